//! Any bytes as what is sent to the socket that clients attach to.
#![no_main]

#[allow(dead_code)] // Each target uses a part of it.
#[path = "../../crates/uvfs-client/tests/client/fuzz/targets.rs"]
mod targets;

use std::cell::RefCell;

use libfuzzer_sys::fuzz_target;

thread_local! {
    static TARGET: RefCell<targets::Attaching> = RefCell::default();
}

fuzz_target!(|input: &[u8]| TARGET.with_borrow_mut(|target| target.run(input)));
