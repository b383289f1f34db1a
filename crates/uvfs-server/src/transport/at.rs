//! Steps on paths (`uvfs_proto::ext::AT`): a client's walk along names, and what it does at the end,
//! as one request. Each step of the walk is an ordinary request of the client, with all that
//! belongs to it.
//!
//! Directories on the way are remembered for a second, as the kernel remembers them, and until
//! anything is renamed or removed, or changes its permissions, through the mount or a client.

use std::collections::{HashMap, VecDeque};
use std::ops::Range;
use std::rc::Rc;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use smallvec::SmallVec;
use uvfs_io::Payload;
use uvfs_proto::abi::{self, Opcode, URING_OP_IN_OUT_SZ};
use uvfs_proto::ext::{
    self, AT_FOLLOW, AT_KEEP, AtIn, AtOpenOut, CloseIn, LEASE_NONE, LEASE_READ, TokenIn,
};
use uvfs_queue::pair::INLINE_SIZE;
use zerocopy::{FromBytes, IntoBytes};

use super::shm::Client;
use crate::coherence;
use crate::fs::{FileSystem, ROOT};
use crate::slot::{Answer, Body, Slot};
use crate::token::Grant;
use crate::transport::serve_for;

/// How long the way to a directory is remembered.
const WAY: Duration = Duration::from_secs(1);
/// Ways that are remembered.
const WAYS: usize = 64;
/// Files that were looked at last, and are likely opened next.
const RECENT: usize = 16;
/// The longest contents that come with an open.
const CONTENTS: u64 = 2048;

/// What a client's walks remember. Everything here holds one lookup.
#[derive(Default)]
pub(super) struct Walked {
    /// By the node that a walk started from and its names: where it led, and when.
    ways: HashMap<(u64, Vec<u8>), (u64, Instant)>,
    /// When these were right (`Coherence::moves`).
    moves: u64,
    /// Directory, name, and what it was.
    recent: VecDeque<(u64, SmallVec<[u8; 32]>, u64)>,
}

/// The names of a path, as parts of the payload, each with its 0 byte.
type Names = SmallVec<[Range<usize>; 8]>;

/// A path to walk.
struct Path<'a> {
    from: u64,
    names: &'a [Range<usize>],
}

fn entry_of(answer: &Answer) -> Result<abi::EntryOut, Errno> {
    let Answer::Body(body) = answer else {
        return Err(Errno::IO);
    };
    let (entry, _) = abi::EntryOut::read_from_prefix(body).map_err(|_| Errno::IO)?;
    match entry.nodeid {
        0 => Err(Errno::NOENT),
        _ => Ok(entry),
    }
}

fn kind(entry: &abi::EntryOut) -> u32 {
    entry.attr.mode & libc::S_IFMT
}

/// Splits the payload into names; nothing for what no path consists of.
fn split(bytes: &[u8]) -> Option<Names> {
    let mut names = Names::new();
    let mut from = 0;
    for (at, _) in bytes.iter().enumerate().filter(|(_, byte)| **byte == 0) {
        if at == from {
            return None;
        }
        names.push(from..at + 1);
        from = at + 1;
    }
    (from == bytes.len()).then_some(names)
}

impl<F: FileSystem> Client<F> {
    /// One ordinary request of the client's, with what it gives noted.
    async fn step(
        &self,
        opcode: Opcode,
        node: u64,
        op: &[u8],
        input: Payload,
        room: Payload,
    ) -> Result<Answer, Errno> {
        let mut area = [0; URING_OP_IN_OUT_SZ];
        area[..op.len()].copy_from_slice(op);
        let len = size_of::<abi::InHeader>() + op.len() + input.len();
        let mut slot = Slot {
            header: self.header(opcode as u32, node, len),
            op: area,
            op_len: op.len(),
            input,
            room,
        };
        self.constrain(&mut slot);
        let answer = serve_for(&self.session, &self.stats, &slot, Some(&self.link)).await;
        self.note(&slot, &answer);
        match answer {
            Answer::Error(errno) => Err(errno),
            answer => Ok(answer),
        }
    }

    /// Takes back one lookup.
    fn drop_lookup(&self, node: u64) {
        if node == ROOT {
            return;
        }
        let mut lookups = self.lookups.borrow_mut();
        if let Some(count) = lookups.get_mut(&node) {
            *count -= 1;
            if *count == 0 {
                lookups.remove(&node);
                self.session.coherence.forget(&self.link, node);
            }
            drop(lookups);
            self.session.fs().forget(node, 1);
        }
    }

