//! Paths for the inodes that findings are about.

use super::problem::Finding;
use crate::Volume;
use crate::blocks::Blocks;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// Inodes that are looked for.
const MAX_WANTED: usize = 1000;
/// Fills in the path of each finding that has an inode, where the directory tree leads to it.
/// At most `max_dirs` directories are looked through; beyond that inodes go without a path.
pub(crate) fn name(blocks: &Arc<dyn Blocks>, findings: &mut [Finding], max_dirs: usize) {
    let mut wanted: BTreeSet<u64> = findings
        .iter()
        .filter_map(|f| f.place.inode)
        .take(MAX_WANTED)
        .collect();
    if wanted.is_empty() {
        return;
    }
    let Ok(volume) = Volume::open(blocks.clone()) else {
        return;
    };
    let root = volume.geometry().rootino;
    let mut paths: BTreeMap<u64, String> = BTreeMap::new();
    if wanted.remove(&root) {
        paths.insert(root, "/".into());
    }
    // Breadth first; a directory is entered once.
    let mut seen = BTreeSet::from([root]);
    let mut level: Vec<(u64, String)> = vec![(root, String::new())];
    while !level.is_empty() && !wanted.is_empty() && seen.len() < max_dirs {
        let mut next = Vec::new();
        for (ino, path) in level {
            let Ok(dir) = volume.inode(ino) else { continue };
            let mut children = Vec::new();
            // A damaged directory gives what comes before the damage.
            let _ = volume.readdir(&dir, 0, &mut |e| {
                if !matches!(e.name, b"." | b"..") {
                    let want = wanted.contains(&e.ino);
                    let maybe_dir = e.file_type.may_be_directory();
                    if want || maybe_dir {
                        children.push((e.ino, maybe_dir, e.name.to_vec()));
                    }
                }
                children.len() < max_dirs
            });
            for (child, maybe_dir, name) in children {
                let full = format!("{path}/{}", name.escape_ascii());
                if wanted.remove(&child) {
                    paths.insert(child, full.clone());
                }
                if maybe_dir && seen.len() < max_dirs && seen.insert(child) {
                    next.push((child, full));
                }
            }
        }
        level = next;
    }
    for f in findings {
        if let Some(p) = f.place.inode.and_then(|i| paths.get(&i)) {
            f.path = Some(p.clone());
        }
    }
}
