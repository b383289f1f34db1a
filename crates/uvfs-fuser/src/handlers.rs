//! The requests that `uvfs_server` hands over: each becomes a call of the program's file system, and its reply
//! the answer.

use std::ffi::{CStr, OsString};
use std::path::Path;
use std::sync::Arc;
use std::time::SystemTime;

use uvfs_proto::abi;
use uvfs_server::FileSystem;
use uvfs_server::fs::{self, Context, Handle, Node, Payload, Result};

use crate::adapter::*;
use crate::reply::{Data, XATTR_MAX};
use crate::*;

/// Clients would be told of the file that lost a name. Here are none, and the kernel knows by itself.
fn unlinked((): ()) -> fs::Unlinked {
    fs::Unlinked::default()
}

/// The mode of a new node as fuser has it, with the type.
fn mode(new: &fs::NewNode) -> u32 {
    new.kind.as_raw_mode() | new.mode.as_raw_mode()
}

/// A time as fuser has it where it knows no "now".
fn time_or_this(time_to_set: fs::SetTime) -> SystemTime {
    match time_to_set {
        fs::SetTime::Now => SystemTime::now(),
        fs::SetTime::At(secs, nanos) => time(secs, nanos),
    }
}

/// An argument of a request as a handler takes it, which may outlive the request.
trait Kept {
    type Owned;

    fn kept(self) -> Self::Owned;
}

macro_rules! kept {
    ($($from:ty => $to:ty = |$from_value:pat_param| $owned:expr;)*) => {$(
        impl Kept for $from {
            type Owned = $to;

            fn kept(self) -> $to {
                let $from_value = self;
                $owned
            }
        }
    )*};
}

kept! {
    Node => INodeNo = |node| INodeNo(node.0);
    Handle => FileHandle = |fh| FileHandle(fh.0);
    fs::LockOwner => LockOwner = |owner| LockOwner(owner.0);
    fs::OFlags => OpenFlags = |flags| OpenFlags(flags.bits() as i32);
    fs::Access => AccessFlags = |mask| AccessFlags::from_bits_retain(mask.bits() as i32);
    fs::RenameFlags => RenameFlags = |flags| RenameFlags::from_bits_retain(flags.bits());
    fs::XattrFlags => i32 = |flags| flags.bits() as i32;
    fs::FallocateFlags => i32 = |mode| mode.bits() as i32;
    fs::Seek => i32 = |seek| match seek {
        fs::Seek::Data => libc::SEEK_DATA,
        fs::Seek::Hole => libc::SEEK_HOLE,
    };
    &CStr => OsString = |name| own(name);
    &[u8] => Vec<u8> = |value| value.to_vec();
    bool => bool = |flag| flag;
    u32 => u32 = |number| number;
    u64 => u64 = |number| number;
}

impl<T: Copy> Kept for &T {
    type Owned = T;

    fn kept(self) -> T {
        *self
    }
}

impl<T: Kept> Kept for Option<T> {
    type Owned = Option<T::Owned>;

    fn kept(self) -> Self::Owned {
        self.map(T::kept)
    }
}

/// Writes methods that call a handler, for the caller (`ask_for`) or in any case (`ask`), with arguments that are
/// made of the kept ones of the request. The offsets after `within` have to fit into 63 bits.
macro_rules! handlers {
    ($($name:ident($($arg:ident: $type:ty),*) -> $answer:ty = $ask:ident $handler:ident($($given:expr),*)
        $(, then $then:expr)? $(, within [$($offset:expr),*])?;)*) => {$(
        async fn $name(&self, cx: &Context, $($arg: $type),*) -> Result<$answer> {
            $(in_range([$($offset),*])?;)?
            $(let $arg = $arg.kept();)*
            let answer = self.$ask(cx, move |fs, req, reply| fs.$handler(req, $($given,)* reply));
            answer.await$(.map($then))?
        }
    )*};
}

