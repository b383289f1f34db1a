//! Changes of names: files and directories that are made, renamed and removed.

use std::collections::{BTreeMap, HashMap};
use std::ffi::CStr;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use futures_util::{StreamExt, TryStreamExt, stream};
use tokio::sync::{MutexGuard, RwLockReadGuard};
use uvfs_server::fs::*;
use uvfs_server::interrupt::{is_client, until_killed};

use crate::draft::{self, Draft};
use crate::fs::{ObjectFs, child, split};
use crate::listing::{Listing, Now};
use crate::object::Object;
use crate::posix::Posix;
use crate::put::Writing;
use crate::store::{Facts, Version, is_directory};
use crate::tree::Known;
use crate::upload::Removal;
use crate::write::{Writer, complete, locked};

/// The notes of requests that change names. That of a rename has removed what it replaces.
const BEGUN: u64 = 1;
const MOVING: u64 = 2;
/// Between the kernel's look at a name and the request that makes it is less time.
const LOOKED: Duration = Duration::from_secs(60);

/// The file or directory of a key.
pub(crate) enum There {
    Draft(Arc<Draft>),
    /// The store said so.
    Facts(Facts),
}

impl There {
    pub(crate) fn is_directory(&self) -> bool {
        matches!(self, Self::Facts(facts) if facts.version.is_none())
    }

    pub(crate) fn draft(&self) -> Option<&Arc<Draft>> {
        match self {
            Self::Draft(draft) => Some(draft),
            Self::Facts(_) => None,
        }
    }

    /// The version that the store has under the key.
    pub(crate) fn version(&self) -> Option<Version> {
        match self {
            Self::Draft(draft) => draft.state().replaces.clone(),
            Self::Facts(facts) => facts.version.clone(),
        }
    }
}

impl Writing {
    /// The file or directory that programs made of a name, or its absence, if the store does not have that yet.
    pub(crate) fn changed_to(&self, directory: &str, key: &str) -> Option<Option<There>> {
        let mut gone = false;
        for key in [key, &format!("{key}/")] {
            let Some(draft) = self.drafts.get(key) else {
                continue;
            };
            let (is_gone, is_file) = {
                let state = draft.state();
                (state.gone, state.is_file())
            };
            match is_file {
                _ if is_gone => gone = true,
                true => return Some(Some(There::Draft(draft))),
                false => return Some(Some(There::Facts(draft.directory()))),
            }
        }
        // Last: the store may get the directory, and then the file, meanwhile. In the other order both would be missed.
        (gone || self.is_new(directory)).then_some(None)
    }

    /// Notes what a name is from now on.
    pub(crate) fn changed(&self, key: &str, now: Now) {
        let (directory, name) = split(key.trim_end_matches('/'));
        self.listings.changed(directory, name, now);
        if let Some(known) = self.tree.at(directory) {
            known.state().written = Some([timespec(SystemTime::now()); 2]);
        }
    }

    /// Notes that no name leads to a file, or its draft, any more.
    pub(crate) fn removed(&self, key: &str, draft: Option<&Arc<Draft>>) {
        if let Some(draft) = draft {
            self.discard(key, draft);
        }
        self.changed(key, Now::Gone);
        self.tree.removed(key);
    }

    /// Whether a directory was made, and the store does not have it yet.
    pub(crate) fn is_new(&self, directory: &str) -> bool {
        self.made(directory).is_some()
    }

    /// The draft of such a directory.
    pub(crate) fn made(&self, directory: &str) -> Option<Arc<Draft>> {
        let made = self
            .drafts
            .get(directory)
            .filter(|_| is_directory(directory));
        made.filter(|made| {
            let state = made.state();
            !state.gone && state.is_dirty()
        })
    }

    /// Whether nothing is in a directory, as programs see it.
    pub(crate) async fn is_empty(&self, directory: &str, ttl: Duration) -> Result<bool> {
        let changes = self.changes(directory);
        let is_there =
            |(key, draft): &(String, Arc<Draft>)| key != directory && !draft.state().gone;
        if self.drafts.below(directory).iter().any(is_there) {
            return Ok(false);
        }
        if self.is_new(directory) {
            return Ok(true);
        }
        let begun = Instant::now();
        let list = match self.listings.fresh(directory, ttl) {
            Some(list) => list,
            None => {
                let most = if changes.is_empty() { 0 } else { usize::MAX };
                let Some(names) = self.fetch.store.list(directory, most).await? else {
                    return Ok(false);
                };
                Arc::new(Listing::new(directory, names, begun))
            }
        };
        Ok(list.as_changed(directory, changes).names.is_empty())
    }

