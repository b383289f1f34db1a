//! The few system calls that rustix has no safe form of.

use std::ffi::CStr;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::fs::{AtFlags, Mode, OFlags, ResolveFlags, Statx, StatxFlags};
use rustix::io::Errno;
use smallvec::SmallVec;
use uvfs_queue::shm::SharedMemory;
use uvfs_sys::checked;

pub(crate) type Result<T> = std::result::Result<T, Errno>;

/// MAX_HANDLE_SZ of name_to_handle_at(2).
const MAX_HANDLE: usize = 128;
/// All that is asked of statx(2) for attributes.
pub(crate) const STATX_MASK: StatxFlags = StatxFlags::BASIC_STATS
    .union(StatxFlags::BTIME)
    .union(StatxFlags::MNT_ID);

/// Opens a name or an inode for its identity only, and no symbolic link's target.
pub(crate) const O_PATH: OFlags = OFlags::PATH.union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);
/// Never out of the source.
pub(crate) const BENEATH: ResolveFlags = ResolveFlags::BENEATH
    .union(ResolveFlags::NO_SYMLINKS)
    .union(ResolveFlags::NO_MAGICLINKS);

/// The result of name_to_handle_at(2): names an inode of a file system for as long as it exists, and
/// never a later inode with the same number.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct FileHandle {
    kind: i32,
    bytes: SmallVec<[u8; 32]>,
}

impl FileHandle {
    pub(crate) fn parts(&self) -> (i32, &[u8]) {
        (self.kind, &self.bytes)
    }

    /// The number of the inode that it is of, where a file system of this type (statfs(2)'s f_type)
    /// says it.
    pub(crate) fn ino(&self, fs_type: i64) -> Option<u64> {
        const EXT4: i64 = 0xef53;
        const TMPFS: i64 = 0x0102_1994;
        const XFS: i64 = 0x5846_5342;
        let word = |at: usize| {
            let bytes = self.bytes[at..at + 4].try_into().expect("four bytes");
            u64::from(u32::from_ne_bytes(bytes))
        };
        let long = |at| word(at) | word(at + 4) << 32;
        // As the kernel makes them: inode number and generation, on tmpfs the other way round.
        match (fs_type, self.kind, self.bytes.len()) {
            (EXT4 | XFS, 1, 8) => Some(word(0)),
            (XFS, 0x81, 12) => Some(long(0)),
            (TMPFS, 1, 12) => Some(long(4)),
            _ => None,
        }
    }

    /// Nothing when it is too long to be one.
    pub(crate) fn from_parts(kind: i32, bytes: &[u8]) -> Option<Self> {
        (bytes.len() <= MAX_HANDLE).then(|| Self {
            kind,
            bytes: SmallVec::from_slice(bytes),
        })
    }
}

/// struct file_handle with room for any handle.
#[repr(C)]
struct RawHandle {
    len: u32,
    kind: i32,
    bytes: [u8; MAX_HANDLE],
}

fn owned(result: libc::c_long) -> Result<OwnedFd> {
    let fd = checked(result)?;
    // SAFETY: the call that gave it succeeded, so it is a new descriptor without another owner.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as i32) })
}

/// The handle of `name` in `dir` (of `dir` itself when empty), and the id of the mount it is on.
pub(crate) fn handle_at(dir: BorrowedFd<'_>, name: &CStr) -> Result<(FileHandle, u64)> {
    let mut raw = RawHandle {
        len: MAX_HANDLE as u32,
        kind: 0,
        bytes: [0; MAX_HANDLE],
    };
    let mut mount = 0i32;
    let flags = if name.is_empty() {
        libc::AT_EMPTY_PATH
    } else {
        0
    };
    // SAFETY: `raw` has the layout of struct file_handle with `len` bytes of room, `mount` is an
    // int, `name` ends with a 0; all outlive the call.
    checked(unsafe {
        libc::syscall(
            libc::SYS_name_to_handle_at,
            dir.as_raw_fd(),
            name.as_ptr(),
            &raw mut raw,
            &raw mut mount,
            flags,
        )
    })?;
    let bytes = raw.bytes.get(..raw.len as usize).ok_or(Errno::OVERFLOW)?;
    Ok((
        FileHandle {
            kind: raw.kind,
            bytes: SmallVec::from_slice(bytes),
        },
        mount as u64,
    ))
}

