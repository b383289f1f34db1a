//! Serving an image, read-only.
//!
//! A node's number is its inode number, except for the root. Nothing changes, so that the kernel
//! may keep all that it was told.

use crate::error::Error;
use crate::format::*;
use crate::inode::{Fork, Inode, Time};
use crate::volume::Volume;
use slab::Slab;
use std::ffi::CStr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use uvfs_io::blocking;
use uvfs_proto::abi;
use uvfs_server::fs::{
    Attributes, Bytes, Config, Context, DirEntry, DirSink, Entry, Errno, FileSystem, InitFlags,
    IoHow, OpenFlags, OpenHow, Opened, Payload, ROOT, Result,
};

/// How long the kernel may keep names and attributes. The image does not change.
const TTL: Duration = Duration::from_secs(86_400);

/// Inodes that a listing with attributes reads ahead.
const READAHEAD_INODES: usize = 64;

const O_ACCMODE: u32 = 3;
const SEEK_DATA: u32 = 3;
const SEEK_HOLE: u32 = 4;
const STATX_BASIC_STATS: u32 = 0x7ff;
const STATX_BTIME: u32 = 0x800;
const STATX_ATTR_IMMUTABLE: u64 = 0x10;
const STATX_ATTR_APPEND: u64 = 0x20;
const STATX_ATTR_NODUMP: u64 = 0x40;

/// A volume as the server serves it.
pub struct XfsFs {
    volume: Arc<Volume>,
    open: Mutex<Slab<Arc<Inode>>>,
}

fn errno(e: Error) -> Errno {
    if matches!(e, Error::Corrupt { .. } | Error::Io { .. }) {
        tracing::error!("{e}");
    }
    Errno::from_raw_os_error(e.errno())
}

impl XfsFs {
    /// Serves `volume`.
    pub fn new(volume: Arc<Volume>) -> XfsFs {
        XfsFs {
            volume,
            open: Mutex::default(),
        }
    }

    fn inode(&self, node: u64) -> Result<Inode> {
        let ino = if node == ROOT {
            self.volume.geometry().rootino
        } else {
            node
        };
        self.volume.inode(ino).map_err(|e| match e {
            Error::NotFound(_) => Errno::STALE,
            e => errno(e),
        })
    }

    fn node(&self, ino: u64) -> u64 {
        if ino == self.volume.geometry().rootino {
            ROOT
        } else {
            ino
        }
    }

    fn open(&self, inode: Inode) -> u64 {
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        open.insert(Arc::new(inode)) as u64
    }

    fn opened(&self, fh: u64) -> Result<Arc<Inode>> {
        let open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        usize::try_from(fh)
            .ok()
            .and_then(|i| open.get(i).cloned())
            .ok_or(Errno::BADF)
    }

    fn close(&self, fh: u64) {
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        if let Ok(i) = usize::try_from(fh) {
            open.try_remove(i);
        }
    }

    fn attr(&self, i: &Inode) -> abi::Attr {
        abi::Attr {
            ino: i.ino,
            size: i.size,
            blocks: self.sectors(i),
            atime: i.atime.sec as u64,
            mtime: i.mtime.sec as u64,
            ctime: i.ctime.sec as u64,
            atimensec: i.atime.nsec,
            mtimensec: i.mtime.nsec,
            ctimensec: i.ctime.nsec,
            mode: u32::from(i.mode),
            nlink: i.nlink,
            uid: i.uid,
            gid: i.gid,
            rdev: encode_dev(i.rdev),
            blksize: self.volume.geometry().block_size,
            flags: 0,
        }
    }

    fn sectors(&self, i: &Inode) -> u64 {
        i.nblocks
            .saturating_mul(u64::from(self.volume.geometry().block_size) / 512)
    }

    fn entry(&self, i: &Inode) -> Entry {
        Entry {
            node: self.node(i.ino),
            generation: i.generation.into(),
            attr: self.attr(i),
            attr_ttl: TTL,
            entry_ttl: TTL,
        }
    }
}

/// Device numbers as the kernel encodes them in 32 bits (`new_encode_dev`).
fn encode_dev((major, minor): (u32, u32)) -> u32 {
    (minor & 0xff) | ((major & 0xfff) << 8) | ((minor & !0xff) << 12)
}

fn sx_time(t: Time) -> abi::SxTime {
    abi::SxTime {
        tv_sec: t.sec,
        tv_nsec: t.nsec,
        ..Default::default()
    }
}

