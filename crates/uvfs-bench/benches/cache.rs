//! The client's page cache beside the host's: reads of cached pages, and buffered writes past the dirty limit.

#![allow(missing_docs, reason = "criterion's macros make public functions")]

use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use uvfs_client::{Client, Config, Flags, OpenOptions};
use uvfs_passthrough::{Options, Passthrough};
use uvfs_server::{ClientLimits, InProcess, Session, SessionOptions, in_process};

const PAGE: usize = 4096;
const FILE: u64 = 64 << 20;

/// A client of a directory, which a server in this process serves.
fn client(dir: &Path, memory: usize) -> (InProcess, Client) {
    let config = Config::default().memory(memory);
    let fs = Passthrough::open(dir, Options::default()).expect("the directory");
    let session = Session::unmounted(fs, SessionOptions::default()).expect("a session");
    let (serving, socket) =
        in_process(&Arc::new(session), ClientLimits::default()).expect("a server");
    (
        serving,
        Client::new(socket.into(), config).expect("a client"),
    )
}

fn rw() -> OpenOptions {
    OpenOptions::new().read(true).write(true).create(true)
}

/// The pages of a file in an order that reading ahead does not see.
fn pages() -> impl Iterator<Item = u64> {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    std::iter::repeat_with(move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state % (FILE / PAGE as u64) * PAGE as u64
    })
}

fn hit(c: &mut Criterion, dir: &Path) {
    std::fs::write(dir.join("read"), vec![7; FILE as usize]).expect("a file");
    let native = std::fs::File::open(dir.join("read")).expect("the file");
    let (_serving, client) = client(dir, FILE as usize + (64 << 20));
    let file = client.open("read", rw()).expect("the file");
    let mut page = [0; PAGE];
    for at in (0..FILE).step_by(PAGE) {
        file.read_at(&mut page, at, Flags::empty()).expect("a read");
    }
    let mut group = c.benchmark_group("read a cached page");
    group.throughput(Throughput::Bytes(PAGE as u64));
    let mut at = pages();
    group.bench_function("client", |b| {
        b.iter(|| {
            let at = at.next().expect("a page");
            let n = file.read_at(&mut page, at, Flags::empty());
            assert_eq!(n.expect("a read"), PAGE);
        });
    });
    let mut at = pages();
    group.bench_function("host", |b| {
        b.iter(|| {
            let at = at.next().expect("a page");
            assert_eq!(native.read_at(&mut page, at).expect("a read"), PAGE);
        });
    });
}

fn buffered(c: &mut Criterion, dir: &Path) {
    let mut group = c.benchmark_group("buffered write");
    group.sample_size(20);
    for size in [1024, PAGE, 1 << 20] {
        let data = vec![1; size];
        group.throughput(Throughput::Bytes(size as u64));
        let next = |at: &mut u64| {
            let now = *at;
            *at = (now + size as u64) % FILE;
            now
        };
        let mut at = 0;
        // A cache of half the file: clean pages have to be made all the time.
        let (_serving, client) = client(dir, FILE as usize / 2);
        let file = client.open("written", rw()).expect("a file");
        group.bench_function(BenchmarkId::new("client", size), |b| {
            b.iter(|| {
                let n = file.write_at(&data, next(&mut at), Flags::empty());
                assert_eq!(n.expect("a write"), size);
            });
        });
        let mut at = 0;
        let native = std::fs::File::create(dir.join("native")).expect("a file");
        group.bench_function(BenchmarkId::new("host", size), |b| {
            b.iter(|| native.write_all_at(&data, next(&mut at)).expect("a write"));
        });
    }
}

fn cache(c: &mut Criterion) {
    // In memory, where there is such a place: the disk is not what is measured.
    let base = Some(Path::new("/dev/shm")).filter(|dir| dir.exists());
    let dir = tempfile::tempdir_in(base.unwrap_or(&std::env::temp_dir())).expect("a directory");
    hit(c, dir.path());
    buffered(c, dir.path());
}

criterion_group!(benches, cache);
criterion_main!(benches);
