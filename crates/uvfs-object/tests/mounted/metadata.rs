//! User metadata: types, modes, owners and times of objects, and what asking for them costs.

use std::fs::{self, File, OpenOptions};
use std::io::{Read, Write};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use uvfs_object::Options;
use uvfs_testing::{Need, has};

use crate::fake::{Bucket, Fake};
use crate::stores::Seaweed;
use crate::{At, Served, serve};

fn with_metadata(options: &mut Options) {
    options.metadata = true;
    (options.uid, options.gid) = (11, 12);
    (options.file_mode, options.dir_mode) = (0o604, 0o705);
}

/// Type, mode, owner, times and link of everything, as one find(1) sees them.
fn attributes(path: &Path) -> Vec<String> {
    let out = Command::new("find")
        .arg(path)
        .args([
            "-mindepth",
            "1",
            "-printf",
            "%P %y %m %U:%G %s %T@ %A@ %C@ %l\n",
        ])
        .output()
        .unwrap();
    assert!(out.status.success(), "{out:?}");
    let text = String::from_utf8(out.stdout).unwrap();
    let mut lines: Vec<_> = text
        .lines()
        .map(|line| line.trim_end().to_owned())
        .collect();
    lines.sort();
    lines
}

fn fill(bucket: &mut Bucket) {
    let owners = [("uid", "1001"), ("gid", "1002")];
    let time = ("mtime", "1500000000.5");
    // As s3fs writes them.
    bucket.put_with(
        "p/by s3fs",
        b"file",
        &[
            ("mode", "33184"),
            owners[0],
            owners[1],
            time,
            ("atime", "1500000001"),
            ("ctime", "1500000002"),
        ],
    );
    bucket.put_with("p/", b"", &[("mode", "16841"), ("uid", "1003")]);
    bucket.put_with("p/dir/", b"", &[("mode", "16840"), owners[0], owners[1]]);
    bucket.put_with("p/dir/link", b"../by s3fs", &[("mode", "41471"), time]);
    bucket.put_with("p/fifo", b"", &[("mode", "4516")]);
    bucket.put_with("p/null", b"", &[("mode", "8630"), ("rdev", "259")]);
    // As rclone does.
    bucket.put_with(
        "p/by rclone",
        b"rclone",
        &[
            ("mode", "100750"),
            owners[0],
            ("mtime", "1500000000.123456789"),
            ("atime", "2017-07-14T04:40:01.25+02:00"),
        ],
    );
    bucket.put_with("p/set-uid", b"", &[("mode", "35309")]);
    bucket.put_with(
        "p/nonsense",
        b"x",
        &[
            ("mode", "99999999"),
            ("uid", "root"),
            ("mtime", "soon"),
            ("rdev", "-1"),
        ],
    );
    bucket.put("p/plain", b"plain");
    bucket.put("p/no marker/file", b"");
}

const FOUND: [&str; 11] = [
    "by rclone f 750 1001:12 6 1500000000.1234567890 1500000001.2500000000 1354040105.0000000000",
    "by s3fs f 640 1001:1002 4 1500000000.5000000000 1500000001.0000000000 1500000002.0000000000",
    "dir d 710 1001:1002 0",
    "dir/link l 777 11:12 10 1500000000.5000000000 1500000000.5000000000 1354040105.0000000000 ../by s3fs",
    "fifo p 644 11:12 0 1354040105.0000000000 1354040105.0000000000 1354040105.0000000000",
    "no marker d 705 11:12 0",
    "no marker/file f 604 11:12 0 1354040105.0000000000 1354040105.0000000000 1354040105.0000000000",
    "nonsense f 604 11:12 1 1354040105.0000000000 1354040105.0000000000 1354040105.0000000000",
    "null c 666 11:12 0 1354040105.0000000000 1354040105.0000000000 1354040105.0000000000",
    "plain f 604 11:12 5 1354040105.0000000000 1354040105.0000000000 1354040105.0000000000",
    "set-uid f 4755 11:12 0 1354040105.0000000000 1354040105.0000000000 1354040105.0000000000",
];

/// Lines of [`attributes`] are as expected, but for the times of directories.
fn check(found: &[String]) {
    assert_eq!(found.len(), FOUND.len(), "{found:#?}");
    for (found, expected) in found.iter().zip(FOUND) {
        assert!(found.starts_with(expected), "{found} is not {expected}");
    }
}

fn names_as_their_metadata_says(fake: &Fake) {
    fill(&mut fake.bucket());
    let served = serve(&fake.uri(), with_metadata);
    // By a listing first, and name by name first.
    check(&attributes(served.mounted.path()));
    let root = fs::metadata(served.mounted.path()).unwrap();
    assert_eq!((root.mode(), root.uid()), (0o040_711, 1003));
    let second = serve(&fake.uri(), with_metadata);
    for line in FOUND {
        let name = line.split(['/']).next().unwrap();
        let name = [" f ", " d ", " p ", " c "]
            .iter()
            .find_map(|kind| Some(name.split_once(kind)?.0));
        fs::symlink_metadata(second.at(name.unwrap_or("dir/link"))).unwrap();
    }
    check(&attributes(second.mounted.path()));
    assert_eq!(fs::read_to_string(served.at("dir/link")).unwrap(), "file");
    let null = fs::metadata(served.at("null")).unwrap();
    assert_eq!(
        (null.rdev(), null.file_type().is_char_device()),
        (259, true)
    );
    // The test's mounts, as the command's, have no devices.
    let error = File::open(served.at("null")).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::EACCES));
    // The kernel itself serves a FIFO.
    let nonblocking = |options: &mut OpenOptions| {
        options
            .custom_flags(libc::O_NONBLOCK)
            .open(served.at("fifo"))
    };
    let mut reader = nonblocking(File::options().read(true)).unwrap();
    let mut writer = nonblocking(File::options().write(true)).unwrap();
    writer.write_all(b"through").unwrap();
    let mut data = [0; 7];
    reader.read_exact(&mut data).unwrap();
    assert_eq!(&data, b"through");
}

