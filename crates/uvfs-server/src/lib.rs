//! Serving a file system: the FileSystem trait, sessions and transports.

pub mod fs;

pub use fs::{Errno, FileSystem};
