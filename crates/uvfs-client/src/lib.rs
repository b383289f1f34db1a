//! Files with a page cache in user space.
//!
//! A [`Client`] speaks to a file system through a [`Backend`], which is a uvfs server behind a shared-memory queue
//! pair. Its [`File`]s are read and written through the page [`cache`]: buffered, uncached ([`Flags::DONTCACHE`]) or
//! direct ([`Flags::DIRECT`]), per call.
//!
//! A server is reached through its socket, [`Server::connect`]; or it is in the same program, with
//! a file system that is a value of it:
//!
//! ```
//! use std::sync::Arc;
//! use uvfs_client::{Client, Config, Flags, OpenOptions, Server};
//! use uvfs_passthrough::{Options, Passthrough};
//! use uvfs_server::{ClientLimits, Session, SessionOptions, in_process};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let dir = tempfile::tempdir()?;
//! // Or your own: whatever implements `uvfs_server::FileSystem`.
//! let fs = Passthrough::open(dir.path(), Options::default())?;
//! let session = Arc::new(Session::unmounted(fs, SessionOptions::default())?);
//! let (_serving, socket) = in_process(&session, ClientLimits::default())?;
//! let client = Client::new(Server::from(socket), Config::default())?;
//! let file = client.open("hello", OpenOptions::new().read(true).write(true).create(true))?;
//! file.write_at(b"hello, world", 0, Flags::empty())?;
//! let mut buf = [0; 5];
//! assert_eq!(file.read_at(&mut buf, 7, Flags::empty())?, 5);
//! assert_eq!(&buf, b"world");
//! file.close()?;
//! assert_eq!(std::fs::read(dir.path().join("hello"))?, b"hello, world");
//! # Ok(())
//! # }
//! ```
//!
//! Calls can be submitted and awaited, on any executor:
//!
//! ```
//! # use uvfs_client::{Client, Config, File, Flags, OpenOptions};
//! # fn main() -> std::io::Result<()> {
//! # let dir = tempfile::tempdir()?;
//! # let client = Client::new(uvfs_local::LocalStore::open(dir.path())?, Config::default())?;
//! # let file = client.open("f", OpenOptions::new().read(true).write(true).create(true))?;
//! async fn log(file: &File, line: &[u8]) -> std::io::Result<()> {
//!     file.submit_write_at(line, 0, Flags::empty()).await?;
//!     file.submit_sync(true).await
//! }
//! # let mut task = std::pin::pin!(log(&file, b"one"));
//! # let mut cx = std::task::Context::from_waker(std::task::Waker::noop());
//! # while task.as_mut().poll(&mut cx).is_pending() {
//! #     std::thread::yield_now();
//! # }
//! // Or waited for, or polled without waiting.
//! file.submit_sync(false).wait()?;
//! # Ok(())
//! # }
//! ```

pub mod backend;
pub mod cache;
mod client;
mod event;
mod file;
mod known;
mod pending;
mod remote;
mod shared;
mod silence;
mod stats;
mod token;

pub use backend::{
    Attr, Backend, DirEntry, Entry, Imported, LockKind, NewFile, NodeId, RangeLock, SetAttr, StatFs,
};
pub use cache::Config;
pub use client::Client;
pub use file::{Advice, AllocateMode, Driver, File, Flags, Landed, OpenOptions};
pub use pending::Pending;
pub use remote::Server;
pub use stats::Stats;
pub use token::Token;
