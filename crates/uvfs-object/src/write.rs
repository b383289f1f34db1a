//! Changes of contents and attributes.
//!
//! A program's changes go to a draft (`draft.rs`), which `put.rs` brings to the store.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Instant, SystemTime};

use futures_util::future::OptionFuture;
use rustix::fs::{Timespec, Timestamps, UTIME_NOW, UTIME_OMIT};
use tokio::sync::Mutex;
use uvfs_io::ops;
use uvfs_server::fs::*;

use crate::draft::{self, Draft};
use crate::fs::{ObjectFs, Open};
use crate::object::{Fetch, Object};
use crate::posix::Posix;
use crate::put::{Writing, conflict};
use crate::tree::Known;

/// A change of attributes.
const NO_BYTES: Range<u64> = 0..0;
/// Bytes that are taken over from a version at a time.
const RUN: u64 = 4 << 20;

/// Brings the first bytes of a version into the cache, and uses each part while it is sure to be there.
pub(crate) async fn bring(
    fetch: &Fetch,
    object: &Arc<Object>,
    len: u64,
    part: impl Fn(Range<u64>) -> Result<()>,
) -> Result<()> {
    let mut at = 0;
    while at < len {
        let end = len.min(at + RUN);
        let ahead = end..len.min(end + 8 * RUN);
        let _pinned = object.have(fetch, at..end, ahead).await?;
        part(at..end)?;
        at = end;
    }
    Ok(())
}

/// Takes over the first bytes of a version into a draft.
pub(crate) async fn take_over(
    fetch: Fetch,
    object: Arc<Object>,
    draft: Arc<Draft>,
    len: u64,
) -> Result<()> {
    let contents = draft.contents()?;
    let copy =
        |part: Range<u64>| (fetch.cache).with_room(|| object.copy_to(&contents.file, part.clone()));
    bring(&fetch, &object, len, copy).await
}

/// Sets the modification time of a draft: to this one, or to now. That of its last change becomes now.
fn set_modified(draft: &Draft, time: Option<(i64, u32)>) -> Result<()> {
    let timespec = |tv_sec, tv_nsec| Timespec { tv_sec, tv_nsec };
    let times = Timestamps {
        last_access: timespec(0, UTIME_OMIT),
        last_modification: match time {
            Some((seconds, nanos)) => timespec(seconds, nanos.into()),
            None => timespec(0, UTIME_NOW),
        },
    };
    Ok(rustix::fs::futimens(&draft.contents()?.file, &times)?)
}

/// Brings a whole version into the cache, because it is open and loses its name. What can't be had is ESTALE for its readers.
pub(crate) async fn complete(fetch: Fetch, object: Arc<Object>) -> Result<()> {
    let whole = bring(&fetch, &object, object.version.size, |_| Ok(()));
    if let Err(error) = whole.await {
        let key = &object.key;
        tracing::warn!(key, "{error}: it loses its name, and is not cached whole");
    }
    Ok(())
}

/// Locks what may not be there.
pub(crate) async fn locked(lock: Option<&Mutex<()>>) -> Option<tokio::sync::MutexGuard<'_, ()>> {
    OptionFuture::from(lock.map(Mutex::lock)).await
}

/// Whether two threads are there, and are of two processes.
fn is_of_another_process(thread: u32, other: u32) -> bool {
    let process = |thread: u32| {
        let status = std::fs::read_to_string(format!("/proc/{thread}/status")).ok()?;
        let line = status.lines().find_map(|line| line.strip_prefix("Tgid:"))?;
        line.trim().parse::<u32>().ok()
    };
    match (process(thread), process(other)) {
        (Some(one), Some(two)) => one != two,
        _ => false,
    }
}

/// Counts as a program that writes a file.
pub(crate) struct Writer<'a> {
    fs: &'a ObjectFs,
    known: &'a Known,
}

impl<'a> Writer<'a> {
    pub(crate) fn new(fs: &'a ObjectFs, known: &'a Known) -> Self {
        known.state().writers += 1;
        Self { fs, known }
    }

    /// Whether the file is open for writing, too.
    fn is_one_of_several(&self) -> bool {
        self.known.state().writers > 1
    }
}

impl Drop for Writer<'_> {
    fn drop(&mut self) {
        self.fs.end_write(self.known);
    }
}

