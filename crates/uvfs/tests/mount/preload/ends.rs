//! A program or its server ends while the other goes on.

use super::*;

/// Data that a process wrote before it was killed is not lost.
#[test]
fn killed() {
    if !can() || !has(&[Need::Program("python3")]) {
        return;
    }
    let served = Served::new(&Serve::for_clients(Transport::Dev));
    let script = r#"exec python3 -c '
import os, sys
f = os.open(sys.argv[1] + "/data", os.O_RDWR | os.O_CREAT)
n = os.open(sys.argv[2], os.O_WRONLY | os.O_CREAT)
i = 0
while True:
    os.pwrite(f, b"%08d" % i, i * 8)
    i += 1
    os.pwrite(n, b"%08d" % i, 0)
' "$1" "$2""#;
    for round in 0..2 {
        let count = served.scratch.path(&format!("count{round}"));
        let mut program =
            Running::start(&mut under(How::Eager, script, &[&served.mount.at, &count]));
        let acknowledged = || {
            let text = fs::read_to_string(&count).unwrap_or_default();
            text.parse::<usize>().unwrap_or(0)
        };
        wait_for("some writes", || acknowledged() > 500);
        program.signal(Signal::KILL);
        program.wait(SOON).expect("a killed program ends");
        let count = acknowledged();
        // As the mount has it: the server may be writing it still.
        let mut cat = command("cat", [served.at("data")]);
        let data = served.mount.run(&mut cat).ok();
        let expected: String = (0..count).map(|i| format!("{i:08}")).collect();
        assert!(data.starts_with(&expected), "{count} writes");
        let mut remove = command("rm", [served.at("data")]);
        served.mount.run(&mut remove).ok();
    }
}

/// The server is killed under a program: its calls fail as on a dead mount, and none hangs.
#[test]
fn server_killed_under_a_program() {
    if !can() || !has(&[Need::Program("python3")]) {
        return;
    }
    for transport in transports() {
        let mut served = Served::new(&Serve::for_clients(transport));
        let script = r#"exec python3 -c '
import errno, os, sys, threading
f = os.open(sys.argv[1] + "/data", os.O_RDWR | os.O_CREAT)
def work(call):
    i = 0
    while True:
        try: call(i)
        except OSError as e:
            return e.errno in (errno.ENOTCONN, errno.ECONNABORTED) or os._exit(3)
        i += 1
        if i == 100: open(sys.argv[2] + "." + call.__name__, "w").close()
def write(i): os.pwrite(f, b"x" * 5000, i % 500 * 5000)
def read(i): os.pread(f, 9000, i % 500 * 5000)
def sync(i): os.fsync(f)
def stat(i): os.fstat(f)
threads = [threading.Thread(target=work, args=(c,)) for c in (write, read, sync, stat)]
for t in threads: t.start()
for t in threads: t.join()
try: os.lseek(f, 0, os.SEEK_END)
except OSError: pass
try: os.close(f)
except OSError: pass
print("went on")
' "$1" "$2""#;
        let flag = served.scratch.path("flag");
        let mut program =
            Running::start(&mut under(How::Eager, script, &[&served.mount.at, &flag]));
        wait_for("some calls of each", || {
            ["write", "read", "sync", "stat"]
                .iter()
                .all(|call| flag.with_extension(call).exists())
        });
        served.mount.expect_gone();
        served.mount.server.signal(Signal::KILL);
        let outcome = program.wait(SOON);
        if outcome.is_none() {
            served.mount.abort();
        }
        let outcome = outcome.expect("a program goes on without its server");
        assert!(outcome.status.success(), "{outcome}");
        assert_eq!(outcome.stdout, "went on\n", "{outcome}");
        let lines = outcome.stderr.lines();
        let words = lines.filter(|line| line.contains("going on through the kernel"));
        assert!(words.count() <= 1, "{outcome}");
    }
}

