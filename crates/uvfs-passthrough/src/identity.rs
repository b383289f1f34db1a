//! The identity of a host file across restarts of the server: device, inode number, time of birth and, where
//! the file system has them, the file's handle, which together mean one file for ever. Behind it comes
//! where the file was below the source, to find it without privileges.

use std::ffi::OsStr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use uvfs_server::fs::{Context, Entry, Node, ROOT};

use crate::Source;
use crate::inode::born;
use crate::sys::{self, BENEATH, FileHandle, ProcPath, Result};

/// Bytes of device, inode number, time of birth, kind and length of the handle.
const FIXED: usize = 4 + 4 + 8 + 8 + 4 + 4 + 4;

fn identity(
    device: (u32, u32),
    ino: u64,
    born: (i64, u32),
    handle: Option<&FileHandle>,
) -> Vec<u8> {
    let (kind, bytes) = handle.map_or((0, &[][..]), FileHandle::parts);
    let mut identity = Vec::with_capacity(FIXED + bytes.len());
    identity.extend_from_slice(&device.0.to_ne_bytes());
    identity.extend_from_slice(&device.1.to_ne_bytes());
    identity.extend_from_slice(&ino.to_ne_bytes());
    identity.extend_from_slice(&born.0.to_ne_bytes());
    identity.extend_from_slice(&born.1.to_ne_bytes());
    identity.extend_from_slice(&kind.to_ne_bytes());
    identity.extend_from_slice(&(bytes.len() as u32).to_ne_bytes());
    identity.extend_from_slice(bytes);
    identity
}

fn word(bytes: &[u8], at: usize) -> Result<u32> {
    let word = bytes.get(at..at + 4).ok_or(Errno::INVAL)?;
    Ok(u32::from_ne_bytes(word.try_into().expect("four bytes")))
}

impl Source {
    /// Where a descriptor's file is below the source now.
    fn place(&self, fd: BorrowedFd<'_>) -> Result<PathBuf> {
        let path = |fd| {
            let link = rustix::fs::readlink(ProcPath::new(fd).as_c_str(), Vec::new())?;
            Ok::<_, Errno>(PathBuf::from(OsStr::from_bytes(link.as_bytes())))
        };
        let (root, path) = (path(self.root.as_fd())?, path(fd)?);
        path.strip_prefix(root)
            .map(Path::to_owned)
            .map_err(|_| Errno::STALE)
    }

    /// The identity of a node.
    pub(crate) fn identity_of(&self, node: Node) -> Result<Vec<u8>> {
        let inode = self.inode(node)?;
        let key = &inode.key;
        Ok(identity(
            key.device,
            key.ino,
            inode.born,
            key.handle.as_ref(),
        ))
    }

    /// Where a node's file is below the source now.
    pub(crate) fn path_of(&self, node: Node) -> Result<Vec<u8>> {
        let inode = self.inode(node)?;
        let fd = self.path_fd(&inode)?;
        Ok(self.place(fd.as_fd())?.into_os_string().into_vec())
    }

    /// Finds the file of an identity and a path behind it, and counts a lookup.
    pub(crate) fn find_again(&self, cx: &Context, asked: &[u8]) -> Result<Entry> {
        let len = word(asked, FIXED - 4)? as usize;
        let kind = word(asked, FIXED - 8)? as i32;
        let bytes = asked
            .get(FIXED..)
            .and_then(|rest| rest.get(..len))
            .ok_or(Errno::INVAL)?;
        let handle = FileHandle::from_parts(kind, bytes).ok_or(Errno::INVAL)?;
        let (told, place) = asked.split_at(FIXED + len);
        let is_it = |fd: &OwnedFd| -> Result<bool> {
            let handle = match len {
                0 => None,
                _ => Some(sys::handle_at(fd.as_fd(), c"")?.0),
            };
            let st = sys::stat(fd.as_fd())?;
            let (device, born) = ((st.stx_dev_major, st.stx_dev_minor), born(&st));
            Ok(identity(device, st.stx_ino, born, handle.as_ref()) == *told)
        };
        let walk = |place: &Path| {
            let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            rustix::fs::openat2(&*self.root, place, flags, Mode::empty(), BENEATH)
        };
        let root = self.inode(ROOT)?;
        let gone = |errno| match errno {
            // The last: this process may not open handles.
            Errno::NOENT | Errno::NOTDIR | Errno::XDEV | Errno::LOOP | Errno::PERM => Errno::STALE,
            other => other,
        };
        let found = match walk(Path::new(OsStr::from_bytes(place))) {
            Ok(fd) if is_it(&fd)? => Some(fd),
            _ => match (&root.mount.fd, len) {
                (None, _) | (_, 0) => None,
                (Some(mount), _) => {
                    // Renamed. A handle leads anywhere on the mount: only what is found by name
                    // below the source is served.
                    let fd =
                        sys::open_handle(mount.as_fd(), &handle, OFlags::PATH).map_err(gone)?;
                    let fd = walk(&self.place(fd.as_fd())?).map_err(gone)?;
                    is_it(&fd)?.then_some(fd)
                }
            },
        };
        let (inode, st) = self.adopt(&root, found.ok_or(Errno::STALE)?)?;
        Ok(self.entry(cx, &inode, &st))
    }
}
