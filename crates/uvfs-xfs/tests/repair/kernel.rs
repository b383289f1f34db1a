//! Single fields, changed with a right checksum, judged by the kernel: it has no objection to an image that the
//! check calls sound, nor to one that was repaired.

use super::*;
use mutate::FieldChange;
use std::io::{Read as _, Seek as _};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use uvfs_xfs::format::{SB_CRC_OFFSET, Superblock, VERSION_DALIGN, VERSION_NLINK, VERSION_QUOTA};

/// The kernel's log from now on.
struct KernelLog(File);

impl KernelLog {
    fn open() -> io::Result<KernelLog> {
        let flags = rustix::fs::OFlags::NONBLOCK.bits() as i32;
        let mut file = File::options()
            .read(true)
            .custom_flags(flags)
            .open("/dev/kmsg")?;
        file.seek(io::SeekFrom::End(0))?;
        Ok(KernelLog(file))
    }

    /// The objections to what is on a loop device.
    fn objections(&mut self, device: &str) -> Vec<String> {
        let about = format!("XFS ({device}):");
        let bad = ["orruption", "Internal error", "I/O error", "hutting down"];
        let mut out = Vec::new();
        let mut line = vec![0; 8192];
        loop {
            match self.0.read(&mut line) {
                Ok(n) => {
                    let text = String::from_utf8_lossy(&line[..n]);
                    let said = text.lines().next().and_then(|l| l.split_once(&about));
                    if let Some((_, said)) = said.filter(|s| bad.iter().any(|b| s.1.contains(b))) {
                        out.push(said.to_string());
                    }
                }
                // Lines that were not read yet are gone.
                Err(e) if e.kind() == io::ErrorKind::BrokenPipe => {}
                Err(_) => return out,
            }
        }
    }
}

/// The loop device below a mount.
fn device(mount: &Path) -> Option<String> {
    let mounts = fs::read_to_string("/proc/self/mounts").unwrap();
    let is = |l: &&str| l.split(' ').nth(1).map(Path::new) == Some(mount);
    let line = mounts.lines().find(is)?;
    let device = line.split(' ').next()?;
    Some(device.strip_prefix("/dev/")?.to_string())
}

/// Notes that the kernel could not do something, unless a file's flags, type, owner or size are why.
fn note<T>(what: &str, path: &Path, result: io::Result<T>, errors: &mut Vec<String>) -> Option<T> {
    use rustix::io::Errno;
    let may_be = [
        Errno::PERM,
        Errno::ACCESS,
        Errno::NXIO,
        Errno::NODEV,
        Errno::FBIG,
        Errno::OVERFLOW,
        Errno::NOTEMPTY,
    ];
    match result {
        Ok(value) => return Some(value),
        Err(e)
            if may_be
                .iter()
                .any(|m| e.raw_os_error() == Some(m.raw_os_error())) => {}
        Err(e) => errors.push(format!("{what} {}: {e}", path.display())),
    }
    None
}

fn attributes(path: &Path) -> io::Result<()> {
    let mut names = vec![0; 1 << 16];
    let n = rustix::fs::llistxattr(path, &mut names[..])?;
    let mut value = vec![0; 1 << 16];
    for name in names[..n].split(|b| *b == 0).filter(|n| !n.is_empty()) {
        rustix::fs::lgetxattr(path, name, &mut value[..])?;
    }
    Ok(())
}

/// Reads the beginning of a file, and writes a block: a shared one is copied then.
fn contents(path: &Path) -> io::Result<()> {
    let file = File::options().read(true).write(true).open(path)?;
    let mut buf = vec![0; 1 << 20];
    file.read_at(&mut buf, 0)?;
    file.write_all_at(&buf[..100], 0)
}

/// Reads all that a directory leads to, with attributes, and removes it: that takes every tree.
fn use_up(dir: &Path, errors: &mut Vec<String>) {
    let Some(entries) = note("list", dir, fs::read_dir(dir), errors) else {
        return;
    };
    for e in entries.collect::<Vec<_>>() {
        let Some(e) = note("list", dir, e, errors) else {
            continue;
        };
        let path = e.path();
        note("attributes of", &path, attributes(&path), errors);
        let Some(m) = note("stat", &path, fs::symlink_metadata(&path), errors) else {
            continue;
        };
        if m.is_dir() {
            use_up(&path, errors);
            note("remove", &path, fs::remove_dir(&path), errors);
            continue;
        }
        let used = match () {
            () if m.is_symlink() => fs::read_link(&path).map(drop),
            () if m.is_file() => contents(&path),
            () => Ok(()),
        };
        note("use", &path, used, errors);
        note("remove", &path, fs::remove_file(&path), errors);
    }
}

