//! Files of a store that the kernel writes by itself (docs/remote.md, "Files that the kernel writes").

use super::clients::Program;
use super::*;
use crate::backed::figure;

/// The cache is large enough for the kernel to write files.
const KERNEL: [&str; 2] = ["write=back", "cache_size=4G"];

/// What a program needs for the tests: a path, and `meanwhile`, which waits for the test.
const MAPS: &str = "
import mmap
def new(name): return os.open(path + name, os.O_RDWR | os.O_CREAT)
";

fn start(store: &InMemory, work: &str) -> Program {
    Program::start(store, false, &format!("{MAPS}{work}"))
}

fn can() -> bool {
    has(&[
        Need::Mount(Transport::Dev),
        Need::Uvfs,
        Need::Program("python3"),
    ])
}

/// What the store has of an object of the mount.
fn object(fake: &Fake, name: &str) -> Option<Vec<u8>> {
    let bucket = fake.bucket();
    let object = bucket.objects.get(&format!("p/{name}"));
    object.map(|object| object.contents.clone())
}

fn names(fake: &Fake) -> Vec<String> {
    fake.bucket().objects.keys().cloned().collect()
}

/// A store whose files the kernel writes; `None` where it can't be mounted.
fn written() -> Option<InMemory> {
    can().then(|| InMemory::new(&KERNEL, |_| {}))
}

/// Writes of a file that is open for reading and writing cost no request, and reach the store. So do those by an open that
/// appends beside it.
#[test]
fn writes_cost_no_request() {
    let Some(store) = written() else { return };
    let program = start(
        &store,
        r#"
fd = new("")
for n in range(1000): os.pwrite(fd, b"%04096d" % n, 4096 * n)
assert os.fstat(fd).st_size == os.stat(path).st_size == 4096000
assert os.pread(fd, 4096, 4096 * 7) == b"%04096d" % 7
meanwhile()
beside = os.open(path, os.O_WRONLY | os.O_APPEND)
os.write(beside, b"more")
assert os.fstat(fd).st_size == 4096004
assert os.pread(fd, 100, 4096000) == b"more"
os.pwrite(fd, b"M", 4096000)
os.ftruncate(fd, 4096002)
reader = os.open(path, os.O_RDONLY)
assert os.pread(reader, 100, 4096000) == b"Mo"
os.pwrite(fd, b"n", 4096001)
assert os.pread(reader, 100, 4096000) == b"Mn"
"#,
    );
    assert_eq!(figure(&store.mount, "backed_opens"), 1);
    let moved = ["READ", "WRITE"].map(|op| figure(&store.mount, op));
    assert_eq!(moved, [0, 0]);
    program.goes_on();
    program.ends().ok();
    store.mount.unmount().ok();
    let object = object(&store.fake, "file").unwrap();
    assert_eq!(object.len(), 4_096_002);
    assert_eq!(&object[4096 * 999..4096 * 999 + 4], b"0000");
    assert_eq!(&object[4_096_000..], b"Mn");
    assert_eq!(names(&store.fake), ["p/file"]);
}

/// Stores through a mapping that outlives close(2) reach the object, also if the store had the file meanwhile.
#[test]
fn a_mapping_outlives_the_open_file() {
    let Some(store) = written() else { return };
    let program = start(
        &store,
        r#"
fd = new("")
os.write(fd, b"a" * 8192)
memory = mmap.mmap(fd, 8192)
memory[0:1] = b"b"
os.close(fd)
meanwhile()
memory[1:2] = b"c"
memory.close()
"#,
    );
    wait_for("the first put", || {
        object(&store.fake, "file").is_some_and(|has| has.starts_with(b"baa"))
    });
    program.goes_on();
    program.ends().ok();
    wait_for("the second put", || {
        object(&store.fake, "file").is_some_and(|has| has.starts_with(b"bca"))
    });
    wait_for("the draft's end", || nothing_waits(&store));
    store.mount.unmount().ok();
    assert_eq!(names(&store.fake), ["p/file"]);
}

