//! Programs change files of a store: what they were told is done is in the store.

use std::fs::{self, File, OpenOptions};
use std::io::{ErrorKind, Read, Seek, SeekFrom, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use fastrand::Rng;
use uvfs_object::Writes;
use uvfs_testing::{Need, has};

use crate::counts;
use crate::fake::Fake;
use crate::proxy::{Mode, Proxy};
use crate::stores::At;
use crate::{MIB, Served, bytes, listing, serve};

fn writable(uri: &str) -> Served {
    serve(uri, |options| options.writes = Writes::Close)
}

/// What another mount, which begins only now, has of a file.
#[track_caller]
fn stored(store: &impl At, path: &str) -> Vec<u8> {
    fs::read(serve(&store.uri(), |_| {}).at(path)).unwrap()
}

pub fn all(store: &(impl At + Sync)) {
    small_files(store);
    a_large_file_is_stored(store);
}

/// The promises that hold where an object is put by one request, too.
pub fn small_files(store: &(impl At + Sync)) {
    what_was_closed_is_in_the_store(store);
    parts_of_files_change(store);
    names_change(store);
    an_open_file_outlives_its_name(store);
    a_mapping_is_stored(store);
    a_file_without_a_name_gets_one(store);
    for writes in [Writes::Close, Writes::Back] {
        random_changes(store, writes, Duration::ZERO);
        random_changes(store, writes, Duration::from_secs(600));
    }
}

fn what_was_closed_is_in_the_store(store: &impl At) {
    let served = writable(&store.uri());
    for len in [0, 1, 65_536, 65_537, 3 * MIB + 1] {
        let path = format!("w-{len}");
        let content = bytes(len, len as u64);
        let mut file = File::create_new(served.at(&path)).unwrap();
        // It is there before the store has it.
        assert_eq!(fs::metadata(served.at(&path)).unwrap().len(), 0);
        assert!(listing(served.mounted.path()).contains(&format!("f 0 {path}")));
        file.write_all(&content).unwrap();
        assert!(fs::read(served.at(&path)).unwrap() == content, "{len}");
        file.sync_all().unwrap();
        assert!(stored(store, &path) == content, "{len}, after fsync");
        file.write_all(b"more").unwrap();
        drop(file);
        let all = [&content[..], b"more"].concat();
        assert!(stored(store, &path) == all, "{len}, after close");
        assert!(fs::read(served.at(&path)).unwrap() == all);
        assert_eq!(
            fs::metadata(served.at(&path)).unwrap().len(),
            len as u64 + 4
        );
        fs::write(served.at(&path), b"anew").unwrap();
        assert_eq!(stored(store, &path), b"anew");
        fs::remove_file(served.at(&path)).unwrap();
        let again = serve(&store.uri(), |_| {});
        let gone = fs::metadata(again.at(&path)).unwrap_err();
        assert_eq!(gone.kind(), ErrorKind::NotFound);
    }
    // Emptied by an open for reading.
    fs::write(served.at("read"), b"full").unwrap();
    let flags = rustix::fs::OFlags::RDONLY | rustix::fs::OFlags::TRUNC;
    rustix::fs::open(served.at("read"), flags, rustix::fs::Mode::empty()).unwrap();
    assert_eq!(stored(store, "read"), b"");
    let taken = File::create_new(served.at("taken"));
    drop(taken.unwrap());
    let error = File::create_new(served.at("taken")).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::AlreadyExists);
}

fn parts_of_files_change(store: &impl At) {
    let mut content = bytes(2 * MIB + 77, 5);
    store.put("parts", &content);
    let served = writable(&store.uri());
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .open(served.at("parts"))
        .unwrap();
    file.write_all_at(b"in the middle", 70_000).unwrap();
    content[70_000..][..13].copy_from_slice(b"in the middle");
    let mut read = vec![0; content.len()];
    file.read_exact_at(&mut read, 0).unwrap();
    assert!(read == content);
    drop(file);
    assert!(stored(store, "parts") == content);
    let mut file = OpenOptions::new().append(true).open(served.at("parts"));
    file.as_mut().unwrap().write_all(b"the end").unwrap();
    drop(file);
    content.extend(b"the end");
    assert!(stored(store, "parts") == content);
    let file = OpenOptions::new().write(true).open(served.at("parts"));
    for len in [100_000, 300_000, 0, 10] {
        file.as_ref().unwrap().set_len(len).unwrap();
        content.resize(len as usize, 0);
    }
    drop(file);
    assert!(stored(store, "parts") == content);
    // By the path alone.
    let cut = Command::new("truncate")
        .args(["-c", "-s", "5"])
        .arg(served.at("parts"))
        .status();
    assert!(cut.unwrap().success());
    assert_eq!(stored(store, "parts"), [0; 5]);
}

pub fn a_large_file_is_stored(store: &impl At) {
    let content = bytes(37 * MIB + 5, 6);
    let served = writable(&store.uri());
    fs::write(served.at("large"), &content).unwrap();
    assert!(stored(store, "large") == content);
    assert!(fs::read(served.at("large")).unwrap() == content);
    fs::remove_file(served.at("large")).unwrap();
}

