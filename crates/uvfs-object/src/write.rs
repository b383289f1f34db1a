//! Changes of files and names.
//!
//! The server writes a program's changes to a draft (`draft.rs`). With `write=close` close(2), fsync(2) and changes without an
//! open file return when the store has the draft as an object. With `write=back` a task puts it later. A draft whose file no
//! program writes any more becomes a version of the cache.

use std::collections::{BTreeMap, HashMap};
use std::ffi::CStr;
use std::ops::Range;
use std::sync::atomic::Ordering;
use std::sync::{Arc, MutexGuard};
use std::time::{Duration, Instant, SystemTime};

use futures_util::future::OptionFuture;
use futures_util::{StreamExt, TryStreamExt, stream};
use rustix::fs::{Timespec, Timestamps, UTIME_NOW, UTIME_OMIT};
use tokio::sync::{Mutex, OwnedSemaphorePermit, RwLock, Semaphore};
use uvfs_io::ops;
use uvfs_server::fs::*;

use crate::draft::{self, Draft, Drafts};
use crate::fs::{ObjectFs, Open, REQUEST, child, split, times};
use crate::listing::{Listing, Listings, Now};
use crate::object::{Fetch, Object};
use crate::posix::Posix;
use crate::store::{Facts, NAME_MAX, Version, is_directory};
use crate::tree::{self, Known, Tree};
use crate::upload::{PART, PARTS, Stored, Tell, Upload, Words};

/// Puts of one draft that begin anew because the file was made shorter meanwhile.
const TRIES: usize = 5;
/// Pauses between puts of a draft that fail.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
const LONGEST_PAUSE: Duration = Duration::from_secs(60);
/// How long a change waits with others, for the disk and for the store.
const COMMIT: Duration = Duration::from_secs(1);
/// A change of attributes.
const NO_BYTES: Range<u64> = 0..0;
/// Bytes that are taken over from a version at a time.
const RUN: u64 = 4 << 20;
/// Characters of a file's name that the name of its conflict keeps, at most.
const KEPT_NAME: usize = NAME_MAX - 40;

/// The parts of a mount that changes files, shared by its handlers and the tasks that put drafts.
pub(crate) struct Writing {
    pub(crate) fetch: Fetch,
    pub(crate) tree: Arc<Tree>,
    pub(crate) listings: Arc<Listings>,
    pub(crate) drafts: Drafts,
    /// As many as [`Fetch::permits`] has.
    pub(crate) permits: usize,
    /// Programs' changes wait for the local disk alone; fsync(2) does if the other is set as well.
    pub(crate) back: bool,
    pub(crate) local_fsync: bool,
    /// Changes that tasks bring to the store at a time.
    pub(crate) turns: Semaphore,
    /// Taken alone while a directory moves: its files' keys don't change under what puts, makes or removes them. Taken before
    /// [`Draft::order`].
    pub(crate) moving: RwLock<()>,
}

/// What is at a key.
pub(crate) enum There {
    Draft(Arc<Draft>),
    /// The store said so.
    Facts(Facts),
}

impl There {
    fn is_directory(&self) -> bool {
        matches!(self, Self::Facts(facts) if facts.version.is_none())
    }

    fn draft(&self) -> Option<&Arc<Draft>> {
        match self {
            Self::Draft(draft) => Some(draft),
            Self::Facts(_) => None,
        }
    }

    /// What the store has there.
    fn version(&self) -> Option<Version> {
        match self {
            Self::Draft(draft) => draft.state().replaces.clone(),
            Self::Facts(facts) => facts.version.clone(),
        }
    }
}

impl Writing {
    /// Puts a draft if the store has other contents.
    pub(crate) async fn put(&self, draft: &Arc<Draft>) -> Result<()> {
        let _still = self.moving.read().await;
        let _order = draft.order.lock().await;
        self.put_in_order(draft).await
    }

    /// Puts a draft as a program closed it, and leaves one alone that a program is writing.
    async fn put_closed(&self, draft: &Arc<Draft>) -> Result<()> {
        let _still = self.moving.read().await;
        let _order = draft.order.lock().await;
        match self.want_closed(draft)? {
            true => self.put_as(draft, true).await,
            false => Ok(()),
        }
    }

    /// Whether a draft is as a program left it. If none writes it any more, it is: stores through a mapping come without a
    /// close(2).
    fn want_closed(&self, draft: &Draft) -> Result<bool> {
        let node = draft.state().node.upgrade();
        // No program opens the file meanwhile.
        let known = node.as_ref().map(|node| node.state());
        let is_written = known.is_some_and(|known| known.writers > 0);
        match is_written {
            true => Ok(draft.state().is_wanted()),
            false => draft.want().map(|_| true),
        }
    }

    async fn put_in_order(&self, draft: &Arc<Draft>) -> Result<()> {
        self.put_as(draft, false).await
    }

