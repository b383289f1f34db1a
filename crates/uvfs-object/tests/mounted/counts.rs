//! The counts of a mount, beside what the store was asked for.

use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::{FileExt, OpenOptionsExt};

use uvfs_testing::{Need, has};

use crate::fake::Fake;
use crate::stores::At;
use crate::{Served, bytes, serve};

pub fn count(served: &Served, name: &str) -> u64 {
    let counts = served.mounted.session().report().counts;
    counts.iter().find(|one| one.name == name).unwrap().count
}

/// How many requests the store has answered, by the names of their counts.
fn asked(fake: &Fake) -> [(&'static str, u64); 3] {
    let bucket = fake.bucket();
    let of = |kind: &str| {
        let asked = bucket.asked.iter();
        asked.filter(|one| one.starts_with(kind)).count() as u64
    };
    [
        ("store_stat_requests", of("HEAD ")),
        ("store_list_requests", of("LIST ")),
        ("store_read_requests", of("GET ")),
    ]
}

/// Reads past the kernel's cache, so that the server gets this very range.
fn direct(served: &Served, name: &str) -> File {
    let mut how = OpenOptions::new();
    how.read(true).custom_flags(libc::O_DIRECT);
    how.open(served.at(name)).unwrap()
}

/// Requests and bytes are those that the store had, pages of listings and attempts that failed included.
#[test]
fn counts_are_the_store_s() {
    if !has(&[Need::Fuse]) {
        return;
    }
    let fake = Fake::start();
    let content = bytes(100_000, 1);
    fake.put("file", &content);
    (0..1500).for_each(|n| fake.put(&format!("many/{n:04}"), b""));
    let served = serve(&fake.uri(), |options| options.backing_files = false);
    let same = |what: &str| {
        for (name, requests) in asked(&fake) {
            assert!(requests > 0, "{what}: {name}");
            assert_eq!(count(&served, name), requests, "{what}: {name}");
        }
    };
    assert_eq!(fs::read_dir(served.at("many")).unwrap().count(), 1500);
    let file = direct(&served, "file");
    let mut part = vec![0; 10_000];
    // Of two pieces.
    file.read_exact_at(&mut part, 60_000).unwrap();
    assert!(part == content[60_000..70_000]);
    same("a read");
    assert_eq!(count(&served, "store_read_bytes"), 100_000);
    assert_eq!(count(&served, "cache_miss_bytes"), 10_000);
    assert_eq!(count(&served, "cache_hit_bytes"), 0);
    file.read_exact_at(&mut part[..7000], 63_000).unwrap();
    assert_eq!(count(&served, "cache_miss_bytes"), 10_000);
    assert_eq!(count(&served, "cache_hit_bytes"), 7000);
    assert_eq!(count(&served, "store_retries"), 0);
    assert_eq!(count(&served, "store_failures"), 0);
    assert!(fs::metadata(served.at("none")).is_err());
    same("a name that is not there");

    fake.put("again", b"again");
    let file = direct(&served, "again");
    fake.bucket().refuses = Some((503, "SlowDown", 2));
    let mut part = [0; 5];
    file.read_exact_at(&mut part, 0).unwrap();
    assert_eq!(&part, b"again");
    assert_eq!(count(&served, "store_retries"), 2);
    assert_eq!(count(&served, "store_failures"), 0, "a retry brought it");
    let [.., (name, answered)] = asked(&fake);
    assert_eq!(count(&served, name), answered + 2);
    assert_eq!(count(&served, "store_read_bytes"), 100_005);

    fake.put("refused", b"refused");
    let file = direct(&served, "refused");
    fake.bucket().objects.get_mut("p/refused").unwrap().refused = Some("AccessDenied");
    file.read_exact_at(&mut part, 0).unwrap_err();
    assert_eq!(count(&served, "store_failures"), 1);
    assert_eq!(count(&served, "store_read_bytes"), 100_005);
}
