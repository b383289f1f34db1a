//! Stores that stall, refuse, break off or lie: an error in time that says what failed, and never wrong data.

use std::fmt::Debug;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Mutex, Once};
use std::time::{Duration, Instant};

use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};
use uvfs_object::{ObjectFs, Options};
use uvfs_testing::{Need, has};

use crate::fake::Fake;
use crate::proxy::{Mode, Proxy};
use crate::stores::At;
use crate::{MIB, bytes, serve};

/// What the mounts of this process have logged.
static LOG: Mutex<String> = Mutex::new(String::new());

struct Log;

struct Line<'a>(&'a mut String);

impl Visit for Line<'_> {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        self.0.push_str(&format!("{}={value:?} ", field.name()));
    }
}

impl Subscriber for Log {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() <= Level::WARN
    }

    fn event(&self, event: &Event<'_>) {
        let mut log = LOG.lock().unwrap();
        event.record(&mut Line(&mut log));
        log.push('\n');
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
}

/// Begins to collect what mounts log.
pub fn logs() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| tracing::subscriber::set_global_default(Log).unwrap());
}

/// Whether a mount has logged such a line.
pub fn logged(what: &str) -> bool {
    LOG.lock().unwrap().contains(what)
}

/// A path that leads to the open file itself, without a lookup of its name.
fn itself(file: &OwnedFd) -> PathBuf {
    format!("/proc/self/fd/{}", file.as_raw_fd()).into()
}

fn handle(path: &Path) -> OwnedFd {
    let file = OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_PATH)
        .open(path);
    file.unwrap().into()
}

/// Every call that asks the store ends within the deadline, and the log names the object.
#[test]
fn a_stall_is_an_error_in_time() {
    if !has(&[Need::Fuse]) {
        return;
    }
    logs();
    let fake = Fake::start();
    let content = bytes(3 * MIB, 6);
    for name in ["opened", "looked-at", "to-open", "listed/file"] {
        fake.bucket().put(&format!("p/{name}"), &content);
    }
    let proxy = Proxy::start(fake.address());
    let served = serve(&fake.uri_at(proxy.address()), |options| {
        options.timeout = Duration::from_secs(1);
    });
    let opened = File::open(served.at("opened")).unwrap();
    let [looked, to_open, listed] =
        ["looked-at", "to-open", "listed"].map(|name| handle(&served.at(name)));
    // The kernel asks again.
    std::thread::sleep(Duration::from_millis(1100));
    proxy.set(Mode::Stall);
    let read = || opened.read_at(&mut [0; 4096], 0).map(drop);
    let lookup = || fs::metadata(served.at("unknown")).map(drop);
    let getattr = || fs::metadata(itself(&looked)).map(drop);
    let open = || File::open(itself(&to_open)).map(drop);
    let readdir = || fs::read_dir(itself(&listed))?.try_for_each(|entry| entry.map(drop));
    let calls: [(&str, &(dyn Fn() -> io::Result<()> + Sync)); 5] = [
        ("\"opened\"", &read),
        ("\"unknown", &lookup),
        ("\"looked-at\"", &getattr),
        ("\"to-open\"", &open),
        ("\"listed/\"", &readdir),
    ];
    let begun = Instant::now();
    std::thread::scope(|scope| {
        for (name, call) in calls {
            scope.spawn(move || {
                let error = call().unwrap_err();
                assert_eq!(error.raw_os_error(), Some(libc::EIO), "{name}: {error}");
                let took = begun.elapsed();
                assert!(took < Duration::from_secs(10), "{name}: {took:?}");
            });
        }
        // It asks no store.
        let mut statfs = Command::new("stat");
        statfs
            .args(["-f", "--format=%T"])
            .arg(served.mounted.path());
        assert!(statfs.output().unwrap().status.success());
    });
    let log = LOG.lock().unwrap().clone();
    for (name, _) in calls {
        let named = log
            .lines()
            .any(|line| line.contains(name) && line.contains("no answer"));
        assert!(named, "{name} is not in {log}");
    }
    // And all is well when the store is.
    proxy.set(Mode::Pass);
    assert!(fs::read(served.at("to-open")).unwrap() == content);
    let mut data = vec![0; MIB];
    opened.read_exact_at(&mut data, MIB as u64).unwrap();
    assert!(data == content[MIB..2 * MIB]);
}

