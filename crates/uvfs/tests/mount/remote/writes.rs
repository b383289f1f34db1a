//! Stores that programs write to.

use super::*;

/// A name that a program removed stays away if the server is killed while another program makes it anew, and contents that
/// were closed stay if it is killed while they are replaced.
#[test]
fn what_is_written_anew_when_the_server_is_killed() {
    if !has(&[Need::Mount(Transport::Dev), Need::Uvfs]) {
        return;
    }
    let store = InMemory::new(&["write=back", "timeout=10"], |fake| {
        fake.put("removed", b"at first");
    });
    fs::write(store.at("closed"), b"closed").unwrap();
    fs::remove_file(store.at("removed")).unwrap();
    let files = ["removed", "closed"].map(|name| {
        use std::io::Write;
        let mut file = File::create(store.at(name)).unwrap();
        file.write_all(b"half").unwrap();
        file
    });
    let store = store.kill(|| drop(files));
    assert!(!store.at("removed").exists());
    assert_eq!(fs::read(store.at("closed")).unwrap(), b"closed");
    store.mount.unmount().ok();
    let bucket = store.fake.bucket();
    assert!(!bucket.objects.contains_key("p/removed"));
    assert_eq!(bucket.objects["p/closed"].contents, b"closed");
    let beside = |key: &&String| key.starts_with("p/removed.interrupted-");
    assert_eq!(bucket.objects.keys().filter(beside).count(), 1);
}

/// More files and names may wait for the store than the server may have open files.
#[test]
fn more_changes_wait_than_files_may_be_open() {
    if !has(&[
        Need::Mount(Transport::Dev),
        Need::Uvfs,
        Need::Program("prlimit"),
    ]) {
        return;
    }
    let store = InMemory::new(&["write=back", "timeout=60", "ttl=600"], |fake| {
        for n in 0..200 {
            fake.put(&format!("old{n}"), b"old");
        }
    });
    let pid = store.mount.server.pid().to_string();
    let open = fs::read_dir(format!("/proc/{pid}/fd")).unwrap().count();
    let limit = format!("--nofile={}", open + 100);
    run(Command::new("prlimit").args(["--pid", &pid, &limit])).ok();
    let at = |name: &str, n: i32| store.mount.at.join(format!("{name}{n}"));
    assert_eq!(fs::read_dir(&store.mount.at).unwrap().count(), 200);
    store.proxy.set(Mode::Stall);
    for n in 0..200 {
        fs::write(at("new", n), n.to_string()).unwrap();
        fs::remove_file(at("old", n)).unwrap();
        fs::create_dir(at("made", n)).unwrap();
    }
    for n in 0..200 {
        assert_eq!(fs::read(at("new", n)).unwrap(), n.to_string().as_bytes());
    }
    store.proxy.set(Mode::Pass);
    store.mount.unmount().ok();
    let bucket = store.fake.bucket();
    for n in 0..200 {
        let contents = &bucket.objects[&format!("p/new{n}")].contents;
        assert_eq!(contents, n.to_string().as_bytes());
        assert!(bucket.objects.contains_key(&format!("p/made{n}/")));
    }
    assert_eq!(bucket.objects.len(), 400);
}

/// A directory that is removed, made and removed again before the store hears of it is gone, and a file may take its name.
#[test]
fn a_directory_is_removed_twice() {
    let Some(store) = Stored::new() else {
        return;
    };
    run(store.mount().args(["-o", "write=back"])).ok();
    let dir = store.at.join("dir");
    fs::remove_dir(&dir).unwrap();
    fs::create_dir(&dir).unwrap();
    fs::remove_dir(&dir).unwrap();
    fs::write(&dir, "a file").unwrap();
    store.unmount();
    assert_eq!(
        fs::read(store.scratch.path("store/dir")).unwrap(),
        b"a file"
    );
}

/// A mount is writable by its option alone, and not by fstab's `rw`.
#[test]
fn a_store_is_written_by_the_option() {
    let Some(store) = Stored::new() else {
        return;
    };
    for (options, writes) in [
        ("rw", false),
        ("write=close", true),
        ("write=close,ro", false),
    ] {
        run(store.mount().args(["-o", options])).ok();
        let written = fs::write(store.at.join("new"), options);
        assert_eq!(written.is_ok(), writes, "{options}");
        store.unmount();
    }
    assert_eq!(
        fs::read(store.scratch.path("store/new")).unwrap(),
        b"write=close"
    );
    let outcome = run(uvfs()
        .args(["mount", "-o", "write=close"])
        .arg(store.scratch.path("store"))
        .arg(&store.at));
    assert_eq!(outcome.status.code(), Some(2), "{outcome}");
    assert!(
        outcome.stderr.contains("-o write: only for object stores"),
        "{outcome}"
    );
}
