//! File operations of the calling thread's runtime.
//!
//! Reads and writes first try to do it at once without waiting (RWF_NOWAIT), since for data in the
//! host's page cache that is one short system call; what would wait goes through the runtime's driver.

use std::io::{IoSlice, IoSliceMut};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::task::Poll;
use std::time::Duration;

use rustix::io::{Errno, ReadWriteFlags};

use crate::buf::Payload;
use crate::runtime::{self, Call, Keep, Transfer, start};

/// The kernel takes at most so many pieces in one call (UIO_MAXIOV).
const MAX_PARTS: usize = 1024;
/// A transfer of this many bytes, or more, takes much longer than handing it to another thread.
pub const LARGE: usize = 128 << 10;
/// Drops cached pages when the I/O has ended (RWF_DONTCACHE, Linux 6.14).
pub const DONTCACHE: u32 = 0x80;

/// cachestat(2). A system call since Linux 5.1 has the same number on every architecture.
const SYS_CACHESTAT: libc::c_long = 451;

/// Whether a file takes RWF_NOWAIT, as far as it is known.
mod nowait {
    /// It was not tried yet, or works.
    pub const TRY: u8 = 0;
    /// The file does not take it, but its data is in memory: a plain read or write never waits.
    pub const IN_MEMORY: u8 = 1;
    /// The file does not take it, and a plain read or write may wait.
    pub const MAY_WAIT: u8 = 2;
}

/// An open file for the operations here.
#[derive(Debug)]
pub struct File {
    fd: OwnedFd,
    nowait: AtomicU8,
}

impl From<OwnedFd> for File {
    fn from(fd: OwnedFd) -> Self {
        Self {
            fd,
            nowait: AtomicU8::new(nowait::TRY),
        }
    }
}

impl AsFd for File {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl AsRawFd for File {
    fn as_raw_fd(&self) -> RawFd {
        self.fd.as_raw_fd()
    }
}

/// Whether what is on `fd`'s file system is in memory (tmpfs, ramfs): such a file can't do
/// RWF_NOWAIT, and need not.
pub fn in_memory(fd: impl AsFd) -> bool {
    const TMPFS_MAGIC: i64 = 0x0102_1994;
    const RAMFS_MAGIC: i64 = 0x8584_58f6;
    rustix::fs::fstatfs(fd).is_ok_and(|stat| [TMPFS_MAGIC, RAMFS_MAGIC].contains(&stat.f_type))
}

/// How many bytes of a file the host has in its page cache (cachestat(2), Linux 6.5).
///
/// # Errors
/// ENOSYS of an older kernel, EOPNOTSUPP for what has no page cache.
pub fn cached_bytes(fd: impl AsFd) -> Result<u64, Errno> {
    // struct cachestat_range and struct cachestat of linux/mman.h.
    let everything = [0u64, 0];
    let mut counts = [0u64; 5];
    // SAFETY: both structures live over the call and are as long as the kernel takes them to be.
    uvfs_sys::checked(unsafe {
        libc::syscall(
            SYS_CACHESTAT,
            fd.as_fd().as_raw_fd(),
            everything.as_ptr(),
            counts.as_mut_ptr(),
            0u32,
        )
    })?;
    Ok(counts[0] * rustix::param::page_size() as u64)
}

impl File {
    /// Of a descriptor on a file system of which [`in_memory`] is known.
    pub fn new(fd: OwnedFd, in_memory: bool) -> Self {
        let nowait = if in_memory {
            nowait::IN_MEMORY
        } else {
            nowait::TRY
        };
        Self {
            fd,
            nowait: AtomicU8::new(nowait),
        }
    }

