//! A slow file system.

use std::time::Duration;

use uvfs_io::ops;

use super::{Layer, Opcode};
use crate::fs::{Context, FileSystem, Node, Result};

/// Delays requests, each by the same time. Those that are under way at once wait at once.
///
/// ```no_run
/// use std::time::Duration;
/// use uvfs_server::layers::{Latency, Opcode};
/// use uvfs_server::{FileSystem, Options, mount};
///
/// # fn serve(fs: impl FileSystem) -> std::io::Result<()> {
/// // A disk: names come from a cache.
/// let slow = Latency::new(fs, Duration::from_millis(8)).only(&[Opcode::Read, Opcode::Write]);
/// mount(slow, "/mnt", Options::named("slow"))?.wait();
/// # Ok(())
/// # }
/// ```
pub struct Latency<F> {
    fs: F,
    time: Duration,
    only: &'static [Opcode],
}

impl<F: FileSystem> Latency<F> {
    /// Delays every request to `fs`, but for FORGET, by `time`.
    pub fn new(fs: F, time: Duration) -> Self {
        let only = Opcode::ALL;
        Self { fs, time, only }
    }

    /// Delays only these requests.
    pub fn only(mut self, these: &'static [Opcode]) -> Self {
        self.only = these;
        self
    }
}

impl<F: FileSystem> Layer for Latency<F> {
    type Inner = F;

    fn inner(&self) -> &F {
        &self.fs
    }

    async fn around<T>(
        &self,
        _: &Context,
        opcode: Opcode,
        node: Node,
        call: impl AsyncFnOnce(Node) -> Result<T>,
    ) -> Result<T> {
        if !self.time.is_zero() && self.only.contains(&opcode) {
            ops::sleep(self.time).await;
        }
        call(node).await
    }
}