impl FileSystem for XfsFs {
    fn init(&self, config: &mut Config) -> Result<()> {
        config.wanted |= InitFlags::ASYNC_READ
            | InitFlags::ASYNC_DIO
            | InitFlags::CACHE_SYMLINKS
            | InitFlags::DO_READDIRPLUS
            | InitFlags::READDIRPLUS_AUTO
            | InitFlags::MAX_PAGES
            | InitFlags::PARALLEL_DIROPS
            | InitFlags::POSIX_ACL
            | InitFlags::EXPORT_SUPPORT;
        config.wanted -= InitFlags::AUTO_INVAL_DATA | InitFlags::WRITEBACK_CACHE;
        config.time_gran = 1;
        Ok(())
    }

    async fn lookup(&self, _: &Context, parent: u64, name: &CStr) -> Result<Entry> {
        let dir = self.inode(parent)?;
        match self.volume.lookup(&dir, name.to_bytes()) {
            Ok(ino) => Ok(self.entry(&self.volume.inode(ino).map_err(errno)?)),
            // That there is no such name will not change either.
            Err(Error::NotFound(_)) => Ok(Entry {
                node: 0,
                generation: 0,
                attr: abi::Attr::default(),
                attr_ttl: TTL,
                entry_ttl: TTL,
            }),
            Err(e) => Err(errno(e)),
        }
    }

    async fn getattr(&self, _: &Context, node: u64, _: Option<u64>) -> Result<Attributes> {
        Ok(Attributes {
            attr: self.attr(&self.inode(node)?),
            ttl: TTL,
        })
    }

    async fn statx(
        &self,
        _: &Context,
        node: u64,
        _: Option<u64>,
        _: u32,
    ) -> Result<(abi::Statx, Duration)> {
        let i = self.inode(node)?;
        let flags = [
            (DIFLAG_IMMUTABLE, STATX_ATTR_IMMUTABLE),
            (DIFLAG_APPEND, STATX_ATTR_APPEND),
            (DIFLAG_NODUMP, STATX_ATTR_NODUMP),
        ];
        let attributes = flags
            .iter()
            .filter(|(f, _)| i.flags & f != 0)
            .fold(0, |m, (_, a)| m | a);
        let statx = abi::Statx {
            mask: STATX_BASIC_STATS | if i.crtime.is_some() { STATX_BTIME } else { 0 },
            blksize: self.volume.geometry().block_size,
            attributes,
            nlink: i.nlink,
            uid: i.uid,
            gid: i.gid,
            mode: i.mode,
            ino: i.ino,
            size: i.size,
            blocks: self.sectors(&i),
            attributes_mask: STATX_ATTR_IMMUTABLE | STATX_ATTR_APPEND | STATX_ATTR_NODUMP,
            atime: sx_time(i.atime),
            btime: sx_time(i.crtime.unwrap_or_default()),
            ctime: sx_time(i.ctime),
            mtime: sx_time(i.mtime),
            rdev_major: i.rdev.0,
            rdev_minor: i.rdev.1,
            ..Default::default()
        };
        Ok((statx, TTL))
    }

    async fn readlink(&self, _: &Context, node: u64) -> Result<Bytes> {
        self.volume.readlink(&self.inode(node)?).map_err(errno)
    }

    async fn open(&self, _: &Context, node: u64, how: &OpenHow) -> Result<Opened> {
        if how.flags & O_ACCMODE != 0 {
            return Err(Errno::ROFS);
        }
        let fh = self.open(self.inode(node)?);
        Ok(Opened {
            fh,
            flags: OpenFlags::KEEP_CACHE | OpenFlags::NOFLUSH,
            backing: 0,
        })
    }

    async fn read(&self, _: &Context, _: u64, how: &IoHow, data: &Payload) -> Result<usize> {
        let inode = self.opened(how.fh)?;
        let volume = self.volume.clone();
        let (offset, len) = (how.offset, data.len());
        // The device may be slow: other requests of this queue go on meanwhile.
        let bytes = blocking::run(move || {
            let mut bytes = vec![0; len];
            let n = volume.read(&inode, offset, &mut bytes)?;
            bytes.truncate(n);
            Ok(bytes)
        });
        let bytes = bytes.await.map_err(errno)?;
        data.copy_in(0, &bytes);
        Ok(bytes.len())
    }

    async fn release(&self, _: &Context, _: u64, fh: u64, _: Option<u64>) -> Result<()> {
        self.close(fh);
        Ok(())
    }

    async fn opendir(&self, _: &Context, node: u64, _: &OpenHow) -> Result<Opened> {
        let inode = self.inode(node)?;
        if !inode.is_dir() {
            return Err(Errno::NOTDIR);
        }
        let fh = self.open(inode);
        Ok(Opened {
            fh,
            flags: OpenFlags::KEEP_CACHE | OpenFlags::CACHE_DIR,
            backing: 0,
        })
    }

