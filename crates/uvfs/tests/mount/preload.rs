//! Programs under `uvfs run`, on a mount: what they leave is what they leave without it.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use rustix::process::Signal;

use crate::harness::*;

/// The library, built if it is not there: no dependency of a test's does that.
pub fn library() -> &'static Path {
    static LIBRARY: OnceLock<PathBuf> = OnceLock::new();
    LIBRARY.get_or_init(|| {
        let beside = Path::new(env!("CARGO_BIN_EXE_uvfs")).with_file_name("libuvfs_preload.so");
        if !beside.exists() {
            let cargo = std::env::var_os("CARGO").unwrap_or("cargo".into());
            let mut build = Command::new(cargo);
            build.args(["build", "--offline", "-p", "uvfs-preload"]);
            build.current_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."));
            run_within(LATER, &mut build).ok();
        }
        beside
    })
}

/// What `uvfs run` serves: most tests have it serve everything.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum How {
    /// What pays, as people run it.
    AsItPays,
    /// Every read and write.
    Eager,
}

/// `uvfs run --report` with what it needs.
pub fn uvfs_run(how: How) -> Command {
    let mut command = uvfs();
    command
        .env("UVFS_PRELOAD", library())
        .env("LC_ALL", "C")
        .args(["run", "--report"]);
    if how == How::Eager {
        command.arg("--eager");
    }
    command
}

/// `uvfs run --report -- bash -c SCRIPT`, with arguments `$1`, `$2`…
pub fn under(how: How, script: &str, args: &[&Path]) -> Command {
    let mut command = uvfs_run(how);
    command
        .args(["--", "bash", "-euo", "pipefail", "-c"])
        .args([script, "bash"])
        .args(args);
    command
}

/// Whether a report says that calls were served.
pub fn served_any(outcome: &Outcome) -> bool {
    outcome.stderr.lines().any(|line| {
        line.starts_with("uvfs run: ")
            && line.contains(" calls served")
            && !line.contains(" 0 calls served")
    })
}

