//! From a request's opcode to the handler that answers it, and from what that gives to the wire.

mod listing;

use std::cell::Cell;
use std::pin::pin;

use uvfs_proto::abi::{self, GetattrFlags, InitFlags, ReadFlags, SetattrValid, WriteFlags};
use uvfs_proto::import::{TOKEN_IOCTL, TokenOut};
use uvfs_proto::reply::{self};
use uvfs_proto::request::Operation;
use zerocopy::IntoBytes;

use crate::fs::*;
use crate::reply::{Body, Outcome, Reply};
use crate::request::{DEPTH, Request};
use crate::session::Session;
use listing::listing;

/// The extended attribute of the root that names the control socket.
pub const CONTROL_XATTR: &str = "user.uvfs.control";

/// The extended attribute of the root that names the socket that clients attach to.
pub const SOCKET_XATTR: &str = "user.uvfs.socket";

/// The kernel's limit for a value and for a list of names (XATTR_SIZE_MAX).
const XATTR_MAX: usize = 65536;
/// A listing is sent in pieces of at most this, whatever the kernel has room for.
const LISTING_MAX: usize = 1 << 20;

/// _IOC_WRITE where a command of ioctl(2) has it: it hands something over.
const IOC_WRITE: u32 = 1 << 30;

/// The two ways of lseek(2) that the kernel can't answer by itself.
const SEEK_DATA: u32 = libc::SEEK_DATA as u32;
const SEEK_HOLE: u32 = libc::SEEK_HOLE as u32;

/// FUSE_SETXATTR_ACL_KILL_SGID.
const ACL_KILL_SGID: u32 = 1;

/// Answers a request; never panics, whatever the handler does. What loses a name by it is put into
/// `unlinked`.
pub(crate) async fn answer<F: FileSystem>(
    session: &Session<F>,
    request: &Request<'_>,
    unlinked: &Cell<Unlinked>,
) -> Outcome {
    // Where it is made: it is large to move.
    let handler = pin!(dispatch(session, request, unlinked));
    let answered = session.interrupts.guard(request.waits(), handler).await;
    answered.unwrap_or_else(|| {
        let (opcode, node) = (request.operation.opcode().name(), request.node);
        tracing::error!(opcode, node, "a handler panicked: EIO");
        Err(Errno::IO)
    })
}

/// A node's attributes now, on behalf of a request.
pub(crate) async fn attributes<F: FileSystem>(
    session: &Session<F>,
    of: &Request<'_>,
    node: u64,
) -> Result<abi::Attr> {
    let mut request = of.like(node, Operation::Getattr(abi::GetattrIn::default()));
    // Apart from the kernel's and from clients' own.
    request.cx.unique |= 1 << 61;
    match answer(session, &request, &Cell::default()).await? {
        Reply::Attributes(out) => Ok(out.attr),
        _ => Err(Errno::IO),
    }
}

/// Whether a read or write is to leave nothing in the store's cache: all of the session's, or those
/// of our own clients that ask for it. The flag means nothing in a request of the kernel.
fn uncached<F: FileSystem>(session: &Session<F>, request: &Request<'_>, asked: bool) -> bool {
    let asked = asked && matches!(request.origin, Origin::Client(_));
    (session.options.uncached || asked) && session.takes_uncached()
}

/// The kernel may have cached what a request of its own moved.
fn moved<F: FileSystem>(session: &Session<F>, request: &Request<'_>, offset: u64, len: usize) {
    if let Some(recent) = session.recent.get()
        && matches!(request.origin, Origin::Kernel)
    {
        recent.add(request.node, offset, len);
    }
}

pub(crate) fn entry_out(entry: &Entry) -> abi::EntryOut {
    let mut out = abi::EntryOut {
        nodeid: entry.node.0,
        generation: entry.generation,
        attr: entry.attr,
        ..Default::default()
    };
    out.set_entry_ttl(entry.entry_ttl);
    out.set_attr_ttl(entry.attr_ttl);
    out
}

fn attr_out(attributes: &Attributes) -> abi::AttrOut {
    let (attr_valid, attr_valid_nsec) = reply::ttl(attributes.ttl);
    abi::AttrOut {
        attr_valid,
        attr_valid_nsec,
        dummy: 0,
        attr: attributes.attr,
    }
}

fn open_out(opened: &Opened) -> abi::OpenOut {
    abi::OpenOut {
        fh: opened.fh.0,
        open_flags: opened.flags.bits(),
        backing_id: opened.backing,
    }
}

