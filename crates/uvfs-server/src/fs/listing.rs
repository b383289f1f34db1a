//! Listings of directories, and reads of contents that are in memory.

use super::{FileType, Payload};

use super::types::Entry;

/// One entry of a directory listing.
#[derive(Clone, Copy, Debug)]
pub struct DirEntry<'a> {
    /// Inode number to show.
    pub ino: u64,
    /// The offset to go on from after this entry.
    pub next: u64,
    /// DT_* file type: [`FileType::as_raw_mode`] shifted right by 12.
    pub kind: u32,
    /// The name.
    pub name: &'a [u8],
}

/// Takes the entries of a listing until it is full.
pub trait DirSink {
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

/// Lists a directory whose entries are numbered by their position: `offset` is that of a
/// [`FileSystem::readdir`](super::FileSystem::readdir), and each entry is an inode number, a type and a name. The list has to begin
/// with `.` and `..`, and entries have to keep their position while the directory does not change.
pub fn list<'a>(
    entries: impl IntoIterator<Item = (u64, FileType, &'a [u8])>,
    offset: u64,
    sink: &mut dyn DirSink,
) {
    let first = usize::try_from(offset).unwrap_or(usize::MAX);
    for (next, (ino, kind, name)) in (1..).zip(entries).skip(first) {
        // A type's DT_* number is the upper bits of its mode.
        let kind = kind.as_raw_mode() >> 12;
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
pub fn read_from(file: &[u8], offset: u64, data: &Payload) -> usize {
    let start = usize::try_from(offset).unwrap_or(usize::MAX);
    let rest = file.get(start..).unwrap_or_default();
    let len = rest.len().min(data.len());
    data.copy_in(0, &rest[..len]);
    len
}
