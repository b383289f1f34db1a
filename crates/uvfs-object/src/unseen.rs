//! Writes that the server does not see.
//!
//! With `write=back` the data file of a draft may be a backing file: the kernel writes it by itself for programs that opened the file
//! for reading and writing. The server hears of OPEN, FLUSH, FSYNC and RELEASE, but not of writes, nor of stores through a
//! mapping. Those go on after RELEASE, and after the server's end. So:
//!
//! - The record of such a draft says that the store may not have its contents, from before the answer to the OPEN until no program
//!   can write the file any more. The kernel tells that by a lease ([`uvfs_sys::is_unwritten`]).
//! - FLUSH, FSYNC and RELEASE look at the size and the times of the file. If they moved, it has changed. If they never moved since
//!   the OPEN, it has not. A store to a page that a mapping wrote before does not move them, so once they moved, a put
//!   that began before the lease counts as one of older contents. Where the times don't tell, the next put compares the
//!   contents with those that it sent last.

use std::fs::{File, Metadata};
use std::io;
use std::os::fd::AsFd;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use uvfs_server::fs::*;

use crate::cache::{self, Cache};
use crate::draft::{Draft, State};
use crate::fs::{By, LARGE_FILE, ObjectFs, times};
use crate::put::Writing;
use crate::tree::{self, Known};
use crate::write::Writer;

/// Two changes that are nearer than this may get the same time, unless the kernel gives a change its own time when the last one was
/// looked at (Linux 6.13): its clock for files ticks at 100 Hz or faster.
const TICK: Duration = Duration::from_millis(20);
/// Pauses between looks at files that are closed and may still be mapped. RELEASE comes a little before the end of the open file.
const FIRST_PAUSE: Duration = Duration::from_millis(1);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);
/// Changes that have to get a time each, so that this counts as given: more than there are ticks meanwhile.
const CHANGES: u64 = 20;
/// Looks at such files before the server ends.
const LAST_LOOKS: usize = 8;
/// Contents that are waiting for the store are copied up to this size where the local disk has no clones.
const MOST_COPIED: u64 = 1 << 20;
/// No further file is written by the kernel unless the disk, and what the cache leaves to drafts, have this much room: the server
/// can't stop such writes. Other files go through a cache that is smaller than they are.
const LEAST_ROOM: u64 = 1 << 30;

/// The size and the times of a data file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Stamp {
    size: u64,
    times: [(i64, u32); 2],
}

impl Stamp {
    fn of(file: &Metadata) -> Self {
        Self {
            size: file.len(),
            times: times(file),
        }
    }

    /// Whether the last change is so long ago that the next one has another time, whatever the kernel.
    fn is_settled(&self) -> bool {
        let [_, (seconds, nanos)] = self.times;
        let since_epoch = u64::try_from(seconds).map(|seconds| Duration::new(seconds, nanos));
        let age = since_epoch.map(|time| SystemTime::now().duration_since(UNIX_EPOCH + time));
        age.is_ok_and(|age| age.is_ok_and(|age| age > TICK))
    }
}

/// How far it is known what the kernel wrote to a draft by itself.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Unseen {
    /// As of the last look. `None` if the next change may look the same.
    last: Option<Stamp>,
    /// It has not changed so far, and if it still looks the same, it has not.
    is_same: bool,
    /// Each change that follows a look has another time.
    is_fine: bool,
    /// A put has read it.
    is_read: bool,
    /// Counts opens. One that comes while [`Draft::end_unseen`] looks goes on with it.
    opens: u64,
    /// A program has closed it, or asked for it to be stored, since the kernel writes it. Then the next mount takes it as it is.
    pub(crate) is_closed: bool,
}

impl Unseen {
    /// Of a file that the kernel is about to write.
    fn new(file: &Metadata, host: Host) -> Self {
        let mut this = Self {
            last: None,
            is_same: true,
            is_fine: host.fine_times,
            opens: 0,
            is_read: false,
            is_closed: false,
        };
        this.note(Stamp::of(file));
        this
    }

    fn note(&mut self, now: Stamp) {
        self.last = Some(now).filter(|now| self.is_fine || now.is_settled());
    }

