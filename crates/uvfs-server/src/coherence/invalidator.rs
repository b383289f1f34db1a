//! Invalidates in the kernel what a client, or a program of the host, has changed. The kernel waits for
//! pages that requests of its own have locked, so threads of their own make these calls.

use std::collections::VecDeque;
use std::ffi::CString;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock};
use std::task::{Poll, Waker};
use std::time::Instant;

use super::host::{self, How, Pending, What};
use super::turns::{Truncation, Turns};
use crate::fs::{Node, Sizes};
use crate::notify::Notifier;
use uvfs_sys::lock;

/// Invalidations under way at once.
const INVALIDATORS: usize = 8;
/// Of these, at most so many are for the host's changes, which no request waits for.
const FOR_HOST: usize = INVALIDATORS / 2;
/// Names that the kernel is yet to drop, and that no request waits for.
const MOST_HINTS: usize = 256;

/// Something to invalidate.
pub(super) enum Job {
    /// A node's attributes, and its pages from an offset on unless that is negative.
    Inode(u64, i64, i64),
    /// A name in a directory.
    Entry(u64, CString),
    /// A name in a directory, if it is still this node's.
    Removed(u64, CString, u64),
    /// A file is at least this long.
    Grown(u64, u64),
}

#[derive(Default)]
struct Done {
    done: AtomicBool,
    waker: Mutex<Option<Waker>>,
}

#[derive(Default)]
struct Jobs {
    queue: VecDeque<(Job, Arc<Done>)>,
    /// Jobs that no request waits for.
    hints: VecDeque<Job>,
    /// The changes of programs of the host.
    host: Pending,
    threads: usize,
    idle: usize,
    over: bool,
}

impl Jobs {
    /// How many threads have something to do.
    fn waiting(&self) -> usize {
        let host = !self.host.is_empty() && self.host.telling < FOR_HOST;
        self.queue.len() + self.hints.len() + usize::from(host)
    }
}

#[derive(Default)]
struct Shared {
    jobs: Mutex<Jobs>,
    more: Condvar,
    /// There is room for what the host changes.
    room: Condvar,
    /// Gives the size of a file that the host has changed.
    sizes: OnceLock<Box<Sizes>>,
    turns: Turns,
}

/// Threads that make invalidations, and wait with the kernel for pages that are in use.
pub(super) struct Invalidator {
    pub(super) notifier: Notifier,
    shared: Arc<Shared>,
}

impl Drop for Invalidator {
    fn drop(&mut self) {
        lock(&self.shared.jobs).over = true;
        self.shared.more.notify_all();
    }
}

impl Invalidator {
    /// Invalidates a node's attributes and pages, now and until answers that are under way to the kernel
    /// must have arrived.
    pub(super) fn tell_again(&self, node: u64) {
        let how = How {
            pages: true,
            again: true,
            grown: None,
        };
        self.tell_of_host(What::Inode(node), how);
    }

    /// Invalidates a node's attributes and pages soon.
    pub(super) fn drop_later(&self, node: u64) {
        let how = How {
            pages: true,
            ..How::default()
        };
        self.note(What::Inode(node), how);
    }

    /// Tells the kernel soon that a file is at least so long.
    pub(super) fn grown_later(&self, node: u64, size: u64) {
        let how = How {
            grown: Some(size),
            ..How::default()
        };
        self.note(What::Inode(node), how);
    }

    /// Says how to find out the sizes of files that the host has changed.
    pub(super) fn set_sizes(&self, sizes: Box<Sizes>) {
        let _ = self.shared.sizes.set(sizes);
    }

