//! The table of the program's descriptors.
//!
//! A descriptor has one word: how things stand, or a pointer to the [`Description`] that it shares
//! with its duplicates. Looking one up takes one atomic load, and for what was imported a reference
//! that keeps it open until the call is over. Descriptions are recycled and never freed, so a
//! pointer that was just replaced still points to one, whose count then says that it is gone.
//!
//! A change of a word carries a new number, so that a slow decision about a descriptor is not
//! written down for the next one with the same number.

use std::ffi::c_int;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use uvfs_sys::lock;

use uvfs_client::{File, Flags};

use crate::DESCRIPTORS;
use crate::passing::Calls;
use crate::ranked::{Guard, Ranked};

/// Descriptions that are in use at most; what is more is left to the kernel.
const MOST: usize = 1 << 16;

const TAG: u64 = 7;
/// Nothing is known; it may be shared with other processes.
const UNKNOWN: u64 = 1;
/// Opened by this process a moment ago: no other process has it.
const FRESH: u64 = 2;
/// Not ours to serve.
const FOREIGN: u64 = 3;
/// This library's own.
const OWN: u64 = 4;
/// Being closed, or replaced.
const CLOSING: u64 = 5;

/// The state of this module.
struct Descriptors {
    words: [AtomicU64; DESCRIPTORS],
    /// One above the highest descriptor that had a word.
    highest: AtomicUsize,
    number: AtomicU64,
    made: AtomicUsize,
    /// Threads of the program that close what they may not have opened.
    closing_now: AtomicUsize,
    /// Threads that are at work here with descriptors that are not in the table yet.
    making_now: AtomicUsize,
    /// Held in [`while_it_has`].
    by_number: Ranked<(), { crate::rank::BY_NUMBER }>,
    free: Ranked<Vec<&'static Description>, { crate::rank::FREE }>,
}

static STATE: Descriptors = Descriptors {
    words: [const { AtomicU64::new(0) }; DESCRIPTORS],
    highest: AtomicUsize::new(0),
    number: AtomicU64::new(1),
    made: AtomicUsize::new(0),
    closing_now: AtomicUsize::new(0),
    making_now: AtomicUsize::new(0),
    by_number: Ranked::new(()),
    free: Ranked::new(Vec::new()),
};

fn fresh_word(tag: u64) -> u64 {
    STATE.number.fetch_add(1, Ordering::Relaxed) << 3 | tag
}

fn word(fd: c_int) -> Option<&'static AtomicU64> {
    STATE.words.get(usize::try_from(fd).ok()?)
}

fn saw(fd: c_int) {
    let above = fd as usize + 1;
    if STATE.highest.load(Ordering::Relaxed) < above {
        STATE.highest.fetch_max(above, Ordering::Relaxed);
    }
}

/// Where an open file description is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Position {
    /// Here: only this process has the description.
    Here(u64),
    /// In the kernel, where other processes see it too.
    Kernel,
}

/// An open file of the server, and what identifies its inode to this process.
pub(crate) struct Opened {
    pub(crate) file: File,
    pub(crate) inode: (u64, u64),
    /// As fcntl(2) gave them.
    pub(crate) flags: c_int,
}

impl Opened {
    /// The flags that change how a call is served, and that F_SETFL can change.
    pub(crate) const SWITCHED: c_int = libc::O_APPEND | libc::O_DIRECT;

    /// How all its calls are done.
    pub(crate) fn how(&self) -> Flags {
        let mut flags = Flags::empty();
        flags.set(Flags::DIRECT, self.flags & libc::O_DIRECT != 0);
        flags.set(Flags::DSYNC, self.flags & libc::O_DSYNC != 0);
        flags
    }

    /// Attributes are durable too when a write returns.
    pub(crate) fn syncs_all(&self) -> bool {
        self.flags & libc::O_SYNC == libc::O_SYNC
    }
}

/// An open file description: what duplicates of a descriptor share.
pub(crate) struct Description {
    /// Words and calls that have it; 0 when it is free.
    users: AtomicU32,
    /// Set once, by the thread that imports it.
    opened: AtomicPtr<Opened>,
    /// All through the kernel, from now on.
    kernel: AtomicBool,
    /// Held by calls that use it, as the kernel does.
    pub(crate) position: Mutex<Position>,
    /// The position is known to no other process when it is imported.
    pub(crate) private: AtomicBool,
    /// Calls that use the kernel's position at this moment.
    pub(crate) passing: Calls,
}