    /// Of a draft of an earlier mount, which knew no more.
    pub(crate) fn of_before(is_closed: bool) -> Self {
        Self {
            last: None,
            is_same: false,
            is_fine: false,
            opens: 0,
            is_read: true,
            is_closed,
        }
    }

    /// Whether the file has changed, as far as that shows.
    fn look(&mut self, file: &Metadata) -> bool {
        let now = Stamp::of(file);
        let has_changed = self.last.map_or(self.is_same, |last| last != now);
        self.note(now);
        self.is_same &= !has_changed;
        has_changed
    }
}

impl Draft {
    /// Lets the kernel write the data file by itself, from the answer to an OPEN on, for a further program if it does already.
    pub(crate) fn begin_unseen(&self, host: Host) -> Result<()> {
        // The RELEASE of a program that closed it before may be still to come.
        self.look(false)?;
        let mut state = self.state();
        state.parts.end();
        let before = state.unseen;
        let mut unseen = match before {
            Some(unseen) => unseen,
            None => Unseen::new(&self.metadata()?, host),
        };
        // `NUMBER.kept` has the contents that a program closed, until a program closes the file again.
        let is_apart = state.is_wanted() && state.is_dirty();
        if is_apart && !state.kept {
            self.keep(MOST_COPIED)?;
            state.kept = true;
        }
        unseen.is_closed &= !is_apart;
        unseen.opens += 1;
        state.unseen = Some(unseen);
        let noted = self.note(&state);
        noted.inspect_err(|_| state.unseen = before)
    }

    /// Notes that the kernel writes the data file by itself since an earlier server of the mount.
    pub(crate) fn go_on_unseen(&self) {
        let mut state = self.state();
        let is_closed = state.is_wanted();
        (state.unseen).get_or_insert_with(|| Unseen::of_before(is_closed));
    }

    /// Finds out whether a program has the data file mapped that an earlier server of the mount let the kernel write.
    pub(crate) fn find_unseen(&self) -> Result<()> {
        let is_file = self.state().is_file();
        // A file system without leases can't be asked, and has none.
        if self.back() && is_file && is_unwritten(&self.path()).is_ok_and(|is| !is) {
            self.go_on_unseen();
            self.note(&self.state())?;
        }
        Ok(())
    }

    /// Counts a change if the kernel has written the file by itself since the last look. With `any`, as of fsync(2), also if it may
    /// have.
    pub(crate) fn look(&self, any: bool) -> Result<()> {
        let is_seen = |state: &State| state.unseen.is_none() || state.removed;
        if is_seen(&self.state()) {
            return Ok(());
        }
        self.count()?;
        let file = self.metadata()?;
        let mut state = self.state();
        let Some(unseen) = &mut state.unseen else {
            return Ok(());
        };
        let (has_changed, may_have) = (unseen.look(&file), any && !unseen.is_same);
        match state.is_stored_or_wanted() {
            true if has_changed => state.change(),
            true if may_have => state.may_have_changed(),
            _ => {}
        }
        Ok(())
    }

    /// Notes that a put reads the file.
    pub(crate) fn is_read(&self) {
        if let Some(unseen) = &mut self.state().unseen {
            unseen.is_read = true;
        }
    }

    /// Ends what [`Draft::begin_unseen`] began, if no program can write the file any more.
    pub(crate) fn end_unseen(&self) -> Result<bool> {
        let opens = |state: &State| state.unseen.map(|unseen| unseen.opens);
        let before = opens(&self.state());
        if self.state().removed {
            self.state().unseen = None;
            return Ok(true);
        }
        if !self.is_unwritten()? {
            return Ok(false);
        }
        self.look(false)?;
        let mut state = self.state();
        if opens(&state) != before {
            return Ok(false);
        }
        if let Some(unseen) = state.unseen.take() {
            if !unseen.is_same && unseen.is_read && state.is_stored_or_wanted() {
                state.may_have_changed();
            }
            let kept = state.kept && state.is_wanted();
            state.kept &= !kept;
            self.note(&state)?;
            if kept {
                cache::remove_or_warn(&self.beside("kept"));
            }
        }
        Ok(true)
    }
}

