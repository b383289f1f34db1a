//! Asking a mount for a token of an open file.

use std::ffi::OsStr;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use rustix::io::Errno;
use uvfs_proto::import::{TOKEN_IOCTL, TokenOut, VERSION};
use zerocopy::FromZeros;

use crate::error::{Error, Result};

/// Good for one [`crate::Client::import_token`] within a few seconds: a client that shows it may use the
/// open file that it was made for, in the way that it was opened.
pub struct Token {
    secret: [u8; 32],
    socket: PathBuf,
}

impl std::fmt::Debug for Token {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Token")
            .field("socket", &self.socket)
            .finish_non_exhaustive()
    }
}

impl Token {
    /// Asks for a token of an open regular file.
    ///
    /// # Errors
    /// `ENOTTY` for what is no file of a uvfs mount that has clients, `EOPNOTSUPP` where a mount's
    /// files can't be shared, `EBUSY` for one that the kernel reads and writes at the host itself,
    /// `EPROTO` from a server of another version, `EAGAIN` when too many tokens are out.
    pub fn of(fd: BorrowedFd<'_>) -> Result<Self> {
        let mut out = TokenOut::new_zeroed();
        // SAFETY: the kernel writes what the command's number says, the size of `out`, to it.
        let done = unsafe { libc::ioctl(fd.as_raw_fd(), TOKEN_IOCTL as _, &raw mut out) };
        if done < 0 {
            return Err(std::io::Error::last_os_error().into());
        }
        let path = out.path.get(..out.path_len as usize);
        let (VERSION, Some(path)) = (out.version, path) else {
            return Err(Error::because(
                Errno::PROTO,
                "the server is of another version",
            ));
        };
        Ok(Self {
            secret: out.token,
            socket: OsStr::from_bytes(path).into(),
        })
    }

    /// The secret that the server takes it by.
    pub fn secret(&self) -> &[u8; 32] {
        &self.secret
    }

    /// The socket of the server that made it.
    pub fn socket(&self) -> &Path {
        &self.socket
    }
}
