//! The promises of the page cache: copies, locks, errors, limits, and that nothing waits for what it
//! must not wait for.

mod limits;

use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use rustix::fs::RenameFlags;
use rustix::io::Errno;
use uvfs_client::layer::{Op, PageIo, Request};
use uvfs_client::{Advice, AllocateMode, Attr, Client, Config, File, Flags, OpenOptions, SetAttr};

use crate::common::faulty::faulty;
use crate::common::{connect, eventually, rw};

const MIB: usize = 1 << 20;

fn quiet() -> Config {
    // Nothing is written unless the test says so.
    Config::default()
        .memory(16 * MIB)
        .writeback_after(Duration::from_secs(3600))
}

/// Writeback sends many pages in one request.
#[test]
fn a_request_takes_two_locks_and_nothing_is_merged() {
    let dir = tempfile::tempdir().unwrap();
    let (_serving, connection) = connect(dir.path());
    let client = Client::new(connection, quiet()).unwrap();
    let file = client.open("f", rw()).unwrap();
    file.write_at(&vec![7; MIB], 0, Flags::empty()).unwrap();
    let before = client.stats();
    assert_eq!(before.bytes_in, MIB as u64);
    assert_eq!((before.writeback_requests, before.dirty_pages), (0, 256));
    file.sync_data().unwrap();
    let after = client.stats();
    assert_eq!(after.writeback_requests, 1);
    assert_eq!(after.writeback_pages, 256);
    assert_eq!(
        after.writeback_locks - before.writeback_locks,
        2,
        "one to start, one to end"
    );
    assert_eq!(
        (after.bytes_in, after.bytes_merged, after.dirty_pages),
        (MIB as u64, 0, 0)
    );

    // A cold read merges nothing either. (How often bytes are copied: `copies.rs`.)
    drop(file);
    let (_serving, connection) = connect(dir.path());
    let client = Client::new(connection, quiet()).unwrap();
    let file = client.open("f", OpenOptions::new().read(true)).unwrap();
    let mut buf = vec![0; MIB];
    assert_eq!(file.read_at(&mut buf, 0, Flags::empty()).unwrap(), MIB);
    assert!(buf.iter().all(|&b| b == 7));
    let stats = client.stats();
    assert_eq!(
        (stats.bytes_out, stats.bytes_in, stats.bytes_merged),
        (MIB as u64, 0, 0)
    );
}

/// A small write to a new part of a file waits for no read.
#[test]
fn a_partial_write_reads_nothing() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("f"), vec![1; 3 * 4096]).unwrap();
    let (_serving, connection) = connect(dir.path());
    let client = Client::new(connection, quiet()).unwrap();
    let file = client.open("f", OpenOptions::new().write(true)).unwrap();
    file.write_at(&[2; 100], 50, Flags::empty()).unwrap();
    file.write_at(&[3; 100], 150, Flags::empty()).unwrap();
    file.write_at(&[4; 10], 4096 + 4000, Flags::empty())
        .unwrap();
    // Does not meet the page's dirty bytes: those go first, and nothing is read.
    file.write_at(&[5; 10], 3000, Flags::empty()).unwrap();
    file.close().unwrap();
    assert_eq!(client.stats().read_requests, 0);
    let mut want = vec![1; 3 * 4096];
    want[50..150].fill(2);
    want[150..250].fill(3);
    want[3000..3010].fill(5);
    want[8096..8106].fill(4);
    assert!(std::fs::read(dir.path().join("f")).unwrap() == want);
}

/// Sequential reads are read ahead, random ones fetch only their pages.
#[test]
fn readahead_grows_on_sequential_reads_and_not_on_random_ones() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("f"), vec![1; 8 * MIB]).unwrap();
    let open = || {
        let (serving, connection) = connect(dir.path());
        let client = Client::new(connection, quiet()).unwrap();
        let file = client.open("f", OpenOptions::new().read(true)).unwrap();
        (serving, client, file)
    };
    let mut buf = vec![0; 4096];
    let (_serving, client, file) = open();
    for at in (0..8 * MIB as u64).step_by(4096) {
        assert_eq!(file.read_at(&mut buf, at, Flags::empty()).unwrap(), 4096);
    }
    let stats = client.stats();
    assert!(stats.read_requests <= 64, "{stats:?}");

    let (_serving, client, file) = open();
    for i in 0..100u64 {
        let page = i * 7919 % 2048 / 2 * 2 + 1;
        assert_eq!(
            file.read_at(&mut buf, page * 4096, Flags::empty()).unwrap(),
            4096
        );
    }
    let stats = client.stats();
    assert_eq!(stats.readahead_pages, 0, "{stats:?}");
    assert!(stats.cached_pages <= 100 + 16);
}

