//! The metadata buffer cache: what a file system's own code uses instead of reading blocks.
//!
//! A [`Target`] is a device with its engine, an index per allocation group (each with a lock of
//! its own), an arena of bounded size and a list of buffers in order of age. A [`Buffer`] is a
//! counted reference to the content of one or several [`Extent`]s:
//!
//! * [`Target::read`] finds or reads it, and has a [`Verifier`] look at the content before
//!   any caller does. [`Target::readahead`] does not wait.
//! * [`Buffer::read`] and [`Buffer::write`] lock the content; [`Buffer::pin`] keeps it readable
//!   through an owned handle.
//! * [`WriteQueue`] collects changed buffers and writes them sorted and merged.
//! * [`Target::read_many_uncached`] submits all its I/O before it waits for any, and leaves no trace in the index.
//!
//! A buffer in use stays; of the others, those whose type is more often needed
//! ([`Verifier::references`]) survive more looks of reclaim. Memory never exceeds
//! [`Config::limit`]: the cache evicts, then waits for I/O and for holders, and only then fails
//! with [`BufError::NoMemory`]. Under memory pressure ([`uvfs_mem::Monitor`]) it gives memory
//! back through [`Target::shrinker`].
//!
//! A thread that waits for I/O collects completions itself, for all threads; the others wait for
//! it. There is no thread of the cache's own.
//!
//! **Locks.** `lru`, then one group of the index, then a buffer's state; the engine's own locks
//! come last. A content lock is taken with none of them held. A thread must not write out a
//! buffer while it holds a guard of that buffer's content.

mod buffer;
mod config;
mod error;
mod index;
mod inner;
mod queue;
mod shared;
mod target;

pub use buffer::{Buffer, Pinned, ReadGuard, WriteGuard};
pub use config::{Config, Prefetch};
pub use error::{BufError, Corrupt};
pub use queue::WriteQueue;
pub use shared::Stats;
pub use target::Target;

/// The unit of disk addresses and of the lengths of extents, in bytes, whatever the device's
/// own block size.
pub const SECTOR: u64 = 512;

/// The longest buffer, in sectors (4 MiB).
pub const MAX_SECTORS: u64 = (4 << 20) / SECTOR;

/// The most extents of one buffer.
pub const MAX_EXTENTS: usize = 256;

/// A range of the device in sectors of 512 bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Extent {
    /// The disk address of the first sector.
    pub daddr: u64,
    /// The number of sectors.
    pub len: u32,
}

/// Judges the content of a kind of buffer, after it was read and before it is written, and
/// completes it before it is written.
pub trait Verifier: Sync {
    /// The verifier's name, for messages; two verifiers of the same name are taken to be the same.
    fn name(&self) -> &'static str;

    /// Whether these bytes, of the buffer at `daddr`, are what they should be. Called once for a
    /// buffer (now and then more often, when several threads read it at the same time).
    ///
    /// # Errors
    /// The defect of the bytes.
    fn verify(&self, daddr: u64, bytes: &[u8]) -> Result<(), Corrupt>;

    /// Completes the content of the buffer at `daddr` before it is written: puts in what follows
    /// from the rest, a checksum for one. [`Verifier::verify`] judges what this leaves.
    fn seal(&self, daddr: u64, bytes: &mut [u8]) {
        let _ = (daddr, bytes);
    }

    /// How many looks of reclaim a buffer of this kind survives after its last use: more for
    /// what is needed again and again, such as the roots of trees and group headers.
    fn references(&self) -> u8 {
        1
    }
}

/// Takes any content.
pub struct Anything;

impl Verifier for Anything {
    fn name(&self) -> &'static str {
        "anything"
    }

    fn verify(&self, _daddr: u64, _bytes: &[u8]) -> Result<(), Corrupt> {
        Ok(())
    }
}