/// Parts of a file go to the store while a program writes it, and the object is what the program left, whatever it did to what
/// was sent.
pub fn parts_go_while_a_file_is_written(store: &(impl At + Sync)) {
    type After = fn(&File, &Path, &mut Vec<u8>);
    let cases: [(&str, After); 6] = [
        ("as-written", |_, _, _| {}),
        ("changed-behind", |file, _, content| {
            file.write_all_at(b"header", 3).unwrap();
            content[3..9].copy_from_slice(b"header");
        }),
        ("cut", |file, _, content| {
            file.set_len(9 * MIB as u64).unwrap();
            content.truncate(9 * MIB);
        }),
        ("cut-and-written-again", |file, _, content| {
            file.set_len(0).unwrap();
            content.reverse();
            file.write_all_at(content, 0).unwrap();
        }),
        ("extended-by-a-hole", |file, _, content| {
            file.set_len(50 * MIB as u64).unwrap();
            content.resize(50 * MIB, 0);
        }),
        ("moved", |_, path, _| {
            fs::rename(path, path.with_extension("new")).unwrap();
        }),
    ];
    let served = writable(&store.uri());
    for (name, after) in cases {
        let path = served.at(name);
        let mut content = bytes(37 * MIB + 5, 6);
        let mut file = File::create_new(&path).unwrap();
        let before = counts::count(&served, "store_write_requests");
        for part in content.chunks(MIB) {
            file.write_all(part).unwrap();
        }
        let begun = Instant::now();
        while counts::count(&served, "store_write_requests") == before {
            assert!(begun.elapsed() < Duration::from_secs(20), "{name}");
            std::thread::sleep(Duration::from_millis(1));
        }
        after(&file, &path, &mut content);
        close(file).unwrap_or_else(|error| panic!("{name}: {error}"));
        let name = if name == "moved" { "moved.new" } else { name };
        assert!(stored(store, name) == content, "{name}");
        assert!(fs::read(served.at(name)).unwrap() == content, "{name}");
        fs::remove_file(served.at(name)).unwrap();
    }
    // A file that is removed meanwhile is not there afterwards.
    let mut gone = File::create_new(served.at("gone")).unwrap();
    gone.write_all(&bytes(37 * MIB, 1)).unwrap();
    fs::remove_file(served.at("gone")).unwrap();
    close(gone).unwrap();
    // Files beyond those that may begin early are put as well.
    let all: Vec<_> = (0..9).map(|n| format!("many-{n}")).collect();
    let content = bytes(20 * MIB, 2);
    let files = all
        .iter()
        .map(|name| File::create_new(served.at(name)).unwrap());
    let mut files: Vec<_> = files.collect();
    for part in content.chunks(MIB) {
        for file in &mut files {
            file.write_all(part).unwrap();
        }
    }
    files.into_iter().for_each(|file| close(file).unwrap());
    let fresh = serve(&store.uri(), |_| {});
    assert!(!fresh.at("gone").exists());
    for name in all {
        assert!(fs::read(fresh.at(&name)).unwrap() == content, "{name}");
    }
}

/// A file that is larger than the cache goes through it. What the store has of it by then can't be changed before it is closed.
pub fn a_file_larger_than_the_cache_streams(store: &crate::Seaweed) {
    let proxy = Proxy::start(store.address());
    let content = bytes(130 * MIB, 8);
    let (begin, end) = content.split_at(120 * MIB);
    for (writes, fails) in [(Writes::Close, false), (Writes::Back, true)] {
        let mount = |cache: &Path| {
            serve(&store.uri_at(proxy.address()), |options| {
                options.writes = writes;
                options.cache_dir = Some(cache.to_owned());
                options.cache_size = Some(64 << 20);
                options.timeout = Duration::from_secs(5);
            })
        };
        let caches = [(); 2].map(|()| tempfile::tempdir().unwrap());
        let served = mount(caches[0].path());
        let blocks = || {
            let root = fs::read_dir(caches[0].path()).unwrap().next().unwrap();
            let files = fs::read_dir(root.unwrap().path()).unwrap();
            let sizes = files.map(|entry| entry.unwrap().metadata().unwrap().blocks() * 512);
            sizes.sum::<u64>()
        };
        // It takes the place of a file that was removed.
        fs::write(served.at("stream"), b"before").unwrap();
        File::open(served.mounted.path())
            .unwrap()
            .sync_all()
            .unwrap();
        fs::remove_file(served.at("stream")).unwrap();
        let mut file = File::create_new(served.at("stream")).unwrap();
        for part in begin.chunks(MIB) {
            file.write_all(part).unwrap();
            assert!(blocks() < 100 << 20, "{} of 64 MiB", blocks() >> 20);
        }
        let error = file.write_all_at(b"changed", 5).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::ENOSPC));
        let error = fs::rename(served.at("stream"), served.at("other")).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EBUSY));
        // As kill -9 leaves it.
        let copied = Command::new("cp")
            .args(["-r", "--sparse=always"])
            .args(caches.each_ref().map(|cache| cache.path().join(".")))
            .status();
        assert!(copied.unwrap().success());
        file.write_all(end).unwrap();
        if fails {
            proxy.set(Mode::Refuse);
            let error = close(file).unwrap_err();
            assert_eq!(error.raw_os_error(), Some(libc::EIO));
            proxy.set(Mode::Pass);
            assert!(!served.at("stream").exists());
        } else {
            close(file).unwrap();
            assert!(stored(store, "stream") == content);
            assert!(fs::read(served.at("stream")).unwrap() == content);
            fs::remove_file(served.at("stream")).unwrap();
        }
        assert!(blocks() < 100 << 20);
        drop(served);
        let next = mount(caches[1].path());
        let left = listing(next.mounted.path());
        assert!(!left.iter().any(|line| line.contains("stream")), "{left:?}");
        drop(next);
        assert!(!serve(&store.uri(), |_| {}).at("stream").exists());
    }
}

fn names_change(store: &impl At) {
    let served = writable(&store.uri());
    let at = |path: &str| served.at(path);
    fs::create_dir(at("n")).unwrap();
    fs::create_dir_all(at("n/deep/er")).unwrap();
    fs::write(at("n/one"), b"1").unwrap();
    fs::write(at("n/deep/er/two"), b"22").unwrap();
    fs::rename(at("n/one"), at("n/uno")).unwrap();
    fs::rename(at("n/deep"), at("n/tief")).unwrap();
    fs::write(at("n/tief/er/three"), b"333").unwrap();
    // Over another file, and while it is written.
    let mut file = File::create_new(at("n/new")).unwrap();
    file.write_all(b"begun").unwrap();
    fs::rename(at("n/new"), at("n/uno")).unwrap();
    file.write_all(b" and done").unwrap();
    drop(file);
    let full = fs::remove_dir(at("n/tief")).unwrap_err();
    assert_eq!(full.raw_os_error(), Some(libc::ENOTEMPTY));
    let link = fs::hard_link(at("n/uno"), at("n/link")).unwrap_err();
    assert_eq!(link.raw_os_error(), Some(libc::EPERM));
    let expected = [
        "d tief",
        "d tief/er",
        "f 14 uno",
        "f 2 tief/er/two",
        "f 3 tief/er/three",
    ];
    assert_eq!(listing(&at("n")), expected);
    let again = serve(&store.uri(), |_| {});
    assert_eq!(listing(&again.at("n")), expected);
    assert_eq!(fs::read(again.at("n/uno")).unwrap(), b"begun and done");
    // A directory stays when its last file goes.
    fs::remove_file(at("n/tief/er/two")).unwrap();
    fs::rename(at("n/tief/er/three"), at("n/three")).unwrap();
    assert_eq!(listing(&at("n/tief")), ["d er"]);
    fs::remove_dir(at("n/tief/er")).unwrap();
    fs::remove_dir(at("n/tief")).unwrap();
    fs::remove_file(at("n/three")).unwrap();
    fs::remove_file(at("n/uno")).unwrap();
    let again = serve(&store.uri(), |_| {});
    assert_eq!(listing(&again.at("n")), [""; 0]);
    fs::remove_dir(at("n")).unwrap();
}

