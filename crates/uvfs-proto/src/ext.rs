//! Requests of uvfs's own clients beyond FUSE, over shared memory. The kernel never sends
//! these; their numbers begin at 8192, far from FUSE's.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::abi::{Attr, wire};
use crate::import::{IMPORT, ImportIn};
use crate::request::{Problem, arg};

/// Asks for a lease of the header's node, whose data and size may be cached under it, but no names and no
/// other attributes: [`LeaseIn`], answered by [`LeaseOut`].
pub const LEASE: u32 = 8192;
/// Gives a lease back, or keeps less of it: [`LeaseReturnIn`], answered by nothing.
pub const LEASE_RETURN: u32 = 8193;
/// Finds the node of an identity: the payload is the identity, and behind it the path below the root by
/// which the client found the file, if it knows one; the header's node is the root's. Answered as
/// LOOKUP, and counts as one; ESTALE when what had the identity is gone, EOPNOTSUPP when the file
/// system has none. Answers to OPEN and CREATE of clients end with the file's identity: what finds the
/// same file again when the server was restarted. Answers to IMPORT end with identity and path.
pub const FIND: u32 = 8195;
/// The longest identity and path together, in bytes.
pub const IDENTITY_MAX: usize = 2048;
/// The code of a notification that recalls a lease: [`NotifyRecallOut`] after the header.
pub const NOTIFY_RECALL: i32 = 8192;

/// No lease: nothing may be cached.
pub const LEASE_NONE: u32 = 0;
/// Pages, size and times may be cached for reading; several clients may hold it.
pub const LEASE_READ: u32 = 1;
/// Writes may be cached too; one client may hold it, and no other cache then has anything.
pub const LEASE_WRITE: u32 = 2;

wire! {
    /// A request for a lease.
    LeaseIn, 8 {
        /// [`LEASE_READ`] or [`LEASE_WRITE`].
        mode: u32,
        /// Zero.
        padding: u32,
    }

    /// The answer to a request for a lease.
    LeaseOut, 104 {
        /// The mode that was granted; [`LEASE_NONE`] when it was refused.
        granted: u32,
        /// When refused: milliseconds after which it is worth asking again.
        retry_ms: u32,
        /// The lease's number; later ones are larger. Recalls and returns name it. When refused: 1 if
        /// there is no waiting for it, as the kernel of the mount reads and writes the file without asking
        /// for as long as a program has it open.
        seq: u64,
        /// The attributes at the time of the grant.
        attr: Attr,
    }

    /// Gives a lease back.
    LeaseReturnIn, 16 {
        /// The lease's number.
        seq: u64,
        /// The lease that the client keeps: [`LEASE_NONE`], or [`LEASE_READ`] of a write lease.
        keep: u32,
        /// Zero.
        padding: u32,
    }

    /// Recalls a lease: write what is dirty, then return it.
    NotifyRecallOut, 24 {
        /// The node.
        node: u64,
        /// The lease's number.
        seq: u64,
        /// The most that may be kept.
        keep: u32,
        /// Zero.
        padding: u32,
    }
}

/// A client's request beyond FUSE, as [`crate::request::Operation`] has those of FUSE.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "the opcode of the same name has a description")]
pub enum ExtOperation<'a> {
    Import(ImportIn),
    Lease(LeaseIn),
    LeaseReturn(LeaseReturnIn),
    Find(&'a [u8]),
}

impl<'a> ExtOperation<'a> {
    /// Parses the structure and the payload of an opcode; nothing for one that is not of these.
    pub fn parse(opcode: u32, op: &[u8], bytes: &'a [u8]) -> Option<Result<Self, Problem>> {
        let parsed = match opcode {
            IMPORT => arg(op).map(Self::Import),
            LEASE => arg(op).map(Self::Lease),
            LEASE_RETURN => arg(op).map(Self::LeaseReturn),
            FIND => Ok(Self::Find(bytes)),
            _ => return None,
        };
        Some(parsed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A malformed request of a client is refused.
    #[test]
    fn requests_are_parsed_or_refused_whatever_they_say() {
        let parse = |opcode, op: &[u8], payload| ExtOperation::parse(opcode, op, payload);
        let lease = LeaseIn {
            mode: LEASE_READ,
            padding: 0,
        };
        let parsed = Some(Ok(ExtOperation::Lease(lease)));
        assert_eq!(parse(LEASE, lease.as_bytes(), b""), parsed);
        assert_eq!(
            parse(FIND, &[], b"identity"),
            Some(Ok(ExtOperation::Find(b"identity")))
        );
        for opcode in [LEASE, LEASE_RETURN, IMPORT] {
            assert!(matches!(parse(opcode, &[0; 4], b""), Some(Err(_))));
        }
        for opcode in [0, crate::abi::Opcode::Read as u32, 8200, u32::MAX] {
            assert_eq!(parse(opcode, &[0; 128], b"f\0"), None);
        }
    }
}
