//! The ways that requests come by. Each has queues; a queue has one thread and one runtime.

use std::sync::Arc;
use std::time::Instant;

use crate::fs::FileSystem;
use crate::session::{Session, has_no_answer};
use crate::slot::{Answer, Slot};
use crate::stats::QueueStats;

pub mod dev;
pub mod shm;
pub mod uring;

/// Requests that one queue has under way at most; further ones wait in the kernel.
pub(crate) const DEPTH: usize = 64;

/// Answers a request and counts it.
pub(crate) async fn serve<F: FileSystem>(
    session: &Arc<Session<F>>,
    stats: &QueueStats,
    slot: &Slot,
) -> Answer {
    let began = stats.begin(slot.header.opcode).then(Instant::now);
    let mut answer = crate::dispatch::answer(session, slot).await;
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
