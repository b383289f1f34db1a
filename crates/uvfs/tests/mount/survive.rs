//! `-o survive`: a mount goes on when its server is killed, and no program sees an error.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use uvfs_server::stats::{Report, SurviveReport};
use uvfs_testing::outlives::{self, PAUSE};

use crate::harness::*;

/// How to serve a mount that outlives its server.
pub fn survives() -> Serve {
    Serve::over(Transport::Dev).option("survive")
}

/// How to serve one over FUSE-over-io_uring.
fn survives_fast() -> Serve {
    Serve::over(Transport::Uring).option("survive=fast")
}

/// The process that serves: the keeper is the one that was started.
fn worker(mount: &Mount) -> Option<Pid> {
    outlives::worker(mount.server.pid())
}

fn report(at: &Path) -> Report {
    let outcome = run(uvfs().args(["stats", "--json"]).arg(at)).ok();
    serde_json::from_str(&outcome).unwrap()
}

pub(crate) fn counts(mount: &Mount) -> SurviveReport {
    report(&mount.at)
        .survive
        .expect("the mount outlives its server")
}

/// Waits until the keeper knows that its worker serves: before that, it ends with it.
pub(crate) fn is_kept(mount: &Mount) {
    wait_for("the keeper", || counts(mount).programs > 0);
}

fn outlives(serve: &Serve) -> Served {
    let served = Served::new(serve);
    is_kept(&served.mount);
    served
}

/// Starts the programs, for so long. `words` are those that the file system does not have, and perhaps `full`.
fn load(mount: &Mount, time: Duration, words: &[&str]) -> Running {
    let mut python = Command::new("python3");
    python.args(["-c", outlives::PROGRAMS]);
    python.arg(&mount.at).arg(time.as_secs_f64().to_string());
    Running::start(python.args(words))
}

/// All programs, with those that take longer where tests may.
fn all() -> &'static [&'static str] {
    if full() { &["", "full"] } else { &[] }
}

/// Kills the worker, and waits for the next one.
pub(crate) fn replaced(mount: &Mount, signal: Signal) {
    let old = worker(mount).expect("a worker");
    kill_process(old, signal).unwrap();
    wait_for("the next server", || {
        worker(mount).is_some_and(|now| now != old)
    });
}

/// Does something while the server is replaced again and again: by turns another one after it is killed, and another
/// program.
pub fn while_replaced<T>(mount: &Mount, does: impl FnOnce() -> T) -> T {
    let every = if full() {
        Duration::from_secs(1)
    } else {
        PAUSE
    };
    let ended = AtomicBool::new(false);
    let outcome = std::thread::scope(|scope| {
        let replaces = scope.spawn(|| {
            for turn in 1.. {
                std::thread::sleep(every);
                if ended.load(Ordering::Relaxed) {
                    return turn - 1;
                }
                match turn % 2 {
                    0 => drop(upgrade(mount).ok()),
                    _ => replaced(mount, Signal::KILL),
                }
            }
            0
        });
        let outcome = catch_unwind(AssertUnwindSafe(does));
        ended.store(true, Ordering::Relaxed);
        let replaced = replaces.join().expect("the server is replaced");
        eprintln!("replaced {replaced} times");
        assert!(replaced > 0);
        outcome
    });
    outcome.unwrap_or_else(|panic| resume_unwind(panic))
}

/// Whether the machine has what the programs need.
pub(crate) fn has_load() -> bool {
    has_load_over(Transport::Dev)
}

fn has_load_over(transport: Transport) -> bool {
    let long = ["git", "make", "cc", "fio", "tail"].map(Need::Program);
    has(&[Need::Mount(transport), Need::Uvfs, Need::Program("python3")]) && (!full() || has(&long))
}

/// Runs the programs while the server is killed again and again.
pub(crate) fn kill_under_load(mount: &Mount, words: &[&str], signal: Signal) {
    let kills = outlives::kills();
    let time = PAUSE * (kills + 4);
    let mut load = load(mount, time, words);
    let mut done = 0;
    while load.ended().is_none() && done < kills {
        std::thread::sleep(PAUSE);
        if let Some(worker) = worker(mount)
            && kill_process(worker, signal).is_ok()
        {
            done += 1;
        }
    }
    let outcome = load.wait(time + LATER).expect("the programs end").ok();
    eprintln!("{done} kills: {outcome}");
    let counts = counts(mount);
    assert!(
        counts.generation > u64::from(kills / 2),
        "{counts:?} after {done} kills"
    );
}

