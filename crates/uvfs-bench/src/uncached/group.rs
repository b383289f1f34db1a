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
        let path = Path::new(root).join(format!("uvfs-bench.{}", std::process::id()));
        fs::create_dir(&path)?;
        let group = Self { path };
        fs::write(group.path.join(limit), bytes.to_string())?;
        join(&group.path)?;
        Ok(group)
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        // This process ends soon, so it need not go back to the group from before.
        if let Some(root) = self.path.parent() {
            let _ = join(root);
        }
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
