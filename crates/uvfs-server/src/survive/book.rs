//! The shared memory that a worker's successor reads: fixed records of words.
//!
//! Only the worker writes, and it may be killed between any two stores. So the word that makes a record valid is stored
//! last, and taken away first. What a successor reads it checks, as any input: memory that a crash has overwritten must
//! not lead to more than an error.

use std::ffi::{OsStr, OsString};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use uvfs_proto::abi::InitIn;
use uvfs_queue::shm::SharedMemory;
use zerocopy::{FromBytes, IntoBytes};

use crate::fs::MOST_SAVED;
use crate::notify::Writers;

/// "uvfsbook".
const MAGIC: u64 = u64::from_be_bytes(*b"uvfsbook");
/// The version of the state that a program of this version leaves, and reads.
pub const VERSION: u64 = 3;

const WORD: usize = 8;
/// The header: magic, version, generation, requests sent again, whether INIT was agreed on, the count of the devices,
/// the count of programs, whether there were clients, and from byte 64 on INIT, what the file system keeps open, the devices,
/// and the threads that notify.
const HEADER: usize = 8192;
const GENERATION: usize = 2 * WORD;
const AGAIN: usize = 3 * WORD;
const AGREED: usize = 4 * WORD;
const DEVICE_COUNT: usize = 5 * WORD;
const PROGRAMS: usize = 6 * WORD;
const CLIENTS: usize = 7 * WORD;
const INIT: usize = 64;
/// Two descriptors, one in each half of the word; 0 if there are none.
const KEPT: usize = 248;
const DEVICES: usize = 256;
/// As many cores have a connection of their own.
const MOST_DEVICES: usize = 256;
const WRITERS: usize = DEVICES + MOST_DEVICES * WORD;
/// The arguments of the program that serves: their length, and the bytes, with a 0 after each.
const ARGS: usize = 4096;
const MOST_ARGS: usize = HEADER - ARGS - WORD;
/// The memory of the entries of io_uring: its descriptor (0: there is none), its address, and the size of a payload. Behind them
/// the descriptors of pipes.
const ENTRIES: usize = WRITERS + Writers::SIZE;
const PIPES: usize = ENTRIES + 3 * WORD;
/// As many workers may end while the direct I/O of the first one is under way.
const MOST_PIPES: usize = 16;
/// How many intents were carried so far.
const NEXT_CARRIED: usize = PIPES + MOST_PIPES * WORD;
const _: () = assert!(NEXT_CARRIED + WORD <= ARGS);

/// Bytes of an intent's record, and of its answer.
const INTENT: usize = 512;
const INTENT_HEAD: usize = 5 * WORD;
const ANSWER: usize = INTENT - INTENT_HEAD;
/// Records of intents: those of the slots of all queues, and those that earlier workers left.
pub(super) const SLOTS: usize = 1 << 14;
const CARRIED: usize = 1 << 12;
const INTENTS: usize = HEADER;

/// Bytes of a record of a node or a handle: its head, and what is saved. If that does not fit, the last word is the place where
/// it goes on, which has a word of its kind, one of the next such place, and the bytes.
const RECORD: usize = 256;
const RECORD_HEAD: usize = 5 * WORD;
const INLINE: usize = RECORD - RECORD_HEAD;
const MORE_HEAD: usize = 2 * WORD;
const MORE: usize = RECORD - MORE_HEAD;
const RECORDS: usize = INTENTS + (SLOTS + CARRIED) * INTENT;
/// As many nodes and handles a mount has at most. The memory is used only as they come.
pub(super) const MOST_RECORDS: usize = 1 << 25;
const SIZE: usize = RECORDS + MOST_RECORDS * RECORD;

/// The kind of a record, in the lowest byte of its first word. The next two bytes are the length of what is saved, and the
/// upper half is the stamp.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Kind {
    Node = 1,
    File = 2,
    Directory = 3,
    /// More of what is saved in another record.
    More = 4,
}

