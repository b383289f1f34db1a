//! Against the real kernel: notifications, interrupts and panics, over both transports.
//!
//! The file system is served by another process (this test program again): a process must not use
//! a mount that it serves. It takes commands on standard input, a line each.

use std::ffi::{CStr, CString};
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rustix::fs::AtFlags;
use rustix::process::{Pid, Signal, kill_process};
use uvfs_server::fs::{
    Attr, Attributes, Context, Entry, Errno, FileType, Handle, IoHow, Mode, Node, OpenFlags,
    OpenHow, Opened, Payload, ROOT, Result, attr,
};
use uvfs_server::interrupt::interrupted;
use uvfs_server::mount::unmount;
use uvfs_server::{FileSystem, Options, Session, Transport, mount};
use uvfs_testing::{Need, has};

const FILE: Node = Node(2);
const PANICS: Node = Node(3);
const SLOW: Node = Node(4);
/// Longer than any test: what changes without a notification stays unseen.
const TTL: Duration = Duration::from_secs(3600);
const DEADLINE: Duration = Duration::from_secs(60);

/// One file under a name that can change, one that panics, one that answers when interrupted.
#[derive(Default)]
struct Stage {
    name: Mutex<CString>,
    content: Mutex<Vec<u8>>,
    reads: AtomicU64,
    waits: AtomicU64,
    interrupted: AtomicU64,
}

impl Stage {
    fn attr(&self, node: Node) -> Attr {
        let (kind, mode, size) = match node {
            ROOT => (FileType::Directory, 0o755, 0),
            FILE => (
                FileType::RegularFile,
                0o644,
                self.content.lock().unwrap().len(),
            ),
            _ => (FileType::RegularFile, 0o644, 4096),
        };
        Attr {
            size: size as u64,
            ..attr(node, kind, Mode::from_raw_mode(mode))
        }
    }
}

impl FileSystem for Stage {
    async fn lookup(&self, _: &Context, _: Node, name: &CStr) -> Result<Entry> {
        let node = if name == c"panics" {
            PANICS
        } else if name == c"slow" {
            SLOW
        } else if name == c"ends" {
            uvfs_io::runtime::spawn(async { panic!("outside a handler") });
            return std::future::pending().await;
        } else if name == self.name.lock().unwrap().as_c_str() {
            FILE
        } else {
            return Err(Errno::NOENT.into());
        };
        Ok(Entry::new(self.attr(node), TTL))
    }

    async fn getattr(&self, _: &Context, node: Node, _: Option<Handle>) -> Result<Attributes> {
        Ok(Attributes::new(self.attr(node), TTL))
    }

    async fn open(&self, _: &Context, node: Node, _: &OpenHow) -> Result<Opened> {
        // Reading ahead for the page cache is not interrupted; a direct read is.
        let flags = if node == SLOW {
            OpenFlags::DIRECT_IO
        } else {
            OpenFlags::KEEP_CACHE
        };
        Ok(Opened::default().with_flags(flags))
    }

    async fn read(&self, _: &Context, node: Node, how: &IoHow, data: &Payload) -> Result<usize> {
        match node {
            PANICS => panic!("a panic that the test wants"),
            SLOW => {
                self.waits.fetch_add(1, Ordering::Relaxed);
                // Resumed by the interruption alone.
                std::future::poll_fn(|_| match interrupted() {
                    true => std::task::Poll::Ready(()),
                    false => std::task::Poll::Pending,
                })
                .await;
                self.interrupted.fetch_add(1, Ordering::Relaxed);
                Err(Errno::INTR.into())
            }
            _ => {
                self.reads.fetch_add(1, Ordering::Relaxed);
                let content = self.content.lock().unwrap();
                let rest = content.get(how.offset as usize..).unwrap_or_default();
                let len = rest.len().min(data.len());
                data.copy_in(0, &rest[..len]);
                Ok(len)
            }
        }
    }
}

