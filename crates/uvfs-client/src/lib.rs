//! Files with a page cache in user space.
//!
//! A [`Client`] speaks to a uvfs server over a [`Connection`]: a queue pair in shared memory. Its [`File`]s are read
//! and written through the page cache: buffered, uncached ([`Flags::DONTCACHE`]) or direct ([`Flags::DIRECT`]), per
//! call.
//!
//! A server is reached through its socket, [`Connection::connect`]; or it is in the same program, with
//! a file system that is a value of it:
//!
//! ```
//! use std::sync::Arc;
//! use uvfs_client::{Client, Config, Connection, Flags, OpenOptions};
//! use uvfs_passthrough::{Options, Passthrough};
//! use uvfs_server::{ClientLimits, Session, SessionOptions, in_process};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let dir = tempfile::tempdir()?;
//! // Or your own: whatever implements `uvfs_server::FileSystem`.
//! let fs = Passthrough::open(dir.path(), Options::default())?;
//! let session = Arc::new(Session::unmounted(fs, SessionOptions::default())?);
//! let (_serving, socket) = in_process(&session, ClientLimits::default())?;
//! let client = Client::new(Connection::from(socket), Config::default())?;
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
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let dir = tempfile::tempdir()?;
//! # let fs = uvfs_passthrough::Passthrough::open(dir.path(), uvfs_passthrough::Options::default())?;
//! # let session = uvfs_server::Session::unmounted(fs, uvfs_server::SessionOptions::default())?;
//! # let limits = uvfs_server::ClientLimits::default();
//! # let (_serving, socket) = uvfs_server::in_process(&std::sync::Arc::new(session), limits)?;
//! # let client = Client::new(socket.into(), Config::default())?;
//! # let file = client.open("f", OpenOptions::new().read(true).write(true).create(true))?;
//! async fn log(file: &File, line: &[u8]) -> uvfs_client::Result<()> {
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

/// A setter for each option, which takes and returns the options.
macro_rules! option {
    ($($(#[$doc:meta])* $name:ident: $type:ty),* $(,)?) => {
        $($(#[$doc])*
        #[must_use]
        pub fn $name(mut self, $name: $type) -> Self {
            self.$name = $name;
            self
        })*
    };
}

mod cache;
mod client;
mod connection;
mod error;
mod event;
mod file;
mod pending;
mod shared;
mod stats;
mod token;
mod types;

/// The page cache's reads and writes, for layers: see [`Client::layered`].
pub mod layer {
    pub use crate::connection::pages::{Done, Op, PageIo, Request};
}

pub use cache::Config;
pub use client::Client;
pub use connection::{Connection, OnDescriptor};
pub use error::{Error, Result};
pub use file::{Advice, AllocateMode, Driver, File, Flags, Landed, OpenOptions};
pub use pending::Pending;
pub use stats::Stats;
pub use token::Token;
pub use types::{
    Attr, DirEntry, Entry, Grant, Imported, Lease, LockKind, LockRequest, NewFile, NodeId, ROOT,
    RangeLock, SetAttr, StatFs,
};
