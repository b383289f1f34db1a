//! Linux AIO: io_setup(2), io_submit(2), io_getevents(2), by their system call numbers.

use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::ptr;
use std::sync::Arc;

use rustix::io::Errno;

use uvfs_sys::aio::{FDSYNC, IoEvent, Iocb, PREADV, PWRITEV};
use uvfs_sys::checked;

use super::Op;
use super::core::{Backend, Transfer};
use crate::device::Device;

/// Events fetched by one system call.
const BATCH: usize = 64;

pub(super) struct Aio {
    context: libc::c_ulong,
    device: Arc<Device>,
}

impl Aio {
    pub(super) fn new(device: Arc<Device>, depth: usize) -> io::Result<Aio> {
        let mut context: libc::c_ulong = 0;
        // SAFETY: the kernel writes one context to the pointer, which is valid and was zero.
        checked(unsafe {
            libc::syscall(libc::SYS_io_setup, depth as libc::c_ulong, &mut context)
        })?;
        Ok(Aio { context, device })
    }
}

impl Drop for Aio {
    fn drop(&mut self) {
        // SAFETY: our own context; nothing is in flight any more (the engine waited for it),
        // and the kernel would wait here if there were.
        let _ = checked(unsafe { libc::syscall(libc::SYS_io_destroy, self.context) });
    }
}

impl Backend for Aio {
    fn name(&self) -> &'static str {
        "aio"
    }

    fn start(&self, batch: &[Transfer], iovs: &[libc::iovec]) -> Result<usize, Errno> {
        let mut blocks = [Iocb::default(); BATCH];
        let mut pointers: [*mut Iocb; BATCH] = [ptr::null_mut(); BATCH];
        let count = batch.len().min(BATCH);
        for (transfer, block) in batch[..count].iter().zip(&mut blocks) {
            *block = Iocb {
                data: transfer.key,
                fd: self.device.as_fd().as_raw_fd() as u32,
                ..Iocb::default()
            };
            if transfer.op == Op::Flush {
                block.opcode = FDSYNC;
                continue;
            }
            let pieces = &iovs[transfer.first..transfer.first + transfer.count];
            block.opcode = if transfer.op == Op::Read {
                PREADV
            } else {
                PWRITEV
            };
            block.buf = pieces.as_ptr() as u64;
            block.len = pieces.len() as u64;
            block.offset = transfer.offset as i64;
        }
        for (pointer, block) in pointers.iter_mut().zip(&mut blocks) {
            *pointer = block;
        }
        // SAFETY: the context is ours; `count` pointers to control blocks are valid, and the
        // kernel copies the control blocks and the vectors they point to before it returns. The
        // memory that the vectors describe belongs to the I/O until its event.
        checked(unsafe {
            libc::syscall(
                libc::SYS_io_submit,
                self.context,
                count as libc::c_long,
                pointers.as_mut_ptr(),
            )
        })
    }

    fn collect(&self, wait: bool, events: &mut Vec<(u64, Result<usize, Errno>)>) -> io::Result<()> {
        let mut fetched = [IoEvent::default(); BATCH];
        loop {
            // SAFETY: the context is ours and `fetched` has room for the number of events asked.
            let result = checked(unsafe {
                libc::syscall(
                    libc::SYS_io_getevents,
                    self.context,
                    libc::c_long::from(wait),
                    BATCH as libc::c_long,
                    fetched.as_mut_ptr(),
                    ptr::null_mut::<libc::timespec>(),
                )
            });
            let count = match result {
                Err(Errno::INTR) => continue,
                other => other?,
            };
            events.extend(fetched[..count].iter().map(|event| {
                let result = usize::try_from(event.res)
                    .map_err(|_| Errno::from_raw_os_error(event.res.unsigned_abs() as i32));
                (event.data, result)
            }));
            return Ok(());
        }
    }
}
