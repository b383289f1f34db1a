//! A control group with little memory.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::Duration;

use uvfs_cli::{Context, Result};

/// Where control groups are, of the first and of the second version.
const FIRST: &str = "/sys/fs/cgroup/memory";
const SECOND: &str = "/sys/fs/cgroup";

/// A control group that this process is in, with all that it starts, until this is dropped.
pub struct Group {
    path: PathBuf,
    /// The group from before.
    before: PathBuf,
}

impl Group {
    /// Moves this process into a new group that has so many bytes of memory.
    pub fn enter(bytes: u64) -> Result<Self> {
        let what = || "a control group with a limit of memory, which root can make".into();
        Self::new(bytes).context(what)
    }

    fn new(bytes: u64) -> io::Result<Self> {
        let (root, limit) = match Path::new(FIRST).is_dir() {
            true => (FIRST, "memory.limit_in_bytes"),
            false => (SECOND, "memory.max"),
        };
        let table = fs::read_to_string("/proc/self/cgroup")?;
        let before = Path::new(root).join(own(&table).trim_start_matches('/'));
        let path = Path::new(root).join(format!("uvfs-bench.{}", std::process::id()));
        fs::create_dir(&path)?;
        let group = Self { path, before };
        fs::write(group.path.join(limit), bytes.to_string())?;
        join(&group.path)?;
        Ok(group)
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        // The root is where a process always may go.
        let root = self.path.parent().unwrap_or(Path::new(SECOND));
        let _ = join(&self.before).or_else(|_| join(root));
        // The servers' processes may take a moment to go.
        for _ in 0..50 {
            if fs::remove_dir(&self.path).is_ok() {
                return;
            }
            sleep(Duration::from_millis(20));
        }
        uvfs_cli::warn(format!("{}: left behind", self.path.display()));
    }
}

fn join(group: &Path) -> io::Result<()> {
    fs::write(group.join("cgroup.procs"), std::process::id().to_string())
}

/// The path of a process's own group, in what /proc says of it: that of the memory controller, or that of all.
fn own(table: &str) -> &str {
    let line = |line: &'static str| {
        let of = move |row: &&str| row.split(':').nth(1) == Some(line);
        table.lines().find(of)
    };
    let row = line("memory").or_else(|| line(""));
    row.and_then(|row| row.splitn(3, ':').nth(2)).unwrap_or("/")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A process finds the group that it goes back to, in both versions of control groups.
    #[test]
    fn the_own_group_is_found() {
        assert_eq!(own("0::/user.slice/a:b\n"), "/user.slice/a:b");
        assert_eq!(own("5:cpu:/x\n3:memory:/y/z\n0::/user.slice\n"), "/y/z");
        assert_eq!(own(""), "/");
    }
}
