//! `uvfs run --eager`: calls on files and paths give under it what they give without it and on the host.

use std::fs;
use std::path::{Path, PathBuf};

use crate::harness::*;
use crate::preload::{How, same_as_host, served_any, under, uvfs_run};

fn can() -> bool {
    has(&[Need::Mount(Transport::Dev), Need::Uvfs, Need::Program("cc")])
}

pub fn compiled(scratch: &Scratch, name: &str, source: &str) -> PathBuf {
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

/// The same calls in a directory on the host, on the mount, and on it under `uvfs run --eager`.
fn same_everywhere(part: &str) {
    if !can() {
        return;
    }
    for transport in transports() {
        let served = Served::new(&Serve::for_clients(transport));
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
        let mut command = uvfs_run(How::Eager);
        command.arg("--").arg(&program).arg(&on_mount).arg(part);
        let outcome = served.mount.run_within(LATER, &mut command);
        if let Some(different) = difference(&on_host, &outcome.stdout) {
            panic!(
                "the host, and with --eager over {transport}:\n{different}\n{}",
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

/// Every call gives the same result under `uvfs run`.
#[test]
fn every_call_on_every_kind_of_path() {
    same_everywhere("0");
}

/// Descriptors that are passed on or inherited lead to the same files under `uvfs run`.
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
        let served = Served::new(&Serve::for_clients(transport));
        let program = compiled(&served.scratch, "stress", include_str!("programs/stress.c"));
        let rounds = if full() { "2000" } else { "150" };
        let mut command = uvfs_run(How::Eager);
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

/// Programs that walk, copy and remove trees do the same under `uvfs run`.
#[test]
fn programs_walk_and_copy_trees() {
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
        let outcome = same_as_host(How::Eager, transport, &[], script);
        assert!(served_any(&outcome), "{outcome}");
    }
}

/// A database that is killed while it writes is whole.
#[test]
fn databases_are_killed() {
    if !can() || !has(&[Need::Program("sqlite3")]) {
        return;
    }
    let served = Served::new(&Serve::for_clients(Transport::Dev));
    for mode in ["wal", "delete"] {
        let at = served.at(mode);
        let prepare = "sqlite3 \"$1\" 'pragma journal_mode='\"$2\"'; create table t(a integer primary key, b)'";
        served
            .mount
            .run(&mut under(How::Eager, prepare, &[&at, Path::new(mode)]))
            .ok();
        let script = "i=0; while :; do i=$((i + 1)); echo \"begin; insert into t(b) values($i); \
                      insert into t(b) values($i); commit; select 'done', $i;\"; done | exec sqlite3 \"$1\"";
        for _ in 0..2 {
            let mut program = Running::start(&mut under(How::Eager, script, &[&at]));
            let done = |program: &Running| program.stdout().lines().count();
            wait_for("some transactions", || done(&program) > 20);
            program.kill();
            let last = done(&program).saturating_sub(1);
            let query = format!(
                "pragma integrity_check; select count(*) % 2, count(*) >= {} from t;",
                2 * last
            );
            let check = format!("sqlite3 \"$1\" '{query}'");
            for mut command in [shell(&check, &[&at]), under(How::Eager, &check, &[&at])] {
                let outcome = served.mount.run(&mut command);
                assert_eq!(outcome.stdout, "ok\n0|1\n", "{mode} {last}: {outcome}");
            }
            let clear = "sqlite3 \"$1\" 'delete from t'";
            served.mount.run(&mut under(How::Eager, clear, &[&at])).ok();
        }
    }
}

/// bonnie++ passes under `uvfs run`.
#[test]
fn bonnie_passes() {
    if !can() || !has(&[Need::Program("bonnie++")]) {
        return;
    }
    for transport in transports() {
        let served = Served::new(&Serve::for_clients(transport));
        let script = "exec bonnie++ -q -u root -s 0 -n 1:4096:0:3 -d \"$1\"";
        let outcome = served
            .mount
            .run_within(LATER, &mut under(How::Eager, script, &[&served.mount.at]));
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
    let mut served = Served::new(&Serve::for_clients(Transport::Dev));
    let program = compiled(&served.scratch, "closes", source);
    let mut command = uvfs_run(How::Eager);
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
