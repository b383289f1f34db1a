//! `/dev/fuse`: requests are read from it and answers written to it.
//!
//! Each worker has a descriptor of its own (FUSE_DEV_IOC_CLONE), since an answer has to go where
//! its request came from, and a fixed number of slots. The slots are tasks that take turns in
//! reading. While nothing else is under way the one whose turn it is blocks in read(2), of which
//! the kernel wakes one worker for a request; else the runtime waits for it with everything else.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::io::{self, IoSlice};
use std::os::fd::{AsFd, OwnedFd};
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Poll, Waker};
use std::time::{Duration, Instant};

use rustix::fs::OFlags;
use rustix::io::Errno;
use uvfs_io::ops::{self, File};
use uvfs_io::runtime::{self, Runtime};
use uvfs_io::{IoBuf, Payload};
use uvfs_proto::abi::{InHeader, Opcode, URING_OP_IN_OUT_SZ, WriteIn};
use uvfs_proto::reply;
use uvfs_queue::wait::{Spinner, WaitConfig, WaitMode};
use zerocopy::{FromBytes, IntoBytes};

use crate::fs::FileSystem;
use crate::pipeline::serve;
use crate::reply::{Outcome, Reply, header_of};
use crate::request::Message;
use crate::session::{DEPTH, Session};
use crate::stats::QueueStats;
use crate::transport::structure_len;
use crate::transport::uring::Tasks;

/// The bytes before the data of a WRITE. The buffer begins so far before a page, so that the data
/// begins with one and can go straight to a device.
const BEFORE_DATA: usize = size_of::<InHeader>() + size_of::<WriteIn>();
const PAGE: usize = 4096;

/// Whether the worker's descriptor blocks.
#[derive(Clone, Copy, PartialEq)]
enum Mode {
    Blocking,
    Polling,
}

struct DevWorker<F> {
    session: Arc<Session<F>>,
    stats: Arc<QueueStats>,
    device: Arc<File>,
    mode: Cell<Mode>,
    /// Slots whose handler is not done.
    busy: Cell<usize>,
    /// Whether a slot reads now.
    reading: Cell<bool>,
    /// Slots that wait for their turn; the last one to come is the next, for its memory is warm.
    waiting: RefCell<VecDeque<Waker>>,
    spinner: RefCell<Spinner>,
    /// The gaps between requests matter.
    learns: bool,
    /// Forgets are all that usually comes: they are let gather, and then come as one.
    gathers: bool,
    /// A forget came by the last message.
    forgot: Cell<bool>,
    /// The mount has ended.
    over: Cell<bool>,
}

/// Serves until the mount ends, as the queue with this number. Calls `started` once it has all that serving takes.
///
/// # Errors
/// When memory, the device or the runtime fails.
pub(crate) fn run<F: FileSystem>(
    runtime: &Runtime,
    session: Arc<Session<F>>,
    device: OwnedFd,
    queue: usize,
    wait: WaitConfig,
    gathers: bool,
    started: impl FnOnce(),
) -> io::Result<()> {
    // All of it now: a slot that found none later would be missing, or end the mount.
    let room = PAGE + session.max_payload() + PAGE;
    let buffers: Vec<_> = (0..DEPTH)
        .map(|_| IoBuf::alloc(room))
        .collect::<io::Result<_>>()?;
    let stats = session.add_queue();
    // A server that was killed may have left it polling.
    rustix::fs::fcntl_setfl(&device, OFlags::empty())?;
    let worker = Rc::new(DevWorker {
        session,
        stats,
        device: Arc::new(File::from(device)),
        mode: Cell::new(Mode::Blocking),
        busy: Cell::new(0),
        reading: Cell::new(false),
        waiting: RefCell::default(),
        spinner: RefCell::new(Spinner::new(wait)),
        learns: wait.mode == WaitMode::Adaptive,
        gathers,
        forgot: Cell::new(false),
        over: Cell::new(false),
    });
    let tasks = Rc::new(Tasks::default());
    let result: Rc<RefCell<io::Result<()>>> = Rc::new(RefCell::new(Ok(())));
    started();
    runtime.block_on(async move {
        for (slot, buffer) in buffers.into_iter().enumerate() {
            let (worker, tasks, result) = (worker.clone(), tasks.clone(), result.clone());
            assert!(tasks.comes(), "the slots begin once");
            runtime::spawn(async move {
                if let Err(error) = worker.slot(queue * DEPTH + slot, buffer).await {
                    *result.borrow_mut() = Err(error);
                }
                worker.end();
                tasks.left();
            });
        }
        tasks.ended().await;
        result.replace(Ok(()))
    })?
}

