//! A mount that this process made, and how to take it away.

use std::fmt::Write;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use uvfs_sys::lock;

use super::guard::Guard;
use super::{MountLine, table, unmount, users};

/// A mount that this process made. Clones are the same mount; dropping them leaves it mounted, unless it was made
/// with [`MountOptions::auto_unmount`](super::MountOptions::auto_unmount).
#[derive(Clone, Debug)]
pub struct Mount(Arc<Held>);

#[derive(Debug)]
struct Held {
    at: PathBuf,
    device: OwnedFd,
    /// The mount as it was made; nothing where /proc does not tell.
    line: Option<MountLine>,
    guard: Mutex<Option<Guard>>,
    guarded: bool,
}

impl Mount {
    pub(super) fn new(
        at: PathBuf,
        device: OwnedFd,
        line: Option<MountLine>,
        guard: Option<Guard>,
    ) -> Self {
        Self(Arc::new(Held {
            at,
            device,
            line,
            guarded: guard.is_some(),
            guard: Mutex::new(guard),
        }))
    }

    /// The mount point, as an absolute path without symbolic links.
    pub fn at(&self) -> &Path {
        &self.0.at
    }

    /// The `/dev/fuse` descriptor, for a session.
    ///
    /// # Errors
    /// EMFILE when there can be no other descriptor.
    pub fn device(&self) -> io::Result<OwnedFd> {
        self.0.device.try_clone()
    }

    /// The device number of the file system, `MAJOR:MINOR`; empty where /proc does not tell.
    pub fn number(&self) -> &str {
        self.0.line.as_ref().map_or("", |line| &line.device)
    }

    /// Whether a process waits to take the mount away when this one is killed.
    pub fn is_guarded(&self) -> bool {
        self.0.guarded
    }

    /// Whether the file system still exists: in the tree, or for its last users.
    pub fn exists(&self) -> bool {
        let mut device = [PollFd::new(&self.0.device, PollFlags::empty())];
        match poll(&mut device, Some(&Timespec::default())) {
            Ok(0) | Err(_) => true,
            Ok(_) => !device[0].revents().contains(PollFlags::ERR),
        }
    }

    /// Unmounts. That it is not mounted any more is no error, as other threads and programs unmount too; another
    /// mount at the same place is left alone.
    ///
    /// # Errors
    /// EBUSY while a process uses it, or another mount covers it; what fusermount3 says.
    pub fn unmount(&self) -> io::Result<()> {
        self.take_away(false)
    }

    /// Takes the mount out of the tree, although it is in use. Its users are served until they are done.
    ///
    /// # Errors
    /// EBUSY when another mount covers it; what fusermount3 says.
    pub fn detach(&self) -> io::Result<()> {
        self.take_away(true)
    }

    fn take_away(&self, lazily: bool) -> io::Result<()> {
        while let Some(at) = self.place()? {
            match unmount(&at, lazily) {
                Ok(()) => break,
                Err(error) if self.place()?.is_some_and(|now| now == at) => return Err(error),
                // Another thread or program was faster, or has moved it.
                Err(_) => {}
            }
        }
        if let Some(guard) = lock(&self.0.guard).take() {
            guard.dismiss();
        }
        Ok(())
    }

    /// Where it is mounted now; nothing if it is not.
    fn place(&self) -> io::Result<Option<PathBuf>> {
        if !self.exists() {
            return Ok(None);
        }
        let Some(made) = &self.0.line else {
            return Ok(Some(self.0.at.clone()));
        };
        let table = table()?;
        let own = |line: &&MountLine| (line.id, &line.device) == (made.id, &made.device);
        let Some(line) = table.iter().find(own) else {
            return Ok(None);
        };
        match table.iter().rfind(|other| other.at == line.at) {
            Some(top) if top.id != line.id => Err(Errno::BUSY.into()),
            _ => Ok(Some(line.at.clone())),
        }
    }

    /// Ends the connection with the kernel: requests under way, and all later ones, fail with ENOTCONN or
    /// ECONNABORTED, and pages that the kernel has not written yet are lost.
    ///
    /// # Errors
    /// EACCES for a mount of another user; without root also where fusectl is not mounted.
    pub fn abort(&self) -> io::Result<()> {
        match self.exists() {
            true => super::abort(self.number()),
            false => Ok(()),
        }
    }

    /// What keeps it from being unmounted, for a message.
    pub fn users(&self) -> String {
        let below = super::mounts_below(self.at());
        list(&users::users(self.number()), &below)
    }
}

impl AsFd for Mount {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.device.as_fd()
    }
}

/// The most users that a message names.
const NAMED: usize = 8;

/// Names what keeps a mount busy: processes, and mounts below it.
pub fn list(users: &[users::User], below: &[PathBuf]) -> String {
    let users = users.iter().map(ToString::to_string);
    let mounts = below.iter().map(|at| format!("the mount {}", at.display()));
    let all: Vec<_> = users.chain(mounts).collect();
    let mut text = all[..all.len().min(NAMED)].join(", ");
    if all.len() > NAMED {
        let _ = write!(text, " and {} more", all.len() - NAMED);
    }
    match text.is_empty() {
        true => "a process that can't be seen from here".into(),
        false => text,
    }
}
