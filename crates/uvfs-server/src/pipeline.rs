//! The stages that every request goes through, from any sender and over any transport:
//!
//! 1. It is decoded, once, from a private copy of its bytes (`request.rs`).
//! 2. A client's request is authorized, and made no more than its sender may ask for
//!    (`client/authorize.rs`). The kernel is trusted.
//! 3. It waits until no lease is in its way (`coherence/`), which goes by its access set.
//! 4. The file system's handler is called (`dispatch.rs`).
//! 5. The kernel is told what a client has changed, and the reply is mended where it may be old.
//! 6. Nodes and handles that the reply gives to a client, or takes from it, are accounted (`client/account.rs`).
//! 7. The transport encodes the reply, once, into the memory that it is sent from (`reply.rs`).

use std::cell::Cell;
use std::pin::pin;
use std::time::Instant;

use uvfs_proto::abi::{self, Opcode, SetattrValid};
use uvfs_proto::request::Operation;

use crate::coherence::{AccessSet, Effects};
use crate::dispatch::{self, attributes};
use crate::fs::{Errno, FileSystem, Origin, Result, Unlinked};
use crate::reply::{Outcome, Reply};
use crate::request::{Message, Request};
use crate::session::Session;
use crate::stats::QueueStats;

/// Serves a request of the kernel's.
pub(crate) async fn serve<F: FileSystem>(
    session: &Session<F>,
    stats: &QueueStats,
    message: &Message,
) -> Outcome {
    let private = message.private();
    match Request::decode(message, &private, Origin::Kernel, session.negotiated()) {
        Ok(request) => pin!(execute(session, stats, &request)).await,
        Err(errno) => refuse(stats, message.header.opcode, errno),
    }
}

/// Answers what can't be decoded, or is not allowed.
pub(crate) fn refuse(stats: &QueueStats, opcode: u32, errno: Errno) -> Outcome {
    stats.begin(opcode);
    stats.end(opcode, Some(errno));
    match Opcode::try_from(opcode).is_ok_and(|opcode| !opcode.has_answer()) {
        true => Ok(Reply::None),
        false => Err(errno),
    }
}

/// Takes a decoded request, which its sender may make, through the stages up to its reply, and
/// counts it.
pub(crate) async fn execute<F: FileSystem>(
    session: &Session<F>,
    stats: &QueueStats,
    request: &Request<'_>,
) -> Outcome {
    let opcode = request.operation.opcode();
    let began = stats.begin(opcode as u32).then(Instant::now);
    // Here and below: futures are pinned where they are made, as they are large to move.
    let mut outcome = pin!(coherent(session, stats, request)).await;
    if let Some(began) = began {
        stats.timed(began.elapsed());
    }
    stats.end(opcode as u32, outcome.as_ref().err().copied());
    stats.count_bytes(&outcome);
    if !opcode.has_answer() {
        outcome = Ok(Reply::None);
    }
    outcome
}

/// Answers a request when no lease is in its way.
async fn coherent<F: FileSystem>(
    session: &Session<F>,
    stats: &QueueStats,
    request: &Request<'_>,
) -> Outcome {
    let coherence = &session.coherence;
    let access = AccessSet::of(request.node, &request.operation);
    if matches!(request.origin, Origin::Kernel) && !coherence.tracks() {
        if !access.counted {
            return untracked(session, request, &access).await;
        }
        stats.without_leases(true);
        // If the first client came meanwhile, it may not have seen the count.
        if !coherence.tracks() {
            let outcome = untracked(session, request, &access).await;
            stats.without_leases(false);
            return outcome;
        }
        stats.without_leases(false);
    }
    match request.truncating_create() {
        // Larger than all others.
        Some(create) => Box::pin(create_and_truncate(session, request, create)).await,
        None => pin!(under_leases(session, request, &access)).await,
    }
}

/// Answers a request of the kernel's while there are no leases.
async fn untracked<F: FileSystem>(
    session: &Session<F>,
    request: &Request<'_>,
    access: &AccessSet<'_>,
) -> Outcome {
    let coherence = &session.coherence;
    let since = coherence.now();
    coherence.moves(access);
    if let Operation::Read(arg) = &request.operation
        && coherence.mixes()
    {
        coherence.sees(request.node, arg, request.room.len());
    }
    let unlinked = Cell::default();
    let mut outcome = answer(session, request, &unlinked).await;
    if let (Operation::Write(arg), Ok(_)) = (&request.operation, &outcome) {
        coherence.direct_write(request.node, arg).await;
    }
    if let Ok(reply) = &mut outcome {
        coherence.shows(request.node, &request.operation, access, reply, since);
    }
    outcome
}

