//! Requests of a client over shared memory, taken from a queue pair and answered into it.
//!
//! Nothing of a client is trusted: entries are copied and checked as they are taken, and its numbers
//! for requests are replaced. A client that breaks the protocol loses its session.

use std::cell::{Cell, RefCell};
use std::io::{self, IoSliceMut};
use std::pin::pin;
use std::ptr::NonNull;
use std::rc::Rc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock};
use std::task::{Poll, Waker};
use std::time::Instant;

use rustix::io::{Errno, ReadWriteFlags};
use uvfs_io::buf::Region;
use uvfs_io::ops::{self, File};
use uvfs_io::{IoBuf, Payload, runtime};
use uvfs_proto::abi::{InHeader, Opcode};
use uvfs_proto::{ext, reply};
use uvfs_queue::arena::Arena;
use uvfs_queue::pair::{Direction, INLINE_SIZE, MAX_DEPTH, Submission};
use uvfs_queue::wait::{Spinner, WaitConfig};
use zerocopy::{FromBytes, IntoBytes};

use crate::client::Client;
use crate::client::tasks::{contained, yield_now};
use crate::fs::FileSystem;
use crate::reply::{Body, Outcome, Reply, header_of};
use crate::request::Message;
use crate::transport::lead::Lead;

/// A client's arena, as memory for I/O.
pub(super) struct ArenaRegion(pub(super) Arc<Arena>);

// SAFETY: the arena's mapping stays, whole and writable, as long as the arena that is held here.
unsafe impl Region for ArenaRegion {
    fn base(&self) -> NonNull<u8> {
        self.0.base()
    }
    fn len(&self) -> usize {
        self.0.len() as usize
    }
}

/// The position that makes preadv2(2) read like readv(2).
const CURRENT: u64 = u64::MAX;

/// How many clients have large transfers under way.
static TRANSFERRING: AtomicUsize = AtomicUsize::new(0);

/// How many threads can run at once.
fn cores() -> usize {
    static CORES: LazyLock<usize> =
        LazyLock::new(|| std::thread::available_parallelism().map_or(1, usize::from));
    *CORES
}

/// Whether a client is one of those that [`TRANSFERRING`] counts: from a large transfer on until the
/// server waits for its next request.
#[derive(Default)]
struct Transferring(Cell<bool>);

