//! A library for `LD_PRELOAD` that takes a program's reads and writes of files on a uvfs mount over
//! shared memory. `uvfs run` sets it up.
//!
//! Files are opened through the mount as always, so that every descriptor is a real one, and every
//! call that isn't served here works as before. The first call that is, on a descriptor of a mount's
//! file, imports it (`import.rs`): from then on its data goes over the queue pair of this process.
//! What stands in the way of that (no server, another version, limits) sends the program through
//! the kernel, with one line on standard error at most.
//!
//! *Positions.* A description that this process opened and that no other can have yet has its
//! position here (`table.rs`); before a fork, an exec, or anything else that lets the kernel or
//! another process use it, the position goes to the kernel, and stays there: read(2) and write(2) on
//! it are the kernel's from then on, while pread(2) and pwrite(2) are still served. The same holds
//! for descriptors that were inherited, and for O_APPEND. What can't be seen here, io_uring and
//! system calls made without the C library, sees a position that is only as new as the last of
//! those moments.
//!
//! *Paths* are served with `uvfs run --metadata` (`paths.rs`, `names.rs`, `dirs.rs`); files that were
//! opened so have no descriptor of the kernel's until something needs one. A program whose system
//! calls don't go through the C library would use such a descriptor unseen: it fails (EBADF).
//!
//! *Signals* that come during a served call are handled at its end, as with the kernel's calls on
//! files (`signals.rs`). What interrupts one all the same, and is called, goes to the kernel. The
//! library has an allocator of its own, so that it never enters the program's.
//!
//! *Locks*, in the order in which they are taken; a thread that has one may take any below it:
//!
//! 1. `paths::OPENING`: shared while a descriptor is made that the kernel doesn't know; by a fork
//!    against all others
//! 2. `paths::STATE`
//! 3. `import::STATE`
//! 4. a description's position
//! 5. `dirs::OPEN`, or a stream's state (never both, but for a child that is alone)
//! 6. `aio::CONTEXTS`, or a context's state
//! 7. `table::FREE`
//!
//! All but the last two are held over waits for the server, and for the kernel's side of the mount.
//! That is safe because nothing that they wait for needs any: the threads that answer recalls, look
//! for servers and write what is dirty are this library's own, which never come back into it
//! (`process::after::pthread_create`), and the client's locks are all below these. A fork takes all
//! of them, so that a child finds them free. Descriptions are dropped, and their files closed, with
//! any of 1 to 5 held, but never with 6 or 7.
//!
//! `table::Apart` is no lock: it keeps the program's closing and this library's making of descriptors
//! apart for some milliseconds at most, and whoever waits longer goes on.

// Unit tests would stand in front of their own C library: they leave out what is exported.
#![cfg_attr(test, allow(dead_code, unused_imports, unused_macros))]

mod aio;
mod calls;
mod dirs;
mod engage;
mod import;
mod mounts;
mod names;
mod paths;
mod process;
mod real;
mod report;
mod signals;
mod table;

#[cfg(not(test))]
#[global_allocator]
static ALLOCATOR: dlmalloc::GlobalDlmalloc = dlmalloc::GlobalDlmalloc;
