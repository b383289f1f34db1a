//! The structures of Linux AIO (io_submit(2)), as linux/aio_abi.h has them.

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
