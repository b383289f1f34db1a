//! Images in an object store (SeaweedFS), behind a proxy that delays and stops what it passes on.

use std::collections::HashSet;
use std::fs;
use std::io::Read;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Signal, kill_process};
use uvfs_testing::outlives::worker;

use crate::fake::Fake;
use crate::fixture::*;
use crate::harness::*;
use crate::proxy::{Mode, Proxy};
use crate::stores::{At, Seaweed};
use crate::survive;

/// The key of the image.
const KEY: &str = "images/a disk.img";
/// Adds a file that takes many requests.
const LARGE: &str = "head -c 60M /dev/urandom >large; head -c 60M /dev/zero | tr '\\0' x >x";

/// A store with an image, and a proxy before it.
struct Stored<'a> {
    store: &'a Seaweed,
    proxy: Proxy,
}

impl<'a> Stored<'a> {
    fn new(store: &'a Seaweed, image: &Image) -> Self {
        store.put(KEY, &fs::read(&image.path).unwrap());
        let proxy = Proxy::start(store.address());
        Self { store, proxy }
    }

    /// The URI of a key, by way of the proxy.
    fn uri(&self, key: &str) -> String {
        let uri = self.store.uri_at(self.proxy.address());
        let key = key.replace(' ', "%20");
        uri.replacen("s3://bucket", &format!("s3://bucket/{key}"), 1)
    }

    /// Runs a command on the image.
    fn run(&self, command: &str, options: &[&str], rest: &[&str]) -> Outcome {
        run(uvfs()
            .arg(command)
            .args(options)
            .arg(self.uri(KEY))
            .args(rest))
    }

    /// Bytes of answers until `work` is done.
    fn answered<T>(&self, work: impl FnOnce() -> T) -> (T, u64) {
        let before = self.proxy.answered();
        let done = work();
        (done, self.proxy.answered() - before)
    }
}

#[test]
fn in_a_store() {
    if !has(&NEEDS) || !has(&[Need::Program("weed")]) {
        return;
    }
    let store = Seaweed::start();
    an_image_is_like_the_local_one(&store);
    an_image_is_mounted(&store);
    an_image_that_changes_or_is_missing_is_an_error(&store);
    a_stalled_store_ends_a_command_in_time(&store);
}

/// Every command shows of an image in a store what it shows of the image on the local disk, at any latency, and reads
/// little more of it than that takes. Nothing gets to the local disk.
fn an_image_is_like_the_local_one(store: &Seaweed) {
    let scratch = Scratch::new();
    let image = Image::filled(&scratch);
    image.write("head -c 20M /dev/urandom >large");
    let stored = Stored::new(store, &image);
    let local = |command: &str, options: &[&str], rest: &[&str]| {
        let mut uvfs = uvfs();
        run(uvfs.arg(command).args(options).arg(image.arg()).args(rest)).ok()
    };
    let tree = |at: &Path| run(&mut describe(at, true)).ok();
    let expected = tree(&image.shown_by_kernel());
    // Another XFS takes whatever this one has.
    let copies = Image::empty(&scratch, "copies").mount("rw");
    const MIB: u64 = 1 << 20;
    for delay in [0, 1, 20] {
        stored.proxy.delay(Duration::from_millis(delay));
        let same = |command, options: &[&str], rest: &[&str], most: u64| {
            let (shown, bytes) = stored.answered(|| stored.run(command, options, rest).ok());
            same(&shown, &local(command, options, rest));
            assert!(bytes < most, "{command} at {delay} ms: {bytes} bytes");
        };
        same("ls", &["-lRa"], &[], 2 * MIB);
        same("ls", &[], &["/many"], MIB);
        same("stat", &[], &["/a/data"], MIB);
        same("cat", &[], &["/a/data"], MIB);
        same("cat", &[], &["/a/sparse"], MIB);
        same("check", &[], &[], 2 * MIB);
        same(
            "check",
            &["--memory", "64M", "--prefetch", "large"],
            &[],
            12 * MIB,
        );
        same("repair", &["-n"], &[], 8 * MIB);
        let little = stored.run("check", &["--memory", "20M"], &[]);
        assert_eq!(little.status.code(), Some(2), "{little}");
        assert!(little.stderr.contains("at least 37M"), "{little}");
        same("check", &["--memory", "37M"], &[], 12 * MIB);
        let copy = copies.join(delay.to_string());
        fs::create_dir(&copy).unwrap();
        let (copied, bytes) = stored
            .answered(|| stored.run("cp", &["-r", "--trusted"], &["/", copy.to_str().unwrap()]));
        assert_eq!(copied.stderr, "");
        crate::fixture::same(&tree(&copy), &expected);
        assert!(bytes < 23 * MIB, "cp at {delay} ms: {bytes} bytes");
    }
    stored.proxy.delay(Duration::ZERO);
    is_measured(&stored);
}

