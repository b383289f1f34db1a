//! Listings of directories: what answers lookups for a while, and tells in which order a program walks.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crate::store::{Facts, Listed, Version};

/// Lookups in a directory, one soon after the other, that make listing it the cheaper way.
const LOOKUPS: u32 = 4;
/// Directories with more names are not listed for a lookup: that takes more than a few requests.
pub(crate) const MOST_NAMES: usize = 5_000;
/// Names that are kept, of all directories together.
const KEPT: usize = 200_000;
/// A walk may leave out so many names before the next that it opens.
const GAP: usize = 8;
/// Opens in the order of the names that make a walk.
const WALK: u32 = 2;
/// Files that are fetched ahead of a walk, at most.
const AHEAD: usize = 64;
/// Files up to this size are fetched ahead, and whole.
const SMALL: u64 = 1 << 20;
/// Bytes that are fetched ahead of a walk, at most.
const BYTES: u64 = 8 << 20;

/// The names in a directory, sorted.
pub(crate) struct Listing {
    pub(crate) names: Vec<Listed>,
    /// When the store was asked.
    pub(crate) begun: Instant,
}

impl Listing {
    /// A directory stands before a file of the same name, and hides it.
    pub(crate) fn new(directory: &str, mut names: Vec<Listed>, begun: Instant) -> Self {
        names.sort_by(|one, two| {
            let order = |entry: &Listed| entry.version.is_some();
            one.name.cmp(&two.name).then(order(one).cmp(&order(two)))
        });
        let mut told = false;
        names.dedup_by(|two, one| {
            let hidden = one.name == two.name;
            if hidden && !std::mem::replace(&mut told, true) {
                let name = &one.name;
                tracing::warn!(
                    directory,
                    name,
                    "the directory hides an object of this name"
                );
            }
            hidden
        });
        Self { names, begun }
    }

    /// The same with changes.
    fn with(&self, directory: &str, changes: BTreeMap<String, Option<Option<Version>>>) -> Self {
        let kept = self.names.iter();
        let kept = kept.filter(|listed| !changes.contains_key(&listed.name));
        let mut names: Vec<_> = kept.cloned().collect();
        let new = changes.into_iter();
        names.extend(new.filter_map(|(name, now)| now.map(|version| Listed { name, version })));
        Self::new(directory, names, self.begun)
    }

    /// The same with more names, where it does not have them.
    pub(crate) fn and(&self, directory: &str, more: Vec<Listed>) -> Self {
        let more = more.into_iter();
        let more = more.filter(|listed| self.find(&listed.name).is_none());
        let names = self.names.iter().cloned().chain(more).collect();
        Self::new(directory, names, self.begun)
    }

    fn find(&self, name: &str) -> Option<usize> {
        let found = self.names.binary_search_by(|one| (*one.name).cmp(name));
        found.ok()
    }
}

/// What is known of a directory.
struct Directory {
    listing: Option<Arc<Listing>>,
    /// Names that have changed through the mount since: gone, directories, or versions.
    changes: BTreeMap<String, Option<Option<Version>>>,
    /// When the last of them did.
    changed: Option<Instant>,
    /// Too many names for [`MOST_NAMES`].
    large: bool,
    /// Lookups that no listing answered, since a moment.
    lookups: u32,
    since: Instant,
    walk: Walk,
}

impl Directory {
    fn new() -> Self {
        Self {
            listing: None,
            changes: BTreeMap::new(),
            changed: None,
            large: false,
            lookups: 0,
            since: Instant::now(),
            walk: Walk::default(),
        }
    }
}

/// Opens of files in the order of their names.
#[derive(Default)]
struct Walk {
    last: usize,
    steps: u32,
    /// Names before this one have been fetched.
    fetched: usize,
}

/// The answer to a lookup.
pub(crate) enum Found {
    /// The store said it when it was asked for the listing.
    Known(Option<Facts>, Instant),
    /// The store is to be asked for the name.
    Ask,
    /// The store is to be asked for a listing.
    List,
}

/// The directories that programs looked into lately.
#[derive(Default)]
pub(crate) struct Listings(Mutex<HashMap<String, Directory>>);

