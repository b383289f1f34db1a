//! Any damage to the book that a killed server of a directory has left: the next server takes over what makes sense.
//!
//! The input has ten bytes for each word that is changed: the word's place, and what it is changed by.
#![no_main]

#[path = "../../crates/uvfs-passthrough/tests/taken_over/target.rs"]
mod target;

use libfuzzer_sys::fuzz_target;

thread_local! {
    static TARGET: target::Target = target::Target::new();
}

fuzz_target!(|damage: &[u8]| TARGET.with(|target| target.run(damage)));
