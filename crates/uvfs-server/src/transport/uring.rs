//! FUSE-over-io_uring (Linux 6.14): a queue for each core, entries that the kernel puts requests
//! into, and one command that hands an answer over and waits for the next request.
//!
//! Each entry is a task. All that a queue's tasks submit, answers and the I/O of handlers alike,
//! leaves in one system call, which also waits for the next event.
//!
//! An entry belongs to the ring that its last command came by, so its task can move to another thread
//! (`Crew::place`). It moves while a program streams through the page cache: the program copies what it has read
//! while the kernel asks for more, which the thread of another core can serve at the same time. The kernel gives a
//! request to the entry that became free last, so one entry moves and takes the stream along. Tasks also move while
//! the kernel writes back its cache: it sends all of that to the queue of one core, many requests at a time, and no
//! program waits for one of them, so all threads take turns.

use std::future::poll_fn;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering, compiler_fence};
use std::sync::{Arc, Mutex, OnceLock};
use std::task::{Poll, Waker};
use std::time::Duration;

use io_uring::{opcode, types};
use rustix::io::Errno;
use uvfs_io::buf::Region;
use uvfs_io::runtime::{self, Keep, Remote, Runtime, Sqe};
use uvfs_io::{IoBuf, Payload};
use uvfs_proto::abi::{
    IO_URING_CMD_COMMIT_AND_FETCH, IO_URING_CMD_REGISTER, InHeader, UNIQUE_RESEND,
    URING_OP_IN_OUT_SZ, UringCmdReq, UringEntInOut, UringReqHeader,
};
use uvfs_proto::reply;
use uvfs_queue::shm::SharedMemory;
use zerocopy::{FromBytes, IntoBytes};

use crate::fs::FileSystem;
use crate::pipeline::serve;
use crate::reply::{Outcome, header_of};
use crate::request::Message;
use crate::session::{DEPTH, Session};
use crate::stats::QueueStats;
use crate::survive::Ledger;
use crate::transport::structure_len;
use uvfs_sys::lock;

/// Offsets in [`UringReqHeader`].
const OP_AT: usize = 128;
const ENTRY_AT: usize = 256;

/// Reads into the page cache, and writes of the kernel's writeback, may move to another thread from this size on.
const LARGE: u32 = 128 << 10;
/// This many large reads in a row are a stream.
const STREAM: u32 = 4;

/// The threads that serve a mount's queues.
pub(crate) struct Crew<F> {
    session: Arc<Session<F>>,
    members: Vec<Member>,
    /// The memory of the entries, if the mount outlives its server.
    kept: Option<Kept>,
    /// Requests of an earlier server's whose direct I/O may be under way, and the threads that are to serve them.
    late: Mutex<Vec<(usize, Arc<QueueEntry>, Received)>>,
    /// Counts large requests of writeback, which the threads serve in turn.
    turn: AtomicUsize,
}

/// One thread.
struct Member {
    stats: Arc<QueueStats>,
    /// Set before its entries are registered.
    remote: OnceLock<Remote>,
    /// Entries whose tasks are here.
    tasks: Tasks,
}

/// Counts the tasks of entries, or slots, on a thread, which serves until there are none.
#[derive(Default)]
pub(super) struct Tasks {
    count: AtomicUsize,
    /// Waits for them to end.
    waiting: Mutex<Option<Waker>>,
}

/// The count of a thread that serves no more.
const ENDED: usize = usize::MAX;

impl Tasks {
    /// Counts a task that is about to come; false if the thread has ended, and would not run it.
    #[must_use]
    pub(super) fn comes(&self) -> bool {
        let more = |count: usize| (count != ENDED).then(|| count + 1);
        (self.count)
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, more)
            .is_ok()
    }

    /// Takes out a task that has ended, or moved to another thread.
    pub(super) fn left(&self) {
        let before = self.count.fetch_sub(1, Ordering::AcqRel);
        assert!(before != 0 && before != ENDED, "a task leaves once");
        if let Some(waker) = lock(&self.waiting).take() {
            waker.wake();
        }
    }

    /// Ends the thread if it has no tasks; none can come after that.
    fn end(&self) -> bool {
        (self.count)
            .compare_exchange(0, ENDED, Ordering::AcqRel, Ordering::Acquire)
            .is_ok()
    }

    /// Waits until all tasks have left, and ends the thread.
    pub(super) async fn ended(&self) {
        poll_fn(|cx| {
            *lock(&self.waiting) = Some(cx.waker().clone());
            match self.end() {
                true => Poll::Ready(()),
                false => Poll::Pending,
            }
        })
        .await;
    }
}

