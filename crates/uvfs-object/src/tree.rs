//! Nodes: which object or directory each number stands for.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::time::Instant;

use sha2::{Digest, Sha256};
use uvfs_server::fs::{Errno, Node, ROOT, Result, SessionHandle};

use crate::draft::{self, Draft};
use crate::listing::Pages;
use crate::object::Object;
use crate::posix::Posix;
use crate::store::{self, Facts, Version};
use crate::survive;

/// No server gives so many numbers.
pub(crate) const RESERVED: u64 = 1 << 32;

/// A file or directory that the kernel knows.
pub(crate) struct Known {
    pub(crate) node: Node,
    directory: bool,
    name: Mutex<Name>,
    pub(crate) state: Mutex<State>,
    /// Held while a draft of it begins and while a program appends to it, and while names in a directory change.
    pub(crate) making: tokio::sync::Mutex<()>,
}

struct Name {
    /// Below the prefix; of a directory with a `/` at the end, but for the root's, which is empty.
    key: Arc<str>,
    /// The number that programs see.
    ino: u64,
}

/// What changes of a file.
#[derive(Default)]
pub(crate) struct State {
    /// `None` for a directory.
    pub(crate) version: Option<Version>,
    pub(crate) posix: Posix,
    /// When the store said so.
    pub(crate) asked: Option<Instant>,
    /// Opens that the kernel sends reads for.
    pub(crate) plain: u64,
    /// Opens of clients.
    pub(crate) clients: u64,
    /// The registration of a backing file and its opens.
    pub(crate) backing: Option<(i32, u64)>,
    /// The pieces of this version, while the file is open.
    pub(crate) object: Option<Arc<Object>>,
    /// The times of modification and change that programs saw as they wrote this version. The store may have others.
    pub(crate) written: Option<[(i64, u32); 2]>,
    /// The file as programs changed it, until the store has that.
    pub(crate) draft: Option<Arc<Draft>>,
    /// Opens for writing, and changes that are under way.
    pub(crate) writers: u64,
    /// No name leads to it any more.
    pub(crate) removed: bool,
    /// When a client changed names in this directory.
    pub(crate) by_client: Option<Instant>,
    /// A directory that has a marker.
    pub(crate) marked: bool,
    pub(crate) pages: Pages,
}

impl State {
    /// When the store got this version.
    pub(crate) fn stored(&self) -> Option<(i64, u32)> {
        let modified = self.version.as_ref()?.modified;
        modified.map(|(seconds, nanos)| (seconds.cast_signed(), nanos))
    }

    /// When the file was modified, as far as that is known.
    pub(crate) fn mtime(&self) -> Option<(i64, u32)> {
        let written = self.written.map(|[modified, _]| modified);
        self.posix.mtime.or(written).or(self.stored())
    }

    pub(crate) fn is_open(&self) -> bool {
        self.plain > 0 || self.clients > 0 || self.backing.is_some()
    }

    /// The store has what the draft was, which ends.
    pub(crate) fn has_stored(&mut self, draft: &draft::State) {
        self.draft = None;
        self.object = None;
        self.posix = draft.posix;
        if !draft.removed {
            self.version.clone_from(&draft.replaces);
            self.asked = Some(Instant::now());
        }
    }

    /// Closes the draft's data file, if no program uses it.
    pub(crate) fn rest(&self) {
        if let Some(draft) = &self.draft
            && !self.is_open()
            && self.writers == 0
        {
            draft.close();
        }
    }
}

impl Known {
    pub(crate) fn is_directory(&self) -> bool {
        self.directory
    }

    pub(crate) fn key(&self) -> Arc<str> {
        uvfs_sys::lock(&self.name).key.clone()
    }

    pub(crate) fn ino(&self) -> u64 {
        uvfs_sys::lock(&self.name).ino
    }

    pub(crate) fn state(&self) -> MutexGuard<'_, State> {
        uvfs_sys::lock(&self.state)
    }
}

/// All nodes. A node stays until the kernel has taken back each of its lookups.
pub(crate) struct Tree {
    nodes: Mutex<Nodes>,
    /// Where nodes are saved for the next server.
    pub(crate) session: OnceLock<Arc<dyn SessionHandle>>,
}

