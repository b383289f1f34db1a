//! The client: its page cache against directories of the host, and what it shares with a server, whether both keep
//! the rules or one of them breaks them.
//!
//! One program, as the file systems that are served here take long to compile. Each test has to be a process of its
//! own, as `./test` runs it: some count the threads, the descriptors or the panics of their process.

mod attached;
mod cache;
mod common;
mod example;
mod exhausted;
mod faults;
mod flips;
mod fuzz;
mod hostile;
mod leases;
mod locks;
mod model;
mod names;
mod pressure;
mod restart;
mod server;
mod shm;
mod silent;
mod uncached;
