//! Queue pairs in shared memory and the wait policy.
//!
//! [`ring`] is the lock-free part: a ring of slot numbers and the sleep/wake handshake, both
//! checked with loom (`RUSTFLAGS="--cfg loom" cargo test -p uvfs-queue --test loom --release`).
//! [`shm`] makes and checks sealed memfds, and [`pair`] lays two rings, a notification ring and
//! the request entries out in one.

#[cfg(not(loom))]
pub mod arena;
#[cfg(not(loom))]
pub mod pair;
pub mod ring;
#[cfg(not(loom))]
pub mod shm;
