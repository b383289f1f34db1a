//! An object store as a file system: objects are files, and the local disk caches them.
//!
//! `docs/remote.md` has the design. A request goes through `fs.rs` (handlers), `tree.rs` (nodes), `object.rs` (the pieces of one
//! version of an object) and, for what is missing, `store.rs` (requests to the store). `posix.rs` reads user metadata, and
//! `listing.rs` keeps listings for lookups. `clients.rs` serves clients over shared memory, and `counters.rs` counts for the
//! statistics, and `survive.rs` saves nodes and open files for the next server of a mount. `write.rs` and `names.rs` take changes, which `draft.rs` and `journal.rs` keep on the local disk and `put.rs` brings to
//! the store. `unseen.rs` has files that the kernel writes by itself. `cache.rs` owns the files of the local disk. `engine.rs` has
//! one object as a device of the buffer cache, for an image in a store.
//!
//! ```no_run
//! use uvfs_object::{ObjectFs, Options};
//! use uvfs_server::SessionOptions;
//!
//! # fn main() -> std::io::Result<()> {
//! let fs = ObjectFs::open("s3://bucket/photos", Options::default())?;
//! # let _ = fs;
//! # Ok(())
//! # }
//! ```

mod cache;
mod clients;
mod counters;
mod draft;
mod engine;
mod fs;
mod journal;
mod listing;
mod map;
mod names;
mod object;
mod posix;
mod put;
mod store;
mod survive;
mod tree;
mod unseen;
mod upload;
mod window;
mod write;

use std::path::PathBuf;
use std::time::Duration;

pub use engine::ObjectEngine;
pub use fs::{ObjectFs, Prepared};
pub use opendal;
pub use store::operator;

/// How a store is served.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Options {
    /// The directory of the cache; by default `uvfs` in the user's cache directory.
    pub cache_dir: Option<PathBuf>,
    /// Bytes that the cache may take; by default a tenth of the free space.
    pub cache_size: Option<u64>,
    /// An open does not ask the store for a version, nor a lookup for a name, that the server asked for within this time,
    /// nor for what a listing within it says. With zero each open asks.
    pub ttl: Duration,
    /// A request that makes no progress for so long fails.
    pub timeout: Duration,
    /// Requests for data that are under way at a time, at most.
    pub requests: usize,
    /// Bytes of memory that the server may take for data: half for what the kernel asks for, half for requests to the
    /// store, of which there are fewer than [`Options::requests`] where that is too little for them.
    pub memory: u64,
    /// Files that are complete in the cache are read by the kernel itself.
    pub backing_files: bool,
    /// Types, modes, owners and times come from the objects' user metadata where they have it. Listings do not carry it, so
    /// each name whose attributes a program asks for costs a request.
    pub metadata: bool,
    /// Whether programs may change files, and what they are told.
    pub writes: Writes,
    /// fsync(2) waits for the local disk alone, with [`Writes::Back`].
    pub local_fsync: bool,
    /// Owner of files whose metadata names none.
    pub uid: u32,
    /// Group of files whose metadata names none.
    pub gid: u32,
    /// Permission bits of files whose metadata has none.
    pub file_mode: u32,
    /// Permission bits of directories whose metadata has none.
    pub dir_mode: u32,
}

/// Whether programs may change files, and when the calls that do so return.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Writes {
    /// The mount is read-only.
    #[default]
    No,
    /// close(2), fsync(2) and changes of names return when the store has what was changed, and say what it answered.
    Close,
    /// Changes wait for the local disk, and the store gets them afterwards. fsync(2) waits for the store.
    Back,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            cache_dir: None,
            cache_size: None,
            ttl: Duration::from_secs(1),
            timeout: Duration::from_secs(60),
            requests: 64,
            memory: 128 << 20,
            backing_files: true,
            metadata: false,
            writes: Writes::No,
            local_fsync: false,
            uid: rustix::process::getuid().as_raw(),
            gid: rustix::process::getgid().as_raw(),
            file_mode: 0o644,
            dir_mode: 0o755,
        }
    }
}
