//! `uvfs check`: its exit statuses, its lines and its JSON.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::Path;

use serde_json::Value;

use crate::fixture::*;
use crate::harness::*;

/// The fields of the JSON, and of a finding.
const FIELDS: &str = "version verdict image log log_device incomplete count findings inodes allocated_inodes blocks free_blocks passes threads prefetch \
                      engine direct reads bytes_read peak_memory seconds";
const FINDING: &str = "what name ag block inode path problem expected found";

/// Runs `uvfs check` with these arguments on an image.
fn check(image: &Image<'_>, args: &[&str]) -> Outcome {
    run(uvfs().arg("check").arg(image.arg()).args(args))
}

/// Asserts that an object has these fields and no others.
#[track_caller]
fn has_fields(object: &Value, names: &str) {
    let there: BTreeSet<&str> = object.as_object().unwrap().keys().map(|k| &**k).collect();
    assert_eq!(there, names.split_whitespace().collect(), "{object}");
}

/// Checks with `--json`; gives the object of a check that ended with this exit status.
#[track_caller]
fn checked(image: &Image<'_>, args: &[&str], code: i32, verdict: &str) -> Value {
    let outcome = check(image, &[&["--json"], args].concat());
    assert_eq!(outcome.status.code(), Some(code), "{outcome}");
    assert_eq!(outcome.stderr, "", "{outcome}");
    let json: Value = serde_json::from_str(&outcome.stdout).expect("one JSON object");
    has_fields(&json, FIELDS);
    assert_eq!(json["verdict"], verdict, "{outcome}");
    assert_eq!(json["image"], image.arg(), "{outcome}");
    let findings = json["findings"].as_array().unwrap();
    assert_eq!(json["count"], findings.len(), "{outcome}");
    findings.iter().for_each(|f| has_fields(f, FINDING));
    json
}

/// Where the inode header of an allocation group is: the third sector of the group.
fn agi(path: &Path, agno: u64) -> u64 {
    let mut sb = [0; 512];
    File::open(path).unwrap().read_exact_at(&mut sb, 0).unwrap();
    let number = |at: usize| u64::from(u32::from_be_bytes(sb[at..at + 4].try_into().unwrap()));
    let sector = u64::from(u16::from_be_bytes([sb[102], sb[103]]));
    agno * number(84) * number(4) + 2 * sector
}

/// Flips a bit at this byte of the image.
fn flip(path: &Path, at: u64) {
    let file = File::options().read(true).write(true).open(path).unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, at).unwrap();
    file.write_all_at(&[byte[0] ^ 1], at).unwrap();
}

/// The exit status tells a sound image from a damaged one.
#[test]
fn a_sound_image_is_0_and_a_damaged_one_1() {
    if !has(&NEEDS) {
        return;
    }
    let scratch = Scratch::new();
    let image = Image::filled(&scratch);
    let before = run(&mut command("md5sum", [image.arg()])).ok();
    let sound = checked(&image, &[], 0, "clean");
    assert_eq!(
        (&sound["log"], &sound["incomplete"]),
        (&"clean".into(), &false.into())
    );
    let inodes = sound["inodes"].as_u64().unwrap();
    // Every way to read finds as little, and as many inodes.
    for way in [
        &["--engine", "aio", "--prefetch", "large", "--threads", "1"][..],
        &["--engine", "uring", "--prefetch", "exact"],
        &["--memory", "32M", "--buffered"],
    ] {
        let same = checked(&image, way, 0, "clean");
        assert_eq!(same["inodes"], inodes, "{way:?}");
    }
    let outcome = check(&image, &[]);
    assert_eq!(outcome.stderr, "", "{outcome}");
    assert_eq!(outcome.ok(), format!("clean: {inodes} inodes\n"));

    // A byte of the second group's inode header, which then has a wrong checksum.
    let magic_at = agi(&image.path, 1);
    let mut magic = [0; 4];
    let file = File::open(&image.path).unwrap();
    file.read_exact_at(&mut magic, magic_at).unwrap();
    assert_eq!(&magic, b"XAGI");
    flip(&image.path, magic_at + 16);
    let damaged = checked(&image, &[], 1, "corrupt");
    let first = &damaged["findings"][0];
    assert_eq!(
        (&first["what"], &first["ag"]),
        (&"AGI".into(), &1.into()),
        "{first}"
    );
    assert!(
        first["problem"].as_str().unwrap().contains("checksum"),
        "{first}"
    );
    let several = checked(&image, &["--memory", "32M"], 1, "corrupt");
    assert_eq!(several["findings"][0], *first);
    let outcome = check(&image, &[]);
    assert_eq!(outcome.status.code(), Some(1), "{outcome}");
    let (count, lines) = (
        &damaged["count"],
        outcome.stdout.lines().collect::<Vec<_>>(),
    );
    assert!(lines[0].starts_with("AGI AG 1: "), "{outcome}");
    let last = lines.last().unwrap();
    assert!(
        last.starts_with(&format!("{count} findings, ")),
        "{outcome}"
    );

    // Set right again it is sound, and none of this wrote anything.
    flip(&image.path, magic_at + 16);
    checked(&image, &[], 0, "clean");
    assert_eq!(run(&mut command("md5sum", [image.arg()])).ok(), before);
}

