//! An XFS reader and checker.
//!
//! [`format`](mod@format) has the on-disk structures and the checks on each, [`geometry`] the sizes
//! and address conversions of one file system.

pub mod error;
pub mod format;
pub mod geometry;

pub use error::{Error, Result};
pub use geometry::Geometry;
