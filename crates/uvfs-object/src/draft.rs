//! Drafts: what programs wrote and the store may not have yet, as files of the cache's directory.
//!
//! A draft has a data file (`NUMBER.new`) and a record in the journal, which says what object it is to become, and whether
//! the store has it already. The record is written before a change is answered, so after kill -9 the next mount goes on
//! with the draft. A directory that is to be made and a name that is to be removed are drafts, too, without a data file.
//!
//! A mount may have more drafts than a process may have open files. So the data file is open only while something uses it.

use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap, HashSet, btree_map};
use std::fs::{File, Metadata, OpenOptions};
use std::io::{self, BufRead, BufReader};
use std::ops::{Bound, Range};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::time::UNIX_EPOCH;

use futures_util::future::join3;
use rustix::fs::{FallocateFlags, FileType, Mode};
use uvfs_io::ops;
use uvfs_server::fs::{Errno, Error, Result};

use crate::cache::{self, Cache, Id, number, remove};
use crate::fs::SECTOR;
use crate::journal::{self, Journal, Records};
use crate::map;
use crate::posix::Posix;
use crate::store::{Facts, Version, has_path, is_directory};
use crate::tree::{Known, Tree};
use crate::unseen::{self, Unseen};
use crate::upload::{PART, Print, Stored, Upload};

/// The words at the beginning of a record.
const WORDS: usize = 7;
/// Flags of a record.
const REPLACES: u32 = 1;
const CLEAN: u32 = 2;
const WANTED: u32 = 4;
const GONE: u32 = 8;
const KEPT: u32 = 16;
const PRINT: u32 = 32;
const ANEW: u32 = 64;
const STREAMED: u32 = 128;
const EARLIER: u32 = 256;
/// Stands for an attribute that the record does not have.
const NONE: u32 = u32::MAX;

/// A file's contents, which programs change.
pub(crate) struct Draft {
    number: u64,
    cache: Arc<Cache>,
    journal: Arc<Journal>,
    /// A closed file waits on the local disk: see [`Draft::keep`].
    back: bool,
    /// Its data file, while something uses it.
    open: Mutex<Option<Arc<Contents>>>,
    state: Mutex<State>,
    /// Held over a put, and over a change of the name.
    pub(crate) order: tokio::sync::Mutex<()>,
    /// A task puts it until that succeeds.
    pub(crate) settling: AtomicBool,
    /// Bytes that the cache counts for it.
    counted: AtomicU64,
    /// The thread that wrote it last.
    pub(crate) writer: AtomicU32,
    /// The disk has the name of its data file.
    is_named: AtomicBool,
    /// The upload of [`Parts`].
    pub(crate) upload: tokio::sync::Mutex<Option<Upload>>,
}

/// An open data file.
pub(crate) struct Contents {
    pub(crate) file: File,
    /// The same file.
    pub(crate) data: Arc<ops::File>,
}

impl Contents {
    fn new(file: File) -> io::Result<Self> {
        let data = Arc::new(ops::File::from(OwnedFd::from(file.try_clone()?)));
        Ok(Self { file, data })
    }
}

/// The object that a draft becomes, and how far its put is.
#[derive(Clone)]
pub(crate) struct State {
    pub(crate) key: String,
    /// The version that it takes the place of; `None` for a new object.
    pub(crate) replaces: Option<Version>,
    pub(crate) posix: Posix,
    /// Counts changes. The store has the contents as of the change `stored`.
    changes: u64,
    stored: u64,
    /// A program asked for the contents as of this change to be stored: by close(2), or fsync(2).
    wanted: u64,
    /// The checksums of the pieces that the store has.
    pub(crate) sums: Vec<u32>,
    /// Grows with each draft and each rename. Of two records of one key the one with the higher order counts.
    pub(crate) order: u32,
    /// A program removed the object before another program made this file. If the file is given up, the object still has to be
    /// removed.
    pub(crate) anew: bool,
    /// The hash of the contents that the last put sent. The store may have them although no answer came.
    pub(crate) print: Option<Print>,
    /// That of the put before, if no answer came to that one either. It may arrive later than it was looked for.
    pub(crate) earlier: Option<Print>,
    /// The hash of the contents that the store has as the version `replaces`, if a put of this mount sent them.
    pub(crate) sent: Option<Print>,
    /// Perhaps the last change was none: see [`State::may_have_changed`].
    pub(crate) is_unsure: bool,
    /// `NUMBER.kept` has the contents that a program closed, while another changes them.
    pub(crate) kept: bool,
    /// The store's object is to be removed: it has no name any more on this mount.
    pub(crate) gone: bool,
    /// No name leads to it any more.
    pub(crate) removed: bool,
    /// The key at which another writer was faster. Each close(2) is told, because a child process that closes what it inherited
    /// may be the first.
    pub(crate) overtaken: Option<String>,
    /// The store has it, and its file is the cache's.
    pub(crate) ended: bool,
    /// An earlier mount ended while a program wrote it: the key and the version that it had then.
    pub(crate) interrupted: Option<(String, Option<Version>)>,
    /// The node that it is open as.
    pub(crate) node: Weak<Known>,
    pub(crate) parts: Parts,
    /// The kernel may write the data file by itself.
    pub(crate) unseen: Option<Unseen>,
}

/// The parts of a file that are uploaded while programs still write it. Only what they write from the beginning on, one byte
/// after the other, and before the first put.
#[derive(Clone, Copy, Default)]
pub(crate) struct Parts {
    /// Bytes that programs have written in this way.
    front: u64,
    /// Bytes that are sent, or about to be.
    sent: u64,
    /// A task sends them.
    sending: bool,
    /// No more are sent.
    over: bool,
    /// A program changed what was sent.
    pub(crate) changed: bool,
    /// Bytes that the local disk has no more: the file is larger than the cache, and streams through it.
    dropped: u64,
}

impl Parts {
    fn change(&mut self, range: &Range<u64>) {
        self.changed |= range.start < self.sent && !range.is_empty();
    }

    fn wrote(&mut self, range: &Range<u64>) {
        if range.start <= self.front {
            self.front = self.front.max(range.end);
        }
    }