    /// A truncation begins, of which [`Invalidator::truncated`] is told the end. It waits until the kernel knows the
    /// sizes that were read before.
    pub(super) async fn truncates(&self, node: u64) -> Truncation<'_> {
        self.shared.turns.truncate(node).await
    }

    /// A truncation has ended: if the kernel was not told of the node's size meanwhile, it is told now.
    pub(super) fn truncated(&self, node: u64, truncation: Truncation<'_>) {
        if truncation.end() {
            self.drop_later(node);
        }
    }

    pub(super) fn new(notifier: Notifier) -> Self {
        Self {
            notifier,
            shared: Arc::default(),
        }
    }

    pub(super) async fn inode(&self, node: u64, offset: i64, len: i64) {
        self.run(Job::Inode(node, offset, len)).await;
    }

    pub(super) async fn run(&self, job: Job) {
        let done = Arc::new(Done::default());
        {
            let mut jobs = lock(&self.shared.jobs);
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
        let mut jobs = lock(&self.shared.jobs);
        if jobs.hints.len() < MOST_HINTS {
            jobs.hints.push_back(Job::Removed(parent, name, node));
            // Without a thread it waits for the next one.
            let _ = self.wake(&mut jobs);
        }
    }

    /// Invalidates what a program of the host has changed. Waits while there is too much of
    /// it; the kernel then keeps the host's events, as many as it likes.
    pub(super) fn tell_of_host(&self, what: What, how: How) {
        let mut jobs = lock(&self.shared.jobs);
        while jobs.host.is_full() {
            jobs = uvfs_sys::wait(&self.shared.room, jobs);
        }
        self.note_among(&mut jobs, what, how);
    }

    /// As [`Invalidator::tell_of_host`], but waits for nothing.
    fn note(&self, what: What, how: How) {
        self.note_among(&mut lock(&self.shared.jobs), what, how);
    }

    fn note_among(&self, jobs: &mut Jobs, what: What, how: How) {
        jobs.host.add(what, how);
        if let Err(error) = self.wake(jobs) {
            // Existing threads get to it, or the next one.
            tracing::debug!(%error, "no thread to tell the kernel");
        }
    }

    /// Has a thread look at the queue.
    fn wake(&self, jobs: &mut Jobs) -> io::Result<()> {
        if jobs.idle >= jobs.waiting() || jobs.threads == INVALIDATORS {
            self.shared.more.notify_one();
        } else {
            self.start()?;
            jobs.threads += 1;
        }
        Ok(())
    }

    fn start(&self) -> io::Result<()> {
        let (shared, notifier) = (self.shared.clone(), self.notifier.clone());
        std::thread::Builder::new()
            .name("uvfs-inval".into())
            .spawn(move || work(&shared, &notifier))?;
        Ok(())
    }
}

/// Waits for more to do, or until something is due to be told again.
fn wait<'a>(shared: &'a Shared, mut jobs: MutexGuard<'a, Jobs>) -> MutexGuard<'a, Jobs> {
    jobs.idle += 1;
    // While enough threads tell of the host's changes, it is one of those that looks again.
    let due = (jobs.host.next()).filter(|_| jobs.host.telling < FOR_HOST);
    let mut jobs = match due {
        None => uvfs_sys::wait(&shared.more, jobs),
        Some(due) => {
            let time = due.saturating_duration_since(Instant::now());
            let woken = shared.more.wait_timeout(jobs, time);
            woken.unwrap_or_else(|poisoned| poisoned.into_inner()).0
        }
    };
    jobs.idle -= 1;
    jobs
}

fn work(shared: &Shared, notifier: &Notifier) {
    let size = |node| shared.sizes.get().and_then(|sizes| sizes(node));
    loop {
        let mut now = lock(&shared.jobs);
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
            if now.host.telling < FOR_HOST
                && let Some((what, how, round)) = now.host.pop()
            {
                now.host.telling += 1;
                if now.waiting() > 0 {
                    // This one may have to wait.
                    shared.more.notify_one();
                }
                shared.room.notify_one();
                drop(now);
                host::tell(notifier, &shared.turns, size, &what, how, round);
                now = lock(&shared.jobs);
                now.host.telling -= 1;
                now.host.told(what, how, round);
                continue;
            }
            now = wait(shared, now);
        };
        drop(now);
        let told = match job {
            Job::Inode(node, offset, len) => notifier.invalidate_inode(Node(node), offset, len),
            Job::Entry(parent, name) => notifier.invalidate_entry(Node(parent), &name),
            Job::Grown(node, grown) => {
                host::grow(notifier, &shared.turns, size, node, Some(grown), false)
            }
            Job::Removed(parent, name, node) => notifier.deleted(Node(parent), Node(node), &name),
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
