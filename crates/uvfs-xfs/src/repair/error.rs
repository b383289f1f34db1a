//! Why a repair failed.

use crate::error::Error;
use std::io;

/// Why a repair could not be done or finished.
#[derive(Debug, thiserror::Error)]
pub enum RepairError {
    /// It could not begin.
    #[error("{0}")]
    Check(Error),
    /// The bound on memory is too small for what has to be repaired; this would do. Nothing was done.
    #[error("to repair what was found at least {}M are needed; nothing was written", .0.div_ceil(1 << 20))]
    Memory(u64),
    /// The image could not be written to. A later repair goes on from there.
    #[error(
        "writing: {0}; the file system is half repaired and marked as needing repair: repair it again"
    )]
    Write(io::Error),
}

impl From<Error> for RepairError {
    fn from(e: Error) -> RepairError {
        RepairError::Check(e)
    }
}
