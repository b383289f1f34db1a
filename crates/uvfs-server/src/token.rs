//! Tokens: what a process with a descriptor of the mount shows to a session over shared memory.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::rand::{GetRandomFlags, getrandom};

use crate::fs::{Handle, Node};
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
        self.tokens.len() >= MOST || (own && !uvfs_sys::is_own_user(user))
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
pub(crate) struct Tokens(Mutex<Out>);

impl Tokens {
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

#[cfg(test)]
mod tests {
    use super::*;

    /// A token is good once and for a short time, and each user has a bounded number of them.
    #[test]
    fn good_once_and_not_for_long_and_not_too_many() {
        let (table, now) = (Tokens::default(), Instant::now());
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
