//! A submitted call: to be polled, waited for, or awaited.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};

use rustix::io;

use crate::error::{Doing, Result};
use crate::file::File;

/// Drives a pending call on; asked again after each event of its inode.
pub(crate) trait Step<T>: Send {
    /// The result, once it is there. Never blocks; not called again after it answered.
    fn step(&mut self) -> Option<io::Result<T>>;

    /// A thread waits that would rather be woken often than have much to do at the end.
    fn hurry(&self) {}

    /// Grows when a part of the call has ended.
    fn progress(&self) -> usize {
        0
    }
}

/// A call that was submitted, whose file is open as long as this lives. Nothing is lost when it is dropped: writes
/// go on.
#[must_use = "a submitted call tells its result here"]
pub struct Pending<T> {
    file: File,
    /// The word that an error of this call begins with, such as "reading".
    doing: &'static str,
    ready: Option<io::Result<T>>,
    step: Option<Box<dyn Step<T>>>,
}

impl<T> std::fmt::Debug for Pending<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pending")
            .field("ready", &self.ready.is_some())
            .finish_non_exhaustive()
    }
}

impl<T> Pending<T> {
    pub(crate) fn ready(file: &File, doing: &'static str, result: io::Result<T>) -> Self {
        Self {
            file: file.clone(),
            doing,
            ready: Some(result),
            step: None,
        }
    }

    pub(crate) fn new(file: &File, doing: &'static str, step: impl Step<T> + 'static) -> Self {
        let mut pending = Self {
            file: file.clone(),
            doing,
            ready: None,
            step: Some(Box::new(step)),
        };
        pending.advance();
        pending
    }

    /// Takes the result, which is there.
    fn take(&mut self) -> Result<T> {
        let result = self.ready.take().expect("the result is taken once");
        result.doing(self.doing, self.file.name())
    }

    fn progress(&self) -> usize {
        self.step.as_ref().map_or(0, |step| step.progress())
    }

    fn advance(&mut self) -> bool {
        if self.ready.is_none()
            && let Some(step) = &mut self.step
        {
            self.ready = step.step();
            if self.ready.is_some() {
                self.step = None;
            }
        }
        self.ready.is_some()
    }

    /// Whether the result is there. Does not wait.
    pub fn is_done(&mut self) -> bool {
        self.advance()
    }

    /// Waits for the result.
    ///
    /// # Errors
    /// The errors of the call.
    ///
    /// # Panics
    /// When the result was already taken by awaiting it.
    pub fn wait(mut self) -> Result<T> {
        let file = self.file.clone();
        if let Some(step) = &self.step {
            step.hurry();
        }
        let mut done = false;
        while !done {
            file.wait(|| {
                let before = self.progress();
                done = self.advance();
                (done || self.progress() > before).then_some(())
            });
        }
        self.take()
    }
}

impl<T: Unpin> Future for Pending<T> {
    type Output = Result<T>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        if !self.advance() {
            self.file.event().register(cx.waker());
            // It may have ended before the waker was known.
            if !self.advance() {
                return Poll::Pending;
            }
        }
        Poll::Ready(self.take())
    }
}
