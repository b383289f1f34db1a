//! What clients ask about names beyond FUSE (`uvfs_proto::ext`): names and listings that come with
//! leases, so that the client may keep them, the contents of short files, and the names by which
//! the mount finds what a client has open.
//!
//! Each is made of ordinary requests of the client's, with all that belongs to them. A lease is
//! asked for before what it protects is read, or, where the node is known only then, after it, and
//! given back if anything changed in between.

use std::pin::pin;

use rustix::io::Errno;
use smallvec::SmallVec;
use uvfs_io::Payload;
use uvfs_proto::abi::{self, Opcode};
use uvfs_proto::ext::{
    self, AHEAD_MAX, LISTED_AT, LISTED_MAX, LeasedEntry, ListedHead, PEEK_MAX, PeekAheadIn,
    PeekOut, PeekedHead, TokenIn,
};
use uvfs_proto::reply;
use uvfs_queue::pair::INLINE_SIZE;
use zerocopy::{FromBytes, IntoBytes};

use super::shm::Client;
use crate::dispatch;
use crate::fs::FileSystem;
use crate::slot::{Answer, Body, Scratch, Slot};
use crate::token::Grant;
use crate::transport::serve_for;

/// Of before a request whose answer tells more than FUSE's.
pub(super) struct More {
    /// The new lease of the directory that a file is made in.
    parent: u64,
    changes: u64,
}

impl<F: FileSystem> Client<F> {
    /// One ordinary request of the client's, with what it gives noted.
    async fn step(
        &self,
        opcode: Opcode,
        node: u64,
        op: &[u8],
        input: Payload,
        room: Payload,
    ) -> Result<Answer, Errno> {
        let slot = self.request(opcode, node, op, input, room);
        let work = serve_for(&self.session, &self.stats, &slot, Some(&self.link));
        let answer = pin!(work).await;
        self.note(&slot, &answer);
        match answer {
            Answer::Error(errno) => Err(errno),
            answer => Ok(answer),
        }
    }

