//! `uvfs run --metadata`: paths give under it what they give without it and on the host.

use std::fs;
use std::path::{Path, PathBuf};

use rustix::process::Signal;

use crate::harness::*;
use crate::preload::{BOTH, How, same_as_host, served_any, under, uvfs_run};

fn can() -> bool {
    has(&[Need::Mount(Transport::Dev), Need::Uvfs, Need::Program("cc")])
}

fn compiled(scratch: &Scratch, name: &str, source: &str) -> PathBuf {
    let (code, program) = (scratch.path(&format!("{name}.c")), scratch.path(name));
    fs::write(&code, source).unwrap();
    let build = "cc -O1 -w -o \"$1\" \"$2\" -lpthread";
    run_within(LATER, &mut shell(build, &[&program, &code])).ok();
    program
}

/// The first lines that differ.
fn difference(one: &str, other: &str) -> Option<String> {
    let lines = one.lines().zip(other.lines()).enumerate();
    let mut different = lines
        .filter(|(_, (one, other))| one != other)
        .map(|(number, (one, other))| format!("{}: {one}\n  but: {other}\n", number + 1))
        .take(20)
        .collect::<String>();
    if one.lines().count() != other.lines().count() {
        different += "one has more lines";
    }
    (!different.is_empty()).then_some(different)
}

/// The same calls in a directory on the host, on the mount, and on it under `uvfs run --metadata`.
fn same_everywhere(part: &str) {
    if !can() {
        return;
    }
    for transport in transports() {
        let served = Served::new(&Serve::over(transport));
        let program = compiled(&served.scratch, "paths", include_str!("programs/paths.c"));
        let host = served.scratch.tmpfs("host", "100m");
        // Paths of the same length.
        let (host, on_mount) = (host.join("work1"), served.at("work"));
        fs::create_dir(&host).unwrap();
        fs::create_dir(served.source.join("work")).unwrap();
        let plain = |dir: &Path| {
            let mut command = command(&program, [dir.as_os_str(), part.as_ref()]);
            let outcome = served.mount.run_within(LATER, &mut command);
            assert!(outcome.status.success(), "{outcome}");
            outcome.stdout
        };
        let on_host = plain(&host);
        assert!(on_host.ends_with("to its end\n"));
        let without = plain(&on_mount);
        if let Some(different) = difference(&on_host, &without) {
            panic!("the host, and the mount over {transport}:\n{different}");
        }
        let mut command = uvfs_run(How::Paths);
        command.arg("--").arg(&program).arg(&on_mount).arg(part);
        let outcome = served.mount.run_within(LATER, &mut command);
        if let Some(different) = difference(&on_host, &outcome.stdout) {
            panic!(
                "the host, and with --metadata over {transport}:\n{different}\n{}",
                outcome.stderr
            );
        }
        assert!(
            outcome.status.success() && served_any(&outcome),
            "{}",
            outcome.stderr
        );
        assert!(
            !outcome.stderr.contains("through the kernel"),
            "{}",
            outcome.stderr
        );
    }
}

#[test]
fn every_call_on_every_kind_of_path() {
    same_everywhere("0");
}

#[test]
fn descriptors_processes_and_places() {
    same_everywhere("1");
}

/// Threads, forks and signals at the same time: nothing hangs, nothing is lost.
#[test]
fn threads_and_forks() {
    if !can() {
        return;
    }
    for transport in transports() {
        let served = Served::new(&Serve::over(transport));
        let program = compiled(&served.scratch, "stress", include_str!("programs/stress.c"));
        let rounds = if full() { "2000" } else { "150" };
        let mut command = uvfs_run(How::Paths);
        command
            .arg("--")
            .arg(&program)
            .arg(&served.mount.at)
            .arg(rounds);
        let outcome = served.mount.run_within(LATER, &mut command);
        assert_eq!(outcome.stdout, "done 1\n", "{outcome}");
        assert!(
            outcome.status.success() && served_any(&outcome),
            "{outcome}"
        );
        assert!(!outcome.stderr.contains("through the kernel"), "{outcome}");
        assert_eq!(fs::read_dir(&served.source).unwrap().count(), 0);
    }
}

