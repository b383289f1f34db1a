//! Clients' requests about names beyond FUSE (`uvfs_proto::ext`): names and listings that come with
//! leases, so that the client may keep them, the contents of short files, and the names by which
//! the mount finds what a client has open.
//!
//! Each is made of ordinary requests of the client's, with all that belongs to them. A lease is
//! asked for before what it protects is read, or, where the node is known only then, after it, and
//! given back if anything changed in between.

use std::ffi::CStr;
use std::pin::pin;

use smallvec::SmallVec;
use uvfs_io::{IoBuf, Payload};
use uvfs_proto::abi;
use uvfs_proto::ext::{
    self, LISTED_AT, LISTED_MAX, LeasedEntry, ListedHead, PEEK_MAX, PeekOut, PeekedHead,
};
use uvfs_proto::request::{Operation, Records};
use uvfs_queue::pair::INLINE_SIZE;
use zerocopy::IntoBytes;

use super::Client;
use crate::fs::{Context, Errno, FileSystem, Result};
use crate::pipeline::execute;
use crate::reply::{Body, Outcome, Reply};
use crate::request::Request;
use crate::token::Grant;

/// The state before a request whose answer tells more than FUSE's.
pub(super) struct More {
    /// The new lease of the directory that a file is made in.
    parent: u64,
    changes: u64,
}

impl<F: FileSystem> Client<F> {
    /// One ordinary request of the client's, with what it gives accounted.
    async fn step(&self, node: u64, operation: Operation<'_>, room: &Payload) -> Outcome {
        let request = self.request(node, operation, Payload::default(), room);
        let outcome = pin!(execute(&self.session, &self.stats, &request)).await;
        self.account(&request, &outcome);
        outcome
    }

    /// Whether the client knows a node that it asks about, and may.
    fn knows(&self, node: u64) -> Result<()> {
        match self.knows_node(node) {
            _ if self.guest => Err(Errno::PERM),
            true => Ok(()),
            false => Err(Errno::STALE),
        }
    }

    /// A lease to read, if it can be had at once and the client has none; else 0.
    fn leased(&self, node: u64) -> u64 {
        let coherence = &self.session.coherence;
        let lease = coherence.try_read(&self.link, node);
        lease.unwrap_or(0)
    }

    /// Takes a lease back before the client heard of it.
    fn unleased(&self, node: u64, seq: u64) {
        if seq != 0 {
            let coherence = &self.session.coherence;
            coherence.returned(&self.link, node, seq, None);
        }
    }

    /// Answers [`uvfs_proto::ext::LOOKUP`].
    pub(super) async fn lookup_leased(&self, parent: u64, name: &CStr) -> Outcome {
        self.knows(parent)?;
        let mut out = LeasedEntry {
            parent: self.leased(parent),
            ..LeasedEntry::default()
        };
        let before = self.session.coherence.changes();
        let none = Payload::default();
        match self.step(parent, Operation::Lookup(name), &none).await {
            Ok(Reply::Entry(entry)) => out.entry = entry,
            // As an answer without a node and without a lifetime.
            Err(Errno::NOENT) => {}
            other => {
                self.unleased(parent, out.parent);
                return Err(other.err().unwrap_or(Errno::IO));
            }
        }
        if out.entry.nodeid != 0 {
            out.node = self.leased(out.entry.nodeid);
            if self.session.coherence.changes() != before {
                // Perhaps of this node, after it was looked at.
                self.unleased(out.entry.nodeid, out.node);
                out.node = 0;
            }
        }
        Ok(Reply::of(&out))
    }

    /// Before a request of [`uvfs_proto::ext::CREATE`] or [`uvfs_proto::ext::WRITE`] is served.
    pub(super) fn more(&self, request: &Request<'_>) -> More {
        More {
            parent: match request.operation {
                Operation::Create(..) => self.leased(request.node),
                _ => 0,
            },
            changes: self.session.coherence.changes(),
        }
    }