/// A reference to a description.
pub(crate) struct Use(&'static Description);

impl std::ops::Deref for Use {
    type Target = Description;
    fn deref(&self) -> &Description {
        self.0
    }
}

impl Drop for Use {
    fn drop(&mut self) {
        if self.users.fetch_sub(1, Ordering::AcqRel) != 1 {
            return;
        }
        let opened = self.opened.swap(std::ptr::null_mut(), Ordering::AcqRel);
        if !opened.is_null() {
            // SAFETY: made by `Box::into_raw` in `set_opened`, and taken out by the last user.
            drop(unsafe { Box::from_raw(opened) });
        }
        STATE.free.lock().push(self.0);
    }
}

impl Use {
    /// A new description, not imported yet.
    pub(crate) fn new(private: bool) -> Option<Self> {
        let free = STATE.free.lock().pop();
        let one = match free {
            Some(one) => one,
            None if STATE.made.fetch_add(1, Ordering::Relaxed) < MOST => {
                Box::leak(Box::new(Description {
                    users: AtomicU32::new(0),
                    opened: AtomicPtr::default(),
                    kernel: AtomicBool::new(false),
                    position: Mutex::new(Position::Kernel),
                    private: AtomicBool::new(false),
                    passing: Calls::new(),
                }))
            }
            None => {
                STATE.made.fetch_sub(1, Ordering::Relaxed);
                return None;
            }
        };
        one.kernel.store(false, Ordering::Relaxed);
        one.private.store(private, Ordering::Relaxed);
        one.passing.reset();
        *lock(&one.position) = Position::Kernel;
        one.users.store(1, Ordering::Release);
        Some(Self(one))
    }

    /// One more reference, if it still is in use.
    fn of(one: &'static Description) -> Option<Self> {
        let more = |users| (users > 0).then_some(users + 1);
        one.users
            .fetch_update(Ordering::AcqRel, Ordering::Relaxed, more)
            .ok()
            .map(|_| Self(one))
    }

    /// One more reference to the same description.
    pub(crate) fn again(&self) -> Self {
        self.users.fetch_add(1, Ordering::Relaxed);
        Self(self.0)
    }

    /// The imported file.
    pub(crate) fn opened(&self) -> Option<&Opened> {
        // SAFETY: null, or of `set_opened`, and not freed while this reference counts.
        unsafe { self.opened.load(Ordering::Acquire).as_ref() }
    }

    /// Says what was imported; one importer at a time.
    pub(crate) fn set_opened(&self, opened: Opened) {
        let before = self
            .opened
            .swap(Box::into_raw(Box::new(opened)), Ordering::SeqCst);
        debug_assert!(before.is_null(), "imported once");
    }

    /// Whether all goes through the kernel.
    pub(crate) fn is_kernels(&self) -> bool {
        self.kernel.load(Ordering::Acquire)
    }

    /// All goes through the kernel from now on; false if it did so already.
    pub(crate) fn give_to_kernel(&self) -> bool {
        !self.kernel.swap(true, Ordering::AcqRel)
    }

    fn into_word(self) -> u64 {
        let pointer = std::ptr::from_ref(self.0) as u64;
        std::mem::forget(self);
        debug_assert!(pointer & TAG == 0, "aligned");
        pointer
    }
}

/// The description that a word points to.
fn pointed(word: u64) -> Option<&'static Description> {
    let pointer = word as *const Description;
    match word & TAG == 0 && word != 0 {
        // SAFETY: such words are made by `into_word` alone, and descriptions are never freed.
        true => Some(unsafe { &*pointer }),
        false => None,
    }
}

/// The state of a descriptor.
pub(crate) enum Known {
    /// Leave it to the kernel.
    Foreign,
    /// This library's own.
    Own,
    /// To be looked at: with the word that stands for that, and whether it was opened here.
    Undecided(u64, bool),
    /// It has a description, imported or not.
    Described(Use),
}

/// Whether a descriptor is known to be none of ours: all that most calls have to ask.
#[inline]
pub(crate) fn is_foreign(fd: c_int) -> bool {
    word(fd).is_none_or(|word| {
        let word = word.load(Ordering::Relaxed);
        matches!(word & TAG, FOREIGN | OWN | CLOSING)
    })
}

/// Whether a descriptor has a description that was imported.
#[inline]
pub(crate) fn is_imported(fd: c_int) -> bool {
    word(fd)
        .and_then(|word| pointed(word.load(Ordering::Acquire)))
        .is_some_and(|one| !one.opened.load(Ordering::Relaxed).is_null())
}