    pub(crate) fn is_begun(&self) -> bool {
        self.sent > 0
    }

    /// Sends no more.
    pub(crate) fn end(&mut self) {
        self.over = true;
    }

    pub(crate) fn is_streamed(&self) -> bool {
        self.dropped > 0
    }

    /// Whether programs are so far ahead of what was sent that they have to wait if there is no room.
    pub(crate) fn is_behind(&self) -> bool {
        self.sending && !self.changed && self.front > self.sent + 2 * PART
    }

    /// The end of the next part.
    fn next(&self) -> Option<u64> {
        let end = self.sent + PART;
        // The last part is the put's: it may be the whole file.
        (!self.over && !self.changed && self.front > end).then_some(end)
    }
}

impl State {
    /// Whether it is as a program left it, and not what the end of the server interrupted.
    pub(crate) fn is_wanted(&self) -> bool {
        self.wanted == self.changes
    }

    /// The hashes that the store may have without an answer.
    pub(crate) fn prints(&self) -> [Option<Print>; 2] {
        [self.print, self.earlier]
    }

    /// Whether it is a file, and not a directory that is made or a name that is removed.
    pub(crate) fn is_file(&self) -> bool {
        !self.gone && !is_directory(&self.key)
    }

    /// Has it take the place of an object that a program removed before, and that the store may still have.
    pub(crate) fn instead_of(&mut self, removal: Option<&Draft>) {
        if let Some(removal) = removal {
            let had = removal.state();
            self.replaces = had.replaces.clone().filter(|_| had.is_dirty());
            (self.print, self.earlier) = (had.print, had.earlier);
            self.anew = self.replaces.is_some();
        }
    }

    /// Counts a change.
    pub(crate) fn change(&mut self) {
        self.changes += 1;
        self.is_unsure = false;
    }

    /// Counts what may be a change. The put compares the contents with those that the store has before it sends them.
    pub(crate) fn may_have_changed(&mut self) {
        self.change();
        self.is_unsure = true;
    }

    /// Whether a program has changed it.
    pub(crate) fn has_changed(&self) -> bool {
        self.changes > 0
    }

    /// Whether the next change is the first one that no program has asked to be stored.
    pub(crate) fn is_stored_or_wanted(&self) -> bool {
        !self.is_dirty() || self.is_wanted()
    }

    /// Whether the store has other contents.
    pub(crate) fn is_dirty(&self) -> bool {
        self.changes != self.stored && !self.removed
    }
}

