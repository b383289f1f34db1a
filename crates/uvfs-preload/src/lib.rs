//! A library for `LD_PRELOAD` that takes a program's reads and writes of files on a uvfs mount over
//! shared memory. `uvfs run` sets it up.
//!
//! Files are opened through the mount as always, so that every descriptor is a real one, and every
//! call that isn't served here works as before. The first call that is, on a descriptor of a mount's
//! file, imports it (`import.rs`): from then on its data goes over the queue pair of this process.
//! An obstacle (no server, another version, limits) sends the program through
//! the kernel, with one line on standard error at most.
//!
//! *Positions.* A description that this process opened and that no other can have yet has its
//! position here (`table.rs`); before a fork, an exec, or anything else that lets the kernel or
//! another process use it, the position goes to the kernel, and stays there: read(2) and write(2) on
//! it are the kernel's from then on, while pread(2) and pwrite(2) are still served. The same holds
//! for descriptors that were inherited, and for O_APPEND.
//!
//! *Calls that don't go through the C library* are seen too while a file is served, or end that
//! (`dispatch.rs`).
//!
//! *Paths* go to the kernel. Opening functions are intercepted only to note that no other process has
//! the new descriptor yet.
//!
//! *Signals* that come during a served call are handled at its end, as with the kernel's calls on
//! files (`signals.rs`). A call by a handler that interrupts one all the same goes to the kernel. The
//! library has an allocator of its own, so that it never enters the program's.
//!
//! *Locks*, in the order in which they are taken; a thread that has one may take any below it. Debug builds
//! check the order of those with a rank (`ranked.rs`):
//!
//! 1. the servers ([`rank::SERVERS`])
//! 2. a description's position
//! 3. the contexts of Linux AIO ([`rank::CONTEXTS`]), then a context's state
//! 4. the numbers of descriptors in use ([`rank::BY_NUMBER`])
//! 5. free descriptions ([`rank::FREE`])
//!
//! The first two are held over waits for the server, and for the kernel's side of the mount.
//! That is safe because nothing that they wait for needs any: the threads that answer recalls, look
//! for servers and write what is dirty are this library's own, which never come back into it
//! (`process::around::pthread_create`), and the client's locks are all below these. A fork takes all
//! of them, so that a child finds them free. Descriptions are dropped, and their files closed, with
//! 1 or 2 held, but never with those below.
//!
//! `table::RaceGuard` is no lock: it keeps the program's closing and this library's making of descriptors
//! apart for some milliseconds at most, and a thread that waits longer goes on.

// Unit tests would stand in front of their own C library: they leave out what is exported.
#![cfg_attr(test, allow(dead_code, unused_imports, unused_macros))]

mod aio;
mod args;
mod calls;
mod dispatch;
mod guard;
mod import;
#[allow(non_snake_case)] // As C has them.
mod next;
mod passing;
mod process;
mod promotion;
mod ranked;
mod real;
mod report;
mod signals;
mod table;
mod traffic;

/// Descriptors from this number on are left to the kernel.
const DESCRIPTORS: usize = 1 << 16;

/// The ranks of locks.
mod rank {
    pub(crate) const SERVERS: u32 = 0;
    pub(crate) const CONTEXTS: u32 = 1;
    pub(crate) const BY_NUMBER: u32 = 2;
    pub(crate) const FREE: u32 = 3;
}

#[cfg(not(test))]
#[global_allocator]
static ALLOCATOR: dlmalloc::GlobalDlmalloc = dlmalloc::GlobalDlmalloc;
