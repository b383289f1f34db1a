//! The words of the command: errors for people and for programs, names that come from elsewhere, sizes and help.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;
use uvfs_testing::{Need, has};

use crate::subcommands;

fn run<S: AsRef<OsStr>>(arguments: impl IntoIterator<Item = S>) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_uvfs"));
    command.args(arguments).output().expect("uvfs")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// An image of a directory with these files.
fn image_of(dir: &Path, names: &[&[u8]]) -> PathBuf {
    let (source, image) = (dir.join("source"), dir.join("image"));
    fs::create_dir(&source).unwrap();
    for name in names {
        fs::write(source.join(OsStr::from_bytes(name)), "").unwrap();
    }
    let from = [
        OsStr::new("mkfs"),
        OsStr::new("-q"),
        OsStr::new("--from"),
        source.as_os_str(),
    ];
    let made = run(from.into_iter().chain([image.as_os_str()]));
    assert!(made.status.success(), "{made:?}");
    image
}

/// One run names all bad words, and says what to use.
#[test]
fn all_bad_words_are_answered_at_once() {
    let words =
        "ro,alow_other,umask=022,ro=1,nonsens,cache=alway,max_write=1KB,attr_timeout=soon,use_ino";
    let output = run(["mount", "-o", words, "-o", "zzz", "/nowhere", "/nowhere/at"]);
    let lines = text(&output.stderr);
    let expected = [
        ("alow_other", "did you mean allow_other?"),
        ("umask=022", "not offered (modes are the source's"),
        ("ro=1", "takes no value"),
        ("nonsens", "unknown option"),
        (
            "cache=alway",
            "none of auto, always, never (did you mean always?)",
        ),
        ("max_write=1KB", "the unit KB is ambiguous (use K or KiB,"),
        ("attr_timeout=soon", "no duration"),
        ("zzz", "unknown option (uvfs mount --help lists them)"),
    ];
    assert_eq!(output.status.code(), Some(2), "{lines}");
    assert_eq!(lines.lines().count(), expected.len(), "{lines}");
    for (line, (word, answer)) in lines.lines().zip(expected) {
        assert!(line.starts_with(&format!("uvfs: -o {word}: ")), "{line}");
        assert!(line.contains(answer), "{line}");
    }
}

/// The helper takes the command lines that mount(8) gives it, with its exit statuses.
#[test]
fn the_helper_is_called_as_mount_does() {
    let code = |words: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_uvfs"));
        let output = command.arg0("/sbin/mount.fuse.uvfs").args(words).output();
        output.expect("the helper").status.code()
    };
    let fake = [
        "/",
        "/",
        "-s",
        "-fn",
        "-v",
        "-t",
        "fuse.uvfs",
        "-o",
        "rw,zzz",
    ];
    assert_eq!(code(&fake), Some(0));
    assert_eq!(code(&fake[1..]), Some(1));
    assert_eq!(code(&fake[..8]), Some(1));
}

/// Every way to fail that needs no mount: arguments, with a path where `{}` is.
const FAILURES: &[&[&str]] = &[
    &["check", "{}"],
    &["repair", "{}"],
    &["mkfs", "--from", "{}", "{}/image"],
    &["mkfs", "--size", "1KB", "{}"],
    &["stat", "{}", "/"],
    &["stats", "{}"],
    &["mount", "{}", "/nowhere/at"],
    &["umount", "{}"],
    &["ls", "{}"],
    &["cat", "{}", "/x"],
    &["cp", "-r", "{}", "/", "{}"],
    &["top", "--once", "{}"],
    &["check", "{}", "{}", "{}"],
    &["{}"],
    &["mount", "-o", "{}", "/", "/nowhere/at"],
    &["mount", "--wait", "{}", "/", "/nowhere/at"],
    &["serve", "--socket", "{}", "{}"],
    &["run", "--", "{}"],
    &["man", "/dev/null/{}"],
];