impl<FS: Filesystem> FileSystem for Adapter<FS> {
    fn init(&self, config: &mut fs::Config, session: Arc<dyn fs::SessionHandle>) -> Result<()> {
        if session.outlives() {
            let _ = self.outlives.set(session.clone());
        }
        let _ = self.session.set(session);
        self.negotiate(config)
    }

    fn destroy(&self) {
        self.calls.end();
        self.held.destroy();
    }

    fn survive(&self) -> Option<&dyn fs::Survive> {
        let survives = self.held.with(|fs| fs.survive().is_some());
        survives.unwrap_or_default().then_some(self as _)
    }

    fn forget(&self, node: Node, lookups: u64) {
        self.calls.call(move |fs| {
            let request = Request::of_none();
            fs.batch_forget(&request, &[ForgetOne::new(INodeNo(node.0), lookups)]);
        });
    }

    handlers! {
        lookup(parent: Node, name: &CStr) -> fs::Entry = ask_for lookup(parent, &name);
        getattr(node: Node, fh: Option<Handle>) -> fs::Attributes = ask_for getattr(node, fh);
        setattr(node: Node, set: &fs::SetAttr) -> fs::Attributes = ask_for setattr(
            node, set.mode.map(|mode| mode.as_raw_mode() | set.kind.map_or(0, |kind| kind.as_raw_mode())),
            set.uid, set.gid, set.size, set.atime.map(time_or_now), set.mtime.map(time_or_now),
            set.ctime.map(time_or_this), set.fh.kept(), None, None, None, None
        );
        symlink(parent: Node, name: &CStr, target: &CStr) -> fs::Entry =
            ask_for symlink(parent, &name, Path::new(&target));
        mknod(parent: Node, name: &CStr, new: &fs::NewNode) -> fs::Entry =
            ask_for mknod(parent, &name, mode(&new), new.umask.as_raw_mode(), new.rdev);
        mkdir(parent: Node, name: &CStr, new: &fs::NewNode) -> fs::Entry =
            ask_for mkdir(parent, &name, new.mode.as_raw_mode(), new.umask.as_raw_mode());
        unlink(parent: Node, name: &CStr) -> fs::Unlinked =
            ask_for unlink(parent, &name), then unlinked;
        rmdir(parent: Node, name: &CStr) -> fs::Unlinked =
            ask_for rmdir(parent, &name), then unlinked;
        rename(
            parent: Node, name: &CStr, new_parent: Node, new_name: &CStr, flags: fs::RenameFlags
        ) -> fs::Unlinked =
            ask_for rename(parent, &name, new_parent, &new_name, flags), then unlinked;
        link(node: Node, new_parent: Node, new_name: &CStr) -> fs::Entry =
            ask_for link(node, new_parent, &new_name);
        open(node: Node, how: &fs::OpenHow) -> fs::Opened = ask_for open(node, how.flags.kept());
        create(
            parent: Node, name: &CStr, new: &fs::NewNode, how: &fs::OpenHow
        ) -> (fs::Entry, fs::Opened) = ask_for create(
            parent, &name, mode(&new), new.umask.as_raw_mode(), how.flags.bits() as i32
        );
        flush(node: Node, fh: Handle, owner: fs::LockOwner) -> () = ask_for flush(node, fh, owner);
        // Linux sends a FLUSH of its own and never asks for one here.
        release(node: Node, fh: Handle, flags: fs::OFlags, flock: Option<fs::LockOwner>) -> () =
            ask release(node, fh, flags, flock, false);
        fsync(node: Node, fh: Handle, data_only: bool) -> () = ask fsync(node, fh, data_only);
        opendir(node: Node, how: &fs::OpenHow) -> fs::Opened =
            ask_for opendir(node, how.flags.kept());
        releasedir(node: Node, fh: Handle, flags: fs::OFlags) -> () =
            ask releasedir(node, fh, flags);
        fsyncdir(node: Node, fh: Handle, data_only: bool) -> () =
            ask fsyncdir(node, fh, data_only);
        statfs(node: Node) -> abi::Kstatfs = ask_for statfs(node);
        getxattr(node: Node, name: &CStr) -> fs::Bytes = ask_for getxattr(node, &name, XATTR_MAX);
        listxattr(node: Node) -> fs::Bytes = ask_for listxattr(node, XATTR_MAX);
        setxattr(
            node: Node, name: &CStr, value: &[u8], flags: fs::XattrFlags, _kill_sgid: bool
        ) -> () = ask_for setxattr(node, &name, &value, flags, 0);
        removexattr(node: Node, name: &CStr) -> () = ask_for removexattr(node, &name);
        access(node: Node, mask: fs::Access) -> () = ask_for access(node, mask);
        getlk(node: Node, how: &fs::LockHow, lock: &fs::Lock) -> fs::Lock = ask_for getlk(
            node, how.fh.kept(), how.owner.kept(), lock.start, lock.end, lock.kind as i32, lock.pid
        );
        setlk(node: Node, how: &fs::LockHow, lock: &fs::Lock) -> () = ask_for setlk(
            node, how.fh.kept(), how.owner.kept(), lock.start, lock.end, lock.kind as i32, lock.pid,
            how.wait
        );
        fallocate(
            node: Node, fh: Handle, offset: u64, len: u64, mode: fs::FallocateFlags
        ) -> () = ask_for fallocate(node, fh, offset, len, mode), within [offset, len];
        lseek(node: Node, fh: Handle, offset: u64, seek: fs::Seek) -> u64 =
            ask_for lseek(node, fh, offset as i64, seek);
        // The reply has 32 bits.
        copy_file_range(node: Node, copy: &fs::CopyRange) -> u64 = ask_for copy_file_range(
            node, copy.fh_in.kept(), copy.offset_in, copy.node_out.kept(), copy.fh_out.kept(),
            copy.offset_out, copy.len.min(u64::from(!4095u32)),
            CopyFileRangeFlags::from_bits_retain(copy.flags)
        ), then u64::from, within [copy.offset_in, copy.offset_out];
        bmap(node: Node, block: u64, block_size: u32) -> u64 =
            ask_for bmap(node, block_size, block);
    }

