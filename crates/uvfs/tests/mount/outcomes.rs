//! The same calls by three users on files of several kinds, on the host's directory and on the mount:
//! what each call gives, and what it leaves behind. docs/differences.md lists what differs, and why.

pub mod calls;

use std::fmt::Write;
use std::fs;
use std::io::Read;
use std::mem::MaybeUninit;
use std::os::fd::AsFd;
use std::path::Path;

use rustix::fs::{
    AtFlags, CWD, FallocateFlags, FileType, Gid, IFlags, Mode, OFlags, StatxFlags, Timespec,
    Timestamps, Uid, XattrFlags,
};

use crate::harness::*;
use crate::outcomes::calls::{
    ACCESS_ACL, Aligned, CALLS, Call, DEFAULT_ACL, GROUP, Place, acl_of, allocate, cut, open,
};
use crate::own_process;
use crate::semantics::scenes::as_user;

const OWNER: u32 = 1000;
pub const STRANGER: u32 = 2000;
/// Larger than what comes with its open.
pub const SIZE: usize = 40_000;

/// The callers: name, user, group, supplementary groups.
const USERS: &[(&str, u32, u32, &[u32])] = &[
    ("root", 0, 0, &[]),
    ("owner", OWNER, OWNER, &[]),
    ("stranger", STRANGER, STRANGER, &[GROUP]),
];

/// A kind of file, and of the directory that it is in.
struct Kind {
    name: &'static str,
    mode: u32,
    owner: (u32, u32),
    dir: (u32, u32, u32),
    flags: IFlags,
    acl: bool,
}

const KINDS: &[Kind] = &[
    kind("set-id", 0o6777, (OWNER, OWNER), (0o777, 0, 0)),
    kind("set-gid, no x", 0o2767, (OWNER, GROUP), (0o1777, 0, 0)),
    kind("plain", 0o644, (OWNER, OWNER), (0o755, OWNER, OWNER)),
    kind("group's", 0o664, (0, GROUP), (0o2775, 0, GROUP)),
    kind("root's set-id", 0o6757, (0, 0), (0o1777, OWNER, 0)),
    Kind {
        flags: IFlags::APPEND,
        ..kind("append-only", 0o4666, (OWNER, OWNER), (0o777, 0, 0))
    },
    Kind {
        flags: IFlags::IMMUTABLE,
        ..kind("immutable", 0o666, (OWNER, OWNER), (0o777, 0, 0))
    },
    Kind {
        acl: true,
        ..kind("ACL", 0o640, (OWNER, OWNER), (0o777, OWNER, OWNER))
    },
];

const fn kind(name: &'static str, mode: u32, owner: (u32, u32), dir: (u32, u32, u32)) -> Kind {
    Kind {
        name,
        mode,
        owner,
        dir,
        flags: IFlags::empty(),
        acl: false,
    }
}

/// Makes what a call is made on, as root.
fn prepare(dir: &Path, kind: &Kind) -> Place {
    let place = Place {
        dir: dir.into(),
        file: dir.join("file"),
    };
    fs::create_dir(dir).unwrap();
    for name in ["file", "other"] {
        fs::write(dir.join(name), vec![name.as_bytes()[0]; SIZE]).unwrap();
    }
    fs::create_dir(dir.join("sub")).unwrap();
    let path = &place.file;
    let owner = |path: &Path, (uid, gid)| {
        rustix::fs::chown(path, Some(Uid::from_raw(uid)), Some(Gid::from_raw(gid))).unwrap();
    };
    owner(path, kind.owner);
    owner(&dir.join("other"), (OWNER, OWNER));
    owner(&dir.join("sub"), (OWNER, OWNER));
    rustix::fs::chmod(path, Mode::from_raw_mode(kind.mode)).unwrap();
    for name in ["user.old", "trusted.old"] {
        rustix::fs::setxattr(path, name, b"value", XattrFlags::empty()).unwrap();
    }
    if kind.acl {
        rustix::fs::setxattr(path, ACCESS_ACL, &acl_of(STRANGER), XattrFlags::empty()).unwrap();
        rustix::fs::setxattr(dir, DEFAULT_ACL, &acl_of(OWNER), XattrFlags::empty()).unwrap();
    }
    let (mode, uid, gid) = kind.dir;
    owner(dir, (uid, gid));
    rustix::fs::chmod(dir, Mode::from_raw_mode(mode)).unwrap();
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Realtime).tv_sec;
    let ago = |seconds| Timespec {
        tv_sec: now - seconds,
        tv_nsec: 0,
    };
    let times = Timestamps {
        last_access: ago(2000),
        last_modification: ago(1000),
    };
    for path in [path, dir] {
        rustix::fs::utimensat(CWD, path, &times, AtFlags::empty()).unwrap();
    }
    if !kind.flags.is_empty() {
        set_flags(path, |now| now | kind.flags);
    }
    place
}