/// Whether no program can write a file.
pub(crate) fn is_unwritten(path: &Path) -> io::Result<bool> {
    uvfs_sys::is_unwritten(File::open(path)?.as_fd())
}

/// The features of the cache's file system that decide which files the kernel may write by itself.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Host {
    /// It says who can write a file. Without that the kernel writes by requests.
    leases: bool,
    /// It copies files without their data.
    clones: bool,
    /// Each change that follows a look at a file has another time.
    fine_times: bool,
}

impl Host {
    /// Finds out by a file of the cache.
    pub(crate) fn of(cache: &Cache) -> Self {
        let [path, copy] = ["try", "try2"].map(|name| cache.root().join(name));
        let try_all = || {
            let mut this = Self::default();
            let mut how = File::options();
            let file = (how.read(true).write(true).create(true).truncate(true)).open(&path)?;
            file.set_len(1)?;
            let is_taken = !is_unwritten(&path)?;
            this.clones = rustix::fs::ioctl_ficlone(File::create(&copy)?, &file).is_ok();
            let mut last = times(&file.metadata()?);
            this.fine_times = true;
            for size in 1..=CHANGES {
                file.set_len(size)?;
                let now = times(&file.metadata()?);
                this.fine_times &= now != last;
                last = now;
            }
            drop(file);
            this.leases = is_taken && is_unwritten(&path)?;
            Ok(this)
        };
        let this = try_all().unwrap_or_else(|error: io::Error| {
            tracing::debug!(%error, "the cache has no leases: the kernel writes by requests");
            Self::default()
        });
        for path in [path, copy] {
            cache::remove_or_warn(&path);
        }
        this
    }
}

/// Whether the kernel may write a further file by itself.
pub(crate) fn has_room(cache: &Cache) -> bool {
    cache.room_for_drafts() >= LEAST_ROOM && cache::free(cache.root()) >= LEAST_ROOM
}

/// Whether an open is of the kind that the kernel writes by itself. A program may switch the other flags on and off, and the
/// backing file would keep them.
fn is_for_both(flags: OFlags) -> bool {
    flags & OFlags::ACCMODE == OFlags::RDWR && !is_around(flags)
}

/// Whether an open of a file that the kernel writes by itself goes by requests all the same.
fn is_around(flags: OFlags) -> bool {
    flags.intersects(OFlags::APPEND | OFlags::DIRECT)
}

impl ObjectFs {
    /// Begins the draft of a large file that the cache has whole, for an open for reading and writing, if that takes a clone alone.
    /// It lasts for as long as what this gives, or the open file.
    pub(crate) async fn prepare<'a>(
        &'a self,
        cx: &Context,
        known: &'a Arc<Known>,
        how: &OpenHow,
    ) -> Option<Writer<'a>> {
        let is_wanted = how.origin == Origin::Kernel && is_for_both(how.flags);
        let host = self.writing.as_ref().map(|writing| writing.host);
        let can = host.is_some_and(|host| host.leases && host.clones) && self.backs();
        if !is_wanted || !can || !has_room(&self.fetch.cache) {
            return None;
        }
        {
            let mut state = known.state();
            let size = state.version.as_ref().map_or(0, |version| version.size);
            if state.draft.is_some() || state.plain > 0 || size < LARGE_FILE {
                return None;
            }
            let object = self.object(known, &mut state);
            if !object.is_ok_and(|object| object.is_complete()) {
                return None;
            }
        }
        let writer = Writer::new(self, known);
        if let Err(error) = self.draft(cx, known, u64::MAX).await {
            tracing::debug!(%error, "the kernel writes by requests");
        }
        Some(writer)
    }

    /// Registers the data file of a draft with the kernel, for the first open of a file.
    pub(crate) fn back_draft(
        &self,
        known: &Known,
        state: &tree::State,
        flags: OFlags,
    ) -> Option<i32> {
        let writing = self.writing.as_ref()?;
        let draft = state.draft.as_ref()?;
        // A program may still have the file mapped. The kernel's pages of it would not have that program's stores.
        let is_mapped = draft.state().unseen.is_some() && !is_around(flags);
        let is_new = is_for_both(flags) && writing.host.leases && has_room(&self.fetch.cache);
        if !(is_mapped || is_new) || !self.backs() || !draft.may_be_backed() {
            return None;
        }
        let contents = draft.contents().ok()?;
        if let Err(error) = draft.begin_unseen(writing.host) {
            tracing::debug!(%error, "the kernel writes by requests");
            return None;
        }
        self.register(known.node, contents.file.as_fd())
    }

    /// Notes a further open of a file that the kernel writes by itself.
    pub(crate) fn back_again(&self, state: &tree::State, flags: OFlags) {
        if let (Some(writing), Some(draft)) = (&self.writing, &state.draft)
            && flags.intersects(OFlags::RWMODE)
            && let Err(error) = draft.begin_unseen(writing.host)
        {
            tracing::debug!(%error, "what was closed is not kept apart");
        }
    }

    /// How an open that was answered so reads and writes.
    pub(crate) fn opened(&self, fh: Handle, by: By, flags: OFlags) -> Opened {
        let mut opened = Opened::new(fh);
        opened.flags = match by {
            // The kernel takes no flag for its pages beside it.
            By::Backed(id) => {
                opened.backing = id;
                match self.writing.is_some() && is_around(flags) {
                    true => OpenFlags::PASSTHROUGH | OpenFlags::DIRECT_IO,
                    false => OpenFlags::PASSTHROUGH,
                }
            }
            By::Kernel | By::Client => OpenFlags::KEEP_CACHE,
        };
        opened
    }
}

