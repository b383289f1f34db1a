//! The checksum of metadata, by size: a sector, an inode, a block.

#![allow(missing_docs, reason = "criterion's macros make public functions")]

use std::hint::black_box;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use uvfs_xfs::format::{check_crc, store_crc};

const AT: usize = 4;

fn checksum(c: &mut Criterion) {
    let mut group = c.benchmark_group("checksum");
    for size in [512, 4096, 65536] {
        let mut bytes: Vec<u8> = (0..size).map(|n| (n % 251) as u8).collect();
        group.throughput(Throughput::Bytes(size as u64));
        group.bench_function(format!("store in {size} bytes"), |b| {
            b.iter(|| store_crc(black_box(&mut bytes), AT));
        });
        store_crc(&mut bytes, AT);
        group.bench_function(format!("check {size} bytes"), |b| {
            b.iter(|| check_crc(black_box(&bytes), AT).expect("the right checksum"));
        });
    }
}

criterion_group!(benches, checksum);
criterion_main!(benches);