impl<F: FileSystem> Crew<F> {
    /// A crew of `threads` threads, for so many queues.
    ///
    /// # Errors
    /// When a mount that outlives its server can't have memory.
    pub(crate) fn new(
        session: &Arc<Session<F>>,
        threads: usize,
        queues: usize,
    ) -> io::Result<Arc<Self>> {
        let member = || Member {
            stats: session.add_queue(),
            remote: OnceLock::new(),
            tasks: Tasks::default(),
        };
        let kept = match session.ledger() {
            Some(ledger) => Some(Kept::new(ledger, session.max_payload(), queues)?),
            None => None,
        };
        Ok(Arc::new(Self {
            session: session.clone(),
            members: (0..threads).map(|_| member()).collect(),
            turn: AtomicUsize::new(0),
            kept,
            late: Mutex::default(),
        }))
    }

    /// The entries of a queue.
    fn entries(&self, queue: &Arc<Queue>, size: usize) -> io::Result<Vec<Arc<QueueEntry>>> {
        let make = |index| {
            let slot = usize::from(queue.id) * DEPTH + index;
            let (header, payload, kept) = match &self.kept {
                None => {
                    let header = IoBuf::alloc(size_of::<UringReqHeader>())?;
                    (header, IoBuf::alloc(size)?, None)
                }
                Some(kept) => {
                    let kept = kept.entry(slot);
                    (kept.header(), kept.payload(), Some(kept))
                }
            };
            Ok(Arc::new(QueueEntry {
                queue: queue.clone(),
                header,
                payload,
                slot: kept.as_ref().map_or(0, |_| slot),
                kept,
            }))
        };
        (0..DEPTH).map(make).collect()
    }

    /// Serves what has to wait for an earlier server's direct I/O.
    pub(crate) fn go_on(self: &Arc<Self>, ledger: &Arc<Ledger>) -> io::Result<()> {
        let (crew, ledger) = (self.clone(), ledger.clone());
        let thread = std::thread::Builder::new().name("uvfs-waits".into());
        thread.spawn(move || {
            ledger.rings_are_gone(DIRECT);
            let late = std::mem::take(&mut *lock(&crew.late));
            for (to, entry, request) in late {
                crew.hand_over(to, &entry, request);
            }
        })?;
        Ok(())
    }

    /// The thread that is to serve a request of a queue.
    fn place(&self, queue: &Queue, request: &Message) -> usize {
        if request.is_large_writeback(LARGE) {
            return self.turn.fetch_add(1, Ordering::Relaxed) % self.members.len();
        }
        match queue.is_streaming(request) {
            true => (queue.home + 1) % self.members.len(),
            false => queue.home,
        }
    }

    /// Moves an entry, with a request that no thread has begun to serve, to thread `to`. Gives the request back if
    /// that thread has not started yet, or has ended with the mount.
    fn hand_over(
        self: &Arc<Self>,
        to: usize,
        entry: &Arc<QueueEntry>,
        request: Received,
    ) -> Option<Received> {
        let member = &self.members[to];
        // A thread that has not begun yet, or has ended, would not run it.
        let Some(remote) = member.remote.get() else {
            return Some(request);
        };
        if !member.tasks.comes() {
            return Some(request);
        }
        let (crew, entry) = (self.clone(), entry.clone());
        let begin = Begin::Serve(request);
        remote.call(move || runtime::spawn(serve_entry(crew, to, entry, begin)));
        None
    }
}

/// The kernel's queue of a core.
struct Queue {
    id: u16,
    /// The thread of the same core.
    home: usize,
    /// Large reads since the last request of another kind.
    streak: AtomicU32,
    /// Entries that are not registered yet, in a mount that outlives its server.
    spare: Mutex<Vec<Arc<QueueEntry>>>,
    /// How many of the others wait for a request.
    idle: AtomicUsize,
}

impl Queue {
    /// An entry that is to be registered, as the last one that waited for a request has got one.
    fn grows(&self) -> Option<Arc<QueueEntry>> {
        lock(&self.spare).pop()
    }

    /// Whether a request continues a stream of large reads.
    fn is_streaming(&self, request: &Message) -> bool {
        let streak = self.streak.load(Ordering::Relaxed);
        if !request.is_large_read(LARGE) {
            if streak != 0 {
                self.streak.store(0, Ordering::Relaxed);
            }
            return false;
        }
        if streak < STREAM {
            self.streak.store(streak + 1, Ordering::Relaxed);
        }
        streak == STREAM
    }
}

