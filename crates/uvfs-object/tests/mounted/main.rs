//! Object stores behind real mounts: each promise of docs/remote.md, over a directory of the host and over S3 (SeaweedFS).

mod bad;
mod cluster;
mod counts;
mod fake;
mod kept;
mod metadata;
mod model;
mod others;
mod pair;
#[allow(dead_code, reason = "shared with the tests of images in stores")]
mod proxy;
mod reports;
mod stores;
mod walk;
mod writes;

use std::fs::{self, File};
use std::io::{ErrorKind, Read};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use rustix::mount::MountFlags;
use uvfs_object::{ObjectFs, Options, Writes};
use uvfs_server::{Mounted, mount};
use uvfs_testing::{Need, has};

use proxy::{Mode, Proxy};
use stores::{At, DirectoryStore, Seaweed};

const MIB: usize = 1 << 20;

/// A mount of a store, with its own cache unless it is given one.
struct Served {
    mounted: Mounted<ObjectFs>,
    scratch: tempfile::TempDir,
}

fn serve(uri: &str, change: impl FnOnce(&mut Options)) -> Served {
    let scratch = tempfile::tempdir().unwrap();
    let point = scratch.path().join("mount");
    fs::create_dir(&point).unwrap();
    let mut options = Options::default();
    options.ttl = Duration::ZERO;
    options.cache_dir = Some(scratch.path().join("cache"));
    change(&mut options);
    let mut how = uvfs_server::Options::named("objects");
    if options.writes == Writes::No {
        how = how.read_only();
    }
    let fs = ObjectFs::open(uri, options).unwrap();
    // As the command mounts.
    how.mount.flags |= MountFlags::NOSUID | MountFlags::NODEV;
    let mounted = mount(fs, &point, how).unwrap();
    Served { mounted, scratch }
}

impl Served {
    fn at(&self, path: &str) -> PathBuf {
        self.mounted.path().join(path)
    }

    fn backed_opens(&self) -> u64 {
        self.mounted.session().report().backed_opens
    }

    fn cache(&self) -> PathBuf {
        let dir = self.scratch.path().join("cache");
        let store = fs::read_dir(dir).unwrap().next().unwrap();
        store.unwrap().path()
    }
}

fn bytes(len: usize, seed: u64) -> Vec<u8> {
    let mut random = fastrand::Rng::with_seed(seed);
    let mut bytes = vec![0; len];
    random.fill(&mut bytes);
    bytes
}

/// What find(1) shows below a directory: type, size and path.
fn listing(path: &Path) -> Vec<String> {
    let out = Command::new("find")
        .arg(path)
        .args(["-mindepth", "1", "-type", "f", "-printf", "%y %s %P\n"])
        .args(["-o", "-mindepth", "1", "-printf", "%y %P\n"])
        .output()
        .unwrap();
    assert!(out.status.success(), "{out:?}");
    let text = String::from_utf8(out.stdout).unwrap();
    let mut lines: Vec<_> = text.lines().map(str::to_owned).collect();
    lines.sort();
    lines
}

fn names_are_as_in_the_store(store: &(impl At + Sync)) {
    store.put("a/b/one", b"1");
    store.put("a/b/two", b"22");
    store.put("a/empty", b"");
    store.put("top", b"333");
    // More than one answer to a listing has.
    std::thread::scope(|scope| {
        for part in 0..15 {
            let put = move || {
                (0..100).for_each(|n| store.put(&format!("many/{:04}", 100 * part + n), b"m"))
            };
            scope.spawn(put);
        }
    });
    store.put_directory("marked");
    let served = serve(&store.uri(), |_| {});
    let shown = listing(served.mounted.path());
    let mut expected: Vec<_> = (0..1500).map(|n| format!("f 1 many/{n:04}")).collect();
    let others = [
        "d a",
        "d a/b",
        "d many",
        "d marked",
        "f 0 a/empty",
        "f 1 a/b/one",
        "f 2 a/b/two",
        "f 3 top",
    ];
    expected.extend(others.map(str::to_owned));
    expected.sort();
    assert_eq!(shown, expected);
    for missing in ["none", "a/b/none", "top/below", "a/b/one/below"] {
        let error = fs::metadata(served.at(missing)).unwrap_err();
        let kinds = [ErrorKind::NotFound, ErrorKind::NotADirectory];
        assert!(kinds.contains(&error.kind()), "{missing}: {error}");
    }
    assert_eq!(fs::read(served.at("a/empty")).unwrap(), b"");
    assert_eq!(fs::read(served.at("a/b/two")).unwrap(), b"22");
    let error = fs::write(served.at("new"), b"x").unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ReadOnlyFilesystem);
    // The numbers are the same in each mount.
    let number = |served: &Served| fs::metadata(served.at("a/b/one")).unwrap().ino();
    let again = serve(&store.uri(), |_| {});
    assert_eq!(number(&served), number(&again));
}

