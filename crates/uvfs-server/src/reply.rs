//! The answer to a request: typed until the transport sends it, so that no stage parses it again.

use std::cell::RefCell;
use std::ops::{Deref, DerefMut};

use smallvec::SmallVec;
use uvfs_proto::abi;
use zerocopy::{FromBytes, Immutable, IntoBytes};

use crate::fs::{Bytes, Errno, Opened, Unlinked};

/// Bytes of an answer. Short ones stay inline; the longest common one is that of CREATE, with a
/// client's identity of the file.
pub(crate) type Body = SmallVec<[u8; 184]>;

/// The result of a request.
pub(crate) type Outcome = Result<Reply, Errno>;

/// Success, and what the sender gets.
#[derive(Debug)]
pub(crate) enum Reply {
    /// The request has no answer.
    None,
    /// An answer without a body.
    Empty,
    /// A node that was found or made.
    Entry(abi::EntryOut),
    /// A name that was taken away, or led elsewhere: an answer without a body.
    Removed(Unlinked),
    /// A file that was made and opened.
    Created(abi::EntryOut, OpenReply),
    /// An open file or directory.
    Opened(OpenReply),
    /// Attributes.
    Attributes(abi::AttrOut),
    /// Attributes as statx(2) has them; twice as large as all others.
    Statx(Box<abi::StatxOut>),
    /// A position in a file.
    Sought(abi::LseekOut),
    /// How much a WRITE took.
    Written(abi::WriteOut),
    /// How much a READ put into the request's room.
    Read(usize),
    /// Entries of a directory.
    Listing(Listed),
    /// Any other body.
    Bytes(Body),
}

/// An open file or directory, and what of it the answer has no room for.
#[derive(Debug)]
pub(crate) struct OpenReply {
    /// The answer.
    pub(crate) out: abi::OpenOut,
    /// [`Opened::contents`].
    pub(crate) contents: Option<Bytes>,
    /// [`Opened::changed`].
    pub(crate) changed: bool,
}

impl From<Opened> for OpenReply {
    fn from(opened: Opened) -> Self {
        Self {
            out: abi::OpenOut {
                fh: opened.fh.0,
                open_flags: opened.flags.bits(),
                backing_id: opened.backing,
            },
            contents: opened.contents,
            changed: opened.changed,
        }
    }
}

/// A listing, in private memory.
#[derive(Debug)]
pub(crate) struct Listed {
    /// The entries.
    pub(crate) bytes: Scratch,
    /// Each is a `struct fuse_direntplus`, and not a `struct fuse_dirent`.
    pub(crate) plus: bool,
}

impl Listed {
    /// Calls `each` with the name and the entry of everything listed with attributes.
    pub(crate) fn entries(&mut self, mut each: impl FnMut(&[u8], &mut abi::EntryOut)) {
        if !self.plus {
            return;
        }
        let mut rest = &mut self.bytes[..];
        while let Ok((mut header, _)) = abi::Direntplus::read_from_prefix(rest) {
            let end = size_of::<abi::Direntplus>() + header.dirent.namelen as usize;
            let (record, behind) = rest.split_at_mut(end.next_multiple_of(8));
            each(
                &record[size_of::<abi::Direntplus>()..end],
                &mut header.entry_out,
            );
            let written = header.write_to_prefix(record);
            debug_assert!(written.is_ok(), "it was read from there");
            rest = behind;
        }
    }
}

impl Reply {
    /// A structure.
    pub(crate) fn of<T: IntoBytes + Immutable>(value: &T) -> Self {
        Self::Bytes(Body::from_slice(value.as_bytes()))
    }

    /// The node that was found or made, to be given on.
    pub(crate) fn entry_mut(&mut self) -> Option<&mut abi::EntryOut> {
        match self {
            Self::Entry(entry) | Self::Created(entry, _) if entry.nodeid != 0 => Some(entry),
            _ => None,
        }
    }

    /// The body, in two pieces. The data of a READ is not in them: it lies in the room already.
    pub(crate) fn parts(&self) -> [&[u8]; 2] {
        match self {
            Self::None | Self::Empty | Self::Removed(_) | Self::Read(_) => [&[], &[]],
            Self::Entry(out) => [out.as_bytes(), &[]],
            Self::Created(entry, opened) => [entry.as_bytes(), opened.out.as_bytes()],
            Self::Opened(opened) => [opened.out.as_bytes(), &[]],
            Self::Attributes(out) => [out.as_bytes(), &[]],
            Self::Statx(out) => [out.as_bytes(), &[]],
            Self::Sought(out) => [out.as_bytes(), &[]],
            Self::Written(out) => [out.as_bytes(), &[]],
            Self::Listing(listed) => [&listed.bytes, &[]],
            Self::Bytes(body) => [body, &[]],
        }
    }

    /// Bytes of the body, those in the room too.
    pub(crate) fn len(&self) -> usize {
        match self {
            Self::Read(len) => *len,
            _ => self.parts().iter().map(|part| part.len()).sum(),
        }
    }
}

/// The error and the length of the body, for an answer's header.
pub(crate) fn header_of(outcome: &Outcome) -> (i32, usize) {
    match outcome {
        Ok(reply) => (0, reply.len()),
        Err(errno) => (-errno.raw_os_error(), 0),
    }
}

thread_local! {
    /// Memory of listings that are over.
    static LISTINGS: RefCell<Vec<Vec<u8>>> = const { RefCell::new(Vec::new()) };
}

/// Memory that holds a listing until it is sent. The thread keeps it for the next listing: the allocator would return
/// a block of this size to the system, and map a new one each time.
#[derive(Debug)]
pub(crate) struct Scratch(Vec<u8>);

impl Scratch {
    /// `len` bytes of any content.
    pub(crate) fn new(len: usize) -> Self {
        let mut bytes = LISTINGS.with_borrow_mut(Vec::pop).unwrap_or_default();
        bytes.resize(len, 0);
        Self(bytes)
    }

    /// Keeps the first `len` bytes.
    pub(crate) fn truncate(&mut self, len: usize) {
        self.0.truncate(len);
    }
}

impl Deref for Scratch {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.0
    }
}

impl DerefMut for Scratch {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.0
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        const MOST: usize = 4;
        const LARGEST: usize = 128 << 10;
        let bytes = std::mem::take(&mut self.0);
        // A thread that is ending has no list any more.
        let _ = LISTINGS.try_with(|kept| {
            let mut kept = kept.borrow_mut();
            if kept.len() < MOST && bytes.capacity() <= LARGEST {
                kept.push(bytes);
            }
        });
    }
}
