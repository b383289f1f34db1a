//! The findings of a check.

use super::problem::{Counter, Finding, Place, Problem};
use crate::format::Fault;
use std::borrow::Cow;
use std::collections::{BTreeSet, HashSet};
use std::fmt::Display;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Findings kept in full; beyond this they are only counted.
const MAX_FINDINGS: usize = 10_000;

/// Collects findings from every thread.
#[derive(Default)]
pub(crate) struct Report {
    inner: Mutex<Inner>,
    incomplete: AtomicBool,
    count: AtomicU64,
    late: AtomicU64,
    latest: AtomicU64,
    /// Groups with inodes that directories lead to and no tree has.
    missing: Mutex<BTreeSet<u32>>,
}

/// The log sequence numbers that are ahead of the log.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Late {
    /// Findings about such.
    pub count: u64,
    /// The greatest.
    pub latest: u64,
}

#[derive(Default)]
struct Inner {
    findings: Vec<Finding>,
    /// Hashes of those reported: a second pass over an image finds the same things again.
    seen: HashSet<u64>,
}

impl Report {
    /// Notes a defect; gives whether it is a new one.
    pub fn add(&self, place: Place, problem: Problem) -> bool {
        let finding = Finding {
            place,
            path: None,
            problem,
        };
        let mut h = DefaultHasher::new();
        finding.hash(&mut h);
        let mut inner = self.inner.lock().expect("no holder panics");
        let room = inner.findings.len() < MAX_FINDINGS;
        if room && !inner.seen.insert(h.finish()) {
            return false;
        }
        if room {
            inner.findings.push(finding);
        }
        self.count.fetch_add(1, Ordering::Relaxed);
        true
    }

    /// Looks at the log sequence number of a structure: it must not be ahead of the log, which ends at
    /// `head`, or the next recovery would take old changes for done.
    pub fn lsn(&self, place: Place, head: u64, found: u64) {
        // Blocks that are never logged have all bits set.
        if found <= head || found == u64::MAX {
            return;
        }
        if self.add(place, Problem::AheadOfLog { head, found }) {
            self.late.fetch_add(1, Ordering::Relaxed);
            self.latest.fetch_max(found, Ordering::Relaxed);
        }
    }

    /// A directory leads to an inode of this group that its trees do not have.
    pub fn missing(&self, agno: u32) {
        self.missing.lock().expect("no holder panics").insert(agno);
    }

    pub fn take_missing(&self) -> BTreeSet<u32> {
        std::mem::take(&mut *self.missing.lock().expect("no holder panics"))
    }

    pub fn late(&self) -> Late {
        Late {
            count: self.late.load(Ordering::Relaxed),
            latest: self.latest.load(Ordering::Relaxed),
        }
    }

    /// A field whose value is not what it should be.
    pub fn differ(
        &self,
        place: Place,
        field: impl Into<Cow<'static, str>>,
        expected: impl Display,
        found: impl Display,
    ) {
        let problem = Problem::Field {
            field: field.into(),
            expected: expected.to_string(),
            found: found.to_string(),
        };
        self.add(place, problem);
    }

    /// Compares a field with what it should be.
    pub fn same<T: PartialEq + Display>(
        &self,
        place: Place,
        field: &'static str,
        expected: T,
        found: T,
    ) {
        if expected != found {
            self.differ(place, field, expected, found);
        }
    }

    /// Compares a counter with what was counted.
    pub fn count_is(
        &self,
        place: Place,
        counter: Counter,
        expected: impl Into<u64>,
        found: impl Into<u64>,
    ) {
        let (expected, found) = (expected.into(), found.into());
        if expected != found {
            let problem = Problem::Count {
                counter,
                expected,
                found,
            };
            self.add(place, problem);
        }
    }

    /// Any other defect.
    pub fn bad(&self, place: Place, problem: impl Into<Problem>) {
        self.add(place, problem.into());
    }

    /// Notes the fault of a structure that failed its check; gives one that passed.
    pub fn sound<T>(&self, place: Place, checked: Result<T, Fault>) -> Option<T> {
        checked.map_err(|fault| self.bad(place, fault)).ok()
    }

    /// An item that comes after one that it should precede.
    pub fn out_of_order(&self, place: Place, what: &'static str, at: usize) {
        self.add(place, Problem::OutOfOrder(what, at));
    }

    /// Says that a structure could not be followed to its end, so that what only follows from
    /// having seen everything cannot be told.
    pub fn incomplete(&self) {
        self.incomplete.store(true, Ordering::Relaxed);
    }

    pub fn is_incomplete(&self) -> bool {
        self.incomplete.load(Ordering::Relaxed)
    }

    pub fn count(&self) -> u64 {
        self.count.load(Ordering::Relaxed)
    }

    /// Whether this holds for all findings.
    pub fn all(&self, holds: impl Fn(&Finding) -> bool) -> bool {
        let inner = self.inner.lock().expect("no holder panics");
        inner.findings.iter().all(holds)
    }

    /// The findings, in an order that does not depend on the threads, and how many there were.
    pub fn take(&self) -> (Vec<Finding>, u64) {
        let mut inner = self.inner.lock().expect("no holder panics");
        let mut all = std::mem::take(&mut inner.findings);
        all.sort_by_cached_key(|f| {
            let Place {
                what,
                ag,
                block,
                inode,
            } = f.place;
            (ag, inode, block, what.name(), f.problem.text())
        });
        (all, self.count())
    }
}
