//! The kernel of the mount sees what others do to a file: sizes that grow, and pages beside direct writes.

use std::fs::{self, File};
use std::io::Write;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;

use rustix::fs::copy_file_range;
use rustix::mm::{MapFlags, ProtFlags};
use rustix::pipe::{SpliceFlags, splice};

use crate::direct::client_of;
use crate::harness::*;

const PAGE: usize = 4096;

/// The side that makes a file longer.
enum Writer<'a> {
    Host(&'a Path),
    Client(uvfs_client::Client),
}

impl Writer<'_> {
    fn append(&self, bytes: &[u8]) {
        match self {
            Self::Host(file) => {
                let mut options = File::options();
                let mut file = options.append(true).open(file).unwrap();
                file.write_all(bytes).unwrap();
            }
            Self::Client(client) => {
                let options = uvfs_client::OpenOptions::new().read(true).write(true);
                let file = client.open("file", options).unwrap();
                let end = file.current_size().unwrap();
                let none = uvfs_client::Flags::empty();
                assert_eq!(file.write_at(bytes, end, none).unwrap(), bytes.len());
                file.sync_all().unwrap();
            }
        }
    }
}

/// The calls for which the kernel goes by the size that it knows: how much of the file each reaches.
fn reach(file: &File, call: &str, at: u64, len: usize) -> usize {
    let pipe = rustix::pipe::pipe().unwrap();
    match call {
        "sendfile" => {
            rustix::fs::sendfile(&pipe.1, file, Some(&mut { at }), len).expect("sendfile")
        }
        "splice" => {
            let (from, to) = (file.as_fd(), pipe.1.as_fd());
            let none = SpliceFlags::empty();
            splice(from, Some(&mut { at }), to, None, len, none).expect("splice")
        }
        "copy_file_range" => {
            let to = tempfile::tempfile_in(std::env::var_os("UVFS_TEST_CHILD_DIR").unwrap());
            let to = to.unwrap();
            copy_file_range(file, Some(&mut { at }), &to, Some(&mut 0), len).expect("a copy")
        }
        "FIONREAD" => {
            rustix::fs::seek(file, rustix::fs::SeekFrom::Start(at)).unwrap();
            let mut left = 0i32;
            // SAFETY: the command stores an int.
            let done = unsafe { libc::ioctl(file.as_raw_fd(), libc::FIONREAD, &mut left) };
            assert_eq!(done, 0);
            usize::try_from(left).unwrap_or(0)
        }
        call => panic!("{call}"),
    }
}

/// A page fault behind the end that the kernel knows is SIGBUS.
fn mapped(file: &File, at: u64) -> bool {
    let page = at / PAGE as u64 * PAGE as u64;
    let (read, shared) = (ProtFlags::READ, MapFlags::SHARED);
    // SAFETY: a new mapping at an address of the kernel's choice.
    let map =
        unsafe { rustix::mm::mmap(std::ptr::null_mut(), PAGE, read, shared, file, page) }.unwrap();
    // The kernel copies from there, and fails with EFAULT where this program would be killed.
    let (_from, to) = rustix::pipe::pipe().unwrap();
    // SAFETY: the kernel checks the address.
    let copied = unsafe { libc::write(to.as_raw_fd(), map, 1) };
    // SAFETY: mapped above and not used again.
    unsafe { rustix::mm::munmap(map, PAGE).unwrap() };
    copied == 1
}

/// Each call on a file that grows, by a descriptor whose size no program asks for.
pub fn grown(dir: &Path, argument: &str) -> String {
    let (who, source) = argument.split_once(' ').unwrap();
    let path = Path::new(source).join("file");
    let writer = match who {
        "host" => Writer::Host(&path),
        _ => Writer::Client(client_of(dir)),
    };
    fs::write(&path, "").unwrap();
    wait_for("the file", || dir.join("file").exists());
    for write in [false, true] {
        for call in ["sendfile", "splice", "copy_file_range", "FIONREAD", "mmap"] {
            // A client does not see what the host does behind its lease.
            let by = if who == "host" {
                &path
            } else {
                &dir.join("file")
            };
            fs::write(by, "start").unwrap();
            wait_for("the short file", || {
                fs::metadata(dir.join("file")).unwrap().len() == 5
            });
            let file = File::options()
                .read(true)
                .write(write)
                .open(dir.join("file"));
            let file = file.unwrap();
            // Reads what it may, so that pages are cached.
            file.read_at(&mut [0; 100], 0).unwrap();
            writer.append(&[b'x'; 3 * PAGE]);
            wait_for(
                &format!("{call} of what {who} wrote ({write})"),
                || match call {
                    "mmap" => mapped(&file, 2 * PAGE as u64),
                    _ => reach(&file, call, 5, 1000) >= 1000,
                },
            );
            let mut bytes = vec![0; 4 * PAGE];
            assert_eq!(file.read_at(&mut bytes, 0).unwrap(), 5 + 3 * PAGE);
            assert!(bytes.starts_with(b"startxxxx") && bytes[3 * PAGE] == b'x');
            assert_eq!(file.metadata().unwrap().len(), 5 + 3 * PAGE as u64);
        }
    }
    "ok".into()
}

