//! Ways to a function of the C library that don't lead by this one.

use std::arch::naked_asm;
use std::ffi::{c_char, c_void};
use std::sync::OnceLock;

use super::start;

type Look = unsafe extern "C" fn(*mut c_void, *const c_char) -> *mut c_void;

/// The dynamic linker's dlsym(3). It looks at the caller, so this library's own dlsym jumps to it.
fn real() -> *mut c_void {
    static REAL: OnceLock<usize> = OnceLock::new();
    let found = REAL.get_or_init(|| {
        let versions = [c"GLIBC_2.34", c"GLIBC_2.2.5"];
        let found = versions.map(|version| {
            // SAFETY: C strings.
            let found =
                unsafe { libc::dlvsym(libc::RTLD_NEXT, c"dlsym".as_ptr(), version.as_ptr()) };
            found as usize
        });
        found.into_iter().find(|found| *found != 0).unwrap_or(0)
    });
    *found as *mut c_void
}

/// A handle of this library.
fn own() -> *mut c_void {
    static OWN: OnceLock<usize> = OnceLock::new();
    let found = OWN.get_or_init(|| {
        // SAFETY: plain data, filled by the call.
        let mut info: libc::Dl_info = unsafe { std::mem::zeroed() };
        // SAFETY: an address of this library, and room.
        if unsafe { libc::dladdr(own as *const () as *const c_void, &mut info) } == 0 {
            return 0;
        }
        // SAFETY: the linker's own name of it. It is loaded already.
        unsafe { libc::dlopen(info.dli_fname, libc::RTLD_LAZY | libc::RTLD_NOLOAD) as usize }
    });
    *found as *mut c_void
}

/// dlsym(3) of a library's handle: where it finds a function of the C library that this library stands in front
/// of, the program gets this library's.
unsafe extern "C" fn through_handle(handle: *mut c_void, name: *const c_char) -> *mut c_void {
    // SAFETY: the function.
    let look = unsafe { std::mem::transmute::<*mut c_void, Look>(real()) };
    // SAFETY: the caller's own arguments.
    let found = unsafe { look(handle, name) };
    let is_c_library = start::text().is_some_and(|text| text.contains(&(found as usize)));
    if !is_c_library || own().is_null() {
        return found;
    }
    // Else it finds what this library uses itself: the same.
    // SAFETY: as above, with a handle that stays.
    let front = unsafe { look(own(), name) };
    if front.is_null() { found } else { front }
}

extern "C" fn before_dlsym(handle: *mut c_void) -> *mut c_void {
    match handle == libc::RTLD_NEXT || handle == libc::RTLD_DEFAULT {
        true => real(),
        false => through_handle as *const () as *mut c_void,
    }
}

/// As the manual says.
///
/// # Safety
/// As the manual says.
#[unsafe(no_mangle)]
#[unsafe(naked)]
pub unsafe extern "C" fn dlsym(handle: *mut c_void, name: *const c_char) -> *mut c_void {
    naked_asm!(
        "push rdi", "push rsi",
        "sub rsp, 8",
        "call {hook}",
        "add rsp, 8",
        "pop rsi", "pop rdi",
        "jmp rax",
        hook = sym before_dlsym,
    );
}