/// Between two of a server's ends are so many writes, at most.
pub(crate) const WRITES: u32 = 600;

/// Runs the programs while each server but the first dies between two of its writes.
pub(crate) fn die_under_load(mount: &Mount, words: &[&str]) {
    replaced(mount, Signal::KILL);
    let time = Duration::from_secs(if full() { 120 } else { 4 });
    let mut load = load(mount, time, words);
    let outcome = load.wait(time + LATER).expect("the programs end").ok();
    let counts = counts(mount);
    eprintln!("{} servers: {outcome}", counts.generation);
    assert!(counts.generation > 20, "{counts:?}");
}

fn killed_under_load(serve: &Serve, signal: Signal) {
    if !has_load_over(serve.transport) {
        return;
    }
    let served = outlives(serve);
    kill_under_load(&served.mount, all(), signal);
    // The source is what the mount shows.
    let list = |at: &Path| run(Command::new("ls").arg("-AlR").current_dir(at)).ok();
    assert_eq!(list(&served.mount.at), list(&served.source));
}

/// No call fails, and no change is lost or made twice, when the server is killed by `kill -9`.
#[test]
fn a_killed_server_is_replaced() {
    killed_under_load(&survives(), Signal::KILL);
}

/// The same over FUSE-over-io_uring.
#[test]
fn a_killed_server_is_replaced_fast() {
    killed_under_load(&survives_fast(), Signal::KILL);
}

/// The same where the kernel asks the server for all data.
#[test]
fn a_killed_server_is_replaced_without_backing_files() {
    killed_under_load(&survives().option("nopassthrough"), Signal::KILL);
}

/// The same over FUSE-over-io_uring.
#[test]
fn a_killed_server_is_replaced_fast_without_backing_files() {
    killed_under_load(&survives_fast().option("nopassthrough"), Signal::KILL);
}

fn dies_between_two_writes(serve: Serve) {
    if full() && has_load_over(serve.transport) {
        let served = outlives(&serve.option("nopassthrough").dies_within(WRITES));
        die_under_load(&served.mount, &["lists"]);
    }
}

/// The same for servers that die between two of their writes: one of the long variants. A long listing is many writes.
#[test]
fn a_server_dies_between_two_writes() {
    dies_between_two_writes(survives());
}

/// The same over FUSE-over-io_uring.
#[test]
fn a_fast_server_dies_between_two_writes() {
    dies_between_two_writes(survives_fast());
}

fn can_not_die(serve: Serve, signal: Signal) {
    let needs = [
        Need::Mount(serve.transport),
        Need::Uvfs,
        Need::Program("python3"),
    ];
    if !has(&needs) {
        return;
    }
    let served = Served::new(&serve.option("nopassthrough"));
    fs::write(served.source.join("hot"), vec![1; 4 << 20]).unwrap();
    let mut python = Command::new("python3");
    python.args(["-c", include_str!("programs/hot.py")]);
    python.arg(&served.source).arg(&served.mount.at);
    let mut load = Running::start(python.arg(if full() { "60" } else { "5" }));
    for turn in 0.. {
        std::thread::sleep(PAUSE);
        if load.ended().is_some() {
            break;
        }
        // The mount ends with ten servers in a row that crash soon, which all do on a busy machine.
        let signal = if turn % 5 == 4 { Signal::KILL } else { signal };
        if let Some(worker) = worker(&served.mount) {
            let _ = kill_process(worker, signal);
        }
    }
    load.wait(SOON).expect("the program ends").ok();
}

/// A killed server whose notification waits in the kernel for a page, which only the next server can bring, is replaced.
#[test]
fn a_server_that_can_not_die_is_replaced() {
    can_not_die(survives(), Signal::KILL);
}

/// Nor is one waited for that crashes meanwhile: the kernel dumps it once those threads have stopped.
#[test]
fn a_server_whose_crash_can_not_end_is_replaced() {
    can_not_die(survives(), Signal::ABORT);
}

