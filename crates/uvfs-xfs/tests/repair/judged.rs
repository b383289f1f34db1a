//! Every damage, repaired and judged by the checker, xfs_repair and the kernel.

use super::*;

/// Regular files by inode: size and a sum of the contents.
pub type Files = BTreeMap<u64, (u64, u64)>;

pub fn files(path: &Path) -> Files {
    files_of(FileBlocks::open(path).unwrap())
}

pub fn files_of(blocks: impl Blocks + 'static) -> Files {
    let mut out = Files::new();
    let Ok(v) = Volume::open(Arc::new(blocks)) else {
        return out;
    };
    let root = v.geometry().rootino;
    let mut todo = vec![root];
    let mut seen = BTreeSet::from([root]);
    let mut buf = vec![0; 1 << 20];
    while let Some(ino) = todo.pop() {
        let Ok(inode) = v.inode(ino) else { continue };
        if inode.is_dir() {
            let _ = v.readdir(&inode, 0, &mut |e| {
                if seen.insert(e.ino) {
                    todo.push(e.ino);
                }
                true
            });
        }
        if inode.file_type() != FileType::Regular {
            continue;
        }
        let (mut at, mut sum) = (0u64, 0u64);
        // Of a large sparse file the beginning is enough.
        while at < inode.size.min(8 << 20) {
            let Ok(n) = v.read(&inode, at, &mut buf) else {
                sum = u64::MAX;
                break;
            };
            if n == 0 {
                break;
            }
            for (i, w) in buf[..n].chunks(8).enumerate() {
                let mut b = [0; 8];
                b[..w.len()].copy_from_slice(w);
                let x = u64::from_le_bytes(b);
                if x != 0 {
                    sum = sum.wrapping_add(x.wrapping_mul((at + i as u64 * 8) * 2 + 1));
                }
            }
            at += n as u64;
        }
        out.insert(ino, (inode.size, sum));
    }
    out
}

#[derive(Default)]
struct Tally {
    done: usize,
    sound: usize,
    refused: Vec<String>,
    unmended: Vec<String>,
    wrong: Vec<String>,
    more_files: usize,
    rounds: BTreeMap<usize, usize>,
}

/// Repairs a damaged image, counts the outcome, and returns whether every finding was repaired.
fn mend(path: &Path, name: &str, tally: &Mutex<Tally>) -> bool {
    let same = MemImage::load(path).unwrap();
    let dry = std::panic::catch_unwind(|| {
        let blocks: Arc<dyn Blocks> = Arc::new(FileBlocks::open(path).unwrap());
        repair(blocks, None, &options(), &CheckProgress::default())
    });
    let ours = std::panic::catch_unwind(|| repair_file(path, &options()));
    let mut t = tally.lock().unwrap();
    t.done += 1;
    let (Ok(ours), Ok(dry)) = (ours, dry) else {
        t.wrong.push(format!("{name}: PANIC"));
        return false;
    };
    let outcome = match (ours, dry) {
        (Ok(o), Ok(d)) => {
            if (o.change_count, o.found_count) != (d.change_count, d.found_count) {
                t.wrong.push(format!("{name}: -n says something else"));
            }
            o
        }
        (Err(e), _) => {
            t.refused.push(format!("{name}: {e}"));
            if !same.same(&MemImage::load(path).unwrap()) {
                t.wrong.push(format!("{name}: refused, but changed"));
            }
            return false;
        }
        (Ok(_), Err(e)) => {
            t.wrong.push(format!("{name}: -n fails: {e}"));
            return false;
        }
    };
    if outcome.dirty_log.is_some() {
        t.refused.push(format!("{name}: dirty log"));
        return false;
    }
    *t.rounds.entry(outcome.rounds).or_default() += 1;
    t.sound += usize::from(outcome.found_count == 0);
    if outcome.left_count > 0 {
        let left: Vec<String> = outcome.left.iter().take(4).map(|f| f.to_string()).collect();
        t.unmended.push(format!("{name}: {left:?}"));
        return false;
    }
    true
}

/// Lists the objections of the checker, xfs_repair, a second repair and the kernel to a repaired image.
fn objections(path: &Path) -> Vec<String> {
    let mut why = Vec::new();
    let found = findings(path);
    if !found.is_empty() {
        why.push(format!("check: {:?}", &found[..found.len().min(4)]));
    }
    if let Some(text) = xfs_repair_n(path) {
        let lines: Vec<&str> = text.lines().filter(|l| !is_noise(l)).take(5).collect();
        why.push(format!("xfs_repair: {lines:?}"));
    }
    match repair_file(path, &options()) {
        Ok(o) if o.found_count == 0 && o.written == 0 => {}
        Ok(o) => why.push(format!("a second run finds {:?}", o.found)),
        Err(e) => why.push(format!("a second run: {e}")),
    }
    if let Err(e) = Mount::new(path, "ro,nouuid") {
        why.push(format!("mount: {e}"));
    }
    why
}

