//! The repair against xfs_repair: after it both call the image sound, the kernel mounts it, and no
//! file is lost that xfs_repair keeps.
//!
//! Needs root, loop devices and xfsprogs. `UVFS_TEST_FULL=1` runs every damage (an hour); without it
//! a part that takes about a minute. `UVFS_DAMAGE` is a number instead: each that is a multiple.

mod common;
#[path = "common/damages.rs"]
mod damages;
#[path = "repair/judged.rs"]
mod judged;
#[path = "repair/kept.rs"]
mod kept;
#[path = "repair/kernel.rs"]
mod kernel;
#[path = "common/mutate.rs"]
mod mutate;
#[path = "repair/mutated.rs"]
mod mutated;
#[path = "repair/once.rs"]
mod once;
#[path = "repair/said.rs"]
mod said;
#[path = "common/sink.rs"]
mod sink;
#[path = "repair/trees.rs"]
mod trees;

use common::*;
use damages::all_damages;
use judged::{files, files_of, step};
use mutate::{Choose, MemImage, Random};
use sink::FileSink;
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::fs::{self, File};
use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use uvfs_xfs::blocks::FileBlocks;
use uvfs_xfs::check::{CheckOptions, CheckProgress, check};
use uvfs_xfs::format::{
    DIFLAG2_NREXT64, DINODE_CRC_OFFSET, DINODE_V3_SIZE, Dinode, ExtentRecord, FileType,
    Layout as _, store_crc,
};
use uvfs_xfs::repair::{RepairError, RepairOptions, RepairOutcome, Sink, repair};
use uvfs_xfs::{Blocks, Volume};

/// Takes nothing.
struct NoSink;

impl Sink for NoSink {
    fn write(&self, _: u64, _: &[u8]) -> io::Result<()> {
        panic!("it writes");
    }
    fn flush(&self) -> io::Result<()> {
        Ok(())
    }
}

fn options() -> RepairOptions {
    RepairOptions::default()
}

fn repair_file(path: &Path, options: &RepairOptions) -> Result<RepairOutcome, RepairError> {
    let blocks: Arc<dyn Blocks> = Arc::new(FileBlocks::open(path).unwrap());
    let sink = FileSink::open(path);
    repair(blocks, Some(&sink), options, &CheckProgress::default())
}

fn findings(path: &Path) -> Vec<String> {
    let blocks: Arc<dyn Blocks> = Arc::new(FileBlocks::open(path).unwrap());
    match check(blocks, &CheckOptions::default(), &CheckProgress::default()) {
        Ok(o) => o.findings.iter().map(|f| f.to_string()).collect(),
        Err(e) => vec![e.to_string()],
    }
}

fn base() -> Option<Arc<Image>> {
    base_after(|_| {})
}

fn copy(from: &Path, to: &Path) {
    let _ = fs::remove_file(to);
    let sparse = OsStr::new("--sparse=auto");
    run("cp", &[sparse, from.as_os_str(), to.as_os_str()]);
}

/// An image in memory that takes writes: all of them, or so many.
struct MemSink {
    state: Mutex<MemState>,
}

struct MemState {
    image: MemImage,
    /// Writes that are still taken.
    left: usize,
    writes: usize,
    /// Writes since the last flush, each with what was there before.
    unflushed: Vec<(u64, Vec<u8>)>,
    error: i32,
}

impl MemSink {
    fn new(image: &MemImage, left: usize, error: i32) -> MemSink {
        MemSink {
            state: Mutex::new(MemState {
                image: image.clone(),
                left,
                writes: 0,
                unflushed: Vec::new(),
                error,
            }),
        }
    }

    /// The image as it is after the machine went down: of what was not flushed, some is missing.
    fn after_crash(self, c: &mut dyn Choose) -> (MemImage, usize) {
        let mut s = self.state.into_inner().unwrap();
        for (offset, old) in s.unflushed.iter().rev() {
            if c.below(2) == 0 {
                s.image.put(*offset, old);
            }
        }
        (s.image, s.writes)
    }
}

impl Sink for MemSink {
    fn write(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        let mut s = self.state.lock().unwrap();
        if s.left == 0 {
            return Err(io::Error::from_raw_os_error(s.error));
        }
        s.left -= 1;
        s.writes += 1;
        let mut old = vec![0; bytes.len()];
        assert!(s.image.get(offset, &mut old), "a write outside the image");
        s.unflushed.push((offset, old));
        s.image.put(offset, bytes);
        Ok(())
    }

