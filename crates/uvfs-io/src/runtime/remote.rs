//! Sends calls and wake-ups to the runtime of another thread.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::AtomicU32;
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::Wake;

use rustix::event::{EventfdFlags, eventfd};
use uvfs_queue::ring::Bell;

use super::with_current;

pub(super) type RemoteCall = Box<dyn FnOnce() + Send>;

pub(super) enum Message {
    Wake(usize),
    Call(RemoteCall),
    /// An operation has ended, with this result.
    Completed(usize, i32),
}

/// The part of a runtime that other threads reach.
pub(super) struct Shared {
    /// None once the runtime is gone.
    pub(super) inbox: Mutex<Option<Vec<Message>>>,
    pub(super) bell: AtomicU32,
    pub(super) eventfd: OwnedFd,
}

impl Shared {
    pub(super) fn new() -> io::Result<Arc<Self>> {
        Ok(Arc::new(Self {
            inbox: Mutex::new(Some(Vec::new())),
            bell: AtomicU32::new(Bell::AWAKE),
            eventfd: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
        }))
    }

    pub(super) fn inbox(&self) -> MutexGuard<'_, Option<Vec<Message>>> {
        uvfs_sys::lock(&self.inbox)
    }

    pub(super) fn send(&self, message: Message) {
        match &mut *self.inbox() {
            Some(inbox) => inbox.push(message),
            None => return,
        }
        if Bell(&self.bell).must_wake() {
            // Can only fail with EAGAIN at 2^64 - 1 unread wake-ups; then it is awake.
            let _ = rustix::io::write(&self.eventfd, &1u64.to_ne_bytes());
        }
    }

    /// Reads the eventfd empty. The executor looks at the inbox anyway.
    pub(super) fn bell_is_heard(&self) {
        let _ = rustix::io::read(&self.eventfd, &mut [0; 8]);
    }
}

/// Reaches a runtime from any thread.
#[derive(Clone)]
pub struct Remote(pub(super) Arc<Shared>);

impl Remote {
    /// Runs `call` on the runtime's thread, soon. Once the runtime is gone it is dropped unrun.
    pub fn call(&self, call: impl FnOnce() + Send + 'static) {
        self.0.send(Message::Call(Box::new(call)));
    }
}

pub(super) struct TaskWaker {
    pub(super) task: usize,
    pub(super) shared: Arc<Shared>,
}

impl Wake for TaskWaker {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        let here = with_current(|core| match core {
            Some(core) if Arc::ptr_eq(&core.shared, &self.shared) => {
                core.make_ready(self.task);
                true
            }
            _ => false,
        });
        if !here {
            self.shared.send(Message::Wake(self.task));
        }
    }
}
