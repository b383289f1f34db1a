//! Directory streams without the kernel: opendir(3) and what works on its result. Streams of this
//! library's are known by a list. Each has an O_PATH descriptor of its directory, which is made one
//! for reading when the program asks for it, and through which the kernel is read on when the
//! session ends, or in a child.

use std::collections::HashSet;
use std::ffi::{c_char, c_int, c_long};
use std::os::unix::ffi::OsStrExt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard};

use libc::{DIR, dirent64};
use uvfs_client::Directory;

use crate::calls::aside;
use crate::paths;
use crate::real::{Inside, errno, set_errno};
use crate::table::lock;

/// The next definitions.
mod next {
    use std::ffi::{CStr, c_char, c_int, c_long, c_void};

    use libc::{DIR, dirent64};

    use crate::real::{Next, next};

    next! {
        opendir(path: *const c_char) -> *mut DIR;
        fdopendir(fd: c_int) -> *mut DIR;
        readdir(dir: *mut DIR) -> *mut dirent64;
        readdir64(dir: *mut DIR) -> *mut dirent64;
        readdir_r(dir: *mut DIR, to: *mut dirent64, result: *mut *mut dirent64) -> c_int;
        readdir64_r(dir: *mut DIR, to: *mut dirent64, result: *mut *mut dirent64) -> c_int;
        closedir(dir: *mut DIR) -> c_int;
        dirfd(dir: *mut DIR) -> c_int;
        rewinddir(dir: *mut DIR) -> ();
        seekdir(dir: *mut DIR, at: c_long) -> ();
        telldir(dir: *mut DIR) -> c_long;
    }
}

/// A stream.
struct Stream {
    /// The directory, as O_PATH until it is `solid`.
    fd: c_int,
    state: Mutex<State>,
}

struct State {
    fd: c_int,
    /// Nothing once the kernel is read.
    directory: Option<Directory>,
    /// The kernel's stream, if that is read.
    kernel: *mut DIR,
    solid: bool,
    list: std::vec::IntoIter<uvfs_client::ListedEntry>,
    /// Where the next entry is listed from.
    at: u64,
    /// What readdir(3) answered last.
    last: Box<dirent64>,
}

// SAFETY: the kernel's stream is only used under the lock that the state is in.
unsafe impl Send for State {}

/// Those that are open.
static OPEN: Mutex<Option<HashSet<usize>>> = Mutex::new(None);
static COUNT: AtomicUsize = AtomicUsize::new(0);

fn ours(dir: *mut DIR) -> Option<&'static Stream> {
    if COUNT.load(Ordering::Relaxed) == 0 {
        return None;
    }
    // Also where the thread is at work here already: what isn't ours is no stream of that kind.
    let inside = Inside::enter();
    let known = lock(&OPEN)
        .as_ref()
        .is_some_and(|open| open.contains(&(dir as usize)));
    drop(inside);
    // SAFETY: made by `open`, and not closed yet, as the caller's function wants.
    known.then(|| unsafe { &*dir.cast::<Stream>() })
}

/// # Safety
/// As for opendir(3).
unsafe fn open(path: *const c_char) -> Option<Result<*mut DIR, c_int>> {
    if !paths::on() {
        return None;
    }
    let work = || {
        let _opening = paths::starts();
        // SAFETY: the caller's duty.
        let (directory, fd) = match unsafe { paths::directory(path) }? {
            Ok(found) => found,
            Err(code) => return Some(Err(code)),
        };
        let state = State {
            fd,
            directory: Some(directory),
            kernel: std::ptr::null_mut(),
            solid: false,
            list: Vec::new().into_iter(),
            at: 0,
            // SAFETY: plain data.
            last: Box::new(unsafe { std::mem::zeroed() }),
        };
        let state = Mutex::new(state);
        let stream = Box::into_raw(Box::new(Stream { fd, state }));
        let mut open = lock(&OPEN);
        let open = open.get_or_insert_default();
        open.insert(stream as usize);
        COUNT.store(open.len(), Ordering::Relaxed);
        Some(Ok(stream.cast()))
    };
    aside(work).flatten()
}

