//! Listings of directories, and reads of contents that are in memory.

use rustix::fs::FileType;
use uvfs_io::Payload;

use super::types::{Entry, Node, ROOT};

/// One entry of a directory listing.
#[derive(Clone, Copy, Debug)]
pub struct DirEntry<'a> {
    /// Inode number to show.
    pub ino: u64,
    /// The offset to go on from after this entry.
    pub next: u64,
    /// The type, as far as it is known.
    pub kind: FileType,
    /// The name.
    pub name: &'a [u8],
}

/// Takes the entries of a listing until it is full.
pub trait DirSink {
    /// Where the listing begins: 0, or an earlier entry's [`DirEntry::next`].
    fn offset(&self) -> u64;
    /// Adds an entry; false when it did not fit, and the listing ends before it.
    fn add(&mut self, entry: DirEntry<'_>) -> bool;
    /// Whether entries with attributes are wanted (READDIRPLUS).
    fn wants_attributes(&self) -> bool;
    /// Whether `add` or `add_plus` of a name of this length would succeed. Ask before counting a
    /// lookup.
    fn fits(&self, name_len: usize) -> bool;
    /// The bytes that are left for entries. An entry takes its structure on the wire and its name, rounded up
    /// to 8.
    fn room(&self) -> usize;
    /// Adds an entry with what a lookup of it gives; `entry.node` 0 for names that count no lookup
    /// (`.` and `..`).
    fn add_plus(&mut self, dir: DirEntry<'_>, entry: &Entry) -> bool;
}

/// Lists directory `node` by a list of its entries, each an inode number, a type and a name, and adds `.` and `..`
/// before them. Entries have to keep their position while the directory does not change.
///
/// ```
/// use uvfs_server::fs::*;
///
/// fn list_root(sink: &mut dyn DirSink) {
///     let entries = [
///         (Node(2), FileType::RegularFile, &b"file"[..]),
///         (Node(3), FileType::Directory, b"directory"),
///     ];
///     list(ROOT, entries, sink);
/// }
/// ```
pub fn list<'a>(
    node: Node,
    entries: impl IntoIterator<Item = (Node, FileType, &'a [u8])>,
    sink: &mut dyn DirSink,
) {
    let first = usize::try_from(sink.offset()).unwrap_or(usize::MAX);
    let dots = [
        (node, FileType::Directory, &b"."[..]),
        // Only a listing shows this number: the kernel follows `..` by itself.
        (ROOT, FileType::Directory, b".."),
    ];
    let all = dots.into_iter().chain(entries);
    for (next, (Node(ino), kind, name)) in (1..).zip(all).skip(first) {
        let entry = DirEntry {
            ino,
            next,
            kind,
            name,
        };
        if !sink.add(entry) {
            break;
        }
    }
}

/// Fills `data` with the bytes of a file in memory from `offset` on, and says how many there were: the
/// answer of a [`FileSystem::read`](super::FileSystem::read).
///
/// ```
/// use uvfs_io::IoBuf;
/// use uvfs_server::fs::{Payload, read_from};
///
/// # fn main() -> std::io::Result<()> {
/// let data = Payload::from(IoBuf::alloc(4096)?);
/// assert_eq!(read_from(b"hello", 2, &data), 3);
/// assert_eq!(read_from(b"hello", 7, &data), 0);
/// # Ok(())
/// # }
/// ```
pub fn read_from(file: &[u8], offset: u64, data: &Payload) -> usize {
    let start = usize::try_from(offset).unwrap_or(usize::MAX);
    let rest = file.get(start..).unwrap_or_default();
    let len = rest.len().min(data.len());
    data.copy_in(0, &rest[..len]);
    len
}