/// The same over FUSE-over-io_uring.
#[test]
fn a_fast_server_that_can_not_die_is_replaced() {
    can_not_die(survives_fast(), Signal::KILL);
}

/// The same when it crashes.
#[test]
fn a_fast_server_whose_crash_can_not_end_is_replaced() {
    can_not_die(survives_fast(), Signal::SEGV);
}

/// A server that crashes is replaced.
#[test]
fn a_crashed_server_is_replaced() {
    killed_under_load(&survives(), Signal::ABORT);
}

/// The same over FUSE-over-io_uring.
#[test]
fn a_fast_server_that_crashes_is_replaced() {
    killed_under_load(&survives_fast(), Signal::SEGV);
}

/// A file that only an open descriptor, a mapping, a lock or a working directory leads to is the same afterwards.
#[test]
fn what_was_open_stays_open() {
    if !has(&[Need::Mount(Transport::Dev), Need::Uvfs]) {
        return;
    }
    let served = outlives(&survives());
    let mut held = Running::start(&mut shell(
        "cd \"$1\" && mkdir gone && echo held > held && exec 3<>held 4<>removed 8<held && rm removed && cd gone && \
         rmdir ../gone && flock 3 && echo kept >&4 && echo ready > ../ready && while ! [ -e ../go ]; do sleep 0.01; \
         done; read line <&3 && [ \"$line\" = held ] && echo more >&4 && [ \"$(cat /proc/self/fd/4)\" = \"$(printf \
         'kept\\nmore')\" ] && [ \"$(stat -c %h .)\" = 0 ]",
        &[&served.mount.at],
    ));
    wait_for("the program", || served.source.join("ready").exists());
    let taken = || shell("flock -n \"$1/held\" true", &[&served.mount.at]);
    for turn in 0..7 {
        match turn % 3 {
            0 => drop(upgrade(&served.mount).ok()),
            _ => replaced(&served.mount, Signal::KILL),
        }
        let outcome = served.mount.run(&mut taken());
        assert_eq!(
            outcome.status.code(),
            Some(1),
            "the lock is held: {outcome}"
        );
    }
    fs::write(served.source.join("go"), "").unwrap();
    held.wait(SOON).expect("the program ends").ok();
    served.mount.run(&mut taken()).ok();
}

/// What the host changes while there is no server shows afterwards, though the kernel had it cached.
#[test]
fn changes_of_the_host_show_afterwards() {
    if !has(&[Need::Mount(Transport::Dev), Need::Uvfs]) {
        return;
    }
    let served = outlives(&survives());
    for name in ["file", "gone", "moves"] {
        fs::write(served.source.join(name), "old").unwrap();
    }
    let cat = || {
        served
            .mount
            .run(Command::new("cat").arg(served.at("file")))
            .ok()
    };
    let there = || {
        let script = "cd \"$1\"; for f in gone moves moved made; do [ -e $f ] && echo -n \"$f \"; done; printf \"%s \" *";
        served
            .mount
            .run(&mut shell(script, &[&served.mount.at]))
            .ok()
    };
    assert_eq!(cat(), "old");
    assert_eq!(there(), "gone moves file gone moves ");
    let old = worker(&served.mount).expect("a worker");
    // The keeper can't start the next server before it goes on.
    served.mount.server.signal(Signal::STOP);
    kill_process(old, Signal::KILL).unwrap();
    fs::write(served.source.join("file"), "newer").unwrap();
    fs::write(served.source.join("made"), "").unwrap();
    fs::remove_file(served.source.join("gone")).unwrap();
    fs::rename(served.source.join("moves"), served.source.join("moved")).unwrap();
    served.mount.server.signal(Signal::CONT);
    wait_for("the change", || cat() == "newer");
    wait_for("the names", || there() == "moved made file made moved ");
}

