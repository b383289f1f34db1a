//! Changes that programs of the host make to the source behind a mount whose kernel caches for as long
//! as nothing changes.

mod changes;
mod races;

use std::collections::BTreeMap;
use std::fs::{self, File, FileTimes, OpenOptions, Permissions};
use std::io::Write;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt, chown, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant, SystemTime};

use rustix::fs::{RenameFlags, XattrFlags, renameat_with};
use rustix::process::Signal;

use crate::harness::*;
pub use changes::host_changes;
use changes::plant;
use races::agree;
pub use races::races;

/// Host file systems that are watched.
const KINDS: [(&str, Transport); 3] = [
    ("tmpfs", Transport::Uring),
    ("ext4", Transport::Dev),
    ("xfs", Transport::Uring),
];

/// A source of a kind, and where it is mounted.
fn source(scratch: &Scratch, kind: &str) -> PathBuf {
    match kind {
        "tmpfs" => scratch.tmpfs("source", "300m"),
        kind => scratch.image("source", kind),
    }
}

fn needs(kind: &str, transport: Transport) -> bool {
    let mut needs = vec![Need::Mount(transport), Need::Uvfs];
    match kind {
        "ext4" => needs.push(Need::Program("mkfs.ext4")),
        "xfs" => needs.push(Need::Program("mkfs.xfs")),
        _ => {}
    }
    has(&needs)
}

fn stats(mount: &Mount) -> serde_json::Value {
    let text = mount
        .run(uvfs().args(["stats", "--json"]).arg(&mount.at))
        .ok();
    serde_json::from_str(&text).expect("JSON")
}

/// Runs a function of this program that uses the mount; the mount and the source are its arguments.
fn play(function: &str, mount: &Mount, source: &Path, scratch: &Scratch) -> String {
    let report = scratch.path(function);
    let source = source.to_str().expect("a name");
    let mut child = crate::own_process::call(function, &mount.at, source, &report);
    mount.run_within(LATER, &mut child).ok();
    fs::read_to_string(report).expect("a report")
}

/// Two views of one tree: the host's, and the mount's.
struct Both<'a> {
    host: &'a Path,
    mount: &'a Path,
    took: Vec<Duration>,
}

impl Both<'_> {
    /// Fills the kernel's caches with what there is, or isn't, under some names.
    fn cache(&self, names: &[&str]) {
        for _ in 0..2 {
            for name in names {
                let path = self.mount.join(name);
                let _ = path.symlink_metadata();
                let _ = fs::read(&path);
                let _ = fs::read_dir(&path).map(Iterator::count);
                let parent = path.parent().expect("a parent");
                let _ = fs::read_dir(parent).map(Iterator::count);
            }
        }
    }

    /// Waits until the mount shows what has changed.
    fn seen(&mut self, what: &str, done: impl Fn(&Path) -> bool) {
        assert!(done(self.host), "{what}: not even on the host");
        let began = Instant::now();
        while !done(self.mount) {
            assert!(began.elapsed() < SEEN, "{what}: not seen");
            std::thread::sleep(Duration::from_micros(100));
        }
        self.took.push(began.elapsed());
    }
}

fn mode(path: &Path) -> Option<u32> {
    Some(path.symlink_metadata().ok()?.mode() & 0o7777)
}

fn listed(path: &Path) -> bool {
    let names = fs::read_dir(path.parent().expect("a parent"));
    let name = path.file_name().expect("a name");
    names.is_ok_and(|mut names| names.any(|entry| entry.is_ok_and(|it| it.file_name() == name)))
}

/// A store through a shared mapping of a file of one page, which is closed before it is unmapped.
fn store(path: &Path, byte: u8) {
    let file = OpenOptions::new().read(true).write(true).open(path);
    let file = file.expect("a file");
    let prot = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: a new mapping of a page that the file has, used and taken away here alone.
    unsafe {
        let fd = file.as_raw_fd();
        let page = libc::mmap(std::ptr::null_mut(), 4096, prot, libc::MAP_SHARED, fd, 0);
        assert_ne!(page, libc::MAP_FAILED);
        drop(file);
        page.cast::<u8>().write_volatile(byte);
        libc::munmap(page, 4096);
    }
}

/// The names that are looked at when events were lost.
fn lost_names() -> Vec<String> {
    let name = |number: usize| format!("d/{}{number}", ["file", "missing"][number % 2]);
    (0..200).map(name).collect()
}

