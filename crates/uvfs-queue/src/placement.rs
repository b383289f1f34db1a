//! Where a queue's thread runs, so that a request and its answer are handed over on one core.
//!
//! A caller sleeps while its request is served, so the two threads never need two cores. But when
//! the server answers, the scheduler looks for an idle core to wake the caller on, and waking an
//! idle (virtual) core costs more than the request. A core on which only SCHED_IDLE threads run
//! counts as free and is looked at first. So a queue's thread is bound to the queue's core and made
//! SCHED_IDLE: the caller stays on its own core, unpinned, and goes on the moment it is woken.
//!
//! The price: any other thread that wants this core goes first. [`Watchdog`] notices a thread that
//! waits to run for too long and makes it an ordinary one for a while.

use std::fs::File;
use std::io::{self, Read, Seek};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::thread::{CpuSet, Pid, gettid, sched_getaffinity, sched_setaffinity};

/// Binds the calling thread to a core.
///
/// # Errors
/// EINVAL when the core is not there or not allowed.
pub fn bind_to_core(core: usize) -> io::Result<()> {
    let mut set = CpuSet::new();
    if core >= CpuSet::MAX_CPU {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    set.set(core);
    Ok(sched_setaffinity(None, &set)?)
}

/// The cores that this thread may run on.
///
/// # Errors
/// What sched_getaffinity(2) gives.
pub fn allowed_cores() -> io::Result<Vec<usize>> {
    let set = sched_getaffinity(None)?;
    Ok((0..CpuSet::MAX_CPU)
        .filter(|&core| set.is_set(core))
        .collect())
}

/// sched(7)'s policies that are used here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Policy {
    Other = libc::SCHED_OTHER as isize,
    Idle = libc::SCHED_IDLE as isize,
}