/// For how long forgets gather.
const GATHER: Duration = Duration::from_millis(2);

fn is_forget(opcode: u32) -> bool {
    matches!(
        Opcode::try_from(opcode),
        Ok(Opcode::Forget | Opcode::BatchForget)
    )
}

impl<F: FileSystem> DevWorker<F> {
    /// Every task that waits finds that it is over.
    fn end(&self) {
        self.over.set(true);
        for waker in self.waiting.borrow_mut().drain(..) {
            waker.wake();
        }
    }

    async fn turn(&self) {
        std::future::poll_fn(|cx| {
            if self.over.get() {
                return Poll::Ready(());
            }
            if self.reading.get() {
                self.waiting.borrow_mut().push_back(cx.waker().clone());
                return Poll::Pending;
            }
            self.reading.set(true);
            Poll::Ready(())
        })
        .await;
    }

    fn pass_turn(&self) {
        self.reading.set(false);
        if let Some(waker) = self.waiting.borrow_mut().pop_back() {
            waker.wake();
        }
    }

    fn set_mode(&self, mode: Mode) -> io::Result<()> {
        if self.mode.get() != mode {
            let flags = match mode {
                Mode::Blocking => OFlags::empty(),
                Mode::Polling => OFlags::NONBLOCK,
            };
            rustix::fs::fcntl_setfl(&self.device, flags)?;
            self.mode.set(mode);
        }
        Ok(())
    }

    /// Reads one message, spinning while the wait policy says so and then sleeping.
    fn read_now(&self, buffer: &IoBuf) -> io::Result<Result<usize, Errno>> {
        let idle = self.busy.get() == 0;
        let budget = self.spinner.borrow().budget();
        let leave = match idle && !budget.is_zero() {
            true => self.spinner.borrow().begin(),
            false => None,
        };
        if leave.is_some() {
            self.set_mode(Mode::Polling)?;
            let start = Instant::now();
            while start.elapsed() < budget {
                let read = crate::mount::read_raw(self.device.as_fd(), buffer);
                if read != Err(Errno::AGAIN) {
                    self.spinner.borrow_mut().ended(start.elapsed(), false);
                    self.stats.waited_here(self.spinner.borrow().counts());
                    return Ok(read);
                }
                std::hint::spin_loop();
            }
        }
        drop(leave);
        self.set_mode(if idle { Mode::Blocking } else { Mode::Polling })?;
        let start = (idle && self.learns).then(Instant::now);
        let read = crate::mount::read_raw(self.device.as_fd(), buffer);
        let mut spinner = self.spinner.borrow_mut();
        match start {
            Some(start) => spinner.ended(budget + start.elapsed(), true),
            None => spinner.count(true),
        }
        self.stats.waited_here(spinner.counts());
        Ok(read)
    }

    /// Reads one message into `buffer`; nothing when the mount has ended.
    async fn read(&self, buffer: &IoBuf) -> io::Result<Option<usize>> {
        loop {
            match self.read_now(buffer)? {
                Ok(0) => return Ok(None),
                Ok(len) => return Ok(Some(len)),
                // ENOENT: the request was interrupted before it could be read.
                Err(Errno::INTR | Errno::NOENT) => {}
                Err(Errno::AGAIN) => {
                    // One worker is woken for a request, as by read(2).
                    let events = (libc::EPOLLIN | libc::EPOLLEXCLUSIVE) as u32;
                    match ops::poll(&self.device, events).await {
                        Ok(_) | Err(Errno::INTR | Errno::AGAIN) => {}
                        Err(error) => return Err(error.into()),
                    }
                }
                Err(Errno::NODEV | Errno::CONNABORTED) => return Ok(None),
                Err(error) => return Err(error.into()),
            }
        }
    }