fn an_open_file_outlives_its_name(store: &impl At) {
    let content = bytes(5 * MIB, 7);
    store.put("open", &content);
    store.put("over", &content);
    let served = writable(&store.uri());
    let mut file = OpenOptions::new()
        .read(true)
        .write(true)
        .open(served.at("open"))
        .unwrap();
    let over = File::open(served.at("over")).unwrap();
    fs::remove_file(served.at("open")).unwrap();
    fs::write(served.at("other"), b"other").unwrap();
    fs::rename(served.at("other"), served.at("over")).unwrap();
    let mut read = vec![0; content.len()];
    over.read_exact_at(&mut read, 0).unwrap();
    assert!(read == content, "what was replaced");
    file.read_exact_at(&mut read, 0).unwrap();
    assert!(read == content, "what was removed");
    file.seek(SeekFrom::End(0)).unwrap();
    file.write_all(b"still").unwrap();
    let mut all = Vec::new();
    file.seek(SeekFrom::Start(0)).unwrap();
    file.read_to_end(&mut all).unwrap();
    assert!(all.len() == content.len() + 5 && all.ends_with(b"still"));
    // A reader sees what was written there to its end.
    let reader = File::open(format!("/proc/self/fd/{}", file.as_raw_fd()));
    drop(file);
    std::thread::sleep(Duration::from_millis(100));
    if let Ok(mut reader) = reader {
        drop_kernel_caches("1");
        let mut again = Vec::new();
        reader.read_to_end(&mut again).unwrap();
        assert!(again == all, "after the writer");
    }
    let again = serve(&store.uri(), |_| {});
    assert_eq!(fs::read(again.at("over")).unwrap(), b"other");
    let gone = fs::metadata(again.at("open")).unwrap_err();
    assert_eq!(gone.kind(), ErrorKind::NotFound);
}

/// A file without a name (O_TMPFILE) is nowhere until a program gives it one.
fn a_file_without_a_name_gets_one(store: &impl At) {
    use rustix::fs::{AtFlags, CWD, Mode, OFlags, linkat, open};
    for writes in [Writes::Close, Writes::Back] {
        let served = serve(&store.uri(), |options| options.writes = writes);
        let root = served.mounted.path();
        let make = || {
            let flags = OFlags::TMPFILE | OFlags::RDWR;
            File::from(open(root, flags, Mode::from_raw_mode(0o600)).unwrap())
        };
        let link = |file: &File, to: &str| {
            let path = format!("/proc/self/fd/{}", file.as_raw_fd());
            linkat(CWD, path, CWD, served.at(to), AtFlags::SYMLINK_FOLLOW)
        };
        let before = listing(root);
        let (mut file, mut other) = (make(), make());
        other.write_all(b"for nothing").unwrap();
        other.sync_all().unwrap();
        file.write_all(b"begun").unwrap();
        file.sync_all().unwrap();
        assert_eq!(file.metadata().unwrap().nlink(), 0);
        assert_eq!(listing(root), before);
        fs::write(served.at("there"), b"there").unwrap();
        assert_eq!(
            link(&file, "there").unwrap_err().raw_os_error(),
            libc::EEXIST
        );
        fs::remove_file(served.at("there")).unwrap();
        link(&file, "there").unwrap();
        assert_eq!(file.metadata().unwrap().nlink(), 1);
        file.write_all(b", and done").unwrap();
        assert_eq!(fs::read(served.at("there")).unwrap(), b"begun, and done");
        assert_eq!(
            link(&file, "twice").unwrap_err().raw_os_error(),
            libc::EPERM
        );
        close(file).unwrap();
        drop(other);
        drop(served);
        assert_eq!(stored(store, "there"), b"begun, and done");
        let served = serve(&store.uri(), |_| {});
        assert_eq!(listing(served.mounted.path()).len(), before.len() + 1);
        drop(served);
        store.remove("there");
    }
}

/// Stores through a mapping, also after close(2), reach the store.
fn a_mapping_is_stored(store: &impl At) {
    let served = writable(&store.uri());
    fs::write(served.at("mapped"), vec![b'a'; 10_000]).unwrap();
    let program = "import mmap,os,sys\n\
        f=os.open(sys.argv[1],os.O_RDWR)\n\
        m=mmap.mmap(f,10000)\n\
        m[0]=98\n\
        os.close(f)\n\
        m[9999]=99\n\
        m.close()\n";
    let done = Command::new("python3")
        .args(["-c", program])
        .arg(served.at("mapped"))
        .status();
    assert!(done.unwrap().success());
    let mut expected = vec![b'a'; 10_000];
    (expected[0], expected[9999]) = (b'b', b'c');
    // RELEASE comes after the last mapping is gone.
    let begun = Instant::now();
    while stored(store, "mapped") != expected {
        assert!(begun.elapsed() < Duration::from_secs(20));
    }
}

