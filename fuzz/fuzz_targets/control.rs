//! Any bytes as what is sent to the control socket.
#![no_main]

use std::cell::RefCell;

use libfuzzer_sys::fuzz_target;
use uvfs_fuzz::targets;

thread_local! {
    static TARGET: RefCell<targets::Controlling> = RefCell::default();
}

fuzz_target!(|input: &[u8]| TARGET.with_borrow_mut(|target| target.run(input)));