fn set_attr(arg: &abi::SetattrIn) -> SetAttr {
    use SetattrValid as Valid;
    let valid = Valid::from_bits_retain(arg.valid);
    let has = |flag| valid.contains(flag);
    let time = |flag, now, secs: u64, nanos| match has(now) {
        _ if !has(flag) => None,
        true => Some(SetTime::Now),
        false => Some(SetTime::At(secs as i64, nanos)),
    };
    SetAttr {
        mode: has(Valid::MODE).then(|| Mode::from_raw_mode(arg.mode)),
        kind: has(Valid::MODE)
            .then(|| FileType::from_raw_mode(arg.mode))
            .filter(|&kind| kind != FileType::Unknown),
        uid: has(Valid::UID).then_some(arg.uid),
        gid: has(Valid::GID).then_some(arg.gid),
        size: has(Valid::SIZE).then_some(arg.size),
        atime: time(Valid::ATIME, Valid::ATIME_NOW, arg.atime, arg.atimensec),
        mtime: time(Valid::MTIME, Valid::MTIME_NOW, arg.mtime, arg.mtimensec),
        ctime: has(Valid::CTIME).then_some(SetTime::At(arg.ctime as i64, arg.ctimensec)),
        fh: has(Valid::FH).then_some(Handle(arg.fh)),
        kill_suidgid: has(Valid::KILL_SUIDGID),
    }
}

fn lock(arg: &abi::LkIn, wait: bool) -> (LockHow, Lock) {
    let flock = abi::LkFlags::from_bits_retain(arg.lk_flags).contains(abi::LkFlags::FLOCK);
    let how = LockHow {
        fh: Handle(arg.fh),
        owner: LockOwner(arg.owner),
        flock,
        wait,
    };
    let lock = Lock {
        start: arg.lk.start,
        end: arg.lk.end,
        kind: arg.lk.r#type,
        pid: arg.lk.pid,
    };
    (how, lock)
}

/// The answer of getxattr(2) and listxattr(2) for a buffer of `size` bytes; 0 asks for the length.
fn sized(value: &[u8], size: u32) -> Outcome {
    if value.len() > XATTR_MAX {
        return Err(Errno::TOOBIG);
    }
    if size == 0 {
        return Ok(Reply::of(&abi::GetxattrOut {
            size: value.len() as u32,
            padding: 0,
        }));
    }
    if value.len() > size as usize {
        return Err(Errno::RANGE);
    }
    Ok(Reply::Bytes(Body::from_slice(value)))
}

