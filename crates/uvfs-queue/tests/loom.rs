//! Models of the lock-free parts, over every interleaving:
//! `RUSTFLAGS="--cfg loom" cargo test -p uvfs-queue --test loom --release`
#![cfg(loom)]

use loom::sync::Arc;
use loom::sync::atomic::{AtomicUsize, Ordering};
use loom::thread;
use uvfs_queue::doorbell::Doorbell;

/// One sleeper, two bringers. The "kernel" is a counter of wake-up calls, as an eventfd is.
#[test]
fn work_never_waits_for_a_sleeper_that_nobody_wakes() {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(3);
    model.check(|| {
        let bell = Arc::new(Doorbell::new());
        let work = Arc::new(AtomicUsize::new(0));
        let calls = Arc::new(AtomicUsize::new(0));
        let bringers: Vec<_> = (0..2)
            .map(|_| {
                let (bell, work, calls) = (bell.clone(), work.clone(), calls.clone());
                thread::spawn(move || {
                    work.fetch_add(1, Ordering::Relaxed);
                    if bell.ring() {
                        calls.fetch_add(1, Ordering::Release);
                    }
                })
            })
            .collect();
        bell.announce_sleep();
        let slept = work.load(Ordering::Relaxed) == 0;
        if !slept {
            bell.awake();
        }
        for bringer in bringers {
            bringer.join().unwrap();
        }
        if slept {
            // It saw no work and sleeps: exactly one bringer has to wake it.
            assert_eq!(calls.load(Ordering::Acquire), 1);
        }
    });
}
