//! Programs under `uvfs run`, and clients, over a mounted store.

use std::fs::{self, File};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

use rustix::io::Errno;
use rustix::process::Signal;
use serde_json::Value;
use uvfs_client::{Client, Config, Connection, Flags, OpenOptions, Token};

use super::InMemory;
use crate::harness::*;
use crate::observe::stats;
use crate::own_process;
use crate::preload::{How, served_any, uvfs_run};
use crate::proxy::Mode;
use crate::stores::At;

/// With this option the kernel reads no file by itself, so that clients may have them all.
const NOT_BACKED: &str = "passthrough=off";

pub(super) fn can() -> bool {
    has(&[
        Need::Mount(Transport::Dev),
        Need::Uvfs,
        Need::Program("python3"),
    ])
}

fn content(len: usize, seed: u64) -> Vec<u8> {
    let mut random = Random(seed);
    let words = std::iter::repeat_with(|| random.next().to_le_bytes());
    words.take(len.div_ceil(8)).flatten().take(len).collect()
}

/// A program in python with arguments, without or with `uvfs run --eager`.
pub(super) fn python(under: bool, program: &str, args: &[&Path]) -> Command {
    let mut command = match under {
        true => {
            let mut command = uvfs_run(How::Eager);
            command.args(["--", "python3"]);
            command
        }
        false => Command::new("python3"),
    };
    command.args(["-c", program]).args(args);
    command
}

