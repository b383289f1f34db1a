//! What the kernel keeps of directories: listings, and names that are not there. It saves requests, and no program sees what is
//! older than `ttl=`.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use fastrand::Rng;
use rustix::fs::Dir;
use uvfs_object::Writes;
use uvfs_testing::{Need, has};

use crate::fake::Fake;
use crate::stores::At;
use crate::{Served, serve};

const LONG: Duration = Duration::from_secs(6);
/// The kernel keeps attributes for so long at least, and by them it sees when a listing is over.
const ATTRIBUTES: Duration = Duration::from_secs(1);

fn requests(served: &Served, kinds: &[&str]) -> u64 {
    let report = served.mounted.session().report();
    let ops = report
        .ops
        .iter()
        .filter(|op| kinds.contains(&op.name.as_str()));
    ops.map(|op| op.count).sum()
}

/// The names in an open directory, from its beginning.
fn names(dir: &mut Dir) -> Vec<String> {
    let names = dir.map(|entry| entry.unwrap().file_name().to_str().unwrap().to_owned());
    names.filter(|name| !name.starts_with('.')).collect()
}

fn open(path: &Path) -> Dir {
    Dir::new(File::open(path).unwrap()).unwrap()
}

fn sorted(path: &Path) -> Vec<String> {
    let mut names = names(&mut open(path));
    names.sort();
    names
}

#[test]
fn a_listing_and_a_missing_name_are_asked_for_once() {
    if !has(&[Need::Fuse]) {
        return;
    }
    let store = Fake::start();
    (0..500).for_each(|n| store.put(&format!("d/{n:03}"), b"1"));
    let served = serve(&store.uri(), |options| {
        options.ttl = Duration::from_secs(600);
        options.writes = Writes::Close;
    });
    let (dir, none) = (served.at("d"), served.at("d/none"));
    let first = sorted(&dir);
    assert_eq!(first.len(), 500);
    assert!(!none.exists());
    let kinds = ["READDIR", "READDIRPLUS", "LOOKUP", "FLUSH"];
    let before = requests(&served, &kinds);
    for n in 0..10 {
        assert_eq!(sorted(&dir), first);
        assert!(!none.exists());
        assert_eq!(fs::read(dir.join(&first[n])).unwrap(), b"1");
    }
    assert_eq!(requests(&served, &kinds), before);
    // What programs change here they see at once.
    fs::write(&none, b"2").unwrap();
    assert!(none.exists());
    assert_eq!(sorted(&dir).len(), 501);
    fs::rename(&none, dir.join("other")).unwrap();
    assert!(!none.exists() && sorted(&dir).contains(&"other".to_owned()));
    fs::remove_file(dir.join("other")).unwrap();
    assert_eq!(sorted(&dir), first);
}

#[test]
fn a_name_that_was_missing_is_found_when_the_time_is_over() {
    if !has(&[Need::Fuse]) {
        return;
    }
    const TTL: Duration = Duration::from_millis(1500);
    let store = Fake::start();
    store.put("d/one", b"1");
    let served = serve(&store.uri(), |options| options.ttl = TTL);
    // By itself, and by a listing that is not new any more.
    assert!(!served.at("d/two").exists());
    assert_eq!(sorted(&served.at("d")), ["one"]);
    std::thread::sleep(TTL / 2);
    assert!(!served.at("d/three").exists());
    store.put("d/two", b"2");
    store.put("d/three", b"3");
    // The kernel counts in ticks of its clock, and rounds up.
    std::thread::sleep(TTL / 2 + Duration::from_millis(100));
    assert!(served.at("d/two").exists() && served.at("d/three").exists());
}

/// What has happened to a name: when a change began and ended, and whether the name was there then.
type Past = Vec<(Instant, Instant, bool)>;

struct Changing<'a> {
    store: &'a Fake,
    names: Mutex<BTreeMap<String, Past>>,
    over: AtomicBool,
}

