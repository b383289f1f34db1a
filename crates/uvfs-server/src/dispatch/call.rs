//! Requests whose way to the handler, or back to the wire, takes several steps.

use std::cell::RefCell;
use std::ffi::CStr;
use std::sync::atomic::Ordering;

use tracing::Level;
use uvfs_proto::abi::{self, InitFlags, ReadFlags, SetxattrFlags, WriteFlags};
use uvfs_proto::reply;
use zerocopy::IntoBytes;

use super::Outcome;
use super::wire::{lock, sized, with_fh};
use crate::fs::*;
use crate::reply::{Body, Reply};
use crate::request::{DEPTH, Request};
use crate::session::Session;

/// The extended attribute of the root that names the control socket.
pub const CONTROL_XATTR: &str = "user.uvfs.control";

/// The extended attribute of the root that names the socket that clients attach to.
pub const SOCKET_XATTR: &str = "user.uvfs.socket";

/// The two ways of lseek(2) that the kernel can't answer by itself.
pub(crate) const SEEK_DATA: u32 = libc::SEEK_DATA as u32;
pub(crate) const SEEK_HOLE: u32 = libc::SEEK_HOLE as u32;

/// A request on its way to its handler.
pub(super) struct Call<'a, F: FileSystem> {
    pub(super) session: &'a Session<F>,
    pub(super) request: &'a Request<'a>,
}