/// One of a queue's entries.
struct QueueEntry {
    queue: Arc<Queue>,
    header: IoBuf,
    payload: IoBuf,
    /// Its number in a mount that outlives its server; else 0.
    slot: usize,
    /// What the next server knows of it, in such a mount.
    kept: Option<KeptEntry>,
}

impl QueueEntry {
    /// See [`KeptEntry::populate`].
    fn populate(&self) {
        if let Some(kept) = &self.kept {
            kept.populate();
        }
    }
}

/// What an entry's task begins with.
#[expect(clippy::large_enum_variant, reason = "what is large is the usual case")]
enum Begin {
    /// The entry is registered.
    Register,
    /// A request that another thread, or an earlier server, had.
    Serve(Received),
    /// An earlier server has answered this request. The kernel may not know that.
    Commit(u64),
}

/// The memory of the entries of a mount that outlives its server: shared memory, which each server has at the same address. A
/// request that the kernel has given to an entry stays there when the server is killed, and the next one takes it over.
struct Kept {
    memory: Arc<SharedMemory>,
    payload: usize,
}

/// The memory of one entry: a page with the header and the words below, [`SAVED`] bytes, and the payload.
struct KeptEntry {
    memory: Arc<SharedMemory>,
    at: usize,
    payload: usize,
}

/// Where the words of a [`KeptEntry`] are: the number of the request whose answer is being written; of that whose answer is
/// whole; and how many bytes of the payload were saved.
const ANSWERING: usize = 2048;
const ANSWERED: usize = ANSWERING + 8;
const SAVED_LEN: usize = ANSWERED + 8;
/// Where the header is saved.
const SAVED_HEADER: usize = 2560;
const PAGE: usize = 4096;
/// How much of a payload can be saved. An answer overwrites less: what has a long payload has a short answer, or the other way
/// round, but for ioctl(2), which has less of both.
const SAVED: usize = 4 * PAGE;
const _: () = assert!(size_of::<UringReqHeader>() <= ANSWERING);
const _: () = assert!(SAVED_HEADER + size_of::<UringReqHeader>() <= PAGE);

/// As many entries of a queue are registered at first. Each has all of its pages.
const FIRST: usize = 4;
/// For so long the next server waits for direct I/O of an earlier one.
const DIRECT: Duration = Duration::from_secs(3);

/// Shared memory, as memory for I/O.
struct Shared(Arc<SharedMemory>);

// SAFETY: the mapping stays, whole and writable, as long as the memory that is held here.
unsafe impl Region for Shared {
    fn base(&self) -> NonNull<u8> {
        NonNull::new(self.0.at(0, self.0.len())).expect("a mapping is not at 0")
    }
    fn len(&self) -> usize {
        self.0.len()
    }
}

impl Kept {
    fn new(ledger: &Ledger, payload: usize, queues: usize) -> io::Result<Self> {
        let len = |payload| queues * DEPTH * Self::stride(payload);
        let (memory, payload) = ledger.entries(queues, payload, len)?;
        Ok(Self { memory, payload })
    }

    fn stride(payload: usize) -> usize {
        PAGE + SAVED + payload.next_multiple_of(PAGE)
    }

    fn entry(&self, slot: usize) -> KeptEntry {
        KeptEntry {
            memory: self.memory.clone(),
            at: slot * Self::stride(self.payload),
            payload: self.payload,
        }
    }
}

impl KeptEntry {
    fn range(&self, at: usize, len: usize) -> IoBuf {
        let from = self.at + at;
        IoBuf::from_region(Arc::new(Shared(self.memory.clone()))).slice(from..from + len)
    }

    fn header(&self) -> IoBuf {
        self.range(0, size_of::<UringReqHeader>())
    }

    fn payload(&self) -> IoBuf {
        self.range(PAGE + SAVED, self.payload)
    }

    /// Has the kernel map all pages that it copies requests to: if it has to find one while this process is being killed, it fails
    /// the request.
    fn populate(&self) {
        let payload = self.payload.next_multiple_of(PAGE);
        for (at, len) in [(0, PAGE), (PAGE + SAVED, payload)] {
            if let Err(error) = self.memory.populate(self.at + at, len) {
                tracing::debug!(%error, "an entry without its memory");
            }
        }
    }

