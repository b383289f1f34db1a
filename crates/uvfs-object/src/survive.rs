//! A mount of a store outlives its server: docs/survive.md.
//!
//! The next server finds the changes of programs in drafts, whose journal is on the local disk. This file saves the rest: the key
//! and the version of each node, the number of its draft, and how the kernel has a file open.

use std::fs::File;
use std::io;
use std::net::TcpStream;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use rustix::net::sockopt::socket_protocol;
use rustix::net::{getpeername, ipproto};
use uvfs_server::fs::*;

use crate::draft::{self, Draft};
use crate::fs::{By, ObjectFs, Open};
use crate::journal::NUMBERS;
use crate::map;
use crate::object::Fetch;
use crate::posix::Posix;
use crate::tree::{Known, State};

/// Flags of a node.
const REMOVED: u32 = 1;
const MARKED: u32 = 2;
const VERSION: u32 = 4;
const DRAFT: u32 = 8;
/// Stands for a value that is not there.
const NONE: u32 = u32::MAX;

/// Appends what the next server finds a node by.
pub(crate) fn save(known: &Known, to: &mut Vec<u8>) -> io::Result<()> {
    let key = known.key();
    let state = known.state();
    let flag = |is, flag| if is { flag } else { 0 };
    let has_no_name = |draft: &Arc<Draft>| draft.state().removed;
    let removed = state.removed || state.draft.as_ref().is_some_and(has_no_name);
    let mut flags = flag(removed, REMOVED)
        | flag(state.marked, MARKED)
        | flag(state.version.is_some(), VERSION);
    let (mut number, mut fd, mut id) = (0, -1, Default::default());
    if let Some(draft) = &state.draft {
        flags |= DRAFT;
        number = draft.number();
        // No name leads to it, or soon none does.
        if let Some((open, identity)) = draft.held() {
            (fd, id) = (open, identity);
        }
    }
    to.extend(flags.to_ne_bytes());
    to.extend(number.to_ne_bytes());
    to.extend(fd.to_ne_bytes());
    to.extend(id);
    to.extend(
        draft::words(&state.posix)
            .into_iter()
            .flat_map(u32::to_ne_bytes),
    );
    let written = state.written.map_or([None; 2], |times| times.map(Some));
    let posix = &state.posix;
    for time in [posix.mtime, posix.atime, posix.ctime]
        .into_iter()
        .chain(written)
    {
        let (seconds, nanos) = time.unwrap_or((0, NONE));
        to.extend(seconds.to_ne_bytes());
        to.extend(nanos.to_ne_bytes());
    }
    let version = state.version.clone().unwrap_or_default();
    to.extend(map::describe(&key, &version).ok_or(Errno::NAMETOOLONG)?);
    Ok(())
}

/// A node that [`save`] has saved.
struct Parsed {
    key: String,
    state: State,
    /// The number of its draft.
    draft: Option<u64>,
    /// The descriptor and the identity of the draft's data file.
    held: (i32, [u8; 16]),
}

fn parse(saved: &[u8]) -> std::result::Result<Parsed, Errno> {
    let mut saved = Saved(saved);
    let flags = u32::from_ne_bytes(saved.take()?);
    let [number] = saved.words()?;
    let [fd] = saved.numbers()?;
    let held = (fd, saved.take()?);
    let mut words = [0; draft::POSIX];
    for word in &mut words {
        *word = u32::from_ne_bytes(saved.take()?);
    }
    let mut posix = draft::posix_of(&words).ok_or(Errno::INVAL)?;
    let mut time = || {
        let (seconds, nanos) = (saved.take()?, u32::from_ne_bytes(saved.take()?));
        let time = (i64::from_ne_bytes(seconds), nanos);
        Ok::<_, Errno>(Some(time).filter(|_| nanos != NONE))
    };
    (posix.mtime, posix.atime, posix.ctime) = (time()?, time()?, time()?);
    let written = time()?.zip(time()?);
    let (key, version) = map::described(saved.0).ok_or(Errno::INVAL)?;
    let state = State {
        version: Some(version).filter(|_| flags & VERSION != 0),
        posix,
        written: written.map(|(modified, changed)| [modified, changed]),
        removed: flags & REMOVED != 0,
        marked: flags & MARKED != 0,
        ..State::default()
    };
    Ok(Parsed {
        key,
        state,
        draft: Some(number).filter(|number| flags & DRAFT != 0 && *number < NUMBERS),
        held,
    })
}

