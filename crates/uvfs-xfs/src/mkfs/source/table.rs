//! An ordered map from bytes to bytes in a temporary file, of which little is in memory.
//!
//! Entries lie in leaves of a few kilobytes, in the order of keys. Memory has the leaves that were used last, and of all
//! others the least key.

use crate::mkfs::MkfsError;
use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io;
use std::ops::{Bound, Range};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The most bytes of a leaf.
const LEAF: usize = 8192;
/// The most bytes of a key and its value: two of them fit into a leaf.
const ENTRY: usize = LEAF / 2 - HEAD;
/// The lengths of a key and of its value.
const HEAD: usize = 4;
/// Leaves in memory.
const CACHED: usize = 256;

/// A temporary file.
#[derive(Debug)]
pub struct Scratch {
    pub file: Arc<File>,
    directory: PathBuf,
}

impl Scratch {
    /// A new one in this directory, without a name.
    pub fn new(directory: &Path) -> Result<Scratch, MkfsError> {
        let file = tempfile::tempfile_in(directory)
            .map_err(|e| MkfsError::source(directory.into(), "making a temporary file", e))?;
        Ok(Scratch {
            file: Arc::new(file),
            directory: directory.into(),
        })
    }

    /// What an error of using it becomes.
    pub fn failed(&self) -> impl FnOnce(io::Error) -> MkfsError {
        let what = "using a temporary file there";
        move |error| MkfsError::source(self.directory.clone(), what, error)
    }

    pub fn write(&self, bytes: &[u8], at: u64) -> Result<(), MkfsError> {
        self.file.write_all_at(bytes, at).map_err(self.failed())
    }

    pub fn read(&self, at: u64, len: usize) -> Result<Vec<u8>, MkfsError> {
        let mut bytes = vec![0; len];
        let read = self.file.read_exact_at(&mut bytes, at);
        read.map_err(self.failed())?;
        Ok(bytes)
    }
}

/// A leaf in memory: entries one after the other.
#[derive(Debug, Default)]
struct Leaf {
    bytes: Vec<u8>,
    /// The file has it otherwise.
    changed: bool,
    /// When it was used last.
    used: u64,
}

/// An entry's place in a leaf.
struct Found {
    whole: Range<usize>,
    key: Range<usize>,
    value: Range<usize>,
}

impl Leaf {
    /// The entry at this byte; `None` at the end.
    fn entry(&self, at: usize) -> Option<Found> {
        let [a, b, c, d] = *self.bytes.get(at..)?.first_chunk::<HEAD>()?;
        let (key, value) = (u16::from_ne_bytes([a, b]), u16::from_ne_bytes([c, d]));
        let start = at + HEAD;
        let middle = start + usize::from(key);
        let end = middle + usize::from(value);
        Some(Found {
            whole: at..end,
            key: start..middle,
            value: middle..end,
        })
    }

    /// The entry with this key, or the byte where it would be.
    fn find(&self, key: &[u8]) -> Result<Found, usize> {
        let mut at = 0;
        while let Some(found) = self.entry(at) {
            match self.bytes[found.key.clone()].cmp(key) {
                std::cmp::Ordering::Less => at = found.whole.end,
                std::cmp::Ordering::Equal => return Ok(found),
                std::cmp::Ordering::Greater => break,
            }
        }
        Err(at)
    }

    /// Takes the entries from the first one at or behind this byte away; gives the least key that they may have, and them.
    fn split(&mut self, from: usize) -> Option<(Box<[u8]>, Vec<u8>)> {
        let (mut at, mut below) = (0, 0..0);
        while let Some(found) = self.entry(at) {
            if at >= from {
                let (left, right) = (&self.bytes[below], &self.bytes[found.key]);
                // Any key between the two will do.
                let same = left.iter().zip(right).take_while(|(l, r)| l == r).count();
                let least = right[..same + 1].into();
                return Some((least, self.bytes.split_off(at)));
            }
            (at, below) = (found.whole.end, found.key);
        }
        None
    }
}

/// The map.
#[derive(Debug)]
pub struct Table {
    file: Scratch,
    /// Numbers of leaves, by a key that is not greater than theirs and greater than those of leaves before.
    leaves: BTreeMap<Box<[u8]>, u32>,
    /// Bytes of each leaf as it is in the file.
    lens: Vec<u16>,
    cached: HashMap<u32, Leaf>,
    uses: u64,
}

impl Table {
    /// An empty map in this file.
    pub fn new(file: Scratch) -> Table {
        Table {
            file,
            leaves: BTreeMap::from([(Box::default(), 0)]),
            lens: vec![0],
            cached: HashMap::new(),
            uses: 0,
        }
    }

    /// Whether an entry may have a key and a value of so many bytes together.
    pub fn fits(bytes: usize) -> bool {
        bytes <= ENTRY
    }

    /// The leaf that has this key, if there is one.
    fn of(&self, key: &[u8]) -> u32 {
        let up_to = (Bound::Unbounded, Bound::Included(key));
        let last = self.leaves.range::<[u8], _>(up_to).next_back();
        last.map_or(0, |(_, number)| *number)
    }

    fn leaf(&mut self, number: u32) -> Result<&mut Leaf, MkfsError> {
        if !self.cached.contains_key(&number) {
            let len = self.lens[number as usize];
            let bytes = self.file.read(at(number), len.into())?;
            self.keep(number, bytes, false)?;
        }
        self.uses += 1;
        let leaf = self.cached.entry(number).or_default();
        leaf.used = self.uses;
        Ok(leaf)
    }

