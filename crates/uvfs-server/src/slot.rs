//! A request as a transport hands it over, and its answer.

use std::cell::RefCell;
use std::ops::{Deref, DerefMut};

use smallvec::SmallVec;
use uvfs_io::Payload;
use uvfs_proto::abi::{ForgetOne, InHeader, Opcode, URING_OP_IN_OUT_SZ};
use zerocopy::{Immutable, IntoBytes};

use crate::fs::Errno;

/// One request, with the memory that its data is in and that its answer's data goes to.
///
/// Header and structure are copies: whoever shares the memory can't change them any more. The
/// memory is owned until the answer is given.
pub struct Slot {
    /// The header.
    pub header: InHeader,
    /// The opcode's structure, and zeros.
    pub op: [u8; URING_OP_IN_OUT_SZ],
    /// Bytes of `op` that count.
    pub op_len: usize,
    /// What follows the structure: names, values, the data of a write.
    pub input: Payload,
    /// Room for the answer's data. May be the same memory as `input`.
    pub room: Payload,
    /// What the sender of an UNLINK forgets when that is answered.
    pub forgets: Option<ForgetOne>,
}

impl Slot {
    /// A request of the same sender and number with another structure, and without data.
    pub(crate) fn like(&self, opcode: Opcode, node: u64, structure: &[u8]) -> Self {
        let mut op = [0; URING_OP_IN_OUT_SZ];
        op[..structure.len()].copy_from_slice(structure);
        Self {
            header: InHeader {
                opcode: opcode as u32,
                nodeid: node,
                ..self.header
            },
            op,
            op_len: structure.len(),
            input: Payload::default(),
            room: Payload::default(),
            forgets: None,
        }
    }
}

/// Short bodies stay inline; the longest common one is that of CREATE, with what finds the file again.
pub type Body = SmallVec<[u8; 184]>;

thread_local! {
    /// Memory of listings that are over.
    static LISTINGS: RefCell<Vec<Vec<u8>>> = const { RefCell::new(Vec::new()) };
}

/// Memory that a listing lies in for a moment. It is kept for the next: of so much at a time the
/// allocator gives the pages back to the system, and gets new ones.
pub(crate) struct Scratch(Vec<u8>);

impl Scratch {
    /// So many bytes of anything.
    pub(crate) fn new(len: usize) -> Self {
        let mut bytes = LISTINGS.with_borrow_mut(Vec::pop).unwrap_or_default();
        bytes.resize(len, 0);
        Self(bytes)
    }

    /// The first bytes of `from`.
    pub(crate) fn copy_of(from: &Payload, len: usize) -> Self {
        let mut bytes = Self::new(len);
        from.copy_out(0, &mut bytes);
        bytes
    }
}

impl Deref for Scratch {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.0
    }
}

impl DerefMut for Scratch {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.0
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        const MOST: usize = 4;
        const LARGEST: usize = 128 << 10;
        let bytes = std::mem::take(&mut self.0);
        // As a thread ends there is nothing to keep it in.
        let _ = LISTINGS.try_with(|kept| {
            let mut kept = kept.borrow_mut();
            if kept.len() < MOST && bytes.capacity() <= LARGEST {
                kept.push(bytes);
            }
        });
    }
}

/// What is sent back.
#[derive(Debug)]
pub enum Answer {
    /// Nothing: the request has no answer.
    None,
    /// An error.
    Error(Errno),
    /// Success with this body.
    Body(Body),
    /// Success; the body is the first so many bytes of the slot's room.
    Room(usize),
}

impl Answer {
    /// Success without a body.
    pub(crate) fn empty() -> Self {
        Self::Body(Body::new())
    }

    /// Success with a structure.
    pub(crate) fn of<T: IntoBytes + Immutable>(value: &T) -> Self {
        Self::Body(Body::from_slice(value.as_bytes()))
    }
}

impl From<Errno> for Answer {
    fn from(errno: Errno) -> Self {
        Self::Error(errno)
    }
}
