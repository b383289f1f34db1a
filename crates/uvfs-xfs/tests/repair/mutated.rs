//! The small image of the fuzz target `repair`, damaged at random many times: what libFuzzer's inputs do, with
//! seeds, and several times as fast.

use super::*;

/// Repairs an image that up to eight structures of were damaged; gives why not, if it was not repaired.
fn outcome(mem: &MemImage, regions: &[mutate::Region], seed: u64) -> Result<(), String> {
    let mut random = Random(seed);
    let mut damaged = mem.clone();
    let mut what = Vec::new();
    for _ in 0..1 + random.below(8) {
        what.push(mutate::damage(&mut damaged, regions, &mut random));
    }
    let sink = MemSink::new(&damaged, usize::MAX, EIO);
    let o = repair_mem(&damaged, &sink).map_err(|e| format!("{what:?}: {e}"))?;
    if o.left_count > 0 {
        return Err(format!("{what:?}: left: {:?}", o.left));
    }
    let after = Arc::new(sink.state.into_inner().unwrap().image);
    let one = CheckOptions {
        threads: 1,
        ..CheckOptions::default()
    };
    let o =
        check(after, &one, &CheckProgress::default()).unwrap_or_else(|e| panic!("{what:?}: {e}"));
    assert_eq!(o.count, 0, "{what:?}: {:?}", o.findings);
    Ok(())
}

/// Seeds whose damage was left once: the type of an entry ".." in a directory block, a symbolic link whose
/// block says that its target is shorter than what the inode holds, a superblock without the root's number, and a
/// copy of the superblock with another UUID beside a broken inode tree.
const FOUND: [u64; 8] = [22662, 61526, 56176, 80498, 84156, 58925, 23020, 7_002_492];

/// The check finds nothing in an image that a repair says it has mended, and none panics or hangs. `UVFS_MUTATED` says
/// how many images, and `UVFS_MUTATED_FROM` the first seed.
#[test]
fn mutated_images_are_mended() {
    if !can_compare() {
        return;
    }
    let number = |name, default| std::env::var(name).map_or(default, |n| n.parse().unwrap());
    let (count, from) = (number("UVFS_MUTATED", 300), number("UVFS_MUTATED_FROM", 0));
    let image = Image::new();
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fuzz/image.sh");
    run("sh", &[OsStr::new(script), image.path().as_os_str()]);
    let mem = MemImage::load(&image.path()).unwrap();
    let regions = mutate::regions(&mem);
    let superblocks: Vec<_> = regions.iter().filter(|r| r.kind == "superblock").collect();
    assert_eq!(superblocks.len(), 2);
    let next = AtomicUsize::new(0);
    let left = Mutex::new(Vec::new());
    let slowest = Mutex::new((std::time::Duration::ZERO, 0));
    for seed in FOUND {
        let outcome = outcome(&mem, &regions, seed);
        assert!(outcome.is_ok(), "{seed} {outcome:?}");
    }
    std::thread::scope(|s| {
        for _ in 0..2 {
            s.spawn(|| {
                loop {
                    let i = next.fetch_add(1, Ordering::Relaxed);
                    if i >= count {
                        break;
                    }
                    let seed = (from + i) as u64;
                    let start = std::time::Instant::now();
                    match std::panic::catch_unwind(|| outcome(&mem, &regions, seed)) {
                        Ok(Ok(())) => {}
                        Ok(Err(why)) => left.lock().unwrap().push(format!("{seed} {why}")),
                        Err(_) => panic!("seed {seed}"),
                    }
                    let mut slowest = slowest.lock().unwrap();
                    *slowest = (start.elapsed(), seed).max(*slowest);
                }
            });
        }
    });
    let left = left.into_inner().unwrap();
    // Without a sound superblock there is nothing to go by; the image has two.
    let is_refused = |why: &&String| {
        let hurt = |at| why.contains(&format!("superblock at {at:#x}:"));
        why.ends_with(UNKNOWN_FEATURES) || superblocks.iter().all(|r| hurt(r.offset))
    };
    let (refused, wrong): (Vec<&String>, Vec<&String>) = left.iter().partition(is_refused);
    let slowest = slowest.into_inner().unwrap();
    let refused = refused.len();
    eprintln!("{count} images, {refused} refused, slowest {slowest:?}");
    assert!(wrong.is_empty(), "{} not mended: {wrong:#?}", wrong.len());
}
