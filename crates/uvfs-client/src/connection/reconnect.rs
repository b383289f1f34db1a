//! Attaching to a server, watching it, and attaching to the next one when it went.

use std::collections::HashMap;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use rustix::fs::OFlags;
use rustix::io::{self, Errno};
use uvfs_proto::abi::{self, Opcode};
use uvfs_proto::ext;
use uvfs_queue::arena::Arena;
use uvfs_queue::attach::{self, Message};
use uvfs_queue::pair::{ClientQueue, End};
use uvfs_queue::wait::Patience;
use zerocopy::IntoBytes;

use super::channel::{Channel, DEPTH, Descriptors, NEVER_WAITS, Reply, Waiting, hangs_up};
use super::codec::{entry_of, lock_in, parse, refusal};
use super::known::Found;
use super::silence::Silence;
use super::{ANSWERS, Attempts, Inner};

use crate::error::{Error, Result};
use crate::event::Event;
use crate::types::{LockRequest, NodeId, ROOT, Reattached, Reclaimed};
use uvfs_sys::lock;

/// How often the watcher looks for a server that came back, at first and at last.
pub(super) const FIRST_PAUSE: Duration = Duration::from_millis(10);
pub(super) const LONGEST_PAUSE: Duration = Duration::from_millis(250);

/// A session's socket, and the list of descriptors that it begins.
pub(super) struct Ready {
    pub(super) socket: UnixStream,
    /// Last, as in [`Channel`].
    pub(super) descriptors: Descriptors,
}

/// A server that is gone, for the search for the next.
pub(super) struct Lost<'a> {
    /// Where that will be.
    pub(super) path: &'a Path,
    pub(super) old: &'a Channel,
    /// The file system gives later changes a later time than this.
    pub(super) since: (i64, u32),
}

impl Channel {
    /// An answer, or the errno of one that is about a file. The error is the session's.
    pub(super) fn answer(&self, reply: Reply) -> io::Result<Reply> {
        match reply {
            Err(e @ Errno::NOTCONN) if !self.is_alive() => Err(e),
            reply => Ok(reply),
        }
    }

    /// Finds a file that was open at a server before this one.
    pub(super) fn find(&self, identity: &[u8]) -> io::Result<io::Result<Reclaimed>> {
        if identity.is_empty() {
            return Ok(Err(Errno::STALE));
        }
        Ok(
            match self.answer(self.call(ext::FIND, ROOT, &[], identity, &[]))? {
                Ok(reply) => entry_of(&reply)
                    .map_err(|_| Errno::IO)
                    .map(|entry| Reclaimed {
                        node: entry.node,
                        mtime: (entry.attr.mtime as i64, entry.attr.mtimensec),
                    }),
                // A guest's: only a token gives it files.
                Err(Errno::PERM) => Err(Errno::STALE),
                Err(code) => Err(code),
            },
        )
    }

    /// Opens a file again, with its locks; the handle.
    pub(super) fn open_again(
        &self,
        node: u64,
        flags: OFlags,
        locks: &[LockRequest],
    ) -> io::Result<io::Result<u64>> {
        let op = abi::OpenIn {
            flags: flags.bits(),
            open_flags: 0,
        };
        let reply = self.call(Opcode::Open as u32, node, op.as_bytes(), &[], &[]);
        let fh = match self.answer(reply)?.map(|r| parse::<abi::OpenOut>(&r)) {
            Ok(Ok(out)) => out.fh,
            Ok(Err(_)) => return Ok(Err(Errno::IO)),
            Err(code) => return Ok(Err(code)),
        };
        for lock in locks {
            let op = lock_in(fh, lock);
            let reply = self.call(Opcode::Setlk as u32, node, op.as_bytes(), &[], &[]);
            if self.answer(reply)?.is_err() {
                // As with NFS, where a lock was lost.
                return Ok(Err(Errno::IO));
            }
        }
        Ok(Ok(fh))
    }

    /// Gives the locks `before` back, and takes those of `now`.
    pub(super) fn lock_anew(
        &self,
        node: u64,
        fh: u64,
        before: &[LockRequest],
        now: &[LockRequest],
    ) {
        let all = |lock: &LockRequest| LockRequest {
            kind: None,
            start: 0,
            end: i64::MAX as u64,
            ..*lock
        };
        for lock in before.iter().map(all).chain(now.iter().copied()) {
            let op = lock_in(fh, &lock);
            self.tell(Opcode::Setlk as u32, node, op.as_bytes());
        }
    }
}

impl Inner {
    /// How long a server may answer nothing.
    pub(super) fn answers(&self) -> Duration {
        *self.answers.get().unwrap_or(&ANSWERS)
    }

