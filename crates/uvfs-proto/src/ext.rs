//! What uvfs's own clients and servers say beyond FUSE, over shared memory. The kernel never sends
//! these; their numbers begin at 8192, far from FUSE's.

use std::fmt::Write as _;

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::abi::{Attr, EntryOut, OpenOut};

/// Asks for a lease of the header's node: [`LeaseIn`], answered by [`LeaseOut`].
pub const LEASE: u32 = 8192;
/// Gives a lease back, or keeps less of it: [`LeaseReturnIn`], answered by nothing.
pub const LEASE_RETURN: u32 = 8193;
/// Finds the node of an identity: the bytes are the payload, and the header's node is the root's.
/// Answered as LOOKUP, and counts as one; ESTALE when what had the identity is gone, EOPNOTSUPP when
/// the file system has none. Answers to OPEN and CREATE of clients end with the file's identity, of
/// at most [`IDENTITY_MAX`] bytes: what finds the same file again when the server was restarted.
pub const FIND: u32 = 8195;
/// The longest identity in bytes.
pub const IDENTITY_MAX: usize = 2048;
/// The code of a notification that recalls a lease: [`NotifyRecallOut`] after the header.
pub const NOTIFY_RECALL: i32 = 8192;

/// No lease: nothing may be cached.
pub const LEASE_NONE: u32 = 0;
/// Pages, size and times may be cached for reading; several clients may hold it.
pub const LEASE_READ: u32 = 1;
/// Writes may be cached too; one client may hold it, and nobody else then caches anything.
pub const LEASE_WRITE: u32 = 2;

/// A request for a lease.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(C)]
pub struct LeaseIn {
    /// [`LEASE_READ`] or [`LEASE_WRITE`].
    pub mode: u32,
    /// Zero.
    pub padding: u32,
}

/// What became of a request for a lease.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(C)]
pub struct LeaseOut {
    /// The mode that was granted; [`LEASE_NONE`] when it was refused.
    pub granted: u32,
    /// When refused: milliseconds after which it is worth asking again.
    pub retry_ms: u32,
    /// The lease's number; later ones are larger. Recalls and returns name it.
    pub seq: u64,
    /// The attributes at the time of the grant.
    pub attr: Attr,
}

/// Gives a lease back.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(C)]
pub struct LeaseReturnIn {
    /// The lease's number.
    pub seq: u64,
    /// What is kept: [`LEASE_NONE`], or [`LEASE_READ`] of a write lease.
    pub keep: u32,
    /// Zero.
    pub padding: u32,
}

/// Recalls a lease: write what is dirty, then return it.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(C)]
pub struct NotifyRecallOut {
    /// The node.
    pub node: u64,
    /// The lease's number.
    pub seq: u64,
    /// The most that may be kept.
    pub keep: u32,
    /// Zero.
    pub padding: u32,
}

/// One step on a path: [`AtIn`], then the names of the path, each with its 0 byte. The server walks
/// from the header's node through all but the last name, and does with that what [`AtIn::what`]
/// says. ELOOP, ESTALE and EOPNOTSUPP say that the path is not this simple: a symbolic link on the
/// way, something that is no regular file to be opened. The kernel then has to be asked.
pub const AT: u32 = 8200;
/// A token for an open file of the client's own, to reach it through the mount: the header's node,
/// [`TokenIn`], answered by its 32 bytes. For ten seconds, and once, the mount's root has an entry
/// of the name [`token_name`] that is this file.
pub const TOKEN: u32 = 8201;
/// Closes a file that [`AT_OPEN`] opened: [`CloseIn`]; its handle, its lookup and its lease go.
pub const CLOSE: u32 = 8202;