impl Listings {
    /// A listing that is younger than `age`.
    pub(crate) fn fresh(&self, directory: &str, age: Duration) -> Option<Arc<Listing>> {
        let mut all = uvfs_sys::lock(&self.0);
        let known = all.get_mut(directory)?;
        let listing = known.listing.as_mut()?;
        if listing.begun.elapsed() >= age {
            return None;
        }
        if !known.changes.is_empty() {
            let changes = std::mem::take(&mut known.changes);
            *listing = Arc::new(listing.with(directory, changes));
        }
        Some(listing.clone())
    }

    /// A name changes through the mount: it is gone, a directory, or a version.
    pub(crate) fn changed(&self, directory: &str, name: &str, now: Option<Option<Version>>) {
        let mut all = uvfs_sys::lock(&self.0);
        let known = all
            .entry(directory.to_owned())
            .or_insert_with(Directory::new);
        known.changed = Some(Instant::now());
        if known.listing.is_some() {
            known.changes.insert(name.to_owned(), now);
        }
    }

    /// A directory is new, and empty.
    pub(crate) fn begin(&self, directory: &str) {
        let empty = Listing::new(directory, Vec::new(), Instant::now());
        self.keep(directory, Some(Arc::new(empty)));
    }

    /// A directory, and all below it, are gone or others.
    pub(crate) fn forget_below(&self, directory: &str) {
        for (key, known) in uvfs_sys::lock(&self.0).iter_mut() {
            if key.starts_with(directory) {
                known.listing = None;
                known.changed = Some(Instant::now());
            }
        }
    }

    /// Keeps a listing; `None` for one with too many names for a lookup.
    pub(crate) fn keep(&self, directory: &str, listing: Option<Arc<Listing>>) {
        let mut all = uvfs_sys::lock(&self.0);
        let names = |one: &Directory| one.listing.as_ref().map_or(1, |list| list.names.len());
        let new = listing.as_ref().map_or(1, |list| list.names.len());
        if all.values().map(names).sum::<usize>() + new > KEPT {
            for known in all.values_mut() {
                (known.listing, known.changes) = (None, BTreeMap::new());
            }
        }
        let had = all.remove(directory);
        let changed = had.as_ref().and_then(|had| had.changed);
        // It may not have a change of meanwhile.
        let overtaken = |list: &Arc<Listing>| changed.is_some_and(|at| at >= list.begun);
        let known = Directory {
            large: new > MOST_NAMES || listing.is_none(),
            listing: listing.filter(|list| list.names.len() <= KEPT && !overtaken(list)),
            changed,
            walk: had.map(|had| had.walk).unwrap_or_default(),
            ..Directory::new()
        };
        all.insert(directory.to_owned(), known);
    }

    /// A file in a directory is another one than its listing says.
    pub(crate) fn forget(&self, directory: &str) {
        if let Some(known) = uvfs_sys::lock(&self.0).get_mut(directory) {
            known.listing = None;
            known.changed = Some(Instant::now());
        }
    }

    /// Answers a lookup by a listing that is younger than `age`.
    pub(crate) fn look_up(&self, directory: &str, name: &str, age: Duration) -> Found {
        let mut all = uvfs_sys::lock(&self.0);
        if all.len() > KEPT {
            all.clear();
        }
        // Most lookups find it, and need no copy of the key.
        if !all.contains_key(directory) {
            all.insert(directory.to_owned(), Directory::new());
        }
        let known = all.get_mut(directory).expect("it is there by now");
        if let Some(list) = &known.listing
            && list.begun.elapsed() < age
        {
            let listed = || list.find(name).map(|at| list.names[at].version.clone());
            let facts = (known.changes.get(name).cloned()).unwrap_or_else(listed);
            return Found::Known(facts.map(Facts::from), list.begun);
        }
        if known.since.elapsed() >= age {
            (known.since, known.lookups) = (Instant::now(), 0);
        }
        known.lookups += 1;
        match known.lookups >= LOOKUPS && !known.large {
            true => Found::List,
            false => Found::Ask,
        }
    }