impl Draft {
    pub(crate) fn state(&self) -> MutexGuard<'_, State> {
        uvfs_sys::lock(&self.state)
    }

    /// The file that the cache may take over.
    pub(crate) fn path(&self) -> PathBuf {
        self.beside("new")
    }

    /// The path of one of its files.
    pub(crate) fn beside(&self, extension: &str) -> PathBuf {
        let name = format!("{:016x}.{extension}", self.number);
        self.cache.root().join(name)
    }

    /// Opens the data file, unless it is. It stays open until [`Draft::close`].
    pub(crate) fn contents(&self) -> io::Result<Arc<Contents>> {
        let mut open = uvfs_sys::lock(&self.open);
        if let Some(contents) = &*open {
            return Ok(contents.clone());
        }
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .open(self.path())?;
        let contents = Arc::new(Contents::new(file)?);
        *open = Some(contents.clone());
        Ok(contents)
    }

    /// Closes the data file, which nothing uses any more.
    pub(crate) fn close(&self) {
        *uvfs_sys::lock(&self.open) = None;
    }

    /// Closes the data file, and says whether no program can write it.
    pub(crate) fn is_unwritten(&self) -> io::Result<bool> {
        // It is not opened again meanwhile.
        let mut open = uvfs_sys::lock(&self.open);
        *open = None;
        unseen::is_unwritten(&self.path())
    }

    /// The inode of the draft's data file and its time of birth, by which later mounts find the draft. `None` where the local disk
    /// tells no time of birth.
    pub(crate) fn identity(&self) -> Option<Id> {
        identity(&self.metadata().ok()?)
    }

    /// Whether programs write it by this node.
    pub(crate) fn is_of(&self, known: &Known) -> bool {
        std::ptr::eq(self.state().node.as_ptr(), known)
    }

    /// Whether a closed file waits on the local disk.
    pub(crate) fn back(&self) -> bool {
        self.back
    }

    pub(crate) fn number(&self) -> u64 {
        self.number
    }

    /// The descriptor and the identity of the data file, if it is open and no name leads to it.
    pub(crate) fn held(&self) -> Option<(RawFd, Id)> {
        if !self.state().removed {
            return None;
        }
        let open = uvfs_sys::lock(&self.open);
        let file = &open.as_ref()?.file;
        let id = identity(&file.metadata().ok()?)?;
        Some((file.as_raw_fd(), id))
    }

    /// Whether its data file is there, if it has one.
    pub(crate) fn is_there(&self) -> bool {
        !self.state().is_file() || self.path().exists()
    }

    /// Whether the kernel may write the data file by itself: it has all of a regular file, and no bits that a write takes away.
    pub(crate) fn may_be_backed(&self) -> bool {
        let state = self.state();
        let has_set_id = state.posix.mode.is_some_and(|mode| mode & 0o6000 != 0);
        state.posix.special.is_none() && !has_set_id && !state.parts.is_begun()
    }

    /// The size and the times of the data file.
    pub(crate) fn metadata(&self) -> io::Result<Metadata> {
        match &*uvfs_sys::lock(&self.open) {
            Some(contents) => contents.file.metadata(),
            None => self.path().symlink_metadata(),
        }
    }

    /// The answer to a lookup of a directory that the store has yet to get.
    pub(crate) fn directory(&self) -> Facts {
        Facts {
            version: None,
            posix: self.state().posix,
        }
    }

    /// Whether it is a file that was made without a name, and may get one.
    pub(crate) fn is_nameless(&self) -> bool {
        self.state().removed && self.path().exists()
    }

    /// Notes a change of a range of bytes. Called before the change, so that the record has it, and again after it: a put that
    /// began meanwhile may not have it.
    pub(crate) fn change(&self, range: &Range<u64>) -> Result<()> {
        let mut state = self.state();
        let parts = &mut state.parts;
        let is_gone = parts.over || parts.changed || range.start < parts.sent;
        if parts.is_streamed() && !range.is_empty() && is_gone {
            let why = "a file that is larger than the cache (cache_size=) is written once, from its beginning";
            return Err(Error::new(Errno::NOSPC, why));
        }
        parts.change(range);
        let is_noted = state.changes != state.stored && !state.is_wanted();
        let is_closed = state.is_wanted() && state.is_dirty();
        if is_closed && !range.is_empty() && self.back {
            self.keep(u64::MAX)?;
            state.kept = true;
        }
        state.change();
        // Attributes are what a program asked for at once.
        if is_closed && range.is_empty() {
            state.wanted += 1;
        }
        match is_noted {
            true => Ok(()),
            false => self.note(&state).inspect_err(|_| state.changes -= 1),
        }
    }

    /// Whether a file that was open when the server ended has what the cache has of the object.
    fn is_as_cached(&self, state: &State) -> bool {
        let Some(version) = &state.replaces else {
            return false;
        };
        let whole = self.cache.whole(&state.key, version);
        whole.is_some_and(|whole| is_equal(&whole, &self.path()).unwrap_or(false))
    }

    /// Keeps what a program closed and the store does not have, before another program changes it: if that one is interrupted,
    /// this is what the file is. Copies at most so many bytes.
    ///
    /// # Errors
    /// EFBIG if it has more, and the local disk has no clones.
    pub(crate) fn keep(&self, most: u64) -> Result<()> {
        let (new, contents) = (self.beside("tmp"), self.contents()?);
        let copy = || {
            let to = File::create(&new)?;
            match rustix::fs::ioctl_ficlone(&to, &contents.file) {
                Ok(()) => Ok(()),
                Err(_) if contents.file.metadata()?.len() > most => Err(Errno::FBIG.into()),
                Err(_) => std::fs::copy(self.path(), &new).map(drop),
            }
        };
        let copied = self.cache.with_room(copy);
        copied.inspect_err(|_| drop(std::fs::remove_file(&new)))?;
        Ok(std::fs::rename(new, self.beside("kept"))?)
    }

    /// Has the cache count the bytes that it takes now.
    pub(crate) fn count(&self) -> Result<()> {
        let now = SECTOR * self.metadata()?.blocks();
        let before = self.counted.swap(now, Ordering::Relaxed);
        if now != before {
            self.cache.drafted(now, before);
        }
        Ok(())
    }

    /// Notes that a program wrote a range of bytes. Whether a part is to be sent, and no task is at it.
    pub(crate) fn wrote(&self, range: &Range<u64>) -> bool {
        let parts = &mut self.state().parts;
        parts.wrote(range);
        parts.next().is_some() && !std::mem::replace(&mut parts.sending, true)
    }

    /// The end of the next part that the one task for that has to send. `None` ends the task.
    pub(crate) fn next_part(&self) -> Option<u64> {
        let mut state = self.state();
        let next = state.parts.next().filter(|_| !state.removed);
        match next {
            Some(end) => state.parts.sent = end,
            None => state.parts.sending = false,
        }
        next
    }

    /// Frees what the upload has of a file that is larger than the cache.
    pub(crate) fn drop_sent(&self) -> Result<()> {
        let range = {
            let mut state = self.state();
            if state.removed || state.parts.changed {
                return Ok(());
            }
            let begun = state.parts.is_streamed();
            let range = state.parts.dropped..state.parts.sent;
            state.parts.dropped = range.end;
            if !begun {
                self.note(&state)?;
            }
            range
        };
        let how = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        let contents = self.contents()?;
        rustix::fs::fallocate(&contents.file, how, range.start, range.end - range.start)?;
        self.count()
    }

    /// Has the draft of a file that is lost remove what a program had removed before it made the file. False if there was none.
    pub(crate) fn remove_instead(&self) -> bool {
        let mut state = self.state();
        if state.anew {
            (state.gone, state.wanted) = (true, state.changes);
            state.parts = Parts::default();
            if let Err(error) = self.note(&state) {
                tracing::error!("{error}: {:?} may come back", state.key);
            }
        }
        state.anew
    }

    /// Whether the local disk has all bytes from here on.
    pub(crate) fn has(&self, offset: u64) -> bool {
        offset >= self.state().parts.dropped
    }

    /// Sends no more parts, and gives the upload of those that were sent.
    pub(crate) async fn take_upload(&self) -> Option<Upload> {
        self.state().parts.over = true;
        self.upload.lock().await.take()
    }

    /// Notes that a program asked for its changes to be stored, and gives the state as of now.
    pub(crate) fn want(&self) -> Result<State> {
        let mut state = self.state();
        if !state.is_wanted() && state.is_dirty() {
            state.wanted = state.changes;
            let kept = std::mem::take(&mut state.kept);
            if let Some(unseen) = &mut state.unseen {
                unseen.is_closed = true;
            }
            self.note(&state)?;
            if kept {
                cache::remove_or_warn(&self.beside("kept"));
            }
        }
        Ok(state.clone())
    }

    /// Notes that the store has, as this version, the contents of the moment when `before` was copied.
    pub(crate) fn stored(&self, before: &State, stored: Stored) -> Result<()> {
        let mut state = self.state();
        state.stored = before.changes;
        (state.print, state.earlier, state.anew) = (None, None, false);
        state.replaces = Some(stored.version);
        (state.sums, state.sent) = (stored.sums, stored.print);
        self.note(&state)
    }

    /// Notes that the store has the contents of the moment when `before` was copied, because they have not changed.
    pub(crate) fn unchanged(&self, before: &State) -> Result<()> {
        let mut state = self.state();
        state.stored = before.changes;
        self.note(&state)
    }

    /// Notes the hash of the contents that a put is about to send.
    pub(crate) fn about_to_put(&self, print: Print) -> Result<()> {
        let mut state = self.state();
        let before = state.print.replace(print).filter(|had| *had != print);
        state.earlier = before.or(state.earlier);
        self.note(&state)
    }

    /// Notes what attributes a directory is to be made with.
    pub(crate) fn set_attributes(&self, posix: Posix) -> Result<()> {
        let mut state = self.state();
        state.posix = posix;
        self.note(&state)
    }

    /// Notes that the version in the store is an earlier one of this draft.
    pub(crate) fn take_place_of(&self, version: Version) -> Result<()> {
        let mut state = self.state();
        (state.replaces, state.print, state.earlier) = (Some(version), None, None);
        self.note(&state)
    }

    /// Notes that the store has the directory that was made, or no longer the name that was removed.
    pub(crate) fn done(&self, before: &State) -> Result<()> {
        let mut state = self.state();
        state.stored = before.changes;
        state.replaces = None;
        self.note(&state)
    }

    /// Waits until the local disk has the file, its name and its record: for all at a time, so that one commit of the disk's file
    /// system is enough.
    pub(crate) async fn sync(&self) -> Result<()> {
        let contents = self.contents()?;
        let data = ops::fsync(&contents.data, true);
        let name = async {
            if !self.is_named.load(Ordering::Acquire) {
                self.cache.sync_names().await?;
                self.is_named.store(true, Ordering::Release);
            }
            Ok(())
        };
        let (data, name, record) = join3(data, name, self.journal.sync_record()).await;
        Ok(data.and(name).and(record)?)
    }

    /// Moves the time of its last change, as a change of attributes does.
    pub(crate) fn attributes_changed(&self) -> Result<()> {
        let contents = self.contents()?;
        Ok(rustix::fs::fchmod(&contents.file, Mode::RUSR | Mode::WUSR)?)
    }

    /// Brings the record up to date.
    pub(crate) fn note(&self, state: &State) -> Result<()> {
        if state.removed {
            return Ok(());
        }
        let record = record(state).ok_or(Errno::NAMETOOLONG)?;
        let noted = || self.journal.set(self.number, record.clone());
        self.cache.with_room(noted)?;
        self.cache.noted.notify_one();
        Ok(())
    }

    /// Removes the record and, if it is still there, the data file. What is open stays readable.
    pub(crate) fn discard(&self) {
        if let Err(error) = self.journal.end(self.number) {
            tracing::warn!(%error, "the journal keeps the record of a change that has ended");
        }
        for extension in ["new", "kept"] {
            cache::remove_or_warn(&self.beside(extension));
        }
    }
}

