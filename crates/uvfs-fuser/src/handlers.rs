//! The requests that `uvfs_server` hands over: each becomes a call of the program's file system, and its reply
//! the answer.

use std::ffi::CStr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::SystemTime;

use uvfs_proto::abi;
use uvfs_server::FileSystem;
use uvfs_server::fs::{self, Context, Handle, Node, Payload, Result};

use crate::adapter::*;
use crate::data::{lock_owner, open_flags};
use crate::reply::{Data, XATTR_MAX};
use crate::*;

/// Clients would be told of the file that lost a name. Here are none, and the kernel knows by itself.
fn unlinked((): ()) -> fs::Unlinked {
    fs::Unlinked::default()
}

/// The mode and umask of a new node as fuser has them, the mode with the type in it or without.
fn modes(new: &fs::NewNode, with_type: bool) -> (u32, u32) {
    let kind = if with_type { new.kind.as_raw_mode() } else { 0 };
    (kind | new.mode.as_raw_mode(), new.umask.as_raw_mode())
}

impl<FS: Filesystem> FileSystem for Adapter<FS> {
    fn init(&self, config: &mut fs::Config, session: Arc<dyn fs::SessionHandle>) -> Result<()> {
        let _ = self.session.set(session);
        self.negotiate(config)
    }

    fn destroy(&self) {
        self.calls.end();
        self.held.destroy();
    }

    fn forget(&self, node: Node, lookups: u64) {
        self.calls.call(move |fs| {
            let request = Request::new(&Context::default());
            fs.batch_forget(&request, &[ForgetOne::new(INodeNo(node.0), lookups)]);
        });
    }

    async fn lookup(&self, cx: &Context, parent: Node, name: &CStr) -> Result<fs::Entry> {
        let name = own(name);
        self.ask_for(cx, move |fs, req, reply| {
            fs.lookup(req, INodeNo(parent.0), &name, reply);
        })
        .await
    }

    async fn getattr(
        &self,
        cx: &Context,
        node: Node,
        fh: Option<Handle>,
    ) -> Result<fs::Attributes> {
        self.ask_for(cx, move |fs, req, reply| {
            let fh = fh.map(|fh| FileHandle(fh.0));
            fs.getattr(req, INodeNo(node.0), fh, reply);
        })
        .await
    }

