//! What users of other mounts of object stores have reported, with what a directory of the same names does beside it.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::ErrorKind;
use std::os::unix::fs::FileExt;
use std::process::Command;
use std::time::{Duration, SystemTime};

use uvfs_testing::{Need, has};

use crate::bad::{logged, logs};
use crate::counts::count;
use crate::fake::Fake;
use crate::stores::At;
use crate::{MIB, Served, bytes, listing, serve};

/// A mount shows what a directory with the same files does.
fn same_as_a_directory(fake: &Fake, served: &Served) {
    let directory = tempfile::tempdir().unwrap();
    let objects: BTreeMap<_, _> = fake.bucket().objects.clone();
    for (key, object) in &objects {
        let path = directory.path().join(key.strip_prefix("p/").unwrap());
        if key.ends_with('/') {
            fs::create_dir_all(path).unwrap();
        } else {
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, &object.contents).unwrap();
        }
    }
    assert_eq!(listing(served.mounted.path()), listing(directory.path()));
    // By name, in a mount that has listed nothing.
    let fresh = serve(&fake.uri(), |_| {});
    for (key, object) in objects.iter().filter(|(key, _)| !key.ends_with('/')) {
        let name = key.strip_prefix("p/").unwrap();
        assert!(
            fs::read(served.at(name)).unwrap() == object.contents,
            "{name:?}"
        );
        assert!(
            fs::read(fresh.at(name)).unwrap() == object.contents,
            "{name:?}"
        );
    }
}

/// goofys 319, minio 15023, boto 23, net-amazon-s3 67, fuse-t 16: `#`, `+`, `%`, control characters, and both forms of an
/// accented letter.
fn names(fake: &Fake) {
    for name in [
        "folder#1#/x",
        "a b",
        "a+b",
        "a%20b",
        "a%2Bb",
        "control \u{1}\u{8}\u{1f}",
        "two\nlines",
        "carriage\rreturn",
        "del\u{7f}",
        "caf\u{e9}",
        "cafe\u{301}",
        "]]>",
        "&amp;",
        "~",
    ] {
        fake.put(name, name.as_bytes());
    }
    same_as_a_directory(fake, &serve(&fake.uri(), |_| {}));
}

/// aws-sdk-rust 153: white space at the ends of keys. OpenDAL cuts it off: such a name does not lead to another object.
fn white_space(fake: &Fake) {
    fake.put("w", b"w");
    fake.put("w ", b"another");
    fake.put("only ", b"only");
    fake.put("d/ lead", b"lead");
    let served = serve(&fake.uri(), |_| {});
    assert_eq!(fs::read(served.at("w")).unwrap(), b"w");
    assert_eq!(fs::metadata(served.at("w")).unwrap().len(), 1);
    assert_eq!(fs::read(served.at("d/ lead")).unwrap(), b"lead");
    for entry in fs::read_dir(served.mounted.path()).unwrap() {
        let entry = entry.unwrap();
        let path = entry.path();
        assert!(
            path.is_dir() || fs::read(&path).is_ok(),
            "{path:?} is listed"
        );
    }
}

/// s3fs 1671 and 1818, mountpoint-s3's semantics: `//`, `.` and `..` in keys. What has a path is there all the same.
fn keys_without_a_path(fake: &Fake) {
    for key in [
        "exp//x", "exp/y", "/lead", "a/../b", "a/./c", "a/d", "./e", "../f", "//",
    ] {
        fake.put(key, b"1");
    }
    fake.put(&format!("{}/x", "l".repeat(256)), b"too long");
    let served = serve(&fake.uri(), |_| {});
    assert_eq!(
        listing(served.mounted.path()),
        ["d a", "d exp", "f 1 a/d", "f 1 exp/y"]
    );
    assert_eq!(fs::read(served.at("exp//y")).unwrap(), b"1");
}

/// mountpoint-s3 725, 256: a name that is an object and a directory, in different pages of the listing; and without the
/// directory.
fn a_file_and_a_directory(fake: &Fake) {
    logs();
    fake.put("out", b"shadowed");
    fake.put("out/shadow", b"1");
    // They sort between both.
    (0..1500).for_each(|n| fake.put(&format!("out-{n:04}"), b""));
    let served = serve(&fake.uri(), |_| {});
    let names = fs::read_dir(served.mounted.path()).unwrap();
    let names: Vec<_> = names.map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(names.iter().filter(|name| *name == "out").count(), 1);
    assert_eq!(names.len(), 1501);
    assert!(fs::metadata(served.at("out")).unwrap().is_dir());
    assert!(logged("name=\"out\""));
    fake.remove("out/shadow");
    std::thread::sleep(Duration::from_millis(1100));
    assert_eq!(fs::read(served.at("out")).unwrap(), b"shadowed");
}

