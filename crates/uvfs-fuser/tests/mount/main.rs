//! File systems written for fuser on real mounts. Needs root and /dev/fuse; without them the tests say so
//! and are skipped, in CI they fail.
//!
//! The server is another process, because a process that uses its own mount can hang for good.

mod stage;

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, SystemTime};

use uvfs_fuser::*;
use uvfs_testing::{Need, has};

use stage::{MANY, NAMES, Stage, TEXT};

/// Does nothing, unless this program is started as the server.
#[test]
fn serves() {
    let Some(at) = std::env::var_os("UVFS_FUSER_TEST_AT") else {
        return;
    };
    let mut config = Config::default();
    config.n_threads = std::env::var("UVFS_FUSER_TEST_THREADS")
        .ok()
        .map(|threads| threads.parse().unwrap());
    let stage = Stage::default();
    stage.with(|state| state.text = "before\n".into());
    if std::env::var_os("UVFS_FUSER_TEST_WAITS").is_some() {
        let session = Session::new(stage, at, &config).unwrap();
        println!("\nready");
        session.run().unwrap();
        println!("\njoined");
        return;
    }
    let session = spawn_mount(stage.clone(), at, &config).unwrap();
    let notifier = session.notifier();
    println!("\nready");
    for line in io::stdin().lines() {
        match line.unwrap().as_str() {
            "change" => {
                stage.with(|state| state.text = "after, and longer\n".into());
                notifier.inval_inode(INodeNo(TEXT), 0, 0).unwrap();
            }
            "store" => notifier.store(INodeNo(TEXT), 0, b"STORE").unwrap(),
            "forget names" => {
                for name in NAMES {
                    notifier
                        .inval_entry(INodeNo::ROOT, OsStr::new(name))
                        .unwrap();
                }
            }
            "wake" => {
                let waiting = stage.with(|state| {
                    state.ready = true;
                    state.waiting.take()
                });
                waiting.expect("a program polls").notify().unwrap();
            }
            "end" => break,
            other => panic!("{other:?} is no command"),
        }
        println!("\ndone");
    }
    session.umount_and_join().unwrap();
    println!("\njoined");
}

struct Mounted {
    server: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
    at: PathBuf,
    _dir: tempfile::TempDir,
}

impl Mounted {
    fn with_threads(threads: usize) -> Option<Self> {
        has(&[Need::Fuse]).then(|| Self::new(threads, false))
    }

    /// Served by a program that does nothing else, or by one that obeys.
    fn new(threads: usize, waits: bool) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let at = dir.path().join("mount");
        fs::create_dir(&at).unwrap();
        let mut command = Command::new(std::env::current_exe().unwrap());
        if waits {
            command.env("UVFS_FUSER_TEST_WAITS", "");
        }
        let mut server = command
            .args(["serves", "--exact", "--nocapture"])
            .env("UVFS_FUSER_TEST_AT", &at)
            .env("UVFS_FUSER_TEST_THREADS", threads.to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut mounted = Self {
            input: server.stdin.take().unwrap(),
            output: BufReader::new(server.stdout.take().unwrap()),
            server,
            at,
            _dir: dir,
        };
        mounted.expect("ready");
        mounted
    }

    fn expect(&mut self, word: &str) {
        let mut line = String::new();
        while line.trim_end() != word {
            line.clear();
            let read = self.output.read_line(&mut line).unwrap();
            assert!(read > 0, "the server ended before it said {word:?}");
        }
    }

    fn tell(&mut self, command: &str) {
        writeln!(self.input, "{command}").unwrap();
        self.expect("done");
    }

    fn text(&self, name: &str) -> String {
        fs::read_to_string(self.at.join(name)).unwrap()
    }

    fn errno(&self, name: &str) -> Option<i32> {
        fs::read(self.at.join(name)).unwrap_err().raw_os_error()
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        let _ = rustix::mount::unmount(&self.at, rustix::mount::UnmountFlags::DETACH);
        let _ = self.server.kill();
        let _ = self.server.wait();
    }
}

/// A caller gets the answer of another thread, and EIO from a handler that panics or never answers.
#[test]
fn replies_come_at_once_later_or_never() {
    let Some(mounted) = Mounted::with_threads(1) else {
        return;
    };
    assert_eq!(mounted.text("text"), "before\n");
    assert_eq!(mounted.text("late"), "here\n");
    assert_eq!(mounted.errno("dropped"), Some(libc::EIO));
    assert_eq!(mounted.errno("panics"), Some(libc::EIO));
    assert_eq!(mounted.text("late"), "here\n", "after a panic");
    assert_eq!(mounted.errno("nothing"), Some(libc::ENOENT));
    let made = File::create_new(mounted.at.join("new"));
    let refused = made.unwrap_err().raw_os_error();
    assert_eq!(refused, Some(libc::ENOSYS), "nothing makes files");
    let time = fs::metadata(mounted.at.join("text")).unwrap().modified();
    let before = SystemTime::UNIX_EPOCH - Duration::from_millis(1500);
    assert_eq!(time.unwrap(), before);
}

/// A listing in pieces has each name once.
#[test]
fn a_long_listing_has_every_name_once() {
    let Some(mounted) = Mounted::with_threads(2) else {
        return;
    };
    for round in 0..2 {
        let mut names = Vec::new();
        for entry in fs::read_dir(mounted.at.join("many")).unwrap() {
            names.push(entry.unwrap().file_name().into_string().unwrap());
        }
        names.sort();
        let mut all: Vec<_> = (0..MANY).map(|at| format!("name-{at}")).collect();
        all.sort();
        assert_eq!(names, all, "round {round}");
    }
}

