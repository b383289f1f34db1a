//! Why a repair failed.

use crate::error::Error;
use std::io;

/// Why a repair could not be done or finished.
#[derive(Debug)]
pub enum RepairError {
    /// It could not begin.
    Check(Error),
    /// The bound on memory is too small for what has to be repaired; this would do. Nothing was done.
    Memory(u64),
    /// The image could not be written to. A later repair goes on from there.
    Write(io::Error),
}

impl std::fmt::Display for RepairError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            RepairError::Check(e) => e.fmt(f),
            RepairError::Memory(least) => write!(
                f,
                "to repair what was found at least {}M are needed; nothing was written",
                least.div_ceil(1 << 20)
            ),
            RepairError::Write(e) => write!(
                f,
                "writing: {e}; the file system is half repaired and marked as needing repair: repair it again"
            ),
        }
    }
}

impl std::error::Error for RepairError {}

impl From<Error> for RepairError {
    fn from(e: Error) -> RepairError {
        RepairError::Check(e)
    }
}
