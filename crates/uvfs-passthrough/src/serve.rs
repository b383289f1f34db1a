//! The file system as the server calls it.

use crate::apart::apart;
use crate::{creds, io, lock};
use rustix::fs::AtFlags;
use std::ffi::CStr;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use uvfs_io::ops;
use uvfs_proto::abi;
use uvfs_server::fs::*;

use crate::inode::patiently;
use crate::options::{Backed, KeepCache};
use crate::{Passthrough, Source};

/// How a row of [`handlers`] makes its call.
macro_rules! made {
    (once, $self:ident, $call:expr) => {
        $call
    };
    (patiently, $self:ident, $call:expr) => {{
        let call = async || $call;
        Ok(patiently(&$self.0, call).await?)
    }};
}

/// Writes methods that are one call of [`apart`], with its arguments: the nodes and the name that it is about, what it
/// has to copy, and the call.
macro_rules! handlers {
    (($self:ident, $cx:ident) $(
        $name:ident($($arg:ident: $type:ty),*) -> $out:ty =
            $how:ident [$($node:ident),*], $about:expr, [$($own:ident),*], |$source:ident| $call:expr;
    )*) => {$(
        async fn $name(&$self, $cx: &Context, $($arg: $type),*) -> Result<$out> {
            made!($how, $self, apart!($self, $cx, [$($node),*], $about, [$($own),*], |$source| $call))
        }
    )*};
}

impl FileSystem for Passthrough {
    fn init(&self, config: &mut Config, session: Arc<dyn SessionHandle>) -> Result<()> {
        let _ = self.0.session.set(session);
        let options = &self.0.options;
        config.wanted |= InitFlags::ASYNC_READ
            | InitFlags::ASYNC_DIO
            | InitFlags::BIG_WRITES
            | InitFlags::CACHE_SYMLINKS
            | InitFlags::CREATE_SUPP_GROUP
            | InitFlags::DONT_MASK
            | InitFlags::DO_READDIRPLUS
            | InitFlags::READDIRPLUS_AUTO
            | InitFlags::HANDLE_KILLPRIV_V2
            | InitFlags::MAX_PAGES
            | InitFlags::NO_EXPORT_SUPPORT
            | InitFlags::PARALLEL_DIROPS
            | InitFlags::SETXATTR_EXT
            | InitFlags::DIRECT_IO_ALLOW_MMAP;
        // Not ATOMIC_O_TRUNC: with O_RDONLY the kernel would ask for the truncation before it looks
        // whether the file is being executed.
        config.wanted -= InitFlags::ATOMIC_O_TRUNC
            | InitFlags::EXPORT_SUPPORT
            | InitFlags::HANDLE_KILLPRIV
            | InitFlags::EXPLICIT_INVAL_DATA
            | InitFlags::SPLICE_READ
            | InitFlags::SPLICE_WRITE
            | InitFlags::SPLICE_MOVE;
        let all = options.passthrough == Backed::All;
        let wanted = match options.passthrough {
            Backed::Off => false,
            // The server's own capability decides, not the caller's.
            Backed::Auto | Backed::Direct => {
                !(options.writeback || options.uncached) && creds::is_administrator()
            }
            Backed::All => true,
        };
        let passthrough = wanted && config.offered.contains(InitFlags::PASSTHROUGH);
        if all && !passthrough {
            tracing::warn!("the kernel has no FUSE passthrough (it needs Linux 6.9); without it");
        }
        // The kernel takes one of the two.
        let writeback = options.writeback && !passthrough;
        let writeback = writeback && config.offered.contains(InitFlags::WRITEBACK_CACHE);
        // With them the kernel checks permissions, asked to or not.
        config
            .wanted
            .set(InitFlags::POSIX_ACL, options.checks_permissions);
        config.wanted.set(InitFlags::PASSTHROUGH, passthrough);
        config.wanted.set(InitFlags::WRITEBACK_CACHE, writeback);
        // With the writeback cache, times are the kernel's own.
        let always = options.keep_cache == KeepCache::Always;
        config
            .wanted
            .set(InitFlags::AUTO_INVAL_DATA, !writeback && !always);
        config
            .wanted
            .set(InitFlags::POSIX_LOCKS, options.host_locks);
        config
            .wanted
            .set(InitFlags::FLOCK_LOCKS, options.host_locks);
        if passthrough {
            config.max_stack_depth = config.max_stack_depth.max(1);
        }
        config.time_gran = 1;
        config.uncached = true;
        let watcher = self.0.watch_host(config.minor);
        match &watcher {
            Ok(_) => tracing::debug!("watching for what the host changes"),
            Err(why) => tracing::info!(why, "not watching for what the host changes"),
        }
        // It then caches all listings, and the host checks no caller's permissions. Since this version of the
        // protocol (Linux 6.9) the host's offsets outlive the descriptor that they were read from, tmpfs's too.
        let unopened = watcher.is_ok()
            && (options.checks_permissions || self.0.creds.is_root())
            && !self.0.rules.strictatime()
            && config.minor >= 40
            && config.offered.contains(InitFlags::NO_OPENDIR_SUPPORT);
        self.0.lists_unopened.store(unopened, Ordering::Relaxed);
        self.0.mounts.watching.set(watcher);
        self.0.passes_through.store(passthrough, Ordering::Relaxed);
        self.0.caches_writes.store(writeback, Ordering::Relaxed);
        Ok(())
    }

