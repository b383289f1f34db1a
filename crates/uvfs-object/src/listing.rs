//! Listings of directories: what answers lookups for a while, and tells in which order a program walks.

use std::collections::{BTreeMap, HashMap};
use std::hash::{DefaultHasher, Hash, Hasher};
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

/// The first place of a name: `.` and `..` come before.
const FIRST_PLACE: u64 = 3;

/// The names in a directory, sorted.
pub(crate) struct Listing {
    pub(crate) names: Vec<Listed>,
    /// The place of each name in READDIR, and which name it is; sorted.
    places: Vec<(u64, usize)>,
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
        let places = names.iter().map(|one| place(&one.name)).zip(0..);
        let mut places: Vec<_> = places.collect();
        places.sort_unstable();
        Self {
            names,
            places,
            begun,
        }
    }

    /// The names whose places are beyond an offset of READDIR, with their places.
    pub(crate) fn beyond(&self, offset: u64) -> impl Iterator<Item = (u64, &Listed)> {
        let first = self.places.partition_point(|(place, _)| *place <= offset);
        let rest = self.places[first..].iter();
        rest.map(|&(place, at)| (place, &self.names[at]))
    }

    /// The same with changes.
    pub(crate) fn with(&self, directory: &str, changes: BTreeMap<String, Now>) -> Self {
        let kept = self.names.iter();
        let kept = kept.filter(|listed| !changes.contains_key(&listed.name));
        let mut names: Vec<_> = kept.cloned().collect();
        let new = changes.into_iter();
        let new = new.filter_map(|(name, now)| {
            let version = now.version()?;
            Some(Listed { name, version })
        });
        names.extend(new);
        Self::new(directory, names, self.begun)
    }

    /// The listing as programs see it, with changes that the store may not have yet.
    pub(crate) fn as_changed(
        self: Arc<Self>,
        directory: &str,
        mut changes: BTreeMap<String, Now>,
    ) -> Arc<Self> {
        let is_listed =
            |name: &str, now: &Now| matches!(now, Now::File(_)) && self.find(name).is_some();
        changes.retain(|name, now| !is_listed(name, now));
        match changes.is_empty() {
            true => self,
            false => Arc::new(self.with(directory, changes)),
        }
    }

    fn find(&self, name: &str) -> Option<usize> {
        let found = self.names.binary_search_by(|one| (*one.name).cmp(name));
        found.ok()
    }
}

/// Where READDIR gives a name: the same in each listing. So a program, or the kernel for its pages, that goes on in a newer
/// listing than it began in still gets each name once that both have.
fn place(name: &str) -> u64 {
    let mut hasher = DefaultHasher::new();
    name.hash(&mut hasher);
    // The kernel's offsets are signed.
    (hasher.finish() >> 1).max(FIRST_PLACE)
}

/// The listing of a directory in the kernel's pages.
#[derive(Default)]
pub(crate) struct Pages {
    /// When the oldest listing was begun that the pages may be of.
    begun: Option<Instant>,
    /// How often the kernel is dropping them.
    drops: u32,
}

impl Pages {
    /// The kernel is about to get a part of a listing.
    pub(crate) fn given(&mut self, begun: Instant) {
        self.begun = Some(self.begun.map_or(begun, |had| had.min(begun)));
    }

    /// Whether the kernel has to drop the pages first: they may be of a listing as old as `age`.
    pub(crate) fn expire(&mut self, age: Duration) -> bool {
        let old = self.begun.is_some_and(|begun| begun.elapsed() >= age);
        if old {
            self.begun = None;
        }
        let drops = old || self.drops > 0;
        self.drops += u32::from(drops);
        drops
    }

    pub(crate) fn dropped(&mut self) {
        self.drops -= 1;
    }
}

/// The state of a name in the store after a program changed it.
#[derive(Clone)]
pub(crate) enum Now {
    Gone,
    Directory,
    File(Version),
}

impl Now {
    /// The version as a listing has it, if the name is there.
    fn version(self) -> Option<Option<Version>> {
        match self {
            Self::Gone => None,
            Self::Directory => Some(None),
            Self::File(version) => Some(Some(version)),
        }
    }
}

/// What is known of a directory.
struct Directory {
    listing: Option<Arc<Listing>>,
    /// Names that have changed through the mount since.
    changes: BTreeMap<String, Now>,
    /// When the last of them did.
    changed: Option<Instant>,
    /// Too many names for [`MOST_NAMES`].
    large: bool,
    /// Lookups that no listing answered, since a moment.
    lookups: u32,
    since: Instant,
    /// In the order of names, and in that of READDIR.
    walks: [Walk; 2],
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
            walks: Default::default(),
        }
    }
}

