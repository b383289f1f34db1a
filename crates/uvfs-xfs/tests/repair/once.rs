//! A small file system is read once.

use super::*;
use std::sync::atomic::AtomicU8;
use uvfs_xfs::blocks::Stream;

/// An image that counts how often each of its sectors is read.
struct Counted {
    image: MemImage,
    sectors: Vec<AtomicU8>,
    ahead: bool,
}

impl Counted {
    fn new(image: &MemImage, ahead: bool) -> Counted {
        let sectors = (0..image.size() / 512).map(|_| AtomicU8::new(0));
        Counted {
            image: image.clone(),
            sectors: sectors.collect(),
            ahead,
        }
    }

    /// How many sectors were read, and those that were more than once.
    fn counts(&self) -> (usize, Vec<usize>) {
        let times = |(_, n): &(usize, &AtomicU8)| n.load(Ordering::Relaxed);
        let all = || self.sectors.iter().enumerate();
        let twice = all().filter(|s| times(s) > 1).map(|(at, _)| at);
        (all().filter(|s| times(s) > 0).count(), twice.collect())
    }
}

impl Blocks for Counted {
    fn size(&self) -> u64 {
        self.image.size()
    }

    fn read_data(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        let sectors = offset / 512..(offset + buf.len() as u64).div_ceil(512);
        for at in sectors {
            self.sectors[at as usize].fetch_add(1, Ordering::Relaxed);
        }
        self.image.read_data(offset, buf)
    }

    fn stream(&self, _: usize) -> Option<Box<dyn Stream + '_>> {
        self.ahead.then(|| mutate::mem_stream(self))
    }
}

/// Most copies of the superblock that mkfs writes know no root directory. They speak for the primary one all the same, so
/// that a repair searches for no other.
#[test]
fn copies_without_a_root_directory_are_no_reason_to_search() {
    if !can_run() {
        return;
    }
    let image = Image::new();
    assert!(image.mkfs(&["-d", "agcount=6"]));
    let counted = Arc::new(Counted::new(&MemImage::load(&image.path()).unwrap(), false));
    let outcome = repair(counted.clone(), None, &options(), &CheckProgress::default()).unwrap();
    assert_eq!(outcome.found_count, 0);
    let (read, _) = counted.counts();
    assert!(read < 4000, "{read} sectors");
}

/// A check, and all rounds of a repair, read each part of a small file system once.
#[test]
fn a_small_file_system_is_read_once() {
    let Some(image) = base() else { return };
    let mem = MemImage::load(&image.path()).unwrap();
    let regions = mutate::regions(&mem);
    let mut damaged = mem.clone();
    for kind in ["AGF", "directory data", "bmbt"] {
        let hit = regions.iter().rfind(|r| r.kind == kind).unwrap();
        damaged.put(hit.offset + 70, &[0xff; 100]);
    }
    let one = CheckOptions {
        threads: 1,
        ..CheckOptions::default()
    };
    for ahead in [false, true] {
        let counted = Arc::new(Counted::new(&mem, ahead));
        let outcome = check(counted.clone(), &one, &CheckProgress::default()).unwrap();
        assert_eq!(outcome.count, 0);
        let (read, twice) = counted.counts();
        assert!(read > 1000 && twice.is_empty(), "check: {read}, {twice:?}");

        let counted = Arc::new(Counted::new(&damaged, ahead));
        let dry = RepairOptions {
            check: one.clone(),
            ..options()
        };
        let outcome = repair(counted.clone(), None, &dry, &CheckProgress::default()).unwrap();
        assert!(outcome.rounds > 0 && outcome.left_count == 0);
        let (read, twice) = counted.counts();
        assert!(read > 1000 && twice.is_empty(), "repair: {read}, {twice:?}");
    }
}
