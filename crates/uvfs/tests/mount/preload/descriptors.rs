//! Descriptors, positions and signals of a program are as without the library.

use super::*;

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

/// Descriptors share a position after dup and fork, and have their own after an open.
#[test]
fn positions_are_shared_as_the_kernel_shares_them() {
    if !can() || !has(&[Need::Program("python3")]) {
        return;
    }
    let script = concat!(
        "python3 - <<'END'\n",
        include_str!("../programs/positions.py"),
        "END\n"
    );
    served_as_on_the_host(script);
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

/// fstat, fadvise and ioctl on a served file answer as the kernel does.
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
