//! Asynchronous I/O: the functions of libaio.
//!
//! A context stays the kernel's, and what isn't served here goes on to it. A served request ends here,
//! in a list of its own beside the kernel's ring; io_getevents(2) takes from both. To wait for both
//! it sleeps in the kernel's own call, so that timeouts, signals and masks mean what they mean, with
//! a *bell* among the context's requests: a poll of an eventfd, which rings when something served
//! has ended.
//!
//! Programs may look into the kernel's ring instead of asking, and would not find there what was
//! served. So a context is served only once the program has asked for its events by libaio; and
//! system calls made by syscall(2) are left to the kernel, as their callers may look first.
//!
//! As with the kernel, only direct I/O that doesn't make a file longer goes on behind the program's
//! back; the rest is done when io_submit(2) returns.

/// As libaio's functions answer: the number, or a negative errno. errno is left alone.
macro_rules! kernel {
    ($number:ident $(, $arg:expr)*) => {{
        let before = errno();
        // SAFETY: the caller's own arguments, or this module's.
        let done = unsafe { crate::real::syscall()($number $(, $arg)*) };
        match done {
            -1 => {
                let code = errno();
                set_errno(before);
                -code
            }
            done => done as c_int,
        }
    }};
}

mod call;
mod events;
mod own;

use std::collections::VecDeque;
use std::ffi::{c_int, c_long, c_void};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use libc::{SYS_io_destroy, SYS_io_setup, SYS_io_submit};
use uvfs_client::Driver;
use uvfs_sys::aio::{FDSYNC, FSYNC, POLL, PREAD, PREADV, PWRITE, PWRITEV, RESFD};
pub(crate) use uvfs_sys::aio::{IoEvent as Event, Iocb};

use crate::args::{flags_of, is_plausible, vectors};
use crate::guard::aside;
use crate::import::{self, Wants, described};
use crate::promotion::Moves;
use crate::ranked::{Guard, Ranked};
use crate::real::{errno, set_errno};
use crate::signals;
use crate::table;
use call::Call;
use events::events;
use own::Own;
use uvfs_sys::lock;

/// `struct aio_ring` of the kernel's fs/aio.c, which libaio looks into as well.
const RING_NR: usize = 4;
const RING_HEAD: usize = 8;
const RING_TAIL: usize = 12;
const RING_MAGIC: usize = 16;
const MAGIC: u32 = 0xa10a_10a1;

/// The libc crate does not have it on every machine.
#[cfg(target_arch = "x86_64")]
#[allow(non_upper_case_globals)] // As C has it.
const SYS_io_pgetevents: c_long = 333;
#[cfg(not(target_arch = "x86_64"))]
#[allow(non_upper_case_globals)]
const SYS_io_pgetevents: c_long = 292;

/// Contexts that are known at a time; with more, the kernel has the others alone.
const CONTEXTS_MOST: usize = 256;
/// Eventfds that one context tells of what ended.
const NOTICES: usize = 16;
/// This library's descriptors have numbers from here on.
const HIGH: c_int = 500;

/// The state of this module.
struct Contexts {
    contexts: Ranked<Vec<Arc<Context>>, { crate::rank::CONTEXTS }>,
    /// Set for good when nothing is served any more.
    over: AtomicBool,
}

static STATE: Contexts = Contexts {
    contexts: Ranked::new(Vec::new()),
    over: AtomicBool::new(false),
};

/// An eventfd of the program's that is told when something ends.
struct Notice {
    fd: c_int,
    /// Another one when `fd` was closed.
    stamp: u64,
    /// A duplicate, as the program may close its own before.
    eventfd: Own,
}

/// The aio context that the program has from the kernel.
pub(crate) struct Context {
    /// Where its ring is mapped.
    ring: usize,
    /// Requests that are served at a time.
    limit: usize,
    /// The bell, from a box; the kernel writes to it when it is submitted.
    bell: usize,
    state: Mutex<ContextState>,
    /// Nothing is under way.
    quiet: Condvar,
}

#[derive(Default)]
struct ContextState {
    under_way: usize,
    ended: VecDeque<(Arc<Call>, Result<usize, c_int>)>,
    /// Threads that sleep in the kernel's call.
    waiters: usize,
    /// The bell's eventfd, while the bell is among the kernel's requests.
    bell: Option<Own>,
    armed: bool,
    rung: bool,
    notices: Vec<Notice>,
    /// Of what was begun last.
    driver: Option<Driver>,
}

