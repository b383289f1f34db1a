//! Mounting, unmounting, and the few system calls on `/dev/fuse` that no library has.

use std::ffi::CString;
use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use io_uring::squeue::Entry128;
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::mount::{MountFlags, UnmountFlags};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags};
use uvfs_io::IoBuf;
use uvfs_proto::abi;
use uvfs_sys::limits::explain_start;
pub use uvfs_sys::mountinfo::{MountLine, mounted, table};

pub mod ending;
mod guard;
mod held;
mod obstacle;
pub mod users;

pub use ending::Ending;
use guard::Guard;
pub use held::{Mount, list};
pub use obstacle::{Obstacle, obstacle};

/// How a mount looks to the kernel.
#[derive(Clone, Debug)]
pub struct MountOptions {
    /// The device that /proc/mounts shows.
    pub name: String,
    /// After `fuse.` in the type.
    pub subtype: String,
    /// Users other than the one who mounts may use it.
    pub allow_other: bool,
    /// The kernel checks permissions by mode, owner and ACLs.
    pub default_permissions: bool,
    /// ro, nosuid, nodev, noexec, noatime and the like.
    pub flags: MountFlags,
    /// Largest read in bytes.
    pub max_read: u32,
    /// The mount goes when its server is killed: a shell waits for that.
    pub auto_unmount: bool,
}

impl Default for MountOptions {
    /// A mount named `uvfs` for the user who makes it, without set-user-id bits and device files. The
    /// kernel checks permissions.
    fn default() -> Self {
        Self {
            name: "uvfs".into(),
            subtype: String::new(),
            allow_other: false,
            default_permissions: true,
            flags: MountFlags::NOSUID | MountFlags::NODEV,
            max_read: 1 << 20,
            auto_unmount: false,
        }
    }
}

fn context(error: impl Into<io::Error>, what: &str) -> io::Error {
    let error = error.into();
    io::Error::new(error.kind(), format!("{what}: {}", explain_start(&error)))
}

fn because(error: io::Error, obstacle: Option<Obstacle>) -> io::Error {
    match obstacle {
        Some(obstacle) => io::Error::new(error.kind(), format!("{error}: {obstacle}")),
        None => error,
    }
}

/// Opens `/dev/fuse`.
///
/// # Errors
/// With what to do about it, when there is none or it may not be opened.
pub fn open_device() -> io::Result<OwnedFd> {
    let path = "/dev/fuse";
    rustix::fs::open(path, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty()).map_err(|error| {
        let hint = match error {
            Errno::NOENT | Errno::NODEV | Errno::NXIO => {
                ": this machine has no FUSE (modprobe fuse; in a container, pass the device in)"
            }
            // fusermount3 would open it with the user's rights, too.
            Errno::ACCESS => ": not for this user (as root: chmod 666 /dev/fuse)",
            Errno::PERM => ": not for this container (docker run --device /dev/fuse)",
            _ => "",
        };
        context(error, &format!("{path}{hint}"))
    })
}

/// The path without symbolic links, but without asking a server that may be dead: only the directory that it is in
/// is looked at.
///
/// # Errors
/// When that directory does not exist.
pub fn real_path(path: &Path) -> io::Result<PathBuf> {
    if let Ok(path) = path.canonicalize() {
        return Ok(path);
    }
    let full = std::path::absolute(path)?;
    match (full.parent(), full.file_name()) {
        (Some(parent), Some(last)) => Ok(parent.canonicalize()?.join(last)),
        _ => Ok(full),
    }
}

/// Mounts a new file system. Directly when privileged, else by fusermount3(1).
///
/// The root has no permissions until the kernel has its attributes, and the kernel drops attributes that it asked for before
/// an invalidation of the same file: a program that comes at once can get EACCES while the source changes. Ask for the
/// attributes of the root in another process, as `uvfs mount` does, before you report that the mount is there.
///
/// # Errors
/// The call that failed, in one line.
pub fn mount(mountpoint: &Path, options: &MountOptions) -> io::Result<Mount> {
    let at = real_path(mountpoint)?;
    let root = rustix::process::geteuid().is_root();
    let device = match directly(&at, options, root)? {
        Some(device) => device,
        None => by_fusermount(&at, options)?,
    };
    let line = mounted(&at).ok().flatten();
    let guard = match &line {
        Some(line) if options.auto_unmount => {
            let started = Guard::start(&at, line.id, &line.device).inspect_err(|_| {
                let _ = unmount(&at, true);
            });
            Some(started.map_err(|error| context(error, "auto_unmount: /bin/sh"))?)
        }
        _ => None,
    };
    Ok(Mount::new(at, device, line, guard))
}