/// Repairs a damaged image, lets xfs_repair do the same to a copy, and tallies what is wrong with
/// the outcome of the former.
fn judge(path: &Path, dir: &Path, name: &str, before: &Files, tally: &Mutex<Tally>) {
    let theirs = dir.join("theirs");
    copy(path, &theirs);
    if !mend(path, name, tally) {
        return;
    }
    let mut why = objections(path);
    let args = ["60", "xfs_repair", "-f"].map(OsStr::new);
    let out = output("timeout", &[&args[..], &[theirs.as_os_str()]].concat()).unwrap();
    let after = files(path);
    if out.status.success() {
        let theirs = files(&theirs);
        let kept = |f: &Files| f.iter().filter(|(i, c)| before.get(i) == Some(c)).count();
        let lost: Vec<u64> = theirs
            .iter()
            .filter(|(ino, c)| before.get(ino) == Some(c) && after.get(ino) != Some(c))
            .map(|(ino, _)| *ino)
            .collect();
        if !lost.is_empty() {
            why.push(format!(
                "lost {} files: {:?}",
                lost.len(),
                &lost[..lost.len().min(5)]
            ));
        }
        tally.lock().unwrap().more_files += usize::from(kept(&after) > kept(&theirs));
    }
    if !why.is_empty() {
        let mut t = tally.lock().unwrap();
        t.wrong.push(format!("{name}: {}", why.join("\n    ")));
    }
}

/// Does `damage` for each number up to `count` to copies of the image, and repairs them.
pub fn each(image: &Image, count: usize, damage: &(dyn Fn(usize, &Path) -> Option<String> + Sync)) {
    let before = files(&image.path());
    let tally = Mutex::new(Tally::default());
    let next = AtomicUsize::new(0);
    std::thread::scope(|s| {
        for _ in 0..3 {
            let dir = tempfile::Builder::new().tempdir_in(image.dir()).unwrap();
            let (tally, next, before) = (&tally, &next, &before);
            s.spawn(move || {
                let path = dir.path().join("damaged");
                loop {
                    let i = next.fetch_add(1, Ordering::Relaxed);
                    if i >= count {
                        break;
                    }
                    copy(&image.path(), &path);
                    if let Some(name) = damage(i, &path) {
                        judge(&path, dir.path(), &name, before, tally);
                    }
                }
            });
        }
    });
    let t = tally.into_inner().unwrap();
    eprintln!(
        "{} damages: {} without findings, {} refused, {} not mended, {} wrong, {} where more files are kept than by xfs_repair; rounds {:?}",
        t.done,
        t.sound,
        t.refused.len(),
        t.unmended.len(),
        t.wrong.len(),
        t.more_files,
        t.rounds,
    );
    for line in &t.refused {
        eprintln!("refused: {line}");
    }
    for line in &t.unmended {
        eprintln!("not mended: {line}");
    }
    assert!(t.wrong.is_empty(), "{}", t.wrong.join("\n"));
}

pub fn step(default: usize) -> usize {
    if uvfs_testing::full() {
        return 1;
    }
    let n = std::env::var("UVFS_DAMAGE").ok();
    n.map_or(default, |n| n.parse().expect("UVFS_DAMAGE is a number"))
}

/// An image that uvfs has repaired is sound to xfs_repair, and keeps each file that xfs_repair keeps.
#[test]
fn damages_are_mended() {
    let Some(image) = base() else { return };
    let mem = MemImage::load(&image.path()).unwrap();
    let regions = mutate::regions(&mem);
    let only = std::env::var("UVFS_ONLY").ok();
    let mut damages = all_damages(&image.path());
    eprintln!("{} damages", damages.len());
    let mut i = 0;
    damages.retain(|d| {
        i += 1;
        match &only {
            Some(o) => d.name().contains(o.as_str()),
            None => i % step(60) == 0 || d.name().contains("lsn"),
        }
    });
    let done = |i: usize, path: &Path| damages[i].apply(path, &mem, &regions);
    each(&image, damages.len(), &done);
}

/// Two damages at once, judged as single ones are.
#[test]
fn pairs_of_damages() {
    let Some(image) = base() else { return };
    let mem = MemImage::load(&image.path()).unwrap();
    let regions = mutate::regions(&mem);
    let count = std::env::var("UVFS_PAIRS").map_or(24, |n| n.parse().unwrap());
    each(&image, count, &|i, path| {
        let mut random = Random(i as u64 + 50_000);
        let mut damaged = mem.clone();
        let a = mutate::damage(&mut damaged, &regions, &mut random);
        let b = mutate::damage(&mut damaged, &regions, &mut random);
        damages::write_regions(path, &damaged, &regions);
        Some(format!("{a}, and {b}"))
    });
}