/// Opens what `handle` names on the mount that `mount` is on.
pub(crate) fn open_handle(
    mount: BorrowedFd<'_>,
    handle: &FileHandle,
    flags: OFlags,
) -> Result<OwnedFd> {
    let mut raw = RawHandle {
        len: handle.bytes.len() as u32,
        kind: handle.kind,
        bytes: [0; MAX_HANDLE],
    };
    raw.bytes[..handle.bytes.len()].copy_from_slice(&handle.bytes);
    // SAFETY: `raw` is a struct file_handle of `len` bytes that outlives the call.
    owned(unsafe {
        libc::syscall(
            libc::SYS_open_by_handle_at,
            mount.as_raw_fd(),
            &raw mut raw,
            (flags | OFlags::CLOEXEC).bits() as i32,
        )
    })
}

/// The path in /proc that stands for a descriptor of this thread. Extended attributes go by it: the calls with a
/// descriptor refuse O_PATH ones (setxattrat(2) with an empty path too).
pub(crate) struct ProcPath([u8; 40]);

impl ProcPath {
    pub(crate) fn new(fd: BorrowedFd<'_>) -> Self {
        use std::io::Write;
        let mut path = [0; 40];
        // 20 bytes of prefix and at most 10 digits always fit, and the rest stays 0.
        let _ = write!(&mut path[..39], "/proc/thread-self/fd/{}", fd.as_raw_fd());
        Self(path)
    }

    pub(crate) fn as_c_str(&self) -> &CStr {
        CStr::from_bytes_until_nul(&self.0).unwrap_or_default()
    }
}

/// Opens again what `fd`, maybe an O_PATH descriptor, stands for.
pub(crate) fn reopen(fd: BorrowedFd<'_>, flags: OFlags) -> Result<OwnedFd> {
    let flags = (flags | OFlags::CLOEXEC) - OFlags::NOFOLLOW;
    rustix::fs::open(ProcPath::new(fd).as_c_str(), flags, Mode::empty())
}

/// Attributes of what `fd` stands for.
pub(crate) fn stat(fd: BorrowedFd<'_>) -> Result<Statx> {
    rustix::fs::statx(fd, c"", AtFlags::EMPTY_PATH, STATX_MASK)
}

/// As [`stat`]; where others answer for the file system, what is known without asking them.
pub(crate) fn stat_known(fd: BorrowedFd<'_>) -> Result<Statx> {
    let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
    rustix::fs::statx(fd, c"", flags, STATX_MASK)
}

/// Attributes of `name` in `dir`, links not followed.
pub(crate) fn stat_at(dir: BorrowedFd<'_>, name: &CStr) -> Result<Statx> {
    let flags = AtFlags::SYMLINK_NOFOLLOW | AtFlags::NO_AUTOMOUNT;
    rustix::fs::statx(dir, name, flags, STATX_MASK)
}

/// Whether this thread may use what `fd` stands for in this way (faccessat2(2)).
pub(crate) fn access(fd: BorrowedFd<'_>, access: rustix::fs::Access) -> Result<()> {
    // SAFETY: the path is a static string; the other arguments are integers.
    checked(unsafe {
        libc::syscall(
            libc::SYS_faccessat2,
            fd.as_raw_fd(),
            c"".as_ptr(),
            access.bits(),
            libc::AT_EMPTY_PATH | libc::AT_EACCESS,
        )
    })
    .map(drop)
}

