//! Functions by which a program makes system calls of its choice, under the names by which it knows them.

use std::ffi::{CStr, c_int, c_long, c_void};

use super::verdict::{Verdict, verdict};
use super::{OFF, Why, fall_back, is_over, mode, trap};
use crate::real::{Next, is_borrowed, is_inside, next, set_errno};

mod next {
    use super::*;

    next! {
        syscall(number: c_long, a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) -> c_long;
        prctl(option: c_int, a: usize, b: usize, c: usize, d: usize) -> c_int;
    }
}

/// As the manual says. C passes it as many arguments as the call has.
///
/// # Safety
/// As the manual says.
#[unsafe(no_mangle)]
#[allow(clippy::too_many_arguments)] // As many as C has.
pub unsafe extern "C" fn syscall(
    number: c_long,
    a: usize,
    b: usize,
    c: usize,
    d: usize,
    e: usize,
    f: usize,
) -> c_long {
    let mut judged = Verdict::Pass;
    if !is_over() && !is_inside() && !is_borrowed() {
        judged = verdict(number as usize, &[a, b, c, d, e, f]);
        // Before anything is served, only what lasts counts.
        if (mode() != OFF || judged == Verdict::Aside(Why::Ring))
            && let Err(done) = trap::prepare(number as usize, judged)
        {
            return match done {
                0.. => done as c_long,
                _ => {
                    set_errno(-done as c_int);
                    -1
                }
            };
        }
    }
    // SAFETY: the caller's own arguments.
    let done = unsafe { next::syscall(number, a, b, c, d, e, f) };
    trap::ran(judged, done as isize);
    done
}

/// As the manual says.
///
/// # Safety
/// As the manual says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn prctl(option: c_int, a: usize, b: usize, c: usize, d: usize) -> c_int {
    const PR_SET_SYSCALL_USER_DISPATCH: c_int = 59;
    if option == PR_SET_SYSCALL_USER_DISPATCH || option == libc::PR_SET_SECCOMP {
        fall_back(Why::Signals);
    }
    // SAFETY: the caller's own arguments.
    unsafe { next::prctl(option, a, b, c, d) }
}