/// What a record is.
#[derive(Clone, Copy, Debug)]
pub(super) struct Head {
    pub(super) kind: Kind,
    pub(super) stamp: u32,
    pub(super) id: u64,
    len: usize,
}

/// A node or a handle as the book has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Record<'a> {
    pub(super) kind: Kind,
    /// Of two records of one node, which a worker that was killed may leave, the one with the higher stamp is newer.
    pub(super) stamp: u32,
    /// The node, or the handle.
    pub(super) id: u64,
    /// Lookups of the node; the node of the handle.
    pub(super) value: u64,
    /// The request that last added lookups, or opened the handle, and how many it added.
    pub(super) by: u64,
    pub(super) added: u64,
    pub(super) saved: &'a [u8],
}

/// A request that must not be done twice, as the book has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Intent {
    pub(super) unique: u64,
    /// Nanoseconds since 1970, by the clock that files' times come from.
    pub(super) began: u64,
    pub(super) note: Option<u64>,
    /// What it was answered: the error, or 0, and the body.
    pub(super) answer: Option<(i32, Vec<u8>)>,
}

/// The memory of the entries of io_uring, as the book has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct EntriesAt {
    pub(super) fd: i32,
    pub(super) address: usize,
    /// Bytes of a payload.
    pub(super) payload: usize,
}

/// Bits of the second word of an intent.
const ANSWERED: u64 = 1;
const NOTED: u64 = 2;

/// The book.
#[derive(Debug)]
pub(crate) struct Book(Arc<SharedMemory>);

impl AsFd for Book {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

pub(super) fn invalid(what: &str) -> io::Error {
    io::Error::new(
        io::ErrorKind::InvalidData,
        format!("the state that the last server left: {what}"),
    )
}

impl Book {
    /// An empty one.
    ///
    /// # Errors
    /// When there can be no shared memory of its size; it takes memory only as it is filled.
    pub(crate) fn create() -> io::Result<Self> {
        let book = Self(Arc::new(SharedMemory::create(c"uvfs-book", SIZE)?));
        book.set(WORD, VERSION);
        book.set(0, MAGIC);
        Ok(book)
    }

    /// One that another program has made.
    ///
    /// # Errors
    /// When it is none, or of another version.
    pub(super) fn open(fd: OwnedFd) -> io::Result<Self> {
        let book = Self(Arc::new(SharedMemory::open(fd, SIZE)?));
        match book.0.len() {
            SIZE => book.check().map(|()| book),
            _ => Err(invalid("its size")),
        }
    }

    /// Checks that it is one of this version.
    ///
    /// # Errors
    /// When it is not.
    pub(crate) fn check(&self) -> io::Result<()> {
        match (self.get(0), self.get(WORD)) {
            (MAGIC, VERSION) => Ok(()),
            (MAGIC, version) => Err(invalid(&format!(
                "its version is {version}, and this server reads {VERSION}"
            ))),
            _ => Err(invalid("not a book")),
        }
    }

    /// The arguments of the program that serves; none if they were too long.
    pub(super) fn args(&self) -> Vec<OsString> {
        let mut bytes = vec![0; (self.get(ARGS) as usize).min(MOST_ARGS)];
        self.0.read(ARGS + WORD, &mut bytes);
        let args = bytes.split_inclusive(|byte| *byte == 0);
        args.map(|arg| OsStr::from_bytes(&arg[..arg.len() - 1]).to_owned())
            .collect()
    }

    pub(super) fn set_args(&self, args: impl Iterator<Item = OsString>) {
        let mut bytes = Vec::new();
        for arg in args {
            bytes.extend(arg.as_bytes());
            bytes.push(0);
        }
        self.set(ARGS, 0);
        if bytes.len() <= MOST_ARGS {
            self.0.write(ARGS + WORD, &bytes);
            self.set(ARGS, bytes.len() as u64);
        }
    }