/// Two programs in one tree, one of them plain, and a third one that does the same on the host: after
/// each step all three have the same names, attributes and contents.
#[test]
fn agrees_with_a_plain_program() {
    if !can() || !has(&[Need::Program("python3")]) {
        return;
    }
    let program = r##"
import os, random, subprocess, sys, errno
mount, host, uvfs = sys.argv[1], sys.argv[2], sys.argv[3:]
worker = r"""
import os, sys, stat
os.chdir(sys.argv[1])
kept = {}
def walk(dir, times):
    out = []
    for name in sorted(os.listdir(dir)):
        path = os.path.join(dir, name); st = os.lstat(path)
        what = [path, oct(st.st_mode), st.st_nlink, st.st_uid, st.st_gid]
        if not stat.S_ISDIR(st.st_mode): what.append(st.st_size)
        if stat.S_ISLNK(st.st_mode): what.append(os.readlink(path))
        if stat.S_ISREG(st.st_mode):
            f = os.open(path, os.O_RDONLY); data = b''
            while part := os.read(f, 3000): data += part
            if os.fstat(f).st_size != len(data): what.append("sizes differ")
            os.close(f); what.append(hash(data) if not times else data.hex())
        if times: what += [st.st_ino, st.st_mtime_ns, st.st_ctime_ns]
        out.append(what)
        if stat.S_ISDIR(st.st_mode): out += walk(path, times)
    return out
def do(op, a, b, n):
    if op == "write":
        f = os.open(a, os.O_WRONLY | os.O_CREAT, 0o640); os.lseek(f, n, 0); os.write(f, b.encode() * n); os.close(f)
    elif op == "new": os.close(os.open(a, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666))
    elif op == "over":
        f = os.open(a, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600); os.write(f, b.encode()); os.close(f)
    elif op == "append":
        f = os.open(a, os.O_WRONLY | os.O_APPEND); os.write(f, b.encode()); os.close(f)
    elif op == "unlink": os.unlink(a)
    elif op == "mkdir": os.mkdir(a)
    elif op == "rmdir": os.rmdir(a)
    elif op == "rename": os.rename(a, b)
    elif op == "link": os.link(a, b)
    elif op == "symlink": os.symlink(b, a)
    elif op == "chmod": os.chmod(a, n % 512 | 0o400)
    elif op == "truncate": os.truncate(a, n)
    elif op == "keep": kept[n % 4] = (kept.pop(n % 4, None), os.open(a, os.O_RDWR))[1]
    elif op == "kept":
        f = kept.get(n % 4)
        if f is not None: os.write(f, b.encode()); return os.fstat(f).st_size
    elif op == "read":
        f = os.open(a, os.O_RDONLY); data = os.read(f, 100); os.close(f); return data.hex()
    elif op == "state": return walk(".", n == 1)
    return None
import json
for line in sys.stdin:
    try: answer = do(*json.loads(line))
    except OSError as e: answer = "errno %d" % e.errno
    print(json.dumps(answer), flush=True)
"""
import json
def start(before, where): return subprocess.Popen(before + [sys.executable, "-c", worker, where], text=True,
    stdin=subprocess.PIPE, stdout=subprocess.PIPE)
all = [start([], mount), start(uvfs, mount), start([], host)]
def ask(who, *words):
    all[who].stdin.write(json.dumps(words) + "\n"); all[who].stdin.flush()
    return json.loads(all[who].stdout.readline())
rng = random.Random(7)
names = ["a", "b", "c", "d", "d/a", "d/b", "e", "e/a", "e/f", "e/f/a"]
ops = ["write"] * 4 + ["new", "new", "over", "over", "append", "unlink", "unlink", "mkdir", "mkdir", "rmdir", "rename", "rename",
       "rename", "link", "symlink", "chmod", "truncate", "read", "keep", "kept", "kept"]
keeper = {}
for step in range(int(500)):
    op, a, b, n = rng.choice(ops), rng.choice(names), rng.choice(names), rng.randrange(1, 5000)
    who = rng.randrange(2)
    # Who has it open is who goes on with it; the host's has all.
    if op == "keep": n = n // 2 * 2 + who
    if op == "kept": who = n % 2
    if op == "symlink": b = b.split("/")[-1]
    mine, model = ask(who, op, a, b, n), ask(2, op, a, b, n)
    assert mine == model, (step, who, op, a, b, n, mine, model)
    seen = [ask(other, "state", "", "", 1) for other in rng.sample([0, 1], 2)]
    assert seen[0] == seen[1], (step, who, op, a, b, n, [x for x in zip(*seen) if x[0] != x[1]], len(seen[0]), len(seen[1]))
    short = lambda state: [x[:-3] for x in state]
    assert short(seen[0]) == short(ask(2, "state", "", "", 1)), (step, who, op, a, b, n)
for one in all: one.stdin.close(); assert one.wait() == 0
print("agreed")
"##;
    for transport in transports() {
        let served = Served::new(&Serve::over(transport));
        let host = served.scratch.tmpfs("host", "100m");
        let run = uvfs_run(How::Paths);
        let mut all = command("python3", ["-c", program]);
        all.arg(&served.mount.at)
            .arg(host)
            .arg(run.get_program())
            .args(run.get_args())
            .arg("--");
        all.env("UVFS_PRELOAD", crate::preload::library());
        let outcome = served.mount.run_within(LATER, &mut all);
        assert_eq!(outcome.stdout, "agreed\n", "{outcome}");
        assert!(served_any(&outcome), "{outcome}");
    }
}