impl Drop for Draft {
    fn drop(&mut self) {
        self.cache
            .drafted(0, self.counted.swap(0, Ordering::Relaxed));
        if self.state().removed {
            cache::remove_or_warn(&self.path());
        }
    }
}

/// All drafts, by their keys.
pub(crate) struct Drafts {
    cache: Arc<Cache>,
    journal: Arc<Journal>,
    back: bool,
    next: AtomicU64,
    all: Mutex<BTreeMap<String, Arc<Draft>>>,
    /// The drafts that an earlier server of the same mount left, by their numbers. Empty after [`Drafts::restored`].
    left: Mutex<HashMap<u64, Arc<Draft>>>,
    /// The numbers of nameless drafts that a restored node has. Empty after that, too.
    used: Mutex<HashSet<u64>>,
}

impl Drafts {
    /// No drafts yet, over the journal of a cache; the records of that, and whether it is damaged. The next number is beyond those of
    /// all records and files.
    fn of(cache: Arc<Cache>, back: bool) -> io::Result<(Self, Records, bool)> {
        let (records, is_damaged) = journal::read(cache.root())?;
        let last = records.keys().next_back().copied();
        let numbers = cache.drafts().iter().filter_map(|path| number(path));
        let next = numbers.chain(last).max().map_or(0, |number| number + 1);
        let this = Self {
            journal: Arc::new(Journal::open(cache.root(), &records)?),
            cache,
            back,
            next: AtomicU64::new(next),
            all: Mutex::default(),
            left: Mutex::default(),
            used: Mutex::default(),
        };
        Ok((this, records, is_damaged))
    }

    /// Takes over what earlier mounts left in this cache and in those that no mount has, and removes what no program was told of.
    pub(crate) fn open(cache: Arc<Cache>, back: bool) -> io::Result<Self> {
        let (mut this, records, is_damaged) = Self::of(cache, back)?;
        let mut next = *this.next.get_mut();
        let others = take_over(&this.cache, &this.journal, &records, &mut next)?;
        if is_damaged {
            set_aside_unknown(this.cache.drafts(), &records.keys().copied().collect())?;
        }
        for path in this.cache.drafts() {
            let is_known = number(path).is_none_or(|number| records.contains_key(&number));
            if !is_known && path.extension().is_some_and(|end| end != "lost") {
                remove(path)?;
            }
        }
        // Drafts of other caches, which this one took over, have got numbers meanwhile.
        this.next = AtomicU64::new(next);
        let mut all = BTreeMap::<String, Arc<Draft>>::new();
        for (number, record) in records.into_iter().chain(others) {
            let Some(draft) = this.found(number, &record)? else {
                continue;
            };
            let (key, order) = {
                let state = draft.state();
                (state.key.clone(), state.order)
            };
            next = next.max(u64::from(order) + 1);
            let one = Arc::new(draft);
            let two = match all.remove(&key) {
                Some(had) if had.state().order > order => all.insert(key, had).or(Some(one)),
                had => all.insert(key, one).or(had),
            };
            if let Some(overtaken) = two {
                overtaken.discard();
            }
        }
        this.next = AtomicU64::new(next);
        this.all = Mutex::new(all);
        Ok(this)
    }

