//! What takes unsafe calls to find out: whether mounting is allowed, whether the kernel takes backing files, and whether
//! user namespaces can be made. Mounts are made in a mount namespace of their own.

use std::io;
use std::os::fd::AsFd;
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::sync::Arc;

use rustix::fs::MemfdFlags;
use rustix::io::Errno;
use rustix::mount::{MountFlags, MountPropagationFlags, mount_change};
use rustix::thread::UnshareFlags;
use uvfs_cli::{Context, Error, Result};
use uvfs_proto::abi::InitFlags;
use uvfs_server::fs::{Config, FileSystem, ROOT, SessionHandle};
use uvfs_server::mount::{self, Mount, MountOptions};
use uvfs_server::{Session, SessionOptions};

/// An empty file system that asks for backing files.
struct Probe;

impl FileSystem for Probe {
    fn init(&self, config: &mut Config, _: Arc<dyn SessionHandle>) -> uvfs_server::fs::Result<()> {
        config.wanted |= InitFlags::PASSTHROUGH;
        config.max_stack_depth = 1;
        Ok(())
    }
}

/// Whether root may mount: the error of mount(2). Where no namespace can be made for that, it is not tried.
pub(super) fn mounting() -> Result<()> {
    alone(|| match namespace() {
        Ok(()) => mounted().map(drop),
        Err(_) => Ok(()),
    })
}

/// Registers a backing file with an empty mount.
pub(super) fn takes_backing_files() -> Result<bool> {
    alone(|| {
        namespace().context(|| "a mount namespace".into())?;
        register()
    })
}

/// Makes a user namespace, in a process that ends at once.
pub(super) fn user_namespace() -> io::Result<()> {
    const MADE: Errno = Errno::CANCELED;
    let mut child = Command::new("true");
    // SAFETY: the closure makes one system call, and the process that it makes it in runs nothing else.
    unsafe {
        child.pre_exec(|| {
            rustix::thread::unshare_unsafe(UnshareFlags::NEWUSER)?;
            Err(MADE.into())
        });
    }
    match child.spawn() {
        Err(error) if error.raw_os_error() == Some(MADE.raw_os_error()) => Ok(()),
        Err(error) => Err(error),
        Ok(mut child) => child.wait().map(drop),
    }
}

/// Namespaces, and mounts in them, go away with the thread.
fn alone<T: Send>(probe: impl FnOnce() -> Result<T> + Send) -> Result<T> {
    let probed = std::thread::scope(|scope| scope.spawn(probe).join());
    probed.unwrap_or_else(|_| Err(Error::new("the probe panicked")))
}

/// Gives this thread a mount namespace.
fn namespace() -> rustix::io::Result<()> {
    // SAFETY: only this thread's mount namespace and working directory become its own. Its code below does
    // not rely on sharing either with another thread, and descriptors stay shared.
    unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWNS | UnshareFlags::FS) }
}

/// Mounts in this thread's namespace, and nowhere else.
fn mounted() -> Result<Mount> {
    let private = MountPropagationFlags::PRIVATE | MountPropagationFlags::REC;
    mount_change("/", private).context(|| "mount".into())?;
    let options = MountOptions {
        name: "uvfs-doctor".into(),
        subtype: "uvfs".into(),
        allow_other: false,
        default_permissions: false,
        flags: MountFlags::NOSUID | MountFlags::NODEV,
        ..MountOptions::default()
    };
    mount::mount("/tmp".as_ref(), &options).context(|| "a mount".into())
}

fn register() -> Result<bool> {
    let file = rustix::fs::memfd_create("uvfs-doctor", MemfdFlags::CLOEXEC)
        .context(|| "a file in memory".into())?;
    let mount = mounted()?;
    let device = mount.device().context(|| "a mount".into())?;
    let session = Session::new(Probe, device, SessionOptions::default());
    let init = session.read_init().context(|| "a mount".into())?;
    if !init.offered().flags.contains(InitFlags::PASSTHROUGH) {
        return Ok(false);
    }
    session
        .answer_init(&init, false)
        .context(|| "a mount".into())?;
    let session = session.handle();
    let id = session
        .register_backing(ROOT, file.as_fd())
        .context(|| "a backing file".into())?;
    session.unregister_backing(ROOT, id);
    Ok(true)
}
