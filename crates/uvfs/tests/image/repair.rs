//! `uvfs repair`: its exit statuses, its lines and its JSON.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;

use serde_json::Value;

use crate::fixture::*;
use crate::harness::*;

fn repair(image: &Image<'_>, args: &[&str]) -> Outcome {
    run(uvfs().arg("repair").args(args).arg(image.arg()))
}

#[track_caller]
fn json(image: &Image<'_>, args: &[&str], code: i32, verdict: &str) -> Value {
    let outcome = repair(image, &[&["--json"], args].concat());
    assert_eq!(outcome.status.code(), Some(code), "{outcome}");
    assert_eq!(outcome.stderr, "", "{outcome}");
    let json: Value = serde_json::from_str(&outcome.stdout).expect("one JSON object");
    assert_eq!(json["verdict"], verdict, "{outcome}");
    json
}

/// `uvfs repair -n` says what a repair does, and a second repair finds nothing.
#[test]
fn what_dry_runs_say_is_done_and_a_second_run_finds_nothing() {
    if !has(&NEEDS) {
        return;
    }
    let scratch = Scratch::new();
    let image = Image::filled(&scratch);
    let sound = json(&image, &[], 0, "clean");
    assert_eq!(sound["written"], 0);
    // The free block count of the second group, whose checksum is then wrong, too.
    let mut sb = [0; 512];
    let file = File::options().read(true).write(true).open(&image.path);
    let file = file.unwrap();
    file.read_exact_at(&mut sb, 0).unwrap();
    let number = |at: usize| u64::from(u32::from_be_bytes(sb[at..at + 4].try_into().unwrap()));
    let sector = u64::from(u16::from_be_bytes([sb[102], sb[103]]));
    let agf = number(84) * number(4) + sector;
    file.write_all_at(&[0xff; 4], agf + 52).unwrap();
    let damaged = fs::read(&image.path).unwrap();
    let would = json(&image, &["-n"], 1, "would-mend");
    assert!(damaged == fs::read(&image.path).unwrap(), "-n wrote");
    let outcome = repair(&image, &["-n"]);
    assert_eq!(outcome.status.code(), Some(1), "{outcome}");
    assert!(outcome.stdout.starts_with("found: AGF AG 1: "), "{outcome}");
    assert!(outcome.stdout.contains("\nwould mend: "), "{outcome}");
    let outcome = repair(&image, &["--memory", "25M"]);
    assert_eq!(outcome.status.code(), Some(2), "{outcome}");
    assert!(
        outcome.stderr.contains("to repair what was found at least"),
        "{outcome}"
    );
    assert!(
        damaged == fs::read(&image.path).unwrap(),
        "refused, but written"
    );
    // With the least that it asks for it works, and keeps to that with all that writing takes.
    let least = outcome.stderr.split_once("at least ").unwrap().1;
    let least = least.split_once(" are needed").unwrap().0;
    let bytes = least.trim_end_matches('M').parse::<u64>().unwrap() << 20;
    let bounded = json(&image, &["-n", "--memory", least], 1, "would-mend");
    let mended = json(&image, &["--memory", least], 0, "mended");
    assert!(
        mended["peak_memory"].as_u64().is_some_and(|n| n < bytes),
        "{mended}"
    );
    assert_eq!(bounded["changes"], mended["changes"]);
    assert_eq!(mended["left_count"], 0);
    assert_eq!(json(&image, &[], 0, "clean")["found_count"], 0);
    // Without a bound, a repair builds less anew.
    fs::write(&image.path, damaged).unwrap();
    let mended = json(&image, &[], 0, "mended");
    assert_eq!(would["changes"], mended["changes"]);
    assert_eq!(mended["left_count"], 0);
    assert_eq!(json(&image, &[], 0, "clean")["found_count"], 0);
    assert!(run(uvfs().arg("check").arg(image.arg())).status.success());
}

/// A file that is no file system is not repaired.
#[test]
fn what_is_no_file_system_cannot_be_repaired() {
    let scratch = Scratch::new();
    let path = scratch.path("zeros");
    fs::write(&path, vec![0; 1 << 20]).unwrap();
    let outcome = run(uvfs().arg("repair").arg(&path));
    assert_eq!(outcome.status.code(), Some(2), "{outcome}");
}