struct Nodes {
    by_number: HashMap<u64, (Arc<Known>, u64)>,
    by_key: HashMap<String, Arc<Known>>,
    next: u64,
}

impl Tree {
    pub(crate) fn new() -> Self {
        let root = Arc::new(known(ROOT, String::new(), Facts::default(), None));
        let nodes = Nodes {
            by_number: HashMap::from([(ROOT.0, (root.clone(), 1))]),
            by_key: HashMap::from([(String::new(), root)]),
            next: ROOT.0 + 1,
        };
        Self {
            nodes: Mutex::new(nodes),
            session: OnceLock::new(),
        }
    }

    /// Saves again what the next server finds a node by, if there may be one. Not to be called with a lock of the node's.
    pub(crate) fn save_again(&self, known: &Known) {
        if let Some(session) = self.session.get() {
            session.save_again(known.node, &mut |to| survive::save(known, to));
        }
    }

    /// Makes a node known that an earlier server of the mount had.
    pub(crate) fn restore(
        &self,
        node: Node,
        lookups: u64,
        key: String,
        state: State,
    ) -> Result<()> {
        let mut nodes = uvfs_sys::lock(&self.nodes);
        if nodes.by_number.contains_key(&node.0) {
            return Err(Errno::EXIST.into());
        }
        nodes.next = nodes.next.max(node.0 + 1);
        let (draft, removed) = (state.draft.clone(), state.removed);
        let mut known = known(node, key.clone(), Facts::default(), None);
        known.state = Mutex::new(state);
        let known = Arc::new(known);
        if let Some(draft) = draft {
            draft.state().node = Arc::downgrade(&known);
        }
        // The newest of a key comes first.
        if !removed {
            nodes.by_key.entry(key).or_insert_with(|| known.clone());
        }
        nodes.by_number.insert(node.0, (known, lookups));
        Ok(())
    }

    /// All nodes are restored. The next ones get numbers that the earlier server has not given.
    pub(crate) fn restored(&self) {
        uvfs_sys::lock(&self.nodes).next += RESERVED;
    }

    pub(crate) fn get(&self, node: Node) -> Option<Arc<Known>> {
        let nodes = uvfs_sys::lock(&self.nodes);
        Some(nodes.by_number.get(&node.0)?.0.clone())
    }

    /// How many lookups of a node are counted.
    pub(crate) fn lookups(&self, node: Node) -> Option<u64> {
        let nodes = uvfs_sys::lock(&self.nodes);
        Some(nodes.by_number.get(&node.0)?.1)
    }

    /// Counts a further lookup of a node.
    pub(crate) fn remember(&self, node: Node) -> Result<()> {
        let mut nodes = uvfs_sys::lock(&self.nodes);
        let (_, lookups) = nodes.by_number.get_mut(&node.0).ok_or(Errno::STALE)?;
        *lookups += 1;
        Ok(())
    }

    /// Counts a lookup of a key, which the store said this of when it was `asked`. Another version or type of a file is
    /// another node.
    pub(crate) fn looked_up(&self, key: String, facts: Facts, asked: Instant) -> Arc<Known> {
        let mut nodes = uvfs_sys::lock(&self.nodes);
        if let Some(known) = nodes.by_key.get(&key).cloned()
            && is_now(&known, &facts, asked)
        {
            let (_, lookups) = nodes
                .by_number
                .get_mut(&known.node.0)
                .expect("both maps have it");
            *lookups += 1;
            return known;
        }
        let number = nodes.next;
        nodes.next += 1;
        let made = Arc::new(known(Node(number), key.clone(), facts, Some(asked)));
        nodes.by_number.insert(number, (made.clone(), 1));
        nodes.by_key.insert(key, made.clone());
        made
    }

    /// Counts a lookup of a key that has a draft, which leads to the node that programs write it by. `None` if the draft has
    /// ended meanwhile.
    pub(crate) fn drafted(&self, key: &str, draft: &Arc<Draft>) -> Option<Arc<Known>> {
        let mut nodes = uvfs_sys::lock(&self.nodes);
        // The kernel may have pages of another node of this key.
        let had = draft.state().node.upgrade();
        let number = had.as_ref().map_or(nodes.next, |had| had.node.0);
        let known = had.unwrap_or_else(|| {
            let facts = Facts::from(Some(Version::default()));
            Arc::new(known(Node(number), key.to_owned(), facts, None))
        });
        {
            let mut state = known.state();
            let mut now = draft.state();
            if now.ended {
                return None;
            }
            if state.draft.is_none() {
                state.draft = Some(draft.clone());
                now.node = Arc::downgrade(&known);
            }
        }
        nodes.next = nodes.next.max(number + 1);
        let (_, lookups) = (nodes.by_number.entry(number)).or_insert_with(|| (known.clone(), 0));
        *lookups += 1;
        nodes.by_key.insert(key.to_owned(), known.clone());
        Some(known)
    }

