//! One operation of a runtime.

use std::any::Any;
use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use super::call::Call;
use super::ring::Sqe;
use super::{Driver, Executor, PERSONALITY, current};
use crate::buf::Payload;

/// The objects that an operation in flight keeps alive: the kernel, or another thread, still uses them when the
/// future is gone.
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
    keep: Keep,
}

/// An operation under way; its value is the completion's result, negative for an errno. When
/// it is dropped early it is cancelled, and its memory is kept until it has ended.
#[must_use = "an operation does nothing for you unless awaited"]
pub struct Operation {
    core: Rc<Executor>,
    key: usize,
}

impl Operation {
    fn begin(core: Rc<Executor>, keep: Keep) -> Self {
        let key = core.ops.borrow_mut().insert(OpEntry {
            state: OpState::Waiting(None),
            keep,
        });
        Self { core, key }
    }
}

/// Starts an entry on the calling thread's ring. It is sent with the next system call.
///
/// # Safety
/// Everything that `entry` points to stays valid until the operation completes: it is owned by
/// `keep`, or by something that outlives the runtime.
///
/// # Panics
/// Outside of a runtime, and in one without a ring.
pub unsafe fn submit(entry: Sqe, keep: Keep) -> Operation {
    let op = Operation::begin(current(), keep);
    let entry = entry
        .personality(PERSONALITY.get())
        .user_data(op.key as u64);
    match &mut *op.core.driver.borrow_mut() {
        Driver::Ring(ring) => ring.push(entry),
        Driver::Pool(_) => unreachable!("an entry is submitted to a ring"),
    }
    op
}

/// Starts an operation of the calling thread's runtime.
///
/// # Safety
/// As [`submit`]; and the descriptor stays open as long.
///
/// # Panics
/// Outside of a runtime.
pub(crate) unsafe fn start(call: Call, keep: Keep) -> Operation {
    let op = Operation::begin(current(), keep);
    let personality = PERSONALITY.get();
    match &mut *op.core.driver.borrow_mut() {
        Driver::Ring(ring) => {
            let keep = &mut op.core.ops.borrow_mut()[op.key].keep;
            ring.start(op.key, &call, keep, personality);
        }
        Driver::Pool(pool) => pool.start(op.key, call, personality),
    }
    op
}

impl Future for Operation {
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

impl Drop for Operation {
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
