//! What uvfs's own clients and servers say beyond FUSE, over shared memory. The kernel never sends
//! these; their numbers begin at 8192, far from FUSE's.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::abi::Attr;

/// Asks for a lease of the header's node: [`LeaseIn`], answered by [`LeaseOut`].
pub const LEASE: u32 = 8192;
/// Gives a lease back, or keeps less of it: [`LeaseReturnIn`], answered by nothing.
pub const LEASE_RETURN: u32 = 8193;
/// Finds the node of an identity: the payload is the identity, and behind it the path below the root by
/// which the client found the file, if it knows one; the header's node is the root's. Answered as
/// LOOKUP, and counts as one; ESTALE when what had the identity is gone, EOPNOTSUPP when the file
/// system has none. Answers to OPEN and CREATE of clients end with the file's identity: what finds the
/// same file again when the server was restarted. Those to IMPORT end with identity and path.
pub const FIND: u32 = 8195;
/// The longest identity and path together, in bytes.
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
