//! Reads a file system, and serves it.

pub(crate) mod attr;
mod cached;
mod da;
pub(crate) mod dir;
pub mod fs;
pub(crate) mod inode;
pub(crate) mod verifier;
pub(crate) mod volume;
pub(crate) mod wait;

pub use cached::CachedBlocks;