    /// How many programs have served the mount.
    pub(super) fn programs(&self) -> u64 {
        self.get(PROGRAMS)
    }

    pub(super) fn count_program(&self) {
        self.set(PROGRAMS, self.programs() + 1);
    }

    /// Whether the mount has ever had clients.
    pub(super) fn had_clients(&self) -> bool {
        self.get(CLIENTS) != 0
    }

    pub(super) fn has_clients(&self) {
        self.set(CLIENTS, 1);
    }

    /// The descriptors that the file system keeps open.
    pub(super) fn kept(&self) -> Option<[i32; 2]> {
        let word = self.get(KEPT);
        (word != 0).then_some([(word >> 32) as i32, word as i32])
    }

    pub(super) fn keep(&self, [one, other]: [i32; 2]) {
        self.set(KEPT, u64::from(one as u32) << 32 | u64::from(other as u32));
    }

    /// The threads that notify.
    pub(super) fn writers(&self) -> Writers {
        Writers::new(self.0.clone(), WRITERS)
    }

    fn word(&self, at: usize) -> &AtomicU64 {
        self.0.u64_at(at)
    }

    fn get(&self, at: usize) -> u64 {
        self.word(at).load(Ordering::Acquire)
    }

    fn set(&self, at: usize, value: u64) {
        uvfs_sys::dying::may_die();
        self.set_next(at, value);
    }

    /// Sets a word where dying before it is the same as dying before the next one.
    fn set_next(&self, at: usize, value: u64) {
        self.word(at).store(value, Ordering::Release);
    }

    /// How many workers there were, this one included.
    pub(crate) fn generation(&self) -> u64 {
        self.get(GENERATION)
    }

    /// A worker begins.
    pub(super) fn next_generation(&self) {
        self.set(GENERATION, self.generation() + 1);
    }

    /// Requests that the kernel has sent again.
    pub(crate) fn sent_again(&self) -> u64 {
        self.get(AGAIN)
    }

    pub(super) fn count_sent_again(&self) {
        self.word(AGAIN).fetch_add(1, Ordering::Relaxed);
    }

    /// The kernel's INIT, if it was answered.
    pub(super) fn init(&self) -> io::Result<Option<InitIn>> {
        match self.get(AGREED) {
            0 => Ok(None),
            1 => {
                let mut bytes = [0; size_of::<InitIn>()];
                self.0.read(INIT, &mut bytes);
                let init = InitIn::read_from_bytes(&bytes);
                Ok(Some(init.map_err(|_| invalid("INIT"))?))
            }
            _ => Err(invalid("INIT")),
        }
    }

    pub(super) fn set_init(&self, init: &InitIn) {
        const { assert!(INIT + size_of::<InitIn>() <= KEPT) };
        self.0.write(INIT, init.as_bytes());
        self.set(AGREED, 1);
    }

    /// The descriptors that queues read from.
    pub(super) fn devices(&self) -> io::Result<Vec<i32>> {
        let count = self.get(DEVICE_COUNT) as usize;
        if count > MOST_DEVICES {
            return Err(invalid("too many connections"));
        }
        let devices = (0..count).map(|n| i32::try_from(self.get(DEVICES + n * WORD)));
        devices
            .collect::<Result<_, _>>()
            .map_err(|_| invalid("a connection"))
    }

    pub(super) fn set_devices(&self, devices: &[i32]) {
        assert!(devices.len() <= MOST_DEVICES);
        for (n, &device) in devices.iter().enumerate() {
            self.set(DEVICES + n * WORD, device as u64);
        }
        self.set(DEVICE_COUNT, devices.len() as u64);
    }

    /// The memory of the entries of io_uring.
    pub(super) fn entries(&self) -> io::Result<Option<EntriesAt>> {
        let (address, payload) = (self.get(ENTRIES + WORD), self.get(ENTRIES + 2 * WORD));
        match (self.get(ENTRIES), i32::try_from(self.get(ENTRIES))) {
            (0, _) => Ok(None),
            (_, Ok(fd)) if payload <= 1 << 32 => Ok(Some(EntriesAt {
                fd,
                address: address as usize,
                payload: payload as usize,
            })),
            _ => Err(invalid("entries")),
        }
    }

