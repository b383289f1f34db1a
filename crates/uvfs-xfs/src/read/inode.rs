//! Inodes, their forks, and file contents.

mod data;

use crate::error::{At, Error, Result};
use crate::format::*;
use crate::geometry::Geometry;
pub use data::DataRun;
use rustix::fs::IFlags;

/// Checks a metadata block of a fork against what it must say about itself.
pub(crate) type VerifyIdent<'a> = &'a dyn Fn(&[u8], &Ident) -> Result<(), Fault>;

/// Blocks of a fork: the first, and how many.
pub(crate) type ForkRange = (Fork, u64, u32);

/// A moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct Time {
    /// Seconds since 1970.
    pub sec: i64,
    /// Nanoseconds.
    pub nsec: u32,
}

/// One of an inode's two forks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Fork {
    /// Contents.
    Data,
    /// Extended attributes.
    Attr,
}

impl Fork {
    fn name(self) -> &'static str {
        match self {
            Fork::Data => "data fork",
            Fork::Attr => "attribute fork",
        }
    }

    /// The flag of its blocks in the reverse mapping tree.
    pub(crate) fn rmap_flag(self) -> u64 {
        match self {
            Fork::Data => 0,
            Fork::Attr => RMAP_OFF_ATTR_FORK,
        }
    }

    fn btree_name(self) -> &'static str {
        match self {
            Fork::Data => "data fork B-tree block",
            Fork::Attr => "attribute fork B-tree block",
        }
    }
}

/// An inode, decoded and checked.
#[derive(Debug, Clone)]
pub struct Inode {
    /// Its number.
    pub ino: u64,
    /// Type and permissions.
    pub mode: u16,
    /// Link count.
    pub nlink: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Project.
    pub projid: u32,
    /// Size in bytes.
    pub size: u64,
    /// Blocks used by both forks.
    pub nblocks: u64,
    /// Access time.
    pub atime: Time,
    /// Modification time.
    pub mtime: Time,
    /// Change time.
    pub ctime: Time,
    /// Birth time, on version 5.
    pub crtime: Option<Time>,
    /// Generation.
    pub generation: u32,
    /// `DIFLAG_*`.
    pub flags: u16,
    /// `DIFLAG2_*`.
    pub flags2: u64,
    /// Major and minor number of a device.
    pub rdev: (u32, u32),
    /// Extents of the data fork.
    pub nextents: u64,
    /// Extents of the attribute fork.
    pub anextents: u64,
    format: u8,
    aformat: u8,
    /// Byte offsets of the forks in `raw`: data from, attributes from (or the end if there are
    /// none).
    data_at: usize,
    attr_at: usize,
    raw: Box<[u8]>,
}

/// Checks that the format suits the type of file, and that what is in the inode fits there.
fn check_data_fork(d: &DinodeV2, size: u64, nextents: u64, room: usize) -> Result<(), Fault> {
    let mode = d.mode.get();
    let formats: &[u8] = match FileType::from_mode(mode) {
        FileType::Regular => &[FORMAT_EXTENTS, FORMAT_BTREE],
        FileType::Directory | FileType::Symlink => &[FORMAT_LOCAL, FORMAT_EXTENTS, FORMAT_BTREE],
        FileType::Unknown => return Err(Fault::field("di_mode", "a file type", mode)),
        _ => &[FORMAT_DEV],
    };
    if !formats.contains(&d.format) {
        let expected = "one for this type of file";
        return Err(Fault::field("di_format", expected, d.format));
    }
    let fits = "what fits in the inode";
    match d.format {
        FORMAT_LOCAL if size > room as u64 => Err(Fault::field("di_size", fits, size)),
        FORMAT_EXTENTS if nextents > (room / ExtentRecord::SIZE) as u64 => {
            Err(Fault::field("di_nextents", fits, nextents))
        }
        _ => Ok(()),
    }
}

fn check_attr_fork(d: &DinodeV2, anextents: u64, room: usize) -> Result<(), Fault> {
    match d.aformat {
        FORMAT_LOCAL | FORMAT_BTREE => Ok(()),
        FORMAT_EXTENTS if anextents <= (room / ExtentRecord::SIZE) as u64 => Ok(()),
        FORMAT_EXTENTS => {
            let fits = "what fits in the inode";
            Err(Fault::field("di_anextents", fits, anextents))
        }
        f => Err(Fault::field("di_aformat", "local, extents or btree", f)),
    }
}