    async fn setattr(&self, cx: &Context, node: Node, set: &fs::SetAttr) -> Result<fs::Attributes> {
        let set = *set;
        self.ask_for(cx, move |fs, req, reply| {
            let ctime = set.ctime.map(|ctime| match ctime {
                fs::SetTime::Now => SystemTime::now(),
                fs::SetTime::At(secs, nanos) => time(secs, nanos),
            });
            fs.setattr(
                req,
                INodeNo(node.0),
                set.mode
                    .map(|mode| mode.as_raw_mode() | set.kind.map_or(0, |kind| kind.as_raw_mode())),
                set.uid,
                set.gid,
                set.size,
                set.atime.map(time_or_now),
                set.mtime.map(time_or_now),
                ctime,
                set.fh.map(|fh| FileHandle(fh.0)),
                None,
                None,
                None,
                None,
                reply,
            );
        })
        .await
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

    async fn symlink(
        &self,
        cx: &Context,
        parent: Node,
        name: &CStr,
        target: &CStr,
    ) -> Result<fs::Entry> {
        let (name, target) = (own(name), PathBuf::from(own(target)));
        self.ask_for(cx, move |fs, req, reply| {
            fs.symlink(req, INodeNo(parent.0), &name, &target, reply);
        })
        .await
    }

    async fn mknod(
        &self,
        cx: &Context,
        parent: Node,
        name: &CStr,
        new: &fs::NewNode,
    ) -> Result<fs::Entry> {
        let (name, new) = (own(name), *new);
        self.ask_for(cx, move |fs, req, reply| {
            let parent = INodeNo(parent.0);
            let (mode, umask) = modes(&new, true);
            fs.mknod(req, parent, &name, mode, umask, new.rdev, reply);
        })
        .await
    }

    async fn mkdir(
        &self,
        cx: &Context,
        parent: Node,
        name: &CStr,
        new: &fs::NewNode,
    ) -> Result<fs::Entry> {
        let (name, new) = (own(name), *new);
        self.ask_for(cx, move |fs, req, reply| {
            let (mode, umask) = modes(&new, false);
            fs.mkdir(req, INodeNo(parent.0), &name, mode, umask, reply);
        })
        .await
    }

    async fn unlink(&self, cx: &Context, parent: Node, name: &CStr) -> Result<fs::Unlinked> {
        let name = own(name);
        let done = self.ask_for(cx, move |fs, req, reply| {
            fs.unlink(req, INodeNo(parent.0), &name, reply);
        });
        done.await.map(unlinked)
    }

    async fn rmdir(&self, cx: &Context, parent: Node, name: &CStr) -> Result<fs::Unlinked> {
        let name = own(name);
        let done = self.ask_for(cx, move |fs, req, reply| {
            fs.rmdir(req, INodeNo(parent.0), &name, reply);
        });
        done.await.map(unlinked)
    }

    async fn rename(
        &self,
        cx: &Context,
        parent: Node,
        name: &CStr,
        new_parent: Node,
        new_name: &CStr,
        flags: fs::RenameFlags,
    ) -> Result<fs::Unlinked> {
        let (name, new_name) = (own(name), own(new_name));
        let done = self.ask_for(cx, move |fs, req, reply| {
            fs.rename(
                req,
                INodeNo(parent.0),
                &name,
                INodeNo(new_parent.0),
                &new_name,
                RenameFlags::from_bits_retain(flags.bits()),
                reply,
            );
        });
        done.await.map(unlinked)
    }

    async fn link(
        &self,
        cx: &Context,
        node: Node,
        new_parent: Node,
        new_name: &CStr,
    ) -> Result<fs::Entry> {
        let new_name = own(new_name);
        self.ask_for(cx, move |fs, req, reply| {
            fs.link(
                req,
                INodeNo(node.0),
                INodeNo(new_parent.0),
                &new_name,
                reply,
            );
        })
        .await
    }

    async fn open(&self, cx: &Context, node: Node, how: &fs::OpenHow) -> Result<fs::Opened> {
        let flags = open_flags(how.flags);
        let device = self.device.clone();
        self.ask_for(cx, move |fs, req, sender| {
            fs.open(req, INodeNo(node.0), flags, ReplyOpen::new(sender, device));
        })
        .await
    }

    async fn create(
        &self,
        cx: &Context,
        parent: Node,
        name: &CStr,
        new: &fs::NewNode,
        how: &fs::OpenHow,
    ) -> Result<(fs::Entry, fs::Opened)> {
        let (name, new, flags) = (own(name), *new, how.flags.bits() as i32);
        let device = self.device.clone();
        self.ask_for(cx, move |fs, req, sender| {
            let reply = ReplyCreate::new(sender, device);
            let parent = INodeNo(parent.0);
            let (mode, umask) = modes(&new, true);
            fs.create(req, parent, &name, mode, umask, flags, reply);
        })
        .await
    }

    async fn read(
        &self,
        cx: &Context,
        node: Node,
        how: &fs::IoHow,
        data: &Payload,
    ) -> Result<usize> {
        self.read_file(cx, node, how, data).await
    }

    async fn write(
        &self,
        cx: &Context,
        node: Node,
        how: &fs::IoHow,
        data: &Payload,
    ) -> Result<usize> {
        self.write_file(cx, node, how, data).await
    }

    async fn flush(
        &self,
        cx: &Context,
        node: Node,
        fh: Handle,
        owner: fs::LockOwner,
    ) -> Result<()> {
        self.ask_for(cx, move |fs, req, reply| {
            fs.flush(
                req,
                INodeNo(node.0),
                FileHandle(fh.0),
                lock_owner(owner),
                reply,
            );
        })
        .await
    }

    async fn release(
        &self,
        cx: &Context,
        node: Node,
        fh: Handle,
        flags: fs::OFlags,
        flock: Option<fs::LockOwner>,
    ) -> Result<()> {
        self.ask(cx, move |fs, req, reply| {
            fs.release(
                req,
                INodeNo(node.0),
                FileHandle(fh.0),
                open_flags(flags),
                flock.map(lock_owner),
                // Linux sends a FLUSH of its own and never asks for one here.
                false,
                reply,
            );
        })
        .await
    }

    async fn fsync(&self, cx: &Context, node: Node, fh: Handle, data_only: bool) -> Result<()> {
        self.ask(cx, move |fs, req, reply| {
            fs.fsync(req, INodeNo(node.0), FileHandle(fh.0), data_only, reply);
        })
        .await
    }

    async fn opendir(&self, cx: &Context, node: Node, how: &fs::OpenHow) -> Result<fs::Opened> {
        let flags = open_flags(how.flags);
        let device = self.device.clone();
        self.ask_for(cx, move |fs, req, sender| {
            fs.opendir(req, INodeNo(node.0), flags, ReplyOpen::new(sender, device));
        })
        .await
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

    async fn releasedir(
        &self,
        cx: &Context,
        node: Node,
        fh: Handle,
        flags: fs::OFlags,
    ) -> Result<()> {
        let flags = open_flags(flags);
        self.ask(cx, move |fs, req, reply| {
            fs.releasedir(req, INodeNo(node.0), FileHandle(fh.0), flags, reply);
        })
        .await
    }

    async fn fsyncdir(&self, cx: &Context, node: Node, fh: Handle, data_only: bool) -> Result<()> {
        self.ask(cx, move |fs, req, reply| {
            fs.fsyncdir(req, INodeNo(node.0), FileHandle(fh.0), data_only, reply);
        })
        .await
    }

    async fn statfs(&self, cx: &Context, node: Node) -> Result<abi::Kstatfs> {
        self.ask_for(cx, move |fs, req, reply| {
            fs.statfs(req, INodeNo(node.0), reply);
        })
        .await
    }

    async fn getxattr(&self, cx: &Context, node: Node, name: &CStr) -> Result<fs::Bytes> {
        let name = own(name);
        self.ask_for(cx, move |fs, req, reply| {
            fs.getxattr(req, INodeNo(node.0), &name, XATTR_MAX, reply);
        })
        .await
    }

    async fn listxattr(&self, cx: &Context, node: Node) -> Result<fs::Bytes> {
        self.ask_for(cx, move |fs, req, reply| {
            fs.listxattr(req, INodeNo(node.0), XATTR_MAX, reply);
        })
        .await
    }

    async fn setxattr(
        &self,
        cx: &Context,
        node: Node,
        name: &CStr,
        value: &[u8],
        flags: fs::XattrFlags,
        _: bool,
    ) -> Result<()> {
        let (name, value) = (own(name), value.to_vec());
        self.ask_for(cx, move |fs, req, reply| {
            fs.setxattr(
                req,
                INodeNo(node.0),
                &name,
                &value,
                flags.bits() as i32,
                0,
                reply,
            );
        })
        .await
    }

    async fn removexattr(&self, cx: &Context, node: Node, name: &CStr) -> Result<()> {
        let name = own(name);
        self.ask_for(cx, move |fs, req, reply| {
            fs.removexattr(req, INodeNo(node.0), &name, reply);
        })
        .await
    }

    async fn access(&self, cx: &Context, node: Node, mask: fs::Access) -> Result<()> {
        let mask = AccessFlags::from_bits_retain(mask.bits() as i32);
        self.ask_for(cx, move |fs, req, reply| {
            fs.access(req, INodeNo(node.0), mask, reply);
        })
        .await
    }

    async fn getlk(
        &self,
        cx: &Context,
        node: Node,
        how: &fs::LockHow,
        lock: &fs::Lock,
    ) -> Result<fs::Lock> {
        let (how, lock) = (*how, *lock);
        self.ask_for(cx, move |fs, req, reply| {
            fs.getlk(
                req,
                INodeNo(node.0),
                FileHandle(how.fh.0),
                lock_owner(how.owner),
                lock.start,
                lock.end,
                lock.kind as i32,
                lock.pid,
                reply,
            );
        })
        .await
    }

    async fn setlk(
        &self,
        cx: &Context,
        node: Node,
        how: &fs::LockHow,
        lock: &fs::Lock,
    ) -> Result<()> {
        let (how, lock) = (*how, *lock);
        self.ask_for(cx, move |fs, req, reply| {
            fs.setlk(
                req,
                INodeNo(node.0),
                FileHandle(how.fh.0),
                lock_owner(how.owner),
                lock.start,
                lock.end,
                lock.kind as i32,
                lock.pid,
                how.wait,
                reply,
            );
        })
        .await
    }

    async fn fallocate(
        &self,
        cx: &Context,
        node: Node,
        fh: Handle,
        offset: u64,
        len: u64,
        mode: fs::FallocateFlags,
    ) -> Result<()> {
        in_range([offset, len])?;
        self.ask_for(cx, move |fs, req, reply| {
            let (ino, fh) = (INodeNo(node.0), FileHandle(fh.0));
            fs.fallocate(req, ino, fh, offset, len, mode.bits() as i32, reply);
        })
        .await
    }

    async fn lseek(
        &self,
        cx: &Context,
        node: Node,
        fh: Handle,
        offset: u64,
        seek: fs::Seek,
    ) -> Result<u64> {
        self.ask_for(cx, move |fs, req, reply| {
            let (ino, fh) = (INodeNo(node.0), FileHandle(fh.0));
            let whence = match seek {
                fs::Seek::Data => libc::SEEK_DATA,
                fs::Seek::Hole => libc::SEEK_HOLE,
            };
            fs.lseek(req, ino, fh, offset as i64, whence, reply);
        })
        .await
    }

    async fn copy_file_range(&self, cx: &Context, node: Node, copy: &fs::CopyRange) -> Result<u64> {
        in_range([copy.offset_in, copy.offset_out])?;
        let copy = *copy;
        let copied = self.ask_for(cx, move |fs, req, reply| {
            fs.copy_file_range(
                req,
                INodeNo(node.0),
                FileHandle(copy.fh_in.0),
                copy.offset_in,
                INodeNo(copy.node_out.0),
                FileHandle(copy.fh_out.0),
                copy.offset_out,
                // The reply has 32 bits.
                copy.len.min(u64::from(!4095u32)),
                CopyFileRangeFlags::from_bits_retain(copy.flags),
                reply,
            );
        });
        copied.await.map(u64::from)
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
            fs.ioctl(
                req,
                INodeNo(node.0),
                fh,
                flags,
                cmd,
                &input,
                out_size,
                reply,
            );
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
            fs.poll(
                req,
                INodeNo(node.0),
                FileHandle(poll.fh.0),
                PollNotifier::new(PollHandle(poll.kh), Notifier::new(notifier)),
                PollEvents::from_bits_retain(poll.events),
                flags,
                reply,
            );
        })
        .await
    }

    async fn bmap(&self, cx: &Context, node: Node, block: u64, block_size: u32) -> Result<u64> {
        self.ask_for(cx, move |fs, req, reply| {
            fs.bmap(req, INodeNo(node.0), block_size, block, reply);
        })
        .await
    }
}
