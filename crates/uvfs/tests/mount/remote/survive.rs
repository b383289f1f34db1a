//! A mount of a store with `-o survive` goes on when its server is killed or replaced, and no program sees an error.

use std::time::Duration;

use super::written::Directory;
use super::*;
use crate::survive::{
    WRITES, counts, die_under_load, has_load, is_kept, kill_under_load, replaced, upgrade,
};

/// Whether only a conflict, or a server that did not go on with what it had, leaves this name.
fn is_left(name: &str) -> bool {
    name.contains(".conflict-") || name.contains(".interrupted-")
}

fn left_beside(fake: &Fake) -> Vec<String> {
    let bucket = fake.bucket();
    let left = bucket.objects.keys().filter(|key| is_left(key));
    left.cloned().collect()
}

fn outlives(options: &[&str], fill: impl FnOnce(&Fake)) -> InMemory {
    let store = InMemory::new(options, fill);
    is_kept(&store.mount);
    store
}

/// Programs of the load that a store has nothing for.
const WITHOUT: &str = "exchanges,attributes,links,symlinks,fifos";

/// No call fails, no acknowledged change is lost or made twice, and the store gets all of it, once.
fn killed_under_load(options: &str) {
    if has_load() {
        let store = outlives(&[options, "survive"], |_| {});
        kill_under_load(&store.mount, &[WITHOUT], Signal::KILL);
        has_all(store);
    }
}

fn has_all(store: InMemory) {
    let appended = fs::read(store.at("appended")).unwrap();
    let InMemory { mount, fake, .. } = store;
    mount.unmount();
    assert_eq!(left_beside(&fake), Vec::<String>::new());
    let bucket = fake.bucket();
    let object = bucket.objects.get("p/appended").expect("it is put");
    assert!(object.contents == appended);
}

#[test]
fn a_killed_server_is_replaced_with_write_close() {
    killed_under_load("write=close");
}

#[test]
fn a_killed_server_is_replaced_with_write_back() {
    killed_under_load("write=back");
}

/// Names, appends and sqlite wait for the local disk alone. So the server is killed in other places.
#[test]
fn a_killed_server_is_replaced_with_nofsync() {
    killed_under_load("write=back,nofsync");
}

/// The same for servers that die between two of their writes. On a busy machine such a server may not come as far as the end of
/// its first request, or of its last one after the mount is gone, so this is one of the long variants.
#[test]
fn a_server_dies_between_two_writes() {
    if full() && has_load() {
        let serve = |serve: Serve| serve.dies_within(WRITES);
        let store = InMemory::with(serve, &["write=back,nofsync,survive"], |_| {});
        is_kept(&store.mount);
        // A long listing is many writes.
        die_under_load(&store.mount, &[&format!("{WITHOUT},lists")]);
        has_all(store);
    }
}

/// A request that a killed server had sent is done before the next server changes anything in the store, however long it is under
/// way: a put does not bring a renamed file back, and a removal does not take the file that was made anew.
#[test]
fn requests_of_a_killed_server_come_first() {
    if !has(&[Need::Mount(Transport::Dev), Need::Uvfs]) {
        return;
    }
    const LATE: Duration = Duration::from_secs(2);
    let store = outlives(&["survive,write=close"], |_| {});
    let late = |request: &(dyn Fn() + Sync)| {
        store.proxy.delay(LATE);
        std::thread::scope(|scope| {
            scope.spawn(request);
            std::thread::sleep(LATE / 4);
            replaced(&store.mount, Signal::KILL);
            store.proxy.delay(Duration::ZERO);
        });
    };
    let mut file = File::create(store.at("file")).unwrap();
    std::io::Write::write_all(&mut file, b"old").unwrap();
    late(&|| file.sync_all().unwrap());
    drop(file);
    fs::rename(store.at("file"), store.at("other")).unwrap();
    std::thread::sleep(LATE);
    let names = || Vec::from_iter(store.fake.bucket().objects.keys().cloned());
    assert_eq!(names(), ["p/other"]);
    late(&|| fs::remove_file(store.at("other")).unwrap());
    fs::write(store.at("other"), "new").unwrap();
    std::thread::sleep(LATE);
    assert_eq!(names(), ["p/other"]);
    assert_eq!(left_beside(&store.fake), Vec::<String>::new());
}