impl Inode {
    /// The bytes that it was decoded from.
    pub(crate) fn raw(&self) -> &[u8] {
        &self.raw
    }

    /// Decodes the inode `ino` from its bytes (one inode size of them), after tests of what that needs. The checker
    /// tests the other fields (`check/inode.rs`).
    pub fn parse(ino: u64, raw: &[u8], g: &Geometry) -> Result<Inode> {
        let bad = |fault| Error::corrupt("inode", At::Inode(ino), fault);
        let d = check_dinode(raw, &g.ident(0, Some(ino))).map_err(bad)?;
        let v3 = match d.version {
            3 => Some(Dinode::at(raw, 0).map_err(bad)?),
            _ => None,
        };
        let mode = d.mode.get();
        if mode == 0 {
            return Err(Error::NotFound("inode"));
        }
        let size = d.size.get();
        if i64::try_from(size).is_err() {
            return Err(bad(Fault::field("di_size", "less than 2^63", size)));
        }
        let flags2 = v3.map_or(0, |v| v.flags2.get());
        let old = (d.nextents.get().into(), d.anextents.get().into());
        let (nextents, anextents) = v3.map_or(old, |v| v.extent_counts());
        let data_at = v3.map_or(DINODE_V2_SIZE, |_| DINODE_V3_SIZE);
        let attr_at = match d.forkoff {
            0 => raw.len(),
            f => data_at + usize::from(f) * 8,
        };
        if attr_at > raw.len() || (d.forkoff != 0 && attr_at == raw.len()) {
            let fault = Fault::field("di_forkoff", "inside the inode", d.forkoff);
            return Err(bad(fault));
        }
        check_data_fork(d, size, nextents, attr_at - data_at).map_err(bad)?;
        if d.forkoff != 0 {
            check_attr_fork(d, anextents, raw.len() - attr_at).map_err(bad)?;
        }
        let dev = match d.format {
            FORMAT_DEV => Be32::at(&raw[..attr_at], data_at).map_err(bad)?.get(),
            _ => 0,
        };
        let (nlink, projid) = match d.version {
            1 => (d.onlink.get().into(), 0),
            _ => {
                let high = u32::from(d.projid_hi.get()) << 16;
                (d.nlink.get(), high | u32::from(d.projid_lo.get()))
            }
        };
        let time = |raw: Be64| {
            let (sec, nsec) = timestamp(raw.get(), flags2 & DIFLAG2_BIGTIME != 0);
            Time { sec, nsec }
        };
        Ok(Inode {
            ino,
            mode,
            nlink,
            uid: d.uid.get(),
            gid: d.gid.get(),
            projid,
            size,
            nblocks: d.nblocks.get(),
            atime: time(d.atime),
            mtime: time(d.mtime),
            ctime: time(d.ctime),
            crtime: v3.map(|v| time(v.crtime)),
            generation: d.r#gen.get(),
            flags: d.flags.get(),
            flags2,
            rdev: (dev >> 18 & 0x3fff, dev & 0x3_ffff),
            nextents,
            anextents,
            format: d.format,
            aformat: d.aformat,
            data_at,
            attr_at,
            raw: raw.into(),
        })
    }

    /// The type.
    pub fn file_type(&self) -> FileType {
        FileType::from_mode(self.mode)
    }

    /// Whether it is a directory.
    pub fn is_dir(&self) -> bool {
        self.file_type() == FileType::Directory
    }

    /// A fork's format, `FORMAT_*`; `None` if there is no such fork.
    pub fn fork_format(&self, fork: Fork) -> Option<u8> {
        match fork {
            Fork::Data => Some(self.format),
            Fork::Attr => (self.attr_at < self.raw.len()).then_some(self.aformat),
        }
    }

    /// A fork's part of the inode.
    pub fn fork_bytes(&self, fork: Fork) -> &[u8] {
        match fork {
            Fork::Data => &self.raw[self.data_at..self.attr_at],
            Fork::Attr => &self.raw[self.attr_at..],
        }
    }

    /// Its flags as lsattr(1) knows them.
    pub(crate) fn common_flags(&self) -> IFlags {
        let set = COMMON_FLAGS
            .iter()
            .filter(|(flag, _)| self.flags & flag != 0);
        set.map(|(_, flag)| *flag).collect()
    }

    /// How many extents a fork has.
    pub(crate) fn extents(&self, fork: Fork) -> u64 {
        match fork {
            Fork::Data => self.nextents,
            Fork::Attr => self.anextents,
        }
    }