/// Reads of random ranges, small and large, by several threads, give what was put.
fn random_reads_give_what_was_put(store: &(impl At + Sync)) {
    let sizes = [1, 65_535, 65_536, 65_537, MIB, MIB + 1, 9 * MIB + 12_345];
    let contents = sizes.map(|size| bytes(size, size as u64));
    for (n, content) in contents.iter().enumerate() {
        store.put(&format!("r/{n}"), content);
    }
    let served = serve(&store.uri(), |_| {});
    std::thread::scope(|scope| {
        for seed in 0..4 {
            let (served, contents) = (&served, &contents);
            scope.spawn(move || {
                let mut random = fastrand::Rng::with_seed(seed);
                for _ in 0..60 {
                    let n = random.usize(..contents.len());
                    let (file, content) = (File::open(served.at(&format!("r/{n}"))), &contents[n]);
                    let file = file.unwrap();
                    let at = random.usize(..content.len() + 1000);
                    let mut data = vec![0; random.usize(1..300_000)];
                    let len = file.read_at(&mut data, at as u64).unwrap();
                    let rest = content.get(at..).unwrap_or_default();
                    let expected = &rest[..rest.len().min(data.len())];
                    assert!(
                        len == expected.len() || len > 0 && len < expected.len(),
                        "{len}"
                    );
                    assert!(data[..len] == expected[..len], "{n} at {at}");
                }
            });
        }
    });
    for (n, content) in contents.iter().enumerate() {
        assert!(
            fs::read(served.at(&format!("r/{n}"))).unwrap() == *content,
            "{n}"
        );
    }
}

/// A file that the cache has whole is read by the kernel, and so is one of an earlier mount once it was verified.
fn a_complete_file_is_read_by_the_kernel(store: &(impl At + Sync)) {
    let content = bytes(5 * MIB, 1);
    store.put("whole", &content);
    let served = serve(&store.uri(), |_| {});
    assert!(fs::read(served.at("whole")).unwrap() == content);
    assert_eq!(served.backed_opens(), 0);
    closed(&served);
    assert!(fs::read(served.at("whole")).unwrap() == content);
    assert_eq!(served.backed_opens(), 1);
    // A plain open is left: another open must not be of the other kind.
    store.put("two", &content);
    let plain = File::open(served.at("two")).unwrap();
    assert!(fs::read(served.at("two")).unwrap() == content);
    assert!(fs::read(served.at("two")).unwrap() == content);
    assert_eq!(served.backed_opens(), 1);
    drop(plain);
}

/// RELEASE comes after close(2) has returned.
fn closed(served: &Served) {
    let _ = served;
    std::thread::sleep(Duration::from_millis(100));
}

/// A reader of an object that changes gets one version or ESTALE, and an open after the change gets the new one.
fn versions_are_never_mixed(store: &(impl At + Sync)) {
    let (old, new) = (vec![b'o'; 40 * MIB], vec![b'n'; 40 * MIB]);
    store.put("v", &old);
    let served = serve(&store.uri(), |_| {});
    let file = File::open(served.at("v")).unwrap();
    let mut data = vec![0; 4096];
    file.read_exact_at(&mut data, 0).unwrap();
    store.put("v", &new);
    let mut stale = false;
    for at in (0..40).rev() {
        match file.read_exact_at(&mut data, (at * MIB) as u64) {
            Ok(()) => assert!(data.iter().all(|byte| *byte == b'o'), "{at}"),
            Err(error) => {
                assert_eq!(error.raw_os_error(), Some(libc::ESTALE), "{error}");
                stale = true;
            }
        }
    }
    assert!(stale, "40 MiB were not read at once");
    // While the old one is open.
    assert!(fs::read(served.at("v")).unwrap() == new);
    let (one, two) = (
        file.metadata().unwrap(),
        fs::metadata(served.at("v")).unwrap(),
    );
    assert_eq!(one.ino(), two.ino());
    drop(file);
    // A version that is cached whole is read to its end.
    let mut file = File::open(served.at("v")).unwrap();
    store.put("v", b"short");
    let mut all = Vec::new();
    file.read_to_end(&mut all).unwrap();
    assert!(all == new);
    assert_eq!(fs::read(served.at("v")).unwrap(), b"short");
    drop(file);
    store.remove("v");
    let error = File::open(served.at("v")).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotFound);
}