/// The state of a descriptor.
pub(crate) fn look(fd: c_int) -> Known {
    let Some(slot) = word(fd) else {
        return Known::Foreign;
    };
    loop {
        let word = slot.load(Ordering::Acquire);
        if let Some(one) = pointed(word) {
            let Some(found) = Use::of(one) else {
                std::hint::spin_loop();
                continue;
            };
            // Still this descriptor's: then it is the right one, however it came there.
            if slot.load(Ordering::Acquire) == word {
                return Known::Described(found);
            }
            continue;
        }
        return match word & TAG {
            FOREIGN | CLOSING => Known::Foreign,
            OWN => Known::Own,
            FRESH => Known::Undecided(word, true),
            _ => Known::Undecided(word, false),
        };
    }
}

/// Decides about a descriptor, unless it has become another one since `word` was read.
pub(crate) fn decide(fd: c_int, seen: u64, decision: Option<Use>) -> bool {
    let Some(slot) = word(fd) else {
        return false;
    };
    saw(fd);
    let new = match decision {
        Some(one) => one.into_word(),
        None => fresh_word(FOREIGN),
    };
    let done = slot
        .compare_exchange(seen, new, Ordering::AcqRel, Ordering::Relaxed)
        .is_ok();
    if !done {
        drop(pointed(new).map(Use));
    }
    done
}

/// Puts a word in the place of another, and takes back that one's reference. Says whether it was a description's.
fn replace(fd: c_int, new: u64) -> bool {
    let Some(slot) = word(fd) else {
        drop(pointed(new).map(Use));
        return false;
    };
    saw(fd);
    crate::traffic::forget(fd);
    let old = slot.swap(new, Ordering::AcqRel);
    // The word's own reference.
    let before = pointed(old).map(Use);
    before.is_some()
}

/// Runs `work`, which asks the kernel by a descriptor's number, unless that is another description's by now. A
/// thread that closes the descriptor waits meanwhile, so `work` must not.
pub(crate) fn while_it_has(fd: c_int, one: &Use, work: impl FnOnce()) {
    let _by_number = STATE.by_number.lock();
    let now = word(fd).and_then(|word| pointed(word.load(Ordering::Acquire)));
    if now.is_some_and(|now| std::ptr::eq(now, one.0)) {
        work();
    }
}

/// A descriptor was opened by this process just now.
pub(crate) fn opened(fd: c_int) {
    if word(fd).is_some() {
        replace(fd, fresh_word(FRESH));
    }
}

/// A descriptor was made some other way.
pub(crate) fn made(fd: c_int) {
    if word(fd).is_some_and(|word| word.load(Ordering::Relaxed) != 0) {
        replace(fd, fresh_word(UNKNOWN));
    }
}

/// A descriptor is none of ours.
pub(crate) fn foreign(fd: c_int) {
    if word(fd).is_some() {
        replace(fd, fresh_word(FOREIGN));
    }
}

/// A number that changes once a descriptor that [`foreign`] was told of has been closed.
pub(crate) fn stamp(fd: c_int) -> Option<u64> {
    word(fd).map(|word| word.load(Ordering::Relaxed))
}

/// A descriptor is this library's own from now on, or no more.
pub(crate) fn own(fd: c_int, is: bool) {
    if word(fd).is_some() {
        replace(fd, fresh_word(if is { OWN } else { UNKNOWN }));
    }
}