    /// Adds to its answer what that tells beyond FUSE.
    pub(super) async fn tell_more(
        &self,
        request: &Request<'_>,
        outcome: &mut Outcome,
        more: More,
        tail: &mut Body,
    ) {
        match (outcome, &request.operation) {
            (Ok(Reply::Created(entry, _)), _) => {
                let mut leases = ext::Leases {
                    parent: more.parent,
                    node: self.leased(entry.nodeid),
                };
                // One change is this one. Another may have been of this file, after it was made.
                if self.session.coherence.changes() != more.changes + 1 {
                    self.unleased(entry.nodeid, std::mem::take(&mut leases.node));
                }
                tail.extend_from_slice(leases.as_bytes());
            }
            (Ok(Reply::Written(_)), Operation::Write(arg)) => {
                let (fs, cx) = (self.session.fs(), &request.cx);
                let attr = fs.getattr(cx, request.node, Some(arg.fh));
                let attr = self.session.interrupts.guard(cx.unique, attr);
                if let Some(Ok(now)) = pin!(attr).await {
                    tail.extend_from_slice(now.attr.as_bytes());
                }
            }
            _ => self.unleased(request.node, more.parent),
        }
    }

    /// Answers [`uvfs_proto::ext::LIST`].
    pub(super) async fn list(&self, node: u64, mut arg: abi::ReadIn, room: &Payload) -> Outcome {
        self.knows(node)?;
        self.has(node, arg.fh, true)?;
        // No more entries than there are places for leases.
        let least = size_of::<abi::Direntplus>() + 8;
        let space = room.len().saturating_sub(LISTED_AT);
        let space = space.min(LISTED_MAX * least);
        if space < 4096 {
            return Err(Errno::INVAL);
        }
        let entries = room.slice(LISTED_AT..LISTED_AT + space);
        arg.size = space as u32;
        let mut head = ListedHead {
            parent: self.leased(node),
            len: 0,
        };
        let before = self.session.coherence.changes();
        let listed = self.step(node, Operation::Readdirplus(arg), &entries).await;
        let listed = match listed {
            Ok(Reply::Listing(listed)) => listed,
            other => {
                self.unleased(node, head.parent);
                return Err(other.err().unwrap_or(Errno::IO));
            }
        };
        head.len = listed.bytes.len() as u64;
        let mut leases = [0u64; LISTED_MAX];
        let nodes = &listed.nodes;
        assert!(nodes.len() <= LISTED_MAX, "an entry takes {least} bytes");
        for (lease, &node) in leases.iter_mut().zip(nodes).filter(|(_, node)| **node != 0) {
            *lease = self.leased(node);
        }
        if self.session.coherence.changes() != before {
            for (lease, &node) in leases.iter_mut().zip(nodes) {
                self.unleased(node, std::mem::take(lease));
            }
        }
        room.copy_in(0, head.as_bytes());
        room.copy_in(size_of::<ListedHead>(), leases.as_bytes());
        entries.copy_in(0, &listed.bytes);
        Ok(Reply::Read(LISTED_AT + listed.bytes.len()))
    }

    /// Answers [`uvfs_proto::ext::PEEK`]; `spare` is private memory of the request. Under a lease nobody
    /// has anything newer, so the file system is asked at once.
    pub(super) async fn peek(&self, cx: &Context, node: u64, spare: &IoBuf) -> Outcome {
        self.knows(node)?;
        if self.session.kernel_writes_back() {
            // It has data of its own.
            return Err(Errno::OPNOTSUPP);
        }
        let lease = self.session.coherence.try_read(&self.link, node);
        let lease = lease.ok_or(Errno::AGAIN)?;
        self.stats.begin(ext::PEEK);
        let work = self.read_whole(cx, node, spare, PEEK_MAX, false);
        let read = self.session.interrupts.guard(cx.unique, work).await;
        self.stats.end(!matches!(read, Some(Ok(_))));
        let bytes = read.unwrap_or(Err(Errno::IO));
        let bytes = bytes.inspect_err(|_| self.unleased(node, lease))?;
        let out = PeekOut {
            lease,
            len: bytes.len() as u64,
        };
        let mut body = Body::from_slice(out.as_bytes());
        body.extend_from_slice(&bytes);
        Ok(Reply::Bytes(body))
    }