/// Streams that don't fit into the cache read each page once: what was read makes room for what was read ahead.
#[test]
fn streams_larger_than_the_cache_read_each_page_once() {
    const STREAMS: usize = 8;
    let dir = tempfile::tempdir().unwrap();
    for n in 0..STREAMS {
        std::fs::write(dir.path().join(n.to_string()), vec![1; 8 * MIB]).unwrap();
    }
    let (_serving, connection) = connect(dir.path());
    let client = Client::new(connection, quiet()).unwrap();
    let open = |n: usize| client.open(n.to_string(), OpenOptions::new().read(true));
    let files: Vec<File> = (0..STREAMS).map(|n| open(n).unwrap()).collect();
    let mut buf = vec![0; MIB / 16];
    for at in (0..8 * MIB).step_by(buf.len()) {
        for file in &files {
            let read = file.read_at(&mut buf, at as u64, Flags::empty()).unwrap();
            assert_eq!(read, buf.len());
        }
    }
    let stats = client.stats();
    let read = stats.reclaimed_pages + stats.cached_pages;
    let pages = (STREAMS * 8 * MIB / 4096) as u64;
    assert!(read <= pages + pages / 20, "{read} of {pages}: {stats:?}");
}

/// A file that has more free pages than are wanted gives them, and no other file loses any for that.
#[test]
fn spare_pages_of_a_stream_cost_no_other_file_its_pages() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("read"), vec![1; 17 * MIB]).unwrap();
    let (_serving, connection) = connect(dir.path());
    let client = Client::new(connection, quiet().readahead(0)).unwrap();
    // Its pages are dropped once they are written, and the last ones stay for the next write.
    let stream = client.open("stream", rw()).unwrap();
    for at in (0..24 * MIB).step_by(MIB) {
        let written = stream.write_at(&vec![2; MIB], at as u64, Flags::empty());
        assert_eq!(written.unwrap(), MIB);
    }
    stream.advise(Advice::DontNeed, 0, u64::MAX).unwrap();
    let file = client.open("read", OpenOptions::new().read(true)).unwrap();
    let mut page = vec![0; 4096];
    for at in (0..17 * MIB).step_by(4096) {
        let read = file.read_at(&mut page, at as u64, Flags::empty());
        assert_eq!(read.unwrap(), 4096);
        let stats = client.stats();
        assert!(at < 16 * MIB || stats.cached_pages > 3900, "{stats:?}");
    }
}

/// A page that was used twice stays while a stream goes by.
#[test]
fn what_is_used_again_stays_while_a_stream_goes_by() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("hot"), vec![1; 2 * MIB]).unwrap();
    std::fs::write(dir.path().join("stream"), vec![2; 64 * MIB]).unwrap();
    let (_serving, connection) = connect(dir.path());
    let client = Client::new(connection, quiet()).unwrap();
    let [hot, stream] =
        ["hot", "stream"].map(|name| client.open(name, OpenOptions::new().read(true)).unwrap());
    let mut buf = vec![0; MIB];
    let mut missed = Vec::new();
    for at in (0..64 * MIB).step_by(MIB) {
        if at % (4 * MIB) == 0 {
            let before = client.stats().misses;
            for at in [0, MIB] {
                hot.read_at(&mut buf, at as u64, Flags::empty()).unwrap();
            }
            missed.push(client.stats().misses - before);
        }
        stream.read_at(&mut buf, at as u64, Flags::empty()).unwrap();
    }
    assert!(
        missed[0] > 0 && missed[1..].iter().all(|&n| n == 0),
        "{missed:?}"
    );
}