/// chmod(2) of what `fd`, maybe an O_PATH descriptor, stands for.
pub(crate) fn chmod(fd: BorrowedFd<'_>, mode: u32) -> Result<()> {
    static MISSING: AtomicBool = AtomicBool::new(false);
    if !MISSING.load(Ordering::Relaxed) {
        // SAFETY: the path is a static string; the other arguments are integers.
        let result = checked(unsafe {
            libc::syscall(
                uvfs_sys::SYS_FCHMODAT2,
                fd.as_raw_fd(),
                c"".as_ptr(),
                mode,
                libc::AT_EMPTY_PATH,
            )
        });
        match result {
            Err(Errno::NOSYS) => MISSING.store(true, Ordering::Relaxed),
            result => return result.map(drop),
        }
    }
    rustix::fs::chmod(ProcPath::new(fd).as_c_str(), Mode::from_raw_mode(mode))
}

/// getdents64(2).
pub(crate) fn getdents(fd: BorrowedFd<'_>, buf: &mut [u8]) -> Result<usize> {
    // SAFETY: the kernel writes at most `buf.len()` bytes to `buf`.
    checked(unsafe {
        libc::syscall(
            libc::SYS_getdents64,
            fd.as_raw_fd(),
            buf.as_mut_ptr(),
            buf.len(),
        )
    })
}

/// Sets this thread's file-system user id and gives the former; `u32::MAX` only asks.
pub(crate) fn setfsuid(uid: u32) -> u32 {
    // SAFETY: only integers; acts on the calling thread alone.
    unsafe { libc::syscall(libc::SYS_setfsuid, uid) as u32 }
}

/// Sets this thread's file-system group id and gives the former; `u32::MAX` only asks.
pub(crate) fn setfsgid(gid: u32) -> u32 {
    // SAFETY: only integers; acts on the calling thread alone.
    unsafe { libc::syscall(libc::SYS_setfsgid, gid) as u32 }
}

/// Gives this thread its own umask (and working directory).
pub(crate) fn unshare_fs() -> Result<()> {
    // SAFETY: with CLONE_FS alone, only the umask, root and working directory stop being shared.
    checked(unsafe { libc::unshare(libc::CLONE_FS) } as libc::c_long).map(drop)
}

/// mount_setattr(2): sets and clears attributes of the mount that `fd` is the root of.
pub(crate) fn mount_setattr(fd: BorrowedFd<'_>, set: u64, clear: u64) -> Result<()> {
    // struct mount_attr: attr_set, attr_clr, propagation, userns_fd.
    let attr: [u64; 4] = [set, clear, 0, 0];
    // SAFETY: the name is a C string and the structure has the size given; both live over the call.
    checked(unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            fd.as_raw_fd(),
            c"".as_ptr(),
            libc::AT_EMPTY_PATH,
            attr.as_ptr(),
            size_of_val(&attr),
        )
    })
    .map(drop)
}

/// A fanotify(7) group whose events tell of files by their handles, and of names.
pub(crate) fn fanotify_init(flags: libc::c_uint) -> Result<OwnedFd> {
    let flags = flags
        | libc::FAN_CLASS_NOTIF
        | libc::FAN_CLOEXEC
        | libc::FAN_NONBLOCK
        | libc::FAN_REPORT_DFID_NAME_TARGET;
    // SAFETY: only integers.
    owned(unsafe { libc::fanotify_init(flags, libc::O_RDONLY as libc::c_uint) } as libc::c_long)
}

/// Has a fanotify group tell of events on the file system of `fd`.
pub(crate) fn fanotify_mark(group: BorrowedFd<'_>, fd: BorrowedFd<'_>, mask: u64) -> Result<()> {
    let flags = libc::FAN_MARK_ADD | libc::FAN_MARK_FILESYSTEM;
    // SAFETY: a null path stands for the descriptor's own file; the rest are integers.
    checked(unsafe {
        libc::fanotify_mark(
            group.as_raw_fd(),
            flags,
            mask,
            fd.as_raw_fd(),
            std::ptr::null(),
        )
    } as libc::c_long)
    .map(drop)
}

