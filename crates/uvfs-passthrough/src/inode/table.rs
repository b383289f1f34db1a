//! All inodes that the kernel knows, by node number and by key.

use std::borrow::Borrow;
use std::collections::HashSet;
use std::hash::{BuildHasherDefault, Hash, Hasher};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};

use rustix::io::Errno;
use uvfs_server::fs::{Node, ROOT};
use uvfs_sys::lock;

use super::Inode;
use super::key::{AsIs, Key};
use crate::slots::{SHARDS, Slab, shard_of};
use crate::sys::Result;

/// An inode in its set, found by its key.
struct ByKey {
    /// The key's, at hand when the set grows.
    hash: u64,
    inode: Arc<Inode>,
}

impl Borrow<Key> for ByKey {
    fn borrow(&self) -> &Key {
        &self.inode.key
    }
}

impl PartialEq for ByKey {
    fn eq(&self, other: &Self) -> bool {
        self.hash == other.hash && self.inode.key == other.inode.key
    }
}

impl Eq for ByKey {}

impl Hash for ByKey {
    fn hash<H: Hasher>(&self, state: &mut H) {
        state.write_u64(self.hash);
    }
}

struct Known {
    inode: Arc<Inode>,
    /// How often the kernel was given the node; it takes them back with FORGET.
    lookups: u64,
}

#[derive(Default)]
struct Shard {
    by_key: HashSet<ByKey, BuildHasherDefault<AsIs>>,
    slots: Slab<Known>,
}

/// All inodes that the kernel knows, by node number and by key. A key and the number given to it
/// are in the same shard, so that a count changes under the lock that finds it: a lookup and a
/// forget of the same inode come one after the other.
pub(crate) struct Inodes {
    shards: [Mutex<Shard>; SHARDS],
    root: Arc<Inode>,
}

impl Inodes {
    pub(crate) fn new(root: Arc<Inode>) -> Self {
        Self {
            shards: std::array::from_fn(|_| Mutex::default()),
            root,
        }
    }

    /// The root's inode.
    pub(crate) fn root(&self) -> &Arc<Inode> {
        &self.root
    }

    /// The inode of a node number.
    pub(crate) fn get(&self, node: Node) -> Result<Arc<Inode>> {
        if node == ROOT {
            return Ok(self.root.clone());
        }
        let known = &mut lock(&self.shards[shard_of(node.0)]).slots;
        known
            .get(node.0)
            .map(|known| known.inode.clone())
            .ok_or(Errno::STALE)
    }

    /// The same in every process, as a node's number says the shard, and may be older than this process.
    fn shard(key: &Key) -> usize {
        uvfs_sys::spread(key.ino, SHARDS)
    }

    /// Counts a lookup of the inode with this key, if there is one.
    pub(super) fn find(&self, key: &Key) -> Option<Arc<Inode>> {
        if self.root.key == *key {
            return Some(self.root.clone());
        }
        let mut shard = lock(&self.shards[Self::shard(key)]);
        let inode = shard.by_key.get(key)?.inode.clone();
        shard.slots.get(inode.node.0)?.lookups += 1;
        Some(inode)
    }

    /// The inode with this key, if the kernel knows it. Counts nothing.
    pub(super) fn peek(&self, key: &Key) -> Option<Arc<Inode>> {
        let shard = lock(&self.shards[Self::shard(key)]);
        shard.by_key.get(key).map(|known| known.inode.clone())
    }

    /// The inode with this key, the root's as well. Counts nothing.
    pub(crate) fn known(&self, key: &Key) -> Option<Arc<Inode>> {
        match self.root.key == *key {
            true => Some(self.root.clone()),
            false => self.peek(key),
        }
    }

    /// The numbers of all nodes.
    pub(crate) fn nodes(&self) -> Vec<Node> {
        let mut nodes = vec![ROOT];
        for shard in &self.shards {
            let shard = lock(shard);
            nodes.extend(shard.by_key.iter().map(|known| known.inode.node));
        }
        nodes
    }

    /// The numbers of nodes that are not open.
    pub(super) fn unused(&self) -> Vec<Node> {
        let mut nodes = Vec::new();
        for shard in &self.shards {
            let shard = lock(shard);
            let inodes = shard.by_key.iter().map(|known| &known.inode);
            let unused = inodes.filter(|inode| inode.opens.load(Ordering::Relaxed) == 0);
            nodes.extend(unused.map(|inode| inode.node));
        }
        nodes
    }

