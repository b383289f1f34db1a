//! io_uring with the device as a registered file, and memory as a registered buffer.

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::sync::{Arc, Mutex};

use io_uring::{IoUring, opcode, squeue, types};
use rustix::io::Errno;

use uvfs_mem::Arena;

use super::Op;
use super::core::{Backend, Transfer};
use crate::device::Device;
use crate::runtime::{Refused, probe};
use uvfs_sys::lock;

pub(super) struct Uring {
    ring: IoUring,
    device: Arc<Device>,
    registered: bool,
    /// Memory that is buffer 0 of the ring.
    fixed: Option<Arena>,
    /// The vectors of transfers of several pieces: an entry that the kernel did not take at once
    /// is read later, so they stay until the event.
    vectors: Mutex<HashMap<u64, Vectors>>,
}

struct Vectors {
    _kept: Box<[libc::iovec]>,
}

// SAFETY: the pointers are only handed to the kernel; they point into blocks that the I/O of
// the same key owns.
unsafe impl Send for Vectors {}

impl Uring {
    pub(super) fn new(
        device: Arc<Device>,
        depth: usize,
        memory: Option<Arena>,
    ) -> io::Result<Uring> {
        let entries = (depth as u32).next_power_of_two();
        let ring = IoUring::builder()
            .setup_clamp()
            .setup_cqsize(entries.max(2) * 2)
            .build(entries)
            .and_then(|ring: IoUring| probe(&ring.submitter()).map(|()| ring))
            .map_err(|error| match Refused::new(&error) {
                Some(refused) => io::Error::new(error.kind(), refused.to_string()),
                None => error,
            })?;
        let registered = ring
            .submitter()
            .register_files(&[device.as_fd().as_raw_fd()])
            .is_ok();
        let fixed = memory.filter(|arena| match arena.pinned_range() {
            Some((base, len)) => {
                let iov = libc::iovec {
                    iov_base: base.cast(),
                    iov_len: len,
                };
                // SAFETY: the range is the arena's mapping, which stays while the ring has it: the
                // arena is kept beside the ring, and a pinned one gives no page back.
                let result = unsafe { ring.submitter().register_buffers(&[iov]) };
                if let Err(error) = &result {
                    tracing::debug!(%error, len, "memory is not registered");
                }
                result.is_ok()
            }
            None => false,
        });
        Ok(Uring {
            ring,
            device,
            registered,
            fixed,
            vectors: Mutex::default(),
        })
    }

    /// Whether the piece of memory lies in the registered buffer.
    fn is_fixed(&self, iov: &libc::iovec) -> bool {
        let range = self.fixed.as_ref().and_then(Arena::pinned_range);
        range.is_some_and(|(base, len)| {
            let at = (iov.iov_base as usize).wrapping_sub(base as usize);
            at < len && iov.iov_len <= len - at
        })
    }

    fn entry(&self, transfer: &Transfer, iovs: &[libc::iovec]) -> squeue::Entry {
        // An opcode takes either kind of descriptor, but as different types.
        macro_rules! entry {
            ($file:expr) => {{
                let offset = transfer.offset;
                match (transfer.op, iovs) {
                    (Op::Flush, _) => opcode::Fsync::new($file)
                        .flags(types::FsyncFlags::DATASYNC)
                        .build(),
                    (Op::Read, [one]) if self.is_fixed(one) => {
                        let (base, len) = (one.iov_base.cast(), one.iov_len as u32);
                        opcode::ReadFixed::new($file, base, len, 0)
                            .offset(offset)
                            .build()
                    }
                    (Op::Write, [one]) if self.is_fixed(one) => {
                        let (base, len) = (one.iov_base.cast(), one.iov_len as u32);
                        opcode::WriteFixed::new($file, base, len, 0)
                            .offset(offset)
                            .build()
                    }
                    (Op::Read, [one]) => {
                        opcode::Read::new($file, one.iov_base.cast(), one.iov_len as u32)
                            .offset(offset)
                            .build()
                    }
                    (Op::Write, [one]) => {
                        opcode::Write::new($file, one.iov_base.cast(), one.iov_len as u32)
                            .offset(offset)
                            .build()
                    }
                    (op, many) => {
                        let kept: Box<[libc::iovec]> = many.into();
                        let (start, count) = (kept.as_ptr(), kept.len() as u32);
                        lock(&self.vectors).insert(transfer.key, Vectors { _kept: kept });
                        if op == Op::Read {
                            opcode::Readv::new($file, start, count)
                                .offset(offset)
                                .build()
                        } else {
                            opcode::Writev::new($file, start, count)
                                .offset(offset)
                                .build()
                        }
                    }
                }
            }};
        }
        let entry = if self.registered {
            entry!(types::Fixed(0))
        } else {
            entry!(types::Fd(self.device.as_fd().as_raw_fd()))
        };
        entry.user_data(transfer.key)
    }
}