/// The smallest bound on memory holds, and changes no finding.
#[test]
fn memory_is_bounded() {
    const LEAST: u64 = 25 << 20;
    if !has(&NEEDS) {
        return;
    }
    let scratch = Scratch::new();
    // The uses of so many blocks alone are more than there is room for.
    let image = Image::of_size(&scratch, "large", 160 << 30);
    image.write("mkdir d && cd d && seq -f entry-%06g 60000 | xargs touch");
    let bound = LEAST.to_string();
    let args = ["--memory", &bound, "--threads", "2"];
    let compare = |code, verdict| {
        let free = checked(&image, &[], code, verdict);
        let bounded = checked(&image, &args, code, verdict);
        assert_eq!(free["passes"], 1);
        assert!(bounded["passes"].as_u64() > Some(1), "{bounded}");
        let peak = bounded["peak_memory"].as_u64().unwrap();
        assert!(0 < peak && peak <= LEAST, "{bounded}");
        for field in ["findings", "inodes", "incomplete"] {
            assert_eq!(free[field], bounded[field]);
        }
    };
    compare(0, "clean");
    flip(&image.path, agi(&image.path, 1) + 16);
    compare(1, "corrupt");
    let less = (LEAST - (2 << 20)).to_string();
    let outcome = check(&image, &["--memory", &less]);
    assert_eq!(outcome.status.code(), Some(2), "{outcome}");
    assert!(outcome.stderr.contains("at least 25M"), "{outcome}");
}

/// An image that can't be read counts neither as damaged nor as sound.
#[test]
fn what_cannot_be_checked_is_2() {
    if !has(&NEEDS) {
        return;
    }
    let scratch = Scratch::new();
    let zeros = scratch.path("zeros");
    fs::write(&zeros, vec![0; 1 << 20]).unwrap();
    let missing = scratch.path("missing");
    let used = Image::empty(&scratch, "used");
    let at = used.mount("rw");
    for (path, words) in [
        (&zeros, "not an XFS file system"),
        (&missing, "No such file"),
        (&used.path, "mounted at"),
    ] {
        for json in [&[][..], &["--json"]] {
            let outcome = run(uvfs().arg("check").arg(path).args(json));
            assert_eq!(outcome.status.code(), Some(2), "{outcome}");
            assert_eq!(outcome.stdout, "", "{outcome}");
            let begin = if json.is_empty() { "uvfs: " } else { "{" };
            assert!(outcome.stderr.starts_with(begin), "{outcome}");
            assert_eq!(outcome.stderr.lines().count(), 1, "{outcome}");
            assert!(outcome.stderr.contains(words), "{outcome}");
        }
    }
    used.unmount(&at);
    checked(&used, &[], 0, "clean");
    for wrong in [
        &["--memory", "64X"][..],
        &["--memory", "16M"],
        &["--threads", "0"],
        &["--engine", "steam"],
    ] {
        let outcome = check(&used, wrong);
        assert_eq!(outcome.status.code(), Some(2), "{outcome}");
    }
}

/// An image that only needs its log replayed does not count as damaged, and is not changed.
#[test]
fn a_dirty_log_is_replayed_in_memory() {
    if !has(&NEEDS) {
        return;
    }
    let scratch = Scratch::new();
    let image = Image::filled(&scratch);
    image.crash();
    for _ in 0..2 {
        let replayed = checked(&image, &[], 0, "clean");
        assert_eq!(replayed["log"], "replayed");
    }
    let listed = run(uvfs().args(["ls", image.arg()]));
    assert!(listed.stderr.is_empty(), "{listed}");
    assert!(listed.ok().contains("new\n"));
    run(uvfs().args(["repair", image.arg()])).ok();
    assert_eq!(checked(&image, &[], 0, "clean")["log"], "clean");
    let at = image.mount("rw");
    assert!(at.join("new").exists());
    image.unmount(&at);
}

/// A target that moved out of its inode for attributes that are gone since stays where it is: the kernel reads it so.
#[test]
fn a_link_keeps_its_block() {
    if !has(&NEEDS) || !has(&[Need::Program("xfs_db")]) {
        return;
    }
    let scratch = Scratch::new();
    let image = Image::empty(&scratch, "link");
    image.write(
        "ln -s $(printf 'x%.0s' $(seq 330)) link; setfattr -h -n trusted.a -v 1 link; setfattr -h -x trusted.a link",
    );
    let path = image.arg();
    let format = ["-r", "-c", "path /link", "-c", "p core.format", path];
    // Its own verifier, before version 6.10, is wrong about it.
    let format = run(&mut command("xfs_db", format));
    assert!(format.stdout.contains("extents"), "{format}");
    let at = image.shown_by_kernel();
    assert_eq!(
        fs::read_link(at.join("link")).unwrap().as_os_str().len(),
        330
    );
    image.unmount(&at);
    checked(&image, &[], 0, "clean");
}