impl<F: FileSystem> Call<'_, F> {
    fn fs(&self) -> &F {
        &self.session.fs
    }

    fn cx(&self) -> &Context {
        &self.request.cx
    }

    fn node(&self) -> Node {
        Node(self.request.node)
    }

    /// Whether a read or write is to leave nothing in the store's cache: every one of an uncached mount, and those of
    /// clients that ask for it. In a request of the kernel's the flag has no meaning.
    fn uncached(&self, asked: bool) -> bool {
        let asked = asked && matches!(self.request.origin, Origin::Client(_));
        (self.session.options.uncached || asked) && self.session.takes_uncached()
    }

    /// How a file or directory is opened.
    pub(super) fn how(&self, flags: u32, open_flags: u32) -> OpenHow {
        OpenHow {
            flags: OFlags::from_bits_retain(flags),
            kill_suidgid: open_flags & abi::OPEN_KILL_SUIDGID != 0,
            origin: self.request.origin.map(|_| ()),
        }
    }

    pub(super) async fn statx(&self, arg: &abi::StatxIn) -> Outcome {
        let fh = with_fh(arg.getattr_flags, arg.fh);
        let (stat, ttl) = self
            .fs()
            .statx(self.cx(), self.node(), fh, arg.sx_mask)
            .await?;
        let (attr_valid, attr_valid_nsec) = reply::ttl(ttl);
        Ok(Reply::Statx(Box::new(abi::StatxOut {
            attr_valid,
            attr_valid_nsec,
            stat,
            ..Default::default()
        })))
    }

    pub(super) async fn read(&self, arg: &abi::ReadIn) -> Outcome {
        let size = arg.size as usize;
        let room = self.request.room.len();
        if size > room {
            let why = format!("a READ of {size} bytes with room for {room}");
            return Err(Error::new(Errno::INVAL, why).level(Level::WARN));
        }
        let flags = ReadFlags::from_bits_retain(arg.read_flags);
        let how = IoHow {
            fh: Handle(arg.fh),
            offset: arg.offset,
            flags: OFlags::from_bits_retain(arg.flags),
            owner: flags
                .contains(ReadFlags::LOCKOWNER)
                .then_some(LockOwner(arg.lock_owner)),
            uncached: self.uncached(flags.contains(ReadFlags::DONTCACHE)),
            ..IoHow::default()
        };
        let data = self.request.room.slice(0..size);
        let read = self
            .fs()
            .read(self.cx(), self.node(), &how, &data)
            .await?
            .min(size);
        Ok(Reply::Read(read))
    }

    pub(super) async fn write(&self, arg: &abi::WriteIn) -> Outcome {
        let flags = WriteFlags::from_bits_retain(arg.write_flags);
        let how = IoHow {
            fh: Handle(arg.fh),
            offset: arg.offset,
            flags: OFlags::from_bits_retain(arg.flags),
            from_cache: flags.contains(WriteFlags::CACHE),
            kill_suidgid: flags.contains(WriteFlags::KILL_SUIDGID),
            owner: flags
                .contains(WriteFlags::LOCKOWNER)
                .then_some(LockOwner(arg.lock_owner)),
            uncached: self.uncached(flags.contains(WriteFlags::DONTCACHE)),
        };
        let data = &self.request.data;
        let written = self
            .fs()
            .write(self.cx(), self.node(), &how, data)
            .await?
            .min(data.len());
        Ok(Reply::Written(abi::WriteOut {
            size: written as u32,
            padding: 0,
        }))
    }

    /// The kernel's answer to a notification that asked for its cached pages.
    pub(super) fn retrieved(&self, arg: &abi::NotifyRetrieveIn) -> Reply {
        let mut bytes = vec![0; (arg.size as usize).min(self.request.data.len())];
        self.request.data.copy_out(0, &mut bytes);
        self.session.retrieved(self.cx().unique, arg.offset, bytes);
        Reply::None
    }

    pub(super) async fn release(&self, arg: &abi::ReleaseIn) -> Result<()> {
        let flags = abi::ReleaseFlags::from_bits_retain(arg.release_flags);
        let flock = flags
            .contains(abi::ReleaseFlags::FLOCK_UNLOCK)
            .then_some(LockOwner(arg.lock_owner));
        let opened = OFlags::from_bits_retain(arg.flags);
        let fh = Handle(arg.fh);
        self.fs()
            .release(self.cx(), self.node(), fh, opened, flock)
            .await
    }

    pub(super) async fn setxattr(
        &self,
        arg: &abi::SetxattrIn,
        name: &CStr,
        value: &[u8],
    ) -> Result<()> {
        let negotiated = self.session.negotiated().flags;
        let kill_sgid = negotiated.contains(InitFlags::SETXATTR_EXT)
            && arg.setxattr_flags & SetxattrFlags::ACL_KILL_SGID.bits() != 0;
        let flags = XattrFlags::from_bits_retain(arg.flags);
        self.fs()
            .setxattr(self.cx(), self.node(), name, value, flags, kill_sgid)
            .await
    }

    pub(super) async fn getxattr(&self, arg: &abi::GetxattrIn, name: &CStr) -> Outcome {
        let own = match name.to_str() {
            Ok(CONTROL_XATTR) => self.session.control_path(),
            Ok(SOCKET_XATTR) => self.session.socket_path(),
            _ => None,
        };
        if let Some(path) = own.filter(|_| self.node() == ROOT) {
            return sized(path.as_os_str().as_encoded_bytes(), arg.size);
        }
        let value = self.fs().getxattr(self.cx(), self.node(), name).await?;
        sized(&value, arg.size)
    }

    pub(super) async fn getlk(&self, arg: &abi::LkIn) -> Outcome {
        let (how, wanted) = lock(arg, false);
        let found = self
            .fs()
            .getlk(self.cx(), self.node(), &how, &wanted)
            .await?;
        let lk = abi::FileLock {
            start: found.start,
            end: found.end,
            r#type: found.kind,
            pid: found.pid,
        };
        Ok(Reply::of(&abi::LkOut { lk }))
    }

    pub(super) async fn setlk(&self, arg: &abi::LkIn, wait: bool) -> Result<()> {
        let _place = wait.then(|| LockWait::begin(self.cx().uid)).transpose()?;
        let (how, wanted) = lock(arg, wait);
        self.fs().setlk(self.cx(), self.node(), &how, &wanted).await
    }

    pub(super) async fn lseek(&self, arg: &abi::LseekIn) -> Outcome {
        let seek = match arg.whence {
            SEEK_DATA => Seek::Data,
            SEEK_HOLE => Seek::Hole,
            _ => return Err(Errno::INVAL.into()),
        };
        let (fs, fh) = (self.fs(), Handle(arg.fh));
        let offset = fs
            .lseek(self.cx(), self.node(), fh, arg.offset, seek)
            .await?;
        Ok(Reply::Sought(abi::LseekOut { offset }))
    }

    pub(super) async fn copy(&self, arg: &abi::CopyFileRangeIn, most: u64) -> Result<u64> {
        let copy = CopyRange {
            fh_in: Handle(arg.fh_in),
            offset_in: arg.off_in,
            node_out: Node(arg.nodeid_out),
            fh_out: Handle(arg.fh_out),
            offset_out: arg.off_out,
            len: arg.len.min(most),
            flags: arg.flags,
        };
        // The kernel takes ENOSYS for one of its two requests, and would ask again by the other.
        let unknown = &self.session.copies_not;
        if unknown.load(Ordering::Relaxed) {
            return Err(Errno::NOSYS.into());
        }
        let copied = self
            .fs()
            .copy_file_range(self.cx(), self.node(), &copy)
            .await
            .inspect_err(|error| {
                if *error == Errno::NOSYS {
                    unknown.store(true, Ordering::Relaxed);
                }
            })?;
        Ok(copied.min(copy.len))
    }

    pub(super) async fn ioctl(&self, arg: &abi::IoctlIn, input: &[u8]) -> Outcome {
        let ioctl = Ioctl {
            fh: Handle(arg.fh),
            cmd: arg.cmd,
            arg: arg.arg,
            flags: arg.flags,
            input,
            out_size: arg.out_size,
        };
        let (result, data) = self.fs().ioctl(self.cx(), self.node(), &ioctl).await?;
        if data.len() > arg.out_size as usize {
            let (len, room) = (data.len(), arg.out_size);
            let why = format!("an answer of {len} bytes, and the caller's buffer has {room}");
            return Err(Error::new(Errno::IO, why));
        }
        let out = abi::IoctlOut {
            result,
            ..Default::default()
        };
        let mut body = Body::from_slice(out.as_bytes());
        body.extend_from_slice(&data);
        Ok(Reply::Bytes(body))
    }

    pub(super) async fn poll(&self, arg: &abi::PollIn) -> Outcome {
        let flags = abi::PollFlags::from_bits_retain(arg.flags);
        let poll = Poll {
            fh: Handle(arg.fh),
            kh: arg.kh,
            events: arg.events,
            notify: flags.contains(abi::PollFlags::SCHEDULE_NOTIFY),
        };
        let revents = self.fs().poll(self.cx(), self.node(), &poll).await?;
        Ok(Reply::of(&abi::PollOut {
            revents,
            padding: 0,
        }))
    }
}