    /// Puts a draft as it is, or only as a program `closed` it. The caller holds [`Draft::order`].
    async fn put_as(&self, draft: &Arc<Draft>, closed: bool) -> Result<()> {
        let store = &self.fetch.store;
        for _ in 0..TRIES {
            let key = match draft.state() {
                state if state.is_dirty() => state.key.clone(),
                _ => return Ok(()),
            };
            self.make_parents(&key).await?;
            let upload = draft.take_upload().await;
            let before = match closed {
                true => draft.state().clone(),
                false => draft.want()?,
            };
            if !before.is_wanted() {
                // A program has begun to write it again.
                if let Some(upload) = upload {
                    store.abort(upload).await;
                }
                return Ok(());
            }
            if !before.is_file() {
                return self.make_or_remove(draft, &before).await;
            }
            let upload = match upload {
                Some(upload) if before.parts.changed => {
                    store.abort(upload).await;
                    None
                }
                upload => upload,
            };
            // An upload that has begun takes permits for its parts.
            let under_way = match upload {
                Some(_) => 0,
                None => draft.file.metadata()?.len().min(PARTS as u64 * PART),
            };
            let permits = (under_way.div_ceil(REQUEST) as usize).clamp(1, self.permits);
            let permits = self.fetch.permits.acquire_many(permits as u32);
            let _permits = OptionFuture::from(upload.is_none().then_some(permits)).await;
            let words = self.words(draft, &before)?;
            let (key, replaces) = (&before.key, before.replaces.as_ref());
            // A program that does not wait for its put may change the file before the answer comes.
            let tell = |print| draft.about_to_put(print);
            let tell: Option<Tell<'_>> = match self.back {
                true => Some(&tell),
                false => None,
            };
            let put = store.put(key, &draft.file, replaces, words, upload, tell);
            match put.await {
                Ok(Some(stored)) => return self.stored(draft, &before, stored),
                Ok(None) => match store.stat(key).await?.map(|facts| facts.version) {
                    // Gone: nothing is overwritten.
                    None => {
                        self.drafts.rename(draft, key, None)?;
                    }
                    // An earlier attempt arrived, and its answer got lost.
                    Some(Some(version)) if store.equals(key, &version, &draft.file).await? => {
                        let sums = Vec::new();
                        return self.stored(draft, &before, Stored { version, sums });
                    }
                    Some(Some(version)) if store.has_print(key, &version, before.print).await? => {
                        draft.take_place_of(version)?;
                    }
                    // Another writer has put another version.
                    Some(_) => {
                        self.move_beside(draft, "conflict")?;
                        store.counters.conflict();
                        let mut state = draft.state();
                        tracing::warn!("{}", conflict(key, &state.key));
                        state.overtaken.get_or_insert(before.key);
                    }
                },
                Err(error) if error == Errno::AGAIN => {}
                Err(error) => return Err(error),
            }
        }
        let why = format!("object {:?} changed during each put", draft.state().key);
        Err(Error::new(Errno::IO, why))
    }

    /// Makes a directory, or removes a name.
    async fn make_or_remove(&self, draft: &Draft, before: &draft::State) -> Result<()> {
        let (store, key) = (&self.fetch.store, &before.key);
        match before.gone {
            false => store.make_directory(key).await?,
            true if is_directory(key) && self.drafts.below(key).len() > 1 => {
                let why = format!("{key:?} is removed when the names in it are");
                return Err(Error::new(Errno::BUSY, why));
            }
            true => {
                // Another writer's version stays.
                let now = match before.replaces {
                    Some(_) => store.stat(key).await?.and_then(|facts| facts.version),
                    None => None,
                };
                let same = match (&now, &before.replaces) {
                    (Some(now), Some(version)) if now.is(version) => true,
                    (Some(now), Some(_)) => store.has_print(key, now, before.print).await?,
                    _ => true,
                };
                if same {
                    self.keep_parent(key).await?;
                    store.remove(key).await?;
                    self.changed(key, Now::Gone);
                } else {
                    tracing::info!(key, "another writer has changed it: it is not removed");
                    self.listings.forget(split(key).0);
                }
            }
        }
        draft.done(before)
    }

    /// Makes the directories that lead to a name, and that the store does not have yet: while it has not, nothing is in them.
    async fn make_parents(&self, key: &str) -> Result<()> {
        for (slash, _) in key.trim_end_matches('/').match_indices('/') {
            let directory = &key[..=slash];
            let Some(made) = self.drafts.get(directory) else {
                continue;
            };
            let _order = made.order.lock().await;
            let before = made.state().clone();
            if before.is_dirty() && !before.gone {
                self.make_or_remove(&made, &before).await?;
            }
        }
        Ok(())
    }

    /// Makes sure that the directory of a name is still there without it.
    async fn keep_parent(&self, key: &str) -> Result<()> {
        let (parent, _) = split(key.trim_end_matches('/'));
        match self.tree.at(parent) {
            // It gets a marker, or is to go.
            _ if self.drafts.get(parent).is_some() => Ok(()),
            Some(known) => self.keep_directory(&known).await,
            None => self.fetch.store.mark(parent).await,
        }
    }

    /// Brings what was changed below a directory to the store. The caller holds [`Writing::moving`].
    async fn put_below(&self, directory: &str) -> Result<()> {
        // The deepest first.
        for (_, draft) in self.drafts.below(directory).into_iter().rev() {
            self.put_now(&draft).await?;
        }
        Ok(())
    }

    async fn put_now(&self, draft: &Arc<Draft>) -> Result<()> {
        let order = draft.order.lock().await;
        self.put_in_order(draft).await?;
        drop(order);
        self.finish(draft);
        Ok(())
    }

    /// Notes a name that the store is to get or to lose, and has a task tell the store.
    fn later(self: &Arc<Self>, state: draft::State) -> Result<()> {
        let draft = self.drafts.begin(state)?;
        self.drafts.insert(draft.clone());
        self.settle(&draft);
        Ok(())
    }

    /// Waits until the store has some of the drafts that fill the cache. Files that programs have open only end with the disk.
    async fn wait_for_room(&self, patience: Duration) -> Result<()> {
        let cache = &self.fetch.cache;
        let some = async {
            loop {
                let ended = cache.ended.notified();
                if !cache.is_full_of_drafts() || self.drafts.waiting() == 0 {
                    return;
                }
                ended.await;
            }
        };
        let late = |_| {
            let why = "the cache is full of what the store does not take (cache_size=)";
            Error::new(Errno::NOSPC, why)
        };
        tokio::time::timeout(patience, some).await.map_err(late)
    }

    /// Has the disk get what was noted, within a second.
    pub(crate) fn commit_each_second(self: &Arc<Self>) {
        let cache = self.fetch.cache.clone();
        let runtime = self.fetch.runtime.clone();
        self.fetch.runtime.spawn(async move {
            loop {
                cache.noted.notified().await;
                tokio::time::sleep(COMMIT).await;
                let cache = cache.clone();
                match runtime.spawn_blocking(move || cache.sync_all()).await {
                    Ok(Ok(())) => {}
                    Ok(Err(error)) => tracing::error!(%error, "the cache's disk keeps nothing"),
                    Err(_) => return,
                }
            }
        });
    }

    /// Sends parts of a file while programs write it, until there is no next one.
    fn send_parts(self: &Arc<Self>, draft: &Arc<Draft>) {
        let memory = match draft.state().parts.is_begun() {
            true => None,
            false => match self.memory_of_upload() {
                Some(memory) => Some(memory),
                // The put sends all of it.
                None => return,
            },
        };
        let (this, draft) = (self.clone(), draft.clone());
        self.fetch.runtime.spawn(async move {
            let mut upload = draft.upload.lock().await;
            let sent = this.send_while_written(&draft, &mut upload, memory);
            if let Err(error) = sent.await {
                tracing::debug!(%error, "the put sends all parts");
                draft.state().parts.changed = true;
            }
        });
    }

    /// The permits of an upload that begins before its file is closed. It has them for as long as a program writes, so those of
    /// another upload are left to puts and reads.
    fn memory_of_upload(&self) -> Option<OwnedSemaphorePermit> {
        let each = PARTS * (PART / REQUEST) as usize;
        let permits = self.fetch.permits.clone();
        let mut both = permits.try_acquire_many_owned(2 * each as u32).ok()?;
        both.split(each)
    }

    async fn send_while_written(
        &self,
        draft: &Draft,
        upload: &mut Option<Upload>,
        memory: Option<OwnedSemaphorePermit>,
    ) -> Result<()> {
        let store = &self.fetch.store;
        if let Some(memory) = memory {
            let (key, replaces) = {
                let state = draft.state();
                (state.key.clone(), state.replaces.clone())
            };
            let begun = store.begin_early(&key, replaces.as_ref(), memory, self.back);
            *upload = Some(begun.await?);
        }
        while let Some(upload) = upload
            && let Some(end) = draft.next_part()
        {
            store.send(upload, &draft.file, end).await?;
        }
        Ok(())
    }

    /// Finds out what the store has of a draft whose put may have arrived. The caller holds [`Draft::order`].
    async fn find_out(&self, draft: Option<&Arc<Draft>>) -> Result<()> {
        match draft {
            Some(draft) if draft.state().print.is_some() => self.put_in_order(draft).await,
            _ => Ok(()),
        }
    }

    /// Removes what a program had removed before it made the file anew that is given up.
    fn give_name_back(self: &Arc<Self>, draft: &Draft) -> Result<()> {
        let removal = {
            let state = draft.state();
            let mut removal = draft::change_of_name(&state.key, state.replaces.clone(), true);
            removal.print = state.print;
            Some(removal).filter(|_| state.anew)
        };
        removal.map_or(Ok(()), |removal| self.later(removal))
    }

    /// Gives a draft the key of a new object, beside the one of its name.
    fn move_beside(&self, draft: &Arc<Draft>, why: &str) -> Result<()> {
        let key = draft.state().key.clone();
        let (directory, name) = split(&key);
        let mut kept = name.len().min(KEPT_NAME);
        while !name.is_char_boundary(kept) {
            kept -= 1;
        }
        let (seconds, nanos) = timespec(SystemTime::now());
        let beside = format!("{directory}{}.{why}-{seconds}.{nanos:09}", &name[..kept]);
        self.tree.renamed(&key, &beside);
        self.listings.forget(directory);
        self.drafts.rename(draft, &beside, None).map(drop)
    }

    /// The user metadata that a draft is put with.
    fn words(&self, draft: &Draft, state: &draft::State) -> Result<Option<Words>> {
        if !self.fetch.store.metadata {
            return Ok(None);
        }
        let [mtime, _] = times(&draft.file.metadata()?);
        let posix = Posix {
            mtime: Some(mtime),
            ..state.posix
        };
        Ok(Some(posix.words()))
    }

    /// Whether parts of files are sent while programs write them. An object's metadata goes with the first part, and has the time
    /// of the last write.
    fn sends_early(&self) -> bool {
        !self.fetch.store.metadata && self.fetch.store.takes_parts()
    }

    fn stored(&self, draft: &Draft, before: &draft::State, stored: Stored) -> Result<()> {
        self.changed(&before.key, Now::File(stored.version.clone()));
        draft.stored(before, stored.version, stored.sums)
    }

    /// What programs made of a name, if the store does not have that yet.
    fn changed_to(&self, directory: &str, key: &str) -> Option<Option<There>> {
        let mut gone = self.is_new(directory).then_some(None);
        for key in [key, &format!("{key}/")] {
            let Some(draft) = self.drafts.get(key) else {
                continue;
            };
            let (is_gone, is_file) = {
                let state = draft.state();
                (state.gone, state.is_file())
            };
            match is_file {
                _ if is_gone => gone = Some(None),
                true => return Some(Some(There::Draft(draft))),
                false => return Some(Some(There::Facts(Facts::default()))),
            }
        }
        gone
    }

    /// Notes what a name is from now on.
    fn changed(&self, key: &str, now: Now) {
        let (directory, name) = split(key.trim_end_matches('/'));
        self.listings.changed(directory, name, now);
        if let Some(known) = self.tree.at(directory) {
            known.state().written = Some([timespec(SystemTime::now()); 2]);
        }
    }

    /// Notes that no name leads to a file, or its draft, any more.
    fn removed(&self, key: &str, draft: Option<&Arc<Draft>>) {
        if let Some(draft) = draft {
            self.discard(key, draft);
        }
        self.changed(key, Now::Gone);
        self.tree.removed(key);
    }

    /// Gives a draft up: it becomes no object, and parts that were sent are removed.
    fn discard(&self, key: &str, draft: &Arc<Draft>) {
        draft.state().removed = true;
        self.drafts.take(key, draft);
        draft.discard();
        if draft.state().parts.is_begun() {
            let (store, draft) = (self.fetch.store.clone(), draft.clone());
            self.fetch.runtime.spawn(async move {
                if let Some(upload) = draft.take_upload().await {
                    store.abort(upload).await;
                }
            });
        }
    }

    /// Ends a draft whose file no program writes any more, or has a task put it first.
    pub(crate) fn settle(self: &Arc<Self>, draft: &Arc<Draft>) {
        if self.finish(draft) || draft.settling.swap(true, Ordering::AcqRel) {
            return;
        }
        let (this, draft) = (self.clone(), draft.clone());
        self.fetch.runtime.spawn(async move {
            if this.back {
                // Many a file gets another name, or is removed, soon after it was closed.
                tokio::time::sleep(COMMIT).await;
            }
            let mut pause = FIRST_PAUSE;
            loop {
                let turn = this.turns.acquire().await;
                let put = this.put_closed(&draft).await;
                drop(turn);
                draft.settling.store(false, Ordering::Release);
                if this.finish(&draft) || draft.settling.swap(true, Ordering::AcqRel) {
                    return;
                }
                match put {
                    Ok(()) => {}
                    Err(error) if error == Errno::BUSY => tokio::time::sleep(FIRST_PAUSE).await,
                    Err(error) => {
                        tracing::warn!("{error}: the next attempt is in {pause:?}");
                        tokio::time::sleep(pause).await;
                        pause = (2 * pause).min(LONGEST_PAUSE);
                    }
                }
            }
        });
    }

    /// Ends a draft that the store has, and gives its file to the cache. False if the store has to get it first. The draft of a
    /// file that a program still writes ends later, with the last such program.
    fn finish(&self, draft: &Arc<Draft>) -> bool {
        loop {
            let node = draft.state().node.upgrade();
            let mut known = node.as_ref().map(|node| node.state());
            let mut state = draft.state();
            // A lookup gave the draft a node meanwhile: that node's lock has to be taken first.
            let same = match (state.node.upgrade(), &node) {
                (Some(now), Some(node)) => Arc::ptr_eq(&now, node),
                (None, None) => true,
                _ => false,
            };
            if !same {
                continue;
            }
            // A draft without a name goes with the last open file.
            let is_used = |known: &MutexGuard<'_, tree::State>| {
                known.writers > 0 || state.removed && known.is_open()
            };
            if state.ended {
                return true;
            }
            // A program closed it, although another may have it open.
            if state.is_dirty() && state.is_wanted() {
                return false;
            }
            if known.as_ref().is_some_and(is_used) {
                return true;
            }
            if state.is_dirty() {
                return false;
            }
            state.ended = true;
            self.drafts.take(&state.key, draft);
            if let Some(known) = &mut known {
                known.draft = None;
                known.object = None;
                known.posix = state.posix;
                known.written = draft.file.metadata().ok().map(|file| times(&file));
                if !state.removed {
                    known.version.clone_from(&state.replaces);
                    known.asked = Some(Instant::now());
                }
            }
            let taken = match (draft.path(), &state.replaces) {
                (Some(path), Some(version)) if !state.removed && state.is_file() => {
                    let cache = &self.fetch.cache;
                    cache.adopt(&path, &state.key, version, &state.sums)
                }
                _ => Ok(()),
            };
            if let Err(error) = taken {
                tracing::debug!(%error, key = state.key, "the cache does not take it over");
            }
            draft.discard();
            return true;
        }
    }

    /// Goes on with what an earlier mount did not put. What its end interrupted takes no other object's place.
    pub(crate) fn resume(self: &Arc<Self>) {
        for (key, draft) in self.drafts.below("") {
            if !draft.state().is_wanted() {
                let moved = self.give_name_back(&draft);
                let moved = moved.and_then(|()| self.move_beside(&draft, "interrupted"));
                let beside = draft.state().key.clone();
                tracing::warn!(
                    "the server ended while {key:?} was written: what was there by then becomes {beside:?}"
                );
                if let Err(error) = moved {
                    tracing::error!("{error}: {beside:?}");
                }
            }
            self.settle(&draft);
        }
    }

    /// Waits until the store has all drafts, for as long as it takes one within `patience`. Says how many it does not have.
    pub(crate) async fn put_all(&self, patience: Duration) -> usize {
        loop {
            let drafts = self.drafts.below("");
            let before = drafts.len();
            let puts = drafts.into_iter().map(|(key, draft)| async move {
                let _turn = self.turns.acquire().await;
                match self.put_closed(&draft).await {
                    Ok(()) => {
                        self.finish(&draft);
                    }
                    // The next round has its turn.
                    Err(error) if error == Errno::BUSY => {}
                    Err(error) => tracing::error!("{error}: {key:?} is not in the store"),
                }
            });
            let mut puts = stream::iter(puts).buffer_unordered(self.permits);
            while let Ok(Some(())) = tokio::time::timeout(patience, puts.next()).await {}
            drop(puts);
            let left = self.drafts.len();
            if left == 0 || left >= before {
                return left;
            }
        }
    }

    /// Whether a directory was made, and the store does not have it yet.
    pub(crate) fn is_new(&self, directory: &str) -> bool {
        let made = self.drafts.get(directory);
        made.is_some_and(|made| {
            let state = made.state();
            !state.gone && state.is_dirty()
        })
    }

    /// Whether nothing is in a directory, as programs see it.
    async fn is_empty(&self, directory: &str, ttl: Duration) -> Result<bool> {
        let mut removals = 0;
        for (key, draft) in self.drafts.below(directory) {
            match draft.state().gone {
                true => removals += 1,
                false if key == directory => {}
                false => return Ok(false),
            }
        }
        if self.is_new(directory) {
            return Ok(true);
        }
        let begun = Instant::now();
        let list = match self.listings.fresh(directory, ttl) {
            Some(list) => list,
            None => {
                let most = if removals > 0 { usize::MAX } else { 0 };
                let Some(names) = self.fetch.store.list(directory, most).await? else {
                    return Ok(false);
                };
                Arc::new(Listing::new(directory, names, begun))
            }
        };
        Ok(self.as_changed(directory, list).names.is_empty())
    }

    /// A directory's listing as programs see it.
    pub(crate) fn as_changed(&self, directory: &str, list: Arc<Listing>) -> Arc<Listing> {
        let mut changes = BTreeMap::new();
        for (key, draft) in self.drafts.below(directory) {
            let name = &key[directory.len()..];
            let (name, end) = name.split_at(name.find('/').unwrap_or(name.len()));
            if name.is_empty() || end.len() > 1 {
                continue;
            }
            let now = match (draft.state().gone, end) {
                (true, _) => Now::Gone,
                (false, "") if list.has(name) => continue,
                (false, "") => Now::File(Version::default()),
                (false, _) => Now::Directory,
            };
            match now {
                // A file may have taken the directory's place, or the other way round.
                Now::Gone => drop(changes.entry(name.to_owned()).or_insert(now)),
                now => drop(changes.insert(name.to_owned(), now)),
            }
        }
        match changes.is_empty() {
            true => list,
            false => Arc::new(list.with(directory, changes)),
        }
    }

    /// Makes sure that a directory is still there when its last file is gone.
    async fn keep_directory(&self, directory: &Known) -> Result<()> {
        let key = directory.key();
        if directory.state().marked {
            return Ok(());
        }
        self.fetch.store.mark(&key).await?;
        directory.state().marked = true;
        Ok(())
    }
}