/// A handler gets the arguments that fuser gives it.
#[test]
fn what_a_handler_is_told() {
    let Some(mounted) = Mounted::with_threads(1) else {
        return;
    };
    let late = mounted.at.join("late");
    let mut file = File::options().write(true).open(&late).unwrap();
    file.write_all(b"hello").unwrap();
    rustix::fs::flock(&file, rustix::fs::FlockOperation::LockExclusive).unwrap();
    rustix::fs::fchmod(&file, 0o2640.into()).unwrap();
    drop(file);
    let file = File::open(&late).unwrap();
    let mut value = [0u8; 64];
    let refused = rustix::fs::fgetxattr(&file, "user.abc", &mut value[..4]);
    assert_eq!(refused, Err(rustix::io::Errno::RANGE));
    let len = rustix::fs::fgetxattr(&file, "user.abc", &mut value);
    assert_eq!(len, Ok(8));
    assert_eq!(&value[..8], b"user.abc");
    drop(file);
    // RELEASE comes some time after close(2).
    let mut said = String::new();
    for _ in 0..500 {
        said = mounted.text("said");
        if said.contains("release 3 O_RDONLY") {
            break;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    assert!(said.contains("write 3 0 hello O_WRONLY"), "{said}");
    // With the type, as fuser has it.
    assert!(said.contains("setattr 3 102640"), "{said}");
    assert!(said.contains("release 3 O_WRONLY None false"), "{said}");
    assert!(said.contains("release 3 O_RDONLY None false"), "{said}");
}

/// The kernel's cache follows each notification.
#[test]
fn the_kernel_drops_what_it_is_told_to() {
    let Some(mut mounted) = Mounted::with_threads(1) else {
        return;
    };
    assert_eq!(mounted.text("text"), "before\n");
    mounted.tell("change");
    assert_eq!(mounted.text("text"), "after, and longer\n");
    mounted.tell("store");
    assert_eq!(mounted.text("text"), "STORE, and longer\n");
    mounted.tell("forget names");
    assert_eq!(mounted.text("late"), "here\n");
}

/// A notification wakes a program that sleeps in poll(2).
#[test]
fn a_poll_is_told_when_there_is_something() {
    let Some(mut mounted) = Mounted::with_threads(1) else {
        return;
    };
    let file = File::open(mounted.at.join("text")).unwrap();
    let (sender, woken) = std::sync::mpsc::channel();
    let poll = move |time: Option<&rustix::event::Timespec>| {
        use rustix::event::{PollFd, PollFlags};
        let mut files = [PollFd::from_borrowed_fd(file.as_fd(), PollFlags::IN)];
        rustix::event::poll(&mut files, time).unwrap()
    };
    assert_eq!(poll(Some(&rustix::event::Timespec::default())), 0);
    std::thread::spawn(move || sender.send(poll(None)));
    let early = woken.recv_timeout(Duration::from_millis(100));
    assert!(early.is_err(), "nothing is ready yet");
    mounted.tell("wake");
    let ready = woken.recv_timeout(Duration::from_secs(20));
    assert_eq!(ready, Ok(1));
}

/// The most handlers that ran at once, of five callers.
fn most_at_once(threads: usize) -> Option<usize> {
    let mounted = Mounted::with_threads(threads)?;
    std::thread::scope(|scope| {
        for _ in 0..5 {
            scope.spawn(|| {
                let mut text = String::new();
                let mut file = File::open(mounted.at.join("meet")).unwrap();
                file.read_to_string(&mut text).unwrap();
            });
        }
    });
    Some(mounted.text("meet").parse().unwrap())
}

/// With one thread one handler runs at a time.
#[test]
fn one_thread_means_one_handler_at_a_time() {
    if let Some(most) = most_at_once(1) {
        assert_eq!(most, 1);
    }
}

/// With many threads handlers run side by side.
#[test]
fn many_threads_run_handlers_side_by_side() {
    let cores = std::thread::available_parallelism().unwrap().get();
    if let Some(most) = most_at_once(cores + 4) {
        assert!(most >= 4, "{most}");
    }
}

/// The end of a session calls `destroy` and unmounts.
#[test]
fn the_end_destroys_the_file_system() {
    let Some(mut mounted) = Mounted::with_threads(1) else {
        return;
    };
    assert_eq!(mounted.text("late"), "here\n");
    writeln!(mounted.input, "end").unwrap();
    mounted.expect("destroyed");
    mounted.expect("joined");
    assert_eq!(fs::read_dir(&mounted.at).unwrap().count(), 0, "unmounted");
}

/// A signal unmounts; a program that waits in `mount` then goes on, and one that does other things ends.
#[test]
fn signals_end_a_session() {
    for waits in [true, false] {
        if !has(&[Need::Fuse]) {
            return;
        }
        let mut mounted = Mounted::new(1, waits);
        assert_eq!(mounted.text("late"), "here\n");
        let pid = rustix::process::Pid::from_child(&mounted.server);
        rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
        mounted.expect("destroyed");
        let status = mounted.server.wait().unwrap();
        match waits {
            true => assert!(status.success(), "{status}"),
            false => assert_eq!(status.signal(), Some(libc::SIGTERM), "{status}"),
        }
        assert_eq!(fs::read_dir(&mounted.at).unwrap().count(), 0, "unmounted");
    }
}

struct Fails;

impl Filesystem for Fails {
    fn init(&mut self, _: &Request, _: &mut KernelConfig) -> io::Result<()> {
        Err(io::Error::from_raw_os_error(libc::ENOSPC))
    }
}

/// A file system that fails in `init` is not mounted, and the mount fails with its error.
#[test]
fn a_failed_init_is_the_error_of_the_mount() {
    if !has(&[Need::Fuse]) {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let error = Session::new(Fails, dir.path(), &Config::default()).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::ENOSPC));
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0, "unmounted");
}