    fn destroy(&self) {
        self.0.mounts.watching.stop();
        self.0.files.clear();
        self.0.dirs.clear();
        self.0.inodes.clear();
    }

    fn watch(&self) -> Option<Watch> {
        self.0.mounts.watching.report()
    }

    fn clients(&self) -> Option<&dyn ClientSupport> {
        Some(self)
    }

    /// With `host_locks` the owners of locks would be lost.
    fn survive(&self) -> Option<&dyn Survive> {
        (!self.0.options.host_locks).then_some(self)
    }

    fn forget(&self, node: Node, lookups: u64) {
        self.0.inodes.forget(node, lookups);
    }

    handlers! { (self, cx)
        lookup(parent: Node, name: &CStr) -> Entry =
            patiently [parent], Some(name), [cx, name], |source| source.look_up(cx, parent, name);
        getattr(node: Node, fh: Option<Handle>) -> Attributes =
            once [node], None, [cx], |source| source.get_attr(cx, node, fh);
        statx(node: Node, fh: Option<Handle>, mask: u32) -> (abi::Statx, Duration) =
            once [node], None, [cx], |source| source.get_statx(cx, node, fh, mask);
        setattr(node: Node, set: &SetAttr) -> Attributes =
            once [node], None, [cx, set], |source| source.set_attr(cx, node, set);
        readlink(node: Node) -> Bytes =
            once [node], None, [], |source| source.read_link(node);
        symlink(parent: Node, name: &CStr, target: &CStr) -> Entry =
            once [parent], Some(name), [cx, name, target], |source|
                source.with_room(|| source.make_symlink(cx, parent, name, target));
        mknod(parent: Node, name: &CStr, new: &NewNode) -> Entry =
            once [parent], Some(name), [cx, name, new], |source|
                source.with_room(|| source.make_node(cx, parent, name, new));
        mkdir(parent: Node, name: &CStr, new: &NewNode) -> Entry =
            once [parent], Some(name), [cx, name, new], |source|
                source.with_room(|| source.make_dir(cx, parent, name, new));
        unlink(parent: Node, name: &CStr) -> Unlinked =
            once [parent], Some(name), [cx, name], |source| source.remove_name(cx, parent, name, AtFlags::empty());
        rmdir(parent: Node, name: &CStr) -> Unlinked =
            once [parent], Some(name), [cx, name], |source| source.remove_name(cx, parent, name, AtFlags::REMOVEDIR);
        rename(
            parent: Node, name: &CStr, new_parent: Node, new_name: &CStr, flags: RenameFlags
        ) -> Unlinked =
            once [parent, new_parent], Some(name), [cx, name, new_name], |source|
                source.with_room(|| source.move_name(cx, parent, name, new_parent, new_name, flags));
        link(node: Node, new_parent: Node, new_name: &CStr) -> Entry =
            once [new_parent, node], Some(new_name), [cx, new_name], |source|
                source.with_room(|| source.make_link(cx, node, new_parent, new_name));
        open(node: Node, how: &OpenHow) -> Opened =
            patiently [node], None, [cx, how], |source| source.open_file(cx, node, how);
        create(parent: Node, name: &CStr, new: &NewNode, how: &OpenHow) -> (Entry, Opened) =
            patiently [parent], Some(name), [cx, name, new, how], |source|
                source.with_room(|| source.create_file(cx, parent, name, new, how));
        tmpfile(parent: Node, new: &NewNode, how: &OpenHow) -> (Entry, Opened) =
            once [parent], None, [cx, new, how], |source|
                source.with_room(|| source.make_tmpfile(cx, parent, new, how));
        statfs(node: Node) -> abi::Kstatfs =
            once [node], None, [], |source| source.stat_fs(node);
        getxattr(node: Node, name: &CStr) -> Bytes =
            once [node], None, [cx, name], |source| source.get_xattr(cx, node, name);
        listxattr(node: Node) -> Bytes =
            once [node], None, [cx], |source| source.list_xattr(cx, node);
        setxattr(node: Node, name: &CStr, value: &[u8], flags: XattrFlags, kill_sgid: bool) -> () =
            once [node], None, [cx, name, value], |source|
                source.set_xattr(cx, node, name, value, flags, kill_sgid);
        removexattr(node: Node, name: &CStr) -> () =
            once [node], None, [cx, name], |source| source.remove_xattr(cx, node, name);
        access(node: Node, mask: Access) -> () =
            once [node], None, [], |source| source.may_access(node, mask);
        getlk(node: Node, how: &LockHow, lock: &Lock) -> Lock =
            once [node], None, [how, lock], |source| source.test_lock(how, lock);
        lseek(node: Node, fh: Handle, offset: u64, seek: Seek) -> u64 =
            once [node], None, [], |source| source.seek_file(fh, offset, seek);
    }

