//! Where a reply, given on any thread, meets the request that waits for it on its queue's thread.

use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::{Context, Poll, Waker};

use crate::Errno;

pub(crate) type Answer<T> = Result<T, Errno>;

enum State<T> {
    Waiting(Option<Waker>),
    Answered(Answer<T>),
    /// The request is over: its task no longer waits.
    Over,
}

struct Slot<T>(Mutex<State<T>>);

impl<T> Slot<T> {
    fn lock(&self) -> MutexGuard<'_, State<T>> {
        uvfs_sys::lock(&self.0)
    }

    fn put(&self, answer: impl FnOnce() -> Answer<T>) {
        let mut state = self.lock();
        let State::Waiting(waker) = &mut *state else {
            return;
        };
        let waker = waker.take();
        // Under the lock: what the answer is copied to is the request's for as long as it waits.
        *state = State::Answered(answer());
        drop(state);
        if let Some(waker) = waker {
            waker.wake();
        }
    }
}

/// Answers a request, at most once; dropped without an answer, with EIO.
pub(crate) struct Sender<T> {
    slot: Option<Arc<Slot<T>>>,
    unique: u64,
}

/// Waits for the answer.
pub(crate) struct Receiver<T>(Arc<Slot<T>>);

/// The two ends of a request's answer.
pub(crate) fn slot<T>(unique: u64) -> (Sender<T>, Receiver<T>) {
    let slot = Arc::new(Slot(Mutex::new(State::Waiting(None))));
    let sender = Sender {
        slot: Some(slot.clone()),
        unique,
    };
    (sender, Receiver(slot))
}

impl<T> Sender<T> {
    pub(crate) fn send(self, answer: Answer<T>) {
        self.send_with(|| answer);
    }

    /// Makes the answer only if the request's task waits for it.
    pub(crate) fn send_with(mut self, answer: impl FnOnce() -> Answer<T>) {
        if let Some(slot) = self.slot.take() {
            slot.put(answer);
        }
    }
}

impl<T> Drop for Sender<T> {
    fn drop(&mut self) {
        if let Some(slot) = self.slot.take() {
            let request = self.unique;
            tracing::warn!(request, "a reply was dropped without an answer: EIO");
            slot.put(|| Err(Errno::EIO));
        }
    }
}

impl<T> std::fmt::Debug for Sender<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Sender")
            .field("unique", &self.unique)
            .finish()
    }
}

impl<T> Future for Receiver<T> {
    type Output = Answer<T>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let mut state = self.0.lock();
        match std::mem::replace(&mut *state, State::Over) {
            State::Answered(answer) => Poll::Ready(answer),
            _ => {
                *state = State::Waiting(Some(cx.waker().clone()));
                Poll::Pending
            }
        }
    }
}

impl<T> Drop for Receiver<T> {
    fn drop(&mut self) {
        *self.0.lock() = State::Over;
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::task::Wake;

    use super::*;

    #[derive(Default)]
    struct Counts(AtomicUsize);

    impl Wake for Counts {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn poll<T>(receiver: &mut Receiver<T>, counts: &Arc<Counts>) -> Poll<Answer<T>> {
        let waker = Waker::from(counts.clone());
        Pin::new(receiver).poll(&mut Context::from_waker(&waker))
    }

    /// An answer from another thread wakes the request's task once.
    #[test]
    fn an_answer_from_another_thread_wakes_once() {
        let counts = Arc::new(Counts::default());
        let (sender, mut receiver) = slot(1);
        assert!(poll(&mut receiver, &counts).is_pending());
        std::thread::spawn(move || sender.send(Ok(7)))
            .join()
            .unwrap();
        assert_eq!(counts.0.load(Ordering::Relaxed), 1);
        assert_eq!(poll(&mut receiver, &counts), Poll::Ready(Ok(7)));
    }

    /// An answer that came before the wait is taken at once.
    #[test]
    fn an_answer_that_came_first_is_there() {
        let (sender, mut receiver) = slot(1);
        sender.send(Ok(7));
        assert_eq!(
            poll(&mut receiver, &Arc::default()),
            Poll::Ready(Ok(7)),
            "without waiting"
        );
    }

    /// A reply that a program drops is EIO.
    #[test]
    fn a_dropped_reply_is_an_io_error() {
        let (sender, mut receiver) = slot::<()>(1);
        drop(sender);
        assert_eq!(
            poll(&mut receiver, &Arc::default()),
            Poll::Ready(Err(Errno::EIO))
        );
    }

    /// A late reply writes nothing into the memory of the request.
    #[test]
    fn nothing_is_written_for_a_request_that_is_over() {
        let (sender, receiver) = slot::<()>(1);
        drop(receiver);
        sender.send_with(|| panic!("the request's memory is another's by now"));
    }
}