    /// A file was opened. Gives the small files after it if a program walks through the directory.
    pub(crate) fn opened(&self, directory: &str, name: &str) -> Vec<(String, Version)> {
        let mut all = uvfs_sys::lock(&self.0);
        let Some(known) = all.get_mut(directory) else {
            return Vec::new();
        };
        let Some((list, at)) =
            (known.listing.as_ref()).and_then(|list| Some((list, list.find(name)?)))
        else {
            return Vec::new();
        };
        let walk = &mut known.walk;
        if at == walk.last && walk.steps > 0 {
            return Vec::new();
        }
        if !(at > walk.last && at - walk.last <= GAP) {
            *walk = Walk {
                last: at,
                ..Walk::default()
            };
        }
        (walk.last, walk.steps) = (at, walk.steps + 1);
        // Half of what was fetched is used up.
        if walk.steps <= WALK || walk.fetched > at + AHEAD / 2 {
            return Vec::new();
        }
        let (mut bytes, mut next) = (0, Vec::new());
        let mut until = walk.fetched.max(at + 1);
        let end = list.names.len().min(at + 1 + AHEAD);
        while until < end && bytes < BYTES {
            let one = &list.names[until];
            until += 1;
            if let Some(version) = &one.version
                && (1..=SMALL).contains(&version.size)
            {
                bytes += version.size;
                next.push((format!("{directory}{}", one.name), version.clone()));
            }
        }
        walk.fetched = until;
        next
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn listed(name: &str, size: Option<u64>) -> Listed {
        Listed {
            name: name.into(),
            version: size.map(|size| Version {
                size,
                ..Version::default()
            }),
        }
    }

    fn numbered(count: usize, size: u64) -> Arc<Listing> {
        let names = (0..count).map(|n| listed(&format!("{n:04}"), Some(size)));
        Arc::new(Listing::new("d/", names.collect(), Instant::now()))
    }

    #[test]
    fn a_directory_hides_a_file_of_its_name() {
        let names = vec![listed("b", None), listed("a", Some(1)), listed("a", None)];
        let list = Listing::new("d/", names, Instant::now());
        let seen: Vec<_> = list.names.iter().map(|one| &*one.name).collect();
        assert_eq!(seen, ["a", "b"]);
        assert!(list.names[0].version.is_none());
    }

    #[test]
    fn lookups_that_follow_each_other_ask_for_a_listing_and_it_answers() {
        let all = Listings::default();
        let ask = |name: &str| all.look_up("d/", name, SECOND);
        (1..LOOKUPS).for_each(|_| assert!(matches!(ask("0001"), Found::Ask)));
        assert!(matches!(ask("0001"), Found::List));
        all.keep("d/", Some(numbered(3, 1)));
        assert!(matches!(ask("0001"), Found::Known(Some(_), _)));
        assert!(matches!(ask("0009"), Found::Known(None, _)));
        // Not for longer than it is valid, and not where there are too many names.
        let late = all.look_up("d/", "0001", Duration::ZERO);
        assert!(matches!(late, Found::Ask));
        all.keep("d/", None);
        (0..9).for_each(|_| assert!(matches!(ask("0001"), Found::Ask)));
    }

    #[test]
    fn a_walk_fetches_each_small_file_ahead_once() {
        let all = Listings::default();
        all.keep("d/", Some(numbered(1000, 4096)));
        let mut fetched = Vec::new();
        for n in 0..1000 {
            let next = all.opened("d/", &format!("{n:04}"));
            let ahead = next
                .iter()
                .map(|(key, _)| key[2..].parse::<usize>().unwrap());
            let ahead: Vec<_> = ahead.collect();
            assert!(ahead.iter().all(|next| (n + 1..=n + AHEAD).contains(next)));
            fetched.extend(ahead);
        }
        // Once each, from where it was seen that it is a walk.
        let expected: Vec<_> = (WALK as usize + 1..1000).collect();
        assert_eq!(fetched, expected);
    }

    #[test]
    fn opens_at_random_and_large_files_fetch_nothing() {
        let all = Listings::default();
        all.keep("d/", Some(numbered(1000, 4096)));
        for n in (0..1000).map(|n| n * 379 % 1000) {
            assert!(all.opened("d/", &format!("{n:04}")).is_empty(), "{n}");
        }
        all.keep("d/", Some(numbered(1000, 2 << 20)));
        for n in 0..1000 {
            assert!(all.opened("d/", &format!("{n:04}")).is_empty(), "{n}");
        }
    }

    #[test]
    fn what_is_kept_is_bounded() {
        let all = Listings::default();
        (0..100).for_each(|n| all.keep(&format!("{n}/"), Some(numbered(9000, 1))));
        let names: usize = uvfs_sys::lock(&all.0)
            .values()
            .map(|one| one.listing.as_ref().map_or(0, |list| list.names.len()))
            .sum();
        assert!(names <= KEPT);
    }
}
