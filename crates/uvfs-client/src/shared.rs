//! The state that a client's clones and files share.

use std::sync::Arc;
use std::thread::JoinHandle;

use crate::cache::Cache;

#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) cache: Arc<Cache>,
    pub(crate) flusher: Option<JoinHandle<()>>,
}

impl Drop for Shared {
    fn drop(&mut self) {
        // The last user is gone, so nothing becomes dirty any more: write what is.
        self.cache.write_all(|inode, error| {
            tracing::error!(node = inode.node, %error, "dirty pages are lost: writeback failed");
        });
        self.cache.stop_flusher();
        if let Some(flusher) = self.flusher.take() {
            // A request's end may hold the last reference, and the flusher may be that end.
            if flusher.thread().id() != std::thread::current().id() {
                let _ = flusher.join();
            }
        }
        self.cache.forget_all();
    }
}