/// The kernel keeps what it has cached of files that the host has not changed.
#[test]
fn caches_stay() {
    if !has(&[Need::Mount(Transport::Dev), Need::Uvfs]) {
        return;
    }
    const FILES: u64 = 200;
    let scratch = Scratch::new();
    let source = scratch.tmpfs("source", "1m");
    for n in 0..FILES {
        fs::write(source.join(n.to_string()), "old").unwrap();
    }
    let mount = Mount::new(&survives(), &source, &scratch.dir("mount"));
    is_kept(&mount);
    let looks = || {
        for n in 0..FILES {
            let there = fs::metadata(mount.at.join(n.to_string())).unwrap();
            assert_eq!(there.len(), 3);
        }
        let ops = report(&mount.at).ops;
        let asked = ["LOOKUP", "GETATTR"].map(|name| ops.iter().find(|op| op.name == name));
        asked.into_iter().flatten().map(|op| op.count).sum::<u64>()
    };
    assert!(looks() >= FILES);
    replaced(&mount, Signal::KILL);
    wait_for("the next server", || counts(&mount).generation == 2);
    // The next server has the kernel drop what may be old as soon as it serves.
    std::thread::sleep(PAUSE);
    let asked = looks();
    assert!(asked < FILES / 2, "{asked} requests for what was cached");
}

/// A mount below one that outlives its server stays, and open files keep their paths, also in another mount namespace.
#[test]
fn mounts_below_and_paths_stay() {
    if !has(&[Need::Mount(Transport::Dev), Need::Uvfs]) {
        return;
    }
    for options in ["", "cache=always"] {
        let served = outlives(&survives().option(options));
        let script = "set -e; cd \"$1\"; mkdir below; echo 1 > file; exec 3< file; mount -t tmpfs none below; \
            echo 2 > below/file; echo > ready; while ! [ -e go ]; do cat file below/file; sleep 0.01; done; \
            readlink /proc/$$/fd/3";
        let own = [
            "--mount",
            "--propagation",
            "private",
            "bash",
            "-c",
            script,
            "bash",
        ];
        let mut program = Running::start(Command::new("unshare").args(own).arg(&served.mount.at));
        wait_for("the program", || served.source.join("ready").exists());
        for turn in 0..4 {
            match turn {
                2 => drop(upgrade(&served.mount).ok()),
                _ => replaced(&served.mount, Signal::KILL),
            }
            // The program looks at the names.
            std::thread::sleep(PAUSE);
        }
        fs::write(served.source.join("go"), "").unwrap();
        let outcome = program.wait(SOON).expect("the program ends").ok();
        let path = served.at("file").display().to_string();
        assert_eq!(outcome.lines().last(), Some(path.as_str()));
    }
}

/// When the keeper is killed the mount goes on with the server that it has, and ends with that one.
#[test]
fn without_its_keeper_a_mount_is_any_other() {
    if !has(&[Need::Mount(Transport::Dev), Need::Uvfs]) {
        return;
    }
    let mut served = outlives(&survives());
    let last = worker(&served.mount).expect("a worker");
    served.mount.expect_gone();
    served.mount.server.signal(Signal::KILL);
    fs::write(served.source.join("file"), "data").unwrap();
    served
        .mount
        .run(Command::new("cat").arg(served.at("file")))
        .ok();
    kill_process(last, Signal::KILL).unwrap();
    wait_for("the end", || {
        let outcome = served
            .mount
            .run(Command::new("stat").arg(served.at("file")));
        outcome.status.code() != Some(0)
    });
    served.mount.server.wait(SOON).expect("both have ended");
    unmount_by_force(&served.mount.at);
}

/// A server that crashes again and again ends the mount, and the log says why.
#[test]
fn a_server_that_only_crashes_ends_the_mount() {
    if !has(&[Need::Mount(Transport::Dev), Need::Uvfs]) {
        return;
    }
    let mut served = outlives(&survives());
    served.mount.expect_gone();
    let mut last = None;
    let began = Instant::now();
    while served.mount.server.ended().is_none() && began.elapsed() < SOON {
        if let Some(now) = worker(&served.mount)
            && last != Some(now)
            && kill_process(now, Signal::ABORT).is_ok()
        {
            last = Some(now);
        }
    }
    let outcome = served.mount.server.wait(SOON).expect("the keeper gives up");
    assert_eq!(outcome.status.code(), Some(1), "{outcome}");
    assert!(outcome.stderr.contains("ended by signal 6"), "{outcome}");
    assert!(outcome.stderr.contains("the mount ends"), "{outcome}");
    assert!(mounted(&served.mount.at).is_none());
}

