//! Backends of [`uvfs_client`] in the same process, for its tests and benchmarks.
//!
//! [`LocalStore`] serves a directory of the host, and [`Faulty`] makes another backend fail and wait. A test sees
//! the exact requests of the page cache through them, and a benchmark measures the page cache without a server.
//! A program that wants to serve a directory takes `uvfs-passthrough`, which has leases, caches and permissions,
//! behind `uvfs_server::in_process`.
//!
//! ```
//! use std::sync::atomic::Ordering;
//! use uvfs_client::{Client, Config, Flags};
//! use uvfs_local::{Faulty, LocalStore};
//!
//! # fn main() -> std::io::Result<()> {
//! # let dir = tempfile::tempdir()?;
//! let store = Faulty::new(LocalStore::open(dir.path())?);
//! let fault = store.fault.clone();
//! let client = Client::new(store, Config::default())?;
//! let file = client.create("file")?;
//! file.write_at(b"buffered", 0, Flags::empty())?;
//! assert_eq!(fault.requests.load(Ordering::Relaxed), 0);
//! file.sync_all()?;
//! assert_eq!(fault.requests.load(Ordering::Relaxed), 1);
//! # Ok(())
//! # }
//! ```

mod faulty;
mod store;

use std::io;

pub use faulty::{Fault, Faulty};
pub use store::LocalStore;

fn errno(code: i32) -> io::Error {
    io::Error::from_raw_os_error(code)
}
