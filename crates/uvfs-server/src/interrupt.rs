//! Interrupted callers: INTERRUPT finds the handler of the request that it names.
//!
//! Only a handler that awaits can be interrupted, so a request enters the table when it first
//! does; most never do. `slow.rs` finds requests that wait for long in the same table.

use std::cell::RefCell;
use std::collections::{HashMap, VecDeque};
use std::future::Future;
use std::pin::pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::{Poll, Waker};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use uvfs_io::ops;
use uvfs_proto::abi::UNIQUE_RESEND;

use crate::fs::Context;

/// How often a request whose caller had a signal looks whether another one kills it.
const TICK: Duration = Duration::from_millis(100);

type Flag = Arc<AtomicBool>;

thread_local! {
    /// The flag of the request whose handler is being polled on this thread.
    static POLLED: RefCell<Option<Flag>> = const { RefCell::new(None) };
}

/// Whether the caller of the request that is being handled was interrupted. A handler that waits
/// asks this each time that it is resumed, and ends with EINTR.
///
/// ```
/// use std::time::Duration;
/// use uvfs_server::fs::{Errno, Result};
/// use uvfs_server::interrupt::interrupted;
///
/// async fn wait_until(ready: impl Fn() -> bool) -> Result<()> {
///     while !ready() {
///         if interrupted() {
///             return Err(Errno::INTR.into());
///         }
///         uvfs_io::ops::sleep(Duration::from_millis(10)).await;
///     }
///     Ok(())
/// }
/// ```
pub fn interrupted() -> bool {
    POLLED.with(|polled| {
        polled
            .borrow()
            .as_ref()
            .is_some_and(|flag| flag.load(Ordering::Relaxed))
    })
}

/// The result of `future`; `None`, at once, when the caller of the request with this context is being killed.
///
/// Threads of one program may wait for each other in the kernel: for the lookup of one name, say. When the program is
/// killed, their requests come one after another, so each has to end without delay. Other signals do not count:
/// programs do not expect EINTR from calls such as stat(2). A client whose session ends counts as killed.
pub async fn until_killed<T>(cx: &Context, future: impl Future<Output = T>) -> Option<T> {
    let mut future = pin!(future);
    let mut tick = None;
    let mut first: Option<Signals> = None;
    std::future::poll_fn(|task| {
        if let Poll::Ready(done) = future.as_mut().poll(task) {
            return Poll::Ready(Some(done));
        }
        let first = first.get_or_insert_with(|| Signals::at_first(cx.unique, cx.pid));
        // The kernel says once that a signal came. A later one may kill.
        while first.any || interrupted() {
            if is_client(cx) || is_dying(cx.pid) {
                return Poll::Ready(None);
            }
            let sleep = tick.get_or_insert_with(|| Box::pin(ops::sleep(TICK)));
            if sleep.as_mut().poll(task).is_pending() {
                break;
            }
            tick = None;
        }
        Poll::Pending
    })
    .await
}

/// Whether a client over shared memory sent the request with this context, and not the kernel.
pub fn is_client(cx: &Context) -> bool {
    is_clients(cx.unique)
}

fn is_clients(request: u64) -> bool {
    request & CLIENTS != 0
}

/// Numbers of clients' requests have this bit, which the kernel's never have: [`Interrupts`] has both.
const CLIENTS: u64 = 1 << 62;
/// The low bits of such a number, which count a client's requests.
const COUNT: u32 = 31;

/// The number of a client's request. In steps of two, as the kernel's: the lowest bit marks interrupts.
pub(crate) fn unique(client: u32, count: u64) -> u64 {
    let client = u64::from(client) << COUNT & (CLIENTS - 1);
    CLIENTS | client | count << 1 & ((1 << COUNT) - 1)
}

/// Signals that wait for a thread, and whether one of them kills it. Nothing where that can't be seen. (Nothing that
/// this reads waits for locks that the thread may hold.)
#[derive(Clone, Copy, Default)]
struct Signals {
    any: bool,
    kill: bool,
}

impl Signals {
    fn of(thread: u32) -> Self {
        let Ok(status) = std::fs::read_to_string(format!("/proc/{thread}/status")) else {
            return Self::default();
        };
        let set = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name));
            line.and_then(|set| u64::from_str_radix(set.trim(), 16).ok())
                .unwrap_or(0)
        };
        let pending = set("SigPnd:") | set("ShdPnd:");
        Self {
            any: pending & !set("SigBlk:") != 0,
            // The kernel makes every signal that kills into this one.
            kill: pending & 1 << (libc::SIGKILL - 1) != 0,
        }
    }

    /// The signals that the caller of a request had when the server first looked. The kernel (Linux 6.18) sends no
    /// INTERRUPT for a signal that comes after it has given a request to a ring's entry and before the entry is the
    /// server's: `fuse_uring_prepare_send` sets FR_SENT without a look at FR_INTERRUPTED.
    fn at_first(request: u64, thread: u32) -> Self {
        match is_clients(request) {
            true => Self::default(),
            false => Self::of(thread),
        }
    }
}

