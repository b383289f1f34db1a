//! Serving an image, read-only.
//!
//! A node's number is its inode number, except for the root. The image does not change, so the kernel may keep all
//! that it was told. Files need no open, either: the server says so at the first one, and from then on the kernel
//! opens and closes without asking.
//!
//! File data goes from the device straight into the answer, on the ring of the thread.

use crate::blocks::{DiskExtent, io_error};
use crate::error::Error;
use crate::format::*;
use crate::geometry::BBSIZE;
use crate::read::inode::{DataRun, Fork, Inode, KEPT_FLAGS, Time};
use crate::read::volume::Volume;
use crate::read::wait::without_waiting;
use rustix::fs::StatxFlags;
use std::cell::Cell;
use std::ffi::CStr;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::Duration;
use uvfs_buf::Anything;
use uvfs_io::blocking::PerUser;
use uvfs_io::ops::{self, File};
use uvfs_io::{IoBuf, Payload};
use uvfs_proto::abi;
use uvfs_server::fs::{
    self, Attributes, Bytes, Config, Context, DirEntry, DirSink, Entry, Errno, FileSystem, Handle,
    InitFlags, IoHow, Ioctl, Node, OpenHow, Opened, ROOT, Result, Seek, Survive,
};
use uvfs_server::interrupt::until_killed;

/// How long the kernel may keep names and attributes. The image does not change.
const TTL: Duration = Duration::from_secs(86_400);

/// Clusters of inodes that a listing with attributes reads ahead.
const READAHEAD_CLUSTERS: usize = 16;
/// Entries that it looks at for that: about as many as the kernel takes at a time.
const READAHEAD_ENTRIES: usize = 256;

/// Threads of each user that read without a ring.
const READERS: usize = 8;
// The ioctls of inode flags (linux/fs.h); the size in the numbers of the first two is that of a long.
const FS_IOC_GETFLAGS: u32 = 0x8008_6601;
const FS_IOC_SETFLAGS: u32 = 0x4008_6602;
const FS_IOC_FSGETXATTR: u32 = 0x801c_581f;
const FS_IOC_FSSETXATTR: u32 = 0x401c_5820;
const FS_XFLAG_HASATTR: u32 = 0x8000_0000;

/// After this many misses a request waits for its blocks, so that it ends even if the cache is far too small.
const MISSES: usize = 1024;

/// The missing item where the kernel names a node that does not exist.
const GONE: &str = "inode with this number";

/// One listing in this many is a sample, see [`Asked`].
const SAMPLE: u32 = 32;

/// A volume as the server serves it. The mount must be read-only.
pub struct XfsFs {
    volume: Arc<Volume>,
    /// Where file data is read from; without it, through the volume.
    data: Option<Arc<File>>,
    /// Threads that wait for a device without a ring.
    readers: PerUser,
    asked: Asked,
    idmapped: bool,
}

/// Whether programs that list directories go on to ask for the attributes of what is in them, as tar
/// does and find does not. Attributes that no program asks for cost more than the rest of a listing;
/// each that is asked for costs a request if the listing was without.
///
/// Once attributes are given no program needs to ask, so one listing in [`SAMPLE`] goes without
/// them, as a sample.
#[derive(Default)]
struct Asked {
    /// Listings are given with attributes.
    yes: AtomicBool,
    listings: AtomicU32,
    /// The directory that was last listed without attributes and had files; 0 once a program asked.
    sample: AtomicU64,
}

impl Asked {
    /// Whether a listing that begins has attributes.
    fn begin(&self) -> bool {
        let yes = self.yes.load(Ordering::Relaxed);
        if yes && self.listings.fetch_add(1, Ordering::Relaxed) % SAMPLE == SAMPLE - 1 {
            if self.sample.load(Ordering::Relaxed) != 0 {
                // No program asked for anything in the last one.
                self.yes.store(false, Ordering::Relaxed);
            }
            return false;
        }
        yes
    }

    /// Directory `ino` was listed without the attributes of its files.
    fn omitted(&self, ino: u64) {
        self.sample.store(ino, Ordering::Relaxed);
    }

    /// Whether a listing of directory `ino` that goes on has attributes.
    fn goes_on(&self, ino: u64) -> bool {
        self.yes.load(Ordering::Relaxed) && self.sample.load(Ordering::Relaxed) != ino
    }

