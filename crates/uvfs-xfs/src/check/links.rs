//! What only all inodes and directories together tell: unlinked lists, link counts, kinds, parents,
//! and what no directory leads to.

use super::ctx::{Ctx, KIND_BAD, KIND_FREE, Pair};
use super::reader::Reader;
use super::report::Place;
use crate::format::*;

/// Follows the lists of unlinked inodes. Their members are in use without being in a directory.
pub(crate) fn unlinked(ctx: &Ctx<'_>, rd: &mut Reader<'_>, agno: u32) {
    let (g, report) = (ctx.g, ctx.report);
    let ag = &ctx.ags[agno as usize];
    let (Some(heads), Some(facts), Some(frees)) =
        (ag.unlinked.get(), ag.facts.get(), ag.free.get())
    else {
        return;
    };
    for head in heads {
        let mut at = *head;
        while at != NULLAGINO {
            let ino = g.ino(agno, at);
            let place = Place::inode("unlinked list", ino);
            let Some((chunk, slot)) = ctx.find_chunk(agno, at) else {
                report.bad(place, "it leads to an inode that does not exist");
                break;
            };
            if frees[chunk] >> (slot % 64) & 1 != 0 {
                report.bad(place, "it leads to a free inode");
                break;
            }
            // Each inode is visited once, so this ends.
            if facts.get(slot).unlinked {
                report.bad(place, "it leads to this inode twice");
                break;
            }
            facts.set_unlinked(slot);
            let offset = (u64::from(at) << g.inodelog)
                + (g.daddr(crate::geometry::AgBlock { agno, agbno: 0 }) << 9);
            match rd.bytes(offset, g.inode_size as usize) {
                Ok(raw) => match DinodeV2::at(&raw, 0) {
                    Ok(d) => {
                        if d.nlink.get() != 0 {
                            report.differ(place, "di_nlink", 0, d.nlink.get());
                        }
                        at = d.next_unlinked.get();
                    }
                    Err(_) => break,
                },
                Err(e) => {
                    ctx.io(place, &e);
                    break;
                }
            }
        }
    }
}

fn kind_name(kind: u32) -> &'static str {
    match FileType::from_ftype(kind as u8) {
        Some(FileType::Regular) => "regular file",
        Some(FileType::Directory) => "directory",
        Some(FileType::CharDevice) => "character device",
        Some(FileType::BlockDevice) => "block device",
        Some(FileType::Fifo) => "FIFO",
        Some(FileType::Socket) => "socket",
        Some(FileType::Symlink) => "symbolic link",
        Some(FileType::Whiteout) => "whiteout",
        _ => "unknown",
    }
}

/// Compares the link counts of an allocation group's inodes with the entries seen.
pub(crate) fn counts(ctx: &Ctx<'_>, agno: u32) {
    let (g, report) = (ctx.g, ctx.report);
    let ag = &ctx.ags[agno as usize];
    let (Some(chunks), Some(facts)) = (ag.chunks.get(), ag.facts.get()) else {
        return;
    };
    for (k, chunk) in chunks.iter().enumerate() {
        for slot in 0..INODES_PER_CHUNK {
            let f = facts.get(k * 64 + slot as usize);
            if matches!(f.kind, KIND_FREE | KIND_BAD) {
                continue;
            }
            let ino = g.ino(agno, chunk.start + slot);
            let own = g.quota_inodes.contains(&Some(ino)) || ino == g.rbmino || ino == g.rsumino;
            let place = Place::inode("inode", ino);
            let is_dir = f.kind == FileType::Directory as u32;
            if own {
                if f.kind != FileType::Regular as u32 {
                    report.differ(
                        place,
                        "one of the file system's own",
                        "regular file",
                        kind_name(f.kind),
                    );
                }
                if f.nlink == 0 {
                    report.differ(place, "di_nlink", 1, 0);
                }
                continue;
            }
            if f.claimed != 0 && (f.mixed || f.claimed != f.kind) {
                let found = if f.mixed {
                    "different types"
                } else {
                    kind_name(f.claimed)
                };
                report.differ(
                    place,
                    "file type in a directory entry",
                    kind_name(f.kind),
                    found,
                );
            }
            if f.unlinked {
                let own_dot = u32::from(is_dir);
                if f.seen > own_dot {
                    report.bad(place, "on an unlinked list, but in a directory");
                }
                continue;
            }
            if report.is_incomplete() {
                continue;
            }
            if f.seen == 0 && !is_dir {
                report.bad(place, "in use, but in no directory");
            } else if !f.links_match() {
                report.differ(place, "di_nlink", f.seen, f.nlink);
            }
        }
    }
}

/// Checks that every directory has one parent, says so itself, and leads up to the root.
pub(crate) fn tree(ctx: &Ctx<'_>) {
    let (g, report) = (ctx.g, ctx.report);
    let mut tree = ctx.tree.lock().expect("no holder panics");
    let place = Place::inode("root directory", g.rootino);
    let root = ctx.index(g.rootino);
    if let Some(f) = ctx.fact(g.rootino)
        && f.kind != FileType::Directory as u32
        && f.kind != KIND_BAD
    {
        report.bad(place, "not a directory");
    } else if root.is_none() {
        report.bad(place, "it does not exist");
    }
    let Some(root) = root else { return };
    tree.dotdot.sort_unstable();
    tree.parent.sort_unstable();
    let (dotdot, parent) = (&tree.dotdot[..], &tree.parent[..]);
    let dir_place = |i: u32| Place::inode("directory", ctx.ino_of(i).unwrap_or(0));
    let show = |i: u32| ctx.ino_of(i).map_or("?".into(), |i| i.to_string());
    let parents = |child: u32| -> &[Pair] {
        let from = parent.partition_point(|p| p.0 < child);
        let n = parent[from..].partition_point(|p| p.0 == child);
        &parent[from..from + n]
    };
    let incomplete = report.is_incomplete();
    for (dir, up) in dotdot {
        let entries = parents(*dir);
        if *dir == root {
            if *up != root {
                report.differ(place, "inode of \"..\"", g.rootino, show(*up));
            }
            if !entries.is_empty() {
                report.bad(place, "a directory has an entry for it");
            }
            continue;
        }
        match entries {
            [] => {
                let unlinked = ctx
                    .ino_of(*dir)
                    .and_then(|i| ctx.fact(i))
                    .is_some_and(|f| f.unlinked);
                if !incomplete && !unlinked {
                    report.bad(dir_place(*dir), "in use, but in no other directory");
                }
            }
            [(_, one)] => {
                if one != up {
                    report.differ(dir_place(*dir), "inode of \"..\"", show(*one), show(*up));
                }
            }
            more => report.differ(
                dir_place(*dir),
                "directories with an entry for it",
                1,
                more.len(),
            ),
        }
    }
    if incomplete {
        return;
    }
    // Up from each directory: 0 not seen, 1 on this way, 2 done.
    let mut state = vec![0u8; dotdot.len()];
    let find = |i: u32| dotdot.binary_search_by_key(&i, |d| d.0).ok();
    for start in 0..dotdot.len() {
        let (mut at, mut way) = (Some(start), Vec::new());
        while let Some(i) = at {
            match state[i] {
                0 => {
                    state[i] = 1;
                    way.push(i);
                    at = match parents(dotdot[i].0) {
                        [(_, up), ..] if dotdot[i].0 != root => find(*up),
                        _ => None,
                    };
                }
                1 => {
                    report.bad(dir_place(dotdot[i].0), "it is its own ancestor");
                    break;
                }
                _ => break,
            }
        }
        for i in way {
            state[i] = 2;
        }
    }
}