/// A program's file is an object beside the one that another writer has put.
fn conflict(key: &str, beside: &str) -> Error {
    let why = format!(
        "object {key:?} has changed in the store meanwhile: what was written is kept as {beside:?}"
    );
    Error::new(Errno::STALE, why).level(tracing::Level::INFO)
}

/// Brings the first bytes of a version into the cache, and uses each part while it is sure to be there.
async fn bring(
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
async fn take_over(fetch: Fetch, object: Arc<Object>, draft: Arc<Draft>, len: u64) -> Result<()> {
    let copy =
        |part: Range<u64>| (fetch.cache).with_room(|| object.copy_to(&draft.file, part.clone()));
    bring(&fetch, &object, len, copy).await
}

/// Sets the modification time of a draft: to this one, or to now.
fn set_modified(draft: &Draft, time: Option<(i64, u32)>) -> Result<()> {
    let timespec = |tv_sec, tv_nsec| Timespec { tv_sec, tv_nsec };
    let times = Timestamps {
        last_access: timespec(0, UTIME_OMIT),
        last_modification: match time {
            Some((seconds, nanos)) => timespec(seconds, nanos.into()),
            None => timespec(0, UTIME_NOW),
        },
    };
    Ok(rustix::fs::futimens(&draft.file, &times)?)
}

/// Brings a whole version into the cache, because it is open and loses its name. What can't be had is ESTALE for its readers.
async fn complete(fetch: Fetch, object: Arc<Object>) -> Result<()> {
    let whole = bring(&fetch, &object, object.version.size, |_| Ok(()));
    if let Err(error) = whole.await {
        let key = &object.key;
        tracing::warn!(key, "{error}: it loses its name, and is not cached whole");
    }
    Ok(())
}

/// Locks what may not be there.
async fn locked(lock: Option<&Mutex<()>>) -> Option<tokio::sync::MutexGuard<'_, ()>> {
    OptionFuture::from(lock.map(Mutex::lock)).await
}