    fn flush(&self) -> io::Result<()> {
        self.state.lock().unwrap().unflushed.clear();
        Ok(())
    }
}

const EIO: i32 = 5;
const ENOSPC: i32 = 28;

fn repair_mem(image: &MemImage, sink: &dyn Sink) -> Result<RepairOutcome, RepairError> {
    let blocks: Arc<dyn Blocks> = Arc::new(image.clone());
    let one = RepairOptions {
        zero_log: true,
        check: CheckOptions {
            threads: 1,
            ..CheckOptions::default()
        },
    };
    repair(blocks, Some(sink), &one, &CheckProgress::default())
}

/// Repairs an image in memory completely; gives it and how many writes that took, or what is left.
fn mended(image: &MemImage) -> Result<(MemImage, usize), String> {
    let (after, writes, _) = mended_saying(image)?;
    Ok((after, writes))
}

/// As [`mended`], and gives the inodes of which the report speaks; `None` if not all are told.
fn mended_saying(image: &MemImage) -> Result<(MemImage, usize, Option<BTreeSet<u64>>), String> {
    let sink = MemSink::new(image, usize::MAX, EIO);
    let o = repair_mem(image, &sink).map_err(|e| e.to_string())?;
    let told = o.changes.len() as u64 == o.change_count;
    let told = told.then(|| o.changes.iter().filter_map(|c| c.place.inode).collect());
    if o.left_count > 0 {
        let left: Vec<String> = o.left.iter().take(4).map(|f| f.to_string()).collect();
        return Err(format!("{left:?}"));
    }
    let s = sink.state.into_inner().unwrap();
    let again = repair_mem(&s.image, &NoSink).map_err(|e| e.to_string())?;
    assert_eq!(again.found_count, 0, "{:?}", again.found);
    Ok((s.image, s.writes, told))
}

/// A repair cut off after each of its writes, with some of those before the cut missing: the next
/// one ends with a sound file system.
#[test]
fn cut_off_after_each_write() {
    let Some(image) = base() else { return };
    let mem = MemImage::load(&image.path()).unwrap();
    let regions = mutate::regions(&mem);
    let mut cuts = 0;
    for seed in (0..400u64).filter(|s| s % (step(40) as u64 * 10) == 3) {
        let mut random = Random(seed);
        let mut damaged = mem.clone();
        let mut what = Vec::new();
        for _ in 0..3 {
            what.push(mutate::damage(&mut damaged, &regions, &mut random));
        }
        let Ok((_, writes)) = mended(&damaged) else {
            continue;
        };
        for n in 0..writes {
            let sink = MemSink::new(&damaged, n, [EIO, ENOSPC][n % 2]);
            match repair_mem(&damaged, &sink) {
                Err(RepairError::Write(e)) => {
                    assert_eq!(e.raw_os_error(), Some([EIO, ENOSPC][n % 2]));
                }
                other => panic!("{what:?}, write {n}: {other:?}"),
            }
            let (crashed, done) = sink.after_crash(&mut random);
            assert_eq!(done, n);
            if let Err(left) = mended(&crashed) {
                panic!("{what:?}, cut off after {n} of {writes} writes: {left}");
            }
            cuts += 1;
        }
    }
    assert!(cuts > 5, "{cuts}");
    eprintln!("{cuts} repairs cut off");
}

/// The refusal of a file system whose superblock asks for what no repair here knows.
const UNKNOWN_FEATURES: &str =
    ": repairing XFS with parent pointers or unknown features is not supported";

