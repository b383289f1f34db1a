//! The directory of an object store's cache, with damage: the mount shows what the store has, and drafts reach the names that
//! their records say, and no file besides.
//!
//! The input says what happens to the files that an earlier mount left, and what records of drafts lie beside them. Most headers
//! and frames of journals have their checksums set right again.
#![no_main]

use std::collections::BTreeMap;
use std::ffi::CString;
use std::fs::{self, File};
use std::future::Future;
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::task::{Poll, Wake, Waker};
use std::thread::Thread;
use std::time::{Duration, SystemTime};

use libfuzzer_sys::fuzz_target;
use uvfs_fuzz::mutate::{Bytes, Choose};
use uvfs_io::IoBuf;
use uvfs_object::{ObjectFs, Options, Writes};
use uvfs_server::fs::{Context, IoHow, OFlags, OpenHow, Payload, ROOT, Result};
use uvfs_server::{FileSystem, Session, SessionOptions};

const JOURNAL: &str = "journal";
/// Bytes of the header of a map.
const HEADER: usize = 8192;
const PIECE: usize = 1 << 16;
const OBJECTS: [(&str, usize); 3] = [("one", 3), ("dir/two", 2 * PIECE + 5), ("empty", 0)];
/// What names of drafts' files begin with.
const NUMBERS: [&str; 9] = [
    "0000000000000000",
    "0000000000000001",
    "fffffffffffffffe",
    "ffffffffffffffff",
    "10000000000000000",
    "00000000ffffffff",
    "5",
    "+5",
    "x",
];
const KEYS: [&str; 18] = [
    "one", "dir/two", "empty", "new", "dir/new", "new/dir/", "dir/", "", "/", ".", "..", "../out",
    "dir/../../out", "/out", "dir//two", "one/below", " one", "a\0b",
];

const CONTEXT: Context = Context {
    unique: 1,
    uid: 0,
    gid: 0,
    pid: 0,
    group: None,
};

struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

/// Waits for what the threads of the store do.
fn wait<T>(future: impl Future<Output = T>) -> T {
    let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
    let mut future = pin!(future);
    loop {
        match future.as_mut().poll(&mut std::task::Context::from_waker(&waker)) {
            Poll::Ready(value) => return value,
            Poll::Pending => std::thread::park(),
        }
    }
}

/// The beginning of what has no end.
fn contents(name: &str, len: usize) -> Vec<u8> {
    static ALL: OnceLock<Vec<u8>> = OnceLock::new();
    let all = ALL.get_or_init(|| (0..300_000).map(|n| (n * 7 + n / 251) as u8).collect());
    all[name.len()..][..len].to_vec()
}

/// A store and the cache of its mounts.
struct World {
    root: PathBuf,
}

impl World {
    /// A new one. The name of a cache has a hash of the store's path, so a mount makes it.
    fn new(parent: &Path) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let world = Self {
            root: parent.join(number.to_string()),
        };
        for (key, len) in OBJECTS {
            let path = world.store().join(key);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(&path, contents(key, len)).unwrap();
            let file = File::options().write(true).open(&path).unwrap();
            let time = SystemTime::UNIX_EPOCH + Duration::from_secs(1_600_000_000);
            file.set_modified(time).unwrap();
        }
        drop(world.mount(Writes::No));
        let made = fs::read_dir(world.root.join("cache")).unwrap().next();
        let made = made.unwrap().unwrap().path();
        let second = made.to_str().unwrap().trim_end_matches('0').to_owned() + "1";
        fs::create_dir(&second).unwrap();
        File::create(Path::new(&second).join("lock")).unwrap();
        world
    }

    fn store(&self) -> PathBuf {
        self.root.join("store")
    }

    /// The directories of caches; the first is the next mount's.
    fn caches(&self) -> Vec<PathBuf> {
        let all = fs::read_dir(self.root.join("cache")).unwrap();
        let mut all: Vec<_> = all.map(|entry| entry.unwrap().path()).collect();
        all.sort();
        all
    }

    fn mount(&self, writes: Writes) -> Session<ObjectFs> {
        let mut options = Options::default();
        options.cache_dir = Some(self.root.join("cache"));
        options.timeout = Duration::from_secs(2);
        options.ttl = Duration::ZERO;
        options.writes = writes;
        let uri = format!("fs://{}", self.store().display());
        let fs = ObjectFs::open(&uri, options).expect("damage keeps no store from being mounted");
        Session::unmounted(fs, SessionOptions::default()).expect("it has no kernel")
    }

    /// The files of the store.
    fn stored(&self) -> BTreeMap<String, Vec<u8>> {
        let mut found = BTreeMap::new();
        let mut directories = vec![self.store()];
        while let Some(directory) = directories.pop() {
            for entry in fs::read_dir(directory).unwrap() {
                let path = entry.unwrap().path();
                if path.is_dir() {
                    directories.push(path);
                    continue;
                }
                let key = path.strip_prefix(self.store()).unwrap();
                found.insert(key.to_str().unwrap().into(), fs::read(&path).unwrap());
            }
        }
        found
    }

    /// A mount shows what the store has.
    fn compare(&self, fs: &ObjectFs) {
        for (key, contents) in self.stored() {
            // Names that a directory of the host may have, and OpenDAL does not reach.
            if key.trim() != key {
                continue;
            }
            let read = read(fs, &key).unwrap_or_else(|error| panic!("{key:?}: {error}"));
            assert!(read == contents, "{key:?} has other contents");
        }
    }
}

