//! How a server of the library ends: by signals, from other threads, and from its own handlers, and what is left of
//! its mount. The file system is served by another process, this test program again.

use std::ffi::CStr;
use std::fs::{self, File};
use std::io::{BufRead, BufReader, Read};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use uvfs_server::fs::*;
use uvfs_server::mount::mounted;
use uvfs_server::{FileSystem, OnSignal, Options, Unmounter, mount};
use uvfs_testing::{Need, has};

const DEADLINE: Duration = Duration::from_secs(60);

/// An empty directory in which a lookup of `end` ends the mount.
#[derive(Clone, Default)]
struct Ends {
    unmounter: Arc<OnceLock<Unmounter>>,
}

impl FileSystem for Ends {
    async fn getattr(&self, _: &Context, node: Node, _: Option<Handle>) -> Result<Attributes> {
        let attr = attr(node, FileType::Directory, 0o755);
        Ok(Attributes::new(attr, Duration::from_secs(1)))
    }

    async fn lookup(&self, _: &Context, _: Node, name: &CStr) -> Result<Entry> {
        if name == c"end" {
            let unmounter = self.unmounter.get().unwrap();
            // To wait for it would be to wait for this request.
            let refused = unmounter.unmount().unwrap_err();
            assert_eq!(refused.raw_os_error(), Some(libc::EDEADLK));
            unmounter.end();
        }
        Err(Errno::NOENT.into())
    }

    fn destroy(&self) {
        println!("destroyed");
    }
}

/// Does nothing, unless this program is started as the server.
#[test]
fn serves() {
    let Some(at) = std::env::var_os("UVFS_ENDS_TEST_AT") else {
        return;
    };
    let scene = std::env::var("UVFS_ENDS_TEST_SCENE").unwrap();
    let own = scene == "handler before";
    if own {
        handle();
    }
    let mut options = Options::named("ends");
    options.mount.auto_unmount = scene == "guarded";
    if matches!(&*scene, "nothing" | "guarded") {
        options.on_signal = OnSignal::Nothing;
    }
    let fs = Ends::default();
    let mounted = mount(fs.clone(), at, options).unwrap();
    fs.unmounter.set(mounted.unmounter()).unwrap();
    if scene == "handler later" {
        handle();
    }
    println!("\nready");
    match &*scene {
        "waits" => mounted.wait(),
        "threads" => std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| mounted.wait());
            }
            for _ in 0..3 {
                let unmounter = mounted.unmounter();
                scope.spawn(move || unmounter.unmount().unwrap());
                scope.spawn(|| mounted.unmount().unwrap());
            }
        }),
        "drops" => drop(mounted),
        _ if scene.starts_with("handler") => {
            while !HANDLED.load(Ordering::Relaxed) {
                std::thread::sleep(Duration::from_millis(5));
            }
            println!("handled");
            // With a handler that came later the mount may have ended already, which is no error.
            mounted.unmount().unwrap();
            mounted.wait();
        }
        _ => std::thread::sleep(DEADLINE),
    }
    println!("went on");
}

static HANDLED: AtomicBool = AtomicBool::new(false);

/// Installs a handler, as a program would that knows nothing of mounts.
fn handle() {
    extern "C" fn note(_: i32) {
        HANDLED.store(true, Ordering::Relaxed);
    }
    // SAFETY: the handler only stores to an atomic variable.
    unsafe {
        libc::signal(
            libc::SIGTERM,
            note as extern "C" fn(i32) as libc::sighandler_t,
        )
    };
}

struct Server {
    at: PathBuf,
    process: Child,
    output: BufReader<ChildStdout>,
    _dir: tempfile::TempDir,
}

