//! What users of other mounts of object stores have reported, with what a directory of the same names does beside it.

use std::collections::BTreeMap;
use std::fs;
use std::io::ErrorKind;
use std::process::Command;
use std::time::{Duration, SystemTime};

use uvfs_testing::{Need, has};

use crate::bad::{logged, logs};
use crate::fake::Fake;
use crate::stores::At;
use crate::{Served, listing, serve};

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
    ];
    let mut failed = Vec::new();
    for (name, report) in reports {
        fake.bucket().objects.clear();
        let caught = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| report(&fake)));
        failed.extend(caught.is_err().then_some(name));
    }
    assert!(failed.is_empty(), "{failed:?}");
}
