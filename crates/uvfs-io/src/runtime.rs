//! A small executor for each thread, and the driver that does its operations.
//!
//! Tasks run on the thread that spawned them and wait for operations ([`crate::ops`]), for
//! each other, or for a waker called on another thread. When no task can go on, one system call waits.
//!
//! There are two drivers. A *ring* is an io_uring: the same system call submits what tasks have queued. Where
//! io_uring is refused, as containers' seccomp profiles do, a *pool* of threads makes the calls that may wait
//! (`pool.rs`). A task need not know which one its runtime has; only FUSE-over-io_uring takes a ring.

mod call;
mod op;
mod pool;
mod refused;
mod remote;
mod ring;

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::future::Future;
use std::io;
use std::os::fd::BorrowedFd;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::{Arc, Once};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use slab::Slab;
use uvfs_queue::ring::Bell;
use uvfs_queue::wait::{Spinner, WaitConfig, WaitCounts};

pub(crate) use call::{Call, Transfer};
pub(crate) use op::start;
pub use op::{Keep, Operation, submit};
use op::{OpEntry, OpState};
use pool::Pool;
pub use refused::{Refused, refusal};
pub use remote::Remote;
use remote::{Message, Shared, TaskWaker};
use ring::Ring;
pub use ring::Sqe;
pub(crate) use ring::probe;

type Task = Pin<Box<dyn Future<Output = ()>>>;

/// The most tasks that are polled in a row before the driver looks for completions.
const TURN: usize = 32;
/// The kernel has released a ring's memory at the latest this long after the ring was closed.
const RELEASED: Duration = Duration::from_secs(2);

/// What does the operations.
enum Driver {
    Ring(Ring),
    Pool(Pool),
}

/// The same method of either driver.
macro_rules! of_driver {
    ($driver:expr, $one:ident => $call:expr) => {
        match &mut *$driver {
            Driver::Ring($one) => $call,
            Driver::Pool($one) => $call,
        }
    };
}

struct Spawned {
    /// Taken out while it is polled.
    future: Option<Task>,
    waker: Waker,
    ready: bool,
}

struct Executor {
    driver: RefCell<Driver>,
    ops: RefCell<Slab<OpEntry>>,
    tasks: RefCell<Slab<Spawned>>,
    ready: RefCell<VecDeque<usize>>,
    shared: Arc<Shared>,
    spinner: RefCell<Spinner>,
    enters: Cell<u64>,
    hands_over: Cell<bool>,
    /// Registered credentials.
    personality: Cell<Option<u16>>,
}

thread_local! {
    /// The credentials of operations that are submitted now; 0 are the thread's own.
    static PERSONALITY: Cell<u16> = const { Cell::new(0) };
    static CURRENT: RefCell<Option<Rc<Executor>>> = const { RefCell::new(None) };
}

fn with_current<T>(f: impl FnOnce(Option<&Rc<Executor>>) -> T) -> T {
    CURRENT.with(|current| f(current.borrow().as_ref()))
}

fn current() -> Rc<Executor> {
    with_current(|core| core.cloned()).expect("only inside a Runtime of this thread")
}

/// Whether the calling thread runs a [`Runtime`].
pub fn is_running() -> bool {
    with_current(|core| core.is_some())
}

/// Starts a task on the calling thread's runtime.
///
/// # Panics
/// Outside of a runtime.
pub fn spawn(future: impl Future<Output = ()> + 'static) {
    current().spawn(Box::pin(future));
}

/// Says whether large transfers that begin now are done by other threads, those of
/// different files side by side, instead of one after another in the calling thread. Worth its
/// price when more than one is waiting. Nothing outside of a runtime.
pub fn hand_over_large(on: bool) {
    with_current(|core| {
        if let Some(core) = core {
            core.hands_over.set(on);
        }
    });
}

/// Whether the calling thread's runtime has something to do besides the task that asks: a task that can
/// go on, an operation to submit, a completion to take. False outside of a runtime.
pub fn has_work() -> bool {
    with_current(|core| core.is_some_and(|core| core.has_work()))
}

/// See [`hand_over_large`].
pub(crate) fn hands_over() -> bool {
    with_current(|core| core.is_some_and(|core| core.hands_over.get()))
}

/// The credentials that were registered with the calling thread's runtime, if any were.
pub fn personality() -> Option<u16> {
    with_current(|core| core.and_then(|core| core.personality.get()))
}

