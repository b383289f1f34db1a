//! Scenes of system calls. Each writes down the results of its steps, which must be the same on
//! every file system with Linux's semantics: errors, sizes, modes, contents, and whether a time
//! has changed, but never a time, an inode number or a directory position itself.

mod attributes;
mod contents;
mod direct_io;
mod directories;
mod locking;
mod naming;
mod opening;
mod permissions;

use std::ffi::OsString;
use std::fmt::Debug;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::panic::{self, AssertUnwindSafe};
use std::path::{Path, PathBuf};
use std::thread;

use rustix::fs::{
    self, AtFlags, CWD, FallocateFlags, FileType, FlockOperation, Gid, IFlags, Mode, OFlags,
    RenameFlags, SeekFrom, StatxFlags, Timespec, Timestamps, UTIME_NOW, UTIME_OMIT, Uid,
    XattrFlags,
};
use rustix::io::{self, Errno};
use rustix::mm::{MapFlags, ProtFlags};
use rustix::thread::{set_thread_gid, set_thread_groups, set_thread_res_uid};

use crate::harness::next_file_time;
pub use permissions::acl;

const NOBODY: u32 = 65534;

/// One scene's directory and the results so far.
struct Scene<'a> {
    name: &'static str,
    dir: PathBuf,
    report: &'a mut String,
}

impl Scene<'_> {
    fn at(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    /// Writes down a result.
    fn note<T: Debug>(&mut self, step: &str, result: io::Result<T>) {
        let result = match result {
            Ok(value) => format!("{value:?}"),
            Err(e) => e.to_string(),
        };
        self.value(step, result);
    }

    /// Writes down that a call succeeded or how it failed.
    fn done<T>(&mut self, step: &str, result: io::Result<T>) {
        self.note(step, result.map(|_| ()));
    }

    fn value(&mut self, step: &str, value: impl ToString) {
        let value = value.to_string().replace('\n', "\\n");
        self.report
            .push_str(&format!("{} {step}: {value}\n", self.name));
    }

    fn open(&self, name: &str, flags: OFlags) -> io::Result<OwnedFd> {
        fs::open(self.at(name), flags | OFlags::CLOEXEC, Mode::from(0o644))
    }

    /// A new file with this content, open for reading and writing.
    fn file(&self, name: &str, content: impl AsRef<[u8]>) -> OwnedFd {
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::TRUNC;
        let file = self
            .open(name, flags)
            .unwrap_or_else(|e| panic!("{}: {e}", self.at(name).display()));
        write_all(&file, content.as_ref());
        file
    }

    fn chmod(&self, name: &str, mode: u32) -> io::Result<()> {
        fs::chmod(self.at(name), Mode::from_raw_mode(mode))
    }

    /// Mode and owner.
    fn who(&self, name: &str) -> io::Result<String> {
        let stat = fs::lstat(self.at(name))?;
        Ok(format!(
            "{:o} {}:{}",
            stat.st_mode, stat.st_uid, stat.st_gid
        ))
    }

    fn size(&self, name: &str) -> io::Result<i64> {
        fs::lstat(self.at(name)).map(|stat| stat.st_size)
    }

    fn links(&self, name: &str) -> io::Result<u64> {
        #[allow(clippy::unnecessary_cast, reason = "the type differs by architecture")]
        fs::lstat(self.at(name)).map(|stat| stat.st_nlink as u64)
    }

    fn content(&self, name: &str) -> io::Result<String> {
        read_all(&self.open(name, OFlags::RDONLY)?)
    }

    /// The sorted names in a directory.
    fn names(&self, name: &str) -> io::Result<Vec<String>> {
        let dir = self.open(name, OFlags::RDONLY | OFlags::DIRECTORY)?;
        let mut names = list(&dir)?;
        names.sort();
        Ok(names)
    }

    /// Access, modification and change times in nanoseconds.
    fn times(&self, name: &str) -> [i128; 3] {
        let s = fs::lstat(self.at(name)).expect("stat");
        #[allow(clippy::unnecessary_cast, reason = "the types differ by architecture")]
        [
            (s.st_atime, s.st_atime_nsec),
            (s.st_mtime, s.st_mtime_nsec),
            (s.st_ctime, s.st_ctime_nsec),
        ]
        .map(|(s, ns)| s as i128 * 1_000_000_000 + ns as i128)
    }

    /// Notes which of the modification and change times a call moves.
    fn moves(&mut self, step: &str, name: &str, call: impl FnOnce(&Self)) {
        let before = self.times(name);
        next_file_time();
        call(self);
        let after = self.times(name);
        let moved = format!(
            "mtime {} ctime {}",
            after[1] > before[1],
            after[2] > before[2]
        );
        self.value(&format!("{step} moves"), moved);
    }
}

fn write_all(file: &OwnedFd, mut bytes: &[u8]) {
    while !bytes.is_empty() {
        let n = io::write(file, bytes).expect("write");
        bytes = &bytes[n..];
    }
}

/// From the start. Long content is cut down to its length and a sum.
fn read_all(file: &OwnedFd) -> io::Result<String> {
    let (mut bytes, mut chunk) = (Vec::new(), vec![0; 65536]);
    loop {
        let n = io::pread(file, &mut chunk[..], bytes.len() as u64)?;
        if n == 0 {
            break;
        }
        bytes.extend_from_slice(&chunk[..n]);
    }
    if bytes.len() > 100 {
        let sum = bytes.iter().fold(0u64, |sum, b| {
            sum.wrapping_mul(31).wrapping_add(u64::from(*b))
        });
        return Ok(format!("{} bytes, sum {sum:x}", bytes.len()));
    }
    Ok(bytes.escape_ascii().to_string())
}

