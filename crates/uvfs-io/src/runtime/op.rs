//! One operation on the ring.

use std::any::Any;
use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use super::{Executor, PERSONALITY, Sqe, current};
use crate::buf::Payload;

/// The objects that an operation in flight keeps alive: the kernel still uses them when the future is gone.
#[derive(Default)]
pub struct Keep {
    /// Data memory.
    pub data: Option<Payload>,
    /// Descriptors, iovecs, names.
    pub other: Option<Arc<dyn Any>>,
}

pub(super) enum OpState {
    Waiting(Option<Waker>),
    Done(i32),
    /// Its future was dropped.
    Abandoned,
}

pub(super) struct OpEntry {
    pub(super) state: OpState,
    _keep: Keep,
}

/// A ring operation under way; its value is the completion's result, negative for an errno. When
/// it is dropped early it is cancelled, and its memory is kept until the kernel is done with it.
#[must_use = "an operation does nothing for you unless awaited"]
pub struct RingOp {
    core: Rc<Executor>,
    key: usize,
}

/// Starts an operation on the calling thread's ring. It is sent with the next system call.
///
/// # Safety
/// Everything that `entry` points to stays valid until the operation completes: it is owned by
/// `keep`, or by something that outlives the runtime.
///
/// # Panics
/// Outside of a runtime.
pub unsafe fn submit(entry: Sqe, keep: Keep) -> RingOp {
    let core = current();
    let key = core.ops.borrow_mut().insert(OpEntry {
        state: OpState::Waiting(None),
        _keep: keep,
    });
    core.push(entry.personality(PERSONALITY.get()).user_data(key as u64));
    RingOp { core, key }
}

impl Future for RingOp {
    type Output = i32;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<i32> {
        let mut ops = self.core.ops.borrow_mut();
        let op = &mut ops[self.key];
        match &mut op.state {
            OpState::Done(result) => Poll::Ready(*result),
            OpState::Waiting(waker) => {
                match waker {
                    Some(waker) => waker.clone_from(cx.waker()),
                    None => *waker = Some(cx.waker().clone()),
                }
                Poll::Pending
            }
            OpState::Abandoned => unreachable!("polled after drop"),
        }
    }
}

impl Drop for RingOp {
    fn drop(&mut self) {
        let mut ops = self.core.ops.borrow_mut();
        let op = &mut ops[self.key];
        if let OpState::Done(_) = op.state {
            let done = ops.remove(self.key);
            drop(ops);
            drop(done);
        } else {
            op.state = OpState::Abandoned;
            drop(ops);
            self.core.cancel(self.key);
        }
    }
}
