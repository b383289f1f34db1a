//! Watches the source for what programs of the host change, with fanotify(7), so that the kernel of the
//! mount may cache names, attributes and data until they change.
//!
//! Events carry file handles, and inodes are known by those. Changes by this process itself are
//! left out: the kernel knows what is done through the mount, and the server what clients do.
//!
//! Not seen: stores through a mapping, and what the kernel (a loop device) or libaio writes, until the
//! file is closed.

use std::ffi::CStr;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::Receiver;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use uvfs_server::fs::{HostChange, Node, SessionHandle};

use crate::inode::{Inode, Inodes, Key, Mounts, Stale};
use crate::mount::{FsId, Mount};
use crate::mounted::Mounted;
use crate::sys::{FileHandle, Result};
use crate::watcher::{BUFFER, CONTENTS, NAMES, Watcher};

/// After a batch of events the next one gathers for so long: the kernel merges what is alike.
const GATHER: Duration = Duration::from_millis(2);

/// No process.
const NONE: i32 = -1;

/// Reports what the host changes until it is stopped. Where an earlier server's watcher ended, it waits for `restored`, and
/// then begins with what that one may not have reported.
pub(crate) fn start(
    watcher: Arc<Watcher>,
    inodes: Arc<Inodes>,
    mounts: Arc<Mounts>,
    mut mounted: Mounted,
    session: Arc<dyn SessionHandle>,
    restored: Receiver<()>,
) -> std::io::Result<()> {
    std::thread::Builder::new()
        .name("uvfs-watch".into())
        .spawn(move || {
            let mut buf = Box::new([0; BUFFER]);
            if watcher.goes_on {
                if restored.recv().is_err() {
                    return;
                }
                let found = Found {
                    inodes: &inodes,
                    mounts: mounts.watched(),
                };
                watcher.recent.each(&mut buf, |bytes| {
                    let events = Events { bytes, own: NONE };
                    for event in events {
                        found.tell(&event, &*session, |_| {});
                    }
                });
                mounted.forget();
                report_mounts(&mut mounted, &inodes, &*session);
            }
            while let Err(errno) = run(
                &watcher,
                &mut buf,
                &inodes,
                &mounts,
                &mut mounted,
                &*session,
            ) {
                tracing::warn!(%errno, "watching for changes");
                session.host_changed(HostChange::Anything(inodes.nodes()));
                std::thread::sleep(Duration::from_millis(100));
            }
        })?;
    Ok(())
}

/// The names where something was mounted or unmounted lead elsewhere.
fn report_mounts(mounted: &mut Mounted, inodes: &Inodes, session: &dyn SessionHandle) {
    for (directory, name) in mounted.changed(inodes) {
        session.host_changed(HostChange::Name(directory.node, &name));
    }
}

fn run(
    watcher: &Watcher,
    buf: &mut [u8; BUFFER],
    inodes: &Inodes,
    mounts: &Mounts,
    mounted: &mut Mounted,
    session: &dyn SessionHandle,
) -> Result<()> {
    let own = std::process::id() as i32;
    loop {
        let mut fds = [
            PollFd::new(&watcher.events, PollFlags::IN),
            PollFd::new(&watcher.stop, PollFlags::IN),
            PollFd::new(&*mounted, PollFlags::PRI),
        ];
        match rustix::event::poll(&mut fds, None) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(errno) => return Err(errno),
        }
        if !fds[1].revents().is_empty() {
            return Ok(());
        }
        if !fds[2].revents().is_empty() {
            watcher.batches.fetch_add(1, Ordering::SeqCst);
            report_mounts(mounted, inodes, session);
        }
        loop {
            let bytes = match watcher.recent.read(watcher.events.as_fd(), buf) {
                Ok([]) | Err(Errno::AGAIN) => break,
                Ok(bytes) => bytes,
                Err(Errno::INTR) => continue,
                Err(errno) => return Err(errno),
            };
            // Before any inode is looked for; see `Watching::batches`.
            let (mut found, mut names, mut contents) = (None, false, Vec::new());
            let mut events = Events { bytes, own };
            while let Some((event, bytes)) = events.next_with_bytes() {
                let found = found.get_or_insert_with(|| {
                    watcher.batches.fetch_add(1, Ordering::SeqCst);
                    Found {
                        inodes,
                        // Now: inodes of mounts that come later were read after these changes.
                        mounts: mounts.watched(),
                    }
                });
                watcher.count.fetch_add(1, Ordering::Relaxed);
                let keep = |node| contents.push((node, event.mask, bytes));
                names |= found.tell(&event, session, keep);
            }
            match names {
                true => watcher.recent.keep(),
                false => watcher.recent.keep_contents(contents),
            }
        }
        std::thread::sleep(GATHER);
    }
}