/// What fsync(2) put is not put again at the last close(2), or by another fsync(2), unless a mapping has changed it since.
#[test]
fn what_fsync_put_is_put_once() {
    let Some(store) = written() else { return };
    let program = start(
        &store,
        r#"
def write(name, stores):
    fd = new(name)
    os.write(fd, b"a" * 8192)
    memory = mmap.mmap(fd, 8192)
    memory[0:1] = b"b"
    os.fsync(fd)
    os.fsync(fd)
    os.close(fd)
    if stores: memory[0:1] = b"c"
    memory.close()
write("same", False)
write("other", True)
meanwhile()
"#,
    );
    program.goes_on();
    program.ends().ok();
    let puts = |name: &str| {
        let put = format!("PUT p/file{name}");
        let bucket = store.fake.bucket();
        bucket.asked.iter().filter(|asked| **asked == put).count()
    };
    wait_for("the second put", || {
        object(&store.fake, "fileother").is_some_and(|has| has.starts_with(b"ca"))
    });
    wait_for("the drafts' end", || nothing_waits(&store));
    store.mount.unmount().ok();
    assert!(object(&store.fake, "filesame").unwrap().starts_with(b"ba"));
    assert_eq!(["same", "other"].map(puts), [1, 2]);
}

fn nothing_waits(store: &InMemory) -> bool {
    let counts = stats(&store.mount.at)["counts"].clone();
    let counts = counts.as_array().expect("a list");
    (counts.iter()).any(|count| count["name"] == "store_changes_waiting" && count["count"] == 0)
}

/// A child closes the descriptor that it inherited, and the store gets the file as of then. It gets the rest later.
#[test]
fn an_inherited_descriptor_is_closed() {
    let Some(store) = written() else { return };
    let program = start(
        &store,
        r#"
fd = new("")
os.write(fd, b"one")
memory = mmap.mmap(fd, 3)
memory[0:1] = b"O"
if os.fork() == 0: os._exit(0)
os.wait()
meanwhile()
memory[1:2] = b"N"
os.lseek(fd, 0, os.SEEK_END)
os.close(fd)
memory.close()
"#,
    );
    wait_for("the first put", || {
        object(&store.fake, "file").is_some_and(|has| has == b"One")
    });
    program.goes_on();
    program.ends().ok();
    store.mount.unmount().ok();
    assert_eq!(object(&store.fake, "file").unwrap(), b"ONe");
}

/// The server is killed. Programs go on with what they have open and mapped, and the next mount puts all of it when they are
/// done: of what was never closed as another file.
#[test]
fn programs_go_on_when_the_server_is_killed() {
    let Some(store) = written() else { return };
    let program = start(
        &store,
        r#"
fd = new("closed")
os.write(fd, b"closed")
closed = mmap.mmap(fd, 6)
os.close(fd)
half = new("half")
os.write(half, b"half")
meanwhile()
closed[0:1] = b"C"
closed.flush()
assert os.write(half, b" more") == 5
"#,
    );
    let store = store.kill(|| {});
    assert_eq!(fs::read(store.at("fileclosed")).unwrap(), b"closed");
    program.goes_on();
    program.ends().ok();
    assert_eq!(fs::read(store.at("fileclosed")).unwrap(), b"Closed");
    assert!(!store.at("filehalf").exists());
    store.mount.unmount().ok();
    assert_eq!(object(&store.fake, "fileclosed").unwrap(), b"Closed");
    let names = names(&store.fake);
    assert_eq!(names.len(), 2, "{names:?}");
    let beside = names[1].strip_prefix("p/").unwrap();
    assert!(beside.starts_with("filehalf.interrupted-"), "{beside}");
    assert_eq!(object(&store.fake, beside).unwrap(), b"half more");
}

