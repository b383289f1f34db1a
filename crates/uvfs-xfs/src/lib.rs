//! An XFS reader, checker, repair and mkfs.
//!
//! [`format`](mod@format) has the on-disk structures and the checks on each, [`geometry`] the sizes
//! and address conversions of one file system. [`Volume`] reads a file system through [`Blocks`]:
//! a plain image or device ([`blocks::FileBlocks`]) or a cache. A volume never writes, and nothing that it
//! reads is trusted: a damaged image gives errors that name the structure and what is wrong with it.
//! [`check`] finds what is wrong with an image and [`repair`] mends it; [`mod@mkfs`] makes file
//! systems. Both build trees with [`bulk`]. [`fs::XfsFs`] serves a volume, [`tools`] are what the
//! command line does with one.

mod attr;
pub mod blocks;
pub mod bulk;
mod cached;
pub mod check;
mod dir;
pub mod error;
pub mod format;
pub mod fs;
pub mod geometry;
mod inode;
mod log;
pub mod mkfs;
mod overlay;
pub mod repair;
pub mod tools;
mod verifier;
mod volume;
mod wait;
mod walk;

pub use blocks::Blocks;
pub use cached::CachedBlocks;
pub use dir::DirEntry;
pub use error::{Error, Result};
pub use fs::XfsFs;
pub use geometry::Geometry;
pub use inode::{DataRun, Fork, Inode, Time};
pub use log::LogState;
pub use volume::{Space, Volume};
