//! Programs under `uvfs run`, on a mount: what they leave is what they leave without it.

mod descriptors;
mod ends;
mod namespaces;
mod set_id;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use rustix::process::Signal;

use crate::harness::*;

/// The library. Cargo makes it for the command, which depends on it.
pub fn library() -> PathBuf {
    Path::new(env!("CARGO_BIN_EXE_uvfs")).with_file_name("deps/libuvfs_preload.so")
}

/// The calls that `uvfs run` serves: most tests have it serve everything.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum How {
    /// The calls that pay, as people run it.
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
    same_on(how, &served.mount, &served.source, script)
}

/// As [`same_as_host`], on a mount of which the server has the files in `source`.
pub fn same_on(how: How, mount: &Mount, source: &Path, script: &str) -> Outcome {
    let scratch = Scratch::new();
    let host = scratch.dir("host");
    for dir in [&host, &mount.at] {
        fs::create_dir(dir.join("work")).unwrap();
    }
    let script = format!("cd \"$1\"/work; {script}");
    let on_host = run_within(LATER, &mut shell(&script, &[&host])).ok();
    let outcome = mount.run_within(LATER, &mut under(how, &script, &[&mount.at]));
    assert!(outcome.status.success(), "{outcome}");
    assert_eq!(outcome.stdout, on_host, "{outcome}");
    // And the trees are the same, seen by the server.
    run(Command::new("diff")
        .args(["-r", "--no-dereference"])
        .arg(host.join("work"))
        .arg(source.join("work")))
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

/// cp, tar, sort and other everyday programs.
pub const EVERYDAY: &str = r#"
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

/// sqlite and git.
pub const DATABASES: &str = r#"
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

/// cp, tar, sort and other everyday programs leave the same files under `uvfs run`.
#[test]
fn everyday_programs() {
    if !can() {
        return;
    }
    for transport in transports() {
        let outcome = same_as_host(How::Eager, transport, &["tar"], EVERYDAY);
        assert!(served_any(&outcome), "{outcome}");
    }
}

/// Programs that live for milliseconds get no session.
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
    assert!(!outcome.stderr.contains("calls served"), "{outcome}");
    assert!(!outcome.stderr.contains("going on"), "{outcome}");
}

/// sqlite and git leave sound files under `uvfs run`.
#[test]
fn databases_and_repositories() {
    if !can() || !has(&["sqlite3", "git"].map(Need::Program)) {
        return;
    }
    same_as_host(How::Eager, Transport::Dev, &[], DATABASES);
}

/// fio reads back the blocks that it wrote.
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

/// make and rsync leave the same files under `uvfs run`.
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

/// A random mix of calls reads back what was written under `uvfs run`.
#[test]
fn fsx_reads_back() {
    if !can() || !has(&[Need::Tool("fsx")]) {
        return;
    }
    fsx_on(&Served::new(&Serve::for_clients(Transport::Dev)).mount);
}

/// Has fsx under `uvfs run` read back what it writes on a mount.
pub fn fsx_on(mount: &Mount) {
    let scratch = Scratch::new();
    let configuration = scratch.path("configuration");
    // Without mappings: after the first the file is the kernel's. Its calls must be the C library's.
    let text = "[opsize]\nmax = 65536\n[weights]\nclose_open = 1\ninvalidate = 0\nmapread = 0\n\
                mapwrite = 0\nread = 10\nwrite = 10\ntruncate = 10\nfsync = 1\nfdatasync = 1\n\
                posix_fallocate = 5\npunch_hole = 5\nsendfile = 5\nposix_fadvise = 1\n\
                copy_file_range = 5\n";
    fs::write(&configuration, text).unwrap();
    let operations = if full() { 20_000 } else { 2_000 };
    let script = r#"exec "$1" -q -N "$5" -S 11 -P "$2" -f "$3" "$4""#;
    let (tool, dir, file) = (tool("fsx"), scratch.path(""), mount.at.join("file"));
    let operations = operations.to_string();
    let args: [&Path; 5] = [&tool, &dir, &configuration, &file, operations.as_ref()];
    let mut command = under(How::Eager, script, &args);
    let outcome = mount.run_within(LATER, &mut command);
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
    for transport in transports() {
        agree_on(&Served::new(&Serve::for_clients(transport)).mount);
    }
}