    /// What walks remember is forgotten, when nobody asks any more.
    pub(super) fn forget_walks(&self) {
        let walked = std::mem::take(&mut *self.walked.borrow_mut());
        for (node, _) in walked.ways.values() {
            self.drop_lookup(*node);
        }
        for (_, _, node) in &walked.recent {
            self.drop_lookup(*node);
        }
    }

    /// Keeps the lookup of a file for a moment.
    fn remember(&self, parent: u64, name: &[u8], node: u64) {
        if node == ROOT {
            return;
        }
        if self.lookups.borrow().get(&node).is_none_or(|&n| n > 1) {
            return self.drop_lookup(node);
        }
        let oldest = {
            let mut walked = self.walked.borrow_mut();
            walked.recent.push_back((parent, name.into(), node));
            match walked.recent.len() > RECENT {
                true => walked.recent.pop_front(),
                false => None,
            }
        };
        if let Some((_, _, node)) = oldest {
            self.drop_lookup(node);
        }
    }

    /// A name is about to become another file's, or nobody's: what is kept of it would keep its
    /// space.
    fn leave(&self, parent: u64, name: &[u8]) {
        let gone = {
            let mut walked = self.walked.borrow_mut();
            let at = walked
                .recent
                .iter()
                .position(|(p, n, _)| *p == parent && n[..] == *name);
            at.and_then(|at| walked.recent.remove(at))
        };
        if let Some((_, _, node)) = gone {
            self.drop_lookup(node);
        }
    }

    async fn lookup(&self, parent: u64, name: Payload) -> Result<abi::EntryOut, Errno> {
        let none = Payload::default();
        let found = self.step(Opcode::Lookup, parent, &[], name, none).await?;
        entry_of(&found)
    }

    /// The directory that names lead to.
    async fn walk(&self, from: u64, slot: &Slot, names: &[Range<usize>]) -> Result<u64, Errno> {
        let (Some(first), Some(last)) = (names.first(), names.last()) else {
            return Ok(from);
        };
        let moves = self.session.coherence.moves();
        if self.walked.borrow().moves != moves {
            self.forget_walks();
            self.walked.borrow_mut().moves = moves;
        }
        let mut key = vec![0; last.end - first.start];
        slot.input.copy_out(first.start, &mut key);
        let key = (from, key);
        let known = self.walked.borrow().ways.get(&key).copied();
        if let Some((node, since)) = known
            && since.elapsed() < WAY
        {
            return Ok(node);
        }
        let mut node = from;
        for name in names {
            let found = self.lookup(node, slot.input.slice(name.clone())).await;
            if node != from {
                self.drop_lookup(node);
            }
            let entry = found?;
            if kind(&entry) != libc::S_IFDIR {
                self.drop_lookup(entry.nodeid);
                return Err(match kind(&entry) {
                    libc::S_IFLNK => Errno::LOOP,
                    _ => Errno::NOTDIR,
                });
            }
            node = entry.nodeid;
        }
        let (too_many, old) = {
            let mut walked = self.walked.borrow_mut();
            let too_many = walked.ways.len() >= WAYS || walked.moves != moves;
            let old = match too_many {
                true => None,
                false => walked.ways.insert(key.clone(), (node, Instant::now())),
            };
            (too_many, old)
        };
        if let Some((node, _)) = old {
            self.drop_lookup(node);
        }
        if too_many {
            self.forget_walks();
            let mut walked = self.walked.borrow_mut();
            walked.moves = moves;
            walked.ways.insert(key, (node, Instant::now()));
        }
        Ok(node)
    }

    /// Whether the client may start from a node.
    fn starts(&self, node: u64) -> Result<(), Errno> {
        match node == ROOT || self.lookups.borrow().contains_key(&node) {
            true => Ok(()),
            false => Err(Errno::STALE),
        }
    }