    pub(super) fn set_entries(&self, entries: EntriesAt) {
        self.set(ENTRIES + WORD, entries.address as u64);
        self.set(ENTRIES + 2 * WORD, entries.payload as u64);
        self.set(ENTRIES, entries.fd as u64);
    }

    /// The pipes that the rings of workers hold an end of: their places, and the descriptors of the other ends.
    pub(super) fn pipes(&self) -> Vec<(usize, i32)> {
        let all = (0..MOST_PIPES).map(|place| (place, self.get(PIPES + place * WORD) as i32));
        all.filter(|(_, fd)| *fd > 0).collect()
    }

    /// Notes a pipe if there is a place for it.
    pub(super) fn add_pipe(&self, fd: i32) {
        let free = (0..MOST_PIPES).find(|place| self.get(PIPES + place * WORD) == 0);
        if let Some(place) = free {
            self.set(PIPES + place * WORD, fd as u64);
        }
    }

    /// A pipe is closed.
    pub(super) fn remove_pipe(&self, place: usize) {
        self.set(PIPES + place * WORD, 0);
    }

    fn intent(slot: usize) -> usize {
        assert!(slot < SLOTS + CARRIED);
        INTENTS + slot * INTENT
    }

    /// A request begins in a slot.
    pub(super) fn begin(&self, slot: usize, unique: u64, began: u64) {
        let at = Self::intent(slot);
        self.set(at, 0);
        self.set(at + WORD, 0);
        self.set(at + 2 * WORD, began);
        self.set(at, unique);
    }

    /// Its file system notes a number.
    pub(super) fn note(&self, slot: usize, note: u64) {
        let at = Self::intent(slot);
        self.set(at + 3 * WORD, note);
        uvfs_sys::dying::may_die();
        self.word(at + WORD).fetch_or(NOTED, Ordering::Release);
    }

    /// It is done, and is about to be answered. False if the answer is too long to be kept.
    pub(super) fn answer(&self, slot: usize, error: i32, body: [&[u8]; 2]) -> bool {
        let at = Self::intent(slot);
        let [first, second] = body;
        let len = first.len() + second.len();
        if len > ANSWER {
            return false;
        }
        self.0.write(at + INTENT_HEAD, first);
        self.0.write(at + INTENT_HEAD + first.len(), second);
        self.set(at + 4 * WORD, u64::from(error as u32) << 32 | len as u64);
        uvfs_sys::dying::may_die();
        self.word(at + WORD).fetch_or(ANSWERED, Ordering::Release);
        true
    }

    fn read_intent(&self, slot: usize) -> Option<Intent> {
        let at = Self::intent(slot);
        let unique = self.get(at);
        if unique == 0 {
            return None;
        }
        let state = self.get(at + WORD);
        let result = self.get(at + 4 * WORD);
        let len = (result as u32 as usize).min(ANSWER);
        let answer = (state & ANSWERED != 0).then(|| {
            let mut body = vec![0; len];
            self.0.read(at + INTENT_HEAD, &mut body);
            let error = (result >> 32) as u32 as i32;
            (if is_error(error) { error } else { libc::EIO }, body)
        });
        Some(Intent {
            unique,
            began: self.get(at + 2 * WORD),
            note: (state & NOTED != 0).then(|| self.get(at + 3 * WORD)),
            answer,
        })
    }

