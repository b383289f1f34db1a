//! What takes several transactions, cut off in the middle of it: the log then announces what it does not have.

use super::*;
use rustix::fs::{self as rfs, FallocateFlags, XattrFlags};
use uvfs_xfs::format::*;

/// A way to use a file system until that fails.
type Use = fn(&Path) -> io::Result<()>;

/// What is done over and over, on what image, and the change that the log is to end within.
struct Scene {
    /// Arguments of mkfs.xfs.
    args: &'static str,
    /// Further incompatible features.
    features: u32,
    using: Use,
    /// As [`LogState::Replayed`] names it.
    about: &'static str,
}

const FREEING: &str = "the freeing of blocks";
const OWNER: &str = "a change of the reverse mapping tree";
const REFERENCES: &str = "a change of the reference count tree";
const MAPPING: &str = "a change of a file's mapping";
const ATTRIBUTE: &str = "a change of an extended attribute";
const EXCHANGE: &str = "an exchange of files' contents";
const ALL: &str = "-m rmapbt=1,reflink=1 -b size=1024";
const SHARING: &str = "-m rmapbt=0,reflink=1";

const fn scene(args: &'static str, features: u32, using: Use, about: &'static str) -> Scene {
    Scene {
        args,
        features,
        using,
        about,
    }
}

const SCENES: [Scene; 12] = [
    scene(ALL, 0, truncate, OWNER),
    scene("-m rmapbt=0,reflink=0", 0, truncate, FREEING),
    scene(ALL, 0, share, MAPPING),
    scene(SHARING, 0, share, REFERENCES),
    scene(ALL, 0, unshare, REFERENCES),
    scene("-m rmapbt=0,reflink=1 -i nrext64=1", 0, unshare, MAPPING),
    scene(ALL, 0, shift, OWNER),
    scene(ALL, INCOMPAT_EXCHRANGE, exchange, EXCHANGE),
    scene(SHARING, INCOMPAT_EXCHRANGE, exchange_written, EXCHANGE),
    scene(ALL, 0, attributes, FREEING),
    scene(
        "-m rmapbt=0,reflink=1 -i size=512",
        INCOMPAT_PARENT,
        names,
        ATTRIBUTE,
    ),
    scene(ALL, INCOMPAT_PARENT | INCOMPAT_EXCHRANGE, names, ATTRIBUTE),
];

fn block(root: &Path) -> u64 {
    rfs::statvfs(root).unwrap().f_bsize
}

/// A file of so many extents: every other block is written.
fn pieces(path: &Path, extents: u64, seed: u64) -> io::Result<File> {
    let file = File::options()
        .read(true)
        .write(true)
        .create(true)
        .truncate(true)
        .open(path)?;
    let size = block(path.parent().unwrap());
    for i in 0..extents {
        file.write_all_at(&pattern(seed + i, size as usize), i * 2 * size)?;
    }
    file.sync_data()?;
    Ok(file)
}

fn truncate(root: &Path) -> io::Result<()> {
    let file = pieces(&root.join("a"), 700, 1)?;
    file.set_len(block(root) * 3)?;
    let file = pieces(&root.join("b"), 300, 1)?;
    fs::remove_file(root.join("b"))?;
    drop(file);
    Ok(())
}

fn share(root: &Path) -> io::Result<()> {
    let size = block(root);
    let from = pieces(&root.join("from"), 400, 1)?;
    let to = pieces(&root.join("to"), 300, 2)?;
    let clone = |to: &File| io::Result::Ok(rfs::ioctl_ficlone(to, &from)?);
    clone(&to)?;
    to.set_len(0)?;
    let third = pieces(&root.join("third"), 800, 3)?;
    clone(&third)?;
    third.write_all_at(&pattern(8, size as usize * 90), size * 50)?;
    third.sync_data()
}

fn unshare(root: &Path) -> io::Result<()> {
    let size = block(root);
    let from = pieces(&root.join("from"), 500, 1)?;
    let to = File::create(root.join("to"))?;
    rfs::ioctl_ficlone(&to, &from)?;
    rfs::fallocate(&from, FallocateFlags::UNSHARE_RANGE, 0, size * 900)?;
    rfs::fallocate(
        &to,
        FallocateFlags::KEEP_SIZE | FallocateFlags::PUNCH_HOLE,
        size,
        size * 500,
    )?;
    Ok(())
}

