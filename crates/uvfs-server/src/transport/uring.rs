//! FUSE-over-io_uring (Linux 6.14): a queue for each core, entries that the kernel puts requests
//! into, and one command that hands an answer over and waits for the next request.
//!
//! Each entry is a task. What a queue's tasks submit, answers and the I/O of handlers alike, leaves
//! in one system call, which also waits for what comes next.

use std::cell::{Cell, RefCell};
use std::io;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Poll, Waker};

use io_uring::{opcode, types};
use rustix::io::Errno;
use uvfs_io::runtime::{self, Keep, Runtime, Sqe};
use uvfs_io::{IoBuf, Payload};
use uvfs_proto::abi::{
    IO_URING_CMD_COMMIT_AND_FETCH, IO_URING_CMD_REGISTER, InHeader, Opcode, URING_OP_IN_OUT_SZ,
    UringCmdReq, UringEntInOut, UringReqHeader,
};
use uvfs_proto::reply;
use uvfs_proto::request::op_len;
use zerocopy::{FromBytes, IntoBytes};

use crate::fs::FileSystem;
use crate::session::Session;
use crate::slot::{Answer, Slot};
use crate::stats::QueueStats;
use crate::transport::{DEPTH, serve};

/// Offsets in [`UringReqHeader`].
const OP_AT: usize = 128;
const ENTRY_AT: usize = 256;

/// The two pieces of memory that an entry is registered with; read by the kernel at registration.
struct EntryMemory {
    iovecs: [libc::iovec; 2],
    header: IoBuf,
    payload: IoBuf,
}

/// Serves the queues `ids` (as many as there are cores, in all) until the mount ends. Calls
/// `registered` once the kernel has all entries.
///
/// # Errors
/// When memory or the ring fails.
pub(crate) fn run<F: FileSystem>(
    runtime: &Runtime,
    session: Arc<Session<F>>,
    ids: Vec<u16>,
    registered: impl FnOnce() + 'static,
) -> io::Result<()> {
    let stats = session.add_queue();
    let size = session.max_payload();
    let left = Rc::new(Cell::new(0));
    let ended: Rc<RefCell<Option<Waker>>> = Rc::default();
    let mut entries = Vec::new();
    for &id in &ids {
        for _ in 0..DEPTH {
            let (header, payload) = (
                IoBuf::alloc(size_of::<UringReqHeader>())?,
                IoBuf::alloc(size)?,
            );
            entries.push((id, header, payload));
        }
    }
    left.set(entries.len());
    runtime.block_on(async move {
        for (id, header, payload) in entries {
            let (session, stats) = (session.clone(), stats.clone());
            let (left, ended) = (left.clone(), ended.clone());
            runtime::spawn(async move {
                entry(&session, &stats, id, header, payload).await;
                left.set(left.get() - 1);
                if let Some(waker) = ended.borrow_mut().take() {
                    waker.wake();
                }
            });
        }
        // The entries' tasks run first; then their registrations leave with this one's system call.
        uvfs_io::ops::sleep(std::time::Duration::from_micros(1)).await;
        registered();
        std::future::poll_fn(|cx| {
            if left.get() == 0 {
                return Poll::Ready(());
            }
            *ended.borrow_mut() = Some(cx.waker().clone());
            Poll::Pending
        })
        .await;
    })
}

/// The io_uring command `command` of FUSE for an entry of queue `qid`.
fn command(
    device: i32,
    command: u32,
    qid: u16,
    commit_id: u64,
    memory: Option<&EntryMemory>,
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
        crate::mount::set_sqe_buffer(&mut entry, &memory.iovecs);
    }
    entry
}

async fn entry<F: FileSystem>(
    session: &Arc<Session<F>>,
    stats: &QueueStats,
    qid: u16,
    header: IoBuf,
    payload: IoBuf,
) {
    let device = session.raw_device();
    let memory = Rc::new(EntryMemory {
        iovecs: [
            libc::iovec {
                iov_base: header.as_ptr().cast(),
                iov_len: header.len(),
            },
            libc::iovec {
                iov_base: payload.as_ptr().cast(),
                iov_len: payload.len(),
            },
        ],
        header,
        payload,
    });
    let mut next = command(device, IO_URING_CMD_REGISTER, qid, 0, Some(&memory));
    loop {
        let keep = Keep {
            data: None,
            other: Some(Box::new(memory.clone())),
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
            return;
        }
        let (slot, commit_id) = take_apart(session, &memory);
        let answer = serve(session, stats, &slot).await;
        give_answer(&memory, slot.header.unique, &answer);
        next = command(device, IO_URING_CMD_COMMIT_AND_FETCH, qid, commit_id, None);
    }
}

/// The request that the kernel has put into an entry, and what its answer is committed by.
fn take_apart<F: FileSystem>(session: &Session<F>, memory: &EntryMemory) -> (Slot, u64) {
    let mut bytes = [0; size_of::<UringReqHeader>()];
    memory.header.copy_out(0, &mut bytes);
    let (header, _) = InHeader::read_from_prefix(&bytes).expect("128 bytes hold a header");
    let (entry, _) =
        UringEntInOut::read_from_prefix(&bytes[ENTRY_AT..]).expect("the area has its size");
    let mut op = [0; URING_OP_IN_OUT_SZ];
    op.copy_from_slice(&bytes[OP_AT..ENTRY_AT]);
    let structure =
        Opcode::try_from(header.opcode).map_or(0, |opcode| op_len(opcode, session.negotiated()));
    let len = (entry.payload_sz as usize).min(memory.payload.len());
    let room = Payload::from(memory.payload.clone());
    let slot = Slot {
        header,
        op,
        op_len: structure,
        input: room.slice(0..len),
        room,
    };
    (slot, entry.commit_id)
}

fn give_answer(memory: &EntryMemory, unique: u64, answer: &Answer) {
    let (error, len) = match answer {
        // Has to be committed all the same.
        Answer::None => (0, 0),
        Answer::Error(errno) => (-errno.raw_os_error(), 0),
        Answer::Body(body) => {
            memory.payload.copy_in(0, body);
            (0, body.len())
        }
        Answer::Room(len) => (0, *len),
    };
    let header = reply::header(unique, error, len);
    memory.header.copy_in(0, header.as_bytes());
    let entry = UringEntInOut {
        payload_sz: len as u32,
        ..Default::default()
    };
    memory.header.copy_in(ENTRY_AT, entry.as_bytes());
}