    async fn readdir(
        &self,
        _: &Context,
        _: u64,
        fh: u64,
        offset: u64,
        sink: &mut dyn DirSink,
    ) -> Result<()> {
        let dir = self.opened(fh)?;
        let plus = sink.wants_attributes();
        if plus {
            let mut ahead = 0;
            self.volume
                .readdir(&dir, offset, &mut |e| {
                    self.volume.readahead_inode(e.ino);
                    ahead += 1;
                    ahead < READAHEAD_INODES
                })
                .map_err(errno)?;
        }
        let mut failed = None;
        let mut any = false;
        self.volume
            .readdir(&dir, offset, &mut |e| {
                let shown = DirEntry {
                    ino: e.ino,
                    next: e.next,
                    kind: e.file_type.mode_bits() >> 12,
                    name: e.name,
                };
                if !plus {
                    any = true;
                    return sink.add(shown);
                }
                if !sink.fits(e.name.len()) {
                    return false;
                }
                any = true;
                let inode = match self.volume.inode(e.ino) {
                    Ok(i) => i,
                    // One bad inode does not hide the rest: the name is listed, a look at it fails.
                    Err(_) => {
                        let nothing = Entry {
                            node: 0,
                            generation: 0,
                            attr: abi::Attr::default(),
                            attr_ttl: Duration::ZERO,
                            entry_ttl: Duration::ZERO,
                        };
                        return sink.add_plus(shown, &nothing);
                    }
                };
                let mut entry = self.entry(&inode);
                if matches!(e.name, b"." | b"..") {
                    entry.node = 0;
                }
                sink.add_plus(shown, &entry)
            })
            .unwrap_or_else(|e| failed = Some(e));
        match failed {
            // What could be read is shown first; the error comes when it is asked for again.
            Some(e) if !any => Err(errno(e)),
            _ => Ok(()),
        }
    }

    async fn releasedir(&self, _: &Context, _: u64, fh: u64) -> Result<()> {
        self.close(fh);
        Ok(())
    }

    async fn statfs(&self, _: &Context, _: u64) -> Result<abi::Kstatfs> {
        let s = self.volume.space();
        Ok(abi::Kstatfs {
            blocks: s.blocks,
            bfree: s.free_blocks,
            bavail: s.free_blocks,
            files: s.files,
            ffree: s.free_files,
            bsize: s.block_size,
            namelen: MAXNAMELEN as u32,
            frsize: s.block_size,
            ..Default::default()
        })
    }

    async fn getxattr(&self, _: &Context, node: u64, name: &CStr) -> Result<Bytes> {
        self.volume
            .xattr(&self.inode(node)?, name.to_bytes())
            .map_err(errno)
    }

    async fn listxattr(&self, _: &Context, node: u64) -> Result<Bytes> {
        let inode = self.inode(node)?;
        let mut list = Vec::new();
        let mut too_long = false;
        self.volume
            .xattr_names(&inode, &mut |name| {
                list.extend_from_slice(name);
                list.push(0);
                // More than the kernel takes (XATTR_LIST_MAX).
                too_long = list.len() > 65_536;
                !too_long
            })
            .map_err(errno)?;
        if too_long {
            Err(Errno::TOOBIG)
        } else {
            Ok(list)
        }
    }

    async fn lseek(&self, _: &Context, node: u64, _: u64, offset: u64, whence: u32) -> Result<u64> {
        let inode = self.inode(node)?;
        if offset >= inode.size {
            return Err(Errno::NXIO);
        }
        let log = self.volume.geometry().blocklog;
        let blocks = inode.size.div_ceil(1 << log);
        let mut at = offset;
        let mut data = None;
        self.volume
            .map(&inode, Fork::Data, offset >> log, blocks, &mut |e| {
                if e.unwritten {
                    return Ok(true);
                }
                let start = (e.startoff << log).max(offset);
                if whence == SEEK_DATA {
                    data = Some(start);
                    return Ok(false);
                }
                if start > at {
                    return Ok(false);
                }
                at = (e.startoff + u64::from(e.blockcount)) << log;
                Ok(true)
            })
            .map_err(errno)?;
        match whence {
            SEEK_DATA => data.filter(|d| *d < inode.size).ok_or(Errno::NXIO),
            SEEK_HOLE => Ok(at.min(inode.size)),
            _ => Err(Errno::INVAL),
        }
    }
}