    /// Answers a step on a path; `at` is where the request's inline payload lies.
    pub(super) async fn at(self: &Rc<Self>, slot: &Slot, at: usize) -> Result<Answer, Errno> {
        if self.guest {
            return Err(Errno::PERM);
        }
        if self.session.kernel_writes_back() {
            // The kernel has sizes, times and data of its own.
            return Err(Errno::OPNOTSUPP);
        }
        let (arg, _) = AtIn::read_from_prefix(&slot.op[..slot.op_len]).map_err(|_| Errno::INVAL)?;
        let mut bytes: SmallVec<[u8; 320]> = SmallVec::new();
        bytes.resize(slot.input.len(), 0);
        slot.input.copy_out(0, &mut bytes);
        let names = split(&bytes).ok_or(Errno::INVAL)?;
        let count = arg.names as usize;
        if names.len() != count.saturating_add(arg.more as usize) {
            return Err(Errno::INVAL);
        }
        let start = slot.header.nodeid;
        self.starts(start)?;
        let (first, second) = names.split_at(count);
        let path = Path {
            from: start,
            names: first,
        };
        let none = Payload::default();
        let Some((last, way)) = path.names.split_last() else {
            return match arg.what {
                ext::AT_STAT => {
                    let attr = coherence::attributes(&self.session, slot, start).await?;
                    Ok(Answer::of(&self.itself(start, attr, arg.flags)))
                }
                ext::AT_OPENDIR => {
                    let attr = coherence::attributes(&self.session, slot, start).await?;
                    self.open_directory(self.itself(start, attr, AT_KEEP)).await
                }
                _ => Err(Errno::INVAL),
            };
        };
        let parent = self.walk(path.from, slot, way).await?;
        let name = slot.input.slice(last.clone());
        let text = &bytes[last.clone()];
        match arg.what {
            ext::AT_STAT => {
                let entry = self.lookup(parent, name).await?;
                if kind(&entry) == libc::S_IFLNK && arg.flags & AT_FOLLOW != 0 {
                    self.drop_lookup(entry.nodeid);
                    return Err(Errno::LOOP);
                }
                if arg.flags & AT_KEEP == 0 {
                    self.remember(parent, text, entry.nodeid);
                }
                Ok(Answer::of(&entry))
            }
            ext::AT_READLINK => {
                let entry = self.lookup(parent, name).await?;
                let none2 = Payload::default();
                let target = self.step(Opcode::Readlink, entry.nodeid, &[], none, none2);
                let target = target.await;
                self.drop_lookup(entry.nodeid);
                target
            }
            ext::AT_OPEN => self.open(parent, name, text, &arg, at).await,
            ext::AT_OPENDIR => {
                let entry = self.lookup(parent, name).await?;
                let kind = kind(&entry);
                if kind != libc::S_IFDIR {
                    self.drop_lookup(entry.nodeid);
                    return Err(match kind {
                        libc::S_IFLNK => Errno::LOOP,
                        _ => Errno::NOTDIR,
                    });
                }
                self.open_directory(entry).await
            }
            ext::AT_MKDIR => {
                let op = abi::MkdirIn {
                    mode: arg.mode,
                    umask: arg.umask,
                };
                let made = self.step(Opcode::Mkdir, parent, op.as_bytes(), name, none);
                let made = entry_of(&made.await?)?;
                self.remember(parent, text, made.nodeid);
                Ok(Answer::empty())
            }
            ext::AT_SYMLINK if second.len() == 1 => {
                let both = slot.input.slice(last.start..second[0].end);
                let made = self.step(Opcode::Symlink, parent, &[], both, none);
                self.drop_lookup(entry_of(&made.await?)?.nodeid);
                Ok(Answer::empty())
            }
            ext::AT_UNLINK | ext::AT_RMDIR => {
                self.leave(parent, text);
                let opcode = match arg.what {
                    ext::AT_UNLINK => Opcode::Unlink,
                    _ => Opcode::Rmdir,
                };
                self.step(opcode, parent, &[], name, none).await
            }
            ext::AT_RENAME | ext::AT_LINK => {
                self.starts(arg.to)?;
                let Some((new, way)) = second.split_last() else {
                    return Err(Errno::INVAL);
                };
                let to = self.walk(arg.to, slot, way).await?;
                self.leave(to, &bytes[new.clone()]);
                let new_name = slot.input.slice(new.clone());
                if arg.what == ext::AT_LINK {
                    let entry = self.lookup(parent, name).await?;
                    let op = abi::LinkIn {
                        oldnodeid: entry.nodeid,
                    };
                    let made = self.step(Opcode::Link, to, op.as_bytes(), new_name, none);
                    let made = made.await;
                    self.drop_lookup(entry.nodeid);
                    self.drop_lookup(entry_of(&made?)?.nodeid);
                    return Ok(Answer::empty());
                }
                self.leave(parent, text);
                let op = abi::Rename2In {
                    newdir: to,
                    flags: arg.flags,
                    padding: 0,
                };
                let parts = name.parts().iter().chain(new_name.parts()).cloned();
                let both = Payload::from_parts(parts);
                self.step(Opcode::Rename2, parent, op.as_bytes(), both, none)
                    .await
            }
            _ => Err(Errno::INVAL),
        }
    }

