//! The FUSE wire format: requests, replies and notifications.
//!
//! Linux 6.18's protocol, 7.45, spoken down to 7.31.
//!
//! * [`abi`]: the structures, opcodes and flags, as the kernel lays them out.
//! * [`request`]: requests, parsed and encoded.
//! * [`ext`]: uvfs's own additions, between its clients and servers.
//! * [`reply`]: what replies are made of beyond plain structures.
//! * [`notify`]: what a server tells without being asked.
//! * [`import`]: what is ours: tokens for open files.
//!
//! A message has two forms. Over `/dev/fuse` it is contiguous: header, structure, payload. Over
//! io_uring and shared memory it is split: header and structure lie in areas of fixed size, the
//! payload in a buffer of its own. Parsers take the split form; [`request::split`] cuts a
//! contiguous message into it.
//!
//! No input makes a parser panic or allocate.

pub mod abi;
pub mod ext;
pub mod import;
pub mod notify;
pub mod reply;
pub mod request;

/// Why a message cannot be written as bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EncodeError {
    /// A length does not fit its field on the wire.
    #[error("{0} is too long for its length field")]
    TooLong(&'static str),
    /// The structure's size or count is not that of what follows it.
    #[error("the request says {said} bytes follow, but {given} are given")]
    Size {
        /// Bytes that the structure announces.
        said: u64,
        /// Bytes given.
        given: u64,
    },
    /// The raw security contexts are not what their header says.
    #[error("malformed security contexts")]
    SecurityContexts,
    /// Extensions before 7.38.
    #[error("protocol 7.{0} has no request extensions; they need 7.38")]
    Extensions(u32),
}

/// Rounds up to the alignment of records ([`abi::REC_ALIGN`]).
const fn rec_align(len: usize) -> usize {
    len.next_multiple_of(abi::REC_ALIGN)
}