    /// Takes over what an earlier server of the same mount left. Programs have its files open, so they are as they are.
    pub(crate) fn go_on(cache: Arc<Cache>, back: bool) -> io::Result<Self> {
        let (mut this, records, _) = Self::of(cache, back)?;
        let (mut next, mut left) = (*this.next.get_mut(), HashMap::new());
        for (number, record) in records {
            let Some(mut state) = parse(&record) else {
                tracing::error!("record {number:x} of the journal is none");
                continue;
            };
            next = next.max(u64::from(state.order) + 1);
            if state.parts.is_streamed() {
                // The upload that had its beginning ended with that server.
                (state.parts.over, state.parts.dropped) = (true, u64::MAX);
            }
            left.insert(number, Arc::new(this.draft(number, state)));
        }
        (this.next, this.left) = (AtomicU64::new(next), Mutex::new(left));
        Ok(this)
    }

    /// No further draft gets a number that a node was saved with.
    pub(crate) fn reserve(&self, number: u64) {
        self.next.fetch_max(number + 1, Ordering::Relaxed);
    }

    /// The draft of a number, for the node that had it under the server before.
    pub(crate) fn left(&self, number: u64) -> Option<Arc<Draft>> {
        uvfs_sys::lock(&self.left).get(&number).cloned()
    }

    /// The same for one that no name leads to. Its data file still has its own name, or else `file` is it.
    pub(crate) fn nameless(
        &self,
        number: u64,
        file: Option<File>,
        posix: Posix,
    ) -> io::Result<Option<Arc<Draft>>> {
        let mut begun = state("", None, posix, 1);
        begun.removed = true;
        let draft = self.draft(number, begun);
        match file {
            Some(file) => *uvfs_sys::lock(&draft.open) = Some(Arc::new(Contents::new(file)?)),
            None if draft.path().exists() => drop(draft.contents()?),
            None => return Ok(None),
        }
        draft.count()?;
        uvfs_sys::lock(&self.used).insert(number);
        Ok(Some(Arc::new(draft)))
    }

    /// All nodes are restored. Drafts that the store has, and those that no program was told of, end. A node that loses its draft or
    /// its name by that is saved before the journal forgets the draft.
    pub(crate) fn restored(&self, tree: &Tree) -> Result<()> {
        let left = std::mem::take(&mut *uvfs_sys::lock(&self.left));
        let mut used = std::mem::take(&mut *uvfs_sys::lock(&self.used));
        let mut left: Vec<_> = left.into_values().collect();
        left.sort_unstable_by_key(|draft| Reverse(draft.state().order));
        for draft in left {
            let (key, is_dirty, node) = {
                let state = draft.state();
                (state.key.clone(), state.is_dirty(), state.node.upgrade())
            };
            if !draft.is_there() || !is_dirty && node.is_none() {
                if let Some(node) = node {
                    node.state().has_stored(&draft.state());
                    tree.save_again(&node);
                }
                draft.discard();
                continue;
            }
            if self.all().contains_key(&key) {
                // The server was killed when another file had taken its name.
                if let Some(node) = node {
                    draft.contents()?;
                    draft.state().removed = true;
                    node.state().removed = true;
                    tree.save_again(&node);
                }
                draft.discard();
                continue;
            }
            if draft.state().is_file() {
                draft.count()?;
            }
            if let Some(node) = node {
                tree.leads_to(&key, &node);
            }
            used.insert(draft.number);
            self.all().insert(key, draft);
        }
        for path in self.cache.drafts() {
            let is_used = number(path).is_some_and(|number| used.contains(&number));
            let end = path.extension().and_then(|end| end.to_str());
            if end == Some("tmp") || !is_used && end != Some("lost") {
                remove(path)?;
            }
        }
        Ok(())
    }

    fn draft(&self, number: u64, state: State) -> Draft {
        Draft {
            number,
            cache: self.cache.clone(),
            journal: self.journal.clone(),
            back: self.back,
            open: Mutex::default(),
            state: Mutex::new(state),
            order: tokio::sync::Mutex::default(),
            settling: AtomicBool::default(),
            counted: AtomicU64::default(),
            writer: AtomicU32::default(),
            is_named: AtomicBool::default(),
            upload: tokio::sync::Mutex::default(),
        }
    }

    /// The draft of a record that an earlier mount left; `None` for one that the store has.
    fn found(&self, number: u64, record: &[u8]) -> io::Result<Option<Draft>> {
        let Some(parsed) = parse(record) else {
            let draft = self.draft(number, state("", None, Posix::default(), 0));
            let lost = set_aside(&draft.path())?;
            tracing::error!("record {number:x} of the journal is none: {lost}");
            draft.discard();
            return Ok(None);
        };
        let draft = self.draft(number, parsed);
        let (data, kept) = (draft.path(), draft.beside("kept"));
        {
            let mut state = draft.state();
            if state.parts.is_streamed() {
                // Only the upload had its beginning.
                let key = &state.key;
                tracing::warn!(
                    "the server ended while {key:?} was written, which is larger than the cache: it is not in the store"
                );
                if !state.anew {
                    drop(state);
                    draft.discard();
                    return Ok(None);
                }
                // A program removed what the store has there.
                (state.gone, state.wanted) = (true, state.changes);
                state.parts = Parts::default();
            }
            match state.kept {
                true => {
                    if kept.exists() {
                        let (key, lost) = (&state.key, set_aside(&data)?);
                        tracing::warn!("the server ended while {key:?} was written anew: {lost}");
                        std::fs::rename(&kept, &data)?;
                    }
                    (state.kept, state.wanted) = (false, state.changes);
                }
                false => remove(&kept)?,
            }
            let has_all = !state.is_file() || data.exists();
            // Programs of the earlier mount may still have it open, or mapped.
            if has_all && state.is_file() && unseen::is_unwritten(&data).is_ok_and(|is| !is) {
                state.unseen = Some(Unseen::of_before(state.is_wanted()));
            }
            let is_same = !state.is_wanted() && state.unseen.is_none() && !state.anew;
            let is_same = is_same && draft.is_as_cached(&state);
            if !state.is_dirty() || !has_all || is_same {
                drop(state);
                draft.discard();
                return Ok(None);
            }
            draft.note(&state)?;
            if !state.is_file() {
                remove(&data)?;
                drop(state);
                return Ok(Some(draft));
            }
        }
        draft.count()?;
        Ok(Some(draft))
    }