async fn dispatch<F: FileSystem>(
    session: &Session<F>,
    request: &Request<'_>,
    unlinked: &Cell<Unlinked>,
) -> Outcome {
    let fs = &session.fs;
    let (cx, node) = (&request.cx, Node(request.node));
    let done = |(): ()| Reply::Empty;
    let lost = |what: Unlinked| {
        unlinked.set(what);
        Reply::Empty
    };
    let entry = |entry: Entry| Reply::Entry(entry_out(&entry));
    let attr = |attributes: Attributes| Reply::Attributes(attr_out(&attributes));
    let opened = |opened: Opened| Reply::Opened(open_out(&opened));
    let origin = request.origin.map(|_| ());
    let how = |flags: u32, open_flags: u32| OpenHow {
        flags: OFlags::from_bits_retain(flags),
        kill_suidgid: open_flags & abi::OPEN_KILL_SUIDGID != 0,
        origin,
    };
    use Operation::*;
    match request.operation {
        Lookup(name) => fs.lookup(cx, node, name).await.map(entry),
        Forget(arg) => {
            fs.forget(node, arg.nlookup);
            Ok(Reply::None)
        }
        BatchForget(_, records) => {
            for one in records.iter() {
                fs.forget(Node(one.nodeid), one.nlookup);
            }
            Ok(Reply::None)
        }
        Getattr(arg) => {
            let fh = with_fh(arg.getattr_flags, arg.fh);
            fs.getattr(cx, node, fh).await.map(attr)
        }
        Statx(arg) => {
            let fh = with_fh(arg.getattr_flags, arg.fh);
            let (stat, ttl) = fs.statx(cx, node, fh, arg.sx_mask).await?;
            let (attr_valid, attr_valid_nsec) = reply::ttl(ttl);
            Ok(Reply::Statx(Box::new(abi::StatxOut {
                attr_valid,
                attr_valid_nsec,
                stat,
                ..Default::default()
            })))
        }
        Setattr(arg) => fs.setattr(cx, node, &set_attr(&arg)).await.map(attr),
        Readlink => fs
            .readlink(cx, node)
            .await
            .map(|target| Reply::Bytes(Body::from_vec(target))),
        Symlink { name, target } => fs.symlink(cx, node, name, target).await.map(entry),
        Mknod(arg, name) => {
            let kind = type_of(arg.mode);
            let new = new_node(kind, arg.mode, arg.umask, arg.rdev);
            fs.mknod(cx, node, name, &new).await.map(entry)
        }
        Mkdir(arg, name) => {
            let new = new_node(FileType::Directory, arg.mode, arg.umask, 0);
            fs.mkdir(cx, node, name, &new).await.map(entry)
        }
        Unlink(name) => fs.unlink(cx, node, name).await.map(lost),
        Rmdir(name) => fs.rmdir(cx, node, name).await.map(lost),
        Rename { arg, name, newname } => {
            let no_flags = RenameFlags::empty();
            fs.rename(cx, node, name, Node(arg.newdir), newname, no_flags)
                .await
                .map(lost)
        }
        Rename2 { arg, name, newname } => {
            let flags = RenameFlags::from_bits_retain(arg.flags);
            fs.rename(cx, node, name, Node(arg.newdir), newname, flags)
                .await
                .map(lost)
        }
        Link(arg, name) => fs
            .link(cx, Node(arg.oldnodeid), node, name)
            .await
            .map(entry),
        Open(arg) => {
            let since = session.coherence.now();
            let file = fs.open(cx, node, &how(arg.flags, arg.open_flags)).await?;
            session.tell_of_open(origin, request.node, &file, since);
            session.count_open(&file);
            Ok(opened(file))
        }
        Create(arg, name) => {
            let new = new_node(FileType::RegularFile, arg.mode, arg.umask, 0);
            let how = how(arg.flags, arg.open_flags);
            let made = fs.create(cx, node, name, &new, &how).await?;
            session.count_open(&made.1);
            Ok(created(&made))
        }
        Tmpfile(arg, _) => {
            let new = new_node(FileType::RegularFile, arg.mode, arg.umask, 0);
            let how = how(arg.flags, 0);
            let made = fs.tmpfile(cx, node, &new, &how).await?;
            session.count_open(&made.1);
            Ok(created(&made))
        }
        Read(arg) => {
            let size = arg.size as usize;
            let room = request.room.len();
            if size > room {
                tracing::warn!(size, room, "refused: a READ without room");
                return Err(Errno::INVAL);
            }
            let flags = ReadFlags::from_bits_retain(arg.read_flags);
            let how = IoHow {
                fh: Handle(arg.fh),
                offset: arg.offset,
                flags: OFlags::from_bits_retain(arg.flags),
                owner: flags
                    .contains(ReadFlags::LOCKOWNER)
                    .then_some(LockOwner(arg.lock_owner)),
                uncached: uncached(session, request, flags.contains(ReadFlags::DONTCACHE)),
                ..IoHow::default()
            };
            let data = request.room.slice(0..size);
            let read = fs.read(cx, node, &how, &data).await?.min(size);
            moved(session, request, arg.offset, read);
            Ok(Reply::Read(read))
        }
        Write(arg) => {
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
                uncached: uncached(session, request, flags.contains(WriteFlags::DONTCACHE)),
            };
            let data = &request.data;
            let written = fs.write(cx, node, &how, data).await?.min(data.len());
            moved(session, request, arg.offset, written);
            Ok(Reply::Written(abi::WriteOut {
                size: written as u32,
                padding: 0,
            }))
        }
        NotifyReply(arg) => {
            let mut bytes = vec![0; (arg.size as usize).min(request.data.len())];
            request.data.copy_out(0, &mut bytes);
            session.retrieved(cx.unique, arg.offset, bytes);
            Ok(Reply::None)
        }
        Statfs => fs
            .statfs(cx, node)
            .await
            .map(|st| Reply::of(&abi::StatfsOut { st })),
        Release(arg) => {
            let flags = abi::ReleaseFlags::from_bits_retain(arg.release_flags);
            let flock = flags
                .contains(abi::ReleaseFlags::FLOCK_UNLOCK)
                .then_some(LockOwner(arg.lock_owner));
            let opened = OFlags::from_bits_retain(arg.flags);
            fs.release(cx, node, Handle(arg.fh), opened, flock)
                .await
                .map(done)
        }
        Flush(arg) => fs
            .flush(cx, node, Handle(arg.fh), LockOwner(arg.lock_owner))
            .await
            .map(done),
        Fsync(arg) => fs
            .fsync(cx, node, Handle(arg.fh), data_only(&arg))
            .await
            .map(done),
        Fsyncdir(arg) => fs
            .fsyncdir(cx, node, Handle(arg.fh), data_only(&arg))
            .await
            .map(done),
        Opendir(arg) => fs
            .opendir(cx, node, &how(arg.flags, arg.open_flags))
            .await
            .map(opened),
        Readdir(arg) => listing(session, request, &arg, false).await,
        Readdirplus(arg) => listing(session, request, &arg, true).await,
        Releasedir(arg) => {
            let opened = OFlags::from_bits_retain(arg.flags);
            fs.releasedir(cx, node, Handle(arg.fh), opened)
                .await
                .map(done)
        }
        Setxattr(arg, name, value) => {
            let kill_sgid = session.negotiated().flags.contains(InitFlags::SETXATTR_EXT)
                && arg.setxattr_flags & ACL_KILL_SGID != 0;
            let flags = XattrFlags::from_bits_retain(arg.flags);
            fs.setxattr(cx, node, name, value, flags, kill_sgid)
                .await
                .map(done)
        }
        Getxattr(arg, name) => {
            let own = match name.to_str() {
                Ok(CONTROL_XATTR) => session.control_path(),
                Ok(SOCKET_XATTR) => session.socket_path(),
                _ => None,
            };
            if let Some(path) = own.filter(|_| node == ROOT) {
                return sized(path.as_os_str().as_encoded_bytes(), arg.size);
            }
            sized(&fs.getxattr(cx, node, name).await?, arg.size)
        }
        Listxattr(arg) => sized(&fs.listxattr(cx, node).await?, arg.size),
        Removexattr(name) => fs.removexattr(cx, node, name).await.map(done),
        Access(arg) => {
            let mask = crate::fs::Access::from_bits_retain(arg.mask);
            fs.access(cx, node, mask).await.map(done)
        }
        Getlk(arg) => {
            let (how, wanted) = lock(&arg, false);
            let found = fs.getlk(cx, node, &how, &wanted).await?;
            let lk = abi::FileLock {
                start: found.start,
                end: found.end,
                r#type: found.kind,
                pid: found.pid,
            };
            Ok(Reply::of(&abi::LkOut { lk }))
        }
        Setlk(arg) | Setlkw(arg) => {
            let wait = matches!(request.operation, Setlkw(_));
            let _place = if wait { Some(LockWait::begin()?) } else { None };
            let (how, wanted) = lock(&arg, wait);
            fs.setlk(cx, node, &how, &wanted).await.map(done)
        }
        Fallocate(arg) => {
            let mode = FallocateFlags::from_bits_retain(arg.mode);
            fs.fallocate(cx, node, Handle(arg.fh), arg.offset, arg.length, mode)
                .await
                .map(done)
        }
        Lseek(arg) => {
            let seek = match arg.whence {
                SEEK_DATA => Seek::Data,
                SEEK_HOLE => Seek::Hole,
                _ => return Err(Errno::INVAL),
            };
            let offset = fs.lseek(cx, node, Handle(arg.fh), arg.offset, seek).await?;
            Ok(Reply::of(&abi::LseekOut { offset }))
        }
        CopyFileRange(arg) => {
            // Its answer has 32 bits.
            let copied = copy(fs, cx, node, &arg, u64::from(!4095u32)).await?;
            Ok(Reply::of(&abi::WriteOut {
                size: copied as u32,
                padding: 0,
            }))
        }
        CopyFileRange64(arg) => {
            let bytes_copied = copy(fs, cx, node, &arg, u64::MAX).await?;
            Ok(Reply::of(&abi::CopyFileRangeOut { bytes_copied }))
        }
        Ioctl(arg, _) if arg.cmd == TOKEN_IOCTL => {
            let body = session.token_for(node, Handle(arg.fh), cx.uid)?;
            let mut answer = Body::from_slice(abi::IoctlOut::default().as_bytes());
            answer.extend_from_slice(
                &body.as_bytes()[..size_of::<TokenOut>().min(arg.out_size as usize)],
            );
            Ok(Reply::Bytes(answer))
        }
        Ioctl(arg, input) => {
            let ioctl = crate::fs::Ioctl {
                fh: Handle(arg.fh),
                cmd: arg.cmd,
                arg: arg.arg,
                flags: arg.flags,
                input,
                out_size: arg.out_size,
            };
            let (result, data) = fs.ioctl(cx, node, &ioctl).await?;
            if arg.cmd & IOC_WRITE != 0 {
                // It changed attributes that the kernel has, such as the time of a change.
                session.drop_attributes(origin, request.node);
            }
            let out = abi::IoctlOut {
                result,
                ..Default::default()
            };
            let mut body = Body::from_slice(out.as_bytes());
            body.extend_from_slice(&data[..data.len().min(arg.out_size as usize)]);
            Ok(Reply::Bytes(body))
        }
        Poll(arg) => {
            let poll = crate::fs::Poll {
                fh: Handle(arg.fh),
                kh: arg.kh,
                events: arg.events,
                notify: abi::PollFlags::from_bits_retain(arg.flags)
                    .contains(abi::PollFlags::SCHEDULE_NOTIFY),
            };
            let revents = fs.poll(cx, node, &poll).await?;
            Ok(Reply::of(&abi::PollOut {
                revents,
                padding: 0,
            }))
        }
        Bmap(arg) => {
            let block = fs.bmap(cx, node, arg.block, arg.blocksize).await?;
            Ok(Reply::of(&abi::BmapOut { block }))
        }
        Syncfs(_) => fs.syncfs(cx, node).await.map(done),
        Interrupt(arg) => session
            .interrupts
            .interrupt(arg.unique)
            .map(|()| Reply::None),
        Destroy => Ok(Reply::Empty),
        // Answered before any queue starts; a second one is nonsense.
        Init(_) => Err(Errno::INVAL),
        Setupmapping(_) | Removemapping(..) | CuseInit(_) => Err(Errno::NOSYS),
    }
}