impl Drop for Uring {
    /// The kernel ends a ring in the background. Without this the device would stay claimed until then, and the
    /// next program would find it in use.
    fn drop(&mut self) {
        if self.registered {
            let _ = self.ring.submitter().unregister_files();
        }
    }
}

impl Backend for Uring {
    fn name(&self) -> &'static str {
        "uring"
    }

    fn start(&self, batch: &[Transfer], iovs: &[libc::iovec]) -> Result<usize, Errno> {
        let mut pushed = 0;
        {
            // SAFETY: `start` is only called under the engine's lock, so this is the only
            // submission queue handle.
            let mut queue = unsafe { self.ring.submission_shared() };
            for transfer in batch {
                if queue.is_full() {
                    break;
                }
                let pieces = &iovs[transfer.first..transfer.first + transfer.count];
                let entry = self.entry(transfer, pieces);
                // SAFETY: the memory that the entry describes belongs to the I/O until its
                // event, the vectors are kept as long, and the file lives as long as the ring.
                if unsafe { queue.push(&entry) }.is_err() {
                    break;
                }
                pushed += 1;
            }
        }
        // An entry that the kernel does not take now stays queued, and goes with a later call: it counts
        // as started either way.
        match self.ring.submit() {
            Ok(_) => {}
            Err(error)
                if matches!(
                    error.raw_os_error(),
                    Some(libc::EAGAIN | libc::EBUSY | libc::EINTR)
                ) => {}
            Err(error) if pushed == 0 => {
                return Err(Errno::from_raw_os_error(
                    error.raw_os_error().unwrap_or(libc::EIO),
                ));
            }
            Err(error) => tracing::warn!(%error, "submitting to the ring"),
        }
        if pushed == 0 {
            Err(Errno::AGAIN)
        } else {
            Ok(pushed)
        }
    }

    fn collect(&self, wait: bool, events: &mut Vec<(u64, Result<usize, Errno>)>) -> io::Result<()> {
        loop {
            let before = events.len();
            {
                // SAFETY: `collect` is not called by two threads at once, so this is the only
                // completion queue handle.
                let queue = unsafe { self.ring.completion_shared() };
                let mut vectors = lock(&self.vectors);
                for event in queue {
                    vectors.remove(&event.user_data());
                    let result = usize::try_from(event.result())
                        .map_err(|_| Errno::from_raw_os_error(-event.result()));
                    events.push((event.user_data(), result));
                }
            }
            if !wait || events.len() > before {
                return Ok(());
            }
            match self.ring.submitter().submit_and_wait(1) {
                Ok(_) => {}
                Err(error) => match error.raw_os_error() {
                    Some(libc::EINTR) => {}
                    // The completion queue is full, or the kernel short of memory: take what
                    // is there, and give it a moment.
                    Some(libc::EAGAIN | libc::EBUSY) => std::thread::yield_now(),
                    _ => return Err(error),
                },
            }
        }
    }
}