/// Registers the calling thread's credentials, as they are now, with its runtime.
///
/// # Errors
/// The errors of io_uring_register(2).
///
/// # Panics
/// Outside of a runtime.
pub fn register_personality() -> io::Result<u16> {
    let core = current();
    let id = match &mut *core.driver.borrow_mut() {
        Driver::Ring(ring) => ring.register_personality()?,
        Driver::Pool(pool) => pool.register_personality(),
    };
    core.personality.set(Some(id));
    Ok(id)
}

/// Calls `work`. The operations that it submits have registered credentials.
pub fn with_personality<T>(id: u16, work: impl FnOnce() -> T) -> T {
    struct Back(u16);
    impl Drop for Back {
        fn drop(&mut self) {
            PERSONALITY.set(self.0);
        }
    }
    let _back = Back(PERSONALITY.replace(id));
    work()
}

/// How a runtime's thread has waited, and its system calls.
#[derive(Clone, Copy, Debug, Default)]
pub struct RuntimeCounts {
    /// How waits ended.
    pub waits: WaitCounts,
    /// Calls of io_uring_enter(2) or ppoll(2).
    pub enters: u64,
}

/// The calling thread's counts; zeros outside of a runtime.
pub fn counts() -> RuntimeCounts {
    with_current(|core| {
        core.map_or_else(RuntimeCounts::default, |core| RuntimeCounts {
            waits: core.spinner.borrow().counts(),
            enters: core.enters.get(),
        })
    })
}

/// One thread's executor and driver.
pub struct Runtime {
    core: Rc<Executor>,
}

impl Runtime {
    /// Makes the calling thread's runtime. It stays on this thread. Where io_uring is refused ([`refusal`]) it has
    /// a pool of threads instead.
    ///
    /// # Errors
    /// When a limit is reached.
    pub fn new(wait: WaitConfig) -> io::Result<Self> {
        let shared = Shared::new()?;
        let driver = match Ring::new(&shared) {
            Ok(ring) => Driver::Ring(ring),
            Err(error) => {
                let refused = Refused::new(&error).ok_or(error)?;
                static WARN: Once = Once::new();
                WARN.call_once(|| {
                    tracing::warn!(%refused, "a pool of threads does what may wait, slower");
                });
                Driver::Pool(Pool::new(&shared))
            }
        };
        Ok(Self::with(driver, shared, wait))
    }

    /// As [`Runtime::new`], but with a ring or not at all.
    ///
    /// # Errors
    /// The refusal of io_uring; when a limit is reached.
    pub fn with_ring(wait: WaitConfig) -> io::Result<Self> {
        let shared = Shared::new()?;
        let deadline = Instant::now() + RELEASED;
        let ring = loop {
            match Ring::new(&shared) {
                // The kernel takes its time to release the memory of rings that are gone.
                Err(error)
                    if error.kind() == io::ErrorKind::OutOfMemory && Instant::now() < deadline =>
                {
                    std::thread::sleep(Duration::from_millis(5));
                }
                Err(error) => {
                    return Err(match Refused::new(&error) {
                        Some(refused) => io::Error::new(error.kind(), refused.to_string()),
                        None => error,
                    });
                }
                Ok(ring) => break ring,
            }
        };
        Ok(Self::with(Driver::Ring(ring), shared, wait))
    }

    /// Prepares for a process that is killed while another one has the descriptor of the ring: the kernel then cancels the
    /// commands of this thread, as it does by itself for a ring that is closed. `end` stays open until the last operation has
    /// ended.
    ///
    /// # Errors
    /// When a limit is reached.
    ///
    /// # Panics
    /// Without a ring.
    pub fn outlives(&self, end: BorrowedFd<'_>) -> io::Result<()> {
        match &mut *self.core.driver.borrow_mut() {
            Driver::Ring(ring) => ring.outlives(end),
            Driver::Pool(_) => unreachable!("a pool has no commands"),
        }
    }

    /// A runtime as it is where io_uring is refused.
    #[cfg(test)]
    pub(crate) fn without_ring(wait: WaitConfig) -> Self {
        let shared = Shared::new().unwrap();
        let driver = Driver::Pool(Pool::new(&shared));
        Self::with(driver, shared, wait)
    }