    /// Has a leaf in memory, in place of the one that was not used for the longest time.
    fn keep(&mut self, number: u32, bytes: Vec<u8>, changed: bool) -> Result<(), MkfsError> {
        if self.cached.len() >= CACHED
            && let Some(oldest) = self.cached.iter().min_by_key(|(_, leaf)| leaf.used)
        {
            let oldest = *oldest.0;
            if let Some(leaf) = self.cached.get(&oldest).filter(|leaf| leaf.changed) {
                self.file.write(&leaf.bytes, at(oldest))?;
                self.lens[oldest as usize] = leaf.bytes.len() as u16;
            }
            self.cached.remove(&oldest);
        }
        let leaf = Leaf {
            bytes,
            changed,
            used: self.uses,
        };
        self.cached.insert(number, leaf);
        Ok(())
    }

    /// The value of a key.
    pub fn get(&mut self, key: &[u8]) -> Result<Option<&[u8]>, MkfsError> {
        let leaf = self.leaf(self.of(key))?;
        let found = leaf.find(key).ok();
        Ok(found.map(|found| &leaf.bytes[found.value]))
    }

    /// Gives a key this value.
    ///
    /// # Panics
    /// If the two do not fit ([`Table::fits`]).
    pub fn insert(&mut self, key: &[u8], value: &[u8]) -> Result<(), MkfsError> {
        assert!(Table::fits(key.len() + value.len()), "{}", value.len());
        let leaf = self.leaf(self.of(key))?;
        let place = match leaf.find(key) {
            Ok(found) => found.whole,
            Err(at) => at..at,
        };
        let start = place.start;
        let lens = [key.len() as u16, value.len() as u16].map(u16::to_ne_bytes);
        let entry = lens.as_flattened().iter().chain(key).chain(value);
        leaf.bytes.splice(place, entry.copied());
        leaf.changed = true;
        // Entries in order, or in the opposite one, leave full leaves behind.
        let half = match (start, start + HEAD + key.len() + value.len()) {
            (0, _) => 1,
            (_, end) if end == leaf.bytes.len() => start,
            _ => LEAF / 2,
        };
        if leaf.bytes.len() > LEAF
            && let Some((least, upper)) = leaf.split(half)
        {
            let number = self.lens.len() as u32;
            self.lens.push(0);
            self.leaves.insert(least, number);
            self.keep(number, upper, true)?;
        }
        Ok(())
    }

    /// Takes a key away.
    pub fn remove(&mut self, key: &[u8]) -> Result<(), MkfsError> {
        let leaf = self.leaf(self.of(key))?;
        if let Ok(found) = leaf.find(key) {
            leaf.bytes.drain(found.whole);
            leaf.changed = true;
        }
        Ok(())
    }

    /// Gives `each` what follows the prefix in the keys that have it, and their values, in order, until it says `false`.
    pub fn scan(
        &mut self,
        prefix: &[u8],
        mut each: impl FnMut(&[u8], &[u8]) -> Result<bool, MkfsError>,
    ) -> Result<(), MkfsError> {
        let more = (Bound::Excluded(prefix), Bound::Unbounded);
        let more = self.leaves.range::<[u8], _>(more);
        let more = more.take_while(|(least, _)| least.starts_with(prefix));
        let numbers: Vec<u32> = more.map(|(_, number)| *number).collect();
        for number in std::iter::once(self.of(prefix)).chain(numbers) {
            let leaf = self.leaf(number)?;
            let mut at = leaf
                .find(prefix)
                .map_or_else(|at| at, |found| found.whole.start);
            while let Some(found) = leaf.entry(at) {
                let Some(name) = leaf.bytes[found.key].strip_prefix(prefix) else {
                    return Ok(());
                };
                if !each(name, &leaf.bytes[found.value])? {
                    return Ok(());
                }
                at = found.whole.end;
            }
        }
        Ok(())
    }
}

/// A leaf's place in the file.
fn at(number: u32) -> u64 {
    u64::from(number) * LEAF as u64
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Few names, many of which share what they begin with, so that leaves split between most of them.
    fn key() -> impl Strategy<Value = Vec<u8>> {
        let short = proptest::collection::vec(0u8..3, 0..4);
        (short, 0usize..300).prop_map(|(mut key, more)| {
            key.resize(key.len() + more, 1);
            key
        })
    }

    proptest! {
        /// It holds what a map in memory does, when most of it is in the file.
        #[test]
        fn a_table_is_a_map(
            steps in proptest::collection::vec((key(), 0usize..3700, 0u8..8), 0..3000),
            prefix in key(),
        ) {
            let mut table = Table::new(Scratch::new(&std::env::temp_dir()).unwrap());
            let mut map = BTreeMap::new();
            for (n, (key, len, what)) in steps.into_iter().enumerate() {
                match what {
                    0 => {
                        table.remove(&key).unwrap();
                        map.remove(&key);
                    }
                    1 => prop_assert_eq!(table.get(&key).unwrap(), map.get(&key).map(Vec::as_slice)),
                    _ => {
                        let value = vec![n as u8; len];
                        table.insert(&key, &value).unwrap();
                        map.insert(key, value);
                    }
                }
            }
            let mut found = Vec::new();
            table.scan(&prefix, |name, value| {
                found.push(([&prefix, name].concat(), value.to_vec()));
                Ok(true)
            }).unwrap();
            let expected = map.into_iter().filter(|(key, _)| key.starts_with(&prefix));
            prop_assert_eq!(found, expected.collect::<Vec<_>>());
        }
    }
}
