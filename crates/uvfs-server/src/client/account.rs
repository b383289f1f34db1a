//! The open files and lookups of a client, counted by the replies that it got. The server takes them
//! back when the client goes.

use std::collections::hash_map::Entry;

use uvfs_proto::abi::ForgetOne;
use uvfs_proto::request::Operation;

use super::Client;
use crate::fs::{FileSystem, ROOT};
use crate::reply::Reply;
use crate::request::Request;

impl<F: FileSystem> Client<F> {
    /// Whether the client was given a node.
    pub(super) fn knows_node(&self, node: u64) -> bool {
        (node == ROOT.0 && self.guest.is_none()) || self.link.lookups().contains_key(&node)
    }

    /// The client is given a node; 0 is none.
    pub(super) fn looked_up(&self, node: u64) {
        if node == 0 {
            return;
        }
        let mut lookups = self.link.lookups();
        let count = lookups.entry(node).or_default();
        *count += 1;
        if *count == 1
            && let Some(guest) = &self.guest
        {
            guest.knows();
        }
    }

    /// The client is given a handle.
    pub(super) fn opened(&self, node: u64, fh: u64, is_directory: bool) {
        let mut handles = self.handles.borrow_mut();
        *handles.entry((node, fh, is_directory)).or_default() += 1;
    }

    /// The client gives a handle back.
    fn released(&self, node: u64, fh: u64, is_directory: bool) {
        let mut handles = self.handles.borrow_mut();
        if let Entry::Occupied(mut count) = handles.entry((node, fh, is_directory)) {
            *count.get_mut() -= 1;
            if *count.get() == 0 {
                count.remove();
            }
        }
    }

    /// Remembers what a reply gives to the client, or takes from it.
    pub(super) fn account(&self, request: &Request<'_>, reply: Reply) {
        let node = request.node;
        match reply {
            Reply::Entry(entry) => self.looked_up(entry.nodeid),
            Reply::Created(entry, opened) => {
                self.opened(entry.nodeid, opened.out.fh, false);
                self.looked_up(entry.nodeid);
            }
            Reply::Opened(opened) => {
                let is_directory = matches!(request.operation, Operation::Opendir(_));
                self.opened(node, opened.out.fh, is_directory);
            }
            Reply::Listing(mut listed) => {
                listed.entries(|_, entry| self.looked_up(entry.nodeid));
            }
            _ => {}
        }
        match &request.operation {
            Operation::Release(arg) => {
                self.released(node, arg.fh, false);
                if let Entry::Occupied(mut held) = self.imported.borrow_mut().entry((node, arg.fh))
                {
                    self.closed(1);
                    held.get_mut().1 -= 1;
                    if held.get().1 == 0 {
                        held.remove();
                    }
                }
            }
            Operation::Releasedir(arg) => self.released(node, arg.fh, true),
            Operation::Forget(arg) => self.forgot(ForgetOne {
                nodeid: node,
                nlookup: arg.nlookup,
            }),
            Operation::BatchForget(_, records) => records.iter().for_each(|one| self.forgot(one)),
            _ => {}
        }
    }

    /// The client has no more lookups of so many nodes.
    pub(super) fn forgot_nodes(&self, count: usize) {
        if let Some(guest) = &self.guest {
            guest.forgot(count);
        }
    }

    /// The client has given up lookups, which it had.
    fn forgot(&self, gone: ForgetOne) {
        let mut lookups = self.link.lookups();
        let Entry::Occupied(mut count) = lookups.entry(gone.nodeid) else {
            return;
        };
        *count.get_mut() = count.get().saturating_sub(gone.nlookup);
        if *count.get() == 0 {
            count.remove();
            self.forgot_nodes(1);
            self.session.coherence.forget(&self.link, gone.nodeid);
        }
    }
}