#[test]
fn sizes_grow_with_what_the_host_and_clients_write() {
    for transport in transports().filter(|_| has(&[Need::Uvfs])) {
        for options in ["", "passthrough=off"] {
            let served = Served::new(&Serve::over(transport).option(options));
            for who in ["host", "client"] {
                let report = served.scratch.path("report");
                let argument = format!("{who} {}", served.source.display());
                let mut child =
                    crate::own_process::call("grown", &served.mount.at, &argument, &report);
                served.mount.run(&mut child).ok();
            }
        }
    }
}

/// Bytes that each direct write covers, all with the number of the write.
const BLOCK: usize = 16 * PAGE;
const READERS: usize = 20;

#[repr(align(4096))]
struct Block([u8; BLOCK]);

/// libaio's calls.
mod aio {
    use uvfs_sys::aio::IoEvent;
    pub use uvfs_sys::aio::{Iocb, PWRITE};

    pub fn setup(depth: u32) -> u64 {
        let mut context = 0u64;
        // SAFETY: the call stores the context.
        let done = unsafe { libc::syscall(libc::SYS_io_setup, depth, &mut context) };
        assert_eq!(done, 0, "io_setup");
        context
    }

    /// Submits writes and waits for all of them.
    ///
    /// # Safety
    /// The memory that they write from has to live.
    pub unsafe fn write(context: u64, writes: &mut [Iocb]) {
        let mut pointers: Vec<*mut Iocb> = writes.iter_mut().map(std::ptr::from_mut).collect();
        let mut events = vec![IoEvent::default(); writes.len()];
        let n = writes.len();
        // SAFETY: the structures live until all writes have ended, and what they write from as well.
        unsafe {
            let done = libc::syscall(libc::SYS_io_submit, context, n, pointers.as_mut_ptr());
            assert_eq!(done, n as i64, "io_submit");
            let none = std::ptr::null_mut::<libc::timespec>();
            let done = libc::syscall(
                libc::SYS_io_getevents,
                context,
                n,
                n,
                events.as_mut_ptr(),
                none,
            );
            assert_eq!(done, n as i64, "io_getevents");
        }
        for event in events {
            assert_eq!(event.res as u64, writes[0].len, "a write's result");
        }
    }
}

/// Many read a file through the kernel's page cache that one writes past it, all of it again and again. A read that
/// begins after a write has ended sees it.
pub fn beside_direct_writer(dir: &Path, rounds: &str) -> String {
    let rounds: u64 = rounds.parse().unwrap();
    let path = dir.join("file");
    fs::write(&path, vec![0; BLOCK]).unwrap();
    let direct = File::options()
        .read(true)
        .write(true)
        .custom_flags(libc::O_DIRECT)
        .open(&path)
        .unwrap();
    let (ended, over) = (AtomicU64::new(0), AtomicBool::new(false));
    thread::scope(|scope| {
        for number in 0..READERS {
            let (path, ended, over) = (&path, &ended, &over);
            scope.spawn(move || {
                let file = File::open(path).unwrap();
                let mut page = [0; PAGE];
                let mut at = number;
                while !over.load(Ordering::Relaxed) {
                    at = (at * 5 + 3) % (BLOCK / PAGE);
                    let before = ended.load(Ordering::SeqCst);
                    file.read_exact_at(&mut page, (at * PAGE) as u64).unwrap();
                    let after = ended.load(Ordering::SeqCst) + 1;
                    // Numbers are cut to a byte: between the last write that had ended, and one under way.
                    let seen = u64::from(page[0].wrapping_sub(before as u8));
                    if seen > after - before {
                        over.store(true, Ordering::Relaxed);
                        panic!("page {at} has {}, and {before} to {after} are due", page[0]);
                    }
                    thread::yield_now();
                }
            });
        }
        let context = aio::setup(16);
        let mut block = Box::new(Block([0; BLOCK]));
        for round in 1..=rounds {
            if over.load(Ordering::Relaxed) {
                break;
            }
            block.0.fill(round as u8);
            // In one piece, or in several at a time.
            let pieces = if round % 2 == 0 { 1 } else { 4 };
            let len = BLOCK / pieces;
            let piece = |n: usize| aio::Iocb {
                opcode: aio::PWRITE,
                fd: direct.as_raw_fd() as u32,
                buf: block.0.as_ptr() as u64 + (n * len) as u64,
                len: len as u64,
                offset: (n * len) as i64,
                ..Default::default()
            };
            let mut writes: Vec<_> = (0..pieces).map(piece).collect();
            // SAFETY: the block outlives the call.
            unsafe { aio::write(context, &mut writes) };
            ended.store(round, Ordering::SeqCst);
        }
        over.store(true, Ordering::Relaxed);
    });
    "ok".into()
}

#[test]
fn readers_see_what_a_direct_writer_has_written() {
    let rounds = if full() { "5000" } else { "250" };
    for transport in transports() {
        for options in ["passthrough=off", "writeback"] {
            let served = Served::new(&Serve::over(transport).option(options));
            let report = served.scratch.path("report");
            let at = &served.mount.at;
            let mut child = crate::own_process::call("beside_direct_writer", at, rounds, &report);
            served.mount.run(&mut child).ok();
        }
    }
}