    /// A file in directory `ino` was looked up by its name.
    fn looked_up(&self, ino: u64) {
        let sample = &self.sample;
        if sample.load(Ordering::Relaxed) == ino {
            sample.store(0, Ordering::Relaxed);
            self.yes.store(true, Ordering::Relaxed);
        }
    }
}

impl From<Error> for fs::Error {
    /// The log says what is wrong with the image or its device.
    fn from(e: Error) -> Self {
        let errno = match e {
            Error::NotFound(GONE) => Errno::STALE,
            ref e => Errno::from_raw_os_error(e.errno()),
        };
        match e {
            Error::Corrupt { .. } | Error::Io { .. } => Self::new(errno, e.to_string()),
            _ => errno.into(),
        }
    }
}

impl XfsFs {
    /// Serves `volume`.
    pub fn new(volume: Arc<Volume>) -> XfsFs {
        let file = volume.blocks().data_file();
        let own = file.and_then(|fd| fd.try_clone_to_owned().ok());
        XfsFs {
            data: own.map(|fd| Arc::new(File::from(fd))),
            volume,
            readers: PerUser::new(READERS),
            asked: Asked::default(),
            idmapped: false,
        }
    }

    /// Whether the mount may be idmapped (mount_setattr(2)). The kernel then sends no caller's user and group, and
    /// takes that only for a mount where it checks permissions itself (`default_permissions`).
    pub fn idmapped(mut self, allowed: bool) -> XfsFs {
        self.idmapped = allowed;
        self
    }

    fn inode(&self, node: Node) -> crate::Result<Inode> {
        let ino = match node == ROOT {
            true => self.volume.geometry().rootino,
            false => node.0,
        };
        self.volume.inode(ino).map_err(|e| match e {
            Error::NotFound(_) => Error::NotFound(GONE),
            e => e,
        })
    }

    /// Runs `op`, which reads metadata. A block that is not in the cache is fetched while other requests
    /// of this thread go on; then `op` runs again. A device that fails ends this at once: it may take its time each time.
    async fn look<T>(&self, cx: &Context, mut op: impl FnMut() -> crate::Result<T>) -> Result<T> {
        for _ in 0..MISSES {
            match without_waiting(&mut op) {
                Ok(done) => return Ok(done?),
                Err(missing) => self.fetch(cx, missing).await?,
            }
        }
        Ok(op()?)
    }

    /// Runs `call` on a thread that may wait for the device, and no longer than the caller lives.
    async fn wait<T: Send + 'static>(
        &self,
        cx: &Context,
        call: impl FnOnce() -> crate::Result<T> + Send + 'static,
    ) -> Result<T> {
        let done = until_killed(cx, self.readers.run(cx.uid, call)).await;
        Ok(done.ok_or(Errno::INTR)??)
    }

    /// Brings blocks into the cache.
    async fn fetch(&self, cx: &Context, extents: Vec<DiskExtent>) -> Result<()> {
        let volume = self.volume.clone();
        let read = move |extents: &[DiskExtent]| match volume.blocks().read(extents, &Anything) {
            // The cache is too small: see `MISSES`.
            Err(e) if e.kind() == io::ErrorKind::OutOfMemory => Ok(()),
            read => read.map(drop).map_err(|e| io_error(extents, e)),
        };
        let Some(file) = &self.data else {
            return self.wait(cx, move || read(&extents)).await;
        };
        for e in &extents {
            // Only to have it in the kernel's page cache, from where the cache gets it at once.
            if let Ok(scratch) = IoBuf::alloc(e.bytes as usize) {
                let scratch = Payload::from(scratch);
                let _ = ops::read_at(file, &scratch, e.daddr * BBSIZE, 0).await;
            }
        }
        Ok(read(&extents)?)
    }

    fn node(&self, ino: u64) -> Node {
        match ino == self.volume.geometry().rootino {
            true => ROOT,
            false => Node(ino),
        }
    }

    fn attr(&self, i: &Inode) -> abi::Attr {
        abi::Attr {
            ino: i.ino,
            size: i.size,
            blocks: self.volume.sectors(i),
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
            rdev: abi::encode_dev(i.rdev.0, i.rdev.1),
            blksize: self.volume.geometry().block_size,
            flags: 0,
        }
    }

    /// Begins to read the inodes of what a listing from `offset` has that is `wanted`.
    fn readahead(
        &self,
        dir: &Inode,
        offset: u64,
        wanted: &dyn Fn(FileType) -> bool,
    ) -> crate::Result<()> {
        let g = self.volume.geometry();
        let (mut count, mut last) = (0, g.cluster_of(dir.ino));
        let mut seen = 0;
        let ahead = &mut |e: crate::DirEntry<'_>| {
            let cluster = g.cluster_of(e.ino);
            if wanted(e.file_type) && !matches!(e.name, b"." | b"..") && cluster != last {
                self.volume.readahead_inode(e.ino);
                last = cluster;
                count += 1;
            }
            // Not to the end of the directory: each part of a listing does this.
            seen += 1;
            count < READAHEAD_CLUSTERS && seen < READAHEAD_ENTRIES
        };
        self.volume.readdir(dir, offset, ahead)
    }

    fn entry(&self, i: &Inode) -> Entry {
        let mut entry = Entry::new(self.attr(i), TTL);
        entry.node = self.node(i.ino);
        entry.generation = i.generation.into();
        entry
    }
}