/// A mount that an earlier program of this process has made ([`Kept`](crate::survive::Kept)).
///
/// # Errors
/// When /proc does not tell which mount it is.
pub fn held(at: &Path, device: OwnedFd) -> io::Result<Mount> {
    let line = mounted(at)?;
    Ok(Mount::new(at.to_owned(), device, line, None))
}

/// Mounts without help; nothing where only fusermount3 may.
fn directly(mountpoint: &Path, options: &MountOptions, root: bool) -> io::Result<Option<OwnedFd>> {
    let device = open_device()?;
    // A dead mount can be mounted over, but has no mode.
    let mode = std::fs::metadata(mountpoint).map_or(libc::S_IFDIR, |found| found.mode());
    let data = CString::new(format!(
        "fd={},rootmode={:o},user_id={},group_id={}{}{},max_read={}",
        device.as_raw_fd(),
        mode & libc::S_IFMT,
        rustix::process::getuid().as_raw(),
        rustix::process::getgid().as_raw(),
        if options.allow_other {
            ",allow_other"
        } else {
            ""
        },
        if options.default_permissions {
            ",default_permissions"
        } else {
            ""
        },
        options.max_read,
    ))?;
    let kind = match options.subtype.as_str() {
        "" => "fuse".to_owned(),
        subtype => format!("fuse.{subtype}"),
    };
    let direct = rustix::mount::mount(
        options.name.as_str(),
        mountpoint,
        kind.as_str(),
        options.flags,
        Some(data.as_c_str()),
    );
    match direct {
        Ok(()) => Ok(Some(device)),
        Err(Errno::PERM) if !root => Ok(None),
        Err(errno) => {
            let error = context(errno, "mount");
            Err(because(error, obstacle::behind(errno)))
        }
    }
}

/// The flags of mount(2) as words of fusermount3.
pub const FLAGS: [(MountFlags, &str); 12] = [
    (MountFlags::RDONLY, "ro"),
    (MountFlags::NOSUID, "nosuid"),
    (MountFlags::NODEV, "nodev"),
    (MountFlags::NOEXEC, "noexec"),
    (MountFlags::NOSYMFOLLOW, "nosymfollow"),
    (MountFlags::SYNCHRONOUS, "sync"),
    (MountFlags::DIRSYNC, "dirsync"),
    (MountFlags::LAZYTIME, "lazytime"),
    (MountFlags::NOATIME, "noatime"),
    (MountFlags::NODIRATIME, "nodiratime"),
    (MountFlags::RELATIME, "relatime"),
    (MountFlags::STRICTATIME, "strictatime"),
];

fn by_fusermount(mountpoint: &Path, options: &MountOptions) -> io::Result<OwnedFd> {
    let name = options.name.replace('\\', "\\\\").replace(',', "\\,");
    let mut words = vec![
        format!("fsname={name}"),
        format!("max_read={}", options.max_read),
    ];
    if !options.subtype.is_empty() {
        words.push(format!("subtype={}", options.subtype));
    }
    let flags = FLAGS
        .iter()
        .map(|(flag, word)| (options.flags.contains(*flag), *word));
    let others = [
        (options.allow_other, "allow_other"),
        (options.default_permissions, "default_permissions"),
    ];
    let set = flags.chain(others).filter(|(set, _)| *set);
    words.extend(set.map(|(_, word)| word.to_owned()));
    let (ours, theirs) = UnixStream::pair()?;
    rustix::io::fcntl_setfd(&theirs, rustix::io::FdFlags::empty())?;
    let child = Command::new("fusermount3")
        .arg("-o")
        .arg(words.join(","))
        .arg("--")
        .arg(mountpoint)
        .env("_FUSE_COMMFD", theirs.as_raw_fd().to_string())
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(|error| context(error, "fusermount3 (package fuse3), needed without root"))?;
    drop(theirs);
    let device = receive_descriptor(&ours);
    let output = child.wait_with_output()?;
    match device {
        Ok(Some(device)) if output.status.success() => Ok(device),
        Err(error) => Err(context(error, "fusermount3")),
        _ => Err(because(
            io::Error::other(reason(&output.stderr)),
            obstacle(),
        )),
    }
}