    fn get(&self, word: usize) -> u64 {
        self.memory.u64_at(self.at + word).load(Ordering::Acquire)
    }

    fn set(&self, word: usize, value: u64) {
        uvfs_sys::dying::may_die();
        let word = self.memory.u64_at(self.at + word);
        word.store(value, Ordering::Release);
        // What is written later is not to come before it.
        compiler_fence(Ordering::SeqCst);
    }

    /// Saves what an answer of `len` bytes overwrites of a request with so many.
    fn save(&self, unique: u64, request: usize, len: usize) {
        let saved = request.min(len).min(SAVED);
        self.copy(0, SAVED_HEADER, size_of::<UringReqHeader>());
        self.copy(PAGE + SAVED, PAGE, saved);
        self.set(SAVED_LEN, saved as u64);
        self.set(ANSWERING, unique);
    }

    fn copy(&self, from: usize, to: usize, len: usize) {
        let mut some = [0; 512];
        for at in (0..len).step_by(some.len()) {
            let some = &mut some[..(len - at).min(512)];
            self.memory.read(self.at + from + at, some);
            self.memory.write(self.at + to + at, some);
        }
    }

    /// What an earlier server has left of the request `unique`: nothing if it has answered it.
    fn restore(&self, unique: u64) -> bool {
        if self.get(ANSWERED) == unique {
            return false;
        }
        if self.get(ANSWERING) == unique {
            self.copy(SAVED_HEADER, 0, size_of::<UringReqHeader>());
            self.copy(
                PAGE,
                PAGE + SAVED,
                (self.get(SAVED_LEN) as usize).min(SAVED),
            );
            self.set(ANSWERING, 0);
        }
        true
    }

    /// The answer is whole.
    fn answered(&self, unique: u64) {
        self.set(ANSWERED, unique);
    }
}

/// What an earlier server has left in an entry.
fn left<F: FileSystem>(session: &Session<F>, entry: &QueueEntry) -> Option<Begin> {
    let kept = entry.kept.as_ref()?;
    let mut bytes = [0; size_of::<UringEntInOut>()];
    entry.header.copy_out(ENTRY_AT, &mut bytes);
    let unique = UringEntInOut::read_from_bytes(&bytes).ok()?.commit_id;
    if unique == 0 {
        return None;
    }
    if !kept.restore(unique) {
        return Some(Begin::Commit(unique));
    }
    let mut request = take_apart(session, entry);
    request.slot.header.unique |= UNIQUE_RESEND;
    Some(Begin::Serve(request))
}

/// A request as an entry brought it, and what its answer is committed by.
struct Received {
    slot: Message,
    commit_id: u64,
}

/// Where an entry's memory is; read by the kernel at registration.
struct Registration([libc::iovec; 2]);

/// Serves the queues `ids` as thread `me` (of as many as there are cores, in all) until the mount
/// ends. Calls `registered` once the kernel has all entries.
///
/// # Errors
/// When memory or the ring fails.
pub(crate) fn run<F: FileSystem>(
    runtime: &Runtime,
    crew: Arc<Crew<F>>,
    me: usize,
    ids: Vec<u16>,
    end: Option<Arc<OwnedFd>>,
    registered: impl FnOnce() + 'static,
) -> io::Result<()> {
    let size = crew.session.max_payload();
    if let Some(end) = end {
        runtime.outlives(end.as_fd())?;
    }
    let mut entries = Vec::new();
    for id in ids {
        let queue = Arc::new(Queue {
            id,
            home: me,
            streak: AtomicU32::new(0),
            spare: Mutex::default(),
            idle: AtomicUsize::new(0),
        });
        let mut registers = 0;
        for entry in crew.entries(&queue, size)? {
            let begin = left(&crew.session, &entry);
            if begin.is_some() {
                entry.populate();
            }
            match begin {
                Some(Begin::Serve(request)) if request.slot.is_direct() => {
                    lock(&crew.late).push((me, entry, request));
                }
                Some(begin) => entries.push((entry, begin)),
                None if entry.kept.is_some() && registers == FIRST => {
                    lock(&queue.spare).push(entry);
                }
                None => {
                    entry.populate();
                    registers += 1;
                    entries.push((entry, Begin::Register));
                }
            }
        }
        // The first of them comes first.
        lock(&queue.spare).reverse();
    }
    let member = &crew.members[me];
    for _ in &entries {
        assert!(member.tasks.comes(), "a thread serves once");
    }
    let _ = member.remote.set(runtime.remote());
    runtime.block_on(async move {
        for (entry, begin) in entries {
            runtime::spawn(serve_entry(crew.clone(), me, entry, begin));
        }
        // The entries' tasks run first; then their registrations leave with this one's system call.
        uvfs_io::ops::sleep(std::time::Duration::from_micros(1)).await;
        registered();
        crew.members[me].tasks.ended().await;
    })
}