/// Finds inodes by what an event says.
struct Found<'a> {
    inodes: &'a Inodes,
    mounts: Vec<Arc<Mount>>,
}

impl Found<'_> {
    /// All inodes of a file: one for each mount that it is known by.
    fn inodes(&self, id: &Option<Id>) -> impl Iterator<Item = Arc<Inode>> {
        let id = id.as_ref();
        self.mounts.iter().filter_map(move |mount| {
            let id = id.filter(|id| mount.watched.get() == Some(&id.fs))?;
            let ino = id.handle.ino(mount.fs_type)?;
            let key = Key::of(mount.id, mount.device, ino, Some(id.handle.clone()));
            self.inodes.known(&key)
        })
    }

    /// Tells the kernel what an event says. True if the kernel may know a name that has changed; `contents` gets each node whose
    /// attributes or pages it may have.
    fn tell(
        &self,
        event: &Event<'_>,
        session: &dyn SessionHandle,
        mut contents: impl FnMut(Node),
    ) -> bool {
        if event.mask & libc::FAN_Q_OVERFLOW != 0 {
            tracing::info!("the host's changes came too fast: everything is dropped once");
            session.host_changed(HostChange::Anything(self.inodes.nodes()));
            return true;
        }
        let mut names = false;
        if event.mask & NAMES != 0
            && let Some(name) = event.name
        {
            for directory in self.inodes(&event.directory) {
                session.host_changed(HostChange::Name(directory.node, name));
                names = true;
            }
        }
        // Of a directory itself there is no other.
        let of_names = event.mask & NAMES != 0;
        let itself = match &event.target {
            None if !of_names => &event.directory,
            target => target,
        };
        for inode in self.inodes(itself) {
            // Also of names: how many there are, and the time of change.
            let mut stale = Stale::Attributes;
            if event.mask & CONTENTS != 0 {
                stale = inode.written();
                if event.mask & !(CONTENTS | libc::FAN_ONDIR) != 0 {
                    stale = stale.max(Stale::Attributes);
                }
            }
            if stale != Stale::Nothing {
                contents(inode.node);
            }
            session.host_changed(match stale {
                Stale::Nothing => HostChange::KnownAttributes(inode.node),
                Stale::Attributes => HostChange::Attributes(inode.node),
                Stale::Contents => HostChange::Contents(inode.node),
            });
        }
        names
    }
}

/// A file system and a handle on it.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Id {
    fs: FsId,
    handle: FileHandle,
}

/// An event as fanotify gives it.
#[derive(Debug, Default, PartialEq, Eq)]
struct Event<'a> {
    mask: u64,
    pid: i32,
    directory: Option<Id>,
    name: Option<&'a CStr>,
    target: Option<Id>,
}

/// Bytes of struct fanotify_event_metadata, of the header of a record behind it, and of what comes
/// before the handle's bytes in a record of a file: header, f_fsid, and struct file_handle.
const METADATA: usize = 24;
const RECORD: usize = 4;
const HANDLE: usize = RECORD + 8 + 8;

