//! `uvfs ls`, `cat`, `stat` and `cp`.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use crate::fixture::*;
use crate::harness::*;

/// Runs `uvfs` with these arguments.
fn uvfs_with<S: AsRef<std::ffi::OsStr>>(args: impl IntoIterator<Item = S>) -> Outcome {
    run(uvfs().args(args))
}

/// Asserts exit status 1 and one line on standard error that has these words.
#[track_caller]
pub fn refused(outcome: &Outcome, words: &[&str]) {
    assert_eq!(outcome.status.code(), Some(1), "{outcome}");
    let lines: Vec<_> = outcome
        .stderr
        .lines()
        .filter(|line| !line.starts_with("uvfs: warning: "))
        .collect();
    assert!(
        lines.len() == 1 && lines[0].starts_with("uvfs: "),
        "one line `uvfs: …`: {outcome}"
    );
    for word in words {
        assert!(lines[0].contains(word), "no {word:?}: {outcome}");
    }
}

/// Lines with one space between words; without the totals that `ls -l` begins with.
fn words(listing: &str) -> String {
    listing
        .lines()
        .filter(|line| !line.starts_with("total "))
        .map(|line| {
            let words: Vec<_> = line.split_whitespace().collect();
            words.join(" ")
        })
        // `ls` marks what has an ACL.
        .map(|line| match line.split_once("+ ") {
            Some((mode, rest)) if mode.len() == 10 => format!("{mode} {rest}"),
            _ => line,
        })
        .collect::<Vec<_>>()
        .join("\n")
}

/// `uvfs ls` shows the names, modes and times of the kernel's mount.
#[test]
fn listed_like_the_kernel() {
    if !has(&NEEDS) {
        return;
    }
    let scratch = Scratch::new();
    let image = Image::filled(&scratch);
    let at = image.shown_by_kernel();
    let style = "--time-style=+%Y-%m-%d %H:%M:%S.%N +0000";
    for (ours, theirs, path) in [
        ("-lR", "-nR", "."),
        ("-laR", "-naR", "a"),
        ("-R", "-R", "./many"),
        ("-a", "-a", "."),
    ] {
        let expected = run(command("ls", [theirs, style, path]).current_dir(&at)).ok();
        for access in [&[][..], &["--engine", "uring", "--memory", "4M"]] {
            let listed = uvfs_with([&["ls", ours], access, &[image.arg(), path]].concat()).ok();
            same(&words(&listed), &words(&expected));
        }
    }
    let one = uvfs_with(["ls", image.arg(), "/a/b"]).ok();
    assert_eq!(one, "c\nhard\nrelative\n");
    assert_eq!(uvfs_with(["ls", image.arg()]).ok(), {
        "a\nabsolute\nempty\nlong\nmany\n"
    });
}

