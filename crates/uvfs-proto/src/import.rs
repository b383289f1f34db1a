//! How a process proves to a server of ours which open file it means: an ioctl on a descriptor of
//! the mount gives a token, which a session over shared memory changes for a handle of its own.
//!
//! Not FUSE's; opcodes from 8192 on are ours.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::abi::{Attr, wire};

/// The opcode, in a session over shared memory: [`ImportIn`] asks, [`ImportOut`] answers.
pub const IMPORT: u32 = 8194;
/// The current [`TokenOut::version`]. Another layout gets another number.
pub const VERSION: u32 = 1;
/// The longest path of a socket (`sun_path` of unix(7), with its ending 0).
pub const PATH_MAX: usize = 108;

/// The ioctl, as `_IOR('u', 0x71, TokenOut)` of `asm-generic/ioctl.h`: the kernel passes on what
/// says its own size and direction.
pub const TOKEN_IOCTL: u32 =
    2 << 30 | (size_of::<TokenOut>() as u32) << 16 | (b'u' as u32) << 8 | 0x71;

/// The answer of the ioctl.
#[repr(C)]
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
pub struct TokenOut {
    /// [`VERSION`].
    pub version: u32,
    /// Bytes of `path` that count.
    pub path_len: u32,
    /// Random; good for one IMPORT within a few seconds.
    pub token: [u8; 32],
    /// The socket that clients attach to.
    pub path: [u8; PATH_MAX],
    /// Zero.
    pub padding: u32,
}

wire! {
    /// The argument of IMPORT.
    ImportIn, 32 {
        /// The token that the ioctl gave.
        token: [u8; 32],
    }

    /// The answer to IMPORT: a lookup of the node and an open file, both to be taken back.
    ImportOut, 112 {
        /// The node.
        nodeid: u64,
        /// The client's own handle.
        fh: u64,
        /// open(2)'s flags that the file was opened with.
        flags: u32,
        /// Zero.
        padding: u32,
        /// The node's attributes.
        attr: Attr,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The kernel passes the ioctl on by which a client imports an open file.
    #[test]
    fn the_kernel_passes_the_ioctl_on() {
        // _IOC_READ, a size of less than 14 bits, and no structure that a compiler pads.
        assert_eq!(TOKEN_IOCTL >> 30, 2);
        assert_eq!((TOKEN_IOCTL >> 16 & 0x3fff) as usize, size_of::<TokenOut>());
        assert_eq!(size_of::<TokenOut>(), 152);
    }
}