/// The last line of what fusermount3 said, which begins with its name.
fn reason(stderr: &[u8]) -> String {
    let text = String::from_utf8_lossy(stderr);
    let line = text.trim().lines().last().map(str::to_owned);
    line.unwrap_or_else(|| "fusermount3 failed without a reason".into())
}

fn receive_descriptor(socket: &UnixStream) -> io::Result<Option<OwnedFd>> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut byte = [0];
    let mut parts = [io::IoSliceMut::new(&mut byte)];
    rustix::net::recvmsg(socket, &mut parts, &mut control, RecvFlags::CMSG_CLOEXEC)?;
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(mut descriptors) = message {
            return Ok(descriptors.next());
        }
    }
    Ok(None)
}

/// Unmounts. `lazy` takes it out of the tree now and ends it when its last user is gone.
///
/// # Errors
/// EBUSY when in use, EINVAL when nothing is mounted there; what fusermount3 says otherwise.
pub fn unmount(mountpoint: &Path, lazy: bool) -> io::Result<()> {
    let mut flags = UnmountFlags::NOFOLLOW;
    flags.set(UnmountFlags::DETACH, lazy);
    match rustix::mount::unmount(mountpoint, flags) {
        Err(Errno::PERM) if !rustix::process::geteuid().is_root() => {
            let mut command = Command::new("fusermount3");
            command.arg("-u");
            if lazy {
                command.arg("-z");
            }
            let output = command
                .arg("--")
                .arg(mountpoint)
                .env("LC_ALL", "C")
                .output()
                .map_err(|error| context(error, "fusermount3 (package fuse3)"))?;
            if output.status.success() {
                return Ok(());
            }
            let reason = reason(&output.stderr);
            match reason.ends_with("Device or resource busy") {
                true => Err(Errno::BUSY.into()),
                false => Err(io::Error::other(reason)),
            }
        }
        other => Ok(other?),
    }
}

/// Ends the connection of a FUSE file system, whose device number is that of /proc/self/mountinfo: requests under way,
/// and all later ones, fail, and pages that the kernel has not written yet are lost. It stays mounted.
///
/// # Errors
/// EACCES for a mount of another user; without root also where fusectl is not mounted.
pub fn abort(device: &str) -> io::Result<()> {
    let minor = device.split_once(':').map_or("", |(_, minor)| minor);
    let directory = connections().map_err(|error| context(error, "fusectl"))?;
    let name = format!("{minor}/abort");
    let flags = OFlags::WRONLY | OFlags::CLOEXEC;
    let abort = rustix::fs::openat(&directory, name.as_str(), flags, Mode::empty());
    abort
        .and_then(|file| rustix::io::write(&file, b"1"))
        .map_err(|error| context(error, &format!("/sys/fs/fuse/connections/{name}")))?;
    Ok(())
}

/// The directory of the kernel's file system about connections, which need not be mounted.
fn connections() -> io::Result<OwnedFd> {
    use rustix::mount::{
        FsMountFlags, FsOpenFlags, MountAttrFlags, fsconfig_create, fsmount, fsopen,
    };
    const FUSECTL: u64 = 0x6573_5543;
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let mounted = rustix::fs::open("/sys/fs/fuse/connections", flags, Mode::empty());
    if let Ok(directory) = mounted
        && rustix::fs::fstatfs(&directory)?.f_type as u64 == FUSECTL
    {
        return Ok(directory);
    }
    let context = fsopen("fusectl", FsOpenFlags::FSOPEN_CLOEXEC)?;
    fsconfig_create(&context)?;
    let flags = FsMountFlags::FSMOUNT_CLOEXEC;
    Ok(fsmount(&context, flags, MountAttrFlags::empty())?)
}

/// The mounts below a mount point.
pub fn mounts_below(mountpoint: &Path) -> Vec<PathBuf> {
    let places = table().unwrap_or_default().into_iter().map(|line| line.at);
    places
        .filter(|at| at != mountpoint && at.starts_with(mountpoint))
        .collect()
}