/// `uvfs bench check` measures each strategy with each number of requests, also with a proxy of its own before the store.
fn is_measured(stored: &Stored<'_>) {
    let mut bench = uvfs();
    bench.args(["bench", "check", "--json", "--rounds", "1"]);
    bench.args(["--prefetch", "exact,large", "--requests", "1,8"]);
    bench.args(["--latency-us", "0,1000"]).arg(stored.uri(KEY));
    let (text, bytes) = stored.answered(|| run(&mut bench).ok());
    assert!(bytes > 0, "the store was not asked");
    assert!(!text.contains("secret"), "{text}");
    let report: serde_json::Value = serde_json::from_str(&text).unwrap();
    let names = |list: &str| -> Vec<String> {
        let list = report[list].as_array().unwrap().iter();
        list.map(|one| one["name"].as_str().unwrap().into())
            .collect()
    };
    let targets = ["1-exact", "1-large", "8-exact", "8-large"];
    assert_eq!(names("targets"), targets);
    assert_eq!(names("works"), ["0us", "1000us"]);
}

/// A mount of an image shows what the kernel's does. The store says whether a URI names an image or what is below a
/// prefix, unless the mount says so.
fn an_image_is_mounted(store: &Seaweed) {
    let scratch = Scratch::new();
    let image = Image::filled(&scratch);
    let kernel = image.shown_by_kernel();
    let expected = run(&mut describe(&kernel, false)).ok();
    let stored = Stored::new(store, &image);
    stored.store.put(&format!("{KEY}.d/below"), b"it is below");
    stored.proxy.delay(Duration::from_millis(1));
    let at = scratch.dir("mount");
    for image_word in [false, true] {
        let mut serve = Serve::over(Transport::Dev);
        if image_word {
            serve = serve.option("image");
        }
        let mount = Mount::new(&serve, Path::new(&stored.uri(KEY)), &at);
        same(&mount.run(&mut describe(&at, false)).ok(), &expected);
        let touched = mount.run(&mut shell("echo >> $1/a/hello", &[&at]));
        assert!(touched.stderr.contains("Read-only"), "{touched}");
        mount.unmount().ok();
    }
    let cache = format!("cache_dir={}", scratch.path("cache").display());
    let serve = Serve::over(Transport::Dev).option(&cache);
    for (key, shown) in [
        (format!("{KEY}.d"), "below"),
        ("images/".into(), "a disk.img"),
    ] {
        let mount = Mount::new(&serve, Path::new(&stored.uri(&key)), &at);
        let listed = mount.run(command("ls", ["-1"]).arg(&at)).ok();
        assert!(listed.lines().any(|name| name == shown), "{listed}");
        mount.unmount().ok();
    }
    // A call on a store that stalls ends in its time, and at once if its program is killed.
    for (timeout, killed) in [("timeout=2", false), ("timeout=600", true)] {
        let serve = Serve::over(Transport::Dev).option(timeout);
        let mount = Mount::new(&serve, Path::new(&stored.uri(KEY)), &at);
        let calls = [
            command("cat", [at.join("a/data")]),
            // With the attributes of what is in it: many requests for one call.
            command("ls", [at.join("many")]),
            command("stat", [at.join("many/dir-001")]),
        ];
        let open = fs::File::open(at.join("many")).unwrap();
        stored.proxy.set(Mode::Stall);
        for mut call in calls {
            let mut running = Running::start(&mut call);
            if killed {
                std::thread::sleep(Duration::from_millis(300));
                running.signal(Signal::KILL);
            }
            let ended = running.wait(SOON).expect("an end");
            let failed = ended.stderr.contains("Input/output error");
            assert!(killed || failed, "{ended}");
        }
        stored.proxy.set(Mode::Pass);
        drop(open);
        mount.unmount().ok();
    }
    // A mount shows nothing of another image.
    let serve = Serve::over(Transport::Dev);
    let mount = Mount::new(&serve, Path::new(&stored.uri(KEY)), &at);
    let cat = |name: &str| mount.run(&mut command("cat", [at.join(name)]));
    let mut compare = command("cmp", [&at, &kernel].map(|root| root.join("a/data")));
    mount.run(&mut compare).ok();
    stored.store.put(KEY, &vec![0; 400 << 20]);
    let stale = cat("many/dir-001/file");
    assert!(stale.stderr.contains("Stale file handle"), "{stale}");
    mount.unmount().ok();

    let missing = stored.uri("images/none.img");
    let refused = run(uvfs().args(["mount", "-o", "image", &missing]).arg(&at));
    assert_eq!(refused.status.code(), Some(1), "{refused}");
    assert!(refused.stderr.contains("no such object"), "{refused}");
    assert!(mounted(&at).is_none());
}

