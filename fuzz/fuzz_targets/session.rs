//! Any bytes as what a client does to its session, against a real server.
#![no_main]

use std::cell::RefCell;

use libfuzzer_sys::fuzz_target;
use uvfs_fuzz::targets;

thread_local! {
    static TARGET: RefCell<targets::Sessions> = RefCell::default();
}

fuzz_target!(|input: &[u8]| TARGET.with_borrow_mut(|target| target.run(input)));