impl Server {
    fn new(scene: &str) -> Option<Self> {
        if !has(&[Need::Fuse]) {
            return None;
        }
        let dir = tempfile::tempdir().unwrap();
        let at = dir.path().canonicalize().unwrap().join("mount");
        fs::create_dir(&at).unwrap();
        let mut command = Command::new(std::env::current_exe().unwrap());
        command
            .args(["--exact", "serves", "--nocapture"])
            .env("UVFS_ENDS_TEST_AT", &at)
            .env("UVFS_ENDS_TEST_SCENE", scene)
            .stdout(Stdio::piped());
        // SAFETY: signal is allowed between fork and exec. A background job of a shell ignores SIGINT, which would be
        // left alone.
        unsafe {
            command.pre_exec(|| {
                libc::signal(libc::SIGINT, libc::SIG_DFL);
                Ok(())
            })
        };
        let mut process = command.spawn().unwrap();
        let output = BufReader::new(process.stdout.take().unwrap());
        let mut server = Self {
            at,
            process,
            output,
            _dir: dir,
        };
        let mut line = String::new();
        while line.trim_end() != "ready" {
            line.clear();
            assert!(server.output.read_line(&mut line).unwrap() > 0, "no mount");
        }
        Some(server)
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.process), signal).unwrap();
    }

    /// How it ended, and what it had said. The mount is to be gone.
    fn end(mut self) -> (ExitStatus, String) {
        let deadline = Instant::now() + DEADLINE;
        let status = loop {
            match self.process.try_wait().unwrap() {
                Some(status) => break status,
                None => assert!(Instant::now() < deadline, "it does not end"),
            }
            std::thread::sleep(Duration::from_millis(5));
        };
        let mut said = String::new();
        self.output.read_to_string(&mut said).unwrap();
        (status, said)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = uvfs_server::mount::unmount(&self.at, true);
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn is_mounted(at: &Path) -> bool {
    mounted(at).unwrap().is_some()
}

/// A signal unmounts, `destroy` is called, and the program goes on after `wait`.
#[test]
fn signals_end_a_mount_that_is_waited_for() {
    for signal in [Signal::TERM, Signal::INT, Signal::HUP] {
        let Some(server) = Server::new("waits") else {
            return;
        };
        let at = server.at.clone();
        server.signal(signal);
        let (status, said) = server.end();
        assert!(status.success(), "{signal:?}: {status}");
        assert!(said.contains("destroyed\nwent on\n"), "{signal:?}: {said}");
        assert!(!is_mounted(&at), "{signal:?}");
    }
}

/// A program that does not wait is unmounted and destroyed, and then ends by the signal.
#[test]
fn a_program_that_does_not_wait_ends_by_the_signal() {
    let Some(server) = Server::new("sleeps") else {
        return;
    };
    let at = server.at.clone();
    server.signal(Signal::TERM);
    let (status, said) = server.end();
    assert_eq!(status.signal(), Some(libc::SIGTERM), "{status}");
    assert!(said.contains("destroyed") && !is_mounted(&at), "{said}");
}

/// A program that has a file open when the signal comes is served until it closes it.
#[test]
fn those_who_use_it_are_served_to_their_end() {
    let Some(server) = Server::new("waits") else {
        return;
    };
    let at = server.at.clone();
    let user = File::open(&at).unwrap();
    server.signal(Signal::TERM);
    let deadline = Instant::now() + DEADLINE;
    while is_mounted(&at) {
        assert!(Instant::now() < deadline, "still there");
        std::thread::sleep(Duration::from_millis(5));
    }
    let gone = rustix::fs::openat(&user, "nothing", OFlags::RDONLY, Mode::empty());
    assert_eq!(gone.unwrap_err(), Errno::NOENT, "it is served");
    drop(user);
    let (status, said) = server.end();
    assert!(
        status.success() && said.contains("destroyed"),
        "{status} {said}"
    );
}

/// A handler that the program installed, before or after the mount, is called, and the process goes on.
#[test]
fn handlers_of_the_program_stay() {
    for scene in ["handler before", "handler later"] {
        let Some(server) = Server::new(scene) else {
            return;
        };
        server.signal(Signal::TERM);
        let (status, said) = server.end();
        assert!(status.success(), "{scene}: {status}");
        assert!(
            said.contains("handled\ndestroyed\nwent on\n"),
            "{scene}: {said}"
        );
    }
}

/// With `OnSignal::Nothing` a signal ends the process and leaves the mount, unless it has `auto_unmount`.
#[test]
fn an_author_may_leave_signals_alone() {
    for scene in ["nothing", "guarded"] {
        let Some(server) = Server::new(scene) else {
            return;
        };
        let at = server.at.clone();
        server.signal(Signal::TERM);
        let mut server = server;
        let status = server.process.wait().unwrap();
        assert_eq!(status.signal(), Some(libc::SIGTERM), "{status}");
        if scene == "nothing" {
            assert!(is_mounted(&at), "left behind");
            continue;
        }
        let deadline = Instant::now() + DEADLINE;
        while is_mounted(&at) {
            assert!(Instant::now() < deadline, "auto_unmount has left it behind");
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

/// Any thread may wait for a mount, and any thread or handler, or dropping it, ends it.
#[test]
fn a_mount_is_ended_from_anywhere() {
    for scene in ["threads", "drops"] {
        let Some(server) = Server::new(scene) else {
            return;
        };
        let at = server.at.clone();
        let (status, said) = server.end();
        assert!(status.success(), "{scene}: {status}");
        assert!(said.contains("destroyed\nwent on\n"), "{scene}: {said}");
        assert!(!is_mounted(&at), "{scene}");
    }
    let Some(server) = Server::new("waits") else {
        return;
    };
    let at = server.at.clone();
    let error = File::open(at.join("end")).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::ENOENT), "it is answered");
    let (status, said) = server.end();
    assert!(
        status.success() && said.contains("destroyed\nwent on\n"),
        "{status} {said}"
    );
}