/// Has the kernel read, change and remove all that is in an image.
fn kernel_objections(path: &Path) -> Vec<String> {
    let mut log = KernelLog::open().unwrap();
    let mount = match Mount::new(path, "rw,nouuid") {
        Ok(m) => m,
        Err(e) => return vec![e],
    };
    let device = device(mount.path()).unwrap();
    let mut errors = Vec::new();
    use_up(mount.path(), &mut errors);
    drop(mount);
    errors.truncate(3);
    errors.extend(log.objections(&device).into_iter().take(3));
    errors
}

/// The fault of the check or the repair of an image with this change.
fn judge_change(base: &Path, path: &Path, change: &FieldChange) -> Option<String> {
    copy(base, path);
    let file = File::options().write(true).open(path).unwrap();
    file.write_all_at(&change.bytes, change.offset).unwrap();
    let found = findings(path);
    if !found.is_empty() {
        match repair_file(path, &options()) {
            Ok(o) if o.left_count == 0 => {}
            Ok(o) => return Some(format!("{}: left: {:?}", change.what, o.left)),
            // A feature that no repair here knows.
            Err(e) if e.to_string().ends_with("not supported") => return None,
            Err(e) => return Some(format!("{}: {e}", change.what)),
        }
    }
    let mut why = kernel_objections(path);
    why.extend(findings(path).iter().map(|f| format!("afterwards: {f}")));
    let found = &found[..found.len().min(2)];
    (!why.is_empty()).then(|| {
        format!(
            "{}: found {found:?}\n    {}",
            change.what,
            why.join("\n    ")
        )
    })
}

/// The kernel takes each image that the check calls sound or the repair has repaired.
#[test]
fn fields_to_the_kernel() {
    let Some(image) = base() else { return };
    if let Err(e) = KernelLog::open() {
        return uvfs_testing::skip(format!("needs /dev/kmsg: {e}"));
    }
    let mem = MemImage::load(&image.path()).unwrap();
    let mut changes = mutate::field_changes(&mem, &mutate::regions(&mem));
    let mut i = 0;
    // A slot that is not in use was missed once.
    let always =
        |c: &FieldChange| c.what.starts_with("AGFL") && c.what.ends_with("-> [80, 00, 00, 00]");
    let only = std::env::var("UVFS_ONLY").ok();
    changes.retain(|c| {
        i += 1;
        match &only {
            Some(o) => c.what.contains(o.as_str()),
            None => i % (step(50) * 20) == 0 || always(c),
        }
    });
    let next = AtomicUsize::new(0);
    let wrong = Mutex::new(Vec::new());
    std::thread::scope(|s| {
        for _ in 0..3 {
            s.spawn(|| {
                let dir = tempfile::Builder::new().tempdir_in(image.dir()).unwrap();
                let path = dir.path().join("damaged");
                while let Some(change) = changes.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let why = judge_change(&image.path(), &path, change);
                    wrong.lock().unwrap().extend(why);
                }
            });
        }
    });
    eprintln!("{} of {i} changes", changes.len());
    let wrong = wrong.into_inner().unwrap();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// A way to damage a superblock.
type Edit = fn(&mut Superblock);

/// Fields of superblocks that the check did not look at once: the bits of quota and of stripes without what they
/// stand for, the bits that version 5 always or never has, and a number in a copy that is beyond its range.
#[test]
fn fields_of_superblocks() {
    let Some(image) = base() else { return };
    let mem = MemImage::load(&image.path()).unwrap();
    let regions = mutate::regions(&mem);
    let mut copies = regions.iter().filter(|r| r.kind == "superblock");
    let (primary, copy) = (copies.next().unwrap(), copies.next().unwrap());
    let edits: [(_, _, Edit); 5] = [
        ("quota", primary, |s| {
            s.versionnum.set(s.versionnum.get() | VERSION_QUOTA)
        }),
        ("stripes", primary, |s| {
            s.versionnum.set(s.versionnum.get() | VERSION_DALIGN)
        }),
        ("links", primary, |s| {
            s.versionnum.set(s.versionnum.get() & !VERSION_NLINK)
        }),
        ("qflags", primary, |s| s.qflags.set(0x20)),
        ("imax_pct", copy, |s| s.imax_pct = 255),
    ];
    judged::each(&image, edits.len(), &|i, path| {
        let (name, region, edit) = edits[i];
        let mut bytes = vec![0; region.len];
        assert!(mem.get(region.offset, &mut bytes));
        let mut sb = *Superblock::at(&bytes, 0).unwrap();
        edit(&mut sb);
        sb.put(&mut bytes, 0);
        store_crc(&mut bytes, SB_CRC_OFFSET);
        let file = File::options().write(true).open(path).unwrap();
        file.write_all_at(&bytes, region.offset).unwrap();
        assert!(!findings(path).is_empty(), "{name}");
        Some(name.into())
    });
}