/// Several structures damaged at once: no panic, no hang, what is said to be repaired is, and no file
/// that was whole is changed without a word.
#[test]
fn random_damage() {
    let Some(image) = base() else { return };
    let mem = MemImage::load(&image.path()).unwrap();
    let regions = mutate::regions(&mem);
    let count = std::env::var("UVFS_RANDOM")
        .map_or(if uvfs_testing::full() { 100 } else { 50 }, |n| {
            n.parse().unwrap()
        });
    let before = files(&image.path());
    let next = AtomicUsize::new(0);
    let left = Mutex::new(Vec::new());
    std::thread::scope(|s| {
        for _ in 0..3 {
            s.spawn(|| {
                loop {
                    let i = next.fetch_add(1, Ordering::Relaxed);
                    if i >= count {
                        break;
                    }
                    let mut random = Random(i as u64 + 10_000);
                    let mut damaged = mem.clone();
                    let mut what = Vec::new();
                    for _ in 0..2 + i % 12 {
                        what.push(mutate::damage(&mut damaged, &regions, &mut random));
                    }
                    let start = std::time::Instant::now();
                    match std::panic::catch_unwind(|| mended_saying(&damaged)) {
                        Ok(Ok((after, _, told))) => {
                            let (whole, after) = (files_of(damaged), files_of(after));
                            let changed = whole.iter().filter(|(ino, file)| {
                                before.get(ino) == Some(file) && after.get(ino) != Some(file)
                            });
                            for (ino, _) in changed {
                                let said = told.as_ref().is_none_or(|t| t.contains(ino));
                                assert!(said, "{i} {what:?}: file {ino} is not what it was");
                            }
                        }
                        Ok(Err(why)) => left.lock().unwrap().push(format!("{i} {what:?}: {why}")),
                        Err(_) => panic!("{i} {what:?}"),
                    }
                    assert!(start.elapsed().as_secs() < 120, "{i} {what:?}");
                }
            });
        }
    });
    let left = left.into_inner().unwrap();
    eprintln!("{count} images, {} refused", left.len());
    // A primary superblock with a right checksum that asks for features that no repair here knows may be
    // a newer file system's, which repairing would take apart: it is refused. All else is repaired.
    for l in &left {
        assert!(l.contains("superblock at 0x0:"), "not mended: {l}");
        assert!(l.ends_with(UNKNOWN_FEATURES), "not mended: {l}");
    }
}

/// A dirty log is refused, unless it is to be zeroed; then the kernel mounts what is left.
#[test]
fn a_dirty_log_is_thrown_away_when_asked() {
    if !can_compare() {
        return;
    }
    let image = Image::new();
    assert!(image.mkfs(&["-m", "rmapbt=1"]));
    let mount = Mount::new(&image.path(), "rw").unwrap();
    for i in 0..40 {
        fs::write(mount.path().join(format!("file-{i}")), pattern(i, 5000)).unwrap();
    }
    rustix::fs::syncfs(File::open(mount.path()).unwrap()).unwrap();
    let unlinked = File::create(mount.path().join("unlinked")).unwrap();
    fs::remove_file(mount.path().join("unlinked")).unwrap();
    for i in 0..20 {
        fs::rename(
            mount.path().join(format!("file-{i}")),
            mount.path().join(format!("new-{i}")),
        )
        .unwrap();
    }
    let shutdown = ["-x", "-c", "shutdown -f"].map(OsStr::new);
    run(
        "xfs_io",
        &[&shutdown[..], &[mount.path().as_os_str()]].concat(),
    );
    drop(unlinked);
    drop(mount);
    let path = image.path();
    let before = MemImage::load(&path).unwrap();
    let zero = RepairOptions {
        zero_log: true,
        ..options()
    };
    let blocks = Arc::new(FileBlocks::open(&path).unwrap());
    let o = repair(blocks, None, &zero, &CheckProgress::default()).unwrap();
    assert!(o.found_count > 0 && o.left_count == 0, "{:?}", o.left);
    assert!(before.same(&MemImage::load(&path).unwrap()));
    let o = repair_file(&path, &zero).unwrap();
    assert_eq!(o.left_count, 0, "{:?}", o.left);
    assert_eq!(findings(&path), Vec::<String>::new());
    assert_eq!(xfs_repair_n(&path), None);
    let mount = Mount::new(&path, "rw").unwrap();
    fs::write(mount.path().join("more"), pattern(1, 100_000)).unwrap();
    drop(mount);
    assert_eq!(findings(&path), Vec::<String>::new());
    assert_eq!(xfs_repair_n(&path), None);
}

