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
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::task::{Poll, Waker};

use io_uring::{opcode, types};
use rustix::io::Errno;
use uvfs_io::runtime::{self, Keep, Remote, Runtime, Sqe};
use uvfs_io::{IoBuf, Payload};
use uvfs_proto::abi::{
    IO_URING_CMD_COMMIT_AND_FETCH, IO_URING_CMD_REGISTER, InHeader, URING_OP_IN_OUT_SZ,
    UringCmdReq, UringEntInOut, UringReqHeader,
};
use uvfs_proto::reply;
use zerocopy::{FromBytes, IntoBytes};

use crate::fs::FileSystem;
use crate::pipeline::serve;
use crate::reply::{Outcome, header_of};
use crate::request::Message;
use crate::session::{DEPTH, Session};
use crate::stats::QueueStats;
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
    /// A crew of `threads` threads.
    pub(crate) fn new(session: &Arc<Session<F>>, threads: usize) -> Arc<Self> {
        let member = || Member {
            stats: session.add_queue(),
            remote: OnceLock::new(),
            tasks: Tasks::default(),
        };
        Arc::new(Self {
            session: session.clone(),
            members: (0..threads).map(|_| member()).collect(),
            turn: AtomicUsize::new(0),
        })
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
        remote.call(move || runtime::spawn(serve_entry(crew, to, entry, Some(request))));
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
}

impl Queue {
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
    registered: impl FnOnce() + 'static,
) -> io::Result<()> {
    let size = crew.session.max_payload();
    let mut entries = Vec::new();
    for id in ids {
        let queue = Arc::new(Queue {
            id,
            home: me,
            streak: AtomicU32::new(0),
        });
        for _ in 0..DEPTH {
            entries.push(Arc::new(QueueEntry {
                queue: queue.clone(),
                header: IoBuf::alloc(size_of::<UringReqHeader>())?,
                payload: IoBuf::alloc(size)?,
            }));
        }
    }
    let member = &crew.members[me];
    for _ in &entries {
        assert!(member.tasks.comes(), "a thread serves once");
    }
    let _ = member.remote.set(runtime.remote());
    runtime.block_on(async move {
        for entry in entries {
            runtime::spawn(serve_entry(crew.clone(), me, entry, None));
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

/// Serves what an entry brings, on thread `here`: registers it, or goes on with a request that
/// another thread hands over.
async fn serve_entry<F: FileSystem>(
    crew: Arc<Crew<F>>,
    here: usize,
    entry: Arc<QueueEntry>,
    handed: Option<Received>,
) {
    let Member { stats, .. } = &crew.members[here];
    let session = &crew.session;
    let device = session.raw_device();
    let qid = entry.queue.id;
    let mut request = handed;
    loop {
        let (next, registration) = match request {
            Some(Received { slot, commit_id }) => {
                let outcome = serve(session, stats, &slot).await;
                give_answer(&entry, slot.header.unique, &outcome);
                let commit = IO_URING_CMD_COMMIT_AND_FETCH;
                (command(device, commit, qid, commit_id, None), None)
            }
            None => {
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
        let result = unsafe { runtime::submit(next, keep) }.await;
        stats.waited(runtime::counts());
        if result < 0 {
            match Errno::from_raw_os_error(-result) {
                // The mount has ended.
                Errno::NOTCONN | Errno::CANCELED | Errno::NODEV | Errno::CONNABORTED => {}
                error => tracing::error!(qid, %error, "an entry of FUSE-over-io_uring is lost"),
            }
            break;
        }
        let brought = take_apart(session, &entry);
        let to = crew.place(&entry.queue, &brought.slot);
        request = match to == here {
            true => Some(brought),
            false => crew.hand_over(to, &entry, brought),
        };
        if request.is_none() {
            break;
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
        slot: 0,
    };
    Received {
        slot,
        commit_id: entry.commit_id,
    }
}

fn give_answer(memory: &QueueEntry, unique: u64, outcome: &Outcome) {
    let (error, len) = header_of(outcome);
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
        ..Default::default()
    };
    memory.header.copy_in(ENTRY_AT, entry.as_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;

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
