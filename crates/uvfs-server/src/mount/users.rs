//! The processes that keep a file system busy.

use std::fmt;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, StatxFlags, statx};

/// A process that uses a file system.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct User {
    /// Its number.
    pub pid: u32,
    /// The name of its program.
    pub program: String,
}

impl fmt::Display for User {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} (pid {})", self.program, self.pid)
    }
}

/// The processes that have a file of a file system open or mapped, or their working or root directory in it, as far
/// as this process may look into others. The device number is that of /proc/self/mountinfo, so that users of a mount
/// that was detached are found as well. The server of the file system is not asked: it may be dead, or the caller.
pub fn users(device: &str) -> Vec<User> {
    let Some(device) = numbers(device, 10) else {
        return Vec::new();
    };
    let uses = |pid: &u32| {
        let base = PathBuf::from(format!("/proc/{pid}"));
        let links = ["cwd", "root"].map(|name| base.join(name)).into_iter();
        links
            .chain(entries(&base.join("fd")))
            .any(|link| is_on(&link, device))
            || maps(&base, device)
    };
    let name = |pid| {
        let program = std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
        let program = program.trim().to_owned();
        User { pid, program }
    };
    processes().filter(uses).map(name).collect()
}

/// The numbers of all processes.
pub fn processes() -> impl Iterator<Item = u32> {
    entries(Path::new("/proc")).filter_map(|entry| entry.file_name()?.to_str()?.parse().ok())
}

/// The paths in a directory; none if it can't be read.
pub fn entries(dir: &Path) -> impl Iterator<Item = PathBuf> {
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    entries.map(|entry| entry.path())
}

/// Whether a link of /proc leads to this file system; no file system is asked for attributes.
fn is_on(link: &Path, device: (u32, u32)) -> bool {
    let flags = AtFlags::STATX_DONT_SYNC | AtFlags::NO_AUTOMOUNT;
    statx(CWD, link, flags, StatxFlags::empty())
        .is_ok_and(|found| (found.stx_dev_major, found.stx_dev_minor) == device)
}

/// Whether a process has mapped a file of this file system.
fn maps(base: &Path, device: (u32, u32)) -> bool {
    let maps = std::fs::read(base.join("maps")).unwrap_or_default();
    maps.split(|&byte| byte == b'\n').any(|line| {
        let word = line.split(|&byte| byte == b' ').nth(3);
        let word = word.and_then(|word| std::str::from_utf8(word).ok());
        word.and_then(|word| numbers(word, 16)) == Some(device)
    })
}

/// `MAJOR:MINOR`.
fn numbers(text: &str, radix: u32) -> Option<(u32, u32)> {
    let (major, minor) = text.split_once(':')?;
    let number = |text| u32::from_str_radix(text, radix).ok();
    Some((number(major)?, number(minor)?))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use super::*;

    /// A process uses the mounts of its directory and of its program.
    #[test]
    fn this_process_uses_its_root_and_its_program() {
        let device = |path: &Path| {
            let device = std::fs::metadata(path).unwrap().dev();
            format!("{}:{}", libc::major(device), libc::minor(device))
        };
        let own = std::process::id();
        let is_own = |user: &User| user.pid == own;
        let directory = std::env::current_dir().unwrap();
        assert!(users(&device(&directory)).iter().any(is_own));
        // Mapped, and not open.
        let program = std::env::current_exe().unwrap();
        let number = numbers(&device(&program), 10).unwrap();
        assert!(maps(Path::new("/proc/self"), number));
        assert!(users("4095:1048575").is_empty() && users("what").is_empty());
    }
}
