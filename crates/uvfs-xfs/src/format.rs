//! The on-disk structures of XFS as typed big-endian layouts, and the checks that a block must
//! pass before its contents mean anything.
//!
//! Names, sizes and values follow "XFS Algorithms & Data Structures" (the on-disk format
//! documentation that xfsprogs ships) and the kernel's `fs/xfs/libxfs/xfs_format.h`,
//! `xfs_da_format.h` and `xfs_log_format.h`; field names drop their structure's prefix (`sb_`,
//! `agf_`, `di_`). Every layout has alignment one, so a reference to it can be taken at any byte
//! of a block.
//!
//! Version 4 file systems have no checksums; version 5 ones put a CRC32c, the file system's uuid,
//! the block's own address and its owner in every metadata block. The `check_*` functions here
//! compare all of these against an [`Ident`].

use std::fmt;
use zerocopy::byteorder::{big_endian as be, little_endian as le};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Big-endian 16-bit integer.
pub type Be16 = be::U16;
/// Big-endian 32-bit integer.
pub type Be32 = be::U32;
/// Big-endian 64-bit integer.
pub type Be64 = be::U64;
/// Little-endian 16-bit integer, of a log item.
pub type Le16 = le::U16;
/// Little-endian 32-bit integer; checksums are stored this way.
pub type Le32 = le::U32;
/// Little-endian 64-bit integer, of a log item.
pub type Le64 = le::U64;
/// A file system identifier.
pub type Uuid = [u8; 16];

/// A layout that can be looked at in place in any byte buffer.
pub trait Layout: Sized + FromBytes + IntoBytes + Immutable + KnownLayout + Unaligned {
    /// Size in bytes.
    const SIZE: usize = size_of::<Self>();

    /// The structure at byte `offset` of `bytes`, or [`Fault::Short`] if it does not fit.
    fn at(bytes: &[u8], offset: usize) -> Result<&Self, Fault> {
        let short = Fault::short(bytes, offset, Self::SIZE);
        let found = bytes.get(offset..).map(Self::ref_from_prefix);
        found.and_then(Result::ok).map(|(v, _)| v).ok_or(short)
    }

    /// As [`Layout::at`], to change it where it is.
    fn at_mut(bytes: &mut [u8], offset: usize) -> Result<&mut Self, Fault> {
        let short = Fault::short(bytes, offset, Self::SIZE);
        let found = bytes.get_mut(offset..).map(Self::mut_from_prefix);
        found.and_then(Result::ok).map(|(v, _)| v).ok_or(short)
    }

    /// `count` consecutive structures from byte `offset` of `bytes`, or [`Fault::Short`].
    fn slice_at(bytes: &[u8], offset: usize, count: usize) -> Result<&[Self], Fault> {
        let short = Fault::short(bytes, offset, count.saturating_mul(Self::SIZE));
        let found = |b| <[Self]>::ref_from_prefix_with_elems(b, count).ok();
        let found = bytes.get(offset..).and_then(found);
        found.map(|(v, _)| v).ok_or(short)
    }

    /// Writes the structure at byte `offset` of `bytes`: the inverse of [`Layout::at`].
    ///
    /// # Panics
    /// If it does not fit.
    fn put(&self, bytes: &mut [u8], offset: usize) {
        bytes[offset..offset + Self::SIZE].copy_from_slice(self.as_bytes());
    }
}
impl<T: Sized + FromBytes + IntoBytes + Immutable + KnownLayout + Unaligned> Layout for T {}

/// A field of a layout.
#[derive(Debug, Clone, Copy)]
pub struct FieldAt {
    /// Its name.
    pub name: &'static str,
    /// Its first byte in the layout.
    pub at: usize,
    /// Bytes.
    pub len: usize,
}