/// Reads of every kind print the same under `uvfs run` as without it, of files that are not in the cache yet, and of those
/// that are; with backing files, too.
#[test]
fn programs_read_the_same_under_uvfs_run() {
    if !can() {
        return;
    }
    const PROGRAM: &str = r#"
import hashlib, mmap, os, sys, threading
def told(call):
    try: return call()
    except OSError as error: return error.errno
def summed(parts):
    digest = hashlib.md5()
    for part in parts: digest.update(part)
    return digest.hexdigest()
def all(fd, size):
    at = 0
    while part := os.pread(fd, size, at):
        at += len(part)
        yield part
for name in sorted(os.listdir(sys.argv[1])):
    path = os.path.join(sys.argv[1], name)
    fd = os.open(path, os.O_RDONLY)
    print(name, summed(iter(lambda: os.read(fd, 3000), b"")), os.lseek(fd, 0, os.SEEK_CUR))
    sums = {}
    def work(n):
        own = os.open(path, os.O_RDONLY)
        sums[n] = summed(all(own, 10000 + 7 * n))
        os.close(own)
    threads = [threading.Thread(target=work, args=(n,)) for n in range(12)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
    print(len(sums), set(sums.values()), summed(all(fd, 1 << 20)))
    stat = os.fstat(fd)
    print(stat.st_size, oct(stat.st_mode), stat.st_ino, stat.st_mtime)
    if stat.st_size: print(summed([mmap.mmap(fd, 0, prot=mmap.PROT_READ)]))
    print([told(lambda: os.lseek(fd, 5, how)) for how in (os.SEEK_DATA, os.SEEK_HOLE, os.SEEK_END)])
    print(os.lseek(fd, 2, os.SEEK_SET), os.readv(fd, [bytearray(3), bytearray(4)]), os.read(fd, 10))
    print([told(lambda: call()) for call in (lambda: os.write(fd, b"x"), lambda: os.ftruncate(fd, 0),
        lambda: os.open(path, os.O_RDWR), lambda: os.pread(fd, 10, 1 << 40), lambda: os.fsync(fd))])
    copy = os.dup(fd)
    print(os.read(copy, 10), os.lseek(fd, 0, os.SEEK_CUR), os.read(fd, 10))
    direct, memory = os.open(path, os.O_RDONLY | os.O_DIRECT), mmap.mmap(-1, 65536)
    print(os.preadv(direct, [memory], 4096), summed([memory]))
"#;
    let names = [
        ("empty", 0),
        ("small", 12),
        ("pieces", 200_001),
        ("large", 6 << 20),
    ];
    for options in [&[NOT_BACKED][..], &[]] {
        let fill = |fake: &crate::fake::Fake| {
            for (seed, (name, len)) in (1..).zip(names) {
                fake.put(&format!("dir/{name}"), &content(len, seed));
            }
        };
        let (cold, other) = (InMemory::new(options, fill), InMemory::new(options, fill));
        let plain = (cold.mount).run_within(LATER, &mut python(false, PROGRAM, &[&cold.at("dir")]));
        let plain = plain.ok();
        assert_eq!(plain.lines().count(), 4 * 9 - 1, "{plain}");
        for what in ["not cached", "cached"] {
            let mut program = python(true, PROGRAM, &[&other.at("dir")]);
            let outcome = other.mount.run_within(LATER, &mut program);
            assert!(outcome.status.success(), "{what}: {outcome}");
            assert_eq!(outcome.stdout, plain, "{what} {options:?}: {outcome}");
            // Without backing files all is served, and with them what is not cached.
            if !options.is_empty() {
                assert!(served_any(&outcome), "{what}: {outcome}");
            }
        }
        for store in [cold, other] {
            wait_for("the last client's end", || {
                stats(&store.mount.at)["clients"] == Value::Array(Vec::new())
            });
            store.mount.unmount().ok();
        }
    }
}

/// A program that stops amid its work.
pub(super) struct Program {
    pub(super) running: Running,
    done: PathBuf,
}

impl Program {
    /// Starts `work` on the object `file`, and returns when it calls `meanwhile`.
    #[track_caller]
    pub(super) fn start(store: &InMemory, under: bool, work: &str) -> Self {
        const TOOLS: &str = r#"
import os, sys, time
path, has, done = sys.argv[1:]
def part(fd, at):
    try: return os.pread(fd, 50000, at)[:10]
    except OSError as error: return os.strerror(error.errno)
def meanwhile():
    open(has, "w").close()
    while not os.path.exists(done): time.sleep(0.01)
"#;
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let sign = |name| store.scratch.path(&format!("{name}{number}"));
        let (has, done) = (sign("has"), sign("done"));
        let program = format!("{TOOLS}{work}");
        let mut command = python(under, &program, &[&store.at("file"), &has, &done]);
        let running = Running::start(command.env("LC_ALL", "C"));
        let this = Self { running, done };
        wait_for("the program's first part", || has.exists());
        this
    }

    /// Lets it go on.
    pub(super) fn goes_on(&self) {
        fs::write(&self.done, "").unwrap();
    }

    #[track_caller]
    pub(super) fn ends(mut self) -> Outcome {
        self.running.wait(SOON).unwrap_or_else(|| {
            self.running.kill();
            panic!("it hangs: {}", self.running.stderr());
        })
    }
}

impl Drop for Program {
    /// A test that fails leaves no program that waits for it.
    fn drop(&mut self) {
        if self.running.ended().is_none() {
            self.running.kill();
        }
    }
}

/// A client that has a file open keeps its version, and gets an error for what is not cached of it, as without `uvfs run`.
#[test]
fn an_object_changes_while_a_client_has_it() {
    if !can() {
        return;
    }
    let work = r#"
fd = os.open(path, os.O_RDONLY)
print(part(fd, 0))
meanwhile()
print(part(fd, 0), part(fd, 30 << 20), part(fd, 0), os.fstat(fd).st_size)
new = os.open(path, os.O_RDONLY)
print(part(new, 0), part(new, 20 << 20), os.fstat(new).st_size, part(fd, 0), part(fd, 31 << 20))
"#;
    let mut outputs = Vec::new();
    for under in [false, true] {
        let store = InMemory::new(&[NOT_BACKED, "ttl=0"], |fake| {
            fake.put("file", &content(40 << 20, 1));
        });
        let program = Program::start(&store, under, work);
        store.fake.put("file", &content(25 << 20, 2));
        program.goes_on();
        let outcome = program.ends();
        assert_eq!(under, served_any(&outcome), "{outcome}");
        outputs.push(outcome.ok());
        store.mount.unmount().ok();
    }
    assert_eq!(
        outputs[0].matches("Stale file").count(),
        2,
        "{}",
        outputs[0]
    );
    assert_eq!(outputs[0], outputs[1]);
}

/// Reads a part that is not cached, after a part that is read from the store, too.
const TWO_PARTS: &str = r#"
fd = os.open(path, os.O_RDONLY)
print(part(fd, 0))
meanwhile()
print(part(fd, 30 << 20), part(fd, 0))
"#;

/// Requests that the mount's server has not answered.
fn in_flight(store: &InMemory) -> u64 {
    let queues = stats(&store.mount.at)["queues"].clone();
    let queues = queues.as_array().unwrap().iter();
    queues
        .map(|queue| queue["in_flight"].as_u64().unwrap())
        .sum()
}

/// A store that does not answer is an error for a client in the mount's time. The client can go on.
#[test]
fn a_store_that_stalls_is_an_error_for_a_client() {
    if !can() {
        return;
    }
    let mut outputs = Vec::new();
    for under in [false, true] {
        let store = InMemory::new(&[NOT_BACKED, "timeout=1"], |fake| {
            fake.put("file", &content(40 << 20, 1));
        });
        let program = Program::start(&store, under, TWO_PARTS);
        store.proxy.set(Mode::Stall);
        program.goes_on();
        let outcome = program.ends();
        store.proxy.set(Mode::Pass);
        assert_eq!(under, served_any(&outcome), "{outcome}");
        outputs.push(outcome.ok());
        store.mount.unmount().ok();
    }
    assert_eq!(
        outputs[0].matches("Input/output error").count(),
        1,
        "{}",
        outputs[0]
    );
    assert_eq!(outputs[0], outputs[1]);
}

/// A client that waits for a store that stalls can be killed. The server forgets it at once, and others read the file.
#[test]
fn a_client_that_waits_is_killed() {
    if !can() {
        return;
    }
    let whole = content(40 << 20, 1);
    let store = InMemory::new(&[NOT_BACKED, "timeout=600"], |fake| {
        fake.put("file", &whole)
    });
    let mut program = Program::start(&store, true, TWO_PARTS);
    assert_eq!(
        stats(&store.mount.at)["clients"].as_array().map(Vec::len),
        Some(1)
    );
    store.proxy.set(Mode::Stall);
    program.goes_on();
    wait_for("the client's request", || in_flight(&store) > 0);
    program.running.kill();
    wait_for("the client's end", || {
        in_flight(&store) == 0 && stats(&store.mount.at)["clients"] == Value::Array(Vec::new())
    });
    store.proxy.set(Mode::Pass);
    let mut cat = python(
        true,
        "import sys; sys.stdout.write(str(len(open(sys.argv[1], 'rb').read())))",
        &[&store.at("file")],
    );
    assert_eq!(store.mount.run(&mut cat).ok(), whole.len().to_string());
    let copy = store.scratch.path("copy");
    store
        .mount
        .run(command("cp", [&store.at("file"), &copy]).arg("--"))
        .ok();
    assert!(fs::read(copy).unwrap() == whole);
    store.mount.unmount().ok();
}

/// A client goes on at the next server of the store, if the object is the same. If not, its file is gone: it takes none of a
/// bucket of the same name elsewhere.
#[test]
fn a_server_comes_back_to_a_client() {
    if !can() {
        return;
    }
    for changes in [false, true] {
        let mut store = InMemory::new(&[NOT_BACKED], |fake| {
            fake.put("file", &content(40 << 20, 1));
        });
        let program = Program::start(&store, true, TWO_PARTS);
        let mount = &mut store.mount;
        mount.expect_gone();
        mount.server.signal(Signal::KILL);
        mount.server.wait(SOON).expect("it is killed");
        unmount_by_force(&mount.at);
        let elsewhere = InMemory::new(&[NOT_BACKED], |fake| {
            fake.put("file", &content(40 << 20, 1));
        });
        if changes {
            store.fake.put("file", &content(40 << 20, 2));
        }
        let uri = InMemory::uri(&store.fake, &store.proxy);
        let again = Mount::new(&store.serve, Path::new(&uri), &store.mount.at);
        program.goes_on();
        let outcome = program.ends();
        assert!(served_any(&outcome), "{outcome}");
        let read = outcome.ok();
        // Through the kernel, whose mount has ended.
        let gone = read.matches("Transport endpoint is not connected").count();
        assert_eq!(gone, if changes { 2 } else { 0 }, "{read}");
        again.unmount().ok();
        elsewhere.mount.unmount().ok();
    }
}

/// Opens and closes files by their paths, and as a kernel's open file.
pub fn by_paths(dir: &Path, _: &str) -> String {
    let file = File::open(dir.join("file")).unwrap();
    let token = Token::of(file.as_fd()).unwrap();
    let server = Connection::connect(token.socket()).unwrap();
    let client = Client::new(server, Config::default()).unwrap();
    let file = client.import_token(&token).unwrap();
    assert_eq!(file.size(), 40 << 20);
    for _ in 0..3 {
        let one = client
            .open("dir/one", OpenOptions::new().read(true))
            .unwrap();
        let mut bytes = [0; 10];
        assert_eq!(one.read_at(&mut bytes, 0, Flags::empty()).unwrap(), 10);
        assert_eq!(bytes, content(10, 2)[..]);
    }
    let error = client.create("dir/new").unwrap_err();
    assert_eq!(error.errno(), Errno::ROFS);
    "ok".into()
}

/// What a client has closed is not open any more: the kernel gets a backing file for it.
#[test]
fn a_client_closes_what_it_opened() {
    if !can() {
        return;
    }
    let store = InMemory::new(&[], |fake| {
        fake.put("file", &content(40 << 20, 1));
        fake.put("dir/one", &content(2 << 20, 2));
    });
    let report = store.scratch.path("report");
    let mut client = own_process::call("store_by_paths", &store.mount.at, "", &report);
    store.mount.run(&mut client).ok();
    assert_eq!(fs::read_to_string(report).unwrap(), "ok");
    wait_for("a backing file", || {
        store
            .mount
            .run(Command::new("cat").arg(store.at("dir/one")))
            .ok();
        stats(&store.mount.at)["backed_opens"].as_u64() > Some(0)
    });
    let outcome = store.mount.unmount();
    assert!(!outcome.stderr.contains("panic"), "{outcome}");
}
