//! The fuzz targets of `fuzz/` that need a server, driven by random bytes in an ordinary test: for ten
//! seconds each, or for `UVFS_TEST_FUZZ` runs (`UVFS_TEST_FULL=1`: a million). A finding is printed,
//! to be put into [`FOUND`].

pub mod targets;

use std::time::{Duration, Instant};

use crate::common::Random;

/// The time that a target has where no number of runs is given.
const TIME: Duration = Duration::from_secs(10);
/// Inputs that were kept to be changed.
const KEPT: usize = 64;

fn runs() -> Option<u64> {
    let given = std::env::var("UVFS_TEST_FUZZ").ok();
    let given = given.map(|runs| runs.parse().expect("UVFS_TEST_FUZZ is a number of runs"));
    given.or(uvfs_testing::full().then_some(1_000_000))
}

fn bytes(random: &mut Random) -> Vec<u8> {
    let len = match random.below(4) {
        0 => random.below(16),
        1 => random.below(600),
        _ => random.below(100),
    };
    // Small numbers lead further than others.
    (0..len)
        .map(|_| match random.below(3) {
            0 => random.below(8) as u8,
            _ => random.below(256) as u8,
        })
        .collect()
}

fn changed(input: &[u8], random: &mut Random) -> Vec<u8> {
    let mut input = input.to_vec();
    for _ in 0..1 + random.below(4) {
        let at = random.below(input.len() as u64 + 1) as usize;
        match random.below(4) {
            0 => drop(input.splice(at..at, bytes(random))),
            1 => input.truncate(at.max(1)),
            _ if at < input.len() => input[at] = random.below(256) as u8,
            _ => input.push(random.below(256) as u8),
        }
    }
    input.truncate(4096);
    input
}

/// Gives a target its inputs: so many, or for some time.
fn drive(name: &str, mut run: impl FnMut(&[u8])) {
    let seed = std::env::var("PROPTEST_RNG_SEED").ok();
    let (seed, most) = (seed.and_then(|seed| seed.parse().ok()).unwrap_or(1), runs());
    let (mut random, began) = (Random(seed), Instant::now());
    let mut kept: Vec<Vec<u8>> = FOUND.iter().map(|input| input.to_vec()).collect();
    let mut count = 0;
    while most.map_or(began.elapsed() < TIME, |most| count < most) {
        let input = match (FOUND.get(count as usize), kept.len() as u64) {
            (Some(input), _) => input.to_vec(),
            (None, n) if n > 0 && random.below(2) == 0 => {
                changed(&kept[random.below(n) as usize], &mut random)
            }
            _ => bytes(&mut random),
        };
        let tried = std::panic::AssertUnwindSafe(|| run(&input));
        if let Err(panic) = std::panic::catch_unwind(tried) {
            eprintln!("{name}, run {count} of seed {seed}: {input:?}");
            std::panic::resume_unwind(panic);
        }
        if kept.len() < KEPT {
            kept.push(input);
        } else if random.below(8) == 0 {
            kept[random.below(KEPT as u64) as usize] = input;
        }
        count += 1;
    }
    println!("{name}: {count} runs in {:?}", began.elapsed());
}

/// Inputs that led to a finding once.
const FOUND: &[&[u8]] = &[];

/// No bytes that a client writes into its queue end the server.
#[test]
fn sessions_of_any_bytes() {
    let mut target = targets::Sessions::default();
    drive("session", |input| target.run(input));
    // If all were refused, nothing behind the refusal would be reached.
    assert!(target.served > 100);
}

/// No bytes that reach the socket end the server.
#[test]
fn attach_messages_of_any_bytes() {
    let mut target = targets::Attaching::default();
    drive("attach", |input| target.run(input));
}

/// No request to the control socket ends the server.
#[test]
fn control_requests_of_any_bytes() {
    let mut target = targets::Controlling::default();
    drive("control", |input| target.run(input));
}

/// Clients see the same contents of one file.
#[test]
fn several_clients_agree_with_a_model() {
    let mut target = targets::Coherent::default();
    drive("coherence", |input| target.run(input));
}