/// Runs a script under `uvfs run` on a mount and without it on the host, in directories of the same
/// name, and compares what it prints.
pub fn same_as_host(
    how: How,
    transport: Transport,
    programs: &[&'static str],
    script: &str,
) -> Outcome {
    let served = Served::new(&Serve::for_clients(transport));
    for program in programs {
        assert!(has(&[Need::Program(program)]));
    }
    let host = served.scratch.dir("host");
    fs::create_dir(served.source.join("work")).unwrap();
    fs::create_dir(host.join("work")).unwrap();
    let script = format!("cd \"$1\"/work; {script}");
    let on_host = run_within(LATER, &mut shell(&script, &[&host])).ok();
    let outcome = served
        .mount
        .run_within(LATER, &mut under(how, &script, &[&served.mount.at]));
    assert!(outcome.status.success(), "{outcome}");
    assert_eq!(outcome.stdout, on_host, "{outcome}");
    // And the trees are the same, seen by the server.
    run(Command::new("diff")
        .args(["-r", "--no-dereference"])
        .arg(host.join("work"))
        .arg(served.source.join("work")))
    .ok();
    outcome
}

/// As [`same_as_host`], over `/dev/fuse`, of what is served at least in part.
pub fn served_as_on_the_host(script: &str) {
    let outcome = same_as_host(How::Eager, Transport::Dev, &[], script);
    assert!(served_any(&outcome), "{outcome}");
}

fn can() -> bool {
    has(&[Need::Mount(Transport::Dev), Need::Uvfs])
}

#[test]
fn everyday_programs() {
    if !can() {
        return;
    }
    let script = r#"
        seq 200000 >numbers
        dd if=numbers of=copy bs=7k status=none
        dd if=numbers of=copy2 bs=64k iflag=direct oflag=direct conv=notrunc status=none || cp numbers copy2
        dd if=copy of=part bs=1000 skip=3 seek=5 count=77 conv=notrunc status=none
        cp copy copy3; cmp numbers copy; cmp numbers copy3
        mkdir tree; cp -a numbers copy part tree/
        tar -cf archive.tar --mtime=@0 --owner=0 --group=0 --sort=name tree
        mkdir out; tar -xf archive.tar -C out; diff -r tree out/tree
        sort -R --random-source=numbers numbers | sort -n >sorted; cmp numbers sorted
        gzip -nk copy; gzip -dc copy.gz | cmp - numbers
        md5sum * 2>/dev/null | grep -v archive || true
        wc -c numbers; tail -n 2 numbers; head -c 20 part | od -c | head -3
    "#;
    for transport in transports() {
        let outcome = same_as_host(How::Eager, transport, &["tar"], script);
        assert!(served_any(&outcome), "{outcome}");
    }
}

#[test]
fn short_programs_are_left_to_the_kernel() {
    if !can() {
        return;
    }
    let script = r#"
        seq 1000 >numbers
        for i in 1 2 3 4 5; do cat numbers >>all; done
        cp -a numbers copy; grep -c 7 all; tail -n 1 copy; wc -c numbers all
    "#;
    let outcome = same_as_host(How::AsItPays, Transport::Dev, &[], script);
    assert!(!outcome.stderr.contains("uvfs run:"), "{outcome}");
}

/// A descriptor is imported in the middle of its use.
#[test]
fn a_file_that_pays_moves_with_its_position() {
    if !can() || !has(&[Need::Program("python3")]) {
        return;
    }
    let script = r##"python3 - <<'END'
import os, threading
def check(a, b):
    if a != b: raise SystemExit(f"{a!r} is not {b!r}")
fd = os.open("log", os.O_RDWR | os.O_CREAT, 0o644)
for i in range(5000):
    check(os.write(fd, b"%06d\n" % i), 7)
check(os.lseek(fd, 0, os.SEEK_CUR), 35000)
os.lseek(fd, 7 * 4000, os.SEEK_SET)
check(os.read(fd, 7), b"004000\n")
check(os.pread(fd, 7, 7 * 1999), b"001999\n")
check(os.fstat(fd).st_size, 35000)
copy = os.dup(fd)
check(os.write(copy, b"hello"), 5)
check(os.lseek(fd, 0, os.SEEK_CUR), 7 * 4001 + 5)
# Threads that share a position while the file moves: no record is written over another.
def work(fd, name):
    for i in range(40):
        os.write(fd, b"%s%05d\n" % (name, i))
for round in range(200):
    fd = os.open("shared", os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
    other = os.dup(fd) if round % 2 else fd
    users = ((fd, b"a"), (other, b"b"), (fd, b"c"))
    threads = [threading.Thread(target=work, args=user) for user in users]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
    os.lseek(fd, 0, os.SEEK_SET)
    lines = os.read(fd, 1 << 16).splitlines()
    check((len(lines), len(set(lines))), (120, 120))
    os.close(fd)
    if other != fd: os.close(other)
os.unlink("shared")
print("ok")
END"##;
    let outcome = same_as_host(How::AsItPays, Transport::Dev, &["python3"], script);
    assert!(served_any(&outcome), "{outcome}");
    // dd writes to a duplicate of what it has opened.
    let script = "
        dd if=/dev/zero of=zeros bs=1k count=5000 status=none; wc -c zeros
        dd if=zeros of=part bs=1k count=3000 seek=100 status=none; md5sum part
    ";
    let outcome = same_as_host(How::AsItPays, Transport::Dev, &[], script);
    assert!(served_any(&outcome), "{outcome}");
}

#[test]
fn positions_are_shared_as_the_kernel_shares_them() {
    if !can() || !has(&[Need::Program("python3")]) {
        return;
    }
    let script = r##"python3 - <<'END'
import os, sys, fcntl, mmap, subprocess
def check(a, b):
    if a != b: raise SystemExit(f"{a!r} is not {b!r} in line {sys._getframe(1).f_lineno}")
data = bytes(range(256)) * 400
fd = os.open("file", os.O_RDWR | os.O_CREAT, 0o644)
check(os.write(fd, data), len(data))
check(os.lseek(fd, 0, os.SEEK_CUR), len(data))
os.lseek(fd, 10, os.SEEK_SET)
# dup: one position.
other = os.dup(fd)
check(os.read(fd, 5), data[10:15]); check(os.read(other, 5), data[15:20])
check(os.lseek(fd, 0, os.SEEK_CUR), 20)
third = os.dup2(other, 100)
check(os.read(third, 4), data[20:24]); os.close(other)
check(os.read(fd, 4), data[24:28])
fourth = fcntl.fcntl(fd, fcntl.F_DUPFD, 50)
check(os.read(fourth, 4), data[28:32])
# dup before the first use.
a = os.open("file", os.O_RDONLY); b = os.dup(a)
check(os.read(b, 3), data[:3]); check(os.read(a, 3), data[3:6]); os.close(a); check(os.read(b, 3), data[6:9])
# fork: still one, both ways.
r, w = os.pipe()
pid = os.fork()
if pid == 0:
    ok = os.read(fd, 8) == data[32:40] and os.pread(fd, 5, 1000) == data[1000:1005]
    os.write(w, b"y" if ok else b"n"); os._exit(0)
os.waitpid(pid, 0)
check(os.read(r, 1), b"y")
check(os.read(fd, 8), data[40:48])
# A child's write is the parent's to see, and a child writes through a session of its own.
pid = os.fork()
if pid == 0:
    mine = os.open("child", os.O_RDWR | os.O_CREAT)
    for i in range(100): os.write(mine, b"%03d\n" % i)
    os.pwrite(fd, b"child was here", 5000); os._exit(0)
os.waitpid(pid, 0)
check(os.pread(fd, 14, 5000), b"child was here")
check(open("child", "rb").read(), b"".join(b"%03d\n" % i for i in range(100)))
# Another program goes on where we are.
one = os.open("file", os.O_RDONLY); os.read(one, 256)
out = subprocess.run(["head", "-c", "16"], stdin=one, stdout=subprocess.PIPE).stdout
check(out, data[256:272])
# Appending: to the end, whoever made it longer.
log = os.open("log", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
plain = os.open("log", os.O_RDWR)
for i in range(10):
    os.write(log, b"append\n"); os.lseek(plain, 0, os.SEEK_END); os.write(plain, b"plain\n")
check(os.path.getsize("log"), 130); os.pwrite(log, b"x", 0)
check(open("log", "rb").read(), b"append\nplain\n" * 10 + b"x")
fcntl.fcntl(plain, fcntl.F_SETFL, os.O_APPEND)
os.lseek(plain, 0, os.SEEK_SET); os.write(plain, b"end")
check(os.path.getsize("log"), 134)
# Sizes, holes, vectors, and what is refused.
f = os.open("sparse", os.O_RDWR | os.O_CREAT)
os.pwrite(f, b"far", 1 << 20); check(os.fstat(f).st_size, (1 << 20) + 3)
os.ftruncate(f, 100); check(os.stat("sparse").st_size, 100)
check(os.pwritev(f, [b"ab", b"cd"], 98), 4); check(os.lseek(f, 0, os.SEEK_END), 102)
buffers = [bytearray(3), bytearray(50)]; check(os.preadv(f, buffers, 97), 5)
check(bytes(buffers[0]), b"\0ab")
os.posix_fallocate(f, 0, 5000); check(os.fstat(f).st_size, 5000)
ro = os.open("sparse", os.O_RDONLY)
for call in (lambda: os.write(ro, b"x"), lambda: os.pwrite(ro, b"x", 0), lambda: os.ftruncate(ro, 0),
             lambda: os.pread(f, 1, -1), lambda: os.lseek(f, -1, os.SEEK_SET)):
    try: call()
    except OSError as e: print(e.errno)
    else: raise SystemExit("not refused")
os.fsync(f); os.fdatasync(f)
# A shared mapping and read(2) are one file.
m = mmap.mmap(f, 5000); m[10:14] = b"mmap"; check(os.pread(f, 4, 10), b"mmap")
os.pwrite(f, b"back", 20); check(m[20:24], b"back"); m.close()
# Numbers of descriptors are used again.
for i in range(300):
    n = os.open("file", os.O_RDONLY); os.lseek(n, i, 0); check(os.read(n, 1), data[i:i+1]); os.close(n)
    r2, w2 = os.pipe(); os.write(w2, b"p"); check(os.read(r2, 1), b"p"); os.close(r2); os.close(w2)
os.closerange(3, 1000)
g = os.open("after", os.O_RDWR | os.O_CREAT); os.write(g, b"after"); check(os.pread(g, 9, 0), b"after")
print("done")
END
    "##;
    served_as_on_the_host(script);
}

#[test]
fn databases_and_repositories() {
    if !can() || !has(&["sqlite3", "git"].map(Need::Program)) {
        return;
    }
    let script = r#"
        for mode in delete wal; do
            sqlite3 $mode.db "pragma journal_mode=$mode; create table t(a integer primary key, b);" >/dev/null
            for i in 1 2 3; do
                sqlite3 $mode.db "insert into t(b) with recursive c(x) as (select 1 union all
                    select x+1 from c where x<500) select 'row '||x from c; delete from t where a%7=0;"
            done
            sqlite3 $mode.db "select count(*), sum(a), max(b) from t; pragma integrity_check;"
            sqlite3 $mode.db .dump | md5sum; rm $mode.db*
        done
        git init -q -b main repo; cd repo
        git config user.name n; git config user.email e; git config gc.auto 0
        for i in $(seq 20); do seq $((i * 50)) >file$i; done
        git add .; GIT_AUTHOR_DATE='2001-01-01 00:00:00 +0000' GIT_COMMITTER_DATE='2001-01-01 00:00:00 +0000' git commit -q -m one
        for i in $(seq 20); do echo more >>file$i; done
        GIT_AUTHOR_DATE='2002-01-01 00:00:00 +0000' GIT_COMMITTER_DATE='2002-01-01 00:00:00 +0000' git commit -q -a -m two
        git repack -q -a -d; git fsck --strict 2>/dev/null; git log --format=%H; git status --short
        cd ..; git clone -q repo clone; git -C clone log --format=%H; rm -rf repo clone
    "#;
    same_as_host(How::Eager, Transport::Dev, &[], script);
}

#[test]
fn fio_verifies() {
    if !can() || !has(&[Need::Program("fio")]) {
        return;
    }
    let served = Served::new(&Serve::for_clients(Transport::Dev));
    let engines = ["psync", "pvsync2", "sync", "libaio", "mmap"];
    for engine in engines {
        let script = format!(
            "fio --name=j --directory=\"$1\" --ioengine={engine} --rw=randrw --bs=512-16k \
             --bsrange=512-16k --size=8m --numjobs=2 --verify=crc32c --verify_fatal=1 --end_fsync=1 \
             --randseed=7 --verify_state_save=0 --minimal >/dev/null"
        );
        let mut command = under(How::Eager, &script, &[&served.mount.at]);
        let outcome = served.mount.run_within(LATER, &mut command);
        assert!(outcome.status.success(), "{engine}: {outcome}");
        if engine == "psync" {
            assert!(served_any(&outcome), "{outcome}");
        }
    }
}

/// What a process wrote is there when it is killed, whenever that is.
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

/// A handler that interrupts served calls on a file, and uses the kernel for the same file: neither
/// waits for the other.
#[test]
fn signals_wait_for_the_end_of_a_call() {
    if !can() || !has(&[Need::Program("cc")]) {
        return;
    }
    let source = r##"
        #define _GNU_SOURCE
        #include <fcntl.h>
        #include <setjmp.h>
        #include <signal.h>
        #include <stdio.h>
        #include <string.h>
        #include <sys/syscall.h>
        #include <sys/time.h>
        #include <time.h>
        #include <unistd.h>
        static int fd, codes, jump; static volatile long handled; static double longest;
        static sigjmp_buf out;
        static double now(void) {
            struct timespec t; clock_gettime(CLOCK_MONOTONIC, &t); return t.tv_sec + t.tv_nsec / 1e9;
        }
        static void handler(int signal, siginfo_t *info, void *context) {
            (void)context;
            if (signal != SIGALRM || (info->si_code != SI_KERNEL && info->si_code != SI_TIMER)) codes++;
            double began = now();
            char c = '!';
            if (syscall(SYS_pwrite64, fd, &c, 1, 1 << 20) != 1) codes++;
            double took = now() - began; if (took > longest) longest = took;
            handled++;
            if (jump && handled % 8 == 0) siglongjmp(out, 1);
        }
        static char a[65536], b[65536];
        int main(int argc, char **argv) {
            (void)argc;
            fd = open(argv[1], O_RDWR | O_CREAT, 0644);
            struct sigaction action = {0}, old;
            action.sa_sigaction = handler; action.sa_flags = SA_SIGINFO | SA_RESTART;
            sigaction(SIGALRM, &action, NULL);
            sigaction(SIGALRM, NULL, &old);
            if (old.sa_sigaction != handler || !(old.sa_flags & SA_SIGINFO)) return 2;
            if (signal(SIGUSR1, SIG_IGN) != SIG_DFL) return 3;
            struct itimerval timer = {{0, 700}, {0, 700}};
            setitimer(ITIMER_REAL, &timer, NULL);
            for (jump = 0; jump < 2; jump++) {
                volatile double end = now() + 60; volatile long begin = handled; volatile int i = 0;
                sigsetjmp(out, 1);
                while (handled < begin + 800 && now() < end) {
                    i++;
                    memset(a, i, sizeof a);
                    if (pwrite(fd, a, sizeof a, 0) != sizeof a) return 4;
                    if (pread(fd, b, sizeof b, 0) != sizeof b || memcmp(a, b, sizeof a)) return 5;
                }
                if (handled < begin + 800) return 6;
            }
            if (codes) return 7;
            if (longest > 3) { fprintf(stderr, "%f s\n", longest); return 8; }
            if (pread(fd, b, 2, 1 << 20) != 1 || b[0] != '!') return 9;
            return 0;
        }
    "##;
    let served = Served::new(&Serve::for_clients(Transport::Dev));
    let (code, program) = (served.scratch.path("s.c"), served.scratch.path("s"));
    fs::write(&code, source).unwrap();
    run_within(
        LATER,
        &mut shell("cc -O1 -o \"$1\" \"$2\"", &[&program, &code]),
    )
    .ok();
    let args = [&*program, &served.at("file")];
    let mut command = under(How::Eager, "exec \"$1\" \"$2\"", &args);
    let outcome = served.mount.run_within(LATER, &mut command);
    assert!(
        outcome.status.success() && served_any(&outcome),
        "{outcome}"
    );
    assert!(!outcome.stderr.contains("through the kernel"), "{outcome}");
}

#[test]
fn attributes_and_advice() {
    if !can() || !has(&[Need::Program("python3")]) {
        return;
    }
    let script = r##"python3 - <<'END'
import ctypes, errno, os, sys, time
def check(a, b):
    if a != b: raise SystemExit(f"{a!r} is not {b!r} in line {sys._getframe(1).f_lineno}")
f = os.open("file", os.O_RDWR | os.O_CREAT, 0o640)
last = 0
for i in range(20):
    os.pwrite(f, b"x" * 1000, i * 700)
    st = os.fstat(f)
    check(st.st_size, i * 700 + 1000)
    if st.st_mtime_ns < last: raise SystemExit("time goes back")
    last = st.st_mtime_ns
    if i % 5 == 0: time.sleep(0.02)
here, there = os.fstat(f), os.stat("file")
check(tuple(here), tuple(there))
for name in ("st_dev", "st_ino", "st_mtime_ns", "st_ctime_ns", "st_blksize", "st_blocks", "st_rdev"):
    check((name, getattr(here, name)), (name, getattr(there, name)))
os.utime("file", (1, 2)); os.chmod("file", 0o600)
st = os.fstat(f); check((st.st_mtime, st.st_mode & 0o777), (2, 0o600))
libc = ctypes.CDLL(None, use_errno=True)
for flags in (1, 2, 4, 7): check(libc.sync_file_range(f, ctypes.c_long(0), ctypes.c_long(0), flags), 0)
check(libc.sync_file_range(f, ctypes.c_long(0), ctypes.c_long(0), 8), -1)
os.pwrite(f, b"advice", 3)
for advice in (os.POSIX_FADV_NORMAL, os.POSIX_FADV_SEQUENTIAL, os.POSIX_FADV_RANDOM,
               os.POSIX_FADV_WILLNEED, os.POSIX_FADV_NOREUSE, os.POSIX_FADV_DONTNEED):
    os.posix_fadvise(f, 0, 0, advice); check(os.pread(f, 6, 3), b"advice")
check(libc.posix_fadvise(f, ctypes.c_long(0), ctypes.c_long(0), 77), errno.EINVAL)
# Direct and synchronous descriptors.
import mmap
page = mmap.mmap(-1, 8192); page[:8] = b"directly"
d = os.open("direct", os.O_RDWR | os.O_CREAT | getattr(os, "O_DIRECT", 0))
check(os.pwritev(d, [page], 0), 8192); page[:8] = bytes(8); check(os.preadv(d, [page], 0), 8192)
check(page[:8], b"directly"); check(os.read(os.open("direct", os.O_RDONLY), 8), b"directly")
for how in (os.O_DSYNC, os.O_SYNC):
    s = os.open("sync", os.O_RDWR | os.O_CREAT | how)
    for i in range(5): check(os.write(s, b"synchronous"), 11)
    check(os.pread(s, 11, 44), b"synchronous"); os.close(s)
# Pointers where nothing can be.
for pointer in (0, 8, 1 << 47, (1 << 64) - 4096):
    for call in (libc.pread, libc.pwrite):
        check(call(f, ctypes.c_void_p(pointer), ctypes.c_size_t(10), ctypes.c_long(0)), -1)
        check(ctypes.get_errno(), errno.EFAULT)
check(os.pread(f, 6, 3), b"advice")
print("done")
END
    "##;
    served_as_on_the_host(script);
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
        let words = lines.filter(|line| line.contains("through the kernel"));
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

/// A program with one thread gets the numbers that it counts on: no thread of the library takes one of
/// them, not even for a moment. A second and a half is some looks at the machine's memory.
#[test]
fn descriptors_are_the_lowest_that_are_free() {
    if !can() || !has(&[Need::Program("python3")]) {
        return;
    }
    let script = r#"exec python3 -c '
import os, sys, time
f = os.open(sys.argv[1] + "/data", os.O_RDWR | os.O_CREAT)
os.write(f, b"served")
free = os.open("/dev/null", os.O_RDONLY)
os.close(free)
end = time.monotonic() + 1.5
while time.monotonic() < end:
    for i in range(1000):
        null = os.open("/dev/null", os.O_RDONLY)
        assert null == free, (null, free)
        os.dup2(null, free + 1, False)
        os.close(free)
        os.close(free + 1)
print(os.pread(f, 20, 0).decode())
' "$1""#;
    let served = Served::new(&Serve::for_clients(Transport::Dev));
    let outcome = served
        .mount
        .run(&mut under(How::Eager, script, &[&served.mount.at]));
    assert_eq!(outcome.stdout, "served\n", "{outcome}");
    assert!(served_any(&outcome), "{outcome}");
    served.mount.unmount().ok();
}

#[test]
fn builds_and_copies() {
    if !can() || !has(&["cc", "rsync", "make", "ar"].map(Need::Program)) {
        return;
    }
    let script = r##"
        mkdir src; cd src
        for i in $(seq 12); do
            printf '#include <stdio.h>\n#include "all.h"\nint f%d(int x) { printf("%%d\\n", x); return x * %d; }\n' $i $i >f$i.c
        done
        for i in $(seq 12); do echo "int f$i(int);"; done >all.h
        { echo '#include "all.h"'; echo 'int main(void) { int s = 0;'
          for i in $(seq 12); do echo "s += f$i($i);"; done; echo 'return s != 650; }'; } >main.c
        printf 'O = %s\nall: main.o libf.a\n\tcc -o prog main.o libf.a\nlibf.a: $(O)\n\tar crD $@ $(O)\n%%.o: %%.c all.h\n\tcc -O1 -c -o $@ $<\n' \
            "$(seq -f 'f%g.o' -s ' ' 12)" >Makefile
        make -s -j4; ./prog; make -s -q -W nothing && echo fresh
        md5sum *.o libf.a prog
        cd ..; rsync -a src/ copy/; diff -r src copy; echo changed >>src/f1.c
        rsync -a --checksum --inplace --no-whole-file src/ copy/; diff -r src copy; rsync -ani --checksum src/ copy/ | wc -l
    "##;
    served_as_on_the_host(script);
}

#[test]
fn fsx() {
    if !can() || !has(&[Need::Tool("fsx")]) {
        return;
    }
    let served = Served::new(&Serve::for_clients(Transport::Dev));
    let configuration = served.scratch.path("configuration");
    // Without mappings: after the first the file is the kernel's. Its calls must be the C library's.
    let text = "[opsize]\nmax = 65536\n[weights]\nclose_open = 1\ninvalidate = 0\nmapread = 0\n\
                mapwrite = 0\nread = 10\nwrite = 10\ntruncate = 10\nfsync = 1\nfdatasync = 1\n\
                posix_fallocate = 5\npunch_hole = 5\nsendfile = 5\nposix_fadvise = 1\n\
                copy_file_range = 5\n";
    fs::write(&configuration, text).unwrap();
    let script = r#"exec "$1" -q -N 20000 -S 11 -P "$2" -f "$3" "$4""#;
    let (tool, scratch, file) = (tool("fsx"), served.scratch.path(""), served.at("file"));
    let args: [&Path; 4] = [&tool, &scratch, &configuration, &file];
    let mut command = under(How::Eager, script, &args);
    let outcome = served.mount.run_within(LATER, &mut command);
    assert!(
        outcome.status.success() && served_any(&outcome),
        "{outcome}"
    );
}

/// Two programs on one file, one of them plain: each sees at every step what the other did.
#[test]
fn agrees_with_a_plain_program() {
    if !can() || !has(&[Need::Program("python3")]) {
        return;
    }
    let program = r##"
import os, random, subprocess, sys
path, uvfs = sys.argv[1], sys.argv[2:]
worker = r"""
import os, sys
f = os.open(sys.argv[1], os.O_RDWR)
a = os.open(sys.argv[1], os.O_RDWR | os.O_APPEND)
for line in sys.stdin:
    op, x, y, c = line.split()
    x, y, c = int(x), int(y), bytes([int(c)])
    if op == "write": print(os.pwrite(f, c * y, x))
    elif op == "append": print(os.write(a, c * y))
    elif op == "cut": os.ftruncate(f, x); print(0)
    elif op == "sync": os.fsync(f); print(0)
    elif op == "look":
        data, at = b"", 0
        while part := os.pread(f, 8192, at): data += part; at += len(part)
        st = os.fstat(f)
        print(data.hex(), st.st_size, os.lseek(f, 0, os.SEEK_END), st.st_mtime_ns)
    sys.stdout.flush()
"""
open(path, "w").close()
start = lambda before: subprocess.Popen(before + [sys.executable, "-c", worker, path], text=True,
    stdin=subprocess.PIPE, stdout=subprocess.PIPE)
both = [start([]), start(uvfs)]
def ask(who, *words):
    both[who].stdin.write(" ".join(map(str, words)) + "\n"); both[who].stdin.flush()
    return both[who].stdout.readline().split()
rng, model, last = random.Random(5), bytearray(), 0
for step in range(500):
    who, op, c = rng.randrange(2), rng.choice(["write", "write", "append", "cut", "sync"]), rng.randrange(256)
    x, y = rng.randrange(20000), rng.randrange(1, 9000)
    assert ask(who, op, x, y, c) == [str(y if op in ("write", "append") else 0)]
    if op == "write":
        model.extend(bytes(max(0, x - len(model)))); model[x:x + y] = bytes([c]) * y
    elif op == "append": model.extend(bytes([c]) * y)
    elif op == "cut": model = model[:x] + bytes(max(0, x - len(model)))
    for other in rng.sample([0, 1], 2):
        seen = ask(other, "look", 0, 0, 0)
        data = "" if len(seen) == 3 else seen.pop(0)
        assert bytes.fromhex(data) == model, (step, who, op, other, x, y, len(data) // 2, len(model))
        assert [int(n) for n in seen[:2]] == [len(model)] * 2, (step, who, op, other, seen, len(model))
        assert int(seen[2]) >= last, (step, who, op, other, seen, last)
        last = int(seen[2])
for one in both: one.stdin.close(); assert one.wait() == 0
print("agreed")
"##;
    for transport in transports() {
        let served = Served::new(&Serve::for_clients(transport));
        let mut both = command("python3", ["-c", program]);
        let run = uvfs_run(How::Eager);
        both.arg(served.at("file"))
            .arg(run.get_program())
            .args(run.get_args())
            .arg("--")
            .env("UVFS_PRELOAD", library());
        let outcome = served.mount.run_within(LATER, &mut both);
        assert_eq!(outcome.stdout, "agreed\n", "{outcome}");
        assert!(served_any(&outcome), "{outcome}");
    }
}

/// Without anything to attach to, and when it goes: the kernel serves.
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
    // The socket goes in the middle: who is attached stays so, who comes later does without.
    let socket = served.mount.run(
        command("getfattr", ["--only-values", "-n", "user.uvfs.socket"]).arg(&served.mount.at),
    );
    fs::remove_file(socket.ok()).unwrap();
    let outcome = served
        .mount
        .run(&mut under(How::Eager, script, &[&served.mount.at]));
    assert_eq!(outcome.stdout, "409600\n", "{outcome}");
    let lines: Vec<_> = outcome.stderr.lines().collect();
    // Of each process that tries at most one: of bash, dd and stat.
    let all = |line: &&str| line.contains("through the kernel");
    assert!(
        (1..=3).contains(&lines.len()) && lines.iter().all(all),
        "{outcome}"
    );
    // A mount that keeps writes back is left alone, silently.
    drop(served);
    let served = Served::new(&Serve::for_clients(Transport::Dev).option("writeback"));
    let outcome = served
        .mount
        .run(&mut under(How::Eager, script, &[&served.mount.at]));
    assert_eq!(
        (outcome.stdout.as_str(), outcome.stderr.as_str()),
        ("409600\n", "")
    );
}

#[test]
fn exit_statuses_and_words() {
    if !can() {
        return;
    }
    let run_it = |words: &[&str]| {
        let mut command = uvfs();
        run(command
            .env("UVFS_PRELOAD", library())
            .arg("run")
            .args(words))
    };
    assert_eq!(run_it(&["--", "sh", "-c", "exit 7"]).status.code(), Some(7));
    assert_eq!(run_it(&["--", "no-such-program"]).status.code(), Some(127));
    assert_eq!(run_it(&["/"]).status.code(), Some(126));
    assert_eq!(run_it(&[]).status.code(), Some(2));
    let mut missing = uvfs();
    missing
        .env("UVFS_PRELOAD", "/no/library")
        .args(["run", "true"]);
    let outcome = run(&mut missing);
    assert_eq!(outcome.status.code(), Some(1), "{outcome}");
    assert!(run_it(&["--help"]).ok().contains("--report"));
}

/// What `uvfs stats` says of a program that is attached, while it is.
#[test]
fn stats_of_each_client() {
    if !can() || !has(&[Need::Program("python3")]) {
        return;
    }
    let served = Served::new(&Serve::for_clients(Transport::Dev));
    let flag = served.scratch.path("flag");
    let script = r#"exec python3 -c '
import os, sys, time
f = os.open(sys.argv[1] + "/data", os.O_RDWR | os.O_CREAT)
for i in range(100): os.pwrite(f, b"x" * 1000, i * 1000)
for i in range(100): os.pread(f, 500, i * 1000)
os.fsync(f)
open(sys.argv[2], "w").close()
while os.path.exists(sys.argv[2]): time.sleep(0.01)
' "$1" "$2""#;
    let json = || -> serde_json::Value {
        let text = run(uvfs().args(["stats", "--json"]).arg(&served.mount.at)).ok();
        serde_json::from_str(&text).expect("JSON")
    };
    assert_eq!(json()["clients"], serde_json::json!([]));
    let mut program = Running::start(&mut under(How::Eager, script, &[&served.mount.at, &flag]));
    wait_for("the program's calls", || flag.exists());
    // It says so a moment later.
    wait_for("what it says of itself", || {
        json()["clients"][0]["says"]["calls"] == 200
    });
    let stats = json();
    let client = &stats["clients"][0];
    assert_eq!(stats["clients"].as_array().map(Vec::len), Some(1));
    assert_eq!(client["pid"], program.pid(), "{stats}");
    assert_eq!(client["says"]["name"], "python3", "{stats}");
    assert_eq!(client["says"]["bytes_read"], 50_000, "{stats}");
    assert_eq!(client["says"]["bytes_written"], 100_000, "{stats}");
    assert!(client["says"]["hits"].as_u64() <= Some(100), "{stats}");
    assert!(client["requests"].as_u64() > Some(0), "{stats}");
    assert_eq!(client["bytes_written"], 100_000, "{stats}");
    let text = run(uvfs().arg("stats").arg(&served.mount.at)).ok();
    let line = text.lines().find(|line| line.contains(" python3 "));
    let pid = program.pid().to_string();
    assert!(line.is_some_and(|line| line.starts_with(&pid)), "{text}");
    fs::remove_file(&flag).unwrap();
    let outcome = program.wait(SOON).expect("the program ends");
    assert!(
        outcome.status.success() && served_any(&outcome),
        "{outcome}"
    );
    wait_for("its end", || json()["clients"] == serde_json::json!([]));
}