    /// The changes in a directory that the store does not have yet. To be taken before its listing: a change that the store gets
    /// meanwhile is in both, not in neither.
    pub(crate) fn changes(&self, directory: &str) -> BTreeMap<String, Now> {
        let mut changes = BTreeMap::new();
        for (key, draft) in self.drafts.children(directory) {
            let name = &key[directory.len()..];
            let (name, end) = name.split_at(name.find('/').unwrap_or(name.len()));
            if name.is_empty() {
                continue;
            }
            let now = match (draft.state().gone, end) {
                (true, _) => Now::Gone,
                (false, "") => Now::File(Version::default()),
                (false, _) => Now::Directory,
            };
            match now {
                // A file may have taken the directory's place, or the other way round.
                Now::Gone => drop(changes.entry(name.to_owned()).or_insert(now)),
                now => drop(changes.insert(name.to_owned(), now)),
            }
        }
        changes
    }

    /// Makes sure that a directory is still there when its last file is gone.
    pub(crate) async fn keep_directory(&self, directory: &Known) -> Result<()> {
        let key = directory.key();
        if directory.state().marked {
            return Ok(());
        }
        self.fetch.store.mark(&key).await?;
        directory.state().marked = true;
        Ok(())
    }
}

impl ObjectFs {
    /// The file or directory of a key below a directory, and when the server asked for it.
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
    pub(crate) async fn named(
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

    /// The store's last answer for a name, if it is younger than `ttl=`.
    pub(crate) fn lately(&self, key: &str) -> Option<Facts> {
        let known = [key.to_owned(), format!("{key}/")];
        let known = known.iter().find_map(|key| self.tree.at(key))?;
        let state = known.state();
        let asked = state.asked.filter(|_| state.draft.is_none())?;
        (asked.elapsed() < self.options.ttl).then(|| Facts {
            version: state.version.clone(),
            posix: state.posix,
        })
    }

    /// Keeps other programs from changing names in these directories. Among its own programs the kernel does that, but not
    /// among clients.
    async fn alone_in<'a>(
        &self,
        cx: &Context,
        directories: impl IntoIterator<Item = Option<&'a Arc<Known>>>,
    ) -> Result<Vec<MutexGuard<'a, ()>>> {
        if !self.writing()?.back {
            // They change names that are looked up next.
            let ended = until_killed(cx, self.fetch.store.earlier_ended()).await;
            ended.ok_or(Errno::INTR)?;
        }
        let mut directories: Vec<_> = directories.into_iter().flatten().collect();
        directories.sort_unstable_by_key(|known| known.node);
        directories.dedup_by_key(|known| known.node);
        let mut all = Vec::with_capacity(directories.len());
        for known in directories {
            let lock = until_killed(cx, known.making.lock()).await;
            all.push(lock.ok_or(Errno::INTR)?);
            if is_client(cx) {
                known.state().by_client = Some(Instant::now());
            }
        }
        Ok(all)
    }

    /// EEXIST for a name that is taken. The kernel has looked itself, but a client may have made the name since.
    async fn is_free(&self, cx: &Context, parent: &Known, key: &str) -> Result<()> {
        let clients = {
            let state = parent.state();
            if state.removed {
                return Err(Errno::NOENT.into());
            }
            (state.by_client).is_some_and(|changed| changed.elapsed() < LOOKED)
        };
        let made = self.writing()?.changed_to(&parent.key(), key);
        let there = match made {
            None if clients => self.there(cx, parent, key).await?.0,
            made => made.flatten(),
        };
        match there {
            Some(_) => Err(Errno::EXIST.into()),
            None => Ok(()),
        }
    }

    /// The attributes of a new file that the store keeps.
    fn kept(&self, posix: Posix) -> Posix {
        match self.options.metadata {
            true => posix,
            false => Posix::default(),
        }
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
        self.at_once(cx, task).await
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
            for (key, draft) in writing.drafts.children(&directory) {
                let (is_wanted, gone) = {
                    let state = draft.state();
                    (state.is_wanted(), state.gone)
                };
                match is_wanted {
                    false => {}
                    // After what was in it.
                    true if gone && is_directory(&key) => writing.put_below(&key).await?,
                    true => writing.put_now(&draft).await?,
                }
            }
            Ok(())
        };
        self.at_once(cx, task).await
    }

    /// The key of a name that a file gets, and the lock under which its directory does not move. The caller is alone in that.
    async fn new_file<'a>(
        &self,
        cx: &Context,
        writing: &'a Writing,
        parent: &Known,
        name: &CStr,
    ) -> Result<(String, RwLockReadGuard<'a, ()>)> {
        let key = new_key(parent, name)?;
        self.is_free(cx, parent, &key).await?;
        self.end_removal(cx, format!("{key}/")).await?;
        let still = writing.moving.read().await;
        let key = new_key(parent, name)?;
        match self.fetch.store.takes(&key) {
            true => Ok((key, still)),
            false => Err(Errno::NAMETOOLONG.into()),
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
        let _alone = self.alone_in(cx, [Some(&parent)]).await?;
        if self.begun_before(cx).is_some()
            && let key = new_key(&parent, name)?
            && let Some(draft) = writing.drafts.file(&key)
            && let Some(known) = self.tree.drafted(&key, &draft)
        {
            return Ok(known);
        }
        let (key, _still) = self.new_file(cx, writing, &parent, name).await?;
        self.begins(cx, BEGUN);
        let removal = writing.drafts.removal(&key);
        let _order = locked(removal.as_ref().map(|removal| &removal.order)).await;
        let mut begun = draft::state(&key, None, self.kept(posix), 1);
        begun.instead_of(removal.as_deref());
        let draft = writing.drafts.begin(begun)?;
        // A program that has another file of this name open may have begun to write it.
        let inserted = writing.drafts.insert(&draft, removal.as_ref());
        inserted.inspect_err(|_| draft.discard())?;
        // The store need not be told.
        if let Some(removal) = removal.as_ref() {
            writing.discard(&key, removal);
        }
        let known = self.tree.drafted(&key, &draft);
        Ok(known.expect("it has not ended"))
    }

    /// Begins a file without a name (O_TMPFILE).
    pub(crate) fn make_nameless(&self, parent: Node, posix: Posix) -> Result<Arc<Known>> {
        let (writing, parent) = (self.writing()?, self.known(parent)?);
        let mut begun = draft::state(&parent.key(), None, self.kept(posix), 1);
        begun.removed = true;
        let draft = writing.drafts.begin(begun)?;
        // No name has a component of this length.
        let key = format!("{}{:0300}", parent.key(), draft.state().order);
        let known = self.tree.drafted(&key, &draft);
        self.tree.removed(&key);
        Ok(known.expect("it has not ended"))
    }

    /// Gives a file that was made without a name its name. Other hard links are refused as file systems without them do, so that
    /// programs take another way.
    pub(crate) async fn give_name(
        &self,
        cx: &Context,
        node: Node,
        parent: Node,
        name: &CStr,
    ) -> Result<Arc<Known>> {
        let (writing, known) = (self.writing()?, self.known(node)?);
        let parent = self.known(parent)?;
        if self.begun_before(cx).is_some() && *known.key() == *new_key(&parent, name)? {
            self.tree.remember(node)?;
            return Ok(known);
        }
        let draft = known.state().draft.clone();
        let draft = draft.filter(|draft| draft.is_nameless());
        let draft = draft.ok_or(Errno::PERM)?;
        let _alone = self.alone_in(cx, [Some(&parent)]).await?;
        let (key, _still) = self.new_file(cx, writing, &parent, name).await?;
        self.begins(cx, BEGUN);
        let removal = writing.drafts.removal(&key);
        let _order = locked(removal.as_ref().map(|removal| &removal.order)).await;
        let replaces = {
            let mut state = draft.state();
            state.instead_of(removal.as_deref());
            state.removed = false;
            state.replaces.clone()
        };
        let named = (writing.drafts).rename(&draft, &key, replaces, removal.as_ref());
        named.inspect_err(|_| draft.state().removed = true)?;
        if let Some(removal) = removal.as_ref() {
            writing.discard(&key, removal);
        }
        self.tree.moved(&known, &key);
        known.state().removed = false;
        self.tree.remember(node)?;
        Ok(known)
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
        std::os::unix::fs::FileExt::write_all_at(&draft.contents()?.file, contents, 0)?;
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
        posix: Posix,
    ) -> Result<Arc<Known>> {
        let (writing, parent) = (self.writing()?.clone(), self.known(parent)?);
        let _alone = self.alone_in(cx, [Some(&parent)]).await?;
        let name = new_key(&parent, name)?;
        let key = format!("{name}/");
        if !self.fetch.store.takes(&key) {
            return Err(Errno::NAMETOOLONG.into());
        }
        let is_made = self.begun_before(cx).is_some() && writing.is_new(&key);
        if !is_made {
            self.is_free(cx, &parent, &name).await?;
            self.end_removal(cx, name).await?;
        }
        self.begins(cx, BEGUN);
        let posix = match self.fetch.store.keeps_directories() {
            true => posix,
            false => Posix::default(),
        };
        let (made, asked) = (key.clone(), Instant::now());
        let task = async move {
            let _still = writing.moving.read().await;
            match writing.back {
                true if is_made => {}
                true => {
                    let removal = writing.drafts.removal(&made);
                    let _order = locked(removal.as_ref().map(|removal| &removal.order)).await;
                    let mut directory = draft::directory(&made, posix);
                    // The store may have the one that was removed.
                    directory.anew = removal.is_some();
                    writing.later(directory, removal.as_ref())?;
                    if let Some(removal) = removal.as_ref() {
                        writing.discard(&made, removal);
                    }
                }
                false => writing.fetch.store.make_directory(&made, &posix).await?,
            }
            writing.changed(&made, Now::Directory);
            Ok(())
        };
        self.at_once(cx, task).await?;
        self.listings.begin(&key);
        let facts = Facts {
            version: None,
            posix,
        };
        let known = self.tree.looked_up(key, facts, asked);
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
        let directory = self.known(parent)?;
        let _alone = self.alone_in(cx, [Some(&directory)]).await?;
        let (parent, key, there) = self.named(cx, parent, name).await?;
        if there.is_none() && self.begun_before(cx).is_some() {
            return Ok(self.removed_before(&key));
        }
        let there = there.ok_or(Errno::NOENT)?;
        if there.is_directory() {
            return Err(Errno::ISDIR.into());
        }
        self.begins(cx, BEGUN);
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
                    writing.later(removal, draft)?;
                } else {
                    writing.keep_directory(&parent).await?;
                    writing.fetch.store.remove(&name).await?;
                }
            }
            writing.removed(&name, draft);
            Ok(())
        };
        self.at_once(cx, task).await?;
        Ok(unlinked(known.as_deref()))
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

    /// The answer for a name that an earlier server has removed.
    fn removed_before(&self, key: &str) -> Unlinked {
        let known = self.tree.at(key);
        self.tree.removed(key);
        unlinked(known.as_deref())
    }

    pub(crate) async fn remove_directory(
        &self,
        cx: &Context,
        parent: Node,
        name: &CStr,
    ) -> Result<Unlinked> {
        let directory = self.known(parent)?;
        let removed = (self.tree).at(&format!("{}/", new_key(&directory, name)?));
        let both = [Some(&directory), removed.as_ref()];
        let _alone = self.alone_in(cx, both).await?;
        self.take_directory(cx, parent, name).await
    }

    /// The same for a caller that is alone in both.
    async fn take_directory(&self, cx: &Context, parent: Node, name: &CStr) -> Result<Unlinked> {
        let (parent, key, there) = self.named(cx, parent, name).await?;
        let key = format!("{key}/");
        match there {
            None if self.begun_before(cx).is_some() => return Ok(self.removed_before(&key)),
            None => return Err(Errno::NOENT.into()),
            Some(there) if !there.is_directory() => return Err(Errno::NOTDIR.into()),
            Some(_) => {}
        }
        self.begins(cx, BEGUN);
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
                let anew = made.as_ref().is_some_and(|made| made.state().anew);
                if anew || !writing.is_new(&name) {
                    let removal = draft::change_of_name(&name, None, true);
                    writing.later(removal, made.as_ref())?;
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
        self.at_once(cx, task).await?;
        Ok(unlinked(known.as_deref()))
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
        let directories = (self.known(parent)?, self.known(new_parent)?);
        let replaced = (self.tree).at(&format!("{}/", new_key(&directories.1, new_name)?));
        let all = [
            Some(&directories.0),
            Some(&directories.1),
            replaced.as_ref(),
        ];
        let _alone = self.alone_in(cx, all).await?;
        if directories.1.state().removed {
            return Err(Errno::NOENT.into());
        }
        let (parent, from, there) = self.named(cx, parent, name).await?;
        let (new_parent, to, other) = self.named(cx, new_parent, new_name).await?;
        let begun = self.begun_before(cx) == Some(MOVING);
        if there.is_none() && other.is_some() && begun {
            return self.renamed_before(cx, &from, &to).await;
        }
        let there = there.ok_or(Errno::NOENT)?;
        if other.is_some() && flags.contains(RenameFlags::NOREPLACE) && !begun {
            return Err(Errno::EXIST.into());
        }
        if from == to {
            return Ok(Unlinked::default());
        }
        for key in [to.clone(), format!("{to}/")] {
            self.end_removal(cx, key).await?;
        }
        let directory = there.is_directory();
        if directory && to.starts_with(&format!("{from}/")) {
            return Err(Errno::INVAL.into());
        }
        match &other {
            Some(other) if other.is_directory() && !directory => return Err(Errno::ISDIR.into()),
            Some(other) if !other.is_directory() && directory => return Err(Errno::NOTDIR.into()),
            _ => {}
        }
        if directory {
            let replaced = match other {
                // These are the copies of an earlier server's attempt, which goes on.
                Some(_) if begun => Unlinked::default(),
                Some(_) => self.take_directory(cx, new_parent.node, new_name).await?,
                None => Unlinked::default(),
            };
            let (from, to) = (format!("{from}/"), format!("{to}/"));
            self.begins(cx, MOVING);
            self.move_directory(cx, &parent, from, to).await?;
            return Ok(replaced);
        }
        self.begins(cx, MOVING);
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
                again: begun,
            };
            let _still = writing.moving.read().await;
            writing.move_file(&parent, moved).await
        };
        self.at_once(cx, task).await?;
        Ok(unlinked(replaced.as_deref()))
    }

    /// The answer for a name, or a directory, that an earlier server has given another name.
    async fn renamed_before(&self, cx: &Context, from: &str, to: &str) -> Result<Unlinked> {
        let writing = self.writing()?.clone();
        let (from, to) = (from.to_owned(), to.to_owned());
        let task = async move {
            let _alone = writing.moving.write().await;
            let now_at = |from: &str, to: &str, version| {
                let known = writing.tree.at(to);
                let had = known.and_then(|known| known.state().version.clone());
                if let (Some(had), Some(version)) = (had, version) {
                    writing.now_at((from, &had), (to, version));
                }
            };
            let mut replaced = None;
            if let Some(known) = writing.tree.at(&from).or_else(|| writing.tree.at(&to)) {
                replaced = writing.tree.lose_name(&to, &known);
                if *known.key() == *from {
                    writing.tree.renamed(&from, &to);
                }
                // The draft of the file that had the name.
                let draft = writing.drafts.file(&to);
                if let Some(draft) = draft.filter(|draft| !draft.is_of(&known)) {
                    let _order = draft.order.lock().await;
                    writing.discard(&to, &draft);
                }
                let facts = writing.fetch.store.stat(&to).await?;
                now_at(&from, &to, facts.and_then(|facts| facts.version));
            }
            let (from, to) = (format!("{from}/"), format!("{to}/"));
            if writing.tree.at(&from).is_some() {
                writing.tree.renamed(&from, &to);
                for (key, version) in writing.fetch.store.below(&to).await? {
                    now_at(&format!("{from}{}", &key[to.len()..]), &key, version);
                }
            }
            Ok(unlinked(replaced.as_deref()))
        };
        self.ask(cx, task).await
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
            let store = &writing.fetch.store;
            store.earlier_ended().await;
            let _alone = writing.moving.write().await;
            writing.put_below(&from).await?;
            writing.put_below(&to).await?;
            writing.make_parents(&to).await?;
            let below = store.below(&from).await?;
            let moved = |key: &str| format!("{to}{}", &key[from.len()..]);
            let copies = below.clone().into_iter().map(|(key, had)| {
                let (to, store) = (moved(&key), store.clone());
                async move {
                    Ok::<_, Error>(match had {
                        None => {
                            let had = store.facts(&key).await?.unwrap_or_default();
                            store.make_directory(&to, &had.posix).await?;
                            None
                        }
                        Some(had) => {
                            let version = store.copy(&key, &to, had.size).await?;
                            Some((key, had, version))
                        }
                    })
                }
            });
            let copies = stream::iter(copies).buffer_unordered(requests);
            let copies: Vec<_> = copies.try_collect().await?;
            if below.iter().all(|(key, _)| *key != from) {
                store.make_directory(&to, &Posix::default()).await?;
            }
            writing.keep_directory(&parent).await?;
            let removals = copies.into_iter().flatten().map(|(key, had, version)| {
                let store = store.clone();
                async move {
                    let removal = store.remove_version(&key, &had).await?;
                    Ok::<_, Error>((key, had, version, removal))
                }
            });
            let removals = stream::iter(removals).buffer_unordered(requests);
            let removals: Vec<_> = removals.try_collect().await?;
            let (mut copies, mut changed) = (HashMap::new(), Vec::new());
            for (key, had, version, removal) in removals {
                if removal == Removal::Done {
                    copies.insert(key, (had, version));
                    continue;
                }
                tracing::warn!(
                    "{key:?} changed while its directory was renamed: a new version stays there"
                );
                changed.push(key);
            }
            // The deepest first: the service for directories removes no full one.
            let directories = below.into_iter().filter(|(_, had)| had.is_none());
            let mut directories: Vec<_> = directories.collect();
            directories.sort_unstable_by(|(one, _), (two, _)| two.cmp(one));
            for (key, _) in directories {
                store.remove(&key).await?;
            }
            store.remove(&from).await?;
            for (key, draft) in writing.drafts.below(&from) {
                let version = copies.get(&key).map(|(_, version)| version.clone());
                writing.give_key(&draft, &moved(&key), version, None)?;
            }
            writing.tree.renamed(&from, &to);
            for (key, (had, version)) in copies {
                let to = moved(&key);
                writing.now_at((&key, &had), (&to, version));
            }
            for key in changed {
                writing.tree.outdated(&moved(&key));
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
    /// The file or directory that has the name so far.
    other: Option<There>,
    /// An earlier server may have done some of it.
    again: bool,
}

impl Writing {
    async fn move_file(&self, parent: &Known, moved: Moved<'_>) -> Result<()> {
        let Moved {
            from,
            to,
            there,
            other,
            again,
        } = moved;
        // A program may be writing the file that loses the name.
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
        let overwrites = other.as_ref().and_then(There::version);
        let end = |draft: Option<&Arc<Draft>>| {
            if let Some(draft) = draft {
                self.discard(to, draft);
            }
        };
        match &there {
            There::Draft(draft) => {
                let _order = draft.order.lock().await;
                let is_streamed = {
                    let state = draft.state();
                    state.parts.is_streamed() && state.is_dirty()
                };
                if is_streamed {
                    let why = format!(
                        "object {from:?} is larger than the cache: it keeps its name until it is closed"
                    );
                    return Err(Error::new(Errno::BUSY, why));
                }
                self.find_out(Some(draft)).await?;
                // The store has nothing of a new file, so only its draft gets the name.
                let is_stored = draft.state().replaces.is_some();
                let copy = match is_stored {
                    true => {
                        self.put_in_order(draft).await?;
                        let had = draft.state().replaces.clone().ok_or(Errno::STALE)?;
                        let to = (to, other.is_some());
                        let version = match again {
                            true => self.moved_before(from, to.0).await?,
                            false => None,
                        };
                        let version = match version {
                            Some(version) => version,
                            None => self.move_version(parent, (from, &had), to).await?,
                        };
                        Some((had, version))
                    }
                    false => None,
                };
                self.tree.renamed(from, to);
                if !is_stored {
                    // A put of what it takes the place of may have arrived.
                    draft.state().print = overwritten.and_then(|draft| draft.state().print);
                }
                let replaces = copy.as_ref().map(|(_, version)| version.clone());
                let replaces = replaces.or(overwrites);
                let is_draft = self.give_key(draft, to, replaces, overwritten)?;
                // Only now: a crash leaves one of the two.
                end(overwritten);
                if is_draft {
                    // A conflict has a name that a program gave it.
                    draft.state().overtaken = None;
                    draft.attributes_changed()?;
                } else if let Some((had, version)) = copy.clone() {
                    // It has ended meanwhile, as a version of the cache.
                    self.now_at((from, &had), (to, version));
                }
                // Of a new file the store has nothing there yet. It gets it only now: no put is under way.
                let version = copy.map(|(_, version)| version);
                self.changed(to, version.map_or(Now::Gone, Now::File));
            }
            There::Facts(facts) => {
                let had = facts.version.as_ref().ok_or(Errno::ISDIR)?;
                let version = self.move_version(parent, (from, had), (to, other.is_some()));
                let version = version.await?;
                end(overwritten);
                self.tree.renamed(from, to);
                self.now_at((from, had), (to, version.clone()));
                self.changed(to, Now::File(version));
            }
        }
        self.changed(from, Now::Gone);
        Ok(())
    }

    /// Gives a draft another key, in the place of the draft `over`. Another one that has it by now goes beside.
    fn give_key(
        &self,
        draft: &Arc<Draft>,
        key: &str,
        replaces: Option<Version>,
        over: Option<&Arc<Draft>>,
    ) -> Result<bool> {
        loop {
            match self.drafts.rename(draft, key, replaces.clone(), over) {
                Err(error) if error == Errno::EXIST => {
                    if let Some(third) = self.drafts.get(key) {
                        self.overtaken(&third)?;
                    }
                }
                done => return done,
            }
        }
    }

    /// The version that an earlier server has made of an object under another name, if it came to remove the original.
    async fn moved_before(&self, from: &str, to: &str) -> Result<Option<Version>> {
        let store = &self.fetch.store;
        match store.stat(from).await? {
            Some(_) => Ok(None),
            None => Ok(store.stat(to).await?.and_then(|facts| facts.version)),
        }
    }

    /// Copies an object and removes the original. The copy is the version `had`, because that is still there when it is removed.
    ///
    /// # Errors
    /// ESTALE if another writer puts another version meanwhile: the kernel looks the name up again, and goes on with that.
    async fn move_version(
        &self,
        parent: &Known,
        (from, had): (&str, &Version),
        (to, overwrites): (&str, bool),
    ) -> Result<Version> {
        let store = &self.fetch.store;
        self.make_parents(to).await?;
        let version = store.copy(from, to, had.size).await?;
        self.keep_directory(parent).await?;
        let removal = store.remove_version(from, had).await?;
        if removal == Removal::Done {
            return Ok(version);
        }
        self.listings.forget(split(from).0);
        self.listings.forget(split(to).0);
        if removal == Removal::Refused && !overwrites {
            store.remove_version(to, &version).await?;
        }
        let why = format!("object {from:?} changed while it was renamed");
        Err(Error::new(Errno::STALE, why).level(tracing::Level::INFO))
    }

    /// An object was copied: the node and the pieces in the cache of the version that it had are the copy's. A node of an older
    /// version stays what it is.
    fn now_at(&self, (from, had): (&str, &Version), (to, version): (&str, Version)) {
        let Some(known) = self.tree.at(to) else {
            return;
        };
        let mut state = known.state();
        if state.draft.is_some() {
            return;
        }
        state.object = None;
        if !state.version.as_ref().is_some_and(|known| known.is(had)) {
            drop(state);
            return self.tree.outdated(to);
        }
        self.fetch.cache.moved((from, had), (to, &version));
        // The copy has the time of now in the store.
        let mtime = state.mtime().unwrap_or_default();
        state.written = Some([mtime, timespec(SystemTime::now())]);
        state.version = Some(version);
        state.asked = Some(Instant::now());
        drop(state);
        self.tree.save_again(&known);
    }
}

/// The answer that a node lost its name. There are no others: a file has one.
fn unlinked(known: Option<&Known>) -> Unlinked {
    Unlinked {
        node: known.map(|known| known.node),
        last: true,
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