/// No name of a file controls the terminal, or looks like a message of the command.
#[test]
fn no_name_reaches_the_terminal_as_it_is() {
    let name = b"\x1b]0;owned\x07\x1b[31m\nuvfs: all is well\x9b2J\xc2\x9b2J";
    let dir = tempfile::tempdir().unwrap();
    for arguments in FAILURES {
        let fill = |argument: &&str| {
            let mut parts = argument.split("{}");
            let mut filled = parts.next().unwrap().as_bytes().to_vec();
            for part in parts {
                filled.extend(dir.path().join("no").as_os_str().as_bytes());
                filled.extend(name);
                filled.extend(part.as_bytes());
            }
            OsString::from_vec(filled)
        };
        let output = run(arguments.iter().map(fill));
        assert!(!output.status.success(), "{arguments:?}");
        let all = [text(&output.stdout), text(&output.stderr)].concat();
        assert!(
            !all.contains(|c: char| c.is_control() && c != '\n'),
            "{arguments:?}: {all:?}"
        );
        assert!(
            all.lines()
                .all(|line| !line.starts_with("uvfs: all is well")),
            "{all}"
        );
        assert!(
            !all.contains("os error") && !all.contains("Kind("),
            "{arguments:?}: {all}"
        );
        assert!(!all.is_empty(), "{arguments:?}");
    }
}

/// No message shows an error as a library's source code names it.
#[test]
fn an_image_that_is_cut_off() {
    let dir = tempfile::tempdir().unwrap();
    let image = image_of(dir.path(), &[b"file"]);
    let file = fs::File::options().write(true).open(&image).unwrap();
    file.set_len(1 << 20).unwrap();
    for arguments in [&["check"][..], &["repair", "-n"], &["ls", "-R"]] {
        let arguments = arguments.iter().map(OsStr::new);
        let output = run(arguments.chain([image.as_os_str()]));
        let all = [text(&output.stdout), text(&output.stderr)].concat();
        assert!(!all.contains("Kind(") && !all.contains("os error"), "{all}");
    }
}

/// With `--json` an error is JSON on standard error, and nothing is on standard output.
#[test]
fn errors_are_json_when_asked_for() {
    let dir = tempfile::tempdir().unwrap();
    let missing = dir.path().join("missing");
    let missing = missing.to_str().unwrap();
    for arguments in [
        &["check", missing][..],
        &["repair", missing],
        &["mkfs", "--from", missing, "image"],
        &["stat", missing, "/"],
        &["stats", missing],
        &["stats", missing, missing],
        &["check"],
        &["doctor", "--no-such-option"],
    ] {
        let plain = run(arguments);
        let json = run(arguments.iter().chain(&["--json"]));
        assert_eq!(plain.status.code(), json.status.code(), "{arguments:?}");
        assert!(json.stdout.is_empty(), "{json:?}");
        assert!(plain.stderr.starts_with(b"uvfs: "), "{plain:?}");
        let error: Value =
            serde_json::from_slice(&json.stderr).unwrap_or_else(|e| panic!("{e}: {json:?}"));
        assert_eq!(error["version"], 1);
        assert_eq!(
            error["exit_status"].as_i64(),
            json.status.code().map(i64::from)
        );
        assert!(
            error["errors"][0]
                .as_str()
                .is_some_and(|text| !text.is_empty()),
            "{error}"
        );
    }
}

/// `mkfs`, `check` and `repair` count the same inodes, and their JSON has a version.
#[test]
fn commands_count_the_same_inodes() {
    let dir = tempfile::tempdir().unwrap();
    let names: Vec<_> = (0..70).map(|number| format!("file-{number}")).collect();
    let names: Vec<_> = names.iter().map(|name| name.as_bytes()).collect();
    image_of(dir.path(), &names);
    let image = dir.path().join("again").display().to_string();
    let source = dir.path().join("source").display().to_string();
    let json = |arguments: &[&str]| -> Value {
        let output = run(arguments);
        let found = serde_json::from_slice(&output.stdout);
        let found: Value = found.unwrap_or_else(|e| panic!("{e}: {output:?}"));
        assert_eq!(found["version"], 1, "{found}");
        found
    };
    let made = json(&["mkfs", "--json", "--from", &source, &image]);
    // The root, and the two files of the real-time device.
    assert_eq!(made["inodes"], 73);
    let checked = json(&["check", "--json", &image]);
    assert_eq!(checked["inodes"], made["inodes"], "{checked}");
    assert_eq!(checked["allocated_inodes"], 128, "{checked}");
    assert_eq!(json(&["repair", "-n", "--json", &image])["inodes"], 73);
    assert_eq!(json(&["stat", "--json", &image, "/"])["type"], "directory");
    assert!(text(&run(["check", &image]).stdout).contains("73 inodes"));
}

