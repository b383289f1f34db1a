//! Archives that GNU tar, bsdtar, Python, Go and no program at all write: an image made of each is what GNU tar
//! extracts.

use super::*;
use std::collections::BTreeMap;
use std::process::Stdio;
use std::time::{SystemTime, UNIX_EPOCH};
use uvfs_testing::{Need, has};
use uvfs_xfs::mkfs::Archive;

/// CI makes an image of each fifth archive. A part of names chooses others, and `all` or the long variants all.
const CHOSEN: &str = "UVFS_TEST_ARCHIVES";

const PROGRAMS: [&str; 7] = ["bsdtar", "bzip2", "python3", "setfacl", "tar", "xz", "zstd"];

/// Every archive: its name, the reason if it is to be refused, and the one that GNU tar extracts.
fn archives(source: &Path, out: &Path, all: bool) -> Vec<[String; 3]> {
    let at = |name| Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/mkfs")).join(name);
    let mut args = vec![at("archives.py"), source.into(), out.into()];
    if !all {
        // Its compiler takes longer than all the rest.
    } else if let Some(go) = Need::Program("go").missing() {
        uvfs_testing::say(format_args!("archives of Go: needs {go}"));
    } else {
        let program = out.join("go");
        let build = Path::new("build");
        run("go", &[build, "-o".as_ref(), &program, &at("archives.go")]);
        args.push(program);
    }
    run("python3", &args);
    let list = fs::read_to_string(out.join("list")).unwrap();
    let each = list.lines().map(|line| {
        let mut fields = line.split('\t').map(str::to_owned);
        std::array::from_fn(|_| fields.next().unwrap())
    });
    each.collect()
}

pub fn archive(path: &Path) -> Archive {
    Archive {
        name: path.into(),
        from: Box::new(fs::File::open(path).unwrap()),
    }
}

/// What the two trees have to have in common. Directories that no member is about get their times from the clock.
pub fn lines(root: &Path, since: u64) -> Vec<String> {
    let mut inodes = BTreeMap::<u64, Vec<PathBuf>>::new();
    let mut lines = Vec::new();
    let mut todo = vec![PathBuf::new()];
    while let Some(rel) = todo.pop() {
        let path = root.join(&rel);
        let m = fs::symlink_metadata(&path).unwrap();
        let made = m.is_dir() && (m.mtime() >= since as i64 || m.mtime() == 0);
        if m.is_dir() {
            let entries = fs::read_dir(&path).unwrap();
            todo.extend(entries.map(|e| rel.join(e.unwrap().file_name())));
        }
        // Extracting a member changes the directory that all go to.
        if rel.as_os_str().is_empty() && made {
            continue;
        }
        let mut line = format!("{rel:?} {:o} {}:{}", m.mode(), m.uid(), m.gid());
        line += &format!(" {} {:x}", m.nlink(), m.rdev());
        match made {
            true => line += " new",
            false => line += &format!(" {}.{:09}", m.mtime(), m.mtime_nsec()),
        }
        line += &contents(&path, &m);
        lines.push(line);
        if m.nlink() > 1 && !m.is_dir() {
            inodes.entry(m.ino()).or_default().push(rel);
        }
    }
    lines.extend(inodes.into_values().map(|mut names| {
        names.sort();
        format!("one inode: {names:?}")
    }));
    lines.sort();
    lines
}

/// An empty file system that the kernel has mounted, for what programs extract, and the second at which it was made.
pub fn native() -> (Image, Mount, u64) {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
    let base = Image::new();
    assert!(base.mkfs(&[]));
    let native = Mount::new(&base.path(), "rw").unwrap();
    (base, native, since.as_secs())
}

/// Each archive becomes what GNU tar extracts from it, or is refused for the reason that is told.
#[test]
fn every_archive_becomes_what_gnu_tar_extracts() {
    if !can_run() || !has(&PROGRAMS.map(Need::Program)) {
        return;
    }
    let (dir, (_base, native, since)) = (scratch(), native());
    let source = native.path().join("source");
    fs::create_dir(&source).unwrap();
    let archives_dir = dir.path().join("archives");
    fs::create_dir(&archives_dir).unwrap();
    let chosen = std::env::var(CHOSEN).unwrap_or_default();
    let every = chosen == "all" || uvfs_testing::full();
    let all = archives(&source, &archives_dir, every);
    let mut failed = Vec::new();
    for (i, [name, refused, like]) in all.iter().enumerate() {
        let wanted = match &*chosen {
            _ if every => true,
            "" => i % 5 == 0,
            part => name.contains(part),
        };
        if !wanted {
            continue;
        }
        let paths = [name, like].map(|name| archives_dir.join(name));
        let outcome = compare(&paths[0], refused, &paths[1], native.path(), since);
        failed.extend(outcome.err().map(|why| format!("{name}: {why}")));
    }
    assert!(
        failed.is_empty(),
        "{} archives:\n{}",
        failed.len(),
        failed.join("\n")
    );
}

fn compare(
    path: &Path,
    refused: &str,
    like: &Path,
    native: &Path,
    since: u64,
) -> Result<(), String> {
    let image = path.with_extension("image");
    let from = From::Archives(vec![archive(path)]);
    let made = make(&image, &MkfsOptions::default(), from);
    if !refused.is_empty() {
        let why = made.err().ok_or("it is not refused")?.to_string();
        return match why.contains(refused) {
            true => Ok(()),
            false => Err(format!("refused for another reason: {why}")),
        };
    }
    made.map_err(|e| e.to_string())?;
    let extracted = native.join("extracted");
    fs::create_dir(&extracted).unwrap();
    let status = Command::new("tar")
        .args([
            "--numeric-owner",
            "--acls",
            "--xattrs",
            "--xattrs-include=*",
        ])
        .args(["--selinux", "--delay-directory-restore", "-xpf"])
        .arg(like)
        .arg("-C")
        .arg(&extracted)
        .stderr(Stdio::null())
        .status()
        .unwrap();
    let expected = lines(&extracted, since);
    let mount = Mount::new(&image, "ro,norecovery")?;
    let ours = lines(mount.path(), since);
    drop(mount);
    fs::remove_dir_all(&extracted).unwrap();
    let found = findings(&image);
    fs::remove_file(&image).unwrap();
    let only = |a: &[String], b: &[String]| -> Vec<String> {
        let lines = a.iter().filter(|l| !b.contains(l));
        lines
            .take(4)
            .map(|l| l.chars().take(400).collect())
            .collect()
    };
    let (more, less) = (only(&ours, &expected), only(&expected, &ours));
    if !more.is_empty() || !less.is_empty() || !found.is_empty() {
        return Err(format!(
            "the image has {more:#?}, GNU tar {less:#?}, check {found:?}"
        ));
    }
    match status.success() {
        true => Ok(()),
        false => Err("GNU tar fails".into()),
    }
}
