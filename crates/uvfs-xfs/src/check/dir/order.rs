//! The order of the entries of a hash index.

use super::super::ctx::Ctx;
use super::super::problem::Place;
use crate::format::*;

/// Checks that a leaf's entries are in the order of their hashes, and counts the stale ones.
pub(super) fn leaf_order(
    ctx: &Ctx<'_>,
    place: Place,
    entries: &[Dir2LeafEntry],
    previous: &mut u32,
) -> u32 {
    let mut stale = 0;
    for (i, e) in entries.iter().enumerate() {
        let hash = e.hashval.get();
        if hash < *previous {
            ctx.report.out_of_order(place, "entry", i);
        }
        *previous = hash;
        stale += u32::from(e.address.get() == DIR2_NULL_DATAPTR);
    }
    stale
}
