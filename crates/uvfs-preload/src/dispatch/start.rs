//! The beginning of the dispatch, and what is looked at before it: whatever the process did until now may have
//! been unseen.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::io::Read;
use std::ops::Range;
use std::sync::OnceLock;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::{BLOCK, STATE, Why, last, threads, trap};
use crate::real::stat;

/// The text of the C library, in which calls do not trap; nothing where it can't be told.
pub(super) fn text() -> Option<Range<usize>> {
    static TEXT: OnceLock<Option<Range<usize>>> = OnceLock::new();
    TEXT.get_or_init(|| {
        unsafe extern "C" {
            // Of the C library alone: nothing stands in front of it.
            fn gnu_get_libc_version() -> *const c_char;
        }
        let text = segment_of(gnu_get_libc_version as *const () as usize);
        // The calls that this library passes on have to be made there.
        text.contains(&trap::passing_on()).then_some(text)
    })
    .clone()
}

/// Whether an address is in this library's text.
pub(super) fn is_own(at: usize) -> bool {
    static OWN: OnceLock<Range<usize>> = OnceLock::new();
    OWN.get_or_init(|| segment_of(trap::handler()))
        .contains(&at)
}

/// The executable segment that has an address; empty if there is none.
fn segment_of(at: usize) -> Range<usize> {
    let mut found = (at, 0..0);
    // SAFETY: a function that takes what it is given, which lives until it has returned.
    unsafe { libc::dl_iterate_phdr(Some(segment), (&raw mut found).cast()) };
    found.1
}

/// Of one object, for [`segment_of`].
unsafe extern "C" fn segment(
    object: *mut libc::dl_phdr_info,
    _: usize,
    found: *mut c_void,
) -> c_int {
    // SAFETY: of dl_iterate_phdr, and of `segment_of`.
    let (object, found) = unsafe { (&*object, &mut *found.cast::<(usize, Range<usize>)>()) };
    for index in 0..usize::from(object.dlpi_phnum) {
        // SAFETY: the object has so many headers.
        let header = unsafe { &*object.dlpi_phdr.add(index) };
        let from = (object.dlpi_addr + header.p_vaddr) as usize;
        let range = from..from + header.p_memsz as usize;
        if header.p_type == libc::PT_LOAD
            && header.p_flags & libc::PF_X != 0
            && range.contains(&found.0)
        {
            found.1 = range;
            return 1;
        }
    }
    0
}

/// Has all calls of the program seen from now on. Says whether a descriptor that the calling thread has opened a
/// moment ago is known to no other process.
pub(super) fn start(fd: c_int) -> Result<bool, Why> {
    let text = text().ok_or(Why::Unsupported)?;
    let preloaded = std::env::var_os("LD_PRELOAD").unwrap_or_default();
    if preloaded
        .as_encoded_bytes()
        .windows(9)
        .any(|at| at == b"vgpreload")
    {
        // Valgrind makes the program's calls elsewhere than in the C library's text.
        return Err(Why::Unsupported);
    }
    // Sanitizers make calls and mask signals in their own ways, also in threads of theirs.
    let sanitizer = [c"__asan_init", c"__tsan_init", c"__msan_init"]
        .iter()
        .any(|name| {
            // SAFETY: a C string.
            !unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) }.is_null()
        });
    if sanitizer {
        return Err(Why::Bound);
    }
    // Found now, as the handler of SIGSYS must not look for it.
    let _ = is_own(0);
    handlers(&text)?;
    trap::install()?;
    threads::arm()?;
    let alone = || Ok(last::tasks().ok_or(Why::Unsupported)? == 1);
    let unblocked = || {
        let tasks = armed_tasks()?;
        let own = threads::own();
        // One that blocks SIGSYS would be ended by its first call that traps.
        match tasks
            .iter()
            .any(|task| *task != own && blocks_sigsys(*task))
        {
            true => Err(Why::Signals),
            false => Ok(tasks),
        }
    };
    if !alone()? {
        settled(unblocked)?;
    }
    STATE.selector.store(BLOCK, Ordering::SeqCst);
    if alone()? {
        return Ok(true);
    }
    settled(|| {
        let mut children = false;
        for task in unblocked()? {
            if !has_same(fd, &format!("/proc/self/task/{task}")) {
                // It has descriptors of its own (unshare), or ends.
                return Err(Why::Threads);
            }
            // A child that another thread made just now may have the descriptor, too.
            children |= children_of(task).is_none_or(|list| !list.is_empty());
        }
        Ok(!children)
    })
}