    /// The node that a key has now.
    pub(crate) fn at(&self, key: &str) -> Option<Arc<Known>> {
        uvfs_sys::lock(&self.nodes).by_key.get(key).cloned()
    }

    /// Notes that no name leads to the node of a key any more.
    pub(crate) fn removed(&self, key: &str) {
        if let Some(known) = uvfs_sys::lock(&self.nodes).by_key.remove(key) {
            known.state().removed = true;
        }
    }

    /// Notes that the node of a key has an older version than the store. Programs that have it open go on with that, opens ask
    /// the store, and the next lookup makes a new node.
    pub(crate) fn outdated(&self, key: &str) {
        if let Some(known) = uvfs_sys::lock(&self.nodes).by_key.remove(key) {
            known.state().asked = None;
        }
    }

    /// Gives the node of a key, or all nodes below a directory, another key. The node that had it loses its name.
    pub(crate) fn renamed(&self, from: &str, to: &str) {
        let mut nodes = uvfs_sys::lock(&self.nodes);
        if let Some(replaced) = nodes.by_key.remove(to) {
            replaced.state().removed = true;
        }
        let below = |key: &&String| match store::is_directory(from) {
            true => key.starts_with(from),
            false => *key == from,
        };
        let keys: Vec<_> = nodes.by_key.keys().filter(below).cloned().collect();
        let mut moved = Vec::new();
        for key in keys {
            let known = nodes.by_key.remove(&key).expect("it was listed");
            moved.push(known.clone());
            let now = format!("{to}{}", &key[from.len()..]);
            *uvfs_sys::lock(&known.name) = Name {
                key: now.as_str().into(),
                ino: ino(&now),
            };
            nodes.by_key.insert(now, known);
        }
        drop(nodes);
        for known in moved {
            self.save_again(&known);
        }
    }

    /// Notes that a key leads to this node.
    pub(crate) fn leads_to(&self, key: &str, known: &Arc<Known>) {
        let by_key = &mut uvfs_sys::lock(&self.nodes).by_key;
        by_key.insert(key.to_owned(), known.clone());
    }

    /// Notes that a key leads to no other node than `but`. The other one that an earlier server had there.
    pub(crate) fn lose_name(&self, key: &str, but: &Known) -> Option<Arc<Known>> {
        let nodes = uvfs_sys::lock(&self.nodes);
        let others = nodes.by_number.values().map(|(other, _)| other);
        let mut others = others.filter(|other| {
            other.node != but.node && *other.key() == *key && !other.state().removed
        });
        let other = others.next()?.clone();
        other.state().removed = true;
        Some(other)
    }

    /// Gives a node another key.
    pub(crate) fn moved(&self, known: &Arc<Known>, to: &str) {
        let mut nodes = uvfs_sys::lock(&self.nodes);
        let name = Name {
            key: to.into(),
            ino: ino(to),
        };
        let had = std::mem::replace(&mut *uvfs_sys::lock(&known.name), name);
        if (nodes.by_key.get(&*had.key)).is_some_and(|now| Arc::ptr_eq(now, known)) {
            nodes.by_key.remove(&*had.key);
        }
        nodes.by_key.insert(to.to_owned(), known.clone());
        drop(nodes);
        self.save_again(known);
    }

    /// The kernel takes back lookups.
    pub(crate) fn forget(&self, node: Node, count: u64) {
        let mut nodes = uvfs_sys::lock(&self.nodes);
        let Some((known, lookups)) = nodes.by_number.get_mut(&node.0) else {
            return;
        };
        *lookups = lookups.saturating_sub(count);
        if *lookups > 0 || node == ROOT {
            return;
        }
        let known = known.clone();
        nodes.by_number.remove(&node.0);
        if nodes
            .by_key
            .get(&*known.key())
            .is_some_and(|now| now.node == node)
        {
            nodes.by_key.remove(&*known.key());
        }
    }
}