impl ObjectFs {
    /// EROFS unless programs may change files.
    pub(crate) fn writing(&self) -> Result<&Arc<Writing>> {
        Ok(self.writing.as_ref().ok_or(Errno::ROFS)?)
    }

    /// The draft of a file that is open for writing. A new one takes over the first `keep` bytes.
    pub(crate) async fn draft(
        &self,
        cx: &Context,
        known: &Arc<Known>,
        keep: u64,
    ) -> Result<Arc<Draft>> {
        if let Some(draft) = known.state().draft.clone() {
            return Ok(draft);
        }
        let _one = known.making.lock().await;
        let (mut begun, object) = {
            let mut state = known.state();
            debug_assert!(state.writers > 0);
            if let Some(draft) = state.draft.clone() {
                return Ok(draft);
            }
            let version = state.version.clone().ok_or(Errno::ISDIR)?;
            let keep = keep.min(version.size);
            let object = match keep {
                0 => None,
                _ => Some((self.object(known, &mut state)?, keep)),
            };
            let mut begun = draft::state(&known.key(), Some(version), state.posix, 0);
            begun.removed = state.removed;
            (begun, object)
        };
        begun.node = Arc::downgrade(known);
        let writing = self.writing()?;
        let draft = writing.drafts.begin(begun)?;
        if let Some((object, keep)) = object {
            let fetch = self.fetch.clone();
            let taken = self.ask(cx, take_over(fetch, object, draft.clone(), keep));
            taken.await.inspect_err(|_| draft.discard())?;
            let had = self.attr(known);
            set_modified(&draft, Some((had.mtime.cast_signed(), had.mtimensec)))?;
        }
        let _still = writing.moving.read().await;
        let mut state = known.state();
        let named = if state.removed {
            // It lost its name meanwhile.
            draft.state().removed = true;
            draft.discard();
            Ok(true)
        } else {
            let version = state.version.clone();
            (writing.drafts).rename(&draft, &known.key(), version, None)
        };
        // Another writer changed the store, and then a program of this mount made the file anew.
        let is_taken = matches!(&named, Err(error) if *error == Errno::EXIST);
        if !is_taken {
            named?;
        }
        state.draft = Some(draft.clone());
        drop(state);
        self.tree.save_again(known);
        if is_taken {
            writing.overtaken(&draft)?;
        }
        Ok(draft)
    }

    /// Waits until what was written to a file is where the mount promises it: as of a close(2), or of an fsync(2).
    pub(crate) async fn store_draft(&self, cx: &Context, known: &Known, fsync: bool) -> Result<()> {
        let Some(draft) = known.state().draft.clone() else {
            return Ok(());
        };
        let writing = self.writing()?.clone();
        draft.look(fsync)?;
        let is_streamed = draft.state().parts.is_streamed();
        // A child process closes what it inherited, before it does anything else. This close would end the upload.
        let writer = draft.writer.load(Ordering::Relaxed);
        if is_streamed && !fsync && is_of_another_process(cx.pid, writer) {
            return Ok(());
        }
        if writing.back && !fsync && !is_streamed {
            draft.want()?;
            writing.settle(&draft);
            return Ok(());
        }
        if writing.back && writing.local_fsync && !is_streamed {
            draft.want()?;
            return draft.sync().await;
        }
        let put = async move {
            writing.put(&draft).await?;
            let state = draft.state();
            match &state.overtaken {
                Some(key) => Err(conflict(key, &state.key)),
                None => Ok(()),
            }
        };
        self.ask(cx, put).await
    }

    /// A program ended writing a file.
    pub(crate) fn end_write(&self, known: &Known) {
        known.state().writers -= 1;
        self.rest(known);
    }

    /// A program has closed a file, or ended writing it.
    pub(crate) fn rest(&self, known: &Known) {
        let draft = {
            let state = known.state();
            state.rest();
            state.draft.clone().filter(|_| state.writers == 0)
        };
        if let (Some(draft), Ok(writing)) = (draft, self.writing()) {
            writing.let_go(&draft);
        }
    }

    pub(crate) async fn truncate(&self, cx: &Context, known: &Arc<Known>, size: u64) -> Result<()> {
        let draft = self.draft(cx, known, size).await?;
        let range = size..u64::MAX;
        draft.change(&range)?;
        draft.contents()?.file.set_len(size)?;
        draft.count()?;
        draft.change(&range)
    }

