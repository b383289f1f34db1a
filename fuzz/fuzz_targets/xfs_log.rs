//! Dirty logs with damage: they are replayed or refused, without a panic and without taking long.
//!
//! The input says what to do to the records of an image that was cut off while in use: UVFS_FUZZ_IMAGE names it
//! (`CUT=1 fuzz/image.sh` makes one). Most records have their checksum set right again.
#![no_main]

use libfuzzer_sys::fuzz_target;
use std::sync::{Arc, OnceLock};
use std::time::Duration;
use uvfs_fuzz::mutate::{Bytes, Choose, LogRecord, MemImage, damage_log, log_records};
use uvfs_xfs::{Blocks, LogState, Volume};

fn base() -> &'static (MemImage, Vec<LogRecord>) {
    static BASE: OnceLock<(MemImage, Vec<LogRecord>)> = OnceLock::new();
    BASE.get_or_init(|| {
        let path = std::env::var_os("UVFS_FUZZ_IMAGE").expect("UVFS_FUZZ_IMAGE names an image");
        let image = MemImage::load(path.as_ref()).unwrap();
        let volume = Volume::open(Arc::new(image.clone())).unwrap();
        let dirty = matches!(volume.log(), LogState::Replayed { .. });
        assert!(
            dirty,
            "the log of the image is not dirty: {:?}",
            volume.log()
        );
        let records = log_records(&image, volume.geometry());
        (image, records)
    })
}

fn cpu_time() -> Duration {
    let t = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::new(t.tv_sec as u64, t.tv_nsec as u32)
}

fuzz_target!(|input: &[u8]| {
    let mut choose = Bytes(input);
    let (image, records) = base();
    let mut damaged = image.clone();
    for _ in 0..1 + choose.below(6) {
        damage_log(&mut damaged, records, &mut choose);
    }
    let blocks: Arc<dyn Blocks> = Arc::new(damaged);
    let start = cpu_time();
    if let Ok(volume) = Volume::open(blocks)
        && let Ok(root) = volume.root()
    {
        let _ = volume.readdir(&root, 0, &mut |_| true);
    }
    // Not the clock's: other programs may hold us up.
    let took = cpu_time() - start;
    assert!(took < Duration::from_secs(1), "it took {took:?}");
});