impl State {
    /// The next entry; nothing at the end.
    fn next(&mut self) -> std::io::Result<Option<&mut dirent64>> {
        let entry = match self.list.next() {
            Some(entry) => entry,
            None => {
                let listed = match &self.directory {
                    Some(directory) => directory.list(self.at),
                    None => return self.next_of_kernel(),
                };
                self.list = match listed {
                    Ok(list) => list.into_iter(),
                    Err(_) => {
                        // The kernel has it still, or the right error.
                        self.directory = None;
                        return self.next_of_kernel();
                    }
                };
                match self.list.next() {
                    Some(entry) => entry,
                    None => return Ok(None),
                }
            }
        };
        self.at = entry.next;
        let to = &mut *self.last;
        let name = entry.name.as_bytes();
        let len = name.len().min(to.d_name.len() - 1);
        to.d_ino = entry.ino;
        to.d_off = entry.next as i64;
        to.d_type = entry.kind;
        let size = std::mem::offset_of!(dirent64, d_name) + len + 1;
        to.d_reclen = size.next_multiple_of(8) as u16;
        for (to, from) in to.d_name.iter_mut().zip(&name[..len]) {
            *to = *from as c_char;
        }
        to.d_name[len] = 0;
        Ok(Some(to))
    }

    /// Another descriptor of the directory, for reading.
    fn again(&self) -> Result<c_int, c_int> {
        let flags = libc::O_RDONLY | libc::O_DIRECTORY | libc::O_CLOEXEC;
        // SAFETY: a C string and numbers.
        let fd = unsafe { libc::syscall(libc::SYS_openat, self.fd, c".".as_ptr(), flags) };
        match fd < 0 {
            true => Err(errno()),
            false => Ok(fd as c_int),
        }
    }

    fn next_of_kernel(&mut self) -> std::io::Result<Option<&mut dirent64>> {
        if self.kernel.is_null() {
            let fd = self.again().map_err(std::io::Error::from_raw_os_error)?;
            // SAFETY: a directory's descriptor, which the stream owns from now on; offsets are the
            // same ones.
            unsafe {
                self.kernel = next::fdopendir(fd);
                if self.kernel.is_null() {
                    libc::syscall(libc::SYS_close, fd);
                    return Err(std::io::Error::last_os_error());
                }
                next::seekdir(self.kernel, self.at as c_long);
            }
        }
        set_errno(0);
        // SAFETY: the stream is open; its entry is its own until it is read on.
        let entry = unsafe { next::readdir64(self.kernel).as_mut() };
        match (entry, errno()) {
            (Some(entry), _) => {
                self.at = entry.d_off as u64;
                Ok(Some(entry))
            }
            (None, 0) => Ok(None),
            (None, code) => Err(std::io::Error::from_raw_os_error(code)),
        }
    }

    fn go(&mut self, at: u64) {
        if !self.kernel.is_null() {
            // SAFETY: the stream is open.
            unsafe { next::seekdir(self.kernel, at as c_long) };
        }
        self.at = at;
        self.list = Vec::new().into_iter();
    }
}

fn read(stream: &Stream) -> *mut dirent64 {
    let done = aside(|| match lock(&stream.state).next() {
        Ok(Some(entry)) => Ok(std::ptr::from_mut(entry)),
        Ok(None) => Ok(std::ptr::null_mut()),
        Err(error) => Err(error.raw_os_error().unwrap_or(libc::EIO)),
    });
    match done {
        Some(Ok(entry)) => entry,
        Some(Err(code)) => {
            set_errno(code);
            std::ptr::null_mut()
        }
        None => std::ptr::null_mut(),
    }
}

/// # Safety
/// As for readdir_r(3).
unsafe fn read_to(stream: &Stream, to: *mut dirent64, result: *mut *mut dirent64) -> c_int {
    let before = errno();
    set_errno(0);
    let entry = read(stream);
    let code = errno();
    set_errno(before);
    // SAFETY: the caller's room; the entry is this stream's until it is read on.
    unsafe {
        if !entry.is_null() {
            let len = usize::from((*entry).d_reclen);
            std::ptr::copy_nonoverlapping(entry.cast::<u8>(), to.cast::<u8>(), len);
        }
        *result = if entry.is_null() { entry } else { to };
    }
    code
}

/// # Safety
/// As for closedir(3); the stream is this library's.
unsafe fn close(dir: *mut DIR) -> c_int {
    aside(|| {
        {
            let mut open = lock(&OPEN);
            let open = open.get_or_insert_default();
            open.remove(&(dir as usize));
            COUNT.store(open.len(), Ordering::Relaxed);
        }
        // SAFETY: made by `open`, and its caller's last use of it.
        let stream = unsafe { &*dir.cast::<Stream>() };
        drop(crate::table::Closing::begin(stream.fd));
        // SAFETY: this stream's.
        unsafe { libc::syscall(libc::SYS_close, stream.fd) };
        // Not where a thread of the parent's was at work as this process was forked.
        let free = stream.state.try_lock().is_ok_and(|state| {
            if !state.kernel.is_null() {
                // SAFETY: this stream's.
                unsafe { next::closedir(state.kernel) };
            }
            true
        });
        if free {
            // SAFETY: as above; nobody has it any more.
            drop(unsafe { Box::from_raw(dir.cast::<Stream>()) });
        }
    });
    0
}

