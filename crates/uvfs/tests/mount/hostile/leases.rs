//! Holders of leases that do not give them back.

use std::fs;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use rustix::thread::{CpuSet, sched_setaffinity};
use uvfs_client::{Client, Config, Connection, Flags, Token};

use super::ANY;
use crate::harness::*;
use crate::own_process;

/// Takes a write lease of a file of its own, and waits to be stopped.
pub fn leaseholder(dir: &Path, ready: &str) -> String {
    let held = fs::File::create(dir.join("held")).unwrap();
    let token = Token::of(held.as_fd()).unwrap();
    let client = Client::new(
        Connection::connect(token.socket()).unwrap(),
        Config::default(),
    )
    .unwrap();
    let file = client.import(held.as_fd()).unwrap();
    file.write_at(b"held back", 0, Flags::empty()).unwrap();
    fs::write(ready, "").unwrap();
    loop {
        std::thread::park();
    }
}

/// A client that has the write lease of a file, and answers no recall.
fn stopped_leaseholder(served: &Served) -> Running {
    let (report, ready) = (served.scratch.path("holder"), served.scratch.path("holds"));
    let argument = ready.to_str().unwrap();
    let at = &served.mount.at;
    let holder = Running::start(&mut own_process::call("leaseholder", at, argument, &report));
    wait_for("the lease", || ready.exists());
    holder.signal(Signal::STOP);
    assert_eq!(fs::read(served.source.join("held")).unwrap(), b"");
    holder
}

/// On one core, more callers than its queue has entries want to see files. Reports for how long another
/// caller then waits for something else, and goes without those that still wait.
pub fn crowd(dir: &Path, name: &str) -> String {
    let mut core = CpuSet::new();
    core.set(0);
    sched_setaffinity(None, &core).unwrap();
    for number in 0..150 {
        let path = dir.join(name.replace('#', &number.to_string()));
        std::thread::spawn(move || fs::metadata(path).map(|found| found.len()));
    }
    // All of them are under way.
    std::thread::sleep(Duration::from_millis(300));
    let began = Instant::now();
    assert!(fs::metadata(dir.join("none")).is_err());
    began.elapsed().as_millis().to_string()
}

/// Requests that wait for a lease do not fill a queue: a client stops no mount with a file of its own.
#[test]
fn a_crowd_that_waits_for_a_lease_stops_nobody_else() {
    for transport in [Transport::Dev, Transport::Uring] {
        if !has(&[Need::Mount(transport), Need::Uvfs]) {
            continue;
        }
        let served = Served::new(&Serve::over(transport).option("nopassthrough"));
        let mut holder = stopped_leaseholder(&served);
        let report = served.scratch.path("crowd");
        let command = &mut own_process::call("crowd", &served.mount.at, "held", &report);
        served.mount.run(command).ok();
        let waited: u64 = fs::read_to_string(report).unwrap().parse().unwrap();
        println!("{transport:?}: {waited} ms");
        // The time that a client has for a recall is five seconds, counted from 0.3 s earlier.
        assert!(waited < 2500, "{transport:?}: {waited} ms");
        assert_eq!(fs::read(served.source.join("held")).unwrap(), b"held back");
        holder.kill();
    }
}

/// Looks at the file "held", while signals come that it handles, or that end it.
pub fn signalled(dir: &Path, ready: &str) -> String {
    extern "C" fn nothing(_: libc::c_int) {}
    // SAFETY: the handler does nothing; the action lives as long as the call, and zeros are valid.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = nothing as *const () as usize;
        assert_eq!(
            libc::sigaction(libc::SIGUSR1, &action, std::ptr::null_mut()),
            0
        );
    }
    fs::write(ready, "").unwrap();
    fs::metadata(dir.join("held")).unwrap().len().to_string()
}

/// Whether a killed caller ended before the lease that it waited for did; one that only got a signal waited.
fn killed_caller_ends(transport: Transport) -> bool {
    let served = Served::new(&Serve::over(transport).option("nopassthrough"));
    let mut holder = stopped_leaseholder(&served);
    let start = |name: &str| -> (Running, PathBuf) {
        let (report, ready) = (served.scratch.path(name), served.scratch.path("looks"));
        let _ = fs::remove_file(&ready);
        let argument = ready.to_str().unwrap();
        let at = &served.mount.at;
        let caller = Running::start(&mut own_process::call("signalled", at, argument, &report));
        wait_for("the caller", || ready.exists());
        std::thread::sleep(Duration::from_millis(100));
        (caller, report)
    };
    let (mut signalled, report) = start("signalled");
    let (mut killed, _) = start("killed");
    signalled.signal(Signal::USR1);
    // The kernel says only once that a caller was interrupted.
    killed.signal(Signal::USR1);
    std::thread::sleep(Duration::from_millis(100));
    killed.signal(Signal::KILL);
    killed.wait(SOON).expect("it ends");
    let before = fs::read(served.source.join("held")).unwrap().is_empty();
    signalled.wait(SOON).expect("the lease ends").ok();
    assert_eq!(fs::read_to_string(report).unwrap(), "9");
    holder.kill();
    before
}