/// Uncached calls neither fill the cache nor drop pages that were in it.
#[test]
fn uncached_calls_leave_nothing_and_older_pages_stay() {
    let dir = tempfile::tempdir().unwrap();
    let (_serving, connection) = connect(dir.path());
    let client = Client::new(connection, quiet()).unwrap();
    let file = client.open("f", rw()).unwrap();
    file.write_at(&vec![1; MIB], 0, Flags::empty()).unwrap();
    file.sync_data().unwrap();
    for i in 1..64 {
        file.write_at(&vec![2; MIB], i * MIB as u64, Flags::DONTCACHE)
            .unwrap();
    }
    // Over the old pages as well.
    file.write_at(&vec![3; MIB], 0, Flags::DONTCACHE).unwrap();
    eventually("writeback ends by itself", || {
        client.stats().dirty_pages == 0
    });
    let hits = |at: u64| {
        let before = client.stats().read_requests;
        let mut buf = [0; 4096];
        assert_eq!(file.read_at(&mut buf, at, Flags::DONTCACHE).unwrap(), 4096);
        (client.stats().read_requests == before, buf[0])
    };
    assert_eq!(hits(4096), (true, 3), "an older page stays");
    assert_eq!(
        hits(5 * MIB as u64),
        (false, 2),
        "a page of an uncached write goes"
    );
    assert_eq!(
        hits(5 * MIB as u64),
        (false, 2),
        "a page of an uncached read goes"
    );
    let stats = client.stats();
    assert!(stats.peak_pages * 4096 < 14 * MIB as u64, "{stats:?}");
    assert_eq!(file.size(), 64 * MIB as u64);
}

/// A program learns once of each file that its data was not written.
#[test]
fn a_failed_writeback_is_told_once_per_file_and_tried_again() {
    let dir = tempfile::tempdir().unwrap();
    let (_serving, client, fault) = faulty(dir.path(), quiet());
    let (a, b) = (
        client.open("f", rw()).unwrap(),
        client.open("f", rw()).unwrap(),
    );
    a.write_at(&[9; 5000], 100, Flags::empty()).unwrap();
    fault.errno.store(libc::ENOSPC, Ordering::Relaxed);
    fault.every.store(1, Ordering::Relaxed);
    assert_eq!(a.sync_all().unwrap_err().errno(), Errno::NOSPC);
    assert_eq!(client.stats().dirty_pages, 2, "kept");
    fault.every.store(0, Ordering::Relaxed);
    a.sync_all().unwrap();
    assert_eq!(
        b.sync_all().unwrap_err().errno(),
        Errno::NOSPC,
        "told once each"
    );
    b.sync_all().unwrap();
    let real = std::fs::read(dir.path().join("f")).unwrap();
    assert_eq!(real.len(), 5100);
    assert!(real[..100].iter().all(|&x| x == 0) && real[100..].iter().all(|&x| x == 9));
    let late = client.open("f", rw()).unwrap();
    late.close().unwrap();
}

/// Errors of the server lose no data that a sync has acknowledged.
#[test]
fn errors_at_every_nth_request_lose_nothing_that_was_acknowledged() {
    for every in 2..9 {
        let dir = tempfile::tempdir().unwrap();
        let config = quiet().memory(MIB).max_request(16 << 10);
        let (_serving, client, fault) = faulty(dir.path(), config);
        fault.errno.store(libc::EIO, Ordering::Relaxed);
        fault.every.store(every, Ordering::Relaxed);
        let file = client.open("f", rw()).unwrap();
        let mut model = vec![0u8; 3 * MIB];
        for i in 0..400usize {
            let at = i * 7919 * 13 % (3 * MIB - 9000);
            let len = 1 + i * 37 % 9000;
            let data = vec![i as u8 | 1; len];
            let flags = [Flags::empty(), Flags::DONTCACHE, Flags::DIRECT][i % 3];
            // A write may fail; what it says it wrote must be there. The result of a failed direct write
            // is unknown, so it is written again until it works.
            for attempt in 0.. {
                assert!(attempt < 100);
                let n = file.write_at(&data, at as u64, flags).unwrap_or(0);
                model[at..at + n].copy_from_slice(&data[..n]);
                if n == len {
                    break;
                }
            }
            let mut buf = vec![0; len];
            if let Ok(n) = file.read_at(&mut buf, at as u64, Flags::empty()) {
                assert!(buf[..n] == model[at..at + n], "every {every}, write {i}");
            }
        }
        assert!(fault.failed.load(Ordering::Relaxed) > 0);
        fault.every.store(0, Ordering::Relaxed);
        let _ = file.sync_all();
        file.sync_all().unwrap();
        let size = file.size() as usize;
        let real = std::fs::read(dir.path().join("f")).unwrap();
        assert_eq!(real.len(), size);
        assert!(real == model[..size], "every {every}");
    }
}

