//! A sink of repairs for tests.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use uvfs_xfs::repair::Sink;

/// Writes to a file, without making it durable.
pub struct FileSink(File);

impl FileSink {
    /// Writes to the file `path`.
    pub fn open(path: &Path) -> FileSink {
        FileSink(File::options().write(true).open(path).unwrap())
    }
}

impl Sink for FileSink {
    fn write(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        self.0.write_all_at(bytes, offset)
    }

    fn flush(&self) -> io::Result<()> {
        Ok(())
    }
}