/// Keeps the program's closing of descriptors and this library's making of them apart, for 10 ms at most: a close may
/// write its file, and so wait for this library.
pub(crate) struct RaceGuard(&'static AtomicUsize);

impl RaceGuard {
    const LONGEST: Duration = Duration::from_millis(10);

    fn enter(own: &'static AtomicUsize, other: &AtomicUsize, gives_way: bool) -> Self {
        let mut until = None;
        loop {
            own.fetch_add(1, Ordering::SeqCst);
            if other.load(Ordering::SeqCst) == 0 {
                return Self(own);
            }
            let now = Instant::now();
            if now > *until.get_or_insert(now + Self::LONGEST) {
                return Self(own);
            }
            if gives_way {
                own.fetch_sub(1, Ordering::SeqCst);
                std::thread::yield_now();
                continue;
            }
            while other.load(Ordering::SeqCst) != 0 && until.is_some_and(|end| Instant::now() < end)
            {
                std::thread::yield_now();
            }
            return Self(own);
        }
    }

    /// The program closes descriptors, perhaps some that it has not opened.
    pub(crate) fn closes() -> Self {
        Self::enter(&STATE.closing_now, &STATE.making_now, true)
    }

    /// This library makes descriptors, and says later that they are its own.
    pub(crate) fn makes() -> Self {
        Self::enter(&STATE.making_now, &STATE.closing_now, false)
    }
}

impl Drop for RaceGuard {
    fn drop(&mut self) {
        // A child may have begun anew meanwhile.
        let less = |n: usize| n.checked_sub(1);
        let _ = (self.0).fetch_update(Ordering::SeqCst, Ordering::SeqCst, less);
    }
}

/// Whether nothing is known of a descriptor.
pub(crate) fn is_unknown(fd: c_int) -> bool {
    word(fd).is_some_and(|word| {
        let word = word.load(Ordering::Relaxed);
        word == 0 || word & TAG == UNKNOWN
    })
}

/// Whether a descriptor is this library's own.
pub(crate) fn is_own(fd: c_int) -> bool {
    word(fd).is_some_and(|word| word.load(Ordering::Relaxed) & TAG == OWN)
}

/// In a child: they are other processes' threads.
pub(crate) fn forget_races() {
    STATE.closing_now.store(0, Ordering::SeqCst);
    STATE.making_now.store(0, Ordering::SeqCst);
}

/// Closes a descriptor of this library's own; nothing where it is none.
pub(crate) fn close_own(fd: c_int, close: impl FnOnce() -> c_int) -> Option<c_int> {
    let slot = word(fd)?;
    let own = slot.load(Ordering::Acquire);
    if own & TAG != OWN {
        return None;
    }
    // Until it is closed, the program must not; from then on another thread may have the number.
    let done = close();
    let unknown = fresh_word(UNKNOWN);
    let _ = slot.compare_exchange(own, unknown, Ordering::AcqRel, Ordering::Relaxed);
    Some(done)
}

/// A descriptor is a duplicate of something that has a description.
pub(crate) fn duplicate(fd: c_int, of: Use) {
    replace(fd, of.into_word());
}

/// Forgets a descriptor without giving anything back, for where no lock may be taken.
pub(crate) fn abandon(fd: c_int) {
    if let Some(slot) = word(fd) {
        slot.store(fresh_word(UNKNOWN), Ordering::Release);
    }
}

/// As [`abandon`], unless the descriptor is this library's own.
#[cfg(target_arch = "x86_64")]
pub(crate) fn abandon_unless_own(fd: c_int) {
    if !is_own(fd) {
        abandon(fd);
    }
}

/// A descriptor is about to be closed or replaced; nothing is decided about it meanwhile.
pub(crate) struct Closing(c_int, u64);

impl Closing {
    pub(crate) fn begin(fd: c_int) -> Option<Self> {
        let slot = word(fd)?;
        if slot.load(Ordering::Relaxed) == 0 {
            return None;
        }
        let word = fresh_word(CLOSING);
        if replace(fd, word) {
            // A thread that found the description before has done with the number after this.
            drop(STATE.by_number.lock());
        }
        Some(Self(fd, word))
    }
}

impl Drop for Closing {
    fn drop(&mut self) {
        // Unless it was opened again and says something else by now.
        if let Some(slot) = word(self.0) {
            let unknown = fresh_word(UNKNOWN);
            let _ = slot.compare_exchange(self.1, unknown, Ordering::AcqRel, Ordering::Relaxed);
        }
    }
}

/// The descriptors that may have a description.
pub(crate) fn all() -> impl Iterator<Item = c_int> {
    0..STATE.highest.load(Ordering::Relaxed).min(DESCRIPTORS) as c_int
}

/// Descriptors that were opened here may from now on be shared with other processes.
pub(crate) fn no_longer_private(fd: c_int) {
    let Some(slot) = word(fd) else { return };
    let now = slot.load(Ordering::Acquire);
    if now & TAG == FRESH {
        let new = fresh_word(UNKNOWN);
        let _ = slot.compare_exchange(now, new, Ordering::AcqRel, Ordering::Relaxed);
    }
}

/// Keeps other threads from holding this module's locks, for a fork.
pub(crate) struct TableLocks {
    _free: Guard<'static, Vec<&'static Description>, { crate::rank::FREE }>,
    _by_number: Guard<'static, (), { crate::rank::BY_NUMBER }>,
}

/// Waits for the threads that hold this module's locks.
pub(crate) fn hold() -> TableLocks {
    // In the order of their ranks.
    let by_number = STATE.by_number.lock();
    TableLocks {
        _free: STATE.free.lock(),
        _by_number: by_number,
    }
}

/// In a child process that has this one thread: what was imported is the parent's. Nothing of it is
/// dropped here, as that would end the parent's use of it; positions are the kernel's by now.
pub(crate) fn forget_all() {
    for fd in all() {
        let Some(slot) = word(fd) else { continue };
        crate::traffic::forget(fd);
        let now = slot.load(Ordering::Relaxed);
        if pointed(now).is_some() || now & TAG == OWN || now & TAG == FRESH {
            slot.store(0, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests;
