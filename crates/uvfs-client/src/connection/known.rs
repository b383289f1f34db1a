//! The nodes and handles that the server gave to the client, under numbers that outlive the server.
//!
//! The cache knows a node or handle by the number that the server gave it first. A server that came
//! back has other numbers for the same files, so from then on numbers are translated as requests are
//! sent. Until then they are the server's own, and nothing is looked up.

use std::collections::HashMap;
use std::collections::hash_map::Entry::Occupied;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;

use rustix::fs::OFlags;
use rustix::io::{self, Errno};
use uvfs_proto::ext::IDENTITY_MAX;

use crate::types::{LockRequest, NodeId, ROOT, Reclaimed};

#[derive(Debug)]
struct Node {
    /// The current server's number, or why it has none.
    at_server: io::Result<u64>,
    lookups: u64,
    /// How many of them the current server has counted.
    counted: u64,
    /// The path below the root by which it was found last; empty when that is not known.
    place: Box<[u8]>,
}

/// A node that has files open. Only those are found again, so what that takes goes with the last.
#[derive(Debug, Default)]
struct Open {
    /// Its handles.
    handles: usize,
    /// The identity that finds it again, with the node's `place` behind it unless it has a path itself.
    identity: Vec<u8>,
    placed: bool,
}

impl Open {
    /// The identity and path that the server is asked to find.
    fn whole_identity(&self, place: &[u8]) -> Vec<u8> {
        let mut whole = self.identity.clone();
        // Too deep: by the rest of the identity alone, then.
        if !whole.is_empty() && !self.placed && whole.len() + place.len() <= IDENTITY_MAX {
            whole.extend_from_slice(place);
        }
        whole
    }
}

#[derive(Debug)]
struct OpenHandle {
    /// How often it was given: file systems may have one for all opens of a file.
    opens: u64,
    at_server: io::Result<u64>,
    /// As which it was opened.
    flags: OFlags,
    /// The locks that it has.
    locks: Vec<LockRequest>,
}

impl OpenHandle {
    /// Changes its locks as fcntl(2) and flock(2) do: what is asked for replaces what its owner has
    /// of that range.
    fn locked(&mut self, request: &LockRequest) {
        let mut locks = Vec::with_capacity(self.locks.len() + 2);
        for lock in self.locks.drain(..) {
            let same = lock.owner == request.owner && lock.flock == request.flock;
            if !same || lock.end < request.start || request.end < lock.start {
                locks.push(lock);
                continue;
            }
            if lock.start < request.start {
                locks.push(LockRequest {
                    end: request.start - 1,
                    ..lock
                });
            }
            if lock.end > request.end {
                locks.push(LockRequest {
                    start: request.end + 1,
                    ..lock
                });
            }
        }
        if request.kind.is_some() {
            locks.push(*request);
        }
        self.locks = locks;
    }
}

/// The number of a node or handle at a server that came back, or the errno with which it was not found.
pub(crate) type Found<K, T = u64> = HashMap<K, io::Result<T>>;

#[derive(Debug, Default)]
pub(crate) struct Known {
    /// How often a server came back.
    generation: u64,
    /// The server is gone, and what is known was counted for the next one.
    counted: bool,
    nodes: foldhash::HashMap<NodeId, Node>,
    /// By node and number.
    handles: foldhash::HashMap<(NodeId, u64), OpenHandle>,
    /// The nodes that those are of.
    open: foldhash::HashMap<NodeId, Open>,
    /// From the current server's numbers to ours; empty for the first server.
    ours: foldhash::HashMap<u64, NodeId>,
    /// Numbers for what the server calls as it called something else before.
    made: u64,
}

impl Known {
    /// Whether that server still is the one that numbers are translated to.
    pub(crate) fn check(&self, generation: u64) -> io::Result<()> {
        if generation == self.generation && !self.counted {
            Ok(())
        } else {
            Err(Errno::NOTCONN)
        }
    }

    /// A number that nothing has, the server's own if it can be.
    fn fresh(&mut self, at_server: u64, taken: impl Fn(&Self, u64) -> bool) -> u64 {
        let mut number = at_server;
        while taken(self, number) {
            self.made += 1;
            number = u64::MAX - self.made;
        }
        number
    }

    /// The path below the root of a name in a directory; empty when it is not known.
    fn place(&self, parent: NodeId, name: &OsStr) -> Box<[u8]> {
        if parent == ROOT {
            return name.as_bytes().into();
        }
        match self.nodes.get(&parent) {
            Some(dir) if !dir.place.is_empty() => [&dir.place, name.as_bytes()].join(&b'/').into(),
            _ => Box::default(),
        }
    }