/// Does nothing, unless this program is started as the server.
#[test]
fn serves() {
    let Some(at) = std::env::var_os("UVFS_KERNEL_TEST_AT") else {
        return;
    };
    let transport = match std::env::var("UVFS_KERNEL_TEST_TRANSPORT").as_deref() {
        Ok("uring") => Transport::Uring,
        _ => Transport::Dev,
    };
    let mut options = Options::named("stage");
    options.mount.subtype = "uvfs-test".into();
    options.mount.default_permissions = false;
    options.mount.flags = rustix::mount::MountFlags::empty();
    options.server.transport = transport;
    let stage = Stage::default();
    *stage.name.lock().unwrap() = c"file".into();
    let mounted = mount(stage, at, options).unwrap();
    let session = mounted.session().clone();
    let commands = std::thread::spawn(move || obey(&session));
    println!("\nready");
    mounted.wait();
    commands.join().unwrap();
}

fn obey(session: &Arc<Session<Stage>>) {
    let notifier = session.notifier();
    let stage = session.fs();
    let count = |counter: &AtomicU64| Ok(counter.load(Ordering::Relaxed).to_string());
    for line in std::io::stdin().lines() {
        let line = line.unwrap();
        let (command, rest) = line.split_once(' ').unwrap_or((&line, ""));
        let name = CString::new(rest).unwrap();
        let nothing = |()| String::new();
        let result = match command {
            "content" => {
                *stage.content.lock().unwrap() = rest.as_bytes().to_vec();
                Ok(String::new())
            }
            "name" => {
                *stage.name.lock().unwrap() = name;
                Ok(String::new())
            }
            "reads" => count(&stage.reads),
            "waits" => count(&stage.waits),
            "interrupted" => count(&stage.interrupted),
            "grow" => notifier.grow(FILE, rest.parse().unwrap()).map(nothing),
            "inode" => notifier.invalidate_inode(FILE, 0, 0).map(nothing),
            "entry" => notifier.invalidate_entry(ROOT, &name).map(nothing),
            "expire" => notifier.expire_entry(ROOT, &name).map(nothing),
            "deleted" => notifier.deleted(ROOT, FILE, &name).map(nothing),
            "store" => notifier.store(FILE, 0, rest.as_bytes()).map(nothing),
            "retrieve" => notifier.retrieve(FILE, 0, 4096).map(|(at, data)| {
                let data = String::from_utf8_lossy(&data)
                    .trim_end_matches('\0')
                    .to_owned();
                format!("{at} {data}")
            }),
            "resend" => notifier.resend().map(nothing),
            "epoch" => notifier.new_epoch().map(nothing),
            "prune" => notifier.prune(&[FILE]).map(nothing),
            other => panic!("{other}?"),
        };
        match result {
            Ok(text) => println!("ok {text}"),
            Err(error) => println!("error {error}"),
        }
    }
}

/// A mounted stage; goes away when dropped, whatever state it is in.
struct Mounted {
    at: PathBuf,
    server: Child,
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
    _dir: tempfile::TempDir,
}