/// What a program closed stays if the server is killed while a program writes the file again.
#[test]
fn a_closed_file_is_written_again_when_the_server_is_killed() {
    let Some(store) = written() else { return };
    let program = start(
        &store,
        r#"
fd = new("")
os.write(fd, b"closed")
os.close(fd)
fd = new("")
os.write(fd, b"half")
meanwhile()
"#,
    );
    let store = store.kill(|| {
        program.goes_on();
        program.ends().ok();
    });
    assert_eq!(fs::read(store.at("file")).unwrap(), b"closed");
    store.mount.unmount().ok();
    assert_eq!(object(&store.fake, "file").unwrap(), b"closed");
    assert_eq!(names(&store.fake), ["p/file"]);
}

/// A file that loses its name, one that gets its name late, and one that changes it, while the kernel writes them.
#[test]
fn names_change_while_the_kernel_writes() {
    let Some(store) = written() else { return };
    let program = start(
        &store,
        r#"
fd = new("gone")
os.write(fd, b"gone")
os.unlink(path + "gone")
os.write(fd, b" and read")
assert os.pread(fd, 100, 0) == b"gone and read"
late = os.open(os.path.dirname(path), os.O_RDWR | os.O_TMPFILE)
os.write(late, b"late")
os.link("/proc/self/fd/%d" % late, path + "late", src_dir_fd=late, follow_symlinks=True)
os.write(late, b" name")
moved = new("before")
os.write(moved, b"moved")
os.rename(path + "before", path + "after")
os.write(moved, b" while open")
closed = new("closed")
os.write(closed, b"closed")
os.close(closed)
os.rename(path + "closed", path + "closed2")
meanwhile()
os.rename(path + "closed2", path + "closed3")
os.write(moved, b" and stored")
"#,
    );
    wait_for("a put", || object(&store.fake, "fileclosed2").is_some());
    program.goes_on();
    program.ends().ok();
    store.mount.unmount().ok();
    let all = ["p/fileafter", "p/fileclosed3", "p/filelate"];
    assert_eq!(names(&store.fake), all);
    let has = |name: &str| String::from_utf8(object(&store.fake, name).unwrap()).unwrap();
    assert_eq!(has("fileafter"), "moved while open and stored");
    assert_eq!(has("fileclosed3"), "closed");
    assert_eq!(has("filelate"), "late name");
}

/// A large file that the cache has whole is written without requests where the local disk has clones. A server that is killed
/// leaves it alone if no program wrote it.
#[test]
fn a_file_of_the_store_is_changed() {
    if !can() || !has(&[Need::Program("mkfs.xfs")]) {
        return;
    }
    let disk = Scratch::new();
    let cache = format!("cache_dir={}", disk.image_of("disk", "xfs", 4096).display());
    let content: Vec<u8> = (0..4 << 20).map(|n: u32| (n >> 8) as u8).collect();
    let store = InMemory::new(&[KERNEL[0], KERNEL[1], &cache], |fake| {
        fake.put("file", &content);
    });
    assert_eq!(fs::read(store.at("file")).unwrap(), content);
    let program = start(
        &store,
        r#"
fd = os.open(path, os.O_RDWR)
assert os.pread(fd, 2, 255) == b"\0\1"
meanwhile()
"#,
    );
    assert_eq!(figure(&store.mount, "backed_opens"), 1);
    let mut store = store.kill(|| {
        program.goes_on();
        program.ends().ok();
    });
    let open = |store: &InMemory| {
        let mut how = File::options();
        how.read(true).write(true).open(store.at("file")).unwrap()
    };
    let version = |store: &InMemory| store.fake.bucket().objects["p/file"].etag.clone();
    let before = version(&store);
    assert_eq!(fs::read(store.at("file")).unwrap(), content);
    drop(open(&store));
    store.mount.end().unwrap().ok();
    assert_eq!(version(&store), before);
    let store = store.again(|| {});
    assert_eq!(fs::read(store.at("file")).unwrap(), content);
    open(&store).write_all_at(b"changed", 4095).unwrap();
    assert_eq!(figure(&store.mount, "WRITE"), 0);
    store.mount.unmount().ok();
    let mut changed = content;
    changed[4095..4102].copy_from_slice(b"changed");
    assert_eq!(object(&store.fake, "file").unwrap(), changed);
    assert_eq!(names(&store.fake), ["p/file"]);
}