/// s3fs 2393, pfio 380: names that begin or end alike.
fn names_that_begin_alike(fake: &Fake) {
    for key in [
        "b/file", "ab/cd", "bush/x", "bus-stop", "b-/x", "b./x", "b0",
    ] {
        fake.put(key, b"1");
    }
    let served = serve(&fake.uri(), |_| {});
    let error = fs::metadata(served.at("bus")).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotFound);
    same_as_a_directory(fake, &served);
}

/// s3fs 1872 and 2048: markers with and without contents, of nested directories, and times of what has none.
fn markers(fake: &Fake) {
    fake.put("m/", b"");
    fake.put("full/", b"contents of a directory");
    fake.put("n/o/", b"");
    fake.put("n/file", b"1");
    let served = serve(&fake.uri(), |_| {});
    same_as_a_directory(fake, &served);
    for name in ["m", "full", "n", "n/o", ""] {
        let time = fs::metadata(served.at(name)).unwrap().modified().unwrap();
        let age = SystemTime::now().duration_since(time).unwrap();
        assert!(age < Duration::from_secs(60), "{name}: {age:?}");
    }
    let time = fs::metadata(served.at("n/file"))
        .unwrap()
        .modified()
        .unwrap();
    let since = time.duration_since(SystemTime::UNIX_EPOCH).unwrap();
    assert_eq!(since, Duration::from_secs(1_354_040_105), "in UTC");
}

/// goofys 147, gcsfuse 165: an object that says it is compressed is read as it is stored.
fn compressed(fake: &Fake) {
    fake.put("data.gz", b"\x1f\x8b\x08 as it is stored");
    fake.bucket().objects.get_mut("p/data.gz").unwrap().headers = "\r\ncontent-encoding: gzip";
    same_as_a_directory(fake, &serve(&fake.uri(), |_| {}));
}

/// mountpoint-s3 152: the contents of an archived object can't be had, but all else can.
fn archived(fake: &Fake) {
    fake.put("archived", b"far away");
    fake.put("near", b"near");
    fake.bucket().objects.get_mut("p/archived").unwrap().refused = Some("InvalidObjectState");
    let served = serve(&fake.uri(), |_| {});
    assert_eq!(listing(served.mounted.path()), ["f 4 near", "f 8 archived"]);
    let error = fs::read(served.at("archived")).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::PermissionDenied);
    assert_eq!(fs::read(served.at("near")).unwrap(), b"near");
}

/// rclone 6600, rustfs 1596: a listing that says it goes on, and not how. It is an error, and no endless or short list.
fn a_listing_without_its_end(fake: &Fake) {
    (0..1500).for_each(|n| fake.put(&format!("long/{n:04}"), b"x"));
    fake.put("short/file", b"x");
    fake.bucket().no_token = true;
    let served = serve(&fake.uri(), |_| {});
    assert_eq!(fs::read(served.at("long/0001")).unwrap(), b"x");
    let mut list = fs::read_dir(served.at("long")).unwrap();
    let error = list.next().unwrap().unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::EIO));
    assert_eq!(listing(&served.at("short")), ["f 1 file"]);
    fake.bucket().no_token = false;
}

/// Stores whose listings have ETags without quotes: an open that trusts the listing works.
fn bare_etags(fake: &Fake) {
    fake.put("x", b"x");
    fake.bucket().bare_etags = true;
    let served = serve(&fake.uri(), |options| {
        options.ttl = Duration::from_secs(600)
    });
    assert_eq!(listing(served.mounted.path()), ["f 1 x"]);
    fake.bucket().asked.clear();
    assert_eq!(fs::read(served.at("x")).unwrap(), b"x");
    assert!(fake.bucket().asked.contains(&"GET p/x".to_owned()));
    fake.bucket().bare_etags = false;
}

/// s3fs 158, mountpoint-s3 1323: a directory of 100,000 names is listed whole, also by one who seeks.
fn a_large_directory(fake: &Fake) {
    (0..100_000).for_each(|n| fake.put(&format!("large/{n:06}"), b""));
    let served = serve(&fake.uri(), |_| {});
    let names = Command::new("ls")
        .arg("-U")
        .arg(served.at("large"))
        .output()
        .unwrap();
    assert!(names.status.success());
    assert_eq!(
        names.stdout.iter().filter(|byte| **byte == b'\n').count(),
        100_000
    );
}

