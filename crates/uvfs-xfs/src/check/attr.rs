//! Extended attributes.

use std::fmt::Display;
use std::ops::Range;

use super::da::DaTree;
use super::runs::read_run;
use super::{Ctx, Place, Reader, Structure};
use crate::format::*;
use crate::read::attr::acl_miscount;
use crate::read::inode::{Fork, Inode};
use crate::walk::attr::{Stored, Value, leaf_attr, short_attrs};

/// Checks what holds for every attribute `i`.
fn stored_attr(ctx: &Ctx<'_>, place: Place, i: usize, stored: &Stored<'_>) {
    let Stored { flags, name, .. } = *stored;
    let report = ctx.report;
    if name.is_empty() {
        report.bad(place, format!("attribute {i} has no name"));
    }
    if name.contains(&0) && flags & ATTR_PARENT == 0 {
        report.bad(place, format!("attribute {i} has a zero byte in its name"));
    }
    if (flags & ATTR_NSP_MASK).count_ones() > 1 {
        let (field, found) = (format!("flags of attribute {i}"), format!("{flags:#x}"));
        report.differ(place, field, "at most one namespace", found);
    }
    if let Value::Here(value) = stored.value
        && let Some((expected, found)) = acl_miscount(flags, name, value)
    {
        report.differ(place, "entries of an access control list", expected, found);
    }
}

/// Checks the attributes of an inode.
pub(crate) fn check(ctx: &Ctx<'_>, rd: &mut Reader<'_>, inode: &Inode, extents: &[Extent]) {
    if inode.fork_format(Fork::Attr) == Some(FORMAT_LOCAL) {
        return shortform(ctx, inode);
    }
    if extents.is_empty() {
        return;
    }
    let place = Place::inode(Structure::Attributes, inode.ino);
    let mut remote: Vec<(u32, u32)> = Vec::new();
    let mut previous = 0;
    let mut tree = DaTree::new(ctx, place, extents, Fork::Attr);
    tree.walk(rd, 0, &mut |_, place, block| {
        leaf(ctx, place, block, &mut previous, &mut remote)
    });
    for (number, len) in remote {
        value(ctx, rd, inode, extents, number, len);
    }
}

fn shortform(ctx: &Ctx<'_>, inode: &Inode) {
    let report = ctx.report;
    let place = Place::inode(Structure::ShortAttributes, inode.ino);
    let fork = inode.fork_bytes(Fork::Attr);
    let Some(h) = report.sound(place, AttrSfHeader::at(fork, 0)) else {
        return;
    };
    let total = usize::from(h.totsize.get());
    let Some(data) = fork.get(..total).filter(|d| d.len() >= AttrSfHeader::SIZE) else {
        let expected = format!("from {} to {}", AttrSfHeader::SIZE, fork.len());
        return report.differ(place, "totsize", expected, total);
    };
    let mut at = AttrSfHeader::SIZE;
    for (i, stored) in short_attrs(data).take(h.count.into()).enumerate() {
        let Ok(stored) = stored else {
            return report.bad(place, format!("attribute {i} ends beyond totsize"));
        };
        if stored.flags & !ATTR_NSP_MASK != 0 {
            let (field, found) = (format!("flags of attribute {i}"), stored.flags);
            report.differ(place, field, "a namespace", format!("{found:#x}"));
        }
        stored_attr(ctx, place, i, &stored);
        at = stored.end;
    }
    report.same(place, "totsize", at, total);
}

/// Where the first name begins; 0 stands for the end of a block of 64 KiB.
fn firstused(counts: &AttrLeafCounts) -> usize {
    match counts.firstused.get() {
        0 => 65536,
        f => usize::from(f),
    }
}

/// Checks that names lie beside each other in the room for them, and holes between them.
fn room(
    ctx: &Ctx<'_>,
    place: Place,
    counts: &AttrLeafCounts,
    mut used: Vec<(usize, usize)>,
    inside: Range<usize>,
) {
    let report = ctx.report;
    used.sort_unstable();
    for w in used.windows(2) {
        if w[0].1 > w[1].0 {
            report.bad(place, format!("names at {} and {} overlap", w[0].0, w[1].0));
        }
    }
    let bytes: usize = used.iter().map(|(a, b)| b - a).sum();
    report.same(place, "usedbytes", bytes, counts.usedbytes.get().into());
    for (i, [base, size]) in counts.freemap.iter().enumerate() {
        let (base, size) = (usize::from(base.get()), usize::from(size.get()));
        let differ = |expected| {
            let found = format!("{size} bytes at {base}");
            report.differ(place, format!("freemap[{i}]"), expected, found);
        };
        if size != 0 && (base < inside.start || base + size > inside.end) {
            differ("a hole inside the block");
        } else if base % 4 != 0 || size % 4 != 0 {
            differ("an aligned hole");
        } else if size != 0 && used.iter().any(|(a, b)| *a < base + size && base < *b) {
            report.bad(place, format!("freemap[{i}] covers a name"));
        }
    }
}