/// A large file, which is uploaded in parts, takes no place of a version that another mount has put meanwhile.
pub fn a_large_file_is_not_overwritten(store: &impl At) {
    let mounts = [0, 1].map(|_| writable(&store.uri()));
    for (name, had) in [("had", true), ("new", false)] {
        if had {
            store.put(name, &bytes(20 * MIB, 1));
        }
        let mut files = [0, 1].map(|n| {
            let open = OpenOptions::new()
                .write(true)
                .create(true)
                .truncate(false)
                .open(mounts[n].at(name));
            open.unwrap()
        });
        let contents = [2, 3].map(|seed| bytes(20 * MIB, seed));
        for (file, content) in files.iter_mut().zip(&contents) {
            file.write_all(content).unwrap();
        }
        let [one, two] = files;
        close(one).unwrap();
        let error = close(two).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::ESTALE), "{name}");
        assert!(stored(store, name) == contents[0], "{name}");
        let beside = fs::read_dir(mounts[0].mounted.path()).unwrap();
        let beside = beside.map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let beside: Vec<_> = beside
            .filter(|beside| beside.starts_with(&format!("{name}.conflict-")))
            .collect();
        assert_eq!(beside.len(), 1, "{name}");
        assert!(stored(store, &beside[0]) == contents[1], "{name}");
    }
}

/// The same random calls on a directory of the host and on the mount: the same results, and at last the same tree in the
/// store.
fn random_changes(store: &impl At, writes: Writes, ttl: Duration) {
    let host = tempfile::tempdir().unwrap();
    let served = serve(&store.uri(), |options| {
        (options.writes, options.ttl) = (writes, ttl);
    });
    let place = format!("random-{}-{writes:?}", ttl.as_secs());
    fs::create_dir(served.at(&place)).unwrap();
    let roots = [host.path().to_owned(), served.at(&place)];
    let seed =
        std::env::var("SEED").map_or_else(|_| fastrand::u64(..), |seed| seed.parse().unwrap());
    let mut random = Rng::with_seed(seed);
    let path = |random: &mut Rng| {
        let parts = ["a", "b", "c"];
        let depth = random.usize(1..=3);
        (0..depth)
            .map(|_| parts[random.usize(..3)])
            .collect::<PathBuf>()
    };
    for step in 0..300 {
        let (one, two) = (path(&mut random), path(&mut random));
        let (what, at) = (random.u32(..10), random.u64(..200_000));
        let content = bytes(random.usize(..100_000), random.u64(..));
        let [host, mount] = roots
            .each_ref()
            .map(|root| change(root, what, &one, &two, at, &content));
        assert_eq!(
            host, mount,
            "seed {seed}, step {step}, {writes:?}: {what} {one:?} {two:?}"
        );
    }
    let [host, mount] = roots.each_ref().map(|root| tree(root));
    assert_eq!(lines(&host), lines(&mount), "seed {seed}, {writes:?}");
    assert!(host == mount, "seed {seed}, {writes:?}");
    drop(served);
    let again = serve(&store.uri(), |_| {});
    let again = tree(&again.at(&place));
    assert_eq!(
        lines(&again),
        lines(&host),
        "seed {seed}, {writes:?}, in the store"
    );
    assert!(again == host, "seed {seed}, {writes:?}, in the store");
}

/// One call; what it read, or its error.
fn change(
    root: &Path,
    what: u32,
    one: &Path,
    two: &Path,
    at: u64,
    content: &[u8],
) -> Result<Vec<u8>, i32> {
    let (one, two) = (root.join(one), root.join(two));
    let done = match what {
        0 => fs::create_dir(&one),
        1 => fs::remove_dir(&one),
        2 => fs::remove_file(&one),
        3 | 4 => fs::rename(&one, &two),
        5 | 6 => fs::write(&one, content),
        7 => OpenOptions::new()
            .write(true)
            .open(&one)
            .and_then(|file| file.write_all_at(content, at)),
        8 => OpenOptions::new()
            .write(true)
            .open(&one)
            .and_then(|file| file.set_len(at)),
        _ => return fs::read(&one).map_err(|error| error.raw_os_error().unwrap()),
    };
    let code = done.map_err(|error| error.raw_os_error().unwrap());
    match code {
        // rename(2) says either of a directory that is not empty.
        Err(libc::EEXIST) if what > 2 => Err(libc::ENOTEMPTY),
        other => other.map(|()| Vec::new()),
    }
}

/// All files and directories with what is in them.
fn tree(root: &Path) -> Vec<(String, Vec<u8>)> {
    let lines = listing(root).into_iter();
    let read = |line: String| {
        let content = match line.strip_prefix("f ") {
            Some(rest) => fs::read(root.join(rest.split_once(' ').unwrap().1)).unwrap(),
            None => Vec::new(),
        };
        (line, content)
    };
    lines.map(read).collect()
}

fn lines(tree: &[(String, Vec<u8>)]) -> Vec<&str> {
    tree.iter().map(|(line, _)| &**line).collect()
}

#[test]
fn a_directory_of_the_host_is_written() {
    if has(&[Need::Fuse]) {
        all(&crate::DirectoryStore::new());
    }
}

#[test]
fn two_mounts_write_the_same_files() {
    if let Some(fake) = fake() {
        crate::pair::a_file_that_changed_is_renamed(&fake);
        crate::pair::a_file_that_is_gone_is_made_anew(&fake);
        crate::pair::two_mounts_write(&fake);
    }
}

#[test]
fn a_store_in_memory_is_written() {
    if let Some(fake) = fake() {
        names_change(&fake);
        for writes in [Writes::Close, Writes::Back] {
            random_changes(&fake, writes, Duration::ZERO);
        }
    }
}

/// A store in memory, and what it has of an object.
fn fake() -> Option<Fake> {
    has(&[Need::Fuse]).then(Fake::start)
}

fn contents(fake: &Fake, key: &str) -> Vec<u8> {
    fake.bucket().objects[&format!("p/{key}")].contents.clone()
}

/// The objects beside one that another writer changed.
fn conflicts(fake: &Fake, key: &str) -> Vec<Vec<u8>> {
    let prefix = format!("p/{key}.conflict-");
    let bucket = fake.bucket();
    let beside = bucket.objects.range(prefix.clone()..);
    let beside = beside.take_while(|(key, _)| key.starts_with(&prefix));
    beside.map(|(_, object)| object.contents.clone()).collect()
}

pub fn close(file: File) -> std::io::Result<()> {
    use std::os::fd::IntoRawFd;
    // SAFETY: the descriptor is this file's alone.
    match unsafe { libc::close(file.into_raw_fd()) } {
        0 => Ok(()),
        _ => Err(std::io::Error::last_os_error()),
    }
}

