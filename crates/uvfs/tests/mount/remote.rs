//! Object stores by the command: crates/uvfs-object tests what is behind a mount, and here is how one begins and ends.

pub(crate) mod clients;
mod killed;
mod survive;
mod unseen;
mod writes;
pub(crate) mod written;

use std::fs::{self, File};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use rustix::process::Signal;

use serde_json::Value;

use crate::fake::Fake;
use crate::harness::*;
use crate::observe::{Metrics, stats};
use crate::proxy::{Mode, Proxy};
use crate::stores::At;

/// A directory of the host as a store, and a place for its mount.
struct Stored {
    scratch: Scratch,
    uri: String,
    /// What the object `file` has.
    content: Vec<u8>,
    at: PathBuf,
}

impl Stored {
    /// `None` where the command can't mount.
    fn new() -> Option<Self> {
        if !has(&[Need::Mount(Transport::Dev), Need::Uvfs]) {
            return None;
        }
        let scratch = Scratch::new();
        let dir = scratch.dir("store");
        let mut random = Random(1);
        let content: Vec<u8> = (0..20 << 20).map(|_| random.next() as u8).collect();
        fs::write(dir.join("file"), &content).unwrap();
        fs::create_dir(dir.join("dir")).unwrap();
        Some(Self {
            uri: format!("fs://{}", dir.display()),
            at: scratch.dir("mount"),
            content,
            scratch,
        })
    }

    /// The option that puts the cache here.
    fn cache(&self) -> String {
        format!("cache_dir={}", self.scratch.path("cache").display())
    }

    /// The command that mounts it.
    fn mount(&self) -> Command {
        let mut command = uvfs();
        command.args(["mount", "-o", &self.cache(), "-o", "cache_size=1G"]);
        command.args([self.uri.as_ref(), self.at.as_os_str()]);
        command
    }

    fn unmount(&self) {
        run(uvfs().arg("umount").arg(&self.at)).ok();
        assert!(mounted(&self.at).is_none());
    }
}

/// A store in memory behind a proxy, and its mount.
struct InMemory {
    // Dropped in this order, so that the end of the mount waits for no store.
    mount: Mount,
    proxy: Proxy,
    fake: Fake,
    scratch: Scratch,
    serve: Serve,
}

impl InMemory {
    /// `fill` puts objects there. With these options of the mount.
    #[track_caller]
    fn new(options: &[&str], fill: impl FnOnce(&Fake)) -> Self {
        Self::with(|serve| serve, options, fill)
    }

    /// The same, served so.
    #[track_caller]
    fn with(how: impl FnOnce(Serve) -> Serve, options: &[&str], fill: impl FnOnce(&Fake)) -> Self {
        let fake = Fake::start();
        fill(&fake);
        let proxy = Proxy::start(fake.address());
        let scratch = Scratch::new();
        let cache = format!("cache_dir={}", scratch.path("cache").display());
        let serve = how(Serve::over(Transport::Dev).option(&cache));
        let serve = (options.iter()).fold(serve, |serve, option| serve.option(option));
        let uri = Self::uri(&fake, &proxy);
        let mount = Mount::new(&serve, Path::new(&uri), &scratch.dir("mount"));
        Self {
            mount,
            proxy,
            fake,
            scratch,
            serve,
        }
    }

    /// Kills the server, and mounts again after what `meanwhile` does.
    fn kill(mut self, meanwhile: impl FnOnce()) -> Self {
        self.mount.expect_gone();
        self.mount.server.signal(Signal::KILL);
        self.mount.server.wait(SOON).expect("it is killed");
        unmount_by_force(&self.mount.at);
        self.again(meanwhile)
    }

    /// Mounts again when this mount has ended, after what `meanwhile` does.
    fn again(self, meanwhile: impl FnOnce()) -> Self {
        let at = self.mount.at.clone();
        drop(self.mount);
        meanwhile();
        let uri = Self::uri(&self.fake, &self.proxy);
        let mount = Mount::new(&self.serve, Path::new(&uri), &at);
        Self { mount, ..self }
    }

    /// A prefix, so that the command does not ask before whether this is an image.
    fn uri(fake: &Fake, proxy: &Proxy) -> String {
        fake.uri_at(proxy.address()).replacen("/p?", "/p/?", 1)
    }

    fn at(&self, name: &str) -> PathBuf {
        self.mount.at.join(name)
    }
}

/// The bytes that the cache holds.
fn cached(scratch: &Scratch) -> u64 {
    let dir = scratch.path("cache");
    let stores = fs::read_dir(dir)
        .unwrap()
        .map(|store| store.unwrap().path());
    let files = stores.flat_map(|store| fs::read_dir(store).unwrap());
    let data = files.map(|file| file.unwrap());
    let data = data.filter(|file| file.path().extension().is_some_and(|end| end == "data"));
    data.map(|file| file.metadata().unwrap().blocks() * 512)
        .sum()
}

