//! The cache at its limit: how writers wait, and what gives way.

use std::sync::mpsc::{Receiver, Sender, channel};

use super::*;

/// A stream pushes nothing else out of the cache.
#[test]
fn a_stream_larger_than_the_cache_passes_through_few_pages() {
    let want: Vec<u8> = (0..=255).cycle().step_by(3).take(4093).collect();
    let want = want.repeat(20 * MIB / 4093);
    for (block, every) in [(1 << 10, 0), (1000, 0), (4 << 10, 0), (MIB, 0), (5000, 9)] {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("kept"), vec![3; MIB]).unwrap();
        let config = quiet().memory(8 * MIB);
        let (_serving, client, fault) = faulty(dir.path(), config);
        // So that the pages used don't depend on time.
        fault.waits.store(true, Ordering::Relaxed);
        fault.errno.store(libc::EIO, Ordering::Relaxed);
        let kept = client.open("kept", rw()).unwrap();
        let mut buf = vec![0; MIB];
        kept.read_at(&mut buf, 0, Flags::empty()).unwrap();
        let before = client.stats();

        let file = client.open("stream", rw()).unwrap();
        fault.every.store(every, Ordering::Relaxed);
        let mut at = 0;
        while at < want.len() {
            let part = &want[at..want.len().min(at + block)];
            // A write that fails is tried again.
            at += file.write_at(part, at as u64, Flags::empty()).unwrap_or(0);
        }
        fault.every.store(0, Ordering::Relaxed);
        let _ = file.sync_all();
        file.sync_all().unwrap();
        assert!(std::fs::read(dir.path().join("stream")).unwrap() == want);
        let after = client.stats();
        assert_eq!(after.dirty_pages, 0);
        if every == 0 {
            assert!(after.peak_pages < 2048, "{block}: {after:?}");
            assert_eq!(after.reclaimed_pages, 0, "{block}: {after:?}");
        }
        // Pages that others use stay, and pages that went by are read again.
        kept.read_at(&mut buf, 0, Flags::empty()).unwrap();
        if every == 0 {
            assert_eq!(client.stats().misses, before.misses, "{block}");
        }
        for at in [0, 7 * MIB, 19 * MIB] {
            let n = file.read_at(&mut buf, at as u64, Flags::empty()).unwrap();
            assert!(buf[..n] == want[at..at + n], "{block}: at {at}");
        }
        file.close().unwrap();
    }
}

/// Writers that are faster than the server wait once the cache is full.
#[test]
fn writers_are_held_back_at_the_limit_and_the_cache_stays_within_its_memory() {
    let dir = tempfile::tempdir().unwrap();
    let config = quiet().memory(2 * MIB);
    let (_serving, client, fault) = faulty(dir.path(), config);
    fault.latency_us.store(500, Ordering::Relaxed);
    std::thread::scope(|s| {
        for t in 0..2u8 {
            let client = &client;
            s.spawn(move || {
                let file = client.open(format!("f{t}"), rw()).unwrap();
                let data = vec![t + 1; 10_000];
                for i in 0..2000u64 {
                    assert_eq!(
                        file.write_at(&data, i * 10_000, Flags::empty()).unwrap(),
                        10_000
                    );
                }
                file.close().unwrap();
            });
        }
    });
    let stats = client.stats();
    assert!(
        stats.throttles > 0 && stats.reclaimed_pages > 0,
        "{stats:?}"
    );
    assert!(stats.peak_pages <= 512);
    for t in 0..2u8 {
        let real = std::fs::read(dir.path().join(format!("f{t}"))).unwrap();
        assert_eq!(real.len(), 20_000_000);
        assert!(real.iter().all(|&b| b == t + 1));
    }
}

/// Writers do not hang where every writeback fails.
#[test]
fn a_store_that_only_fails_does_not_hold_writers_for_ever() {
    let dir = tempfile::tempdir().unwrap();
    let config = quiet().memory(MIB);
    let (_serving, client, fault) = faulty(dir.path(), config);
    fault.errno.store(libc::ENOSPC, Ordering::Relaxed);
    fault.every.store(1, Ordering::Relaxed);
    let file = client.open("f", rw()).unwrap();
    let mut written = 0;
    let error = loop {
        match file.write_at(&[1; 4096], written, Flags::empty()) {
            Ok(n) => written += n as u64,
            Err(e) => break e,
        }
        assert!(written < 2 * MIB as u64);
    };
    assert_eq!(error.errno(), Errno::NOSPC);
    fault.every.store(0, Ordering::Relaxed);
    let _ = file.sync_all();
    file.sync_all().unwrap();
    assert_eq!(
        std::fs::metadata(dir.path().join("f")).unwrap().len(),
        written
    );
}

