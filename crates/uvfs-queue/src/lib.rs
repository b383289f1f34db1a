//! Queue pairs in shared memory and the wait policy.
//!
//! [`ring`] is the lock-free part of a queue pair: a ring of slot numbers and the sleep/wake
//! handshake on a shared word, both checked with loom (`RUSTFLAGS="--cfg loom" cargo test -p
//! uvfs-queue --test loom --release`). `shm` makes and checks sealed memfds,
//! `pair` lays two rings, a notification ring and the request entries out in one, and `arena` is
//! the memory that pages and payloads live in.

#[cfg(not(loom))]
pub mod arena;
#[cfg(not(loom))]
pub mod attach;
#[cfg(not(loom))]
pub mod impatience;
#[cfg(not(loom))]
pub mod pair;
pub mod placement;
pub mod ring;
#[cfg(not(loom))]
pub mod shm;
pub mod wait;
