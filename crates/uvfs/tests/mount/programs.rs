//! Programs that people run, on the mount and on the host, with the results compared.

use std::fs;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::Command;

use rustix::fs::{lgetxattr, llistxattr};

use crate::harness::*;

/// Everything about a tree that a copy of it keeps: a line for each file.
fn manifest(root: &Path) -> String {
    let mut lines = Vec::new();
    let mut links = Vec::new();
    describe(root, root, &mut lines, &mut links);
    lines.sort();
    lines.join("\n")
}

fn describe(root: &Path, path: &Path, lines: &mut Vec<String>, links: &mut Vec<(u64, PathBuf)>) {
    let meta = path
        .symlink_metadata()
        .unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let name = path.strip_prefix(root).unwrap().to_path_buf();
    let kind = meta.file_type();
    let mut line = format!(
        "{} {:o} {}:{} ",
        name.display(),
        meta.mode(),
        meta.uid(),
        meta.gid()
    );
    if !kind.is_symlink() {
        line += &format!("{}.{:09} ", meta.mtime(), meta.mtime_nsec());
    }
    if kind.is_file() {
        line += &format!(
            "{} bytes {:016x} ",
            meta.len(),
            checksum(&fs::read(path).unwrap())
        );
        if meta.nlink() > 1 {
            let first = links
                .iter()
                .find(|l| l.0 == meta.ino())
                .map(|l| l.1.clone());
            let first = first.unwrap_or_else(|| {
                links.push((meta.ino(), name.clone()));
                name.clone()
            });
            line += &format!("{} links, like {} ", meta.nlink(), first.display());
        }
    } else if kind.is_symlink() {
        line += &format!("-> {} ", fs::read_link(path).unwrap().display());
    } else if kind.is_char_device() || kind.is_block_device() {
        line += &format!("device {} ", meta.rdev());
    }
    let mut names = vec![0; 4096];
    let length = llistxattr(path, &mut names[..]).unwrap_or(0);
    let mut names: Vec<_> = names[..length]
        .split(|b| *b == 0)
        .filter(|n| !n.is_empty())
        .collect();
    names.sort();
    for name in names {
        let mut value = vec![0; 4096];
        let length = lgetxattr(path, name, &mut value[..]).unwrap();
        line += &format!("{}={:?} ", String::from_utf8_lossy(name), &value[..length]);
    }
    lines.push(line);
    if kind.is_dir() {
        let mut children: Vec<_> = fs::read_dir(path)
            .unwrap()
            .map(|e| e.unwrap().path())
            .collect();
        children.sort();
        for child in children {
            describe(root, &child, lines, links);
        }
    }
}

/// FNV-1a.
fn checksum(bytes: &[u8]) -> u64 {
    let step = |hash: u64, byte: &u8| (hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3);
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, step)
}

/// Fails with the lines that differ.
#[track_caller]
fn same(what: &str, host: &str, mount: &str) {
    let missing: Vec<_> = host
        .lines()
        .filter(|l| !mount.lines().any(|m| m == *l))
        .collect();
    let new: Vec<_> = mount
        .lines()
        .filter(|l| !host.lines().any(|m| m == *l))
        .collect();
    assert!(
        missing.is_empty() && new.is_empty(),
        "{what}\nhost: {missing:#?}\nmount: {new:#?}"
    );
}

/// A tree with some of everything.
const TREE: &str = r#"
cd "$1"; umask 022
mkdir -p tree/a/b/c tree/empty; cd tree
for i in $(seq 200); do printf '%0*d\n' $((i * 37)) "$i" >a/file$i; done
head -c 3000000 /dev/urandom >a/b/large
truncate -s 10M a/b/sparse; printf end >>a/b/sparse
ln a/file1 a/b/c/hardlink; ln a/file1 hardlink
ln -s ../nowhere a/dangling; ln -s b/c a/link; ln -s /etc/passwd absolute
mkfifo fifo; mknod null c 1 3
printf x >'name with  blanks, "quotes"
and a newline'; printf x >"$(printf 'not utf-8: \xff\xfe')"; printf x >"$(printf 'x%.0s' {1..255})"
cp /bin/true setuid; chown 1:2 setuid; chmod 6755 setuid; chmod 1777 empty; chmod 000 a/file2
setfattr -n user.colour -v green a/file3; setfattr -n user.colour -v blue a/b
setfattr -n trusted.secret -v x a/file4
setfacl -m u:1:rwx,g:2:r-- a/file5; setfacl -d -m u:1:rwx a/b/c
chown -h 3:4 a/dangling; chown 65534:65534 a/file6
# All long ago: rsync leaves a time alone that differs in its nanoseconds only.
find . -exec touch -h -d '2020-02-02 02:02:02.202020202 UTC' {} +
touch -d '1999-12-31 23:59:59.123456789 UTC' a/file7
touch -d '2001-02-03 04:05:06.5 UTC' a/b/c a/b a
"#;

