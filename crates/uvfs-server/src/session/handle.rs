//! The session, as its file system reaches it.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, OnceLock, Weak};

use rustix::io::Errno;

use super::{Session, UNMOUNTED};
use crate::coherence::Coherence;
use crate::fs::{Again, Context, FileSystem, HostChange, Node, SessionHandle, Sizes};
use crate::notify::{Notifier, Retrievals, Writers};
use crate::survive::Ledger;

/// The handle of a session.
struct Handle {
    device: Weak<OwnedFd>,
    coherence: Weak<Coherence>,
    retrievals: Retrievals,
    writers: Arc<OnceLock<Writers>>,
    ledger: Option<Arc<Ledger>>,
}

impl<F: FileSystem> Session<F> {
    /// What the file system gets.
    pub fn handle(&self) -> Arc<dyn SessionHandle> {
        let device = match self.transport.get() {
            Some(&UNMOUNTED) => Weak::new(),
            _ => Arc::downgrade(&self.device),
        };
        Arc::new(Handle {
            device,
            coherence: Arc::downgrade(&self.coherence),
            retrievals: self.retrievals.clone(),
            writers: self.writers.clone(),
            ledger: self.ledger().cloned(),
        })
    }
}

impl Handle {
    fn device(&self) -> io::Result<Arc<OwnedFd>> {
        Ok(self.device.upgrade().ok_or(Errno::NODEV)?)
    }
}

impl SessionHandle for Handle {
    fn notifier(&self) -> io::Result<Notifier> {
        let retrievals = self.retrievals.clone();
        Ok(Notifier::new(
            self.device()?,
            retrievals,
            self.writers.clone(),
        ))
    }

    fn register_backing(&self, node: Node, file: BorrowedFd<'_>) -> io::Result<i32> {
        let device = self.device()?;
        let coherence = self.coherence.upgrade().ok_or(Errno::NODEV)?;
        if !coherence.pass(node.0) {
            return Err(Errno::BUSY.into());
        }
        crate::mount::backing_open(device.as_fd(), file).inspect_err(|_| coherence.passed(node.0))
    }

    fn unregister_backing(&self, node: Node, id: i32) {
        let (Ok(device), Some(coherence)) = (self.device(), self.coherence.upgrade()) else {
            return;
        };
        if let Err(error) = crate::mount::backing_close(device.as_fd(), id) {
            tracing::debug!(%error, id, "backing file");
        }
        coherence.passed(node.0);
    }

    fn restored_backing(&self, node: Node) {
        if let Some(coherence) = self.coherence.upgrade() {
            let free = coherence.pass(node.0);
            debug_assert!(free, "there is no client yet");
        }
    }

    fn outlives(&self) -> bool {
        self.ledger.is_some()
    }

    fn kept(&self) -> Option<[OwnedFd; 2]> {
        self.ledger.as_ref()?.kept()
    }

    fn keep(&self, kept: [BorrowedFd<'_>; 2]) {
        if let Some(ledger) = &self.ledger {
            ledger.keep(kept);
        }
    }

    fn save_again(&self, node: Node, save: &mut dyn FnMut(&mut Vec<u8>) -> io::Result<()>) {
        if let Some(ledger) = &self.ledger {
            ledger.save_again(node, save);
        }
    }

    fn note(&self, cx: &Context, note: u64) {
        if let Some(ledger) = &self.ledger {
            ledger.note(cx.unique, note);
        }
    }

    fn again(&self, cx: &Context) -> Option<Again> {
        self.ledger.as_ref()?.again(cx.unique)
    }

    fn attributes_changed(&self, node: Node) {
        // None of its pages: that could wait for one that another request has locked.
        let told = self
            .notifier()
            .and_then(|kernel| kernel.invalidate_inode(node, -1, 0));
        if let Err(error) = told {
            tracing::debug!(%node, %error, "a notification was not taken");
        }
    }

    fn host_is_watched(&self, size: Box<Sizes>) -> bool {
        let coherence = self.coherence.upgrade();
        coherence.is_some_and(|coherence| coherence.host_is_watched(size))
    }

    fn host_changed(&self, change: HostChange<'_>) {
        if let Some(coherence) = self.coherence.upgrade() {
            coherence.host_changed(change);
        }
    }
}