    /// Begins an empty draft. One that no name leads to has no record, so the next mount removes its file.
    pub(crate) fn begin(&self, mut state: State) -> Result<Arc<Draft>> {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        state.order = number as u32;
        let is_file = state.is_file() || state.removed;
        let draft = self.draft(number, state);
        if is_file {
            let mut how = OpenOptions::new();
            how.read(true).write(true).create_new(true).mode(0o600);
            let contents = Contents::new(how.open(draft.path())?)?;
            *uvfs_sys::lock(&draft.open) = Some(Arc::new(contents));
        }
        let noted = draft.note(&draft.state());
        noted.inspect_err(|_| draft.discard())?;
        Ok(Arc::new(draft))
    }

    pub(crate) fn get(&self, key: &str) -> Option<Arc<Draft>> {
        self.all().get(key).cloned()
    }

    /// The draft of a file.
    pub(crate) fn file(&self, key: &str) -> Option<Arc<Draft>> {
        self.get(key).filter(|draft| draft.state().is_file())
    }

    /// The removal of a name that the store does not have yet.
    pub(crate) fn removal(&self, key: &str) -> Option<Arc<Draft>> {
        self.get(key).filter(|draft| draft.state().gone)
    }

    /// Has lookups find a draft, in the place of another one of its key.
    ///
    /// # Errors
    /// ESTALE if a third one has the key by now.
    pub(crate) fn insert(&self, draft: &Arc<Draft>, over: Option<&Arc<Draft>>) -> Result<()> {
        let key = draft.state().key.clone();
        let mut all = self.all();
        if is_taken(&all, &key, [Some(draft), over]) {
            return Err(Errno::STALE.into());
        }
        all.insert(key, draft.clone());
        Ok(())
    }

    /// Gives a draft another key, in the place of the draft `over`, in one step, so that lookups find it at one of the two. False,
    /// and nothing is done, if the draft has ended.
    ///
    /// # Errors
    /// EEXIST if a third one has the key.
    pub(crate) fn rename(
        &self,
        draft: &Arc<Draft>,
        key: &str,
        replaces: Option<Version>,
        over: Option<&Arc<Draft>>,
    ) -> Result<bool> {
        let mut state = draft.state();
        if state.ended || state.removed {
            return Ok(false);
        }
        let mut all = self.all();
        if is_taken(&all, key, [Some(draft), over]) {
            return Err(Errno::EXIST.into());
        }
        if is_at(&all, &state.key, draft) {
            all.remove(&state.key);
        }
        all.insert(key.to_owned(), draft.clone());
        drop(all);
        key.clone_into(&mut state.key);
        state.order = self.next.fetch_add(1, Ordering::Relaxed) as u32;
        (state.replaces, state.sent) = (replaces, None);
        draft.note(&state)?;
        Ok(true)
    }

    /// Takes a draft out, if it is this one.
    pub(crate) fn take(&self, key: &str, draft: &Arc<Draft>) {
        let mut all = self.all();
        if is_at(&all, key, draft) {
            all.remove(key);
        }
    }

    /// Changes that programs were told of and that are on their way to the store.
    pub(crate) fn waiting(&self) -> usize {
        let drafts: Vec<_> = self.all().values().cloned().collect();
        let is_waiting = |draft: &&Arc<Draft>| {
            let state = draft.state();
            state.is_wanted() && state.is_dirty()
        };
        drafts.iter().filter(is_waiting).count()
    }

    pub(crate) fn len(&self) -> usize {
        self.all().len()
    }

    /// The drafts whose keys begin so.
    pub(crate) fn below(&self, prefix: &str) -> Vec<(String, Arc<Draft>)> {
        let all = self.all();
        let from = all.range(prefix.to_owned()..);
        let below = from.take_while(|(key, _)| key.starts_with(prefix));
        below
            .map(|(key, draft)| (key.clone(), draft.clone()))
            .collect()
    }

    /// The drafts of a directory and of the names in it.
    pub(crate) fn children(&self, directory: &str) -> Vec<(String, Arc<Draft>)> {
        let all = self.all();
        let children = children(&all, directory);
        children
            .map(|(key, draft)| (key.clone(), draft.clone()))
            .collect()
    }

    /// Whether anything below a directory has a draft.
    pub(crate) fn any_below(&self, directory: &str) -> bool {
        let all = self.all();
        let next = from(&all, Bound::Excluded(directory)).next();
        next.is_some_and(|(key, _)| key.starts_with(directory))
    }

    fn all(&self) -> MutexGuard<'_, BTreeMap<String, Arc<Draft>>> {
        uvfs_sys::lock(&self.all)
    }
}

fn from<'a, T>(all: &'a BTreeMap<String, T>, key: Bound<&str>) -> btree_map::Range<'a, String, T> {
    all.range::<str, _>((key, Bound::Unbounded))
}

/// A directory and the names in it, of keys that may be many more: what is deeper is stepped over.
fn children<'a, T>(
    all: &'a BTreeMap<String, T>,
    directory: &str,
) -> impl Iterator<Item = (&'a String, &'a T)> {
    let mut rest = from(all, Bound::Included(directory));
    std::iter::from_fn(move || {
        loop {
            let (key, value) = rest.next()?;
            let name = key.strip_prefix(directory)?;
            match name.split_once('/') {
                Some((name, deeper)) if !deeper.is_empty() => {
                    // `0` follows `/`.
                    let after = format!("{directory}{name}0");
                    rest = from(all, Bound::Included(&after));
                }
                _ => return Some((key, value)),
            }
        }
    })
}

/// The inode of a file and its time of birth. `None` where its file system tells none.
pub(crate) fn identity(file: &Metadata) -> Option<Id> {
    let born = file.created().ok()?.duration_since(UNIX_EPOCH).ok()?;
    let born = u64::try_from(born.as_nanos()).ok()?;
    let mut id = Id::default();
    id[..8].copy_from_slice(&file.ino().to_le_bytes());
    id[8..].copy_from_slice(&born.to_le_bytes());
    Some(id)
}