    async fn slot(&self, number: usize, buffer: IoBuf) -> io::Result<()> {
        let message = buffer.slice(PAGE - BEFORE_DATA..buffer.len());
        let room = Payload::from(buffer.slice(PAGE..buffer.len() - PAGE));
        let mut ready = self.session.ledger().is_none();
        loop {
            self.turn().await;
            if self.over.get() {
                return Ok(());
            }
            if !std::mem::replace(&mut ready, true) {
                // The kernel answers a request with EIO if this process is killed while it copies the request to a page
                // that is not there yet. Most slots are never used, so each has its pages only now.
                buffer.zero(0..buffer.len());
            }
            if self.gathers && self.forgot.replace(false) {
                ops::sleep(GATHER).await;
            }
            let Some(len) = self.read(&message).await? else {
                return Ok(());
            };
            self.busy.set(self.busy.get() + 1);
            let slot = self.take_apart(&message, len, &room, number);
            let opcode = slot.as_ref().map_or(0, |slot| slot.header.opcode);
            self.forgot.set(is_forget(opcode));
            self.pass_turn();
            if let Some(slot) = slot {
                let outcome = serve(&self.session, &self.stats, &slot).await;
                self.answer(&slot.header, &outcome, &buffer.slice(PAGE..buffer.len()));
            }
            self.busy.set(self.busy.get() - 1);
        }
    }

    /// A message's parts; nothing, and a log line, when it is none.
    fn take_apart(
        &self,
        message: &IoBuf,
        len: usize,
        room: &Payload,
        slot: usize,
    ) -> Option<Message> {
        const HEADER: usize = size_of::<InHeader>();
        let mut head = [0; HEADER + URING_OP_IN_OUT_SZ];
        let head = &mut head[..len.min(HEADER + URING_OP_IN_OUT_SZ)];
        message.copy_out(0, head);
        let header = match InHeader::read_from_prefix(head) {
            Ok((header, _)) if header.len as usize == len => header,
            _ => {
                tracing::warn!(len, "dropped: a message that is no request");
                return None;
            }
        };
        // A structure that is cut off is refused where it is parsed.
        let structure = structure_len(&self.session, &header).min(len - HEADER);
        let mut op = [0; URING_OP_IN_OUT_SZ];
        op[..structure].copy_from_slice(&head[HEADER..HEADER + structure]);
        let input = Payload::from(message.slice(HEADER + structure..len));
        Some(Message {
            header,
            op,
            op_len: structure,
            input,
            room: room.clone(),
            slot,
        })
    }

    fn answer(&self, request: &InHeader, outcome: &Outcome, room: &IoBuf) {
        let unique = request.unique;
        let (error, len) = header_of(outcome);
        let header = reply::header(unique, error, len);
        let written = match outcome {
            Ok(Reply::None) => return,
            Ok(Reply::Read(len)) => {
                crate::mount::write_raw(self.device.as_fd(), header.as_bytes(), room, *len)
            }
            Ok(reply) => {
                let [first, second] = reply.parts();
                let parts = [header.as_bytes(), first, second].map(IoSlice::new);
                rustix::io::writev(&self.device, &parts)
            }
            Err(_) => rustix::io::write(&self.device, header.as_bytes()),
        };
        match written {
            Ok(_) => {}
            // The caller is gone, or the mount.
            Err(Errno::NOENT | Errno::NODEV | Errno::PERM | Errno::CONNABORTED) => {}
            Err(error) => {
                let opcode = Opcode::try_from(request.opcode).map_or("?", Opcode::name);
                tracing::warn!(opcode, %error, len, "the kernel refused an answer");
                if outcome.is_ok() {
                    let header = reply::header(unique, -Errno::IO.raw_os_error(), 0);
                    let _ = rustix::io::write(&self.device, header.as_bytes());
                }
            }
        }
    }
}