/// A file that claims the blocks of a directory or of another file does not get them.
#[test]
fn contested_blocks_stay_with_their_owner() {
    let Some(image) = base() else { return };
    let mem = MemImage::load(&image.path()).unwrap();
    let v = image.open();
    let g = v.geometry();
    let names = |v: &Volume, path: &str| {
        let dir = v.resolve(path.as_bytes(), false).unwrap();
        let mut out = Vec::new();
        v.readdir(&dir, 0, &mut |e| {
            out.push((e.name.to_vec(), e.ino));
            true
        })
        .unwrap();
        out
    };
    let offset = |ino: u64| {
        let a = g.inode(ino).unwrap();
        let at = uvfs_xfs::geometry::AgBlock {
            agno: a.agno,
            agbno: a.agbno,
        };
        (g.daddr(at) << 9) + (u64::from(a.index) << g.inodelog)
    };
    let whole = names(&v, "/dir500");
    let dir = v.resolve(b"/dir500", false).unwrap();
    let mut first = None;
    v.map(&dir, uvfs_xfs::Fork::Data, 0, 1 << 20, &mut |e| {
        first = first.or(Some(e.startblock));
        Ok(true)
    })
    .unwrap();
    for thief in ["/files/plain-70000", "/files/plain-4097"] {
        let thief = v.resolve(thief.as_bytes(), false).unwrap();
        let mut damaged = mem.clone();
        let mut raw = vec![0; g.inode_size as usize];
        assert!(damaged.get(offset(thief.ino), &mut raw));
        let mut extent = ExtentRecord::at(&raw, DINODE_V3_SIZE).unwrap().unpack();
        extent.startblock = first.unwrap();
        ExtentRecord::pack(&extent).put(&mut raw, DINODE_V3_SIZE);
        store_crc(&mut raw, DINODE_CRC_OFFSET);
        damaged.put(offset(thief.ino), &raw);
        let (after, _) = mended(&damaged).unwrap();
        let v = Volume::open(Arc::new(after)).unwrap();
        assert_eq!(names(&v, "/dir500"), whole);
    }
}

/// The kernel refuses an inode whose padding is not zero, so the check finds it and the repair clears it.
#[test]
fn padding_of_inodes_is_cleared() {
    let Some(image) = base() else { return };
    let mut damaged = MemImage::load(&image.path()).unwrap();
    let v = image.open();
    let g = v.geometry();
    let file = v.resolve(b"/files/plain-4097", false).unwrap();
    let a = g.inode(file.ino).unwrap();
    let at = uvfs_xfs::geometry::AgBlock {
        agno: a.agno,
        agbno: a.agbno,
    };
    let at = (g.daddr(at) << 9) + (u64::from(a.index) << g.inodelog);
    let mut raw = vec![0; g.inode_size as usize];
    assert!(damaged.get(at, &mut raw));
    let mut d = *Dinode::at(&raw, 0).unwrap();
    if d.flags2.get() & DIFLAG2_NREXT64 != 0 {
        // Here the padding is the count of extents: make it an inode as older kernels do.
        d.flags2.set(d.flags2.get() & !DIFLAG2_NREXT64);
        let extents = d.v2.big_nextents.get();
        d.v2.nextents.set(extents as u32);
    }
    d.v2.big_nextents.set(0x1000 << 32);
    d.put(&mut raw, 0);
    store_crc(&mut raw, DINODE_CRC_OFFSET);
    damaged.put(at, &raw);
    let found = repair_mem(&damaged, &MemSink::new(&damaged, usize::MAX, EIO)).unwrap();
    let found: Vec<String> = found.found.iter().map(|f| f.to_string()).collect();
    assert!(
        found.len() == 1 && found[0].contains("di_v3_pad"),
        "{found:?}"
    );
    let (after, _) = mended(&damaged).unwrap();
    assert!(after.get(at, &mut raw));
    assert_eq!(Dinode::at(&raw, 0).unwrap().v2.big_nextents.get(), 0);
}

