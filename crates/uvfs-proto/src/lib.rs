//! The FUSE wire format: requests, replies and notifications.
//!
//! Linux 6.18's protocol, 7.45, spoken down to 7.31. [`abi`] has the structures as the kernel lays
//! them out.

pub mod abi;