    /// Called when the file has refused RWF_NOWAIT: notes, and gives, what to do instead.
    fn cannot_nowait(&self) -> u8 {
        let state = if in_memory(&self.fd) {
            nowait::IN_MEMORY
        } else {
            nowait::MAY_WAIT
        };
        self.nowait.store(state, Ordering::Relaxed);
        state
    }
}

fn check(result: i32) -> Result<usize, Errno> {
    usize::try_from(result).map_err(|_| Errno::from_raw_os_error(-result))
}

/// struct iovec for each part.
struct IoVecs(Vec<libc::iovec>);

impl IoVecs {
    fn of(payload: &Payload) -> Self {
        let parts = payload.parts().iter().take(MAX_PARTS);
        Self(
            parts
                .map(|p| libc::iovec {
                    iov_base: p.as_ptr().cast(),
                    iov_len: p.len(),
                })
                .collect(),
        )
    }
}

#[derive(Clone, Copy, PartialEq)]
enum Direction {
    Read,
    Write,
}

/// The result of a transfer that fails after some bytes.
#[derive(Clone, Copy, PartialEq)]
enum Behind {
    /// Success, with those bytes.
    Short,
    /// The error.
    Error,
}

fn now(
    direction: Direction,
    fd: &File,
    payload: &Payload,
    offset: u64,
    flags: u32,
) -> Result<usize, Errno> {
    let flags = ReadWriteFlags::from_bits_retain(flags);
    let fd = fd.as_fd();
    if let [part] = payload.parts() {
        // SAFETY: `part` owns `len` mapped bytes. The reference lives for the system call alone,
        // in which this thread does nothing else with them.
        let bytes = unsafe { std::slice::from_raw_parts_mut(part.as_ptr(), part.len()) };
        return match direction {
            // The plain calls have no list for the kernel to copy in.
            Direction::Read if flags.is_empty() => rustix::io::pread(fd, bytes, offset),
            Direction::Write if flags.is_empty() => rustix::io::pwrite(fd, bytes, offset),
            Direction::Read => {
                rustix::io::preadv2(fd, &mut [IoSliceMut::new(bytes)], offset, flags)
            }
            Direction::Write => rustix::io::pwritev2(fd, &[IoSlice::new(bytes)], offset, flags),
        };
    }
    let vecs = IoVecs::of(payload);
    let (fd, base, len) = (fd.as_raw_fd(), vecs.0.as_ptr(), vecs.0.len() as i32);
    let (offset, flags) = (offset as i64, flags.bits() as i32);
    // SAFETY: the iovecs describe memory that `payload` keeps mapped over the call.
    uvfs_sys::checked(unsafe {
        match direction {
            Direction::Read => libc::preadv2(fd, base, len, offset, flags),
            Direction::Write => libc::pwritev2(fd, base, len, offset, flags),
        }
    })
}

/// A transfer that may wait, by the runtime's driver.
async fn waiting(
    direction: Direction,
    fd: &Arc<File>,
    payload: &Payload,
    offset: u64,
    flags: u32,
    hand_over: bool,
) -> Result<usize, Errno> {
    let vecs = Box::new(IoVecs::of(payload));
    let call = Call::Transfer(Transfer {
        write: direction == Direction::Write,
        fd: fd.as_raw_fd(),
        iovecs: vecs.0.as_ptr(),
        count: vecs.0.len() as u32,
        offset,
        flags: flags as i32,
        hand_over,
    });
    #[expect(
        clippy::arc_with_non_send_sync,
        reason = "it stays with this thread's runtime"
    )]
    let keep = Keep {
        data: Some(payload.clone()),
        other: Some(Arc::new((vecs, fd.clone()))),
    };
    // SAFETY: the iovecs, the memory they name and the descriptor are in `keep`.
    check(unsafe { start(call, keep) }.await)
}

async fn transfer(
    direction: Direction,
    fd: &Arc<File>,
    payload: &Payload,
    offset: u64,
    flags: u32,
    behind: Behind,
) -> Result<usize, Errno> {
    if i64::try_from(offset).is_err() {
        return Err(Errno::INVAL);
    }
    let nowait_flag = ReadWriteFlags::NOWAIT.bits();
    let mut done = 0;
    // A short transfer is continued: only the end of the file or an error ends it.
    while done < payload.len() {
        let sliced;
        let rest = match done {
            0 => payload,
            _ => {
                sliced = payload.slice(done..payload.len());
                &sliced
            }
        };
        let at = offset + done as u64;
        let mut known = fd.nowait.load(Ordering::Relaxed);
        let large = rest.len() >= LARGE && runtime::hands_over();
        let mut result = match known {
            _ if large => waiting(direction, fd, rest, at, flags, true).await,
            nowait::TRY => now(direction, fd, rest, at, flags | nowait_flag),
            _ => Err(Errno::AGAIN),
        };
        // RWF_DONTCACHE that is not supported fails in the same way, and is the caller's to drop.
        if result == Err(Errno::OPNOTSUPP) && !large {
            known = fd.cannot_nowait();
            result = Err(Errno::AGAIN);
        }
        if result == Err(Errno::AGAIN) && !large {
            result = match known {
                nowait::IN_MEMORY => now(direction, fd, rest, at, flags),
                _ => waiting(direction, fd, rest, at, flags, false).await,
            };
        }
        match result {
            Ok(0) => break,
            Ok(n) => {
                done += n;
                // With data in memory, only the end of the file cuts a read short.
                if direction == Direction::Read && known == nowait::IN_MEMORY {
                    break;
                }
            }
            Err(Errno::INTR | Errno::AGAIN) => {}
            Err(error) if done == 0 || behind == Behind::Error => return Err(error),
            Err(_) => break,
        }
    }
    Ok(done)
}

