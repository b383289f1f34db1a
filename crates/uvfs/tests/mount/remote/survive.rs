//! A mount of a store with `-o survive` goes on when its server is killed or replaced, and no program sees an error.

use super::*;
use crate::survive::{counts, has_load, is_kept, kill_under_load, replaced, upgrade};

/// Names that only a conflict, or a server that did not go on with what it had, leaves.
fn left_beside(fake: &Fake) -> Vec<String> {
    let is_left = |key: &&String| key.contains(".conflict-") || key.contains(".interrupted-");
    let bucket = fake.bucket();
    bucket.objects.keys().filter(is_left).cloned().collect()
}

fn outlives(options: &[&str], fill: impl FnOnce(&Fake)) -> InMemory {
    let store = InMemory::new(options, fill);
    is_kept(&store.mount);
    store
}

/// No call fails, no acknowledged change is lost or made twice, and the store gets all of it, once.
fn killed_under_load(options: &[&str]) {
    if !has_load() {
        return;
    }
    let store = outlives(&[options, &["survive"]].concat(), |_| {});
    kill_under_load(
        &store.mount,
        &["exchanges,attributes,links,symlinks,fifos"],
        Signal::KILL,
    );
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
    killed_under_load(&["write=close"]);
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
    let store = outlives(&["survive,write=close"], |_| {});
    fs::write(store.at("file"), "one").unwrap();
    let mut file = File::options().append(true).open(store.at("file")).unwrap();
    store.proxy.set(Mode::Refuse);
    replaced(&store.mount, Signal::KILL);
    std::io::Write::write_all(&mut file, b"two").unwrap();
    assert_eq!(fs::read(store.at("file")).unwrap(), b"onetwo");
    upgrade(&store.mount).ok();
    assert_eq!(fs::read(store.at("file")).unwrap(), b"onetwo");
    store.proxy.set(Mode::Pass);
    drop(file);
    wait_for("the store has it", || {
        let bucket = store.fake.bucket();
        let object = bucket.objects.get("p/file");
        object.is_some_and(|object| object.contents == b"onetwo")
    });
}

/// A promise that it can't keep is refused.
#[test]
fn write_back_is_refused() {
    if !has(&[Need::Uvfs]) {
        return;
    }
    let scratch = Scratch::new();
    let (uri, at) = (
        format!("fs://{}", scratch.dir("store").display()),
        scratch.dir("mount"),
    );
    let outcome = run(uvfs()
        .args(["mount", "-o", "survive,write=back", &uri])
        .arg(&at));
    assert_eq!(outcome.status.code(), Some(2), "{outcome}");
    assert!(outcome.stderr.contains("not with write=back"), "{outcome}");
}
