//! What a check finds: a place and what is wrong there, as data. Its text is for people only.

use super::space::Use;
use crate::format::{Btree, Fault};
use std::borrow::Cow;
use std::fmt::{self, Display};

/// An enum without data whose variants have names.
macro_rules! named {
    ($(#[$meta:meta])* $of:ident $(($other:ident: $type:ty))?, $($name:ident = $text:literal,)*) => {
        $(#[$meta])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        #[non_exhaustive]
        pub enum $of {
            $(
                #[doc = "A B-tree of a group or a fork."]
                $other($type),
            )?
            $(#[doc = $text] $name,)*
        }

        impl $of {
            /// The name, as messages and JSON have it.
            pub fn name(self) -> &'static str {
                match self {
                    $($of::$other(of) => of.name(),)?
                    $($of::$name => $text,)*
                }
            }
        }

        impl Display for $of {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(self.name())
            }
        }
    };
}

named! {
    /// A structure of the format, or a part of a file system that findings are about.
    Structure (Tree: Btree),
    Image = "image",
    Log = "log",
    Superblock = "superblock",
    SuperblockCopy = "superblock copy",
    Group = "allocation group",
    GroupHeaders = "allocation group headers",
    Agf = "AGF",
    Agfl = "AGFL",
    Agi = "AGI",
    FreeSpace = "free space",
    InodeChunk = "inode chunk",
    UnlinkedList = "unlinked list",
    Inode = "inode",
    DataFork = "data fork",
    AttributeFork = "attribute fork",
    SymbolicLink = "symbolic link",
    RootDirectory = "root directory",
    Directory = "directory",
    ShortDirectory = "short-form directory",
    DirectoryData = "directory data",
    DirectoryIndex = "directory index",
    DirectoryFreeIndex = "directory free index",
    LostAndFound = "lost+found",
    Attributes = "attributes",
    ShortAttributes = "short-form attributes",
    AttributeValue = "attribute value",
    UserQuota = "user quota",
    GroupQuota = "group quota",
    ProjectQuota = "project quota",
}

named! {
    /// A number that follows from the rest of the file system, which a check counts.
    Counter,
    Links = "di_nlink",
    AgfFreeblks = "agf_freeblks",
    AgfLongest = "agf_longest",
    AgfBtreeblks = "agf_btreeblks",
    AgfRmapBlocks = "agf_rmap_blocks",
    AgfRefcountBlocks = "agf_refcount_blocks",
    AgiCount = "agi_count",
    AgiFreecount = "agi_freecount",
    AgiIblocks = "agi_iblocks",
    AgiFblocks = "agi_fblocks",
    SbIcount = "sb_icount",
    SbIfree = "sb_ifree",
    SbFdblocks = "sb_fdblocks",
}

impl From<Btree> for Structure {
    fn from(tree: Btree) -> Structure {
        Structure::Tree(tree)
    }
}

/// Where something is: as much as is known.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Place {
    /// The structure.
    pub what: Structure,
    /// Allocation group.
    pub ag: Option<u32>,
    /// Block in the allocation group.
    pub block: Option<u32>,
    /// Inode.
    pub inode: Option<u64>,
}

impl Place {
    pub(crate) fn fs(what: impl Into<Structure>) -> Place {
        Place {
            what: what.into(),
            ag: None,
            block: None,
            inode: None,
        }
    }

    pub(crate) fn ag(what: impl Into<Structure>, agno: u32) -> Place {
        Place {
            ag: Some(agno),
            ..Place::fs(what)
        }
    }

    pub(crate) fn block(what: impl Into<Structure>, agno: u32, agbno: u32) -> Place {
        Place::fs(what).at(agno, agbno)
    }

    pub(crate) fn inode(what: impl Into<Structure>, ino: u64) -> Place {
        Place {
            inode: Some(ino),
            ..Place::fs(what)
        }
    }

    pub(crate) fn at(self, agno: u32, agbno: u32) -> Place {
        Place {
            ag: Some(agno),
            block: Some(agbno),
            ..self
        }
    }
}

impl Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.what.fmt(f)?;
        self.ag.map_or(Ok(()), |ag| write!(f, " AG {ag}"))?;
        self.block.map_or(Ok(()), |b| write!(f, " block {b}"))?;
        self.inode.map_or(Ok(()), |ino| write!(f, " inode {ino}"))
    }
}