fn set_policy(thread: Option<Pid>, policy: Policy) -> io::Result<()> {
    let param = libc::sched_param { sched_priority: 0 };
    let thread = thread.map_or(0, |pid| pid.as_raw_nonzero().get());
    // SAFETY: `param` is a valid struct for the whole call, which only reads it.
    match unsafe { libc::sched_setscheduler(thread, policy as i32, &param) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Whether a thread can become SCHED_IDLE and come back (an unprivileged one may not come back).
pub fn can_hand_over() -> bool {
    std::thread::spawn(|| {
        set_policy(None, Policy::Idle).is_ok() && set_policy(None, Policy::Other).is_ok()
    })
    .join()
    .unwrap_or(false)
}

/// How often the watchdog looks while there is traffic.
const TICK: Duration = Duration::from_millis(25);
/// A thread that waited to run for more than this much of a tick starves.
const STARVING: Duration = Duration::from_millis(10);
/// For so many ticks it is then an ordinary thread.
const RELIEF: u32 = 40;
/// After so many ticks without any thread having run, the watchdog sleeps.
const QUIET: u32 = 8;

struct Ward {
    thread: Pid,
    schedstat: File,
    ran: u64,
    waited: u64,
    relief: u32,
}

impl Ward {
    /// Nanoseconds on a core and nanoseconds waiting for one (/proc/PID/task/TID/schedstat).
    fn read(&mut self) -> io::Result<(u64, u64)> {
        let mut text = [0; 96];
        self.schedstat.rewind()?;
        let len = self.schedstat.read(&mut text)?;
        let text = std::str::from_utf8(&text[..len]).unwrap_or("");
        let mut words = text
            .split_ascii_whitespace()
            .map(|word| word.parse().unwrap_or(0));
        Ok((words.next().unwrap_or(0), words.next().unwrap_or(0)))
    }

    /// Looks once; true when the thread ran since the last look.
    fn tick(&mut self) -> bool {
        let Ok((ran, waited)) = self.read() else {
            return false;
        };
        let starved = waited.saturating_sub(self.waited) > STARVING.as_nanos() as u64;
        let active = ran != self.ran || starved;
        (self.ran, self.waited) = (ran, waited);
        if starved {
            if self.relief == 0 {
                let _ = set_policy(Some(self.thread), Policy::Other);
            }
            self.relief = RELIEF;
        } else if self.relief > 0 {
            self.relief -= 1;
            if self.relief == 0 {
                let _ = set_policy(Some(self.thread), Policy::Idle);
            }
        }
        active
    }
}

#[derive(Default)]
struct State {
    wards: Vec<Ward>,
    stop: bool,
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    call: Condvar,
    asleep: AtomicBool,
}

fn lock(mutex: &Mutex<State>) -> MutexGuard<'_, State> {
    mutex
        .lock()
        .unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// Watches threads that hand over, and relieves those that starve. Costs nothing while they idle.
pub struct Watchdog {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

/// A watched thread's end of its [`Watchdog`].
#[derive(Clone)]
pub struct Watched(Arc<Shared>);

impl Watchdog {
    /// Starts one.
    ///
    /// # Errors
    /// When no thread can be made.
    pub fn start() -> io::Result<Self> {
        let shared = Arc::new(Shared::default());
        let theirs = shared.clone();
        let thread = std::thread::Builder::new()
            .name("uvfs-watchdog".into())
            .spawn(move || watch(&theirs))?;
        Ok(Self {
            shared,
            thread: Some(thread),
        })
    }

    /// What a thread needs to enter by [`Watched::hand_over`].
    pub fn handle(&self) -> Watched {
        Watched(self.shared.clone())
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        lock(&self.shared.state).stop = true;
        self.shared.call.notify_all();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Watched {
    /// Makes the calling thread SCHED_IDLE, under watch.
    ///
    /// # Errors
    /// When the policy can't be set, or the kernel keeps no scheduling statistics: then the
    /// thread stays an ordinary one.
    pub fn hand_over(&self) -> io::Result<()> {
        let thread = gettid();
        let path = format!("/proc/self/task/{}/schedstat", thread.as_raw_nonzero());
        let mut ward = Ward {
            thread,
            schedstat: File::open(path)?,
            ran: 0,
            waited: 0,
            relief: 0,
        };
        (ward.ran, ward.waited) = ward.read()?;
        set_policy(None, Policy::Idle)?;
        lock(&self.0.state).wards.push(ward);
        self.0.call.notify_all();
        Ok(())
    }

    /// The calling thread is busy again. Cheap: to be called after each sleep.
    #[inline]
    pub fn stir(&self) {
        if self.0.asleep.load(Ordering::Relaxed) {
            self.0.asleep.store(false, Ordering::Relaxed);
            // Taken so that the call can't fall between the watchdog's look and its wait.
            drop(lock(&self.0.state));
            self.0.call.notify_all();
        }
    }
}

fn watch(shared: &Shared) {
    let mut quiet = 0;
    let mut state = lock(&shared.state);
    while !state.stop {
        if quiet >= QUIET && state.wards.iter().all(|ward| ward.relief == 0) {
            shared.asleep.store(true, Ordering::Relaxed);
            while shared.asleep.load(Ordering::Relaxed) && !state.stop {
                state = shared
                    .call
                    .wait(state)
                    .unwrap_or_else(|poisoned| poisoned.into_inner());
            }
            quiet = 0;
            continue;
        }
        state = shared
            .call
            .wait_timeout(state, TICK)
            .unwrap_or_else(|poisoned| poisoned.into_inner())
            .0;
        let mut active = false;
        for ward in &mut state.wards {
            active |= ward.tick();
        }
        quiet = if active { 0 } else { quiet + 1 };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_is_bound_and_comes_back() {
        let core = allowed_cores().unwrap()[0];
        std::thread::spawn(move || {
            bind_to_core(core).unwrap();
            assert_eq!(allowed_cores().unwrap(), [core]);
        })
        .join()
        .unwrap();
        assert!(bind_to_core(CpuSet::MAX_CPU).is_err());
    }

    #[test]
    fn a_starving_thread_is_relieved() {
        if !can_hand_over() {
            eprintln!("skipped: this user may not leave SCHED_IDLE");
            return;
        }
        let core = allowed_cores().unwrap()[0];
        let stop = Arc::new(AtomicBool::new(false));
        let watchdog = Watchdog::start().unwrap();
        let hog_stop = stop.clone();
        let hog = std::thread::spawn(move || {
            bind_to_core(core).unwrap();
            while !hog_stop.load(Ordering::Relaxed) {
                std::hint::spin_loop();
            }
        });
        let handle = watchdog.handle();
        std::thread::spawn(move || {
            bind_to_core(core).unwrap();
            handle.hand_over().unwrap();
            let start = std::time::Instant::now();
            // SAFETY: takes no pointers.
            while unsafe { libc::sched_getscheduler(0) } != libc::SCHED_OTHER {
                handle.stir();
                assert!(start.elapsed() < Duration::from_secs(60), "never relieved");
            }
        })
        .join()
        .unwrap();
        stop.store(true, Ordering::Relaxed);
        hog.join().unwrap();
    }
}
