//! Functions by which a program makes system calls of its choice, under the names by which it knows them.

use std::ffi::{c_int, c_long};

use super::verdict::{Verdict, verdict};
use super::{OFF, Why, fall_back, is_over, mode, trap};
use crate::real::{exports, is_borrowed, is_inside, set_errno};

exports! {
    /// C passes it as many arguments as the call has.
    #[allow(clippy::too_many_arguments)] // As many as C has.
    fn syscall(number: c_long, a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) -> c_long {
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
        let done = unsafe { next(number, a, b, c, d, e, f) };
        trap::ran(judged, done as isize);
        done
    }

    fn prctl(option: c_int, a: usize, b: usize, c: usize, d: usize) -> c_int {
        const PR_SET_SYSCALL_USER_DISPATCH: c_int = 59;
        if option == PR_SET_SYSCALL_USER_DISPATCH || option == libc::PR_SET_SECCOMP {
            fall_back(Why::Signals);
        }
        // SAFETY: the caller's own arguments.
        unsafe { next(option, a, b, c, d) }
    }
}
