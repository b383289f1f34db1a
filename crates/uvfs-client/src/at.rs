//! Paths from a directory that is held, each in one request: what the `*at` system calls do.

use std::ffi::OsString;
use std::io;
use std::sync::Arc;

use uvfs_proto::abi::{Dirent, EntryOut};
use uvfs_proto::ext::{self, AT_FOLLOW, AT_KEEP, AtIn, AtOpenOut, LEASE_READ};
use zerocopy::FromBytes;

use crate::backend::{Attr, Entry, NodeId, ROOT};
use crate::cache::errno;
use crate::client::{Client, Shared};
use crate::remote::attr_of;
use crate::short::ShortFile;

/// The longest path, as in the kernel (PATH_MAX, with its 0 byte).
const LONGEST: usize = 4096;

/// A directory that paths start from. It stays the same one when it is renamed or removed.
#[derive(Debug)]
pub struct Place {
    client: Arc<Shared>,
    node: NodeId,
}

impl Drop for Place {
    fn drop(&mut self) {
        if self.node != ROOT {
            self.client.cache.backend.forget(self.node, 1);
        }
    }
}

/// The names of a path, in order.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Names {
    /// Each with its 0 byte.
    bytes: Vec<u8>,
    count: u32,
}

impl Names {
    /// Takes a relative path apart; nothing for what a server can't be asked in one step: a path
    /// with `..`, one that ends with a slash, one that is too long. No names are the place itself.
    pub fn parse(path: &[u8]) -> Option<Self> {
        if path.len() >= LONGEST || path.is_empty() || path.ends_with(b"/") {
            return None;
        }
        let mut names = Self {
            bytes: Vec::with_capacity(path.len() + 1),
            count: 0,
        };
        for name in path.split(|&byte| byte == b'/') {
            match name {
                b"" | b"." => {}
                b".." => return None,
                name => {
                    names.bytes.extend_from_slice(name);
                    names.bytes.push(0);
                    names.count += 1;
                }
            }
        }
        // The kernel refuses to make, remove or rename this: it knows how.
        let dot = names.count > 0 && path.ends_with(b"/.");
        (!dot && !names.bytes.is_empty() || names.count == 0).then_some(names)
    }

    /// Whether the place itself is meant.
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }
}

/// An open directory.
#[derive(Debug)]
pub struct Directory {
    client: Arc<Shared>,
    node: NodeId,
    handle: u64,
    /// Its inode's number.
    pub ino: u64,
}

impl Drop for Directory {
    fn drop(&mut self) {
        let backend = &self.client.cache.backend;
        backend.close_directory(self.node, self.handle);
    }
}

/// An entry of a listing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Listed {
    /// Its name.
    pub name: OsString,
    /// The inode's number.
    pub ino: u64,
    /// DT_* of readdir(3).
    pub kind: u8,
    /// Where the entry after it is listed from.
    pub next: u64,
}

impl Directory {
    /// Entries from `offset` on, `.` and `..` too; none at the end. The first offset is 0.
    ///
    /// # Errors
    /// What the server answers.
    pub fn list(&self, offset: u64) -> io::Result<Vec<Listed>> {
        use std::os::unix::ffi::OsStringExt;
        let backend = &self.client.cache.backend;
        let bytes = backend.list_from(self.node, self.handle, offset)?;
        let mut list = Vec::new();
        let mut rest = &bytes[..];
        while let Ok((entry, tail)) = Dirent::read_from_prefix(rest) {
            let len = entry.namelen as usize;
            let Some(name) = tail.get(..len) else { break };
            list.push(Listed {
                name: OsString::from_vec(name.to_vec()),
                ino: entry.ino,
                kind: entry.r#type as u8,
                next: entry.off,
            });
            rest = tail.get(len.next_multiple_of(8)..).unwrap_or_default();
        }
        Ok(list)
    }
}

fn entry(bytes: &[u8]) -> io::Result<Entry> {
    let (out, _) = EntryOut::read_from_prefix(bytes).map_err(|_| errno(libc::EIO))?;
    Ok(Entry {
        node: out.nodeid,
        attr: attr_of(&out.attr),
    })
}

/// Of a server that understands no steps on paths, and where the kernel has to be asked, all of
/// these fail with ELOOP, ESTALE, ENOSYS, EPERM or EOPNOTSUPP. None follows symbolic links.
impl Client {
    /// The file system's root.
    pub fn root(&self) -> Place {
        Place {
            client: self.0.clone(),
            node: ROOT,
        }
    }

    fn at(&self, from: &Place, what: AtIn, names: &Names) -> io::Result<Vec<u8>> {
        let arg = AtIn {
            names: names.count,
            ..what
        };
        self.backend().step(from.node, &arg, &names.bytes)
    }

    fn at_two(&self, from: &Place, what: AtIn, names: &Names, more: &Names) -> io::Result<Vec<u8>> {
        let arg = AtIn {
            names: names.count,
            more: more.count,
            ..what
        };
        let both = [&names.bytes[..], &more.bytes].concat();
        self.backend().step(from.node, &arg, &both)
    }

    /// Another place, and its attributes: a directory, or what else the path leads to.
    ///
    /// # Errors
    /// What the server answers.
    pub fn place_at(&self, from: &Place, names: &Names) -> io::Result<(Place, Attr)> {
        let what = AtIn {
            what: ext::AT_STAT,
            flags: AT_KEEP | AT_FOLLOW,
            ..AtIn::default()
        };
        let found = entry(&self.at(from, what, names)?)?;
        let place = Place {
            client: self.0.clone(),
            node: found.node,
        };
        Ok((place, found.attr))
    }