/// `uvfs cat` and `stat` show the same as the kernel's mount.
#[test]
fn contents_and_attributes_like_the_kernels() {
    if !has(&NEEDS) {
        return;
    }
    let scratch = Scratch::new();
    let image = Image::filled(&scratch);
    let at = image.shown_by_kernel();
    for name in ["a/hello", "a/sparse", "a/nothing", "many/dir-007/file"] {
        let written = run(shell(
            r#""$1" cat "$2" "$3" | cmp - "$4""#,
            &[
                Path::new(env!("CARGO_BIN_EXE_uvfs")),
                &image.path,
                Path::new(name),
                &at.join(name),
            ],
        )
        .env_remove("UVFS_LOG"));
        written.ok();
    }
    // Links lead to files of the image.
    assert_eq!(uvfs_with(["cat", image.arg(), "absolute"]).ok(), "hello\n");
    for name in ["a", "a/hello", "a/sparse", "a/b/relative", "a/disk", "long"] {
        let text = uvfs_with(["stat", "--json", image.arg(), name]).ok();
        let json: serde_json::Value = serde_json::from_str(&text).unwrap();
        let meta = fs::symlink_metadata(at.join(name)).unwrap();
        for (field, expected) in [
            ("inode", meta.ino()),
            ("mode", u64::from(meta.mode() & 0o7777)),
            ("nlink", meta.nlink()),
            ("uid", u64::from(meta.uid())),
            ("gid", u64::from(meta.gid())),
            ("size", meta.size()),
            ("sectors", meta.blocks()),
            ("block_size", meta.blksize()),
        ] {
            assert_eq!(json[field].as_u64(), Some(expected), "{name}: {field}");
        }
        for (field, sec, nsec) in [
            ("atime", meta.atime(), meta.atime_nsec()),
            ("mtime", meta.mtime(), meta.mtime_nsec()),
            ("ctime", meta.ctime(), meta.ctime_nsec()),
        ] {
            assert_eq!(json[field]["sec"].as_i64(), Some(sec), "{name}: {field}");
            assert_eq!(json[field]["nsec"].as_i64(), Some(nsec), "{name}: {field}");
        }
        let target = fs::read_link(at.join(name)).ok();
        let target = target.as_deref().and_then(Path::to_str);
        assert_eq!(json["target"].as_str(), target, "{name}");
    }
    let text = uvfs_with(["stat", "--json", image.arg(), "a/disk"]).ok();
    assert!(text.contains(r#""type":"block""#) && text.contains(r#""device":[259,77777]"#));
    let text = uvfs_with(["stat", image.arg(), "a/hello"]).ok();
    assert!(
        text.contains("regular file") && text.contains("user.big"),
        "{text}"
    );
}

/// `uvfs cp` keeps owners, times, holes and links.
#[test]
fn copied_with_everything() {
    if !has(&NEEDS) {
        return;
    }
    let scratch = Scratch::new();
    let image = Image::filled(&scratch);
    let at = image.shown_by_kernel();
    // Another XFS takes whatever this one has.
    let to = Image::empty(&scratch, "copy").mount("rw");
    let copied = uvfs_with([
        "cp",
        "-r",
        "--trusted",
        image.arg(),
        "/",
        to.to_str().unwrap(),
    ]);
    assert_eq!(copied.stderr, "");
    copied.ok();
    same(
        &run(&mut describe(&to, true)).ok(),
        &run(&mut describe(&at, true)).ok(),
    );
    let blocks = |root: &Path| fs::metadata(root.join("a/sparse")).unwrap().blocks();
    assert_eq!(blocks(&to), blocks(&at), "holes stay holes");

    // Into a directory under its own name, or as a new name.
    let (into, new) = (scratch.dir("into"), scratch.path("new"));
    for dest in [&into, &new] {
        uvfs_with([
            "cp",
            image.arg(),
            "many/dir-001/file",
            dest.to_str().unwrap(),
        ])
        .ok();
    }
    for copy in [into.join("file"), new.clone()] {
        assert_eq!(fs::read_to_string(copy).unwrap(), "many/dir-001");
    }
    // Nothing is overwritten, and a directory has to be asked for.
    let again = uvfs_with(["cp", image.arg(), "a/data", new.to_str().unwrap()]);
    refused(&again, &["new", "exists"]);
    let again = uvfs_with([
        "cp",
        image.arg(),
        "many/dir-002/file",
        into.to_str().unwrap(),
    ]);
    refused(&again, &["file", "exists"]);
    for copy in [into.join("file"), new.clone()] {
        assert_eq!(fs::read_to_string(copy).unwrap(), "many/dir-001");
    }
    let directory = uvfs_with(["cp", image.arg(), "a", into.to_str().unwrap()]);
    refused(&directory, &["a directory", "-r"]);
    let nowhere = scratch.path("no/such");
    let nowhere = uvfs_with(["cp", image.arg(), "a/hello", nowhere.to_str().unwrap()]);
    refused(&nowhere, &["/no: "]);
}

/// When a copy could not make a file, no later name of that becomes a link to the file that was in the way.
#[test]
fn a_copy_makes_no_links_to_what_was_there() {
    if !has(&NEEDS) {
        return;
    }
    let scratch = Scratch::new();
    let image = Image::empty(&scratch, "links");
    image.write("echo copied > one && ln one two && ln one three");
    let to = scratch.dir("to");
    fs::write(to.join("one"), "somebody else's").unwrap();
    let copied = uvfs_with([
        "cp",
        "-r",
        "--trusted",
        image.arg(),
        "/",
        to.to_str().unwrap(),
    ]);
    assert_eq!(copied.status.code(), Some(1), "{copied}");
    assert!(copied.stderr.contains("one"), "{copied}");
    let read = |name: &str| fs::read_to_string(to.join(name)).unwrap();
    assert_eq!(read("one"), "somebody else's");
    assert_eq!((&*read("two"), &*read("three")), ("copied\n", "copied\n"));
    let file = |name: &str| fs::metadata(to.join(name)).unwrap();
    assert_eq!(file("one").nlink(), 1);
    assert_eq!(file("two").ino(), file("three").ino());
}

/// An error names the image and what is wrong.
#[test]
fn errors_are_one_line() {
    if !has(&NEEDS) {
        return;
    }
    let scratch = Scratch::new();
    let image = Image::filled(&scratch);
    let is = |args: &[&str], words: &[&str]| refused(&uvfs_with(args), words);
    is(
        &["ls", image.arg(), "/no/such"],
        &["image", "/no/such", "no such"],
    );
    is(
        &["ls", image.arg(), "a/hello/x"],
        &["a/hello/x", "not a directory"],
    );
    is(&["cat", image.arg(), "/a"], &["/a", "not a regular file"]);
    is(&["cat", image.arg(), "gone"], &["gone", "no such"]);
    is(&["stat", image.arg(), "gone"], &["gone", "no such"]);
    is(&["cp", image.arg(), "gone", "."], &["gone", "no such"]);
    let missing = scratch.path("missing");
    is(
        &["ls", missing.to_str().unwrap()],
        &["missing", "No such file"],
    );
    is(&["ls", "/"], &["neither a block device nor an image"]);

    let (text, zeros) = (scratch.path("text"), scratch.path("zeros"));
    fs::write(&text, "no image").unwrap();
    fs::write(&zeros, vec![0; 1 << 20]).unwrap();
    for other in [&text, &zeros] {
        is(
            &["ls", other.to_str().unwrap()],
            &["not an XFS file system"],
        );
        is(
            &["stat", other.to_str().unwrap(), "/"],
            &["not an XFS file system"],
        );
    }
    for wrong in [
        &["ls", "--memory", "1K", image.arg()][..],
        &["ls", "--engine", "steam", image.arg()],
        &["cat", image.arg()],
        &["cp", image.arg(), "/"],
    ] {
        let outcome = uvfs_with(wrong);
        assert_eq!(outcome.status.code(), Some(2), "{outcome}");
    }

    // There is a warning of the part that is cut off; the rest can be read.
    let cut = fs::OpenOptions::new()
        .write(true)
        .open(&image.path)
        .unwrap();
    cut.set_len(1 << 20).unwrap();
    drop(cut);
    let listed = uvfs_with(["ls", "-lR", image.arg()]);
    assert_eq!(listed.status.code(), Some(1), "{listed}");
    assert!(
        listed.stderr.contains("uvfs: warning: ") && listed.stderr.contains("image ends at byte"),
        "{listed}"
    );
    assert!(listed.stdout.contains(" absolute"), "{listed}");
}

/// A file whose data is in the realtime section: it is named, and all else can be read.
#[test]
fn realtime_files_are_refused_by_name() {
    if !has(&NEEDS) || !has(&[Need::Program("xfs_db")]) {
        return;
    }
    let scratch = Scratch::new();
    let image = Image::empty(&scratch, "realtime");
    image.write("echo here > kept; echo there > moved");
    let flag = ["-x", "-c", "path /moved", "-c", "write core.realtime 1"];
    run(command("xfs_db", flag).arg(&image.path)).ok();
    refused(
        &uvfs_with(["cat", image.arg(), "moved"]),
        &["realtime section", "not supported"],
    );
    assert_eq!(uvfs_with(["cat", image.arg(), "kept"]).ok(), "here\n");
    let listed = uvfs_with(["ls", image.arg()]).ok();
    assert!(
        listed.contains("kept") && listed.contains("moved"),
        "{listed}"
    );
    let to = scratch.dir("realtime-copy");
    let copied = uvfs_with([
        "cp",
        "-r",
        "--trusted",
        image.arg(),
        "/",
        to.to_str().unwrap(),
    ]);
    assert_eq!(copied.status.code(), Some(1), "{copied}");
    assert!(copied.stderr.contains("moved"), "{copied}");
    assert!(copied.stderr.contains("realtime section"), "{copied}");
    assert_eq!(fs::read_to_string(to.join("kept")).unwrap(), "here\n");
}

/// `uvfs ls … | head` prints no error.
#[test]
fn a_reader_that_goes_away_is_no_error_message() {
    if !has(&NEEDS) {
        return;
    }
    let scratch = Scratch::new();
    let image = Image::filled(&scratch);
    let script = r#"set +o pipefail; "$1" ls -lR "$2" many | head -1"#;
    let program = Path::new(env!("CARGO_BIN_EXE_uvfs"));
    let outcome = run(&mut shell(script, &[program, &image.path]));
    assert_eq!((&*outcome.stdout, &*outcome.stderr), ("many:\n", ""));
}

/// No command reads an image that the kernel has mounted for writing.
#[test]
fn an_image_in_use_is_left_alone() {
    if !has(&NEEDS) {
        return;
    }
    let scratch = Scratch::new();
    let image = Image::empty(&scratch, "used");
    let at = image.mount("rw");
    let outcome = uvfs_with(["ls", image.arg()]);
    refused(&outcome, &["mounted at", at.to_str().unwrap()]);
}

/// Devices and rights stay in an image that is not trusted, and the command says so.
#[test]
fn a_copy_takes_no_devices_and_no_rights_unless_trusted() {
    if !has(&NEEDS) || !has(&[Need::Program("setcap")]) {
        return;
    }
    let scratch = Scratch::new();
    let image = Image::empty(&scratch, "powers");
    image.write(
        "echo x >suid; chmod 4755 suid; mkdir -m 2775 dir; echo x >able; chmod 755 able; setcap cap_chown=ep able; \
         mknod null c 1 3; mkfifo -m 640 fifo; ln suid suid2",
    );
    let looks = "stat -c '%n %F %a %h' * | sort; getcap able";
    let to = scratch.dir("to");
    let copied = uvfs_with(["cp", "-r", image.arg(), "/", to.to_str().unwrap()]);
    assert_eq!(copied.status.code(), Some(1), "{copied}");
    for words in ["1 devices were not made", "2 set-user-id bits", "--trusted"] {
        assert!(copied.stderr.contains(words), "{copied}");
    }
    let expected = "able regular file 755 1\ndir directory 2775 2\nfifo fifo 640 1\n\
        suid regular file 755 2\nsuid2 regular file 755 2\n";
    assert_eq!(run(shell(looks, &[]).current_dir(&to)).ok(), expected);
}

/// An archive has all that the kernel's mount shows: GNU tar extracts it, and `uvfs mkfs` makes an image of it.
#[test]
fn an_archive_has_all_that_the_kernel_shows() {
    if !has(&NEEDS) || !has(&[Need::Program("tar")]) {
        return;
    }
    let scratch = Scratch::new();
    let image = Image::filled(&scratch);
    // Names and numbers that headers have no room for, holes at the end, times before 1970, large owners.
    image.write(
        r#"mkdir -p "deep/$(printf 'n%.0s' $(seq 200))" && cd "deep/$(printf 'n%.0s' $(seq 200))"
        echo long >"$(printf 'm%.0s' $(seq 250))"; ln m* another; ln -s "$(printf 't%.0s' $(seq 150))" link
        truncate -s 60M end; printf x | dd of=end bs=1 seek=20M conv=notrunc status=none
        truncate -s 5M hole; touch -d '1969-12-31 23:59:58.25 UTC' hole; chown 3000000:4000000000 end
        touch -d '1960-01-01 00:00:00.75 UTC' link 'a b' ; setfattr -n user.a=b%c -v '=%' 'a b'"#,
    );
    let at = image.shown_by_kernel();
    let expected = run(&mut describe(&at, true)).ok();
    let both = format!("{}:/", image.arg());
    let to = Image::empty(&scratch, "extracted");
    let into = to.mount("rw");
    let script = r#"set -o pipefail
        "$1" cp -r --trusted "$2" - | tar -C "$3" --xattrs --xattrs-include='*' --numeric-owner -xpSf -"#;
    let uvfs_path = env!("CARGO_BIN_EXE_uvfs");
    let args = [Path::new(uvfs_path), Path::new(&both), &into];
    run(command("bash", ["-c", script, "bash"]).args(args)).ok();
    same(&run(&mut describe(&into, true)).ok(), &expected);
    let made = scratch.path("made");
    let script = r#"set -o pipefail
        "$1" cp -r --trusted "$2" - | "$1" mkfs -q --from - "$3""#;
    let args = [Path::new(uvfs_path), Path::new(&both), &made];
    run(command("bash", ["-c", script, "bash"]).args(args)).ok();
    let again = scratch.dir("again");
    run(command("mount", ["-t", "xfs", "-o", "loop,ro"]).args([&made, &again])).ok();
    let shown = run(&mut describe(&again, true)).ok();
    let holes = fs::metadata(again.join("a/sparse")).unwrap().blocks();
    run(&mut command("umount", [again.to_str().unwrap()])).ok();
    same(&shown, &expected);
    assert!(holes < 100, "{holes} blocks");
    image.unmount(&at);
    image.write("python3 -c 'import socket; socket.socket(socket.AF_UNIX).bind(\"a/socket\")'");
    // Of one directory, without what has power over the machine, and without a warning if that is asked for.
    let left = uvfs_with(["cp", "-r", image.arg(), "/a", "-"]);
    assert_eq!(left.status.code(), Some(1), "{left}");
    assert!(left.stderr.contains("2 devices were not made"), "{left}");
    assert!(left.stderr.contains("1 sockets were left out"), "{left}");
    let list = r#""$1" cp -r --no-devices --no-suid "$2" /a /empty - | tar tvf - | awk '{print $1, $6}' | sort"#;
    let listed = run(&mut shell(
        list,
        &[Path::new(uvfs_path), Path::new(image.arg())],
    ));
    assert_eq!(listed.stderr.lines().count(), 1, "{listed}");
    let listed = listed.ok();
    for line in [
        "-rwxr-xr-x a/b/hard",
        "hrwxr-xr-x a/data",
        "drwxrwxrwt empty/",
        "prw-r--r-- a/fifo",
    ] {
        let other = line.replace("h", "-");
        assert!(
            listed.contains(line) || listed.contains(&other),
            "{line}: {listed}"
        );
    }
    assert!(!listed.contains("a/null"), "{listed}");
}

/// Patterns match what a shell's match in the kernel's mount.
#[test]
fn patterns_match_as_in_a_shell() {
    if !has(&NEEDS) {
        return;
    }
    let scratch = Scratch::new();
    let image = Image::filled(&scratch);
    image.write("mkdir -p p/.hidden/x p/.other/x; touch p/ab p/a.b 'p/a b' p/.c p/ä 'p/[z]' p/z p/-; ln -s p q");
    let at = image.shown_by_kernel();
    for pattern in [
        "/p/*",
        "/*/ab",
        "/p/.*/x",
        "/p/[a-y]*",
        "/p/[!a]*",
        "/q/a?b",
        "/p/?",
        "/m*/dir-01?/f*",
        "/p/[z]",
        "/p/[[:alpha:]]",
    ] {
        let script = r#"cd "$1" && export LC_ALL=C.UTF-8 && printf '%s\n' .$2 | sort"#;
        let expected =
            run(command("bash", ["-c", script, "bash"]).args([&*at, Path::new(pattern)])).ok();
        let to = scratch.dir(&format!("to{}", pattern.len()));
        let out = run(
            command("bash", ["-c", r#""$1" ls -R --json -a "$2" "$3""#, "bash"]).args([
                env!("CARGO_BIN_EXE_uvfs"),
                image.arg(),
                pattern,
            ]),
        )
        .ok();
        let json: serde_json::Value = serde_json::from_str(&out).unwrap();
        let entries = json["entries"].as_array().unwrap();
        let depth = pattern.matches('/').count();
        let ours: Vec<String> = entries
            .iter()
            .map(|e| format!(".{}", e["path"].as_str().unwrap()))
            .filter(|p| p.matches('/').count() == depth)
            .collect();
        let expected: Vec<String> = match pattern {
            // A name that exists is no pattern.
            "/p/[z]" => vec!["./p/[z]".into()],
            _ => expected.lines().map(str::to_owned).collect(),
        };
        let mut sorted = ours.clone();
        sorted.sort();
        assert_eq!(sorted, expected, "{pattern}");
        fs::remove_dir(to).unwrap();
    }
    refused(
        &uvfs_with(["ls", image.arg(), "/p/x*"]),
        &["/p/x*", "nothing matches"],
    );
    let copied = scratch.dir("copied");
    uvfs_with(["cp", image.arg(), "/p/a*", "/p/z", copied.to_str().unwrap()]).ok();
    let mut names: Vec<_> = fs::read_dir(&copied)
        .unwrap()
        .map(|e| e.unwrap().file_name())
        .collect();
    names.sort();
    assert_eq!(names, ["a b", "a.b", "ab", "z"]);
    refused(
        &uvfs_with(["cp", image.arg(), "/p/a*", "/p/z", "/tmp/none/x"]),
        &["not a directory"],
    );
    let missing = uvfs_with(["cp", image.arg(), "-"]);
    assert_eq!(missing.status.code(), Some(2), "{missing}");
}

/// `ls --json` has each entry as `stat --json` has it, and nothing on standard output of what fails.
#[test]
fn listings_are_json() {
    if !has(&NEEDS) {
        return;
    }
    let scratch = Scratch::new();
    let image = Image::filled(&scratch);
    let json = |args: &[&str]| -> serde_json::Value {
        serde_json::from_str(&uvfs_with(args).ok()).unwrap()
    };
    let all = json(&["ls", "-aR", "--json", image.arg()]);
    assert_eq!((&all["version"], &all["path"]), (&1.into(), &"/".into()));
    let entries = all["entries"].as_array().unwrap();
    let at = image.shown_by_kernel();
    let found = run(shell("find . -mindepth 1 | wc -l", &[]).current_dir(&at)).ok();
    assert_eq!(entries.len().to_string(), found.trim());
    for entry in entries.iter().step_by(37) {
        let mut stat = json(&[
            "stat",
            "--json",
            image.arg(),
            entry["path"].as_str().unwrap(),
        ]);
        stat.as_object_mut().unwrap().remove("version");
        assert_eq!(*entry, stat);
    }
    let one = json(&["ls", "--json", image.arg(), "/a"]);
    let paths: Vec<_> = one["entries"]
        .as_array()
        .unwrap()
        .iter()
        .map(|e| e["path"].as_str().unwrap().to_owned())
        .collect();
    assert_eq!(
        paths,
        [
            "/a/b",
            "/a/data",
            "/a/disk",
            "/a/fifo",
            "/a/hello",
            "/a/nothing",
            "/a/null",
            "/a/sparse"
        ]
    );
    let file = json(&["ls", "--json", image.arg(), "/a/hello"]);
    assert_eq!(file["entries"][0]["path"], "/a/hello");
    let missing = uvfs_with(["ls", "--json", image.arg(), "/none"]);
    assert_eq!(
        (missing.status.code(), missing.stdout.as_str()),
        (Some(1), ""),
        "{missing}"
    );
    assert!(missing.stderr.starts_with("{\"errors\":["), "{missing}");
}