    /// Counts a lookup of a name in a directory (or without one) that a server answered; our number
    /// for what was found.
    pub(crate) fn looked_up(
        &mut self,
        generation: u64,
        at_server: u64,
        by: Option<(NodeId, &OsStr)>,
    ) -> io::Result<NodeId> {
        self.check(generation)?;
        if at_server == ROOT {
            return Ok(ROOT);
        }
        let ours = match self.ours.get(&at_server) {
            Some(&ours) => ours,
            None if generation == 0 => at_server,
            None => {
                let ours = self.fresh(at_server, |k, n| k.nodes.contains_key(&n));
                self.ours.insert(at_server, ours);
                ours
            }
        };
        let place = by.map_or_else(Box::default, |(parent, name)| self.place(parent, name));
        let node = self.nodes.entry(ours).or_insert_with(|| Node {
            at_server: Ok(at_server),
            lookups: 0,
            counted: 0,
            place: Box::default(),
        });
        if !place.is_empty() {
            node.place = place;
        }
        node.lookups += 1;
        node.counted += 1;
        Ok(ours)
    }

    /// Takes back lookups; what the server is to be told: node and count.
    pub(crate) fn forget(&mut self, generation: u64, ours: NodeId, n: u64) -> Option<(u64, u64)> {
        let Occupied(mut entry) = self.nodes.entry(ours) else {
            return None;
        };
        let node = entry.get_mut();
        let uncounted = node.lookups - node.counted;
        let n = n.min(node.lookups);
        let tell = n - n.min(uncounted);
        node.lookups -= n;
        node.counted -= tell;
        let at_server = node.at_server.ok();
        if node.lookups == 0 {
            entry.remove();
            if let Some(at_server) = at_server {
                self.ours.remove(&at_server);
            }
            // The number may be another file's next.
            if let Some(open) = self.open.get_mut(&ours) {
                open.identity.clear();
            }
        }
        let told = tell > 0 && generation == self.generation;
        at_server.filter(|_| told).map(|node| (node, tell))
    }

    /// A node's number at the server.
    pub(crate) fn node(&self, generation: u64, ours: NodeId) -> io::Result<u64> {
        self.check(generation)?;
        match self.nodes.get(&ours) {
            _ if ours == ROOT => Ok(ROOT),
            Some(node) => node.at_server,
            None if generation == 0 => Ok(ours),
            None => Err(Errno::STALE),
        }
    }

    /// A handle's number at the server.
    pub(crate) fn handle(&self, generation: u64, node: NodeId, ours: u64) -> io::Result<u64> {
        self.check(generation)?;
        match self.handles.get(&(node, ours)) {
            Some(handle) => handle.at_server,
            None => Err(Errno::BADF),
        }
    }

    /// Our number for a node of the server.
    pub(crate) fn ours(&self, generation: u64, at_server: u64) -> Option<NodeId> {
        self.check(generation).ok()?;
        if generation == 0 {
            return Some(at_server);
        }
        self.ours.get(&at_server).copied()
    }

    /// A file was opened; our number for the handle. `placed`: its identity says itself where it is,
    /// as for a file that another program looked up.
    pub(crate) fn opened(
        &mut self,
        generation: u64,
        node: NodeId,
        at_server: u64,
        flags: OFlags,
        identity: &[u8],
        placed: bool,
    ) -> io::Result<u64> {
        self.check(generation)?;
        let ours = match generation {
            0 => at_server,
            _ => self.fresh(at_server, |k, n| k.handles.contains_key(&(node, n))),
        };
        // A file that exists is neither created nor truncated once more.
        let flags = flags - (OFlags::CREATE | OFlags::EXCL | OFlags::TRUNC);
        let open = self.open.entry(node).or_default();
        let handle = self.handles.entry((node, ours)).or_insert_with(|| {
            open.handles += 1;
            OpenHandle {
                opens: 0,
                at_server: Ok(at_server),
                flags,
                locks: Vec::new(),
            }
        });
        handle.opens += 1;
        if (handle.flags ^ flags).intersects(OFlags::ACCMODE) {
            handle.flags = (handle.flags - OFlags::ACCMODE) | OFlags::RDWR;
        }
        if self.nodes.contains_key(&node) {
            // The last one knows best where the file is.
            open.identity = identity.to_vec();
            open.placed = placed;
        }
        Ok(ours)
    }

    /// A file was closed; the handle's number at the server.
    pub(crate) fn closed(&mut self, generation: u64, node: NodeId, ours: u64) -> Option<u64> {
        let handle = self.handles.get_mut(&(node, ours))?;
        handle.opens -= 1;
        let at_server = handle.at_server.ok();
        if handle.opens == 0 {
            self.handles.remove(&(node, ours));
            if let Occupied(mut open) = self.open.entry(node) {
                open.get_mut().handles -= 1;
                if open.get().handles == 0 {
                    open.remove();
                }
            }
        }
        at_server.filter(|_| generation == self.generation)
    }

