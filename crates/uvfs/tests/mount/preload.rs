//! Programs under `uvfs run`, on a mount: what they leave is what they leave without it.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use rustix::process::Signal;

use crate::harness::*;

/// The library, built if it is not there: no dependency of a test's does that.
fn library() -> &'static Path {
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

/// `uvfs run --report -- bash -c SCRIPT`, with arguments `$1`, `$2`…
fn under(script: &str, args: &[&Path]) -> Command {
    let mut command = uvfs();
    command
        .env("UVFS_PRELOAD", library())
        .env("LC_ALL", "C")
        .args(["run", "--report", "--", "bash", "-euo", "pipefail", "-c"])
        .args([script, "bash"])
        .args(args);
    command
}

/// Whether a report says that calls were served.
fn served_any(outcome: &Outcome) -> bool {
    outcome.stderr.lines().any(|line| {
        line.starts_with("uvfs run: ")
            && line.contains(" calls served")
            && !line.contains(" 0 calls served")
    })
}

/// Runs a script under `uvfs run` on a mount and without it on the host, in directories of the same
/// name, and compares what it prints.
fn same_as_host(transport: Transport, programs: &[&'static str], script: &str) -> Outcome {
    let served = Served::new(&Serve::over(transport));
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
        .run_within(LATER, &mut under(&script, &[&served.mount.at]));
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
    for transport in [Transport::Dev, Transport::Uring] {
        if has(&[Need::Mount(transport)]) {
            let outcome = same_as_host(transport, &["tar"], script);
            assert!(served_any(&outcome), "{outcome}");
        }
    }
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
    let outcome = same_as_host(Transport::Dev, &[], script);
    assert!(served_any(&outcome), "{outcome}");
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
    same_as_host(Transport::Dev, &[], script);
}

#[test]
fn fio_verifies() {
    if !can() || !has(&[Need::Program("fio")]) {
        return;
    }
    let served = Served::new(&Serve::over(Transport::Dev));
    for engine in ["psync", "pvsync2", "sync", "libaio", "mmap"] {
        let script = format!(
            "fio --name=j --directory=\"$1\" --ioengine={engine} --rw=randrw --bs=512-16k \
             --bsrange=512-16k --size=8m --numjobs=2 --verify=crc32c --verify_fatal=1 --end_fsync=1 \
             --randseed=7 --verify_state_save=0 --minimal >/dev/null"
        );
        let mut command = under(&script, &[&served.mount.at]);
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
    let served = Served::new(&Serve::over(Transport::Dev));
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
    for round in 0..3 {
        let count = served.scratch.path(&format!("count{round}"));
        let mut program = Running::start(&mut under(script, &[&served.mount.at, &count]));
        let acknowledged = || {
            let text = fs::read_to_string(&count).unwrap_or_default();
            text.parse::<usize>().unwrap_or(0)
        };
        wait_for("some writes", || acknowledged() > 500);
        program.signal(Signal::KILL);
        program.wait(SOON).expect("a killed program ends");
        let count = acknowledged();
        let data = fs::read_to_string(served.source.join("data")).unwrap();
        let expected: String = (0..count).map(|i| format!("{i:08}")).collect();
        assert!(data.starts_with(&expected), "{count} writes");
        fs::remove_file(served.source.join("data")).unwrap();
    }
}

/// Without anything to attach to, and when it goes: the kernel serves.
#[test]
fn no_server_to_attach_to() {
    if !can() || !has(&[Need::Program("python3")]) {
        return;
    }
    let served = Served::new(&Serve::over(Transport::Dev));
    let script = "dd if=/dev/zero of=\"$1\"/f bs=4k count=100 status=none; stat -c %s \"$1\"/f";
    let elsewhere = served.scratch.dir("elsewhere");
    let outcome = run(&mut under(script, &[&elsewhere]));
    assert_eq!(
        (outcome.stdout.as_str(), outcome.stderr.as_str()),
        ("409600\n", "")
    );
    // The socket goes in the middle: who is attached stays so, who comes later does without.
    let socket = served.mount.run(
        command("getfattr", ["--only-values", "-n", "user.uvfs.socket"]).arg(&served.mount.at),
    );
    fs::remove_file(socket.ok()).unwrap();
    let outcome = served.mount.run(&mut under(script, &[&served.mount.at]));
    assert_eq!(outcome.stdout, "409600\n", "{outcome}");
    let lines: Vec<_> = outcome.stderr.lines().collect();
    assert!(
        lines.len() == 1 && lines[0].contains("through the kernel"),
        "{outcome}"
    );
    // A mount that keeps writes back is left alone, silently.
    drop(served);
    let served = Served::new(&Serve::over(Transport::Dev).option("writeback"));
    let outcome = served.mount.run(&mut under(script, &[&served.mount.at]));
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
