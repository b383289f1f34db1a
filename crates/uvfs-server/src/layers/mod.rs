//! File systems that wrap another.
//!
//! Each takes a file system and is one: `ReadOnly::new(Prefix::new(fs, "public"))` serves a directory of `fs` that no
//! program can change. One of your own implements [`Layer`], and there only what it does differently.

mod attribute_cache;
mod discard;
mod faults;
mod latency;
mod prefix;
mod read_only;

use std::ffi::CStr;
use std::sync::Arc;
use std::time::Duration;

pub use attribute_cache::AttributeCache;
pub use discard::Discard;
pub use faults::{Call, Faults};
pub use latency::Latency;
pub use prefix::Prefix;
pub use read_only::ReadOnly;
pub use uvfs_proto::abi::Opcode;

use crate::fs::*;

/// Writes a [`Layer`], whose methods forward, and a file system that calls them.
macro_rules! layer {
    ($($opcode:ident $name:ident($node:ident $(, $arg:ident: $ty:ty)*) -> $out:ty;)*) => {
        /// A file system over another, to which it passes on each request that it has no method for.
        ///
        /// Every type that implements this is a [`FileSystem`]. The methods are those of that trait, and those that a
        /// layer leaves out go through [`around`](Self::around), so that one method can see, delay, refuse or redirect
        /// any of them.
        ///
        /// ```
        /// use std::sync::atomic::{AtomicU64, Ordering};
        /// use uvfs_server::fs::*;
        /// use uvfs_server::layers::{Layer, Opcode};
        ///
        /// /// Counts requests, and bytes that are read.
        /// struct Counted<F> {
        ///     fs: F,
        ///     requests: AtomicU64,
        ///     bytes: AtomicU64,
        /// }
        ///
        /// impl<F: FileSystem> Layer for Counted<F> {
        ///     type Inner = F;
        ///
        ///     fn inner(&self) -> &F {
        ///         &self.fs
        ///     }
        ///
        ///     async fn around<T>(
        ///         &self,
        ///         _: &Context,
        ///         _: Opcode,
        ///         node: Node,
        ///         call: impl AsyncFnOnce(Node) -> Result<T>,
        ///     ) -> Result<T> {
        ///         self.requests.fetch_add(1, Ordering::Relaxed);
        ///         call(node).await
        ///     }
        ///
        ///     async fn read(&self, cx: &Context, node: Node, how: &IoHow, data: &Payload) -> Result<usize> {
        ///         let read = self.fs.read(cx, node, how, data).await?;
        ///         self.bytes.fetch_add(read as u64, Ordering::Relaxed);
        ///         Ok(read)
        ///     }
        /// }
        /// ```
        #[allow(async_fn_in_trait)] // As `FileSystem`.
        pub trait Layer: Send + Sync + 'static {
            /// The file system below.
            type Inner: FileSystem;

            /// The file system below.
            fn inner(&self) -> &Self::Inner;

            /// Passes on a request by `call`, which takes the node that it is about in the file system below. A method
            /// that the layer has of its own does not come here.
            ///
            /// # Errors
            /// The layer's, or that of the file system below.
            async fn around<T>(
                &self,
                cx: &Context,
                opcode: Opcode,
                node: Node,
                call: impl AsyncFnOnce(Node) -> Result<T>,
            ) -> Result<T> {
                let _ = (cx, opcode);
                call(node).await
            }

            /// As [`FileSystem::init`].
            ///
            /// # Errors
            /// As there.
            fn init(&self, config: &mut Config, session: Arc<dyn SessionHandle>) -> Result<()> {
                self.inner().init(config, session)
            }

            /// As [`FileSystem::destroy`].
            fn destroy(&self) {
                self.inner().destroy();
            }

            /// As [`FileSystem::watch`].
            fn watch(&self) -> Option<Watch> {
                self.inner().watch()
            }

            /// As [`FileSystem::counts`].
            fn counts(&self) -> Vec<(&'static str, u64)> {
                self.inner().counts()
            }

            /// As [`FileSystem::clients`].
            fn clients(&self) -> Option<&dyn ClientSupport> {
                self.inner().clients()
            }

            /// As [`FileSystem::survive`]: that of the file system below. For a layer that has nodes or handles of its
            /// own, or changes their numbers, it is nothing.
            fn survive(&self) -> Option<&dyn Survive> {
                self.inner().survive()
            }

            /// As [`FileSystem::forget`].
            fn forget(&self, node: Node, lookups: u64) {
                self.inner().forget(node, lookups);
            }

            $(
                #[doc = concat!("As [`FileSystem::", stringify!($name), "`].")]
                ///
                /// # Errors
                /// As there.
                async fn $name(&self, cx: &Context, $node: Node $(, $arg: $ty)*) -> Result<$out> {
                    let call = async |node| self.inner().$name(cx, node $(, $arg)*).await;
                    self.around(cx, Opcode::$opcode, $node, call).await
                }
            )*
        }

        impl<L: Layer> FileSystem for L {
            fn init(&self, config: &mut Config, session: Arc<dyn SessionHandle>) -> Result<()> {
                Layer::init(self, config, session)
            }

            fn destroy(&self) {
                Layer::destroy(self);
            }

            fn watch(&self) -> Option<Watch> {
                Layer::watch(self)
            }

            fn counts(&self) -> Vec<(&'static str, u64)> {
                Layer::counts(self)
            }

            fn clients(&self) -> Option<&dyn ClientSupport> {
                Layer::clients(self)
            }

            fn survive(&self) -> Option<&dyn Survive> {
                Layer::survive(self)
            }

            fn forget(&self, node: Node, lookups: u64) {
                Layer::forget(self, node, lookups);
            }

            $(
                async fn $name(&self, cx: &Context, $node: Node $(, $arg: $ty)*) -> Result<$out> {
                    Layer::$name(self, cx, $node $(, $arg)*).await
                }
            )*
        }
    };
}

