//! Damaged XFS images, repaired in memory: no panic, no hang, and what the repair says to be mended has
//! no findings.
//!
//! The input says what to do to a sound image, as for `xfs_image`: UVFS_FUZZ_IMAGE names it
//! (fuzz/image.sh makes one that has every structure).
#![no_main]

use libfuzzer_sys::fuzz_target;
use std::io;
use std::sync::{Arc, Mutex, OnceLock};
use uvfs_fuzz::mutate::{self, Bytes, Choose, MemImage, Region};
use uvfs_xfs::Blocks;
use uvfs_xfs::check::{CheckOptions, CheckProgress, check};
use uvfs_xfs::repair::{RepairOptions, Sink, repair};

fn base() -> &'static (MemImage, Vec<Region>) {
    static BASE: OnceLock<(MemImage, Vec<Region>)> = OnceLock::new();
    BASE.get_or_init(|| {
        let path = std::env::var_os("UVFS_FUZZ_IMAGE").expect("UVFS_FUZZ_IMAGE names an image");
        let image = MemImage::load(path.as_ref()).unwrap();
        let regions = mutate::regions(&image);
        (image, regions)
    })
}

struct MemSink(Mutex<MemImage>);

impl Sink for MemSink {
    fn write(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        self.0.lock().unwrap().put(offset, bytes);
        Ok(())
    }
    fn flush(&self) -> io::Result<()> {
        Ok(())
    }
}

fuzz_target!(|input: &[u8]| {
    let mut choose = Bytes(input);
    let (image, regions) = base();
    let mut damaged = image.clone();
    for _ in 0..1 + choose.below(8) {
        mutate::damage(&mut damaged, regions, &mut choose);
    }
    for _ in 0..choose.below(4) {
        mutate::change_field(&mut damaged, regions, &mut choose);
    }
    let one = CheckOptions {
        threads: 1,
        ..CheckOptions::default()
    };
    let options = RepairOptions {
        zero_log: true,
        check: one.clone(),
    };
    let sink = MemSink(Mutex::new(damaged.clone()));
    let blocks: Arc<dyn Blocks> = Arc::new(damaged);
    let Ok(outcome) = repair(blocks, Some(&sink), &options, &CheckProgress::default()) else {
        return;
    };
    if outcome.left_count > 0 {
        return;
    }
    let blocks: Arc<dyn Blocks> = Arc::new(sink.0.into_inner().unwrap());
    let after =
        check(blocks, &one, &CheckProgress::default()).expect("a mended image can be checked");
    assert_eq!(after.count, 0, "{:?}", after.findings);
});
