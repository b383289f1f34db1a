//! The FUSE wire format: requests, replies and notifications.
//!
//! Linux 6.18's protocol, 7.45, spoken down to 7.31.
//!
//! * [`abi`]: the structures, opcodes and flags, as the kernel lays them out.
//! * [`request`]: requests, parsed.
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

/// Rounds up to the alignment of records ([`abi::REC_ALIGN`]).
const fn rec_align(len: usize) -> usize {
    len.next_multiple_of(abi::REC_ALIGN)
}