/// Looks at the end of the path; the node itself without names. Answered by
/// [`EntryOut`](crate::abi::EntryOut).
pub const AT_STAT: u32 = 1;
/// Opens a regular file; `flags` are those of open(2), without O_TRUNC. Answered by [`AtOpenOut`] and contents.
pub const AT_OPEN: u32 = 2;
/// The target of a symbolic link.
pub const AT_READLINK: u32 = 3;
/// Makes a directory.
pub const AT_MKDIR: u32 = 4;
/// Removes a name that is no directory.
pub const AT_UNLINK: u32 = 5;
/// Removes a directory.
pub const AT_RMDIR: u32 = 6;
/// Renames to the path that follows, from [`AtIn::to`]; `flags` are those of renameat2(2).
pub const AT_RENAME: u32 = 7;
/// Makes the path that follows, from [`AtIn::to`], another name of the first.
pub const AT_LINK: u32 = 8;
/// Makes a symbolic link; its target is the name that follows.
pub const AT_SYMLINK: u32 = 9;
/// Opens a directory, the node itself without names. Answered by [`AtOpenOut`].
pub const AT_OPENDIR: u32 = 10;

/// With [`AT_STAT`]: a symbolic link at the end is not what is meant.
pub const AT_FOLLOW: u32 = 1;
/// With [`AT_STAT`]: the client keeps the lookup.
pub const AT_KEEP: u32 = 2;

/// A step on a path.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(C)]
pub struct AtIn {
    /// One of `AT_*`.
    pub what: u32,
    /// As the step has them.
    pub flags: u32,
    /// Permissions of what is made.
    pub mode: u32,
    /// The caller's umask.
    pub umask: u32,
    /// Names of the path.
    pub names: u32,
    /// Names of the second path.
    pub more: u32,
    /// The node that the second path starts from.
    pub to: u64,
}

/// A file that was opened. What the file holds follows, if it is short and `granted` says so.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct AtOpenOut {
    /// The file, and a lookup of it.
    pub entry: EntryOut,
    /// The handle.
    pub open: OpenOut,
    /// [`LEASE_READ`] when the contents follow, all of them, and hold for as long as this lease;
    /// else [`LEASE_NONE`].
    pub granted: u32,
    /// Zero.
    pub padding: u32,
    /// The lease's number.
    pub seq: u64,
}

/// An open file of the client's own.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(C)]
pub struct TokenIn {
    /// Its handle.
    pub fh: u64,
}

/// What is given back with a file.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(C)]
pub struct CloseIn {
    /// Its handle.
    pub fh: u64,
    /// The number of the lease that came with it; 0 for none.
    pub seq: u64,
}

const TOKEN_NAME: &[u8] = b".uvfs-open-";

/// The name by which a token's file is found in the mount's root.
pub fn token_name(token: &[u8; 32]) -> String {
    let mut name = String::from_utf8_lossy(TOKEN_NAME).into_owned();
    for byte in token {
        let _ = write!(name, "{byte:02x}");
    }
    name
}

/// The token that a name stands for.
pub fn token_of_name(name: &[u8]) -> Option<[u8; 32]> {
    let digits = name.strip_prefix(TOKEN_NAME).filter(|d| d.len() == 64)?;
    let digit = |byte: u8| match byte {
        b'0'..=b'9' => Some(byte - b'0'),
        b'a'..=b'f' => Some(byte - b'a' + 10),
        _ => None,
    };
    let mut token = [0; 32];
    for (byte, pair) in token.iter_mut().zip(digits.chunks_exact(2)) {
        *byte = digit(pair[0])? << 4 | digit(pair[1])?;
    }
    Some(token)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_has_a_name_and_no_other_name_a_token() {
        let token = std::array::from_fn(|at| (at as u8).wrapping_mul(9));
        let name = token_name(&token);
        assert_eq!(token_of_name(name.as_bytes()), Some(token));
        let bad = name.replace('9', "g");
        for other in ["", ".uvfs-open-", &name[..74], &bad, &(name.clone() + "0")] {
            assert_eq!(token_of_name(other.as_bytes()), None, "{other}");
        }
        assert_eq!(size_of::<AtIn>(), 32);
        assert_eq!(size_of::<AtOpenOut>(), 128 + 16 + 16);
    }
}