fn copied(transport: Transport) {
    use Need::*;
    let programs = ["tar", "rsync", "setfacl", "setfattr"].map(Program);
    if !has(&[Mount(transport)]) || !has(&programs) {
        return;
    }
    for option in ["", "writeback"] {
        let served = Served::new(&Serve::over(transport).option(option));
        let host = served.scratch.tmpfs("host", "200m");
        served.mount.run(&mut shell(TREE, &[&host])).ok();
        let original = manifest(&host.join("tree"));
        let archive = "tar --acls --xattrs --xattrs-include='*' --numeric-owner --sparse";
        let through_tar = format!("{archive} -C \"$1\" -cf - tree | {archive} -pC \"$2\" -xf -");
        let through_rsync = "rsync -aHAX --numeric-ids \"$1/tree\" \"$2/\"".to_owned();
        for (name, script) in [("tar", through_tar), ("rsync", through_rsync)] {
            let there = served.mount.at.join(name);
            let back = served.scratch.dir(&format!("{name}.back"));
            run(Command::new("mount")
                .args(["-t", "tmpfs", "tmpfs"])
                .arg(&back))
            .ok();
            let prepare = "mkdir \"$1\"";
            served.mount.run(&mut shell(prepare, &[&there])).ok();
            served.mount.run(&mut shell(&script, &[&host, &there])).ok();
            served.mount.run(&mut shell(&script, &[&there, &back])).ok();
            let at_source = served.source.join(name).join("tree");
            same(
                &format!("{name} into the mount"),
                &original,
                &manifest(&at_source),
            );
            same(
                &format!("{name} out of the mount"),
                &original,
                &manifest(&back.join("tree")),
            );
        }
        let again = "rsync -aHAXn --numeric-ids --itemize-changes \"$1/tree\" \"$2/\"";
        let there = served.mount.at.join("rsync");
        let changes = served.mount.run(&mut shell(again, &[&host, &there])).ok();
        assert_eq!(changes, "", "a second rsync finds changes");
        let differ = "diff -r --no-dereference \"$1/tree/a\" \"$2/tree/a\"";
        served.mount.run(&mut shell(differ, &[&host, &there])).ok();
        served.mount.unmount();
    }
}

/// The repository that this program was built from, or one made here.
fn repository(scratch: &Scratch) -> PathBuf {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let find = "git -C \"$1\" -c safe.directory='*' rev-parse --show-toplevel";
    let found = run(&mut shell(find, &[here]));
    if found.status.success() {
        return found.stdout.trim_end().into();
    }
    let made = scratch.dir("repository");
    let make = r#"
        cd "$1"; git init -q; for i in $(seq 300); do seq $i >f$i; done; git add .
        git -c user.name=t -c user.email=t@localhost commit -qm first
        for i in $(seq 100); do seq $((i * 2)) >f$i; done
        git -c user.name=t -c user.email=t@localhost commit -qam second"#;
    run(&mut shell(make, &[&made])).ok();
    made
}

/// Clones `$1` into `$2`/clone and prints what must be the same everywhere.
const CLONE: &str = r#"
export GIT_CONFIG_COUNT=1 GIT_CONFIG_KEY_0=safe.directory GIT_CONFIG_VALUE_0='*'
git clone -q --no-hardlinks "$1" "$2/clone" 2>/dev/null; cd "$2/clone"
git fsck --full --strict --no-dangling 2>&1 | grep -v '^notice:' || true
git rev-parse HEAD; git ls-files -s
git gc -q; git status --porcelain
echo change >>"$(git ls-files | sed -n 1p)"; git -c user.name=t -c user.email=t@localhost commit -qam change
git checkout -q HEAD~1; git status --porcelain; git log --format='%T' -3; git write-tree
"#;

fn git_clones(transport: Transport) {
    if !has(&[Need::Mount(transport), Need::Program("git")]) {
        return;
    }
    let served = Served::new(&Serve::over(transport).option("writeback"));
    let host = served.scratch.tmpfs("host", "1g");
    let repository = repository(&served.scratch);
    let expected = run_within(LATER, &mut shell(CLONE, &[&repository, &host])).ok();
    let script = &mut shell(CLONE, &[&repository, &served.mount.at]);
    let cloned = served.mount.run_within(LATER, script).ok();
    same("git", &expected, &cloned);
    let differ = "diff -r --no-dereference --exclude=.git \"$1/clone\" \"$2/clone\"";
    served
        .mount
        .run(&mut shell(differ, &[&host, &served.mount.at]))
        .ok();
    served.mount.unmount();
}

