//! Looking up metadata buffers: those that are cached, and all of a file by each engine and way to read ahead.

#![allow(missing_docs, reason = "criterion's macros make public functions")]

use std::fs::{self, File};
use std::hint::black_box;
use std::path::Path;
use std::sync::Arc;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use uvfs_buf::{Anything, Config, Extent, Prefetch, Target};
use uvfs_io::device::{Device, OpenOptions};
use uvfs_io::engine::EngineKind;

/// Sectors of a buffer, and from one to the next: every second block, so that there is something to skip.
const LEN: u32 = 8;
const STEP: u64 = 16;
const BUFFERS: u64 = 4096;
/// How many buffers one call reads ahead.
const AHEAD: usize = 128;

fn buffers() -> Vec<[Extent; 1]> {
    let extent = |n| Extent {
        daddr: n * STEP,
        len: LEN,
    };
    (0..BUFFERS).map(|n| [extent(n)]).collect()
}

fn open(path: &Path, kind: EngineKind) -> Option<Target> {
    let config = Config {
        limit: 1 << 26,
        ..Config::default()
    };
    let device = Device::open(path, OpenOptions::default()).expect("the file");
    // io_uring or libaio may be switched off here.
    let target = Target::open(Arc::new(device), kind, config).ok()?;
    target.set_groups(BUFFERS * STEP / 16);
    Some(target)
}

fn hit(c: &mut Criterion, path: &Path) {
    let target = open(path, EngineKind::Sync).expect("system calls");
    let buffers = buffers();
    let mut next = 0;
    c.bench_function("buffer lookup, cached", |b| {
        b.iter(|| {
            // In no order: 1,001 and the number of buffers have no common divisor.
            next = (next + 1001) % buffers.len();
            let buffer = target.read(&buffers[next], &Anything).expect("a buffer");
            black_box(buffer.read()[0]);
        });
    });
}

fn all(c: &mut Criterion, path: &Path) {
    let ways = [
        ("none", None),
        ("exact", Some(Prefetch::Exact)),
        (
            "span",
            Some(Prefetch::Span {
                max_gap: 64,
                max_len: 4096,
            }),
        ),
    ];
    let buffers = buffers();
    let mut group = c.benchmark_group("buffers of a cached file");
    group
        .throughput(Throughput::Elements(BUFFERS))
        .sample_size(10);
    for kind in EngineKind::ALL {
        let Some(target) = open(path, kind) else {
            continue;
        };
        for (name, way) in ways {
            group.bench_function(BenchmarkId::new(kind.to_string(), name), |b| {
                b.iter(|| {
                    target.invalidate_all();
                    for part in buffers.chunks(AHEAD) {
                        if let Some(way) = way {
                            target.readahead(part.iter().map(|e| &e[..]), &Anything, way);
                        }
                        for extents in part {
                            let buffer = target.read(extents, &Anything).expect("a buffer");
                            black_box(buffer.read()[0]);
                        }
                    }
                });
            });
        }
    }
}

fn lookup(c: &mut Criterion) {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("image");
    File::create(&path).expect("an image");
    fs::write(&path, vec![1; (BUFFERS * STEP * 512) as usize]).expect("an image");
    hit(c, &path);
    all(c, &path);
}

criterion_group!(benches, lookup);
criterion_main!(benches);