impl Context {
    fn at(&self, offset: usize) -> u32 {
        // SAFETY: the ring is mapped while the context lives, which the kernel confirmed when this
        // was made; the kernel and other threads change it.
        unsafe { AtomicU32::from_ptr((self.ring + offset) as *mut u32) }.load(Ordering::Acquire)
    }

    /// Whether the kernel has something for us.
    fn kernel_has_events(&self) -> bool {
        self.at(RING_HEAD) != self.at(RING_TAIL)
    }

    fn is_bell(&self, event: &Event) -> bool {
        event.obj == self.bell as u64
    }

    /// Puts the bell among the kernel's requests, unless it is there.
    fn arm(&self, state: &mut ContextState) -> bool {
        if state.armed {
            return true;
        }
        if state.bell.is_none() {
            state.bell = Own::eventfd();
        }
        let Some(bell) = &state.bell else {
            return false;
        };
        if std::mem::take(&mut state.rung) {
            bell.clear();
        }
        let request = self.bell as *mut Iocb;
        // SAFETY: from a box that lives as long as this, and used under the state's lock. The kernel
        // looks at a request only while it is submitted.
        unsafe { (*request).fd = bell.0 as u32 };
        let list = [request];
        state.armed = kernel!(SYS_io_submit, self.ring, 1, list.as_ptr()) == 1;
        state.armed
    }

    fn ring_bell(state: &mut ContextState) {
        if state.waiters > 0
            && !state.rung
            && let Some(bell) = &state.bell
        {
            state.rung = true;
            bell.add();
        }
    }

    /// A served request has ended.
    fn ended(&self, call: Arc<Call>, result: Result<usize, c_int>) {
        let notice = call.notice;
        let mut state = lock(&self.state);
        state.under_way -= 1;
        state.ended.push_back((call, result));
        Self::ring_bell(&mut state);
        if let Some(stamp) = notice
            && let Some(notice) = state.notices.iter().find(|one| one.stamp == stamp)
        {
            notice.eventfd.add();
        }
        let quiet = state.under_way == 0;
        drop(state);
        if quiet {
            self.quiet.notify_all();
        }
    }

    /// Waits until nothing that is served is under way.
    fn settle(&self) {
        let mut state = lock(&self.state);
        while state.under_way > 0 {
            let driver = state.driver.clone();
            drop(state);
            if let Some(driver) = driver {
                driver.drive(|| lock(&self.state).under_way == 0);
            }
            state = lock(&self.state);
            if state.under_way > 0 {
                let wait = Duration::from_millis(10);
                let waited = self.quiet.wait_timeout(state, wait);
                state = waited.unwrap_or_else(|poisoned| poisoned.into_inner()).0;
            }
        }
    }

    /// Takes what has ended, and waits a little for `least` while something is under way.
    fn take(&self, events: &mut [Event], least: usize) -> usize {
        let mut taken = 0;
        for round in 0..2 {
            let mut state = lock(&self.state);
            while taken < events.len()
                && let Some((call, result)) = state.ended.pop_front()
            {
                drop(state);
                events[taken] = call.event(result);
                taken += 1;
                state = lock(&self.state);
            }
            if round == 1 || taken == events.len() || taken >= least.max(1) || state.under_way == 0
            {
                break;
            }
            let driver = state.driver.clone();
            drop(state);
            if let Some(driver) = driver {
                let began = Instant::now();
                driver.drive(|| {
                    let ended = lock(&self.state).ended.len();
                    least == 0 || taken + ended >= least || signals::any_deferred()
                });
                driver.waited(began.elapsed());
            }
        }
        taken
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: made by `Box::into_raw` in `known`, and the kernel doesn't look at it any more.
        drop(unsafe { Box::from_raw(self.bell as *mut Iocb) });
    }
}

/// The context of a ring; remembered now, `if_new`.
fn known(ring: usize, if_new: bool) -> Option<Arc<Context>> {
    let mut contexts = STATE.contexts.lock();
    if let Some(one) = contexts.iter().find(|one| one.ring == ring) {
        return Some(one.clone());
    }
    if !if_new || contexts.len() == CONTEXTS_MOST || !ring.is_multiple_of(align_of::<u32>()) {
        return None;
    }
    // Nothing to do, on a context that the kernel knows.
    if kernel!(SYS_io_submit, ring, 0, std::ptr::null::<*mut Iocb>()) != 0 {
        return None;
    }
    let bell = Box::new(Iocb {
        opcode: POLL,
        buf: libc::POLLIN as u64,
        // SAFETY: plain data.
        ..unsafe { std::mem::zeroed() }
    });
    let mut one = Context {
        ring,
        limit: 0,
        bell: Box::into_raw(bell) as usize,
        state: Mutex::default(),
        quiet: Condvar::new(),
    };
    if one.at(RING_MAGIC) != MAGIC {
        return None;
    }
    one.limit = one.at(RING_NR).saturating_sub(1) as usize;
    let one = Arc::new(one);
    contexts.push(one.clone());
    Some(one)
}

