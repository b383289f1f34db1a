//! Keeps the server below its limit of descriptors where every inode that the kernel knows has one: without file handles,
//! as without CAP_DAC_READ_SEARCH. Else who lists a large tree would use them up.

use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rustix::io::Errno;
use uvfs_io::blocking::Pool;
use uvfs_io::ops;

use crate::Source;
use crate::sys::Result;

/// Nodes in one message to the kernel.
const BATCH: usize = 256;
/// After a round, in which the kernel forgets.
const PAUSE: Duration = Duration::from_millis(2);

/// How often a call that found no descriptor is made again, after a pause.
const TRIES: usize = 100;

/// Whether descriptors run short.
pub(crate) struct Crowd {
    /// The least free number is so high when half of all are in use.
    high: RawFd,
    /// The kernel is being told to forget.
    busy: AtomicBool,
    /// It can't be told.
    refused: AtomicBool,
    thread: Arc<Pool>,
}

impl Crowd {
    /// Of so many descriptors.
    pub(crate) fn new(limit: u64) -> Arc<Self> {
        Arc::new(Self {
            high: RawFd::try_from(limit / 2).unwrap_or(RawFd::MAX),
            busy: AtomicBool::new(false),
            refused: AtomicBool::new(false),
            thread: Pool::new(1),
        })
    }

    /// Whether to look up only what is asked for.
    pub(crate) fn is_busy(&self) -> bool {
        self.busy.load(Ordering::Relaxed)
    }
}

impl Source {
    /// An inode is to hold a descriptor: has the kernel forget others if these run short.
    pub(super) fn holds(&self, fd: &OwnedFd) {
        if fd.as_raw_fd() >= self.crowd.high {
            self.thin_out();
        }
    }

    /// Has the kernel forget what it does not use, on another thread: it waits for locks of directories, which requests
    /// hold. Not where the source has handles, as that would free nothing.
    pub(super) fn thin_out(&self) {
        let (None, Some(session)) = (&self.inodes.root().mount.fd, self.session.get()) else {
            return;
        };
        let crowd = self.crowd.clone();
        if crowd.refused.load(Ordering::Relaxed) || crowd.busy.swap(true, Ordering::AcqRel) {
            return;
        }
        let (session, inodes) = (session.clone(), self.inodes.clone());
        self.crowd.thread.run(move || {
            let nodes = inodes.unused();
            let forget = || {
                let kernel = session.notifier()?;
                nodes.chunks(BATCH).try_for_each(|nodes| kernel.prune(nodes))
            };
            if let Err(error) = forget() {
                tracing::info!(%error, "this kernel can't be told to forget files (Linux 6.18 can)");
                crowd.refused.store(true, Ordering::Relaxed);
            }
            std::thread::sleep(PAUSE);
            crowd.busy.store(false, Ordering::Release);
        });
    }
}

/// Makes a call again that found no descriptor while the kernel is being told to forget.
pub(crate) async fn patiently<T>(
    source: &Source,
    mut call: impl AsyncFnMut() -> Result<T>,
) -> Result<T> {
    for _ in 0..TRIES {
        match call().await {
            Err(Errno::MFILE) if source.crowd.is_busy() => ops::sleep(PAUSE).await,
            done => return done,
        }
    }
    call().await
}
