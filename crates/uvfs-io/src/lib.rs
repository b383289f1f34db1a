//! Asynchronous I/O: a ring per thread and its executor; block devices and their engines.

pub mod blocking;
pub mod buf;
pub mod device;
pub mod engine;
pub mod ops;
pub mod runtime;

pub use buf::{IoBuf, Payload};