/// The flags of an inode as struct fsxattr has them: XFS stores them so, but for one that is its own affair.
fn extended_flags(i: &Inode) -> u32 {
    u32::from(i.flags & !DIFLAG_NEWRTBM)
}

/// Reads the runs one after another into `data`, and gives their length.
async fn read_runs(file: &Arc<File>, runs: &[DataRun], data: &Payload) -> Result<usize> {
    let mut done = 0;
    for run in runs {
        let part = data.slice(done..done + run.len);
        match run.device {
            None => part.parts().iter().for_each(|p| p.zero(0..p.len())),
            Some(at) => {
                let n = ops::read_at(file, &part, at, 0).await?;
                if n < run.len {
                    let why = format!("the device ends within {} bytes at {at}", run.len);
                    return Err(fs::Error::new(Errno::IO, why));
                }
            }
        }
        done += run.len;
    }
    Ok(done)
}

/// A node's number is that of its inode, and an image does not change: the next server knows all that this one does.
impl Survive for XfsFs {}

impl FileSystem for XfsFs {
    fn survive(&self) -> Option<&dyn Survive> {
        Some(self)
    }

    fn init(&self, config: &mut Config, _: Arc<dyn fs::SessionHandle>) -> Result<()> {
        config.wanted |= InitFlags::ASYNC_READ
            | InitFlags::ASYNC_DIO
            | InitFlags::CACHE_SYMLINKS
            | InitFlags::DO_READDIRPLUS
            | InitFlags::MAX_PAGES
            | InitFlags::PARALLEL_DIROPS
            | InitFlags::POSIX_ACL
            | InitFlags::EXPORT_SUPPORT;
        // Whether a listing has attributes is decided here (see `Asked`). The kernel would look only
        // at whether a program asked before the listing goes on, but most programs read it to its end first.
        config.wanted -= InitFlags::READDIRPLUS_AUTO;
        config.wanted -= InitFlags::AUTO_INVAL_DATA | InitFlags::WRITEBACK_CACHE;
        config.wanted.set(InitFlags::ALLOW_IDMAP, self.idmapped);
        config.time_gran = 1;
        Ok(())
    }

    async fn lookup(&self, cx: &Context, parent: Node, name: &CStr) -> Result<Entry> {
        let (dir, inode) = self
            .look(cx, || {
                let dir = self.inode(parent)?;
                if name == c"." {
                    // By a file handle (open_by_handle_at(2)): also of what is no directory.
                    return Ok((dir.ino, Some(dir)));
                }
                match self.volume.lookup(&dir, name.to_bytes()) {
                    Ok(ino) => Ok((dir.ino, Some(self.volume.inode(ino)?))),
                    Err(Error::NotFound(_)) => Ok((dir.ino, None)),
                    Err(e) => Err(e),
                }
            })
            .await?;
        let Some(inode) = inode else {
            // That there is no such name will not change either.
            return Ok(Entry::missing(TTL));
        };
        if !inode.is_dir() {
            self.asked.looked_up(dir);
        }
        Ok(self.entry(&inode))
    }

    async fn getattr(&self, cx: &Context, node: Node, _: Option<Handle>) -> Result<Attributes> {
        let inode = self.look(cx, || self.inode(node)).await?;
        Ok(Attributes::new(self.attr(&inode), TTL))
    }

