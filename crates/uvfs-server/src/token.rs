//! Tokens: what a process with a descriptor of the mount shows to a session over shared memory.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::os::unix::ffi::OsStrExt;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::rand::{GetRandomFlags, getrandom};
use uvfs_proto::import::{PATH_MAX, TokenOut, VERSION};

use crate::fs::{FileSystem, Handle, Node, OFlags};
use crate::session::Session;
use crate::transport::attach::is_own;
use uvfs_sys::lock;

/// How long a token is good.
const LIFE: Duration = Duration::from_secs(10);
/// Tokens that are out at most, in all and of one user but the server's own and root; more get EAGAIN.
const MOST: usize = 32768;
const MOST_OF_USER: usize = 1024;

/// The open file that a token stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Grant {
    pub(crate) node: Node,
    pub(crate) fh: Handle,
    /// open(2)'s flags of the handle.
    pub(crate) flags: u32,
}

/// A token that is out.
struct Issued {
    ends: Instant,
    user: u32,
    grant: Grant,
}

#[derive(Default)]
struct Out {
    tokens: HashMap<[u8; 32], Issued>,
    /// How many each user has.
    users: HashMap<u32, usize>,
}

impl Out {
    /// Takes one out of the count.
    fn gone(users: &mut HashMap<u32, usize>, user: u32) {
        if let Entry::Occupied(mut count) = users.entry(user) {
            *count.get_mut() -= 1;
            if *count.get() == 0 {
                count.remove();
            }
        }
    }

    fn is_full(&self, user: u32) -> bool {
        let own = self.users.get(&user).is_some_and(|&n| n >= MOST_OF_USER);
        self.tokens.len() >= MOST || (own && !is_own(user))
    }

    fn forget_old(&mut self, now: Instant) {
        let users = &mut self.users;
        self.tokens.retain(|_, issued| {
            let stays = issued.ends > now;
            if !stays {
                Self::gone(users, issued.user);
            }
            stays
        });
    }
}

/// The tokens that are out.
#[derive(Default)]
pub(crate) struct Table(Mutex<Out>);

impl Table {
    fn insert(&self, token: [u8; 32], grant: Grant, user: u32, now: Instant) -> Result<(), Errno> {
        let mut out = lock(&self.0);
        if out.is_full(user) {
            out.forget_old(now);
            if out.is_full(user) {
                return Err(Errno::AGAIN);
            }
        }
        let ends = now + LIFE;
        out.tokens.insert(token, Issued { ends, user, grant });
        *out.users.entry(user).or_default() += 1;
        Ok(())
    }

    /// A new token for a user.
    pub(crate) fn issue(&self, grant: Grant, user: u32) -> Result<[u8; 32], Errno> {
        let mut token = [0; 32];
        // Never short for so few bytes, once the generator is seeded (random(7)).
        if getrandom(&mut token, GetRandomFlags::empty())? != token.len() {
            return Err(Errno::AGAIN);
        }
        self.insert(token, grant, user, Instant::now())?;
        Ok(token)
    }

    /// Uses up a token, and gives the open file that it stands for.
    pub(crate) fn take(&self, token: &[u8; 32], now: Instant) -> Option<Grant> {
        let mut out = lock(&self.0);
        let issued = out.tokens.remove(token)?;
        Out::gone(&mut out.users, issued.user);
        (issued.ends > now).then_some(issued.grant)
    }
}

impl<F: FileSystem> Session<F> {
    /// How clients are to use an open file: as it was opened, and as the mount was made. ENOSYS where the file
    /// system has no support for clients.
    pub(crate) fn flags_of(&self, node: Node, fh: Handle) -> Result<u32, Errno> {
        let clients = self.fs().clients().ok_or(Errno::NOSYS)?;
        let mut flags = clients.open_flags(node, fh)?;
        if self.options.synchronous {
            flags |= OFlags::DSYNC;
        }
        Ok(flags.bits())
    }

    /// A token for an open file of a user's. ENOTTY, as for an unknown ioctl, where no client may have it; EBUSY
    /// where this open is to be left to the kernel.
    pub(crate) fn token_for(&self, node: Node, fh: Handle, user: u32) -> Result<TokenOut, Errno> {
        let path = self.socket_path().ok_or(Errno::NOTTY)?;
        let path = path.as_os_str().as_bytes();
        if path.len() >= PATH_MAX {
            return Err(Errno::NOTTY);
        }
        if self.kernel_writes_back() {
            // A client would not see writes that the kernel holds back.
            return Err(Errno::OPNOTSUPP);
        }
        // EBUSY for what the kernel reads and writes itself, faster than anybody could here.
        let flags = match self.flags_of(node, fh) {
            Err(Errno::NOSYS) => return Err(Errno::NOTTY),
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn good_once_and_not_for_long_and_not_too_many() {
        let (table, now) = (Table::default(), Instant::now());
        let grant = Grant {
            node: Node(2),
            fh: Handle(3),
            flags: 0,
        };
        let token = |n: usize| {
            let mut token = [7; 32];
            token[..8].copy_from_slice(&n.to_ne_bytes());
            token
        };
        let (one, other) = (1234, 5678);
        table.insert(token(0), grant, one, now).unwrap();
        assert_eq!(table.take(&token(1), now), None);
        assert_eq!(table.take(&token(0), now), Some(grant));
        assert_eq!(table.take(&token(0), now), None);
        table.insert(token(0), grant, one, now).unwrap();
        assert_eq!(table.take(&token(0), now + LIFE), None);
        for n in 0..MOST_OF_USER {
            table.insert(token(n), grant, one, now).unwrap();
        }
        assert_eq!(
            table.insert(token(MOST), grant, one, now),
            Err(Errno::AGAIN)
        );
        // One user takes nothing from another, nor from root.
        table.insert(token(MOST), grant, other, now).unwrap();
        for n in MOST_OF_USER..MOST - 1 {
            table.insert(token(n), grant, 0, now).unwrap();
        }
        let more = token(MOST + 1);
        assert_eq!(table.insert(more, grant, 0, now), Err(Errno::AGAIN));
        table.take(&token(0), now).unwrap();
        table.insert(more, grant, one, now).unwrap();
        // The old ones make room once they are too old.
        table.insert(token(0), grant, one, now + LIFE).unwrap();
        assert!(table.take(&token(0), now + LIFE).is_some());
        assert!(lock(&table.0).users.is_empty());
    }
}