    /// The answer about a node that the client has.
    fn itself(&self, node: u64, attr: abi::Attr, flags: u32) -> abi::EntryOut {
        if flags & AT_KEEP != 0 && node != ROOT {
            // It is known, so one more lookup can be counted.
            if self.session.fs().look_again(node) {
                *self.lookups.borrow_mut().entry(node).or_default() += 1;
            }
        }
        abi::EntryOut {
            nodeid: node,
            attr,
            ..Default::default()
        }
    }

    async fn open_directory(&self, entry: abi::EntryOut) -> Result<Answer, Errno> {
        let op = abi::OpenIn {
            flags: libc::O_DIRECTORY as u32,
            open_flags: 0,
        };
        let none = Payload::default();
        let opened = self.step(
            Opcode::Opendir,
            entry.nodeid,
            op.as_bytes(),
            none.clone(),
            none,
        );
        match opened.await {
            Ok(Answer::Body(body)) => Ok(Answer::of(&AtOpenOut {
                entry,
                open: abi::OpenOut::read_from_prefix(&body)
                    .map_err(|_| Errno::IO)?
                    .0,
                ..Default::default()
            })),
            other => {
                self.drop_lookup(entry.nodeid);
                Err(other.err().unwrap_or(Errno::IO))
            }
        }
    }

    async fn open(
        &self,
        parent: u64,
        name: Payload,
        text: &[u8],
        arg: &AtIn,
        at: usize,
    ) -> Result<Answer, Errno> {
        let asked = arg.flags as i32;
        if asked & libc::O_TRUNC != 0 {
            // A change of the file, which has its own request.
            return Err(Errno::INVAL);
        }
        let creates = asked & libc::O_CREAT != 0;
        let only_new = creates && asked & libc::O_EXCL != 0;
        for _ in 0..4 {
            let found = match only_new {
                true => Err(Errno::NOENT),
                false => self.lookup(parent, name.clone()).await,
            };
            match found {
                Ok(entry) => {
                    let opened = self.open_found(parent, entry, arg, at).await;
                    if opened.is_err() {
                        self.drop_lookup(entry.nodeid);
                    }
                    self.leave(parent, text);
                    return opened;
                }
                Err(Errno::NOENT) if creates => {}
                Err(errno) => return Err(errno),
            }
            let op = abi::CreateIn {
                flags: (asked | libc::O_EXCL) as u32,
                mode: arg.mode & 0o7777 | libc::S_IFREG,
                umask: arg.umask,
                open_flags: 0,
            };
            let none = Payload::default();
            let made = self.step(Opcode::Create, parent, op.as_bytes(), name.clone(), none);
            match made.await {
                // Somebody was faster.
                Err(Errno::EXIST) if !only_new => {}
                Err(errno) => return Err(errno),
                Ok(Answer::Body(body)) => {
                    let (entry, rest) =
                        abi::EntryOut::read_from_prefix(&body).map_err(|_| Errno::IO)?;
                    let (open, _) = abi::OpenOut::read_from_prefix(rest).map_err(|_| Errno::IO)?;
                    return Ok(Answer::of(&AtOpenOut {
                        entry,
                        open,
                        granted: LEASE_NONE,
                        padding: 0,
                        seq: 0,
                    }));
                }
                Ok(_) => return Err(Errno::IO),
            }
        }
        Err(Errno::LOOP)
    }