/// A defect.
#[derive(Debug, Clone, PartialEq, Eq, Hash, thiserror::Error)]
#[non_exhaustive]
pub enum Problem {
    /// A structure that fails the check of its bytes alone.
    #[error("{0}")]
    Fault(Fault),
    /// A field whose value is not what it should be.
    #[error("{field}: expected {expected}, found {found}")]
    Field {
        /// The field, or several that belong together.
        field: Cow<'static, str>,
        /// The values that would be right.
        expected: String,
        /// The value that is there.
        found: String,
    },
    /// A counter that differs from what was counted.
    #[error("{counter}: expected {expected}, found {found}")]
    Count {
        /// The counter.
        counter: Counter,
        /// What was counted.
        expected: u64,
        /// The value that is there.
        found: u64,
    },
    /// A log sequence number ahead of the log's end: the next recovery would take old changes for done.
    #[error("log sequence number: expected {}, found {}", at_most(*head), lsn(*found))]
    AheadOfLog {
        /// The log's end.
        head: u64,
        /// The value that is there.
        found: u64,
    },
    /// It cannot be read: the device's error.
    #[error("cannot be read: {0}")]
    Unreadable(String),
    /// Blocks from the place on that something else uses, too.
    #[error("{}", used_twice(*blocks, *was, *new))]
    UsedTwice {
        /// How many.
        blocks: u32,
        /// The other use.
        was: Use,
        /// The use that the structure makes of them.
        new: Use,
    },
    /// That many blocks from the place on are neither free nor in use.
    #[error("{0} blocks from here are neither free nor in use")]
    Unowned(u32),
    /// Shared blocks in an inode without the reflink flag.
    #[error("shared blocks in an inode without the reflink flag")]
    NoReflinkFlag,
    /// An inode in use to which no directory leads.
    #[error("in use, but in no directory")]
    NoEntry,
    /// An entry of a directory that leads to no inode that it may name.
    #[error("entry {} {why}", show(name))]
    BadEntry {
        /// The name.
        name: Vec<u8>,
        /// What is wrong with the name or the inode.
        why: String,
    },
    /// An item, such as a "record", and its number, that comes after one that it should precede.
    #[error("{0} {1} is out of order")]
    OutOfOrder(&'static str, usize),
    /// A record of a tree with blocks that the allocation group does not have.
    #[error("record {at}: {blocks} blocks from {start} are not there")]
    NotThere {
        /// The record's number in its block.
        at: usize,
        /// First block.
        start: u32,
        /// How many.
        blocks: u32,
    },
    /// Any other rule of the format that is broken, in words.
    #[error("{0}")]
    Rule(Cow<'static, str>),
}

impl Problem {
    /// The kind of defect. Names stay as they are from release to release.
    pub fn name(&self) -> &'static str {
        match self {
            Problem::Fault(Fault::Short { .. }) => "short",
            Problem::Fault(Fault::Magic { .. }) => "magic-number",
            Problem::Fault(Fault::Crc { .. }) => "checksum",
            Problem::Fault(Fault::Uuid { .. }) => "uuid",
            Problem::Fault(Fault::Owner { .. }) => "owner",
            Problem::Fault(Fault::BlockNumber { .. }) => "block-number",
            Problem::Fault(Fault::Field { .. }) | Problem::Field { .. } => "field",
            Problem::Count { .. } => "counter",
            Problem::AheadOfLog { .. } => "ahead-of-log",
            Problem::Unreadable(_) => "unreadable",
            Problem::UsedTwice { .. } => "used-twice",
            Problem::Unowned(_) => "unowned",
            Problem::NoReflinkFlag => "no-reflink-flag",
            Problem::NoEntry => "no-entry",
            Problem::BadEntry { .. } => "bad-entry",
            Problem::OutOfOrder(..) => "out-of-order",
            Problem::NotThere { .. } => "not-there",
            Problem::Rule(_) => "rule",
        }
    }

    /// The defect in words; of one that is about a value also the value that would be right, and the one that is there.
    pub fn text(&self) -> (String, Option<(String, String)>) {
        let (text, expected, found) = match self {
            Problem::Fault(fault) => fault.text(),
            Problem::Field {
                field,
                expected,
                found,
            } => (&**field, expected.clone(), found.clone()),
            Problem::Count {
                counter,
                expected,
                found,
            } => (counter.name(), expected.to_string(), found.to_string()),
            Problem::AheadOfLog { head, found } => {
                ("log sequence number", at_most(*head), lsn(*found))
            }
            _ => return (self.to_string(), None),
        };
        (text.into(), Some((expected, found)))
    }
}

fn lsn(lsn: u64) -> String {
    format!("{}:{}", lsn >> 32, lsn & 0xffff_ffff)
}

fn at_most(head: u64) -> String {
    format!("at most the log's, {}", lsn(head))
}

fn used_twice(blocks: u32, was: Use, new: Use) -> String {
    let run = match blocks {
        1 => "its block is".to_string(),
        n => format!("{n} blocks from here are"),
    };
    match (new, was) {
        (Use::Free, _) => format!("listed as free, but {run} {}", was.name()),
        (_, Use::Free) => format!("{run} in the free space trees, too"),
        _ => format!("{run} {}", was.name()),
    }
}

/// A name in a message.
pub(crate) fn show(name: &[u8]) -> String {
    format!("\"{}\"", name.escape_ascii())
}

impl From<Fault> for Problem {
    fn from(fault: Fault) -> Problem {
        Problem::Fault(fault)
    }
}

impl From<&'static str> for Problem {
    fn from(text: &'static str) -> Problem {
        Problem::Rule(text.into())
    }
}

impl From<String> for Problem {
    fn from(text: String) -> Problem {
        Problem::Rule(text.into())
    }
}

/// One thing that is wrong, or, of a repair, that was done about it.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Finding<P = Problem> {
    /// Where it is.
    pub place: Place,
    /// A path to the inode, where one is known.
    pub path: Option<String>,
    /// The defect, or the change.
    pub problem: P,
}

impl<P: Display> Display for Finding<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.place.fmt(f)?;
        let path = self.path.as_ref();
        path.map_or(Ok(()), |path| write!(f, " ({path})"))?;
        write!(f, ": {}", self.problem)
    }
}