const PACKAGE: &str = r#"
cd "$1"; mkdir -p small/src small/lib/src; cd small
cat >Cargo.toml <<'T'
[package]
name = "small"
version = "0.1.0"
edition = "2021"
[dependencies]
lib = { path = "lib" }
[workspace]
T
cat >lib/Cargo.toml <<'T'
[package]
name = "lib"
version = "0.1.0"
edition = "2021"
T
echo 'pub fn answer() -> u32 { include_str!("number").trim().parse().unwrap() }' >lib/src/lib.rs
echo 42 >lib/src/number
cat >build.rs <<'T'
fn main() { println!("cargo:rerun-if-changed=build.rs"); println!("cargo:rustc-env=BUILT=yes"); }
T
echo 'fn main() { println!("{} {}", lib::answer(), env!("BUILT")); }' >src/main.rs
echo '#[test] fn right() { assert_eq!(lib::answer(), 42); }' >>src/main.rs
cargo test --offline 2>&1 | grep '^test .* \.\.\. '
cargo run --offline --quiet
# Nothing has changed: cargo goes by the files' times.
cargo build --offline 2>&1 | grep -c Compiling || true
sleep 0.02; echo 43 >lib/src/number
cargo run --offline --quiet
"#;

fn cargo_builds(transport: Transport) {
    if !has(&[Need::Mount(transport), Need::Program("cargo")]) {
        return;
    }
    let served = Served::new(&Serve::over(transport));
    let mut cargo = shell(PACKAGE, &[&served.mount.at]);
    forget_cargo(&mut cargo);
    let report = served.mount.run_within(LATER, &mut cargo).ok();
    assert_eq!(report, "test right ... ok\n42 yes\n0\n43 yes\n");
    served.mount.unmount();
}

/// Takes away what this cargo tells its children.
fn forget_cargo(command: &mut Command) {
    let inherited = std::env::vars_os().filter(|(name, _)| {
        name.to_str()
            .is_some_and(|n| n.starts_with("CARGO_") && n != "CARGO_HOME")
    });
    for (name, _) in inherited {
        command.env_remove(name);
    }
    command.env_remove("RUSTFLAGS");
}

/// Clones `$1` to `$2`/clone, tests there what `$3`… name, and looks whether the files are still
/// those of the commit.
const BUILD: &str = r#"
export GIT_CONFIG_COUNT=1 GIT_CONFIG_KEY_0=safe.directory GIT_CONFIG_VALUE_0='*'
git clone -q --no-hardlinks "$1" "$2/clone"; cd "$2/clone"; shift 2
export CARGO_TARGET_DIR=$PWD/target CARGO_INCREMENTAL=0 CARGO_PROFILE_DEV_DEBUG=0 CARGO_PROFILE_DEV_OPT_LEVEL=0
cargo test --offline "$@" 2>"$CARGO_TARGET_DIR.log" || { cat "$CARGO_TARGET_DIR.log" >&2; exit 1; }
# Nothing has changed: cargo goes by the files' times.
cargo test --offline --no-run "$@" 2>&1 | sed -n 's/.*Compiling/again:/p'
rm "$CARGO_TARGET_DIR.log"; git status --porcelain
"#;

/// This repository, cloned into the mount and built there: one crate and what it needs, or all.
fn own_repository_builds(transport: Transport) {
    use Need::*;
    if !has(&[Mount(transport), Program("cargo"), Program("git")]) {
        return;
    }
    let served = Served::new(&Serve::over(transport));
    let repository = repository(&served.scratch);
    if !repository.join("crates/uvfs-queue").exists() {
        return uvfs_testing::say("these sources are in no git repository");
    }
    let (what, limit) = match full() {
        true => (&["--workspace", "--lib", "--bins"][..], 6 * LATER),
        // The crate with the fewest dependencies that still has some with build scripts.
        false => (&["--package", "uvfs-queue", "--lib"][..], 3 * LATER),
    };
    let mut cargo = shell(BUILD, &[&repository, &served.mount.at]);
    forget_cargo(cargo.args(what));
    let report = served.mount.run_within(limit, &mut cargo).ok();
    let results: Vec<_> = report
        .lines()
        .filter(|line| line.starts_with("test result: "))
        .collect();
    assert!(
        !results.is_empty() && results.iter().all(|line| line.contains(" 0 failed")),
        "{report}"
    );
    assert!(report.contains(" ... ok"), "no test ran: {report}");
    assert!(!report.contains("again:"), "built twice: {report}");
    assert!(
        report
            .trim_end()
            .lines()
            .last()
            .is_some_and(|line| line.starts_with("test result: ")),
        "git sees changes: {report}"
    );
    served.mount.unmount();
}

