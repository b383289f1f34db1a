//! Calls the handler for a request's opcode, and makes a typed reply of its result.

mod call;
mod listing;
mod wire;

use std::pin::pin;

use uvfs_proto::abi;
use uvfs_proto::request::Operation;

use crate::fs::*;
use crate::reply::{self, Body, Reply};
use crate::request::Request;
use crate::session::Session;
use call::Call;
pub use call::{CONTROL_XATTR, SOCKET_XATTR};
pub(crate) use call::{SEEK_DATA, SEEK_HOLE};
use listing::listing;
pub(crate) use wire::entry_out;
use wire::{attr_out, created, data_only, new_node, set_attr, sized, type_of, with_fh};

/// A reply, or an error that is to be logged.
type Outcome = Result<Reply>;

/// Answers a request; never panics, whatever the handler does.
pub(crate) async fn answer<F: FileSystem>(
    session: &Session<F>,
    request: &Request<'_>,
) -> reply::Outcome {
    // Pinned where it is made, as it is large to move.
    let handler = pin!(dispatch(session, request));
    let answered = session.interrupts.guard(request.waits(), handler).await;
    end(answered, request.operation.opcode().name(), request.node)
}

/// Turns the result of a handler, `None` after a panic, into that of the request. Logs an error that has a message.
pub(crate) fn end<T>(answered: Option<Result<T>>, opcode: &str, node: u64) -> Result<T, Errno> {
    let panicked = || Err(Error::new(Errno::IO, "a handler panicked"));
    let answered = answered.unwrap_or_else(panicked);
    answered.map_err(|error| error.answer(opcode, node))
}

/// A node's attributes now, on behalf of a request.
pub(crate) async fn attributes<F: FileSystem>(
    session: &Session<F>,
    of: &Request<'_>,
    node: u64,
) -> Result<abi::Attr, Errno> {
    let mut request = of.like(node, Operation::Getattr(abi::GetattrIn::default()));
    // A number that neither the kernel nor a client uses.
    request.cx.unique |= 1 << 61;
    match answer(session, &request).await? {
        Reply::Attributes(out) => Ok(out.attr),
        _ => Err(Errno::IO),
    }
}

