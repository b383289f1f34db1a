//! Loom models of the ring, of the sleep/wake handshake, of how `uvfs-preload` takes over a file's position, and of how
//! the server begins to serve clients. Run with
//! `RUSTFLAGS="--cfg loom" cargo test -p uvfs-queue --test loom --release`.
#![cfg(loom)]

use loom::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use loom::sync::{Arc, Condvar, Mutex};
use loom::thread;
use uvfs_queue::ring::{Bell, Cells, Consumer, Producer};

// `reset` is for descriptors alone.
#[allow(dead_code)]
#[path = "../../uvfs-preload/src/passing.rs"]
mod passing;

// A mount that watches its host is not modelled.
#[allow(dead_code)]
#[path = "../../uvfs-server/src/switch.rs"]
mod switch;

#[derive(Clone)]
struct Heap(Arc<Vec<AtomicU64>>);

impl Heap {
    fn new(n: usize) -> Self {
        Self(Arc::new((0..n).map(|_| AtomicU64::new(0)).collect()))
    }
}

impl Cells for Heap {
    fn len(&self) -> usize {
        self.0.len()
    }
    fn cell(&self, index: usize) -> &AtomicU64 {
        &self.0[index]
    }
}

/// The kernel's futex: compare and block in one step, as seen by a waker.
struct Futex {
    word: AtomicU32,
    queue: Mutex<()>,
    woken: Condvar,
}

impl Futex {
    fn new() -> Self {
        Self {
            word: AtomicU32::new(0),
            queue: Mutex::new(()),
            woken: Condvar::new(),
        }
    }
    fn wait(&self, expected: u32) {
        let mut queue = self.queue.lock().unwrap();
        while self.word.fetch_add(0, Ordering::AcqRel) == expected {
            queue = self.woken.wait(queue).unwrap();
        }
    }
    fn wake(&self) {
        let _queue = self.queue.lock().unwrap();
        self.woken.notify_one();
    }
}

/// A consumer that sees an entry sees its contents.
#[test]
fn one_producer_publishes_what_it_wrote_before() {
    loom::model(|| {
        let cells = Heap::new(2);
        let data = Arc::new(AtomicU32::new(0));
        let producer = {
            let (tx, data) = (Producer::new(cells.clone()), data.clone());
            thread::spawn(move || {
                data.store(7, Ordering::Relaxed);
                tx.push(1);
                tx.push(2);
            })
        };
        let rx = Consumer::new(cells);
        if let Some(v) = rx.pop() {
            assert_eq!(v, 1);
            assert_eq!(data.load(Ordering::Relaxed), 7);
        }
        producer.join().unwrap();
        while rx.pop().is_some() {}
        assert_eq!(rx.popped(), 2);
    });
}

/// Each request of two producers is taken once.
#[test]
fn two_producers_lose_and_repeat_nothing() {
    loom::model(|| {
        let cells = Heap::new(2);
        let tx = Arc::new(Producer::new(cells.clone()));
        let other = {
            let tx = tx.clone();
            thread::spawn(move || tx.push(10))
        };
        let rx = Consumer::new(cells);
        tx.push(20);
        let mut seen = Vec::new();
        if let Some(v) = rx.pop() {
            seen.push(v);
        }
        other.join().unwrap();
        while let Some(v) = rx.pop() {
            seen.push(v);
        }
        seen.sort_unstable();
        assert_eq!(seen, [10, 20]);
    });
}

/// The handshake loses no wake-up: if it did, the consumer would block for ever, which loom
/// reports as a deadlock.
fn handshake(producers: u32) {
    let cells = Heap::new(2);
    let futex = Arc::new(Futex::new());
    let tx = Arc::new(Producer::new(cells.clone()));
    let threads: Vec<_> = (0..producers)
        .map(|i| {
            let (tx, futex) = (tx.clone(), futex.clone());
            thread::spawn(move || {
                tx.push(i);
                if Bell(&futex.word).must_wake() {
                    futex.wake();
                }
            })
        })
        .collect();
    let rx = Consumer::new(cells);
    let mut got = 0;
    while got < producers {
        if rx.pop().is_some() {
            got += 1;
            continue;
        }
        Bell(&futex.word).going_to_sleep();
        if !rx.ready() {
            futex.wait(Bell::ASLEEP);
        }
        Bell(&futex.word).awake();
    }
    for t in threads {
        t.join().unwrap();
    }
}

