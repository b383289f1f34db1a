//! Memory for caches: where it comes from, what goes first, and when it must go.
//!
//! A cache that calls `malloc` for each of its buffers grows the heap under load, and heap growth
//! serialises every thread's page faults on the process's memory map. A cache that guesses how
//! much of the machine it may have is killed on the day the guess is wrong. This crate holds
//! what both caches of uvfs (metadata buffers and file pages) use instead:
//!
//! * [`Arena`]: one mapping made at the start, cut into slabs of power-of-two size classes, with
//!   a hard limit. Memory that is no longer needed goes back to the kernel with
//!   `MADV_DONTNEED`, the mapping itself never changes.
//! * [`Lru`]: a list in order of age; [`RefCount`]: the small counter that lets an entry survive
//!   as many looks of reclaim as its kind deserves.
//! * [`Shrinker`] and [`Shrinkers`]: caches that can give memory back, and how they are asked.
//! * [`Monitor`]: the thread that asks, when the kernel's pressure stall information (or, where
//!   that is missing, a look at `MemAvailable` and the cgroup's own numbers) says it is time.
//!
//! `unsafe` is confined to the arena module.

mod arena;
mod lru;
mod pressure;
mod shrink;

pub use arena::{Arena, ArenaStats, Block, MAX_SLAB_OBJECT, MIN_OBJECT, NoMemory, SLAB};
pub use lru::{Lru, LruKey, RefCount, Verdict};
pub use pressure::{Monitor, MonitorConfig, Room, Source};
pub use shrink::{Shrinker, Shrinkers};