/// What an earlier mount cached is used, but for what is damaged.
fn a_next_mount_uses_the_cache(store: &(impl At + Sync)) {
    let content = bytes(3 * MIB, 2);
    store.put("kept", &content);
    let cache = tempfile::tempdir().unwrap();
    let with_cache = |options: &mut Options| options.cache_dir = Some(cache.path().to_owned());
    let served = serve(&store.uri(), with_cache);
    assert!(fs::read(served.at("kept")).unwrap() == content);
    drop(served);
    let place = fs::read_dir(cache.path())
        .unwrap()
        .next()
        .unwrap()
        .unwrap()
        .path();
    let data = fs::read_dir(&place)
        .unwrap()
        .map(|entry| entry.unwrap().path());
    let data = data.filter(|path| path.extension().is_some_and(|end| end == "data"));
    let data: Vec<_> = data.collect();
    assert_eq!(data.len(), 1);
    let file = File::options().write(true).open(&data[0]).unwrap();
    file.write_all_at(b"damage", MIB as u64).unwrap();
    let served = serve(&store.uri(), with_cache);
    assert!(fs::read(served.at("kept")).unwrap() == content);
    closed(&served);
    assert!(fs::read(served.at("kept")).unwrap() == content);
    assert_eq!(served.backed_opens(), 1);
    // A second mount at the same time has a cache of its own.
    let second = serve(&store.uri(), with_cache);
    assert!(fs::read(second.at("kept")).unwrap() == content);
    assert_eq!(fs::read_dir(cache.path()).unwrap().count(), 2);
}

/// The cache stays within its limit, also for one object that is larger.
fn the_cache_has_a_limit(store: &(impl At + Sync)) {
    let limit = 64 * MIB;
    let content = bytes(100 * MIB, 3);
    store.put("large", &content);
    for n in 0..8 {
        store.put(&format!("l/{n}"), &content[n * MIB..][..12 * MIB]);
    }
    let served = serve(&store.uri(), |options| {
        options.cache_size = Some(limit as u64)
    });
    let blocks = || {
        let sizes = fs::read_dir(served.cache()).unwrap();
        let sizes = sizes.map(|entry| entry.unwrap().metadata().unwrap().blocks() * 512);
        sizes.sum::<u64>()
    };
    for _ in 0..2 {
        assert!(fs::read(served.at("large")).unwrap() == content);
        assert!(blocks() <= limit as u64 + (8 << 20), "{}", blocks());
        for n in 0..8 {
            let part = fs::read(served.at(&format!("l/{n}"))).unwrap();
            assert!(part == content[n * MIB..][..12 * MIB], "{n}");
        }
        assert!(blocks() <= limit as u64 + (8 << 20), "{}", blocks());
    }
}

/// Characters that mean something in a URL, in XML, or to a shell.
fn any_name_is_found_again(store: &(impl At + Sync)) {
    let names = [
        "sp ace",
        " lead",
        "per%cent",
        "%2F",
        "plus+",
        "qu?e",
        "ha#sh",
        "\u{fc}ml\u{e4}ut",
        "a\u{308}",
        "\u{65e5}\u{672c}",
        "a&b",
        "a;b",
        "a=b",
        "a:b",
        "a@b",
        "a,b",
        "q\"q",
        "q'q",
        "<x>",
        "tab\tx",
        "~t",
        "*",
        "[b]",
        "{c}",
        "$d",
        "!",
        "|",
        "^",
        "`",
        "..dots",
        ".hidden",
        "...",
        "-n",
        "x.",
        "\u{1f980}",
    ];
    let names: Vec<_> = names.iter().chain(store.names()).copied().collect();
    for &name in &names {
        store.put(&format!("names/{name}"), name.as_bytes());
        store.put(&format!("names/in {name}/{name}"), name.as_bytes());
    }
    let long = "l".repeat(255);
    store.put(&format!("names/{long}"), b"long");
    let served = serve(&store.uri(), |_| {});
    // Each by its own name first, and then as a listing has it.
    for name in &names {
        let path = served.at("names").join(name);
        assert_eq!(
            fs::read(&path).unwrap_or_default(),
            name.as_bytes(),
            "{name:?}"
        );
        let path = served.at("names").join(format!("in {name}")).join(name);
        assert_eq!(
            fs::read(&path).unwrap_or_default(),
            name.as_bytes(),
            "in {name:?}"
        );
    }
    assert_eq!(fs::read(served.at("names").join(&long)).unwrap(), b"long");
    let listed = fs::read_dir(served.at("names")).unwrap();
    let mut listed: Vec<_> =
        (listed.map(|entry| entry.unwrap().file_name().into_string().unwrap())).collect();
    listed.sort();
    let inside = names.iter().map(|name| format!("in {name}"));
    let mut expected: Vec<_> = names
        .iter()
        .map(|name| name.to_string())
        .chain(inside)
        .collect();
    expected.push(long);
    expected.sort();
    assert_eq!(listed, expected);
    // OpenDAL cuts the space off: the name must not lead to another object.
    let cut = fs::metadata(served.at("names/x. ")).unwrap_err();
    assert_eq!(cut.kind(), ErrorKind::NotFound);
    let too_long = "l".repeat(256);
    let error = fs::metadata(served.at("names").join(too_long)).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::ENAMETOOLONG));
}

