//! The way of a request from a transport to its answer:
//!
//! 1. It is decoded, once, from a private copy of its bytes (`request.rs`).
//! 2. `client/` authorizes a client's request before it calls [`execute`], and accounts for the answer afterwards.
//! 3. `stage/` does what the mount's stage needs before and after the handler; `stage/kernel.rs` is on the way of
//!    every request of the kernel's.
//! 4. The file system's handler is called (`dispatch.rs`).
//! 5. The transport encodes the reply, once, into the memory that it is sent from (`reply.rs`).

use std::pin::pin;
use std::time::Instant;

use uvfs_proto::abi::Opcode;

use crate::fs::{Errno, FileSystem, Origin};
use crate::reply::{Outcome, Reply};
use crate::request::{Message, Request};
use crate::session::Session;
use crate::stage;
use crate::stats::QueueStats;
use crate::survive::Ledger;

/// Serves a request of the kernel's.
pub(crate) async fn serve<F: FileSystem>(
    session: &Session<F>,
    stats: &QueueStats,
    message: &Message,
) -> Outcome {
    let private = message.private();
    match Request::decode(message, &private, Origin::Kernel, session.negotiated()) {
        Ok(request) => match session.ledger() {
            None => pin!(execute(session, stats, &request)).await,
            Some(ledger) => {
                let outliving = outliving(session, stats, ledger, message.slot, &request);
                Box::pin(outliving).await
            }
        },
        Err(errno) => refuse(stats, message.header.opcode, errno),
    }
}

/// Serves a request of a mount that outlives its server: all that the answer makes true is written down before it is sent.
async fn outliving<F: FileSystem>(
    session: &Session<F>,
    stats: &QueueStats,
    ledger: &Ledger,
    slot: usize,
    request: &Request<'_>,
) -> Outcome {
    if let Some(outcome) = ledger.begins(session.fs(), slot, request) {
        return outcome;
    }
    let mut outcome = pin!(execute(session, stats, request)).await;
    ledger.ends(session.fs(), request, &mut outcome);
    outcome
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

/// Takes a decoded request, which its sender is allowed to make, through the mount's stage to its reply, and counts
/// it.
pub(crate) async fn execute<F: FileSystem>(
    session: &Session<F>,
    stats: &QueueStats,
    request: &Request<'_>,
) -> Outcome {
    let opcode = request.operation.opcode();
    let began = stats.begin(opcode as u32).then(Instant::now);
    // Here and below: futures are pinned where they are made, as they are large to move.
    let mut outcome = pin!(stage::answer(session, stats, request)).await;
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