/// SIGTERM for the keeper ends the mount, and so does unmounting, also when the server is not the first.
#[test]
fn it_ends_as_any_mount() {
    if !has(&[Need::Mount(Transport::Dev), Need::Uvfs]) {
        return;
    }
    let mut served = outlives(&survives());
    replaced(&served.mount, Signal::KILL);
    assert_eq!(counts(&served.mount).generation, 2);
    served.mount.expect_gone();
    served.mount.server.signal(Signal::TERM);
    served.mount.server.wait(SOON).expect("it ends").ok();
    assert!(mounted(&served.mount.at).is_none());
    let scratch = Scratch::new();
    let mount = Mount::new(&survives(), &served.source, &scratch.dir("again"));
    is_kept(&mount);
    replaced(&mount, Signal::KILL);
    mount.unmount();
}

pub(crate) fn upgrade(mount: &Mount) -> Outcome {
    run(uvfs().arg("upgrade").arg(&mount.at))
}

/// No call fails when the program of the server is replaced.
#[test]
fn a_replaced_program_goes_on() {
    replaced_program_goes_on(survives());
}

/// The same over FUSE-over-io_uring.
#[test]
fn a_fast_program_that_is_replaced_goes_on() {
    replaced_program_goes_on(survives_fast());
}

fn replaced_program_goes_on(serve: Serve) {
    if !has_load_over(serve.transport) {
        return;
    }
    let upgrades = u64::from(outlives::kills());
    // xdev: the server has a mount of the source of its own, which the next program has to take over.
    let served = outlives(&serve.option("xdev"));
    let time = 2 * PAUSE * upgrades as u32;
    let mut load = load(&served.mount, time, all());
    let keeper = counts(&served.mount).keeper;
    let mut done = 0;
    while load.ended().is_none() && done < upgrades {
        upgrade(&served.mount).ok();
        done += 1;
        std::thread::sleep(PAUSE);
    }
    let outcome = load.wait(time + LATER).expect("the programs end").ok();
    eprintln!("{done} upgrades: {outcome}");
    let counts = counts(&served.mount);
    assert_eq!((counts.programs, counts.keeper), (done + 1, keeper));
}

/// A program that can't serve the mount does not replace the one that does; a later one does.
#[test]
fn a_program_that_can_not_serve_replaces_none() {
    if !has(&[Need::Mount(Transport::Dev), Need::Uvfs]) {
        return;
    }
    let scratch = Scratch::new();
    let program = scratch.dir("bin").join("uvfs");
    let installs = |text: &str| {
        let new = program.with_extension("new");
        fs::write(&new, text).unwrap();
        fs::set_permissions(&new, fs::Permissions::from_mode(0o755)).unwrap();
        fs::rename(&new, &program).unwrap();
    };
    fs::copy(env!("CARGO_BIN_EXE_uvfs"), &program).unwrap();
    let mut serve = survives();
    serve.program.clone_from(&program);
    let served = outlives(&serve);
    fs::write(served.source.join("file"), "kept").unwrap();
    // It takes over the state of another version, does not run, or does not know the mount's options.
    for (text, why) in [
        ("#!/bin/sh\necho 1000\n", "state of version \"1000\""),
        ("not a program", "uvfs: "),
        (
            concat!(
                "#!/bin/sh\ncase $1 in upgrade) exec ",
                env!("CARGO_BIN_EXE_uvfs"),
                " \"$@\";; esac\nexec ",
                env!("CARGO_BIN_EXE_uvfs"),
                " mount -o no_such_option a b\n"
            ),
            "goes on",
        ),
    ] {
        installs(text);
        let outcome = upgrade(&served.mount);
        assert_eq!(outcome.status.code(), Some(1), "{outcome}");
        assert!(outcome.stderr.contains(why), "{why}: {outcome}");
        let cat = served.mount.run(Command::new("cat").arg(served.at("file")));
        assert_eq!(cat.ok(), "kept");
    }
    fs::remove_file(&program).unwrap();
    fs::copy(env!("CARGO_BIN_EXE_uvfs"), &program).unwrap();
    upgrade(&served.mount).ok();
    // And from then on.
    replaced(&served.mount, Signal::KILL);
    upgrade(&served.mount).ok();
}

