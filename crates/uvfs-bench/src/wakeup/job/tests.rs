use super::*;
use clap::ValueEnum;
use std::fs;

/// A work has the same name in `--work` and in the JSON, so that runs can be compared.
#[test]
fn a_work_has_one_name() {
    for work in WakeupWork::value_variants() {
        let value = work.to_possible_value().unwrap();
        assert_eq!(serde_json::to_value(work).unwrap(), value.get_name());
    }
}

/// A work uses each file once, so that it finds none in a cache.
#[test]
fn shuffled_numbers_are_all_there() {
    let mut numbers = shuffled(Rng::with_seed(7), 100);
    assert_ne!(numbers, (0..100).collect::<Vec<_>>());
    numbers.sort_unstable();
    assert_eq!(numbers, (0..100).collect::<Vec<_>>());
}

/// A work on small files counts the calls that it makes, and notices wrong contents.
#[test]
fn small_file_works_do_what_they_say() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path();
    assert_eq!(create(path, 20).unwrap().amount, 20.0);
    assert_eq!(stat(path, 20, Rng::with_seed(1)).unwrap().amount, 20.0);
    // `create` writes zeros: file 0 is right, and the next one is found out.
    assert!(read_small(path, 20, Rng::with_seed(1)).is_err());
    assert_eq!(read_small(path, 1, Rng::with_seed(1)).unwrap().amount, 1.0);
    assert_eq!(unlink(path, 20, Rng::with_seed(1)).unwrap().amount, 20.0);
    assert_eq!(fs::read_dir(path).unwrap().count(), 0);
}

/// The rate of streams is in the report's unit, MiB.
#[test]
fn streams_count_mebibytes() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("out");
    assert_eq!(stream_out(&path, 3 << 20).unwrap().amount, 3.0);
    assert_eq!(stream_in(&path).unwrap().amount, 3.0);
}

/// Reads at a queue depth return the right bytes, and none gets lost.
#[test]
fn reads_at_a_depth_come_back_whole() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("data");
    let blocks: Vec<u8> = (0..64_u64)
        .flat_map(|n| {
            let mut page = [0; BLOCK];
            page[..8].copy_from_slice(&n.to_le_bytes());
            page
        })
        .collect();
    fs::write(&path, blocks).unwrap();
    // Buffered, since not every file system that holds temporary files does direct I/O.
    let file = File::open(&path).unwrap();
    let mut reader = aio::Queue::new(file, aio::Call::Read, DEPTH, 1).unwrap();
    let mut random = Rng::with_seed(3);
    let mut seen = 0;
    for _ in 0..10 {
        reader.submit(|_| random.u64(..64) * BLOCK as u64).unwrap();
        seen += reader
            .wait(|offset, data| check_block(offset / BLOCK as u64, data))
            .unwrap();
    }
    while reader.is_busy() {
        seen += reader.wait(|_, _| Ok(())).unwrap();
    }
    assert!(seen >= 10 + DEPTH as u64 - 1, "{seen}");
}
