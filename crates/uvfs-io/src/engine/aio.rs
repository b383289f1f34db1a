//! The engine of Linux AIO.

use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::sync::Arc;

use rustix::io::Errno;

use uvfs_sys::aio::{Context, FDSYNC, IoEvent, Iocb, PREADV, PWRITEV};

use super::Op;
use super::core::{Backend, Transfer};
use crate::device::Device;

/// Events fetched by one system call.
const BATCH: usize = 64;

pub(super) struct Aio {
    context: Context,
    device: Arc<Device>,
}

impl Aio {
    pub(super) fn new(device: Arc<Device>, depth: usize) -> io::Result<Aio> {
        let context = Context::new(depth)?;
        Ok(Aio { context, device })
    }
}

impl Backend for Aio {
    fn name(&self) -> &'static str {
        "aio"
    }

    fn start(&self, batch: &[Transfer], iovs: &[libc::iovec]) -> Result<usize, Errno> {
        let mut blocks = [Iocb::default(); BATCH];
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
        let calls = blocks.each_ref();
        // SAFETY: the kernel copies the vectors before it returns, and the memory that they describe belongs to the
        // I/O until its event.
        unsafe { self.context.submit(&calls[..count]) }
    }

    fn collect(&self, wait: bool, events: &mut Vec<(u64, Result<usize, Errno>)>) -> io::Result<()> {
        let mut fetched = [IoEvent::default(); BATCH];
        loop {
            let count = match self.context.events(wait.into(), &mut fetched) {
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
