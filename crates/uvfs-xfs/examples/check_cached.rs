//! Checks an image through the checker's own reads and through the buffer cache in turns, past the page
//! cache, and prints how long each took:
//! `cargo run --release -p uvfs-xfs --example check_cached -- IMAGE [ROUNDS] [CACHE IN MiB]`

use std::error::Error;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use uvfs_buf::{Config, Target};
use uvfs_io::device::{Device, OpenOptions};
use uvfs_io::engine::EngineKind;
use uvfs_xfs::check::{CheckOptions, CheckProgress, DeviceBlocks, Prefetch, check};
use uvfs_xfs::{Blocks, CachedBlocks};

/// Bytes of a group of the cache's index: the index has a lock for each.
const GROUP: u64 = 64 << 20;

fn main() -> Result<(), Box<dyn Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let image = args
        .first()
        .ok_or("usage: check_cached IMAGE [ROUNDS] [CACHE IN MiB]")?;
    let number = |i: usize, default| args.get(i).map_or(Ok(default), |a| a.parse::<usize>());
    let (rounds, cache) = (number(1, 5)?, number(2, 128)?);
    let device = || {
        let options = OpenOptions {
            direct: true,
            ..OpenOptions::default()
        };
        Device::open(Path::new(image), options).map(Arc::new)
    };
    let options = CheckOptions {
        prefetch: Prefetch::Exact,
        ..CheckOptions::default()
    };
    let mut took = [Vec::new(), Vec::new()];
    for round in 0..2 * rounds {
        let device = device()?;
        let (side, blocks): (usize, Arc<dyn Blocks>) = match round % 2 {
            0 => (0, Arc::new(DeviceBlocks::best(device)?)),
            _ => {
                let config = Config {
                    limit: cache << 20,
                    ..Config::default()
                };
                let target = Target::open(device.clone(), EngineKind::Uring, config)?;
                target.set_groups(GROUP / uvfs_buf::SECTOR);
                (1, Arc::new(CachedBlocks::new(Arc::new(target), device)))
            }
        };
        let start = Instant::now();
        let outcome = check(blocks, &options, &CheckProgress::default())?;
        let seconds = start.elapsed().as_secs_f64();
        if outcome.count > 0 {
            return Err(format!("{image} is damaged").into());
        }
        took[side].push(seconds);
    }
    for (name, mut times) in ["own reads", "cache"].into_iter().zip(took) {
        times.sort_by(f64::total_cmp);
        let median = times[times.len() / 2];
        println!("{name:10} median {median:.3} s, all {times:.3?}");
    }
    Ok(())
}