/// Fills the kernel's caches, or waits until the mount shows what the host has.
pub fn look(mount: &Path, host: &str) -> String {
    let took = agree(
        Path::new(host),
        mount,
        &lost_names(),
        "after events were lost",
    );
    format!("{took:?}")
}

/// The mount follows more changes than the kernel keeps events of while the server can't take them.
#[test]
fn lost_events_are_made_up_for() {
    if !needs("tmpfs", Transport::Uring) {
        return;
    }
    let scratch = Scratch::new();
    let source = scratch.tmpfs("source", "1g");
    plant(&source);
    for name in lost_names().iter().step_by(2) {
        fs::write(source.join(name), "old").unwrap();
    }
    let mount = Mount::new(
        &Serve::over(Transport::Uring),
        &source,
        &scratch.dir("mount"),
    );
    play("host_look", &mount, &source, &scratch);
    mount.server.signal(Signal::STOP);
    // None of these is alike.
    for number in 0..100_000 {
        let path = source.join(format!("unseen/{number}"));
        File::create(&path).unwrap();
    }
    for (number, name) in lost_names().iter().enumerate() {
        let path = source.join(name);
        match number % 4 {
            0 => fs::write(&path, "new").unwrap(),
            2 => fs::remove_file(&path).unwrap(),
            _ => fs::create_dir(&path).unwrap(),
        }
    }
    fs::rename(source.join("d/tree"), source.join("e/tree")).unwrap();
    fs::remove_dir_all(source.join("unseen")).unwrap();
    mount.server.signal(Signal::CONT);
    println!(
        "agreed after {}",
        play("host_look", &mount, &source, &scratch)
    );
    let watch = &stats(&mount)["watch"];
    assert!(watch["lost"].as_u64() >= Some(1), "{watch}");
}

/// Requests that something made the kernel send, by kind.
fn requests(mount: &Mount, run: impl FnOnce()) -> BTreeMap<String, u64> {
    let count = || -> BTreeMap<String, u64> {
        let stats = stats(mount);
        let ops = stats["ops"].as_array().expect("a list").clone();
        let one = |op: serde_json::Value| {
            let name = op["name"].as_str().expect("a name").to_owned();
            (name, op["count"].as_u64().expect("a number"))
        };
        ops.into_iter().map(one).collect()
    };
    let before = count();
    run();
    let mut after = count();
    for (name, count) in before {
        *after.get_mut(&name).expect("it was there") -= count;
    }
    after.retain(|_, count| *count > 0);
    after
}

const PASS: &str = r#"
cd "$1"; find . -printf '%p %s %m %T@ %n %l\n'; ls -R; tar cf - . | md5sum; du -s --apparent-size .
grep -r nothing-has-this . || true; for i in $(seq 50); do test -e missing$i || true; done
stat -c '%n %s' d/*; readlink e/link
"#;

/// The kernel does not ask again for what has not changed.
#[test]
fn what_is_unchanged_is_not_asked_for_again() {
    if !has(&[Need::Mount(Transport::Uring), Need::Uvfs]) {
        return;
    }
    let scratch = Scratch::new();
    let source = scratch.tmpfs("source", "300m");
    plant(&source);
    for number in (0..300).step_by(6) {
        let size = number * number;
        fs::write(source.join(format!("d/sized{number}")), vec![b'.'; size]).unwrap();
    }
    let mount = Mount::new(
        &Serve::over(Transport::Uring),
        &source,
        &scratch.dir("mount"),
    );
    let pass = || mount.run(&mut shell(PASS, &[&mount.at])).ok();
    let first = pass();
    let mut left = BTreeMap::new();
    // The second pass asks for times of access that the first one changed. Pages may go at any time, as
    // the machine needs memory for something else.
    for _ in 0..10 {
        std::thread::sleep(Duration::from_millis(1100));
        left = requests(&mount, || assert_eq!(pass(), first));
        left.retain(|name, _| !["OPEN", "RELEASE"].contains(&name.as_str()));
        // Of `stats` itself, which asks where the server's socket is, and of `find` and `du`.
        let few = ["GETXATTR", "STATFS"];
        left.retain(|name, count| *count > 8 || !few.contains(&name.as_str()));
        if left.is_empty() {
            break;
        }
    }
    assert!(left.is_empty(), "{left:?}");
    // Programs that use the mount cause no events that lead anywhere. The first file that cp writes has a
    // backing file, and the kernel's writes there look like another program's.
    let script = r#"cd "$1"; cp -a d copy; mv copy other; chmod -R a+r other; rm -r other"#;
    mount.run(&mut shell(script, &[&mount.at])).ok();
    let watch = &stats(&mount)["watch"];
    assert!(watch["events"].as_u64() <= Some(2), "{watch}");
    assert_eq!(watch["told"], 0, "{watch}");
}

/// A directory that the host has just made can be worked in: the notification of its name takes no program's working
/// directory away.
#[test]
fn a_new_name_is_not_dropped() {
    if !needs("tmpfs", Transport::Uring) {
        return;
    }
    let served = Served::new(&Serve::over(Transport::Uring));
    let script = r#"
for i in $(seq 100); do
    [ ! -e "$2/new$i" ]
    mkdir "$1/new$i"
    until cd "$2/new$i" 2>/dev/null; do :; done
    sleep 0.0$((i % 10))
    [ "$(/bin/pwd)" = "$2/new$i" ]
    echo $i >file; cd /
done; cat "$1"/new*/file | sort -n | tail -1"#;
    let mut work = shell(script, &[&served.source, &served.mount.at]);
    assert_eq!(served.mount.run(&mut work).ok(), "100\n");
}

