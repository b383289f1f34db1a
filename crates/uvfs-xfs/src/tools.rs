//! The command line's operations on an image: list, show, describe, copy out.
//!
//! Names and contents come from an image that is not trusted. Control characters in names are shown
//! escaped; a copy never follows a link that came out of the image and never overwrites.

mod archive;
mod copy;
mod ls;
mod tree;

use crate::error::{Error, Result};
use crate::format::*;
use crate::read::inode::{Fork, Inode};
use crate::read::volume::Volume;
pub use archive::{archive, finish};
pub use copy::{Copied, Trust, copy_out};
pub use ls::{LsOptions, escape, format_time, human, ls, mode_string, quote};
use std::collections::VecDeque;
use std::io::{self, Write};
pub use tree::{expand, walk};

/// Bytes read at a time.
const CHUNK: usize = 1 << 20;
/// The same of an image whose data only an engine reaches: so many requests for parts of it are under way.
const REMOTE_CHUNK: usize = 8 << 20;
/// Directories with more entries than this are listed in their own order, not by name.
const SORT_LIMIT: usize = 100_000;
/// Entries of a directory that a copy holds at a time, and whose inodes are read ahead together.
const BATCH: usize = 1024;
/// Entries whose data a copy reads ahead.
const DATA_AHEAD: usize = 32;
/// Directories within directories that a copy goes down: each holds a file descriptor.
const MAX_DEPTH: usize = 500;

fn output(what: &str) -> impl Fn(io::Error) -> Error {
    move |source| Error::Output {
        what: what.to_string(),
        source,
    }
}

/// The error of a directory that another entry led to before.
fn twice(dir: &Inode, ino: u64) -> Error {
    dir.wrong(
        "directory",
        "inumber",
        "a directory that is in one place",
        ino,
    )
}

/// A directory's entries, read a part at a time.
#[derive(Default)]
struct Entries {
    /// Name and number of those that were read and are not used yet.
    read: VecDeque<(Vec<u8>, u64)>,
    /// Where to go on reading.
    next: u64,
    complete: bool,
}

impl Entries {
    /// Reads so many at most, without those of the directory itself and its parent.
    fn refill(&mut self, volume: &Volume, dir: &Inode, most: usize) -> Result<()> {
        let (start, mut more) = (self.next, false);
        let read = volume.readdir(dir, start, &mut |e| {
            if self.read.len() == most {
                more = true;
                return false;
            }
            self.next = e.next;
            if e.name != b"." && e.name != b".." {
                self.read.push_back((e.name.to_vec(), e.ino));
            }
            true
        });
        // Positions grow, so that this ends.
        self.complete = !more || read.is_err() || self.next <= start;
        read
    }

    /// Reads inodes of the first ones ahead.
    fn readahead(&self, volume: &Volume) {
        volume.readahead_inodes(self.read.iter().take(BATCH).map(|(_, ino)| *ino));
    }
}

/// The name that a copy of `from` gets; `None` for the root.
fn last_name(from: &[u8]) -> Option<&[u8]> {
    let name = from.rsplit(|b| *b == b'/').find(|c| !c.is_empty());
    name.filter(|n| *n != b"." && *n != b"..")
}

/// Memory for what is read at a time.
fn buffer(volume: &Volume) -> Vec<u8> {
    let local = volume.blocks().data_file().is_some();
    vec![0; if local { CHUNK } else { REMOTE_CHUNK }]
}

/// Writes the contents of the regular file at `path`, links followed.
pub fn cat(volume: &Volume, path: &[u8], out: &mut dyn Write) -> Result<()> {
    let inode = volume.resolve(path, true)?;
    let mut buf = buffer(volume);
    let mut offset = 0;
    loop {
        let n = volume.read(&inode, offset, &mut buf)?;
        if n == 0 {
            return Ok(());
        }
        let written = out.write_all(&buf[..n]);
        written.map_err(output("writing the contents"))?;
        offset += n as u64;
    }
}

/// Describes the file at `path`, links not followed: what stat(1) shows, and what is particular
/// to XFS.
pub fn stat(volume: &Volume, path: &[u8], out: &mut dyn Write) -> Result<()> {
    let i = volume.resolve(path, false)?;
    let mut text = format!("  File: {}", escape(path));
    if i.file_type() == FileType::Symlink {
        text += &format!(" -> {}", escape(&volume.readlink(&i)?));
    }
    let kind = match i.file_type() {
        FileType::Regular => "regular file",
        FileType::Directory => "directory",
        FileType::CharDevice | FileType::Whiteout => "character special file",
        FileType::BlockDevice => "block special file",
        FileType::Fifo => "fifo",
        FileType::Socket => "socket",
        FileType::Symlink => "symbolic link",
        FileType::Unknown => "unknown",
    };
    let block_size = volume.geometry().block_size;
    let sectors = volume.sectors(&i);
    text += &format!(
        "\n  Size: {}\tBlocks: {sectors}\tIO Block: {block_size}\t{kind}\n Inode: {}\tLinks: {}",
        i.size, i.ino, i.nlink
    );
    if matches!(i.file_type(), FileType::CharDevice | FileType::BlockDevice) {
        text += &format!("\tDevice type: {},{}", i.rdev.0, i.rdev.1);
    }
    text += &format!(
        "\nAccess: ({:04o}/{})\tUid: {}\tGid: {}\tProject: {}",
        i.mode & 0o7777,
        mode_string(i.mode),
        i.uid,
        i.gid,
        i.projid
    );
    for (name, t) in [
        ("Access", Some(i.atime)),
        ("Modify", Some(i.mtime)),
        ("Change", Some(i.ctime)),
        (" Birth", i.crtime),
    ] {
        text += &format!("\n{name}: {}", t.map_or("-".into(), format_time));
    }
    let form = |fork, extents: u64| match i.fork_format(fork) {
        None => "none".to_string(),
        Some(FORMAT_LOCAL) => "in the inode".to_string(),
        Some(FORMAT_DEV) => "device".to_string(),
        Some(FORMAT_BTREE) => format!("{extents} extents in a B-tree"),
        Some(_) => format!("{extents} extents"),
    };
    text += &format!(
        "\n  Data: {}\tAttributes: {}\tGeneration: {}\tFlags: {:#x} {:#x}\n",
        form(Fork::Data, i.nextents),
        form(Fork::Attr, i.anextents),
        i.generation,
        i.flags,
        i.flags2
    );
    volume.xattr_names(&i, &mut |name| {
        text += &format!(" Xattr: {}\n", escape(name));
        true
    })?;
    out.write_all(text.as_bytes())
        .map_err(output("writing the description"))
}

#[cfg(test)]
mod tests;