const AWKWARD: &[&[u8]] = &[
    b"plain",
    b"a b",
    b"it's",
    b"it's $5",
    b"say \"x\"",
    b"two\nlines",
    b"tab\there",
    b"\x1b[31mred",
    b"\x01\x02",
    b"b\xff\xfe",
    b"\xc3\xa9t\xc3\xa9",
    b"a*b",
    b"a?b",
    b"a[b]",
    b"#top",
    b"mid#dle",
    b"~home",
    b"a~",
    b"{}",
    b"x;y",
    b"x&y",
    b"x|y",
    b"(p)",
    b"<i>",
    b"back\\slash",
    b"a=b",
    b"=a",
    b"!x",
    b"a^b",
    b"`x`",
    b"$v",
    b"-n",
    b"%",
    b"+",
    b",",
    b":",
    b"@",
    b"]",
    b"_",
    b"{",
    b"'",
    b"\"",
    b"'\n'",
    b"\x7f",
    b"\xc2\x9b2J",
    b"a,b",
    b"'a",
];

/// `uvfs ls` quotes names on a terminal, and gives scripts the names as they are.
#[test]
fn ls_shows_names_as_ls_does() {
    let dir = tempfile::tempdir().unwrap();
    let image = image_of(dir.path(), AWKWARD);
    let piped = run([OsStr::new("ls"), image.as_os_str()]);
    let mut expected: Vec<_> = AWKWARD.to_vec();
    expected.sort_unstable();
    assert_eq!(piped.stdout, [&expected.join(&b'\n')[..], b"\n"].concat());
    if !has(&[Need::Program("script")]) {
        return;
    }
    let on_a_terminal = |command: String| {
        let mut script = Command::new("script");
        script
            .args(["-qec", &command, "/dev/null"])
            .stdin(Stdio::null());
        let output = script
            .env("LC_ALL", "C.UTF-8")
            .env("TERM", "dumb")
            .output()
            .unwrap();
        let shown = text(&output.stdout).replace("\r\n", "\n");
        // ls(1) puts a space before names without quotes, so that all are in one column.
        let mut lines: Vec<_> = shown
            .lines()
            .map(|line| line.trim_start().to_owned())
            .collect();
        lines.sort_unstable();
        lines
    };
    let ours = on_a_terminal(format!(
        "{} ls {}",
        env!("CARGO_BIN_EXE_uvfs"),
        image.display()
    ));
    let theirs = on_a_terminal(format!("ls -1 {}", dir.path().join("source").display()));
    assert_eq!(ours, theirs);
}

/// `-h` has ls(1)'s meaning.
#[test]
fn ls_has_sizes_for_people() {
    let dir = tempfile::tempdir().unwrap();
    let source = dir.path().join("source");
    fs::create_dir(&source).unwrap();
    for size in [
        0, 1023, 1024, 1025, 10_137, 10_240, 1_048_575, 1_048_576, 5_000_000,
    ] {
        fs::File::create(source.join(format!("{size:08}")))
            .unwrap()
            .set_len(size)
            .unwrap();
    }
    let image = dir.path().join("image");
    let arguments = ["mkfs", "-q", "--from"].map(OsStr::new);
    run(arguments
        .into_iter()
        .chain([source.as_os_str(), image.as_os_str()]));
    let sizes = |listing: &[u8]| {
        let lines = text(listing);
        let words = lines.lines().filter(|line| !line.starts_with("total"));
        words
            .map(|line| line.split_whitespace().nth(4).unwrap().to_owned())
            .collect::<Vec<_>>()
    };
    let ours = run([OsStr::new("ls"), OsStr::new("-lh"), image.as_os_str()]);
    let theirs = Command::new("ls").arg("-lh").arg(&source).output().unwrap();
    assert_eq!(sizes(&ours.stdout), sizes(&theirs.stdout));
    let help = run(["ls", "--help"]);
    assert!(help.status.success() && text(&help.stdout).contains("--human-readable"));
}