/// What another writer put meanwhile is not overwritten: neither by a store that keeps conditions, nor by one that does not.
#[test]
fn another_writer_is_not_overwritten() {
    for unconditional in [false, true] {
        let Some(fake) = fake() else { return };
        fake.bucket().unconditional = unconditional;
        fake.put("both", b"at first");
        let served = writable(&fake.uri());
        let open = |path: &str| {
            OpenOptions::new()
                .append(true)
                .open(served.at(path))
                .unwrap()
        };
        for key in ["both", "new"] {
            let mut file = match key {
                "new" => File::create_new(served.at(key)).unwrap(),
                _ => open(key),
            };
            file.write_all(b" and mine").unwrap();
            fake.put(key, b"theirs");
            // A child process closes what it inherited first.
            close(file.try_clone().unwrap()).unwrap_err();
            let error = close(file).unwrap_err();
            assert_eq!(error.raw_os_error(), Some(libc::ESTALE), "{key}: {error}");
            assert_eq!(contents(&fake, key), b"theirs");
            let mine = [["at first"].concat(), String::new()][usize::from(key == "new")].clone();
            assert_eq!(
                conflicts(&fake, key),
                [format!("{mine} and mine").into_bytes()]
            );
            let begun = Instant::now();
            // The kernel keeps a name for a second.
            while fs::read(served.at(key)).unwrap() != b"theirs" {
                assert!(begun.elapsed() < Duration::from_secs(20), "{key}");
            }
        }
        assert_eq!(counts::count(&served, "store_conflicts"), 2);
        // Gone meanwhile: there is nothing to overwrite.
        fake.put("gone", b"at first");
        let mut file = open("gone");
        file.write_all(b" and mine").unwrap();
        fake.remove("gone");
        close(file).unwrap();
        assert_eq!(contents(&fake, "gone"), b"at first and mine");
    }
}

/// A put whose answer gets lost is tried again. That the store has the object by then is no conflict.
#[test]
fn a_lost_answer_is_no_conflict() {
    let Some(fake) = fake() else { return };
    let served = writable(&fake.uri());
    for (n, path) in ["a", "a", "b"].into_iter().enumerate() {
        fake.bucket().loses = 1;
        fs::write(served.at(path), [n as u8; 10]).unwrap();
        assert_eq!(fake.bucket().loses, 0);
        assert_eq!(contents(&fake, path), [n as u8; 10]);
        assert_eq!(conflicts(&fake, path), [[0; 0]; 0]);
    }
}

/// A program is told that the store failed. What it wrote stays, and is in the store when that is back.
#[test]
fn a_failed_put_is_an_error_and_is_tried_again() {
    let Some(fake) = fake() else { return };
    let proxy = Proxy::start(fake.address());
    let served = serve(&fake.uri_at(proxy.address()), |options| {
        (options.writes, options.timeout) = (Writes::Close, Duration::from_secs(2));
    });
    let mut file = File::create_new(served.at("late")).unwrap();
    file.write_all(b"what was written").unwrap();
    proxy.set(Mode::Refuse);
    let error = file.sync_all().unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::EIO));
    let error = close(file).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::EIO));
    assert_eq!(fs::read(served.at("late")).unwrap(), b"what was written");
    proxy.set(Mode::Pass);
    let begun = Instant::now();
    while !fake.bucket().objects.contains_key("p/late") {
        assert!(begun.elapsed() < Duration::from_secs(60));
        std::thread::sleep(Duration::from_millis(50));
    }
    assert_eq!(contents(&fake, "late"), b"what was written");
}

/// What the store does not have when a mount ends is put by the next one.
#[test]
fn the_next_mount_puts_what_is_left() {
    let Some(fake) = fake() else { return };
    let proxy = Proxy::start(fake.address());
    let cache = tempfile::tempdir().unwrap();
    let mount = || {
        serve(&fake.uri_at(proxy.address()), |options| {
            (options.writes, options.timeout) = (Writes::Close, Duration::from_secs(2));
            options.cache_dir = Some(cache.path().to_owned());
        })
    };
    fake.put("had", b"at first");
    let served = mount();
    let mut new = File::create_new(served.at("new")).unwrap();
    let mut had = OpenOptions::new().append(true).open(served.at("had"));
    new.write_all(b"new").unwrap();
    had.as_mut().unwrap().write_all(b" and more").unwrap();
    proxy.set(Mode::Refuse);
    for file in [new, had.unwrap()] {
        close(file).unwrap_err();
    }
    drop(served);
    assert!(!fake.bucket().objects.contains_key("p/new"));
    proxy.set(Mode::Pass);
    let served = mount();
    // At once, whether the store has it by now or not.
    assert_eq!(fs::read(served.at("new")).unwrap(), b"new");
    assert_eq!(fs::read(served.at("had")).unwrap(), b"at first and more");
    drop(served);
    assert_eq!(contents(&fake, "new"), b"new");
    assert_eq!(contents(&fake, "had"), b"at first and more");
    assert_eq!(conflicts(&fake, "had"), [[0; 0]; 0]);
    let left = fs::read_dir(cache.path()).unwrap().next().unwrap().unwrap();
    let left = fs::read_dir(left.path()).unwrap();
    let drafts = left.filter(|entry| {
        let name = entry.as_ref().unwrap().file_name();
        [".kept", ".new", ".tmp"]
            .iter()
            .any(|end| name.to_str().unwrap().ends_with(end))
    });
    assert_eq!(drafts.count(), 0);
}