/// All pieces of a large direct call are under way at once, and only those that were read count.
#[test]
fn direct_pieces_are_sent_together_and_a_short_or_failed_one_ends_the_call() {
    let dir = tempfile::tempdir().unwrap();
    let config = quiet().max_request(128 << 10);
    let (_serving, client, fault) = faulty(dir.path(), config);
    // Longer than the copying takes: the first pieces leave while the rest is copied.
    fault.latency_us.store(50_000, Ordering::Relaxed);
    let file = client.open("f", rw()).unwrap();
    let data: Vec<u8> = (0..2 * MIB).map(|i| (i / 4096) as u8).collect();
    assert_eq!(file.write_at(&data, 0, Flags::DIRECT).unwrap(), 2 * MIB);
    assert_eq!(fault.peak.load(Ordering::Relaxed), 16, "all at once");
    let mut back = vec![0; 2 * MIB + 5];
    assert_eq!(file.read_at(&mut back, 0, Flags::DIRECT).unwrap(), 2 * MIB);
    assert!(back[..2 * MIB] == data);
    let pending: Vec<_> = (0..4)
        .map(|i| file.submit_read_at(vec![0; MIB / 2], i * (MIB as u64 / 2), Flags::DIRECT))
        .collect();
    for (i, p) in pending.into_iter().enumerate() {
        assert!(p.wait().unwrap() == data[i * MIB / 2..(i + 1) * MIB / 2]);
    }

    // The fifth piece of a write that makes the file longer fails: it ends there, although later
    // pieces succeeded. The server keeps those, and may have given another client the new size.
    fault.errno.store(libc::EIO, Ordering::Relaxed);
    let sent = fault.requests.load(Ordering::Relaxed);
    fault.every.store(sent + 5, Ordering::Relaxed);
    assert_eq!(
        file.write_at(&data[..MIB], 2 * MIB as u64, Flags::DIRECT)
            .unwrap(),
        512 << 10
    );
    fault.every.store(0, Ordering::Relaxed);
    assert_eq!(
        std::fs::metadata(dir.path().join("f")).unwrap().len(),
        file.size()
    );

    // A short piece in the middle.
    let sent = fault.requests.load(Ordering::Relaxed);
    fault.short_every.store(sent + 2, Ordering::Relaxed);
    assert_eq!(
        file.write_at(&data[..MIB], 0, Flags::DIRECT).unwrap(),
        (128 + 64) << 10
    );
}

/// Direct reads see cached writes, and cached reads see direct writes.
#[test]
fn direct_and_cached_calls_see_each_other() {
    let dir = tempfile::tempdir().unwrap();
    let (_serving, connection) = connect(dir.path());
    let client = Client::new(connection, quiet()).unwrap();
    let file = client.open("f", rw()).unwrap();
    let mut buf = [0; 8192];
    file.write_at(&[1; 8192], 0, Flags::empty()).unwrap();
    assert_eq!(file.read_at(&mut buf, 0, Flags::DIRECT).unwrap(), 8192);
    assert_eq!(buf, [1; 8192]);
    file.write_at(&[2; 5000], 1000, Flags::DIRECT).unwrap();
    assert_eq!(file.read_at(&mut buf, 0, Flags::empty()).unwrap(), 8192);
    assert!(buf[1000..6000].iter().all(|&b| b == 2) && buf[999] == 1 && buf[6000] == 1);
    // A hole that only the client knows of.
    file.write_at(&[3; 10], 100_000, Flags::empty()).unwrap();
    assert_eq!(file.read_at(&mut buf, 50_000, Flags::DIRECT).unwrap(), 8192);
    assert_eq!(buf, [0; 8192]);
    file.allocate(AllocateMode::PunchHole, 0, 4096).unwrap();
    assert_eq!(file.seek_data(0).unwrap(), 4096);
    assert_eq!(file.seek_hole(4096).unwrap() % 4096, 0);
    assert_eq!(file.seek_data(100_010).unwrap_err().errno(), Errno::NXIO);
}