impl Transferring {
    fn begin(&self) {
        if !self.0.replace(true) {
            TRANSFERRING.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn end(&self) {
        if self.0.replace(false) {
            TRANSFERRING.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

impl Drop for Transferring {
    fn drop(&mut self) {
        self.end();
    }
}

/// Whether no thread of the client waits for the answer to an opcode. The server does not wake the client for it; the
/// client takes it along with the next one.
fn is_told(opcode: u32) -> bool {
    opcode == ext::LEASE_RETURN
        || matches!(
            Opcode::try_from(opcode),
            Ok(Opcode::Release | Opcode::Releasedir | Opcode::Forget | Opcode::BatchForget)
        )
}

/// A client's end of a queue pair, and the tasks that take requests from it.
pub(super) struct Channel<F: FileSystem> {
    client: Rc<Client<F>>,
    /// Private memory for each entry's inline payload.
    inline: IoBuf,
    /// Requests that were taken and are not answered.
    busy: Cell<usize>,
    /// Decides which of the tasks that answer requests takes them, see [`Channel::work`].
    lead: Lead,
    /// How often the queue was polled since other tasks of the thread could run.
    looked: Cell<u32>,
    transferring: Transferring,
    /// The task that waits until no request is taken any more, and all are answered.
    end: RefCell<Option<Waker>>,
    /// The socket was closed.
    gone: Cell<bool>,
    /// A task of the client's panicked.
    broken: Cell<bool>,
    bell: Arc<File>,
    spinner: RefCell<Spinner>,
}

impl<F: FileSystem> Channel<F> {
    /// Memory for a channel's inline payloads.
    ///
    /// # Errors
    /// ENOMEM.
    pub(super) fn room() -> io::Result<IoBuf> {
        IoBuf::alloc(MAX_DEPTH as usize * INLINE_SIZE)
    }

    /// A client's channel, with memory from [`Channel::room`].
    pub(super) fn new(
        client: Rc<Client<F>>,
        bell: Arc<File>,
        inline: IoBuf,
        wait: WaitConfig,
    ) -> Self {
        Self {
            client,
            inline,
            busy: Cell::new(0),
            lead: Lead::default(),
            looked: Cell::new(0),
            transferring: Transferring::default(),
            end: RefCell::default(),
            gone: Cell::new(false),
            broken: Cell::new(false),
            bell,
            spinner: RefCell::new(Spinner::new(wait)),
        }
    }

    /// Whether the client's socket was closed.
    pub(super) fn is_gone(&self) -> bool {
        self.gone.get()
    }

    /// Serves the client until it goes or breaks the protocol, and all that it had asked for is
    /// answered. A request that waits for a lock holds up no other.
    pub(super) async fn serve(self: Rc<Self>) {
        // The session may end before its socket is closed, and closes it then.
        let (me, socket) = (Rc::downgrade(&self), self.client.socket.clone());
        runtime::spawn(async move {
            // The client sends nothing more: readable means closed.
            let events = (libc::POLLIN | libc::POLLRDHUP) as u32;
            while let Err(Errno::INTR | Errno::AGAIN) = ops::poll(&socket, events).await {}
            if let Some(me) = me.upgrade() {
                me.gone.set(true);
                me.client.link.wake();
            }
        });
        self.pass_lead();
        std::future::poll_fn(|cx| {
            if self.is_done() {
                return Poll::Ready(());
            }
            *self.end.borrow_mut() = Some(cx.waker().clone());
            Poll::Pending
        })
        .await;
    }

    /// The body of a task: takes requests and answers them while it has the lead. There come to be as many tasks as
    /// requests wait at a time; then they stay, because their state is large.
    async fn work(self: Rc<Self>, number: u32) {
        loop {
            if !self.lead.taken(number).await {
                return;
            }
            while let Some(request) = self.next().await {
                let mut leads = true;
                let mut answers = pin!(self.serve_one(request));
                std::future::poll_fn(|cx| {
                    let answered = answers.as_mut().poll(cx);
                    if answered.is_pending() && std::mem::take(&mut leads) {
                        self.pass_lead();
                    }
                    answered
                })
                .await;
                if !leads {
                    break;
                }
            }
            if self.client.over.get() {
                return;
            }
        }
    }

    /// Has another task take requests from now on.
    fn pass_lead(self: &Rc<Self>) {
        if let Some(number) = self.lead.pass() {
            assert!(number <= MAX_DEPTH, "each but the leader has a request");
            let me = self.clone();
            runtime::spawn(async move {
                if contained(me.clone().work(number)).await.is_none() {
                    me.broken.set(true);
                    me.over();
                }
            });
        }
    }

    /// The next request, for the task that has the lead; None when there will be none.
    async fn next(&self) -> Option<Submission> {
        loop {
            if self.client.link.is_over() {
                break;
            }
            // Others on this thread, and requests that wait, may be able to go on, also while there is always
            // another request, or seems to be one.
            if self.looked.get() >= MAX_DEPTH {
                self.lets_others_run().await;
            }
            self.looked.set(self.looked.get() + 1);
            match self.client.queue.pop() {
                Ok(Some(request)) => {
                    self.busy.set(self.busy.get() + 1);
                    return Some(request);
                }
                Ok(None) => {}
                Err(error) => {
                    tracing::warn!(%error, uid = self.client.uid, "a client is cut off");
                    break;
                }
            }
            if self.gone.get() || self.client.queue.client_closed() {
                break;
            }
            if self.busy.get() > 0 && self.looked.get() > 1 {
                // The client may then have more to ask.
                self.lets_others_run().await;
                continue;
            }
            self.sleep().await;
        }
        self.over();
        None
    }

    async fn lets_others_run(&self) {
        self.looked.set(0);
        yield_now().await;
    }

    /// Takes no more requests.
    fn over(&self) {
        self.client.ends();
        self.client.queue.close();
        self.lead.close();
        self.looks_for_end();
    }

    /// Whether nothing is taken any more, and all that was is answered or lost by a panic.
    fn is_done(&self) -> bool {
        self.client.over.get() && (self.busy.get() == 0 || self.broken.get())
    }

    /// Wakes the task that waits for the end.
    fn looks_for_end(&self) {
        if self.is_done()
            && let Some(waker) = self.end.borrow_mut().take()
        {
            waker.wake();
        }
    }

    /// Waits for a request, or for the end of the session.
    async fn sleep(&self) {
        let start = Instant::now();
        let idle = self.busy.get() == 0;
        if idle && self.spin(start) {
            self.spinner.borrow_mut().ended(start.elapsed(), false);
            self.count_waits();
            return;
        }
        let queue = &self.client.queue;
        queue.arm();
        if !queue.ready() {
            if idle {
                self.transferring.end();
            }
            self.rung().await;
            self.looked.set(0);
        }
        queue.disarm();
        if idle {
            self.spinner.borrow_mut().ended(start.elapsed(), true);
            self.count_waits();
        }
    }

    /// Spins for as long as the wait policy says and nothing else is to be done on this thread; whether a
    /// request came.
    fn spin(&self, start: Instant) -> bool {
        let budget = self.spinner.borrow().budget();
        if budget.is_zero() || runtime::has_work() {
            return false;
        }
        let Some(_leave) = self.spinner.borrow().begin() else {
            return false;
        };
        while start.elapsed() < budget {
            for _ in 0..16 {
                if self.client.queue.ready() {
                    return true;
                }
                std::hint::spin_loop();
            }
            if runtime::has_work() {
                return false;
            }
        }
        false
    }

    /// Waits until the client rings, or its session ends.
    async fn rung(&self) {
        let mut rings = pin!(ops::poll(&self.bell, libc::POLLIN as u32));
        std::future::poll_fn(|cx| {
            self.client.link.wakes(cx.waker());
            if self.gone.get() || self.client.link.is_over() {
                return Poll::Ready(());
            }
            rings.as_mut().poll(cx).map(drop)
        })
        .await;
        // The client shares the descriptor's flags and may have read it first: a plain read could wait.
        let mut count = [0; 8];
        let mut to = [IoSliceMut::new(&mut count)];
        let _ = rustix::io::preadv2(&*self.bell, &mut to, CURRENT, ReadWriteFlags::NOWAIT);
    }

    fn count_waits(&self) {
        let counts = self.spinner.borrow().counts();
        self.client.stats.waited_here(counts);
    }

    /// Serves one request: takes its bytes out of the entry, has [`Client::serve`] answer it, and puts the answer
    /// there.
    async fn serve_one(&self, request: Submission) {
        let client = &self.client;
        let (theirs, _) =
            InHeader::read_from_prefix(&request.header).expect("the area holds a header");
        let segs = Payload::from_parts(request.segs.iter().map(|seg| {
            let start = seg.offset as usize;
            client.memory.slice(start..start + seg.len as usize)
        }));
        let at = request.id as usize * INLINE_SIZE;
        let spare = self.inline.slice(at..at + INLINE_SIZE);
        (client.queue).inline(&request, |from, part| spare.copy_in(from, part));
        let inline = Payload::from(spare.slice(0..request.inline_len));
        let (input, room) = match request.direction {
            Direction::ToServer if !segs.is_empty() => (segs, Payload::default()),
            Direction::ToServer => (inline, Payload::default()),
            Direction::FromServer => (inline, segs),
        };
        // One thread serves a whole client: what the client sends together goes to the host side by side,
        // unless there are transfers of other clients for every core.
        if input.len().max(room.len()) >= ops::LARGE {
            self.transferring.begin();
        }
        let cores_left = TRANSFERRING.load(Ordering::Relaxed) < cores();
        let others = self.busy.get() > 1 || client.queue.ready();
        runtime::hand_over_large(others && cores_left);
        let message = Message {
            header: InHeader {
                len: (size_of::<InHeader>() + request.op_len + input.len()) as u32,
                opcode: theirs.opcode,
                nodeid: theirs.nodeid,
                ..client.header()
            },
            op: request.op,
            op_len: request.op_len,
            input,
            room,
            slot: 0,
        };
        let send = |outcome: &Outcome, tail: &[u8], room: &Payload| {
            self.answer(request.id, &theirs, outcome, tail, room);
        };
        pin!(client.serve(message, send)).await;
        self.busy.set(self.busy.get() - 1);
        self.looks_for_end();
    }

    /// Puts an answer, with what it has beyond FUSE's, into the request's entry or its room.
    fn answer(&self, id: u32, theirs: &InHeader, outcome: &Outcome, tail: &[u8], room: &Payload) {
        let queue = &self.client.queue;
        let (mut error, mut len) = header_of(outcome);
        let mut body = Body::new();
        if let Ok(reply) = outcome
            && !matches!(reply, Reply::Read(_))
        {
            let [first, second] = reply.parts();
            let parts = [first, second, tail];
            len += tail.len();
            if room.is_empty() && len <= INLINE_SIZE {
                for part in parts {
                    body.extend_from_slice(part);
                }
            } else if len <= room.len() {
                room.copy_in(0, first);
                room.copy_in(first.len(), second);
                room.copy_in(first.len() + second.len(), tail);
            } else {
                (error, len) = (-Errno::RANGE.raw_os_error(), 0);
            }
        }
        let header = reply::header(theirs.unique, error, len);
        queue.complete(id, header.as_bytes(), &body);
        if !is_told(theirs.opcode) {
            queue.ring();
        }
    }
}
