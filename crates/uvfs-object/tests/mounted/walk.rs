//! Programs that go through a directory: requests are few, and what they see is no older than `ttl=`.

use std::fs;
use std::time::Duration;

use uvfs_testing::{Need, has};

use crate::fake::Fake;
use crate::serve;
use crate::stores::At;

const FILES: usize = 300;

fn contents(number: usize) -> Vec<u8> {
    format!("number {number}").repeat(1 + number).into_bytes()
}

/// The requests since this was last asked whose text begins with `kind`, and all others.
fn asked(store: &Fake, kind: &str) -> (usize, usize) {
    let asked = std::mem::take(&mut store.bucket().asked);
    let of_kind = asked.iter().filter(|one| one.starts_with(kind)).count();
    (of_kind, asked.len() - of_kind)
}

fn name(number: usize) -> String {
    format!("d/{number:04}")
}

#[test]
fn a_walk_takes_a_request_for_each_small_file() {
    if !has(&[Need::Fuse]) {
        return;
    }
    let store = Fake::start();
    (0..FILES).for_each(|n| store.put(&name(n), &contents(n)));
    let served = serve(&store.uri(), |options| {
        options.ttl = Duration::from_secs(600);
    });
    asked(&store, "GET");
    let count = fs::read_dir(served.at("d")).unwrap().count();
    assert_eq!(count, FILES);
    let read = |n: usize| {
        let read = fs::read(served.at(&name(n))).unwrap();
        assert!(read == contents(n), "{n}");
    };
    const FIRST: usize = 10;
    (0..FIRST).for_each(read);
    // Files are there before they are opened.
    let gets = || {
        let all = &store.bucket().asked;
        all.iter().filter(|one| one.starts_with("GET")).count()
    };
    while gets() < 2 * FIRST {
        std::thread::sleep(Duration::from_millis(10));
    }
    (FIRST..FILES).for_each(read);
    let (gets, others) = asked(&store, "GET");
    assert_eq!(gets, FILES);
    // The directory is looked up and listed; no file is asked for by itself.
    assert!(others <= 5, "{others}");
}

#[test]
fn lookups_of_one_directory_become_a_listing() {
    if !has(&[Need::Fuse]) {
        return;
    }
    let store = Fake::start();
    (0..FILES).for_each(|n| store.put(&name(n), b"1"));
    let served = serve(&store.uri(), |options| {
        options.ttl = Duration::from_secs(600);
    });
    asked(&store, "LIST");
    for n in 0..FILES {
        assert!(fs::metadata(served.at(&name(n))).unwrap().is_file());
        assert!(fs::metadata(served.at(&format!("d/none{n}"))).is_err());
    }
    let (lists, others) = asked(&store, "LIST");
    assert!(lists + others < 20, "{lists} {others}");
}

#[test]
fn changes_are_seen_when_the_time_is_over() {
    if !has(&[Need::Fuse]) {
        return;
    }
    const TTL: Duration = Duration::from_millis(1500);
    let store = Fake::start();
    (0..20).for_each(|n| store.put(&name(n), &contents(n)));
    let served = serve(&store.uri(), |options| options.ttl = TTL);
    let all = || -> Vec<_> {
        let mut names: Vec<_> = fs::read_dir(served.at("d")).unwrap().collect();
        names.sort_by_key(|entry| entry.as_ref().unwrap().file_name());
        let path = |entry: Result<fs::DirEntry, _>| entry.unwrap().path();
        names
            .into_iter()
            .map(|entry| fs::read(path(entry)).unwrap())
            .collect()
    };
    let expected: Vec<_> = (0..20).map(contents).collect();
    assert!(all() == expected);
    store.put(&name(7), b"another");
    store.remove(&name(8));
    store.put(&name(20), b"new");
    std::thread::sleep(TTL);
    let mut expected = expected;
    expected[7] = b"another".to_vec();
    expected.remove(8);
    expected.push(b"new".to_vec());
    assert!(all() == expected);
}
