//! Your first file system.
//!
//! A file system is a type that implements [`FileSystem`](crate::FileSystem). Each request of the kernel, or of
//! a client over shared memory, calls one of its methods. All methods have a default, so you begin with few
//! and add those that your programs use.
//!
//! # A new program
//!
//! A mount needs root, or `fusermount3` of the Debian package fuse3, and `/dev/fuse`. The dependencies, with the
//! path of a checkout of uvfs (`uvfs-client` only to use a file system in process):
//!
//! ```toml
//! [dependencies]
//! uvfs-server = { path = "uvfs/crates/uvfs-server" }
//! uvfs-client = { path = "uvfs/crates/uvfs-client" }
//! ```
//!
//! # One file
//!
//! This is the whole program. It is also the crate's example `hello`:
//! `cargo run -p uvfs-server --example hello -- MOUNTPOINT`.
//!
//! ```no_run
#![doc = include_str!("../examples/hello.rs")]
//! ```
//!
//! - **Nodes.** You name files by numbers, of the type [`Node`](crate::fs::Node). [`ROOT`](crate::fs::ROOT) is the
//!   root directory; the others are yours to choose, but not 0. A number is in use from the first [`lookup`](crate::FileSystem::lookup) that gives it until
//!   [`forget`](crate::FileSystem::forget) takes the last lookup back, also if the file is removed meanwhile.
//! - **Lifetimes.** With each name and its attributes you say how long the kernel may keep them. If files
//!   change only by requests, an hour is right, and most requests never reach you. If they change by
//!   themselves, give a short time, or tell the kernel by the [`SessionHandle`](crate::SessionHandle) that
//!   [`init`](crate::FileSystem::init) gets.
//! - **Attributes.** [`attr`](crate::fs::attr) begins with the number, the type and the permissions. Sizes, owners
//!   and times are 0 until you set them; [`touch`](crate::fs::touch) sets times to now.
//! - **Errors.** Return the [`Errno`](crate::Errno) that a kernel file system would. The program that made the
//!   call gets it. A method that you leave out gives ENOSYS (“Function not implemented”). Where an errno does not say
//!   enough, attach a message or a cause ([`Error`](crate::Error)): it is logged, once, when the request ends.
//! - **Handles.** An open file has a number too, a [`Handle`](crate::fs::Handle). A file system that needs none
//!   leaves out [`open`](crate::FileSystem::open), and all handles are 0.
//! - **Modes and flags** have types of their own, those of the crate rustix: [`FileType`](crate::fs::FileType),
//!   [`Mode`](crate::fs::Mode), [`OFlags`](crate::fs::OFlags) and so on. You need no `libc`.
//! - **Permissions.** The kernel checks them by mode, owner and group. Without
//!   [`default_permissions`](crate::mount::MountOptions::default_permissions) you check each request by its
//!   [`Context`](crate::fs::Context).
//!
//! # Many requests at once
//!
//! Each core has a queue with a thread of its own, and your methods run on these threads. So the type is
//! shared (`&self`, `Send + Sync`), and you lock what changes. A method is `async`: while it awaits, its
//! thread takes other requests. Hold no lock across an await. Work that blocks goes through
//! [`uvfs_io`]: `uvfs_io::ops` has reads, writes and syncs of host files over io_uring.
//!
//! A [`Payload`](crate::fs::Payload) is the caller's memory, or the transport's. `read` fills it and `write`
//! takes from it; nothing is copied in between. Handed on to `uvfs_io::ops`, the bytes move once.
//!
//! # The end
//!
//! A mount ends when a user unmounts it, and by SIGTERM, SIGINT and SIGHUP. The kernel then sends what it still has to
//! write, the last requests are answered, [`destroy`](crate::FileSystem::destroy) is called, and
//! [`Mounted::wait`](crate::Mounted::wait) returns. Put what your file system holds back into `destroy`, and into
//! [`fsync`](crate::FileSystem::fsync) and [`flush`](crate::FileSystem::flush), whose callers are told that it is safe.
//!
//! A mount in use can't be unmounted. SIGINT waits for its users; SIGTERM, SIGHUP and a second SIGINT detach it:
//! it leaves the tree, and its users are served until they are done. One more signal cuts them off: they get
//! errors, and the kernel's unwritten pages are lost. Messages go to `tracing`.
//!
//! A program with signal handlers of its own keeps them, and ends the mount itself:
//!
//! ```no_run
//! # use uvfs_server::{FileSystem, Options};
//! # struct Hello;
//! # impl FileSystem for Hello {}
//! # fn on_terminate(_: impl Fn() + Send + 'static) {}
//! # fn main() -> std::io::Result<()> {
//! let mounted = uvfs_server::mount(Hello, "/mnt", Options::named("hello"))?;
//! let unmounter = mounted.unmounter();
//! // Your own, or that of a crate.
//! on_terminate(move || unmounter.end());
//! mounted.wait();
//! println!("destroyed: what is left can be cleaned up");
//! # Ok(())
//! # }
//! ```
//!
//! [`Unmounter::end`](crate::Unmounter::end) waits for nothing, so a handler of the file system may call it too. All
//! threads may wait, and unmount, at once. [`OnSignal::Nothing`](crate::OnSignal) leaves signals alone, and
//! [`auto_unmount`](crate::mount::MountOptions::auto_unmount) takes the mount away even after `kill -9`.
//!
//! # A file system in memory, served in three ways
//!
//! This is a complete one: files, directories, symbolic and hard links, renames, and open files that have lost
//! their name. It is `fs.rs` of the crate's example `memory`.
//!
//! ```ignore
#![doc = include_str!("../examples/memory/fs.rs")]
//! ```
//!
//! Three things in it are easy to get wrong:
//!
//! - Every [`Entry`](crate::fs::Entry) that you return counts a lookup, whichever method returns it. The node
//!   lives until [`forget`](crate::FileSystem::forget) has taken all of them back, also without a name.
//! - [`unlink`](crate::FileSystem::unlink), `rmdir` and `rename` return which node lost its name
//!   ([`Unlinked`](crate::fs::Unlinked)), so that the server can invalidate its attributes in the kernel.
//! - The kernel truncates by [`setattr`](crate::FileSystem::setattr), also for an open with O_TRUNC.
//!
//! The `main.rs` of the example serves it:
//!
//! ```ignore
#![doc = include_str!("../examples/memory/main.rs")]
//! ```
//!
//! 1. **By a mount**, for all programs: [`mount()`](crate::mount()). `cargo run -p uvfs-server --example memory --
//!    MOUNTPOINT` serves until `umount MOUNTPOINT`.
//! 2. **Under `uvfs run`**, for unmodified programs that write or read so much that requests to the kernel
//!    cost too much: set [`ServerOptions::clients`](crate::ServerOptions::clients), and implement
//!    [`ClientSupport`](crate::fs::ClientSupport), which [`clients`](crate::FileSystem::clients) gives. The reads
//!    and writes of such a program then come over shared memory, and through a page cache in the program:
//!    `uvfs run --report -- dd if=/dev/zero of=MOUNTPOINT/file bs=4k count=100000`.
//! 3. **In process**, without a mount or a second process:
//!    [`Session::unmounted`](crate::Session::unmounted) and [`in_process`](crate::in_process()), with a
//!    `uvfs_client::Client` at the other end.
//!
//! # A file system that outlives its server
//!
//! With [`Options::survive`](crate::Options) a mount goes on when its server is killed or crashes, and no call of a program
//! fails. [`mount()`](crate::mount()) then splits the process: a keeper waits, and a worker serves, in which
//! [`mount()`](crate::mount()) returns. If the worker is killed, it returns again, in the next one. That one has its memory as
//! it was at the first call, and all descriptors. The file system sees to three things:
//!
//! - **What it keeps** lies outside of its memory: in files on a disk, or in a memfd that it opens before
//!   [`mount()`](crate::mount()). A worker can be killed at any moment, so what it writes has to be the old or the new state
//!   at each. [`init`](crate::FileSystem::init), which each worker calls, reads it.
//! - **What the kernel knows**: [`survive`](crate::FileSystem::survive) gives what implements
//!   [`Survive`](crate::fs::Survive). If the numbers of nodes and handles mean the same to each worker, its defaults do. A file
//!   system that counts lookups gets them back by [`restore_node`](crate::fs::Survive::restore_node), and one with a table of
//!   open files saves the number of each descriptor, which the next worker claims.
//! - **What is done once**: the kernel sends again what the killed worker had not answered, though that may have done it.
//!   Reads, writes at a place and new attributes can be done twice. For changes of names,
//!   [`SessionHandle::note`](crate::SessionHandle::note) tells the next worker what a request is about before it is done,
//!   and [`SessionHandle::again`](crate::SessionHandle::again) gives it.
//!
//! The crate's example `kept` is a file system in memory that does all this. `cargo run -p uvfs-server --example kept --
//! MOUNTPOINT` prints the process that serves; `kill -9` it, and look at MOUNTPOINT.
//!
//! ```ignore
#![doc = include_str!("../examples/kept.rs")]
//! ```
//!
//! # Going on
//!
//! | You want | Look at |
//! |---|---|
//! | names and attributes that live for ever, although the host changes them | [`SessionHandle::host_changed`](crate::SessionHandle::host_changed) |
//! | the kernel to read and write a host file itself | [`Opened::backing`](crate::fs::Opened::backing) |
//! | small files that come with their open | [`Opened::contents`](crate::fs::Opened::contents) |
//! | the kernel's write-back cache, and other features of the protocol | [`Config::wanted`](crate::fs::Config::wanted) in [`init`](crate::FileSystem::init) |
//! | a file system over yours: slow, failing, read-only, a directory of it, or cached | [`layers`](crate::layers) |
//! | clients that go on after a restart of the server | [`identity`](crate::fs::ClientSupport::identity) and [`find`](crate::fs::ClientSupport::find) |
//! | counts, and latency by request | [`Session::report`](crate::Session::report), `uvfs stats MOUNTPOINT` |
//!
//! `uvfs stats` and `uvfs top` find the server by an extended attribute of the mount's root. Once a file system has
//! answered ENOSYS to [`getxattr`](crate::FileSystem::getxattr), as it does without that method, the kernel asks
//! for no attribute any more, and they fail. To keep them, answer ENODATA; the kernel then asks before writes
//! whether the file has capabilities, unless [`init`](crate::FileSystem::init) takes over with
//! `HANDLE_KILLPRIV_V2`.