/// The call that serves a request; nothing for what the kernel is to do, or to refuse.
///
/// # Safety
/// As for io_submit(2).
unsafe fn served(context: &Arc<Context>, at: *const Iocb) -> Option<Call> {
    if !is_plausible(at.cast(), size_of::<Iocb>()) {
        return None;
    }
    // SAFETY: the program's request.
    let request = unsafe { at.read() };
    let fd = c_int::try_from(request.fd).ok()?;
    if table::is_foreign(fd) || request.reserved != 0 || request.flags & !RESFD != 0 {
        return None;
    }
    let flags = flags_of(request.rw_flags)?;
    let buffers = match request.opcode {
        PREAD | PWRITE => {
            let one = libc::iovec {
                iov_base: request.buf as *mut c_void,
                iov_len: usize::try_from(request.len).ok()?,
            };
            // SAFETY: one buffer.
            unsafe { vectors(&one, 1) }?
        }
        PREADV | PWRITEV => {
            let count = c_int::try_from(request.len).ok()?;
            // SAFETY: the program's list.
            unsafe { vectors(request.buf as *const libc::iovec, count) }?
        }
        FSYNC | FDSYNC if request.rw_flags == 0 => Vec::new(),
        _ => return None,
    };
    let moves = !matches!(request.opcode, FSYNC | FDSYNC);
    let len: usize = buffers.iter().map(|buffer| buffer.1).sum();
    let offset = u64::try_from(request.offset).ok()?;
    if moves && (len == 0 || offset.checked_add(len as u64)? > i64::MAX as u64) {
        return None;
    }
    let wants = match request.opcode {
        PREAD | PREADV => Wants::File(Moves::Read(len)),
        PWRITE | PWRITEV => Wants::File(Moves::Write(len)),
        _ => Wants::Imported,
    };
    if !import::may_serve(fd, wants) {
        return None;
    }
    let one = described(fd, wants)?;
    let opened = one.opened()?;
    let refusing = match request.opcode {
        PREAD | PREADV => libc::O_WRONLY,
        _ => libc::O_RDONLY,
    };
    if moves && opened.flags & libc::O_ACCMODE == refusing {
        return None;
    }
    // The kernel appends, whatever the place.
    if matches!(wants, Wants::File(Moves::Write(_))) && opened.flags & libc::O_APPEND != 0 {
        return None;
    }
    let flags = flags | opened.how();
    let notice = match request.flags & RESFD != 0 {
        true => Some(notice(context, c_int::try_from(request.resfd).ok()?)?),
        false => None,
    };
    let buffers = buffers.iter().map(|&(at, len)| (at as usize, len));
    Some(Call {
        context: context.clone(),
        data: request.data,
        obj: at as u64,
        opcode: request.opcode,
        fd,
        one,
        buffers: buffers.collect(),
        offset,
        flags,
        notice,
    })
}

/// The stamp of a program's eventfd; `None` for another file, which the kernel refuses.
fn notice(context: &Context, fd: c_int) -> Option<u64> {
    let mut state = lock(&context.state);
    let stamp = table::stamp(fd)?;
    let known = |one: &Notice| (one.fd, one.stamp) == (fd, stamp);
    if state.notices.iter().any(known) {
        return Some(stamp);
    }
    let link = std::fs::read_link(format!("/proc/self/fd/{fd}")).ok()?;
    if link.as_os_str() != "anon_inode:[eventfd]" {
        return None;
    }
    let eventfd = Own::high(fd)?;
    // From now on a close of it changes the stamp.
    table::foreign(fd);
    let stamp = table::stamp(fd)?;
    if state.under_way == 0 {
        let same = |one: &Notice| table::stamp(one.fd) == Some(one.stamp);
        state.notices.retain(same);
    }
    if state.notices.len() == NOTICES {
        return None;
    }
    state.notices.push(Notice { fd, stamp, eventfd });
    Some(stamp)
}

