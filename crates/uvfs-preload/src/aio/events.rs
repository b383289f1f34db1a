//! io_getevents: completions from this library and from the kernel.

use crate::args::is_plausible;
use crate::guard::aside;
use crate::import::{self};
use crate::real::{errno, set_errno};
use crate::signals;
use libc::{SYS_io_getevents, timespec};
use std::ffi::{c_int, c_long};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use uvfs_sys::lock;

use super::{Context, Event, STATE, SYS_io_pgetevents, known};

/// The kernel's io_getevents(2), or with a mask io_pgetevents(2).
///
/// # Safety
/// As for those.
unsafe fn kernel_events(
    ring: usize,
    least: c_long,
    (events, most): (*mut Event, c_long),
    timeout: *const timespec,
    mask: *const libc::sigset_t,
) -> c_int {
    /// `struct __aio_sigset`, with the size of the kernel's signal sets.
    #[repr(C)]
    struct Mask(*const libc::sigset_t, usize);
    if mask.is_null() {
        return kernel!(SYS_io_getevents, ring, least, most, events, timeout);
    }
    let mask = Mask(mask, 8);
    kernel!(SYS_io_pgetevents, ring, least, most, events, timeout, &mask)
}

/// How to wait for events.
enum Sleep {
    /// Not yet: something has ended.
    Not,
    /// With the bell; and whether something served is under way.
    Armed(bool),
    /// For the kernel's alone, as nothing can be served meanwhile.
    Plain,
    /// A moment only: the context is full of the kernel's requests.
    Short,
}

impl Context {
    fn before_sleep(&self) -> Sleep {
        let mut state = lock(&self.state);
        if !state.ended.is_empty() {
            return Sleep::Not;
        }
        let armed = import::any() && !STATE.over.load(Ordering::Relaxed) && self.arm(&mut state);
        if !armed && state.under_way > 0 {
            return Sleep::Short;
        }
        state.waiters += 1;
        match armed {
            true => Sleep::Armed(state.under_way > 0),
            false => Sleep::Plain,
        }
    }

    /// Takes the bell out of what the kernel gave.
    fn without_bell(&self, events: &mut [Event]) -> usize {
        let Some(index) = events.iter().position(|event| self.is_bell(event)) else {
            return events.len();
        };
        events.copy_within(index + 1.., index);
        aside(|| {
            let mut state = lock(&self.state);
            state.armed = false;
            // It may have been rung for other threads, which sleep still.
            if state.waiters > 0 && self.arm(&mut state) && !state.ended.is_empty() {
                Self::ring_bell(&mut state);
            }
        });
        events.len() - 1
    }

    /// Waits for events, `least` of them at least: see io_getevents(2).
    ///
    /// # Safety
    /// `mask` is null or a signal set.
    unsafe fn events(
        &self,
        least: usize,
        events: &mut [Event],
        time: Option<Duration>,
        mask: *const libc::sigset_t,
    ) -> c_int {
        const NOW: timespec = timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        let deadline = time.and_then(|time| Instant::now().checked_add(time));
        let nonblocking = least == 0 || time.is_some_and(|time| time.is_zero());
        let mut got = 0;
        let place = |room: &mut [Event]| (room.as_mut_ptr(), room.len() as c_long);
        let part = |got: usize, code: c_int| if got > 0 { got as c_int } else { code };
        loop {
            let took = aside(|| {
                let wanted = if nonblocking { 0 } else { least - got };
                let took = self.take(&mut events[got..], wanted);
                (took, signals::any_deferred())
            });
            let (took, interrupted) = took.unwrap_or_default();
            got += took;
            if got < events.len() && self.kernel_has_events() {
                let room = &mut events[got..];
                // SAFETY: without a mask.
                let n = unsafe { kernel_events(self.ring, 0, place(room), &NOW, std::ptr::null()) };
                if n < 0 {
                    return part(got, n);
                }
                got += self.without_bell(&mut room[..n as usize]);
            }
            let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            if got >= least || nonblocking || left.is_some_and(|left| left.is_zero()) {
                return got as c_int;
            }
            if interrupted {
                return part(got, -libc::EINTR);
            }
            let (wanted, ours) = match aside(|| self.before_sleep()) {
                Some(Sleep::Not) => continue,
                Some(Sleep::Armed(ours)) => (1, ours),
                Some(Sleep::Plain) => (least - got, false),
                Some(Sleep::Short) | None => {
                    std::thread::sleep(Duration::from_micros(200));
                    continue;
                }
            };
            let time = left.map(|left| timespec {
                tv_sec: left.as_secs() as _,
                tv_nsec: left.subsec_nanos() as _,
            });
            let time = time.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
            let room = &mut events[got..];
            let began = Instant::now();
            // SAFETY: the caller's mask.
            let n = unsafe { kernel_events(self.ring, wanted as c_long, place(room), time, mask) };
            aside(|| {
                let mut state = lock(&self.state);
                state.waiters -= 1;
                if let (true, Some(driver)) = (ours, &state.driver) {
                    driver.waited(began.elapsed());
                }
            });
            if n < 0 {
                return part(got, n);
            }
            got += self.without_bell(&mut room[..n as usize]);
        }
    }
}

/// io_getevents(2) and io_pgetevents(2).
///
/// # Safety
/// As for those.
pub(super) unsafe fn events(
    ring: usize,
    least: c_long,
    most: c_long,
    events: *mut Event,
    timeout: *const timespec,
    mask: *const libc::sigset_t,
) -> c_int {
    let valid = |time: &timespec| time.tv_sec >= 0 && (0..1_000_000_000).contains(&time.tv_nsec);
    let known = || {
        let (least, most) = (usize::try_from(least).ok()?, usize::try_from(most).ok()?);
        if most == 0
            || least > most
            || !import::is_ready()
            || !is_plausible(events.cast(), most.saturating_mul(size_of::<Event>()))
        {
            return None;
        }
        // SAFETY: the caller's, or null.
        let time = unsafe { timeout.as_ref() };
        if !time.is_none_or(valid) {
            return None;
        }
        let time = time.map(|time| Duration::new(time.tv_sec as u64, time.tv_nsec as u32));
        let context = aside(|| known(ring, true)).flatten()?;
        Some((context, least, most, time))
    };
    let Some((context, least, most, time)) = known() else {
        // SAFETY: the caller's own arguments.
        return unsafe { kernel_events(ring, least, (events, most), timeout, mask) };
    };
    // SAFETY: the program's room, which it has nothing in that it could want.
    let room = unsafe { std::slice::from_raw_parts_mut(events, most) };
    // SAFETY: the caller's duty.
    unsafe { context.events(least, room, time, mask) }
}