    /// Whether the client knows a node that it asks about, and may.
    fn knows(&self, node: u64) -> Result<(), Errno> {
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
    pub(super) async fn lookup_leased(&self, slot: &Slot) -> Result<Answer, Errno> {
        let parent = slot.header.nodeid;
        self.knows(parent)?;
        let mut out = LeasedEntry {
            parent: self.leased(parent),
            ..LeasedEntry::default()
        };
        let before = self.session.coherence.changes();
        let (name, none) = (slot.input.clone(), Payload::default());
        let found = self.step(Opcode::Lookup, parent, &[], name, none).await;
        match found {
            Ok(Answer::Body(body)) => {
                (out.entry, _) = abi::EntryOut::read_from_prefix(&body).map_err(|_| Errno::IO)?;
            }
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
        Ok(Answer::of(&out))
    }

    /// What is to be known before a request of [`uvfs_proto::ext::CREATE`] or
    /// [`uvfs_proto::ext::WRITE`] is served.
    pub(super) fn more(&self, slot: &Slot) -> More {
        let makes = slot.header.opcode == Opcode::Create as u32;
        More {
            parent: if makes {
                self.leased(slot.header.nodeid)
            } else {
                0
            },
            changes: self.session.coherence.changes(),
        }
    }

    /// Adds to its answer what that tells beyond FUSE.
    pub(super) async fn tell_more(&self, slot: &Slot, answer: Answer, more: More) -> Answer {
        let node = slot.header.nodeid;
        let Answer::Body(mut body) = answer else {
            self.unleased(node, more.parent);
            return answer;
        };
        if slot.header.opcode == Opcode::Create as u32 {
            let mut leases = ext::Leases {
                parent: more.parent,
                node: 0,
            };
            if let Ok((entry, _)) = abi::EntryOut::read_from_prefix(&body) {
                leases.node = self.leased(entry.nodeid);
                // One change is this one. Another may have been of this file, after it was made.
                if self.session.coherence.changes() != more.changes + 1 {
                    self.unleased(entry.nodeid, std::mem::take(&mut leases.node));
                }
            }
            body.extend_from_slice(leases.as_bytes());
        } else {
            let (fs, cx) = (self.session.fs(), dispatch::context(&slot.header));
            let fh = abi::WriteIn::read_from_prefix(&slot.op).map(|(arg, _)| arg.fh);
            let attr = fs.getattr(&cx, node, fh.ok());
            let attr = self.session.interrupts.guard(slot.header.unique, attr);
            if let Some(Ok(now)) = pin!(attr).await {
                body.extend_from_slice(now.attr.as_bytes());
            }
        }
        Answer::Body(body)
    }

    /// Answers [`uvfs_proto::ext::LIST`].
    pub(super) async fn list(&self, slot: &Slot) -> Result<Answer, Errno> {
        let node = slot.header.nodeid;
        let (mut arg, _) =
            abi::ReadIn::read_from_prefix(&slot.op[..slot.op_len]).map_err(|_| Errno::INVAL)?;
        self.knows(node)?;
        if !self.handles.borrow().contains(&(node, arg.fh, true)) {
            return Err(Errno::BADF);
        }
        // No more entries than there are places for leases.
        let least = size_of::<abi::Direntplus>() + 8;
        let space = slot.room.len().saturating_sub(LISTED_AT);
        let space = space.min(LISTED_MAX * least);
        if space < 4096 {
            return Err(Errno::INVAL);
        }
        let room = slot.room.slice(LISTED_AT..LISTED_AT + space);
        arg.size = space as u32;
        let mut head = ListedHead {
            parent: self.leased(node),
            len: 0,
        };
        let before = self.session.coherence.changes();
        let none = Payload::default();
        let op = arg.as_bytes();
        let listed = self
            .step(Opcode::Readdirplus, node, op, none, room.clone())
            .await;
        let len = match listed {
            Ok(Answer::Room(len)) => len,
            Ok(Answer::Body(body)) => {
                room.copy_in(0, &body);
                body.len()
            }
            other => {
                self.unleased(node, head.parent);
                return Err(other.err().unwrap_or(Errno::IO));
            }
        };
        let bytes = Scratch::copy_of(&room, len);
        head.len = len as u64;
        let mut leases = [0u64; LISTED_MAX];
        let entries = reply::direntpluses(&bytes).flatten();
        let nodes: SmallVec<[u64; 64]> = entries.map(|(entry, _)| entry.entry_out.nodeid).collect();
        assert!(nodes.len() <= LISTED_MAX, "an entry takes {least} bytes");
        for (lease, &node) in leases
            .iter_mut()
            .zip(&nodes)
            .filter(|(_, node)| **node != 0)
        {
            *lease = self.leased(node);
        }
        if self.session.coherence.changes() != before {
            for (lease, &node) in leases.iter_mut().zip(&nodes) {
                self.unleased(node, std::mem::take(lease));
            }
        }
        slot.room.copy_in(0, head.as_bytes());
        slot.room
            .copy_in(size_of::<ListedHead>(), leases.as_bytes());
        // The entries lie where they belong already.
        Ok(Answer::Room(LISTED_AT + len))
    }

    /// Answers [`uvfs_proto::ext::PEEK`]; `at` is where the request's inline payload lies. Under a
    /// lease nobody has anything newer, so the file system is asked at once.
    pub(super) async fn peek(&self, slot: &Slot, at: usize) -> Result<Answer, Errno> {
        let node = slot.header.nodeid;
        self.knows(node)?;
        if self.session.kernel_writes_back() {
            // It has data of its own.
            return Err(Errno::OPNOTSUPP);
        }
        let coherence = &self.session.coherence;
        let lease = coherence.try_read(&self.link, node);
        let lease = lease.ok_or(Errno::AGAIN)?;
        self.stats.begin(ext::PEEK);
        let unique = slot.header.unique;
        let work = self.read_whole(slot, node, at, PEEK_MAX, false);
        let read = self.session.interrupts.guard(unique, work).await;
        self.stats.end(!matches!(read, Some(Ok(_))));
        let bytes = read.unwrap_or(Err(Errno::IO));
        let bytes = bytes.inspect_err(|_| self.unleased(node, lease))?;
        let out = PeekOut {
            lease,
            len: bytes.len() as u64,
        };
        let mut body = Body::from_slice(out.as_bytes());
        body.extend_from_slice(&bytes);
        Ok(Answer::Body(body))
    }

    /// Answers [`uvfs_proto::ext::PEEK_AHEAD`]. The client has the leases already: what changes
    /// meanwhile recalls one of them first, and then it believes nothing of this.
    pub(super) async fn peek_ahead(&self, slot: &Slot, at: usize) -> Result<Answer, Errno> {
        if self.guest {
            return Err(Errno::PERM);
        }
        if self.session.kernel_writes_back() {
            return Err(Errno::OPNOTSUPP);
        }
        let (arg, _) =
            PeekAheadIn::read_from_prefix(&slot.op[..slot.op_len]).map_err(|_| Errno::INVAL)?;
        let (ahead, used) = (arg.ahead as usize, arg.used as usize);
        if ahead.max(used) > AHEAD_MAX || slot.input.len() != (ahead + used) * 8 {
            return Err(Errno::INVAL);
        }
        let mut nodes = [0u64; 2 * AHEAD_MAX];
        let nodes = &mut nodes[..ahead + used];
        slot.input.copy_out(0, nodes.as_mut_bytes());
        let (ahead, used) = nodes.split_at(ahead);
        self.stats.begin(ext::PEEK_AHEAD);
        let unique = slot.header.unique;
        let work = async {
            let body = self.read_several(slot, ahead, at).await;
            for &node in used.iter().filter(|&&node| self.knows_node(node)) {
                // For its time of access alone.
                let _ = self.read_whole(slot, node, at, 0, false).await;
            }
            body
        };
        let body = self.session.interrupts.guard(unique, work).await;
        self.stats.end(body.is_none());
        body.map(Answer::Body).ok_or(Errno::IO)
    }

    async fn read_several(&self, slot: &Slot, nodes: &[u64], at: usize) -> Body {
        let mut body = Body::new();
        for &node in nodes {
            let room = INLINE_SIZE.saturating_sub(body.len() + size_of::<PeekedHead>());
            if room == 0 {
                break;
            }
            let read = match self.session.coherence.has(&self.link, node) {
                true => {
                    let most = room.min(PEEK_MAX);
                    self.read_whole(slot, node, at, most, true).await
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
        slot: &Slot,
        node: u64,
        at: usize,
        most: usize,
        ahead: bool,
    ) -> Result<SmallVec<[u8; 256]>, Errno> {
        const { assert!(PEEK_MAX < INLINE_SIZE) };
        let fs = self.session.fs();
        let cx = dispatch::context(&slot.header);
        let uncached = self.session.options.uncached && fs.takes_uncached();
        // One byte more than fits, to find out that it is too long. The memory is the request's.
        let room = Payload::from(self.inline.slice(at..at + most + 1));
        let len = fs.peek(&cx, node, uncached, ahead, &room).await?;
        if len > most {
            return Err(Errno::FBIG);
        }
        let mut bytes = SmallVec::from_elem(0, len);
        room.copy_out(0, &mut bytes);
        Ok(bytes)
    }

    /// Answers [`uvfs_proto::ext::TOKEN`].
    pub(super) fn token(&self, slot: &Slot) -> Result<Answer, Errno> {
        let (arg, _) =
            TokenIn::read_from_prefix(&slot.op[..slot.op_len]).map_err(|_| Errno::INVAL)?;
        let node = slot.header.nodeid;
        if self.guest || !self.handles.borrow().contains(&(node, arg.fh, false)) {
            return Err(Errno::BADF);
        }
        let grant = Grant {
            node,
            fh: arg.fh,
            flags: self.session.fs().open_flags(node, arg.fh)?,
        };
        let token = self.session.tokens.issue(grant)?;
        Ok(Answer::Body(Body::from_slice(&token)))
    }
}
