//! Finds out whether the kernel takes backing files: registers one with an empty mount in a mount namespace of
//! its own.

use std::os::fd::AsFd;

use rustix::fs::MemfdFlags;
use rustix::mount::{MountFlags, MountPropagationFlags, mount_change};
use rustix::thread::UnshareFlags;
use uvfs_cli::{Context, Error, Result};
use uvfs_proto::abi::InitFlags;
use uvfs_server::fs::{Config, FileSystem, ROOT};
use uvfs_server::mount::{self, MountOptions};
use uvfs_server::{Session, SessionOptions};

use super::Finding;

/// An empty file system that asks for backing files.
struct Probe;

impl FileSystem for Probe {
    fn init(&self, config: &mut Config) -> uvfs_server::fs::Result<()> {
        config.wanted |= InitFlags::PASSTHROUGH;
        config.max_stack_depth = 1;
        Ok(())
    }
}

/// Checks for passthrough.
pub(super) fn find(root: bool) -> Finding {
    if !root {
        return Finding::off("only for root (CAP_SYS_ADMIN)", "mount as root");
    }
    // The namespace and the mount in it go away with the thread.
    let probed = std::thread::spawn(probe).join();
    match probed.unwrap_or_else(|_| Err(Error::new("the probe panicked"))) {
        Ok(true) => Finding::ok("the kernel takes backing files"),
        Ok(false) => Finding::missing("this kernel does not have it (it came with Linux 6.9)"),
        Err(error) => Finding::missing(format!("could not be tried: {error}")),
    }
}

/// Mounts, and registers a backing file.
fn probe() -> Result<bool> {
    // SAFETY: only this thread's mount namespace and working directory become its own. Its code below does
    // not rely on sharing either with another thread, and descriptors stay shared.
    unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWNS | UnshareFlags::FS) }
        .context(|| "a mount namespace".into())?;
    let private = MountPropagationFlags::PRIVATE | MountPropagationFlags::REC;
    mount_change("/", private).context(|| "a private mount namespace".into())?;
    let file = rustix::fs::memfd_create("uvfs-doctor", MemfdFlags::CLOEXEC)
        .context(|| "a file in memory".into())?;
    let options = MountOptions {
        name: "uvfs-doctor".into(),
        subtype: "uvfs".into(),
        allow_other: false,
        default_permissions: false,
        flags: MountFlags::NOSUID | MountFlags::NODEV,
        ..MountOptions::default()
    };
    let mount = mount::mount("/tmp".as_ref(), &options).context(|| "a mount".into())?;
    let device = mount.device().context(|| "a mount".into())?;
    let session = Session::new(Probe, device, SessionOptions::default());
    let init = session.read_init().context(|| "a mount".into())?;
    if !init.offered().flags.contains(InitFlags::PASSTHROUGH) {
        return Ok(false);
    }
    session
        .answer_init(&init, false)
        .context(|| "a mount".into())?;
    let id = session
        .register_backing(ROOT, file.as_fd())
        .context(|| "a backing file".into())?;
    session.unregister_backing(ROOT, id);
    Ok(true)
}