fn leaf(
    ctx: &Ctx<'_>,
    place: Place,
    block: &[u8],
    previous: &mut u32,
    remote: &mut Vec<(u32, u32)>,
) -> Option<u32> {
    let (crc, report) = (ctx.g.features.crc, ctx.report);
    let (counts, entries) = report.sound(place, attr_leaf_entries(block, crc))?;
    let entries_end = attr_leaf_header_len(crc) + size_of_val(entries);
    let firstused = firstused(counts);
    if firstused > block.len() || firstused < entries_end {
        let expected = format!("from {entries_end} to {}", block.len());
        report.differ(place, "firstused", expected, firstused);
    }
    if entries.is_empty() {
        // The kernel leaves an empty root behind when a large attribute's removal is cut short,
        // and no other leaf.
        report.bad(place, "no attributes");
    }
    // (first byte, end) of each name.
    let mut used: Vec<(usize, usize)> = Vec::with_capacity(entries.len());
    for (i, e) in entries.iter().enumerate() {
        let differ = |field: &str, expected: &str, found: &dyn Display| {
            report.differ(place, format!("{field} of attribute {i}"), expected, found);
        };
        let hash = e.hashval.get();
        if hash < *previous {
            report.out_of_order(place, "attribute", i);
        }
        *previous = hash;
        if e.flags & ATTR_INCOMPLETE != 0 {
            report.bad(place, format!("attribute {i} was left incomplete"));
        }
        let known = ATTR_LOCAL | ATTR_NSP_MASK | ATTR_INCOMPLETE;
        if e.flags & !known != 0 {
            differ("flags", "no unknown bits", &format!("{:#x}", e.flags));
        }
        let at = usize::from(e.nameidx.get());
        let Ok(stored) = leaf_attr(block, e) else {
            differ("nameidx", "a name inside the block", &at);
            continue;
        };
        stored_attr(ctx, place, i, &stored);
        // A parent pointer's hash covers the parent, too.
        let named = da_hashname(stored.name);
        if e.flags & ATTR_PARENT == 0 && named != hash {
            differ("hash", &format!("{named:#x}"), &format!("{hash:#x}"));
        }
        if at < firstused {
            differ("nameidx", &format!("at least firstused ({firstused})"), &at);
        }
        used.push((at, stored.end.next_multiple_of(4)));
        if let Value::Remote { block: number, len } = stored.value
            && e.flags & ATTR_INCOMPLETE == 0
        {
            if number != 0 && len as usize <= ATTR_MAX_VALUE {
                remote.push((number, len));
                continue;
            }
            let (expected, found) = ("a block, at most 65536 bytes", format!("{number}, {len}"));
            differ("valueblk, valuelen", expected, &found);
        }
    }
    room(ctx, place, counts, used, entries_end..block.len());
    entries.last().map(|e| e.hashval.get())
}

/// Checks the blocks of a value that is not in the leaf.
fn value(
    ctx: &Ctx<'_>,
    rd: &mut Reader<'_>,
    inode: &Inode,
    extents: &[Extent],
    first: u32,
    len: u32,
) {
    let (g, report) = (ctx.g, ctx.report);
    let base = Place::inode(Structure::AttributeValue, inode.ino);
    let mut done = 0u32;
    for number in u64::from(first).. {
        if done >= len {
            return;
        }
        let Some((bytes, a)) = read_run(ctx, rd, base, extents, number, 1) else {
            return;
        };
        let ident = g.ident(g.daddr(a), Some(inode.ino));
        let place = base.at(a.agno, a.agbno);
        let checked = check_remote(&bytes, ATTR3_RMT_MAGIC, done, &ident);
        let Some(part) = report.sound(place, checked) else {
            return;
        };
        if part.is_empty() {
            return report.bad(place, "an empty block");
        }
        if g.features.crc {
            let want = (bytes.len() - RemoteHeader::SIZE).min((len - done) as usize);
            report.same(place, "bytes", want, part.len());
        }
        done = done.saturating_add(part.len() as u32);
    }
}
