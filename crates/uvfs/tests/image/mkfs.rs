//! `uvfs mkfs`.

use std::fs;
use std::io::Read;
use std::os::unix::fs::FileExt;
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

/// The kernel mounts an image made from a directory, and shows the same files.
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

/// `--from` takes an archive by its name, compressed or not, several of them, and an OCI layout, with the rights that a
/// confined command has.
#[test]
fn archives_and_layouts_become_images() {
    if !has(&[Need::Uvfs, Need::Program("python3"), Need::Program("tar")]) {
        return;
    }
    let scratch = Scratch::new();
    let script = r#"cd "$1"; mkdir tree; echo one >tree/one; echo two >tree/two
tar -C tree -cf base.tar .; gzip -k base.tar; mkdir upper; touch upper/.wh.one; echo 3 >upper/three
tar -C upper -cf upper.tar .; mkdir -p layout/blobs/sha256; cd layout; echo '{}' >oci-layout
blob() { digest=$(sha256sum "$1" | cut -d ' ' -f 1); size=$(stat -c %s "$1"); mv "$1" blobs/sha256/$digest; }
gzip -c ../base.tar >a; blob a; echo '{"layers":[{"mediaType":"layer.v1.tar+gzip","digest":"sha256:'$digest'"}]}' >m
blob m; echo '{"manifests":[{"mediaType":"image.manifest.v1+json","digest":"sha256:'$digest'"}]}' >index.json"#;
    run(&mut shell(script, &[&scratch.path("")])).ok();
    let path = |name: &str| scratch.path(name).to_str().unwrap().to_owned();
    let image = path("image");
    let names = |from: &[&str]| {
        let paths = from.iter().map(|name| path(name));
        let args = paths.flat_map(|path| ["--from".to_owned(), path]);
        let args: Vec<String> = args.collect();
        let mut args: Vec<&str> = args.iter().map(String::as_str).collect();
        args.push(&image);
        mkfs(&args).ok();
        let names = run(uvfs().args(["ls", &image])).ok();
        fs::remove_file(&image).unwrap();
        names
            .split_whitespace()
            .map(str::to_owned)
            .collect::<Vec<_>>()
    };
    assert_eq!(names(&["tree"]), ["one", "two"]);
    assert_eq!(names(&["base.tar"]), ["one", "two"]);
    assert_eq!(names(&["base.tar.gz"]), ["one", "two"]);
    assert_eq!(names(&["layout"]), ["one", "two"]);
    assert_eq!(names(&["base.tar.gz", "upper.tar"]), ["three", "two"]);
    // Patterns count for archives as for directories, whether or not their names begin with "./". A file whose first
    // name is left out keeps its contents under the others.
    let script = r#"cd "$1"; mkdir -p hard/d; echo same >hard/a; ln hard/a hard/d/a; ln hard/a hard/b
tar -C hard -cf plain.tar a b d; tar -C hard -cf dotted.tar ."#;
    run(&mut shell(script, &[&scratch.path("")])).ok();
    for archive in ["plain.tar", "dotted.tar"] {
        mkfs(&["--from", &path(archive), "--exclude", "/a", &image]).ok();
        let listed = run(uvfs().args(["ls", "-R", &image])).ok();
        assert_eq!(listed, "/:\nb\nd\n\n/d:\na\n", "{archive}");
        assert_eq!(run(uvfs().args(["cat", &image, "/b"])).ok(), "same\n");
        fs::remove_file(&image).unwrap();
    }
    let (tree, base) = (path("tree"), path("base.tar"));
    let both = mkfs(&["--from", &base, "--from", &tree, &image]);
    assert_eq!(both.status.code(), Some(2));
    assert!(both.stderr.contains("the only source"), "{both}");
    refused(
        &mkfs(&["--from", "/etc/passwd", &image]),
        &["/etc/passwd", "no tar archive"],
    );
    assert!(!Path::new(&image).exists());
}

/// A block device becomes a file system.
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

/// A loop device with 4 KiB sectors, detached when dropped.
struct Loop(String);

impl Loop {
    fn new(file: &Path) -> Loop {
        let attach = ["--find", "--show", "--sector-size", "4096"];
        let device = run(command("losetup", attach).arg(file)).ok();
        Loop(device.trim().into())
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        let detached = run(&mut command("losetup", ["--detach", &self.0]));
        if !detached.status.success() {
            eprintln!("could not detach {}: {detached}", self.0);
        }
    }
}

