//! `uvfs stat`.

use std::path::PathBuf;
use std::process::ExitCode;

use serde_json::{Value, json};
use uvfs_cli::Result;
use uvfs_xfs::format::{FORMAT_BTREE, FORMAT_DEV, FORMAT_EXTENTS, FORMAT_LOCAL, FileType};
use uvfs_xfs::tools::{self, escape};
use uvfs_xfs::{Fork, Inode, Time, Volume};

use super::{Access, Image};
use crate::confine;

const EXAMPLES: &str = "\
Examples:
  uvfs stat disk.img /etc/passwd
  uvfs stat --json disk.img / | jq .inode

The JSON object has: path, type (file, directory, symlink, char, block, fifo, socket), target (of
a symlink), inode, generation, mode (the permission bits), nlink, uid, gid, projid, size, sectors
(of 512 bytes), block_size, device (major and minor number), atime, mtime, ctime and btime (sec
since 1970 and nsec), flags and flags2 (di_flags, di_flags2), data and attributes (format, extents)
and xattrs (names). What there is not is null. Names are escaped as `uvfs ls` shows them. Fields
may be added, never removed.

Symbolic links are followed on the way, inside the image, but not at the end.

Exit status: 0 shown, 1 failed, 2 wrong usage.";

/// Describe a file of an XFS image.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// As one JSON object
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    access: Access,
    /// The file
    path: PathBuf,
}

/// A moment as JSON.
fn time(t: Time) -> Value {
    json!({ "sec": t.sec, "nsec": t.nsec })
}

/// A fork as JSON, null if there is none.
fn fork(inode: &Inode, fork: Fork, extents: u64) -> Value {
    let format = match inode.fork_format(fork) {
        None => return Value::Null,
        Some(FORMAT_LOCAL) => "local",
        Some(FORMAT_EXTENTS) => "extents",
        Some(FORMAT_BTREE) => "btree",
        Some(FORMAT_DEV) => "device",
        Some(_) => "unknown",
    };
    json!({ "format": format, "extents": extents })
}

/// What there is to say of the inode at `path`.
pub fn as_json(volume: &Volume, path: &[u8], i: &Inode) -> uvfs_xfs::Result<Value> {
    let kind = i.file_type();
    let target = match kind {
        FileType::Symlink => Some(escape(&volume.readlink(i)?)),
        _ => None,
    };
    let is_device = matches!(kind, FileType::CharDevice | FileType::BlockDevice);
    let mut xattrs = Vec::new();
    volume.xattr_names(i, &mut |name| {
        xattrs.push(escape(name));
        true
    })?;
    Ok(json!({
        "path": escape(path),
        "type": match kind {
            FileType::Regular => "file",
            FileType::Directory => "directory",
            FileType::Symlink => "symlink",
            FileType::CharDevice | FileType::Whiteout => "char",
            FileType::BlockDevice => "block",
            FileType::Fifo => "fifo",
            FileType::Socket => "socket",
            FileType::Unknown => "unknown",
        },
        "target": target,
        "inode": i.ino,
        "generation": i.generation,
        "mode": i.mode & 0o7777,
        "nlink": i.nlink,
        "uid": i.uid,
        "gid": i.gid,
        "projid": i.projid,
        "size": i.size,
        "sectors": volume.sectors(i),
        "block_size": volume.geometry().block_size,
        "device": is_device.then_some(i.rdev),
        "atime": time(i.atime),
        "mtime": time(i.mtime),
        "ctime": time(i.ctime),
        "btime": i.crtime.map(time),
        "flags": i.flags,
        "flags2": i.flags2,
        "data": fork(i, Fork::Data, i.nextents),
        "attributes": fork(i, Fork::Attr, i.anextents),
        "xattrs": xattrs,
    }))
}

/// Runs it.
pub fn run(args: Args) -> Result<ExitCode> {
    let image = Image::open(&args.access, confine::reader)?;
    let volume = image.volume();
    let path = super::bytes(&args.path);
    let out = &mut std::io::stdout().lock();
    let outcome = if args.json {
        let inode = volume.resolve(path, false);
        match inode.and_then(|inode| as_json(volume, path, &inode)) {
            Ok(object) => return uvfs_cli::json(&object).map(|()| ExitCode::SUCCESS),
            Err(error) => Err(error),
        }
    } else {
        tools::stat(volume, path, out)
    };
    image.finish(&args.path, outcome, |()| ExitCode::SUCCESS)
}
