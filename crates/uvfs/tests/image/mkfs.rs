//! `uvfs mkfs`.

use std::fs;
use std::io::Read;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use crate::commands::refused;
use crate::fixture::*;
use crate::harness::*;

fn mkfs(args: &[&str]) -> Outcome {
    run(uvfs().arg("mkfs").args(args))
}

/// Asserts that `uvfs check` and xfs_repair find nothing.
#[track_caller]
fn sound(image: &str) {
    run(uvfs().args(["check", image])).ok();
    run(&mut command("xfs_repair", ["-n", image])).ok();
}

#[test]
fn a_directory_becomes_an_image_that_the_kernel_mounts() {
    if !has(&NEEDS) || !has(&[Need::Program("xfs_repair")]) {
        return;
    }
    let scratch = Scratch::new();
    let source = Image::filled(&scratch);
    let from = source.mount("rw,noatime");
    let to = scratch.path("made");
    let to = to.to_str().unwrap();
    let from = from.to_str().unwrap();
    let outcome = mkfs(&["--from", from, "-L", "made", "--json", to]);
    let json: serde_json::Value = serde_json::from_str(&outcome.ok()).unwrap();
    assert_eq!(json["label"], "made");
    assert_eq!(json["size"].as_u64(), Some(fs::metadata(to).unwrap().len()));
    sound(to);
    let at = scratch.dir("at");
    run(command("mount", ["-t", "xfs", "-o", "loop,ro", to]).arg(&at)).ok();
    let ours = run(&mut describe(&at, true)).ok();
    let expected = run(&mut describe(Path::new(from), true)).ok();
    run(&mut command("umount", [at.to_str().unwrap()])).ok();
    same(&ours, &expected);
}

#[test]
fn a_device_becomes_a_file_system() {
    if !has(&NEEDS) || !has(&[Need::Program("xfs_repair")]) {
        return;
    }
    let scratch = Scratch::new();
    let image = Image::filled(&scratch);
    let device = run(&mut command("losetup", ["--find", "--show", image.arg()])).ok();
    let device = device.trim();
    // Run all of it before anything is asserted, so that the loop device goes.
    let kept = mkfs(&[device]);
    let over = mkfs(&["--force", "-d", "agcount=3", device]);
    let checked = run(uvfs().args(["check", device]));
    let repaired = run(&mut command("xfs_repair", ["-n", device]));
    run(&mut command("losetup", ["--detach", device])).ok();
    // A ring lets go of its files some time after it was closed, and the device goes only then.
    wait_for("the end of the loop device", || {
        let left = run(&mut command("losetup", ["--associated", image.arg()]));
        left.ok().is_empty()
    });
    refused(&kept, &["an XFS file system", "--force"]);
    over.ok();
    checked.ok();
    repaired.ok();
    let at = image.mount("rw");
    assert_eq!(fs::read_dir(&at).unwrap().count(), 0);
    fs::write(at.join("new"), "new").unwrap();
    image.unmount(&at);
    sound(image.arg());
}

#[test]
fn an_interrupted_one_is_no_file_system() {
    if !has(&[Need::Uvfs]) {
        return;
    }
    let scratch = Scratch::new();
    let from = scratch.dir("from");
    for i in 0..40 {
        fs::write(from.join(i.to_string()), vec![i; 4 << 20]).unwrap();
    }
    let image = scratch.path("image");
    let mut interrupted = 0;
    for millis in (0..12).map(|i| i * 15) {
        let _ = fs::remove_file(&image);
        let mut child = uvfs()
            .args(["mkfs", "--threads", "1", "--size", "1G", "--from"])
            .args([&from, &image])
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        std::thread::sleep(Duration::from_millis(millis));
        child.kill().unwrap();
        let ended = child.wait().unwrap().success();
        let checked = run(uvfs().arg("check").arg(&image));
        if ended {
            checked.ok();
            continue;
        }
        interrupted += 1;
        // Not there or empty, in progress, or finished if the kill came after the last write.
        let mut start = [0; 127];
        let read = fs::File::open(&image).and_then(|mut file| file.read_exact(&mut start));
        let expected = match (read.is_ok() && start.starts_with(b"XFSB"), start[126]) {
            (false, _) => 2,
            (true, 0) => 0,
            (true, _) => 1,
        };
        assert_eq!(checked.status.code(), Some(expected), "{checked}");
        if expected != 0 && image.exists() {
            // mkfs overwrites the remains without being asked.
            let again = run(uvfs().args(["mkfs", "--size", "300M"]).arg(&image));
            again.ok();
        }
    }
    assert!(interrupted > 0, "it was never interrupted");
}

#[test]
fn wrong_options_are_2_and_errors_are_one_line() {
    if !has(&[Need::Uvfs]) {
        return;
    }
    let scratch = Scratch::new();
    let image = scratch.path("image");
    let image = image.to_str().unwrap();
    for wrong in [
        &["-b", "size=5000"][..],
        &["-b", "sice=4096"],
        &["-b", "4096"],
        &["-d", "agcount=0"],
        &["-d", "agcount=many"],
        &["-d", "agcount=2,agsize=100M"],
        &["-i", "size=4096"],
        &["-l", "size=1"],
        &["-m", "uuid=no"],
        &["-s", "size=100"],
        &["-L", "more than twelve bytes"],
        &["--size", "1M"],
        &["--size", "64X"],
        &["--engine", "steam"],
    ] {
        let args = [&["--size", "400M"], wrong, &[image]].concat();
        // A size is given once.
        let args = if wrong[0] == "--size" {
            &args[2..]
        } else {
            &args
        };
        let outcome = mkfs(args);
        assert_eq!(outcome.status.code(), Some(2), "{wrong:?}: {outcome}");
        assert!(!Path::new(image).exists(), "{wrong:?}");
    }
    assert_eq!(mkfs(&[image]).status.code(), Some(2));
    let missing = scratch.path("missing");
    let from = mkfs(&["--from", missing.to_str().unwrap(), image]);
    refused(&from, &["missing", "No such file"]);
    refused(&mkfs(&["--size", "400M", "/proc/self/none"]), &["none"]);
    refused(&mkfs(&["--size", "400M", "/dev/null"]), &["neither"]);
}

#[test]
fn a_source_that_cannot_be_read_is_named() {
    if !has(&[Need::Uvfs]) || !rustix::process::geteuid().is_root() {
        return;
    }
    let scratch = Scratch::new();
    let from = scratch.dir("from");
    fs::write(from.join("secret"), "x").unwrap();
    run(&mut command(
        "chmod",
        ["000", from.join("secret").to_str().unwrap()],
    ))
    .ok();
    let to = scratch.dir("to");
    run(&mut command("chmod", ["777", to.to_str().unwrap()])).ok();
    let image = to.join("image");
    let program = env!("CARGO_BIN_EXE_uvfs");
    let mut other = command("setpriv", ["--reuid", "65534", "--clear-groups", program]);
    other.args(["mkfs", "--from"]).args([&from, &image]);
    let outcome = run(&mut other);
    if outcome.stderr.contains("execute") {
        return;
    }
    refused(&outcome, &["from/secret", "Permission denied"]);
    assert!(!image.exists());
}
