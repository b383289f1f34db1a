//! Measures the cache on an image or a device, read-only:
//! `cargo run --release -p uvfs-buf --example measure -- IMAGE [direct] [threads]`
//!
//! Reads 4 KiB buffers in random order, cold and warm, with each engine and prefetch strategy.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use uvfs_buf::{Anything, Config, Extent, Prefetch, Target};
use uvfs_io::device::{Device, OpenOptions};
use uvfs_io::engine::EngineKind;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let args: Vec<_> = std::env::args().skip(1).collect();
    let path = args
        .first()
        .ok_or("usage: measure IMAGE [direct] [threads]")?;
    let direct = args.iter().any(|a| a == "direct");
    let threads: u64 = args.last().and_then(|a| a.parse().ok()).unwrap_or(1);
    for kind in EngineKind::ALL {
        for (name, how) in [
            ("none", None),
            ("exact", Some(Prefetch::Exact)),
            (
                "span",
                Some(Prefetch::Span {
                    max_gap: 64,
                    max_len: 4096,
                }),
            ),
        ] {
            let options = OpenOptions {
                direct,
                ..OpenOptions::default()
            };
            let device = Arc::new(Device::open(path, options)?);
            let config = Config {
                limit: 1 << 30,
                ..Config::default()
            };
            let target = Target::open(device, kind, config)?;
            target.set_groups(target.sectors().div_ceil(16).max(1));
            // Every second block: something to skip between them.
            let blocks = (target.sectors() / 16).min(100_000);
            for pass in ["cold", "warm"] {
                let start = Instant::now();
                let sum = AtomicU64::new(0);
                std::thread::scope(|scope| {
                    for thread in 0..threads {
                        let (target, sum) = (&target, &sum);
                        scope.spawn(move || {
                            let own: Vec<[Extent; 1]> = (0..blocks)
                                .skip(thread as usize)
                                .step_by(threads as usize)
                                .map(|n| {
                                    [Extent {
                                        daddr: n * 16,
                                        len: 8,
                                    }]
                                })
                                .collect();
                            let mut ahead = 0;
                            for (n, extents) in own.iter().enumerate() {
                                if let Some(how) = how
                                    && pass == "cold"
                                    && ahead < own.len()
                                    && ahead < n + 64
                                {
                                    ahead = ahead.max(n);
                                    let end = (ahead + 128).min(own.len());
                                    let wanted = own[ahead..end].iter().map(|e| &e[..]);
                                    target.readahead(wanted, &Anything, how);
                                    ahead = end;
                                }
                                match target.read(extents, &Anything) {
                                    Ok(buffer) => {
                                        sum.fetch_add(
                                            u64::from(buffer.read()[0]),
                                            Ordering::Relaxed,
                                        );
                                    }
                                    Err(error) => eprintln!("{error}"),
                                }
                            }
                        });
                    }
                });
                let took = start.elapsed().as_secs_f64();
                println!(
                    "{kind:6} {name:6} {pass}: {:9.0} buffers/s, {} reads",
                    blocks as f64 / took,
                    target.engine_stats().reads
                );
            }
        }
    }
    Ok(())
}