/// The connections of the server before. They may lead elsewhere than to the store, which does not matter.
fn connections(orphans: &Orphans) -> Vec<TcpStream> {
    let is_connection = |fd: BorrowedFd<'_>| {
        let is_tcp = socket_protocol(fd).is_ok_and(|protocol| protocol == Some(ipproto::TCP));
        is_tcp && getpeername(fd).is_ok()
    };
    let mut found = orphans.left();
    found.retain(|fd| orphans.look(*fd, is_connection) == Some(true));
    let claimed = found.into_iter().flat_map(|fd| orphans.claim(fd));
    claimed.map(TcpStream::from).collect()
}

impl ObjectFs {
    /// The draft that a node had.
    fn draft_of(
        &self,
        number: u64,
        (fd, id): (i32, [u8; 16]),
        posix: Posix,
        orphans: &Orphans,
    ) -> io::Result<Option<Arc<Draft>>> {
        let writing = self.writing()?;
        writing.drafts.reserve(number);
        if let Some(draft) = writing.drafts.left(number) {
            return Ok(Some(draft));
        }
        // It has no record, as no name leads to it.
        if let Some(draft) = writing.drafts.nameless(number, None, posix)? {
            return Ok(Some(draft));
        }
        let copied = orphans.look(fd, |open| open.try_clone_to_owned());
        let Some(copy) = copied.transpose()? else {
            return Ok(None);
        };
        if draft::identity(&File::from(copy).metadata()?) != Some(id) {
            return Ok(None);
        }
        let file = File::from(orphans.claim(fd)?);
        writing.drafts.nameless(number, Some(file), posix)
    }
}

impl Survive for ObjectFs {
    fn save_node(&self, node: Node, to: &mut Vec<u8>) -> io::Result<()> {
        save(&*self.known(node)?, to)
    }

    fn save_handle(&self, directory: bool, fh: Handle, to: &mut Vec<u8>) -> io::Result<()> {
        let open = self.handle(fh)?;
        match &*open {
            // A handle for which nothing is saved is not restored.
            Open::Directory(_) if directory => {
                to.push(0);
                Ok(())
            }
            Open::File { flags, by, .. } if !directory => {
                let id = match by {
                    By::Backed(id) => *id,
                    By::Kernel => 0,
                    By::Client => return Err(Errno::BADF.into()),
                };
                to.extend(flags.bits().to_ne_bytes());
                to.extend(id.to_ne_bytes());
                Ok(())
            }
            _ => Err(Errno::BADF.into()),
        }
    }

    fn restore_node(
        &self,
        node: Node,
        lookups: u64,
        saved: &[u8],
        orphans: &Orphans,
    ) -> io::Result<()> {
        let mut saved = parse(saved)?;
        let state = &mut saved.state;
        if let Some(number) = saved.draft
            && let Some(draft) = self.draft_of(number, saved.held, state.posix, orphans)?
        {
            let of_draft = draft.state();
            state.removed = of_draft.removed;
            if !state.removed {
                saved.key.clone_from(&of_draft.key);
            }
            drop(of_draft);
            state.draft = Some(draft);
        }
        self.tree.restore(node, lookups, saved.key, saved.state)?;
        Ok(())
    }

