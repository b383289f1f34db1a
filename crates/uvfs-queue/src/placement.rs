//! Where a queue's thread runs, so that a request and its answer are handed over on one core.
//!
//! A caller sleeps while its request is served, so the two threads never need two cores. But when
//! the server answers, the scheduler looks for an idle core to wake the caller on, and waking an
//! idle (virtual) core costs more than the request. A core on which only SCHED_IDLE threads run
//! counts as free and is looked at first. So a queue's thread is bound to the queue's core and made
//! SCHED_IDLE: the caller stays on its own core, unpinned, and goes on the moment it is woken.
//!
//! The price: any other thread that wants this core goes first. [`Watchdog`] notices a thread that
//! waits to run for too long and makes it an ordinary one for a while. While it sleeps itself all are
//! ordinary ones, so that the first request after a pause is served though a program has the core.

use std::fs::File;
use std::io::{self, Read, Seek};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;
use uvfs_sys::lock;

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
/// The errors of sched_getaffinity(2).
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
    uvfs_sys::checked(unsafe { libc::sched_setscheduler(thread, policy as i32, &param) })?;
    Ok(())
}

/// Whether a thread can become SCHED_IDLE and come back (an unprivileged one may not come back).
pub fn can_hand_over() -> bool {
    let tried = std::thread::Builder::new().spawn(|| {
        set_policy(None, Policy::Idle).is_ok() && set_policy(None, Policy::Other).is_ok()
    });
    tried.is_ok_and(|thread| thread.join().unwrap_or(false))
}

/// Undoes for a new thread what it has from the thread that started it: it runs on the cores of the process's first
/// thread, and gives way to no other.
pub fn be_ordinary() {
    // Where either fails, as in a sandbox, the thread is slower and no more.
    if let Ok(cores) = sched_getaffinity(Some(rustix::process::getpid())) {
        let _ = sched_setaffinity(None, &cores);
    }
    let _ = set_policy(None, Policy::Other);
}

/// How often the watchdog looks while there is traffic.
const TICK: Duration = Duration::from_millis(25);
/// A thread that waited to run for more than this much of a tick starves.
const STARVING: Duration = Duration::from_millis(10);
/// For so many ticks it is then an ordinary thread, at first and at most: each time that it starves
/// again soon it is so for twice as long.
const RELIEF: u32 = 40;
const RELIEF_MAX: u32 = 640;
/// After so many ticks without any thread having run, the watchdog sleeps.
const QUIET: u32 = 8;

/// The observed state of a thread.
#[derive(Clone, Copy, Debug, Default)]
struct Look {
    /// Nanoseconds on a core.
    ran: u64,
    /// Nanoseconds waiting for one; a wait counts once it is over.
    waited: u64,
    /// On a core or waiting for one.
    runnable: bool,
}

/// The conclusion from looking at a thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verdict {
    Stays,
    Relieve,
    HandOver,
}

/// From looks at a thread to what it should be.
#[derive(Debug, Default)]
struct Judge {
    last: Look,
    /// Ticks that it will stay an ordinary thread.
    relief: u32,
    /// How long that was at its beginning.
    term: u32,
    /// Ticks since it ended.
    since: u32,
}

impl Judge {
    /// Looks once; also says whether the thread was active since the last look.
    fn tick(&mut self, look: Look) -> (Verdict, bool) {
        let last = std::mem::replace(&mut self.last, look);
        // A thread that gets no core at all is not seen to wait, but to be ready and not to run.
        let stuck = last.runnable && look.runnable && last.ran == look.ran;
        let starved = stuck || look.waited.saturating_sub(last.waited) > STARVING.as_nanos() as u64;
        let active = look.ran != last.ran || starved;
        let verdict = if starved {
            let before = self.relief;
            if before == 0 {
                self.term = match self.since <= self.term {
                    true => (2 * self.term).clamp(RELIEF, RELIEF_MAX),
                    false => RELIEF,
                };
            }
            self.relief = self.term;
            match before {
                0 => Verdict::Relieve,
                _ => Verdict::Stays,
            }
        } else if self.relief > 0 {
            self.relief -= 1;
            self.since = 0;
            match self.relief {
                0 => Verdict::HandOver,
                _ => Verdict::Stays,
            }
        } else {
            self.since = self.since.saturating_add(1);
            Verdict::Stays
        };
        (verdict, active)
    }
}