/// Reads and writes past the page cache are then multiples of 4 KiB, and so are the headers of groups.
#[test]
fn a_device_with_large_sectors_is_made_checked_and_repaired() {
    if !has(&NEEDS) || !has(&[Need::Program("xfs_repair")]) {
        return;
    }
    let scratch = Scratch::new();
    let file = scratch.tmpfs("sectors", "700m").join("disk");
    fs::File::create(&file).unwrap().set_len(400 << 20).unwrap();
    let device = Loop::new(&file);
    let at = device.0.as_str();
    // The device's own sectors are taken, as they are larger.
    mkfs(&["-s", "size=512", at]).ok();
    sound(at);
    // The count of free blocks of the second group, whose checksum is then wrong, too.
    let disk = fs::File::options().read(true).write(true).open(at).unwrap();
    let mut sb = [0; 512];
    disk.read_exact_at(&mut sb, 0).unwrap();
    let number = |at: usize| u64::from(u32::from_be_bytes(sb[at..at + 4].try_into().unwrap()));
    assert_eq!(u16::from_be_bytes([sb[102], sb[103]]), 4096);
    disk.write_all_at(&[0xff; 4], number(84) * number(4) + 4096 + 52)
        .unwrap();
    disk.sync_all().unwrap();
    drop(disk);
    let damaged = run(uvfs().args(["check", at]));
    assert_eq!(damaged.status.code(), Some(1), "{damaged}");
    run(uvfs().args(["repair", at])).ok();
    sound(at);
    let mount = scratch.dir("sectors-mount");
    run(command("mount", ["-t", "xfs", at]).arg(&mount)).ok();
    fs::write(mount.join("new"), vec![1; 100_000]).unwrap();
    run(&mut command("umount", [mount.to_str().unwrap()])).ok();
    sound(at);
}

/// An interrupted mkfs leaves no file system.
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
    // When the superblock says "in progress": the kill follows at once, with most of the copying left.
    let in_progress = || {
        let mut start = [0; 127];
        let read = fs::File::open(&image).and_then(|mut file| file.read_exact(&mut start));
        read.is_ok() && start.starts_with(b"XFSB") && start[126] != 0
    };
    let mut in_the_middle = 0;
    for _ in 0..12 {
        let _ = fs::remove_file(&image);
        let mut child = uvfs()
            .args(["mkfs", "--threads", "1", "--size", "1G", "--from"])
            .args([&from, &image])
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        while !in_progress() && child.try_wait().unwrap().is_none() {
            std::thread::sleep(Duration::from_micros(200));
        }
        child.kill().unwrap();
        child.wait().unwrap();
        let left = in_progress();
        let checked = run(uvfs().arg("check").arg(&image));
        // It is finished if the kill came after the last write.
        let expected = i32::from(left);
        assert_eq!(checked.status.code(), Some(expected), "{checked}");
        if left {
            in_the_middle += 1;
            // mkfs overwrites the remains without being asked.
            run(uvfs().args(["mkfs", "--size", "300M"]).arg(&image)).ok();
        }
    }
    assert!(in_the_middle > 0, "it was never killed while in progress");
}

/// The exit status tells wrong usage from a failure.
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