    fn restore_handle(
        &self,
        directory: bool,
        node: Node,
        fh: Handle,
        saved: &[u8],
        _: &Orphans,
    ) -> io::Result<()> {
        let known = self.known(node)?;
        if directory {
            return self.restore(fh, Open::Directory(Default::default()));
        }
        let mut saved = Saved(saved);
        let flags = OFlags::from_bits_retain(u32::from_ne_bytes(saved.take()?));
        let [id] = saved.numbers()?;
        let by = match id {
            0 => By::Kernel,
            id => By::Backed(id),
        };
        let open = Open::File {
            known: known.clone(),
            window: Default::default(),
            flags,
            by,
        };
        self.restore(fh, open)?;
        let mut state = known.state();
        state.writers += u64::from(flags.intersects(OFlags::RWMODE));
        let By::Backed(id) = by else {
            state.plain += 1;
            return Ok(());
        };
        if let Some(draft) = &state.draft {
            draft.go_on_unseen();
        }
        match &mut state.backing {
            Some((_, opens)) => *opens += 1,
            None => {
                state.backing = Some((id, 1));
                // The kernel has the file open, whatever the cache has of it.
                if self.writing.is_none() {
                    self.object(&known, &mut state)?.backed_before();
                }
                if let Some(session) = self.session.get() {
                    session.restored_backing(node);
                }
            }
        }
        Ok(())
    }

    fn restored(&self, orphans: &Orphans) {
        self.tree.restored();
        self.restored_handles();
        let Some(writing) = &self.writing else {
            return;
        };
        let Fetch { store, runtime, .. } = &self.fetch;
        store.let_end(connections(orphans), runtime);
        if let Err(error) = writing.go_on_with_drafts() {
            tracing::error!(%error, "what was written may stay in the cache");
        }
    }

    fn drop_handle(&self, _: bool, fh: Handle) {
        self.close(fh);
    }
}

impl ObjectFs {
    /// Notes that a request is about to change something.
    pub(crate) fn begins(&self, cx: &Context, note: u64) {
        if let Some(session) = self.session.get() {
            session.note(cx, note);
        }
    }

    /// The note of this request, if an earlier server had come so far and may have done it.
    pub(crate) fn begun_before(&self, cx: &Context) -> Option<u64> {
        self.session.get()?.again(cx)?.note
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use proptest::prelude::*;
    use rustix::fs::FileType;

    use super::*;
    use crate::store::{Facts, Version};
    use crate::tree::Tree;

    proptest! {
        #[test]
        fn a_node_comes_back(
            key in "[!-.0-~]{3,200}(/[!-.0-~]{3,200}){0,3}/?",
            etag in proptest::option::of("[ -~]{0,60}"),
            mode in proptest::option::of(0..=0o7777_u32),
            modified in proptest::option::of((any::<i64>(), 0..1_000_000_000_u32)),
            removed: bool,
        ) {
            let version = etag.map(|etag| Version { etag: Some(etag), modified: None, size: 7 });
            let special = Some((FileType::Symlink, 0));
            let posix = Posix { special, mode, uid: Some(3), mtime: modified, ..Posix::default() };
            let facts = Facts { version, posix };
            let known = Tree::new().looked_up(key.clone(), facts.clone(), Instant::now());
            known.state().removed = removed;
            known.state().written = modified.map(|time| [time, (5, 6)]);
            let mut bytes = Vec::new();
            save(&known, &mut bytes).unwrap();
            let found = parse(&bytes).unwrap();
            prop_assert_eq!(found.key, key);
            prop_assert_eq!(found.state.posix, posix);
            prop_assert_eq!(found.state.removed, removed);
            prop_assert_eq!(found.state.written, known.state().written);
            prop_assert_eq!(found.draft, None);
            let etag = |version: Option<Version>| version.and_then(|version| version.etag);
            prop_assert_eq!(etag(found.state.version), etag(facts.version));
        }

        #[test]
        fn any_bytes_are_read_without_a_panic(
            bytes in proptest::collection::vec(any::<u8>(), 0..400),
        ) {
            let _ = parse(&bytes);
        }
    }
}
