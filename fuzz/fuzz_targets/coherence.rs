//! Any bytes as legal calls of several clients, which a model says the outcome of.
#![no_main]

use std::cell::RefCell;

use libfuzzer_sys::fuzz_target;
use uvfs_fuzz::targets;

thread_local! {
    static TARGET: RefCell<targets::Coherent> = RefCell::default();
}

fuzz_target!(|input: &[u8]| TARGET.with_borrow_mut(|target| target.run(input)));
