//! Files with a page cache in user space.
//!
//! A [`Client`] speaks to a file system through a [`Backend`]: [`LocalStore`] (a host directory,
//! in this process) or a uvfs server over a shared-memory queue pair. Its [`File`]s are read and
//! written through the page [`cache`]: buffered, uncached ([`Flags::DONTCACHE`]) or direct
//! ([`Flags::DIRECT`]), per call.
//!
//! ```
//! use uvfs_client::{Client, Config, Flags, LocalStore, OpenOptions};
//!
//! # fn main() -> std::io::Result<()> {
//! # let dir = tempfile::tempdir()?;
//! let store = LocalStore::open(dir.path())?;
//! let client = Client::new(store, Config::default())?;
//! let file = client.open("hello", OpenOptions::new().read(true).write(true).create(true))?;
//! file.write_at(b"hello, world", 0, Flags::empty())?;
//! let mut buf = [0; 5];
//! assert_eq!(file.read_at(&mut buf, 7, Flags::empty())?, 5);
//! assert_eq!(&buf, b"world");
//! file.sync_all()?;
//! # Ok(())
//! # }
//! ```

pub mod backend;
pub mod cache;
mod client;
mod event;
mod faulty;
mod file;
mod local;
mod pending;
mod remote;
mod stats;
mod token;

pub use backend::{Attr, Backend, DirEntry, Entry, Imported, NodeId, SetAttr, StatFs};
pub use cache::Config;
pub use client::Client;
pub use faulty::{Fault, Faulty};
pub use file::{Advice, AllocateMode, File, Flags, OpenOptions};
pub use local::LocalStore;
pub use pending::Pending;
pub use remote::Server;
pub use stats::Stats;
pub use token::Token;
