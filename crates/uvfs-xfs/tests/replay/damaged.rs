//! Images that were cut off while they were used, and damaged then: a dirty log over structures that are not sound.

use super::*;
use std::panic::catch_unwind;
use uvfs_xfs::format::SB_CRC_OFFSET;

/// What became of the images.
#[derive(Debug, Default)]
struct Tally {
    done: usize,
    /// Those that the kernel mounted, and xfs_repair left sound then.
    theirs: usize,
    ours: usize,
    wrong: Vec<String>,
}

/// An image that was cut off, as a file, in memory, and by its structures.
struct Dirty {
    image: Image,
    mem: MemImage,
    regions: Vec<mutate::Region>,
}

impl Dirty {
    fn new(args: &str, seed: u64) -> Dirty {
        let image = Image::new();
        let all: Vec<&str> = args.split(' ').collect();
        assert!(image.mkfs(&all), "mkfs.xfs {args}");
        let mount = Mount::new(&image.path(), "rw").unwrap();
        // What is on disk already, and what only the log has.
        let held = workload::work(mount.path(), &mut Random(seed), 300);
        run("sync", &[OsStr::new("-f"), mount.path().as_os_str()]);
        run("xfs_freeze", &[OsStr::new("-f"), mount.path().as_os_str()]);
        run("xfs_freeze", &[OsStr::new("-u"), mount.path().as_os_str()]);
        let more = workload::work(mount.path(), &mut Random(seed + 1000), 200);
        cut_off(mount.path(), true);
        drop((held, more, mount));
        let replayed = matches!(image.open().log(), LogState::Replayed { .. });
        assert!(replayed, "{args}: the log is not dirty");
        let mem = MemImage::load(&image.path()).unwrap();
        let regions = mutate::regions(&mem);
        Dirty {
            image,
            mem,
            regions,
        }
    }

    /// A copy with up to four of its structures damaged; gives how.
    fn damaged(&self, to: &Path, seed: u64) -> String {
        let mut random = Random(seed);
        let mut mem = self.mem.clone();
        let count = 1 + random.below(4);
        let damage = |_| mutate::damage(&mut mem, &self.regions, &mut random);
        let mut what: Vec<String> = (0..count).map(damage).collect();
        // Then only a copy tells where the log is.
        if seed.is_multiple_of(8) {
            mem.put(SB_CRC_OFFSET as u64, &[0; 4]);
            what.push("superblock at 0x0: its checksum".into());
        }
        copied(&self.image.path(), to);
        let file = File::options().write(true).open(to).unwrap();
        for r in &self.regions {
            let (mut old, mut new) = (vec![0; r.len], vec![0; r.len]);
            if self.mem.get(r.offset, &mut old) && mem.get(r.offset, &mut new) && old != new {
                file.write_all_at(&new, r.offset).unwrap();
            }
        }
        what.join("; ")
    }
}

/// Whether the kernel mounts an image, and xfs_repair then leaves it sound.
fn they_repair(path: &Path) -> bool {
    match Mount::new(path, "rw,nouuid") {
        Ok(mount) => drop(mount),
        Err(_) => return false,
    }
    let args = ["60", "xfs_repair", "-f"].map(OsStr::new);
    let out = output("timeout", &[&args[..], &[path.as_os_str()]].concat()).unwrap();
    out.status.success() && xfs_repair_n(path).is_none()
}

/// Why what the repair left of an image is not sound, if it said that it was.
fn objection(path: &Path) -> Result<(), String> {
    let options = RepairOptions::default();
    let sink = FileSink::open(path);
    let outcome = repair(open(path), Some(&sink), &options, &CheckProgress::default());
    let outcome = outcome.map_err(|e| e.to_string())?;
    if outcome.left_count > 0 {
        return Err(format!("left: {:?}", outcome.left));
    }
    if let Some(dirty) = outcome.dirty_log {
        return Err(format!("dirty log: {dirty:?}"));
    }
    match xfs_repair_n(path) {
        Some(said) => {
            let lines: Vec<&str> = said.lines().filter(|l| !is_noise(l)).take(5).collect();
            Err(format!("xfs_repair: {lines:?}"))
        }
        None => Ok(()),
    }
}

fn try_one(dirty: &Dirty, seed: u64, tally: &mut Tally) {
    let (ours, theirs) = (
        dirty.image.dir().join("ours"),
        dirty.image.dir().join("theirs"),
    );
    let what = dirty.damaged(&ours, seed);
    copied(&ours, &theirs);
    let start = Instant::now();
    let judged = catch_unwind(|| {
        let _ = check(
            open(&ours),
            &CheckOptions::default(),
            &CheckProgress::default(),
        );
        objection(&ours)
    });
    tally.done += 1;
    let mut wrong = |why: &str| tally.wrong.push(format!("{seed} {what}: {why}"));
    let judged = match judged {
        Ok(judged) => judged,
        Err(_) => return wrong("PANIC"),
    };
    if start.elapsed() > Duration::from_secs(60) {
        wrong("it took more than a minute");
    }
    let they_do = they_repair(&theirs);
    match &judged {
        Err(why) if they_do || why.starts_with("xfs_repair") => wrong(why),
        _ => {}
    }
    tally.theirs += usize::from(they_do);
    tally.ours += usize::from(judged.is_ok());
}

/// What xfs_repair repairs once the kernel has replayed the log, a repair leaves clean, too; and neither it nor a check
/// panics or hangs. `UVFS_DAMAGED` says how many images of each kind.
#[test]
fn damage_below_dirty_logs() {
    if !can_compare() || !uvfs_testing::has(&[uvfs_testing::Need::Program("xfs_freeze")]) {
        return;
    }
    let count = std::env::var("UVFS_DAMAGED").ok();
    let count = count.map_or(if uvfs_testing::full() { 100 } else { 4 }, |n| {
        n.parse().unwrap()
    });
    let mut tally = Tally::default();
    for (i, args) in [
        "-b size=1024 -m rmapbt=1,reflink=1",
        "-m reflink=1",
        KINDS[3].0,
    ]
    .into_iter()
    .enumerate()
    {
        let dirty = Dirty::new(args, i as u64);
        for seed in 0..count {
            try_one(&dirty, (i as u64) << 32 | seed, &mut tally);
        }
    }
    eprintln!("{tally:#?}");
    assert!(tally.wrong.is_empty(), "{:#?}", tally.wrong);
    assert!(tally.ours > 0 && tally.theirs > 0, "{tally:?}");
}