struct Ward {
    thread: Pid,
    schedstat: File,
    stat: File,
    judge: Judge,
    relieved: Relieved,
}

fn read_text<'a>(file: &mut File, buf: &'a mut [u8]) -> io::Result<&'a str> {
    file.rewind()?;
    let len = file.read(buf)?;
    Ok(std::str::from_utf8(&buf[..len]).unwrap_or(""))
}

impl Ward {
    fn new(thread: Pid) -> io::Result<Self> {
        let open = |name: &str| {
            File::open(format!(
                "/proc/self/task/{}/{name}",
                thread.as_raw_nonzero()
            ))
        };
        let mut ward = Self {
            thread,
            schedstat: open("schedstat")?,
            stat: open("stat")?,
            judge: Judge::default(),
            relieved: Relieved::default(),
        };
        ward.judge.last = ward.look()?;
        Ok(ward)
    }

    /// From /proc/PID/task/TID/schedstat, and stat for the state.
    fn look(&mut self) -> io::Result<Look> {
        let mut buf = [0; 96];
        let text = read_text(&mut self.schedstat, &mut buf)?;
        let mut words = text
            .split_ascii_whitespace()
            .map(|word| word.parse().unwrap_or(0));
        let (ran, waited) = (words.next().unwrap_or(0), words.next().unwrap_or(0));
        // The name before the state has at most 15 bytes, in parentheses.
        let text = read_text(&mut self.stat, &mut buf)?;
        let state = text.rsplit_once(')').map_or("", |(_, rest)| rest);
        Ok(Look {
            ran,
            waited,
            runnable: state.trim_start().starts_with('R'),
        })
    }

    /// Looks once; true when the thread was active since the last look.
    fn tick(&mut self) -> bool {
        let Ok(look) = self.look() else {
            return false;
        };
        let (verdict, active) = self.judge.tick(look);
        match verdict {
            Verdict::Stays => {}
            Verdict::Relieve => self.set(Policy::Other),
            Verdict::HandOver => self.set(Policy::Idle),
        }
        active
    }

    fn set(&self, policy: Policy) {
        let relieved = policy == Policy::Other;
        self.relieved.0.store(relieved, Ordering::Relaxed);
        self.policy(policy);
    }

    fn policy(&self, policy: Policy) {
        // Can only fail when the thread has ended.
        let _ = set_policy(Some(self.thread), policy);
    }
}

/// Tells whether a thread that hands over is an ordinary one for now, for want of its core.
#[derive(Clone, Debug, Default)]
pub struct Relieved(Arc<AtomicBool>);