    /// Takes the intents that earlier workers left. They stay in the book, apart from the slots, until
    /// [`Book::settle`]: this worker may be killed before the kernel has sent them again.
    pub(super) fn carry(&self) -> Vec<Intent> {
        let carried = SLOTS..SLOTS + CARRIED;
        let mut all: Vec<_> = carried.flat_map(|slot| self.read_intent(slot)).collect();
        for slot in 0..SLOTS {
            let Some(intent) = self.read_intent(slot) else {
                continue;
            };
            // One after another, so that the oldest ones make room: a request that is still under way has a newer one since.
            let to = SLOTS + self.get(NEXT_CARRIED) as usize % CARRIED;
            let mut record = [0; INTENT];
            self.0.read(Self::intent(slot), &mut record);
            self.set(Self::intent(to), 0);
            self.0.write(Self::intent(to) + WORD, &record[WORD..]);
            self.set(Self::intent(to), intent.unique);
            self.set(NEXT_CARRIED, self.get(NEXT_CARRIED).wrapping_add(1));
            self.set(Self::intent(slot), 0);
            all.push(intent);
        }
        all
    }

    /// Drops what was carried: the kernel has sent again all that it had.
    pub(super) fn settle(&self) {
        for slot in SLOTS..SLOTS + CARRIED {
            if self.get(Self::intent(slot)) != 0 {
                self.set(Self::intent(slot), 0);
            }
        }
    }

    fn record(index: usize) -> usize {
        assert!(index < MOST_RECORDS);
        RECORDS + index * RECORD
    }

    /// Says that a place is used, but has no record, or not any more: [`Book::heads`] looks for those behind it, too.
    pub(super) fn empty(&self, index: usize) {
        self.set(Self::record(index), USED);
    }

    /// How many places a record takes beside its own.
    pub(super) fn more(saved: usize) -> usize {
        match saved <= INLINE {
            true => 0,
            false => (saved - (INLINE - WORD)).div_ceil(MORE),
        }
    }

    /// Writes a record to an empty place, and to as many as [`Book::more`] says.
    pub(super) fn put(&self, index: usize, more: &[usize], record: &Record<'_>) {
        let at = Self::record(index);
        assert!(record.saved.len() <= MOST_SAVED && self.get(at) & 0xff == 0);
        assert_eq!(more.len(), Self::more(record.saved.len()));
        let mut saved = record.saved;
        if let Some(&next) = more.first() {
            let (first, rest) = saved.split_at(INLINE - WORD);
            let nexts = more.iter().skip(1).map(|next| *next as u64).chain([0]);
            for ((&place, next), part) in more.iter().zip(nexts).zip(rest.chunks(MORE)) {
                let at = Self::record(place);
                self.set(at + WORD, next);
                self.0.write(at + MORE_HEAD, part);
                self.set(at, Kind::More as u64);
            }
            self.set(at + RECORD - WORD, next as u64);
            saved = first;
        }
        self.set_next(at + WORD, record.id);
        self.set_next(at + 2 * WORD, record.value);
        self.set_next(at + 3 * WORD, record.by);
        self.set_next(at + 4 * WORD, record.added);
        self.0.write(at + RECORD_HEAD, saved);
        let stamp = u64::from(record.stamp) << 32;
        self.set(
            at,
            stamp | (record.saved.len() as u64) << 8 | record.kind as u64,
        );
    }

    /// Sets the lookups of a node's record: a request added so many.
    pub(super) fn count(&self, index: usize, lookups: u64, by: u64, added: u64) {
        let at = Self::record(index);
        // A request that is sent again takes back what is said here. The number of the request comes last: until then
        // the lookups are at most too many.
        self.set_next(at + 3 * WORD, 0);
        self.set_next(at + 4 * WORD, added);
        self.set_next(at + 2 * WORD, lookups);
        self.set(at + 3 * WORD, by);
    }

    /// Sets the lookups of a node's record.
    pub(super) fn set_lookups(&self, index: usize, lookups: u64) {
        self.set(Self::record(index) + 2 * WORD, lookups);
    }

