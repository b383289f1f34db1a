//! Tells the kernel to drop what a client has changed. The kernel waits for pages that requests of
//! its own have locked, so threads of their own make these calls.

use std::collections::VecDeque;
use std::ffi::CString;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::task::{Poll, Waker};

use crate::lock;
use crate::notify::Notifier;

/// Invalidations under way at once.
const INVALIDATORS: usize = 8;
/// Names that the kernel is yet to let go of, with nobody waiting for it.
const MOST_HINTS: usize = 256;

/// Something for the kernel to drop.
pub(super) enum Job {
    /// A node's attributes, and its pages from an offset on unless that is negative.
    Inode(u64, i64, i64),
    /// A name in a directory.
    Entry(u64, CString),
    /// A name in a directory, if it is still this node's.
    Removed(u64, CString, u64),
}

#[derive(Default)]
struct Done {
    done: AtomicBool,
    waker: Mutex<Option<Waker>>,
}

#[derive(Default)]
struct Jobs {
    queue: VecDeque<(Job, Arc<Done>)>,
    /// Jobs that nobody waits for.
    hints: VecDeque<Job>,
    threads: usize,
    idle: usize,
    over: bool,
}

/// Threads that tell the kernel what to drop, and wait with it for pages that are in use.
pub(super) struct Invalidator {
    pub(super) notifier: Notifier,
    jobs: Arc<(Mutex<Jobs>, Condvar)>,
}

impl Drop for Invalidator {
    fn drop(&mut self) {
        lock(&self.jobs.0).over = true;
        self.jobs.1.notify_all();
    }
}

impl Invalidator {
    pub(super) fn new(notifier: Notifier) -> Self {
        Self {
            notifier,
            jobs: Arc::default(),
        }
    }

    pub(super) async fn inode(&self, node: u64, offset: i64, len: i64) {
        self.run(Job::Inode(node, offset, len)).await;
    }

    pub(super) async fn run(&self, job: Job) {
        let done = Arc::new(Done::default());
        {
            let mut jobs = lock(&self.jobs.0);
            jobs.queue.push_back((job, done.clone()));
            if let Err(error) = self.wake(&mut jobs) {
                // Existing clients get to it; without any, there is nothing to drop.
                assert!(jobs.threads > 0, "no thread to tell the kernel: {error}");
            }
        }
        std::future::poll_fn(|cx| {
            let mut waker = lock(&done.waker);
            if done.done.load(Ordering::Acquire) {
                return Poll::Ready(());
            }
            *waker = Some(cx.waker().clone());
            Poll::Pending
        })
        .await;
    }

    /// Has the kernel let go of a removed name, some time.
    pub(super) fn hint(&self, parent: u64, node: u64, name: CString) {
        let mut jobs = lock(&self.jobs.0);
        if jobs.hints.len() < MOST_HINTS {
            jobs.hints.push_back(Job::Removed(parent, name, node));
            // Without a thread it waits for the next one.
            let _ = self.wake(&mut jobs);
        }
    }

    /// Has a thread look at the queue.
    fn wake(&self, jobs: &mut Jobs) -> io::Result<()> {
        if jobs.idle >= jobs.queue.len() + jobs.hints.len() || jobs.threads == INVALIDATORS {
            self.jobs.1.notify_one();
        } else {
            self.start()?;
            jobs.threads += 1;
        }
        Ok(())
    }

    fn start(&self) -> io::Result<()> {
        let (jobs, notifier) = (self.jobs.clone(), self.notifier.clone());
        std::thread::Builder::new()
            .name("uvfs-inval".into())
            .spawn(move || work(&jobs, &notifier))?;
        Ok(())
    }
}

fn work((jobs, more): &(Mutex<Jobs>, Condvar), notifier: &Notifier) {
    loop {
        let mut now = lock(jobs);
        let (job, done) = loop {
            if let Some((job, done)) = now.queue.pop_front() {
                break (job, Some(done));
            }
            if let Some(job) = now.hints.pop_front() {
                break (job, None);
            }
            if now.over {
                return;
            }
            now.idle += 1;
            now = more
                .wait(now)
                .unwrap_or_else(|poisoned| poisoned.into_inner());
            now.idle -= 1;
        };
        drop(now);
        let told = match job {
            Job::Inode(node, offset, len) => notifier.invalidate_inode(node, offset, len),
            Job::Entry(parent, name) => notifier.invalidate_entry(parent, &name),
            Job::Removed(parent, name, node) => notifier.deleted(parent, node, &name),
        };
        if let Err(error) = told {
            // The mount has ended, or the name is in use as a mount point or a directory.
            tracing::debug!(%error, "telling the kernel");
        }
        let Some(done) = done else { continue };
        let waker = {
            let mut waker = lock(&done.waker);
            done.done.store(true, Ordering::Release);
            waker.take()
        };
        if let Some(waker) = waker {
            waker.wake();
        }
    }
}