/// mountpoint-s3 785 and 782: an object is put again, or removed, while `ttl=` keeps what the mount knows of it. A program
/// may get ESTALE once, and the next one what the store has.
fn changes_within_a_long_ttl(fake: &Fake) {
    fake.put("d/again", b"0123456789");
    fake.put("d/gone", b"0123456789");
    let served = serve(&fake.uri(), |options| {
        options.ttl = Duration::from_secs(600)
    });
    assert_eq!(listing(&served.at("d")), ["f 10 again", "f 10 gone"]);
    assert_eq!(fs::metadata(served.at("d/again")).unwrap().len(), 10);
    fake.put("d/again", &[b'n'; 100]);
    fake.remove("d/gone");
    let once = |name: &str| match fs::read(served.at(name)) {
        Ok(found) => panic!("{name}: {found:?} is no more"),
        Err(error) => assert_eq!(error.raw_os_error(), Some(libc::ESTALE), "{name}"),
    };
    once("d/again");
    once("d/gone");
    assert_eq!(fs::read(served.at("d/again")).unwrap(), [b'n'; 100]);
    let error = fs::read(served.at("d/gone")).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotFound);
}

/// rclone 6053: an object that is put again and again, of the same length and within the same second.
fn the_same_length_each_time(fake: &Fake) {
    let served = serve(&fake.uri(), |_| {});
    for n in 0..50 {
        let content = format!("foo{n:04}");
        fake.put("test", content.as_bytes());
        assert_eq!(fs::read_to_string(served.at("test")).unwrap(), content);
    }
}

/// s3fs 715 and 15: what was not read of a cached file is no zeros to a later mount.
fn parts_in_the_cache_of_a_later_mount(fake: &Fake) {
    let content = bytes(5 * MIB + 99, 7);
    fake.put("film", &content);
    let cache = tempfile::tempdir().unwrap();
    for at in [5 * MIB, 2 * MIB + 3, 0] {
        let served = serve(&fake.uri(), |options| {
            options.cache_dir = Some(cache.path().into());
        });
        let mut part = [0; 50];
        let file = File::open(served.at("film")).unwrap();
        file.read_exact_at(&mut part, at as u64).unwrap();
        assert_eq!(part, content[at..][..50]);
    }
    let served = serve(&fake.uri(), |options| {
        options.cache_dir = Some(cache.path().into());
    });
    assert!(fs::read(served.at("film")).unwrap() == content);
}

/// rclone 6063, juicefs 6363: reading the first byte again and again asks the store once, and small reads here and there
/// get little more than what they read.
fn small_reads_get_little(fake: &Fake) {
    let content = bytes(64 * MIB, 8);
    fake.put("image", &content);
    let served = serve(&fake.uri(), |_| {});
    let got = || count(&served, "store_read_bytes");
    for _ in 0..10 {
        let mut first = [0];
        let file = File::open(served.at("image")).unwrap();
        rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::Random).unwrap();
        file.read_exact_at(&mut first, 0).unwrap();
        assert_eq!(first[0], content[0]);
    }
    let first = got();
    assert!(first <= 2 * MIB as u64, "{first} bytes for one");
    let file = File::open(served.at("image")).unwrap();
    rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::Random).unwrap();
    let mut random = fastrand::Rng::with_seed(3);
    for _ in 0..50 {
        let (at, mut part) = (random.usize(..content.len() - 4096), [0; 4096]);
        file.read_exact_at(&mut part, at as u64).unwrap();
        assert!(part == content[at..][..4096], "{at}");
    }
    let all = got() - first;
    assert!(
        all <= 50 * (2 << 16) + MIB as u64,
        "{all} bytes for 200 KiB"
    );
}

/// s3fs 2616: two readers of more than the cache holds don't take each other's pieces away again and again.
fn two_readers_and_a_small_cache(fake: &Fake) {
    let content = bytes(100 * MIB, 9);
    fake.put("large", &content);
    let served = serve(&fake.uri(), |options| {
        options.cache_size = Some(64 << 20);
    });
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| assert!(fs::read(served.at("large")).unwrap() == content));
        }
    });
    let got = count(&served, "store_read_bytes");
    assert!(got <= 3 * content.len() as u64, "{got} bytes");
}

/// goofys 23: a listing has `.` and `..`.
fn dots(fake: &Fake) {
    fake.put("d/x", b"x");
    let served = serve(&fake.uri(), |_| {});
    for directory in ["", "d"] {
        let mut ls = Command::new("ls");
        let all = ls.arg("-a").arg(served.at(directory)).output().unwrap();
        let all = String::from_utf8(all.stdout).unwrap();
        assert!(all.starts_with(".\n..\n"), "{directory:?}: {all}");
    }
}