/// The events in what was read, but for those of the process `own`. A malformed one ends them.
struct Events<'a> {
    bytes: &'a [u8],
    own: i32,
}

impl<'a> Iterator for Events<'a> {
    type Item = Event<'a>;

    fn next(&mut self) -> Option<Event<'a>> {
        Some(self.next_with_bytes()?.0)
    }
}

impl<'a> Events<'a> {
    fn next_with_bytes(&mut self) -> Option<(Event<'a>, &'a [u8])> {
        loop {
            let len = u32::from_ne_bytes(part(self.bytes, 0)?) as usize;
            let [version, _, metadata @ ..]: [u8; 4] = part(self.bytes, 4)?;
            let metadata = usize::from(u16::from_ne_bytes(metadata));
            if version != libc::FANOTIFY_METADATA_VERSION || metadata < METADATA || len < metadata {
                return None;
            }
            let event = self.bytes.get(..len)?;
            self.bytes = &self.bytes[len..];
            let pid = i32::from_ne_bytes(part(event, 20)?);
            // Often the most of them.
            if pid != self.own {
                return Some((Event::parse(event, metadata, pid)?, event));
            }
        }
    }
}

/// `N` bytes at an offset.
fn part<const N: usize>(bytes: &[u8], at: usize) -> Option<[u8; N]> {
    bytes.get(at..)?.first_chunk().copied()
}

impl<'a> Event<'a> {
    /// Of the process `pid`, with records behind so many bytes.
    fn parse(event: &'a [u8], metadata: usize, pid: i32) -> Option<Self> {
        let mut parsed = Self {
            mask: u64::from_ne_bytes(part(event, 8)?),
            pid,
            ..Self::default()
        };
        let mut records = &event[metadata..];
        while !records.is_empty() {
            let [kind, _, len @ ..]: [u8; 4] = part(records, 0)?;
            let len = usize::from(u16::from_ne_bytes(len));
            if len < RECORD {
                return None;
            }
            let record = records.get(..len)?;
            records = &records[len..];
            parsed.take(kind, record)?;
        }
        Some(parsed)
    }

    /// Takes in a record of this kind; others mean nothing here.
    fn take(&mut self, kind: u8, record: &'a [u8]) -> Option<()> {
        let to = match kind {
            libc::FAN_EVENT_INFO_TYPE_FID => &mut self.target,
            libc::FAN_EVENT_INFO_TYPE_DFID | libc::FAN_EVENT_INFO_TYPE_DFID_NAME => {
                &mut self.directory
            }
            _ => return Some(()),
        };
        let len = u32::from_ne_bytes(part(record, RECORD + 8)?) as usize;
        let handle_kind = i32::from_ne_bytes(part(record, RECORD + 12)?);
        let rest = record.get(HANDLE..)?;
        let (handle, name) = rest.split_at_checked(len)?;
        *to = Some(Id {
            fs: part(record, RECORD)?,
            handle: FileHandle::from_parts(handle_kind, handle)?,
        });
        if kind == libc::FAN_EVENT_INFO_TYPE_DFID_NAME {
            self.name = Some(CStr::from_bytes_until_nul(name).ok()?);
        }
        Some(())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn record(kind: u8, handle: &[u8], name: &[u8]) -> Vec<u8> {
        let mut record = vec![kind, 0, 0, 0];
        record.extend([1, 2, 3, 4, 5, 6, 7, 8]);
        record.extend((handle.len() as u32).to_ne_bytes());
        record.extend(9i32.to_ne_bytes());
        record.extend(handle);
        record.extend(name);
        record.resize(record.len().next_multiple_of(4), 0);
        let len = record.len() as u16;
        record[2..4].copy_from_slice(&len.to_ne_bytes());
        record
    }

    fn event(mask: u64, pid: i32, records: &[Vec<u8>]) -> Vec<u8> {
        let records = records.concat();
        let mut event = Vec::new();
        event.extend(((METADATA + records.len()) as u32).to_ne_bytes());
        event.extend([libc::FANOTIFY_METADATA_VERSION, 0]);
        event.extend((METADATA as u16).to_ne_bytes());
        event.extend(mask.to_ne_bytes());
        event.extend((-1i32).to_ne_bytes());
        event.extend(pid.to_ne_bytes());
        event.extend(records);
        event
    }

    fn id(handle: &[u8]) -> Option<Id> {
        let handle = FileHandle::from_parts(9, handle)?;
        let fs = [1, 2, 3, 4, 5, 6, 7, 8];
        Some(Id { fs, handle })
    }

    fn two_events() -> Vec<u8> {
        let directory = record(libc::FAN_EVENT_INFO_TYPE_DFID_NAME, b"directory", b"name\0");
        let target = record(libc::FAN_EVENT_INFO_TYPE_FID, b"file", b"");
        let other = record(libc::FAN_EVENT_INFO_TYPE_PIDFD, b"", b"");
        let mut bytes = event(libc::FAN_CREATE, 77, &[directory, other, target]);
        let itself = record(libc::FAN_EVENT_INFO_TYPE_DFID, b"dir", b"");
        bytes.extend(event(libc::FAN_ATTRIB | libc::FAN_ONDIR, 78, &[itself]));
        bytes
    }

    /// The events of every process.
    fn events(bytes: &[u8]) -> Events<'_> {
        Events { bytes, own: -7 }
    }