/// A bound on memory leaves room for what the sink takes.
#[test]
fn memory_of_the_sink_counts() {
    struct Heavy(MemSink, u64);
    impl Sink for Heavy {
        fn memory(&self) -> u64 {
            self.1
        }
        fn write(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
            self.0.write(offset, bytes)
        }
        fn flush(&self) -> io::Result<()> {
            self.0.flush()
        }
    }
    let Some(image) = base() else { return };
    let mut damaged = MemImage::load(&image.path()).unwrap();
    let regions = mutate::regions(&damaged);
    let agf = regions.iter().find(|r| r.kind == "AGF").unwrap();
    damaged.put(agf.offset + 52, &[0xff; 4]);
    let bounded = |memory: u64, takes: u64| {
        let blocks: Arc<dyn Blocks> = Arc::new(damaged.clone());
        let options = RepairOptions {
            check: CheckOptions {
                memory: Some(memory),
                ..CheckOptions::default()
            },
            ..RepairOptions::default()
        };
        let sink = Heavy(MemSink::new(&damaged, usize::MAX, EIO), takes);
        repair(blocks, Some(&sink), &options, &CheckProgress::default())
    };
    let least = |takes| match bounded(25 << 20, takes) {
        Err(RepairError::Memory(least)) => least,
        other => panic!("{other:?}"),
    };
    let (light, heavy) = (least(0), least(70 << 20));
    // An eighth of the bound is for changes, so that 70 MiB take 80 of it.
    assert_eq!(heavy - light, 80 << 20);
    assert!(matches!(
        bounded(heavy - 1024, 70 << 20),
        Err(RepairError::Memory(_))
    ));
    assert_eq!(bounded(heavy, 70 << 20).unwrap().left_count, 0);
}

/// An image that counts the reads of one of its bytes.
struct Watched {
    image: MemImage,
    at: u64,
    reads: AtomicUsize,
}

impl Blocks for Watched {
    fn size(&self) -> u64 {
        self.image.size()
    }

    fn read_data(&self, offset: u64, buf: &mut [u8]) -> io::Result<()> {
        if (offset..offset + buf.len() as u64).contains(&self.at) {
            self.reads.fetch_add(1, Ordering::Relaxed);
        }
        self.image.read_data(offset, buf)
    }
}

/// Repair of a directory, or of the inode tree of a group, is sound and reads no inode again that the check has seen.
#[test]
fn inodes_are_read_once_for_damage_beside_them() {
    let Some(image) = base() else { return };
    let mem = MemImage::load(&image.path()).unwrap();
    let regions = mutate::regions(&mem);
    let v = image.open();
    let g = v.geometry();
    let file = v.resolve(b"/files/plain-70000", false).unwrap();
    let a = g.inode(file.ino).unwrap();
    let at = uvfs_xfs::geometry::AgBlock {
        agno: a.agno,
        agbno: a.agbno,
    };
    let at = (g.daddr(at) << 9) + (u64::from(a.index) << g.inodelog);
    let ag_bytes = u64::from(g.agblocks) << g.blocklog;
    let is_leaf = |offset| {
        let mut level = [0; 2];
        mem.get(offset + 4, &mut level) && level == [0; 2]
    };
    for kind in [
        "directory data",
        "directory leaf",
        "directory free",
        "inobt",
        "finobt",
    ] {
        let tree = kind.ends_with("inobt");
        let mut hit = regions.iter().filter(|r| {
            let elsewhere = r.offset / ag_bytes != u64::from(a.agno) && is_leaf(r.offset);
            r.kind == kind && (!tree || elsewhere)
        });
        let hit = hit.next_back().expect("there is one");
        let mut damaged = mem.clone();
        damaged.put(hit.offset + 70, &[0xff; 150]);
        let watched = Arc::new(Watched {
            image: damaged.clone(),
            at,
            reads: AtomicUsize::new(0),
        });
        let options = RepairOptions {
            check: CheckOptions {
                threads: 1,
                path_dirs: Some(0),
                ..CheckOptions::default()
            },
            ..RepairOptions::default()
        };
        let sink = MemSink::new(&damaged, usize::MAX, EIO);
        let outcome = repair(
            watched.clone(),
            Some(&sink),
            &options,
            &CheckProgress::default(),
        )
        .unwrap();
        assert!(
            outcome.found_count > 0 && outcome.left_count == 0,
            "{kind}: {outcome:?}"
        );
        assert_eq!(
            watched.reads.load(Ordering::Relaxed),
            1,
            "{kind}: {outcome:?}"
        );
        let after = Arc::new(sink.state.into_inner().unwrap().image);
        let found = check(after, &options.check, &CheckProgress::default()).unwrap();
        assert_eq!(found.count, 0, "{kind}: {:?}", found.findings);
    }
}
