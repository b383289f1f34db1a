//! The calls of [`crate::outcomes`], each on a file in a directory of its own.

use std::ffi::CString;
use std::fs;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use rustix::fs::{
    Access, AtFlags, CWD, FallocateFlags, FileType, FlockOperation, Gid, IFlags, Mode, Nsecs,
    OFlags, RenameFlags, SeekFrom, StatxFlags, Timespec, Timestamps, UTIME_NOW, UTIME_OMIT, Uid,
    XattrFlags,
};
use rustix::io::{Errno, ReadWriteFlags};
use rustix::mm::{MapFlags, MsyncFlags, ProtFlags};

use crate::outcomes::{SIZE, STRANGER};
use crate::semantics::scenes::acl;

pub type Result<T = i64> = std::result::Result<T, Errno>;

/// A group that the stranger is in besides its own.
pub const GROUP: u32 = 3000;
/// A file in a directory of its own.
pub struct Place {
    pub dir: PathBuf,
    pub file: PathBuf,
}

pub type Call = fn(&Place) -> Result;

#[repr(align(4096))]
pub struct Aligned(pub [u8; 8192]);

pub fn open(path: &Path, flags: OFlags) -> Result<OwnedFd> {
    rustix::fs::open(path, flags | OFlags::CLOEXEC, Mode::from(0o666))
}

fn write_by(place: &Place, flags: OFlags) -> Result {
    let file = open(&place.file, flags)?;
    let bytes = Aligned([b'n'; 8192]);
    Ok(rustix::io::write(&file, &bytes.0[..4096])? as i64)
}

fn read_by(place: &Place, flags: OFlags) -> Result {
    let file = open(&place.file, flags)?;
    let mut bytes = Aligned([0; 8192]);
    let n = rustix::io::read(&file, &mut bytes.0[..4096])?;
    Ok(n as i64 + i64::from(bytes.0[0]))
}

pub fn allocate(place: &Place, flags: FallocateFlags, offset: u64, len: u64) -> Result {
    let file = open(&place.file, OFlags::WRONLY)?;
    rustix::fs::fallocate(file, flags, offset, len).map(|()| 0)
}

pub fn cut(place: &Place, size: u64) -> Result {
    let file = open(&place.file, OFlags::RDWR)?;
    rustix::fs::ftruncate(file, size).map(|()| 0)
}

fn chmod(place: &Place, mode: u32) -> Result {
    rustix::fs::chmod(&place.file, Mode::from_raw_mode(mode)).map(|()| 0)
}

fn chown(place: &Place, uid: Option<u32>, gid: Option<u32>) -> Result {
    let (uid, gid) = (uid.map(Uid::from_raw), gid.map(Gid::from_raw));
    rustix::fs::chown(&place.file, uid, gid).map(|()| 0)
}

fn touch(place: &Place, access: Nsecs, modification: Nsecs) -> Result {
    let time = |tv_nsec| Timespec {
        tv_sec: 1_000_000,
        tv_nsec,
    };
    let times = Timestamps {
        last_access: time(access),
        last_modification: time(modification),
    };
    rustix::fs::utimensat(CWD, &place.file, &times, AtFlags::empty()).map(|()| 0)
}

fn set_attribute(place: &Place, name: &str, value: &[u8], flags: XattrFlags) -> Result {
    rustix::fs::setxattr(&place.file, name, value, flags).map(|()| 0)
}

fn move_to(place: &Place, from: &str, to: &str, flags: RenameFlags) -> Result {
    let (from, to) = (place.dir.join(from), place.dir.join(to));
    rustix::fs::renameat_with(CWD, from, CWD, to, flags).map(|()| 0)
}

fn make(place: &Place, kind: FileType, mode: u32, dev: u64) -> Result {
    let mode = Mode::from_raw_mode(mode);
    rustix::fs::mknodat(CWD, place.dir.join("new"), kind, mode, dev).map(|()| 0)
}

fn attributes(place: &Place, set: IFlags) -> Result {
    let file = open(&place.file, OFlags::RDONLY)?;
    let now = rustix::fs::ioctl_getflags(&file)?;
    rustix::fs::ioctl_setflags(&file, now | set).map(|()| 0)
}