/// geesefs 71: a listing after another client has removed objects shows none of them, and is no error.
fn removed_by_another_client(fake: &Fake) {
    (0..20).for_each(|n| fake.put(&format!("d/{n:02}"), b"x"));
    let served = serve(&fake.uri(), |_| {});
    assert_eq!(listing(&served.at("d")).len(), 20);
    (0..10).for_each(|n| fake.remove(&format!("d/{n:02}")));
    let all = Command::new("ls").arg("-l").arg(served.at("d")).output();
    let all = all.unwrap();
    assert!(all.status.success(), "{all:?}");
    // A line says how many blocks there are.
    assert_eq!(all.stdout.iter().filter(|c| **c == b'\n').count(), 11);
}

/// mountpoint-s3 1614: what is there is found, while others list the directory and new names come.
fn found_among_others(fake: &Fake) {
    (0..700).for_each(|n| fake.put(&format!("work/{n:03}"), b"x"));
    let served = serve(&fake.uri(), |options| options.ttl = Duration::from_secs(1));
    let over = std::sync::atomic::AtomicBool::new(false);
    let is_over = || over.load(std::sync::atomic::Ordering::Relaxed);
    std::thread::scope(|scope| {
        for seed in 0..6 {
            let (served, is_over) = (&served, &is_over);
            scope.spawn(move || {
                let mut random = fastrand::Rng::with_seed(seed);
                while !is_over() {
                    let name = format!("work/{:03}", random.u32(..700));
                    assert_eq!(fs::read(served.at(&name)).unwrap(), b"x", "{name}");
                    if random.u32(..50) == 0 {
                        let names = fs::read_dir(served.at("work")).unwrap();
                        assert!(names.count() >= 700);
                    }
                }
            });
        }
        for n in 700..1100 {
            fake.put(&format!("work/{n}"), b"x");
            std::thread::sleep(Duration::from_millis(5));
        }
        over.store(true, std::sync::atomic::Ordering::Relaxed);
    });
}

/// mountpoint-s3 974: a store that refuses an expired token is an error, and none any more when it takes the next one.
fn an_expired_token(fake: &Fake) {
    let content = bytes(3 * MIB, 1);
    fake.put("x", &content);
    let served = serve(&fake.uri(), |_| {});
    let file = File::open(served.at("x")).unwrap();
    let refuse = |code| fake.bucket().objects.get_mut("p/x").unwrap().refused = code;
    refuse(Some("ExpiredToken"));
    let mut part = [0; 100];
    let error = file.read_exact_at(&mut part, 0).unwrap_err();
    assert!(
        [Some(libc::EIO), Some(libc::EACCES)].contains(&error.raw_os_error()),
        "{error}"
    );
    refuse(None);
    file.read_exact_at(&mut part, 0).unwrap();
    assert_eq!(part, content[..100]);
    assert!(fs::read(served.at("x")).unwrap() == content);
}

/// s3fs 197: a directory with a name that may not be looked at is listed, with metadata, too.
fn a_forbidden_name(fake: &Fake) {
    fake.put("d/open", b"x");
    fake.put("d/closed", b"x");
    fake.bucket().objects.get_mut("p/d/closed").unwrap().hidden = true;
    for metadata in [false, true] {
        let served = serve(&fake.uri(), |options| options.metadata = metadata);
        let names = fs::read_dir(served.at("d")).unwrap();
        let names = names.map(|entry| entry.unwrap().file_name());
        assert_eq!(names.count(), 2);
        assert_eq!(fs::read(served.at("d/open")).unwrap(), b"x");
        let error = fs::read(served.at("d/closed")).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::PermissionDenied);
    }
}

#[test]
fn of_other_mounts() {
    if !has(&[Need::Fuse]) {
        return;
    }
    let fake = Fake::start();
    let reports = [
        ("names", names as fn(&Fake)),
        ("white space", white_space),
        ("keys without a path", keys_without_a_path),
        ("a file and a directory", a_file_and_a_directory),
        ("names that begin alike", names_that_begin_alike),
        ("markers", markers),
        ("compressed", compressed),
        ("archived", archived),
        ("a listing without its end", a_listing_without_its_end),
        ("bare ETags", bare_etags),
        ("a large directory", a_large_directory),
        ("changes within a long ttl", changes_within_a_long_ttl),
        ("the same length each time", the_same_length_each_time),
        ("parts in the cache", parts_in_the_cache_of_a_later_mount),
        ("small reads", small_reads_get_little),
        ("two readers", two_readers_and_a_small_cache),
        ("dots", dots),
        ("removed by another client", removed_by_another_client),
        ("found among others", found_among_others),
        ("an expired token", an_expired_token),
        ("a forbidden name", a_forbidden_name),
    ];
    let mut failed = Vec::new();
    for (name, report) in reports {
        fake.bucket().objects.clear();
        let caught = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| report(&fake)));
        failed.extend(caught.is_err().then_some(name));
    }
    assert!(failed.is_empty(), "{failed:?}");
}