/// A mount that a program has used and has nothing open of can be unmounted, one of which it has
/// something open can't; and one that was made read-only is.
#[test]
fn mounts_are_as_busy_as_they_are() {
    if !can() || !has(&[Need::Program("python3")]) {
        return;
    }
    let served = Served::new(&Serve::over(Transport::Dev));
    let script = r#"exec python3 -c '
import errno, os, subprocess, sys
at = sys.argv[1]
f = os.open(at + "/file", os.O_RDWR | os.O_CREAT)
os.write(f, b"open")
busy = subprocess.run(["umount", at], stderr=subprocess.DEVNULL).returncode
os.close(f)
assert os.path.getsize(at + "/file") == 4
def refused(call):
    try: call()
    except OSError as e: return errno.errorcode[e.errno]
subprocess.run(["mount", "-o", "remount,bind,ro", at], check=True)
print(busy != 0, refused(lambda: os.mkdir(at + "/d")), refused(lambda: os.open(at + "/new", os.O_RDWR | os.O_CREAT)),
    refused(lambda: os.unlink(at + "/file")), os.path.exists(at + "/file"))
subprocess.run(["mount", "-o", "remount,bind,rw", at], check=True)
os.mkdir(at + "/d"); os.rmdir(at + "/d")
for i in range(3): os.close(os.open(at + "/again", os.O_RDWR | os.O_CREAT))
g = os.open(at + "/again", os.O_RDONLY); os.read(g, 1); os.close(g)
print(subprocess.run(["umount", at]).returncode, os.path.exists(at + "/file"))
' "$1""#;
    let mut served = served;
    served.mount.expect_gone();
    let outcome = served
        .mount
        .run(&mut under(How::Paths, script, &[&served.mount.at]));
    assert_eq!(
        outcome.stdout, "True EROFS EROFS EROFS True\n0 False\n",
        "{outcome}"
    );
    assert!(served_any(&outcome), "{outcome}");
}

/// What a process made is there when it is killed.
#[test]
fn killed() {
    if !can() || !has(&[Need::Program("python3")]) {
        return;
    }
    let served = Served::new(&Serve::over(Transport::Dev));
    let script = r#"exec python3 -c '
import os, sys
n = os.open(sys.argv[2], os.O_WRONLY | os.O_CREAT)
i = 0
while True:
    name = sys.argv[1] + "/%d" % i
    f = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
    os.write(f, b"%d" % i * (1 + i % 2000))
    os.close(f)
    i += 1
    os.pwrite(n, b"%08d" % i, 0)
' "$1" "$2""#;
    let count = served.scratch.path("count");
    let mut program = Running::start(&mut under(How::Paths, script, &[&served.mount.at, &count]));
    let made = || {
        let text = fs::read_to_string(&count).unwrap_or_default();
        text.parse::<usize>().unwrap_or(0)
    };
    wait_for("some files", || made() > 200);
    program.signal(Signal::KILL);
    program.wait(SOON).expect("a killed program ends");
    for i in 0..made() {
        let text = i.to_string().repeat(1 + i % 2000);
        let at = |dir: &Path| fs::read_to_string(dir.join(i.to_string())).unwrap_or_default();
        wait_for("what it wrote", || at(&served.source) == text);
        let mut cat = command("cat", [served.at(&i.to_string())]);
        if i % 20 == 0 {
            assert_eq!(served.mount.run(&mut cat).ok(), text);
        }
    }
}