/// No call fails while servers are killed and replaced, also while the store does not answer, and what is served stays the version
/// that was mounted. A server that finds another one there ends the mount.
#[test]
fn a_killed_server_of_an_image_in_a_store_is_replaced() {
    if !has(&NEEDS) || !has(&[Need::Program("python3")]) {
        return;
    }
    let scratch = Scratch::new();
    let image = Image::filled(&scratch);
    let fake = Fake::start();
    fake.bucket()
        .put("p/disk.img", &fs::read(&image.path).unwrap());
    let proxy = Proxy::start(fake.address());
    let uri = fake.uri_at(proxy.address());
    let uri = uri.replacen("/p?", "/p/disk.img?", 1);
    let serve = survive::survives().option("timeout=5");
    let at = scratch.dir("mount");
    let mut mount = Mount::new(&serve, Path::new(&uri), &at);
    let describe = || mount.run(&mut describe(&at, false)).ok();
    let before = describe();
    let mut load = survive::load(&mount, Duration::from_secs(12));
    for turn in 0..6 {
        // The last server has begun to serve.
        assert!(!at.join("missing").exists());
        std::thread::sleep(Duration::from_millis(150));
        match turn % 3 {
            2 => drop(run(uvfs().arg("upgrade").arg(&at)).ok()),
            _ => survive::kill(&mount),
        }
    }
    load.wait(LATER).expect("the programs end").ok();
    same(&describe(), &before);

    proxy.set(Mode::Stall);
    survive::kill(&mount);
    let mut cat = Running::start(&mut command("cat", [at.join("a/hello")]));
    // The server has tried in vain by then.
    std::thread::sleep(Duration::from_secs(8));
    proxy.set(Mode::Pass);
    assert_eq!(cat.wait(LATER).expect("an end").ok(), "hello\n");

    fake.bucket().put("p/disk.img", &[0; 1 << 20]);
    survive::kill(&mount);
    mount.expect_gone();
    let outcome = mount.server.wait(LATER).expect("its end");
    assert!(
        outcome.stderr.contains("has changed in the store"),
        "{outcome}"
    );
    assert!(mounted(&at).is_none());
}

/// Servers that are killed one after another, while they wait for the store and do not serve yet, end the mount.
#[test]
fn servers_that_never_come_to_serve_end_the_mount() {
    if !has(&NEEDS) {
        return;
    }
    let scratch = Scratch::new();
    let image = Image::filled(&scratch);
    let fake = Fake::start();
    fake.bucket()
        .put("p/disk.img", &fs::read(&image.path).unwrap());
    let proxy = Proxy::start(fake.address());
    let uri = fake.uri_at(proxy.address());
    let uri = uri.replacen("/p?", "/p/disk.img?", 1);
    let at = scratch.dir("mount");
    let serve = survive::survives().option("timeout=60");
    let mut mount = Mount::new(&serve, Path::new(&uri), &at);
    wait_for("the keeper", || survive::counts(&mount).programs > 0);
    mount.expect_gone();
    proxy.set(Mode::Stall);
    let (began, mut killed) = (Instant::now(), HashSet::new());
    while mount.server.ended().is_none() && began.elapsed() < SOON {
        if let Some(worker) = worker(mount.server.pid())
            && kill_process(worker, Signal::KILL).is_ok()
        {
            killed.insert(worker);
        }
    }
    let outcome = mount.server.wait(SOON).expect("the keeper gives up");
    assert_eq!(outcome.status.code(), Some(1), "{outcome}");
    assert!(outcome.stderr.contains("the mount ends"), "{outcome}");
    // The first one has served.
    assert_eq!(killed.len(), 1 + 100);
    assert!(mounted(&at).is_none());
}

