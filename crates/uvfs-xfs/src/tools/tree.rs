//! Paths of an image: those that a pattern matches, and all below one.

use crate::error::{Error, Result};
use crate::mkfs::source::Patterns;
use crate::read::inode::Inode;
use crate::read::volume::Volume;
use std::collections::HashSet;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use super::{Entries, SORT_LIMIT, twice};

/// As many paths a pattern gives at most.
const MOST_PATHS: usize = 1_000_000;

/// The paths that `path` means: itself if there is such a one, otherwise those that it matches as a shell's pattern with
/// `*`, `?` and `[...]`, in the order of their bytes. Names with a leading dot are matched by patterns with one only.
///
/// # Errors
/// [`Error::NotFound`] if there is none; those of reading directories.
pub fn expand(volume: &Volume, path: &[u8]) -> Result<Vec<Vec<u8>>> {
    let is_pattern = |name: &[u8]| name.iter().any(|b| b"*?[".contains(b));
    if !is_pattern(path) || volume.resolve(path, false).is_ok() {
        return Ok(vec![path.to_vec()]);
    }
    let mut found = vec![Vec::new()];
    for part in path.split(|b| *b == b'/').filter(|p| !p.is_empty()) {
        if !is_pattern(part) {
            found.iter_mut().for_each(|p: &mut Vec<u8>| {
                p.push(b'/');
                p.extend_from_slice(part);
            });
            continue;
        }
        let pattern = std::str::from_utf8(part).ok();
        let pattern = pattern.and_then(|p| Patterns::new(&[p]).ok());
        let pattern = pattern.ok_or(Error::NotFound("file, nor is it a pattern"))?;
        let mut next = Vec::new();
        for above in &found {
            let Ok(dir) = volume.resolve(above, true) else {
                continue;
            };
            if !dir.is_dir() {
                continue;
            }
            volume.readdir(&dir, 0, &mut |e| {
                let hidden = e.name.starts_with(b".") && !part.starts_with(b".");
                let own = matches!(e.name, b"." | b"..");
                if !hidden && !own && pattern.matches(e.name) {
                    next.push([above, e.name].join(&b'/'));
                }
                next.len() <= MOST_PATHS
            })?;
            if next.len() > MOST_PATHS {
                let what = format!("a pattern that matches more than {MOST_PATHS} names is");
                return Err(Error::Unsupported(what));
            }
        }
        next.sort_unstable();
        found = next;
    }
    found.retain(|path| volume.resolve(path, false).is_ok());
    match found.is_empty() {
        true => Err(Error::NotFound("file: nothing matches this pattern")),
        false => Ok(found),
    }
}

/// Visits the inode at `path`, and if it is a directory and `recursive` all that is below, each directory before what is
/// in it, by name. What cannot be read, and other errors of `visit`, are handed to `report`, and the walk goes on; gives how
/// often that was.
///
/// # Errors
/// Of the first inode. An [`Error::Output`] of `visit` ends the walk.
pub fn walk(
    volume: &Volume,
    path: &[u8],
    recursive: bool,
    visit: &mut dyn FnMut(&[u8], &Inode) -> Result<()>,
    report: &mut dyn FnMut(&Path, &Error),
) -> Result<u64> {
    let mut errors = 0;
    let mut failed = |path: &[u8], error: &Error| {
        errors += 1;
        report(Path::new(OsStr::from_bytes(path)), error);
    };
    let mut visit = |path: &[u8], inode: &Inode, failed: &mut dyn FnMut(&[u8], &Error)| {
        match visit(path, inode) {
            Err(error) if !matches!(error, Error::Output { .. }) => failed(path, &error),
            other => other?,
        }
        Ok(())
    };
    let start = volume.resolve(path, false)?;
    visit(path, &start, &mut failed)?;
    let mut seen = HashSet::from([start.ino]);
    let mut todo = Vec::new();
    if start.is_dir() {
        todo.push(Level::new(path.to_vec(), start));
    }
    while let Some(level) = todo.last_mut() {
        let entries = &mut level.entries;
        let Some((name, ino)) = entries.read.pop_front() else {
            if entries.complete {
                todo.pop();
                continue;
            }
            if let Err(error) = entries.refill(volume, &level.inode, SORT_LIMIT) {
                failed(&level.path, &error);
            }
            entries.read.make_contiguous().sort_unstable();
            entries.readahead(volume);
            continue;
        };
        let slash: &[u8] = if level.path.ends_with(b"/") {
            b""
        } else {
            b"/"
        };
        let path = [&level.path, slash, &name].concat();
        let inode = match volume.inode(ino) {
            Ok(inode) => inode,
            Err(error) => {
                failed(&path, &error);
                continue;
            }
        };
        if inode.is_dir() && !seen.insert(ino) {
            failed(&path, &twice(&level.inode, ino));
            continue;
        }
        visit(&path, &inode, &mut failed)?;
        if inode.is_dir() && recursive {
            todo.push(Level::new(path, inode));
        }
    }
    Ok(errors)
}

/// A directory of a walk.
struct Level {
    path: Vec<u8>,
    inode: Inode,
    entries: Entries,
}

impl Level {
    fn new(path: Vec<u8>, inode: Inode) -> Level {
        Level {
            path,
            inode,
            entries: Entries::default(),
        }
    }
}
