//! The driver that has an io_uring: everything that tasks submit leaves in one system call, which also waits.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use io_uring::{EnterFlags, IoUring, cqueue, opcode, squeue, types};
use rustix::io::Errno;

use super::call::Call;
use super::op::Keep;
use super::remote::Shared;

/// A submission entry of the ring; all are 128 bytes, as FUSE-over-io_uring needs.
pub type Sqe = squeue::Entry128;

pub(super) type Queues = IoUring<squeue::Entry128, cqueue::Entry>;

/// Entries of the submission queue; more wait in `overflow` until there is room.
const ENTRIES: u32 = 256;
/// `user_data` of the poll that waits for other threads.
const BELL: u64 = u64::MAX;
/// `user_data` of operations whose completion no task waits for.
const IGNORED: u64 = u64::MAX - 1;

pub(super) struct Ring {
    queues: Queues,
    /// Entries that did not fit into the ring.
    overflow: VecDeque<Sqe>,
    /// The flags of each wait.
    enter_flags: u32,
    shared: Arc<Shared>,
    /// See [`Ring::outlives`].
    second: Option<Box<IoUring>>,
}

/// Makes the two other system calls of a ring: a sandbox may refuse each of the three.
///
/// # Errors
/// The error of io_uring_enter(2) or io_uring_register(2).
pub(crate) fn probe(submitter: &io_uring::Submitter<'_>) -> io::Result<()> {
    submitter.register_probe(&mut io_uring::Probe::new())?;
    // SAFETY: submits nothing, waits for nothing, and passes no argument.
    unsafe { submitter.enter::<libc::sigset_t>(0, 0, 0, None) }?;
    Ok(())
}

/// A ring that is known to work.
///
/// # Errors
/// The errors of the three system calls.
pub(super) fn build() -> io::Result<Queues> {
    let mut builder = IoUring::<squeue::Entry128, cqueue::Entry>::builder();
    builder
        .setup_single_issuer()
        .setup_defer_taskrun()
        .setup_taskrun_flag();
    let queues = match builder.build(ENTRIES) {
        // Before 6.1 there is no deferred task work.
        Err(error) if error.raw_os_error() == Some(Errno::INVAL.raw_os_error()) => {
            IoUring::builder().build(ENTRIES)?
        }
        other => other?,
    };
    probe(&queues.submitter())?;
    Ok(queues)
}

impl Ring {
    /// # Errors
    /// See [`build`].
    pub(super) fn new(shared: &Arc<Shared>) -> io::Result<Self> {
        let queues = build()?;
        let mut enter_flags = EnterFlags::GETEVENTS;
        if queues.params().is_feature_no_iowait() {
            // A thread that waits for requests is idle, and its core is not to count as waiting for
            // a device (Linux 6.15).
            enter_flags |= EnterFlags::NO_IOWAIT;
        }
        let mut ring = Self {
            queues,
            overflow: VecDeque::new(),
            enter_flags: enter_flags.bits(),
            shared: shared.clone(),
            second: None,
        };
        ring.arm_bell();
        Ok(ring)
    }

    /// Prepares for a descriptor of this ring that outlives the thread.
    ///
    /// The kernel cancels the commands of a thread that ends only if the thread has an operation under way on a ring. So it
    /// polls a second one, which it uses for nothing else. The ring holds `end` open as long as any of its operations is under
    /// way, direct I/O for instance.
    pub(super) fn outlives(&mut self, end: BorrowedFd<'_>) -> io::Result<()> {
        self.queues.submitter().register_files(&[end.as_raw_fd()])?;
        let second = IoUring::new(1)?;
        let poll = opcode::PollAdd::new(types::Fd(second.as_raw_fd()), libc::POLLIN as u32);
        self.push(Sqe::from(poll.build().user_data(IGNORED)));
        self.second = Some(Box::new(second));
        Ok(())
    }

    pub(super) fn register_personality(&self) -> io::Result<u16> {
        self.queues.submitter().register_personality()
    }

    /// Queues an operation, which the next [`Ring::enter`] sends.
    pub(super) fn start(&mut self, key: usize, call: &Call, keep: &mut Keep, personality: u16) {
        let entry = call.entry(keep);
        self.push(entry.personality(personality).user_data(key as u64));
    }

    /// Queues an entry, whose memory its `OpEntry` keeps until it completes.
    pub(super) fn push(&mut self, entry: Sqe) {
        // SAFETY: what the entry points to is kept by its OpEntry until it completes.
        if !self.overflow.is_empty() || unsafe { self.queues.submission().push(&entry) }.is_err() {
            self.overflow.push_back(entry);
        }
    }

    fn arm_bell(&mut self) {
        let eventfd: &OwnedFd = &self.shared.eventfd;
        let poll = opcode::PollAdd::new(types::Fd(eventfd.as_raw_fd()), libc::POLLIN as u32);
        self.push(Sqe::from(poll.build().user_data(BELL)));
    }

    pub(super) fn cancel(&mut self, key: usize) {
        let cancel = opcode::AsyncCancel::new(key as u64).build();
        self.push(Sqe::from(cancel.user_data(IGNORED)));
    }

    pub(super) fn has_work(&mut self) -> bool {
        let submission = self.queues.submission();
        let submits = !submission.is_empty() || submission.taskrun();
        drop(submission);
        submits || !self.queues.completion().is_empty()
    }

    /// Whether a completion waits for a system call to be seen.
    pub(super) fn has_unseen(&mut self) -> bool {
        self.queues.submission().taskrun()
    }

    /// Sends what was queued, and waits for a completion if `wait`.
    pub(super) fn enter(&mut self, wait: bool) -> io::Result<()> {
        loop {
            let mut queue = self.queues.submission();
            while let Some(entry) = self.overflow.front() {
                // SAFETY: what the entry points to is kept by its OpEntry until it completes.
                if unsafe { queue.push(entry) }.is_err() {
                    break;
                }
                self.overflow.pop_front();
            }
            queue.sync();
            let len = queue.len();
            drop(queue);
            let more = !self.overflow.is_empty();
            let want = u32::from(wait && !more);
            let submitter = self.queues.submitter();
            // SAFETY: no argument is passed; the entries' memory is kept as said above.
            let result = unsafe {
                submitter.enter::<libc::sigset_t>(len as u32, want, self.enter_flags, None)
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

    /// The next operation that has ended, and its result.
    pub(super) fn completed(&mut self) -> Option<(usize, i32)> {
        loop {
            let entry = self.queues.completion().next()?;
            match entry.user_data() {
                BELL => {
                    self.shared.bell_is_heard();
                    self.arm_bell();
                }
                IGNORED => {}
                key => return Some((key as usize, entry.result())),
            }
        }
    }
}