    async fn readlink(&self, cx: &Context, node: Node) -> Result<fs::Bytes> {
        let target = self.ask_for(cx, move |fs, req, sender| {
            fs.readlink(req, INodeNo(node.0), ReplyData::new(sender, None));
        });
        match target.await? {
            Data::Bytes(target) => Ok(target),
            Data::Placed(_) => Err(fs::Errno::IO.into()),
        }
    }

    async fn read(
        &self,
        cx: &Context,
        node: Node,
        how: &fs::IoHow,
        data: &Payload,
    ) -> Result<usize> {
        in_range([how.offset])?;
        let (how, room) = (*how, data.clone());
        let read = self.ask(cx, move |fs, req, sender| {
            let (size, flags, owner) = (room.len() as u32, how.flags.kept(), how.owner.kept());
            let reply = ReplyData::new(sender, Some(room));
            let (ino, fh) = (node.kept(), how.fh.kept());
            fs.read(req, ino, fh, how.offset, size, flags, owner, reply);
        });
        match read.await? {
            Data::Placed(read) => Ok(read),
            Data::Bytes(_) => Err(fs::Errno::IO.into()),
        }
    }

    async fn write(
        &self,
        cx: &Context,
        node: Node,
        how: &fs::IoHow,
        data: &Payload,
    ) -> Result<usize> {
        in_range([how.offset])?;
        let (how, data, buffers) = (*how, data.clone(), self.buffers.clone());
        // A handler on a thread of its own may read the data after its reply, when the kernel may already have
        // the memory for the next request.
        let copied = self.calls.are_elsewhere() || data.parts().len() != 1;
        let copy = copied.then(|| {
            let mut bytes = buffers.take(data.len());
            data.copy_out(0, &mut bytes[..data.len()]);
            bytes
        });
        let written = self.ask(cx, move |fs, req, reply| {
            let bytes = match &copy {
                Some(copy) => &copy[..data.len()],
                // SAFETY: the kernel has filled this memory, which belongs to this process alone as adapters
                // serve no clients. It writes there again only once the request is answered. That is done by
                // this thread, which is in the handler as long as the slice is used.
                None => unsafe { data.bytes() }.unwrap_or_default(),
            };
            let mut how_written = WriteFlags::empty();
            how_written.set(WriteFlags::FUSE_WRITE_CACHE, how.from_cache);
            how_written.set(WriteFlags::FUSE_WRITE_LOCKOWNER, how.owner.is_some());
            how_written.set(WriteFlags::FUSE_WRITE_KILL_SUIDGID, how.kill_suidgid);
            let (ino, fh, at) = (node.kept(), how.fh.kept(), how.offset);
            let (flags, owner) = (how.flags.kept(), how.owner.kept());
            fs.write(req, ino, fh, at, bytes, how_written, flags, owner, reply);
            if let Some(copy) = copy {
                buffers.give_back(copy);
            }
        });
        Ok(written.await? as usize)
    }

