//! The ways that requests come by. Each has queues; a queue has one thread and one runtime.

use std::cell::Cell;
use std::pin::pin;
use std::sync::Arc;
use std::time::Instant;

use uvfs_proto::abi::{self, InHeader, Opcode};
use uvfs_proto::request::op_len;
use zerocopy::{FromBytes, IntoBytes};

use crate::coherence::{self, Link};
use crate::fs::{Errno, FileSystem};
use crate::session::{Session, has_no_answer};
use crate::slot::{Answer, Slot};
use crate::stats::QueueStats;

pub mod dev;
mod lead;
mod names;
pub mod shm;
pub mod uring;

/// Requests that one queue has under way at most; further ones wait in the kernel.
pub(crate) const DEPTH: usize = 64;

/// How long the structure behind a header is; 0 of an opcode that is not known.
fn structure_len<F: FileSystem>(session: &Session<F>, header: &InHeader) -> usize {
    Opcode::try_from(header.opcode).map_or(0, |opcode| op_len(opcode, session.negotiated()))
}

/// Answers a request of the kernel's and counts it.
pub(crate) async fn serve<F: FileSystem>(
    session: &Arc<Session<F>>,
    stats: &QueueStats,
    slot: &Slot,
) -> Answer {
    serve_for(session, stats, slot, None).await
}

/// Answers a request of the client `link`, or of the kernel, and counts it.
pub(crate) async fn serve_for<F: FileSystem>(
    session: &Arc<Session<F>>,
    stats: &QueueStats,
    slot: &Slot,
    link: Option<&Arc<Link>>,
) -> Answer {
    let began = stats.begin(slot.header.opcode).then(Instant::now);
    // Here and below: futures are pinned where they are made, as they are large to move.
    let mut answer = pin!(coherent(session, stats, slot, link)).await;
    if let Some(began) = began {
        stats.timed(began.elapsed());
    }
    stats.end(matches!(answer, Answer::Error(_)));
    stats.count_bytes(slot, &answer);
    if has_no_answer(slot.header.opcode) {
        answer = Answer::None;
    }
    answer
}

/// Answers a request when no lease is in its way.
async fn coherent<F: FileSystem>(
    session: &Arc<Session<F>>,
    stats: &QueueStats,
    slot: &Slot,
    link: Option<&Arc<Link>>,
) -> Answer {
    let coherence = &session.coherence;
    if link.is_none() && !coherence.tracks() {
        if !coherence::counts(slot.header.opcode) {
            return untracked(session, slot).await;
        }
        stats.without_leases(true);
        // If the first client came meanwhile, it may not have seen the count.
        if !coherence.tracks() {
            let answer = untracked(session, slot).await;
            stats.without_leases(false);
            return answer;
        }
        stats.without_leases(false);
    }
    match coherence::cuts(slot) {
        // Larger than all others.
        Some(create) => Box::pin(create_and_cut(session, slot, create, link)).await,
        None => pin!(under_leases(session, slot, link)).await,
    }
}

/// Answers a request of the kernel's while there are no leases.
async fn untracked<F: FileSystem>(session: &Arc<Session<F>>, slot: &Slot) -> Answer {
    let coherence = &session.coherence;
    let since = coherence.now();
    coherence.moves(slot);
    let mut answer = crate::dispatch::answer(session, slot, &Cell::default()).await;
    coherence.shows(slot, &mut answer, since);
    answer
}

/// Lets a request begin once no lease is in its way, and answers it.
async fn under_leases<F: FileSystem>(
    session: &Arc<Session<F>>,
    slot: &Slot,
    link: Option<&Arc<Link>>,
) -> Answer {
    let coherence = &session.coherence;
    let under = match pin!(coherence.begin(link, slot)).await {
        Ok(under) => under,
        Err(errno) => return Answer::Error(errno),
    };
    let unlinked = Cell::default();
    let mut answer = pin!(crate::dispatch::answer(session, slot, &unlinked)).await;
    let unlinked = unlinked.get();
    pin!(coherence.end(session, link, slot, under, unlinked, &mut answer)).await;
    answer
}

/// CREATE with O_TRUNC. Whose leases are in its way is known only when the file is found: it is found
/// or made first, and cut by an OPEN if there is anything to cut.
async fn create_and_cut<F: FileSystem>(
    session: &Arc<Session<F>>,
    slot: &Slot,
    create: abi::CreateIn,
    link: Option<&Arc<Link>>,
) -> Answer {
    let cut = create.flags & libc::O_TRUNC as u32;
    let without = abi::CreateIn {
        flags: create.flags - cut,
        ..create
    };
    let node = slot.header.nodeid;
    let found = Slot {
        input: slot.input.clone(),
        ..slot.like(Opcode::Create, node, without.as_bytes())
    };
    let answer = under_leases(session, &found, link).await;
    let Answer::Body(mut body) = answer else {
        return answer;
    };
    let Ok((mut entry, rest)) = abi::EntryOut::read_from_prefix(&body) else {
        return Answer::Body(body);
    };
    let Ok((opened, _)) = abi::OpenOut::read_from_prefix(rest) else {
        return Answer::Body(body);
    };
    let node = entry.nodeid;
    if entry.attr.size == 0 && !session.coherence.is_leased(node) {
        return Answer::Body(body);
    }
    let open = abi::OpenIn {
        flags: create.flags & !(libc::O_CREAT as u32),
        open_flags: create.open_flags,
    };
    let open = slot.like(Opcode::Open, node, open.as_bytes());
    let answer = under_leases(session, &open, link).await;
    let release = abi::ReleaseIn {
        fh: opened.fh,
        flags: create.flags,
        ..Default::default()
    };
    let release = slot.like(Opcode::Release, node, release.as_bytes());
    under_leases(session, &release, link).await;
    let cut = match answer {
        Answer::Body(cut) => match coherence::attributes(session, slot, node).await {
            Ok(attr) => Ok((cut, attr)),
            Err(errno) => Err(errno),
        },
        Answer::Error(errno) => Err(errno),
        Answer::None | Answer::Room(_) => Err(Errno::IO),
    };
    match cut {
        Ok((cut, attr)) => {
            entry.attr = attr;
            // It may have changed again.
            (entry.attr_valid, entry.attr_valid_nsec) = (0, 0);
            body.clear();
            body.extend_from_slice(entry.as_bytes());
            body.extend_from_slice(&cut);
            Answer::Body(body)
        }
        Err(errno) => {
            let forget = abi::ForgetIn { nlookup: 1 };
            let forget = slot.like(Opcode::Forget, node, forget.as_bytes());
            under_leases(session, &forget, link).await;
            Answer::Error(errno)
        }
    }
}
