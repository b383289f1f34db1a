//! Bulk loading: whole trees of blocks built at once from all that they are to hold.
//!
//! [`btree`] builds the B-trees of an allocation group and of a fork from sorted records, [`group`] a
//! group's headers with its trees, [`dir`] a directory from its entries, [`attr`] an inode's attributes from names and values. Each works in
//! two steps. The first tells how many blocks there will be, so that the caller can allocate them
//! where it likes; the second fills them, given their addresses. No block is read or written here.
//!
//! The blocks are version 5 ones ("XFS Algorithms & Data Structures", chapters on B-trees,
//! directories and extended attributes), complete but for their checksums, which
//! [`crate::format::store_crc`] or a buffer's verifier puts in.

pub mod attr;
pub mod btree;
pub mod dir;
pub mod group;
pub(crate) mod space;

/// Takes a block that was built: which block of the fork it is, and its bytes without the checksum.
pub type Put<'a, E> = dyn FnMut(u64, &[u8]) -> Result<(), E> + 'a;
