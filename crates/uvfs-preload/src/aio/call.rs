//! One request of a context that this library serves.

use crate::import;
use crate::next;
use crate::real::errno;
use crate::report::{self, Why};
use crate::table::{self, Known, Opened, Use};
use rustix::io::Errno;
use std::ffi::{c_int, c_void};
use std::io::{IoSlice, IoSliceMut};
use std::sync::Arc;
use uvfs_client::{Error, Flags};

use super::{Context, Event, FDSYNC, PREAD, PREADV, PWRITE, PWRITEV};

/// A request that is served.
pub(super) struct Call {
    pub(super) context: Arc<Context>,
    pub(super) data: u64,
    /// Where the program has its request.
    pub(super) obj: u64,
    pub(super) opcode: u16,
    pub(super) fd: c_int,
    pub(super) one: Use,
    /// Addresses and lengths.
    pub(super) buffers: Vec<(usize, usize)>,
    pub(super) offset: u64,
    pub(super) flags: Flags,
    /// The number of the notice, by its stamp.
    pub(super) notice: Option<u64>,
}

impl Call {
    /// The event that the program gets.
    pub(super) fn event(&self, result: Result<usize, c_int>) -> Event {
        let result = match result {
            // The session is over: another may begin; and the kernel has the file still, if it is
            // open still.
            Err(libc::ENOTCONN) => match self.again() {
                Err(libc::ENOTCONN) => self.through_the_kernel(),
                result => result,
            },
            result => result,
        };
        if let Ok(n) = result {
            match self.opcode {
                PREAD | PREADV => report::served(n, 0),
                PWRITE | PWRITEV => report::served(0, n),
                _ => report::served(0, 0),
            }
        }
        Event {
            data: self.data,
            obj: self.obj,
            res: result.map_or_else(|code| -i64::from(code), |n| n as i64),
            res2: 0,
        }
    }

    /// As a call that waits.
    fn again(&self) -> Result<usize, c_int> {
        let Some(opened) = self.one.opened() else {
            return Err(libc::ENOTCONN);
        };
        self.at_once(opened)
            .map_err(|error| error.errno().raw_os_error())
    }

    fn at_once(&self, opened: &Opened) -> Result<usize, Error> {
        let (file, at) = (&opened.file, self.offset);
        match self.opcode {
            // SAFETY: the program has not been told that it ended.
            PREAD | PREADV => file.read_vectored_at(&mut unsafe { self.room() }, at, self.flags),
            PWRITE | PWRITEV => {
                // SAFETY: as above.
                let done = file.write_vectored_at(&unsafe { self.bytes() }, at, self.flags)?;
                if opened.syncs_all() {
                    file.sync_all()?;
                }
                Ok(done)
            }
            FDSYNC => file.sync_data().map(|()| 0),
            _ => file.sync_all().map(|()| 0),
        }
    }

    fn through_the_kernel(&self) -> Result<usize, c_int> {
        import::trouble(format_args!("the server's session: {}", Errno::NOTCONN));
        match table::look(self.fd) {
            Known::Described(one) if std::ptr::eq::<table::Description>(&*one, &*self.one) => {
                import::give_up(self.fd, &one, Why::NoSession);
            }
            _ => return Err(libc::ENOTCONN),
        }
        let list: Vec<libc::iovec> = self
            .buffers
            .iter()
            .map(|&(at, len)| libc::iovec {
                iov_base: at as *mut c_void,
                iov_len: len,
            })
            .collect();
        let (fd, at) = (self.fd, self.offset as i64);
        let (list, count) = (list.as_ptr(), list.len() as c_int);
        // SAFETY: the program's buffers, which are this request's until it ends.
        let done = unsafe {
            match self.opcode {
                PREAD | PREADV => next::preadv64(fd, list, count, at),
                PWRITE | PWRITEV => next::pwritev64(fd, list, count, at),
                FDSYNC => next::fdatasync(fd) as isize,
                _ => next::fsync(fd) as isize,
            }
        };
        usize::try_from(done).map_err(|_| errno())
    }

    /// # Safety
    /// The request has not ended, so that the program's buffers are its own.
    unsafe fn room(&self) -> Vec<IoSliceMut<'_>> {
        self.buffers
            .iter()
            .map(|&(at, len)| {
                // SAFETY: the caller's duty; bytes are only ever written to it.
                let room = unsafe { std::slice::from_raw_parts_mut(at as *mut u8, len) };
                IoSliceMut::new(room)
            })
            .collect()
    }

    /// # Safety
    /// As for [`Call::room`].
    unsafe fn bytes(&self) -> Vec<IoSlice<'_>> {
        self.buffers
            .iter()
            // SAFETY: the caller's duty.
            .map(|&(at, len)| unsafe { std::slice::from_raw_parts(at as *const u8, len) })
            .map(IoSlice::new)
            .collect()
    }

    fn end(self: Arc<Self>, result: Result<usize, Errno>) {
        let context = self.context.clone();
        let result = result.map_err(|error| error.raw_os_error());
        context.ended(self, result);
    }

    /// Begins it. It ends by itself, perhaps in here.
    pub(super) fn begin(self: Arc<Self>, opened: &Opened) {
        let (file, at, flags) = (&opened.file, self.offset, self.flags);
        let call = self.clone();
        let begun = match self.opcode {
            PREAD | PREADV => {
                let len = self.buffers.iter().map(|buffer| buffer.1).sum();
                file.begin_read_at(len, at, flags, move |landed| {
                    let done = landed.map(|landed| {
                        // SAFETY: it ends below.
                        landed.copy_to(&mut unsafe { call.room() });
                        landed.len()
                    });
                    call.end(done);
                })
            }
            PWRITE | PWRITEV => {
                // SAFETY: it ends below, or later.
                let bytes = unsafe { self.bytes() };
                !opened.syncs_all()
                    && file.begin_write_at(&bytes, at, flags, move |done| call.end(done))
            }
            opcode => {
                file.begin_sync(opcode == FDSYNC, move |done| call.end(done.map(|()| 0)));
                true
            }
        };
        if !begun {
            let done = self.at_once(opened);
            self.end(done.map_err(|error| error.errno()));
        }
    }
}