/// A program that waits for a stalled store dies of a signal long before the deadline, whatever it waits in.
#[test]
fn a_program_that_waits_can_be_killed() {
    if !has(&[Need::Fuse]) {
        return;
    }
    let fake = Fake::start();
    fake.bucket().put("p/dir/file", &bytes(3 * MIB, 7));
    let proxy = Proxy::start(fake.address());
    let served = serve(&fake.uri_at(proxy.address()), |options| {
        options.ttl = Duration::from_secs(600);
        options.timeout = Duration::from_secs(8);
    });
    fs::metadata(served.at("dir/file")).unwrap();
    proxy.set(Mode::Stall);
    let mut waiting = Vec::new();
    for signal in ["KILL", "TERM", "INT"] {
        // The lookups of one name follow one another.
        for (program, name) in [("cat", "dir/file"), ("ls", "dir"), ("stat", "dir/other")] {
            // A shell's background job ignores SIGINT.
            let mut command = Command::new("env");
            command
                .args(["--default-signal=INT,TERM", program])
                .arg(served.at(name));
            let child = command
                .stdout(Stdio::null())
                .stderr(Stdio::null())
                .spawn()
                .unwrap();
            waiting.push((signal, program, child));
        }
    }
    std::thread::sleep(Duration::from_millis(500));
    let begun = Instant::now();
    for (signal, program, child) in &mut waiting {
        assert!(child.try_wait().unwrap().is_none(), "{program} waits");
        let mut kill = Command::new("kill");
        kill.arg(format!("-{signal}")).arg(child.id().to_string());
        assert!(kill.status().unwrap().success());
    }
    for (signal, program, child) in &mut waiting {
        child.wait().unwrap();
        let took = begun.elapsed();
        assert!(
            took < Duration::from_secs(5),
            "{program} by {signal}: {took:?}"
        );
    }
    proxy.set(Mode::Pass);
    assert_eq!(fs::read(served.at("dir/file")).unwrap().len(), 3 * MIB);
}

/// What the store refuses for good is said in one line before there is a mount.
#[test]
fn a_store_that_refuses_is_not_mounted() {
    let fake = Fake::start();
    for (status, code) in [
        (404, "NoSuchBucket"),
        (403, "AccessDenied"),
        (403, "InvalidAccessKeyId"),
        (403, "SignatureDoesNotMatch"),
        (301, "PermanentRedirect"),
    ] {
        fake.bucket().refuses = Some((status, code, u32::MAX));
        let scratch = tempfile::tempdir().unwrap();
        let mut options = Options::default();
        options.ttl = Duration::ZERO;
        options.cache_dir = Some(scratch.path().to_owned());
        options.timeout = Duration::from_secs(1);
        let error = ObjectFs::open(&fake.uri(), options)
            .err()
            .expect("it refuses");
        let text = error.to_string();
        assert!(text.contains(code), "{code}: {text}");
        assert!(!text.contains('\n') && text.len() < 300, "{text}");
    }
}

