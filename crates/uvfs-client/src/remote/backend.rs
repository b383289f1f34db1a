//! [`Backend`] by requests to the server.

use std::io;
use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use uvfs_proto::abi::{self, Opcode};
use uvfs_proto::ext;
use uvfs_proto::import::{IMPORT, ImportIn, ImportOut};
use uvfs_queue::arena::Arena;
use uvfs_queue::attach;
use uvfs_queue::pair::{Direction, End};
use zerocopy::IntoBytes;

use super::codec::{attr_of, parse, wire};
use super::session::{ANSWERS_RECALLS, NEVER_WAITS, Waiting};
use super::{Attempts, LAST_LOOK, LISTING, RECONNECT, SEQ_BITS, Server};
use crate::backend::{
    Backend, Entry, Figures, FileOps, Grant, Imported, Lease, Limits, NodeId, OnReattach, OnRecall,
    Op, PageIo, Request, SharedServer,
};
use crate::cache::errno;
use uvfs_sys::lock;

impl Backend for Server {
    fn pages(&self) -> &dyn PageIo {
        self
    }

    fn files(&self) -> &dyn FileOps {
        self
    }

    fn shared(&self) -> Option<&dyn SharedServer> {
        Some(self)
    }
}

impl PageIo for Server {
    fn attach(&self, arena: &Arc<Arena>) -> io::Result<()> {
        let socket = lock(&self.inner.first).take();
        let socket = socket.ok_or_else(|| errno(libc::EBUSY))?;
        // The last pages, which the cache was not given.
        *lock(&self.inner.room) = arena.pages() - self.reserved_pages();
        let ready = self.inner.ready(socket, false);
        if self.inner.path.is_some() {
            *lock(&self.inner.spare) = Some(self.inner.ready(attach::socket()?, true));
        }
        let session = self.inner.attach(ready, arena, 0)?;
        self.inner.current.store(Some(session));
        let inner = self.inner.clone();
        let watcher = std::thread::Builder::new().name("uvfs-watcher".into());
        *lock(&self.watcher) = Some(watcher.spawn(move || inner.watch())?);
        Ok(())
    }

    fn descriptors(&self) -> Vec<RawFd> {
        // Without waiting for a lock: also for the child of a fork.
        let current = self.inner.current.load();
        let mut descriptors = Vec::new();
        if let Some(session) = current.as_ref() {
            descriptors.extend(&session.descriptors.open);
            descriptors.push(session.arena.as_fd().as_raw_fd());
        }
        if let Ok(spare) = self.inner.spare.try_lock() {
            descriptors.extend(spare.iter().flat_map(|ready| &ready.descriptors.open));
        }
        descriptors
    }

    fn reserved_pages(&self) -> u32 {
        (LISTING / 4096) as u32
    }

    fn limits(&self) -> Limits {
        let max = self.current().map_or(4096, |s| s.max_payload);
        Limits {
            max_read: max,
            max_write: max,
        }
    }

    fn submit(&self, batch: &mut Vec<Request>) {
        let session = match self.current() {
            Ok(session) => session,
            Err(e) => {
                let code = e.raw_os_error().unwrap_or(libc::EIO);
                return batch.drain(..).for_each(|r| (r.done)(Err(errno(code))));
            }
        };
        for r in batch.drain(..) {
            let at = self.at(&session, r.node, r.handle);
            let reserved = at.and_then(|at| Ok((at, session.reserve()?)));
            let ((node, fh), id) = match reserved {
                Ok(reserved) => reserved,
                Err(e) => {
                    (r.done)(Err(e));
                    continue;
                }
            };
            let waiting = Waiting::Data(r.op, r.len, r.done);
            match r.op {
                Op::Read => {
                    let op = abi::ReadIn {
                        fh,
                        offset: r.offset,
                        size: r.len as u32,
                        read_flags: if r.dontcache {
                            abi::ReadFlags::DONTCACHE.bits()
                        } else {
                            0
                        },
                        ..Default::default()
                    };
                    let from = Direction::FromServer;
                    let op = op.as_bytes();
                    session.send(
                        id,
                        Opcode::Read as u32,
                        node,
                        op,
                        &[],
                        &r.segs,
                        from,
                        waiting,
                    );
                }
                Op::Write => {
                    let mut flags = abi::WriteFlags::empty();
                    flags.set(abi::WriteFlags::CACHE, r.writeback);
                    flags.set(abi::WriteFlags::DONTCACHE, r.dontcache);
                    let op = abi::WriteIn {
                        fh,
                        offset: r.offset,
                        size: r.len as u32,
                        write_flags: flags.bits(),
                        ..Default::default()
                    };
                    let (to, op) = (Direction::ToServer, op.as_bytes());
                    session.send(
                        id,
                        Opcode::Write as u32,
                        node,
                        op,
                        &[],
                        &r.segs,
                        to,
                        waiting,
                    );
                }
            }
        }
        session.queue.ring();
    }

    fn carry_out(&self, batch: &mut Vec<Request>) {
        self.submit(batch);
    }

    fn poll(&self, done: &mut dyn FnMut() -> bool) {
        if let Ok(session) = self.current() {
            session.poll(done);
        }
    }

    fn help(&self, _: &mut dyn FnMut() -> bool) {}
}

