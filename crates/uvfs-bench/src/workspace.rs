//! The private directory in which a benchmark works.

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};

use tempfile::TempDir;
use uvfs_cli::{Context, Error, Result};

use super::files::{BLOCK, file_name, write_blocks};

/// `f_type` of a tmpfs (linux/magic.h).
const TMPFS_MAGIC: i64 = 0x0102_1994;

/// Where benchmarks work when the command line does not say.
const DEFAULT_DIR: &str = "/dev/shm";

/// A directory for one run, open to its owner only, removed at the end.
pub struct Workspace {
    dir: Option<TempDir>,
    root: PathBuf,
    stored: Option<Stored>,
}

/// An object store that the servers serve, and the benchmark's own directory among its objects, removed at the end.
struct Stored {
    uri: String,
    objects: TempDir,
}

impl Workspace {
    /// Makes the directory in `parent`, or in /dev/shm, which then has to be a tmpfs.
    /// `bytes` is the room that the benchmark needs.
    pub fn new(parent: Option<&Path>, bytes: u64) -> Result<Self> {
        let given = parent.is_some();
        let parent = parent.unwrap_or(Path::new(DEFAULT_DIR));
        let what = || format!("{}", parent.display());
        let info = rustix::fs::statfs(parent).context(what)?;
        if !given && info.f_type as i64 != TMPFS_MAGIC {
            return Err(Error::new(format!(
                "{}: not a tmpfs (say where to work by --dir)",
                what()
            )));
        }
        let free = info.f_bavail.saturating_mul(info.f_bsize as u64);
        if free < bytes {
            return Err(Error::new(format!(
                "{}: {} MiB free, {} MiB needed (--quick needs less; --dir works elsewhere)",
                what(),
                free >> 20,
                bytes >> 20
            )));
        }
        let dir = tempfile::Builder::new()
            .prefix("uvfs-bench.")
            .tempdir_in(parent)
            .context(what)?;
        // The client gets its paths as JSON, and the servers should not depend on where they
        // are started.
        let root = dir.path().canonicalize().context(what)?;
        if root.to_str().is_none() {
            return Err(Error::new(format!("{}: the path is not UTF-8", what())));
        }
        let workspace = Self {
            dir: Some(dir),
            root,
            stored: None,
        };
        for dir in [
            workspace.source(),
            workspace.mountpoint(),
            workspace.store(),
        ] {
            fs::create_dir(&dir).context(|| format!("creating {}", dir.display()))?;
        }
        Ok(workspace)
    }

    /// Works in a directory of a store's objects, in which the store has those of this URI.
    pub fn over_store(mut self, uri: &str, objects: &Path) -> Result<Self> {
        let what = || format!("{}: making objects", objects.display());
        let made = tempfile::Builder::new()
            .prefix("uvfs-bench.")
            .tempdir_in(objects)
            .context(what)?;
        // The store may run as another user, and puts objects there.
        let open = std::os::unix::fs::PermissionsExt::from_mode(0o777);
        fs::set_permissions(made.path(), open).context(what)?;
        let objects = made;
        let uri = uri.to_owned();
        self.stored = Some(Stored { uri, objects });
        Ok(self)
    }

    /// The URI of an object store that the servers serve in place of the source, and the source's name there.
    pub fn stored(&self) -> Option<(&str, &OsStr)> {
        let stored = self.stored.as_ref()?;
        Some((&stored.uri, stored.objects.path().file_name()?))
    }

    /// The directory that native work uses and that the servers serve.
    pub fn source(&self) -> PathBuf {
        match &self.stored {
            Some(stored) => stored.objects.path().to_owned(),
            None => self.root.join("source"),
        }
    }

    /// Where a server of an object store has its cache.
    pub fn cache(&self) -> PathBuf {
        self.beside("cache")
    }