/// Threads that write to one page lose none of the writes.
#[test]
fn threads_on_one_file_lose_no_write() {
    let dir = tempfile::tempdir().unwrap();
    let config = quiet()
        .memory(MIB)
        .writeback_after(Duration::ZERO)
        .background_percent(2)
        .dirty_percent(10)
        .max_request(32 << 10);
    let (_serving, connection) = connect(dir.path());
    let client = Client::new(connection, config).unwrap();
    let file = client.open("f", rw()).unwrap();
    file.set_len(4 * MIB as u64).unwrap();
    std::thread::scope(|s| {
        for t in 0..4u64 {
            let file = file.clone();
            // Each thread owns every fourth kilobyte: all pages are shared.
            s.spawn(move || {
                for round in 0..3u8 {
                    for k in 0..1024u64 {
                        let at = (k * 4 + t) * 1024;
                        let data = [round * 4 + t as u8 + 1; 1024];
                        let flags = if (k + t) % 5 == 0 {
                            Flags::DONTCACHE
                        } else {
                            Flags::empty()
                        };
                        assert_eq!(file.write_at(&data, at, flags).unwrap(), 1024);
                        let mut back = [0; 1024];
                        assert_eq!(file.read_at(&mut back, at, Flags::empty()).unwrap(), 1024);
                        assert_eq!(back, data, "thread {t}, round {round}, {at}");
                    }
                }
            });
        }
    });
    file.close().unwrap();
    let real = std::fs::read(dir.path().join("f")).unwrap();
    for (k, block) in real.chunks(1024).enumerate() {
        assert!(
            block.iter().all(|&b| b == 8 + (k % 4) as u8 + 1),
            "block {k}"
        );
    }
}

/// Calls on names and attributes give the host's results.
#[test]
fn names_and_attributes() {
    let dir = tempfile::tempdir().unwrap();
    let (_serving, connection) = connect(dir.path());
    let client = Client::new(connection, quiet()).unwrap();
    client.mkdir("a", 0o755).unwrap();
    client.mkdir("a/b", 0o700).unwrap();
    let file = client.create("a/b/f").unwrap();
    file.write_at(b"data", 0, Flags::empty()).unwrap();
    assert_eq!(
        client.stat("a/b/f").unwrap().size,
        4,
        "what is not written yet counts"
    );
    assert_eq!(client.create("a/b/f").unwrap_err().errno(), Errno::EXIST);
    client.symlink("b/f", "a/link").unwrap();
    assert_eq!(client.readlink("a/link").unwrap().to_str(), Some("b/f"));
    assert_eq!(client.stat("/a/link").unwrap().size, 4);
    client.symlink("loop", "loop").unwrap();
    assert_eq!(client.stat("loop").unwrap_err().errno(), Errno::LOOP);
    client.link("a/b/f", "hard").unwrap();
    assert_eq!(client.stat("hard").unwrap().nlink, 2);
    client
        .rename("hard", "a/moved", RenameFlags::empty())
        .unwrap();
    assert_eq!(client.stat("hard").unwrap_err().errno(), Errno::NOENT);
    assert_eq!(client.stat("a/../a/b/../moved").unwrap().size, 4);
    let mut names: Vec<_> = client
        .readdir("a")
        .unwrap()
        .into_iter()
        .map(|e| e.name)
        .collect();
    names.sort();
    assert_eq!(names, ["b", "link", "moved"]);
    let set = SetAttr {
        mode: Some(0o640),
        mtime: Some((1000, 5)),
        ..SetAttr::default()
    };
    let attr = client.setattr("a/moved", &set).unwrap();
    let mtime = |attr: Attr| (attr.mtime, attr.mtimensec);
    assert_eq!((attr.mode & 0o777, mtime(attr)), (0o640, (1000, 5)));
    file.close().unwrap();
    assert_eq!(
        mtime(client.stat("a/moved").unwrap()),
        (1000, 5),
        "nothing was left to write"
    );
    client
        .setattr(
            "a/moved",
            &SetAttr {
                size: Some(2),
                ..SetAttr::default()
            },
        )
        .unwrap();
    assert_eq!(std::fs::read(dir.path().join("a/moved")).unwrap(), b"da");
    client.unlink("a/moved").unwrap();
    client.unlink("a/b/f").unwrap();
    assert_eq!(client.rmdir("a").unwrap_err().errno(), Errno::NOTEMPTY);
    client.rmdir("a/b").unwrap();
    assert!(client.statfs().unwrap().blocks > 0);
    let e = client.open("a", OpenOptions::new().read(true)).unwrap_err();
    assert_eq!(e.errno(), Errno::ISDIR);
}