/// A source file that can't be read is named, and no image is left.
#[test]
fn a_source_that_cannot_be_read_is_named() {
    if !has(&[Need::Uvfs]) || !uvfs_testing::has(&[uvfs_testing::Need::Root]) {
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
    // Where its holes are is asked when it is listed: not if it is left out.
    let sparse = fs::File::create(from.join("sparse")).unwrap();
    sparse.set_len(1 << 20).unwrap();
    let sparse = from.join("sparse");
    run(&mut command("chmod", ["000", sparse.to_str().unwrap()])).ok();
    for (excluded, status) in [(&["secret"][..], 1), (&["secret", "/sparse"], 0)] {
        let mut other = command("setpriv", ["--reuid", "65534", "--clear-groups", program]);
        other.args(["mkfs", "--from"]).args([&from, &image]);
        other.args(excluded.iter().flat_map(|name| ["--exclude", name]));
        let outcome = run(&mut other);
        assert_eq!(outcome.status.code(), Some(status), "{outcome}");
    }
}

/// The superblocks of an XFS that was there before are gone, and not only the first: xfs_repair would take their word
/// if the new first one were lost.
#[test]
fn old_superblocks_are_wiped() {
    if !has(&NEEDS) || !has(&[Need::Program("xfs_repair"), Need::Program("xfs_db")]) {
        return;
    }
    let scratch = Scratch::new();
    let path = scratch.path("image");
    let image = path.to_str().unwrap();
    fs::File::create(&path).unwrap().set_len(2 << 30).unwrap();
    run(&mut command(
        "mkfs.xfs",
        ["-q", "-d", "agcount=16", "-L", "old", image],
    ))
    .ok();
    mkfs(&["-f", "-d", "agcount=3", "-L", "new", image]).ok();
    let file = fs::File::options().write(true).open(&path).unwrap();
    file.write_all_at(&[0; 4096], 0).unwrap();
    run(&mut command("xfs_repair", ["-f", image]));
    let db = ["-r", "-c", "sb 0", "-c", "p agcount", image];
    assert_eq!(run(&mut command("xfs_db", db)).ok().trim(), "agcount = 3");
    sound(image);
}

/// An image that a process reads is not written, and one that a process writes is neither read nor written.
#[test]
fn an_image_in_use_is_not_written() {
    use uvfs_io::device::{Device, OpenOptions};
    if !has(&[Need::Uvfs]) {
        return;
    }
    let scratch = Scratch::new();
    let path = scratch.path("image");
    let image = path.to_str().unwrap();
    mkfs(&["--size", "300M", image]).ok();
    let repair = |code, words: &[&str]| {
        let outcome = run(uvfs().args(["repair", image]));
        assert_eq!(outcome.status.code(), Some(code), "{outcome}");
        assert!(
            words.iter().all(|w| outcome.stderr.contains(w)),
            "{outcome}"
        );
    };
    let reader = Device::open(&path, OpenOptions::default()).unwrap();
    repair(2, &["image", "in use by another process"]);
    refused(
        &mkfs(&["-f", "--size", "300M", image]),
        &["in use by another process"],
    );
    run(uvfs().args(["ls", image])).ok();
    drop(reader);
    let write = OpenOptions {
        write: true,
        ..OpenOptions::default()
    };
    let writer = Device::open(&path, write).unwrap();
    repair(2, &["in use by another process"]);
    refused(
        &run(uvfs().args(["ls", image])),
        &["being written by another process"],
    );
    drop(writer);
    repair(0, &[]);
}

/// Numbers of devices are stored or refused, and flags are kept: into an image, on its mounts, and out of it.
#[test]
fn device_numbers_and_flags_are_kept() {
    if !has(&NEEDS) || !has(&[Need::Program("lsattr")]) {
        return;
    }
    let scratch = Scratch::new();
    let from = scratch.dir("from");
    let fill = "echo a >i; echo b >a; ln a a2; echo c >d; mkdir dir; mknod dev b 511 262143; \
        chattr +i i && chattr +a a && chattr +d d && chattr +d dir";
    let filled = run(shell(fill, &[]).current_dir(&from));
    let image = scratch.path("image");
    let image = image.to_str().unwrap();
    let made = mkfs(&["--from", from.to_str().unwrap(), image]);
    let to = Image::empty(&scratch, "copy").mount("rw");
    let copied = run(uvfs().args(["cp", "-r", "--trusted", image, "/", to.to_str().unwrap()]));
    let kernel = scratch.dir("kernel");
    let mounted = run(command("mount", ["-t", "xfs", "-o", "loop,ro", image]).arg(&kernel));
    let list = "lsattr -d -- i a a2 d dir | cut -d ' ' -f 1 | tr -d e-; stat -c %t:%T dev";
    let outcomes: Vec<_> = [&from, &kernel, &to]
        .map(|at| run(shell(list, &[]).current_dir(at)))
        .into();
    run(&mut command("umount", [kernel.to_str().unwrap()]));
    let ours = scratch.dir("ours");
    let served = run(uvfs().args(["mount", image]).arg(&ours));
    let shown = run(shell(list, &[]).current_dir(&ours));
    run(uvfs().arg("umount").arg(&ours));
    // Immutable and append-only files can't be removed with the scratch directory.
    let clear = "chattr -i i; chattr -a a";
    run(shell(clear, &[]).current_dir(&from));
    run(shell(clear, &[]).current_dir(&to));
    for o in [&filled, &made, &copied, &mounted, &served] {
        assert!(o.status.success(), "{o}");
    }
    assert!(outcomes[0].stdout.starts_with('i'), "{}", outcomes[0]);
    for o in outcomes.iter().chain([&shown]) {
        same(&o.stdout, &outcomes[0].stdout);
    }
    run(&mut command(
        "mknod",
        [from.join("far").to_str().unwrap(), "b", "300", "300000"],
    ))
    .ok();
    refused(
        &mkfs(&["-f", "--from", from.to_str().unwrap(), image]),
        &["from/far", "device numbers"],
    );
}

/// `-N` tells the sizes that mkfs.xfs tells, line by line, and writes nothing.
#[test]
fn a_dry_run_tells_what_mkfs_xfs_tells() {
    if !has(&[Need::Uvfs, Need::Program("mkfs.xfs")]) {
        return;
    }
    let scratch = Scratch::new();
    let image = scratch.path("image");
    let image = image.to_str().unwrap();
    let configuration = scratch.path("configuration");
    fs::write(
        &configuration,
        "# as in 6.1\n[metadata]\nbigtime=1\ncrc = 1\n\n[inode]\nsparse=1\nmaxpct=9\n",
    )
    .unwrap();
    let configuration = format!("options={}", configuration.display());
    for (size, options) in [
        ("300m", &[][..]),
        ("7g", &["-d", "agcount=7"]),
        ("100g", &["-b", "size=1024", "-m", "crc=1,rmapbt=0"]),
        ("3t", &["-s", "size=4096", "-i", "maxpct=7,sparse=1"]),
        (
            "1g",
            &["-l", "size=20000b,version=2", "-n", "size=4096,ftype"],
        ),
        (
            "2g",
            &[
                "-b",
                "size=16384",
                "-i",
                "perblock=16",
                "-r",
                "extsize=16384",
            ],
        ),
        (
            "1g",
            &[
                "-d",
                "sectsize=4096,noalign",
                "-l",
                "internal,lazy-count=1",
                "-K",
            ],
        ),
        ("1g", &["-c", &configuration]),
    ] {
        let ours = mkfs(&[&["-N", "-d", &format!("size={size}")], options, &[image]].concat());
        assert!(!Path::new(image).exists());
        let name = format!("name={image},size={size},file=1");
        let theirs = run(command("mkfs.xfs", ["-N", "-d", &name]).args(options));
        let theirs = theirs.ok();
        let sizes = theirs.find("meta-data").map_or("", |at| &theirs[at..]);
        assert_eq!(ours.ok(), sizes, "{size} {options:?}");
        let _ = fs::remove_file(image);
    }
}

/// What mkfs.xfs can make and uvfs cannot is refused by the option's name.
#[test]
fn options_without_a_choice_are_refused_by_name() {
    if !has(&[Need::Uvfs]) {
        return;
    }
    let scratch = Scratch::new();
    let image = scratch.path("image");
    let image = image.to_str().unwrap();
    let configuration = scratch.path("configuration");
    fs::write(&configuration, "# old\n[metadata]\nreflink = 0\n").unwrap();
    let configuration = format!("options={}", configuration.display());
    for (option, value, words) in [
        (
            "-m",
            "rmapbt=1",
            "-m rmapbt=1: uvfs only makes file systems with rmapbt=0",
        ),
        ("-m", "crc=0", "-m crc=0"),
        ("-i", "nrext64", "-i nrext64: uvfs only"),
        (
            "-l",
            "logdev=/dev/sdb,internal",
            "-l internal: the log is on another device",
        ),
        (
            "-l",
            "logdev=a,name=b",
            "the device of the log is given twice",
        ),
        (
            "-l",
            &format!("logdev={image}"),
            "the log needs another file",
        ),
        (
            "-l",
            &format!("logdev={image}.log"),
            "the size of a new log has to be given",
        ),
        ("-l", "logdev=/none/log,size=64m", "/none/log: making it"),
        ("-l", "sectsize=4096", "-l sectsize=4096"),
        ("-n", "size=8192", "-n size=8192"),
        ("-n", "version=ci", "-n version=ci"),
        ("-r", "rtdev=/dev/sdb", "-r rtdev"),
        ("-d", "su=64k", "-d su=64k"),
        ("-d", "agcount=2,agcount=3", "-d agcount: it is given twice"),
        ("-c", &configuration, "-m reflink=0: uvfs only"),
        ("-c", "options=/none", "/none"),
        ("-m", "speed=1", "-m speed=1: there is no such option"),
    ] {
        let outcome = mkfs(&["--size", "400M", option, value, image]);
        assert!(outcome.status.code() != Some(0), "{value}: {outcome}");
        assert!(outcome.stderr.contains(words), "{value}: {outcome}");
        assert!(!Path::new(image).exists(), "{value}");
    }
}

/// With SOURCE_DATE_EPOCH, and all that changes a source, the same files give the same bytes: in a file, on standard
/// output, with any number of threads, and from a copy of the source.
#[test]
fn an_epoch_makes_images_the_same() {
    if !has(&[Need::Uvfs]) {
        return;
    }
    let scratch = Scratch::new();
    let contexts = scratch.path("contexts");
    fs::write(&contexts, "/.* u:r:all_t:s0\n/sub/keep -- u:r:keep_t:s0\n").unwrap();
    let owners = scratch.path("owners");
    fs::write(&owners, "+0 app:1000 # the application\n").unwrap();
    let mut images = Vec::new();
    for name in ["one", "two"] {
        let from = scratch.dir(name);
        fs::create_dir(from.join("sub")).unwrap();
        for file in ["sub/keep", "sub/drop.o", "top"] {
            fs::write(from.join(file), file).unwrap();
        }
        for (threads, to_output) in [("1", true), ("3", false)] {
            let image = scratch.path(&format!("{name}-{threads}"));
            let mut make = uvfs();
            make.env("SOURCE_DATE_EPOCH", "1000000000").args([
                "mkfs",
                "-q",
                "--size",
                "auto",
                "--margin",
                "3%",
                "--threads",
                threads,
                "--exclude",
                "*.o",
            ]);
            make.args(["--group", "+7", "--owner-map", owners.to_str().unwrap()]);
            make.args(["--selinux-contexts", contexts.to_str().unwrap(), "--from"])
                .arg(&from);
            if to_output {
                make.arg("-").stdout(fs::File::create(&image).unwrap());
                assert!(make.status().unwrap().success());
            } else {
                run(make.arg(&image)).ok();
            }
            images.push(fs::read(&image).unwrap());
        }
    }
    assert!(
        images.iter().all(|bytes| *bytes == images[0]),
        "the images differ"
    );
    let image = scratch.path("two-3");
    let image = image.to_str().unwrap();
    run(uvfs().args(["check", image])).ok();
    let listing = run(uvfs().args(["ls", "-lR", image])).ok();
    let lines: Vec<&str> = listing.lines().filter(|l| l.starts_with('-')).collect();
    assert_eq!(lines.len(), 2, "{listing}");
    assert!(
        lines
            .iter()
            .all(|l| l.contains(" 1000     7 ") && l.contains("2001-09-09 01:46:40")),
        "{listing}"
    );
    let stat = run(uvfs().args(["stat", image, "/sub/keep"])).ok();
    assert!(stat.contains("security.selinux"), "{stat}");
    // Standard output is named where it fails.
    let program = uvfs();
    let full = run(&mut shell(
        r#""$1" mkfs -q --size 17M - >/dev/full"#,
        &[Path::new(program.get_program())],
    ));
    assert!(
        full.stderr
            .contains("standard output: writing the image: No space left"),
        "{full}"
    );
    assert_eq!(
        mkfs(&["--size", "17M", "--json", "-"]).status.code(),
        Some(2)
    );
    let wrong = mkfs(&["--from", "/etc", "--owner", "no-such-user", "image"]);
    assert_eq!(wrong.status.code(), Some(2), "{wrong}");
    assert!(wrong.stderr.contains("--owner no-such-user: "), "{wrong}");
}