    /// The nodes that have files open, with what finds them again. From now on answers of the server
    /// that was count no more.
    pub(crate) fn nodes(&mut self) -> Vec<(NodeId, Vec<u8>)> {
        self.counted = true;
        let open = self.open.iter();
        let nodes = open.filter_map(|(n, open)| Some((*n, open, self.nodes.get(n)?)));
        nodes
            .map(|(n, open, node)| (n, open.whole_identity(&node.place)))
            .collect()
    }

    /// A handle's locks were changed.
    pub(crate) fn locked(&mut self, node: NodeId, ours: u64, request: &LockRequest) {
        if let Some(handle) = self.handles.get_mut(&(node, ours)) {
            handle.locked(request);
        }
    }

    /// The open files, by node and number, their flags and their locks.
    pub(crate) fn handles(&self) -> Vec<((NodeId, u64), OFlags, Vec<LockRequest>)> {
        let handles = self.handles.iter();
        handles
            .map(|(&name, handle)| (name, handle.flags, handle.locks.clone()))
            .collect()
    }

    /// A server came back, and has these nodes and handles. Returns what is no longer in use: the
    /// handles that it is to close, by its numbers of node and handle, and the nodes to forget.
    pub(crate) fn rebind(
        &mut self,
        nodes: &Found<NodeId, Reclaimed>,
        handles: &Found<(NodeId, u64)>,
    ) -> (Vec<(u64, u64)>, Vec<u64>) {
        self.generation += 1;
        self.counted = false;
        self.ours.clear();
        for (&ours, node) in &mut self.nodes {
            let again = nodes.get(&ours).copied().unwrap_or(Err(Errno::STALE));
            node.at_server = again.map(|again| again.node);
            node.counted = u64::from(node.at_server.is_ok());
            if let Ok(at_server) = node.at_server {
                self.ours.insert(at_server, ours);
            }
        }
        for (ours, handle) in &mut self.handles {
            handle.at_server = handles.get(ours).copied().unwrap_or(Err(Errno::STALE));
        }
        let closed = handles
            .iter()
            .filter(|(n, _)| !self.handles.contains_key(n));
        let closed = closed.filter_map(|((node, _), fh)| {
            let again = nodes.get(node)?.ok()?;
            Some((again.node, fh.ok()?))
        });
        let gone = nodes.iter().filter(|(n, _)| !self.nodes.contains_key(n));
        let gone = gone.filter_map(|(_, again)| Some(again.ok()?.node));
        (closed.collect(), gone.collect())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::types::LockKind;

    fn again(node: u64) -> Reclaimed {
        Reclaimed {
            node,
            mtime: (0, 0),
        }
    }

    /// After a restart of the server an open file is the same file.
    #[test]
    fn numbers_stay_when_the_server_changes() {
        let mut known = Known::default();
        assert_eq!(known.looked_up(0, 7, None).unwrap(), 7);
        assert_eq!(known.looked_up(0, 7, None).unwrap(), 7);
        assert_eq!(known.looked_up(0, 8, None).unwrap(), 8);
        let flags = OFlags::RDWR | OFlags::TRUNC | OFlags::CREATE | OFlags::EXCL;
        assert_eq!(known.opened(0, 7, 3, flags, b"seven", false).unwrap(), 3);
        assert_eq!(known.nodes(), [(7, b"seven".to_vec())]);
        assert_eq!(known.handles()[0].1, OFlags::RDWR);
        assert!(known.looked_up(0, 9, None).is_err(), "that server is gone");
        let nodes = Found::from([(7, Ok(again(8)))]);
        let handles = Found::from([((7, 3), Ok(4)), ((7, 5), Ok(6))]);
        let (closed, gone) = known.rebind(&nodes, &handles);
        assert_eq!(closed, [(8, 6)], "closed meanwhile");
        assert!(gone.is_empty());
        assert!(known.node(0, 7).is_err(), "that server is gone");
        assert_eq!(known.node(1, 7).unwrap(), 8);
        assert_eq!(known.handle(1, 7, 3).unwrap(), 4);
        assert_eq!(known.node(1, 8), Err(Errno::STALE));
        // Another file with the old number of the lost one, and of the handle.
        let other = known.looked_up(1, 7, None).unwrap();
        assert!(other != 7 && other != 8);
        let fh = known
            .opened(1, other, 3, OFlags::RDONLY, b"", false)
            .unwrap();
        assert_eq!(known.handle(1, other, fh).unwrap(), 3);
        assert_eq!(known.looked_up(1, 8, None).unwrap(), 7);
        // One of three lookups was the first server's: it went with it.
        assert_eq!(known.forget(1, 7, 1), None);
        assert_eq!(known.forget(1, 7, 2), Some((8, 2)));
        assert_eq!(known.forget(1, 8, 1), None);
        assert_eq!(known.closed(1, 7, 3), Some(4));
    }

    /// After a restart of the server the client reopens the files that are open, and no others.
    #[test]
    fn an_identity_goes_with_the_last_handle_or_with_its_node() {
        let mut known = Known::default();
        let open = |known: &mut Known, handle, identity: &[u8]| {
            known
                .opened(0, 7, handle, OFlags::RDONLY, identity, false)
                .unwrap();
        };
        known.looked_up(0, 7, None).unwrap();
        // One number for two opens, as some file systems have it.
        open(&mut known, 3, b"first");
        open(&mut known, 3, b"first");
        open(&mut known, 4, b"second");
        let second = [(7, b"second".to_vec())];
        for handle in [4, 3] {
            assert_eq!(known.nodes(), second);
            known.counted = false;
            known.closed(0, 7, handle);
        }
        assert_eq!(known.nodes(), second, "open once more");
        known.counted = false;
        known.closed(0, 7, 3);
        assert!(known.nodes().is_empty() && known.open.is_empty());
        known.counted = false;
        open(&mut known, 5, b"third");
        assert_eq!(known.nodes(), [(7, b"third".to_vec())]);
        known.counted = false;
        known.forget(0, 7, 1);
        assert!(known.nodes().is_empty());
        known.counted = false;
        // Not the file that had the number before.
        known.looked_up(0, 7, None).unwrap();
        assert_eq!(known.nodes(), [(7, Vec::new())]);
        known.counted = false;
        known.closed(0, 7, 5);
        assert!(known.open.is_empty());
    }

    /// A server without privileges finds a client's open files by their paths after a restart.
    #[test]
    fn an_identity_ends_with_the_path_that_led_there() {
        let mut known = Known::default();
        let look_up = |known: &mut Known, parent, name: &str, node| {
            known
                .looked_up(0, node, Some((parent, name.as_ref())))
                .unwrap();
        };
        look_up(&mut known, ROOT, "dir", 2);
        look_up(&mut known, 2, "file", 3);
        look_up(&mut known, ROOT, "link", 3);
        look_up(&mut known, 2, "file", 3);
        look_up(&mut known, 9, "lost", 4);
        look_up(&mut known, 2, &"x".repeat(IDENTITY_MAX), 5);
        look_up(&mut known, ROOT, "imported", 6);
        for node in [3, 4, 5] {
            known
                .opened(0, node, node, OFlags::RDONLY, b"identity:", false)
                .unwrap();
        }
        known
            .opened(0, 6, 6, OFlags::RDONLY, b"identity:there", true)
            .unwrap();
        look_up(&mut known, ROOT, "elsewhere", 6);
        let mut nodes = known.nodes();
        nodes.sort_unstable();
        let identities: Vec<_> = nodes.iter().map(|(_, identity)| &identity[..]).collect();
        let expected: [&[u8]; 4] = [
            b"identity:dir/file",
            b"identity:",
            b"identity:",
            b"identity:there",
        ];
        assert_eq!(identities, expected);
    }

    proptest! {
        /// The locks to be taken again are the locks that are held, byte by byte, for each owner and kind.
        #[test]
        fn locks_are_remembered_as_they_are(
            requests in prop::collection::vec((0u32..3, any::<bool>(), 0u8..3, 0u64..20, 0u64..20), 0..60),
        ) {
            let mut handle = OpenHandle { opens: 1, at_server: Ok(1), flags: OFlags::RDONLY, locks: Vec::new() };
            let mut bytes = HashMap::new();
            for (owner, flock, kind, a, b) in requests {
                let kind = [None, Some(LockKind::Shared), Some(LockKind::Exclusive)][usize::from(kind)];
                let (start, end) = (a.min(b), a.max(b));
                handle.locked(&LockRequest { owner, flock, kind, start, end });
                for at in start..=end {
                    bytes.insert((owner, flock, at), kind);
                }
            }
            let mut found = HashMap::new();
            for lock in &handle.locks {
                for at in lock.start..=lock.end {
                    let before = found.insert((lock.owner, lock.flock, at), lock.kind);
                    prop_assert!(before.is_none(), "a byte is locked once");
                }
            }
            bytes.retain(|_, kind| kind.is_some());
            prop_assert_eq!(found, bytes);
        }
    }
}
