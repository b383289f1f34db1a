//! An XFS reader, checker, repair and mkfs.
//!
//! To begin with: [`Image`] opens an image, [`Builder`] makes one, [`check()`] and [`repair()`] do what their names say. There is
//! an example of each: `list`, `build`, `check`, `repair`.
//!
//! [`format`](mod@format) has the on-disk structures and the checks on each, [`geometry`] the sizes
//! and address conversions of one file system. [`Volume`] reads a file system through [`Blocks`]:
//! a plain image or device ([`blocks::FileBlocks`]) or a cache. A volume never writes, and nothing that it
//! reads is trusted: a damaged image gives errors that name the structure and what is wrong with it.
//! [`mod@check`] finds what is wrong with an image and [`mod@repair`] repairs it; [`mod@mkfs`] makes file
//! systems. Both build trees with [`bulk`]. [`fs::XfsFs`] serves a volume, [`tools`] are what the
//! command line does with one.

pub mod blocks;
pub mod bulk;
pub mod check;
pub mod error;
pub mod format;
pub mod geometry;
pub mod image;
mod log;
pub mod mkfs;
mod overlay;
mod read;
pub mod repair;
pub mod tools;
mod walk;

pub use blocks::Blocks;
pub use error::{Error, Result};
pub use geometry::Geometry;
pub use image::{Image, ImageError, ImageOptions, check, repair};
pub use log::LogState;
pub use mkfs::Builder;
pub use read::CachedBlocks;
pub use read::fs::{self, XfsFs};
pub use read::inode::{DataRun, Fork, Inode, Time};
pub use read::volume::{Space, Volume};
pub use walk::dir::DirEntry;