/// An image that is replaced while it is read is an error that says so, and so is one that is missing, or that is to
/// be changed.
fn an_image_that_changes_or_is_missing_is_an_error(store: &Seaweed) {
    let scratch = Scratch::new();
    let image = Image::filled(&scratch);
    image.write(LARGE);
    let stored = Stored::new(store, &image);
    let mut cat = uvfs();
    let mut cat = cat.arg("cat").arg(stored.uri(KEY)).arg("/x");
    cat = cat.stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut reader = cat.spawn().unwrap();
    let mut data = vec![0; 1000];
    let mut out = reader.stdout.take().unwrap();
    out.read_exact(&mut data).unwrap();
    stored.store.put(KEY, &vec![b'a'; 1 << 20]);
    let mut rest = Vec::new();
    out.read_to_end(&mut rest).unwrap();
    assert!(rest.len() < 59 << 20, "{}", rest.len());
    assert!(rest.iter().all(|byte| *byte == b'x'));
    let ended = reader.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&ended.stderr).into_owned();
    assert_eq!(ended.status.code(), Some(1), "{said}");
    assert!(said.contains("has changed in the store"), "{said}");
    assert_eq!(said.lines().count(), 1, "{said}");

    let error = |outcome: Outcome, code, what: &str| {
        assert_eq!(outcome.status.code(), Some(code), "{outcome}");
        assert!(outcome.stderr.contains(what), "{outcome}");
        assert_eq!(outcome.stderr.lines().count(), 1, "{outcome}");
        assert!(!outcome.stderr.contains("secret_access_key"), "{outcome}");
    };
    error(stored.run("ls", &[], &[]), 1, "not an XFS file system");
    error(stored.run("check", &[], &[]), 2, "XFS");
    error(stored.run("repair", &[], &[]), 2, "can't be changed");
    stored.store.remove(KEY);
    error(stored.run("ls", &[], &[]), 1, "no such object");
    error(stored.run("check", &[], &[]), 2, "no such object");
    error(stored.run("repair", &["-n"], &[]), 2, "no such object");
}

/// A store that stops answering ends a command within its time, with one error and no findings.
fn a_stalled_store_ends_a_command_in_time(store: &Seaweed) {
    let scratch = Scratch::new();
    let image = Image::filled(&scratch);
    let stored = Stored::new(store, &image);
    let timeout = ["--timeout", "2"];
    let ends = |mut command: Command, code, stall_after: Option<u64>| {
        let before = stored.proxy.answered();
        stored.proxy.set(Mode::Pass);
        if stall_after.is_none() {
            stored.proxy.set(Mode::Stall);
        }
        let mut running = Running::start(&mut command);
        if let Some(bytes) = stall_after {
            wait_for("some of the image", || {
                stored.proxy.answered() - before > bytes
            });
            stored.proxy.set(Mode::Stall);
        }
        let begun = Instant::now();
        let outcome = running.wait(SOON).expect("an end");
        assert!(begun.elapsed() < Duration::from_secs(20), "{outcome}");
        assert_eq!(outcome.status.code(), Some(code), "{outcome}");
        assert!(outcome.stderr.contains("disk.img"), "{outcome}");
        assert_eq!(outcome.stderr.lines().count(), 1, "{outcome}");
        assert!(!outcome.stdout.contains("clean"), "{outcome}");
    };
    let command = |name: &str, options: &[&str]| {
        let mut command = uvfs();
        command
            .arg(name)
            .args(timeout)
            .args(options)
            .arg(stored.uri(KEY));
        command
    };
    ends(command("ls", &[]), 1, None);
    ends(command("check", &[]), 2, None);
    // So slow that it lasts.
    stored.proxy.delay(Duration::from_millis(300));
    let some = 20_000;
    ends(command("ls", &["-lR"]), 1, Some(some));
    ends(command("check", &["--prefetch", "exact"]), 2, Some(some));
    stored.proxy.set(Mode::Pass);
}