/// Opens of files in one order.
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

    /// Notes what a name is after a change through the mount.
    pub(crate) fn changed(&self, directory: &str, name: &str, now: Now) {
        let mut all = uvfs_sys::lock(&self.0);
        let known = all
            .entry(directory.to_owned())
            .or_insert_with(Directory::new);
        known.changed = Some(Instant::now());
        if known.listing.is_some() {
            known.changes.insert(name.to_owned(), now);
        }
    }

    /// Keeps the listing of a new directory, which is empty.
    pub(crate) fn begin(&self, directory: &str) {
        let empty = Listing::new(directory, Vec::new(), Instant::now());
        self.keep(directory, Some(Arc::new(empty)));
    }

    /// Drops the listings of a directory and of all below it.
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
        // A listing that began before a change may not have it.
        let overtaken = |list: &Arc<Listing>| changed.is_some_and(|at| at >= list.begun);
        let known = Directory {
            large: new > MOST_NAMES || listing.is_none(),
            listing: listing.filter(|list| list.names.len() <= KEPT && !overtaken(list)),
            changed,
            walks: had.map(|had| had.walks).unwrap_or_default(),
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
            let facts = match known.changes.get(name) {
                Some(now) => now.clone().version(),
                None => listed(),
            };
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
        let (names, places) = (&list.names, &list.places);
        let place = places.binary_search(&(place(name), at));
        let place = place.expect("each name has a place");
        let [by_name, by_place] = &mut known.walks;
        by_name.step(at);
        by_place.step(place);
        let next = match by_name.steps >= by_place.steps {
            true => by_name.ahead(names.len(), |at| &names[at]),
            false => by_place.ahead(names.len(), |at| &names[places[at].1]),
        };
        let next = next.into_iter();
        next.map(|(name, version)| (format!("{directory}{name}"), version.clone()))
            .collect()
    }
}

impl Walk {
    /// The file at `at` was opened.
    fn step(&mut self, at: usize) {
        if at == self.last && self.steps > 0 {
            return;
        }
        if !(at > self.last && at - self.last <= GAP) {
            *self = Self::default();
        }
        (self.last, self.steps) = (at, self.steps + 1);
    }

    /// The small files of `len` that were not fetched yet and are opened next, with their versions.
    fn ahead<'a>(
        &mut self,
        len: usize,
        file: impl Fn(usize) -> &'a Listed,
    ) -> Vec<(&'a str, &'a Version)> {
        let at = self.last;
        // Half of what was fetched is used up.
        if self.steps <= WALK || self.fetched > at + AHEAD / 2 {
            return Vec::new();
        }
        let (mut bytes, mut next) = (0, Vec::new());
        let mut until = self.fetched.max(at + 1);
        let end = len.min(at + 1 + AHEAD);
        while until < end && bytes < BYTES {
            let one = file(until);
            until += 1;
            if let Some(version) = &one.version
                && (1..=SMALL).contains(&version.size)
            {
                bytes += version.size;
                next.push((&*one.name, version));
            }
        }
        self.fetched = until;
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
        let list = numbered(1000, 4096);
        let names: Vec<_> = list.names.iter().map(|one| &*one.name).collect();
        let places: Vec<_> = list.beyond(0).map(|(_, one)| &*one.name).collect();
        assert_ne!(names, places);
        for order in [names, places] {
            let all = Listings::default();
            all.keep("d/", Some(list.clone()));
            let mut fetched = Vec::new();
            for (n, name) in order.iter().enumerate() {
                let next = all.opened("d/", name);
                let ahead = &order[n + 1..1000.min(n + 1 + AHEAD)];
                assert!(next.iter().all(|(key, _)| ahead.contains(&&key[2..])));
                fetched.extend(next.into_iter().map(|(key, _)| key[2..].to_owned()));
            }
            // Once each, from where it was seen that it is a walk.
            assert_eq!(fetched, order[WALK as usize + 1..]);
        }
    }

    #[test]
    fn names_have_the_same_places_in_each_listing() {
        let (few, many) = (numbered(100, 1), numbered(1000, 1));
        let all = |list: &Listing, offset| {
            let names = list
                .beyond(offset)
                .map(|(next, one)| (one.name.clone(), next));
            names.collect::<Vec<_>>()
        };
        let places: HashMap<_, _> = all(&many, 0).into_iter().collect();
        for (at, (name, next)) in all(&few, 2).iter().enumerate() {
            assert_eq!(places[name], *next);
            assert_eq!(all(&few, *next), all(&few, 0)[at + 1..]);
            assert!((FIRST_PLACE..=i64::MAX as u64).contains(next));
        }
        assert_eq!((all(&few, 0).len(), places.len()), (100, 1000));
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