macro_rules! layout {
    ($($(#[$meta:meta])* pub struct $name:ident: $size:literal {
        $($(#[$fmeta:meta])* pub $field:ident: $ty:ty,)*
    })*) => {$(
        $(#[$meta])*
        #[derive(Debug, Clone, Copy)]
        #[derive(zerocopy::FromBytes, zerocopy::IntoBytes, zerocopy::Immutable)]
        #[derive(zerocopy::KnownLayout, zerocopy::Unaligned)]
        #[repr(C)]
        pub struct $name { $($(#[$fmeta])* pub $field: $ty,)* }
        const _: () = assert!(size_of::<$name>() == $size);

        impl $name {
            /// Its fields.
            pub const FIELDS: &'static [$crate::format::FieldAt] = &[$($crate::format::FieldAt {
                name: stringify!($field),
                at: core::mem::offset_of!($name, $field),
                len: size_of::<$ty>(),
            }),*];
        }
    )*};
}

/// The defect of a structure: the first check that it failed.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Fault {
    /// The buffer ends before the structure does.
    Short {
        /// Bytes needed.
        need: usize,
        /// Bytes there are.
        have: usize,
    },
    /// The magic number is another.
    Magic {
        /// The number this kind of block starts with.
        expected: u32,
        /// The number found.
        found: u32,
    },
    /// The checksum does not match the contents.
    Crc {
        /// The checksum computed from the contents.
        expected: u32,
        /// The checksum stored.
        found: u32,
    },
    /// The block belongs to another file system (or an earlier one on the same device).
    Uuid {
        /// The file system's metadata uuid.
        expected: Uuid,
        /// The uuid in the block.
        found: Uuid,
    },
    /// The block belongs to another inode or allocation group.
    Owner {
        /// Inode or allocation group that led to the block.
        expected: u64,
        /// The owner in the block.
        found: u64,
    },
    /// The block was written for another address.
    BlockNumber {
        /// Where the block was read (512-byte sectors).
        expected: u64,
        /// The address in the block.
        found: u64,
    },
    /// Any other field out of its range or at odds with others.
    Field {
        /// The field.
        name: &'static str,
        /// The values that the format allows.
        expected: &'static str,
        /// The value found.
        found: u64,
    },
}

impl Fault {
    /// That `bytes` end before a structure of `len` bytes at byte `offset` does.
    fn short(bytes: &[u8], offset: usize, len: usize) -> Fault {
        let (need, have) = (offset.saturating_add(len), bytes.len());
        Fault::Short { need, have }
    }

    /// A [`Fault::Field`].
    pub fn field(name: &'static str, expected: &'static str, found: impl Into<u64>) -> Fault {
        Fault::Field {
            name,
            expected,
            found: found.into(),
        }
    }

    /// The defect in words, the value that would be right, and the one that is there.
    pub fn text(&self) -> (&'static str, String, String) {
        let hex = |v: &u32| format!("{v:#x}");
        let sum = |v: &u32| format!("{v:#010x}");
        match self {
            Fault::Short { need, have } => {
                let most = format!("at most {have} bytes");
                ("it does not fit", most, need.to_string())
            }
            Fault::Magic { expected, found } => ("magic number", hex(expected), hex(found)),
            Fault::Crc { expected, found } => ("checksum", sum(expected), sum(found)),
            Fault::Uuid { expected, found } => ("uuid", format_uuid(expected), format_uuid(found)),
            Fault::Owner { expected, found } => ("owner", expected.to_string(), found.to_string()),
            Fault::BlockNumber { expected, found } => {
                ("own block number", expected.to_string(), found.to_string())
            }
            Fault::Field {
                name,
                expected,
                found,
            } => (name, expected.to_string(), found.to_string()),
        }
    }
}

/// A uuid the way people write it.
pub fn format_uuid(u: &Uuid) -> String {
    let dash = |i| if matches!(i, 4 | 6 | 8 | 10) { "-" } else { "" };
    let byte = |(i, b)| format!("{}{b:02x}", dash(i));
    u.iter().enumerate().map(byte).collect()
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (text, expected, found) = self.text();
        write!(f, "{text}: expected {expected}, found {found}")
    }
}

impl std::error::Error for Fault {}

mod ag;
mod attr;
mod btree;
mod dir;
mod inode;
mod log;
mod quota;
mod superblock;
mod verify;

pub use ag::*;
pub use attr::*;
pub use btree::*;
pub use dir::*;
pub use inode::*;
pub use log::*;
pub use quota::*;
pub use superblock::*;
pub use verify::*;

#[cfg(test)]
mod tests;
