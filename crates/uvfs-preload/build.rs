//! How the preloaded library and the command (which has a link to this file) are linked. `uvfs run` pays for
//! every page and every library that a program touches before its first line.

use std::ffi::{CStr, c_char};
use std::path::PathBuf;
use std::{env, fs, io};

fn main() -> io::Result<()> {
    println!("cargo:rerun-if-changed=build.rs");
    // Only where the linker is surely one that knows scripts, and the C compiler is gcc or uses its
    // libraries.
    if env::var("CARGO_CFG_TARGET_ENV").as_deref() != Ok("gnu") {
        return Ok(());
    }
    // The unwinder is linked statically: loading libgcc_s.so takes more of a short program's time than
    // everything else that the library does at its start (0.12 of 0.27 ms), and most programs have no
    // other use for it. The standard library's `-lgcc_s` finds this file first.
    let dir = PathBuf::from(env::var_os("OUT_DIR").expect("cargo says where"));
    fs::write(dir.join("libgcc_s.so"), "GROUP ( -lgcc_eh -lgcc )\n")?;
    println!("cargo:rustc-link-search=native={}", dir.display());
    // Relocations as a bitmap: the command has 11,000, which take 260 KiB as a table.
    if env::var("HOST") == env::var("TARGET") && glibc() >= (2, 36) {
        println!("cargo:rustc-link-arg=-Wl,-z,pack-relative-relocs");
    }
    Ok(())
}

/// The version of the C library of the machine that builds. 2.36 is the first that reads such a bitmap.
#[cfg(target_env = "gnu")]
fn glibc() -> (u32, u32) {
    unsafe extern "C" {
        safe fn gnu_get_libc_version() -> *const c_char;
    }
    // SAFETY: the C library returns a string of its own that is never freed.
    let version = unsafe { CStr::from_ptr(gnu_get_libc_version()) };
    let version = version.to_string_lossy();
    let mut parts = version.split('.').map(|part| part.parse().unwrap_or(0));
    (parts.next().unwrap_or(0), parts.next().unwrap_or(0))
}

#[cfg(not(target_env = "gnu"))]
fn glibc() -> (u32, u32) {
    (0, 0)
}