/// Lets the kernel read ahead on a mount by so many bytes. INIT can only lower what is 128 KiB by
/// default, but root may raise it afterwards.
///
/// # Errors
/// EACCES without privileges; ENOENT when nothing is mounted there.
pub fn set_readahead(path: &Path, bytes: u32) -> io::Result<()> {
    set_bdi(path, "read_ahead_kb", bytes / 1024)
}

/// Lets a mount's dirty pages take `percent` of what the machine may have dirty. The kernel gives a FUSE
/// mount 1 %, and makes writers wait beyond that.
///
/// # Errors
/// EACCES without privileges; ENOENT when nothing is mounted there.
pub fn set_dirty_share(path: &Path, percent: u32) -> io::Result<()> {
    set_bdi(path, "max_ratio", percent)
}

/// Sets one of the kernel's limits for the pages of a mount
/// (Documentation/ABI/testing/sysfs-class-bdi).
fn set_bdi(path: &Path, limit: &str, value: u32) -> io::Result<()> {
    let line = mounted(path)?.ok_or(io::ErrorKind::NotFound)?;
    let file = format!("/sys/class/bdi/{}/{limit}", line.device);
    std::fs::write(file, value.to_string())
}

/// Whether the kernel offers FUSE-over-io_uring: the module's parameter, or nothing if it has none.
pub fn uring_parameter() -> Option<bool> {
    let text = std::fs::read_to_string("/sys/module/fuse/parameters/enable_uring").ok()?;
    Some(text.trim() == "Y")
}

/// The most bytes that one request of the kernel's reads or writes, of at most `wanted`
/// (fs.fuse.max_pages_limit; Linux before 6.13 always has 256 pages).
pub fn largest_request(wanted: u32) -> u32 {
    let text = std::fs::read_to_string("/proc/sys/fs/fuse/max_pages_limit").ok();
    let pages: Option<u32> = text.and_then(|text| text.trim().parse().ok());
    let bytes = pages
        .unwrap_or(256)
        .saturating_mul(rustix::param::page_size() as u32);
    wanted.min(bytes)
}

/// How many cores the kernel may ever have; FUSE-over-io_uring wants a queue for each.
///
/// # Errors
/// When /sys can't be read.
pub fn possible_cores() -> io::Result<usize> {
    cores("possible")
}

/// How many cores programs may run on, whatever is left to this process: so many queues get requests.
///
/// # Errors
/// When /sys can't be read.
pub fn online_cores() -> io::Result<usize> {
    cores("online")
}

fn cores(which: &str) -> io::Result<usize> {
    let path = format!("/sys/devices/system/cpu/{which}");
    let text = std::fs::read_to_string(&path)?;
    let last = text.trim().rsplit([',', '-']).next();
    let last = last.and_then(|last| last.parse::<usize>().ok());
    last.map(|last| last + 1)
        .filter(|&cores| cores <= usize::from(u16::MAX))
        .ok_or_else(|| io::Error::other(format!("{path} makes no sense")))
}

/// FUSE_DEV_IOC_CLONE: another descriptor of the same mount.
pub(crate) fn clone_device(device: i32) -> io::Result<OwnedFd> {
    let clone = open_device()?;
    let mut source = device as u32;
    // SAFETY: the ioctl reads one u32 at the address, which is valid for the call.
    let result = unsafe { libc::ioctl(clone.as_raw_fd(), abi::DEV_IOC_CLONE as _, &mut source) };
    uvfs_sys::checked(result).map_err(|errno| context(errno, "FUSE_DEV_IOC_CLONE"))?;
    Ok(clone)
}

/// FUSE_DEV_IOC_BACKING_OPEN: registers a file that the kernel can then read and write by itself, and gives
/// its number.
///
/// # Errors
/// EPERM without CAP_SYS_ADMIN, ELOOP where the file's file system is itself stacked on others, EINVAL,
/// ENOTTY or EOPNOTSUPP where there is no passthrough.
pub fn backing_open(device: BorrowedFd<'_>, file: BorrowedFd<'_>) -> io::Result<i32> {
    let map = abi::BackingMap {
        fd: file.as_raw_fd(),
        flags: 0,
        padding: 0,
    };
    // SAFETY: the ioctl reads one BackingMap at the address, which is valid for the call.
    let id = unsafe { libc::ioctl(device.as_raw_fd(), abi::DEV_IOC_BACKING_OPEN as _, &map) };
    Ok(uvfs_sys::checked(id)? as i32)
}

