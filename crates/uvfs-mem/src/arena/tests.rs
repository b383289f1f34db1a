use super::*;
use proptest::prelude::*;

/// The class of a size is the smallest that holds it.
#[test]
fn classes() {
    assert_eq!((class_of(1), class_of(512), class_of(513)), (0, 0, 1));
    assert_eq!(class_of(SLAB), CLASSES - 1);
    assert_eq!(all_free(0), u128::MAX);
    assert_eq!(all_free(CLASSES - 1), 1);
}

/// An arena does not exceed its limit, and memory that is freed serves any size.
#[test]
fn the_limit_holds_and_freed_memory_serves_any_class() {
    let arena = Arena::new(4 * SLAB).unwrap();
    let small: Vec<_> = (0..4 * 128).map(|_| arena.alloc(512).unwrap()).collect();
    assert_eq!(arena.alloc(512).unwrap_err(), NoMemory);
    assert_eq!(arena.stats().in_use, 4 * SLAB);
    drop(small);
    assert_eq!(arena.stats().used, 0);
    assert_eq!(arena.stats().resident, 4 * SLAB);
    let run = arena.alloc(3 * SLAB + 1).unwrap();
    assert_eq!(arena.alloc(4096).unwrap_err(), NoMemory);
    drop(run);
    assert_eq!(arena.trim(), 4 * SLAB);
    assert_eq!(arena.stats().resident, 0);
}

/// Memory that `trim` gave back reads as zero.
#[test]
fn memory_given_back_reads_as_zero() {
    let arena = Arena::new(SLAB).unwrap();
    let mut block = arena.alloc(SLAB).unwrap();
    block.fill(7);
    drop(block);
    arena.trim();
    assert!(arena.alloc(SLAB).unwrap().iter().all(|&b| b == 0));
}

/// `trim` gives back nothing of a pinned arena.
#[test]
fn pinned_memory_stays() {
    let arena = Arena::pinned(4 * SLAB).unwrap();
    let (base, len) = arena.pinned_range().unwrap();
    assert_eq!(
        (len, Arena::new(SLAB).unwrap().pinned_range()),
        (4 * SLAB, None)
    );
    let mut block = arena.alloc(3 * SLAB).unwrap();
    block.fill(7);
    assert_eq!(block.as_ptr(), base);
    drop(block);
    assert_eq!(arena.trim(), 0);
    let blocks: Vec<Block> = (0..4).map(|_| arena.alloc(SLAB).unwrap()).collect();
    assert!(arena.alloc(1).is_err());
    let sevens = blocks.iter().filter(|b| b.iter().all(|v| *v == 7)).count();
    assert_eq!(sevens, 3);
}

/// Memory that a buffer needs besides its data counts towards the limit.
#[test]
fn charges_count() {
    let arena = Arena::new(2 * SLAB).unwrap();
    let first = arena.alloc_charged(512, SLAB).unwrap();
    assert_eq!(arena.alloc_charged(512, 1).unwrap_err(), NoMemory);
    assert_eq!(arena.alloc(SLAB).unwrap_err(), NoMemory);
    drop(first);
    assert_eq!(arena.stats().used, 0);
    arena.alloc(SLAB).unwrap();
}

proptest! {
    /// Live blocks never overlap, are aligned, and keep what was written to them.
    #[test]
    fn blocks_are_disjoint(ops in prop::collection::vec((1usize..200_000, any::<bool>(), any::<prop::sample::Index>()), 1..300)) {
        let arena = Arena::new(2 << 20).unwrap();
        let mut live: Vec<(Block, u8)> = Vec::new();
        for (n, (len, free, pick)) in ops.into_iter().enumerate() {
            if free && !live.is_empty() {
                let (block, mark) = live.swap_remove(pick.index(live.len()));
                prop_assert!(block.iter().all(|&b| b == mark));
            } else {
                let len = if n % 2 == 0 { len % 5000 + 1 } else { len };
                if let Ok(mut block) = arena.alloc(len) {
                    prop_assert_eq!(block.as_ptr() as usize % len.next_power_of_two().clamp(512, 4096), 0);
                    let mark = n as u8;
                    block.fill(mark);
                    live.push((block, mark));
                }
            }
            let stats = arena.stats();
            prop_assert!(stats.in_use <= stats.limit && stats.resident <= stats.limit);
        }
        for (block, mark) in &live {
            prop_assert!(block.iter().all(|b| b == mark));
        }
        live.clear();
        prop_assert_eq!(arena.stats().used, 0);
        arena.trim();
        prop_assert_eq!(arena.stats().resident, 0);
    }
}