/// With `write=back` programs go on while the store does not answer, and the next mount brings it all of what they did.
#[test]
fn what_waits_for_the_store() {
    let Some(fake) = fake() else { return };
    let proxy = Proxy::start(fake.address());
    let cache = tempfile::tempdir().unwrap();
    let mount = |local_fsync| {
        serve(&fake.uri_at(proxy.address()), |options| {
            (options.writes, options.local_fsync) = (Writes::Back, local_fsync);
            (options.metadata, options.timeout) = (true, Duration::from_secs(2));
            // The kernel knows the names already when the store falls silent.
            options.ttl = Duration::from_secs(600);
            options.cache_dir = Some(cache.path().to_owned());
        })
    };
    for name in ["had", "gone", "full/one"] {
        fake.put(name, name.as_bytes());
    }
    let served = mount(true);
    assert_eq!(listing(served.mounted.path()).len(), 4);
    fs::create_dir(served.at("new")).unwrap();
    let made = ["new/file", "new/other", "new/link", "new/a", "new/a/b"];
    for name in made {
        assert!(!served.at(name).exists());
    }
    proxy.set(Mode::Refuse);
    let asked = fake.bucket().asked.len();
    fs::write(served.at("new/file"), b"1").unwrap();
    fs::rename(served.at("new/file"), served.at("new/other")).unwrap();
    std::os::unix::fs::symlink("other", served.at("new/link")).unwrap();
    assert_eq!(
        fs::read_link(served.at("new/link")).unwrap(),
        Path::new("other")
    );
    fs::create_dir(served.at("new/a")).unwrap();
    fs::create_dir(served.at("new/a/b")).unwrap();
    fs::remove_dir(served.at("new/a/b")).unwrap();
    fs::remove_file(served.at("gone")).unwrap();
    fs::remove_file(served.at("full/one")).unwrap();
    fs::remove_dir(served.at("full")).unwrap();
    // It is synced to the local disk.
    let mut had = File::create(served.at("had")).unwrap();
    had.write_all(b"anew").unwrap();
    had.sync_all().unwrap();
    File::open(served.at("new")).unwrap().sync_all().unwrap();
    close(had).unwrap();
    let shown = |served: &Served| {
        let mut all = listing(served.mounted.path());
        all.sort();
        all
    };
    let now = ["d new", "d new/a", "f 1 new/other", "f 4 had", "l new/link"];
    for (name, there) in [("new/other", true), ("new/a", true), ("new/a/b", false)] {
        assert_eq!(served.at(name).exists(), there, "{name}");
    }
    for (name, there) in [("had", true), ("gone", false), ("full", false)] {
        assert_eq!(served.at(name).exists(), there, "{name}");
    }
    assert_eq!(fake.bucket().asked.len(), asked);
    drop(served);
    assert!(fake.bucket().objects.contains_key("p/gone"));
    // fsync(2) of this mount waits for the store.
    let again = serve(&fake.uri_at(fake.address()), |options| {
        (options.metadata, options.ttl) = (true, Duration::ZERO);
    });
    proxy.set(Mode::Pass);
    let served = mount(false);
    assert_eq!(shown(&served), now);
    let mut synced = File::create(served.at("synced")).unwrap();
    synced.write_all(b"synced").unwrap();
    synced.sync_all().unwrap();
    assert_eq!(fs::read(again.at("synced")).unwrap(), b"synced");
    fs::create_dir(served.at("directory")).unwrap();
    File::open(served.mounted.path())
        .unwrap()
        .sync_all()
        .unwrap();
    assert!(again.at("directory").is_dir());
    drop((synced, served));
    let stored = shown(&again);
    assert_eq!(stored.len(), now.len() + 2);
    assert!(
        now.iter().all(|line| stored.contains(&(*line).to_owned())),
        "{stored:?}"
    );
    assert_eq!(fs::read(again.at("had")).unwrap(), b"anew");
}

/// A directory that the store gets after a listing of its parent stays there for programs.
#[test]
fn a_listing_does_not_hide_what_the_store_gets_later() {
    let Some(fake) = fake() else { return };
    let served = serve(&fake.uri(), |options| {
        options.writes = Writes::Back;
        options.ttl = Duration::from_secs(600);
    });
    fs::create_dir_all(served.at("made/inner")).unwrap();
    fs::write(served.at("made/inner/file"), b"1").unwrap();
    for directory in [".", "made", "made/inner"] {
        assert_eq!(fs::read_dir(served.at(directory)).unwrap().count(), 1);
    }
    let begun = Instant::now();
    while !fake.bucket().objects.contains_key("p/made/inner/file") {
        assert!(begun.elapsed() < Duration::from_secs(60));
        std::thread::sleep(Duration::from_millis(50));
    }
    std::thread::sleep(Duration::from_millis(500));
    drop_kernel_caches("2");
    assert_eq!(fs::read(served.at("made/inner/file")).unwrap(), b"1");
}

/// Has the kernel forget pages (1), or names and nodes (2).
fn drop_kernel_caches(which: &str) {
    fs::write("/proc/sys/vm/drop_caches", which).unwrap();
}

/// A mount that finds the first cache taken leaves its drafts in another. The next mount takes them over.
#[test]
fn drafts_of_another_cache_are_taken_over() {
    let Some(fake) = fake() else { return };
    let proxy = Proxy::start(fake.address());
    let cache = tempfile::tempdir().unwrap();
    let mount = || {
        serve(&fake.uri_at(proxy.address()), |options| {
            (options.writes, options.timeout) = (Writes::Back, Duration::from_secs(2));
            options.cache_dir = Some(cache.path().to_owned());
        })
    };
    let [first, second] = [mount(), mount()];
    fs::write(first.at("first"), b"1").unwrap();
    fs::write(second.at("second"), b"2").unwrap();
    fs::write(second.at("both"), b"3").unwrap();
    fs::write(first.at("both"), b"3").unwrap();
    proxy.set(Mode::Refuse);
    drop((first, second));
    assert_eq!(fs::read_dir(cache.path()).unwrap().count(), 2);
    assert!(fake.bucket().objects.is_empty());
    proxy.set(Mode::Pass);
    let next = mount();
    assert_eq!(fs::read(next.at("second")).unwrap(), b"2");
    drop(next);
    // The draft of a name that had two.
    drop(mount());
    for (name, content) in [("first", b"1"), ("second", b"2"), ("both", b"3")] {
        assert_eq!(contents(&fake, name), content, "{name}");
    }
    let left = |path: PathBuf| {
        let names = fs::read_dir(path)
            .unwrap()
            .map(|entry| entry.unwrap().file_name());
        names
            .filter(|name| name.to_str().unwrap().ends_with(".new"))
            .count()
    };
    let dirs = fs::read_dir(cache.path()).unwrap();
    assert_eq!(dirs.map(|dir| left(dir.unwrap().path())).sum::<usize>(), 0);
}

