//! The ways that requests come by. Each has queues; a queue has one thread and one runtime.

use std::sync::Arc;
use std::time::Instant;

use crate::coherence::{self, Link};
use crate::fs::FileSystem;
use crate::session::{Session, has_no_answer};
use crate::slot::{Answer, Slot};
use crate::stats::QueueStats;

mod at;
pub mod dev;
pub mod shm;
pub mod uring;

/// Requests that one queue has under way at most; further ones wait in the kernel.
pub(crate) const DEPTH: usize = 64;

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
    let mut answer = coherent(session, stats, slot, link).await;
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
            return crate::dispatch::answer(session, slot).await;
        }
        stats.without_leases(true);
        // If the first client came meanwhile, it may not have seen the count.
        if !coherence.tracks() {
            let answer = crate::dispatch::answer(session, slot).await;
            stats.without_leases(false);
            return answer;
        }
        stats.without_leases(false);
    }
    let under = match coherence.begin(link, slot).await {
        Ok(under) => under,
        Err(errno) => return Answer::Error(errno),
    };
    let mut answer = crate::dispatch::answer(session, slot).await;
    coherence.end(session, link, slot, under, &mut answer).await;
    answer
}
