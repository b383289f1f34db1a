//! Tokens: what a process with a descriptor of the mount shows to a session over shared memory.

use std::collections::HashMap;
use std::os::unix::ffi::OsStrExt;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::rand::{GetRandomFlags, getrandom};
use uvfs_proto::import::{PATH_MAX, TokenOut, VERSION};

use crate::fs::FileSystem;
use crate::session::Session;

/// How long a token is good.
const LIFE: Duration = Duration::from_secs(10);
/// Tokens that are out at most; more get EAGAIN.
const MOST: usize = 4096;

/// What a token stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Grant {
    pub(crate) node: u64,
    pub(crate) fh: u64,
    /// open(2)'s flags of the handle.
    pub(crate) flags: u32,
}

/// The tokens that are out.
#[derive(Default)]
pub(crate) struct Table(Mutex<HashMap<[u8; 32], (Instant, Grant)>>);

impl Table {
    fn insert(&self, token: [u8; 32], grant: Grant, now: Instant) -> Result<(), Errno> {
        let mut out = self.0.lock().unwrap_or_else(|p| p.into_inner());
        if out.len() >= MOST {
            out.retain(|_, (ends, _)| *ends > now);
            if out.len() >= MOST {
                return Err(Errno::AGAIN);
            }
        }
        out.insert(token, (now + LIFE, grant));
        Ok(())
    }

    /// A new token.
    pub(crate) fn issue(&self, grant: Grant) -> Result<[u8; 32], Errno> {
        let mut token = [0; 32];
        // Never short for so few bytes, once the generator is seeded (random(7)).
        if getrandom(&mut token, GetRandomFlags::empty())? != token.len() {
            return Err(Errno::AGAIN);
        }
        self.insert(token, grant, Instant::now())?;
        Ok(token)
    }

    /// What a token stands for; it is good for no more.
    pub(crate) fn take(&self, token: &[u8; 32], now: Instant) -> Option<Grant> {
        let mut out = self.0.lock().unwrap_or_else(|p| p.into_inner());
        let (ends, grant) = out.remove(token)?;
        (ends > now).then_some(grant)
    }
}

impl<F: FileSystem> Session<F> {
    /// How clients are to use an open file: as it was opened, and as the mount was made.
    pub(crate) fn flags_of(&self, node: u64, fh: u64) -> Result<u32, Errno> {
        let synchronous = match self.options.synchronous {
            true => libc::O_DSYNC as u32,
            false => 0,
        };
        Ok(self.fs().open_flags(node, fh)? | synchronous)
    }

    /// A token for an open file. ENOTTY, as for an unknown ioctl, where no client may have it; EBUSY
    /// where this open is to be left to the kernel.
    pub(crate) fn token_for(&self, node: u64, fh: u64) -> Result<TokenOut, Errno> {
        let path = self.socket_path().ok_or(Errno::NOTTY)?;
        let path = path.as_os_str().as_bytes();
        if path.len() >= PATH_MAX {
            return Err(Errno::NOTTY);
        }
        if self.kernel_writes_back() {
            // What the kernel holds back a client would not see.
            return Err(Errno::OPNOTSUPP);
        }
        // EBUSY for what the kernel reads and writes itself, faster than anybody could here.
        let flags = match self.flags_of(node, fh) {
            Err(Errno::NOSYS) => return Err(Errno::NOTTY),
            other => other?,
        };
        let token = self.tokens.issue(Grant { node, fh, flags })?;
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn good_once_and_not_for_long_and_not_too_many() {
        let (table, now) = (Table::default(), Instant::now());
        let grant = Grant {
            node: 2,
            fh: 3,
            flags: 0,
        };
        let token = |n: usize| {
            let mut token = [7; 32];
            token[..8].copy_from_slice(&n.to_ne_bytes());
            token
        };
        table.insert(token(0), grant, now).unwrap();
        assert_eq!(table.take(&token(1), now), None);
        assert_eq!(table.take(&token(0), now), Some(grant));
        assert_eq!(table.take(&token(0), now), None);
        table.insert(token(0), grant, now).unwrap();
        assert_eq!(table.take(&token(0), now + LIFE), None);
        for n in 0..MOST {
            table.insert(token(n), grant, now).unwrap();
        }
        assert_eq!(table.insert(token(MOST), grant, now), Err(Errno::AGAIN));
        // The old ones make room once they are too old.
        table.insert(token(MOST), grant, now + LIFE).unwrap();
        assert!(table.take(&token(MOST), now + LIFE).is_some());
    }
}
