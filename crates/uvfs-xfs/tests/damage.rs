//! Damaged images: whatever is on disk, the reader gives answers or errors, and ends.
//! Needs mkfs.xfs, and root and loop devices to fill the image.

mod common;

use common::*;
use std::collections::BTreeSet;
use std::io;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use uvfs_xfs::Volume;
use uvfs_xfs::blocks::{Block, Blocks, DiskExtent, FileBlocks, ReadError, Verify};
use uvfs_xfs::format::FileType;

/// An image with changes on top, which remembers what metadata was read.
struct Overlay {
    image: FileBlocks,
    /// (byte of the device, what is there instead)
    changes: Vec<(u64, u8)>,
    /// Verifiers are not asked: as if a cache had let the block in for another reason, or the
    /// damage had been given right checksums.
    unverified: bool,
    seen: Mutex<BTreeSet<(u64, u32)>>,
}

impl Blocks for Overlay {
    fn size(&self) -> u64 {
        self.image.size()
    }

    fn read(&self, extents: &[DiskExtent], verify: Verify<'_>) -> Result<Block, ReadError> {
        let total: usize = extents.iter().map(|e| e.bytes as usize).sum();
        let mut bytes = Vec::with_capacity(total);
        for e in extents {
            self.seen.lock().unwrap().insert((e.daddr, e.bytes));
            let start = e.daddr * 512;
            let mut part = self.image.read(&[*e], &|_| Ok(()))?.to_vec();
            for (at, to) in &self.changes {
                if (start..start + u64::from(e.bytes)).contains(at) {
                    part[(at - start) as usize] = *to;
                }
            }
            bytes.extend(part);
        }
        if !self.unverified {
            verify(&bytes).map_err(ReadError::Fault)?;
        }
        Ok(Block::new(bytes))
    }

    fn read_data(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        self.image.read_data(offset, buf)
    }
}

/// Looks at everything, with an eye on the number of steps. Gives how many errors came.
fn look(volume: &Volume) -> usize {
    let mut errors = 0;
    let mut steps = 0u32;
    let mut seen = BTreeSet::new();
    let mut todo = vec![volume.geometry().rootino];
    let mut buf = vec![0; 8192];
    while let Some(ino) = todo.pop() {
        steps += 1;
        if steps > 5000 || !seen.insert(ino) {
            continue;
        }
        let inode = match volume.inode(ino) {
            Ok(i) => i,
            Err(_) => {
                errors += 1;
                continue;
            }
        };
        let mut names = Vec::new();
        errors += usize::from(
            volume
                .xattr_names(&inode, &mut |n| {
                    names.push(n.to_vec());
                    names.len() < 400
                })
                .is_err(),
        );
        for n in names.iter().step_by(13) {
            errors += usize::from(volume.xattr(&inode, n).is_err());
        }
        match inode.file_type() {
            FileType::Directory => {
                let mut entries = Vec::new();
                let r = volume.readdir(&inode, 0, &mut |e| {
                    entries.push((e.name.to_vec(), e.ino));
                    entries.len() < 10_000
                });
                errors += usize::from(r.is_err());
                for (name, _) in entries.iter().step_by(7) {
                    errors += usize::from(volume.lookup(&inode, name).is_err());
                }
                let _ = volume.lookup(&inode, b"not there");
                todo.extend(entries.iter().map(|e| e.1));
            }
            FileType::Regular => {
                for at in [0, inode.size / 2, inode.size.saturating_sub(5000)] {
                    errors += usize::from(volume.read(&inode, at, &mut buf).is_err());
                }
                let mut count = 0;
                let r = volume.map(&inode, uvfs_xfs::Fork::Data, 0, 1 << 54, &mut |_| {
                    count += 1;
                    Ok(count < 100_000)
                });
                errors += usize::from(r.is_err());
            }
            FileType::Symlink => errors += usize::from(volume.readlink(&inode).is_err()),
            _ => {}
        }
    }
    errors
}

/// A generator of numbers that is the same on every run.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }
    fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }
}

fn damage(args: &[&str], rounds: u64) {
    if !can_run() {
        return;
    }
    let image = Image::new();
    assert!(image.mkfs(args));
    let mount = Mount::new(&image.path(), "rw").unwrap();
    fill_some(mount.path());
    drop(mount);
    let open = |changes: Vec<(u64, u8)>, unverified| {
        let image = FileBlocks::open(&image.path()).unwrap();
        let seen = Mutex::new(BTreeSet::new());
        let blocks = Arc::new(Overlay {
            image,
            changes,
            unverified,
            seen,
        });
        (Volume::open(blocks.clone()), blocks)
    };
    let (clean, blocks) = open(vec![], false);
    assert_eq!(look(&clean.unwrap()), 0);
    let metadata: Vec<(u64, u32)> = blocks.seen.lock().unwrap().iter().copied().collect();
    let mut random = Random(0x1234_5678_9abc_def1);
    let (mut with_errors, mut refused) = (0, 0);
    for round in 0..rounds {
        // A few bytes here and there, near the starts of blocks and inodes, where the heads are;
        // sometimes a run of them.
        let mut changes = Vec::new();
        for _ in 0..1 + random.below(24) {
            let (daddr, len) = metadata[random.below(metadata.len() as u64) as usize];
            if daddr == 0 && random.below(4) != 0 {
                continue;
            }
            let len = u64::from(len);
            let at = match random.below(3) {
                0 => random.below(len.min(96)),
                1 => random.below(len / 256) * 256 + random.below(256),
                _ => len - 1 - random.below(len.min(64)),
            };
            let to = [0, 1, 0x7f, 0x80, 0xff, random.next() as u8][random.below(6) as usize];
            let run = if random.below(6) == 0 {
                random.below(12)
            } else {
                1
            };
            changes.extend((0..run).map(|i| (daddr * 512 + at + i, to)));
        }
        let start = Instant::now();
        let (volume, _) = open(changes.clone(), round % 4 != 0);
        match volume {
            Ok(v) => with_errors += usize::from(look(&v) > 0),
            Err(_) => refused += 1,
        }
        let took = start.elapsed();
        assert!(
            took < Duration::from_secs(60),
            "round {round} took {took:?}: {changes:?}"
        );
    }
    eprintln!("{args:?}: {rounds} rounds, {with_errors} with errors, {refused} refused");
    assert!(with_errors > rounds as usize / 10);
}

#[test]
fn damaged_v5() {
    damage(&["-b", "size=1024"], if full() { 5000 } else { 150 });
}

#[test]
fn damaged_64k() {
    damage(&["-n", "size=65536"], if full() { 2000 } else { 60 });
}