impl SharedServer for Server {
    fn lease(&self, node: NodeId, lease: Lease) -> io::Result<Grant> {
        let op = ext::LeaseIn {
            mode: wire(lease),
            padding: 0,
        };
        let session = self.living()?;
        let node = self.node(&session, node)?;
        let reply = session.call(ext::LEASE, node, op.as_bytes(), &[], &[])?;
        let out: ext::LeaseOut = parse(&reply)?;
        Ok(if out.granted == ext::LEASE_NONE {
            let retry = Duration::from_millis(out.retry_ms.into());
            match out.seq {
                0 => Grant::Refused(retry),
                _ => Grant::Taken(retry),
            }
        } else {
            Grant::Granted {
                session: session.generation,
                seq: session.generation << SEQ_BITS | out.seq,
                attr: attr_of(&out.attr),
            }
        })
    }

    fn return_lease(&self, node: NodeId, seq: u64, keep: Lease) {
        // One of a server that is gone went with it.
        if let Ok(session) = self.current()
            && session.generation == seq >> SEQ_BITS
            && let Ok(node) = self.node(&session, node)
        {
            let op = ext::LeaseReturnIn {
                seq: seq & ((1 << SEQ_BITS) - 1),
                keep: wire(keep),
                padding: 0,
            };
            session.tell(ext::LEASE_RETURN, node, op.as_bytes());
        }
    }

    fn on_recall(&self, call: OnRecall) {
        let Some(recalls) = lock(&self.inner.recalled).take() else {
            return;
        };
        let known = self.inner.known.clone();
        let answer = move || {
            ANSWERS_RECALLS.set(true);
            NEVER_WAITS.set(true);
            while let Ok((generation, mut recall)) = recalls.recv() {
                let node = lock(&known).ours(generation, recall.node);
                if let Some(node) = node {
                    recall.node = node;
                    recall.seq |= generation << SEQ_BITS;
                    call(recall);
                }
            }
        };
        let thread = std::thread::Builder::new().name("uvfs-recalls".into());
        if let Err(error) = thread.spawn(answer) {
            tracing::error!(%error, "recalls will not be answered");
        }
    }

    fn publish_from(&self, figures: Figures) {
        let _ = self.inner.figures.set(figures);
    }

    fn is_alive(&self) -> bool {
        (self.inner.current.load().as_ref()).is_some_and(|session| session.is_alive())
    }

    fn session(&self) -> Option<u64> {
        let current = self.inner.current.load();
        let session = current.as_ref().filter(|session| session.is_alive())?;
        Some(session.generation)
    }

    fn still_open(&self, node: NodeId, handle: u64) -> io::Result<()> {
        let session = self.current()?;
        self.at(&session, node, handle).map(drop)
    }

    fn names(&self, node: NodeId, handle: u64) -> (u64, u64, u64) {
        let Ok(session) = self.current() else {
            return (0, node, handle);
        };
        if session.generation == 0 {
            return (0, node, handle);
        }
        let known = self.known();
        let generation = session.generation;
        (
            generation,
            known.node(generation, node).unwrap_or(u64::MAX),
            known.handle(generation, node, handle).unwrap_or(u64::MAX),
        )
    }

    fn reconnect(&self) -> io::Result<()> {
        let inner = &*self.inner;
        let gone = Err(errno(libc::ENOTCONN));
        if self.is_alive() {
            return Ok(());
        }
        if NEVER_WAITS.get() || inner.path.is_none() {
            return gone;
        }
        let mut attempts = lock(&inner.attempts);
        if self.is_alive() {
            return Ok(());
        }
        let bound = *inner.patience.get().unwrap_or(&RECONNECT);
        let lost = *attempts.lost.get_or_insert_with(Instant::now);
        let left = bound.saturating_sub(lost.elapsed());
        // One that began before may have looked too early.
        let wait_for = attempts.begun + 1;
        attempts.wanted = true;
        inner.attempted.notify_all();
        let waits = |a: &mut Attempts| {
            !a.over && a.lost.is_some() && (lost.elapsed() < bound || a.ended < wait_for)
        };
        let waited =
            inner
                .attempted
                .wait_timeout_while(attempts, left.max(LAST_LOOK.min(bound)), waits);
        let (attempts, _) = waited.unwrap_or_else(PoisonError::into_inner);
        match attempts.other {
            _ if self.is_alive() => Ok(()),
            true => Err(errno(libc::ESTALE)),
            false => gone,
        }
    }

    fn has_written(&self) -> bool {
        let Ok(session) = self.current() else {
            return false;
        };
        let bound = *self.inner.patience.get().unwrap_or(&RECONNECT);
        let began = Instant::now();
        loop {
            // Looked at first: once the watcher has ended the session nothing changes any more.
            let last = session.stop.load(Ordering::Acquire) || NEVER_WAITS.get();
            match session.queue.server_end() {
                End::Closed if !last && began.elapsed() < bound => {
                    std::thread::sleep(Duration::from_millis(1));
                }
                end => return end == End::Written,
            }
        }
    }

    fn on_reattach(&self, call: OnReattach) {
        *lock(&self.inner.on_reattach) = Some(Arc::new(call));
    }

    fn import(&self, secret: &[u8; 32]) -> io::Result<Imported> {
        let op = ImportIn { token: *secret };
        let session = self.living()?;
        let reply = session.call(IMPORT, 0, op.as_bytes(), &[], &[])?;
        let out: ImportOut = parse(&reply)?;
        let identity = &reply[size_of::<ImportOut>()..];
        let flags = out.flags as i32;
        let mut known = self.known();
        let node = known.looked_up(session.generation, out.nodeid, None)?;
        let handle = known.opened(session.generation, node, out.fh, flags, identity, true)?;
        Ok(Imported {
            entry: Entry {
                node,
                attr: attr_of(&out.attr),
            },
            handle,
            flags,
        })
    }
}
