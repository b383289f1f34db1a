//! A store of several machines loses one.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use uvfs_object::Writes;
use uvfs_testing::{Need, has};

use crate::stores::{At, Seaweed};
use crate::{MIB, bytes, serve};

const FILES: usize = 12;

/// Readers of what the lost server had see no error, and the same contents.
#[test]
fn a_lost_volume_server_is_no_error() {
    if !has(&[Need::Fuse, Need::Program("weed"), Need::Program("setpriv")]) {
        return;
    }
    let mut store = Seaweed::cluster();
    let contents: Vec<_> = (0..FILES).map(|n| bytes(6 * MIB + n, n as u64)).collect();
    for (n, content) in contents.iter().enumerate() {
        store.put(&format!("c/{n}"), content);
    }
    let served = serve(&store.uri(), |_| {});
    let (read, next) = (AtomicUsize::new(0), AtomicUsize::new(0));
    std::thread::scope(|scope| {
        for _ in 0..3 {
            let (served, contents, read, next) = (&served, &contents, &read, &next);
            scope.spawn(move || {
                loop {
                    let n = next.fetch_add(1, Ordering::SeqCst);
                    if n >= FILES {
                        return;
                    }
                    let mut file = File::open(served.at(&format!("c/{n}"))).unwrap();
                    let mut data = vec![0; contents[n].len()];
                    for part in data.chunks_mut(MIB) {
                        file.read_exact(part).unwrap();
                        read.fetch_add(1, Ordering::SeqCst);
                    }
                    assert!(data == contents[n], "{n}");
                }
            });
        }
        while read.load(Ordering::SeqCst) < FILES {
            std::thread::sleep(Duration::from_millis(1));
        }
        store.lose_a_volume_server();
    });
    assert!(read.load(Ordering::SeqCst) > FILES * 6);
    // Nothing of it is cached in another mount.
    let fresh = serve(&store.uri(), |_| {});
    for (n, content) in contents.iter().enumerate() {
        assert!(
            fs::read(fresh.at(&format!("c/{n}"))).unwrap() == *content,
            "{n}"
        );
    }
}

/// Writers see no error either, and all that they closed is there.
#[test]
fn a_lost_volume_server_is_no_error_for_writers() {
    if !has(&[Need::Fuse, Need::Program("weed"), Need::Program("setpriv")]) {
        return;
    }
    let mut store = Seaweed::cluster();
    let served = serve(&store.uri(), |options| options.writes = Writes::Close);
    let contents: Vec<_> = (0..FILES).map(|n| bytes(MIB + n, n as u64)).collect();
    let (written, next) = (AtomicUsize::new(0), AtomicUsize::new(0));
    std::thread::scope(|scope| {
        for _ in 0..3 {
            let (served, contents, written, next) = (&served, &contents, &written, &next);
            scope.spawn(move || {
                loop {
                    let n = next.fetch_add(1, Ordering::SeqCst);
                    if n >= FILES {
                        return;
                    }
                    let mut file = File::create_new(served.at(&n.to_string())).unwrap();
                    file.write_all(&contents[n]).unwrap();
                    file.sync_all().unwrap();
                    written.fetch_add(1, Ordering::SeqCst);
                }
            });
        }
        while written.load(Ordering::SeqCst) < FILES / 3 {
            std::thread::sleep(Duration::from_millis(1));
        }
        store.lose_a_volume_server();
    });
    let fresh = serve(&store.uri(), |_| {});
    for (n, content) in contents.iter().enumerate() {
        let stored = fs::read(fresh.at(&n.to_string())).unwrap();
        assert!(stored == *content, "{n}");
    }
}
