//! Queue pairs in shared memory and the wait policy.

pub mod doorbell;
pub mod placement;
pub mod wait;
