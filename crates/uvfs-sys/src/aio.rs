//! Linux AIO (io_submit(2)): its structures, as linux/aio_abi.h has them, and its calls, by their numbers.

use rustix::io::Errno;

use crate::checked;

/// `struct iocb`: one call.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct Iocb {
    /// Comes back with the event.
    pub data: u64,
    /// The kernel's.
    #[cfg(target_endian = "little")]
    pub key: u32,
    /// RWF_* flags.
    pub rw_flags: i32,
    /// The kernel's.
    #[cfg(target_endian = "big")]
    pub key: u32,
    /// One of this module's constants.
    pub opcode: u16,
    /// Priority of the request.
    pub priority: i16,
    /// The file.
    pub fd: u32,
    /// The address of the buffer, or of the vector.
    pub buf: u64,
    /// Bytes of the buffer, or elements of the vector.
    pub len: u64,
    /// Position in the file.
    pub offset: i64,
    /// Zero.
    pub reserved: u64,
    /// [`RESFD`].
    pub flags: u32,
    /// With [`RESFD`]: an eventfd that is told of the end.
    pub resfd: u32,
}

/// `struct io_event`: the end of a call.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct IoEvent {
    /// [`Iocb::data`].
    pub data: u64,
    /// The address of the [`Iocb`].
    pub obj: u64,
    /// Bytes, or an errno below zero.
    pub res: i64,
    /// Zero.
    pub res2: i64,
}

const _: () = assert!(size_of::<Iocb>() == 64 && size_of::<IoEvent>() == 32);

/// Reads into one buffer.
pub const PREAD: u16 = 0;
/// Writes from one buffer.
pub const PWRITE: u16 = 1;
/// fsync(2).
pub const FSYNC: u16 = 2;
/// fdatasync(2).
pub const FDSYNC: u16 = 3;
/// poll(2).
pub const POLL: u16 = 5;
/// Reads into a vector of buffers.
pub const PREADV: u16 = 7;
/// Writes from a vector of buffers.
pub const PWRITEV: u16 = 8;

/// [`Iocb::resfd`] holds an eventfd (IOCB_FLAG_RESFD).
pub const RESFD: u32 = 1;

/// A context of calls in flight. Dropping it waits for them.
#[derive(Debug)]
pub struct Context(libc::c_ulong);

impl Context {
    /// io_setup(2), for `depth` calls at a time.
    ///
    /// # Errors
    /// Those of io_setup(2).
    pub fn new(depth: usize) -> Result<Self, Errno> {
        let mut context: libc::c_ulong = 0;
        // SAFETY: the kernel writes one context to the pointer, which is valid and was zero.
        checked(unsafe {
            libc::syscall(libc::SYS_io_setup, depth as libc::c_ulong, &mut context)
        })?;
        Ok(Self(context))
    }

    /// io_submit(2): how many calls were started, of which the kernel has copied the blocks.
    ///
    /// # Errors
    /// Those of io_submit(2).
    ///
    /// # Safety
    /// The memory that the blocks lead to stays until the event of their call, or until the context is dropped.
    pub unsafe fn submit(&self, calls: &[&Iocb]) -> Result<usize, Errno> {
        // SAFETY: references are pointers to control blocks; the caller sees to the rest.
        checked(unsafe {
            libc::syscall(
                libc::SYS_io_submit,
                self.0,
                calls.len() as libc::c_long,
                calls.as_ptr(),
            )
        })
    }

    /// io_getevents(2): how many events came, at least so many.
    ///
    /// # Errors
    /// Those of io_getevents(2).
    pub fn events(&self, least: usize, events: &mut [IoEvent]) -> Result<usize, Errno> {
        // SAFETY: `events` has room for the number of events that is asked.
        checked(unsafe {
            libc::syscall(
                libc::SYS_io_getevents,
                self.0,
                least as libc::c_long,
                events.len() as libc::c_long,
                events.as_mut_ptr(),
                std::ptr::null_mut::<libc::timespec>(),
            )
        })
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: the context is this value's own. The kernel returns when nothing is in flight any more.
        unsafe { libc::syscall(libc::SYS_io_destroy, self.0) };
    }
}