    /// Opens what is there. The lookup is the caller's to drop when it fails.
    async fn open_found(
        &self,
        parent: u64,
        mut entry: abi::EntryOut,
        arg: &AtIn,
        at: usize,
    ) -> Result<Answer, Errno> {
        let asked = arg.flags as i32;
        let node = entry.nodeid;
        if kind(&entry) != libc::S_IFREG {
            return Err(Errno::LOOP);
        }
        let none = Payload::default;
        if asked & libc::O_CREAT != 0 && parent != ROOT {
            // What fs.protected_regular is about is for the kernel to judge.
            let op = abi::GetattrIn::default();
            let dir = self.step(Opcode::Getattr, parent, op.as_bytes(), none(), none());
            let shared = match dir.await? {
                Answer::Body(body) => abi::AttrOut::read_from_prefix(&body)
                    .is_ok_and(|(out, _)| out.attr.mode & libc::S_ISVTX != 0),
                _ => true,
            };
            if shared {
                return Err(Errno::LOOP);
            }
        }
        let made = libc::O_CREAT | libc::O_EXCL | libc::O_NOCTTY;
        let op = abi::OpenIn {
            flags: (asked & !made) as u32,
            open_flags: 0,
        };
        let opened = self.step(Opcode::Open, node, op.as_bytes(), none(), none());
        let Answer::Body(body) = opened.await? else {
            return Err(Errno::IO);
        };
        let (open, _) = abi::OpenOut::read_from_prefix(&body).map_err(|_| Errno::IO)?;
        let mut out = AtOpenOut {
            entry,
            open,
            granted: LEASE_NONE,
            padding: 0,
            seq: 0,
        };
        let short = asked & libc::O_ACCMODE == libc::O_RDONLY && entry.attr.size <= CONTENTS;
        if !short {
            return Ok(Answer::of(&out));
        }
        let Some(seq) = self
            .session
            .coherence
            .try_read(&self.session, &self.link, node)
        else {
            return Ok(Answer::of(&out));
        };
        // From here on nobody changes it unseen.
        let lease = (node, seq);
        match self.contents(&mut entry, open.fh, at).await {
            Some(contents) => {
                out.entry = entry;
                (out.granted, out.seq) = (LEASE_READ, seq);
                let mut body = Body::from_slice(out.as_bytes());
                body.extend_from_slice(&contents);
                Ok(Answer::Body(body))
            }
            None => {
                let coherence = &self.session.coherence;
                coherence.returned(&self.link, lease.0, lease.1, None);
                Ok(Answer::of(&out))
            }
        }
    }

    /// All that a short file holds; its attributes are brought up to date.
    async fn contents(
        &self,
        entry: &mut abi::EntryOut,
        fh: u64,
        at: usize,
    ) -> Option<SmallVec<[u8; 256]>> {
        let (node, none) = (entry.nodeid, Payload::default);
        let op = abi::GetattrIn {
            getattr_flags: abi::GetattrFlags::FH.bits(),
            fh,
            ..Default::default()
        };
        let now = self.step(Opcode::Getattr, node, op.as_bytes(), none(), none());
        let Ok(Answer::Body(body)) = now.await else {
            return None;
        };
        entry.attr = abi::AttrOut::read_from_prefix(&body).ok()?.0.attr;
        if entry.attr.size > CONTENTS {
            return None;
        }
        let size = entry.attr.size as usize;
        let mut contents = SmallVec::from_elem(0, size);
        if size > 0 {
            debug_assert!(size <= INLINE_SIZE);
            // The request's names were there; nobody needs them any more.
            let room = Payload::from(self.inline.slice(at..at + size));
            let op = abi::ReadIn {
                fh,
                size: size as u32,
                ..Default::default()
            };
            let read = self.step(Opcode::Read, node, op.as_bytes(), none(), room.clone());
            match read.await {
                Ok(Answer::Room(n)) if n == size => room.copy_out(0, &mut contents),
                _ => return None,
            }
        }
        Some(contents)
    }

    async fn close_handle(&self, node: u64, fh: u64) {
        let op = abi::ReleaseIn {
            fh,
            ..Default::default()
        };
        let none = Payload::default;
        let _ = self
            .step(Opcode::Release, node, op.as_bytes(), none(), none())
            .await;
    }

    /// Takes back what an open gave.
    pub(super) async fn close(&self, slot: &Slot) -> Result<Answer, Errno> {
        let (arg, _) =
            CloseIn::read_from_prefix(&slot.op[..slot.op_len]).map_err(|_| Errno::INVAL)?;
        let node = slot.header.nodeid;
        if !self.handles.borrow().contains(&(node, arg.fh, false)) {
            return Err(Errno::BADF);
        }
        if arg.seq != 0 {
            let coherence = &self.session.coherence;
            coherence.returned(&self.link, node, arg.seq, None);
        }
        self.close_handle(node, arg.fh).await;
        self.drop_lookup(node);
        Ok(Answer::empty())
    }

    /// A token for an open file of the client's own.
    pub(super) fn token(&self, slot: &Slot) -> Result<Answer, Errno> {
        let (arg, _) =
            TokenIn::read_from_prefix(&slot.op[..slot.op_len]).map_err(|_| Errno::INVAL)?;
        let node = slot.header.nodeid;
        if self.guest || !self.handles.borrow().contains(&(node, arg.fh, false)) {
            return Err(Errno::BADF);
        }
        let grant = Grant {
            node,
            fh: arg.fh,
            flags: self.session.fs().open_flags(node, arg.fh)?,
        };
        let token = self.session.tokens.issue(grant)?;
        Ok(Answer::Body(Body::from_slice(&token)))
    }
}
