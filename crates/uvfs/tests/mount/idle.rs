//! An idle server.

use std::fs;
use std::thread;
use std::time::Duration;

use crate::harness::*;

/// How often the threads of a process have gone to sleep; `None` while one of them runs.
fn sleeps(pid: u32) -> Option<u64> {
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).expect("a running server");
    let one = |task: std::io::Result<fs::DirEntry>| {
        let status = fs::read_to_string(task.ok()?.path().join("status")).ok()?;
        let field = |name: &str| status.lines().find_map(|line| line.strip_prefix(name));
        let asleep = field("State:")?.trim().starts_with('S');
        let sleeps = field("voluntary_ctxt_switches:")?.trim().parse::<u64>();
        asleep.then_some(sleeps.ok()?)
    };
    tasks.map(one).sum()
}

fn threads_sleep(transport: Transport) {
    if !has(&[Need::Mount(transport)]) {
        return;
    }
    let served = Served::new(&Serve::over(transport));
    let work = "for i in $(seq 200); do echo $i >\"$1/$i\"; done; cat \"$1\"/* >/dev/null";
    served.mount.run(&mut shell(work, &[&served.mount.at])).ok();
    let server = served.mount.server.pid();
    wait_for("a second in which hardly a thread wakes up", || {
        let before = sleeps(server);
        thread::sleep(Duration::from_secs(1));
        let woken = sleeps(server)
            .zip(before)
            .map(|(after, before)| after - before);
        woken.is_some_and(|woken| woken <= 3)
    });
    served.mount.unmount();
}

/// The threads of an idle server sleep: in a second they wake up three times at most, all together.
#[test]
fn threads_sleep_over_dev() {
    threads_sleep(Transport::Dev);
}

/// The same over io_uring.
#[test]
fn threads_sleep_over_uring() {
    threads_sleep(Transport::Uring);
}
