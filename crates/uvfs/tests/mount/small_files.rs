//! The contents of a small file come with its open; they must still be what the host's file holds.

use std::fs;
use std::process::Command;
use std::time::Duration;

use crate::harness::*;

/// How often a request came, as the server counts.
fn requests(served: &Served, name: &str) -> u64 {
    let text = run(uvfs().args(["stats", "--json"]).arg(&served.mount.at)).ok();
    let report: serde_json::Value = serde_json::from_str(&text).expect("JSON");
    let ops = report["ops"].as_array().expect("requests");
    let one = ops.iter().find(|op| op["name"] == name);
    one.map_or(0, |op| op["count"].as_u64().expect("a count"))
}

fn contents_come_with_the_open(transport: Transport) {
    if !has(&[Need::Mount(transport), Need::Uvfs]) {
        return;
    }
    let served = Served::new(&Serve::over(transport));
    let host = served.source.join("file");
    let at = served.at("file");
    let cat = || served.mount.run(Command::new("cat").arg(&at)).ok();
    // The host's times are only so fine: what is older than that is known not to change unseen.
    let settle = || std::thread::sleep(Duration::from_millis(200));

    fs::write(&host, "first").unwrap();
    fs::write(served.source.join("large"), vec![b'x'; 1 << 20]).unwrap();
    settle();
    assert_eq!(cat(), "first");
    assert_eq!(cat(), "first");
    assert_eq!(requests(&served, "READ"), 0, "its contents came with it");

    // Changed on the host, to the same size and to others: every open sees it.
    for text in ["2 two", "second", "3rd", "", "a fifth one, and longer"] {
        fs::write(&host, text).unwrap();
        assert_eq!(cat(), text);
        settle();
        assert_eq!(cat(), text);
        assert_eq!(cat(), text);
    }
    // Open elsewhere in the mount meanwhile, for reading and for writing.
    let script = "exec 8<\"$1\" 9>>\"$1\"; cat \"$1\"; echo more >&9; cat \"$1\"; cat <&8";
    let text = served.mount.run(&mut shell(script, &[&at])).ok();
    let before = "a fifth one, and longer";
    assert_eq!(text, format!("{before}{before}more\n{before}more\n"));
    settle();
    assert_eq!(cat(), format!("{before}more\n"));
    assert_eq!(
        fs::read_to_string(&host).unwrap(),
        format!("{before}more\n")
    );

    let large = served
        .mount
        .run(Command::new("cat").arg(served.at("large")));
    assert_eq!(large.ok().len(), 1 << 20);
    assert!(requests(&served, "READ") > 0, "large files are read");
}

/// Reading a small file costs no READ.
#[test]
fn contents_come_with_the_open_dev() {
    contents_come_with_the_open(Transport::Dev);
}

/// The same over io_uring.
#[test]
fn contents_come_with_the_open_uring() {
    contents_come_with_the_open(Transport::Uring);
}