impl Drop for World {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.root);
    }
}

/// Reads a file as the kernel does.
fn read(fs: &ObjectFs, key: &str) -> Result<Vec<u8>> {
    let mut node = ROOT;
    let mut size = 0;
    for name in key.split('/') {
        let entry = wait(fs.lookup(&CONTEXT, node, &CString::new(name).unwrap()))?;
        (node, size) = (entry.node, entry.attr.size as usize);
    }
    let fh = wait(fs.open(&CONTEXT, node, &OpenHow::new(OFlags::RDONLY)))?.fh;
    let payload = Payload::from(IoBuf::alloc(size + 1).unwrap());
    let len = wait(fs.read(&CONTEXT, node, &IoHow::new(fh, 0), &payload))?;
    // SAFETY: the handler has answered.
    let bytes = unsafe { payload.bytes() }.unwrap();
    Ok(bytes[..len].to_vec())
}

type Files = BTreeMap<String, Vec<u8>>;

/// The files that a mount leaves which has read all objects.
fn left() -> &'static Files {
    static LEFT: OnceLock<Files> = OnceLock::new();
    LEFT.get_or_init(|| {
        let world = World::new(parent());
        let mounted = world.mount(Writes::No);
        world.compare(mounted.fs());
        drop(mounted);
        let files = fs::read_dir(&world.caches()[0]).unwrap();
        let files = files.map(|entry| entry.unwrap().path());
        let files = files.map(|path| {
            let name = path.file_name().unwrap().to_str().unwrap().to_owned();
            (name, fs::read(path).unwrap())
        });
        files.filter(|(name, _)| name != "lock").collect()
    })
}

fn parent() -> &'static Path {
    static PARENT: OnceLock<tempfile::TempDir> = OnceLock::new();
    let make = || {
        let memory = Path::new("/dev/shm");
        match memory.is_dir() {
            true => tempfile::tempdir_in(memory),
            false => tempfile::tempdir(),
        }
    };
    PARENT.get_or_init(|| make().expect("a directory")).path()
}

/// Sets the checksums of a header, or of the frames of a journal.
fn seal(name: &str, bytes: &mut [u8]) {
    if name == JOURNAL {
        let mut rest = bytes.get_mut(8..).unwrap_or_default();
        while rest.len() >= 16 {
            let len = u32::from_le_bytes(rest[..4].try_into().unwrap());
            let Some((frame, behind)) = rest.split_at_mut_checked(16 + len as usize) else {
                return;
            };
            let sum = crc32c::crc32c(&frame[8..]);
            frame[4..8].copy_from_slice(&sum.to_le_bytes());
            rest = behind;
        }
        return;
    }
    if name.ends_with(".data") || bytes.len() < HEADER {
        return;
    }
    let header = &mut bytes[..HEADER];
    header[..8].copy_from_slice(b"uvfsmap1");
    let sum = crc32c::crc32c(&header[12..]);
    header[8..12].copy_from_slice(&sum.to_le_bytes());
}

/// A frame of a journal with a record, as docs/remote.md, `journal.rs` and `draft.rs` describe it. Its checksum is missing.
fn frame(number: &str, choose: &mut Bytes<'_>) -> Vec<u8> {
    let key = KEYS[choose.below(KEYS.len() as u64) as usize];
    let object = OBJECTS[choose.below(OBJECTS.len() as u64) as usize];
    // Flags, mode, owner, group, kind, device, order.
    let kinds = [0, 0, 0o120_000, 0o010_000, 0o100_000, 0o040_000];
    let kind = kinds[choose.below(6) as usize];
    let words = [choose.below(256) as u32, u32::MAX, u32::MAX, u32::MAX, kind, 0, choose.next() as u32];
    let mut record: Vec<_> = words.into_iter().flat_map(u32::to_le_bytes).collect();
    record.extend([choose.next() as u8; 16]);
    record.extend((object.1 as u64).to_le_bytes());
    record.extend(1_600_000_000_u64.to_le_bytes());
    record.extend(0_u32.to_le_bytes());
    record.extend((key.len() as u16).to_le_bytes());
    record.extend(u16::MAX.to_le_bytes());
    record.extend(key.as_bytes());
    let number = u64::from_str_radix(number, 16).unwrap_or(u64::MAX);
    let mut all = (record.len() as u32).to_le_bytes().to_vec();
    all.extend([0; 4]);
    all.extend(number.to_le_bytes());
    all.extend(record);
    all
}

