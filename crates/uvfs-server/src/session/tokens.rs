//! Tokens for open files of the mount.

use std::os::unix::ffi::OsStrExt;

use rustix::io::Errno;
use uvfs_proto::import::{PATH_MAX, TokenOut, VERSION};

use super::Session;
use crate::fs::{FileSystem, Handle, Node, OFlags, Result};
use crate::token::Grant;

impl<F: FileSystem> Session<F> {
    /// How clients are to use an open file: as it was opened, and as the mount was made. ENOSYS where the file
    /// system has no support for clients.
    pub(crate) fn flags_of(&self, node: Node, fh: Handle) -> Result<u32> {
        let clients = self.fs().clients().ok_or(Errno::NOSYS)?;
        let mut flags = clients.open_flags(node, fh)?;
        if self.options.synchronous {
            flags |= OFlags::DSYNC;
        }
        Ok(flags.bits())
    }

    /// A token for an open file of a user's. ENOTTY, as for an unknown ioctl, where no client may have it; EBUSY
    /// where this open is to be left to the kernel.
    pub(crate) fn token_for(&self, node: Node, fh: Handle, user: u32) -> Result<TokenOut> {
        let path = self.socket_path().ok_or(Errno::NOTTY)?;
        let path = path.as_os_str().as_bytes();
        if path.len() >= PATH_MAX {
            return Err(Errno::NOTTY.into());
        }
        if self.kernel_writes_back() {
            // A client would not see writes that the kernel holds back.
            return Err(Errno::OPNOTSUPP.into());
        }
        // EBUSY for what the kernel reads and writes itself, faster than a client could.
        let flags = match self.flags_of(node, fh) {
            Err(error) if error == Errno::NOSYS => return Err(Errno::NOTTY.into()),
            other => other?,
        };
        let token = self.tokens.issue(Grant { node, fh, flags }, user)?;
        let mut out = TokenOut {
            version: VERSION,
            path_len: path.len() as u32,
            token,
            path: [0; PATH_MAX],
            padding: 0,
        };
        out.path[..path.len()].copy_from_slice(path);
        Ok(out)
    }
}