impl Mounted {
    /// Nothing where this machine can't do it.
    fn over(transport: &str) -> Option<Self> {
        if !has(&[Need::mount_over(transport)]) {
            return None;
        }
        let dir = tempfile::tempdir().unwrap();
        let at = dir.path().join("mount");
        fs::create_dir(&at).unwrap();
        let mut server = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "serves", "--nocapture"])
            .env("UVFS_KERNEL_TEST_AT", &at)
            .env("UVFS_KERNEL_TEST_TRANSPORT", transport)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let input = server.stdin.take();
        let output = BufReader::new(server.stdout.take().unwrap());
        let mut mounted = Self {
            at,
            server,
            input,
            output,
            _dir: dir,
        };
        while mounted.line() != "ready" {}
        // A request that is never answered would hang the test: it fails with the server instead.
        let pid = Pid::from_child(&mounted.server);
        std::thread::spawn(move || {
            std::thread::sleep(DEADLINE);
            let _ = kill_process(pid, Signal::KILL);
        });
        Some(mounted)
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        assert_ne!(
            self.output.read_line(&mut line).unwrap(),
            0,
            "the server ended"
        );
        line.trim_end_matches('\n').to_owned()
    }

    /// Has the server do something; its answer.
    fn tell(&mut self, command: &str) -> String {
        writeln!(self.input.as_mut().unwrap(), "{command}").unwrap();
        self.line()
    }

    /// Asks until the answer is `expected`.
    fn wait_for(&mut self, command: &str, expected: &str) {
        let deadline = Instant::now() + DEADLINE;
        while self.tell(command) != expected {
            assert!(
                Instant::now() < deadline,
                "{command} never gave {expected:?}"
            );
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    fn read(&self, name: &str) -> std::io::Result<String> {
        fs::read_to_string(self.at.join(name))
    }

    fn has_not(&self, name: &str) {
        assert_eq!(
            self.read(name).unwrap_err().raw_os_error(),
            Some(libc::ENOENT),
            "{name}"
        );
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        let _ = unmount(&self.at, true);
        drop(self.input.take());
        let deadline = Instant::now() + Duration::from_secs(20);
        while self.server.try_wait().is_ok_and(|ended| ended.is_none()) {
            if Instant::now() > deadline {
                let _ = self.server.kill();
                let _ = self.server.wait();
                return;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

/// What sendfile(2) reads from an open file's byte `at` on, which does not ask the server for the file's size.
fn sent(file: &fs::File, at: u64) -> String {
    let (from, to) = rustix::pipe::pipe().unwrap();
    let sent = rustix::fs::sendfile(&to, file, Some(&mut { at }), 100).unwrap();
    let mut bytes = vec![0; sent];
    let read = match sent {
        0 => 0,
        _ => rustix::io::read(&from, &mut bytes[..]).unwrap(),
    };
    assert_eq!(read, sent);
    String::from_utf8(bytes).unwrap()
}

fn sizes(transport: &str) {
    let Some(mut stage) = Mounted::over(transport) else {
        return;
    };
    stage.tell("content one");
    let file = fs::File::open(stage.at.join("file")).unwrap();
    assert_eq!(sent(&file, 0), "one");
    stage.tell("content one, and more");
    stage.tell("inode");
    assert_eq!(sent(&file, 3), "");
    assert_eq!(stage.tell("grow 13"), "ok ");
    assert_eq!(sent(&file, 3), ", and more");
    // Nothing was stored: all of it comes from the file system.
    assert_eq!(sent(&file, 0), "one, and more");
    // A size that is too large is corrected by a read, and a smaller one changes nothing.
    assert_eq!(stage.tell("grow 9000"), "ok ");
    assert_eq!(stage.tell("inode"), "ok ");
    assert_eq!(stage.tell("grow 5"), "ok ");
    assert_eq!(stage.tell("grow 0"), "ok ");
    assert_eq!(sent(&file, 3), ", and more");
    assert_eq!(file.metadata().unwrap().len(), 13);
    // Pages that the kernel has stay as they are.
    stage.tell("content ONE, AND MORE");
    assert_eq!(stage.tell("grow 13"), "ok ");
    assert_eq!(sent(&file, 0), "one, and more");
}

/// The kernel is told that a file has grown.
#[test]
fn sizes_over_dev() {
    sizes("dev");
}

#[test]
fn sizes_over_uring() {
    sizes("uring");
}

/// A file system without `access` does not say that a file without an execute bit can be executed.
#[test]
fn access_agrees_with_execution() {
    use rustix::fs::{Access, CWD, accessat};
    let Some(stage) = Mounted::over("dev") else {
        return;
    };
    let may = |access| accessat(CWD, stage.at.join("file"), access, AtFlags::empty());
    assert_eq!(may(Access::EXEC_OK), Err(Errno::ACCESS));
    assert_eq!(may(Access::READ_OK | Access::WRITE_OK), Ok(()));
    let run = Command::new(stage.at.join("file")).status().unwrap_err();
    assert_eq!(run.raw_os_error(), Some(libc::EACCES));
    let root = accessat(CWD, &stage.at, Access::EXEC_OK, AtFlags::empty());
    assert_eq!(root, Ok(()));
}

fn notifications(transport: &str) {
    let Some(mut stage) = Mounted::over(transport) else {
        return;
    };
    assert_eq!(stage.tell("content one"), "ok ");
    assert_eq!(stage.read("file").unwrap(), "one");

    // Unseen until the kernel is told.
    stage.tell("content two");
    assert_eq!(stage.read("file").unwrap(), "one");
    assert_eq!(stage.tell("inode"), "ok ");
    assert_eq!(stage.read("file").unwrap(), "two");

    // The kernel's cached pages can be read, and filled.
    assert_eq!(stage.tell("retrieve"), "ok 0 two");
    stage.tell("content six");
    assert_eq!(stage.tell("store six"), "ok ");
    let reads = stage.tell("reads");
    assert_eq!(stage.read("file").unwrap(), "six");
    assert_eq!(
        stage.tell("reads"),
        reads,
        "it was read from the server after all"
    );

    // Names.
    stage.tell("name other");
    assert!(stage.read("file").is_ok());
    assert_eq!(stage.tell("entry file"), "ok ");
    stage.has_not("file");
    assert_eq!(stage.read("other").unwrap(), "six");
    stage.tell("name third");
    assert_eq!(stage.tell("expire other"), "ok ");
    stage.has_not("other");
    assert_eq!(stage.read("third").unwrap(), "six");
    stage.tell("name fourth");
    assert_eq!(stage.tell("deleted third"), "ok ");
    stage.has_not("third");

    // Not known to the kernel: nothing to do, and no error.
    assert_eq!(stage.tell("entry nothing"), "ok ");
    assert_eq!(stage.read("fourth").unwrap(), "six");
    // Newer kernels' ones: done, or refused by name.
    for command in ["resend", "epoch", "prune"] {
        let answer = stage.tell(command);
        assert!(
            answer.starts_with("ok") || answer.contains("Invalid argument"),
            "{answer}"
        );
    }
    assert_eq!(stage.read("fourth").unwrap(), "six");
}

fn bad_handlers(transport: &str) {
    let Some(mut stage) = Mounted::over(transport) else {
        return;
    };
    stage.tell("content fine");
    let error = stage.read("panics").unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::EIO));
    assert_eq!(
        stage.read("file").unwrap(),
        "fine",
        "one panic ended the mount"
    );

    // The handler of a caller that is interrupted is told, and others are served meanwhile.
    let before = stage.tell("waits");
    let mut slow = Command::new("cat")
        .arg(stage.at.join("slow"))
        .spawn()
        .unwrap();
    let deadline = Instant::now() + DEADLINE;
    while stage.tell("waits") == before {
        assert!(Instant::now() < deadline, "the read never came");
    }
    assert_eq!(
        stage.read("file").unwrap(),
        "fine",
        "one waiting caller holds up others"
    );
    // A background job of a shell, and so this test, may ignore SIGINT.
    kill_process(Pid::from_child(&slow), Signal::TERM).unwrap();
    assert!(!slow.wait().unwrap().success());
    let waits = stage.tell("waits");
    stage.wait_for("interrupted", &waits);
    assert_eq!(stage.read("file").unwrap(), "fine");
}

/// The kernel's cache follows each notification.
#[test]
fn notifications_over_dev() {
    notifications("dev");
}

/// The same over io_uring.
#[test]
fn notifications_over_uring() {
    notifications("uring");
}

/// A handler that panics costs its one request, and one that waits holds up no other and is interrupted.
#[test]
fn bad_handlers_over_dev() {
    bad_handlers("dev");
}

/// The same over io_uring.
#[test]
fn bad_handlers_over_uring() {
    bad_handlers("uring");
}

/// The process ends, so that no caller waits for ever for the thread that panicked.
fn panics_outside_handlers(transport: &str) {
    let Some(mut stage) = Mounted::over(transport) else {
        return;
    };
    let error = stage.read("ends").unwrap_err();
    let gone = [libc::ENOTCONN, libc::ECONNABORTED];
    assert!(gone.contains(&error.raw_os_error().unwrap()), "{error}");
    let ended = stage.server.wait().unwrap();
    assert_eq!(ended.signal(), Some(libc::SIGABRT), "{ended}");
}

/// A panic outside of handlers ends the process, and the requests of the mount fail.
#[test]
fn panics_outside_handlers_over_dev() {
    panics_outside_handlers("dev");
}

/// The same over io_uring.
#[test]
fn panics_outside_handlers_over_uring() {
    panics_outside_handlers("uring");
}