    async fn read(&self, cx: &Context, node: Node, how: &IoHow, data: &Payload) -> Result<usize> {
        let read = match self.0.leads_elsewhere(node) {
            true => Box::pin(self.0.read_elsewhere(cx, how, data)).await,
            false => self.0.read_file(how, data).await,
        };
        Ok(read?)
    }

    async fn write(&self, cx: &Context, node: Node, how: &IoHow, data: &Payload) -> Result<usize> {
        let (mut done, mut how, mut left) = (0, *how, None);
        loop {
            let rest = left.as_ref().unwrap_or(data);
            let written = match self.0.leads_elsewhere(node) {
                true => Box::pin(self.0.write_elsewhere(cx, &how, rest)).await,
                false => self.0.write_file(cx, &how, rest).await,
            };
            match written {
                Err(errno) if self.0.makes_room(errno) => {}
                // A cache takes its pages for written unless it hears of an error.
                Err(errno) if done == 0 || how.from_cache => return Err(errno.into()),
                Err(_) => return Ok(done),
                Ok(0) if how.from_cache && !rest.is_empty() => return Err(Errno::IO.into()),
                Ok(more) if more == 0 || more == rest.len() => return Ok(done + more),
                // The next attempt says why, or has room: but not at the end of the file, where others may have
                // written meanwhile.
                Ok(more) if how.flags.contains(OFlags::APPEND) && !how.from_cache => {
                    return Ok(done + more);
                }
                Ok(more) => {
                    done += more;
                    how.offset += more as u64;
                    left = Some(data.slice(done..data.len()));
                }
            }
        }
    }

    async fn flush(&self, cx: &Context, node: Node, fh: Handle, owner: LockOwner) -> Result<()> {
        if !self.0.options.host_locks {
            // Nothing is held back here, and the kernel then need not ask at each close.
            return Err(Errno::NOSYS.into());
        }
        let call = move |source: &Source| source.drop_locks(fh, owner);
        self.give_back(cx, node, call).await
    }

    async fn release(
        &self,
        cx: &Context,
        node: Node,
        fh: Handle,
        _: OFlags,
        flock: Option<LockOwner>,
    ) -> Result<()> {
        let call = move |source: &Source| {
            // The host's open file, and the lock, would go on as the backing file of other programs that have the file
            // open.
            if let (Some(_), Ok(file)) = (flock, source.file(fh)) {
                let _ = rustix::fs::flock(file.as_fd(), rustix::fs::FlockOperation::Unlock);
            }
            source.release_file(fh)
        };
        self.give_back(cx, node, call).await
    }

    async fn fsync(&self, cx: &Context, node: Node, fh: Handle, data_only: bool) -> Result<()> {
        if self.0.leads_elsewhere(node) {
            let call = move |source: &Source| io::sync(source.file(fh)?.as_fd(), data_only);
            return Ok(Box::pin(self.0.elsewhere(cx, call)).await?);
        }
        Ok(ops::fsync(&self.0.file(fh)?.fd, data_only).await?)
    }

    async fn opendir(&self, cx: &Context, node: Node, how: &OpenHow) -> Result<Opened> {
        let kernel = matches!(how.origin, Origin::Kernel);
        if kernel && self.0.lists_unopened.load(Ordering::Relaxed) {
            return Err(Errno::NOSYS.into());
        }
        let call = async || {
            apart!(self, cx, [node], None, [cx], |source| source
                .open_dir(cx, node))
        };
        Ok(patiently(&self.0, call).await?)
    }