layer! {
    Lookup lookup(parent, name: &CStr) -> Entry;
    Getattr getattr(node, fh: Option<Handle>) -> Attributes;
    Statx statx(node, fh: Option<Handle>, mask: u32) -> (Statx, Duration);
    Setattr setattr(node, set: &SetAttr) -> Attributes;
    Readlink readlink(node) -> Bytes;
    Symlink symlink(parent, name: &CStr, target: &CStr) -> Entry;
    Mknod mknod(parent, name: &CStr, new: &NewNode) -> Entry;
    Mkdir mkdir(parent, name: &CStr, new: &NewNode) -> Entry;
    Unlink unlink(parent, name: &CStr) -> Unlinked;
    Rmdir rmdir(parent, name: &CStr) -> Unlinked;
    Rename2 rename(
        parent, name: &CStr, new_parent: Node, new_name: &CStr, flags: RenameFlags
    ) -> Unlinked;
    Link link(node, new_parent: Node, new_name: &CStr) -> Entry;
    Open open(node, how: &OpenHow) -> Opened;
    Create create(parent, name: &CStr, new: &NewNode, how: &OpenHow) -> (Entry, Opened);
    Tmpfile tmpfile(parent, new: &NewNode, how: &OpenHow) -> (Entry, Opened);
    Read read(node, how: &IoHow, data: &Payload) -> usize;
    Write write(node, how: &IoHow, data: &Payload) -> usize;
    Flush flush(node, fh: Handle, owner: LockOwner) -> ();
    Release release(node, fh: Handle, flags: OFlags, flock: Option<LockOwner>) -> ();
    Fsync fsync(node, fh: Handle, data_only: bool) -> ();
    Opendir opendir(node, how: &OpenHow) -> Opened;
    Readdir readdir(node, fh: Handle, sink: &mut dyn DirSink) -> ();
    Releasedir releasedir(node, fh: Handle, flags: OFlags) -> ();
    Fsyncdir fsyncdir(node, fh: Handle, data_only: bool) -> ();
    Statfs statfs(node) -> Kstatfs;
    Getxattr getxattr(node, name: &CStr) -> Bytes;
    Listxattr listxattr(node) -> Bytes;
    Setxattr setxattr(
        node, name: &CStr, value: &[u8], flags: XattrFlags, kill_sgid: bool
    ) -> ();
    Removexattr removexattr(node, name: &CStr) -> ();
    Access access(node, mask: Access) -> ();
    Getlk getlk(node, how: &LockHow, lock: &Lock) -> Lock;
    Setlk setlk(node, how: &LockHow, lock: &Lock) -> ();
    Fallocate fallocate(
        node, fh: Handle, offset: u64, len: u64, mode: FallocateFlags
    ) -> ();
    Lseek lseek(node, fh: Handle, offset: u64, whence: Seek) -> u64;
    CopyFileRange copy_file_range(node, copy: &CopyRange) -> u64;
    Ioctl ioctl(node, ioctl: &Ioctl<'_>) -> (i32, Bytes);
    Poll poll(node, poll: &Poll) -> u32;
    Bmap bmap(node, block: u64, block_size: u32) -> u64;
    Syncfs syncfs(node) -> ();
}
