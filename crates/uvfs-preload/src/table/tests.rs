use super::*;

/// A descriptor that was duplicated keeps its file when the other one is closed.
#[test]
fn a_description_is_shared_and_ends_with_its_last_user() {
    let (a, b) = (40_000, 40_001);
    opened(a);
    let Known::Undecided(word, true) = look(a) else {
        panic!("opened here");
    };
    assert!(decide(a, word, Use::new(true)));
    let Known::Described(one) = look(a) else {
        panic!("described");
    };
    let first = std::ptr::from_ref::<Description>(&one);
    duplicate(b, one);
    drop(Closing::begin(a));
    assert!(matches!(look(a), Known::Undecided(_, false)));
    // A late decision about what was closed counts for nothing.
    assert!(!decide(a, word, Use::new(true)));
    let Known::Described(other) = look(b) else {
        panic!("still described");
    };
    assert!(std::ptr::eq(first, &*other));
    drop(Closing::begin(b));
    assert_eq!(other.users.load(Ordering::Relaxed), 1);
    drop(other);
    foreign(a);
    assert!(is_foreign(a) && is_foreign(-1) && is_foreign(DESCRIPTORS as c_int));
    opened(a);
    assert!(!is_foreign(a));
}

/// A number that one thread uses is closed by no other meanwhile: its position would become another file's.
#[test]
fn a_number_is_used_for_its_own_description_only() {
    let fd = 40_020;
    duplicate(fd, Use::new(false).expect("there are enough"));
    let Known::Described(one) = look(fd) else {
        panic!("described");
    };
    let (used, closed) = (AtomicBool::new(false), AtomicBool::new(false));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !used.load(Ordering::SeqCst) {
                std::thread::yield_now();
            }
            drop(Closing::begin(fd));
            closed.store(true, Ordering::SeqCst);
        });
        while_it_has(fd, &one, || {
            used.store(true, Ordering::SeqCst);
            std::thread::sleep(Duration::from_millis(50));
            assert!(!closed.load(Ordering::SeqCst), "closed meanwhile");
        });
    });
    assert!(closed.load(Ordering::SeqCst) && used.load(Ordering::SeqCst));
    while_it_has(fd, &one, || panic!("another's"));
}

/// A program may close a file in one thread and use it in another.
#[test]
fn threads_close_what_others_use() {
    let fd = 40_010;
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                for _ in 0..20_000 {
                    if let Known::Described(one) = look(fd) {
                        assert!(one.users.load(Ordering::Relaxed) > 0);
                    }
                }
            });
        }
        scope.spawn(|| {
            for _ in 0..20_000 {
                duplicate(fd, Use::new(false).expect("there are enough"));
                let closing = Closing::begin(fd);
                drop(closing);
            }
        });
    });
}