    fn with(driver: Driver, shared: Arc<Shared>, wait: WaitConfig) -> Self {
        let core = Rc::new(Executor {
            driver: RefCell::new(driver),
            ops: RefCell::default(),
            tasks: RefCell::default(),
            ready: RefCell::default(),
            shared,
            spinner: RefCell::new(Spinner::new(wait)),
            enters: Cell::new(0),
            hands_over: Cell::new(false),
            personality: Cell::new(None),
        });
        Self { core }
    }

    /// Reaches this runtime from any thread.
    pub fn remote(&self) -> Remote {
        Remote(self.core.shared.clone())
    }

    /// Runs `main` and every task spawned meanwhile until `main` ends. Tasks that are left stay
    /// until the next `block_on` or until the runtime is dropped.
    ///
    /// # Errors
    /// When the driver fails in a way that can't be gone on from.
    ///
    /// # Panics
    /// When the thread already is inside a runtime.
    pub fn block_on<T: 'static>(&self, main: impl Future<Output = T> + 'static) -> io::Result<T> {
        assert!(!is_running(), "a runtime inside a runtime");
        CURRENT.with(|current| *current.borrow_mut() = Some(self.core.clone()));
        let _leave = Leave;
        let result = Rc::new(RefCell::new(None));
        let theirs = result.clone();
        self.core.spawn(Box::pin(async move {
            let value = main.await;
            *theirs.borrow_mut() = Some(value);
        }));
        loop {
            self.core.run_ready();
            if let Some(value) = result.borrow_mut().take() {
                return Ok(value);
            }
            self.core.wait()?;
        }
    }
}

/// What becomes of calls in the inbox.
#[derive(Clone, Copy, PartialEq)]
enum Inbox {
    /// They are made.
    Open,
    /// The runtime ends: they are dropped.
    Ends,
}

struct Leave;

impl Drop for Leave {
    fn drop(&mut self) {
        CURRENT.with(|current| *current.borrow_mut() = None);
    }
}