/// The server does not sleep while there is a request.
#[test]
fn no_wake_up_is_lost() {
    loom::model(|| handshake(1));
}

/// The same with two clients' threads.
#[test]
fn no_wake_up_is_lost_with_two_producers() {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(3);
    model.check(|| handshake(2));
}

/// A file of `uvfs-preload` whose position moves from the kernel to the library.
struct Moving {
    calls: passing::Calls,
    imported: AtomicBool,
    /// The kernel's position.
    kernel: AtomicU32,
    /// The library's position, if it has taken over.
    here: Mutex<Option<u32>>,
}

impl Moving {
    fn new() -> Self {
        Self {
            calls: passing::Calls::new(),
            imported: AtomicBool::new(false),
            kernel: AtomicU32::new(0),
            here: Mutex::new(None),
        }
    }

    /// A read or write of one byte at the position.
    fn call(&self) {
        self.calls.begin();
        if !self.imported.load(Ordering::Acquire) {
            self.kernel.fetch_add(1, Ordering::Relaxed);
            self.calls.end();
            return;
        }
        self.calls.end();
        match &mut *self.here.lock().unwrap() {
            Some(at) => *at += 1,
            None => drop(self.kernel.fetch_add(1, Ordering::Relaxed)),
        }
    }

    /// As `import::settle` does.
    fn import(&self) {
        let mut here = self.here.lock().unwrap();
        self.imported.store(true, Ordering::SeqCst);
        if self.calls.under_way() == 0 {
            *here = Some(self.kernel.load(Ordering::Relaxed));
        }
    }
}

/// An import misses no call: the position includes each call's byte.
#[test]
fn a_position_moves_only_between_calls() {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(4);
    model.check(|| {
        let file = Arc::new(Moving::new());
        let threads: Vec<_> = (0..2)
            .map(|_| {
                let file = file.clone();
                thread::spawn(move || file.call())
            })
            .collect();
        file.import();
        for thread in threads {
            thread.join().unwrap();
        }
        let kernel = file.kernel.load(Ordering::Relaxed);
        let here = *file.here.lock().unwrap();
        assert_eq!(here.unwrap_or(kernel), 2);
    });
}

/// No request that began without leases is under way while a client has one, and one that began before the first client
/// came finds out.
#[test]
fn no_lease_is_granted_beside_a_request_without_leases() {
    loom::model(|| {
        let stage = Arc::new(switch::Switch::default());
        let count = Arc::new(switch::Untracked::default());
        // What a lease is about: it is written by a request, or by its holder.
        let data = Arc::new(loom::cell::UnsafeCell::new(0));
        let changes = Arc::new(AtomicBool::new(false));
        let request = {
            let (stage, count) = (stage.clone(), count.clone());
            let (data, changes) = (data.clone(), changes.clone());
            thread::spawn(move || {
                count.begin();
                let begun = stage.stage();
                if begun.is_plain() {
                    // SAFETY: the model fails if the holder of a lease writes at the same time.
                    data.with_mut(|data| unsafe { *data += 1 });
                    // Clients change nothing of which this request does not know at its end.
                    let changed = changes.load(Ordering::SeqCst);
                    assert!(!changed || stage.stage() != begun);
                }
                count.end();
            })
        };
        stage.enter(switch::TRACKED);
        assert!(stage.stage().tracks());
        changes.store(true, Ordering::SeqCst);
        if count.is_none() {
            // SAFETY: as above.
            data.with_mut(|data| unsafe { *data += 1 });
        }
        request.join().unwrap();
    });
}
