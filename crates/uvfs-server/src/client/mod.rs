//! A client over shared memory, as the server sees it: what it is allowed, what it was given, and the
//! requests that only clients have.
//!
//! A guest, another user than the server's, may import open files that it has tokens for
//! (`token.rs`), and use those.

mod account;
mod authorize;
pub(crate) mod guests;
mod recovery;
pub(crate) mod tasks;

use std::cell::{Cell, RefCell};
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use foldhash::HashMap;
use uvfs_io::ops::File;
use uvfs_io::{IoBuf, Payload};
use uvfs_proto::abi::{self, InHeader};
use uvfs_proto::ext::{self, LeaseIn};
use uvfs_proto::import::{IMPORT, ImportIn, ImportOut};
use uvfs_proto::request::Operation;
use uvfs_queue::arena::Arena;
use uvfs_queue::pair::{End, ServerQueue};

use crate::dispatch::{self, attributes, entry_out};
use crate::fs::{self, Context, Errno, FileSystem, Node, Origin};
use crate::interrupt::{self, Cause, Waits};
use crate::lease::{LeaseMode, Link};
use crate::pipeline::{execute, refuse};
use crate::reply::{Body, Outcome, Reply};
use crate::request::{Message, Request};
use crate::session::Session;
use crate::stats::{Attached, QueueStats};

use guests::Guest;

pub(crate) struct Client<F: FileSystem> {
    pub(crate) session: Arc<Session<F>>,
    /// How others recall its leases.
    pub(crate) link: Arc<Link>,
    pub(crate) stats: Arc<QueueStats>,
    /// Its entry in the list that `uvfs stats` shows.
    pub(crate) listed: Arc<Attached>,
    /// Set for another user's client, which may use only what it imported, within limits.
    pub(crate) guest: Option<Arc<Guest>>,
    pub(crate) queue: Arc<ServerQueue>,
    pub(crate) arena: Arc<Arena>,
    /// The arena's memory.
    pub(crate) memory: IoBuf,
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    pub(crate) pid: u32,
    /// Tells its locks from other clients'.
    pub(crate) number: u32,
    /// Open files and directories: node, handle, whether it is a directory; and how often that was opened, as a
    /// file system may give equal handles.
    pub(crate) handles: RefCell<HashMap<(u64, u64, bool), u64>>,
    /// Those of the handles that were imported: the flags that open(2) got for each, and how often it was imported.
    pub(crate) imported: RefCell<HashMap<(u64, u64), (u32, usize)>>,
    /// No request is taken any more.
    pub(crate) over: Cell<bool>,
    /// Its dirty pages have been written, or are lost.
    pub(crate) salvaged: Cell<bool>,
    pub(crate) socket: Arc<File>,
}

/// The client hears of the end of its session, also when a panic ends it.
impl<F: FileSystem> Drop for Client<F> {
    fn drop(&mut self) {
        if !self.salvaged.get() {
            self.queue.close_as(End::CutOff);
        }
        let imported = self.imported.take();
        self.closed(imported.values().map(|(_, count)| count).sum());
        self.forgot_nodes(self.link.lookups().len());
        if let Some(guest) = &self.guest
            && self.link.was_cut_off()
        {
            guest.was_cut_off();
        }
        self.session.client_gone(&self.listed);
        self.session.client_queue_ended(self.stats.clone());
        self.session.coherence.detach(&self.link);
        let _ = rustix::net::shutdown(&*self.socket, rustix::net::Shutdown::Both);
    }
}

impl<F: FileSystem> Client<F> {
    /// The session ends: nothing more is taken, and requests that wait for locks, or for a mount that hangs, wait no
    /// longer.
    pub(crate) fn ends(&self) {
        self.link.end();
        self.over.set(true);
        self.session.interrupts.interrupt_client(self.number);
    }

    /// The header of a new request of the client's, but for what is asked.
    pub(crate) fn header(&self) -> InHeader {
        let cx = self.context();
        InHeader {
            unique: cx.unique,
            uid: cx.uid,
            gid: cx.gid,
            pid: cx.pid,
            ..Default::default()
        }
    }

    /// The caller of a new request.
    fn context(&self) -> Context {
        static COUNT: AtomicU64 = AtomicU64::new(0);
        Context {
            unique: interrupt::unique(self.number, COUNT.fetch_add(1, Ordering::Relaxed)),
            uid: self.uid,
            gid: self.gid,
            pid: self.pid,
            group: None,
        }
    }

