//! Serving a file system: the [`FileSystem`] trait, sessions and transports.
//!
//! To write a file system, begin with the [`guide`]. The smallest one is an empty directory:
//!
//! ```no_run
//! use std::time::Duration;
//! use uvfs_server::{FileSystem, Options, fs::*};
//!
//! struct Empty;
//!
//! impl FileSystem for Empty {
//!     async fn getattr(&self, _: &Context, node: Node, _: Option<Handle>) -> Result<Attributes> {
//!         let attr = attr(node, FileType::Directory, 0o755);
//!         Ok(Attributes::new(attr, Duration::from_secs(1)))
//!     }
//! }
//!
//! fn main() -> std::io::Result<()> {
//!     uvfs_server::mount(Empty, "/mnt", Options::named("empty"))?.wait();
//!     Ok(())
//! }
//! ```
//!
//! A [`Session`] is one mount. Its [`Server`] has a thread for each queue of the transport
//! (`transport/`), which hands the bytes of every request to the pipeline (`pipeline.rs`): there it is
//! decoded once, checked, given to the handler of the [`FileSystem`] and answered. All of a request's
//! handling stays on its queue's thread.

mod client;
mod coherence;
pub mod control;
mod dispatch;
mod drop_behind;
pub mod fs;
#[cfg(any(doc, doctest))]
pub mod guide;
pub mod interrupt;
pub mod layers;
mod lease;
pub mod mount;
mod mounted;
pub mod notify;
mod pipeline;
mod reply;
mod request;
pub mod server;
pub mod session;
pub mod signals;
pub mod slow;
mod stage;
pub mod stats;
pub mod survive;
mod switch;
mod token;
mod transport;

pub use client::guests::GuestLimits;
pub use dispatch::{CONTROL_XATTR, SOCKET_XATTR};
pub use fs::{Errno, Error, FileSystem, SessionHandle};
pub use mounted::{Mounted, OnSignal, Options, Unmounter, mount};
pub use request::DEPTH;
pub use server::{Agreed, Server, ServerOptions, Transport};
pub use session::{Session, SessionOptions};
pub use transport::attach::{ClientLimits, Clients, InProcess, in_process};