    /// What a record is, without what is saved in it; an error behind the last place that was ever used.
    fn head(&self, index: usize) -> Result<Option<Head>, ()> {
        let at = Self::record(index);
        let head = self.get(at);
        let kind = match head & 0xff {
            0 if head == 0 => return Err(()),
            1 => Kind::Node,
            2 => Kind::File,
            3 => Kind::Directory,
            4 => Kind::More,
            _ => return Ok(None),
        };
        let len = usize::from((head >> 8) as u16);
        Ok((len <= MOST_SAVED).then(|| Head {
            kind,
            stamp: (head >> 32) as u32,
            id: self.get(at + WORD),
            len,
        }))
    }

    /// The places of records, up to the first that was never used: what is there.
    pub(super) fn heads(&self) -> impl Iterator<Item = (usize, Option<Head>)> {
        (0..MOST_RECORDS).map_while(|index| Some((index, self.head(index).ok()?)))
    }

    /// The other places of a record. `None` if one of them is not what it has to be.
    pub(super) fn others(&self, index: usize, head: &Head) -> Option<Vec<usize>> {
        let mut word = Self::record(index) + RECORD - WORD;
        let mut all = Vec::new();
        for _ in 0..Self::more(head.len) {
            let next = self.get(word) as usize;
            let is_more = next < MOST_RECORDS
                && matches!(self.head(next), Ok(Some(it)) if it.kind == Kind::More);
            if !is_more {
                return None;
            }
            all.push(next);
            word = Self::record(next) + WORD;
        }
        Some(all)
    }

    /// The whole of a record; what is saved goes to `saved`. `None` if a part of it is missing.
    pub(super) fn read<'a>(
        &self,
        index: usize,
        head: &Head,
        saved: &'a mut [u8; MOST_SAVED],
    ) -> Option<Record<'a>> {
        let at = Self::record(index);
        let others = self.others(index, head)?;
        let saved = &mut saved[..head.len];
        let inline = if others.is_empty() {
            INLINE
        } else {
            INLINE - WORD
        };
        let (first, rest) = saved.split_at_mut(inline.min(head.len));
        self.0.read(at + RECORD_HEAD, first);
        for (place, part) in others.into_iter().zip(rest.chunks_mut(MORE)) {
            self.0.read(Self::record(place) + MORE_HEAD, part);
        }
        let value = self.get(at + 2 * WORD);
        Some(Record {
            kind: head.kind,
            stamp: head.stamp,
            id: head.id,
            value: match head.kind {
                Kind::Node => value.min(MOST_LOOKUPS),
                _ => value,
            },
            by: self.get(at + 3 * WORD),
            added: self.get(at + 4 * WORD).min(MOST_LOOKUPS),
            saved,
        })
    }

    /// What is at a place.
    pub(super) fn at(&self, index: usize) -> Option<Head> {
        self.head(index).ok().flatten()
    }

    /// All words but those that are 0, up to the first records. For tests.
    pub(super) fn words(&self) -> Vec<(usize, u64)> {
        let places = (0..Self::record(16)).step_by(WORD);
        let words = places.map(|at| (at, self.get(at)));
        words.filter(|(_, word)| *word != 0).collect()
    }

    /// For tests.
    pub(super) fn set_words(&self, words: &[(usize, u64)]) {
        for (at, word) in words {
            self.set(*at, *word);
        }
    }

    /// Sets words as bytes say: for each a part of the book, a place there, and the word, or another word that this one
    /// is set to with a change. For tests.
    pub(super) fn damage(&self, bytes: &[u8]) {
        const SLOT: [usize; 4] = [2, 3, SLOTS, SLOTS + CARRIED - 1];
        for change in bytes.chunks(10) {
            let &[part, place, ref value @ ..] = change else {
                return;
            };
            let (of, place) = (usize::from(part >> 2), usize::from(place));
            let at = match part % 4 {
                // What says that it is a book is tested alone.
                0 => 2 * WORD + place % 32 * WORD,
                1 => [DEVICES, ARGS][of % 2] + place * WORD,
                2 => Self::intent(SLOT[of % 4]) + place % 8 * WORD,
                _ => Self::record(of % 16) + place * WORD % RECORD,
            };
            let mut word = self.get(at).to_ne_bytes();
            word.iter_mut().zip(value).for_each(|(to, by)| *to ^= by);
            self.set(at, u64::from_ne_bytes(word));
        }
    }
}