/// Programs that walk, copy and remove trees.
#[test]
fn trees() {
    let programs = [
        "rsync", "tar", "find", "git", "setfacl", "getfacl", "python3",
    ];
    if !can() || !has(&programs.map(Need::Program)) {
        return;
    }
    let script = r#"
        mkdir -p tree/{a,b,c}/{d,e}/f
        for i in $(seq 60); do seq $((i * 7)) >tree/a/d/f/$i; echo $i >tree/b/$i; done
        ln tree/b/1 tree/c/hard; ln -s ../b/2 tree/c/soft; ln -s nowhere tree/c/dangling; mkfifo tree/c/fifo
        chmod 4711 tree/b/3; chown 12:34 tree/b/4; touch -d @1000000000 tree/b/5 tree/a
        setfacl -m u:12:rw tree/b/6 || true; setfacl -d -m g:34:rx tree/c || true
        rsync -aHAX tree/ copy/; rsync -aHAXni --checksum tree/ copy/ | wc -l
        cp -a tree other; diff -r --no-dereference tree other | grep -v fifo || true
        tar -C tree -cf one.tar --sort=name --mtime=@0 .; mkdir out; tar -C out -xpf one.tar
        (cd out; find . -printf '%p %M %U %G %n %l\n' | LC_ALL=C sort | md5sum)
        (cd copy; find . -type f -size +100c -newermt @1000000001 | LC_ALL=C sort | md5sum; find . -links 2 -type f | sort)
        (cd copy; find . -printf '%p %M %U %G %n %l %y\n' | LC_ALL=C sort | md5sum; find . ! -type l | LC_ALL=C sort | getfacl -n - | md5sum)
        mv copy/a copy/z; mkdir copy/y; mv copy/b/* copy/y/; rm -r copy/c; rmdir copy/b; find copy | LC_ALL=C sort | md5sum
        for i in $(seq 20); do cat tree/b/$i >>all; echo x >tree/b/new$i; rm tree/b/new$i; done; md5sum all
        ls -la --time-style=+ tree/b | awk 'NR > 1 {print $1, $2, $3, $4, $6}' | md5sum
        git init -q -b main repo; cd repo; git config user.name n; git config user.email e; git config gc.auto 0
        cp -a ../tree/a .; git add .; export GIT_AUTHOR_DATE='2001-01-01 00:00:00 +0000' GIT_COMMITTER_DATE='2001-01-01 00:00:00 +0000'
        git commit -q -m one; echo more >>a/d/f/7; rm a/d/f/8; echo new >a/new; git status --short; git diff --stat
        git checkout -q -b side; git commit -q -a -m two; git checkout -q main; git merge -q side; git log --format=%H; git stash list
        cd ..; git clone -q repo clone; git -C clone status --short; git -C clone log --format=%H; git -C clone fsck 2>/dev/null
        rm -rf repo clone one.tar; rm -r out other; find . -name '*.lock'; rm tree/c/fifo
        python3 -c '
import os, tempfile, shutil, glob, pathlib
with tempfile.TemporaryDirectory(dir=".") as d:
    for i in range(100): pathlib.Path(d, str(i)).write_text("x" * i)
    print(sorted(len(p.read_text()) for p in pathlib.Path(d).iterdir())[-3:], len(glob.glob(d + "/1*")))
    os.replace(d + "/1", d + "/2"); print(os.path.exists(d + "/1"), os.path.getsize(d + "/2"))
    print(sum(len(f) for _, _, f in os.walk(d)))
shutil.copytree("tree/b", "b2"); print(len(os.listdir("b2"))); shutil.rmtree("b2"); print(os.path.exists("b2"))'
    "#;
    for transport in transports() {
        let outcome = same_as_host(How::Paths, transport, &[], script);
        assert!(served_any(&outcome), "{outcome}");
    }
}

/// A database that is killed while it writes is whole, whoever looks.
#[test]
fn databases_are_killed() {
    if !can() || !has(&[Need::Program("sqlite3")]) {
        return;
    }
    let served = Served::new(&Serve::over(Transport::Dev));
    for mode in ["wal", "delete"] {
        let at = served.at(mode);
        let prepare = "sqlite3 \"$1\" 'pragma journal_mode='\"$2\"'; create table t(a integer primary key, b)'";
        served
            .mount
            .run(&mut under(How::Paths, prepare, &[&at, Path::new(mode)]))
            .ok();
        let script = "i=0; while :; do i=$((i + 1)); echo \"begin; insert into t(b) values($i); \
                      insert into t(b) values($i); commit; select 'done', $i;\"; done | exec sqlite3 \"$1\"";
        for _ in 0..2 {
            let mut program = Running::start(&mut under(How::Paths, script, &[&at]));
            let done = |program: &Running| program.stdout().lines().count();
            wait_for("some transactions", || done(&program) > 20);
            program.kill();
            let last = done(&program).saturating_sub(1);
            let query = format!(
                "pragma integrity_check; select count(*) % 2, count(*) >= {} from t;",
                2 * last
            );
            let check = format!("sqlite3 \"$1\" '{query}'");
            for mut command in [shell(&check, &[&at]), under(How::Paths, &check, &[&at])] {
                let outcome = served.mount.run(&mut command);
                assert_eq!(outcome.stdout, "ok\n0|1\n", "{mode} {last}: {outcome}");
            }
            let clear = "sqlite3 \"$1\" 'delete from t'";
            served.mount.run(&mut under(How::Paths, clear, &[&at])).ok();
        }
    }
}

#[test]
fn bonnie() {
    if !can() || !has(&[Need::Program("bonnie++")]) {
        return;
    }
    for transport in transports() {
        let served = Served::new(&Serve::over(transport));
        let script = "exec bonnie++ -q -u root -s 0 -n 1:4096:0:3 -d \"$1\"";
        let outcome = served
            .mount
            .run_within(LATER, &mut under(How::Paths, script, &[&served.mount.at]));
        assert!(
            outcome.status.success() && served_any(&outcome),
            "{outcome}"
        );
        assert_eq!(fs::read_dir(&served.source).unwrap().count(), 0);
    }
}

/// A program that closes everything again and again, while this library looks for a server that is gone:
/// neither closes what is the other's.
#[test]
fn everything_is_closed_by_a_program() {
    if !can() {
        return;
    }
    let source = r##"
        #define _GNU_SOURCE
        #include <fcntl.h>
        #include <signal.h>
        #include <stdio.h>
        #include <stdlib.h>
        #include <string.h>
        #include <unistd.h>
        int main(int argc, char **argv) {
            char text[6] = "";
            int file = open(argv[1], O_RDWR | O_CREAT, 0600);
            if (write(file, "x", 1) != 1 || pwrite(file, "yy", 2, 100) != 2 || fsync(file)) return 2;
            kill(atoi(argv[2]), SIGKILL);
            for (int i = 0; i < 1000; i++) {
                if (i % 2) closefrom(3);
                else for (int fd = 3; fd < 40; fd++) close(fd);
                int other = open("/etc/passwd", O_RDONLY);
                if (read(other, text, 5) != 5 || strcmp(text, "root:")) return 3;
            }
            puts("closed");
            return argc - 3;
        }
    "##;
    for how in BOTH {
        let mut served = Served::new(&Serve::over(Transport::Dev));
        let program = compiled(&served.scratch, "closes", source);
        let mut command = uvfs_run(how);
        command.arg("--").arg(&program).arg(served.at("file"));
        command.arg(served.mount.server.pid().to_string());
        served.mount.expect_gone();
        let outcome = served.mount.run_within(LATER, &mut command);
        assert_eq!(outcome.stdout, "closed\n", "{outcome}");
        assert!(
            outcome.status.success() && served_any(&outcome),
            "{outcome}"
        );
    }
}
