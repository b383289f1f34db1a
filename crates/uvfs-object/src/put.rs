//! How drafts reach the store, and end.
//!
//! With `write=close` the call of a program waits for the put; with `write=back` a task puts the draft later. A draft whose file
//! no program writes any more becomes a version of the cache.

use std::collections::VecDeque;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, SystemTime};

use futures_util::future::OptionFuture;
use futures_util::{StreamExt, stream};
use tokio::sync::{Notify, OwnedSemaphorePermit, RwLock, Semaphore};
use uvfs_server::fs::*;

use crate::cache::Id;
use crate::draft::{self, Draft, Drafts};
use crate::fs::{REQUEST, split, times};
use crate::listing::{Listings, Now};
use crate::object::Fetch;
use crate::posix::Posix;
use crate::store::{NAME_MAX, Version, is_directory};
use crate::tree::{self, Known, Tree};
use crate::unseen::Host;
use crate::upload::{self, PART, PARTS, Removal, Stored, Tell, Upload, Words};
use crate::write::locked;

/// Puts of one draft that begin anew because the file was made shorter meanwhile.
const TRIES: usize = 5;
/// Pauses between puts of a draft that fail.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
const LONGEST_PAUSE: Duration = Duration::from_secs(60);
/// How long a change waits with others for the disk.
const COMMIT: Duration = Duration::from_secs(1);
/// How long it waits for the store. Many a file gets another name, or is removed, soon after it was closed.
const DELAY: Duration = Duration::from_secs(5);
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
    /// Drafts that a task puts when their time has come, in this order; and that there is one.
    pub(crate) soon: Mutex<VecDeque<(tokio::time::Instant, Arc<Draft>)>>,
    pub(crate) begun: Notify,
    /// Their time has come: a writer waits for room.
    pub(crate) hurry: Notify,
    /// The features of the cache's file system.
    pub(crate) host: Host,
    /// Drafts of files that are closed, and that a program may still have mapped; and that there is one.
    pub(crate) mapped: Mutex<Vec<Arc<Draft>>>,
    pub(crate) maps: Notify,
    /// Taken alone while a directory moves: its files' keys don't change under what puts, makes or removes them. Taken before
    /// [`Draft::order`].
    pub(crate) moving: RwLock<()>,
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
        let is_written = is_written || draft.state().unseen.is_some();
        match is_written {
            true => Ok(draft.state().is_wanted()),
            false => draft.want().map(|_| true),
        }
    }

    pub(crate) async fn put_in_order(&self, draft: &Arc<Draft>) -> Result<()> {
        self.put_as(draft, false).await
    }

    /// Puts a draft as it is, or only as a program `closed` it. The caller holds [`Draft::order`].
    async fn put_as(&self, draft: &Arc<Draft>, closed: bool) -> Result<()> {
        let put = self.put_open(draft, closed).await;
        let node = draft.state().node.upgrade();
        match node {
            Some(known) => known.state().rest(),
            None => draft.close(),
        }
        put
    }

    async fn put_open(&self, draft: &Arc<Draft>, closed: bool) -> Result<()> {
        let store = &self.fetch.store;
        // One of them may be a put of this draft.
        store.earlier_ended().await;
        for _ in 0..TRIES {
            draft.look(false)?;
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
            if before.parts.is_streamed() && upload.is_none() {
                return Err(self.lost(draft));
            }
            if let Some(sent) = before.sent.filter(|_| before.is_unsure) {
                let contents = draft.contents()?;
                let print = move || upload::print(&contents.file).ok();
                let now = self.fetch.runtime.spawn_blocking(print).await;
                if now.is_ok_and(|now| now == Some(sent)) {
                    return draft.unchanged(&before);
                }
            }
            if before.print.is_some() && self.arrived(draft, &before).await? {
                continue;
            }
            // An upload that has begun takes permits for its parts.
            let under_way = match upload {
                Some(_) => 0,
                None => draft.metadata()?.len().min(PARTS as u64 * PART),
            };
            let permits = (under_way.div_ceil(REQUEST) as usize).clamp(1, self.permits);
            let permits = self.fetch.permits.acquire_many(permits as u32);
            let _permits = OptionFuture::from(upload.is_none().then_some(permits)).await;
            let words = self.words(draft, &before)?;
            let (key, replaces) = (&before.key, before.replaces.as_ref());
            // A program that does not wait for its put may change the file before the answer comes.
            let tell = |print| draft.about_to_put(print);
            let tell: Option<Tell<'_>> = match self.notes_prints() {
                true => Some(&tell),
                false => None,
            };
            let contents = draft.contents()?;
            draft.is_read();
            draft.state().sent = None;
            let put = store.put(key, &contents.file, replaces, words, upload, tell);
            match put.await {
                Ok(Some(stored)) => return self.stored(draft, &before, stored),
                Ok(None) if before.parts.is_streamed() => return Err(self.lost(draft)),
                Err(error) if before.parts.is_streamed() => {
                    self.lost(draft);
                    return Err(error);
                }
                Ok(None) => match self.refused(draft, &before).await {
                    Ok(false) => {}
                    Ok(true) => return Ok(()),
                    // Another writer changes it again and again.
                    Err(error) if error == Errno::STALE => {}
                    Err(error) => return Err(error),
                },
                Err(error) if error == Errno::AGAIN => {}
                Err(error) => return Err(error),
            }
        }
        let why = format!("object {:?} changed during each put", draft.state().key);
        Err(Error::new(Errno::IO, why))
    }

    /// Gives a file up whose upload failed or was refused, and which is larger than the cache.
    fn lost(&self, draft: &Arc<Draft>) -> Error {
        let key = draft.state().key.clone();
        match draft.remove_instead() {
            true => {
                self.changed(&key, Now::Gone);
                self.tree.removed(&key);
            }
            false => self.removed(&key, Some(draft)),
        }
        let why =
            format!("object {key:?} is larger than the cache, and its upload failed: it is lost");
        Error::new(Errno::IO, why)
    }

    /// Whether the hash of what a put sends is noted first: the program, or the next server, may have changed the file before it is
    /// known whether the store has that.
    fn notes_prints(&self) -> bool {
        self.back || self.tree.session.get().is_some()
    }

    /// Whether the store has what an earlier put sent, whose answer did not come, as another version than the draft is to take the
    /// place of. This is found out before the next put notes another hash: with that one lost, too, the version would be taken for
    /// another writer's.
    async fn arrived(&self, draft: &Draft, before: &draft::State) -> Result<bool> {
        let (store, key) = (&self.fetch.store, &before.key);
        let facts = store.stat(key).await?;
        let Some(version) = facts.and_then(|facts| facts.version) else {
            return Ok(false);
        };
        let is_known = before.replaces.as_ref().is_some_and(|had| had.is(&version));
        let arrived = !is_known && self.is_own(draft, before, &version).await?;
        if arrived {
            draft.take_place_of(version)?;
        }
        Ok(arrived)
    }

    /// Whether a version is what a put of this draft has left, without an answer.
    async fn is_own(
        &self,
        draft: &Draft,
        before: &draft::State,
        version: &Version,
    ) -> Result<bool> {
        let (store, key) = (&self.fetch.store, &before.key);
        Ok(store.has_print(key, version, before.prints()).await?
            || before.print.is_some()
                && (store.is_cut_off(key, version, &draft.contents()?.file)).await?)
    }

    /// Finds out why the store refused a put. True if it has the draft.
    async fn refused(&self, draft: &Arc<Draft>, before: &draft::State) -> Result<bool> {
        let (store, key) = (&self.fetch.store, &before.key);
        match store.stat(key).await?.map(|facts| facts.version) {
            // Gone: nothing is overwritten.
            None => {
                self.drafts.rename(draft, key, None, None)?;
            }
            // An earlier attempt arrived, and its answer got lost.
            Some(Some(version)) if store.equals(key, &version, &draft.contents()?.file).await? => {
                let stored = Stored {
                    version,
                    sums: Vec::new(),
                    print: None,
                };
                self.stored(draft, before, stored)?;
                return Ok(true);
            }
            Some(Some(version)) if self.is_own(draft, before, &version).await? => {
                draft.take_place_of(version)?;
            }
            // Another writer has put another version.
            Some(_) => {
                self.overtaken(draft)?;
            }
        }
        Ok(false)
    }

    /// Gives a draft a name beside its own, because another file has that one.
    pub(crate) fn overtaken(&self, draft: &Arc<Draft>) -> Result<()> {
        let key = draft.state().key.clone();
        self.move_beside(draft, "conflict")?;
        self.fetch.store.counters.conflict();
        let mut state = draft.state();
        tracing::warn!("{}", conflict(&key, &state.key));
        state.overtaken.get_or_insert(key);
        Ok(())
    }

    /// Makes a directory, or removes a name.
    async fn make_or_remove(&self, draft: &Draft, before: &draft::State) -> Result<()> {
        let (store, key) = (&self.fetch.store, &before.key);
        match before.gone {
            false => {
                store.make_directory(key, &before.posix).await?;
                self.changed(key, Now::Directory);
            }
            true if is_directory(key) && self.drafts.any_below(key) => {
                let why = format!("{key:?} is removed when the names in it are");
                return Err(Error::new(Errno::BUSY, why));
            }
            true => {
                self.keep_parent(key).await?;
                match self.remove_as_noted(key, before).await? {
                    // Another writer's version stays.
                    Removal::Refused => {
                        tracing::info!(key, "another writer has changed it: it is not removed");
                        self.listings.forget(split(key).0);
                    }
                    Removal::Done | Removal::Gone => self.changed(key, Now::Gone),
                }
            }
        }
        draft.done(before)
    }

    /// Removes the version that a record names, or the one that a put of this mount made of it without an answer.
    async fn remove_as_noted(&self, key: &str, before: &draft::State) -> Result<Removal> {
        let store = &self.fetch.store;
        let Some(version) = &before.replaces else {
            store.remove(key).await?;
            return Ok(Removal::Done);
        };
        let removal = store.remove_version(key, version).await?;
        if removal != Removal::Refused || before.print.is_none() {
            return Ok(removal);
        }
        match store.stat(key).await?.and_then(|facts| facts.version) {
            None => Ok(Removal::Gone),
            Some(now) if store.has_print(key, &now, before.prints()).await? => {
                store.remove_version(key, &now).await
            }
            Some(_) => Ok(Removal::Refused),
        }
    }

    /// Makes the directories that lead to a name, and that the store does not have yet: while it has not, nothing is in them.
    pub(crate) async fn make_parents(&self, key: &str) -> Result<()> {
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
    pub(crate) async fn put_below(&self, directory: &str) -> Result<()> {
        // The deepest first.
        for (_, draft) in self.drafts.below(directory).into_iter().rev() {
            self.put_now(&draft).await?;
        }
        Ok(())
    }

    pub(crate) async fn put_now(&self, draft: &Arc<Draft>) -> Result<()> {
        let order = draft.order.lock().await;
        self.put_in_order(draft).await?;
        drop(order);
        self.finish(draft);
        Ok(())
    }

    /// Notes a name that the store is to get or to lose, in the place of the draft that had it, and has a task tell the store.
    pub(crate) fn later(
        self: &Arc<Self>,
        state: draft::State,
        over: Option<&Arc<Draft>>,
    ) -> Result<()> {
        let draft = self.drafts.begin(state)?;
        let inserted = self.drafts.insert(&draft, over);
        inserted.inspect_err(|_| draft.discard())?;
        self.settle(&draft);
        Ok(())
    }

    /// Waits until the store has some of the drafts that fill the cache. Files that programs have open only end with the disk.
    pub(crate) async fn wait_for_room(&self, patience: Duration) -> Result<()> {
        let why = "the cache is full of what the store does not take (cache_size=)";
        let late = Error::new(Errno::NOSPC, why);
        self.wait_while_full(|| self.drafts.waiting() > 0, patience, late)
            .await
    }

    /// Waits until the upload of a file that fills the cache has got on.
    pub(crate) async fn wait_for_upload(&self, draft: &Draft, patience: Duration) -> Result<()> {
        let late = Error::new(Errno::IO, "the store takes no part of the file");
        self.wait_while_full(|| draft.state().parts.is_behind(), patience, late)
            .await
    }

    /// Waits while drafts fill the cache and may end: for so long, and then fails.
    async fn wait_while_full(
        &self,
        may_end: impl Fn() -> bool,
        patience: Duration,
        late: Error,
    ) -> Result<()> {
        let cache = &self.fetch.cache;
        let some = async {
            loop {
                let ended = cache.ended.notified();
                if !cache.is_full_of_drafts() || !may_end() {
                    return;
                }
                self.hurry.notify_one();
                ended.await;
            }
        };
        tokio::time::timeout(patience, some).await.map_err(|_| late)
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
    pub(crate) fn send_parts(self: &Arc<Self>, draft: &Arc<Draft>) {
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
                this.fetch.cache.ended.notify_waiters();
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
            let begun = store.begin_early(&key, replaces.as_ref(), memory, self.notes_prints());
            *upload = Some(begun.await?);
        }
        while let Some(upload) = upload
            && let Some(end) = draft.next_part()
        {
            store.send(upload, &draft.contents()?.file, end).await?;
            if self.fetch.cache.is_full_of_drafts() {
                draft.drop_sent()?;
            }
        }
        Ok(())
    }

    /// Finds out what the store has of a draft whose put may have arrived. The caller holds [`Draft::order`].
    pub(crate) async fn find_out(&self, draft: Option<&Arc<Draft>>) -> Result<()> {
        match draft {
            Some(draft) if draft.state().print.is_some() => self.put_in_order(draft).await,
            _ => Ok(()),
        }
    }

    /// Removes what a program had removed before it made the file anew that is given up.
    pub(crate) fn give_name_back(self: &Arc<Self>, draft: &Arc<Draft>) -> Result<()> {
        let removal = {
            let state = draft.state();
            let mut removal = draft::change_of_name(&state.key, state.replaces.clone(), true);
            (removal.print, removal.earlier) = (state.print, state.earlier);
            Some(removal).filter(|_| state.anew)
        };
        removal.map_or(Ok(()), |removal| self.later(removal, Some(draft)))
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
        let known = draft.state().node.upgrade();
        if let Some(known) = known {
            self.tree.moved(&known, &beside);
        }
        self.listings.forget(directory);
        self.drafts.rename(draft, &beside, None, None).map(drop)
    }

    /// The user metadata that a draft is put with.
    pub(crate) fn words(&self, draft: &Draft, state: &draft::State) -> Result<Option<Words>> {
        if !self.fetch.store.metadata {
            return Ok(None);
        }
        let [mtime, _] = times(&draft.metadata()?);
        let posix = Posix {
            mtime: Some(mtime),
            ..state.posix
        };
        Ok(Some(posix.words(FileType::RegularFile)))
    }

    /// Whether parts of files are sent while programs write them. An object's metadata goes with the first part, and has the time
    /// of the last write.
    pub(crate) fn sends_early(&self) -> bool {
        !self.fetch.store.metadata && self.fetch.store.takes_parts()
    }

    pub(crate) fn stored(
        &self,
        draft: &Draft,
        before: &draft::State,
        stored: Stored,
    ) -> Result<()> {
        self.changed(&before.key, Now::File(stored.version.clone()));
        draft.stored(before, stored)
    }

    /// Gives a draft up: it becomes no object, and parts that were sent are removed.
    pub(crate) fn discard(&self, key: &str, draft: &Arc<Draft>) {
        let node = {
            let mut state = draft.state();
            state.removed = true;
            state.node.upgrade()
        };
        self.drafts.take(key, draft);
        if let Some(node) = node {
            self.tree.save_again(&node);
        }
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
        if !self.back {
            self.fetch.runtime.spawn(self.clone().bring(draft.clone()));
            return;
        }
        let mut soon = uvfs_sys::lock(&self.soon);
        soon.push_back((tokio::time::Instant::now() + DELAY, draft.clone()));
        if soon.len() == 1 {
            self.begun.notify_one();
        }
    }

    /// Has tasks put drafts a while after [`Writing::settle`]. One task waits for all of them: a program that writes small files would
    /// wake a thread for each.
    pub(crate) fn bring_in_time(self: &Arc<Self>) {
        let this = self.clone();
        self.fetch.runtime.spawn(async move {
            loop {
                let first = uvfs_sys::lock(&this.soon).front().map(|(when, _)| *when);
                let Some(when) = first else {
                    this.begun.notified().await;
                    continue;
                };
                if !this.fetch.cache.is_full_of_drafts() {
                    let _ = tokio::time::timeout_at(when, this.hurry.notified()).await;
                }
                let (_, draft) = uvfs_sys::lock(&this.soon)
                    .pop_front()
                    .expect("one task takes them");
                tokio::spawn(this.clone().bring(draft));
            }
        });
    }

    /// Puts a draft, again and again until the store has it.
    async fn bring(self: Arc<Self>, draft: Arc<Draft>) {
        let mut pause = FIRST_PAUSE;
        loop {
            let turn = self.turns.acquire().await;
            let put = self.put_closed(&draft).await;
            drop(turn);
            draft.settling.store(false, Ordering::Release);
            if self.finish(&draft) || draft.settling.swap(true, Ordering::AcqRel) {
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
    }

    /// Ends a draft that the store has, and gives its file to the cache. False if the store has to get it first. The draft of a
    /// file that a program still writes ends later, with the last such program.
    pub(crate) fn finish(&self, draft: &Arc<Draft>) -> bool {
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
            let is_unseen = state.unseen.is_some();
            if state.ended {
                return true;
            }
            // A program closed it, although another may have it open.
            if state.is_dirty() && state.is_wanted() {
                return false;
            }
            if is_unseen || known.as_ref().is_some_and(is_used) {
                return true;
            }
            if state.is_dirty() {
                return false;
            }
            state.ended = true;
            self.drafts.take(&state.key, draft);
            if let Some(known) = &mut known {
                if state.has_changed() {
                    known.written = draft.metadata().ok().map(|file| times(&file));
                }
                known.has_stored(&state);
            }
            let taken = match &state.replaces {
                Some(version)
                    if !state.removed && state.is_file() && !state.parts.is_streamed() =>
                {
                    let cache = &self.fetch.cache;
                    cache.adopt(&draft.path(), &state.key, version, &state.sums)
                }
                _ => Ok(()),
            };
            if let Err(error) = taken {
                tracing::debug!(%error, key = state.key, "the cache does not take it over");
            }
            drop((known, state));
            // Until then the next server has the version from the draft's record.
            if let Some(node) = node {
                self.tree.save_again(&node);
            }
            draft.discard();
            draft.close();
            return true;
        }
    }

    /// Goes on with what an earlier mount did not put. What its end interrupted takes no other object's place.
    pub(crate) fn resume(self: &Arc<Self>) {
        for (key, draft) in self.drafts.below("") {
            let is_interrupted = !draft.state().is_wanted();
            if is_interrupted {
                {
                    let mut state = draft.state();
                    state.interrupted = Some((key.clone(), state.replaces.clone()));
                }
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
            match is_interrupted && !self.back {
                // As it does with `write=back`: a client that wrote the file may come back for it.
                true => {
                    let this = self.clone();
                    self.fetch.runtime.spawn(async move {
                        tokio::time::sleep(DELAY).await;
                        this.let_go(&draft);
                    });
                }
                false => self.let_go(&draft),
            }
        }
    }

    /// Goes on with what an earlier server of the same mount left, after all nodes are restored.
    pub(crate) fn go_on_with_drafts(self: &Arc<Self>) -> Result<()> {
        self.drafts.restored(&self.tree)?;
        for (_, draft) in self.drafts.below("") {
            draft.find_unseen()?;
            let node = draft.state().node.upgrade();
            let is_used = |node: &Arc<Known>| {
                let known = node.state();
                known.is_open() || known.writers > 0
            };
            match node.is_some_and(|node| is_used(&node)) {
                // It may lose its name.
                true => drop(draft.contents()?),
                false => self.let_go(&draft),
            }
        }
        Ok(())
    }

    /// The draft of this identity, under its name again if a program was writing it when an earlier mount ended, and if the store
    /// has not got it under the other name by now.
    ///
    /// # Errors
    /// ESTALE if there is none.
    pub(crate) async fn go_on(self: &Arc<Self>, identity: &Id) -> Result<(String, Arc<Draft>)> {
        let all = self.drafts.below("").into_iter().map(|(_, draft)| draft);
        let is_it = |draft: &Arc<Draft>| {
            draft.state().is_file() && draft.identity().is_some_and(|id| id == *identity)
        };
        let draft = all.into_iter().find(is_it).ok_or(Errno::STALE)?;
        let _still = self.moving.read().await;
        let _order = draft.order.lock().await;
        let Some((key, replaces)) = draft.state().interrupted.clone() else {
            let key = draft.state().key.clone();
            return Ok((key, draft.clone()));
        };
        let removal = self.drafts.removal(&key);
        let _removed = locked(removal.as_ref().map(|removal| &removal.order)).await;
        let replaces = {
            let mut state = draft.state();
            if state.ended || state.removed || state.replaces.is_some() || !state.is_dirty() {
                return Err(Errno::STALE.into());
            }
            state.instead_of(removal.as_deref());
            state.replaces.clone().or(replaces)
        };
        let beside = draft.state().key.clone();
        let named = self.drafts.rename(&draft, &key, replaces, removal.as_ref());
        if !named.is_ok_and(|named| named) {
            // A program has made another file there: what was written stays beside it.
            let mut state = draft.state();
            (state.replaces, state.print, state.anew) = (None, None, false);
            return Err(Errno::STALE.into());
        }
        if let Some(removal) = removal.as_ref() {
            self.discard(&key, removal);
        }
        draft.state().interrupted = None;
        let known = draft.state().node.upgrade();
        if let Some(known) = known {
            self.tree.moved(&known, &key);
        }
        for name in [&beside, &key] {
            self.listings.forget(split(name).0);
        }
        tracing::info!("a client goes on with {key:?}, which it was writing when the server ended");
        Ok((key, draft.clone()))
    }

    /// Waits until the store has all drafts, for as long as it takes one within `patience`. Says how many it does not have.
    pub(crate) async fn put_all(self: &Arc<Self>, patience: Duration) -> usize {
        self.look_a_last_time().await;
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
}

/// A program's file is an object beside the one that another writer has put.
pub(crate) fn conflict(key: &str, beside: &str) -> Error {
    let why = format!(
        "object {key:?} has changed in the store meanwhile: what was written is kept as {beside:?}"
    );
    Error::new(Errno::STALE, why).level(tracing::Level::INFO)
}