/// io_submit(2).
///
/// # Safety
/// As for that.
unsafe fn submit(ring: usize, count: c_long, list: *const *mut Iocb) -> c_int {
    let ready = import::is_ready() && !STATE.over.load(Ordering::Relaxed);
    let work = || {
        let context = known(ring, false)?;
        let count = usize::try_from(count).ok()?.min(context.limit);
        if !is_plausible(list.cast(), count * size_of::<*mut Iocb>()) {
            return None;
        }
        // The calls before `from` are submitted, and the calls up to `to` are the kernel's.
        let kernel = |from: usize, to: usize| {
            // SAFETY: a part of the program's list.
            let list = unsafe { list.add(from) };
            let done = kernel!(SYS_io_submit, ring, to - from, list);
            match usize::try_from(done) {
                Ok(done) if from + done == to => Ok(()),
                Ok(done) => Err((from + done) as c_int),
                Err(_) if from > 0 => Err(from as c_int),
                Err(_) => Err(done),
            }
        };
        let mut from = 0;
        for index in 0..count {
            // SAFETY: the program's list has `count` entries.
            let at = unsafe { list.add(index).read() };
            // SAFETY: the caller's duty.
            let Some(call) = (unsafe { served(&context, at) }) else {
                continue;
            };
            if index > from
                && let Err(done) = kernel(from, index)
            {
                return Some(done);
            }
            from = index;
            let one = call.one.again();
            let Some(opened) = one.opened() else {
                continue;
            };
            let mut state = lock(&context.state);
            if state.waiters > 0 && !state.armed {
                // A thread sleeps without a bell: this request is the kernel's as well.
                continue;
            }
            if state.under_way + state.ended.len() >= context.limit {
                return Some(if from > 0 {
                    from as c_int
                } else {
                    -libc::EAGAIN
                });
            }
            state.under_way += 1;
            let driver = opened.file.driver();
            if !state.driver.as_ref().is_some_and(|one| one.is(&driver)) {
                state.driver = Some(driver);
            }
            drop(state);
            Arc::new(call).begin(opened);
            from = index + 1;
        }
        if from < count
            && let Err(done) = kernel(from, count)
        {
            return Some(done);
        }
        Some(count as c_int)
    };
    let done = if ready && count > 0 {
        aside(work).flatten()
    } else {
        None
    };
    done.unwrap_or_else(|| kernel!(SYS_io_submit, ring, count, list))
}

/// io_setup(2).
///
/// # Safety
/// As for that.
unsafe fn setup(count: c_int, to: *mut usize) -> c_int {
    let done = kernel!(SYS_io_setup, count, to);
    if done == 0 {
        // SAFETY: the kernel has just written there.
        let ring = unsafe { *to };
        aside(|| forget(ring));
    }
    done
}

/// io_destroy(2), which waits for what is under way.
fn destroy(ring: usize) -> c_int {
    aside(|| forget(ring));
    kernel!(SYS_io_destroy, ring)
}

/// A context ends, or another one begins in its place.
fn forget(ring: usize) {
    let one = {
        let mut contexts = STATE.contexts.lock();
        let index = contexts.iter().position(|one| one.ring == ring);
        index.map(|index| contexts.swap_remove(index))
    };
    if let Some(one) = one {
        one.settle();
    }
}

/// Waits until nothing that is served is under way.
pub(crate) fn settle() {
    let contexts = STATE.contexts.lock().clone();
    contexts.iter().for_each(|one| one.settle());
}

/// Nothing is served from now on.
pub(crate) fn leave() {
    STATE.over.store(true, Ordering::Relaxed);
    settle();
    for one in STATE.contexts.lock().iter() {
        let mut state = lock(&one.state);
        Context::ring_bell(&mut state);
        state.notices.clear();
        state.bell = None;
    }
}

/// This module's lock.
pub(crate) type ContextsLock = Guard<'static, Vec<Arc<Context>>, { crate::rank::CONTEXTS }>;

/// Keeps other threads from it, for a fork.
pub(crate) fn hold() -> ContextsLock {
    STATE.contexts.lock()
}

/// In a child: contexts are not inherited.
pub(crate) fn child(mut contexts: ContextsLock) {
    for one in std::mem::take(&mut *contexts) {
        if let Ok(mut state) = one.state.try_lock() {
            state.notices.clear();
            state.bell = None;
        }
        // Calls under way are the parent's.
        std::mem::forget(one);
    }
}

#[cfg(not(test))]
mod exported;