    /// Changes through the mount don't drop the kernel's cache of it.
    #[test]
    fn own_events_are_left_out() {
        let bytes = two_events();
        for (own, pids) in [(77, [78]), (78, [77])] {
            let bytes = bytes.as_slice();
            let left = Events { bytes, own }.map(|event| event.pid);
            assert_eq!(left.collect::<Vec<_>>(), pids);
        }
    }

    /// All changes that the host's kernel reports are seen.
    #[test]
    fn events_are_parsed_within_bounds() {
        let bytes = two_events();
        let parsed: Vec<_> = events(&bytes).collect();
        let first = Event {
            mask: libc::FAN_CREATE,
            pid: 77,
            directory: id(b"directory"),
            name: Some(c"name"),
            target: id(b"file"),
        };
        let second = Event {
            mask: libc::FAN_ATTRIB | libc::FAN_ONDIR,
            pid: 78,
            directory: id(b"dir"),
            ..Event::default()
        };
        assert_eq!(parsed, [first, second]);
        let overflow = event(libc::FAN_Q_OVERFLOW, 0, &[]);
        assert_eq!(events(&overflow).next().unwrap().mask, libc::FAN_Q_OVERFLOW);
        // Without its end.
        for len in 0..bytes.len() {
            assert!(events(&bytes[..len]).count() < 2);
        }
        // A name that does not end, a handle that is longer than its record or than any.
        let named = libc::FAN_EVENT_INFO_TYPE_DFID_NAME;
        for bad in [
            record(named, b"abcd", b"name"),
            record(named, b"abcd", b""),
            record(libc::FAN_EVENT_INFO_TYPE_FID, &[0; 200], b""),
            vec![named, 0, 3, 0],
        ] {
            assert_eq!(events(&event(1, 1, &[bad])).count(), 0);
        }
    }

    proptest! {
        /// Malformed events neither crash the server nor make it loop.
        #[test]
        fn no_bytes_are_too_bad(
            changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..12),
            random in prop::collection::vec(any::<u8>(), 0..200),
        ) {
            let mut bytes = two_events();
            for (at, byte) in changes {
                let at = at.index(bytes.len());
                bytes[at] = byte;
            }
            // Each takes bytes, so there are few.
            prop_assert!(events(&bytes).count() <= bytes.len() / METADATA);
            prop_assert!(events(&random).count() <= random.len() / METADATA);
        }
    }
}
