//! Requests of a session that have waited for long, as `uvfs stats` lists them.

use std::collections::HashMap;
use std::sync::Mutex;
use std::time::Duration;

use uvfs_sys::lock;

use crate::interrupt::Interrupts;
use crate::stats::{StuckRequest, opcode_name};

/// The most requests that a report lists, and that are logged at a time.
pub(crate) const MOST: usize = 64;

/// Paths of the nodes that slow requests are about; `None` while a path is not known.
pub(crate) type Names = Mutex<HashMap<u64, Option<String>>>;

/// Lists requests that have waited for longer than `slow`, unless that is zero.
pub(crate) fn stuck(interrupts: &Interrupts, names: &Names, slow: Duration) -> Vec<StuckRequest> {
    if slow.is_zero() {
        return Vec::new();
    }
    let waiting = interrupts.longer_than(slow, MOST);
    let names = lock(names);
    let told = waiting.into_iter().map(|(waits, since)| StuckRequest {
        opcode: opcode_name(waits.opcode),
        node: waits.node,
        file: names.get(&waits.node).cloned().flatten(),
        pid: waits.pid,
        age_ms: since.elapsed().as_millis() as u64,
        waits_for: waits.cause.name().to_owned(),
    });
    told.collect()
}