/// An ioctl(2) that only reads, with room for its answer, of which the length is told.
fn answer(place: &Place, command: u32) -> Result {
    let file = open(&place.file, OFlags::RDONLY)?;
    let mut room = [0u8; 256];
    // SAFETY: the commands of the table write at most 256 bytes.
    let done = unsafe { libc::ioctl(file.as_raw_fd(), command as _, &mut room) };
    match done {
        0 => Ok(room
            .iter()
            .rposition(|byte| *byte != 0)
            .map_or(0, |last| (last > 4) as i64)),
        _ => Err(Errno::from_io_error(&std::io::Error::last_os_error()).expect("an errno")),
    }
}

fn map_and_store(place: &Place) -> Result {
    let file = open(&place.file, OFlags::RDWR)?;
    let all = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a new mapping, which nothing else refers to; the file is as long for as long.
    unsafe {
        let at = rustix::mm::mmap(std::ptr::null_mut(), 4096, all, MapFlags::SHARED, &file, 0)?;
        at.cast::<u8>().write(b'm');
        rustix::mm::msync(at, 4096, MsyncFlags::SYNC)?;
        rustix::mm::munmap(at, 4096)?;
    }
    Ok(0)
}

fn copy_into(place: &Place) -> Result {
    let from = open(&place.dir.join("other"), OFlags::RDONLY)?;
    let to = open(&place.file, OFlags::WRONLY)?;
    Ok(rustix::fs::copy_file_range(from, None, to, None, 1000)? as i64)
}

fn send_into(place: &Place) -> Result {
    let from = open(&place.dir.join("other"), OFlags::RDONLY)?;
    let to = open(&place.file, OFlags::WRONLY)?;
    Ok(rustix::fs::sendfile(to, from, None, 1000)? as i64)
}

fn splice_into(place: &Place) -> Result {
    let to = open(&place.file, OFlags::WRONLY)?;
    let (reader, writer) = rustix::pipe::pipe()?;
    rustix::io::write(writer, b"spliced")?;
    Ok(rustix::pipe::splice(
        reader,
        None,
        to,
        None,
        100,
        rustix::pipe::SpliceFlags::empty(),
    )? as i64)
}

fn write_with(place: &Place, flags: ReadWriteFlags, open_flags: OFlags) -> Result {
    let file = open(&place.file, open_flags)?;
    let bytes = [std::io::IoSlice::new(b"with flags")];
    Ok(rustix::io::pwritev2(file, &bytes, 100, flags)? as i64)
}

fn lock(place: &Place, flags: OFlags, operation: FlockOperation) -> Result {
    rustix::fs::flock(open(&place.file, flags)?, operation).map(|()| 0)
}

fn control(place: &Place, flags: OFlags, command: i32, argument: i32) -> Result {
    let file = open(&place.file, flags)?;
    // SAFETY: these commands take a number.
    let result = unsafe { libc::fcntl(file.as_raw_fd(), command, argument) };
    match result {
        -1 => Err(last_error()),
        n => Ok(n.into()),
    }
}

fn last_error() -> Errno {
    Errno::from_io_error(&std::io::Error::last_os_error()).expect("an errno")
}

fn range(place: &Place, flags: OFlags, kind: i32) -> Result {
    let file = open(&place.file, flags)?;
    // SAFETY: flock is plain data, for which zero is a value.
    let mut lock: libc::flock = unsafe { std::mem::zeroed() };
    (lock.l_type, lock.l_len) = (kind as i16, 10);
    // SAFETY: the descriptor is open and the lock outlives the call.
    match unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &lock) } {
        -1 => Err(last_error()),
        n => Ok(n.into()),
    }
}

fn without_name(place: &Place, flags: OFlags, mode: u32) -> Result {
    let flags = OFlags::TMPFILE | OFlags::RDWR | flags;
    let file = rustix::fs::open(&place.dir, flags, Mode::from_raw_mode(mode))?;
    rustix::io::write(&file, b"content")?;
    let stat = rustix::fs::fstat(&file)?;
    let name = format!("/proc/self/fd/{}", file.as_raw_fd());
    let linked = rustix::fs::linkat(
        CWD,
        name,
        CWD,
        place.dir.join("new"),
        AtFlags::SYMLINK_FOLLOW,
    );
    Ok(i64::from(stat.st_mode) << 32 | linked.map_or_else(|e| e.raw_os_error().into(), |()| 0))
}

fn told(place: &Place) -> Result {
    let flags = AtFlags::SYMLINK_NOFOLLOW;
    let stat = rustix::fs::statx(CWD, &place.file, flags, StatxFlags::ALL)?;
    Ok(stat.stx_attributes.bits() as i64)
}

pub const DEFAULT_ACL: &str = "system.posix_acl_default";
pub const ACCESS_ACL: &str = "system.posix_acl_access";