/// `uvfs upgrade --all` upgrades the mounts whose program was replaced, and no other.
#[test]
fn all_are_upgraded_whose_program_was_replaced() {
    if !has(&[Need::Mount(Transport::Dev), Need::Uvfs]) {
        return;
    }
    let scratch = Scratch::new();
    let (program, source) = (scratch.dir("bin").join("uvfs"), scratch.dir("source"));
    let installs = |file: &str| {
        // A file that runs can't be written to.
        let _ = fs::remove_file(&program);
        run(Command::new("install").arg(file).arg(&program)).ok();
    };
    installs(env!("CARGO_BIN_EXE_uvfs"));
    let mount = |name: &str, serve: Serve| Mount::new(&serve, &source, &scratch.dir(name));
    let mut own = survives();
    own.program.clone_from(&program);
    let replaced = mount("replaced", own);
    let same = mount("same", survives());
    let plain = mount("plain", Serve::over(Transport::Dev));
    let first = report(&plain.at).pid;
    // Where the mounts of other tests are not seen.
    let upgrade_all = || {
        let script = "findmnt -rno TARGET -t fuse.uvfs | { grep -v \"^$1\" || true; } | xargs -r -n 1 umount -l; exec \"$2\" upgrade --all";
        let own = [
            "unshare",
            "--mount",
            "--propagation",
            "private",
            "bash",
            "-c",
        ];
        let mut command = command(own[0], &own[1..]);
        command.args([script, "bash"]).arg(scratch.path(""));
        run(command.arg(env!("CARGO_BIN_EXE_uvfs")))
    };
    upgrade_all().ok();
    assert_eq!(counts(&replaced).programs, 1);
    installs(env!("CARGO_BIN_EXE_uvfs"));
    for _ in 0..2 {
        upgrade_all().ok();
        assert_eq!(counts(&replaced).programs, 2);
        assert_eq!(counts(&same).programs, 1);
        assert_eq!(report(&plain.at).pid, first);
    }
    installs("/dev/null");
    let outcome = upgrade_all();
    assert_eq!(outcome.status.code(), Some(1), "{outcome}");
    assert!(outcome.stderr.contains("replaced: "), "{outcome}");
    assert_eq!(counts(&replaced).programs, 2);
}

/// A mount in the background, which has let go of its terminal, does the same.
#[test]
fn a_mount_in_the_background_outlives_its_server() {
    if !has(&[Need::Mount(Transport::Dev), Need::Uvfs]) {
        return;
    }
    let scratch = Scratch::new();
    let (source, at) = (scratch.dir("source"), scratch.dir("mount"));
    fs::write(source.join("file"), "data").unwrap();
    run(uvfs()
        .args(["mount", "-o", "survive"])
        .arg(&source)
        .arg(&at))
    .ok();
    let programs = || report(&at).survive.unwrap().programs;
    wait_for("the keeper", || programs() > 0);
    let first = report(&at);
    kill_process(Pid::from_raw(first.pid as i32).unwrap(), Signal::KILL).unwrap();
    let cat = || run(Command::new("cat").arg(at.join("file"))).ok();
    assert_eq!(cat(), "data");
    run(uvfs().arg("upgrade").arg(&at)).ok();
    assert_eq!(cat(), "data");
    let last = report(&at);
    let survive = last.survive.unwrap();
    assert_eq!((survive.generation, survive.programs), (3, 2));
    assert_ne!(last.pid, first.pid);
    run(uvfs().arg("umount").arg(&at)).ok();
    assert!(mounted(&at).is_none());
}

/// Options that can't be had with it are refused, with the reason.
#[test]
fn what_it_can_not_have_is_refused() {
    if !has(&[Need::Uvfs]) {
        return;
    }
    let scratch = Scratch::new();
    let (source, at) = (scratch.dir("source"), scratch.dir("mount"));
    for (words, why) in [
        ("survive,auto_unmount", "not with auto_unmount"),
        ("survive,host_locks", "not with host_locks"),
        ("survive=slow", "is none of fast"),
    ] {
        let outcome = run(uvfs().args(["mount", "-o", words]).arg(&source).arg(&at));
        assert_eq!(outcome.status.code(), Some(2), "{outcome}");
        assert!(outcome.stderr.contains(why), "{outcome}");
    }
}