/// What a server that is killed had cached is whole for the next.
#[test]
fn a_killed_server_leaves_a_cache_that_is_right() {
    let Some(store) = Stored::new() else {
        return;
    };
    let (at, content) = (&store.at, &store.content);
    let mut server = Running::start(store.mount().arg("--foreground"));
    wait_for("the mount", || at.join("file").exists());
    let file = File::open(at.join("file")).unwrap();
    let mut part = vec![0; 3 << 20];
    file.read_exact_at(&mut part, 0).unwrap();
    assert!(part == content[..3 << 20]);
    server.signal(Signal::KILL);
    server.wait(LATER).expect("it was killed");
    drop(file);
    unmount_by_force(at);
    let kept = cached(&store.scratch);
    assert!(kept >= 3 << 20, "{kept}");
    run(&mut store.mount()).ok();
    assert!(fs::read(at.join("file")).unwrap() == *content);
    store.unmount();
}

/// An error is one line that says what to do, and leaves no mount and no mount point behind.
#[test]
fn a_store_that_can_not_be_had_is_an_error() {
    let Some(mut store) = Stored::new() else {
        return;
    };
    store.at = store.scratch.path("missing");
    // No server listens there.
    let nothing =
        "s3://bucket?endpoint=http://127.0.0.1:9&region=r&access_key_id=k&secret_access_key=s";
    for uri in ["nosuch://bucket", nothing] {
        store.uri = uri.into();
        let outcome = run(store.mount().args(["-o", "timeout=1"]));
        assert_eq!(outcome.status.code(), Some(1), "{outcome}");
        let (shown, _) = uri.split_once('?').unwrap_or((uri, ""));
        assert!(outcome.stderr.contains(shown), "{outcome}");
        assert!(!outcome.stderr.contains("secret_access_key"), "{outcome}");
        assert!(!store.at.exists(), "{outcome}");
    }
}

/// Owners and modes are the options', and only a store takes them.
#[test]
fn owners_and_modes_by_options() {
    let Some(store) = Stored::new() else {
        return;
    };
    let words = "uid=1234,gid=5678,file_mode=0640,dir_mode=711";
    run(store.mount().args(["-o", words])).ok();
    for (name, mode) in [("file", 0o100_640), ("dir", 0o040_711), ("", 0o040_711)] {
        let meta = fs::metadata(store.at.join(name)).unwrap();
        assert_eq!(
            (meta.mode(), meta.uid(), meta.gid()),
            (mode, 1234, 5678),
            "{name}"
        );
    }
    store.unmount();
    let outcome = run(uvfs()
        .args(["mount", "-o", words])
        .arg(store.scratch.path("store"))
        .arg(&store.at));
    assert_eq!(outcome.status.code(), Some(2), "{outcome}");
    assert!(
        outcome.stderr.contains("-o uid: only for object stores"),
        "{outcome}"
    );
}

/// By mount(8) a store is mounted without the rights of its writers, and `nofail` mounts one that is there.
#[test]
fn a_store_by_the_helper() {
    let Some(store) = Stored::new() else {
        return;
    };
    let mut helper = uvfs();
    helper
        .arg0("mount.fuse.uvfs")
        .args([store.uri.as_ref(), store.at.as_os_str()]);
    helper.args(["-o", &format!("nofail,{}", store.cache())]);
    run(&mut helper).ok();
    let line = mounted(&store.at).expect("it is mounted");
    for flag in ["nosuid", "nodev", "ro"] {
        assert!(line.options.iter().any(|option| option == flag), "{flag}");
    }
    assert!(fs::read(store.at.join("file")).unwrap() == store.content);
    store.unmount();
}

/// Every call that would change something is EROFS. (pjdfstest makes a directory of its own where it runs, before any test,
/// so nothing of it runs here.)
#[test]
fn a_store_is_read_only() {
    let Some(store) = Stored::new() else {
        return;
    };
    run(&mut store.mount()).ok();
    for script in [
        ">>\"$1/file\"",
        ">\"$1/new\"",
        "mkdir \"$1/new\"",
        "rmdir \"$1/dir\"",
        "rm -f \"$1/file\"",
        "mv \"$1/file\" \"$1/other\"",
        "ln \"$1/file\" \"$1/other\"",
        "ln -s x \"$1/new\"",
        "mkfifo \"$1/new\"",
        "mknod \"$1/new\" c 1 3",
        "chmod 600 \"$1/file\"",
        "chown 1 \"$1/file\"",
        "touch \"$1/file\"",
        "truncate -s 0 \"$1/file\"",
        "setfattr -n user.x -v y \"$1/file\"",
    ] {
        let outcome = run(shell(script, &[&store.at]).env("LC_ALL", "C"));
        assert!(!outcome.status.success(), "{script}: {outcome}");
        assert!(
            outcome.stderr.contains("Read-only file system"),
            "{script}: {outcome}"
        );
    }
    store.unmount();
}

