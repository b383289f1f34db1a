//! `-o uncached`: what is read and written is kept neither by the kernel of the mount nor by the
//! host's file system.

use std::fs::{self, File};
use std::io::{IoSliceMut, Read, Write};
use std::path::Path;
use std::process::Command;
use std::sync::OnceLock;

use rustix::io::ReadWriteFlags;
use uvfs_io::ops::cached_bytes;

use crate::harness::*;
use crate::own_process;

const MIB: usize = 1 << 20;
/// Several times what the server lets the kernel keep.
const SIZE: usize = 96 * MIB;

/// The bytes of block `n`: a window of one pattern, which begins elsewhere for each block.
fn block(n: usize) -> &'static [u8] {
    static ALL: OnceLock<Vec<u8>> = OnceLock::new();
    let all = ALL.get_or_init(|| (0..MIB + 9 * 256).map(|i| (i / 9) as u8).collect());
    &all[n * 7 % 256 * 9..][..MIB]
}

/// Writes and reads a file in the mount, and waits until the kernel has nothing of it cached.
pub fn stream(dir: &Path, _: &str) -> String {
    let path = dir.join("stream");
    let mut file = File::create(&path).unwrap();
    for n in 0..SIZE / MIB {
        file.write_all(block(n)).unwrap();
    }
    file.sync_all().unwrap();
    let mut file = File::open(&path).unwrap();
    let mut back = vec![0; MIB];
    for n in 0..SIZE / MIB {
        file.read_exact(&mut back).unwrap();
        assert!(back == block(n), "MiB {n}");
    }
    // Dropped by a thread that is behind for a moment, and at last when there is no traffic.
    wait_for("an empty cache", || cached_bytes(&file).unwrap() == 0);
    String::new()
}

/// Whether the host's file can do RWF_DONTCACHE (Linux 6.14).
fn can_drop_behind(file: &File) -> bool {
    let flags = ReadWriteFlags::from_bits_retain(uvfs_io::ops::DONTCACHE);
    let mut byte = [0];
    rustix::io::preadv2(file, &mut [IoSliceMut::new(&mut byte)], 0, flags).is_ok()
}

fn nothing_stays(transport: Transport, option: &str) {
    if !has(&[
        Need::Mount(transport),
        Need::Uvfs,
        Need::Program("mkfs.ext4"),
    ]) {
        return;
    }
    let scratch = Scratch::new();
    let source = scratch.ext4("source");
    let probe = File::create(source.join("probe")).unwrap();
    if cached_bytes(&probe).is_err() {
        return uvfs_testing::say("cachestat(2) needs Linux 6.5");
    }
    let serve = Serve::over(transport).option("uncached").option(option);
    let mount = Mount::new(&serve, &source, &scratch.dir("mount"));
    let report = scratch.path("report");
    mount
        .run(&mut own_process::call("stream", &mount.at, "", &report))
        .ok();
    let host = File::open(source.join("stream")).unwrap();
    if can_drop_behind(&host) {
        // A page may stay that was busy when it was to go.
        let cached = || cached_bytes(&host).unwrap() as usize;
        wait_for("the host's cache to give way", || cached() <= MIB);
    }
    // Everything as it was written, by the host and once more through the mount.
    let host = fs::read(source.join("stream")).unwrap();
    assert!(
        host.len() == SIZE
            && host
                .chunks(MIB)
                .enumerate()
                .all(|(n, part)| part == block(n))
    );
    mount
        .run(
            Command::new("cmp")
                .arg(source.join("stream"))
                .arg(mount.at.join("stream")),
        )
        .ok();
    mount.unmount().ok();
}

/// `-o uncached` leaves nothing in the page cache.
#[test]
fn nothing_stays_cached_over_dev() {
    nothing_stays(Transport::Dev, "");
}

/// The same over io_uring.
#[test]
fn nothing_stays_cached_over_uring() {
    nothing_stays(Transport::Uring, "");
}

/// The same with the kernel's own writeback.
#[test]
fn nothing_stays_cached_with_writeback() {
    nothing_stays(Transport::Dev, "writeback");
    nothing_stays(Transport::Uring, "writeback");
}