/// The io_uring command `command` of FUSE for an entry of queue `qid`.
fn command(
    device: i32,
    command: u32,
    qid: u16,
    commit_id: u64,
    memory: Option<&Registration>,
) -> Sqe {
    let arg = UringCmdReq {
        flags: 0,
        commit_id,
        qid,
        padding: [0; 6],
    };
    let mut bytes = [0; 80];
    bytes[..size_of::<UringCmdReq>()].copy_from_slice(arg.as_bytes());
    let mut entry = opcode::UringCmd80::new(types::Fd(device), command)
        .cmd(bytes)
        .build();
    if let Some(memory) = memory {
        crate::mount::set_sqe_buffer(&mut entry, &memory.0);
    }
    entry
}

/// Serves what an entry brings, on thread `here`.
async fn serve_entry<F: FileSystem>(
    crew: Arc<Crew<F>>,
    here: usize,
    entry: Arc<QueueEntry>,
    begin: Begin,
) {
    let Member { stats, .. } = &crew.members[here];
    let session = &crew.session;
    let device = session.raw_device();
    let qid = entry.queue.id;
    let commit = |id| command(device, IO_URING_CMD_COMMIT_AND_FETCH, qid, id, None);
    let mut begin = begin;
    loop {
        let (next, registration) = match begin {
            Begin::Serve(Received { slot, commit_id }) => {
                let outcome = serve(session, stats, &slot).await;
                give_answer(&entry, &slot, &outcome);
                (commit(commit_id), None)
            }
            Begin::Commit(id) => (commit(id), None),
            Begin::Register => {
                let iovec = |memory: &IoBuf| libc::iovec {
                    iov_base: memory.as_ptr().cast(),
                    iov_len: memory.len(),
                };
                let memory = Box::new(Registration([iovec(&entry.header), iovec(&entry.payload)]));
                let register = IO_URING_CMD_REGISTER;
                (
                    command(device, register, qid, 0, Some(&memory)),
                    Some(memory),
                )
            }
        };
        #[expect(
            clippy::arc_with_non_send_sync,
            reason = "it stays with this thread's ring"
        )]
        let other: Arc<dyn std::any::Any> = match registration {
            None => entry.clone(),
            Some(registration) => Arc::new((entry.clone(), registration)),
        };
        let keep = Keep {
            data: None,
            other: Some(other),
        };
        // SAFETY: the kernel reads the iovecs while the command is submitted and uses the memory
        // they name until it completes; all of it is in `keep`. The device outlives the session.
        let submitted = unsafe { runtime::submit(next, keep) };
        if entry.kept.is_some() {
            entry.queue.idle.fetch_add(1, Ordering::Relaxed);
        }
        let result = submitted.await;
        stats.waited(runtime::counts());
        if entry.kept.is_some()
            && entry.queue.idle.fetch_sub(1, Ordering::Relaxed) == 1
            && result >= 0
            && let Some(another) = entry.queue.grows()
            && crew.members[here].tasks.comes()
        {
            another.populate();
            let task = serve_entry(crew.clone(), here, another, Begin::Register);
            runtime::spawn(Box::pin(task) as std::pin::Pin<Box<dyn Future<Output = ()>>>);
            if let Some(ledger) = session.ledger() {
                // The kernel gives no waiting request to a new entry. The keeper has another request come, which fetches it.
                ledger.tell_ready();
            }
        }
        if result < 0 {
            match Errno::from_raw_os_error(-result) {
                // The kernel knows of the answer.
                Errno::NOENT if entry.kept.is_some() => {
                    begin = Begin::Register;
                    continue;
                }
                // The mount has ended.
                Errno::NOTCONN | Errno::CANCELED | Errno::NODEV | Errno::CONNABORTED => {}
                error => tracing::error!(qid, %error, "an entry of FUSE-over-io_uring is lost"),
            }
            break;
        }
        let brought = take_apart(session, &entry);
        let to = crew.place(&entry.queue, &brought.slot);
        let here = match to == here {
            true => Some(brought),
            false => crew.hand_over(to, &entry, brought),
        };
        match here {
            Some(request) => begin = Begin::Serve(request),
            None => break,
        }
    }
    crew.members[here].tasks.left();
}

