//! Listings of directories.

use crate::fs::*;
use crate::reply::{Listed, Reply, Scratch};
use crate::request::Request;
use crate::session::Session;
use uvfs_proto::abi::{self};
use uvfs_proto::reply::DirBuf;

use super::Outcome;
use super::wire::entry_out;

/// A listing is sent in pieces of at most this, whatever the kernel has room for.
const LISTING_MAX: usize = 1 << 20;

struct Listing<'a> {
    offset: u64,
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

impl Listing<'_> {
    fn push(&mut self, dir: DirEntry<'_>, entry: &abi::EntryOut) -> bool {
        self.buf
            .push_plus(entry, dir.ino, dir.next, dirent_type(dir.kind), dir.name)
            .is_ok()
    }
}

impl DirSink for Listing<'_> {
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
        self.push(dir, &entry_out(entry))
    }
}

pub(super) async fn listing<F: FileSystem>(
    session: &Session<F>,
    request: &Request<'_>,
    arg: &abi::ReadIn,
    plus: bool,
) -> Outcome {
    let room = (arg.size as usize).min(request.room.len()).min(LISTING_MAX);
    let mut bytes = Scratch::new(room);
    let mut sink = Listing {
        offset: arg.offset,
        buf: DirBuf::new(&mut bytes),
        room,
        plus,
    };
    let (node, fh) = (Node(request.node), Handle(arg.fh));
    session.fs.readdir(&request.cx, node, fh, &mut sink).await?;
    let len = sink.buf.len();
    bytes.truncate(len);
    Ok(Reply::Listing(Listed { bytes, plus }))
}