    /// Lets the next server of an object store begin with an empty cache.
    pub fn empty_cache(&self) -> Result<()> {
        let cache = self.cache();
        let _ = fs::remove_dir_all(&cache);
        fs::create_dir(&cache).context(|| cache.display().to_string())
    }

    /// The directory on which the servers are mounted, one after another.
    pub fn mountpoint(&self) -> PathBuf {
        self.root.join("mnt")
    }

    /// The directory on which a store is mounted that is served in place of the source.
    pub fn store(&self) -> PathBuf {
        self.root.join("store")
    }

    /// The socket of a server without a mount.
    pub fn socket(&self) -> PathBuf {
        self.root.join("socket")
    }

    /// A file or directory of the benchmark's own, outside of the source and the mount.
    pub fn beside(&self, name: &str) -> PathBuf {
        self.root.join(name)
    }

    /// Writes a file of `bytes` in the source, each 4 KiB block beginning with its number.
    pub fn fill(&self, name: &str, bytes: u64) -> Result<()> {
        let path = self.source().join(name);
        let written = write_blocks(&path, 0..bytes / BLOCK as u64);
        written.context(|| format!("writing {}", path.display()))
    }

    /// Makes an empty directory in the source, in place of one of that name, and in it `files`
    /// files of 4 KiB that begin with their number.
    pub fn populate(&self, name: &str, files: u64) -> Result<()> {
        self.clear(name)?;
        let dir = self.source().join(name);
        let what = || format!("filling {}", dir.display());
        fs::create_dir(&dir).context(what)?;
        for number in 0..files {
            write_blocks(&dir.join(file_name(number)), number..number + 1).context(what)?;
        }
        Ok(())
    }

    /// Removes a file or a directory from the source, if there is one of that name.
    pub fn clear(&self, name: &str) -> Result<()> {
        let path = self.source().join(name);
        let removed = match fs::symlink_metadata(&path) {
            Err(_) => Ok(()),
            Ok(m) if m.is_dir() => fs::remove_dir_all(&path),
            Ok(_) => fs::remove_file(&path),
        };
        removed.context(|| format!("removing {}", path.display()))
    }

    /// Whether something is still mounted below. Asks no file server.
    fn is_mounted(&self) -> bool {
        uvfs_sys::mountinfo::table().map_or(true, |table| {
            table.iter().any(|line| line.at.starts_with(&self.root))
        })
    }
}

impl Drop for Workspace {
    fn drop(&mut self) {
        let Some(dir) = self.dir.take() else { return };
        // Never walk into a mount that could not be removed.
        if self.is_mounted() {
            let path = dir.keep();
            uvfs_cli::warn(format!(
                "{}: left behind, its mnt is still mounted (umount -l it, then remove it)",
                path.display()
            ));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A workspace holds the data that it was filled with, and is removed at its end.
    #[test]
    fn is_filled_cleared_and_removed() {
        let parent = tempfile::tempdir().unwrap();
        let root;
        {
            let w = Workspace::new(Some(parent.path()), 1 << 20).unwrap();
            root = w.root.clone();
            w.fill("data", 3 * BLOCK as u64).unwrap();
            let data = fs::read(w.source().join("data")).unwrap();
            assert_eq!(data.len(), 3 * BLOCK);
            assert_eq!(data[2 * BLOCK..2 * BLOCK + 8], 2_u64.to_le_bytes());
            w.populate("small", 5).unwrap();
            w.populate("small", 3).unwrap();
            assert_eq!(fs::read_dir(w.source().join("small")).unwrap().count(), 3);
            w.clear("small").unwrap();
            w.clear("small").unwrap();
            assert!(!w.is_mounted());
        }
        assert!(!root.exists());
    }

    /// Too little space is an error at once, not ENOSPC in the middle.
    #[test]
    fn too_little_room_is_an_error() {
        let parent = tempfile::tempdir().unwrap();
        let e = Workspace::new(Some(parent.path()), u64::MAX).err().unwrap();
        assert!(e.to_string().contains("needed"), "{e}");
    }
}