    async fn statx(
        &self,
        cx: &Context,
        node: Node,
        _: Option<Handle>,
        _: u32,
    ) -> Result<(abi::Statx, Duration)> {
        let i = self.look(cx, || self.inode(node)).await?;
        let mut mask = StatxFlags::BASIC_STATS;
        mask.set(StatxFlags::BTIME, i.crtime.is_some());
        let time = |t: Time| abi::SxTime::new(t.sec, t.nsec);
        let statx = abi::Statx {
            mask: mask.bits(),
            blksize: self.volume.geometry().block_size,
            // statx(2) has the same bits for them.
            attributes: (i.common_flags() & KEPT_FLAGS).bits().into(),
            nlink: i.nlink,
            uid: i.uid,
            gid: i.gid,
            mode: i.mode,
            ino: i.ino,
            size: i.size,
            blocks: self.volume.sectors(&i),
            attributes_mask: KEPT_FLAGS.bits().into(),
            atime: time(i.atime),
            btime: time(i.crtime.unwrap_or_default()),
            ctime: time(i.ctime),
            mtime: time(i.mtime),
            rdev_major: i.rdev.0,
            rdev_minor: i.rdev.1,
            ..Default::default()
        };
        Ok((statx, TTL))
    }

    async fn readlink(&self, cx: &Context, node: Node) -> Result<Bytes> {
        self.look(cx, || self.volume.readlink(&self.inode(node)?))
            .await
    }

    async fn open(&self, _: &Context, _: Node, _: &OpenHow) -> Result<Opened> {
        Err(Errno::NOSYS.into())
    }

    async fn opendir(&self, _: &Context, _: Node, _: &OpenHow) -> Result<Opened> {
        Err(Errno::NOSYS.into())
    }

    async fn read(&self, cx: &Context, node: Node, how: &IoHow, data: &Payload) -> Result<usize> {
        if let Some(file) = &self.data {
            let runs = || {
                let inode = self.inode(node)?;
                self.volume.data_runs(&inode, how.offset, data.len())
            };
            return read_runs(file, &self.look(cx, runs).await?, data).await;
        }
        let inode = self.look(cx, || self.inode(node)).await?;
        let volume = self.volume.clone();
        let (offset, len) = (how.offset, data.len());
        // The device may be slow: other requests of this queue go on meanwhile.
        let bytes = self.wait(cx, move || {
            let mut bytes = vec![0; len];
            let n = volume.read(&inode, offset, &mut bytes)?;
            bytes.truncate(n);
            Ok(bytes)
        });
        let bytes: Bytes = bytes.await?;
        data.copy_in(0, &bytes);
        Ok(bytes.len())
    }

