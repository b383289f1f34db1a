//! An io_uring per thread and the small executor that drives it.
//!
//! Tasks run on the thread that spawned them and wait for ring operations ([`crate::ops`]), for
//! each other, or for a waker called on another thread. The operations that tasks submitted are sent to the
//! kernel in one system call when no task can go on, and that call also waits for the next completion.

mod op;
mod remote;

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::future::Future;
use std::io;
use std::os::fd::AsRawFd;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::atomic::AtomicU32;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker};
use std::time::Instant;

use io_uring::{EnterFlags, IoUring, cqueue, opcode, squeue, types};
use rustix::event::{EventfdFlags, eventfd};
use rustix::io::Errno;
use slab::Slab;
use uvfs_queue::placement::Watched;
use uvfs_queue::ring::Bell;
use uvfs_queue::wait::{Spinner, WaitConfig, WaitCounts};

pub use op::{Keep, RingOp, submit};
use op::{OpEntry, OpState};
pub use remote::Remote;
use remote::{Message, Shared, TaskWaker};

/// A submission entry of the ring; all are 128 bytes, as FUSE-over-io_uring needs.
pub type Sqe = squeue::Entry128;

type Ring = IoUring<squeue::Entry128, cqueue::Entry>;
type Task = Pin<Box<dyn Future<Output = ()>>>;

/// Entries of the submission queue; more wait in the ring's owner until there is room.
const ENTRIES: u32 = 256;
/// Tasks that are polled before the ring is looked at, also when there always is one that can go on.
const TURN: usize = 32;
/// `user_data` of the poll that waits for other threads.
const BELL: u64 = u64::MAX;
/// `user_data` of operations whose completion nobody waits for.
const IGNORED: u64 = u64::MAX - 1;

struct Spawned {
    /// Taken out while it is polled.
    future: Option<Task>,
    waker: Waker,
    ready: bool,
}

