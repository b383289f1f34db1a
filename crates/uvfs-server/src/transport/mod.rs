//! The ways that requests come by. Each has queues, and each queue is served by one thread.

use uvfs_proto::abi::{InHeader, Opcode};
use uvfs_proto::request::op_len;

use crate::fs::FileSystem;
use crate::session::Session;

pub mod attach;
mod closing;
pub mod dev;
mod lead;
mod pool;
mod shm;
pub mod uring;

/// How long the structure behind a header is; 0 of an opcode that is not known.
fn structure_len<F: FileSystem>(session: &Session<F>, header: &InHeader) -> usize {
    Opcode::try_from(header.opcode).map_or(0, |opcode| op_len(opcode, session.negotiated()))
}