    pub(crate) async fn write_to(
        &self,
        cx: &Context,
        known: &Arc<Known>,
        how: &IoHow,
        data: &Payload,
    ) -> Result<usize> {
        let draft = self.draft(cx, known, u64::MAX).await?;
        // Programs of the kernel may know an older size than clients do: both append where the file ends now.
        let appends = how.flags.contains(OFlags::APPEND) && !how.from_cache;
        let _one = locked(appends.then_some(&known.making)).await;
        let offset = match appends {
            true => {
                // A later server writes the same data again, at the place that the earlier one noted.
                let end = match self.begun_before(cx) {
                    Some(end) => end,
                    None => draft.metadata()?.len(),
                };
                self.begins(cx, end);
                end
            }
            false => how.offset,
        };
        if how.kill_suidgid {
            self.kill_suidgid(known, &draft);
        }
        let writing = self.writing()?;
        let waits = || writing.back || draft.state().parts.is_behind();
        if self.fetch.cache.is_full_of_drafts() && waits() {
            let (writing, draft, patience) = (writing.clone(), draft.clone(), self.options.timeout);
            let wait = async move {
                if writing.back {
                    writing.wait_for_room(patience).await?;
                }
                writing.wait_for_upload(&draft, patience).await
            };
            self.ask(cx, wait).await?;
        }
        draft.writer.store(cx.pid, Ordering::Relaxed);
        let range = offset..offset.saturating_add(data.len() as u64);
        draft.change(&range)?;
        let written = self.write_all(&draft, offset, how, data).await;
        draft.change(&range)?;
        let written = written?;
        draft.count()?;
        if draft.wrote(&(offset..offset + written as u64)) && writing.sends_early() {
            writing.send_parts(&draft);
        }
        Ok(written)
    }

    /// Writes all that the disk takes. A page cache takes its pages for written unless it hears of an error.
    async fn write_all(
        &self,
        draft: &Draft,
        offset: u64,
        how: &IoHow,
        data: &Payload,
    ) -> Result<usize> {
        let contents = draft.contents()?;
        let (mut done, mut may_make_room) = (0, true);
        while done < data.len() {
            let (rest, at) = (data.slice(done..data.len()), offset + done as u64);
            match ops::write_at(&contents.data, &rest, at, 0).await {
                Ok(0) => break,
                Ok(more) => done += more,
                Err(Errno::NOSPC) if std::mem::take(&mut may_make_room) => {
                    self.fetch.cache.make_room();
                }
                Err(_) if done > 0 && !how.from_cache => break,
                Err(errno) => return Err(errno.into()),
            }
        }
        match done < data.len() && how.from_cache {
            true => Err(Errno::IO.into()),
            false => Ok(done),
        }
    }

    /// A client's write takes set-user-id and set-group-id away. For its own programs the kernel does.
    fn kill_suidgid(&self, known: &Known, draft: &Draft) {
        let changed = {
            let mode = &mut draft.state().posix.mode;
            let now = mode.map(|mode| mode & !0o6000);
            std::mem::replace(mode, now) != now
        };
        if changed && let Some(session) = self.session.get() {
            session.attributes_changed(known.node);
        }
    }

    pub(crate) async fn allocate(
        &self,
        cx: &Context,
        fh: Handle,
        range: (u64, u64),
        mode: FallocateFlags,
    ) -> Result<()> {
        let open = self.handle(fh)?;
        let draft = self.draft(cx, open.written()?, u64::MAX).await?;
        // Some modes move what lies behind the range.
        let changed = range.0..u64::MAX;
        draft.change(&changed)?;
        let contents = draft.contents()?;
        let done = ops::fallocate(&contents.data, mode.bits(), range.0, range.1).await;
        draft.count()?;
        draft.change(&changed)?;
        Ok(done?)
    }

    /// A descriptor was closed, or fsync(2) asks for it.
    pub(crate) async fn sync(&self, cx: &Context, fh: Handle, fsync: bool) -> Result<()> {
        let open = self.handle(fh)?;
        match &*open {
            Open::File { known, flags, .. } if flags.intersects(OFlags::RWMODE) => {
                self.store_draft(cx, known, fsync).await
            }
            _ => Ok(()),
        }
    }

