#![doc = include_str!("../README.md")]

mod adapter;
mod backing;
mod buffers;
mod calls;
#[cfg(feature = "experimental")]
pub mod experimental;
mod filesystem;
mod handlers;
mod kernel_config;
mod notify;
mod options;
mod reply;
mod session;
mod slot;
pub mod survive;

use std::io;
use std::path::Path;

pub use backing::BackingId;
use filesystem::ForgetOne;
pub use filesystem::{Filesystem, Request};
/// Types of fuser that only hold values.
pub use fuser::{
    AccessFlags, BsdFileFlags, Config, CopyFileRangeFlags, Errno, FileAttr, FileHandle, FileType,
    FopenFlags, Generation, INodeNo, InitFlags, IoctlFlags, LockOwner, MountOption, OpenAccMode,
    OpenFlags, PollEvents, PollFlags, PollHandle, RenameFlags, RequestId, SessionACL, TimeOrNow,
    Version, WriteFlags, consts,
};
pub use kernel_config::KernelConfig;
pub use notify::{Notifier, PollNotifier};
pub use reply::{
    ReplyAttr, ReplyBmap, ReplyCreate, ReplyData, ReplyDirectory, ReplyDirectoryPlus, ReplyEmpty,
    ReplyEntry, ReplyIoctl, ReplyLock, ReplyLseek, ReplyOpen, ReplyPoll, ReplyStatfs, ReplyWrite,
    ReplyXattr,
};
pub use session::{BackgroundSession, Session, SessionUnmounter};

/// Mounts a file system and serves it until it is unmounted.
///
/// # Errors
/// When the options make no sense, the mount fails, or [`Filesystem::init`] does.
pub fn mount<FS: Filesystem, P: AsRef<Path>>(
    filesystem: FS,
    mountpoint: P,
    options: &Config,
) -> io::Result<()> {
    Session::new(filesystem, mountpoint, options)?.run()
}

/// Mounts a file system and serves it on a thread. Dropping the result unmounts.
///
/// # Errors
/// When the options make no sense, the mount fails, or [`Filesystem::init`] does.
pub fn spawn_mount<'a, FS: Filesystem + Send + 'static + 'a, P: AsRef<Path>>(
    filesystem: FS,
    mountpoint: P,
    options: &Config,
) -> io::Result<BackgroundSession> {
    Session::new(filesystem, mountpoint, options)?.spawn()
}