/// Reads at `offset` until `payload` is full or the file ends; says how many bytes. Fewer than asked for
/// mean the end of the file.
///
/// `flags` are RWF_* of preadv2(2), such as [`DONTCACHE`].
///
/// # Errors
/// The errors of preadv2(2), also when some bytes were read before.
pub async fn read_at(
    fd: &Arc<File>,
    payload: &Payload,
    offset: u64,
    flags: u32,
) -> Result<usize, Errno> {
    transfer(Direction::Read, fd, payload, offset, flags, Behind::Error).await
}

/// As [`read_at`], but an error behind some bytes makes the read short, as in pread(2).
///
/// # Errors
/// The errors of preadv2(2), unless some bytes were read before.
pub async fn read_some_at(
    fd: &Arc<File>,
    payload: &Payload,
    offset: u64,
    flags: u32,
) -> Result<usize, Errno> {
    transfer(Direction::Read, fd, payload, offset, flags, Behind::Short).await
}

/// Writes all of `payload` at `offset`; says how many bytes went before an error.
///
/// `flags` are RWF_* of pwritev2(2), such as [`DONTCACHE`].
///
/// # Errors
/// The errors of pwritev2(2), unless some bytes were written before.
pub async fn write_at(
    fd: &Arc<File>,
    payload: &Payload,
    offset: u64,
    flags: u32,
) -> Result<usize, Errno> {
    transfer(Direction::Write, fd, payload, offset, flags, Behind::Short).await
}

/// fsync(2), or fdatasync(2) with `data_only`.
///
/// # Errors
/// The errors of fsync(2) and fdatasync(2).
pub async fn fsync(fd: &Arc<File>, data_only: bool) -> Result<(), Errno> {
    let call = Call::Sync {
        fd: fd.as_raw_fd(),
        data_only,
    };
    on_file(call, fd).await.map(drop)
}

/// fallocate(2).
///
/// # Errors
/// The errors of fallocate(2).
pub async fn fallocate(fd: &Arc<File>, mode: u32, offset: u64, len: u64) -> Result<(), Errno> {
    let call = Call::Allocate {
        fd: fd.as_raw_fd(),
        mode: mode as i32,
        offset,
        len,
    };
    on_file(call, fd).await.map(drop)
}

/// Waits until `fd` has one of the poll(2) `events`; gives those it has.
///
/// # Errors
/// The errors of poll(2).
pub async fn poll(fd: &Arc<File>, events: u32) -> Result<u32, Errno> {
    let call = Call::Poll {
        fd: fd.as_raw_fd(),
        events,
    };
    on_file(call, fd).await.map(|events| events as u32)
}

/// An operation that points to nothing.
async fn on_file(call: Call, fd: &Arc<File>) -> Result<usize, Errno> {
    let keep = Keep {
        data: None,
        other: Some(fd.clone()),
    };
    // SAFETY: the call points to nothing; the descriptor is in `keep`.
    check(unsafe { start(call, keep) }.await)
}

/// Waits for `time`; other tasks run meanwhile.
pub async fn sleep(time: Duration) {
    // SAFETY: the call points to nothing. The only results are ETIME and cancellation.
    let _ = unsafe { start(Call::Timeout(time), Keep::default()) }.await;
}

