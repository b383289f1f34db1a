//! Requests while there are clients: each begins once no lease is in its way (`coherence/`), which goes by its access
//! set. When its handler is done, the kernel is told what a client has changed, and a reply that may be old already
//! gives the kernel nothing to keep.

use std::pin::pin;

use rustix::io::Result;
use uvfs_proto::abi;
use uvfs_proto::request::Operation;

use super::kernel;
use crate::coherence::AccessSet;
use crate::dispatch::attributes;
use crate::fs::{Errno, FileSystem, Origin};
use crate::interrupt::is_ending;
use crate::reply::{OpenReply, Outcome, Reply};
use crate::request::Request;
use crate::session::Session;

/// Answers a request when no lease is in its way.
pub(super) async fn answer<F: FileSystem>(session: &Session<F>, request: &Request<'_>) -> Outcome {
    match request.truncating_create() {
        // Larger than all others.
        Some(create) => Box::pin(create_and_truncate(session, request, create)).await,
        None => {
            let access = AccessSet::of(request.node, &request.operation);
            let access = match closes_as_it_ends(session, request) {
                true => AccessSet::nothing(),
                false => access,
            };
            pin!(under_leases(session, request, &access)).await
        }
    }
}

/// Whether the end of a program closes a file of which a client has a lease. The client may be that very program, and could
/// give nothing back: its socket is closed after its files.
fn closes_as_it_ends<F: FileSystem>(session: &Session<F>, request: &Request<'_>) -> bool {
    matches!(request.operation, Operation::Flush(_))
        && matches!(request.origin, Origin::Kernel)
        && session.coherence.is_leased(request.node)
        && is_ending(request.cx.pid)
}

/// Lets a request begin once no lease is in its way, and answers it.
async fn under_leases<F: FileSystem>(
    session: &Session<F>,
    request: &Request<'_>,
    access: &AccessSet<'_>,
) -> Outcome {
    let coherence = &session.coherence;
    let under = pin!(coherence.begin(request, access, &session.interrupts)).await?;
    let (mut outcome, grown) = match request.origin {
        Origin::Kernel => (pin!(kernel::answer(session, request)).await, None),
        Origin::Client(_) => {
            let outcome = pin!(super::in_turn(session, request)).await;
            let grown = Box::pin(grown(session, request, &outcome)).await;
            (outcome, grown)
        }
    };
    let fs = session.fs();
    let ended = pin!(coherence.end(fs, request, access, under, grown, &mut outcome)).await;
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
        (Operation::Setattr(arg), _) if request.sets_size() => (request.node, Some(arg.size)),
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
        fh: opened.out.fh,
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
) -> Result<(OpenReply, abi::Attr)> {
    match opened? {
        Reply::Opened(opened) => Ok((opened, attributes(session, request, node).await?)),
        _ => Err(Errno::IO),
    }
}