/// All commands take the same words for sizes.
#[test]
fn sizes_are_the_same_everywhere() {
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("image").display().to_string();
    let size = |arguments: &[&str]| {
        let output = run(arguments);
        assert!(output.status.success(), "{output:?}");
        serde_json::from_slice::<Value>(&output.stdout).unwrap()["size"].as_u64()
    };
    for word in ["512M", "0.5GiB", "524288K", "536870912"] {
        let made = size(&["mkfs", "-f", "--json", "--size", word, &image]);
        assert_eq!(made, Some(512 << 20), "{word}");
    }
    for arguments in [
        &["mkfs", "--size", "512MB", &image][..],
        &["check", "--memory", "512MB", &image],
        &["repair", "--memory", "512MB", &image],
        &["ls", "--memory", "512MB", &image],
        &["run", "--cache", "512MB", "true"],
        &["mount", "-o", "max_read=512MB", "/", "/nowhere/at"],
    ] {
        let output = run(arguments);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}");
        assert!(text(&output.stderr).contains("use M or MiB"), "{output:?}");
    }
}

/// A mount point that holds something is refused.
#[test]
fn what_a_mount_would_hide() {
    let dir = tempfile::tempdir().unwrap();
    let (source, at) = (dir.path().join("source"), dir.path().join("at"));
    fs::create_dir(&source).unwrap();
    fs::create_dir(&at).unwrap();
    fs::write(at.join("file"), "mine").unwrap();
    for (at, words) in [
        (at.as_path(), "not empty"),
        (Path::new("/"), "whole system"),
        (&at.join("file"), "not a directory"),
    ] {
        let output = run([OsStr::new("mount"), source.as_os_str(), at.as_os_str()]);
        assert_eq!(output.status.code(), Some(1), "{output:?}");
        assert!(text(&output.stderr).contains(words), "{output:?}");
    }
    assert_eq!(fs::read(at.join("file")).unwrap(), b"mine");
}

/// Every command has help, which fits 100 columns and lists the exit statuses.
#[test]
fn help_fits() {
    for name in subcommands() {
        for flag in ["-h", "--help"] {
            if name == "ls" && flag == "-h" {
                continue;
            }
            let help = run([name.as_str(), flag]);
            assert!(help.status.success(), "{name} {flag}: {help:?}");
            for line in text(&help.stdout).lines() {
                assert!(line.chars().count() <= 100, "{name} {flag}: {line}");
            }
        }
        let long = text(&run([name.as_str(), "--help"]).stdout);
        assert!(long.contains("Exit status: "), "{name}: {long}");
    }
}

/// A collector can read the log as JSON, with the levels of messages.
#[test]
fn the_log_is_json_when_asked_for() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("socket");
    let mut command = Command::new(env!("CARGO_BIN_EXE_uvfs"));
    command
        .env("UVFS_LOG", "info")
        .env("UVFS_LOG_FORMAT", "json")
        .stderr(Stdio::piped());
    let child = command
        .arg("serve")
        .arg(dir.path())
        .arg("--socket")
        .arg(&socket)
        .spawn();
    let mut child = child.unwrap();
    let end = Instant::now() + Duration::from_secs(20);
    while !socket.exists() && Instant::now() < end && child.try_wait().unwrap().is_none() {
        std::thread::sleep(Duration::from_millis(5));
    }
    let pid = rustix::process::Pid::from_child(&child);
    let _ = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
    let output = child.wait_with_output().unwrap();
    let log = text(&output.stderr);
    let lines: Vec<Value> = log
        .lines()
        .map(|line| serde_json::from_str(line).unwrap_or_else(|e| panic!("{e}: {line}")))
        .collect();
    let ending = lines.iter().find(|line| line["message"] == "ending");
    assert!(
        ending.is_some_and(|line| line["level"] == "INFO" && line["signal"] == 15),
        "{log}"
    );
}