/// Without the option nothing of it counts, whatever a program asks for.
fn names_without_metadata(fake: &Fake) {
    let served = serve(&fake.uri(), |options| {
        with_metadata(options);
        options.metadata = false;
    });
    for line in attributes(served.mounted.path()) {
        let kinds = [" f 604 11:12 ", " d 705 11:12 "];
        assert!(kinds.iter().any(|kind| line.contains(kind)), "{line}");
    }
    assert_eq!(fs::read(served.at("dir/link")).unwrap(), b"../by s3fs");
}

/// The type of a name changes in the store.
fn a_type_changes(fake: &Fake) {
    fake.bucket().put("p/turns", b"plain");
    let served = serve(&fake.uri(), with_metadata);
    let path = served.at("turns");
    let open = File::open(&path).unwrap();
    let after_a_second = |expected: fn(&fs::Metadata) -> bool| {
        std::thread::sleep(Duration::from_millis(1100));
        let now = fs::symlink_metadata(&path).unwrap();
        assert!(expected(&now), "{now:?}");
    };
    fake.bucket()
        .put_with("p/turns", b"by s3fs", &[("mode", "41471")]);
    after_a_second(|now| now.is_symlink());
    assert_eq!(fs::read_to_string(&path).unwrap(), "file");
    fake.bucket().put_with("p/turns", b"", &[("mode", "4516")]);
    after_a_second(|now| now.file_type().is_fifo());
    // Metadata alone: the contents, and the ETag, stay.
    let etag = fake.bucket().objects["p/turns"].etag.clone();
    fake.bucket()
        .put_with("p/turns", b"", &[("mode", "33188"), ("mtime", "1")]);
    fake.bucket().objects.get_mut("p/turns").unwrap().etag = etag;
    after_a_second(|now| now.is_file() && now.mtime() == 1);
    drop(open);
}

/// A target that can't be one is an error, and no crash.
fn targets_that_are_none(fake: &Fake) {
    for (name, target, errno) in [
        ("p/empty", &b""[..], libc::EIO),
        ("p/nul", b"a\0b", libc::EIO),
        ("p/long", &[b'a'; 5000], libc::ENAMETOOLONG),
    ] {
        fake.bucket().put_with(name, target, &[("mode", "41471")]);
        let served = serve(&fake.uri(), with_metadata);
        let error = fs::read_link(served.at(&name[2..])).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(errno), "{name}");
        fake.bucket().objects.remove(name);
    }
}

/// What listings cost, as docs/remote.md has it.
fn requests_of_a_listing(fake: &Fake) {
    fake.bucket().objects.clear();
    for n in 0..2500 {
        fake.bucket().put(&format!("p/d/{n:04}"), b"x");
    }
    let list = |served: &Served, how: &str| {
        let out = Command::new("ls")
            .arg(how)
            .arg(served.at("d"))
            .output()
            .unwrap();
        assert!(out.status.success(), "{out:?}");
        assert!(String::from_utf8_lossy(&out.stdout).lines().count() >= 2500);
        let mut bucket = fake.bucket();
        let asked = std::mem::take(&mut bucket.asked);
        let heads = asked.iter().filter(|asked| asked.starts_with("HEAD p/d/"));
        let lists = asked.iter().filter(|asked| *asked == "LIST p/d/");
        (lists.count(), heads.count())
    };
    // Names stay valid, however slow the machine is.
    let long = |options: &mut Options| options.ttl = Duration::from_secs(600);
    let both = |options: &mut Options| {
        with_metadata(options);
        long(options);
    };
    let served = serve(&fake.uri(), long);
    // Three pages, and the lookup of the directory.
    assert_eq!(list(&served, "-l"), (4, 0));
    let served = serve(&fake.uri(), both);
    let (lists, heads) = list(&served, "-U");
    assert!(lists == 4 && heads < 400, "{lists} {heads}");
    let served = serve(&fake.uri(), both);
    let (lists, heads) = list(&served, "-l");
    assert!(heads >= 2500 && lists == 4, "{lists} {heads}");
}

#[test]
fn user_metadata() {
    if !has(&[Need::Fuse]) {
        return;
    }
    let fake = Fake::start();
    names_as_their_metadata_says(&fake);
    names_without_metadata(&fake);
    a_type_changes(&fake);
    targets_that_are_none(&fake);
    requests_of_a_listing(&fake);
}

/// The same of a store that stores it.
pub fn metadata_of_a_real_store(store: &Seaweed) {
    store.put_with(
        "meta/file",
        "file",
        &[
            ("mode", "33184"),
            ("uid", "1001"),
            ("mtime", "1500000000.5"),
        ],
    );
    store.put_with("meta/link", "file", &[("mode", "41471")]);
    let served = serve(&store.uri(), with_metadata);
    let meta = fs::metadata(served.at("meta/link")).unwrap();
    assert_eq!((meta.mode(), meta.uid(), meta.gid()), (0o100_640, 1001, 12));
    assert_eq!(
        (meta.mtime(), meta.mtime_nsec()),
        (1_500_000_000, 500_000_000)
    );
    assert_eq!(
        fs::read_link(served.at("meta/link")).unwrap(),
        Path::new("file")
    );
    assert_eq!(fs::read(served.at("meta/link")).unwrap(), b"file");
}
