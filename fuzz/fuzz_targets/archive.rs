//! Tar archives: the reader of `mkfs --from` neither panics, nor hangs, nor takes memory without bound.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: &[u8]| uvfs_fuzz::members::read(input));