/// Whether a thread is about to die of a signal.
pub(crate) fn is_dying(thread: u32) -> bool {
    Signals::of(thread).kill
}

/// Whether a thread is the last of its process, and has no memory any more: the process's files are closed next.
pub(crate) fn is_ending(thread: u32) -> bool {
    let status = std::fs::read_to_string(format!("/proc/{thread}/status"));
    status.is_ok_and(|status| !status.contains("\nVmSize:"))
}

/// A request, and what it waits for if it has to wait.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Waits {
    pub(crate) unique: u64,
    pub(crate) opcode: u32,
    pub(crate) node: u64,
    /// The caller's thread.
    pub(crate) pid: u32,
    pub(crate) cause: Cause,
    /// When the wait began; `None` if it begins when the handler first awaits.
    pub(crate) since: Option<Instant>,
}

impl Waits {
    pub(crate) fn new(cx: &Context, opcode: u32, node: u64, cause: Cause) -> Self {
        Self {
            unique: cx.unique & !UNIQUE_RESEND,
            opcode,
            node,
            pid: cx.pid,
            cause,
            since: None,
        }
    }
}

/// The reason why a request waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Cause {
    FileSystem,
    Lease,
    /// A lock, which its owner may keep for as long as it likes.
    Lock,
}

impl Cause {
    /// A name for logs and reports.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Cause::FileSystem => "the file system",
            Cause::Lease => "a client's lease",
            Cause::Lock => "a lock",
        }
    }
}

struct UnderWay {
    flag: Flag,
    waker: Waker,
    waits: Waits,
    since: Instant,
}

/// Requests whose handlers wait.
#[derive(Default)]
pub(crate) struct Interrupts(Mutex<Table>);

#[derive(Default)]
struct Table {
    waiting: HashMap<u64, UnderWay>,
    /// Requests that an INTERRUPT named while they did not wait: they may be about to. The oldest goes first.
    early: VecDeque<u64>,
}

/// INTERRUPTs that are kept for requests to come. More requests than that are seldom on their way from the kernel.
const MOST_EARLY: usize = 1024;

impl Interrupts {
    fn lock(&self) -> MutexGuard<'_, Table> {
        uvfs_sys::lock(&self.0)
    }

    /// Interrupts a request. EAGAIN when it does not wait (yet). The kernel then sends the INTERRUPT again for as long as
    /// the request is under way, but not for a request of a ring: that one is interrupted here as soon as it waits.
    pub(crate) fn interrupt(&self, unique: u64) -> Result<(), Errno> {
        // The kernel interrupts a request that it has sent again by either number.
        let unique = unique & !UNIQUE_RESEND;
        let mut table = self.lock();
        let waker = match table.waiting.get(&unique) {
            Some(waiting) => {
                waiting.flag.store(true, Ordering::Relaxed);
                waiting.waker.clone()
            }
            None => {
                if !table.early.contains(&unique) {
                    table.early.truncate(MOST_EARLY - 1);
                    table.early.push_front(unique);
                }
                return Err(Errno::AGAIN);
            }
        };
        drop(table);
        waker.wake();
        Ok(())
    }

    /// Lists requests that have waited for at least `time`, and since when: the oldest first, at most
    /// `most`.
    pub(crate) fn longer_than(&self, time: Duration, most: usize) -> Vec<(Waits, Instant)> {
        let late = |one: &&UnderWay| one.since.elapsed() >= time;
        let mut found: Vec<_> = (self.lock().waiting.values().filter(late))
            .map(|one| (one.waits, one.since))
            .collect();
        found.sort_by_key(|(_, since)| *since);
        found.truncate(most);
        found
    }

    /// Interrupts all requests of a client, whose session has ended.
    pub(crate) fn interrupt_client(&self, client: u32) {
        let of = unique(client, 0) >> COUNT;
        let requests = self.lock();
        let of_client = (requests.waiting)
            .values()
            .filter(|one| one.waits.unique >> COUNT == of);
        let wakers: Vec<_> = of_client
            .map(|one| {
                one.flag.store(true, Ordering::Relaxed);
                one.waker.clone()
            })
            .collect();
        drop(requests);
        wakers.into_iter().for_each(Waker::wake);
    }

    /// Runs a handler so that an INTERRUPT can reach it. Gives `None` if the handler panics.
    pub(crate) async fn guard<T>(
        &self,
        waits: Waits,
        handler: impl Future<Output = T>,
    ) -> Option<T> {
        let mut handler = pin!(handler);
        let mut entered: Option<InHandler<'_>> = None;
        std::future::poll_fn(move |cx| {
            let flag = entered.as_ref().map(|entered| entered.flag.clone());
            let before = POLLED.replace(flag);
            let polled = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                handler.as_mut().poll(cx)
            }));
            POLLED.set(before);
            match polled {
                Ok(Poll::Pending) => {
                    if entered.is_none() {
                        let flag = Flag::default();
                        let waiting = UnderWay {
                            flag: flag.clone(),
                            waker: cx.waker().clone(),
                            waits,
                            since: waits.since.unwrap_or_else(Instant::now),
                        };
                        let mut table = self.lock();
                        let early = table.early.iter().position(|one| *one == waits.unique);
                        let early = early.and_then(|at| table.early.remove(at)).is_some();
                        let lost = waits.cause == Cause::Lock
                            && Signals::at_first(waits.unique, waits.pid).any;
                        if early || lost {
                            flag.store(true, Ordering::Relaxed);
                            cx.waker().wake_by_ref();
                        }
                        table.waiting.insert(waits.unique, waiting);
                        drop(table);
                        entered = Some(InHandler {
                            table: self,
                            unique: waits.unique,
                            flag,
                        });
                    }
                    Poll::Pending
                }
                Ok(Poll::Ready(value)) => Poll::Ready(Some(value)),
                Err(_) => Poll::Ready(None),
            }
        })
        .await
    }
}