/// The server is killed and the mount made again: a program's calls wait for it and go on.
#[test]
fn server_comes_back_under_a_program() {
    if !can() || !has(&[Need::Program("python3")]) {
        return;
    }
    for transport in transports() {
        let serve = Serve::for_clients(transport);
        let mut served = Served::new(&serve);
        let flags = served.scratch.dir("flags");
        let script = r#"exec python3 -c '
import os, sys, time
os.chdir("/")
f = os.open(sys.argv[1] + "/data", os.O_RDWR | os.O_CREAT)
os.pwrite(f, b"before", 0)
os.mkdir(sys.argv[1] + "/sub")
with open(sys.argv[1] + "/sub/short", "w") as s: s.write("a few bytes")
h = os.open(sys.argv[1] + "/sub/short", os.O_RDONLY)
other = os.open(sys.argv[1] + "/sub/short", os.O_RDONLY)
print(os.pread(h, 5, 0).decode(), os.pread(other, 1, 0).decode())
open(sys.argv[2] + "/ready", "w").close()
while not os.path.exists(sys.argv[2] + "/gone"): time.sleep(0.01)
os.pwrite(f, b"after", 6)
os.fsync(f)
print(os.pread(f, 20, 0).decode())
os.close(f)
for fd in (h, other): print(os.pread(fd, 20, 0).decode(), os.fstat(fd).st_size)
print(os.listdir(sys.argv[1] + "/sub"), os.stat(sys.argv[1] + "/sub/short").st_size)
os.rename(sys.argv[1] + "/sub/short", sys.argv[1] + "/sub/long")
print(os.read(other, 20).decode())
g = os.open(sys.argv[1] + "/data", os.O_RDWR)
os.pwrite(g, b"again", 11)
os.close(g)
' "$1" "$2""#;
        let at = served.mount.at.clone();
        let mut command = under(How::Eager, script, &[&at, &flags]);
        let mut program = Running::start(command.env("UVFS_RUN_RECONNECT", "90"));
        wait_for("the program", || flags.join("ready").exists());
        let gone = || fs::write(flags.join("gone"), "").unwrap();
        let again = served.comes_back(&serve, gone);
        let outcome = program.wait(SOON);
        if outcome.is_none() {
            again.abort();
        }
        let outcome = outcome.expect("the program goes on");
        assert!(outcome.status.success(), "{outcome}");
        let expected = "a few a\nbeforeafter\na few bytes 11\na few bytes 11\n['short'] 11\n\
                        a few bytes\n";
        assert_eq!(outcome.stdout, expected, "{outcome}");
        assert!(served_any(&outcome), "{outcome}");
        assert!(!outcome.stderr.contains("through the kernel"), "{outcome}");
        let data = fs::read_to_string(served.source.join("data")).unwrap();
        assert_eq!(data, "beforeafteragain");
        again.unmount().ok();
    }
}

/// Without a server to attach to, and after it went, the kernel serves.
#[test]
fn no_server_to_attach_to() {
    if !can() || !has(&[Need::Program("python3")]) {
        return;
    }
    let served = Served::new(&Serve::for_clients(Transport::Dev));
    let script = "dd if=/dev/zero of=\"$1\"/f bs=4k count=100 status=none; stat -c %s \"$1\"/f";
    let elsewhere = served.scratch.dir("elsewhere");
    let outcome = run(&mut under(How::Eager, script, &[&elsewhere]));
    assert_eq!(
        (outcome.stdout.as_str(), outcome.stderr.as_str()),
        ("409600\n", "")
    );
    // The socket goes in the middle: attached programs stay so, later ones do without.
    let socket = served.mount.run(
        command("getfattr", ["--only-values", "-n", "user.uvfs.socket"]).arg(&served.mount.at),
    );
    fs::remove_file(socket.ok()).unwrap();
    let outcome = served
        .mount
        .run(&mut under(How::Eager, script, &[&served.mount.at]));
    assert_eq!(outcome.stdout, "409600\n", "{outcome}");
    let lines = outcome.stderr.lines();
    // Of each process that tries at most one: of bash, dd and stat.
    let words = lines.filter(|line| line.contains("going on through the kernel"));
    assert!((1..=3).contains(&words.count()), "{outcome}");
    assert!(outcome.stderr.contains("1 without a session"), "{outcome}");
    // A mount that keeps writes back is left alone, silently.
    drop(served);
    let served = Served::new(&Serve::for_clients(Transport::Dev).option("writeback"));
    let outcome = served
        .mount
        .run(&mut under(How::Eager, script, &[&served.mount.at]));
    assert_eq!(outcome.stdout, "409600\n", "{outcome}");
    assert!(!outcome.stderr.contains("going on"), "{outcome}");
}
