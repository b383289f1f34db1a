//! Checksums of what programs print and leave, to compare the sides with each other.

use std::fs::{self, File};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::{self, BufRead, BufReader};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

/// A sum over the hashes of items, so that the order in which they come does not matter.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Digest(u64);

impl Digest {
    fn add(&mut self, item: impl Hash) {
        let mut hasher = DefaultHasher::new();
        item.hash(&mut hasher);
        self.0 = self.0.wrapping_add(hasher.finish());
    }

    /// Of a file's lines: programs print them in the order in which a directory lists its files.
    pub fn lines(file: &Path) -> io::Result<Self> {
        let mut digest = Self::default();
        let mut reader = BufReader::new(File::open(file)?);
        let mut line = Vec::new();
        while reader.read_until(b'\n', &mut line)? != 0 {
            digest.add(&line);
            line.clear();
        }
        Ok(digest)
    }

    /// Of all that is below `root`: names, types, permissions, links' targets and contents.
    /// Leaves out what has the name `except`. Nothing there is a digest, too.
    pub fn tree(root: &Path, except: &str) -> io::Result<Self> {
        let mut digest = Self::default();
        if fs::symlink_metadata(root).is_ok() {
            digest.add_below(root, root, except)?;
        }
        Ok(digest)
    }

    fn add_below(&mut self, root: &Path, path: &Path, except: &str) -> io::Result<()> {
        let metadata = fs::symlink_metadata(path)?;
        let name = path.strip_prefix(root).unwrap_or(path).as_os_str();
        let contents = if metadata.is_file() {
            fs::read(path)?
        } else if metadata.is_symlink() {
            fs::read_link(path)?.as_os_str().as_bytes().to_vec()
        } else {
            Vec::new()
        };
        self.add((name, metadata.permissions().mode(), contents));
        if metadata.is_dir() {
            for entry in fs::read_dir(path)? {
                let entry = entry?;
                if entry.file_name() != except {
                    self.add_below(root, &entry.path(), except)?;
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The order of a program's lines does not count; the lines do.
    #[test]
    fn lines_count_in_any_order() {
        let dir = tempfile::tempdir().unwrap();
        let digest = |text: &str| {
            let file = dir.path().join("file");
            fs::write(&file, text).unwrap();
            Digest::lines(&file).unwrap()
        };
        assert_eq!(digest("a\nb\n"), digest("b\na\n"));
        assert_ne!(digest("a\nb\n"), digest("a\nc\n"));
        assert_ne!(digest("a\n"), digest("a\na\n"));
        assert_ne!(digest(""), digest("\n"));
    }

    /// A wrong file, name or mode changes the digest of a tree.
    #[test]
    fn each_change_of_a_tree_shows_except_what_is_left_out() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().join("root");
        let digest = || Digest::tree(&root, "index").unwrap();
        let mut seen = vec![digest()];
        let mut check = || {
            let now = digest();
            assert!(!seen.contains(&now));
            seen.push(now);
        };
        fs::create_dir_all(root.join("sub")).unwrap();
        check();
        fs::write(root.join("sub/file"), "1").unwrap();
        check();
        fs::write(root.join("sub/file"), "2").unwrap();
        check();
        fs::set_permissions(root.join("sub/file"), PermissionsExt::from_mode(0o600)).unwrap();
        check();
        fs::rename(root.join("sub/file"), root.join("file")).unwrap();
        check();
        let before = digest();
        fs::write(root.join("sub/index"), "1").unwrap();
        assert_eq!(digest(), before);
    }
}