/// The future of a call is woken when the call ends.
#[test]
fn a_completion_can_be_awaited() {
    struct Thread(std::thread::Thread);
    impl std::task::Wake for Thread {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("f"), vec![4; MIB]).unwrap();
    let (_serving, client, fault) = faulty(dir.path(), quiet());
    fault.latency_us.store(1000, Ordering::Relaxed);
    let file = client.open("f", rw()).unwrap();
    let waker = Arc::new(Thread(std::thread::current())).into();
    let mut cx = std::task::Context::from_waker(&waker);
    for flags in [Flags::empty(), Flags::DIRECT, Flags::DONTCACHE] {
        let mut pending = std::pin::pin!(file.submit_read_at(vec![0; 100_000], 5000, flags));
        let got = loop {
            match std::future::Future::poll(pending.as_mut(), &mut cx) {
                std::task::Poll::Ready(got) => break got.unwrap(),
                std::task::Poll::Pending => std::thread::park_timeout(Duration::from_secs(30)),
            }
        };
        assert!(got == vec![4; 100_000]);
    }
}

/// copy_range copies what was written before it, cached or not.
#[test]
fn ranges_are_copied_with_what_is_cached_of_them() {
    let dir = tempfile::tempdir().unwrap();
    let ((_serving, a), (_other_serving, b)) = (connect(dir.path()), connect(dir.path()));
    let one = Client::new(a, quiet()).unwrap();
    let other = Client::new(b, quiet()).unwrap();
    let from = one.open("from", rw()).unwrap();
    let data: Vec<u8> = (0..3 * MIB).map(|i| (i / 3) as u8).collect();
    from.write_at(&data[..2 * MIB], 0, Flags::empty()).unwrap();
    from.sync_data().unwrap();
    // The rest is dirty.
    from.write_at(&data[2 * MIB..], 2 * MIB as u64, Flags::empty())
        .unwrap();
    // At the server, and between clients, which have no server in common.
    for (i, client) in [&one, &other].into_iter().enumerate() {
        let to = client.open(format!("to{i}"), rw()).unwrap();
        let mut model = vec![9; MIB];
        to.write_at(&model, 0, Flags::empty()).unwrap();
        let mut read = vec![0; 4 * MIB];
        assert_eq!(to.read_at(&mut read, 0, Flags::empty()).unwrap(), MIB);
        for (at, to_at, len) in [
            (0, 5000, 3000),
            (100, 700_000, 2 * MIB),
            (2_900_000, 12, MIB),
        ] {
            let copied = from.copy_range(at as u64, &to, to_at as u64, len as u64);
            let expected = len.min(data.len() - at);
            assert_eq!(copied.unwrap(), expected as u64);
            model.resize(model.len().max(to_at + expected), 0);
            model[to_at..to_at + expected].copy_from_slice(&data[at..at + expected]);
            let n = to.read_at(&mut read, 0, Flags::empty()).unwrap();
            assert!(read[..n] == model);
        }
        assert_eq!(from.copy_range(3 * MIB as u64, &to, 0, 10).unwrap(), 0);
        to.sync_all().unwrap();
        let host = std::fs::read(dir.path().join(format!("to{i}"))).unwrap();
        assert!(host == model);
    }
    // Within one file.
    assert_eq!(from.copy_range(0, &from, MIB as u64, 4096).unwrap(), 4096);
    let mut read = vec![0; 4096];
    from.read_at(&mut read, MIB as u64, Flags::empty()).unwrap();
    assert!(read == data[..4096]);
    let code = |result: uvfs_client::Result<u64>| result.unwrap_err().errno();
    assert_eq!(code(from.copy_range(0, &from, 10, 11)), Errno::INVAL);
    assert_eq!(code(from.copy_range(u64::MAX, &from, 0, 1)), Errno::INVAL);
    let append = one.open("to0", OpenOptions::new().append(true)).unwrap();
    assert_eq!(code(from.copy_range(0, &append, 0, 1)), Errno::BADF);
    assert_eq!(code(append.copy_range(0, &from, 0, 1)), Errno::BADF);
}
