//! What stands between a decoded request and its handler.
//!
//! A mount is in one of three stages, which [`Coherence`](crate::coherence::Coherence) knows:
//!
//! - *plain*: the kernel's requests go through `kernel.rs` to their handlers, and the server notes nothing about
//!   them. A mount is plain while it has no clients, and its file system reports no changes of the host.
//! - *watched*: the file system reports what programs of the host change. The server notes what the kernel may have
//!   cached, for as long as the kernel may keep it.
//! - *tracked*: there are clients. Requests wait for leases (`leases.rs`).
//!
//! The first client, and the first report, change the stage while requests are under way. Each request of the
//! kernel's that changes something, or answers with a new node, is counted by its queue before it looks at the stage,
//! and until it has ended. All threads see count and stage in one order (SeqCst). So either the thread that changes
//! the stage sees the count, and grants no lease until the request has ended; or the request sees the new stage. A
//! plain request looks at the stage again at its end. If it has changed, the answer is treated as if it were as old
//! as the mount. All that was answered before counts as given to the kernel (`KernelCache::assume_all`).

mod kernel;
mod leases;

use std::pin::pin;

use uvfs_proto::request::Operation;

use crate::coherence::Since;
use crate::dispatch;
use crate::fs::{FileSystem, Origin};
use crate::reply::Outcome;
use crate::request::Request;
use crate::session::Session;
use crate::stats::QueueStats;
use crate::switch::Stage;

/// Answers a request as the mount's stage needs: by [`without_leases`] in a plain or watched mount, by
/// [`leases::answer`] in a tracked one.
pub(crate) async fn answer<F: FileSystem>(
    session: &Session<F>,
    stats: &QueueStats,
    request: &Request<'_>,
) -> Outcome {
    if matches!(request.origin, Origin::Kernel) {
        let counted = is_counted(&request.operation);
        if counted {
            stats.untracked.begin();
        }
        let stage = session.coherence.stage();
        if !stage.tracks() {
            let outcome = without_leases(session, request, stage).await;
            if counted {
                stats.untracked.end();
            }
            return outcome;
        }
        if counted {
            stats.untracked.end();
        }
    }
    pin!(leases::answer(session, request)).await
}

/// Calls the handler of a request; of one that sets a size, in turn with what the kernel is told of that file's size.
async fn in_turn<F: FileSystem>(session: &Session<F>, request: &Request<'_>) -> Outcome {
    let handler = dispatch::answer(session, request);
    match request.sets_size() {
        true => Box::pin(session.coherence.in_turn(request.node, handler)).await,
        false => handler.await,
    }
}

/// Whether no lease may be granted while the request is under way, because it changes something that may be cached,
/// or brings attributes without naming their node. Requests that wait for other programs are not counted, and neither
/// are reads: the kernel locks the pages that they fill.
fn is_counted(operation: &Operation<'_>) -> bool {
    use Operation::*;
    !matches!(
        operation,
        Read(_)
            | Getattr(_)
            | Statx(_)
            | Forget(_)
            | BatchForget(..)
            | Release(_)
            | Releasedir(_)
            | Flush(_)
            | Getlk(_)
            | Setlk(_)
            | Setlkw(_)
            | Interrupt(_)
            | Poll(_)
            | NotifyReply(_)
    )
}

/// Answers a request of the kernel's while there are no leases.
async fn without_leases<F: FileSystem>(
    session: &Session<F>,
    request: &Request<'_>,
    stage: Stage,
) -> Outcome {
    let coherence = &session.coherence;
    if stage.is_plain() {
        let mut outcome = kernel::answer(session, request).await;
        if coherence.stage() != stage
            && let Ok(reply) = &mut outcome
        {
            coherence.shows(session.fs(), request, reply, Since::ALWAYS);
        }
        return outcome;
    }
    let since = coherence.now();
    coherence.moves(request);
    let mut outcome = kernel::answer(session, request).await;
    if let Ok(reply) = &mut outcome {
        coherence.shows(session.fs(), request, reply, since);
    }
    outcome
}