/// A killed caller ends before the lease comes back; another signal does not interrupt the wait, as on other file
/// systems.
#[test]
fn a_killed_caller_waits_for_no_lease_and_a_signalled_one_does() {
    for transport in [Transport::Dev, Transport::Uring] {
        if has(&[Need::Mount(transport), Need::Uvfs]) {
            // On a loaded machine the five seconds of the lease may pass before the callers are there.
            let ends = (0..4).any(|_| killed_caller_ends(transport));
            assert!(ends, "{transport:?}: it ended only after the lease did");
        }
    }
}

/// An open that waits for a program of the host, which does not give up its lease of the file, stops no queue.
#[test]
fn a_host_program_with_leases_stops_nobody() {
    if !has(&[Need::Mount(ANY), Need::Uvfs, Need::Program("python3")]) {
        return;
    }
    const HOLDS: &str = "import fcntl, os, signal, sys, time\n\
        signal.signal(signal.SIGIO, signal.SIG_IGN)\n\
        held = [os.open(sys.argv[1] + '/leased%d' % n, os.O_RDWR) for n in range(8)]\n\
        for fd in held: fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)\n\
        print('held', flush=True)\n\
        time.sleep(1000)";
    for transport in [Transport::Dev, Transport::Uring] {
        if !has(&[Need::Mount(transport)]) {
            continue;
        }
        let served = Served::new(&Serve::over(transport));
        for n in 0..8 {
            fs::write(served.source.join(format!("leased{n}")), "mine").unwrap();
        }
        let holds = &mut Command::new("python3");
        let mut holder = Running::start(holds.args(["-c", HOLDS]).arg(&served.source));
        wait_for("the leases", || holder.stdout().contains("held"));
        let script = "for n in 0 1 2 3 4 5 6 7; do cat \"$1/leased$n\" & done; wait";
        let mut opens = Running::start(&mut shell(script, &[&served.mount.at]));
        let mut script = shell(
            "sleep 0.5; echo here >\"$1/other\"; cat \"$1/other\"",
            &[&served.mount.at],
        );
        let seen = (served.mount).run_within(Duration::from_secs(20), &mut script);
        let waiting = opens.ended().is_none();
        holder.kill();
        assert_eq!(seen.ok(), "here\n", "{transport}");
        assert!(waiting, "{transport}: they open it without the holder");
        let opened = opens.wait(SOON).expect("the holder is gone").ok();
        assert_eq!(opened, "mine".repeat(8), "{transport}");
    }
}

/// Takes a lease of its own file on the host, `$1`, and opens it 100 times on the mount, `$2`. Says how many were
/// refused, and with what, and then waits.
const LEASES_AND_OPENS: &str = "import errno, fcntl, os, signal, sys, threading, time\n\
    signal.signal(signal.SIGIO, signal.SIG_IGN)\n\
    held = os.open(sys.argv[1], os.O_RDWR)\n\
    fcntl.fcntl(held, fcntl.F_SETLEASE, fcntl.F_WRLCK)\n\
    os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])\n\
    refused = []\n\
    def opens():\n\
    \x20 try: os.open(sys.argv[2], os.O_RDONLY)\n\
    \x20 except OSError as e: refused.append(errno.errorcode[e.errno])\n\
    for n in range(100): threading.Thread(target=opens, daemon=True).start()\n\
    while len(refused) < 84: time.sleep(0.01)\n\
    print(len(refused), set(refused), flush=True)\n\
    time.sleep(1000)";

/// One user's opens of a file that it has a lease of leave room for the requests of other users.
#[test]
fn a_users_lease_of_its_own_file_keeps_only_its_own_opens() {
    use std::os::unix::process::CommandExt;
    if !has(&[Need::Mount(ANY), Need::Uvfs, Need::Program("python3")]) {
        return;
    }
    let user = super::users::user();
    for transport in transports() {
        let served = Served::new(&Serve::over(transport));
        let leased = served.source.join("leased");
        fs::write(&leased, "").unwrap();
        std::os::unix::fs::chown(&leased, Some(user), Some(user)).unwrap();
        let mut holds = Command::new("python3");
        holds.args(["-c", LEASES_AND_OPENS]).arg(&leased);
        holds.arg(served.at("leased")).uid(user).gid(user);
        let mut holder = Running::start(&mut holds);
        // The holder has 45 s to give it up. Until then only those that are refused have ended.
        wait_for("those that are too many", || {
            assert!(holder.ended().is_none(), "{}", holder.stderr());
            holder.stdout().ends_with('\n')
        });
        assert_eq!(holder.stdout(), "84 {'EAGAIN'}\n", "{transport}");
        let seen = served.mount.run(&mut shell(
            "echo here >\"$1/other\"; cat \"$1/other\"",
            &[&served.mount.at],
        ));
        holder.kill();
        assert_eq!(seen.ok(), "here\n", "{transport}");
    }
}
