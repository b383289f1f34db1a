//! Files that programs of the host remove while programs have them open on the mount.

use std::fs::{self, File};
use std::io::{Read, Seek};
use std::path::Path;
use std::process::Command;

use rustix::io::Errno;

use crate::harness::*;
use crate::own_process;

/// Opens a file, says so by making `opened` in the argument's directory, waits for `removed`
/// there, and reports what is left of the file.
pub fn hold_and_read(dir: &Path, signs: &str) -> String {
    let mut held = File::open(dir.join("sub/held")).unwrap();
    let mut content = String::new();
    held.read_to_string(&mut content).unwrap();
    let signs = Path::new(signs);
    fs::write(signs.join("opened"), "").unwrap();
    wait_for("removed", || signs.join("removed").exists());
    held.rewind().unwrap();
    let mut again = String::new();
    held.read_to_string(&mut again).unwrap();
    let gone = |path: &str| match fs::symlink_metadata(dir.join(path)) {
        Ok(_) => "there".to_owned(),
        Err(e) => match Errno::from_io_error(&e) {
            Some(Errno::NOENT | Errno::STALE) => "gone".to_owned(),
            _ => e.to_string(),
        },
    };
    let listing = fs::read_dir(dir).unwrap().count();
    format!(
        "{} {} {} {listing}",
        content == again,
        gone("sub/held"),
        gone("seen")
    )
}

/// Files are removed at the source itself, behind the mount's back.
fn files_vanish(transport: Transport) {
    if !has(&[Need::Mount(transport), Need::Uvfs]) {
        return;
    }
    let serve = Serve::over(transport)
        .option("attr_timeout=0")
        .option("entry_timeout=0");
    let served = Served::new(&serve);
    fs::create_dir(served.source.join("sub")).unwrap();
    fs::write(served.source.join("sub/held"), "content").unwrap();
    fs::write(served.source.join("seen"), "content").unwrap();
    let (report, signs) = (served.scratch.path("report"), served.scratch.dir("signs"));
    let argument = signs.to_str().unwrap();
    served
        .mount
        .run(Command::new("stat").arg(served.at("seen")))
        .ok();
    let mut child = Running::start(&mut own_process::call(
        "hold_and_read",
        &served.mount.at,
        argument,
        &report,
    ));
    wait_for("opened", || {
        signs.join("opened").exists() || child.ended().is_some()
    });
    fs::remove_dir_all(served.source.join("sub")).unwrap();
    fs::remove_file(served.source.join("seen")).unwrap();
    fs::write(served.source.join("came"), "").unwrap();
    fs::write(signs.join("removed"), "").unwrap();
    let outcome = child.wait(SOON).unwrap_or_else(|| {
        served.mount.abort();
        panic!("the reader hung")
    });
    outcome.ok();
    assert_eq!(fs::read_to_string(report).unwrap(), "true gone gone 1");
    served.mount.unmount();
}

/// Files that the host removes neither hang the programs that have them open nor end the server.
#[test]
fn files_vanish_dev() {
    files_vanish(Transport::Dev);
}

/// The same over io_uring.
#[test]
fn files_vanish_uring() {
    files_vanish(Transport::Uring);
}