    async fn readdir(
        &self,
        cx: &Context,
        node: Node,
        _: Handle,
        sink: &mut dyn DirSink,
    ) -> Result<()> {
        let offset = sink.offset();
        let dir = self.look(cx, || self.inode(node)).await?;
        let plus = sink.wants_attributes();
        let all = match offset {
            0 => plus && self.asked.begin(),
            _ => plus && self.asked.goes_on(dir.ino),
        };
        // Directories are gone into, by find as well.
        let wanted = |kind| all || matches!(kind, FileType::Directory | FileType::Unknown);
        if plus {
            // An inode that cannot be read is reported when it is listed.
            let ahead = || Ok(self.readahead(&dir, offset, &wanted));
            let _ = self.look(cx, ahead).await?;
        }
        let nothing = Entry::missing(Duration::ZERO);
        let (mut any, mut omitted) = (false, false);
        let failing = Cell::new(false);
        // Where the listing goes on when something had to be fetched.
        let mut at = offset;
        let mut list = || {
            let mut missing = None;
            let mut add = |e: &crate::DirEntry<'_>| {
                let shown = DirEntry {
                    ino: e.ino,
                    next: e.next,
                    kind: fs::FileType::from_raw_mode(e.file_type.mode_bits()),
                    name: e.name,
                };
                if !plus {
                    return sink.add(shown);
                }
                if !sink.fits(e.name.len()) {
                    return false;
                }
                if matches!(e.name, b"." | b"..") {
                    return sink.add_plus(shown, &nothing);
                }
                if !wanted(e.file_type) {
                    omitted = true;
                    return sink.add_plus(shown, &nothing);
                }
                match self.volume.inode(e.ino) {
                    Ok(inode) => sink.add_plus(shown, &self.entry(&inode)),
                    Err(e) if e.would_wait() && !failing.get() => {
                        missing = Some(e);
                        false
                    }
                    // One bad inode does not hide the rest: the name is listed, a look at it fails.
                    Err(_) => sink.add_plus(shown, &nothing),
                }
            };
            self.volume.readdir(&dir, at, &mut |e| {
                let added = add(&e);
                if added {
                    at = e.next;
                    any = true;
                }
                added
            })?;
            missing.map_or(Ok(()), Err)
        };
        let mut listed = self.look(cx, &mut list).await;
        // The device has failed once: this request does not wait for it again.
        if listed.as_ref().is_err_and(|error| *error == Errno::IO) {
            failing.set(true);
            listed = self.look(cx, &mut list).await;
        }
        if omitted {
            self.asked.omitted(dir.ino);
        }
        // Entries that could be read are shown first; the error comes with the next request.
        if any { Ok(()) } else { listed }
    }

    async fn statfs(&self, _: &Context, _: Node) -> Result<abi::Kstatfs> {
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

    async fn getxattr(&self, cx: &Context, node: Node, name: &CStr) -> Result<Bytes> {
        self.look(cx, || {
            self.volume.xattr(&self.inode(node)?, name.to_bytes())
        })
        .await
    }

    async fn listxattr(&self, cx: &Context, node: Node) -> Result<Bytes> {
        // More than the kernel takes (XATTR_LIST_MAX).
        let too_long = |list: &Vec<u8>| list.len() > 65_536;
        let names = || {
            let mut list = Vec::new();
            self.volume.xattr_names(&self.inode(node)?, &mut |name| {
                list.extend_from_slice(name);
                list.push(0);
                !too_long(&list)
            })?;
            Ok(list)
        };
        let list = self.look(cx, names).await?;
        if too_long(&list) {
            return Err(Errno::TOOBIG.into());
        }
        Ok(list)
    }

    /// Inode flags (`lsattr`, `xfs_io -c stat`).
    async fn ioctl(&self, cx: &Context, node: Node, ioctl: &Ioctl<'_>) -> Result<(i32, Bytes)> {
        let inode = self.look(cx, || self.inode(node)).await?;
        let mut data = match ioctl.cmd {
            FS_IOC_GETFLAGS => inode.common_flags().bits().to_ne_bytes().to_vec(),
            FS_IOC_FSGETXATTR => {
                // struct fsxattr: flags, extent size hint, extents, project, extent size hint of copies, padding.
                let has_attr = inode.fork_format(Fork::Attr).is_some();
                let flags = extended_flags(&inode) | if has_attr { FS_XFLAG_HASATTR } else { 0 };
                let extents = u32::try_from(inode.nextents).unwrap_or(u32::MAX);
                let words = [flags, 0, extents, inode.projid, 0, 0, 0];
                words.iter().flat_map(|w| w.to_ne_bytes()).collect()
            }
            FS_IOC_SETFLAGS | FS_IOC_FSSETXATTR => return Err(Errno::ROFS.into()),
            _ => return Err(Errno::NOTTY.into()),
        };
        data.truncate(ioctl.out_size as usize);
        Ok((0, data))
    }

    async fn lseek(
        &self,
        cx: &Context,
        node: Node,
        _: Handle,
        offset: u64,
        seek: Seek,
    ) -> Result<u64> {
        let inode = self.look(cx, || self.inode(node)).await?;
        if offset >= inode.size {
            return Err(Errno::NXIO.into());
        }
        let log = self.volume.geometry().blocklog;
        let blocks = inode.size.div_ceil(1 << log);
        let find = || {
            let mut at = offset;
            let mut data = None;
            self.volume
                .map(&inode, Fork::Data, offset >> log, blocks, &mut |e| {
                    if e.unwritten {
                        return Ok(true);
                    }
                    let start = (e.startoff << log).max(offset);
                    if seek == Seek::Data {
                        data = Some(start);
                        return Ok(false);
                    }
                    if start > at {
                        return Ok(false);
                    }
                    at = e.end() << log;
                    Ok(true)
                })?;
            Ok((at, data))
        };
        let (at, data) = self.look(cx, find).await?;
        match seek {
            Seek::Data => Ok(data.filter(|d| *d < inode.size).ok_or(Errno::NXIO)?),
            Seek::Hole => Ok(at.min(inode.size)),
        }
    }
}