struct Executor {
    ring: RefCell<Ring>,
    /// Entries that did not fit into the ring.
    overflow: RefCell<VecDeque<Sqe>>,
    ops: RefCell<Slab<OpEntry>>,
    tasks: RefCell<Slab<Spawned>>,
    ready: RefCell<VecDeque<usize>>,
    shared: Arc<Shared>,
    spinner: RefCell<Spinner>,
    watched: RefCell<Option<Watched>>,
    enters: Cell<u64>,
    /// With which it waits.
    enter_flags: u32,
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

/// Says whether large transfers that begin now are done by threads of the kernel, those of
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

/// The credentials that were registered with the calling thread's ring, if any were.
pub fn personality() -> Option<u16> {
    with_current(|core| core.and_then(|core| core.personality.get()))
}

/// Registers the calling thread's credentials, as they are now, with its ring.
///
/// # Errors
/// The errors of io_uring_register(2).
///
/// # Panics
/// Outside of a runtime.
pub fn register_personality() -> io::Result<u16> {
    let core = current();
    let id = core.ring.borrow().submitter().register_personality()?;
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
    /// Calls of io_uring_enter(2).
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

/// One thread's ring and executor.
pub struct Runtime {
    core: Rc<Executor>,
}

impl Runtime {
    /// Makes the calling thread's runtime. It stays on this thread.
    ///
    /// # Errors
    /// When the kernel has no io_uring (ENOSYS), forbids it (EPERM), or a limit is reached.
    pub fn new(wait: WaitConfig) -> io::Result<Self> {
        let mut builder = IoUring::<squeue::Entry128, cqueue::Entry>::builder();
        builder
            .setup_single_issuer()
            .setup_defer_taskrun()
            .setup_taskrun_flag();
        let ring = match builder.build(ENTRIES) {
            // Before 6.1 there is no deferred task work.
            Err(error) if error.raw_os_error() == Some(Errno::INVAL.raw_os_error()) => {
                IoUring::builder().build(ENTRIES)?
            }
            other => other?,
        };
        let mut enter_flags = EnterFlags::GETEVENTS;
        if ring.params().is_feature_no_iowait() {
            // A thread that waits for requests is idle, and its core is not to count as waiting for
            // a device (Linux 6.15).
            enter_flags |= EnterFlags::NO_IOWAIT;
        }
        let eventfd = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let shared = Arc::new(Shared {
            inbox: Mutex::new(Some(Vec::new())),
            bell: AtomicU32::new(Bell::AWAKE),
            eventfd,
        });
        let core = Rc::new(Executor {
            ring: RefCell::new(ring),
            overflow: RefCell::default(),
            ops: RefCell::default(),
            tasks: RefCell::default(),
            ready: RefCell::default(),
            shared,
            spinner: RefCell::new(Spinner::new(wait)),
            watched: RefCell::new(None),
            enters: Cell::new(0),
            enter_flags: enter_flags.bits(),
            hands_over: Cell::new(false),
            personality: Cell::new(None),
        });
        core.arm_bell();
        Ok(Self { core })
    }

    /// Reaches this runtime from any thread.
    pub fn remote(&self) -> Remote {
        Remote(self.core.shared.clone())
    }

    /// Tells the watchdog when the thread wakes up.
    pub fn set_watched(&self, watched: Watched) {
        *self.core.watched.borrow_mut() = Some(watched);
    }

    /// Runs `main` and every task spawned meanwhile until `main` ends. Tasks that are left stay
    /// until the next `block_on` or until the runtime is dropped.
    ///
    /// # Errors
    /// When the ring fails in a way that can't be gone on from.
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

struct Leave;

impl Drop for Leave {
    fn drop(&mut self) {
        CURRENT.with(|current| *current.borrow_mut() = None);
    }
}

impl Drop for Runtime {
    fn drop(&mut self) {
        // Tasks first: dropping them abandons their operations. Then everything that the kernel may
        // still be using has to be over before its memory goes.
        CURRENT.with(|current| *current.borrow_mut() = Some(self.core.clone()));
        let _leave = Leave;
        let tasks = std::mem::take(&mut *self.core.tasks.borrow_mut());
        drop(tasks);
        // A call may hold a `Remote`, and with it this very inbox.
        let calls = self.core.shared.inbox().take();
        drop(calls);
        let deadline = Instant::now() + std::time::Duration::from_secs(5);
        while !self.core.ops.borrow().is_empty() && Instant::now() < deadline {
            self.core.cancel_all();
            if self.core.enter(0).is_err() {
                break;
            }
            self.core.reap();
            if !self.core.ops.borrow().is_empty() {
                std::thread::sleep(std::time::Duration::from_millis(1));
            }
        }
        if !self.core.ops.borrow().is_empty() {
            // Something in the kernel can't be cancelled: leaking its memory is the safe way out.
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
        self.read_inbox();
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
                // Taken along while it is polled, as that is cheaper than to share it.
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

    fn read_inbox(self: &Rc<Self>) {
        let messages = match &mut *self.shared.inbox() {
            Some(inbox) if !inbox.is_empty() => std::mem::take(inbox),
            _ => return,
        };
        for message in messages {
            match message {
                Message::Wake(task) => self.make_ready(task),
                Message::Call(call) => call(),
            }
        }
    }

    fn inbox_is_empty(&self) -> bool {
        self.shared.inbox().as_ref().is_none_or(Vec::is_empty)
    }

    fn has_work(&self) -> bool {
        let mut ring = self.ring.borrow_mut();
        let submission = ring.submission();
        let submits = !submission.is_empty() || submission.taskrun();
        drop(submission);
        let completes = !ring.completion().is_empty();
        submits || completes || !self.ready.borrow().is_empty() || !self.inbox_is_empty()
    }

    /// Waits for a completion or for another thread, by the wait policy; only looks at the ring while tasks can
    /// go on.
    fn wait(self: &Rc<Self>) -> io::Result<()> {
        if !self.ready.borrow().is_empty() {
            self.enter(0)?;
            self.reap();
            return Ok(());
        }
        let budget = self.spinner.borrow().budget();
        if !budget.is_zero() && self.spin(budget)? {
            return Ok(());
        }
        Bell(&self.shared.bell).going_to_sleep();
        let want = usize::from(self.inbox_is_empty());
        let entered = self.enter(want);
        Bell(&self.shared.bell).awake();
        entered?;
        self.reap();
        if let Some(watched) = &*self.watched.borrow() {
            watched.stir();
        }
        if budget.is_zero() {
            self.spinner.borrow_mut().count(true);
        }
        Ok(())
    }

    /// Spins for at most `budget`; true when there is something to do. Learns from the gap.
    fn spin(self: &Rc<Self>, budget: std::time::Duration) -> io::Result<bool> {
        let leave = self.spinner.borrow().begin();
        let Some(leave) = leave else { return Ok(false) };
        let start = Instant::now();
        self.enter(0)?;
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
            if self.ring.borrow_mut().submission().taskrun() {
                self.enter(0)?;
            }
            std::hint::spin_loop();
        }
    }

    /// Sends what was submitted, and waits for `want` completions.
    fn enter(&self, want: usize) -> io::Result<()> {
        let mut ring = self.ring.borrow_mut();
        loop {
            let mut overflow = self.overflow.borrow_mut();
            let mut queue = ring.submission();
            while let Some(entry) = overflow.front() {
                // SAFETY: what the entry points to is kept by its OpEntry until it completes.
                if unsafe { queue.push(entry) }.is_err() {
                    break;
                }
                overflow.pop_front();
            }
            queue.sync();
            let len = queue.len();
            drop(queue);
            let more = !overflow.is_empty();
            drop(overflow);
            let want = if more { 0 } else { want };
            self.enters.set(self.enters.get() + 1);
            // SAFETY: no argument is passed; the entries' memory is kept as said above.
            let result = unsafe {
                ring.submitter().enter::<libc::sigset_t>(
                    len as u32,
                    want as u32,
                    self.enter_flags,
                    None,
                )
            };
            match result {
                Ok(_) if more => {}
                Ok(_) => return Ok(()),
                Err(error) => match error.raw_os_error().map(Errno::from_raw_os_error) {
                    Some(Errno::INTR | Errno::AGAIN | Errno::BUSY) => return Ok(()),
                    _ => return Err(error),
                },
            }
        }
    }

    /// Takes in completions; says how many.
    fn reap(self: &Rc<Self>) -> usize {
        let mut count = 0;
        loop {
            // One at a time: waking and dropping may run code that submits.
            let Some(entry) = self.ring.borrow_mut().completion().next() else {
                return count;
            };
            count += 1;
            match entry.user_data() {
                BELL => {
                    // Only brings it back to "nothing to read"; the inbox is looked at anyway.
                    let _ = rustix::io::read(&self.shared.eventfd, &mut [0; 8]);
                    self.arm_bell();
                }
                IGNORED => {}
                key => self.complete(key as usize, entry.result()),
            }
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

    fn push(&self, entry: Sqe) {
        let mut overflow = self.overflow.borrow_mut();
        let mut ring = self.ring.borrow_mut();
        // SAFETY: what the entry points to is kept by its OpEntry until it completes.
        if !overflow.is_empty() || unsafe { ring.submission().push(&entry) }.is_err() {
            overflow.push_back(entry);
        }
    }

    fn arm_bell(&self) {
        let eventfd = types::Fd(self.shared.eventfd.as_raw_fd());
        let poll = opcode::PollAdd::new(eventfd, libc::POLLIN as u32).build();
        self.push(Sqe::from(poll.user_data(BELL)));
    }

    fn cancel(&self, key: usize) {
        let cancel = opcode::AsyncCancel::new(key as u64).build();
        self.push(Sqe::from(cancel.user_data(IGNORED)));
    }

    fn cancel_all(&self) {
        let keys: Vec<usize> = self.ops.borrow().iter().map(|(key, _)| key).collect();
        for key in keys {
            self.cancel(key);
        }
    }
}