/// Makes a message of the request that the kernel has put into an entry.
fn take_apart<F: FileSystem>(session: &Session<F>, memory: &QueueEntry) -> Received {
    let mut bytes = [0; size_of::<UringReqHeader>()];
    memory.header.copy_out(0, &mut bytes);
    let (header, _) = InHeader::read_from_prefix(&bytes).expect("128 bytes hold a header");
    let (entry, _) =
        UringEntInOut::read_from_prefix(&bytes[ENTRY_AT..]).expect("the area has its size");
    let mut op = [0; URING_OP_IN_OUT_SZ];
    op.copy_from_slice(&bytes[OP_AT..ENTRY_AT]);
    let len = (entry.payload_sz as usize).min(memory.payload.len());
    let room = Payload::from(memory.payload.clone());
    let slot = Message {
        header,
        op,
        op_len: structure_len(session, &header),
        input: room.slice(0..len),
        room,
        slot: memory.slot,
    };
    Received {
        slot,
        commit_id: entry.commit_id,
    }
}

fn give_answer(memory: &QueueEntry, request: &Message, outcome: &Outcome) {
    let unique = request.header.unique & !UNIQUE_RESEND;
    let (error, len) = header_of(outcome);
    if let Some(kept) = &memory.kept {
        kept.save(unique, request.input.len(), len);
    }
    if let Ok(reply) = outcome {
        let [first, second] = reply.parts();
        memory.payload.copy_in(0, first);
        memory.payload.copy_in(first.len(), second);
    }
    // The kernel wants a commit also for a request that has no answer.
    let header = reply::header(unique, error, len);
    memory.header.copy_in(0, header.as_bytes());
    let entry = UringEntInOut {
        payload_sz: len as u32,
        // For the next server.
        commit_id: unique,
        ..Default::default()
    };
    memory.header.copy_in(ENTRY_AT, entry.as_bytes());
    if let Some(kept) = &memory.kept {
        kept.answered(unique);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What a killed server has begun to answer is the whole request again; what it has answered is not served again.
    #[test]
    fn a_request_is_whole_until_it_is_answered() {
        let memory = SharedMemory::create(c"test", Kept::stride(PAGE)).unwrap();
        let kept = KeptEntry {
            memory: Arc::new(memory),
            at: 0,
            payload: PAGE,
        };
        let all = || {
            let (mut header, mut payload) = ([0; 288], [0; PAGE]);
            kept.header().copy_out(0, &mut header);
            kept.payload().copy_out(0, &mut payload);
            (header, payload)
        };
        let (header, payload) = (kept.header(), kept.payload());
        for (request, answer) in [(0, 0), (700, 128), (10, PAGE), (PAGE, 600)] {
            header.copy_in(0, &[1; 288]);
            payload.copy_in(0, &vec![2; request]);
            let before = all();
            let unique = 2 + answer as u64;
            assert!(kept.restore(unique));
            kept.save(unique, request, answer);
            header.copy_in(0, &[3; 288]);
            payload.copy_in(0, &vec![4; answer]);
            // The server is killed here, and the next one in `restore`.
            for _ in 0..2 {
                assert!(kept.restore(unique));
                let (header, payload) = all();
                assert_eq!(header, before.0);
                assert_eq!(payload[..request], before.1[..request]);
                kept.set(ANSWERING, unique);
            }
            kept.save(unique, request, answer);
            header.copy_in(0, &[3; 288]);
            kept.answered(unique);
            assert!(!kept.restore(unique));
            assert_eq!(all().0, [3; 288]);
        }
    }

    /// A thread that has ended takes no more tasks, and one that has taken a task does not end before it.
    #[test]
    fn no_task_comes_to_a_thread_that_has_ended() {
        for _ in 0..2000 {
            let tasks = Tasks::default();
            assert!(tasks.comes());
            std::thread::scope(|scope| {
                // The home's entry moves here as this thread's own ends.
                let moved = scope.spawn(|| tasks.comes());
                tasks.left();
                let ended = tasks.end();
                let came = moved.join().unwrap();
                assert!(!(ended && came), "no thread would run it");
                if came {
                    assert!(!tasks.end(), "it is still served");
                    tasks.left();
                    assert!(tasks.end());
                } else {
                    assert!(ended);
                }
                assert!(!tasks.comes());
            });
        }
    }
}