    async fn readdir(
        &self,
        cx: &Context,
        node: Node,
        fh: Handle,
        sink: &mut dyn DirSink,
    ) -> Result<()> {
        let offset = sink.offset();
        if !self.0.apart.any() || !self.0.is_apart(&*self.0.inode(node)?) {
            let list = async || self.0.list(cx, node, fh, &mut *sink);
            return Ok(patiently(&self.0, list).await?);
        }
        let dir: Result<_> = apart!(self, cx, [node], None, [], |source| source
            .read_ahead(node, fh, offset));
        let dir = dir?;
        Ok(self.0.list_read(&dir, sink)?)
    }

    async fn releasedir(&self, cx: &Context, node: Node, fh: Handle, _: OFlags) -> Result<()> {
        let call = move |source: &Source| source.dirs.remove(fh).map(drop).ok_or(Errno::BADF);
        self.give_back(cx, node, call).await
    }

    async fn fsyncdir(&self, cx: &Context, node: Node, fh: Handle, data_only: bool) -> Result<()> {
        if self.0.leads_elsewhere(node) {
            let call = move |source: &Source| io::sync(source.dir(node, fh)?.as_fd(), data_only);
            return Ok(Box::pin(self.0.elsewhere(cx, call)).await?);
        }
        Ok(ops::fsync(&self.0.dir(node, fh)?.fd, data_only).await?)
    }

    async fn setlk(&self, cx: &Context, node: Node, how: &LockHow, lock: &Lock) -> Result<()> {
        let attempt = async || {
            apart!(self, cx, [node], None, [how, lock], |source| source
                .try_lock(how, lock))
        };
        Ok(lock::patiently(how.wait, attempt).await?)
    }

    async fn fallocate(
        &self,
        cx: &Context,
        node: Node,
        fh: Handle,
        offset: u64,
        len: u64,
        mode: FallocateFlags,
    ) -> Result<()> {
        loop {
            let done = match self.0.leads_elsewhere(node) {
                true => {
                    let (context, range) = (*cx, (offset, len));
                    let call =
                        move |source: &Source| source.fallocate_waiting(&context, fh, range, mode);
                    Box::pin(self.0.elsewhere(cx, call)).await
                }
                false => self.0.fallocate_file(cx, fh, offset, len, mode).await,
            };
            match done {
                Err(errno) if self.0.makes_room(errno) => {}
                result => return Ok(result?),
            }
        }
    }

    async fn copy_file_range(&self, cx: &Context, node: Node, copy: &CopyRange) -> Result<u64> {
        if self.0.leads_elsewhere(node) || self.0.leads_elsewhere(copy.node_out) {
            let (context, copy) = (*cx, *copy);
            let call = move |source: &Source| source.begin_copy(&context, &copy)?();
            return Ok(Box::pin(self.0.elsewhere(cx, call)).await?);
        }
        Ok(self.0.copy_file(cx, copy).await?)
    }

    async fn ioctl(&self, cx: &Context, node: Node, ioctl: &Ioctl<'_>) -> Result<(i32, Bytes)> {
        let (input, head) = (
            ioctl.input,
            Ioctl {
                input: &[],
                ..*ioctl
            },
        );
        apart!(self, cx, [node], None, [cx, input], |source| {
            source.file_ioctl(cx, node, &Ioctl { input, ..head })
        })
    }

    async fn syncfs(&self, _: &Context, _: Node) -> Result<()> {
        Ok(self.0.sync_all().await?)
    }
}

impl ClientSupport for Passthrough {
    fn open_flags(&self, node: Node, fh: Handle) -> Result<OFlags> {
        Ok(self.0.asked_flags(node, fh)?)
    }

    fn share(&self, node: Node, fh: Handle) -> BoxFuture<'_, Result<Handle>> {
        Box::pin(async move { Ok(self.0.share_file(node, fh)?) })
    }

    fn lookups(&self, node: Node) -> Option<u64> {
        self.0.inodes.lookups(node)
    }

    fn identity(&self, node: Node) -> Option<Bytes> {
        self.0.identity_of(node).ok()
    }

    fn path(&self, node: Node) -> Option<Bytes> {
        self.0.path_of(node).ok()
    }

    fn find<'a>(&'a self, cx: &'a Context, identity: &'a [u8]) -> BoxFuture<'a, Result<Entry>> {
        Box::pin(async move { Ok(self.0.find_again(cx, identity)?) })
    }
}

impl Passthrough {
    /// Takes back what a caller has no more use for, also when no request waits for that any more.
    async fn give_back(
        &self,
        cx: &Context,
        node: Node,
        call: impl FnOnce(&Source) -> Result<(), Errno> + Send + 'static,
    ) -> Result<()> {
        let done = match self.0.leads_elsewhere(node) {
            true => Box::pin(self.0.surely_elsewhere(cx, call)).await,
            false => call(&self.0),
        };
        Ok(done?)
    }
}
