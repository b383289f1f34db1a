//! Asynchronous I/O: a ring per thread and its executor; block devices and their engines.

pub mod blocking;
pub mod buf;
pub mod device;
pub mod engine;

pub use buf::{IoBuf, Payload};
