//! Threads that carry out reads and writes.

use crate::errno;
use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, OnceLock};
use uvfs_client::backend::{NodeId, Op, Request};
use uvfs_queue::arena::Arena;
use uvfs_sys::lock;

/// Leaves nothing in the host's page cache (Linux 6.14).
const RWF_DONTCACHE: i32 = 0x80;

/// A request and its file.
type Task = (Request, Arc<OwnedFd>);

#[derive(Default)]
pub(super) struct Queue {
    pub(super) waiting: VecDeque<Task>,
    /// Files that a write is under way to. The host lets one in at a time: a second thread there
    /// would burn its time waiting.
    pub(super) writing: Vec<NodeId>,
    /// Workers that wait for more.
    pub(super) asleep: usize,
    /// The workers are to end.
    pub(super) stop: bool,
}

impl Queue {
    pub(super) fn take(&mut self) -> Option<Task> {
        let free = |(r, _): &Task| r.op == Op::Read || !self.writing.contains(&r.node);
        let at = self.waiting.iter().position(free)?;
        let task = self.waiting.remove(at)?;
        if task.0.op == Op::Write {
            self.writing.push(task.0.node);
        }
        Some(task)
    }
}

#[derive(Default)]
pub(super) struct Engine {
    pub(super) arena: OnceLock<Arc<Arena>>,
    pub(super) queue: Mutex<Queue>,
    pub(super) more: Condvar,
    /// The host can't do RWF_DONTCACHE here; found at the first try.
    pub(super) no_dontcache: AtomicBool,
}

impl Engine {
    pub(super) fn work(&self) {
        loop {
            let task = {
                let mut queue = lock(&self.queue);
                loop {
                    if let Some(task) = queue.take() {
                        break task;
                    }
                    if queue.stop && queue.waiting.is_empty() {
                        return;
                    }
                    queue.asleep += 1;
                    queue = self.more.wait(queue).unwrap_or_else(|e| e.into_inner());
                    queue.asleep -= 1;
                }
            };
            self.run(task);
        }
    }

    /// Does a request that [`Queue::take`] gave.
    pub(super) fn run(&self, (request, fd): Task) {
        let result = self.transfer(&request, &fd);
        if request.op == Op::Write {
            let mut queue = lock(&self.queue);
            let at = queue.writing.iter().position(|&n| n == request.node);
            queue
                .writing
                .swap_remove(at.expect("noted when it was taken"));
            // Requests that waited for this file may find all workers asleep.
            let more =
                queue.asleep > 0 && queue.waiting.iter().any(|(r, _)| r.node == request.node);
            drop(queue);
            if more {
                self.more.notify_one();
            }
        }
        (request.done)(result);
    }

    /// Moves all bytes, in as many system calls as that takes; short only at the end of the file
    /// or before an error.
    pub(super) fn transfer(&self, request: &Request, fd: &OwnedFd) -> io::Result<usize> {
        let arena = self.arena.get().ok_or_else(|| errno(libc::ENOTCONN))?;
        let mut iov: Vec<libc::iovec> = request
            .segs
            .iter()
            .map(|&seg| libc::iovec {
                iov_base: arena.ptr(seg).cast(),
                iov_len: seg.len as usize,
            })
            .collect();
        let mut rest = &mut iov[..];
        let mut done = 0usize;
        while !rest.is_empty() {
            let n = rest.len().min(1024) as i32;
            let offset =
                i64::try_from(request.offset + done as u64).map_err(|_| errno(libc::EFBIG))?;
            let dontcache = request.dontcache && !self.no_dontcache.load(Ordering::Relaxed);
            let flags = if dontcache { RWF_DONTCACHE } else { 0 };
            // SAFETY: every vector lies in the arena's mapping (`ptr` checked it), which lives as
            // long as `arena`; the kernel copies, so concurrent changes of the shared bytes are
            // as harmless as from any other process.
            let moved = unsafe {
                match request.op {
                    Op::Read => libc::preadv2(fd.as_raw_fd(), rest.as_ptr(), n, offset, flags),
                    Op::Write => libc::pwritev2(fd.as_raw_fd(), rest.as_ptr(), n, offset, flags),
                }
            };
            if moved < 0 {
                let error = io::Error::last_os_error();
                if error.kind() == io::ErrorKind::Interrupted {
                    continue;
                }
                if dontcache && error.raw_os_error() == Some(libc::EOPNOTSUPP) {
                    self.no_dontcache.store(true, Ordering::Relaxed);
                    continue;
                }
                return if done > 0 { Ok(done) } else { Err(error) };
            }
            let mut moved = moved as usize;
            if moved == 0 {
                break;
            }
            done += moved;
            while let Some(first) = rest.first_mut() {
                if moved < first.iov_len {
                    first.iov_base = first.iov_base.wrapping_byte_add(moved);
                    first.iov_len -= moved;
                    break;
                }
                moved -= first.iov_len;
                rest = &mut rest[1..];
            }
        }
        Ok(done)
    }
}
