//! Extended attributes and access control lists.

use std::ffi::CStr;
use std::os::fd::AsFd;

use rustix::io::Errno;
use uvfs_server::fs::{Bytes, Context, Node, XattrFlags};

use crate::Source;
use crate::creds::Caller;
use crate::sys::{self, ProcPath, Result};

/// XATTR_SIZE_MAX and XATTR_LIST_MAX of the kernel.
const MAX: usize = 64 << 10;
/// Most values and lists are shorter.
const SHORT: usize = 256;

/// The bytes that `get` fills, of whatever length they turn out to have.
fn sized(get: impl Fn(&mut [u8]) -> Result<usize>) -> Result<Bytes> {
    let mut short = [0; SHORT];
    match get(&mut short) {
        Ok(n) => return Ok(short[..n].to_vec()),
        Err(Errno::RANGE) => {}
        Err(errno) => return Err(errno),
    }
    let mut long = vec![0; MAX];
    let n = get(&mut long)?;
    long.truncate(n);
    long.shrink_to_fit();
    Ok(long)
}

/// `trusted.` attributes are root's.
fn hidden(cx: &Context, name: &[u8]) -> bool {
    cx.uid != 0 && name.starts_with(b"trusted.")
}

impl Source {
    pub(crate) fn get_xattr(&self, cx: &Context, node: Node, name: &CStr) -> Result<Bytes> {
        if hidden(cx, name.to_bytes()) {
            return Err(Errno::NODATA);
        }
        let inode = self.inode(node)?;
        // The kernel asks for each new file that is written to; a descriptor saves a walk.
        let open = inode.state().open.upgrade();
        if let Some(file) = open {
            return sized(|value| rustix::fs::fgetxattr(file.as_fd(), name, value));
        }
        let fd = self.path_fd(&inode)?;
        let path = ProcPath::new(fd.as_fd());
        sized(|value| rustix::fs::getxattr(path.as_c_str(), name, value))
    }

    pub(crate) fn list_xattr(&self, cx: &Context, node: Node) -> Result<Bytes> {
        let inode = self.inode(node)?;
        let fd = self.path_fd(&inode)?;
        let path = ProcPath::new(fd.as_fd());
        let list = sized(|list| rustix::fs::listxattr(path.as_c_str(), list))?;
        if cx.uid == 0 {
            return Ok(list);
        }
        let shown = list
            .split_inclusive(|byte| *byte == 0)
            .filter(|name| !hidden(cx, name));
        Ok(shown.flatten().copied().collect())
    }

    pub(crate) fn set_xattr(
        &self,
        cx: &Context,
        node: Node,
        name: &CStr,
        value: &[u8],
        flags: XattrFlags,
        kill_sgid: bool,
    ) -> Result<()> {
        self.writable()?;
        if hidden(cx, name.to_bytes()) {
            return Err(Errno::PERM);
        }
        let inode = self.inode(node)?;
        let fd = self.path_fd(&inode)?;
        let path = ProcPath::new(fd.as_fd());
        let set = |_: &Caller| rustix::fs::setxattr(path.as_c_str(), name, value, flags);
        match self.creds.as_caller(cx, None, set) {
            Err(Errno::EXIST) if self.again(cx).is_some() => {
                let now = sized(|value| rustix::fs::getxattr(path.as_c_str(), name, value))?;
                if now != value {
                    return Err(Errno::EXIST);
                }
            }
            set => set?,
        }
        if kill_sgid {
            let mode = u32::from(sys::stat(fd.as_fd())?.stx_mode);
            if mode & libc::S_ISGID != 0 {
                sys::chmod(fd.as_fd(), mode & 0o7777 & !libc::S_ISGID)?;
            }
        }
        Ok(())
    }

    pub(crate) fn remove_xattr(&self, cx: &Context, node: Node, name: &CStr) -> Result<()> {
        self.writable()?;
        if hidden(cx, name.to_bytes()) {
            return Err(Errno::PERM);
        }
        let inode = self.inode(node)?;
        let fd = self.path_fd(&inode)?;
        let path = ProcPath::new(fd.as_fd());
        let remove = |_: &Caller| rustix::fs::removexattr(path.as_c_str(), name);
        match self.creds.as_caller(cx, None, remove) {
            Err(Errno::NODATA) if self.again(cx).is_some() => Ok(()),
            removed => removed,
        }
    }
}