/// Notes what the store said of a file when it was `asked`. Whether the node can stand for that.
pub(crate) fn is_now(known: &Known, now: &Facts, asked: Instant) -> bool {
    let mut state = known.state();
    // It is known better than by a listing of before.
    if state.asked.is_some_and(|known| known > asked) {
        return true;
    }
    // The draft is the file until the store has it, whatever the store says.
    if state.draft.is_some() {
        return true;
    }
    // The kernel takes a node of another type for a broken one.
    if state.posix.special != now.posix.special {
        return false;
    }
    // The kernel may have pages of the version that it had.
    match (&state.version, &now.version) {
        (None, None) => {}
        (Some(had), Some(now)) if had.is(now) => {}
        _ => return false,
    }
    state.version.clone_from(&now.version);
    state.posix = now.posix;
    state.asked = Some(asked);
    true
}

fn known(node: Node, key: String, facts: Facts, asked: Option<Instant>) -> Known {
    let ino = match key.is_empty() {
        true => ROOT.0,
        false => ino(&key),
    };
    Known {
        node,
        directory: store::is_directory(&key),
        name: Mutex::new(Name {
            key: key.into(),
            ino,
        }),
        making: tokio::sync::Mutex::default(),
        state: Mutex::new(State {
            version: facts.version,
            posix: facts.posix,
            asked,
            ..State::default()
        }),
    }
}

/// The number of a key that programs see: the same in each mount.
pub(crate) fn ino(key: &str) -> u64 {
    let digest = Sha256::digest(key.as_bytes());
    let mut number = [0; 8];
    number.copy_from_slice(&digest[..8]);
    // The kernel takes neither 0 nor all bits; 1 is the root's.
    (u64::from_le_bytes(number) >> 1).max(2)
}

#[cfg(test)]
mod tests {
    use uvfs_server::fs::FileType;

    use super::*;

    fn version(etag: &str) -> Facts {
        Facts::from(Some(Version {
            etag: Some(etag.into()),
            ..Version::default()
        }))
    }

    #[test]
    fn a_node_keeps_its_version() {
        let tree = Tree::new();
        let one = tree.looked_up("a".into(), version("1"), Instant::now());
        assert_eq!(
            tree.looked_up("a".into(), version("1"), Instant::now())
                .node,
            one.node
        );
        let two = tree.looked_up("a".into(), version("2"), Instant::now());
        assert_ne!(two.node, one.node);
        assert_eq!(two.ino(), one.ino());
        assert_eq!(
            one.state().version.as_ref().unwrap().etag.as_deref(),
            Some("1")
        );
        // The old node's end leaves the name to the new one.
        tree.forget(one.node, 2);
        assert!(tree.get(one.node).is_none());
        assert_eq!(
            tree.looked_up("a".into(), version("2"), Instant::now())
                .node,
            two.node
        );
    }

    #[test]
    fn a_file_of_another_type_is_another_node() {
        let tree = Tree::new();
        let file = tree.looked_up("a".into(), version("1"), Instant::now());
        let mut link = version("1");
        link.posix.special = Some((FileType::Symlink, 0));
        assert!(!is_now(&file, &link, Instant::now()));
        let found = tree.looked_up("a".into(), link.clone(), Instant::now());
        assert_ne!(found.node, file.node);
        link.posix.mode = Some(0o700);
        assert_eq!(
            tree.looked_up("a".into(), link, Instant::now()).node,
            found.node
        );
        assert_eq!(found.state().posix.mode, Some(0o700));
    }

    #[test]
    fn a_file_becomes_a_directory() {
        let tree = Tree::new();
        let file = tree.looked_up("a".into(), version("1"), Instant::now());
        let directory = tree.looked_up("a/".into(), Facts::default(), Instant::now());
        assert_ne!(file.node, directory.node);
        assert!(directory.is_directory() && !file.is_directory());
    }

    #[test]
    fn the_root_is_never_forgotten() {
        let tree = Tree::new();
        tree.forget(ROOT, 5);
        assert!(tree.get(ROOT).unwrap().is_directory());
    }
}
