//! Measures cached random reads and buffered writes against the host's own page cache.
//!
//! `cargo run --release -p uvfs-client --example throughput [DIRECTORY]` (default /dev/shm).

use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use uvfs_client::{Client, Config, Flags, LocalStore, OpenOptions};

const FILE: u64 = 256 << 20;
const RUN: Duration = Duration::from_millis(700);
const ROUNDS: usize = 5;

fn median(mut v: Vec<f64>) -> f64 {
    v.sort_by(f64::total_cmp);
    v[v.len() / 2]
}

fn random(state: &mut u64) -> u64 {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    *state
}

/// Calls `read` at random pages for a while; calls per second.
fn reads(mut read: impl FnMut(u64)) -> f64 {
    let (mut n, mut state, start) = (0u64, 0x9e37_79b9_7f4a_7c15u64, Instant::now());
    while start.elapsed() < RUN {
        for _ in 0..64 {
            read(random(&mut state) % (FILE / 4096) * 4096);
        }
        n += 64;
    }
    n as f64 / start.elapsed().as_secs_f64()
}

/// Two threads write blocks one after another, round and round in files of 256 MiB; MiB/s.
fn writes(block: usize, write: impl Fn(usize, &[u8], u64) + Sync) -> f64 {
    let start = Instant::now();
    let total: u64 = std::thread::scope(|s| {
        let threads: Vec<_> = (0..2)
            .map(|t| {
                let write = &write;
                s.spawn(move || {
                    let data = vec![t as u8 + 1; block];
                    let (mut at, mut n) = (0, 0u64);
                    while start.elapsed() < RUN {
                        for _ in 0..(1 << 20) / block.min(1 << 20) {
                            write(t, &data, at);
                            at = (at + block as u64) % FILE;
                            n += block as u64;
                        }
                    }
                    n
                })
            })
            .collect();
        threads
            .into_iter()
            .map(|t| t.join().expect("a writer"))
            .sum()
    });
    total as f64 / (1 << 20) as f64 / start.elapsed().as_secs_f64()
}

fn main() -> std::io::Result<()> {
    let base = std::env::args().nth(1).unwrap_or_else(|| "/dev/shm".into());
    let dir = tempfile::tempdir_in(base)?;
    let rw = || OpenOptions::new().read(true).write(true).create(true);
    let host = |name: &str| {
        let path = dir.path().join(name);
        std::fs::OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(path)
    };

    // Cached reads.
    let native = host("read")?;
    let block = vec![7u8; 1 << 20];
    for at in (0..FILE).step_by(1 << 20) {
        native.write_all_at(&block, at)?;
    }
    let config = Config {
        memory: (FILE as usize) + (64 << 20),
        ..Config::default()
    };
    let client = Client::new(LocalStore::open(dir.path())?, config)?;
    let file = client.open("read", rw())?;
    let mut buf = vec![0; 4096];
    for at in (0..FILE).step_by(4096) {
        file.read_at(&mut buf, at, Flags::empty())?;
    }
    let (mut ours, mut theirs) = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        theirs.push(reads(|at| {
            assert_eq!(native.read_at(&mut buf, at).unwrap(), 4096)
        }));
        let read = |at| {
            assert_eq!(file.read_at(&mut buf, at, Flags::empty()).unwrap(), 4096);
        };
        ours.push(reads(read));
    }
    let (ours, theirs) = (median(ours), median(theirs));
    println!(
        "cached 4 KiB random reads: {:.0}/s, native {:.0}/s, ratio {:.2}",
        ours,
        theirs,
        ours / theirs
    );

    // Buffered writes, sustained past the dirty limit; the store's two ways.
    for workers in [0, 1] {
        for block in [1024, 4096, 1 << 20] {
            let (mut ours, mut theirs) = (Vec::new(), Vec::new());
            let natives = [host("n0")?, host("n1")?];
            let config = Config {
                memory: 128 << 20,
                ..Config::default()
            };
            let client = Client::new(LocalStore::with(dir.path(), workers, 1 << 20)?, config)?;
            let files = [client.open("w0", rw())?, client.open("w1", rw())?];
            for _ in 0..ROUNDS {
                theirs.push(writes(block, |t, data, at| {
                    natives[t].write_all_at(data, at).unwrap();
                }));
                ours.push(writes(block, |t, data, at| {
                    files[t].write_at(data, at, Flags::empty()).unwrap();
                }));
            }
            let (ours, theirs) = (median(ours), median(theirs));
            println!(
                "buffered writes, {block} bytes, 2 writers, {workers} workers: {ours:.0} MiB/s, \
                 native {theirs:.0} MiB/s, ratio {:.2}",
                ours / theirs
            );
            if block == 1 << 20 {
                println!("{:?}", client.stats());
            }
        }
    }
    Ok(())
}