impl Changing<'_> {
    fn change(&self, name: &str) {
        let mut names = self.names.lock().unwrap();
        let past = names.entry(name.to_owned()).or_default();
        let there = past.last().is_some_and(|(_, _, there)| *there);
        let (begun, key) = (Instant::now(), format!("d/{name}"));
        match there {
            true => self.store.remove(&key),
            false => self.store.put(&key, b"1"),
        }
        past.push((begun, Instant::now(), !there));
    }

    /// A program listed the directory since `begun`, and may be told what was so for `age` before.
    fn check(&self, found: &[String], begun: Instant, age: Duration, how: &str) {
        let ended = Instant::now();
        let set: BTreeSet<_> = found.iter().map(String::as_str).collect();
        assert_eq!(set.len(), found.len(), "{how}: a name comes twice");
        for (name, past) in &*self.names.lock().unwrap() {
            let over = |change: &&(Instant, Instant, bool)| change.1 + age < begun;
            let sure = past.iter().take_while(over).last();
            let changes = past.iter().skip_while(over);
            if changes.into_iter().any(|(since, ..)| *since < ended) {
                continue;
            }
            let there = sure.is_some_and(|(_, _, there)| *there);
            assert_eq!(
                set.contains(&**name),
                there,
                "{how}: {name} {past:?} {begun:?}"
            );
        }
    }
}

/// Programs list one directory at a time, in parts, from the beginning again, and not to the end, while names come and go.
#[test]
fn listings_are_whole_and_new_while_names_come_and_go() {
    if !has(&[Need::Fuse]) {
        return;
    }
    const TTL: Duration = Duration::from_millis(300);
    let store = Fake::start();
    let changing = Changing {
        store: &store,
        names: Mutex::default(),
        over: AtomicBool::new(false),
    };
    let seed = fastrand::u64(..);
    eprintln!("seed {seed}");
    let mut random = Rng::with_seed(seed);
    // Some stay, before, between and behind those that come and go.
    (0..900).for_each(|n| changing.change(&format!("{n:03}-stays")));
    let served = serve(&store.uri(), |options| options.ttl = TTL);
    let dir = served.at("d");
    std::thread::scope(|scope| {
        let (changing, dir) = (&changing, &dir);
        let until = move |mut listing: Box<dyn FnMut() + Send>| {
            scope.spawn(move || {
                while !changing.over.load(Ordering::Relaxed) {
                    listing();
                }
            })
        };
        let mut readers = Vec::new();
        for n in 0..4 {
            let mut random = Rng::with_seed(seed + n);
            readers.push(until(Box::new(move || {
                let begun = Instant::now();
                let mut open = open(dir);
                if random.u8(..8) == 0 {
                    assert!(open.next().is_some());
                    return;
                }
                let mut found: Vec<_> = Vec::new();
                for entry in open {
                    let name = entry.unwrap().file_name().to_str().unwrap().to_owned();
                    found.extend(Some(name).filter(|name| !name.starts_with('.')));
                    if random.u16(..2000) == 0 {
                        std::thread::sleep(TTL);
                    }
                }
                changing.check(&found, begun, TTL, "a listing");
                std::thread::sleep(Duration::from_millis(random.u64(..50)));
            })));
        }
        let mut open = open(dir);
        readers.push(until(Box::new(move || {
            std::thread::sleep(Duration::from_millis(20));
            let begun = Instant::now();
            open.rewind();
            let found = names(&mut open);
            changing.check(&found, begun, TTL + ATTRIBUTES, "a listing again");
        })));
        let begun = Instant::now();
        while begun.elapsed() < LONG && readers.iter().all(|reader| !reader.is_finished()) {
            changing.change(&format!("{:03}-goes", random.u32(..900)));
            std::thread::sleep(Duration::from_millis(random.u64(..20)));
        }
        changing.over.store(true, Ordering::Relaxed);
    });
    let (opens, lists) = (
        requests(&served, &["OPENDIR"]),
        requests(&served, &["READDIR", "READDIRPLUS"]),
    );
    eprintln!("{opens} opens, {lists} requests for names");
}