fn set_flags(path: &Path, change: impl FnOnce(IFlags) -> IFlags) {
    let file = open(path, OFlags::RDONLY).unwrap();
    let now = rustix::fs::ioctl_getflags(&file).unwrap();
    rustix::fs::ioctl_setflags(&file, change(now)).unwrap();
}

/// Inode number; access, modification and change times.
type Times = (u64, [(i64, u32); 3]);

/// Asks the host's file system, whose next change then shows in the times.
fn times(path: &Path) -> Times {
    let flags = AtFlags::SYMLINK_NOFOLLOW | AtFlags::STATX_FORCE_SYNC;
    let stat = rustix::fs::statx(CWD, path, flags, StatxFlags::BASIC_STATS).unwrap();
    let times = [stat.stx_atime, stat.stx_mtime, stat.stx_ctime];
    (stat.stx_ino, times.map(|time| (time.tv_sec, time.tv_nsec)))
}

/// The files that are there now, and which times have moved since.
fn look(path: &Path, before: Option<Times>) -> String {
    let stat = match rustix::fs::lstat(path) {
        Ok(stat) => stat,
        Err(errno) => return format!("{errno:?}"),
    };
    let mut text = format!(
        "{:o} {}:{} links {}",
        stat.st_mode, stat.st_uid, stat.st_gid, stat.st_nlink
    );
    if FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile {
        let _ = write!(text, " size {} {}", stat.st_size, content(path));
    }
    if let Some((ino, before)) = before
        && ino == stat.st_ino
    {
        #[allow(clippy::unnecessary_cast, reason = "the types differ by architecture")]
        let after = [
            (stat.st_atime as i64, stat.st_atime_nsec as u32),
            (stat.st_mtime as i64, stat.st_mtime_nsec as u32),
            (stat.st_ctime as i64, stat.st_ctime_nsec as u32),
        ];
        let moved = ["a", "m", "c"].iter().zip(before.iter().zip(&after));
        let moved = moved.filter(|(_, (before, after))| before != after);
        let moved: String = moved.map(|(name, _)| *name).collect();
        let _ = write!(text, " moved {moved:?}");
    }
    let mut names = [0u8; 512];
    if let Ok(n) = rustix::fs::llistxattr(path, &mut names[..]) {
        let mut names: Vec<_> = names[..n]
            .split(|byte| *byte == 0)
            .filter(|name| !name.is_empty())
            .collect();
        names.sort();
        for name in names {
            let mut value = [0u8; 128];
            let name = String::from_utf8_lossy(name);
            let n = rustix::fs::lgetxattr(path, &*name, &mut value[..]).unwrap_or(0);
            let sum = value[..n]
                .iter()
                .fold(0u64, |sum, b| sum.wrapping_mul(31) + u64::from(*b));
            let _ = write!(text, " {name}={n}:{sum:x}");
        }
    }
    text
}

/// A sum of the content, by a descriptor that moves no access time.
fn content(path: &Path) -> String {
    let Ok(file) = open(path, OFlags::RDONLY | OFlags::NOATIME) else {
        return "unreadable".into();
    };
    let mut bytes = Vec::new();
    let _ = fs::File::from(file).read_to_end(&mut bytes);
    format!("{:x}", crc32c::crc32c(&bytes))
}

fn names(dir: &Path) -> Vec<String> {
    let mut buffer = [MaybeUninit::uninit(); 2048];
    let dir = open(dir, OFlags::RDONLY).unwrap();
    let mut entries = rustix::fs::RawDir::new(dir.as_fd(), &mut buffer);
    let mut names = Vec::new();
    while let Some(entry) = entries.next() {
        names.push(entry.unwrap().file_name().to_string_lossy().into_owned());
    }
    names.sort();
    names.split_off(2)
}