/// One of the requests of this thread's queue that wait for locks. They are bounded below what the
/// queue can have under way, so that the others, and the unlock that they wait for, still get through.
struct LockWait;

thread_local! {
    static LOCK_WAITS: Cell<usize> = const { Cell::new(0) };
}

impl LockWait {
    /// ENOLCK when too many wait already.
    fn begin() -> Result<Self> {
        let waits = LOCK_WAITS.get();
        if waits >= DEPTH * 3 / 4 {
            tracing::warn!(waits, "too many wait for locks on one queue: ENOLCK");
            return Err(Errno::NOLCK);
        }
        LOCK_WAITS.set(waits + 1);
        Ok(Self)
    }
}

impl Drop for LockWait {
    fn drop(&mut self) {
        LOCK_WAITS.set(LOCK_WAITS.get() - 1);
    }
}

fn data_only(arg: &abi::FsyncIn) -> bool {
    arg.fsync_flags & abi::FSYNC_FDATASYNC != 0
}

fn new_node(kind: FileType, mode: u32, umask: u32, rdev: u32) -> NewNode {
    let mode = Mode::from_raw_mode(mode);
    let umask = Mode::from_raw_mode(umask);
    NewNode {
        kind,
        mode,
        umask,
        rdev,
    }
}

/// The type that mknod(2) makes, which takes none for a regular file.
fn type_of(mode: u32) -> FileType {
    match mode & libc::S_IFMT {
        0 => FileType::RegularFile,
        _ => FileType::from_raw_mode(mode),
    }
}

fn with_fh(flags: u32, fh: u64) -> Option<Handle> {
    GetattrFlags::from_bits_retain(flags)
        .contains(GetattrFlags::FH)
        .then_some(Handle(fh))
}

fn created((entry, opened): &(Entry, Opened)) -> Reply {
    Reply::Created(entry_out(entry), open_out(opened))
}

async fn copy<F: FileSystem>(
    fs: &F,
    cx: &Context,
    node: Node,
    arg: &abi::CopyFileRangeIn,
    most: u64,
) -> Result<u64> {
    let copy = CopyRange {
        fh_in: Handle(arg.fh_in),
        offset_in: arg.off_in,
        node_out: Node(arg.nodeid_out),
        fh_out: Handle(arg.fh_out),
        offset_out: arg.off_out,
        len: arg.len.min(most),
        flags: arg.flags,
    };
    Ok(fs.copy_file_range(cx, node, &copy).await?.min(copy.len))
}