impl Writing {
    /// Ends the draft of a file that the kernel wrote by itself and that no program has open any more, when no mapping of it is
    /// left.
    pub(crate) fn let_go(self: &Arc<Self>, draft: &Arc<Draft>) {
        if draft.state().unseen.is_none() {
            self.settle(draft);
        } else if !self.is_let_go(draft) {
            self.settle(draft);
            uvfs_sys::lock(&self.mapped).push(draft.clone());
            self.maps.notify_one();
        }
    }

    /// False if a program can still write the file.
    fn is_let_go(self: &Arc<Self>, draft: &Arc<Draft>) -> bool {
        let node = draft.state().node.upgrade();
        let is_open = node.is_some_and(|node| {
            let known = node.state();
            known.backing.is_some() || known.writers > 0
        });
        // The close of an open file comes here again.
        if is_open || draft.state().unseen.is_none() {
            return true;
        }
        let ended = draft.end_unseen().unwrap_or_else(|error| {
            let key = &draft.state().key;
            tracing::warn!("{error}: it is not known whether {key:?} is still written");
            false
        });
        if ended {
            self.settle(draft);
        }
        ended
    }

    /// Looks at files that are closed and may still be mapped, again and again.
    pub(crate) fn watch_mapped(self: &Arc<Self>) {
        let this = self.clone();
        self.fetch.runtime.spawn(async move {
            let mut pause = FIRST_PAUSE;
            loop {
                let came = this.maps.notified();
                if uvfs_sys::lock(&this.mapped).is_empty() {
                    came.await;
                    pause = FIRST_PAUSE;
                } else if tokio::time::timeout(pause, came).await.is_ok() {
                    pause = FIRST_PAUSE;
                }
                tokio::time::sleep(FIRST_PAUSE).await;
                this.look_at_mapped();
                pause = (2 * pause).min(LONGEST_PAUSE);
            }
        });
    }

    fn look_at_mapped(self: &Arc<Self>) {
        let mapped = std::mem::take(&mut *uvfs_sys::lock(&self.mapped));
        let still = mapped.into_iter().filter(|draft| !self.is_let_go(draft));
        let still: Vec<_> = still.collect();
        uvfs_sys::lock(&self.mapped).extend(still);
    }

    /// The same before the server ends.
    pub(crate) async fn look_a_last_time(self: &Arc<Self>) {
        let mut pause = FIRST_PAUSE;
        for _ in 0..LAST_LOOKS {
            self.look_at_mapped();
            if uvfs_sys::lock(&self.mapped).is_empty() {
                return;
            }
            tokio::time::sleep(pause).await;
            pause *= 2;
        }
        let left = uvfs_sys::lock(&self.mapped).len();
        tracing::warn!("{left} files are still mapped: the next mount puts what is stored to them");
    }
}