/// Makes all calls below the directory.
pub fn all(dir: &Path, _: &str) -> String {
    rustix::process::umask(Mode::from(0o022));
    let mut report = String::new();
    for kind in KINDS {
        for (user, uid, gid, groups) in USERS {
            for (name, call) in CALLS {
                let dir = dir.join("place");
                let place = prepare(&dir, kind);
                let (file, parent) = (times(&place.file), times(&dir));
                if ["link", "rename", "unlink", "rmdir"]
                    .iter()
                    .any(|it| name.starts_with(it))
                {
                    // tmpfs gives a directory its file's time, which may be the one it has.
                    next_file_time();
                }
                let result = as_user(*uid, *gid, groups, || call(&place));
                let _ = writeln!(report, "{name} ({}, by {user}): {result:?}", kind.name);
                // The directory first: looking at it moves its access time.
                let dir_after = look(&dir, Some(parent));
                for (what, after) in [
                    ("file", look(&place.file, Some(file))),
                    ("new", look(&dir.join("new"), None)),
                    ("other", look(&dir.join("other"), None)),
                    ("directory", dir_after),
                    ("names", names(&dir).join(" ")),
                ] {
                    let _ = writeln!(report, "{name} ({}, by {user}), {what}: {after}", kind.name);
                }
                for path in [&place.file, &dir.join("new"), &dir.join("other")] {
                    if path.is_file() {
                        set_flags(path, |now| now - (IFlags::APPEND | IFlags::IMMUTABLE));
                    }
                }
                fs::remove_dir_all(&dir).unwrap();
            }
        }
    }
    report
}

/// Differences of the kernel's doing: how the line begins, and what is in it.
const BY_NATURE: &[(&str, &str)] = &[
    // Attributes of a file stay unknown to the kernel of the mount.
    ("statx attributes", ""),
    ("access for writing", "(immutable"),
    ("O_APPEND off", "(append-only"),
    ("rmdir a file", "(append-only"),
    ("rmdir a file", "(immutable"),
    ("rename into the directory below", "(append-only"),
    ("rename into the directory below", "(immutable"),
    ("setxattr default ACL", "(append-only"),
    ("setxattr default ACL", "(immutable"),
    // It has no request for them.
    ("fallocate collapse", ""),
    ("fallocate insert", ""),
    ("fallocate unshare", ""),
    ("clone", ""),
    // Its requests don't tell the two apart.
    ("pwritev2 RWF_NOAPPEND", ""),
    ("chown without an owner", ""),
    // tmpfs alone takes set-group-id then.
    ("removexattr ACL", "(set-gid, no x, by owner)"),
    // The host's direct I/O is the kernel's page cache's.
    ("write O_DIRECT|O_APPEND", ""),
];

/// The user that a set-user-id program, which all users may write, runs as after a stranger has written to it.
pub fn executed_after(dir: &Path, _: &str) -> String {
    let write: Call = |p| {
        let file = open(&p.file, OFlags::WRONLY)?;
        Ok(rustix::io::write(file, b"\x7f")? as i64)
    };
    let write_and_read: Call = |p| {
        let file = open(&p.file, OFlags::RDWR)?;
        Ok(rustix::io::write(file, b"\x7f")? as i64)
    };
    let write_direct: Call = |p| {
        let file = open(&p.file, OFlags::RDWR | OFlags::DIRECT)?;
        let mut bytes = Aligned([0; 8192]);
        rustix::io::pread(&file, &mut bytes.0[..], 0)?;
        Ok(rustix::io::pwrite(&file, &bytes.0[..], 0)? as i64)
    };
    let allocate_some: Call = |p| allocate(p, FallocateFlags::KEEP_SIZE, 0, 10);
    let cut_nothing: Call = |p| cut(p, fs::metadata(&p.file).expect("it is there").len());
    let mut report = String::new();
    for (name, call) in [
        ("nothing", (|_| Ok(0)) as Call),
        ("write", write),
        ("write, open for both", write_and_read),
        ("direct write", write_direct),
        ("fallocate", allocate_some),
        ("truncate", cut_nothing),
    ] {
        let place = Place {
            dir: dir.into(),
            file: dir.join("id"),
        };
        let made = std::process::Command::new("install")
            .args(["-m", "4777", "/usr/bin/id"])
            .arg(&place.file)
            .status();
        assert!(made.expect("install").success());
        // The kernel of the mount has cached the mode.
        fs::metadata(&place.file).unwrap();
        let ran = as_user(STRANGER, STRANGER, &[], || {
            call(&place).expect(name);
            std::process::Command::new(&place.file)
                .arg("-u")
                .output()
                .expect("id")
        });
        let _ = writeln!(
            report,
            "{name}: {}",
            String::from_utf8_lossy(&ran.stdout).trim()
        );
    }
    report
}

