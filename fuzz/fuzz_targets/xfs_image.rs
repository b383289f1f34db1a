//! Damaged XFS images: the checker and the reader neither panic nor hang.
//!
//! The input says what to do to a sound image: structures are found by their magic numbers, and
//! most damage has its checksum set right again, so that it gets past the first check. The image is
//! made with mkfs.xfs at the start; or UVFS_FUZZ_IMAGE names one or several (with colons between
//! them, and the input chooses), such as fuzz/image.sh makes, which have every structure. Small
//! images are what makes this fast: without the address sanitizer (`-s none`; the crates that it
//! runs through have no unsafe code) it does hundreds of images a second.
#![no_main]

use libfuzzer_sys::fuzz_target;
use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;
use std::sync::{Arc, OnceLock};
use std::time::Duration;
use uvfs_fuzz::mutate::{self, Bytes, Choose, MemImage, Region};
use uvfs_xfs::check::{CheckOptions, CheckProgress, Prefetch, check};
use uvfs_xfs::{Blocks, Volume};

fn make(path: &Path) {
    let dir = path.parent().unwrap();
    let proto = dir.join("proto");
    let mut text = String::from("-\n0 0\nd--755 0 0\n");
    for (name, count) in [("few", 5), ("some", 30), ("many", 200)] {
        text += &format!("{name} d--755 0 0\n");
        for i in 0..count {
            text += &format!(
                "entry-{i:05}-{} ---644 0 0 /dev/null\n",
                "x".repeat(i * 7 % 60)
            );
        }
        text += "$\n";
    }
    text += "link l--777 0 0 target\n$\n";
    std::fs::write(&proto, text).unwrap();
    std::fs::File::create(path)
        .unwrap()
        .set_len(34 << 20)
        .unwrap();
    let output = Command::new("mkfs.xfs")
        .args([
            "-q",
            "-f",
            "--unsupported",
            "-b",
            "size=1024",
            "-d",
            "agcount=2",
        ])
        .args(["-m", "rmapbt=1,reflink=1", "-p"])
        .args([&proto, path])
        .output()
        .expect("mkfs.xfs is needed to make an image, or UVFS_FUZZ_IMAGE");
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
}

type Base = (MemImage, Vec<Region>);

fn bases() -> &'static [Base] {
    static BASES: OnceLock<Vec<Base>> = OnceLock::new();
    BASES.get_or_init(|| {
        let load = |path: &Path| {
            let image = MemImage::load(path).unwrap();
            let regions = mutate::regions(&image);
            (image, regions)
        };
        if let Some(paths) = std::env::var_os("UVFS_FUZZ_IMAGE") {
            return std::env::split_paths(&paths).map(|p| load(&p)).collect();
        }
        let dir = std::env::temp_dir().join(format!("uvfs-fuzz-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let path = dir.join("image");
        make(&path);
        let base = load(&path);
        std::fs::remove_dir_all(&dir).unwrap();
        vec![base]
    })
}

fn cpu_time() -> Duration {
    let t = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::new(t.tv_sec as u64, t.tv_nsec as u32)
}

fn read(blocks: &Arc<dyn Blocks>) {
    let Ok(v) = Volume::open(blocks.clone()) else {
        return;
    };
    let root = v.geometry().rootino;
    let mut seen = BTreeSet::from([root]);
    let mut todo = vec![root];
    let mut buf = [0; 4096];
    while let Some(ino) = todo.pop() {
        let Ok(inode) = v.inode(ino) else { continue };
        let _ = v.xattr_names(&inode, &mut |_| true);
        let _ = v.readlink(&inode);
        let _ = v.read(&inode, 0, &mut buf);
        let _ = v.lookup(&inode, b"entry-00007-");
        let _ = v.readdir(&inode, 0, &mut |e| {
            if seen.len() < 50 && seen.insert(e.ino) {
                todo.push(e.ino);
            }
            true
        });
    }
}

fuzz_target!(|input: &[u8]| {
    let mut choose = Bytes(input);
    let bases = bases();
    let (image, regions) = match bases {
        [one] => one,
        many => &many[choose.below(many.len() as u64) as usize],
    };
    let mut damaged = image.clone();
    let count = 1 + choose.below(6);
    for _ in 0..count {
        mutate::damage(&mut damaged, regions, &mut choose);
    }
    let prefetch = match choose.below(2) {
        0 => Prefetch::Exact,
        _ => Prefetch::Large,
    };
    // In as little memory as can be: parts of groups, rounds through directories.
    let memory = (choose.below(8) == 7).then_some(1);
    let options = CheckOptions {
        threads: 1,
        prefetch,
        memory,
        ..CheckOptions::default()
    };
    for _ in 0..choose.below(4) {
        mutate::change_field(&mut damaged, regions, &mut choose);
    }
    let blocks: Arc<dyn Blocks> = Arc::new(damaged);
    let start = cpu_time();
    let _ = check(blocks.clone(), &options, &CheckProgress::default());
    read(&blocks);
    // Not the clock's: other programs may hold us up.
    let took = cpu_time() - start;
    assert!(took < Duration::from_secs(1), "it took {took:?}");
});