    /// The extents of a fork that are in the inode: [`Inode::parse`] has checked that they fit.
    pub(crate) fn records(&self, fork: Fork) -> &[ExtentRecord] {
        let records = ExtentRecord::slice_at(self.fork_bytes(fork), 0, self.extents(fork) as usize);
        records.unwrap_or_default()
    }

    /// The contents of a local data fork.
    pub(crate) fn local_data(&self) -> &[u8] {
        // Inode::parse has checked that the size fits.
        &self.fork_bytes(Fork::Data)[..self.size as usize]
    }

    pub(crate) fn fault(&self, what: &'static str, fault: Fault) -> Error {
        Error::corrupt(what, At::Inode(self.ino), fault)
    }

    /// The error of a field whose value is not what it should be.
    pub(crate) fn wrong(
        &self,
        what: &'static str,
        field: &'static str,
        expected: &'static str,
        found: impl Into<u64>,
    ) -> Error {
        self.fault(what, Fault::field(field, expected, found))
    }
}

/// The flags that other file systems have too.
const COMMON_FLAGS: [(u16, IFlags); 6] = [
    (DIFLAG_SYNC, IFlags::SYNC),
    (DIFLAG_IMMUTABLE, IFlags::IMMUTABLE),
    (DIFLAG_APPEND, IFlags::APPEND),
    (DIFLAG_NODUMP, IFlags::NODUMP),
    (DIFLAG_NOATIME, IFlags::NOATIME),
    (DIFLAG_PROJINHERIT, IFlags::PROJECT_INHERIT),
];

/// Those of them that a copy keeps, and that statx(2) shows.
pub(crate) const KEPT_FLAGS: IFlags = IFlags::IMMUTABLE
    .union(IFlags::APPEND)
    .union(IFlags::NODUMP);

/// The flags of `di_flags` that not every inode may have, and their names.
pub(crate) const SPECIAL_FLAGS: [(u16, &str); 7] = [
    (DIFLAG_REALTIME, "realtime"),
    (DIFLAG_NEWRTBM, "newrtbm"),
    (DIFLAG_RTINHERIT, "rtinherit"),
    (DIFLAG_PROJINHERIT, "projinherit"),
    (DIFLAG_NOSYMLINKS, "nosymlinks"),
    (DIFLAG_EXTSZINHERIT, "extszinherit"),
    (DIFLAG_EXTSIZE, "extsize"),
];

/// The flags of `di_flags2`, and their names.
pub(crate) const FLAGS2: [(u64, &str); 5] = [
    (DIFLAG2_DAX, "dax"),
    (DIFLAG2_REFLINK, "reflink"),
    (DIFLAG2_COWEXTSIZE, "cowextsize"),
    (DIFLAG2_BIGTIME, "bigtime"),
    (DIFLAG2_NREXT64, "nrext64"),
];

/// All of [`FLAGS2`].
pub(crate) fn known_flags2() -> u64 {
    FLAGS2.iter().fold(0, |all, (flag, _)| all | flag)
}

/// The flags that an inode may not have, of [`SPECIAL_FLAGS`] and of [`FLAGS2`].
pub(crate) fn unfit_flags(g: &Geometry, ino: u64, kind: FileType, realtime: bool) -> (u16, u64) {
    const OF_DIRECTORIES: u16 =
        DIFLAG_RTINHERIT | DIFLAG_PROJINHERIT | DIFLAG_NOSYMLINKS | DIFLAG_EXTSZINHERIT;
    let f = &g.features;
    let (dir, regular) = (kind == FileType::Directory, kind == FileType::Regular);
    let shares = f.reflink && !realtime;
    let unless = |fits: bool, flag: u16| if fits { 0 } else { flag };
    let unless2 = |fits: bool, flag: u64| if fits { 0 } else { flag };
    let flags = unless(regular && g.rblocks != 0, DIFLAG_REALTIME)
        | unless(ino == g.rbmino, DIFLAG_NEWRTBM)
        | unless(dir, OF_DIRECTORIES)
        | unless(regular, DIFLAG_EXTSIZE);
    let flags2 = unless2(regular || dir, DIFLAG2_DAX)
        | unless2(shares && regular, DIFLAG2_REFLINK)
        | unless2(shares && (regular || dir), DIFLAG2_COWEXTSIZE)
        | unless2(f.bigtime, DIFLAG2_BIGTIME)
        | unless2(f.nrext64, DIFLAG2_NREXT64);
    (flags, flags2)
}
