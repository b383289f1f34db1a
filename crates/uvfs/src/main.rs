//! The Linux file I/O path in user space: mount, inspect and measure.
fn main() {}
