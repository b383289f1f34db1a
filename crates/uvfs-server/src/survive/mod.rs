//! Mounts that outlive their server; docs/survive.md has the whole.
//!
//! [`keep`] splits a program that has mounted into a keeper and a worker, which serves. When the worker is killed, the
//! keeper forks the next one, which goes on with the [`Ledger`] and the descriptors that the first one left.

mod book;
mod damage;
mod keeper;
mod ledger;

pub use book::VERSION;
#[doc(hidden)]
pub use damage::Left;
pub use keeper::{Keeper, Kept, Worker, keep, keep_plainly};
pub use ledger::Ledger;
pub(crate) use ledger::SETTLES;
