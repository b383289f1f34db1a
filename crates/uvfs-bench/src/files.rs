//! The files that the benchmarks read and write, and the memory for direct I/O on them.

use std::fs::{File, OpenOptions};
use std::io::{self, BufWriter, Write};
use std::ops::Range;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

/// The size of a small request and of a small file, in bytes.
pub const BLOCK: usize = 4096;

/// Memory that direct I/O may use.
#[derive(Clone, Copy)]
#[repr(align(4096))]
pub struct Page(pub [u8; BLOCK]);

impl Default for Page {
    fn default() -> Self {
        Self([0; BLOCK])
    }
}

impl Page {
    /// Their bytes.
    pub fn bytes_mut(pages: &mut [Self]) -> &mut [u8] {
        let len = size_of_val(pages);
        // SAFETY: pages are arrays of bytes one after another, and the slice borrows them.
        unsafe { std::slice::from_raw_parts_mut(pages.as_mut_ptr().cast(), len) }
    }
}

/// The name of small file number `number`.
pub fn file_name(number: u64) -> String {
    format!("f{number:07}")
}

/// Makes a file of blocks that begin with these numbers.
pub fn write_blocks(path: &Path, numbers: Range<u64>) -> io::Result<()> {
    let mut file = BufWriter::with_capacity(1 << 20, File::create(path)?);
    let mut block = [0x5a; BLOCK];
    for number in numbers {
        block[..8].copy_from_slice(&number.to_le_bytes());
        file.write_all(&block)?;
    }
    file.flush()
}

/// Opens a file for direct reads, and gives the number of its blocks.
pub fn open_direct(path: &Path) -> io::Result<(File, u64)> {
    let file = OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_DIRECT)
        .open(path)?;
    let blocks = file.metadata()?.len() / BLOCK as u64;
    if blocks == 0 {
        return Err(io::Error::other("the file is empty"));
    }
    Ok((file, blocks))
}

/// A fast server that returns other bytes has measured nothing.
pub fn check_block(number: u64, data: &[u8]) -> io::Result<()> {
    if data.len() == BLOCK && data[..8] == number.to_le_bytes() {
        return Ok(());
    }
    Err(io::Error::other(format!(
        "block {number} came back short or with other bytes"
    )))
}