/// Two writers at once, in both ways of journaling.
const SQLITE: &str = r#"
cd "$1"
for mode in delete wal; do
  sqlite3 $mode.db "pragma journal_mode=$mode; create table t(id integer primary key, who, text)"
  sqlite3 $mode.db "with recursive c(x) as (select 1 union all select x+1 from c where x<5000)
    insert into t(who, text) select 'first', printf('%0200d', x) from c"
  pids=()
  for who in a b; do
    (echo '.timeout 60000'
     for i in $(seq 100); do
       echo "begin immediate; insert into t(who, text) values('$who', '$i');"
       echo "update t set text=text||'$who' where id=$i; commit;"
     done) | sqlite3 $mode.db &
    pids+=($!)
  done
  for pid in "${pids[@]}"; do wait "$pid"; done
  sqlite3 $mode.db "delete from t where id between 1000 and 2000; vacuum; pragma integrity_check;
    select who, count(*), sum(length(text)) from t group by who"
  sqlite3 -readonly $mode.db 'select count(*) from t'
done
"#;

fn sqlite_keeps_its_data(transport: Transport) {
    if !has(&[Need::Mount(transport), Need::Program("sqlite3")]) {
        return;
    }
    for option in ["", "writeback"] {
        let served = Served::new(&Serve::over(transport).option(option));
        let host = served.scratch.tmpfs("host", "200m");
        let expected = run_within(LATER, &mut shell(SQLITE, &[&host])).ok();
        assert!(expected.contains("\nok\n"), "{expected}");
        let got = served
            .mount
            .run_within(LATER, &mut shell(SQLITE, &[&served.mount.at]))
            .ok();
        assert_eq!(expected, got);
        served.mount.unmount();
    }
}

fn fio_reads_what_it_wrote(transport: Transport) {
    if !has(&[Need::Mount(transport), Need::Program("fio")]) {
        return;
    }
    for option in ["", "nopassthrough", "writeback", "direct_io"] {
        let served = Served::new(&Serve::over(transport).option(option));
        for (job, arguments) in [
            (
                "buffered",
                "--ioengine=psync --bsrange=512-128k --size=24m --rw=randwrite",
            ),
            (
                "direct",
                "--ioengine=psync --direct=1 --bs=4k --size=8m --rw=randwrite",
            ),
            (
                "queued",
                "--ioengine=libaio --iodepth=16 --direct=1 --bs=64k --size=32m --rw=write",
            ),
            (
                "large",
                "--ioengine=psync --direct=1 --bs=4m --size=64m --rw=write",
            ),
            (
                "jobs",
                "--ioengine=psync --numjobs=4 --bs=16k --size=8m --rw=randwrite --fsync=64",
            ),
        ] {
            let mut fio = command("fio", ["--output-format=terse", "--verify=crc32c"]);
            fio.args([
                "--verify_fatal=1",
                "--do_verify=1",
                "--randrepeat=1",
                "--randseed=7",
            ]);
            fio.arg(format!("--name={job}")).args(arguments.split(' '));
            fio.arg(format!("--directory={}", served.mount.at.display()));
            fio.current_dir(served.scratch.path(""));
            let outcome = served.mount.run_within(LATER, &mut fio);
            assert!(outcome.status.success(), "-o {option:?}: {outcome}");
        }
        served.mount.unmount();
    }
}

fn bonnie_runs(transport: Transport) {
    if !has(&[Need::Mount(transport), Need::Program("bonnie++")]) {
        return;
    }
    let served = Served::new(&Serve::over(transport));
    let mut bonnie = command(
        "bonnie++",
        ["-q", "-s0", "-n", "2:4096:1:8", "-u", "root", "-d"],
    );
    bonnie.arg(&served.mount.at);
    served.mount.run_within(LATER, &mut bonnie).ok();
    assert_eq!(
        fs::read_dir(&served.source).unwrap().count(),
        0,
        "files were left"
    );
    served.mount.unmount();
}

macro_rules! over_both {
    ($($name:ident)*) => {
        mod over_dev {
            $(#[test]
            fn $name() {
                super::$name(super::Transport::Dev);
            })*
        }
        mod over_uring {
            $(#[test]
            fn $name() {
                super::$name(super::Transport::Uring);
            })*
        }
    };
}

over_both! {
    copied
    git_clones
    cargo_builds
    own_repository_builds
    sqlite_keeps_its_data
    fio_reads_what_it_wrote
    bonnie_runs
}
