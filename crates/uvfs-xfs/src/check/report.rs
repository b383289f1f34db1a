//! The findings of a check.

use crate::format::{Fault, format_uuid};
use std::collections::{BTreeSet, HashSet};
use std::fmt::{self, Display};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Findings kept in full; beyond this they are only counted.
const MAX_FINDINGS: usize = 10_000;

/// Where something is: as much as is known.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub(crate) struct Place {
    pub what: &'static str,
    pub ag: Option<u32>,
    pub block: Option<u32>,
    pub ino: Option<u64>,
}

impl Place {
    pub fn fs(what: &'static str) -> Place {
        Place {
            what,
            ..Place::default()
        }
    }

    pub fn ag(what: &'static str, agno: u32) -> Place {
        Place {
            what,
            ag: Some(agno),
            ..Place::default()
        }
    }

    pub fn block(what: &'static str, agno: u32, agbno: u32) -> Place {
        Place {
            block: Some(agbno),
            ..Place::ag(what, agno)
        }
    }

    pub fn inode(what: &'static str, ino: u64) -> Place {
        Place {
            ino: Some(ino),
            ..Place::fs(what)
        }
    }

    pub fn at(self, agno: u32, agbno: u32) -> Place {
        Place {
            ag: Some(agno),
            block: Some(agbno),
            ..self
        }
    }
}

/// The problem of a structure that is ahead of the log.
pub(crate) const LOG_SEQUENCE_NUMBER: &str = "log sequence number";

/// One thing that is wrong.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Finding {
    /// The structure, by the name that the format's documentation uses.
    pub what: &'static str,
    /// Allocation group.
    pub ag: Option<u32>,
    /// Block in the allocation group.
    pub block: Option<u32>,
    /// Inode.
    pub inode: Option<u64>,
    /// A path to the inode, where one is known.
    pub path: Option<String>,
    /// The defect.
    pub problem: String,
    /// The expected value.
    pub expected: Option<String>,
    /// The value that is there.
    pub found: Option<String>,
}

impl Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.what)?;
        if let Some(ag) = self.ag {
            write!(f, " AG {ag}")?;
        }
        if let Some(block) = self.block {
            write!(f, " block {block}")?;
        }
        if let Some(ino) = self.inode {
            write!(f, " inode {ino}")?;
        }
        if let Some(path) = &self.path {
            write!(f, " ({path})")?;
        }
        write!(f, ": {}", self.problem)?;
        match (&self.expected, &self.found) {
            (Some(e), Some(v)) => write!(f, ": expected {e}, found {v}"),
            (Some(e), None) => write!(f, ": expected {e}"),
            (None, Some(v)) => write!(f, ": found {v}"),
            (None, None) => Ok(()),
        }
    }
}

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
    pub fn add(
        &self,
        place: Place,
        problem: impl Into<String>,
        expected: Option<String>,
        found: Option<String>,
    ) -> bool {
        let finding = Finding {
            what: place.what,
            ag: place.ag,
            block: place.block,
            inode: place.ino,
            path: None,
            problem: problem.into(),
            expected,
            found,
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
    pub fn lsn(&self, place: Place, head: u64, lsn: u64) {
        // Blocks that are never logged have all bits set.
        if lsn <= head || lsn == u64::MAX {
            return;
        }
        let show = |l: u64| format!("{}:{}", l >> 32, l & 0xffff_ffff);
        let expected = Some(format!("at most the log's, {}", show(head)));
        if self.add(place, LOG_SEQUENCE_NUMBER, expected, Some(show(lsn))) {
            self.late.fetch_add(1, Ordering::Relaxed);
            self.latest.fetch_max(lsn, Ordering::Relaxed);
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

    /// A value that is not what it should be.
    pub fn differ(
        &self,
        place: Place,
        problem: impl Into<String>,
        expected: impl Display,
        found: impl Display,
    ) {
        self.add(
            place,
            problem,
            Some(expected.to_string()),
            Some(found.to_string()),
        );
    }

    /// Something wrong that has no two values.
    pub fn bad(&self, place: Place, problem: impl Into<String>) {
        self.add(place, problem, None, None);
    }

    /// A structure that failed its check.
    pub fn fault(&self, place: Place, fault: &Fault) {
        match fault {
            Fault::Short { need, have } => {
                self.differ(
                    place,
                    "it does not fit",
                    format!("at most {have} bytes"),
                    need,
                );
            }
            Fault::Magic { expected, found } => self.differ(
                place,
                "magic number",
                format!("{expected:#x}"),
                format!("{found:#x}"),
            ),
            Fault::Crc { expected, found } => self.differ(
                place,
                "checksum",
                format!("{expected:#010x}"),
                format!("{found:#010x}"),
            ),
            Fault::Uuid { expected, found } => {
                self.differ(place, "uuid", format_uuid(expected), format_uuid(found))
            }
            Fault::Owner { expected, found } => self.differ(place, "owner", expected, found),
            Fault::BlockNumber { expected, found } => {
                self.differ(place, "own block number", expected, found)
            }
            Fault::Field {
                name,
                expected,
                found,
            } => self.differ(place, *name, expected, found),
        }
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
        all.sort_by(|a, b| {
            let key = |f: &Finding| (f.ag, f.inode, f.block);
            key(a)
                .cmp(&key(b))
                .then_with(|| a.what.cmp(b.what))
                .then_with(|| a.problem.cmp(&b.problem))
                .then_with(|| a.found.cmp(&b.found))
        });
        (all, self.count())
    }
}