/// A layer with one thread for writes, which needs memory of the same cache for each: it reads another file
/// through the client whose writeback it is serving, as a server in the same process may.
#[derive(Default)]
struct Nested {
    file: OnceLock<File>,
    armed: AtomicBool,
    reads: AtomicU64,
}

impl Nested {
    fn serve(&self, requests: Receiver<Request>, inner: &dyn PageIo) {
        for request in requests {
            if self.armed.load(Ordering::Acquire) {
                let n = self.reads.fetch_add(1, Ordering::Relaxed);
                let mut buf = [0; 4096];
                let file = self.file.get().unwrap();
                let got = file
                    .read_at(&mut buf, n % 512 * 4096, Flags::empty())
                    .unwrap();
                assert_eq!((got, buf[0]), (4096, 6));
                // Slower than the writer, however slow that is: it has to wait for pages.
                std::thread::sleep(Duration::from_millis(2));
            }
            inner.submit(&mut vec![request]);
        }
    }
}

struct Single {
    inner: Arc<dyn PageIo>,
    queue: Sender<Request>,
}

impl PageIo for Single {
    fn submit(&self, batch: &mut Vec<Request>) {
        for request in batch.extract_if(.., |request| request.op == Op::Write) {
            self.queue.send(request).unwrap();
        }
        // A read by that thread itself does not wait for it.
        self.inner.submit(batch);
    }

    fn poll(&self, _: &mut dyn FnMut() -> bool) {}
}

/// Client and server do not wait for each other's memory.
#[test]
fn a_one_thread_server_that_needs_pages_to_answer_a_write_does_not_deadlock() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("other"), vec![6; 2 * MIB]).unwrap();
    // Nearly all memory may be dirty: the server's reads live off what little is left.
    let config = quiet()
        .memory(MIB)
        .dirty_percent(90)
        .readahead(0)
        .max_request(64 << 10);
    let nested = Arc::<Nested>::default();
    let (_serving, connection) = connect(dir.path());
    let client = Client::layered(connection, config, 0, |_, inner| {
        let (queue, requests) = channel();
        let (nested, below) = (nested.clone(), inner.clone());
        std::thread::spawn(move || nested.serve(requests, &*below));
        Arc::new(Single { inner, queue })
    })
    .unwrap();
    let other = client.open("other", OpenOptions::new().read(true)).unwrap();
    nested.file.set(other).unwrap();
    nested.armed.store(true, Ordering::Release);
    let file = client.open("f", rw()).unwrap();
    let (tell, told) = std::sync::mpsc::channel();
    let writer = std::thread::spawn(move || {
        for i in 0..2000u64 {
            // Not one after another: a stream would keep few pages dirty.
            let at = (i ^ 1) * 8192;
            file.write_at(&[5; 8192], at, Flags::empty()).unwrap();
        }
        file.close().unwrap();
        tell.send(()).unwrap();
    });
    told.recv_timeout(Duration::from_secs(60))
        .expect("no deadlock");
    writer.join().unwrap();
    assert!(nested.reads.load(Ordering::Relaxed) > 0);
    let stats = client.stats();
    assert!(
        stats.throttles > 0 && stats.reclaimed_pages > 0,
        "{stats:?}"
    );
    let real = std::fs::File::open(dir.path().join("f")).unwrap();
    let mut buf = [0; 4096];
    for i in 0..4000 {
        real.read_exact_at(&mut buf, i * 4096).unwrap();
        assert_eq!(buf, [5; 4096]);
    }
}

/// Dirty pages are written after a time, without a sync.
#[test]
fn pages_age_and_are_written() {
    let dir = tempfile::tempdir().unwrap();
    let config = quiet().writeback_after(Duration::from_millis(20));
    let (_serving, connection) = connect(dir.path());
    let client = Client::new(connection, config).unwrap();
    let file = client.open("f", rw()).unwrap();
    file.write_at(b"old", 0, Flags::empty()).unwrap();
    eventually("the flusher writes it", || {
        std::fs::read(dir.path().join("f")).is_ok_and(|d| d == b"old")
    });
    // And again after it was dirtied again.
    file.write_at(b"new", 0, Flags::empty()).unwrap();
    eventually("the flusher writes it again", || {
        std::fs::read(dir.path().join("f")).is_ok_and(|d| d == b"new")
    });
}
