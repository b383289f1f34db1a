//! The control socket, over which commands ask the server about the mount.
//!
//! One request a line, one answer a line: `stats` gives a [`Report`] as JSON.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::fs::FileSystem;
use crate::session::Session;
use crate::stats::Report;

/// The longest request.
const LINE: u64 = 256;
/// The longest answer that a client takes.
const ANSWER: u64 = 1 << 20;
/// How long a client may take in all: the server's end waits for it.
const PATIENCE: Duration = Duration::from_secs(1);
/// How long a server may take to answer.
const ANSWERS_WITHIN: Duration = Duration::from_secs(5);

/// A listening control socket; dropping it removes it.
pub struct Control {
    _listening: Listening,
}

/// A socket with a name, and the thread that accepts on it; dropping it ends both.
pub(crate) struct Listening {
    path: PathBuf,
    listener: UnixListener,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Listening {
    /// Has a thread of this name call `accept`, which returns when a connection comes and the flag is set.
    ///
    /// # Errors
    /// When there can be no thread or no descriptor for it.
    pub(crate) fn start(
        path: &Path,
        listener: UnixListener,
        name: &str,
        accept: impl FnOnce(&UnixListener, &AtomicBool) + Send + 'static,
    ) -> io::Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let (other, flag) = (listener.try_clone()?, stop.clone());
        let thread = std::thread::Builder::new()
            .name(name.into())
            .spawn(move || accept(&other, &flag))?;
        Ok(Self {
            path: path.to_owned(),
            listener,
            stop,
            thread: Some(thread),
        })
    }
}

impl Drop for Listening {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        // First, so that a server that comes after this one finds the name free, and keeps it.
        let _ = std::fs::remove_file(&self.path);
        // Wakes the accept, also where another process removed the socket's name.
        let _ = rustix::net::shutdown(&self.listener, rustix::net::Shutdown::Both);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Where sockets are made: /run/uvfs for root, else the user's own runtime directory.
///
/// # Errors
/// When it can't be made, or is another user's.
pub fn directory() -> io::Result<PathBuf> {
    let dir = if rustix::process::geteuid().is_root() {
        PathBuf::from("/run/uvfs")
    } else {
        match std::env::var_os("XDG_RUNTIME_DIR") {
            Some(dir) => Path::new(&dir).join("uvfs"),
            None => {
                std::env::temp_dir().join(format!("uvfs-{}", rustix::process::geteuid().as_raw()))
            }
        }
    };
    if !dir.exists() {
        // No other user may write to it, not even before its mode is set.
        let mut new = std::fs::DirBuilder::new();
        new.recursive(true).mode(0o711).create(&dir)?;
    }
    let meta = std::fs::symlink_metadata(&dir)?;
    if !meta.is_dir() || meta.uid() != rustix::process::geteuid().as_raw() {
        let text = format!("{} is not a directory of this user's", dir.display());
        return Err(io::Error::new(io::ErrorKind::PermissionDenied, text));
    }
    // Others may pass through to the sockets that they may use, and list nothing.
    if meta.mode() & 0o7777 != 0o711 {
        std::fs::set_permissions(&dir, std::fs::Permissions::from_mode(0o711))?;
    }
    Ok(dir)
}

/// Listens at a path that has this mode from the beginning, but for the program's umask. A confined server, which may
/// change no mode of a name, has none.
pub(crate) fn listen_at(path: &Path, mode: u32) -> io::Result<UnixListener> {
    use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
    let flags = SocketFlags::CLOEXEC;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    // bind(2) gives it to the name.
    rustix::fs::fchmod(&socket, rustix::fs::Mode::from_raw_mode(mode))?;
    rustix::net::bind(&socket, &SocketAddrUnix::new(path)?)?;
    if std::fs::symlink_metadata(path)?.mode() & 0o777 != mode {
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode))?;
    }
    rustix::net::listen(&socket, libc::SOMAXCONN)?;
    Ok(socket.into())
}

/// A name for a socket of this process that no other has: with a dead process's socket removed.
pub(crate) fn socket_path(suffix: &str) -> io::Result<PathBuf> {
    static NUMBER: AtomicU32 = AtomicU32::new(0);
    let number = NUMBER.fetch_add(1, Ordering::Relaxed);
    let path = directory()?.join(format!("{}-{number}{suffix}", std::process::id()));
    match std::fs::remove_file(&path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(path),
    }
}

impl Control {
    /// Makes a session's socket, reachable by its owner alone, and tells the session its path.
    ///
    /// # Errors
    /// When the directory or the socket can't be made.
    pub fn start<F: FileSystem>(session: &Arc<Session<F>>) -> io::Result<Self> {
        let path = socket_path(".sock")?;
        let listener = listen_at(&path, 0o600)?;
        session.set_control_path(&path);
        let session = Arc::downgrade(session);
        let accept = move |listener: &_, stop: &_| listen(listener, &session, stop);
        let _listening = Listening::start(&path, listener, "uvfs-control", accept)?;
        Ok(Self { _listening })
    }
}

fn listen<F: FileSystem>(listener: &UnixListener, session: &Weak<Session<F>>, stop: &AtomicBool) {
    for client in listener.incoming() {
        if stop.load(Ordering::Acquire) {
            return;
        }
        let Ok(client) = client else {
            // No descriptors are left, which is not a reason to spin.
            std::thread::sleep(Duration::from_millis(10));
            continue;
        };
        let Some(session) = session.upgrade() else {
            continue;
        };
        if let Err(error) = answer(&client, &session) {
            tracing::debug!(%error, "a control client");
        }
    }
}

/// A stream, all calls on which end at one time.
struct Until<'a> {
    stream: &'a UnixStream,
    end: Instant,
}

impl Until<'_> {
    fn left(&self) -> io::Result<Option<Duration>> {
        match self.end.saturating_duration_since(Instant::now()) {
            Duration::ZERO => Err(io::ErrorKind::TimedOut.into()),
            left => Ok(Some(left)),
        }
    }
}

impl Read for Until<'_> {
    fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
        self.stream.set_read_timeout(self.left()?)?;
        self.stream.read(to)
    }
}

impl Write for Until<'_> {
    fn write(&mut self, from: &[u8]) -> io::Result<usize> {
        self.stream.set_write_timeout(self.left()?)?;
        self.stream.write(from)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn answer<F: FileSystem>(stream: &UnixStream, session: &Session<F>) -> io::Result<()> {
    // The socket's mode keeps others out, from when it is set.
    if !uvfs_sys::is_own_user(uvfs_queue::attach::peer(stream)?.uid) {
        return Err(io::ErrorKind::PermissionDenied.into());
    }
    let end = Instant::now() + PATIENCE;
    let mut client = Until { stream, end };
    let mut line = String::new();
    BufReader::new((&mut client).take(LINE)).read_line(&mut line)?;
    match line.trim() {
        "stats" => {
            let mut text = serde_json::to_vec(&session.report())?;
            text.push(b'\n');
            client.write_all(&text)
        }
        _ => client.write_all(b"{\"error\":\"not understood\"}\n"),
    }
}

/// Asks the server behind a control socket for its figures.
///
/// # Errors
/// ECONNREFUSED or ENOENT when it is gone, EACCES for another user's socket.
pub fn ask_stats(socket: &Path) -> io::Result<Report> {
    let mut server = UnixStream::connect(socket)?;
    server.set_read_timeout(Some(ANSWERS_WITHIN))?;
    server.write_all(b"stats\n")?;
    let mut text = String::new();
    BufReader::new(server.take(ANSWER)).read_line(&mut text)?;
    Ok(serde_json::from_str(&text)?)
}