/// A put to a directory of the host is seen whole or not at all, and the next server knows which. It has no other way to tell
/// than what is there.
#[test]
fn a_killed_server_of_a_directory_of_the_host_is_replaced() {
    if !has_load() {
        return;
    }
    for way in ["survive,write=close", "survive,write=back"] {
        let store = Directory::new(way);
        is_kept(&store.mount);
        kill_under_load(&store.mount, &[WITHOUT], Signal::KILL);
        let at = &store.mount.at;
        let appended = fs::read(at.join("appended")).unwrap();
        assert!(!names_in(at).contains(".uvfs-puts"));
        store.mount.unmount();
        assert!(fs::read(store.objects.join("appended")).unwrap() == appended);
        let names = names_in(&store.objects);
        assert_eq!(names.iter().find(|name| is_left(name)), None);
    }
}

/// A server that finds the disk of its cache full goes on with what is there.
#[test]
fn a_full_disk_does_not_end_the_mount() {
    if !has(&[Need::Mount(Transport::Dev), Need::Uvfs]) {
        return;
    }
    let scratch = Scratch::new();
    let disk = scratch.tmpfs("disk", "16m");
    let cache = format!("cache_dir={}", disk.display());
    let store = outlives(&["survive,write=back,nofsync", &cache], |_| {});
    let mut open = File::create(store.at("open")).unwrap();
    std::io::Write::write_all(&mut open, b"before").unwrap();
    fs::write(store.at("closed"), "closed").unwrap();
    let filler = disk.join("filler");
    let full = fs::write(&filler, vec![1; 20 << 20]).unwrap_err();
    assert_eq!(full.kind(), std::io::ErrorKind::StorageFull);
    replaced(&store.mount, Signal::KILL);
    assert_eq!(fs::read(store.at("closed")).unwrap(), b"closed");
    assert_eq!(fs::read(store.at("open")).unwrap(), b"before");
    fs::remove_file(filler).unwrap();
    std::io::Write::write_all(&mut open, b" and after").unwrap();
    drop(open);
    fs::write(store.at("new"), "new").unwrap();
    let InMemory { mount, fake, .. } = store;
    mount.unmount();
    let contents = |key: &str| fake.bucket().objects[key].contents.to_vec();
    assert_eq!(contents("p/open"), b"before and after");
    assert_eq!(contents("p/closed"), b"closed");
    assert_eq!(contents("p/new"), b"new");
}

/// The version that a program has open is read to its end, though the store has another one by now, and what is cached is not
/// fetched again.
#[test]
fn readers_go_on() {
    if !has(&[Need::Mount(Transport::Dev), Need::Uvfs]) {
        return;
    }
    let contents: Vec<u8> = (0..5 << 20).map(|at: u32| (at >> 8) as u8).collect();
    let store = outlives(&["survive"], |fake| {
        fake.bucket().put("p/large", &contents);
        fake.bucket().put("p/dir/small", b"small");
    });
    let file = File::open(store.at("large")).unwrap();
    let mut names = fs::read_dir(store.at("")).unwrap();
    let first = names.next().unwrap().unwrap().file_name();
    let mut read = vec![0; contents.len()];
    file.read_exact_at(&mut read, 0).unwrap();
    store.fake.bucket().put("p/large", b"new");
    for kill in 0..3 {
        match kill {
            1 => drop(upgrade(&store.mount).ok()),
            _ => replaced(&store.mount, Signal::KILL),
        }
        read.fill(0);
        file.read_exact_at(&mut read, 0).unwrap();
        assert!(read == contents);
        assert_eq!(fs::read(store.at("dir/small")).unwrap(), b"small");
    }
    let names: Vec<_> = names.map(|name| name.unwrap().file_name()).collect();
    assert!(names.len() == 1 && names[0] != first, "{names:?}");
    assert_eq!(counts(&store.mount).programs, 2);
    wait_for("the new version", || {
        fs::read(store.at("large")).unwrap() == b"new"
    });
}

/// A server that begins while the store is down serves what is there, and the programs wait for the rest as they would otherwise.
#[test]
fn a_store_that_is_down_does_not_end_the_mount() {
    if !has(&[Need::Mount(Transport::Dev), Need::Uvfs]) {
        return;
    }
    let store = outlives(&["survive,write=back,nofsync"], |_| {});
    fs::write(store.at("file"), "one").unwrap();
    let mut file = File::options().append(true).open(store.at("file")).unwrap();
    store.proxy.set(Mode::Refuse);
    replaced(&store.mount, Signal::KILL);
    std::io::Write::write_all(&mut file, b"two").unwrap();
    assert_eq!(fs::read(store.at("file")).unwrap(), b"onetwo");
    upgrade(&store.mount).ok();
    assert_eq!(fs::read(store.at("file")).unwrap(), b"onetwo");
    drop(file);
    store.proxy.set(Mode::Pass);
    wait_for("the store has it", || {
        let bucket = store.fake.bucket();
        let object = bucket.objects.get("p/file");
        object.is_some_and(|object| object.contents == b"onetwo")
    });
}