/// FUSE_DEV_IOC_BACKING_CLOSE: ends the registration of a backing file.
///
/// # Errors
/// ENOENT when there is no such number.
pub fn backing_close(device: BorrowedFd<'_>, id: i32) -> io::Result<()> {
    let id = id as u32;
    // SAFETY: the ioctl reads one u32 at the address, which is valid for the call.
    let closed = unsafe { libc::ioctl(device.as_raw_fd(), abi::DEV_IOC_BACKING_CLOSE as _, &id) };
    uvfs_sys::checked(closed)?;
    Ok(())
}

/// read(2) into I/O memory.
pub(crate) fn read_raw(device: BorrowedFd<'_>, buffer: &IoBuf) -> Result<usize, Errno> {
    // SAFETY: the buffer owns `len` mapped bytes, to which no Rust reference exists.
    let done = unsafe { libc::read(device.as_raw_fd(), buffer.as_ptr().cast(), buffer.len()) };
    uvfs_sys::checked(done)
}

/// writev(2) of `head` and the first `len` bytes of I/O memory.
pub(crate) fn write_raw(
    device: BorrowedFd<'_>,
    head: &[u8],
    data: &IoBuf,
    len: usize,
) -> Result<usize, Errno> {
    let data = data.slice(0..len);
    // SAFETY: `data` owns `len` mapped bytes; the reference lives for the system call alone, and
    // this thread does nothing else with them meanwhile.
    let bytes = unsafe { std::slice::from_raw_parts(data.as_ptr(), len) };
    rustix::io::writev(device, &[IoSlice::new(head), IoSlice::new(bytes)])
}

/// writev(2) of `head` and of one more byte, at an address where the kernel finds none: it handles the head, and
/// then fails with EFAULT.
pub(crate) fn write_without_end(device: BorrowedFd<'_>, head: &[u8]) -> Result<usize, Errno> {
    let parts = [
        libc::iovec {
            iov_base: head.as_ptr().cast_mut().cast(),
            iov_len: head.len(),
        },
        libc::iovec {
            iov_base: std::ptr::null_mut(),
            iov_len: 1,
        },
    ];
    // SAFETY: the kernel only reads from the parts. The first is borrowed for the call; that nothing is mapped at
    // the address of the second is for the kernel to find out.
    let done = unsafe { libc::writev(device.as_raw_fd(), parts.as_ptr(), parts.len() as i32) };
    uvfs_sys::checked(done)
}

/// Sets an entry's `addr` and `len` (struct io_uring_sqe) to a list of buffers, which the wrapper
/// for commands leaves out and registering an entry of FUSE needs.
pub(crate) fn set_sqe_buffer(entry: &mut Entry128, iovecs: &[libc::iovec; 2]) {
    const ADDR_AT: usize = 16;
    const LEN_AT: usize = 24;
    const _: () = assert!(size_of::<Entry128>() == 128);
    let at = std::ptr::from_mut(entry).cast::<u8>();
    // SAFETY: an entry is the kernel's 128-byte structure (asserted above), in which any bytes are
    // valid; both fields lie inside and are naturally aligned.
    unsafe {
        at.add(ADDR_AT)
            .cast::<u64>()
            .write_unaligned(iovecs.as_ptr() as u64);
        at.add(LEN_AT)
            .cast::<u32>()
            .write_unaligned(iovecs.len() as u32);
    }
}

/// A private copy of the mount tree at `path`, without what is mounted on it later: serving a
/// directory that contains its own mount point would else ask itself.
///
/// # Errors
/// EPERM without privileges; what open_tree(2) gives.
pub fn clone_tree(path: &Path) -> io::Result<OwnedFd> {
    use rustix::mount::{OpenTreeFlags, open_tree};
    let flags = OpenTreeFlags::OPEN_TREE_CLONE
        | OpenTreeFlags::OPEN_TREE_CLOEXEC
        | OpenTreeFlags::AT_RECURSIVE;
    Ok(open_tree(rustix::fs::CWD, path, flags)?)
}

/// The last component of the mount's type, for listings: `uvfs` of `fuse.uvfs`.
pub fn subtype(kind: &str) -> &str {
    kind.strip_prefix("fuse.").unwrap_or(kind)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A server has a queue for at least one core.
    #[test]
    fn there_are_cores() {
        let online = online_cores().unwrap();
        assert!((1..=possible_cores().unwrap()).contains(&online));
    }
}