    /// The store gets them at once, unless it has yet to get the directory.
    async fn set_directory(&self, cx: &Context, known: Arc<Known>, posix: Posix) -> Result<()> {
        let (writing, now) = (self.writing()?.clone(), self.attr(&known));
        let task = async move {
            let _still = writing.moving.read().await;
            let key = known.key();
            let made = writing.made(&key);
            let _order = locked(made.as_ref().map(|made| &made.order)).await;
            match made.as_ref().filter(|_| writing.is_new(&key)) {
                Some(made) => made.set_attributes(posix)?,
                None => writing.fetch.store.make_directory(&key, &posix).await?,
            }
            let mut state = known.state();
            (state.posix, state.asked) = (posix, Some(Instant::now()));
            state.marked = true;
            let mtime = (now.mtime.cast_signed(), now.mtimensec);
            state.written = Some([mtime, timespec(SystemTime::now())]);
            Ok(())
        };
        self.at_once(cx, task).await
    }

    pub(crate) async fn set(&self, cx: &Context, node: Node, set: &SetAttr) -> Result<()> {
        let (known, metadata) = (self.known(node)?, self.options.metadata);
        self.writing()?;
        let now = self.attr(&known);
        let mode = set.mode.map(|mode| mode.as_raw_mode() & 0o7777);
        let kills = set.kill_suidgid && metadata;
        let mode = mode.or(kills.then_some(now.mode & 0o1777));
        let mode = mode.filter(|mode| *mode != now.mode & 0o7777);
        let uid = set.uid.filter(|uid| *uid != now.uid);
        let gid = set.gid.filter(|gid| *gid != now.gid);
        let owners = mode.or(uid).or(gid).is_some();
        let refuse = |what: &str| {
            let why = format!("{:?}: {what}", known.key());
            Err(Error::new(Errno::PERM, why).level(tracing::Level::INFO))
        };
        if known.is_directory() {
            let posix = Posix {
                mode: mode.or(Some(now.mode & 0o7777)),
                uid: uid.or(Some(now.uid)),
                gid: gid.or(Some(now.gid)),
                ..Posix::default()
            };
            return match owners {
                true if !metadata => refuse("modes and owners are kept with -o metadata alone"),
                true if !self.fetch.store.keeps_directories() => {
                    refuse("this store keeps no modes and owners of directories")
                }
                true if known.node == ROOT => refuse("the root's are those of the options"),
                true => self.set_directory(cx, known, posix).await,
                // Its times are the mount's.
                false => Ok(()),
            };
        }
        if owners && !metadata {
            return refuse("modes and owners are kept with -o metadata alone");
        }
        let time = match set.mtime {
            Some(SetTime::At(seconds, nanos)) => {
                let same = (now.mtime.cast_signed(), now.mtimensec) == (seconds, nanos);
                Some((seconds, nanos)).filter(|_| !same)
            }
            _ => None,
        };
        // Without metadata the store does not keep it. Programs see it for as long as the kernel knows the file.
        let time = match time {
            Some(time) if !metadata => {
                let mut state = known.state();
                match &state.draft {
                    Some(draft) => set_modified(draft, Some(time))?,
                    None => state.written = Some([time, timespec(SystemTime::now())]),
                }
                None
            }
            time => time,
        };
        let touched = matches!(set.mtime, Some(SetTime::Now)) || time.is_some();
        let accessed = match set.atime {
            Some(SetTime::At(seconds, nanos)) => Some((seconds, nanos)),
            Some(SetTime::Now) => Some(timespec(SystemTime::now())),
            None => None,
        };
        let accessed = accessed.filter(|_| metadata);
        let writer = Writer::new(self, &known);
        if let Some(size) = set.size {
            self.truncate(cx, &known, size).await?;
        }
        if owners || touched || accessed.is_some() {
            let draft = self.draft(cx, &known, u64::MAX).await?;
            draft.change(&NO_BYTES)?;
            if metadata {
                let posix = &mut draft.state().posix;
                posix.mode = mode.or(posix.mode).or(Some(now.mode & 0o7777));
                posix.uid = uid.or(posix.uid).or(Some(now.uid));
                posix.gid = gid.or(posix.gid).or(Some(now.gid));
                posix.atime = accessed.or(posix.atime);
            }
            match touched {
                true => set_modified(&draft, time)?,
                false => draft.attributes_changed()?,
            }
            draft.change(&NO_BYTES)?;
        }
        match writer.is_one_of_several() {
            true => Ok(()),
            false => self.store_draft(cx, &known, false).await,
        }
    }
}