    /// A request as if the client had sent it.
    fn request<'a>(
        &'a self,
        node: u64,
        operation: Operation<'a>,
        data: Payload,
        room: &'a Payload,
    ) -> Request<'a> {
        Request {
            origin: Origin::Client(&self.link),
            cx: self.context(),
            node,
            operation,
            data,
            room,
        }
    }

    /// Serves one request. Calls `send` with the outcome, the bytes that the answer has beyond FUSE's, and the room
    /// for it.
    pub(crate) async fn serve(
        self: &Rc<Self>,
        message: Message,
        send: impl FnOnce(&Outcome, &[u8], &Payload),
    ) {
        let asked = message.header.opcode;
        let private = message.private();
        let mut tail = Body::new();
        match ext::ExtOperation::parse(asked, message.structure(), &private) {
            None => {
                let origin = Origin::Client(&*self.link);
                let negotiated = self.session.negotiated();
                let mut request = Request::decode(&message, &private, origin, negotiated);
                let outcome = match &mut request {
                    Ok(request) => match self.authorize(request) {
                        Ok(()) => pin!(self.fuse(request, &mut tail)).await,
                        Err(errno) => Err(errno),
                    },
                    Err(errno) => refuse(&self.stats, asked, *errno),
                };
                // Accounted once the client is told, which goes on meanwhile: its next request is
                // taken after that.
                send(&outcome, &tail, &message.room);
                if let (Ok(request), Ok(reply)) = (&request, outcome) {
                    self.account(request, reply);
                }
            }
            Some(Ok(operation)) => {
                // The steps of these account for themselves.
                let outcome = pin!(self.own(operation, &message, &mut tail)).await;
                send(&outcome, &tail, &message.room);
            }
            Some(Err(_)) => send(&Err(Errno::INVAL), &tail, &message.room),
        }
    }

    /// Answers an authorized request of FUSE's.
    async fn fuse(&self, request: &Request<'_>, tail: &mut Body) -> Outcome {
        if self.over.get() && matches!(request.operation, Operation::Setlkw(_)) {
            return Err(Errno::INTR);
        }
        let outcome = pin!(execute(&self.session, &self.stats, request)).await;
        match &outcome {
            Ok(Reply::Opened(_)) if matches!(request.operation, Operation::Open(_)) => {
                self.identify(request.node, false, tail);
            }
            Ok(Reply::Created(entry, _)) if matches!(request.operation, Operation::Create(..)) => {
                self.identify(entry.nodeid, false, tail);
            }
            _ => {}
        }
        outcome
    }

    /// Answers a request that only clients have.
    async fn own(
        &self,
        operation: ext::ExtOperation<'_>,
        message: &Message,
        tail: &mut Body,
    ) -> Outcome {
        let (cx, node) = (&message.context(), message.header.nodeid);
        match operation {
            ext::ExtOperation::Import(arg) => pin!(self.import(cx, &arg, tail)).await,
            ext::ExtOperation::Lease(arg) => pin!(self.lease(node, &arg)).await,
            ext::ExtOperation::LeaseReturn(arg) => {
                let keep = (arg.keep == ext::LEASE_READ).then_some(LeaseMode::Read);
                let coherence = &self.session.coherence;
                coherence.returned(&self.link, node, arg.seq, keep);
                Ok(Reply::Empty)
            }
            ext::ExtOperation::Find(identity) => pin!(self.find(cx, identity)).await,
        }
    }

    /// Exchanges a token for a handle of the client's own.
    async fn import(&self, cx: &Context, asked: &ImportIn, tail: &mut Body) -> Outcome {
        let session = &self.session;
        let grant = session.tokens.take(&asked.token, Instant::now());
        let grant = grant.ok_or(Errno::ACCESS)?;
        let fs = session.fs();
        let (node, fh) = (grant.node, grant.fh);
        let work = async {
            if !self.guest.as_ref().is_none_or(|guest| guest.opens()) {
                return Err(Errno::MFILE.into());
            }
            let shared = async { fs.clients().ok_or(Errno::NOSYS)?.share(node, fh).await };
            let fh = shared.await.inspect_err(|_| self.closed(1))?;
            // From here on the server closes it when the client goes.
            self.opened(node.0, fh.0, false);
            {
                let mut imported = self.imported.borrow_mut();
                let (flags, count) = imported.entry((node.0, fh.0)).or_default();
                (*flags, *count) = (grant.flags, *count + 1);
            }
            self.looked_up(node.0);
            if session.flags_of(node, fh)? != grant.flags {
                return Err(Errno::BADF.into());
            }
            let attributes = fs.getattr(cx, node, Some(fh)).await?;
            Ok(ImportOut {
                nodeid: node.0,
                fh: fh.0,
                flags: grant.flags,
                padding: 0,
                attr: attributes.attr,
            })
        };
        let out = self.run(cx, (IMPORT, "IMPORT"), node.0, work).await?;
        if self.guest.is_none() {
            self.identify(node.0, true, tail);
        }
        Ok(Reply::of(&out))
    }

    /// Runs the file system's part of a request that only clients have, counts it, and logs its error.
    async fn run<T>(
        &self,
        cx: &Context,
        (opcode, name): (u32, &str),
        node: u64,
        work: impl Future<Output = fs::Result<T>>,
    ) -> Result<T, Errno> {
        self.stats.begin(opcode);
        let waits = Waits::new(cx, opcode, node, Cause::FileSystem);
        let done = self.session.interrupts.guard(waits, work).await;
        let done = dispatch::end(done, name, node);
        self.stats.end(opcode, done.as_ref().err().copied());
        done
    }

    /// Imported files were closed.
    fn closed(&self, count: usize) {
        if let Some(guest) = &self.guest {
            guest.closed(count);
        }
    }

    /// Grants a lease, if that can be now.
    async fn lease(&self, node: u64, arg: &LeaseIn) -> Outcome {
        let mode = match arg.mode {
            ext::LEASE_READ => LeaseMode::Read,
            ext::LEASE_WRITE => LeaseMode::Write,
            _ => return Err(Errno::INVAL),
        };
        if !self.link.lookups().contains_key(&node) {
            return Err(Errno::STALE);
        }
        let writable = |(&(n, fh), _): (&(u64, u64), &_)| n == node && self.access(n, fh).1;
        if self.guest.is_some()
            && mode == LeaseMode::Write
            && !self.imported.borrow().iter().any(writable)
        {
            return Err(Errno::ACCESS);
        }
        let coherence = &self.session.coherence;
        let seq = match coherence.grant(&self.link, node, mode).await {
            Ok(seq) => seq,
            Err(refusal) => {
                return Ok(Reply::of(&ext::LeaseOut {
                    retry_ms: refusal.retry.as_millis() as u32,
                    seq: u64::from(refusal.passing),
                    ..Default::default()
                }));
            }
        };
        // Read under the lease, so that no other request can change them any more.
        let (none, getattr) = (Payload::default(), abi::GetattrIn::default());
        let getattr = Operation::Getattr(getattr);
        let request = self.request(node, getattr, Payload::default(), &none);
        let attr = attributes(&self.session, &request, node).await;
        let attr = attr.inspect_err(|_| coherence.returned(&self.link, node, seq, None))?;
        Ok(Reply::of(&ext::LeaseOut {
            granted: arg.mode,
            retry_ms: 0,
            seq,
            attr,
        }))
    }

    /// Finds again what the client had at a server before this one. Not for guests: an identity
    /// can be made up, and leads to any file of the source.
    async fn find(&self, cx: &Context, identity: &[u8]) -> Outcome {
        if self.guest.is_some() {
            return Err(Errno::PERM);
        }
        if identity.len() > ext::IDENTITY_MAX {
            return Err(Errno::INVAL);
        }
        let clients = self.session.fs().clients();
        let work = async { clients.ok_or(Errno::OPNOTSUPP)?.find(cx, identity).await };
        let entry = self.run(cx, (ext::FIND, "FIND"), 0, work).await?;
        self.looked_up(entry.node.0);
        Ok(Reply::Entry(entry_out(&entry)))
    }

    /// Adds what finds an opened file again after a restart; with its path for a client that did not
    /// look it up.
    fn identify(&self, node: u64, with_path: bool, tail: &mut Body) {
        let (clients, node) = (self.session.fs().clients(), Node(node));
        let Some(clients) = clients else {
            return;
        };
        let Some(identity) = clients.identity(node) else {
            return;
        };
        let path = match with_path {
            true => clients.path(node).unwrap_or_default(),
            false => Vec::new(),
        };
        if identity.len() <= ext::IDENTITY_MAX {
            tail.extend_from_slice(&identity);
            if identity.len() + path.len() <= ext::IDENTITY_MAX {
                tail.extend_from_slice(&path);
            }
        }
    }
}