/// With `write=back`, too, another writer's version stays: what a program wrote is beside it, and what a program removed is not
/// removed.
#[test]
fn another_writer_is_not_overwritten_later() {
    let Some(fake) = fake() else { return };
    for name in ["written", "removed", "same"] {
        fake.put(name, b"at first");
    }
    let served = serve(&fake.uri(), |options| {
        options.writes = Writes::Back;
        options.ttl = Duration::from_secs(600);
    });
    assert_eq!(fs::read(served.at("written")).unwrap(), b"at first");
    fs::write(served.at("written"), b"mine").unwrap();
    fs::write(served.at("new"), b"mine").unwrap();
    fs::remove_file(served.at("removed")).unwrap();
    fs::remove_file(served.at("same")).unwrap();
    for name in ["written", "new", "removed"] {
        fake.put(name, b"theirs");
    }
    drop(served);
    for name in ["written", "new", "removed"] {
        assert_eq!(contents(&fake, name), b"theirs", "{name}");
    }
    for name in ["written", "new"] {
        assert_eq!(conflicts(&fake, name), [b"mine"], "{name}");
    }
    assert!(!fake.bucket().objects.contains_key("p/same"));
}

/// What the store does not take fills the cache to its limit. Then writers wait, and at last get ENOSPC.
#[test]
fn writers_wait_at_the_limit_of_the_cache() {
    let Some(fake) = fake() else { return };
    let proxy = Proxy::start(fake.address());
    let served = serve(&fake.uri_at(proxy.address()), |options| {
        (options.writes, options.cache_size) = (Writes::Back, Some(1));
        options.timeout = Duration::from_secs(2);
        options.ttl = Duration::from_secs(600);
    });
    let content = bytes(7 * MIB, 3);
    // The smallest cache has 64 MiB.
    let names: Vec<_> = (0..12).map(|n| format!("f{n}")).collect();
    for name in &names {
        assert!(!served.at(name).exists());
    }
    listing(served.mounted.path());
    proxy.set(Mode::Refuse);
    let written = |name: &String| fs::write(served.at(name), &content);
    let full = names
        .iter()
        .position(|name| written(name).is_err())
        .unwrap();
    assert_eq!(full, 9);
    let mut file = OpenOptions::new()
        .append(true)
        .open(served.at("f0"))
        .unwrap();
    let refused = file.write_all(&content).unwrap_err();
    assert_eq!(refused.raw_os_error(), Some(libc::ENOSPC));
    drop(file);
    proxy.set(Mode::Pass);
    // Writers go on when the store takes what they wrote.
    let begun = Instant::now();
    while written(&names[11]).is_err() {
        assert!(begun.elapsed() < Duration::from_secs(60));
    }
    drop(served);
    for name in names[..full].iter().chain([&names[11]]) {
        assert!(contents(&fake, name) == content, "{name}");
    }
}

/// Modes, owners, times and types are kept with `metadata`, and refused without.
#[test]
fn attributes_are_kept_or_refused() {
    let Some(fake) = fake() else { return };
    let served = writable(&fake.uri());
    fs::write(served.at("plain"), b"1").unwrap();
    let run = |program: &str, args: &[&str], at: &Served| {
        let path = at.at(args.last().unwrap());
        let args = &args[..args.len() - 1];
        Command::new(program)
            .args(args)
            .arg(path)
            .output()
            .unwrap()
            .status
            .success()
    };
    assert!(!run("chmod", &["600", "plain"], &served));
    assert!(run("chmod", &["644", "plain"], &served), "it has this mode");
    // The mount shows a time that the store does not keep.
    assert!(run("touch", &["-d", "2001-01-01 UTC", "plain"], &served));
    let copied = Command::new("cp")
        .args(["--preserve=timestamps", "plain", "copy"])
        .current_dir(served.mounted.path())
        .status();
    assert!(copied.unwrap().success());
    for name in ["plain", "copy"] {
        let shown = fs::metadata(served.at(name)).unwrap().modified().unwrap();
        let since = shown.duration_since(std::time::UNIX_EPOCH).unwrap();
        assert_eq!(since.as_secs(), 978_307_200, "{name}");
    }
    assert!(run("touch", &["plain"], &served));
    assert!(!run("mkfifo", &["fifo"], &served));
    drop(served);
    let kept = |writes| {
        serve(&fake.uri(), |options| {
            (options.metadata, options.writes) = (true, writes)
        })
    };
    let served = kept(Writes::Close);
    let shown = |served: &Served, path: &str| {
        let found = fs::symlink_metadata(served.at(path)).unwrap();
        (
            found.mode(),
            found.uid(),
            found.gid(),
            found.mtime(),
            found.mtime_nsec(),
        )
    };
    fs::write(served.at("file"), b"1").unwrap();
    let mtime = shown(&served, "file").4;
    assert!(run("chmod", &["4751", "file"], &served));
    assert!(run("chown", &["7:8", "file"], &served));
    // chown(2) clears the set-user-id bit of an executable file.
    let mode = 0o100_751;
    assert_eq!(shown(&served, "file").0, mode);
    assert_eq!(shown(&served, "file").4, mtime);
    assert!(run(
        "touch",
        &["-d", "2001-01-01 00:00:00.123456789 UTC", "file"],
        &served
    ));
    assert!(run("mkfifo", &["-m", "640", "fifo"], &served));
    std::os::unix::fs::symlink("a/target", served.at("link")).unwrap();
    assert!(run("chmod", &["600", "plain"], &served));
    let all = ["file", "fifo", "link", "plain"];
    let here = all.map(|path| shown(&served, path));
    drop(served);
    let served = kept(Writes::No);
    assert_eq!(all.map(|path| shown(&served, path)), here);
    assert_eq!(here[0], (mode, 7, 8, 978_307_200, 123_456_789));
    assert_eq!(here[1].0, 0o010_640);
    assert_eq!(
        fs::read_link(served.at("link")).unwrap(),
        Path::new("a/target")
    );
    assert_eq!(fs::read(served.at("plain")).unwrap(), b"1");
}

