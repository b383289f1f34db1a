//! Requests of a session that have waited for long, as `uvfs stats` lists them.

use std::collections::HashMap;
use std::sync::Mutex;

use uvfs_sys::lock;

use super::Session;
use crate::fs::FileSystem;
use crate::stats::{StuckRequest, opcode_name};

/// The most requests that a report lists, and that are logged at a time.
pub(crate) const MOST: usize = 64;

/// Paths of the nodes that slow requests are about; `None` while a path is not known.
pub(crate) type Names = Mutex<HashMap<u64, Option<String>>>;

/// Lists a session's requests that have waited for longer than [`slow`](crate::SessionOptions::slow).
pub(crate) fn stuck<F: FileSystem>(session: &Session<F>) -> Vec<StuckRequest> {
    let slow = session.options.slow;
    if slow.is_zero() {
        return Vec::new();
    }
    let waiting = session.interrupts.longer_than(slow, MOST);
    let names = lock(&session.slow);
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