/// More than the kernel has of any node, and far from where counting overflows.
const MOST_LOOKUPS: u64 = 1 << 48;

/// Whether it is 0 or an error that an answer may have.
fn is_error(number: i32) -> bool {
    (0..4096).contains(&number)
}

/// The first word of an empty place: no kind.
const USED: u64 = 0xff << 8;

#[cfg(test)]
mod tests {
    use super::*;

    fn record(id: u64, saved: &[u8]) -> Record<'_> {
        Record {
            kind: Kind::Node,
            stamp: 3,
            id,
            value: 1,
            by: 2,
            added: 1,
            saved,
        }
    }

    /// What was written is read, what was taken away is not, and its place is used again.
    #[test]
    fn records_are_read_as_they_were_written() {
        let book = Book::create().unwrap();
        book.check().unwrap();
        let read = |index, expected: Option<Record<'_>>| {
            let head = book.heads().nth(index).expect("the place was used").1;
            let mut saved = [0; MOST_SAVED];
            let record = head.and_then(|head| book.read(index, &head, &mut saved));
            assert_eq!(record, expected);
        };
        assert_eq!(book.heads().count(), 0);
        let (one, two) = (record(7, b"seven"), record(8, &[1; INLINE]));
        book.empty(0);
        book.empty(1);
        book.put(0, &[], &one);
        book.put(1, &[], &two);
        read(0, Some(one));
        read(1, Some(two));
        book.empty(0);
        read(0, None);
        book.put(0, &[], &record(9, b""));
        book.count(1, 5, 70, 4);
        read(0, Some(record(9, b"")));
        let counted = Record {
            value: 5,
            by: 70,
            added: 4,
            ..two
        };
        read(1, Some(counted));
        assert_eq!(book.heads().count(), 2);
    }

    /// What does not fit into one place goes on in others, and is lost as a whole with one of them.
    #[test]
    fn long_records_are_read_as_they_were_written() {
        let book = Book::create().unwrap();
        (0..20).for_each(|index| book.empty(index));
        for len in [
            INLINE,
            INLINE + 1,
            INLINE - WORD + MORE,
            INLINE - WORD + MORE + 1,
            MOST_SAVED,
        ] {
            let saved: Vec<u8> = (0..len).map(|n| n as u8).collect();
            let more: Vec<usize> = (1..=Book::more(len)).rev().collect();
            let written = record(7, &saved);
            book.put(0, &more, &written);
            let (head, mut read) = (book.at(0).unwrap(), [0; MOST_SAVED]);
            assert_eq!(book.read(0, &head, &mut read), Some(written));
            assert_eq!(book.others(0, &head).as_ref(), Some(&more));
            if let Some(last) = more.last() {
                book.empty(*last);
                assert_eq!(book.read(0, &head, &mut read), None);
            }
            (0..20).for_each(|index| book.empty(index));
        }
    }

    /// The arguments are those that were set, if they fit.
    #[test]
    fn arguments_are_kept() {
        let book = Book::create().unwrap();
        let all = |words: &[&str]| words.iter().map(Into::into).collect::<Vec<OsString>>();
        let args = all(&["uvfs", "", "mount", "a b"]);
        book.set_args(args.clone().into_iter());
        assert_eq!(book.args(), args);
        book.set_args([OsString::from("x".repeat(MOST_ARGS))].into_iter());
        assert_eq!(book.args(), all(&[]));
    }

    /// An intent is carried until it is settled, with what was noted and answered, also over a second crash.
    #[test]
    fn intents_are_carried_from_worker_to_worker() {
        let book = Book::create().unwrap();
        let intent = |unique, note, answer| Intent {
            unique,
            began: 5,
            note,
            answer,
        };
        book.begin(3, 30, 5);
        book.begin(4, 40, 5);
        book.note(4, 44);
        book.begin(5, 50, 5);
        assert!(book.answer(5, 0, [b"body", b"more"]));
        assert!(!book.answer(3, 0, [&[0; ANSWER], b"1"]));
        let first = [
            intent(30, None, None),
            intent(40, Some(44), None),
            intent(50, None, Some((0, b"bodymore".to_vec()))),
        ];
        assert_eq!(book.carry(), first);
        // The next one is killed while it does one of them again.
        book.begin(0, 40, 9);
        let mut second = book.carry();
        second.sort_by_key(|one| (one.unique, one.began));
        let again = Intent {
            began: 9,
            ..intent(40, None, None)
        };
        assert_eq!(
            second,
            [first[0].clone(), first[1].clone(), again, first[2].clone()]
        );
        book.settle();
        assert_eq!(book.carry(), []);
    }

    /// Pipes are there until they are closed, and no more of them than there is room for.
    #[test]
    fn pipes_are_noted() {
        let book = Book::create().unwrap();
        (5..100).for_each(|fd| book.add_pipe(fd));
        assert_eq!(book.pipes().len(), MOST_PIPES);
        book.remove_pipe(3);
        book.add_pipe(200);
        assert_eq!(book.pipes()[2..5], [(2, 7), (3, 200), (4, 9)]);
    }

    /// However many workers end before it is settled, the last intents are there.
    #[test]
    fn the_last_intents_are_carried() {
        let book = Book::create().unwrap();
        for unique in 1..=CARRIED as u64 + 9 {
            book.begin(3, unique, 7);
            let carried = book.carry();
            assert!(carried.iter().any(|intent| intent.unique == unique));
        }
        let carried: Vec<_> = book.carry().iter().map(|intent| intent.unique).collect();
        assert_eq!(carried.len(), CARRIED);
        assert!(!carried.contains(&9) && carried.contains(&10));
    }

    /// Memory that is no book leads to errors.
    #[test]
    fn damage_is_found() {
        let book = Book::create().unwrap();
        book.empty(0);
        book.put(0, &[], &record(7, b"seven"));
        // A kind that there is not, and a length beyond the record.
        for head in [5, 0xff, USED, (MOST_SAVED as u64 + 1) << 8 | 1] {
            book.set(Book::record(0), head);
            assert!(book.heads().next().unwrap().1.is_none());
        }
        // Numbers that no error and no count of lookups has.
        let answered = |error| {
            book.begin(0, 10, 5);
            book.answer(0, error, [&[]; 2]);
            book.read_intent(0).and_then(|intent| intent.answer)
        };
        assert_eq!(answered(-1), Some((libc::EIO, Vec::new())));
        assert_eq!(answered(4096), Some((libc::EIO, Vec::new())));
        book.empty(0);
        book.put(0, &[], &record(7, b""));
        book.count(0, u64::MAX, 1, u64::MAX);
        let head = book.heads().next().unwrap().1.unwrap();
        let mut saved = [0; MOST_SAVED];
        let record = book.read(0, &head, &mut saved).unwrap();
        assert_eq!((record.value, record.added), (MOST_LOOKUPS, MOST_LOOKUPS));
        book.set(DEVICE_COUNT, u64::MAX);
        assert!(book.devices().is_err());
        book.set(AGREED, 7);
        assert!(book.init().is_err());
        let entries = EntriesAt {
            fd: 9,
            address: 4096,
            payload: 1 << 20,
        };
        book.set_entries(entries);
        assert_eq!(book.entries().unwrap(), Some(entries));
        book.set(ENTRIES + 2 * WORD, u64::MAX);
        assert!(book.entries().is_err());
        book.set(WORD, VERSION + 1);
        let error = book.check().unwrap_err().to_string();
        assert!(error.contains("version is 4"), "{error}");
        book.set(0, 0);
        assert!(book.check().is_err());
    }
}