/// The result of `future` if it ends within `time`; else it is dropped.
pub async fn within<T>(time: Duration, future: impl Future<Output = T>) -> Option<T> {
    let (mut future, mut sleep) = (pin!(future), pin!(sleep(time)));
    std::future::poll_fn(|cx| match future.as_mut().poll(cx) {
        Poll::Ready(value) => Poll::Ready(Some(value)),
        Poll::Pending => sleep.as_mut().poll(cx).map(|()| None),
    })
    .await
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;
    use crate::buf::IoBuf;
    use crate::runtime::{Runtime, spawn};
    use uvfs_queue::wait::{WaitConfig, WaitMode};

    /// Runs it with either driver.
    fn on_each<T: 'static, F: Future<Output = T> + 'static>(work: impl Fn() -> F) {
        for runtime in both(WaitMode::Adaptive) {
            runtime.block_on(work()).unwrap();
        }
    }

    fn both(mode: WaitMode) -> impl Iterator<Item = Runtime> {
        let wait = WaitConfig {
            mode,
            ..Default::default()
        };
        [true, false].into_iter().map(move |ring| match ring {
            true => Runtime::new(wait).unwrap(),
            false => Runtime::without_ring(wait),
        })
    }

    fn file() -> Arc<File> {
        Arc::new(File::from(OwnedFd::from(tempfile::tempfile().unwrap())))
    }

    /// A write from several pieces of memory is read back as it was written.
    #[test]
    fn what_is_written_is_read_in_pieces() {
        on_each(|| async {
            let fd = file();
            let memory = IoBuf::alloc(16384).unwrap();
            memory.copy_in(0, b"hello world");
            let data = Payload::from_parts([memory.slice(6..11), memory.slice(0..5)]);
            assert_eq!(write_at(&fd, &data, 100, 0).await, Ok(10));
            fsync(&fd, true).await.unwrap();
            fsync(&fd, false).await.unwrap();
            let back = Payload::from(memory.slice(8192..8192 + 4096));
            assert_eq!(read_at(&fd, &back, 98, 0).await, Ok(12));
            let mut bytes = [0; 12];
            back.copy_out(0, &mut bytes);
            assert_eq!(&bytes, b"\0\0worldhello");
            let waited = waiting(Direction::Read, &fd, &back, 100, 0, false);
            assert_eq!(waited.await, Ok(10));
            assert_eq!(fallocate(&fd, 0, 0, 8192).await, Ok(()));
            assert_eq!(fallocate(&fd, 0, 0, 0).await, Err(Errno::INVAL));
            assert_eq!(read_at(&fd, &back, u64::MAX, 0).await, Err(Errno::INVAL));
        });
    }

    /// A large transfer is handed over by the serving thread, and moves the right bytes.
    #[test]
    fn large_transfers_are_handed_over() {
        on_each(|| async {
            let fd = file();
            runtime::hand_over_large(true);
            let memory = IoBuf::alloc(4 * LARGE).unwrap();
            memory.copy_in(LARGE, b"hello");
            let data = Payload::from(memory.slice(0..2 * LARGE));
            assert_eq!(write_at(&fd, &data, 10, 0).await, Ok(2 * LARGE));
            // Nothing was tried in this thread, which would have been noted.
            assert_eq!(fd.nowait.load(Ordering::Relaxed), nowait::TRY);
            let back = Payload::from(memory.slice(2 * LARGE..4 * LARGE));
            assert_eq!(read_at(&fd, &back, 11, 0).await, Ok(2 * LARGE - 1));
            let mut bytes = [0; 5];
            back.copy_out(LARGE - 1, &mut bytes);
            assert_eq!(&bytes, b"hello");
        });
    }

    /// A read that is given up keeps its memory until the kernel, or a thread, has ended it.
    #[test]
    fn an_abandoned_read_keeps_its_memory_until_it_has_ended() {
        let master = tempfile::tempfile().unwrap();
        master.set_len(64 << 20).unwrap();
        let fd = Arc::new(File::from(OwnedFd::from(master)));
        on_each(move || {
            let fd = fd.clone();
            async move {
                for round in 0..50 {
                    let memory = Payload::from(IoBuf::alloc(1 << 20).unwrap());
                    let mut read = Box::pin(waiting(Direction::Read, &fd, &memory, 0, 0, true));
                    let started =
                        std::future::poll_fn(|cx| Poll::Ready(read.as_mut().poll(cx).is_pending()));
                    assert!(started.await);
                    drop(read);
                    drop(memory);
                    if round % 2 == 0 {
                        sleep(Duration::from_micros(10)).await;
                    }
                }
            }
        });
    }

    /// Waits for descriptors and timeouts end, also beside others that were given up.
    #[test]
    fn waits_for_descriptors_and_timeouts_end_and_can_be_given_up() {
        on_each(|| async {
            let (reader, mut writer) = std::io::pipe().unwrap();
            let reader = Arc::new(File::from(OwnedFd::from(reader)));
            let events = libc::POLLIN as u32;
            let long = Duration::from_secs(600);
            for _ in 0..100 {
                assert_eq!(
                    within(Duration::from_micros(50), poll(&reader, events)).await,
                    None
                );
            }
            assert_eq!(within(Duration::from_millis(1), sleep(long)).await, None);
            spawn(async move {
                sleep(Duration::from_millis(2)).await;
                writer.write_all(b"x").unwrap();
                sleep(long).await;
            });
            assert_eq!(within(long, poll(&reader, events)).await, Some(Ok(events)));
            // Of two that wait for the same both are woken.
            let twice = (poll(&reader, events), poll(&reader, events));
            assert_eq!((twice.0.await, twice.1.await), (Ok(events), Ok(events)));
            let order = std::rc::Rc::new(std::cell::RefCell::new(Vec::new()));
            for ms in [30, 10, 20] {
                let order = order.clone();
                spawn(async move {
                    sleep(Duration::from_millis(ms)).await;
                    order.borrow_mut().push(ms);
                });
            }
            while order.borrow().len() < 3 {
                sleep(Duration::from_millis(1)).await;
            }
            assert_eq!(*order.borrow(), [10, 20, 30]);
        });
    }

    /// Other calls are made beside a hundred that never end.
    #[test]
    fn calls_that_hang_leave_threads_for_others() {
        let runtime = Runtime::without_ring(WaitConfig::default());
        let mut held = Vec::new();
        let mut pipes = Vec::new();
        for _ in 0..100 {
            let (reader, writer) = std::io::pipe().unwrap();
            held.push(writer);
            pipes.push(Arc::new(File::from(OwnedFd::from(reader))));
        }
        runtime
            .block_on(async move {
                for reader in pipes {
                    spawn(async move {
                        let memory = Payload::from(IoBuf::alloc(4096).unwrap());
                        // A pipe is read at its position alone.
                        let read = waiting(Direction::Read, &reader, &memory, u64::MAX, 0, false);
                        let _ = read.await;
                    });
                }
                let fd = file();
                let memory = Payload::from(IoBuf::alloc(4096).unwrap());
                let written = waiting(Direction::Write, &fd, &memory, 0, 0, false).await;
                assert_eq!(written, Ok(4096));
                fsync(&fd, false).await.unwrap();
                drop(held);
            })
            .unwrap();
    }

    /// A call from another thread wakes a runtime that sleeps.
    #[test]
    fn other_threads_wake_a_sleeping_runtime() {
        for mode in [WaitMode::Adaptive, WaitMode::Spin, WaitMode::Sleep] {
            for runtime in both(mode) {
                is_woken(&runtime);
            }
        }
    }

    fn is_woken(runtime: &Runtime) {
        let remote = runtime.remote();
        let (sender, receiver) = std::sync::mpsc::channel();
        let thread = std::thread::spawn(move || {
            for i in 0..200 {
                let sender = sender.clone();
                remote.call(move || sender.send(i).unwrap());
            }
        });
        let sum = runtime
            .block_on(async move {
                let doubled = crate::blocking::run(|| 21 * 2).await;
                spawn(async {});
                let mut sum = 0;
                while sum < 199 * 200 / 2 {
                    sum += receiver.try_iter().sum::<i32>();
                    sleep(Duration::from_micros(50)).await;
                }
                sum + doubled
            })
            .unwrap();
        assert_eq!(sum, 199 * 200 / 2 + 42);
        thread.join().unwrap();
    }

    /// A runtime that ended drops the calls that it has not run, and later ones.
    #[test]
    fn a_runtime_that_is_gone_keeps_no_calls() {
        for runtime in both(WaitMode::Adaptive) {
            let remote = runtime.remote();
            let held = Arc::new(());
            let hold = || {
                let all = (remote.clone(), held.clone());
                remote.call(move || {
                    drop(all);
                    panic!("no runtime runs it");
                });
            };
            hold();
            drop(runtime);
            hold();
            assert_eq!(Arc::strong_count(&held), 1);
        }
    }
}