impl Drop for Runtime {
    fn drop(&mut self) {
        // Tasks first: dropping them abandons their operations. Then everything that the kernel or a thread may
        // still be using has to be over before its memory goes.
        CURRENT.with(|current| *current.borrow_mut() = Some(self.core.clone()));
        let _leave = Leave;
        let tasks = std::mem::take(&mut *self.core.tasks.borrow_mut());
        drop(tasks);
        let deadline = Instant::now() + std::time::Duration::from_secs(5);
        while !self.core.ops.borrow().is_empty() && Instant::now() < deadline {
            self.core.cancel_all();
            if self.core.enter(false).is_err() {
                break;
            }
            self.core.reap();
            self.core.read_inbox(Inbox::Ends);
            if !self.core.ops.borrow().is_empty() {
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        // A call may hold a `Remote`, and with it this very inbox.
        let calls = self.core.shared.inbox().take();
        drop(calls);
        if !self.core.ops.borrow().is_empty() {
            // Something can't be cancelled: leaking its memory is the safe way out.
            std::mem::forget(self.core.clone());
        }
    }
}

impl Executor {
    fn spawn(self: &Rc<Self>, future: Task) {
        let mut tasks = self.tasks.borrow_mut();
        let entry = tasks.vacant_entry();
        let task = entry.key();
        let waker = Waker::from(Arc::new(TaskWaker {
            task,
            shared: self.shared.clone(),
        }));
        entry.insert(Spawned {
            future: Some(future),
            waker,
            ready: true,
        });
        drop(tasks);
        self.ready.borrow_mut().push_back(task);
    }

    fn make_ready(&self, task: usize) {
        // A waker may outlive its task; the worst is that another is polled for nothing.
        if let Some(spawned) = self.tasks.borrow_mut().get_mut(task)
            && !spawned.ready
        {
            spawned.ready = true;
            self.ready.borrow_mut().push_back(task);
        }
    }

    fn run_ready(self: &Rc<Self>) {
        self.read_inbox(Inbox::Open);
        for _ in 0..TURN {
            let Some(task) = self.ready.borrow_mut().pop_front() else {
                return;
            };
            let (mut future, waker) = {
                let mut tasks = self.tasks.borrow_mut();
                let Some(spawned) = tasks.get_mut(task) else {
                    continue;
                };
                spawned.ready = false;
                let Some(future) = spawned.future.take() else {
                    continue;
                };
                // Moved out while the task is polled: that is cheaper than to share it.
                let waker = std::mem::replace(&mut spawned.waker, Waker::noop().clone());
                (future, waker)
            };
            match future.as_mut().poll(&mut Context::from_waker(&waker)) {
                Poll::Pending => {
                    if let Some(spawned) = self.tasks.borrow_mut().get_mut(task) {
                        spawned.future = Some(future);
                        spawned.waker = waker;
                    }
                }
                Poll::Ready(()) => {
                    let done = self.tasks.borrow_mut().try_remove(task);
                    drop(done);
                }
            }
        }
    }

    fn read_inbox(self: &Rc<Self>, state: Inbox) {
        let messages = match &mut *self.shared.inbox() {
            Some(inbox) if !inbox.is_empty() => std::mem::take(inbox),
            _ => return,
        };
        for message in messages {
            match message {
                Message::Completed(key, result) => self.complete(key, result),
                Message::Wake(task) => self.make_ready(task),
                Message::Call(call) if state == Inbox::Open => call(),
                Message::Call(_) => {}
            }
        }
    }

    fn inbox_is_empty(&self) -> bool {
        self.shared.inbox().as_ref().is_none_or(Vec::is_empty)
    }

    fn has_work(&self) -> bool {
        let ended = of_driver!(self.driver.borrow_mut(), one => one.has_work());
        ended || !self.ready.borrow().is_empty() || !self.inbox_is_empty()
    }

    /// Waits for a completion or for another thread, by the wait policy. Does not wait while tasks can go on.
    fn wait(self: &Rc<Self>) -> io::Result<()> {
        if !self.ready.borrow().is_empty() {
            self.enter(false)?;
            self.reap();
            return Ok(());
        }
        let budget = self.spinner.borrow().budget();
        if !budget.is_zero() && self.spin(budget)? {
            return Ok(());
        }
        Bell(&self.shared.bell).going_to_sleep();
        let entered = self.enter(self.inbox_is_empty());
        Bell(&self.shared.bell).awake();
        entered?;
        self.reap();
        if budget.is_zero() {
            self.spinner.borrow_mut().count(true);
        }
        Ok(())
    }

    /// Spins for at most `budget`; true when there is something to do. Learns from the gap.
    fn spin(self: &Rc<Self>, budget: Duration) -> io::Result<bool> {
        let leave = self.spinner.borrow().begin();
        let Some(leave) = leave else { return Ok(false) };
        let start = Instant::now();
        self.enter(false)?;
        loop {
            if self.reap() > 0 || !self.inbox_is_empty() {
                self.spinner.borrow_mut().ended(start.elapsed(), false);
                return Ok(true);
            }
            if start.elapsed() >= budget {
                drop(leave);
                self.spinner.borrow_mut().ended(2 * budget, true);
                return Ok(false);
            }
            if of_driver!(self.driver.borrow_mut(), one => one.has_unseen()) {
                self.enter(false)?;
            }
            std::hint::spin_loop();
        }
    }

    /// Sends what was submitted, and waits for a completion if `wait`.
    fn enter(&self, wait: bool) -> io::Result<()> {
        self.enters.set(self.enters.get() + 1);
        of_driver!(self.driver.borrow_mut(), one => one.enter(wait))
    }

    /// Takes in completions; says how many.
    fn reap(self: &Rc<Self>) -> usize {
        let mut count = 0;
        loop {
            // One at a time: waking and dropping may run code that submits.
            let ended = of_driver!(self.driver.borrow_mut(), one => one.completed());
            let Some((key, result)) = ended else {
                return count;
            };
            count += 1;
            self.complete(key, result);
        }
    }

    fn complete(&self, key: usize, result: i32) {
        let mut ops = self.ops.borrow_mut();
        let Some(op) = ops.get_mut(key) else {
            debug_assert!(false, "a completion of no operation");
            return;
        };
        match std::mem::replace(&mut op.state, OpState::Done(result)) {
            OpState::Waiting(waker) => {
                drop(ops);
                if let Some(waker) = waker {
                    waker.wake();
                }
            }
            OpState::Abandoned => {
                let done = ops.remove(key);
                drop(ops);
                drop(done);
            }
            OpState::Done(_) => debug_assert!(false, "two completions of one operation"),
        }
    }

    fn cancel(&self, key: usize) {
        of_driver!(self.driver.borrow_mut(), one => one.cancel(key));
    }

    fn cancel_all(&self) {
        let keys: Vec<usize> = self.ops.borrow().iter().map(|(key, _)| key).collect();
        for key in keys {
            self.cancel(key);
        }
    }
}
