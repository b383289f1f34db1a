//! Programs change files of a store: what they were told is done is in the store.

use std::fs::{self, File, OpenOptions};
use std::io::{ErrorKind, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use fastrand::Rng;

use crate::stores::At;
use crate::{MIB, Served, bytes, listing, serve};

fn writable(uri: &str) -> Served {
    serve(uri, |options| options.writes = true)
}

/// What another mount, which begins only now, has of a file.
fn stored(store: &impl At, path: &str) -> Vec<u8> {
    fs::read(serve(&store.uri(), |_| {}).at(path)).unwrap()
}

pub fn all(store: &(impl At + Sync)) {
    what_was_closed_is_in_the_store(store);
    parts_of_files_change(store);
    a_large_file_is_stored(store);
    names_change(store);
    an_open_file_outlives_its_name(store);
    a_mapping_is_stored(store);
    random_changes(store, Duration::ZERO);
    random_changes(store, Duration::from_secs(600));
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

fn a_large_file_is_stored(store: &impl At) {
    let content = bytes(37 * MIB + 5, 6);
    let served = writable(&store.uri());
    fs::write(served.at("large"), &content).unwrap();
    assert!(stored(store, "large") == content);
    assert!(fs::read(served.at("large")).unwrap() == content);
    fs::remove_file(served.at("large")).unwrap();
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
    drop(file);
    let again = serve(&store.uri(), |_| {});
    assert_eq!(fs::read(again.at("over")).unwrap(), b"other");
    let gone = fs::metadata(again.at("open")).unwrap_err();
    assert_eq!(gone.kind(), ErrorKind::NotFound);
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

/// The same random calls on a directory of the host and on the mount: the same results, and at last the same tree in the
/// store.
fn random_changes(store: &impl At, ttl: Duration) {
    let host = tempfile::tempdir().unwrap();
    let served = serve(&store.uri(), |options| {
        (options.writes, options.ttl) = (true, ttl);
    });
    let place = format!("random-{}", ttl.as_secs());
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
            "seed {seed}, step {step}: {what} {one:?} {two:?}"
        );
    }
    let [host, mount] = roots.each_ref().map(|root| tree(root));
    assert!(host == mount, "seed {seed}");
    let again = serve(&store.uri(), |_| {});
    assert!(tree(&again.at(&place)) == host, "seed {seed}, in the store");
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

#[test]
fn a_directory_of_the_host_is_written() {
    if uvfs_testing::has(&[uvfs_testing::Need::Fuse]) {
        all(&crate::DirectoryStore::new());
    }
}