    async fn readdir(
        &self,
        cx: &Context,
        node: Node,
        fh: Handle,
        sink: &mut dyn fs::DirSink,
    ) -> Result<()> {
        let (offset, room) = (sink.offset(), sink.room());
        let (node, fh) = (INodeNo(node.0), FileHandle(fh.0));
        if sink.wants_attributes() {
            let listing = self.ask(cx, move |fs, req, sender| {
                let reply = ReplyDirectoryPlus::new(sender, room);
                fs.readdirplus(req, node, fh, offset, reply);
            });
            for (dir, entry) in listing.await?.iter() {
                sink.add_plus(dir, entry);
            }
            return Ok(());
        }
        let listing = self.ask(cx, move |fs, req, sender| {
            fs.readdir(req, node, fh, offset, ReplyDirectory::new(sender, room));
        });
        for (dir, ()) in listing.await?.iter() {
            sink.add(dir);
        }
        Ok(())
    }

    async fn ioctl(
        &self,
        cx: &Context,
        node: Node,
        ioctl: &fs::Ioctl<'_>,
    ) -> Result<(i32, fs::Bytes)> {
        let flags = IoctlFlags::from_bits_retain(ioctl.flags);
        if flags.contains(IoctlFlags::FUSE_IOCTL_UNRESTRICTED) {
            return Err(fs::Errno::NOSYS.into());
        }
        let (fh, cmd, out_size) = (FileHandle(ioctl.fh.0), ioctl.cmd, ioctl.out_size);
        let input = ioctl.input.to_vec();
        self.ask_for(cx, move |fs, req, reply| {
            fs.ioctl(req, node.kept(), fh, flags, cmd, &input, out_size, reply);
        })
        .await
    }

    async fn poll(&self, cx: &Context, node: Node, poll: &fs::Poll) -> Result<u32> {
        let poll = *poll;
        let session = self.session.get().ok_or(fs::Errno::IO)?;
        let notifier = session.notifier()?;
        self.ask_for(cx, move |fs, req, reply| {
            let mut flags = PollFlags::empty();
            flags.set(PollFlags::FUSE_POLL_SCHEDULE_NOTIFY, poll.notify);
            let notifier = PollNotifier::new(PollHandle(poll.kh), Notifier::new(notifier));
            let events = PollEvents::from_bits_retain(poll.events);
            fs.poll(
                req,
                node.kept(),
                poll.fh.kept(),
                notifier,
                events,
                flags,
                reply,
            );
        })
        .await
    }
}