/// A set-user-id program loses its privileges when it is changed.
#[test]
fn set_user_id_programs_that_are_written_to() {
    if !has(&[Need::Mount(Transport::Dev), Need::Uvfs]) {
        return;
    }
    let scratch = Scratch::new();
    let (source, at) = (scratch.tmpfs("source", "64m"), scratch.dir("mount"));
    let report = scratch.path("report");
    run(&mut own_process::call(
        "executed_after",
        &source,
        "",
        &report,
    ))
    .ok();
    let host = fs::read_to_string(&report).unwrap();
    assert!(
        host.contains("nothing: 0\n") && host.contains("write: 2000\n"),
        "{host}"
    );
    for option in [
        "",
        "nopassthrough",
        "attr_timeout=60",
        "cache=always",
        "writeback",
        "passthrough=all",
    ] {
        let serve = Serve::over(Transport::Dev).option("suid").option(option);
        let mount = Mount::new(&serve, &source, &at);
        mount
            .run(&mut own_process::call("executed_after", &at, "", &report))
            .ok();
        mount.unmount();
        assert_eq!(fs::read_to_string(&report).unwrap(), host, "{option}");
    }
}

/// With the first option, and in the long variant with the others.
fn same_as_the_host(transport: Transport, kind: &str, options: &[&str]) {
    if !has(&[Need::Mount(transport), Need::Uvfs])
        || (kind != "tmpfs"
            && !has(&[Need::Program(if kind == "xfs" {
                "mkfs.xfs"
            } else {
                "mkfs.ext4"
            })]))
    {
        return;
    }
    let scratch = Scratch::new();
    let at = scratch.dir("mount");
    let report = scratch.path("report");
    let source = match kind {
        "tmpfs" => scratch.tmpfs("source", "256m"),
        _ => scratch.image("source", kind),
    };
    run_within(
        LATER,
        &mut own_process::call("outcomes", &source, "", &report),
    )
    .ok();
    let host = fs::read_to_string(&report).unwrap();
    assert!(host.lines().count() > 10_000, "{}", host.lines().count());
    let mut differences = Vec::new();
    let count = if full() { options.len() } else { 1 };
    for option in &options[..count] {
        let mount = Mount::new(&Serve::over(transport).option(option), &source, &at);
        mount
            .run_within(LATER, &mut own_process::call("outcomes", &at, "", &report))
            .ok();
        mount.unmount();
        let through = fs::read_to_string(&report).unwrap();
        assert_eq!(host.lines().count(), through.lines().count());
        for (host, got) in host.lines().zip(through.lines()) {
            let known =
                |(start, part): &(&str, &str)| host.starts_with(start) && host.contains(part);
            if host != got && !BY_NATURE.iter().any(known) {
                differences.push(format!(
                    "{kind}, -o {option:?}\n  host:  {host}\n  mount: {got}"
                ));
            }
        }
    }
    assert!(
        differences.is_empty(),
        "{} differences over {transport}:\n{}",
        differences.len(),
        differences.join("\n")
    );
}

/// Every call gives the result, and leaves the state, that it does on the tmpfs below.
#[test]
fn same_as_on_tmpfs() {
    same_as_the_host(Transport::Uring, "tmpfs", &["", "passthrough=all"]);
}

/// The same on ext4.
#[test]
fn same_as_on_ext4() {
    same_as_the_host(Transport::Uring, "ext4", &["", "nopassthrough"]);
}

/// The same on XFS.
#[test]
fn same_as_on_xfs() {
    same_as_the_host(Transport::Dev, "xfs", &["", "passthrough=direct"]);
}