impl Relieved {
    /// Whether it is.
    pub fn get(&self) -> bool {
        self.0.load(Ordering::Relaxed)
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

    /// The handle by which another thread enters with [`Watched::hand_over`].
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
    /// When the policy can't be set, or /proc doesn't show how threads run: then the thread stays an
    /// ordinary one.
    pub fn hand_over(&self) -> io::Result<Relieved> {
        let ward = Ward::new(gettid())?;
        let relieved = ward.relieved.clone();
        set_policy(None, Policy::Idle)?;
        lock(&self.0.state).wards.push(ward);
        self.0.call.notify_all();
        Ok(relieved)
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
        if quiet >= QUIET && state.wards.iter().all(|ward| ward.judge.relief == 0) {
            // The watchdog would not notice a thread that starved now.
            let set_all = |state: &State, policy| {
                let wards = &state.wards;
                wards.iter().for_each(|ward| ward.policy(policy));
            };
            shared.asleep.store(true, Ordering::Relaxed);
            set_all(&state, Policy::Other);
            while shared.asleep.load(Ordering::Relaxed) && !state.stop {
                state = shared
                    .call
                    .wait(state)
                    .unwrap_or_else(|poisoned| poisoned.into_inner());
            }
            set_all(&state, Policy::Idle);
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

    /// A thread is bound to one core, and a core that does not exist is an error.
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

    /// A thread started by one that is bound and idle can take all cores and the ordinary policy.
    #[test]
    fn a_thread_that_a_bound_one_starts_becomes_ordinary() {
        if !can_hand_over() {
            return uvfs_testing::say("this user may not leave SCHED_IDLE");
        }
        let cores = allowed_cores().unwrap();
        std::thread::spawn(move || {
            bind_to_core(cores[0]).unwrap();
            set_policy(None, Policy::Idle).unwrap();
            std::thread::spawn(move || {
                be_ordinary();
                assert_eq!(allowed_cores().unwrap(), cores);
                // SAFETY: takes no pointers.
                assert_eq!(unsafe { libc::sched_getscheduler(0) }, libc::SCHED_OTHER);
            })
            .join()
            .unwrap();
        })
        .join()
        .unwrap();
    }

    /// A thread that another program keeps from its core becomes an ordinary one.
    #[test]
    fn a_starving_thread_is_relieved() {
        if !can_hand_over() {
            return uvfs_testing::say("this user may not leave SCHED_IDLE");
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
            let relieved = handle.hand_over().unwrap();
            let start = std::time::Instant::now();
            // SAFETY: takes no pointers.
            while unsafe { libc::sched_getscheduler(0) } != libc::SCHED_OTHER {
                handle.stir();
                assert!(start.elapsed() < Duration::from_secs(60), "never relieved");
            }
            while !relieved.get() {
                assert!(start.elapsed() < Duration::from_secs(60), "not said");
            }
        })
        .join()
        .unwrap();
        stop.store(true, Ordering::Relaxed);
        hog.join().unwrap();
    }

    /// A thread that waits for its core is relieved, and for twice as long if it starves again at once.
    #[test]
    fn a_thread_that_never_gets_its_core_is_seen_to_starve() {
        let mut judge = Judge::default();
        let look = |ran, waited, runnable| Look {
            ran,
            waited,
            runnable,
        };
        let ms = 1_000_000;
        assert_eq!(judge.tick(look(5, 0, false)), (Verdict::Stays, true));
        // Asleep, then ready just now, then ready all the time.
        assert_eq!(judge.tick(look(5, 0, false)), (Verdict::Stays, false));
        assert_eq!(judge.tick(look(5, 0, true)), (Verdict::Stays, false));
        assert_eq!(judge.tick(look(5, 0, true)), (Verdict::Relieve, true));
        assert_eq!(judge.tick(look(6, 60 * ms, true)), (Verdict::Stays, true));
        let ticks = |judge: &mut Judge, most: u32| {
            (1..=most)
                .find(|n| judge.tick(look(7 + u64::from(*n), 60 * ms, true)).0 == Verdict::HandOver)
        };
        assert_eq!(ticks(&mut judge, 1000), Some(RELIEF));
        // Again at once: relieved for longer. Later: as the first time.
        assert_eq!(judge.tick(look(0, 90 * ms, true)).0, Verdict::Relieve);
        judge.last.waited = 60 * ms;
        assert_eq!(ticks(&mut judge, 1000), Some(2 * RELIEF));
        assert_eq!(ticks(&mut judge, 500), None);
        judge.last.waited = 0;
        assert_eq!(judge.tick(look(0, 90 * ms, true)).0, Verdict::Relieve);
        judge.last.waited = 60 * ms;
        assert_eq!(ticks(&mut judge, 1000), Some(RELIEF));
    }

    /// The watchdog of an idle server sleeps, and its threads are ordinary ones until requests come.
    #[test]
    fn while_the_watchdog_sleeps_threads_are_ordinary_ones() {
        if !can_hand_over() {
            return uvfs_testing::say("this user may not leave SCHED_IDLE");
        }
        let watchdog = Watchdog::start().unwrap();
        let handle = watchdog.handle();
        let (sleeps, told) = std::sync::mpsc::channel::<()>();
        let (thread_id, id) = std::sync::mpsc::channel();
        let thread = std::thread::spawn(move || {
            handle.hand_over().unwrap();
            thread_id.send(gettid()).unwrap();
            told.recv().unwrap();
            // Requests come all the time until this was seen: after a pause it is as before.
            while told.try_recv().is_err() {
                handle.stir();
                std::thread::sleep(Duration::from_millis(1));
            }
        });
        let id = id.recv().unwrap().as_raw_nonzero().get();
        let becomes = |policy: i32| {
            let start = std::time::Instant::now();
            // SAFETY: takes no pointers.
            while unsafe { libc::sched_getscheduler(id) } != policy {
                assert!(start.elapsed() < Duration::from_secs(60), "never {policy}");
                std::thread::sleep(Duration::from_millis(1));
            }
        };
        becomes(libc::SCHED_OTHER);
        sleeps.send(()).unwrap();
        becomes(libc::SCHED_IDLE);
        sleeps.send(()).unwrap();
        thread.join().unwrap();
    }
}