/// Has two programs on one file of a mount, one under `uvfs run` and one not, agree on it.
pub fn agree_on(mount: &Mount) {
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
    let mut both = command("python3", ["-c", program]);
    let run = uvfs_run(How::Eager);
    both.arg(mount.at.join("file"))
        .arg(run.get_program())
        .args(run.get_args())
        .arg("--")
        .env("UVFS_PRELOAD", library());
    let outcome = mount.run_within(LATER, &mut both);
    assert_eq!(outcome.stdout, "agreed\n", "{outcome}");
    assert!(served_any(&outcome), "{outcome}");
}

/// `uvfs run` ends with the program's exit status.
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

/// `uvfs run --report` says which files the kernel served, and why.
#[test]
fn the_report_says_why_the_kernel_served_a_file() {
    if !can() || !has(&[Need::Program("python3")]) {
        return;
    }
    let open = "import os, sys, mmap, fcntl; f = os.open(sys.argv[1], os.O_RDWR); ";
    let says = |program: &str, how, options, expected: &str| {
        let served = Served::new(&Serve::over(Transport::Dev).option(options));
        fs::write(served.source.join("file"), [7; 8192]).unwrap();
        let script = r#"exec python3 -c "$1" "$2"/file"#;
        let program = format!("{open}{program}");
        let mut command = under(how, script, &[Path::new(&program), &served.mount.at]);
        let outcome = served.mount.run_within(LATER, &mut command);
        assert!(outcome.status.success(), "{outcome}");
        let python = |line: &&str| line.starts_with("uvfs run: python3");
        let lines: Vec<_> = outcome.stderr.lines().filter(python).collect();
        let report = lines.join("\n");
        assert!(report.contains(expected), "{program}: {report}");
        report
    };
    let none = "nopassthrough";
    let little = "1 files left to the kernel: 1 used too little to gain";
    let report = says("os.read(f, 100)", How::AsItPays, none, little);
    assert!(!report.contains("calls served"), "{report}");
    let backed = "1 files left to the kernel: 1 with a backing file";
    says("os.read(f, 100)", How::Eager, "passthrough=auto", backed);
    let report = says(
        "os.read(f, 100)",
        How::Eager,
        none,
        "1 files, 1 calls served",
    );
    assert!(!report.contains("left to the kernel"), "{report}");
    let mapped = "1 files left to the kernel: 1 mapped shared and writable later";
    says(
        "os.read(f, 100); mmap.mmap(f, 4096)",
        How::Eager,
        none,
        mapped,
    );
    let program = "os.read(f, 100); fcntl.fcntl(f, fcntl.F_SETFL, os.O_APPEND)";
    let switched = "1 files left to the kernel: 1 with changed flags later";
    says(program, How::Eager, none, switched);
}

/// `uvfs stats` shows a program while it is attached, with its figures.
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

/// On a mount that is synchronous, a program's write under `uvfs run` is with the host when it returns.
#[test]
fn a_synchronous_mount_holds_nothing_back_under_uvfs_run() {
    if !has(&[
        Need::Mount(Transport::Dev),
        Need::Uvfs,
        Need::Program("python3"),
    ]) {
        return;
    }
    // The host's file, before this one is closed or synced.
    let script = "import os, sys\n\
        fd = os.open(sys.argv[1] + '/file', os.O_CREAT | os.O_RDWR)\n\
        os.write(fd, b'first')\n\
        os.pwrite(fd, b'second', 5)\n\
        print(open(sys.argv[2] + '/file').read())";
    for (option, expected) in [("async", ""), ("sync", "firstsecond")] {
        let served = Served::new(&Serve::for_clients(Transport::Dev).option(option));
        let mut command = uvfs_run(How::Eager);
        command.args(["--", "python3", "-c", script]);
        command.arg(&served.mount.at).arg(&served.source);
        let outcome = served.mount.run(&mut command);
        assert!(served_any(&outcome), "{option}: {outcome}");
        assert_eq!(outcome.ok().trim(), expected, "{option}");
    }
}