/// Does one thing to the files of a directory.
fn damage(files: &mut Files, choose: &mut Bytes<'_>) {
    let how = choose.below(6);
    if how == 0 {
        let number = NUMBERS[choose.below(NUMBERS.len() as u64) as usize];
        let journal = files.entry(JOURNAL.to_owned()).or_insert_with(|| b"uvfsjnl1".to_vec());
        journal.extend(frame(number, choose));
        seal(JOURNAL, journal);
        let beside = choose.below(4);
        for (bit, end) in [(1, "new"), (2, "kept")] {
            if beside & bit != 0 {
                files.insert(format!("{number}.{end}"), contents(end, choose.below(200_000) as usize));
            }
        }
        return;
    }
    let Some(name) = files.keys().nth(choose.below(files.len() as u64) as usize) else {
        return;
    };
    let name = name.clone();
    let bytes = files.get_mut(&name).unwrap();
    let place = |bytes: &[u8], choose: &mut Bytes<'_>| match choose.below(4) {
        0 => choose.below(64),
        1 => HEADER as u64 + choose.below(64),
        _ => choose.below(bytes.len() as u64),
    };
    match how {
        1 | 2 => {
            let (at, new) = (place(bytes, choose) as usize, choose.next().to_be_bytes());
            let len = choose.below(9) as usize;
            for (old, new) in bytes.iter_mut().skip(at).zip(&new[8 - len.min(8)..]) {
                *old = *new;
            }
        }
        3 => {
            let len = place(bytes, choose) as usize;
            bytes.resize(len, 0);
        }
        4 => {
            files.remove(&name);
            return;
        }
        _ => {
            let ends = ["new", "kept", "tmp", "map", "data", "lost", "x"];
            let number = NUMBERS[choose.below(NUMBERS.len() as u64) as usize];
            let end = ends[choose.below(ends.len() as u64) as usize];
            let bytes = bytes.clone();
            files.insert(format!("{number}.{end}"), bytes);
            return;
        }
    }
    if choose.below(4) > 0 {
        seal(&name, bytes);
    }
}

/// Whether a damaged piece has the checksum that its map says. That is a cache that another program made, and no damage.
fn is_forged(files: &Files) -> bool {
    left().iter().any(|(name, before)| {
        let Some((data, map)) = name.strip_suffix(".data").and_then(|number| {
            Some((files.get(name)?, files.get(&format!("{number}.map"))?))
        }) else {
            return false;
        };
        let entries = map.get(HEADER..).unwrap_or_default().as_chunks().0;
        let pieces = data.chunks(PIECE).zip(before.chunks(PIECE)).zip(entries);
        let forged = |((now, before), entry): ((&[u8], &[u8]), &[u8; 8])| {
            now != before && u64::from_le_bytes(*entry) == 1 << 32 | u64::from(crc32c::crc32c(now))
        };
        pieces.into_iter().any(forged)
    })
}

fuzz_target!(|input: &[u8]| {
    let mut choose = Bytes(input);
    let writes = [Writes::No, Writes::Close, Writes::Back][choose.below(3) as usize];
    let mut all = [left().clone(), Files::new()];
    for _ in 0..1 + choose.below(6) {
        let which = usize::from(choose.below(4) == 0);
        damage(&mut all[which], &mut choose);
    }
    if is_forged(&all[0]) {
        return;
    }
    let world = World::new(parent());
    for (directory, files) in world.caches().iter().zip(&all) {
        for (name, bytes) in files {
            fs::write(directory.join(name), bytes).unwrap();
        }
        // A journal of any length is no reason to read all of it.
        if choose.below(8) == 1 && files.contains_key(JOURNAL) {
            let file = File::options().write(true).open(directory.join(JOURNAL)).unwrap();
            file.set_len(4 << 30).unwrap();
        }
    }
    let mounted = world.mount(writes);
    if writes == Writes::No {
        world.compare(mounted.fs());
    } else {
        mounted.fs().destroy();
        let counts = mounted.fs().counts();
        let waiting = counts.iter().find(|(name, _)| *name == "store_changes_waiting");
        if waiting.is_some_and(|(_, waiting)| *waiting == 0) {
            world.compare(mounted.fs());
        }
    }
    drop(mounted);
    // What is left of the cache is good.
    world.compare(world.mount(Writes::No).fs());
    let names = |directory: &Path| {
        let names = fs::read_dir(directory).unwrap();
        let mut names: Vec<_> = names.map(|entry| entry.unwrap().file_name()).collect();
        names.sort();
        names
    };
    assert_eq!(names(&world.root), ["cache", "store"]);
    assert_eq!(names(parent()).len(), 1);
    if !all.iter().any(|files| files.contains_key(JOURNAL)) {
        let objects = OBJECTS.map(|(key, len)| (key.to_owned(), contents(key, len)));
        assert!(world.stored() == BTreeMap::from(objects), "the store has changed");
    }
});
