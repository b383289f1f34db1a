//! How often bytes are copied, counted where they move: this program has its own memcpy and memmove, which
//! the client, the server in the same process and the standard library all call.

#[path = "client/common/mod.rs"]
mod common;

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use uvfs_client::{Client, Config, Connection, Flags};
use uvfs_server::{ClientLimits, in_process};

use common::{rw, session};

const MIB: usize = 1 << 20;
/// Smaller copies are of names, headers and structures.
const LARGE: usize = 512;

static COPIED: AtomicU64 = AtomicU64::new(0);

fn count(len: usize) {
    if len >= LARGE {
        COPIED.fetch_add(len as u64, Ordering::Relaxed);
    }
}

/// Bytes by themselves, as a loop that copies may become a call of memcpy.
#[inline]
unsafe fn forwards(to: *mut u8, from: *const u8, len: usize) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: as the caller says; the direction flag is clear by the ABI.
    unsafe {
        std::arch::asm!("rep movsb", inout("rcx") len => _, inout("rdi") to => _, inout("rsi") from => _,
            options(nostack, preserves_flags));
    }
    #[cfg(not(target_arch = "x86_64"))]
    for at in 0..len {
        // SAFETY: as the caller says.
        unsafe { to.add(at).write_volatile(from.add(at).read_volatile()) }
    }
}

/// As memcpy(3).
///
/// # Safety
/// As memcpy(3).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn memcpy(to: *mut u8, from: *const u8, len: usize) -> *mut u8 {
    count(len);
    // SAFETY: the caller's ranges.
    unsafe { forwards(to, from, len) };
    to
}

/// As memmove(3).
///
/// # Safety
/// As memmove(3).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn memmove(to: *mut u8, from: *const u8, len: usize) -> *mut u8 {
    count(len);
    if (to as usize).wrapping_sub(from as usize) >= len {
        // SAFETY: the caller's ranges; what is written was read already.
        unsafe { forwards(to, from, len) };
    } else {
        for at in (0..len).rev() {
            // SAFETY: the caller's ranges.
            unsafe { to.add(at).write_volatile(from.add(at).read_volatile()) }
        }
    }
    to
}

/// How many MiB `work` copies. Structures are large as well, above all in unoptimized programs.
fn copies(work: impl FnOnce()) -> u64 {
    let before = COPIED.load(Ordering::SeqCst);
    work();
    let copied = COPIED.load(Ordering::SeqCst) - before;
    assert!(copied % MIB as u64 <= 512 << 10, "{copied} bytes");
    copied / MIB as u64
}

fn quiet() -> Config {
    Config::default()
        .memory(64 << 20)
        .writeback_after(Duration::from_secs(3600))
}

/// The MiB that are copied by a cached write and its writeback, a cold and a warm read, and direct ones.
fn each_way(mut client: impl FnMut() -> Client) -> [u64; 6] {
    let (data, mut read) = (vec![7; 4 * MIB], vec![0; 4 * MIB]);
    let mut writes = client();
    let mut file = writes.open("f", rw()).unwrap();
    // Memory and threads are there.
    file.write_at(&[7; 4096], 0, Flags::empty()).unwrap();
    file.sync_all().unwrap();
    let written = copies(|| {
        let n = file.write_at(&data, 0, Flags::empty()).unwrap();
        assert_eq!(n, data.len());
    });
    let written_back = copies(|| file.sync_all().unwrap());
    file.close().unwrap();
    drop(writes);
    writes = client();
    file = writes.open("f", rw()).unwrap();
    let mut reads = |flags| {
        read.fill(0);
        let copied = copies(|| {
            let n = file.read_at(&mut read, 0, flags).unwrap();
            assert_eq!(n, data.len());
        });
        assert!(read == data);
        copied
    };
    let cold = reads(Flags::empty());
    let warm = reads(Flags::empty());
    let direct = reads(Flags::DIRECT);
    let direct_write = copies(|| {
        file.write_at(&data, 0, Flags::DIRECT).unwrap();
    });
    [written, written_back, cold, warm, direct, direct_write]
}

/// The client and the server make one copy, between the caller's memory and the page. (One test in this program: the
/// counter is the process's.)
#[test]
fn what_is_written_or_read_is_copied_once() {
    let dir = tempfile::tempdir().unwrap();
    let session = session(dir.path().join("served"));
    let mut serving = Vec::new();
    let over_memory = || {
        let (server, socket) = in_process(&session, ClientLimits::default()).unwrap();
        serving.push(server);
        Client::new(Connection::from(socket), quiet()).unwrap()
    };
    assert_eq!(each_way(over_memory), [4, 0, 4, 4, 4, 4]);
}