/// Lets a request begin once no lease is in its way, and answers it.
async fn under_leases<F: FileSystem>(
    session: &Session<F>,
    request: &Request<'_>,
    access: &AccessSet<'_>,
) -> Outcome {
    let coherence = &session.coherence;
    let under = pin!(coherence.begin(request, access, &session.interrupts)).await?;
    let unlinked = Cell::default();
    let mut outcome = pin!(answer(session, request, &unlinked)).await;
    let (fs, unlinked) = (session.fs(), unlinked.get());
    let grown = match request.origin {
        Origin::Client(_) => Box::pin(grown(session, request, &outcome)).await,
        Origin::Kernel => None,
    };
    let effects = Effects { unlinked, grown };
    let ended = pin!(coherence.end(fs, request, access, under, effects, &mut outcome)).await;
    if let Some(node) = ended
        && let Origin::Client(link) = request.origin
        && let Ok(reply) = &mut outcome
        && let Some(entry) = reply.entry_mut()
    {
        // Rare, and as large as a request.
        let current = Box::pin(async {
            let _looks = coherence.looks(link, node).await?;
            attributes(session, request, node).await
        });
        if let Ok(attr) = current.await {
            entry.attr = attr;
        }
    }
    outcome
}

/// Calls the handler, in turn with what the kernel is told of the file's size.
async fn answer<F: FileSystem>(
    session: &Session<F>,
    request: &Request<'_>,
    unlinked: &Cell<Unlinked>,
) -> Outcome {
    let handler = dispatch::answer(session, request, unlinked);
    match request.sets_size() {
        true => Box::pin(session.coherence.in_turn(request, handler)).await,
        false => handler.await,
    }
}

/// A node whose file a client's request has made longer, maybe, and how long that is now at least. Nothing where the
/// kernel does not know the node.
async fn grown<F: FileSystem>(
    session: &Session<F>,
    request: &Request<'_>,
    outcome: &Outcome,
) -> Option<(u64, u64)> {
    let reply = outcome.as_ref().ok()?;
    let (node, size) = match (&request.operation, reply) {
        (Operation::Write(arg), Reply::Written(out)) => {
            let appends = arg.flags & libc::O_APPEND as u32 != 0;
            let end = arg.offset.saturating_add(out.size.into());
            (request.node, (!appends).then_some(end))
        }
        (Operation::Fallocate(arg), _) if arg.mode & libc::FALLOC_FL_KEEP_SIZE as u32 != 0 => {
            return None;
        }
        (Operation::Fallocate(arg), _) => {
            let end = arg.offset.saturating_add(arg.length);
            (request.node, Some(end))
        }
        (Operation::Setattr(arg), _) => {
            let valid = SetattrValid::from_bits_retain(arg.valid);
            if !valid.contains(SetattrValid::SIZE) {
                return None;
            }
            (request.node, Some(arg.size))
        }
        (Operation::CopyFileRange(arg) | Operation::CopyFileRange64(arg), _) => {
            (arg.nodeid_out, None)
        }
        _ => return None,
    };
    if !session.coherence.is_known_to_kernel(node) {
        return None;
    }
    match size {
        Some(size) => Some((node, size)),
        None => Some((node, attributes(session, request, node).await.ok()?.size)),
    }
}

/// A part of a request that is made of several.
async fn step<F: FileSystem>(
    session: &Session<F>,
    request: &Request<'_>,
    node: u64,
    operation: Operation<'_>,
) -> Outcome {
    let step = request.like(node, operation);
    let access = AccessSet::of(node, &step.operation);
    under_leases(session, &step, &access).await
}

/// CREATE with O_TRUNC. Whose leases are in its way is known only when the file is found: it is found
/// or made first, and truncated by an OPEN if there is anything to truncate.
async fn create_and_truncate<F: FileSystem>(
    session: &Session<F>,
    request: &Request<'_>,
    create: abi::CreateIn,
) -> Outcome {
    let Operation::Create(_, name) = request.operation else {
        return Err(Errno::INVAL);
    };
    let without = abi::CreateIn {
        flags: create.flags & !(libc::O_TRUNC as u32),
        ..create
    };
    let found = Operation::Create(without, name);
    let (mut entry, opened) = match step(session, request, request.node, found).await? {
        Reply::Created(entry, opened) => (entry, opened),
        reply => return Ok(reply),
    };
    let node = entry.nodeid;
    if entry.attr.size == 0 && !session.coherence.is_leased(node) {
        return Ok(Reply::Created(entry, opened));
    }
    let open = Operation::Open(abi::OpenIn {
        flags: create.flags & !(libc::O_CREAT as u32),
        open_flags: create.open_flags,
    });
    let truncated = step(session, request, node, open).await;
    let release = Operation::Release(abi::ReleaseIn {
        fh: opened.fh,
        flags: create.flags,
        ..Default::default()
    });
    let _ = step(session, request, node, release).await;
    match truncated_file(session, request, node, truncated).await {
        Ok((opened, attr)) => {
            entry.attr = attr;
            // It may have changed again.
            (entry.attr_valid, entry.attr_valid_nsec) = (0, 0);
            Ok(Reply::Created(entry, opened))
        }
        Err(errno) => {
            let forget = Operation::Forget(abi::ForgetIn { nlookup: 1 });
            let _ = step(session, request, node, forget).await;
            Err(errno)
        }
    }
}

async fn truncated_file<F: FileSystem>(
    session: &Session<F>,
    request: &Request<'_>,
    node: u64,
    opened: Outcome,
) -> Result<(abi::OpenOut, abi::Attr)> {
    match opened? {
        Reply::Opened(opened) => Ok((opened, attributes(session, request, node).await?)),
        _ => Err(Errno::IO),
    }
}