/// A store that is busy is asked again, and one that stays so, or takes the rights away, is an error.
#[test]
fn errors_of_a_mounted_store() {
    if !has(&[Need::Fuse]) {
        return;
    }
    let fake = Fake::start();
    let content = bytes(100_000, 8);
    fake.bucket().put("p/file", &content);
    let served = serve(&fake.uri(), |options| {
        options.timeout = Duration::from_secs(5)
    });
    for (n, (status, code)) in [
        (500, "InternalError"),
        (503, "SlowDown"),
        (503, "ServiceUnavailable"),
        (429, "TooManyRequests"),
    ]
    .into_iter()
    .enumerate()
    {
        fake.bucket().refuses = Some((status, code, 2));
        fake.bucket().put(&format!("p/{n}"), &content);
        assert!(
            fs::read(served.at(&n.to_string())).unwrap() == content,
            "{code}"
        );
    }
    for (status, code, errno) in [
        (403, "ExpiredToken", libc::EACCES),
        (403, "AccessDenied", libc::EACCES),
        (400, "ExpiredToken", libc::EIO),
    ] {
        fake.bucket().refuses = Some((status, code, u32::MAX));
        for error in [
            fs::metadata(served.at("other")).unwrap_err(),
            fs::read_dir(served.mounted.path())
                .unwrap()
                .next()
                .unwrap()
                .unwrap_err(),
        ] {
            assert_eq!(
                error.raw_os_error(),
                Some(errno),
                "{status} {code}: {error}"
            );
        }
    }
    // A mount outlives it.
    fake.bucket().refuses = None;
    assert!(fs::read(served.at("file")).unwrap() == content);
}

/// Data of another version than the one that was opened is never read.
#[test]
fn a_store_that_lies_is_not_believed() {
    if !has(&[Need::Fuse]) {
        return;
    }
    let fake = Fake::start();
    for size in [10, 3 * MIB] {
        fake.bucket().put("p/file", &vec![b'1'; size]);
        let served = serve(&fake.uri(), |_| {});
        let mut file = File::open(served.at("file")).unwrap();
        // It ignores the condition, and its answers are of another version.
        let mut bucket = fake.bucket();
        let object = bucket.objects.get_mut("p/file").unwrap();
        object.lies = true;
        object.contents.fill(b'2');
        drop(bucket);
        let mut data = Vec::new();
        let error = file.read_to_end(&mut data).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::ESTALE), "{error}");
        assert!(data.is_empty(), "{data:?}");
        // Shorter than it says.
        fake.bucket().put("p/short", &vec![b'1'; size]);
        let mut file = File::open(served.at("short")).unwrap();
        fake.bucket()
            .objects
            .get_mut("p/short")
            .unwrap()
            .contents
            .truncate(size / 2);
        let error = file.read_to_end(&mut data).unwrap_err();
        let errnos = [Some(libc::EIO), Some(libc::ESTALE)];
        assert!(errnos.contains(&error.raw_os_error()), "{error}");
        assert!(data.iter().all(|byte| *byte == b'1'), "{data:?}");
    }
}

/// No object can have these names: they are missing, as they would be from any directory.
#[test]
fn names_that_no_object_can_have() {
    if !has(&[Need::Fuse]) {
        return;
    }
    let fake = Fake::start();
    fake.bucket().put("p/file", b"1");
    let served = serve(&fake.uri(), |_| {});
    let at = |name: &[u8]| {
        served
            .mounted
            .path()
            .join(std::ffi::OsStr::from_bytes(name))
    };
    for (name, errno) in [
        (&b"\xff\xfe"[..], libc::ENOENT),
        (b"file ", libc::ENOENT),
        (b"file/", libc::ENOTDIR),
        (b"file/below", libc::ENOTDIR),
        (&[b'n'; 256], libc::ENAMETOOLONG),
    ] {
        let error = fs::metadata(at(name)).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(errno), "{name:?}");
    }
    // A key has 1024 bytes, which a path can exceed.
    let deep = [
        "k".repeat(255),
        "k".repeat(255),
        "k".repeat(255),
        "k".repeat(250),
    ]
    .join("/");
    fake.bucket().put(&format!("p/{deep}/x"), b"deep");
    assert_eq!(fs::read(at(deep.as_bytes()).join("x")).unwrap(), b"deep");
    let error = fs::metadata(at(deep.as_bytes()).join("longer")).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::ENAMETOOLONG));
}