/// The stream's descriptor, one that can be read.
fn descriptor(stream: &Stream) -> c_int {
    let done = aside(|| {
        let mut state = lock(&stream.state);
        if !state.solid {
            let real = state.again()?;
            // SAFETY: numbers; both are this stream's.
            unsafe {
                libc::syscall(libc::SYS_dup3, real, state.fd, libc::O_CLOEXEC);
                libc::syscall(libc::SYS_close, real);
            }
            state.solid = true;
            crate::table::opened(state.fd);
        }
        Ok(state.fd)
    });
    match done {
        Some(Ok(fd)) => fd,
        Some(Err(code)) => {
            set_errno(code);
            -1
        }
        None => -1,
    }
}

/// This module's lock.
pub(crate) type Held = MutexGuard<'static, Option<HashSet<usize>>>;

/// Keeps other threads from it, for a fork.
pub(crate) fn hold() -> Held {
    lock(&OPEN)
}

/// In a child process: the session is the parent's, so the kernel's directories are read on.
pub(crate) fn child(open: Held) {
    for stream in open.iter().flatten() {
        // SAFETY: open, as it is in the list.
        let stream = unsafe { &*(*stream as *const Stream) };
        if let Ok(mut state) = stream.state.try_lock() {
            std::mem::forget(state.directory.take());
        }
    }
}

/// Functions under the names by which programs know them.
#[cfg(not(test))]
mod exported {
    use super::*;

    macro_rules! streams {
        ($($name:ident($dir:ident $(, $arg:ident: $type:ty)*) -> $result:ty, $stream:ident
            = $served:expr;)*) => {
            $(
                /// As the manual says.
                ///
                /// # Safety
                /// As the manual says.
                #[unsafe(no_mangle)]
                pub unsafe extern "C" fn $name($dir: *mut DIR $(, $arg: $type)*) -> $result {
                    match ours($dir) {
                        // SAFETY: the caller's own arguments.
                        #[allow(unused_unsafe)]
                        Some($stream) => unsafe { $served },
                        // SAFETY: the caller's own arguments.
                        None => unsafe { next::$name($dir $(, $arg)*) },
                    }
                }
            )*
        };
    }

    fn told(stream: &Stream) -> c_long {
        aside(|| lock(&stream.state).at as c_long).unwrap_or(-1)
    }

    fn sought(stream: &Stream, at: c_long) {
        aside(|| lock(&stream.state).go(at as u64));
    }

    streams! {
        readdir(dir) -> *mut dirent64, stream = read(stream);
        readdir64(dir) -> *mut dirent64, stream = read(stream);
        readdir_r(dir, to: *mut dirent64, result: *mut *mut dirent64) -> c_int, stream =
            read_to(stream, to, result);
        readdir64_r(dir, to: *mut dirent64, result: *mut *mut dirent64) -> c_int, stream =
            read_to(stream, to, result);
        dirfd(dir) -> c_int, stream = descriptor(stream);
        rewinddir(dir) -> (), stream = sought(stream, 0);
        seekdir(dir, at: c_long) -> (), stream = sought(stream, at);
        telldir(dir) -> c_long, stream = told(stream);
    }

    /// As the manual says.
    ///
    /// # Safety
    /// As the manual says.
    #[unsafe(no_mangle)]
    pub unsafe extern "C" fn closedir(dir: *mut DIR) -> c_int {
        if ours(dir).is_some() {
            // SAFETY: the caller's own argument.
            return unsafe { close(dir) };
        }
        // SAFETY: the caller's own argument.
        unsafe { next::closedir(dir) }
    }

    /// As the manual says.
    ///
    /// # Safety
    /// As the manual says.
    #[unsafe(no_mangle)]
    pub unsafe extern "C" fn opendir(path: *const c_char) -> *mut DIR {
        // SAFETY: the caller's own argument.
        match unsafe { open(path) } {
            Some(Ok(dir)) => dir,
            Some(Err(code)) => {
                set_errno(code);
                std::ptr::null_mut()
            }
            // SAFETY: the caller's own argument.
            None => unsafe { next::opendir(path) },
        }
    }
}