/// One of the requests of this thread's queue that wait for locks. They are bounded below what the
/// queue can have under way, so that the others, and the unlock that they wait for, still get through. One user has
/// half of that, but for the server's own.
struct LockWait(u32);

thread_local! {
    /// The users of those that wait.
    static LOCK_WAITS: RefCell<Vec<u32>> = const { RefCell::new(Vec::new()) };
}

impl LockWait {
    /// ENOLCK when too many wait already.
    fn begin(uid: u32) -> Result<Self> {
        LOCK_WAITS.with_borrow_mut(|waits| {
            let own = waits.iter().filter(|other| **other == uid).count();
            let most = DEPTH * 3 / 4;
            if waits.len() >= most || own >= most / 2 && !uvfs_sys::is_own_user(uid) {
                let why = format!(
                    "{} requests of this queue wait for locks already, {own} of them of user {uid}",
                    waits.len()
                );
                return Err(Error::new(Errno::NOLCK, why).level(Level::WARN));
            }
            waits.push(uid);
            Ok(Self(uid))
        })
    }
}

impl Drop for LockWait {
    fn drop(&mut self) {
        LOCK_WAITS.with_borrow_mut(|waits| {
            if let Some(at) = waits.iter().position(|uid| *uid == self.0) {
                waits.swap_remove(at);
            }
        });
    }
}