/// Modes and owners of directories are in the metadata of their markers, as s3fs has them.
#[test]
fn attributes_of_directories_are_kept() {
    let Some(fake) = fake() else { return };
    for writes in [Writes::Close, Writes::Back] {
        let served = serve(&fake.uri(), |options| {
            (options.metadata, options.writes) = (true, writes)
        });
        let at = |path: &str| served.at(path).to_str().unwrap().to_owned();
        let run = |command: &[&str]| {
            let done = Command::new(command[0]).args(&command[1..]).status();
            assert!(done.unwrap().success(), "{command:?}");
        };
        let shown = |served: &Served, path: &str| {
            let found = fs::metadata(served.at(path)).unwrap();
            (found.mode(), found.uid(), found.gid())
        };
        run(&["mkdir", "-m", "750", &at("made")]);
        assert_eq!(shown(&served, "made").0, 0o040_750);
        run(&["mkdir", &at("made/in")]);
        run(&["chmod", "2711", &at("made/in")]);
        run(&["chown", "7:8", &at("made/in")]);
        assert_eq!(shown(&served, "made/in"), (0o042_711, 7, 8));
        // As a listing has it.
        run(&["ls", "-lR", &at("")]);
        assert_eq!(shown(&served, "made/in"), (0o042_711, 7, 8));
        run(&["mv", &at("made"), &at("moved")]);
        assert_eq!(shown(&served, "moved/in"), (0o042_711, 7, 8));
        run(&["chmod", "700", &at("moved")]);
        drop(served);
        let word = |key: &str, name: &str| {
            let bucket = fake.bucket();
            let words = &bucket.objects[key].metadata;
            let word = words.iter().find(|(word, _)| word == name);
            word.map(|(_, value)| value.clone())
        };
        assert_eq!(word("p/moved/", "mode").as_deref(), Some("16832"));
        assert_eq!(word("p/moved/in/", "uid").as_deref(), Some("7"));
        let served = serve(&fake.uri(), |options| options.metadata = true);
        assert_eq!(shown(&served, "moved").0, 0o040_700);
        assert_eq!(shown(&served, "moved/in"), (0o042_711, 7, 8));
        drop(served);
        fake.bucket().objects.clear();
    }
}

/// A directory of the host keeps attributes of files, in extended attributes. Its directories have none, and are made all the same.
#[test]
fn a_directory_of_the_host_keeps_attributes_of_files() {
    if !has(&[Need::Fuse]) {
        return;
    }
    for writes in [Writes::Close, Writes::Back] {
        let dir = tempfile::tempdir().unwrap();
        let served = serve(&format!("fs://{}", dir.path().display()), |options| {
            (options.metadata, options.writes) = (true, writes)
        });
        fs::create_dir(served.at("made")).unwrap();
        fs::write(served.at("made/file"), b"1").unwrap();
        let with = |mode| fs::Permissions::from_mode(mode);
        fs::set_permissions(served.at("made/file"), with(0o600)).unwrap();
        let error = fs::set_permissions(served.at("made"), with(0o700)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::PermissionDenied);
        fs::rename(served.at("made"), served.at("moved")).unwrap();
        let found = fs::metadata(served.at("moved/file")).unwrap();
        assert_eq!(found.mode() & 0o7777, 0o600);
        drop(served);
        assert!(dir.path().join("moved").is_dir());
        assert_eq!(fs::read(dir.path().join("moved/file")).unwrap(), b"1");
    }
}

/// A full disk is ENOSPC where it is full, and leaves nothing behind: what the cache holds makes room for what is written.
#[test]
fn a_full_disk_is_an_error_and_makes_room() {
    if !has(&[Need::Fuse, Need::Root]) {
        return;
    }
    let Some(fake) = fake() else { return };
    let disk = tempfile::tempdir().unwrap();
    let mount = |args: &[&str]| {
        let done = Command::new(args[0])
            .args(&args[1..])
            .arg(disk.path())
            .status();
        assert!(done.unwrap().success(), "{args:?}");
    };
    mount(&["mount", "-t", "tmpfs", "-o", "size=20m", "none"]);
    let _end = Unmounted(disk.path());
    let served = serve(&fake.uri(), |options| {
        options.writes = Writes::Close;
        options.cache_dir = Some(disk.path().to_owned());
    });
    let mut file = File::create_new(served.at("large")).unwrap();
    let error = file.write_all(&vec![1; 30 * MIB]).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::ENOSPC));
    fs::remove_file(served.at("large")).unwrap();
    drop(file);
    let files = [1, 2, 3].map(|seed| bytes(7 * MIB, seed));
    let begun = Instant::now();
    // RELEASE, which frees the disk, comes after close(2).
    while fs::write(served.at("1"), &files[0]).is_err() {
        assert!(begun.elapsed() < Duration::from_secs(20));
    }
    fs::write(served.at("2"), &files[1]).unwrap();
    fs::write(served.at("3"), &files[2]).unwrap();
    let file = OpenOptions::new().append(true).open(served.at("1"));
    file.unwrap().write_all(b"more").unwrap();
    assert!(fs::read(served.at("1")).unwrap() == [&files[0][..], b"more"].concat());
    assert!(fs::read(served.at("2")).unwrap() == files[1]);
    drop(served);
    assert!(contents(&fake, "3") == files[2]);
}

/// A mount that a test ends.
struct Unmounted<'a>(&'a Path);

impl Drop for Unmounted<'_> {
    fn drop(&mut self) {
        let _ = Command::new("umount").args(["-l"]).arg(self.0).status();
    }
}

/// A store that may not be written is refused at once. Without the right to overwrite an object, it stays as it is.
#[test]
fn without_the_right_to_write() {
    let Some(fake) = fake() else { return };
    fake.put("file", b"at first");
    let served = writable(&fake.uri());
    let mut file = File::create(served.at("file")).unwrap();
    file.write_all(b"anew").unwrap();
    fake.bucket().forbids = true;
    let error = close(file).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::EACCES));
    assert_eq!(contents(&fake, "file"), b"at first");
    let scratch = tempfile::tempdir().unwrap();
    let mut options = uvfs_object::Options::default();
    (options.writes, options.cache_dir) = (Writes::Close, Some(scratch.path().to_owned()));
    let refused = uvfs_object::ObjectFs::open(&fake.uri(), options).err();
    let refused = refused.expect("it may not be written").to_string();
    assert!(refused.contains("AccessDenied"), "{refused}");
    fake.bucket().forbids = false;
}