/// Reads what comes into `len` bytes of shared memory.
pub(crate) fn read_shared(
    fd: BorrowedFd<'_>,
    memory: &SharedMemory,
    at: usize,
    len: usize,
) -> Result<usize> {
    let to = memory.at(at, len);
    // SAFETY: `at` has checked that the range is in the mapping, which lives as long as `memory`. No reference to its bytes
    // exists anywhere.
    let read = unsafe { libc::read(fd.as_raw_fd(), to.cast(), len) };
    checked(read)
}

/// ioctl(2) of a command whose argument is a structure that fits in `data`.
pub(crate) fn ioctl(
    fd: BorrowedFd<'_>,
    cmd: FileIoctl,
    data: &mut [u8; IOCTL_ROOM],
) -> Result<i32> {
    // SAFETY: each command of the type reads or writes at most its `size` at the argument, which is at most
    // `IOCTL_ROOM` (asserted for each by a test).
    checked(
        unsafe { libc::ioctl(fd.as_raw_fd(), cmd as u32 as _, data.as_mut_ptr()) } as libc::c_long,
    )
    .map(|n| n as i32)
}

/// Room for the argument of any [`FileIoctl`].
pub(crate) const IOCTL_ROOM: usize = 256;

/// The ioctls of files that are passed on: those of inode flags, project ids, generations and labels, from
/// include/uapi/linux/fs.h.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u32)]
pub(crate) enum FileIoctl {
    GetFlags = 0x8008_6601,
    SetFlags = 0x4008_6602,
    FsGetXattr = 0x801c_581f,
    FsSetXattr = 0x401c_5820,
    GetVersion = 0x8008_7601,
    GetFsLabel = 0x8100_9431,
}

impl FileIoctl {
    const ALL: [Self; 6] = [
        Self::GetFlags,
        Self::SetFlags,
        Self::FsGetXattr,
        Self::FsSetXattr,
        Self::GetVersion,
        Self::GetFsLabel,
    ];

    /// The one with this number.
    pub(crate) fn new(number: u32) -> Option<Self> {
        Self::ALL.into_iter().find(|one| *one as u32 == number)
    }

    /// The bytes at its argument. The numbers of the older ones say 8, which file systems take for an int.
    pub(crate) fn size(self) -> usize {
        match self {
            Self::GetFlags | Self::SetFlags | Self::GetVersion => 4,
            Self::FsGetXattr | Self::FsSetXattr | Self::GetFsLabel => {
                (self as u32 >> 16 & 0x3fff) as usize
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;

    /// The host's kernel writes no answer past the room for it.
    #[test]
    fn answers_to_ioctl_have_room() {
        let sizes = FileIoctl::ALL.map(|one| (one.size(), FileIoctl::new(one as u32) == Some(one)));
        assert_eq!(
            sizes,
            [4, 4, 28, 28, 4, IOCTL_ROOM].map(|size| (size, true))
        );
    }

    /// A handle tells its file's own inode number, or none.
    #[test]
    fn a_handle_tells_its_number_or_nothing() {
        let file = tempfile::tempfile().unwrap();
        let fs_type = rustix::fs::fstatfs(&file).unwrap().f_type;
        if let Ok((handle, _)) = handle_at(file.as_fd(), c"") {
            let number = stat(file.as_fd()).unwrap().stx_ino;
            assert!(handle.ino(fs_type).is_none_or(|told| told == number));
        }
        for len in 0..40 {
            for kind in [0, 1, 2, 0x4d, 0x81, 0x82] {
                let handle = FileHandle::from_parts(kind, &vec![7; len]).unwrap();
                for fs_type in [0, 0xef53, 0x0102_1994, 0x5846_5342] {
                    let told = handle.ino(fs_type);
                    assert!(told.is_none_or(|it| it == 0x0707_0707 || it == 0x0707_0707_0707_0707));
                }
            }
        }
    }
}
