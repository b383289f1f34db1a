//! The tasks of clients, many of which share a thread.

use std::future::poll_fn;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::pin;
use std::task::Poll;

/// Lets the runtime's other tasks run.
pub(crate) async fn yield_now() {
    let mut yielded = false;
    std::future::poll_fn(|cx| {
        if std::mem::replace(&mut yielded, true) {
            return Poll::Ready(());
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    })
    .await;
}

/// Runs a client's task so that its panic ends neither the thread nor another client; None after one.
pub(crate) async fn contained<T>(task: impl Future<Output = T>) -> Option<T> {
    let mut task = pin!(task);
    poll_fn(
        |cx| match catch_unwind(AssertUnwindSafe(|| task.as_mut().poll(cx))) {
            Ok(polled) => polled.map(Some),
            Err(_) => {
                tracing::error!("a task of a client panicked");
                Poll::Ready(None)
            }
        },
    )
    .await
}