    /// Counts a lookup of the inode with this key and makes it with `make` if there is none.
    pub(super) fn find_or_insert(
        &self,
        key: Key,
        make: impl FnOnce(Node, Key) -> Arc<Inode>,
    ) -> Result<Arc<Inode>> {
        if self.root.key == key {
            return Ok(self.root.clone());
        }
        let index = Self::shard(&key);
        let mut shard = lock(&self.shards[index]);
        let shard = &mut *shard;
        if let Some(known) = shard.by_key.get(&key) {
            let inode = known.inode.clone();
            shard.slots.get(inode.node.0).ok_or(Errno::IO)?.lookups += 1;
            return Ok(inode);
        }
        let node = shard
            .slots
            .insert(index, |node| Known {
                inode: make(Node(node), key),
                lookups: 1,
            })
            .ok_or(Errno::NFILE)?;
        let inode = shard.slots.get(node).ok_or(Errno::IO)?.inode.clone();
        let added = shard.by_key.insert(ByKey {
            hash: inode.key.hash,
            inode: inode.clone(),
        });
        debug_assert!(added, "it was not there under the same lock");
        Ok(inode)
    }

    /// Makes a node known that was known to an earlier process.
    pub(super) fn restore(&self, inode: Arc<Inode>, lookups: u64) -> Result<()> {
        let index = Self::shard(&inode.key);
        if index != shard_of(inode.node.0) || inode.key == self.root.key {
            return Err(Errno::STALE);
        }
        let mut shard = lock(&self.shards[index]);
        let by_key = ByKey {
            hash: inode.key.hash,
            inode: inode.clone(),
        };
        if !shard.by_key.insert(by_key) {
            return Err(Errno::EXIST);
        }
        let known = Known {
            inode: inode.clone(),
            lookups,
        };
        if shard.slots.restore(inode.node.0, known) {
            return Ok(());
        }
        shard.by_key.remove(&inode.key);
        Err(Errno::EXIST)
    }

    /// To be called when all nodes are restored.
    pub(crate) fn restored(&self) {
        for shard in &self.shards {
            lock(shard).slots.restored();
        }
    }

    /// Counts one more lookup of a node.
    pub(crate) fn remember(&self, node: Node) -> Result<()> {
        if node == ROOT {
            return Ok(());
        }
        let mut shard = lock(&self.shards[shard_of(node.0)]);
        shard.slots.get(node.0).ok_or(Errno::STALE)?.lookups += 1;
        Ok(())
    }

    /// How many lookups of a node are counted.
    pub(crate) fn lookups(&self, node: Node) -> Option<u64> {
        let mut shard = lock(&self.shards[shard_of(node.0)]);
        Some(shard.slots.get(node.0)?.lookups)
    }

    /// Takes back lookups of a node.
    pub(crate) fn forget(&self, node: Node, lookups: u64) {
        if node == ROOT {
            return;
        }
        let gone = {
            let mut shard = lock(&self.shards[shard_of(node.0)]);
            let Some(known) = shard.slots.get(node.0) else {
                tracing::warn!(%node, "the kernel forgot a node that it did not know");
                return;
            };
            if lookups > known.lookups {
                tracing::warn!(
                    %node,
                    lookups,
                    counted = known.lookups,
                    "forgotten too often"
                );
            }
            known.lookups = known.lookups.saturating_sub(lookups);
            if known.lookups > 0 {
                return;
            }
            let gone = shard.slots.remove(node.0);
            if let Some(gone) = &gone {
                shard.by_key.remove(&gone.inode.key);
            }
            gone
        };
        // Its descriptors close without the lock.
        drop(gone);
    }

    /// How many inodes the kernel knows, the root not counted.
    pub(crate) fn len(&self) -> usize {
        self.shards
            .iter()
            .map(|shard| lock(shard).slots.len())
            .sum()
    }

    /// Forgets everything, after the mount has ended.
    pub(crate) fn clear(&self) {
        for shard in &self.shards {
            let old = std::mem::take(&mut *lock(shard));
            drop(old);
        }
    }
}