fn reads(store: &(impl At + Sync)) {
    names_are_as_in_the_store(store);
    any_name_is_found_again(store);
    random_reads_give_what_was_put(store);
    a_complete_file_is_read_by_the_kernel(store);
    versions_are_never_mixed(store);
    a_next_mount_uses_the_cache(store);
}

fn all(store: &(impl At + Sync)) {
    reads(store);
    the_cache_has_a_limit(store);
    model::random_calls(store);
    model::versions_under_readers(store);
    writes::all(store);
}

#[test]
fn over_a_directory_of_the_host() {
    if has(&[Need::Fuse]) {
        all(&DirectoryStore::new());
    }
}

#[test]
fn over_s3() {
    if !has(&[Need::Fuse, Need::Program("weed"), Need::Program("setpriv")]) {
        return;
    }
    let store = Seaweed::start();
    all(&store);
    writes::parts_go_while_a_file_is_written(&store);
    writes::a_file_larger_than_the_cache_streams(&store);
    pair::a_file_that_changed_is_renamed(&store);
    pair::a_file_that_is_gone_is_made_anew(&store);
    pair::two_mounts_write(&store);
    writes::a_large_file_is_not_overwritten(&store);
    metadata::metadata_of_a_real_store(&store);
    keys_that_no_path_can_name_are_hidden(&store);
    a_bad_store_is_an_error_in_time(&store);
    a_bucket_that_is_missing_is_refused(&store);
}

fn keys_that_no_path_can_name_are_hidden(store: &Seaweed) {
    store.put("odd/plain", b"1");
    store.put("odd/both", b"hidden by the directory");
    store.put("odd/both/below", b"2");
    let served = serve(&store.uri(), |_| {});
    let shown = listing(&served.at("odd"));
    // SeaweedFS keeps no object that is also a prefix: the directory is what every store shows.
    assert!(shown.contains(&"f 1 plain".to_owned()), "{shown:?}");
    assert!(shown.contains(&"d both".to_owned()), "{shown:?}");
    assert_eq!(fs::read(served.at("odd/both/below")).unwrap(), b"2");
}

/// A store that stalls, refuses or breaks off: an error within the deadline, no wrong data, and all is well when it is.
fn a_bad_store_is_an_error_in_time(store: &Seaweed) {
    let content = bytes(30 * MIB, 4);
    store.put("bad", &content);
    let proxy = Proxy::start(store.address());
    let uri = store.uri_at(proxy.address());
    let served = serve(&uri, |options| {
        options.timeout = Duration::from_secs(2);
        options.ttl = Duration::from_secs(600);
    });
    let file = File::open(served.at("bad")).unwrap();
    let mut data = vec![0; 64 << 10];
    file.read_exact_at(&mut data, 0).unwrap();
    for (n, mode) in [Mode::Stall, Mode::Refuse, Mode::Unavailable, Mode::Cut]
        .into_iter()
        .enumerate()
    {
        proxy.set(mode);
        let at = (10 + n) * MIB;
        let begun = Instant::now();
        match file.read_exact_at(&mut data, at as u64) {
            // The kernel's readahead may have had it.
            Ok(()) => assert!(data == content[at..][..64 << 10], "{mode:?}"),
            Err(error) => assert_eq!(error.raw_os_error(), Some(libc::EIO), "{mode:?}: {error}"),
        }
        assert!(
            begun.elapsed() < Duration::from_secs(20),
            "{mode:?}: {:?}",
            begun.elapsed()
        );
        proxy.set(Mode::Pass);
        file.read_exact_at(&mut data, at as u64).unwrap();
        assert!(data == content[at..][..64 << 10], "after {mode:?}");
    }
}

fn a_bucket_that_is_missing_is_refused(store: &Seaweed) {
    let uri = store.uri().replace("s3://", "s3://no-such-");
    let scratch = tempfile::tempdir().unwrap();
    let mut options = Options::default();
    options.ttl = Duration::ZERO;
    options.cache_dir = Some(scratch.path().to_owned());
    let error = ObjectFs::open(&uri, options)
        .err()
        .expect("there is no such bucket");
    assert!(
        error.to_string().contains("bucket does not exist"),
        "{error}"
    );
}