    /// Answers [`uvfs_proto::ext::PEEK_AHEAD`]. The client has the leases already: what changes
    /// meanwhile recalls one of them first, and then it believes nothing of this.
    pub(super) async fn peek_ahead(
        &self,
        cx: &Context,
        ahead: Records<'_, u64>,
        used: Records<'_, u64>,
        spare: &IoBuf,
    ) -> Outcome {
        if self.guest {
            return Err(Errno::PERM);
        }
        if self.session.kernel_writes_back() {
            return Err(Errno::OPNOTSUPP);
        }
        self.stats.begin(ext::PEEK_AHEAD);
        let work = async {
            let body = self.read_several(cx, ahead, spare).await;
            for node in used.iter().filter(|&node| self.knows_node(node)) {
                // For its time of access alone.
                let _ = self.read_whole(cx, node, spare, 0, false).await;
            }
            body
        };
        let body = self.session.interrupts.guard(cx.unique, work).await;
        self.stats.end(body.is_none());
        body.map(Reply::Bytes).ok_or(Errno::IO)
    }

    async fn read_several(&self, cx: &Context, nodes: Records<'_, u64>, spare: &IoBuf) -> Body {
        let mut body = Body::new();
        for node in nodes.iter() {
            let room = INLINE_SIZE.saturating_sub(body.len() + size_of::<PeekedHead>());
            if room == 0 {
                break;
            }
            let read = match self.session.coherence.has(&self.link, node) {
                true => {
                    let most = room.min(PEEK_MAX);
                    self.read_whole(cx, node, spare, most, true).await
                }
                false => Err(Errno::AGAIN),
            };
            if matches!(read, Err(Errno::FBIG)) && !body.is_empty() {
                break;
            }
            let (bytes, error) = match read {
                Ok(bytes) => (bytes, 0),
                Err(errno) => (SmallVec::new(), errno.raw_os_error() as u32),
            };
            let len = bytes.len() as u32;
            body.extend_from_slice(PeekedHead { len, error }.as_bytes());
            body.extend_from_slice(&bytes);
            body.resize(body.len().next_multiple_of(8), 0);
        }
        body
    }

    /// All that a file holds, if that is at most `most` bytes; `ahead` of anybody's opening it.
    async fn read_whole(
        &self,
        cx: &Context,
        node: u64,
        spare: &IoBuf,
        most: usize,
        ahead: bool,
    ) -> Result<SmallVec<[u8; 256]>> {
        const { assert!(PEEK_MAX < INLINE_SIZE) };
        let fs = self.session.fs();
        let uncached = self.session.options.uncached && fs.takes_uncached();
        // One byte more than fits, to find out that it is too long.
        let room = Payload::from(spare.slice(0..most + 1));
        let len = fs.peek(cx, node, uncached, ahead, &room).await?;
        if len > most {
            return Err(Errno::FBIG);
        }
        let mut bytes = SmallVec::from_elem(0, len);
        room.copy_out(0, &mut bytes);
        Ok(bytes)
    }

    /// Answers [`uvfs_proto::ext::TOKEN`].
    pub(super) fn token(&self, node: u64, fh: u64) -> Outcome {
        self.has(node, fh, false)?;
        if self.guest {
            return Err(Errno::BADF);
        }
        let flags = self.session.fs().open_flags(node, fh)?;
        let token = self.session.tokens.issue(Grant { node, fh, flags })?;
        Ok(Reply::of(&token))
    }
}