/// A mount or an unmount below the source is seen as well.
pub fn mounts_below(mount: &Path, host: &str) -> String {
    let (host, took) = (Path::new(host), Vec::new());
    let mut both = Both { host, mount, took };
    let tree = host.join("d/tree");
    let there = |root: &Path| root.join("d/tree/inside").exists();
    for _ in 0..5 {
        both.cache(&["d", "d/tree", "d/tree/below", "d/tree/inside"]);
        let mut mounting = command("mount", ["-t", "tmpfs", "below"]);
        run(mounting.arg(&tree)).ok();
        fs::write(tree.join("inside"), "x").unwrap();
        both.seen("a mount", there);
        both.cache(&["d/tree", "d/tree/inside"]);
        fs::remove_file(tree.join("inside")).unwrap();
        both.seen("a change below a mount", |root| !there(root));
        run(command("umount", ["--lazy"]).arg(&tree)).ok();
        both.seen("an unmount", |root| root.join("d/tree/below/leaf").exists());
    }
    "good".into()
}

/// Changes of a file system that is mounted below the source are seen.
#[test]
fn mounts_below_the_source_are_seen() {
    if !needs("tmpfs", Transport::Uring) {
        return;
    }
    let served = Served::new(&Serve::over(Transport::Uring));
    plant(&served.source);
    play(
        "host_mounts",
        &served.mount,
        &served.source,
        &served.scratch,
    );
}

/// `uvfs stats` says why the caches of a mount live shortly.
#[test]
fn who_does_not_watch_says_why() {
    if !has(&[Need::Mount(Transport::Dev), Need::Uvfs]) {
        return;
    }
    let why = |option: &str, source: Option<&Path>| {
        let scratch = Scratch::new();
        let own = scratch.tmpfs("source", "16m");
        let serve = Serve::over(Transport::Dev).option(option);
        let mount = Mount::new(&serve, source.unwrap_or(&own), &scratch.dir("mount"));
        let text = mount.run(uvfs().arg("stats").arg(&mount.at)).ok();
        let line = text.lines().find(|line| line.starts_with("watching"));
        line.expect("a line").to_owned()
    };
    assert!(why("", None).contains(" on: "));
    for option in [
        "cache=always",
        "cache=never",
        "attr_timeout=1",
        "negative_timeout=0",
    ] {
        assert!(
            why(option, None).contains("off: the mount's options"),
            "{option}"
        );
    }
    assert!(why("cache=always,cache=auto", None).contains(" on: "));
    assert!(why("writeback", None).contains("off: the kernel caches writes"));
    // A file system that others may change elsewhere.
    let scratch = Scratch::new();
    let dirs = scratch.tmpfs("dirs", "16m");
    for dir in ["lower", "upper", "work", "over"] {
        fs::create_dir(dirs.join(dir)).unwrap();
    }
    let over = scratch.dir("over");
    let options = "lowerdir=lower,upperdir=upper,workdir=work,nfs_export=off";
    let mut overlay = Command::new("mount");
    overlay
        .current_dir(&dirs)
        .args(["-t", "overlay", "-o", options, "overlay"]);
    if run(overlay.arg(&over)).status.success() {
        let line = why("", Some(&over));
        assert!(line.contains("off: "), "{line}");
    }
}
