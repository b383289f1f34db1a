//! What another version of the program has left in its book may be anything.

#[path = "taken_over/target.rs"]
mod target;

use proptest::prelude::*;

/// A word of the book and what it is changed by: mostly few bits.
fn change() -> impl Strategy<Value = Vec<u8>> {
    let word = prop_oneof![any::<u8>().prop_map(u64::from), any::<u64>()];
    (any::<[u8; 2]>(), word).prop_map(|(place, word)| [&place[..], &word.to_ne_bytes()].concat())
}

/// Any damage to the book leads to no more than lost nodes and files.
#[test]
fn any_book_is_taken_over_or_refused() {
    let target = target::Target::new();
    target.run(&[]);
    let damage = prop::collection::vec(change(), 0..20);
    let mut runner = proptest::test_runner::TestRunner::new(ProptestConfig::with_cases(500));
    runner
        .run(&damage, |damage| {
            target.run(&damage.concat());
            Ok(())
        })
        .unwrap();
}
