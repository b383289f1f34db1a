//! Buffers that cannot be read, checked or written.

use super::*;

/// A full cache fails with ENOMEM until a buffer is released.
#[test]
fn when_everything_is_held_it_is_enomem_until_something_is_released() {
    let config = Config {
        memory_wait: Duration::from_secs(60),
        ..limit(1 << 20)
    };
    each(1024, limit(1 << 20), |target, _| {
        let mut held = Vec::new();
        let error = loop {
            match target.read(&block(held.len() as u64), &Addressed) {
                Ok(buffer) => held.push(buffer),
                Err(error) => break error,
            }
        };
        assert!(matches!(error, BufError::NoMemory { .. }), "{error}");
        assert_eq!(error.errno(), Errno::NOMEM.raw_os_error());
        assert!(held.len() > 200, "{} buffers in 1 MiB", held.len());
        held.truncate(held.len() - 20);
        target.read(&block(1000), &Addressed).unwrap();
        let large = [Extent {
            daddr: 0,
            len: 4096,
        }];
        assert!(matches!(
            target.read(&large, &Addressed),
            Err(BufError::NoMemory { .. })
        ));
    });
    each(1024, config, |target, _| {
        let mut held: Vec<_> = (0..200)
            .map(|n| target.read(&block(n), &Addressed).unwrap())
            .collect();
        std::thread::scope(|scope| {
            let other = scope.spawn(|| {
                let all: Vec<_> = (200..320)
                    .map(|n| target.read(&block(n), &Addressed).unwrap())
                    .collect();
                all.len()
            });
            until("the other thread runs out of memory", || {
                target.stats().memory_waits > 0
            });
            held.clear();
            assert_eq!(other.join().unwrap(), 120);
        });
    });
}

/// A damaged block fails its verifier each time, and other verifiers may accept it.
#[test]
fn verify_errors_stick_and_others_may_look() {
    each(16, Config::default(), |target, path| {
        let mut data = fs::read(path).unwrap();
        data[5 * 4096] ^= 1;
        fs::write(path, &data).unwrap();
        for _ in 0..2 {
            let error = target.read(&block(5), &Addressed).unwrap_err();
            assert!(matches!(
                &error,
                BufError::Verify {
                    daddr: 40,
                    verifier: "addressed",
                    ..
                }
            ));
            assert!(
                error.to_string().contains("addressed at daddr 40: says"),
                "{error}"
            );
        }
        let buffer = target.read(&block(5), &Anything).unwrap();
        assert_eq!(buffer.read()[8], 5);
        assert_eq!((target.stats().reads, target.stats().verify_errors), (1, 1));
        // A corrupt buffer is not written either.
        let good = target.read(&block(6), &Addressed).unwrap();
        good.write()[0] ^= 1;
        let mut queue = WriteQueue::new(target);
        queue.push(good.clone());
        assert!(matches!(
            queue.flush(),
            Err(BufError::Verify { daddr: 48, .. })
        ));
        assert_eq!((queue.len(), good.is_dirty()), (1, true));
        good.write()[0] ^= 1;
        good.write()[9] = 99;
        queue.flush().unwrap();
        assert!(queue.is_empty() && !good.is_dirty());
        assert_eq!(fs::read(path).unwrap()[6 * 4096 + 9], 99);
    });
}

/// A read that failed is tried again by the next caller.
#[test]
fn read_errors_are_tried_again_by_the_next() {
    let faults = Arc::new(Faults::new());
    let config = Config {
        engine: EngineConfig {
            faults: Some(faults.clone()),
            ..EngineConfig::default()
        },
        ..Config::default()
    };
    each(16, config, |target, _| {
        faults.clear();
        faults.add(Rule {
            op: Op::Read,
            range: 8192..8193,
            times: 1,
            fault: Fault::Error(Errno::IO),
        });
        let pieces: Vec<Extent> = [1, 2, 3].iter().flat_map(|&n| block(n)).collect();
        let error = target.read(&pieces, &Addressed).unwrap_err();
        assert!(
            matches!(
                error,
                BufError::Io {
                    errno: Errno::IO,
                    daddr: 8,
                    ..
                }
            ),
            "{error}"
        );
        assert_eq!(error.errno(), Errno::IO.raw_os_error());
        assert_eq!(
            target.read(&pieces, &Addressed).unwrap().read()[4096 + 8],
            2
        );
        // Bad blocks in the middle of a span harm only the buffers they are in.
        faults.add(Rule {
            op: Op::Read,
            range: 12 * 4096..12 * 4096 + 1,
            times: 1,
            fault: Fault::Error(Errno::IO),
        });
        let wanted: Vec<_> = (10..15).map(block).collect();
        let how = Prefetch::Span {
            max_gap: 0,
            max_len: 2048,
        };
        assert_eq!(
            target.readahead(wanted.iter().map(|e| &e[..]), &Addressed, how),
            5
        );
        for n in 10..15 {
            let mut result = target.read(&block(n), &Addressed);
            if result.is_err() {
                result = target.read(&block(n), &Addressed);
            }
            assert_eq!(result.unwrap().read()[8], n as u8);
        }
        assert_eq!(target.stats().read_errors, 1 + 5);
    });
}

/// A write that failed stays an error, and its buffer dirty, until a retry succeeds.
#[test]
fn write_errors_stick_until_a_retry_succeeds() {
    let faults = Arc::new(Faults::new());
    let mut config = limit(1 << 20);
    config.engine.faults = Some(faults.clone());
    each(1024, config, |target, path| {
        faults.clear();
        faults.add(Rule {
            op: Op::Write,
            range: 4096..8192,
            times: 1,
            fault: Fault::Error(Errno::NOSPC),
        });
        let mut queue = WriteQueue::new(target);
        for n in [1, 5] {
            let buffer = target.read(&block(n), &Addressed).unwrap();
            buffer.write()[50] = 0xcc;
            queue.push(buffer);
        }
        let error = queue.flush().unwrap_err();
        assert_eq!(error.errno(), Errno::NOSPC.raw_os_error());
        assert_eq!(queue.len(), 1);
        queue.clear();
        // Dirty buffers stay through any amount of reclaim.
        for n in 10..1000 {
            target.read(&block(n), &Addressed).unwrap();
        }
        let buffer = target.read(&block(1), &Addressed).unwrap();
        assert!(buffer.is_dirty() && buffer.write_error().is_some());
        assert_eq!(buffer.read()[50], 0xcc);
        queue.push(buffer.clone());
        queue.flush().unwrap();
        assert!(!buffer.is_dirty() && buffer.write_error().is_none());
        let on_disk = fs::read(path).unwrap();
        assert_eq!((on_disk[4096 + 50], on_disk[5 * 4096 + 50]), (0xcc, 0xcc));
    });
}

/// A device on which nothing can be read leaves nothing in the cache.
#[test]
fn failed_buffers_take_no_room() {
    let faults = Arc::new(Faults::new());
    let mut config = Config::default();
    config.engine.faults = Some(faults.clone());
    each(64, config, |target, _| {
        faults.clear();
        faults.add(Rule {
            op: Op::Read,
            range: 0..u64::MAX,
            times: usize::MAX,
            fault: Fault::Error(Errno::IO),
        });
        for n in 0..64 {
            target.read(&block(n), &Addressed).unwrap_err();
        }
        assert_eq!((target.len(), target.memory().used), (0, 0));
        // `get` needs no read.
        assert_eq!(target.get(&block(1), &Addressed).unwrap().read()[8], 0);
    });
}