/// Whether two files have the same contents.
fn is_equal(one: &Path, two: &Path) -> io::Result<bool> {
    let (one, two) = (File::open(one)?, File::open(two)?);
    if one.metadata()?.len() != two.metadata()?.len() {
        return Ok(false);
    }
    let (mut one, mut two) = (BufReader::new(one), BufReader::new(two));
    loop {
        let (left, right) = (one.fill_buf()?, two.fill_buf()?);
        let len = left.len().min(right.len());
        if left[..len] != right[..len] || len == 0 {
            return Ok(left.is_empty() && right.is_empty());
        }
        one.consume(len);
        two.consume(len);
    }
}

fn is_at(all: &BTreeMap<String, Arc<Draft>>, key: &str, draft: &Arc<Draft>) -> bool {
    all.get(key).is_some_and(|had| Arc::ptr_eq(had, draft))
}

/// Whether another draft than these has a key.
fn is_taken(all: &BTreeMap<String, Arc<Draft>>, key: &str, but: [Option<&Arc<Draft>>; 2]) -> bool {
    let is_free = but
        .into_iter()
        .flatten()
        .any(|draft| is_at(all, key, draft));
    all.contains_key(key) && !is_free
}

/// Moves the drafts of caches that no mount has into this one, and gives their records. A crash leaves a draft in at least one of
/// them.
fn take_over(
    cache: &Cache,
    journal: &Journal,
    records: &Records,
    next: &mut u64,
) -> io::Result<Records> {
    let key = |record: &Vec<u8>| parse(record).map(|state| state.key);
    let mut keys: HashSet<_> = records.values().filter_map(key).collect();
    let mut taken = Records::new();
    for (dir, _lock) in cache.others()? {
        let (theirs, is_damaged) = journal::read(&dir)?;
        let numbers: HashSet<_> = theirs.keys().copied().collect();
        let (mut stay, mut moved) = (Records::new(), Vec::new());
        for (number, record) in theirs {
            // Of two drafts of a name it is not known which is the later one. The next mount takes the other.
            let Some(key) = key(&record).filter(|key| keys.insert(key.clone())) else {
                let dir = dir.display();
                tracing::warn!("draft {number:x} in {dir} stays: this mount has one of its key");
                stay.insert(number, record);
                continue;
            };
            let [from, to] = [(&*dir, number), (cache.root(), *next)]
                .map(|(dir, number)| dir.join(format!("{number:016x}")));
            for end in ["new", "kept"] {
                match std::fs::hard_link(from.with_extension(end), to.with_extension(end)) {
                    Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                    _ => {}
                }
            }
            journal.set(*next, record.clone())?;
            taken.insert(*next, record);
            *next += 1;
            moved.push(from);
            tracing::debug!(key, "a draft that no mount had is taken over");
        }
        if is_damaged {
            let files = dir.read_dir()?.map(|entry| Ok(entry?.path()));
            let files = files.collect::<io::Result<Vec<_>>>()?;
            set_aside_unknown(&files, &numbers)?;
        }
        if moved.is_empty() && !is_damaged {
            continue;
        }
        journal.sync()?;
        cache.sync()?;
        journal::leave(&dir, &stay)?;
        for from in moved {
            for end in ["new", "kept"] {
                remove(&from.with_extension(end))?;
            }
        }
    }
    Ok(taken)
}

/// Says what an earlier mount did not put, on a mount that does not write.
pub(crate) fn warn_of(cache: &Cache) -> io::Result<()> {
    let (records, _) = journal::read(cache.root())?;
    if !records.is_empty() {
        tracing::warn!(
            "{}: {} written files are not in the store: a mount with -o write=close puts them",
            cache.root().display(),
            records.len()
        );
    }
    Ok(())
}

/// Keeps data files of which a damaged journal has no record.
fn set_aside_unknown(files: &[PathBuf], known: &HashSet<u64>) -> io::Result<()> {
    for path in files {
        let is_unknown = number(path).is_some_and(|number| !known.contains(&number));
        if is_unknown && path.extension().is_some_and(|end| end == "new") {
            let lost = set_aside(path)?;
            tracing::error!("the journal is damaged, and has no record of a file: {lost}");
        }
    }
    Ok(())
}

/// Keeps a data file that is to become no object, and says where it is.
fn set_aside(data: &Path) -> io::Result<String> {
    let lost = data.with_extension("lost");
    match std::fs::rename(data, &lost) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(format!("what was written is in {}", lost.display())),
    }
}

/// The state of a draft as it begins; `changes` is 0 if it has what the store has.
pub(crate) fn state(key: &str, replaces: Option<Version>, posix: Posix, changes: u64) -> State {
    State {
        key: key.to_owned(),
        replaces,
        posix,
        changes,
        stored: 0,
        wanted: 0,
        order: 0,
        anew: false,
        print: None,
        earlier: None,
        sent: None,
        is_unsure: false,
        kept: false,
        sums: Vec::new(),
        gone: false,
        removed: false,
        overtaken: None,
        ended: false,
        interrupted: None,
        node: Weak::new(),
        parts: Parts::default(),
        unseen: None,
    }
}

/// A name that the store is to get or to lose: of a directory that is made, or of what is removed.
pub(crate) fn change_of_name(key: &str, replaces: Option<Version>, gone: bool) -> State {
    State {
        wanted: 1,
        gone,
        ..state(key, replaces, Posix::default(), 1)
    }
}

/// A directory that is made.
pub(crate) fn directory(key: &str, posix: Posix) -> State {
    State {
        posix,
        ..change_of_name(key, None, false)
    }
}