/// Looks again for as long as the other threads may be on their way to what is asked. The C library blocks all
/// signals while it makes or ends a thread, or makes a process, and on a busy machine the thread that does it
/// may wait long for its turn.
fn settled<T>(look: impl Fn() -> Result<T, Why>) -> Result<T, Why> {
    /// What this library has seen begin, and what the C library does.
    const KNOWN: Duration = Duration::from_secs(1);
    /// The end of a thread that was made around the C library.
    const ELSE: Duration = Duration::from_millis(20);
    let began = Instant::now();
    loop {
        let found = look();
        let longest = match &found {
            Err(Why::Signals) => KNOWN,
            Err(Why::Threads) if STATE.threads.any_begins() => KNOWN,
            Err(Why::Threads) => ELSE,
            _ => return found,
        };
        if began.elapsed() > longest {
            return found;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Looks at what the process has that no call tells of, before the first import: io_urings, files that are
/// mapped, and processes that share its descriptors.
pub(super) fn look_back(fd: c_int, mut mapped: impl FnMut((u64, u64))) -> Result<(), Why> {
    let maps = whole("/proc/self/maps").ok_or(Why::Unsupported)?;
    for line in maps.lines() {
        if line.ends_with("anon_inode:[io_uring]") {
            return Err(Why::Ring);
        }
        if let Some(inode) = shared_file(line) {
            mapped(inode);
        }
    }
    for task in settled(armed_tasks)? {
        for child in children_of(task).unwrap_or_default() {
            if has_same(fd, &format!("/proc/{child}")) {
                return Err(Why::Threads);
            }
        }
    }
    Ok(())
}

/// Device and inode of a file that is mapped shared, of a line of `/proc/PID/maps`.
fn shared_file(line: &str) -> Option<(u64, u64)> {
    let mut words = line.split_ascii_whitespace().skip(1);
    let shared = words.next()?.ends_with('s');
    let (major, minor) = words.nth(1)?.split_once(':')?;
    let number = |text| u32::from_str_radix(text, 16).ok();
    let device = libc::makedev(number(major)?, number(minor)?);
    let inode: u64 = words.next()?.parse().ok()?;
    (shared && inode != 0).then_some((device, inode))
}

/// A signal handler outside whose mask SIGSYS stays, and with the C library's return to where it was: what was
/// installed by the C library's functions is so (`masks.rs`).
fn handlers(text: &Range<usize>) -> Result<(), Why> {
    for signal in 1..=64 {
        // SAFETY: plain data, filled by the call.
        let mut now: libc::sigaction = unsafe { std::mem::zeroed() };
        // SAFETY: a buffer, and no new action. Signals that the C library keeps are refused.
        let done = unsafe { trap::action(signal, std::ptr::null(), &mut now) };
        let handler = now.sa_sigaction;
        if done != 0 || handler == libc::SIG_DFL || handler == trap::handler() {
            continue;
        }
        // SAFETY: a set that the call has filled.
        let blocks = unsafe { libc::sigismember(&now.sa_mask, libc::SIGSYS) } == 1;
        let returns = now
            .sa_restorer
            .is_some_and(|at| text.contains(&(at as usize)));
        if signal == libc::SIGSYS || handler != libc::SIG_IGN && (blocks || !returns) {
            return Err(Why::Signals);
        }
    }
    Ok(())
}

/// The threads of this process, all of which are armed.
fn armed_tasks() -> Result<Vec<c_int>, Why> {
    let tasks = numbers("/proc/self/task").ok_or(Why::Unsupported)?;
    let armed = tasks.iter().all(|task| STATE.threads.has(*task));
    armed.then_some(tasks).ok_or(Why::Threads)
}

/// The names in a directory that are numbers. The standard library's way would take the program's next
/// descriptor for a moment.
fn numbers(path: &str) -> Option<Vec<c_int>> {
    use std::os::fd::AsRawFd;
    const NAME: usize = 19;
    let dir = std::fs::File::open(path).ok()?;
    let (mut list, mut room) = (Vec::new(), [0_u8; 4096]);
    loop {
        let (fd, at) = (dir.as_raw_fd(), room.as_mut_ptr());
        // SAFETY: a buffer with its size.
        let len = unsafe { crate::real::syscall()(libc::SYS_getdents64, fd, at, room.len()) };
        let mut left = room.get(..usize::try_from(len).ok()?)?;
        if left.is_empty() {
            return Some(list);
        }
        // struct linux_dirent64: the length at 16, the name at 19.
        while let Some(&[low, high]) = left.get(16..18) {
            let (entry, rest) = left.split_at_checked(u16::from_le_bytes([low, high]).into())?;
            let name = CStr::from_bytes_until_nul(entry.get(NAME..)?).ok()?;
            list.extend(
                name.to_str()
                    .ok()
                    .and_then(|name| name.parse::<c_int>().ok()),
            );
            left = rest;
        }
    }
}

/// The text of a file of /proc.
fn whole(path: &str) -> Option<String> {
    let mut text = Vec::new();
    let mut file = std::fs::File::open(path).ok()?;
    file.read_to_end(&mut text).ok()?;
    Some(String::from_utf8_lossy(&text).into_owned())
}

/// The children that a thread has made; nothing if the kernel doesn't tell.
fn children_of(task: c_int) -> Option<Vec<c_int>> {
    let text = whole(&format!("/proc/self/task/{task}/children"))?;
    let numbers = text.split_ascii_whitespace().map(str::parse);
    numbers.collect::<Result<_, _>>().ok()
}

/// Whether a thread blocks SIGSYS, as far as the kernel tells.
fn blocks_sigsys(task: c_int) -> bool {
    let text = whole(&format!("/proc/self/task/{task}/status")).unwrap_or_default();
    let mask = text.lines().find_map(|line| line.strip_prefix("SigBlk:"));
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    mask.is_none_or(|mask| mask >> (libc::SIGSYS - 1) & 1 != 0)
}

/// Whether a task of the directory has the same file under a descriptor's number.
fn has_same(fd: c_int, task: &str) -> bool {
    use std::os::unix::fs::MetadataExt;
    let there = std::fs::metadata(format!("{task}/fd/{fd}"));
    let own = stat(fd).map(|st| (st.st_dev, st.st_ino));
    there.is_ok_and(|there| Some((there.dev(), there.ino())) == own)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Mappings that share a file are found, and no others.
    #[test]
    fn shared_mappings_are_found() {
        let line = "7f0000000000-7f0000001000 rw-s 00000000 00:2f 1234   /mnt/a file";
        assert_eq!(shared_file(line), Some((libc::makedev(0, 0x2f), 1234)));
        assert_eq!(shared_file(&line.replace("rw-s", "rw-p")), None);
        assert_eq!(shared_file("7f00-7f01 rw-s 00000000 00:00 0"), None);
        assert_eq!(shared_file(""), None);
    }

    /// /proc shows the threads, and the C library.
    #[test]
    fn the_kernel_tells_of_threads() {
        assert!(text().unwrap().contains(&trap::passing_on()));
        let own = threads::own();
        assert!(numbers("/proc/self/task").unwrap().contains(&own));
        assert!(last::tasks().unwrap() >= 1);
        assert!(!blocks_sigsys(own));
        assert!(children_of(own).is_some());
        let file = std::fs::File::open("/proc/self/exe").unwrap();
        let fd = std::os::fd::AsRawFd::as_raw_fd(&file);
        assert!(has_same(fd, &format!("/proc/self/task/{own}")));
        assert!(!has_same(fd, "/proc/1"));
    }
}
