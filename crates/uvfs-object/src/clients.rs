//! The file system as clients over shared memory use it.

use std::time::Instant;

use uvfs_server::fs::*;

use crate::cache::{self, Id};
use crate::fs::{By, ObjectFs, Open, split};
use crate::names::There;
use crate::store::{self, Version};

impl ClientSupport for ObjectFs {
    fn open_flags(&self, _: Node, fh: Handle) -> Result<OFlags> {
        match &*self.handle(fh)? {
            Open::File {
                by: By::Backed(_), ..
            } => Err(Errno::BUSY.into()),
            Open::File { flags, .. } => Ok(*flags),
            Open::Directory(_) => Err(Errno::ISDIR.into()),
        }
    }

    fn share(&self, node: Node, fh: Handle) -> BoxFuture<'_, Result<Handle>> {
        Box::pin(async move {
            let open = self.handle(fh)?;
            let Open::File { known, flags, .. } = &*open else {
                return Err(Errno::ISDIR.into());
            };
            if known.node != node {
                return Err(Errno::BADF.into());
            }
            self.tree.remember(node)?;
            let shared = self.open_file(known.clone(), *flags, Origin::Client(()));
            let (fh, _) = shared.inspect_err(|_| self.tree.forget(node, 1))?;
            Ok(fh)
        })
    }

    fn lookups(&self, node: Node) -> Option<u64> {
        self.tree.lookups(node)
    }

    /// Of the root the name of the store, and of a file the number of its version and the key, with the key's length. Of a file that
    /// is open for writing the identity of its draft, and no key. None if it has no draft yet: by its version alone the
    /// next server could not tell what of it was written by then.
    fn identity(&self, node: Node) -> Option<Bytes> {
        if node == ROOT {
            return Some(self.fetch.store.name().into());
        }
        let known = self.known(node).ok()?;
        let version = {
            let state = known.state();
            match &state.draft {
                Some(draft) if state.writers > 0 => {
                    let none = 0_u32.to_le_bytes();
                    return Some([&draft.identity()?[..], &none].concat());
                }
                None if state.writers > 0 => None,
                Some(draft) => draft.state().replaces.clone(),
                None => state.version.clone(),
            }
        };
        let key = known.key();
        let number = cache::id(&key, &version?);
        let len = (key.len() as u32).to_le_bytes();
        Some([&number, &len[..], key.as_bytes()].concat())
    }

    fn path(&self, node: Node) -> Option<Bytes> {
        let known = self.known(node).ok()?;
        Some(known.key().trim_end_matches('/').as_bytes().to_vec())
    }

    fn find<'a>(&'a self, cx: &'a Context, identity: &'a [u8]) -> BoxFuture<'a, Result<Entry>> {
        Box::pin(async move {
            let (number, key) = parse(identity).ok_or(Errno::INVAL)?;
            if let Some(writing) = self.writing.as_ref().filter(|_| key.is_empty()) {
                let (writing, number) = (writing.clone(), *number);
                let found = self.ask(cx, async move { writing.go_on(&number).await });
                let (key, draft) = found.await?;
                let known = self.tree.drafted(&key, &draft);
                return Ok(self.entry(&*known.ok_or(Errno::STALE)?));
            }
            if !store::has_path(key) || !self.fetch.store.takes(key) {
                return Err(Errno::STALE.into());
            }
            let is_it = |version: &Version| cache::id(key, version) == *number;
            let changed = self.writing.as_ref();
            let changed = changed.and_then(|all| all.changed_to(split(key).0, key));
            if let Some(there) = changed {
                // The draft goes on from the version that the client knew.
                let there = there.filter(|there| there.version().as_ref().is_some_and(is_it));
                let draft = there.as_ref().and_then(There::draft);
                let known = draft.and_then(|draft| self.tree.drafted(key, draft));
                return Ok(self.entry(&*known.ok_or(Errno::STALE)?));
            }
            let asked = Instant::now();
            let found = self.find(cx, key, &format!("{key}/")).await?;
            let found = found.filter(|facts| facts.version.as_ref().is_some_and(is_it));
            let facts = found.ok_or(Errno::STALE)?;
            let known = self.tree.looked_up(key.to_owned(), facts, asked);
            Ok(self.entry(&known))
        })
    }
}

/// The number and the key of a file's identity. A path may follow, which is not needed.
fn parse(identity: &[u8]) -> Option<(&Id, &str)> {
    let (number, rest) = identity.split_first_chunk()?;
    let (len, rest) = rest.split_first_chunk()?;
    let key = rest.get(..u32::from_le_bytes(*len) as usize)?;
    Some((number, std::str::from_utf8(key).ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// No bytes that a client sends make more of an identity than a name that lookups lead to.
    #[test]
    fn an_identity_is_taken_apart() {
        let of = |len: u32, rest: &[u8]| [&[7; 16], &len.to_le_bytes()[..], rest].concat();
        assert_eq!(parse(&of(3, b"a/b")), Some((&[7; 16], "a/b")));
        assert_eq!(parse(&of(3, b"a/band a path")), Some((&[7; 16], "a/b")));
        for bytes in [of(4, b"a/b"), of(u32::MAX, b"a/b"), of(2, b"\xff\xfe")] {
            assert_eq!(parse(&bytes), None, "{bytes:?}");
        }
        for len in 0..20 {
            assert_eq!(parse(&of(3, b"a/b")[..len]), None, "{len}");
        }
        for key in ["a", "a/b", "a b/c"] {
            assert!(store::has_path(key), "{key:?}");
        }
        for key in [
            "", "/", "a/", "/a", "a//b", "../a", "a/./b", "a ", " a", "a /b", "a\0",
        ] {
            assert!(!store::has_path(key), "{key:?}");
        }
    }
}
