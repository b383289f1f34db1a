//! Faults and latency on demand, for tests: what a real device does on its worst day.

use std::ops::Range;
use std::sync::Mutex;
use std::time::Duration;

use rustix::io::Errno;

use super::Op;
use uvfs_sys::lock;

/// A fault that a transfer meets instead of (or before) its I/O.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// It fails.
    Error(Errno),
    /// It moves this many bytes (a multiple of the device's block) and ends.
    Short(usize),
    /// The kernel has no resources for it now.
    Again,
    /// It is reported only this long after it was started.
    Delay(Duration),
}

/// When a [`Fault`] happens.
#[derive(Debug, Clone)]
pub struct Rule {
    /// To this kind of transfer.
    pub op: Op,
    /// To those that touch this range of the device, in bytes (flushes touch everything).
    pub range: Range<u64>,
    /// This many times more.
    pub times: usize,
    /// The fault.
    pub fault: Fault,
}

/// A set of rules that an engine asks before each transfer.
#[derive(Debug, Default)]
pub struct Faults(Mutex<Vec<Rule>>);

impl Faults {
    /// No faults yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a rule; older ones come first.
    pub fn add(&self, rule: Rule) {
        lock(&self.0).push(rule);
    }

    /// The rules, each with how often it still holds.
    pub fn rules(&self) -> Vec<Rule> {
        lock(&self.0).clone()
    }

    /// Forgets all rules.
    pub fn clear(&self) {
        lock(&self.0).clear();
    }

    /// The fault of a transfer that is about to start.
    pub(super) fn next(&self, op: Op, offset: u64, len: usize) -> Option<Fault> {
        let mut rules = lock(&self.0);
        let rule = rules.iter_mut().find(|rule| {
            rule.times > 0
                && rule.op == op
                && (op == Op::Flush
                    || (rule.range.start < offset + len as u64 && offset < rule.range.end))
        })?;
        rule.times -= 1;
        Some(rule.fault)
    }
}