/// Names from the descriptor's position on, without `.` and `..`.
fn list(dir: &OwnedFd) -> io::Result<Vec<String>> {
    let mut buffer = [MaybeUninit::uninit(); 2048];
    let mut entries = fs::RawDir::new(dir, &mut buffer);
    let mut names = Vec::new();
    while let Some(entry) = entries.next() {
        let name = entry?.file_name().to_string_lossy().into_owned();
        if name != "." && name != ".." {
            names.push(name);
        }
    }
    Ok(names)
}

/// Calls a function as another user, in a thread whose credentials alone are changed.
pub fn as_user<T: Send>(uid: u32, gid: u32, groups: &[u32], call: impl FnOnce() -> T + Send) -> T {
    let groups: Vec<Gid> = groups.iter().map(|g| Gid::from_raw(*g)).collect();
    let user = move || {
        set_thread_groups(&groups).expect("setgroups");
        set_thread_gid(Gid::from_raw(gid)).expect("setgid");
        let uid = Uid::from_raw(uid);
        set_thread_res_uid(uid, uid, uid).expect("setresuid");
        call()
    };
    thread::scope(|scope| scope.spawn(user).join().expect("the other user's thread"))
}

fn as_nobody<T: Send>(call: impl FnOnce() -> T + Send) -> T {
    as_user(NOBODY, NOBODY, &[], call)
}

fn now() -> Timestamps {
    let now = Timespec {
        tv_sec: 0,
        tv_nsec: UTIME_NOW,
    };
    Timestamps {
        last_access: now,
        last_modification: now,
    }
}

type Play = fn(&mut Scene);

const SCENES: &[(&str, Play)] = &[
    ("open", opening::open_flags),
    ("append", opening::append),
    ("tmpfile", opening::tmpfile),
    ("rename", naming::rename),
    ("mknod", opening::mknod),
    ("symlink", opening::symlink),
    ("link", naming::link),
    ("names", naming::names),
    ("setuid", permissions::setuid_clearing),
    ("permission", permissions::permission),
    ("sticky", permissions::sticky),
    ("umask", permissions::umask_and_acls),
    ("group", permissions::groups),
    ("xattr", attributes::xattrs),
    ("fallocate", contents::fallocate),
    ("append-only", attributes::append_only),
    ("acl", attributes::acl_mode),
    ("holes", contents::holes),
    ("seek", contents::seek),
    ("copy", contents::copy_range),
    ("statx", attributes::statx),
    ("locks", locking::locks),
    ("sync", contents::sync),
    ("statfs", opening::statfs),
    ("readdir", directories::readdir),
    ("mmap", contents::mmap),
    ("direct", direct_io::direct),
    ("direct alone", direct_io::direct_alone),
    ("direct and others", direct_io::direct_and_others),
    ("direct owners", direct_io::direct_owners),
    ("unlinked", directories::unlinked),
    ("removed", directories::removed_directory),
    ("at removed", directories::at_removed),
    ("executed", opening::executed),
    ("utimens", attributes::utimens),
    ("truncate", contents::truncate),
    ("reopen", opening::reopen),
    ("times", attributes::times),
    ("rw", contents::read_and_write),
    ("access", opening::access),
];

/// Scenes for a mount that only its owner may use, where the kernel leaves permissions to the server.
const ALONE: &[(&str, Play)] = &[
    ("access alone", opening::access_alone),
    ("acl", attributes::acl_mode),
    ("seek", contents::seek),
    ("holes", contents::holes),
    ("append-only", attributes::append_only_alone),
    ("times", attributes::times),
];

/// Plays all scenes below the directory, or those that are for one user alone.
pub fn play(dir: &Path, which: &str) -> String {
    rustix::process::umask(Mode::from(0o022));
    let mut report = String::new();
    let scenes = match which {
        "alone" => ALONE,
        _ => SCENES,
    };
    for (name, scene) in scenes {
        let dir = dir.join(name);
        fs::mkdir(&dir, Mode::from(0o755)).unwrap_or_else(|e| panic!("{}: {e}", dir.display()));
        let mut scene_report = String::new();
        let played = panic::catch_unwind(AssertUnwindSafe(|| {
            scene(&mut Scene {
                name,
                dir,
                report: &mut scene_report,
            });
        }));
        report += &scene_report;
        // A step that nothing can do without failed; the other scenes are played all the same.
        let end = if played.is_ok() {
            "to its end"
        } else {
            "stopped by a panic"
        };
        report += &format!("{name} scene played: {end}\n");
    }
    report
}

/// Calls a function as the user nobody in a new directory of theirs.
fn as_nobody_in<T: Send>(s: &Scene, call: impl FnOnce(&Scene) -> T + Send) -> T {
    let dir = s.at("nobody's");
    fs::mkdir(&dir, Mode::from(0o755)).unwrap();
    fs::chown(
        &dir,
        Some(Uid::from_raw(NOBODY)),
        Some(Gid::from_raw(NOBODY)),
    )
    .unwrap();
    as_nobody(|| {
        call(&Scene {
            name: s.name,
            dir,
            report: &mut String::new(),
        })
    })
}
