//! `uvfs stat`.

use std::path::PathBuf;
use std::process::ExitCode;

use serde::Serialize;
use uvfs_cli::Result;
use uvfs_xfs::format::{FORMAT_BTREE, FORMAT_DEV, FORMAT_EXTENTS, FORMAT_LOCAL, FileType};
use uvfs_xfs::tools::{self, escape};
use uvfs_xfs::{Fork, Inode, Volume};

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
    /// An image file, block device, or image in an object store (s3://BUCKET/KEY)
    #[arg(value_hint = clap::ValueHint::FilePath)]
    image: PathBuf,
    /// The file
    path: PathBuf,
}

#[derive(Serialize)]
struct Time {
    sec: i64,
    nsec: u32,
}

impl From<uvfs_xfs::Time> for Time {
    fn from(t: uvfs_xfs::Time) -> Self {
        Time {
            sec: t.sec,
            nsec: t.nsec,
        }
    }
}

#[derive(Serialize)]
struct ForkJson {
    format: &'static str,
    extents: u64,
}

#[derive(Serialize)]
struct StatJson {
    path: String,
    r#type: &'static str,
    target: Option<String>,
    inode: u64,
    generation: u32,
    mode: u16,
    nlink: u32,
    uid: u32,
    gid: u32,
    projid: u32,
    size: u64,
    sectors: u64,
    block_size: u32,
    device: Option<(u32, u32)>,
    atime: Time,
    mtime: Time,
    ctime: Time,
    btime: Option<Time>,
    flags: u16,
    flags2: u64,
    data: Option<ForkJson>,
    attributes: Option<ForkJson>,
    xattrs: Vec<String>,
}

fn fork(inode: &Inode, fork: Fork, extents: u64) -> Option<ForkJson> {
    let format = match inode.fork_format(fork)? {
        FORMAT_LOCAL => "local",
        FORMAT_EXTENTS => "extents",
        FORMAT_BTREE => "btree",
        FORMAT_DEV => "device",
        _ => "unknown",
    };
    Some(ForkJson { format, extents })
}

fn json(volume: &Volume, path: &[u8]) -> uvfs_xfs::Result<StatJson> {
    let i = volume.resolve(path, false)?;
    let block_size = volume.geometry().block_size;
    let kind = i.file_type();
    let target = match kind {
        FileType::Symlink => Some(escape(&volume.readlink(&i)?)),
        _ => None,
    };
    let mut xattrs = Vec::new();
    volume.xattr_names(&i, &mut |name| {
        xattrs.push(escape(name));
        true
    })?;
    Ok(StatJson {
        path: escape(path),
        r#type: match kind {
            FileType::Regular => "file",
            FileType::Directory => "directory",
            FileType::Symlink => "symlink",
            FileType::CharDevice | FileType::Whiteout => "char",
            FileType::BlockDevice => "block",
            FileType::Fifo => "fifo",
            FileType::Socket => "socket",
            FileType::Unknown => "unknown",
        },
        target,
        inode: i.ino,
        generation: i.generation,
        mode: i.mode & 0o7777,
        nlink: i.nlink,
        uid: i.uid,
        gid: i.gid,
        projid: i.projid,
        size: i.size,
        sectors: i.nblocks.saturating_mul(u64::from(block_size) / 512),
        block_size,
        device: matches!(kind, FileType::CharDevice | FileType::BlockDevice).then_some(i.rdev),
        atime: i.atime.into(),
        mtime: i.mtime.into(),
        ctime: i.ctime.into(),
        btime: i.crtime.map(Time::from),
        flags: i.flags,
        flags2: i.flags2,
        data: fork(&i, Fork::Data, i.nextents),
        attributes: fork(&i, Fork::Attr, i.anextents),
        xattrs,
    })
}

/// Runs it.
pub fn run(args: Args) -> Result<ExitCode> {
    let image = Image::open(&args.image, &args.access, confine::reader)?;
    let volume = image.volume();
    let path = super::bytes(&args.path);
    let out = &mut std::io::stdout().lock();
    let outcome = if args.json {
        match json(volume, path) {
            Ok(object) => return uvfs_cli::json(&object).map(|()| ExitCode::SUCCESS),
            Err(error) => Err(error),
        }
    } else {
        tools::stat(volume, path, out)
    };
    image.finish(&args.path, outcome, |()| ExitCode::SUCCESS)
}