    /// Attributes; with `follow` fails with ELOOP where they would be a symbolic link's.
    ///
    /// # Errors
    /// What the server answers.
    pub fn stat_at(&self, from: &Place, names: &Names, follow: bool) -> io::Result<Attr> {
        let what = AtIn {
            what: ext::AT_STAT,
            flags: if follow { AT_FOLLOW } else { 0 },
            ..AtIn::default()
        };
        let found = entry(&self.at(from, what, names)?)?;
        Ok(self.overlay(&found))
    }

    /// The target of a symbolic link.
    ///
    /// # Errors
    /// What the server answers.
    pub fn readlink_at(&self, from: &Place, names: &Names) -> io::Result<Vec<u8>> {
        let what = AtIn {
            what: ext::AT_READLINK,
            ..AtIn::default()
        };
        self.at(from, what, names)
    }

    /// Makes a directory.
    ///
    /// # Errors
    /// What the server answers.
    pub fn mkdir_at(&self, from: &Place, names: &Names, mode: u32, umask: u32) -> io::Result<()> {
        let what = AtIn {
            what: ext::AT_MKDIR,
            mode,
            umask,
            ..AtIn::default()
        };
        self.at(from, what, names).map(drop)
    }

    /// Removes a name; of a directory, if `directory`.
    ///
    /// # Errors
    /// What the server answers.
    pub fn remove_at(&self, from: &Place, names: &Names, directory: bool) -> io::Result<()> {
        let what = AtIn {
            what: match directory {
                true => ext::AT_RMDIR,
                false => ext::AT_UNLINK,
            },
            ..AtIn::default()
        };
        self.at(from, what, names).map(drop)
    }

    /// Renames, with the flags of renameat2(2).
    ///
    /// # Errors
    /// What the server answers.
    pub fn rename_at(
        &self,
        from: &Place,
        names: &Names,
        to: &Place,
        new: &Names,
        flags: u32,
    ) -> io::Result<()> {
        let what = AtIn {
            what: ext::AT_RENAME,
            flags,
            to: to.node,
            ..AtIn::default()
        };
        self.at_two(from, what, names, new).map(drop)
    }

    /// Makes another name of a file.
    ///
    /// # Errors
    /// What the server answers.
    pub fn link_at(&self, from: &Place, names: &Names, to: &Place, new: &Names) -> io::Result<()> {
        let what = AtIn {
            what: ext::AT_LINK,
            to: to.node,
            ..AtIn::default()
        };
        self.at_two(from, what, names, new).map(drop)
    }

    /// Makes a symbolic link.
    ///
    /// # Errors
    /// What the server answers.
    pub fn symlink_at(&self, target: &[u8], from: &Place, names: &Names) -> io::Result<()> {
        let what = AtIn {
            what: ext::AT_SYMLINK,
            ..AtIn::default()
        };
        let target = Names {
            bytes: [target, b"\0"].concat(),
            count: 1,
        };
        self.at_two(from, what, names, &target).map(drop)
    }

    /// Opens a directory.
    ///
    /// # Errors
    /// What the server answers.
    pub fn open_directory_at(&self, from: &Place, names: &Names) -> io::Result<Directory> {
        let what = AtIn {
            what: ext::AT_OPENDIR,
            ..AtIn::default()
        };
        let reply = self.at(from, what, names)?;
        let (out, _) = AtOpenOut::read_from_prefix(&reply).map_err(|_| errno(libc::EIO))?;
        Ok(Directory {
            client: self.0.clone(),
            node: out.entry.nodeid,
            handle: out.open.fh,
            ino: out.entry.attr.ino,
        })
    }

    /// Opens a regular file, with the flags of open(2).
    ///
    /// # Errors
    /// What the server answers.
    pub fn open_at(
        &self,
        from: &Place,
        names: &Names,
        flags: i32,
        mode: u32,
        umask: u32,
    ) -> io::Result<ShortFile> {
        let what = AtIn {
            what: ext::AT_OPEN,
            flags: (flags & !libc::O_TRUNC) as u32,
            mode,
            umask,
            ..AtIn::default()
        };
        let strays = self.0.cache.shorts.strays();
        let reply = self.at(from, what, names)?;
        let (out, contents) = AtOpenOut::read_from_prefix(&reply).map_err(|_| errno(libc::EIO))?;
        let contents = (out.granted == LEASE_READ && out.entry.attr.size == contents.len() as u64)
            .then(|| contents.to_vec());
        let opened = Entry {
            node: out.entry.nodeid,
            attr: attr_of(&out.entry.attr),
        };
        let file = ShortFile::new(
            self.0.clone(),
            opened,
            out.open.fh,
            flags,
            out.seq,
            contents.map(|contents| (contents, strays)),
        );
        if flags & libc::O_TRUNC != 0 {
            file.truncate()?;
        }
        Ok(file)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn simple_paths_are_names() {
        let of = |path: &str| Names::parse(path.as_bytes());
        let names = |bytes: &[u8], count| {
            Some(Names {
                bytes: bytes.to_vec(),
                count,
            })
        };
        assert_eq!(of("a"), names(b"a\0", 1));
        assert_eq!(of("./a//b/./c"), names(b"a\0b\0c\0", 3));
        assert_eq!(of("."), names(b"", 0));
        for other in ["", "..", "a/..", "../a", "a/", "a/.", "a/../b"] {
            assert_eq!(of(other), None, "{other}");
        }
        assert_eq!(of(&"x".repeat(4096)), None);
        assert!(of(&"x".repeat(4095)).is_some());
    }
}