fn shift(root: &Path) -> io::Result<()> {
    let size = block(root);
    let file = pieces(&root.join("a"), 500, 1)?;
    let other = File::create(root.join("b"))?;
    rfs::ioctl_ficlone(&other, &file)?;
    rfs::fallocate(&file, FallocateFlags::COLLAPSE_RANGE, size * 20, size * 41)?;
    rfs::fallocate(&other, FallocateFlags::INSERT_RANGE, size * 20, size * 40)?;
    rfs::fallocate(&other, FallocateFlags::COLLAPSE_RANGE, size, size * 40)?;
    Ok(())
}

fn exchanged(root: &Path, flags: &str) -> io::Result<()> {
    let (a, b) = (root.join("a"), root.join("b"));
    pieces(&a, 500, 1)?;
    let file = pieces(&b, 300, 2)?;
    rfs::fallocate(
        &file,
        FallocateFlags::empty(),
        block(root) * 101,
        block(root) * 80,
    )?;
    // Once this kernel has finished an exchange of different sizes at mount, it takes the end of a file for blocks beyond
    // its size, and frees them.
    file.set_len(fs::metadata(&a)?.len())?;
    file.sync_data()?;
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/replay/exchange.py");
    let args = [
        script.as_os_str(),
        a.as_os_str(),
        b.as_os_str(),
        OsStr::new(flags),
    ];
    let said = output("python3", &args)?;
    let said = String::from_utf8_lossy(&said.stdout).into_owned();
    assert!(
        said.starts_with("5 "),
        "EIO once the mount was cut off: {said}"
    );
    Err(io::ErrorKind::Other.into())
}

fn exchange(root: &Path) -> io::Result<()> {
    // To the end of both files, whose sizes are exchanged.
    exchanged(root, "1")
}

fn exchange_written(root: &Path) -> io::Result<()> {
    // What is written in the first file only; 4 would be a dry run.
    exchanged(root, "8")
}

fn attributes(root: &Path) -> io::Result<()> {
    for i in 0..12 {
        let path = root.join(format!("file-{i}"));
        File::create(&path)?;
        for k in 0..60 {
            // Values in blocks of their own are not in the log.
            let value = pattern(k, [20, 300, 700][k as usize % 3]);
            rfs::setxattr(&path, format!("user.{k}"), &value, XattrFlags::empty())?;
            if k % 3 > 0 && k > 20 {
                rfs::removexattr(&path, format!("user.{}", k - 20))?;
            }
        }
    }
    Ok(())
}

fn names(root: &Path) -> io::Result<()> {
    let long = "x".repeat(200);
    let dirs = ["one", "two"].map(|dir| root.join(dir));
    for dir in &dirs {
        _ = fs::create_dir(dir);
    }
    for i in 0..40 {
        let path = dirs[0].join(format!("file-{i}"));
        fs::write(&path, pattern(i, 100))?;
        for k in 0..i % 7 * 4 {
            fs::hard_link(&path, dirs[1].join(format!("{long}-{i}-{k}")))?;
        }
        fs::rename(&path, dirs[1].join(format!("renamed-{i}")))?;
    }
    let all: Vec<_> = fs::read_dir(&dirs[1])?.collect::<Result<_, _>>()?;
    for entry in all {
        let name = entry.file_name();
        match name.len() % 2 {
            0 => fs::rename(entry.path(), dirs[0].join(name))?,
            _ => fs::remove_file(entry.path())?,
        }
    }
    fs::remove_dir_all(&dirs[0])
}

/// Makes a file durable now and then, until that fails: with it, what others are in the middle of.
fn sync_at_times(root: &Path) {
    let Ok(file) = File::create(root.join("synced")) else {
        return;
    };
    let mut size = 0;
    while file.set_len(size).is_ok() && file.sync_all().is_ok() {
        size = (size + 1) % 5000;
        std::thread::sleep(Duration::from_micros(200));
    }
}

/// Sets incompatible features of a new image that its mkfs.xfs does not know: they change nothing of an empty one.
pub fn set_features(path: &Path, bits: u32, on: bool) {
    let file = File::options().read(true).write(true).open(path).unwrap();
    let g = Volume::open(open(path)).unwrap().geometry().clone();
    for agno in 0..g.agcount {
        let at = g.ag_header_daddr(agno, 0) * 512;
        let mut sector = vec![0; g.sector_size as usize];
        file.read_exact_at(&mut sector, at).unwrap();
        let sb = Superblock::at_mut(&mut sector, 0).unwrap();
        let old = sb.features_incompat.get();
        sb.features_incompat
            .set(if on { old | bits } else { old & !bits });
        store_crc(&mut sector, SB_CRC_OFFSET);
        file.write_all_at(&sector, at).unwrap();
    }
}