    pub(super) fn ready(&self, socket: UnixStream, begins: bool) -> Ready {
        let mut descriptors = Descriptors {
            open: Vec::new(),
            told: self.on_descriptor.get().cloned(),
            begins,
        };
        descriptors.add(socket.as_raw_fd());
        Ready {
            socket,
            descriptors,
        }
    }

    /// Attaches through a connected socket.
    pub(super) fn attach(
        &self,
        ready: Ready,
        arena: &Arc<Arena>,
        generation: u64,
    ) -> Result<Arc<Channel>> {
        let mut descriptors = ready.descriptors;
        // After it, so that it is dropped before it.
        let socket = ready.socket;
        // The arena shows a server what was cached, and lets it change what is dirty. So a server that comes
        // later has to be the first one's user, or root.
        let user = attach::peer(&socket)?.uid;
        let first = *self.user.get_or_init(|| user);
        if user != 0 && user != first {
            return Err(Error::because(
                Errno::PERM,
                "the server runs as another user than the one before",
            ));
        }
        let queue = ClientQueue::create(DEPTH)?;
        descriptors.add(queue.as_fd().as_raw_fd());
        socket.set_read_timeout(Some(self.answers()))?;
        let hello = Message {
            errno: 0,
            max_payload: 0,
            source: [0; 16],
        };
        let sent = attach::send(&socket, hello, &[arena.as_fd(), queue.as_fd()]);
        // A server without a place answers and closes before it reads: its answer says why.
        let (answer, mut fds) = match (attach::receive(&socket), &sent) {
            (Err(_), Err(_)) => return Err(sent.unwrap_err().into()),
            (Err(e), _) if Errno::from_io_error(&e) == Some(Errno::AGAIN) => {
                return Err(Errno::TIMEDOUT.into());
            }
            (received, _) => received?,
        };
        if answer.errno != 0 {
            return Err(refusal(answer.errno.wrapping_neg()).into());
        }
        sent?;
        let (Some(bell), 4096..) = (fds.pop(), answer.max_payload) else {
            return Err(Errno::PROTO.into());
        };
        let bell = attach::aside(bell);
        descriptors.add(bell.as_raw_fd());
        queue.wake_through(bell);
        let channel = Arc::new(Channel {
            name: self.name,
            cache: self.cache.clone(),
            generation,
            socket,
            source: answer.source,
            queue,
            max_payload: (answer.max_payload as usize).min(1 << 20) / 4096 * 4096,
            arena: arena.clone(),
            slots: std::array::from_fn(|_| Mutex::new(Waiting::Free)),
            answered: AtomicU64::new(0),
            silence: Silence::default(),
            answers: self.answers(),
            consumer: Mutex::default(),
            pollers: AtomicU32::new(0),
            reaper_rests: AtomicBool::new(false),
            patience: Patience::default(),
            event: Event::default(),
            unique: AtomicU64::new(2),
            deferred: Mutex::default(),
            recalls: Mutex::new(lock(&self.recalls).clone()),
            dead: AtomicBool::new(false),
            broken: AtomicBool::new(false),
            stop: AtomicBool::new(false),
            reaper: Mutex::default(),
            descriptors,
        });
        let mine = channel.clone();
        let reaper = std::thread::Builder::new().name("uvfs-reaper".into());
        *lock(&channel.reaper) = Some(reaper.spawn(move || {
            NEVER_WAITS.set(true);
            mine.reap();
        })?);
        Ok(channel)
    }

    /// The body of the thread that notices a server's end and looks for the next.
    pub(super) fn watch(&self) {
        NEVER_WAITS.set(true);
        while let Some(old) = self.current.load_full() {
            wait_closed(&old.socket);
            let since = SystemTime::now().duration_since(UNIX_EPOCH);
            let since = since.unwrap_or_default();
            let since = (since.as_secs() as i64, since.subsec_nanos());
            old.end();
            if self.stop.load(Ordering::Acquire) {
                return;
            }
            lock(&self.attempts).lost.get_or_insert_with(Instant::now);
            let end = old.queue.server_end();
            let over = end == End::CutOff || old.broken.load(Ordering::Acquire);
            let Some(path) = self.path.as_ref().filter(|_| !over) else {
                tracing::error!(path = ?self.path, ?end, "the server is gone for good");
                lock(&self.attempts).over = true;
                self.attempted.notify_all();
                return;
            };
            tracing::warn!(?path, ?end, "the server is gone");
            let mut pause = FIRST_PAUSE;
            let lost = Lost {
                path,
                old: &old,
                since,
            };
            while let Err(error) = self.attempt(&lost) {
                if self.stop.load(Ordering::Acquire) {
                    return;
                }
                tracing::debug!(%error, ?path, "not attached again");
                let attempts = lock(&self.attempts);
                let quiet = |a: &mut Attempts| !a.wanted && !self.stop.load(Ordering::Acquire);
                drop(self.attempted.wait_timeout_while(attempts, pause, quiet));
                // Callers may want many; the machine is to bring the server back.
                std::thread::sleep(FIRST_PAUSE.min(pause));
                pause = (pause * 2).min(LONGEST_PAUSE);
            }
            tracing::warn!(?path, "attached to a server again");
        }
    }

