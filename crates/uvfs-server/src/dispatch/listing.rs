//! Listings of directories.

use crate::coherence::Since;
use crate::fs::*;
use crate::reply::{Listed, Outcome, Reply, Scratch};
use crate::request::Request;
use crate::session::Session;
use uvfs_proto::abi::{self};
use uvfs_proto::reply::DirBuf;

use super::wire::entry_out;

/// A listing is sent in pieces of at most this, whatever the kernel has room for.
const LISTING_MAX: usize = 1 << 20;

struct Listing<'a, F: FileSystem> {
    session: &'a Session<F>,
    directory: u64,
    offset: u64,
    /// Since when what it says may be old.
    since: Since,
    origin: Origin,
    /// Of a client's, the entries' nodes.
    nodes: Vec<u64>,
    buf: DirBuf<'a>,
    room: usize,
    plus: bool,
}

/// A type as a listing has it (DT_*): the upper bits of its mode, or 0 where it is not known.
fn dirent_type(kind: FileType) -> u32 {
    match kind {
        FileType::Unknown => 0,
        kind => kind.as_raw_mode() >> 12,
    }
}

impl<F: FileSystem> Listing<'_, F> {
    fn push(&mut self, dir: DirEntry<'_>, entry: &abi::EntryOut) -> bool {
        let buf = &mut self.buf;
        let pushed = buf.push_plus(entry, dir.ino, dir.next, dirent_type(dir.kind), dir.name);
        if pushed.is_ok() && self.origin != Origin::Kernel {
            self.nodes.push(entry.nodeid);
        }
        pushed.is_ok()
    }
}

impl<F: FileSystem> DirSink for Listing<'_, F> {
    fn offset(&self) -> u64 {
        self.offset
    }

    fn add(&mut self, dir: DirEntry<'_>) -> bool {
        if self.plus {
            return self.push(dir, &abi::EntryOut::default());
        }
        self.buf
            .push(dir.ino, dir.next, dirent_type(dir.kind), dir.name)
            .is_ok()
    }

    fn wants_attributes(&self) -> bool {
        self.plus
    }

    fn fits(&self, name_len: usize) -> bool {
        let fixed = if self.plus {
            size_of::<abi::Direntplus>()
        } else {
            size_of::<abi::Dirent>()
        };
        self.room() >= (fixed + name_len).next_multiple_of(8)
    }

    fn room(&self) -> usize {
        self.room - self.buf.len()
    }

    fn add_plus(&mut self, dir: DirEntry<'_>, entry: &Entry) -> bool {
        debug_assert!(self.plus, "asked for without attributes");
        let coherence = &self.session.coherence;
        if entry.node != Node(0) && !coherence.may_keep(entry.node.0, self.since) {
            // Another client may know better: the name alone, to be looked up when it is used.
            let added = self.add(dir);
            if added {
                self.session.fs.forget(entry.node, 1);
            }
            return added;
        }
        let mut out = entry_out(entry);
        if self.origin == Origin::Kernel {
            coherence.shows_entry(Some((self.directory, dir.name)), &mut out, self.since);
        }
        self.push(dir, &out)
    }
}

pub(super) async fn listing<F: FileSystem>(
    session: &Session<F>,
    request: &Request<'_>,
    arg: &abi::ReadIn,
    plus: bool,
) -> Outcome {
    let (cx, node) = (&request.cx, request.node);
    let room = (arg.size as usize).min(request.room.len()).min(LISTING_MAX);
    let mut bytes = Scratch::new(room);
    let mut sink = Listing {
        session,
        directory: node,
        offset: arg.offset,
        since: session.coherence.now(),
        origin: request.origin.map(|_| ()),
        nodes: Vec::new(),
        buf: DirBuf::new(&mut bytes),
        room,
        plus,
    };
    let fs = &session.fs;
    fs.readdir(cx, Node(node), Handle(arg.fh), &mut sink)
        .await?;
    let (len, nodes, since) = (sink.buf.len(), sink.nodes, sink.since);
    if matches!(request.origin, Origin::Kernel) {
        session.coherence.shows_pages(node, since);
    }
    bytes.truncate(len);
    Ok(Reply::Listing(Listed { bytes, nodes }))
}