/// Where the records of a log end that has not been gone around.
fn ends(path: &Path) -> Vec<u64> {
    let mem = MemImage::load(path).unwrap();
    let volume = Volume::open(open(path)).unwrap();
    let g = volume.geometry();
    let log = g.daddr(g.fsb(g.logstart).unwrap());
    let records = log_records(&mem, g);
    records.iter().map(|r| r.offset / 512 - log).collect()
}

/// What the log of an image announces and does not have.
fn announced(path: &Path) -> Vec<&'static str> {
    match Volume::open(open(path)).unwrap().log() {
        LogState::Replayed {
            finished,
            unfinished,
            ..
        } => {
            assert_eq!(unfinished, &[""; 0], "after {finished:?}");
            finished.clone()
        }
        _ => Vec::new(),
    }
}

/// Uses an image as a scene says, until it is cut off; gives where its log may end earlier.
fn used(scene: &Scene, image: &Image, whole: &Path) -> Vec<u64> {
    // Until a part of the log is in use the kernel writes nothing back. An earlier end of the log then is one that might
    // have been.
    for time in [400u64, 200, 100, 50, 25] {
        let args: Vec<&str> = scene.args.split(' ').collect();
        assert!(image.mkfs(&args), "{}", scene.args);
        set_features(&image.path(), scene.features, true);
        let mount = Mount::new(&image.path(), "rw").unwrap();
        let at = mount.path();
        std::thread::scope(|scope| {
            scope.spawn(move || sync_at_times(at));
            scope.spawn(move || while (scene.using)(at).is_ok() {});
            std::thread::sleep(Duration::from_millis(time));
            cut_off(at, true);
        });
        drop(mount);
        let volume = image.open();
        let blocks = u64::from(volume.geometry().logblocks) << (volume.geometry().blocklog - 9);
        if matches!(volume.log(), LogState::Replayed { head, .. } if *head < blocks / 5) {
            break;
        }
    }
    fs::rename(image.path(), whole).unwrap();
    ends(whole)
}

/// Judges images where their logs end within what a scene is about, as often as `most` says.
fn play(scene: &Scene, most: usize, seed: u64, seen: &mut Seen) {
    const IMAGES: usize = 6;
    let image = Image::new();
    let whole = image.dir().join("whole");
    let mut random = Random(seed);
    let mut left = most;
    for _ in 0..IMAGES {
        let mut ends = used(scene, &image, &whole);
        while left > 0 && !ends.is_empty() {
            let end = ends.swap_remove(random.below(ends.len() as u64) as usize);
            copied(&whole, &image.path());
            tear_at(&image.path(), end);
            let announced = announced(&image.path());
            // Half of a long run's points may be within anything else.
            let other = left * 2 > most + 1 && !announced.is_empty();
            if !other && !announced.contains(&scene.about) {
                continue;
            }
            let kept = image.dir().join("kept");
            copied(&image.path(), &kept);
            let judged = catch_unwind(AssertUnwindSafe(|| judge(&image, seen)));
            if let Err(panic) = judged {
                let (args, features) = (scene.args, scene.features);
                if let Some(to) = std::env::var_os("UVFS_KEEP") {
                    let name = format!("scene-{end}-{features:x}");
                    copied(&kept, &Path::new(&to).join(name));
                }
                eprintln!("{args}, features {features:#x}, log cut off at {end}");
                std::panic::resume_unwind(panic);
            }
            left -= 1;
        }
        if left == 0 {
            break;
        }
    }
    let within = seen.finished.get(scene.about).copied();
    let about = scene.about;
    assert!(within > Some(0), "no log ended within {about}: {seen:?}");
}

/// Intents of all kinds that this kernel writes.
#[test]
fn intents() {
    if !can_compare() || !uvfs_testing::has(&[uvfs_testing::Need::Program("python3")]) {
        return;
    }
    let most = if uvfs_testing::full() { 20 } else { 1 };
    let only = std::env::var("UVFS_SCENE")
        .ok()
        .and_then(|n| n.parse().ok());
    for (i, scene) in SCENES.iter().enumerate() {
        if only.is_some_and(|only: usize| only != i) {
            continue;
        }
        let mut seen = Seen::default();
        play(scene, most, i as u64, &mut seen);
        eprintln!("{i}: {} {:#x}: {seen:?}", scene.args, scene.features);
    }
}