/// A record: flags, attributes and the order, each of 4 bytes, little-endian, a print, perhaps an earlier one, and then the key and
/// the version as a map has them.
fn record(state: &State) -> Option<Vec<u8>> {
    let replaces = state.replaces.clone();
    let flag = |is, flag| if is { flag } else { 0 };
    let is_wanted = state.unseen.map_or(state.is_wanted(), |it| it.is_closed);
    let flags = flag(replaces.is_some(), REPLACES)
        | flag(!state.is_dirty() && state.unseen.is_none(), CLEAN)
        | flag(is_wanted, WANTED)
        | flag(state.gone, GONE)
        | flag(state.kept, KEPT)
        | flag(state.print.is_some(), PRINT)
        | flag(state.earlier.is_some(), EARLIER)
        | flag(state.anew, ANEW)
        | flag(state.parts.is_streamed(), STREAMED);
    let [mode, uid, gid, kind, rdev] = words(&state.posix);
    let words: [u32; WORDS] = [flags, mode, uid, gid, kind, rdev, state.order];
    let mut all: Vec<_> = words.into_iter().flat_map(u32::to_le_bytes).collect();
    all.extend(state.print.unwrap_or_default());
    all.extend(state.earlier.iter().flatten());
    all.extend(map::describe(&state.key, &replaces.unwrap_or_default())?);
    Some(all)
}

/// Words of attributes.
pub(crate) const POSIX: usize = 5;

/// Attributes, but for the times.
pub(crate) fn words(posix: &Posix) -> [u32; POSIX] {
    let (kind, rdev) = match posix.special {
        Some((kind, rdev)) => (kind.as_raw_mode(), rdev),
        None => (0, 0),
    };
    let attribute = |value: Option<u32>| value.unwrap_or(NONE);
    let [mode, uid, gid] = [posix.mode, posix.uid, posix.gid].map(attribute);
    [mode, uid, gid, kind, rdev]
}

/// The attributes that [`words`] gives. `None` for anything else.
pub(crate) fn posix_of(&[mode, uid, gid, kind, rdev]: &[u32; POSIX]) -> Option<Posix> {
    let attribute = |value| Some(value).filter(|value| *value != NONE);
    let special = match FileType::from_raw_mode(kind) {
        _ if kind == 0 => None,
        FileType::Unknown | FileType::RegularFile | FileType::Directory => return None,
        kind => Some((kind, rdev)),
    };
    Some(Posix {
        special,
        mode: attribute(mode).map(|mode| mode & 0o7777),
        uid: attribute(uid),
        gid: attribute(gid),
        ..Posix::default()
    })
}

fn parse(record: &[u8]) -> Option<State> {
    let (words, rest) = record.split_at_checked(4 * WORDS)?;
    let (print, rest) = rest.split_first_chunk()?;
    let flags = u32::from_le_bytes(*words.first_chunk()?);
    let (earlier, rest) = match flags & EARLIER {
        0 => (None, rest),
        _ => (rest.split_first_chunk()).map(|(earlier, rest)| (Some(*earlier), rest))?,
    };
    let (key, version) = map::described(rest)?;
    // A mount made it, so a path leads to it.
    if !has_path(key.strip_suffix('/').unwrap_or(&key)) {
        return None;
    }
    let (print, (words, _)) = (*print, words.as_chunks());
    let word = |at: usize| u32::from_le_bytes(words[at]);
    let posix = posix_of(&std::array::from_fn(|at| word(at + 1)))?;
    let replaces = (flags & REPLACES != 0).then_some(version);
    let changes = u64::from(flags & CLEAN == 0);
    let parts = Parts {
        dropped: u64::from(flags & STREAMED != 0),
        ..Parts::default()
    };
    Some(State {
        parts,
        order: word(6),
        anew: flags & ANEW != 0,
        print: (flags & PRINT != 0).then_some(print),
        earlier,
        gone: flags & GONE != 0,
        kept: flags & KEPT != 0,
        wanted: if flags & WANTED != 0 { changes } else { 0 },
        ..state(&key, replaces, posix, changes)
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_record_comes_back(
            key in "[!-.0-~]{3,200}(/[!-.0-~]{3,200}){0,3}/?",
            etag in proptest::option::of("[ -~]{0,60}"),
            mode in proptest::option::of(0..=0o7777_u32),
            dirty: bool,
        ) {
            let replaces = etag.map(|etag| Version { etag: Some(etag), modified: None, size: 7 });
            let posix = Posix { mode, uid: Some(3), ..Posix::default() };
            let one = state(&key, replaces, posix, u64::from(dirty));
            let two = parse(&record(&one).unwrap()).unwrap();
            prop_assert_eq!(&two.key, &one.key);
            prop_assert_eq!(two.posix, one.posix);
            prop_assert_eq!(two.is_dirty(), dirty);
            prop_assert_eq!(two.is_wanted(), one.is_wanted());
            let etag = |version: Option<Version>| version.and_then(|version| version.etag);
            prop_assert_eq!(etag(two.replaces), etag(one.replaces));
        }

        #[test]
        fn any_record_is_read_without_a_panic(
            at: proptest::sample::Index,
            bytes in proptest::collection::vec(any::<u8>(), 0..200),
        ) {
            let whole = record(&state("key", None, Posix::default(), 1)).unwrap();
            prop_assert!(parse(&whole[..at.index(whole.len())]).is_none());
            let mut damaged = whole.clone();
            damaged[at.index(whole.len())] ^= 1;
            let _ = parse(&damaged);
            let _ = parse(&bytes);
        }
    }

    proptest! {
        #[test]
        fn children_are_those_of_the_directory(
            keys in proptest::collection::btree_set("[a./0]{1,6}", 0..60),
            directory in "|[a.0]{1,2}/",
        ) {
            let all: BTreeMap<_, _> = keys.into_iter().map(|key| (key, ())).collect();
            let is_child = |key: &&String| {
                let name = key.strip_prefix(&*directory);
                name.is_some_and(|name| !name.trim_end_matches('/').contains('/') && !name.contains("//"))
            };
            let expected: Vec<_> = all.keys().filter(is_child).collect();
            let found: Vec<_> = children(&all, &directory).map(|(key, ())| key).collect();
            prop_assert_eq!(found, expected);
        }
    }

    #[test]
    fn a_record_leads_to_a_name() {
        for key in ["", "/", "..", "../up", "a/../../up", "a//b", "a\0", " a"] {
            let record = record(&state(key, None, Posix::default(), 1)).unwrap();
            assert!(parse(&record).is_none(), "{key:?}");
        }
    }
}