/// Counts as a program that writes a file.
struct Writer<'a> {
    fs: &'a ObjectFs,
    known: &'a Known,
}

impl<'a> Writer<'a> {
    fn new(fs: &'a ObjectFs, known: &'a Known) -> Self {
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

    /// What is at a key below a directory, and when the server asked for that.
    pub(crate) async fn there(
        &self,
        cx: &Context,
        parent: &Known,
        key: &str,
    ) -> Result<(Option<There>, Instant)> {
        if let Some(writing) = &self.writing
            && let Some(there) = writing.changed_to(&parent.key(), key)
        {
            return Ok((there, Instant::now()));
        }
        if !self.fetch.store.takes(key) {
            return Err(Errno::NAMETOOLONG.into());
        }
        let (found, asked) = match self.listed(cx, parent, key).await? {
            Some(known) => known,
            None => {
                let asked = Instant::now();
                (self.find(cx, key, &format!("{key}/")).await?, asked)
            }
        };
        Ok((found.map(There::Facts), asked))
    }

    /// The same for the key of a name that a program changes.
    async fn named(
        &self,
        cx: &Context,
        parent: Node,
        name: &CStr,
    ) -> Result<(Arc<Known>, String, Option<There>)> {
        self.writing()?;
        let parent = self.known(parent)?;
        let key = new_key(&parent, name)?;
        let there = match self.lately(&key) {
            Some(facts) => Some(There::Facts(facts)),
            None => self.there(cx, &parent, &key).await?.0,
        };
        Ok((parent, key, there))
    }

    /// What the store said of a name within `ttl=`.
    fn lately(&self, key: &str) -> Option<Facts> {
        let known = [key.to_owned(), format!("{key}/")];
        let known = known.iter().find_map(|key| self.tree.at(key))?;
        let state = known.state();
        let asked = state.asked.filter(|_| state.draft.is_none())?;
        (asked.elapsed() < self.options.ttl).then(|| Facts {
            version: state.version.clone(),
            posix: state.posix,
        })
    }

    /// Has the store lose a removed name, before the name is made as something that does not take its place.
    async fn end_removal(&self, cx: &Context, key: String) -> Result<()> {
        let writing = self.writing()?.clone();
        let Some(removal) = writing.drafts.removal(&key) else {
            return Ok(());
        };
        let task = async move {
            let _still = writing.moving.read().await;
            match is_directory(&key) {
                true => writing.put_below(&key).await,
                false => writing.put_now(&removal).await,
            }
        };
        self.ask(cx, task).await
    }

    /// The draft of a file that is open for writing. A new one takes over the first `keep` bytes.
    async fn draft(&self, cx: &Context, known: &Arc<Known>, keep: u64) -> Result<Arc<Draft>> {
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
        // It lost its name meanwhile.
        if state.removed {
            draft.state().removed = true;
            draft.discard();
        } else {
            let version = state.version.clone();
            writing.drafts.rename(&draft, &known.key(), version)?;
        }
        state.draft = Some(draft.clone());
        Ok(draft)
    }

    /// Waits until what was written to a file is where the mount promises it: as of a close(2), or of an fsync(2).
    async fn store_draft(&self, cx: &Context, known: &Known, fsync: bool) -> Result<()> {
        let Some(draft) = known.state().draft.clone() else {
            return Ok(());
        };
        let writing = self.writing()?.clone();
        if writing.back && !fsync {
            draft.want()?;
            writing.settle(&draft);
            return Ok(());
        }
        if writing.back && writing.local_fsync {
            draft.want()?;
            return self.blocking(cx, move || draft.sync()).await;
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
        let draft = {
            let mut state = known.state();
            state.writers -= 1;
            state.draft.clone().filter(|_| state.writers == 0)
        };
        if let (Some(draft), Ok(writing)) = (draft, self.writing()) {
            writing.settle(&draft);
        }
    }

    pub(crate) async fn truncate(&self, cx: &Context, known: &Arc<Known>, size: u64) -> Result<()> {
        let draft = self.draft(cx, known, size).await?;
        let range = size..u64::MAX;
        draft.change(&range)?;
        draft.file.set_len(size)?;
        draft.count()?;
        draft.change(&range)
    }

    pub(crate) async fn write_to(
        &self,
        cx: &Context,
        known: &Arc<Known>,
        offset: u64,
        data: &Payload,
    ) -> Result<usize> {
        let draft = self.draft(cx, known, u64::MAX).await?;
        let writing = self.writing()?;
        if writing.back && self.fetch.cache.is_full_of_drafts() {
            let (writing, patience) = (writing.clone(), self.options.timeout);
            self.ask(cx, async move { writing.wait_for_room(patience).await })
                .await?;
        }
        let range = offset..offset.saturating_add(data.len() as u64);
        draft.change(&range)?;
        let mut written = ops::write_at(&draft.data, data, offset, 0).await;
        if written == Err(Errno::NOSPC) {
            self.fetch.cache.make_room();
            written = ops::write_at(&draft.data, data, offset, 0).await;
        }
        draft.change(&range)?;
        let written = written?;
        draft.count()?;
        if draft.wrote(&(offset..offset + written as u64)) && writing.sends_early() {
            writing.send_parts(&draft);
        }
        Ok(written)
    }

    pub(crate) async fn allocate(
        &self,
        cx: &Context,
        fh: Handle,
        range: (u64, u64),
        mode: FallocateFlags,
    ) -> Result<()> {
        let open = self.handle(fh)?;
        let Open::File { known, .. } = &*open else {
            return Err(Errno::BADF.into());
        };
        let draft = self.draft(cx, known, u64::MAX).await?;
        // Some modes move what lies behind the range.
        let changed = range.0..u64::MAX;
        draft.change(&changed)?;
        let done = ops::fallocate(&draft.data, mode.bits(), range.0, range.1).await;
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

    /// fsync(2) of a directory: the names in it are where the mount promises them.
    pub(crate) async fn sync_names(&self, cx: &Context, node: Node) -> Result<()> {
        let Some(writing) = self.writing.clone().filter(|writing| writing.back) else {
            return Ok(());
        };
        if writing.local_fsync {
            let cache = writing.fetch.cache.clone();
            return self.blocking(cx, move || cache.sync_all()).await;
        }
        let directory = self.known(node)?.key();
        let task = async move {
            let _still = writing.moving.read().await;
            writing.make_parents(&directory).await?;
            for (key, draft) in writing.drafts.below(&directory) {
                let name = key[directory.len()..].trim_end_matches('/');
                let (is_wanted, gone) = {
                    let state = draft.state();
                    (state.is_wanted(), state.gone)
                };
                match name.contains('/') || !is_wanted {
                    true => {}
                    // After what was in it.
                    false if gone && is_directory(&key) => writing.put_below(&key).await?,
                    false => writing.put_now(&draft).await?,
                }
            }
            Ok(())
        };
        self.ask(cx, task).await
    }

    pub(crate) async fn set(&self, cx: &Context, node: Node, set: &SetAttr) -> Result<()> {
        let (known, metadata) = (self.known(node)?, self.options.metadata);
        self.writing()?;
        let now = self.attr(&known);
        let mode = set.mode.map(|mode| mode.as_raw_mode() & 0o7777);
        let mode = mode.filter(|mode| *mode != now.mode & 0o7777);
        let uid = set.uid.filter(|uid| *uid != now.uid);
        let gid = set.gid.filter(|gid| *gid != now.gid);
        let owners = mode.or(uid).or(gid).is_some();
        let refuse = |what: &str| {
            let why = format!("{:?}: {what}", known.key());
            Err(Error::new(Errno::PERM, why).level(tracing::Level::INFO))
        };
        if known.is_directory() {
            return match owners {
                true => refuse("a directory's mode and owner are those of the mount's options"),
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
                    Some(draft) => {
                        set_modified(draft, Some(time))?;
                        draft.attributes_changed()?;
                    }
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
            if touched {
                set_modified(&draft, time)?;
            }
            draft.attributes_changed()?;
            draft.change(&NO_BYTES)?;
        }
        match writer.is_one_of_several() {
            true => Ok(()),
            false => self.store_draft(cx, &known, false).await,
        }
    }

    /// Begins a new file.
    pub(crate) async fn make_file(
        &self,
        cx: &Context,
        parent: Node,
        name: &CStr,
        posix: Posix,
    ) -> Result<Arc<Known>> {
        let (writing, parent) = (self.writing()?, self.known(parent)?);
        let directory = format!("{}/", new_key(&parent, name)?);
        self.end_removal(cx, directory).await?;
        let _still = writing.moving.read().await;
        let key = new_key(&parent, name)?;
        if !self.fetch.store.takes(&key) {
            return Err(Errno::NAMETOOLONG.into());
        }
        let posix = match self.options.metadata {
            true => posix,
            false => Posix::default(),
        };
        let removal = writing.drafts.removal(&key);
        let _order = locked(removal.as_ref().map(|removal| &removal.order)).await;
        let mut begun = draft::state(&key, None, posix, 1);
        if let Some(removal) = removal.as_ref() {
            let had = removal.state();
            begun.replaces = had.replaces.clone().filter(|_| had.is_dirty());
            begun.print = had.print;
            begun.anew = begun.replaces.is_some();
        }
        let draft = writing.drafts.begin(begun)?;
        writing.drafts.insert(draft.clone());
        // The store need not be told.
        if let Some(removal) = removal.as_ref() {
            writing.discard(&key, removal);
        }
        let known = self.tree.drafted(&key, &draft);
        Ok(known.expect("it has not ended"))
    }

    /// Makes a file with contents: one that is no regular one is an object whose metadata has the type.
    pub(crate) async fn make_node(
        &self,
        cx: &Context,
        parent: Node,
        name: &CStr,
        contents: &[u8],
        posix: Posix,
    ) -> Result<Arc<Known>> {
        if posix.special.is_some() && !self.options.metadata {
            let why = "links, FIFOs, sockets and devices are kept with -o metadata alone";
            return Err(Error::new(Errno::PERM, why).level(tracing::Level::INFO));
        }
        let known = self.make_file(cx, parent, name, posix).await?;
        let draft = known.state().draft.clone().expect("it has just begun");
        let writer = Writer::new(self, &known);
        std::os::unix::fs::FileExt::write_all_at(&draft.file, contents, 0)?;
        let stored = self.store_draft(cx, &known, false).await;
        if stored.is_err() {
            let (writing, key) = (self.writing()?, draft.state().key.clone());
            writing.give_name_back(&draft)?;
            writing.removed(&key, Some(&draft));
            self.tree.forget(known.node, 1);
        }
        drop(writer);
        stored.map(|()| known)
    }

    pub(crate) async fn make_directory(
        &self,
        cx: &Context,
        parent: Node,
        name: &CStr,
    ) -> Result<Arc<Known>> {
        let (writing, parent) = (self.writing()?.clone(), self.known(parent)?);
        let key = format!("{}/", new_key(&parent, name)?);
        if !self.fetch.store.takes(&key) {
            return Err(Errno::NAMETOOLONG.into());
        }
        self.end_removal(cx, key.trim_end_matches('/').to_owned())
            .await?;
        let (made, asked) = (key.clone(), Instant::now());
        let task = async move {
            let _still = writing.moving.read().await;
            match writing.back {
                true => {
                    let removal = writing.drafts.removal(&made);
                    let _order = locked(removal.as_ref().map(|removal| &removal.order)).await;
                    writing.later(draft::change_of_name(&made, None, false))?;
                    if let Some(removal) = removal.as_ref() {
                        writing.discard(&made, removal);
                    }
                }
                false => writing.fetch.store.make_directory(&made).await?,
            }
            writing.changed(&made, Now::Directory);
            Ok(())
        };
        self.ask(cx, task).await?;
        self.listings.begin(&key);
        let known = self.tree.looked_up(key, Facts::default(), asked);
        let mut state = known.state();
        state.marked = true;
        state.written = Some([timespec(SystemTime::now()); 2]);
        drop(state);
        Ok(known)
    }

    /// Removes a file's name.
    pub(crate) async fn remove_file(
        &self,
        cx: &Context,
        parent: Node,
        name: &CStr,
    ) -> Result<Unlinked> {
        let (parent, key, there) = self.named(cx, parent, name).await?;
        let there = there.ok_or(Errno::NOENT)?;
        if there.is_directory() {
            return Err(Errno::ISDIR.into());
        }
        let (writing, known) = (self.writing()?.clone(), self.tree.at(&key));
        let _no_draft = locked(known.as_ref().map(|known| &known.making)).await;
        // It may have begun meanwhile.
        let there = writing.drafts.file(&key).map_or(there, There::Draft);
        let (open, name) = (self.open_object(known.as_deref())?, key);
        let task = async move {
            let draft = there.draft();
            let _still = writing.moving.read().await;
            // A put that is under way would bring it back.
            let _order = locked(draft.map(|draft| &draft.order)).await;
            writing.find_out(draft).await?;
            if let Some(version) = there.version() {
                // Programs that have it open read on.
                if let Some(object) = open {
                    complete(writing.fetch.clone(), object).await?;
                }
                if writing.back {
                    let mut removal = draft::change_of_name(&name, Some(version), true);
                    removal.print = draft.and_then(|draft| draft.state().print);
                    writing.later(removal)?;
                } else {
                    writing.keep_directory(&parent).await?;
                    writing.fetch.store.remove(&name).await?;
                }
            }
            writing.removed(&name, draft);
            Ok(())
        };
        self.ask(cx, task).await?;
        Ok(Unlinked {
            node: known.as_ref().map(|known| known.node),
            last: true,
        })
    }

    /// The pieces of a version that is open.
    fn open_object(&self, known: Option<&Known>) -> Result<Option<Arc<Object>>> {
        let Some(known) = known else {
            return Ok(None);
        };
        let mut state = known.state();
        let open = state.is_open() && state.draft.is_none();
        open.then(|| self.object(known, &mut state)).transpose()
    }

    pub(crate) async fn remove_directory(
        &self,
        cx: &Context,
        parent: Node,
        name: &CStr,
    ) -> Result<Unlinked> {
        let (parent, key, there) = self.named(cx, parent, name).await?;
        match there {
            None => return Err(Errno::NOENT.into()),
            Some(there) if !there.is_directory() => return Err(Errno::NOTDIR.into()),
            Some(_) => {}
        }
        let key = format!("{key}/");
        let (writing, known) = (self.writing()?.clone(), self.tree.at(&key));
        let (name, kept, ttl) = (key.clone(), parent.clone(), self.options.ttl);
        let task = async move {
            let _still = writing.moving.read().await;
            let made = writing.drafts.get(&name);
            let _order = locked(made.as_ref().map(|made| &made.order)).await;
            if !writing.is_empty(&name, ttl).await? {
                return Err(Errno::NOTEMPTY.into());
            }
            if writing.back {
                if !writing.is_new(&name) {
                    writing.later(draft::change_of_name(&name, None, true))?;
                }
                if let Some(made) = made.as_ref() {
                    writing.discard(&name, made);
                }
            } else {
                writing.keep_directory(&kept).await?;
                writing.fetch.store.remove(&name).await?;
            }
            writing.listings.forget(&name);
            writing.removed(&name, None);
            Ok(())
        };
        self.ask(cx, task).await?;
        Ok(Unlinked {
            node: known.as_ref().map(|known| known.node),
            last: true,
        })
    }

    pub(crate) async fn change_name(
        &self,
        cx: &Context,
        (parent, name): (Node, &CStr),
        (new_parent, new_name): (Node, &CStr),
        flags: RenameFlags,
    ) -> Result<Unlinked> {
        if !(flags - RenameFlags::NOREPLACE).is_empty() {
            return Err(Errno::INVAL.into());
        }
        let (parent, from, there) = self.named(cx, parent, name).await?;
        let (new_parent, to, other) = self.named(cx, new_parent, new_name).await?;
        let there = there.ok_or(Errno::NOENT)?;
        if other.is_some() && flags.contains(RenameFlags::NOREPLACE) {
            return Err(Errno::EXIST.into());
        }
        if from == to {
            return Ok(Unlinked::default());
        }
        for key in [to.clone(), format!("{to}/")] {
            self.end_removal(cx, key).await?;
        }
        let directory = there.is_directory();
        match &other {
            Some(other) if other.is_directory() && !directory => return Err(Errno::ISDIR.into()),
            Some(other) if !other.is_directory() && directory => return Err(Errno::NOTDIR.into()),
            _ => {}
        }
        if directory {
            let replaced = match other {
                Some(_) => self.remove_directory(cx, new_parent.node, new_name).await?,
                None => Unlinked::default(),
            };
            let (from, to) = (format!("{from}/"), format!("{to}/"));
            self.move_directory(cx, &parent, from, to).await?;
            return Ok(replaced);
        }
        let writing = self.writing()?.clone();
        let (known, replaced) = (self.tree.at(&from), self.tree.at(&to));
        let _no_draft = locked(known.as_ref().map(|known| &known.making)).await;
        let _nor_there = locked(replaced.as_ref().map(|known| &known.making)).await;
        // Programs that have the other file open read on.
        if let Some(object) = self.open_object(replaced.as_deref())? {
            self.ask(cx, complete(self.fetch.clone(), object)).await?;
        }
        // They may have begun meanwhile.
        let there = writing.drafts.file(&from).map_or(there, There::Draft);
        let other = writing.drafts.file(&to).map(There::Draft).or(other);
        let task = async move {
            let moved = Moved {
                from: &from,
                to: &to,
                there,
                other,
            };
            let _still = writing.moving.read().await;
            writing.move_file(&parent, moved).await
        };
        self.ask(cx, task).await?;
        Ok(Unlinked {
            node: replaced.as_ref().map(|known| known.node),
            last: true,
        })
    }

    /// Renames a directory: all is copied, and then the originals are removed.
    async fn move_directory(
        &self,
        cx: &Context,
        parent: &Arc<Known>,
        from: String,
        to: String,
    ) -> Result<()> {
        let (writing, parent) = (self.writing()?.clone(), parent.clone());
        let requests = self.options.requests.max(1);
        let task = async move {
            let _alone = writing.moving.write().await;
            let store = &writing.fetch.store;
            writing.put_below(&from).await?;
            writing.put_below(&to).await?;
            writing.make_parents(&to).await?;
            let below = store.below(&from).await?;
            let moved = |key: &str| format!("{to}{}", &key[from.len()..]);
            let copies = below.clone().into_iter().map(|(key, size)| {
                let (to, store) = (moved(&key), store.clone());
                async move {
                    Ok::<_, Error>(match is_directory(&key) {
                        true => {
                            store.make_directory(&to).await?;
                            None
                        }
                        false => {
                            let version = store.copy(&key, &to, size).await?;
                            Some((key, version))
                        }
                    })
                }
            });
            let copies = stream::iter(copies).buffer_unordered(requests);
            let copies: Vec<_> = copies.try_collect().await?;
            let copies: HashMap<String, Version> = copies.into_iter().flatten().collect();
            store.make_directory(&to).await?;
            writing.keep_directory(&parent).await?;
            // The deepest first: the service for directories removes no full one.
            let mut gone: Vec<_> = below.into_iter().map(|(key, _)| key).collect();
            gone.sort_unstable_by(|one, two| two.cmp(one));
            let (directories, files): (Vec<_>, Vec<_>) =
                gone.into_iter().partition(|key| is_directory(key));
            let removed = files.into_iter().map(|key| {
                let store = store.clone();
                async move { store.remove(&key).await }
            });
            let removed = stream::iter(removed).buffer_unordered(requests);
            removed.try_collect::<()>().await?;
            for key in directories {
                store.remove(&key).await?;
            }
            store.remove(&from).await?;
            for (key, draft) in writing.drafts.below(&from) {
                let version = copies.get(&key).cloned();
                writing.drafts.rename(&draft, &moved(&key), version)?;
            }
            writing.tree.renamed(&from, &to);
            for (key, version) in copies {
                let to = moved(&key);
                writing.now_at(&key, &to, version);
            }
            if let Some(known) = writing.tree.at(&to) {
                let mut state = known.state();
                if let Some([_, changed]) = &mut state.written {
                    *changed = timespec(SystemTime::now());
                }
            }
            writing.listings.forget_below(&from);
            writing.listings.forget_below(&to);
            writing.changed(&from, Now::Gone);
            writing.changed(&to, Now::Directory);
            Ok(())
        };
        self.ask(cx, task).await
    }
}

/// A file that gets another name.
struct Moved<'a> {
    from: &'a str,
    to: &'a str,
    there: There,
    /// What has the name so far.
    other: Option<There>,
}

impl Writing {
    async fn move_file(&self, parent: &Known, moved: Moved<'_>) -> Result<()> {
        let Moved {
            from,
            to,
            there,
            other,
        } = moved;
        let store = &self.fetch.store;
        // What is written there has no name any more.
        let overwritten = other.as_ref().and_then(There::draft);
        let _end = locked(overwritten.map(|draft| &draft.order)).await;
        if let Some(draft) = overwritten
            && self.back
            && there.version().is_some()
            && draft.state().is_wanted()
        {
            // The store is about to have the copy there. What was closed is in it first, and so no task puts it later.
            self.put_in_order(draft).await?;
        }
        let replaces = other.as_ref().and_then(There::version);
        let end = |draft: Option<&Arc<Draft>>| {
            if let Some(draft) = draft {
                self.discard(to, draft);
            }
        };
        let version = match &there {
            There::Draft(draft) => {
                let _order = draft.order.lock().await;
                self.find_out(Some(draft)).await?;
                // The store has nothing of a new file, so only its draft gets the name.
                let is_stored = draft.state().replaces.is_some();
                if is_stored {
                    self.put_in_order(draft).await?;
                }
                let size = draft.file.metadata()?.len();
                let version = match is_stored {
                    true => {
                        self.make_parents(to).await?;
                        let version = store.copy(from, to, size).await?;
                        self.keep_directory(parent).await?;
                        store.remove(from).await?;
                        Some(version)
                    }
                    false => None,
                };
                self.tree.renamed(from, to);
                if !is_stored {
                    // A put of what it takes the place of may have arrived.
                    draft.state().print = overwritten.and_then(|draft| draft.state().print);
                }
                let replaces = version.clone().or(replaces);
                let is_draft = self.drafts.rename(draft, to, replaces)?;
                // Only now: a crash leaves one of the two.
                end(overwritten);
                if is_draft {
                    draft.attributes_changed()?;
                } else if let Some(version) = version.clone() {
                    // It has ended meanwhile, as a version of the cache.
                    self.now_at(from, to, version);
                }
                version
            }
            There::Facts(facts) => {
                let size = facts.version.as_ref().map_or(0, |version| version.size);
                self.make_parents(to).await?;
                let version = store.copy(from, to, size).await?;
                self.keep_directory(parent).await?;
                store.remove(from).await?;
                end(overwritten);
                self.tree.renamed(from, to);
                self.now_at(from, to, version.clone());
                Some(version)
            }
        };
        self.changed(from, Now::Gone);
        // Of a new file the store has nothing there yet.
        self.changed(to, version.map_or(Now::Gone, Now::File));
        Ok(())
    }

    /// An object was copied: its node and the pieces in the cache are the copy's.
    fn now_at(&self, from: &str, to: &str, version: Version) {
        let Some(known) = self.tree.at(to) else {
            return;
        };
        let mut state = known.state();
        if state.draft.is_some() {
            return;
        }
        state.object = None;
        // The copy has the time of now in the store.
        let mtime = state.mtime().unwrap_or_default();
        state.written = Some([mtime, timespec(SystemTime::now())]);
        if let Some(had) = state.version.replace(version) {
            let now = state.version.as_ref().expect("it was put there");
            self.fetch.cache.moved((from, &had), (to, now));
        }
        state.asked = Some(Instant::now());
    }
}

/// The key of a new name: what OpenDAL can't reach is no name for a file.
fn new_key(parent: &Known, name: &CStr) -> Result<String> {
    match child(parent, name) {
        Err(error) if error == Errno::NOENT => {
            let why = format!("{name:?}: a key has no white space at its ends, and is UTF-8");
            Err(Error::new(Errno::INVAL, why).level(tracing::Level::INFO))
        }
        key => key,
    }
}