/// For a named user and a mask: others' entries as usual.
pub fn acl_of(user: u32) -> Vec<u8> {
    let none = u32::MAX;
    acl(&[
        (1, 6, none),
        (2, 6, user),
        (4, 4, none),
        (16, 6, none),
        (32, 0, none),
    ])
}

#[rustfmt::skip]
pub const CALLS: &[(&str, Call)] = &[
    ("open for reading", |p| open(&p.file, OFlags::RDONLY).map(|_| 0)),
    ("open for writing", |p| open(&p.file, OFlags::WRONLY).map(|_| 0)),
    ("open for both", |p| open(&p.file, OFlags::RDWR).map(|_| 0)),
    ("open for neither", |p| open(&p.file, OFlags::from_bits_retain(3)).map(|_| 0)),
    ("open truncating", |p| open(&p.file, OFlags::WRONLY | OFlags::TRUNC).map(|_| 0)),
    ("open for reading, truncating", |p| open(&p.file, OFlags::RDONLY | OFlags::TRUNC).map(|_| 0)),
    ("open appending, truncating", |p| open(&p.file, OFlags::WRONLY | OFlags::APPEND | OFlags::TRUNC).map(|_| 0)),
    ("open O_CREAT", |p| open(&p.file, OFlags::RDWR | OFlags::CREATE).map(|_| 0)),
    ("open O_CREAT|O_TRUNC", |p| open(&p.file, OFlags::RDWR | OFlags::CREATE | OFlags::TRUNC).map(|_| 0)),
    ("open O_EXCL", |p| open(&p.file, OFlags::RDWR | OFlags::CREATE | OFlags::EXCL).map(|_| 0)),
    ("open O_DIRECTORY", |p| open(&p.file, OFlags::DIRECTORY).map(|_| 0)),
    ("open O_NOFOLLOW", |p| open(&p.file, OFlags::NOFOLLOW).map(|_| 0)),
    ("open O_PATH", |p| open(&p.file, OFlags::PATH).map(|_| 0)),
    ("open O_NOATIME", |p| open(&p.file, OFlags::NOATIME).map(|_| 0)),
    ("open a directory for writing", |p| open(&p.dir, OFlags::RDWR).map(|_| 0)),
    ("make", |p| open(&p.dir.join("new"), OFlags::RDWR | OFlags::CREATE | OFlags::EXCL).map(|_| 0)),
    ("make, no mode", |p| rustix::fs::open(p.dir.join("new"), OFlags::RDWR | OFlags::CREATE, Mode::empty())
        .and_then(|f| rustix::io::write(f, b"x")).map(|n| n as i64)),
    ("make set-id", |p| rustix::fs::open(p.dir.join("new"), OFlags::RDWR | OFlags::CREATE, Mode::from_raw_mode(0o6777)).map(|_| 0)),
    ("make and write", |p| rustix::fs::open(p.dir.join("new"), OFlags::RDWR | OFlags::CREATE, Mode::from_raw_mode(0o6777))
        .and_then(|f| rustix::io::write(f, b"x")).map(|n| n as i64)),
    ("O_TMPFILE", |p| without_name(p, OFlags::empty(), 0o6755)),
    ("O_TMPFILE|O_EXCL", |p| without_name(p, OFlags::EXCL, 0o600)),
    ("read", |p| read_by(p, OFlags::RDONLY)),
    ("read O_DIRECT", |p| read_by(p, OFlags::RDONLY | OFlags::DIRECT)),
    ("read O_NOATIME", |p| read_by(p, OFlags::RDONLY | OFlags::NOATIME)),
    ("read O_RDWR", |p| read_by(p, OFlags::RDWR)),
    ("write", |p| write_by(p, OFlags::WRONLY)),
    ("write O_RDWR", |p| write_by(p, OFlags::RDWR)),
    ("write O_APPEND", |p| write_by(p, OFlags::WRONLY | OFlags::APPEND)),
    ("write O_SYNC", |p| write_by(p, OFlags::RDWR | OFlags::SYNC)),
    ("write O_DSYNC", |p| write_by(p, OFlags::WRONLY | OFlags::DSYNC)),
    ("write O_DIRECT", |p| write_by(p, OFlags::WRONLY | OFlags::DIRECT)),
    ("write O_DIRECT|O_RDWR", |p| write_by(p, OFlags::RDWR | OFlags::DIRECT)),
    ("write O_DIRECT|O_APPEND", |p| write_by(p, OFlags::WRONLY | OFlags::DIRECT | OFlags::APPEND)),
    ("write O_DIRECT|O_SYNC", |p| write_by(p, OFlags::RDWR | OFlags::DIRECT | OFlags::SYNC)),
    ("write O_TRUNC", |p| write_by(p, OFlags::RDWR | OFlags::TRUNC)),
    ("write nothing", |p| open(&p.file, OFlags::RDWR).and_then(|f| rustix::io::write(f, b"")).map(|n| n as i64)),
    ("pwritev2 RWF_APPEND", |p| write_with(p, ReadWriteFlags::APPEND, OFlags::WRONLY)),
    ("pwritev2 RWF_DSYNC", |p| write_with(p, ReadWriteFlags::DSYNC, OFlags::RDWR)),
    ("pwritev2 RWF_NOAPPEND", |p| write_with(p, ReadWriteFlags::from_bits_retain(0x20), OFlags::WRONLY | OFlags::APPEND)),
    ("pwrite far away", |p| open(&p.file, OFlags::WRONLY).and_then(|f| rustix::io::pwrite(f, b"x", 1 << 20)).map(|n| n as i64)),
    ("mmap and store", map_and_store),
    ("copy_file_range", copy_into),
    ("sendfile", send_into),
    ("splice", splice_into),
    ("clone", |p| {
        let from = open(&p.dir.join("other"), OFlags::RDONLY)?;
        rustix::fs::ioctl_ficlone(open(&p.file, OFlags::WRONLY)?, from).map(|()| 0)
    }),
    ("truncate to nothing", |p| cut(p, 0)),
    ("truncate", |p| cut(p, 100)),
    ("truncate to the same", |p| cut(p, SIZE as u64)),
    ("truncate to more", |p| cut(p, 100_000)),
    ("truncate by path", |p| {
        let path = CString::new(p.file.as_os_str().as_bytes()).expect("a path");
        // SAFETY: the path is a C string that lives over the call.
        match unsafe { libc::truncate(path.as_ptr(), 5) } {
            0 => Ok(0),
            _ => Err(last_error()),
        }
    }),
    ("fallocate", |p| allocate(p, FallocateFlags::empty(), 0, 100_000)),
    ("fallocate within", |p| allocate(p, FallocateFlags::empty(), 0, 100)),
    ("fallocate keep", |p| allocate(p, FallocateFlags::KEEP_SIZE, 0, 100_000)),
    ("fallocate punch", |p| allocate(p, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, 100, 8192)),
    ("fallocate zero", |p| allocate(p, FallocateFlags::ZERO_RANGE, 100, 8192)),
    ("fallocate zero keep", |p| allocate(p, FallocateFlags::ZERO_RANGE | FallocateFlags::KEEP_SIZE, 100, 8192)),
    ("fallocate collapse", |p| allocate(p, FallocateFlags::COLLAPSE_RANGE, 0, 4096)),
    ("fallocate insert", |p| allocate(p, FallocateFlags::INSERT_RANGE, 0, 4096)),
    ("fallocate unshare", |p| allocate(p, FallocateFlags::UNSHARE_RANGE, 0, 4096)),
    ("chmod", |p| chmod(p, 0o600)),
    ("chmod to the same", |p| rustix::fs::stat(&p.file).and_then(|s| chmod(p, s.st_mode & 0o7777))),
    ("chmod set-id", |p| chmod(p, 0o6755)),
    ("chmod set-gid, no x", |p| chmod(p, 0o2644)),
    ("chmod sticky", |p| chmod(p, 0o1755)),
    ("chown to self", |p| chown(p, Some(rustix::process::geteuid().as_raw()), None)),
    ("chown to the same", |p| rustix::fs::stat(&p.file).and_then(|s| chown(p, Some(s.st_uid), Some(s.st_gid)))),
    ("chown to others", |p| chown(p, Some(1234), Some(1234))),
    ("chown without an owner", |p| chown(p, None, None)),
    ("chgrp to own", |p| chown(p, None, Some(rustix::process::getegid().as_raw()))),
    ("chgrp to supplementary", |p| chown(p, None, Some(GROUP))),
    ("utimens now", |p| touch(p, UTIME_NOW, UTIME_NOW)),
    ("utimens set", |p| touch(p, 1, 2)),
    ("utimens access time", |p| touch(p, 1, UTIME_OMIT)),
    ("utimens access time now", |p| touch(p, UTIME_NOW, UTIME_OMIT)),
    ("utimens modification time", |p| touch(p, UTIME_OMIT, 1)),
    ("utimens neither", |p| touch(p, UTIME_OMIT, UTIME_OMIT)),
    ("setxattr user", |p| set_attribute(p, "user.new", b"value", XattrFlags::empty())),
    ("setxattr create", |p| set_attribute(p, "user.old", b"value", XattrFlags::CREATE)),
    ("setxattr replace", |p| set_attribute(p, "user.new", b"value", XattrFlags::REPLACE)),
    ("setxattr trusted", |p| set_attribute(p, "trusted.new", b"value", XattrFlags::empty())),
    ("setxattr capability", |p| set_attribute(p, "security.capability",
        b"\x01\0\0\x02\x01\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0", XattrFlags::empty())),
    ("setxattr security", |p| set_attribute(p, "security.new", b"value", XattrFlags::empty())),
    ("setxattr nonsense", |p| set_attribute(p, "nonsense", b"value", XattrFlags::empty())),
    ("setxattr ACL", |p| set_attribute(p, ACCESS_ACL, &acl_of(STRANGER), XattrFlags::empty())),
    ("setxattr bad ACL", |p| set_attribute(p, ACCESS_ACL, b"nonsense", XattrFlags::empty())),
    ("setxattr default ACL", |p| set_attribute(p, DEFAULT_ACL, &acl_of(STRANGER), XattrFlags::empty())),
    ("setxattr default ACL of the directory", |p|
        rustix::fs::setxattr(&p.dir, DEFAULT_ACL, &acl_of(STRANGER), XattrFlags::empty()).map(|()| 0)),
    ("getxattr", |p| rustix::fs::getxattr(&p.file, "user.old", &mut [0u8; 64][..]).map(|n| n as i64)),
    ("getxattr too small", |p| rustix::fs::getxattr(&p.file, "user.old", &mut [0u8; 1][..]).map(|n| n as i64)),
    ("getxattr missing", |p| rustix::fs::getxattr(&p.file, "user.none", &mut [0u8; 64][..]).map(|n| n as i64)),
    ("getxattr trusted", |p| rustix::fs::getxattr(&p.file, "trusted.old", &mut [0u8; 64][..]).map(|n| n as i64)),
    ("getxattr ACL", |p| rustix::fs::getxattr(&p.file, ACCESS_ACL, &mut [0u8; 64][..]).map(|n| n as i64)),
    ("listxattr", |p| rustix::fs::listxattr(&p.file, &mut [0u8; 256][..]).map(|n| n as i64)),
    ("removexattr", |p| rustix::fs::removexattr(&p.file, "user.old").map(|()| 0)),
    ("removexattr missing", |p| rustix::fs::removexattr(&p.file, "user.none").map(|()| 0)),
    ("removexattr ACL", |p| rustix::fs::removexattr(&p.file, ACCESS_ACL).map(|()| 0)),
    ("link", |p| rustix::fs::link(&p.file, p.dir.join("new")).map(|()| 0)),
    ("link over", |p| rustix::fs::link(&p.file, p.dir.join("other")).map(|()| 0)),
    ("link of a directory", |p| rustix::fs::link(&p.dir, p.dir.join("new")).map(|()| 0)),
    ("symlink", |p| rustix::fs::symlink("file", p.dir.join("new")).map(|()| 0)),
    ("readlink", |p| rustix::fs::readlink(&p.file, Vec::new()).map(|_| 0)),
    ("rename", |p| move_to(p, "file", "new", RenameFlags::empty())),
    ("rename over", |p| move_to(p, "file", "other", RenameFlags::empty())),
    ("rename another over it", |p| move_to(p, "other", "file", RenameFlags::empty())),
    ("rename to itself", |p| move_to(p, "file", "file", RenameFlags::empty())),
    ("rename into the directory below", |p| move_to(p, "file", "sub/new", RenameFlags::empty())),
    ("rename a directory", |p| move_to(p, "sub", "new", RenameFlags::empty())),
    ("rename no replace", |p| move_to(p, "file", "other", RenameFlags::NOREPLACE)),
    ("rename exchange", |p| move_to(p, "file", "other", RenameFlags::EXCHANGE)),
    ("rename exchange with a directory", |p| move_to(p, "file", "sub", RenameFlags::EXCHANGE)),
    ("rename whiteout", |p| move_to(p, "file", "new", RenameFlags::WHITEOUT)),
    ("rename nonsense", |p| move_to(p, "file", "new", RenameFlags::NOREPLACE | RenameFlags::EXCHANGE)),
    ("unlink", |p| rustix::fs::unlink(&p.file).map(|()| 0)),
    ("unlink a directory", |p| rustix::fs::unlink(p.dir.join("sub")).map(|()| 0)),
    ("rmdir", |p| rustix::fs::rmdir(p.dir.join("sub")).map(|()| 0)),
    ("rmdir a file", |p| rustix::fs::rmdir(&p.file).map(|()| 0)),
    ("mkdir", |p| rustix::fs::mkdir(p.dir.join("new"), Mode::from_raw_mode(0o7777)).map(|()| 0)),
    ("mknod file", |p| make(p, FileType::RegularFile, 0o6777, 0)),
    ("mknod fifo", |p| make(p, FileType::Fifo, 0o666, 0)),
    ("mknod socket", |p| make(p, FileType::Socket, 0o666, 0)),
    ("mknod device", |p| make(p, FileType::CharacterDevice, 0o666, rustix::fs::makedev(1, 3))),
    ("mknod whiteout", |p| make(p, FileType::CharacterDevice, 0o666, 0)),
    ("flock shared", |p| lock(p, OFlags::RDONLY, FlockOperation::NonBlockingLockShared)),
    ("flock", |p| lock(p, OFlags::RDONLY, FlockOperation::NonBlockingLockExclusive)),
    ("lock for reading", |p| range(p, OFlags::RDONLY, libc::F_RDLCK)),
    ("lock for writing", |p| range(p, OFlags::RDONLY, libc::F_WRLCK)),
    ("lock for writing, open for it", |p| range(p, OFlags::WRONLY, libc::F_WRLCK)),
    ("lock for reading, open for writing", |p| range(p, OFlags::WRONLY, libc::F_RDLCK)),
    ("lease", |p| control(p, OFlags::RDONLY, libc::F_SETLEASE, libc::F_RDLCK)),
    ("O_APPEND off", |p| control(p, OFlags::WRONLY | OFlags::APPEND, libc::F_SETFL, 0)),
    ("O_NOATIME on", |p| control(p, OFlags::RDONLY, libc::F_SETFL, libc::O_NOATIME)),
    ("get attributes", |p| open(&p.file, OFlags::RDONLY).and_then(rustix::fs::ioctl_getflags).map(|f| i64::from(f.bits()))),
    ("get the generation", |p| answer(p, 0x8008_7601)),
    ("get the label", |p| answer(p, 0x8100_9431)),
    ("set nodump", |p| attributes(p, IFlags::NODUMP)),
    ("set append", |p| attributes(p, IFlags::APPEND)),
    ("set immutable", |p| attributes(p, IFlags::IMMUTABLE)),
    ("set noatime", |p| attributes(p, IFlags::NOATIME)),
    ("set attributes of the directory", |p| {
        let dir = open(&p.dir, OFlags::RDONLY)?;
        let now = rustix::fs::ioctl_getflags(&dir)?;
        rustix::fs::ioctl_setflags(&dir, now | IFlags::NODUMP).map(|()| 0)
    }),
    ("statx attributes", told),
    ("access for reading", |p| rustix::fs::access(&p.file, Access::READ_OK).map(|()| 0)),
    ("access for writing", |p| rustix::fs::access(&p.file, Access::WRITE_OK).map(|()| 0)),
    ("access for executing", |p| rustix::fs::access(&p.file, Access::EXEC_OK).map(|()| 0)),
    ("access of the directory", |p| rustix::fs::access(&p.dir, Access::WRITE_OK).map(|()| 0)),
    ("seek to data", |p| open(&p.file, OFlags::RDONLY).and_then(|f| rustix::fs::seek(f, SeekFrom::Data(0))).map(|n| n as i64)),
    ("seek to a hole", |p| open(&p.file, OFlags::RDONLY).and_then(|f| rustix::fs::seek(f, SeekFrom::Hole(0))).map(|n| n as i64)),
    ("fsync", |p| open(&p.file, OFlags::RDONLY).and_then(rustix::fs::fsync).map(|()| 0)),
    ("list", |p| fs::read_dir(&p.dir).map(|entries| entries.count() as i64).map_err(|e| Errno::from_io_error(&e).expect("an errno"))),
    ("chdir", |p| open(&p.dir, OFlags::PATH).and_then(|d| rustix::fs::openat(d, "file", OFlags::RDONLY, Mode::empty())).map(|_| 0)),
];