/// `uvfs stats` and the metrics have what the store was asked for, beside a mount that has no counts of its own.
#[test]
fn statistics_of_a_store() {
    if !has(&[Need::Mount(Transport::Dev), Need::Uvfs]) {
        return;
    }
    let store = InMemory::new(&[], |fake| fake.put("file", &[7; 5000]));
    let (mount, fake) = (&store.mount, &store.fake);
    let other = Served::new(&Serve::over(Transport::Dev));
    mount
        .run(Command::new("cat").arg(mount.at.join("file")))
        .ok();
    let asked = |kind: &str| {
        let bucket = fake.bucket();
        let asked = bucket.asked.iter();
        asked.filter(|one| one.starts_with(kind)).count() as u64
    };
    // Asking the mount for its server may take requests, too.
    let text = run(uvfs().arg("stats").arg(&mount.at)).ok();
    let requests = [asked("HEAD "), asked("LIST "), asked("GET ")];
    let counts = stats(&mount.at)["counts"].clone();
    let mounts = [&mount.at, &other.mount.at];
    let metrics = run(uvfs().args(["stats", "--prometheus"]).args(mounts)).ok();
    assert_eq!(requests, [asked("HEAD "), asked("LIST "), asked("GET ")]);
    let parsed = Metrics::parse(&metrics);
    let expected = [
        ("store_stat_requests", requests[0]),
        ("store_list_requests", requests[1]),
        ("store_read_requests", requests[2]),
        ("store_read_bytes", 5000),
        ("store_retries", 0),
        ("store_failures", 0),
        ("store_write_requests", 0),
        ("store_copy_requests", 0),
        ("store_delete_requests", 0),
        ("store_conflicts", 0),
        ("cache_hit_bytes", 0),
        ("cache_miss_bytes", 5000),
        ("store_changes_waiting", 0),
    ];
    assert!(requests.iter().all(|count| *count > 0), "{requests:?}");
    assert_eq!(counts.as_array().map(Vec::len), Some(expected.len()));
    for (name, count) in expected {
        let told = |one: &&Value| one["name"] == name;
        let json = counts.as_array().unwrap().iter().find(told);
        assert_eq!(json.map(|one| &one["count"]), Some(&count.into()), "{name}");
        let end = if name.ends_with("_waiting") {
            ""
        } else {
            "_total"
        };
        let metric = format!("uvfs_fs_{name}{end}");
        assert_eq!(
            parsed.value(&metric, &mount.at, &[]),
            count as f64,
            "{name}"
        );
        let line = text.lines().find(|line| line.starts_with(name));
        let shown = line.and_then(|line| line.split_whitespace().nth(1));
        assert_eq!(shown, Some(&*count.to_string()), "{name}: {text}");
    }
    let foreign = format!("{:?}", other.mount.at);
    let of_store = |line: &&str| line.starts_with("uvfs_fs_") && line.contains(&foreign);
    assert_eq!(metrics.lines().find(of_store), None);
    assert_eq!(stats(&other.mount.at)["counts"], Value::Array(Vec::new()));
}

/// The mount of an image in a store has the counts of the store.
#[test]
fn statistics_of_an_image() {
    if !has(&[Need::Mount(Transport::Dev), Need::Uvfs]) {
        return;
    }
    let scratch = Scratch::new();
    let (tree, image) = (scratch.dir("tree"), scratch.path("image"));
    fs::write(tree.join("file"), [7; 50_000]).unwrap();
    run(uvfs().args(["mkfs", "--from"]).args([&tree, &image])).ok();
    let fake = Fake::start();
    fake.put("image", &fs::read(image).unwrap());
    let uri = fake.uri().replacen("/p?", "/p/image?", 1);
    let serve = Serve::over(Transport::Dev);
    let mount = Mount::new(&serve, Path::new(&uri), &scratch.dir("mount"));
    let mut cmp = Command::new("cmp");
    mount
        .run(cmp.args([mount.at.join("file"), tree.join("file")]))
        .ok();
    let counts = stats(&mount.at)["counts"].clone();
    let count = |name| {
        let counts = counts.as_array().unwrap().iter();
        let mut found = counts.filter(|one| one["name"] == name);
        found.next().unwrap_or_else(|| panic!("{name}"))["count"].as_u64()
    };
    let asked = fake.bucket().asked.clone();
    let of = |kind| asked.iter().filter(|one| one.starts_with(kind)).count() as u64;
    assert_eq!(count("store_stat_requests"), Some(of("HEAD ")));
    assert_eq!(count("store_read_requests"), Some(of("GET ")));
    assert!(count("store_read_bytes") > Some(50_000), "{counts}");
    assert_eq!(counts.as_array().map(Vec::len), Some(6), "{counts}");
}
