//! Functions under the names by which programs know them. Of the two that some have under one name,
//! these are the newer ones (LIBAIO_0.4).

use libc::timespec;
use std::ffi::{c_int, c_long, c_void};
use std::sync::OnceLock;

use super::*;
use crate::real::Next;

/// Whether the next definition of a name is libaio's: others have functions called so as well.
fn is_libaio() -> bool {
    static IS: OnceLock<bool> = OnceLock::new();
    *IS.get_or_init(|| {
        let (name, version) = (c"io_submit".as_ptr(), c"LIBAIO_0.1".as_ptr());
        // SAFETY: both are strings.
        !unsafe { libc::dlvsym(libc::RTLD_NEXT, name, version) }.is_null()
    })
}

macro_rules! libaio {
        ($($name:ident($($arg:ident: $type:ty),*) = $served:expr;)*) => {
            $(
                /// As libaio has it: the result, or a negative errno.
                ///
                /// # Safety
                /// As the system call.
                #[unsafe(no_mangle)]
                pub unsafe extern "C" fn $name($($arg: $type),*) -> c_int {
                    static NEXT: Next = Next::new(concat!(stringify!($name), "\0"));
                    if !is_libaio() && !NEXT.get().is_null() {
                        type Call = unsafe extern "C" fn($($type),*) -> c_int;
                        // SAFETY: a function; its arguments are in the registers of these.
                        let next = unsafe { std::mem::transmute::<*mut c_void, Call>(NEXT.get()) };
                        // SAFETY: the caller's duty.
                        return unsafe { next($($arg),*) };
                    }
                    // SAFETY: the caller's duty.
                    #[allow(unused_unsafe)]
                    let done = unsafe { $served };
                    done
                }
            )*
        };
    }

libaio! {
    io_setup(count: c_int, to: *mut usize) = setup(count, to);
    io_destroy(ring: usize) = destroy(ring);
    io_submit(ring: usize, count: c_long, list: *const *mut Iocb) = submit(ring, count, list);
    io_getevents(ring: usize, least: c_long, most: c_long, to: *mut Event,
        timeout: *const timespec) = events(ring, least, most, to, timeout, std::ptr::null());
    io_pgetevents(ring: usize, least: c_long, most: c_long, to: *mut Event,
        timeout: *const timespec, mask: *const libc::sigset_t) =
        events(ring, least, most, to, timeout, mask);
}