/// Calls the handler; where that takes several steps, `call.rs` has them.
async fn dispatch<F: FileSystem>(session: &Session<F>, request: &Request<'_>) -> Outcome {
    let call = Call { session, request };
    let (fs, cx, node) = (&session.fs, &request.cx, Node(request.node));
    let done = |(): ()| Reply::Empty;
    let entry = |entry: Entry| Reply::Entry(entry_out(&entry));
    let attr = |attributes: Attributes| Reply::Attributes(attr_out(&attributes));
    let bytes = |bytes: Bytes| Reply::Bytes(Body::from_vec(bytes));
    let opened = |opened: Opened| Reply::Opened(opened.into());
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
        Statx(arg) => call.statx(&arg).await,
        Setattr(arg) => fs.setattr(cx, node, &set_attr(&arg)).await.map(attr),
        Readlink => fs.readlink(cx, node).await.map(bytes),
        Symlink { name, target } => fs.symlink(cx, node, name, target).await.map(entry),
        Mknod(arg, name) => {
            let new = new_node(type_of(arg.mode), arg.mode, arg.umask, arg.rdev);
            fs.mknod(cx, node, name, &new).await.map(entry)
        }
        Mkdir(arg, name) => {
            let new = new_node(FileType::Directory, arg.mode, arg.umask, 0);
            fs.mkdir(cx, node, name, &new).await.map(entry)
        }
        Unlink(name) => fs.unlink(cx, node, name).await.map(Reply::Removed),
        Rmdir(name) => fs.rmdir(cx, node, name).await.map(Reply::Removed),
        Rename { arg, name, newname } => {
            let (to, flags) = (Node(arg.newdir), RenameFlags::empty());
            let renamed = fs.rename(cx, node, name, to, newname, flags).await;
            renamed.map(Reply::Removed)
        }
        Rename2 { arg, name, newname } => {
            let (to, flags) = (Node(arg.newdir), RenameFlags::from_bits_retain(arg.flags));
            let renamed = fs.rename(cx, node, name, to, newname, flags).await;
            renamed.map(Reply::Removed)
        }
        Link(arg, name) => fs
            .link(cx, Node(arg.oldnodeid), node, name)
            .await
            .map(entry),
        Open(arg) => {
            let how = call.how(arg.flags, arg.open_flags);
            fs.open(cx, node, &how).await.map(opened)
        }
        Create(arg, name) => {
            let new = new_node(FileType::RegularFile, arg.mode, arg.umask, 0);
            let how = call.how(arg.flags, arg.open_flags);
            fs.create(cx, node, name, &new, &how).await.map(created)
        }
        Tmpfile(arg, _) => {
            let new = new_node(FileType::RegularFile, arg.mode, arg.umask, 0);
            let how = call.how(arg.flags, 0);
            fs.tmpfile(cx, node, &new, &how).await.map(created)
        }
        Read(arg) => call.read(&arg).await,
        Write(arg) => call.write(&arg).await,
        NotifyReply(arg) => Ok(call.retrieved(&arg)),
        Statfs => (fs.statfs(cx, node).await).map(|st| Reply::of(&abi::StatfsOut { st })),
        Release(arg) => call.release(&arg).await.map(done),
        Flush(arg) => {
            let owner = LockOwner(arg.lock_owner);
            fs.flush(cx, node, Handle(arg.fh), owner).await.map(done)
        }
        Fsync(arg) => {
            let fsync = fs.fsync(cx, node, Handle(arg.fh), data_only(&arg));
            fsync.await.map(done)
        }
        Fsyncdir(arg) => {
            let fsync = fs.fsyncdir(cx, node, Handle(arg.fh), data_only(&arg));
            fsync.await.map(done)
        }
        Opendir(arg) => {
            let how = call.how(arg.flags, arg.open_flags);
            fs.opendir(cx, node, &how).await.map(opened)
        }
        Readdir(arg) => listing(session, request, &arg, false).await,
        Readdirplus(arg) => listing(session, request, &arg, true).await,
        Releasedir(arg) => {
            let (fh, opened) = (Handle(arg.fh), OFlags::from_bits_retain(arg.flags));
            fs.releasedir(cx, node, fh, opened).await.map(done)
        }
        Setxattr(arg, name, value) => call.setxattr(&arg, name, value).await.map(done),
        Getxattr(arg, name) => call.getxattr(&arg, name).await,
        Listxattr(arg) => sized(&fs.listxattr(cx, node).await?, arg.size),
        Removexattr(name) => fs.removexattr(cx, node, name).await.map(done),
        Access(arg) => {
            let mask = crate::fs::Access::from_bits_retain(arg.mask);
            fs.access(cx, node, mask).await.map(done)
        }
        Getlk(arg) => call.getlk(&arg).await,
        Setlk(arg) => call.setlk(&arg, false).await.map(done),
        Setlkw(arg) => call.setlk(&arg, true).await.map(done),
        Fallocate(arg) => {
            let (fh, mode) = (Handle(arg.fh), FallocateFlags::from_bits_retain(arg.mode));
            let allocate = fs.fallocate(cx, node, fh, arg.offset, arg.length, mode);
            allocate.await.map(done)
        }
        Lseek(arg) => call.lseek(&arg).await,
        CopyFileRange(arg) => {
            // Its answer has 32 bits.
            let size = call.copy(&arg, u64::from(!4095u32)).await? as u32;
            Ok(Reply::of(&abi::WriteOut { size, padding: 0 }))
        }
        CopyFileRange64(arg) => {
            let bytes_copied = call.copy(&arg, u64::MAX).await?;
            Ok(Reply::of(&abi::CopyFileRangeOut { bytes_copied }))
        }
        Ioctl(arg, input) => call.ioctl(&arg, input).await,
        Poll(arg) => call.poll(&arg).await,
        Bmap(arg) => {
            let block = fs.bmap(cx, node, arg.block, arg.blocksize).await?;
            Ok(Reply::of(&abi::BmapOut { block }))
        }
        Syncfs(_) => fs.syncfs(cx, node).await.map(done),
        Interrupt(arg) => {
            session.interrupts.interrupt(arg.unique)?;
            Ok(Reply::None)
        }
        Destroy => Ok(Reply::Empty),
        // Answered before any queue starts; a second one is nonsense.
        Init(_) => Err(Errno::INVAL.into()),
    }
}