    pub(super) fn attempt(&self, lost: &Lost<'_>) -> Result<()> {
        {
            let mut attempts = lock(&self.attempts);
            attempts.wanted = false;
            attempts.begun += 1;
        }
        let result = self.reattach(lost);
        lock(&self.next).take();
        let mut attempts = lock(&self.attempts);
        attempts.ended = attempts.begun;
        attempts.other = matches!(&result, Err(e) if e.errno() == Errno::STALE);
        if result.is_ok() {
            attempts.lost = None;
        }
        self.attempted.notify_all();
        result
    }

    /// Attaches to the server that now is at the path, if it serves the same source, finds there
    /// what was open, and makes that the current session.
    pub(super) fn reattach(&self, lost: &Lost<'_>) -> Result<()> {
        let spare = lock(&self.spare).take();
        let ready = match spare {
            Some(ready) => ready,
            None => self.ready(attach::socket()?, true),
        };
        ready.socket.set_write_timeout(Some(self.answers()))?;
        if let Err(error) = attach::connect(&ready.socket, lost.path) {
            *lock(&self.spare) = Some(ready);
            return Err(error.into());
        }
        let new = self.attach(ready, &lost.old.arena, lost.old.generation + 1)?;
        *lock(&self.next) = Some(new.clone());
        let found = match self.stop.load(Ordering::Acquire) {
            true => Err(Errno::NOTCONN),
            false => self.find_again(lost, &new),
        };
        if found.is_ok() {
            let next = attach::socket().ok();
            *lock(&self.spare) = next.map(|socket| self.ready(socket, true));
        } else {
            new.end();
            let _ = new.socket.shutdown(std::net::Shutdown::Both);
        }
        Ok(found?)
    }

    pub(super) fn find_again(&self, lost: &Lost<'_>, new: &Arc<Channel>) -> io::Result<()> {
        let &Lost {
            path, old, since, ..
        } = lost;
        if new.source != old.source || new.source == [0; 16] {
            tracing::error!(
                ?path,
                "another source is served there, or one that can't be told from others: \
                 what is dirty stays until the same one is served again"
            );
            return Err(Errno::STALE);
        }
        if new.max_payload < old.max_payload {
            return Err(Errno::PROTO);
        }
        let (nodes, handles) = {
            let mut known = lock(&self.known);
            (known.nodes(), known.handles())
        };
        let mut found: Found<NodeId, Reclaimed> = Found::new();
        for (node, identity) in nodes {
            let again = new.find(&identity)?;
            if let Err(error) = again {
                tracing::error!(node, %error, "an open file was not found again");
            }
            found.insert(node, again);
        }
        let mut opened = Found::new();
        for &((node, ours), flags, ref locks) in &handles {
            let at_server = match found.get(&node).copied().unwrap_or(Err(Errno::STALE)) {
                Ok(again) => new.open_again(again.node, flags, locks)?,
                Err(code) => Err(code),
            };
            if let Err(error) = at_server {
                tracing::error!(node, %error, "a file could not be opened or locked again");
            }
            opened.insert((node, ours), at_server);
        }
        let end = old.queue.server_end();
        if let Some(cache) = self.cache.get().and_then(Weak::upgrade) {
            cache.reattached(&Reattached {
                session: new.generation,
                written: matches!(end, End::Written | End::Lost),
                lost: end == End::Lost,
                since,
                nodes: &found,
                handles: &opened,
            });
        }
        let (closed, gone, locked) = {
            let mut known = lock(&self.known);
            let (closed, gone) = known.rebind(&found, &opened);
            (closed, gone, known.handles())
        };
        self.current.store(Some(new.clone()));
        let locked: HashMap<_, _> = locked
            .into_iter()
            .map(|(at, _, locks)| (at, locks))
            .collect();
        for (at, _, before) in &handles {
            if let (Some(now), Some(Ok(again)), Some(Ok(fh))) =
                (locked.get(at), found.get(&at.0), opened.get(at))
                && now != before
            {
                // Given back while they were taken again.
                new.lock_anew(again.node, *fh, before, now);
            }
        }
        for (node, fh) in closed {
            let op = abi::ReleaseIn {
                fh,
                ..Default::default()
            };
            new.tell(Opcode::Release as u32, node, op.as_bytes());
        }
        for node in gone {
            let op = abi::ForgetIn { nlookup: 1 };
            new.tell(Opcode::Forget as u32, node, op.as_bytes());
        }
        Ok(())
    }
}

/// Waits until the other end of a socket is closed, or this one.
pub(super) fn wait_closed(socket: &UnixStream) {
    while !hangs_up(socket, None) {}
}