struct InHandler<'a> {
    table: &'a Interrupts,
    unique: u64,
    flag: Flag,
}

impl Drop for InHandler<'_> {
    fn drop(&mut self) {
        self.table.lock().waiting.remove(&self.unique);
    }
}

#[cfg(test)]
mod tests {
    use std::task::Context;

    use super::*;

    fn request(unique: u64) -> Waits {
        Waits {
            unique,
            opcode: 15,
            node: 3,
            pid: 0,
            cause: Cause::FileSystem,
            since: None,
        }
    }

    /// A client that ends interrupts all its own requests, and no other client's.
    #[test]
    fn a_client_that_ends_interrupts_its_own_requests_alone() {
        let table = Interrupts::default();
        let mut cx = Context::from_waker(Waker::noop());
        let waits = || {
            std::future::poll_fn(|_| match interrupted() {
                true => Poll::Ready(()),
                false => Poll::Pending,
            })
        };
        let of = |client, count| Box::pin(table.guard(request(unique(client, count)), waits()));
        let mut all = [of(1, 0), of(1, u64::MAX), of(2, 0), of(u32::MAX, 7)];
        for one in &mut all {
            assert!(one.as_mut().poll(&mut cx).is_pending());
        }
        table.interrupt_client(1);
        let ended = all.map(|mut one| one.as_mut().poll(&mut cx).is_ready());
        assert_eq!(ended, [true, true, false, false]);
    }

    /// An interrupt ends a handler that waits, and a panic ends only its own request.
    #[test]
    fn a_waiting_handler_is_interrupted_and_a_panicking_one_is_contained() {
        let table = Interrupts::default();
        let mut cx = Context::from_waker(Waker::noop());
        let mut waits = pin!(table.guard(
            request(7),
            std::future::poll_fn(|_| {
                if interrupted() {
                    Poll::Ready(())
                } else {
                    Poll::Pending
                }
            })
        ));
        assert_eq!(table.interrupt(7), Err(Errno::AGAIN));
        assert!(table.longer_than(Duration::ZERO, 9).is_empty());
        assert!(waits.as_mut().poll(&mut cx).is_pending());
        let waiting = table.longer_than(Duration::ZERO, 9);
        assert_eq!(waiting.len(), 1);
        assert_eq!((waiting[0].0.unique, waiting[0].0.node), (7, 3));
        assert!(table.longer_than(Duration::from_secs(600), 9).is_empty());
        assert!(table.longer_than(Duration::ZERO, 0).is_empty());
        assert_eq!(table.interrupt(7), Ok(()));
        assert_eq!(waits.as_mut().poll(&mut cx), Poll::Ready(Some(())));
        assert!(table.lock().waiting.is_empty());
        // An INTERRUPT that comes before its request waits is not lost.
        assert_eq!(table.interrupt(9), Err(Errno::AGAIN));
        let mut late = pin!(table.guard(
            request(9),
            std::future::poll_fn(|_| match interrupted() {
                true => Poll::Ready(()),
                false => Poll::Pending,
            })
        ));
        assert!(late.as_mut().poll(&mut cx).is_pending());
        assert_eq!(late.as_mut().poll(&mut cx), Poll::Ready(Some(())));
        for n in 0..2 * MOST_EARLY as u64 {
            let _ = table.interrupt(n);
        }
        assert_eq!(table.lock().early.len(), MOST_EARLY);
        let mut panics = pin!(table.guard(request(8_000), async {
            panic!("a panic that the test wants")
        }));
        assert_eq!(panics.as_mut().poll(&mut cx), Poll::Ready(None::<()>));
        assert!(!interrupted());
    }
}
