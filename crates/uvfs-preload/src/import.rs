//! Servers that this process is attached to, and taking over its descriptors.

use std::ffi::c_int;
use std::fmt::Display;
use std::os::fd::BorrowedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use uvfs_client::{Client, Config, Connection, Stats, Token};

use crate::dispatch;
use crate::promotion::{self, Moves};
use crate::ranked::{Guard, Ranked};
use crate::real::{SignalMask, stat};
use crate::report::{self, Why, say};
use crate::table::{self, Known, Opened, Position, Use};
use uvfs_sys::lock;

/// Servers at a time.
const SERVERS: usize = 8;
/// Devices that are remembered as none of uvfs's.
const DEVICES: usize = 64;
/// Files with writable shared mappings that are remembered; with more all go through the kernel.
const MAPPED: usize = 256;
/// How long falling back waits for calls that are under way.
const LAST_CALLS: Duration = Duration::from_secs(1);
/// `FUSE_SUPER_MAGIC` of linux/magic.h.
const FUSE: i64 = 0x6573_5546;

struct Attached {
    socket: PathBuf,
    /// `None` if it could not attach.
    client: Option<Client>,
}

/// Servers and files.
struct Servers {
    attached: Vec<Attached>,
    /// The statistics of sessions that have ended.
    ended: Vec<Stats>,
    /// Devices whose files are left to the kernel.
    foreign: Vec<u64>,
    mapped: Vec<(u64, u64)>,
}

/// The state of this module.
struct Imports {
    servers: Ranked<Servers, { crate::rank::SERVERS }>,
    /// Set once nothing may be imported any more.
    over: AtomicBool,
    /// Set when the library is ready.
    ready: AtomicBool,
    /// Set when something was imported.
    any: AtomicBool,
    /// Set before the first attachment.
    session: AtomicBool,
    trouble: AtomicBool,
}

static STATE: Imports = Imports {
    servers: Ranked::new(Servers {
        attached: Vec::new(),
        ended: Vec::new(),
        foreign: Vec::new(),
        mapped: Vec::new(),
    }),
    over: AtomicBool::new(false),
    ready: AtomicBool::new(false),
    any: AtomicBool::new(false),
    session: AtomicBool::new(false),
    trouble: AtomicBool::new(false),
};

/// Whether the library is ready for the program's calls.
pub(crate) fn is_ready() -> bool {
    STATE.ready.load(Ordering::Relaxed)
}

pub(crate) fn set_ready(is: bool) {
    STATE.ready.store(is, Ordering::Release);
}

/// One line, once in a process.
pub(crate) fn trouble(error: impl Display) {
    if !STATE.trouble.swap(true, Ordering::Relaxed) {
        say(format_args!(
            "uvfs run: {error}; going on through the kernel"
        ));
    }
}

fn attach(socket: PathBuf) -> Attached {
    STATE.session.store(true, Ordering::SeqCst);
    dispatch::last::watch();
    let _making = table::RaceGuard::makes();
    let config = Config::default().memory(promotion::memory());
    let seconds = |name| {
        let seconds = std::env::var(name).ok()?.parse().ok()?;
        Duration::try_from_secs_f64(seconds).ok()
    };
    let client = Connection::connect(&socket).and_then(|server| {
        let mut server = server.on_descriptor(Arc::new(table::own));
        if let Some(bound) = seconds("UVFS_RUN_RECONNECT") {
            server = server.reconnect_within(bound);
        }
        if let Some(bound) = seconds("UVFS_RUN_TIMEOUT") {
            server = server.answers_within(bound);
        }
        Client::new(server, config)
    });
    if let Err(error) = &client {
        trouble(error);
    }
    if let Ok(client) = &client {
        for fd in client.descriptors() {
            table::own(fd, true);
        }
    }
    Attached {
        socket,
        client: client.ok(),
    }
}

fn is_fuse(fd: c_int) -> bool {
    // SAFETY: plain data, filled by the call.
    let mut st: libc::statfs = unsafe { std::mem::zeroed() };
    // SAFETY: `st` is a statfs buffer.
    unsafe { libc::fstatfs(fd, &mut st) == 0 && st.f_type == FUSE }
}

/// Regular files of FUSE mounts, by device and inode; without asking a server.
fn candidate(state: &mut Servers, fd: c_int) -> Option<(u64, u64)> {
    let st = stat(fd)?;
    if st.st_mode & libc::S_IFMT != libc::S_IFREG || state.foreign.contains(&st.st_dev) {
        return None;
    }
    if !is_fuse(fd) {
        forget_device(state, st.st_dev);
        return None;
    }
    Some((st.st_dev, st.st_ino))
}

/// Whether a descriptor that was just opened is a regular file of a FUSE mount; for the report.
pub(crate) fn is_on_mount(fd: c_int) -> bool {
    candidate(&mut STATE.servers.lock(), fd).is_some()
}

fn forget_device(state: &mut Servers, device: u64) {
    if state.foreign.len() == DEVICES {
        state.foreign.remove(0);
    }
    state.foreign.push(device);
}

/// Whether the size of files is limited, which the kernel has to see to.
pub(crate) fn limited() -> bool {
    // SAFETY: plain data, filled by the call.
    let mut limit: libc::rlimit = unsafe { std::mem::zeroed() };
    // SAFETY: `limit` is an rlimit buffer.
    unsafe { libc::getrlimit(libc::RLIMIT_FSIZE, &mut limit) };
    limit.rlim_cur != libc::RLIM_INFINITY
}

/// The open file of the server behind a descriptor; nothing where it is to be left to the kernel.
fn open(state: &mut Servers, fd: c_int) -> Option<(Opened, c_int)> {
    if STATE.over.load(Ordering::Relaxed) {
        return None;
    }
    let inode = candidate(state, fd)?;
    let list = &mut state.mapped;
    let mapped = |inode| {
        if !list.contains(&inode) && list.len() < MAPPED {
            list.push(inode);
        }
    };
    if !dispatch::may_import(fd, mapped) {
        report::refused(Why::Unseen);
        return None;
    }
    if state.mapped.len() == MAPPED || state.mapped.contains(&inode) {
        report::refused(Why::Mapped);
        return None;
    }
    let flags = crate::next::status_flags(fd)?;
    if flags & libc::O_PATH != 0 {
        return None;
    }
    // SIGXFSZ and EFBIG are the kernel's to give.
    if flags & libc::O_ACCMODE != libc::O_RDONLY && limited() {
        report::refused(Why::Limited);
        return None;
    }
    // SAFETY: it is the caller's, and open: fcntl has just answered.
    let borrowed = unsafe { BorrowedFd::borrow_raw(fd) };
    let _calm = SignalMask::new();
    let token = match Token::of(borrowed) {
        Ok(token) => token,
        Err(error) => {
            // EBUSY: the kernel reads and writes this one without the server.
            let backed = error.errno() == Errno::BUSY;
            report::refused(if backed { Why::Backed } else { Why::NoSession });
            // EAGAIN: too many are out. Neither says anything of other files.
            if !backed && error.errno() != Errno::AGAIN {
                forget_device(state, inode.0);
            }
            return None;
        }
    };
    let index = server(state, token.socket());
    let client = index.and_then(|index| state.attached[index].client.as_ref());
    let Some(client) = client else {
        report::refused(Why::NoSession);
        if index.is_some() {
            forget_device(state, inode.0);
        }
        return None;
    };
    match client.import_token(&token) {
        Ok(file) => {
            STATE.any.store(true, Ordering::Relaxed);
            report::imported();
            let opened = Opened { file, inode, flags };
            Some((opened, flags))
        }
        Err(error) => {
            trouble(&error);
            report::refused(Why::NoSession);
            // A server that did not come back while this waited for it.
            if error.errno() == Errno::NOTCONN {
                forget_device(state, inode.0);
            }
            None
        }
    }
}

/// The place of a server in the list, attached to now if it was not; nothing when there are too
/// many.
fn server(state: &mut Servers, socket: &Path) -> Option<usize> {
    let known = state.attached.iter().position(|one| one.socket == socket);
    match known {
        Some(index) => Some(index),
        None if state.attached.len() < SERVERS => {
            state.attached.push(attach(socket.to_owned()));
            Some(state.attached.len() - 1)
        }
        None => None,
    }
}

/// The access that a call needs of a descriptor.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Wants {
    /// The call says where it reads or writes: any open file may be imported for it.
    File(Moves),
    /// The call uses the position: only a description that no other process has may be imported.
    Position(Moves),
    /// A file that is imported already.
    Imported,
}

/// Whether [`described`] may find something for a call; counts the call.
#[inline]
pub(crate) fn may_serve(fd: c_int, wants: Wants) -> bool {
    match wants {
        Wants::File(moves) | Wants::Position(moves) => {
            table::is_imported(fd) || promotion::count(fd, moves, any)
        }
        Wants::Imported => table::is_imported(fd),
    }
}

/// The description of a descriptor, whose file is imported now if that pays. `None` leaves the call to the kernel.
pub(crate) fn described(fd: c_int, wants: Wants) -> Option<Use> {
    let worth = |private: bool| match wants {
        Wants::File(moves) => promotion::pays(fd, moves, any),
        Wants::Position(moves) => private && promotion::pays(fd, moves, any),
        Wants::Imported => false,
    };
    if !is_ready() || dispatch::is_over() && !report::is_on() {
        return None;
    }
    for _ in 0..8 {
        let (seen, private) = match table::look(fd) {
            Known::Foreign | Known::Own => return None,
            Known::Described(one) if one.is_kernels() => return None,
            Known::Described(one) if one.opened().is_some() => return Some(one),
            Known::Described(one) if worth(one.private.load(Ordering::Relaxed)) => {
                import(fd, &one, wants);
                continue;
            }
            Known::Undecided(seen, private) if worth(private) => (seen, private),
            Known::Described(_) | Known::Undecided(..) => return None,
        };
        let mut state = STATE.servers.lock();
        let Some((opened, flags)) = open(&mut state, fd) else {
            table::decide(fd, seen, None);
            continue;
        };
        let Some(one) = Use::new(private) else {
            table::decide(fd, seen, None);
            continue;
        };
        // From here on other threads' calls wait for the servers, but for those in the kernel already.
        if !table::decide(fd, seen, Some(one.again())) {
            continue;
        }
        settle(fd, &one, opened, flags, wants);
    }
    None
}

/// Imports what a duplicated descriptor shares.
fn import(fd: c_int, one: &Use, wants: Wants) {
    let mut state = STATE.servers.lock();
    if one.opened().is_some() || one.is_kernels() {
        return;
    }
    match open(&mut state, fd) {
        Some((opened, flags)) => settle(fd, one, opened, flags, wants),
        None => {
            one.give_to_kernel();
        }
    }
}

/// Gives a description its imported file, and its position if that is private. If other calls use the position in the
/// kernel, the whole description stays there.
fn settle(fd: c_int, one: &Use, opened: Opened, flags: c_int, wants: Wants) {
    let here = one.private.load(Ordering::Relaxed) && flags & libc::O_APPEND == 0;
    let own = matches!(wants, Wants::Position(_));
    // Calls that begin from here on see the file, and wait for its position.
    let mut position = lock(&one.position);
    one.set_opened(opened);
    if here && promotion::others_pass(fd, one, own) {
        report::returned(Why::Position);
        one.give_to_kernel();
    } else if here {
        // SAFETY: no pointers.
        let at = unsafe { crate::next::lseek(fd, 0, libc::SEEK_CUR) };
        if let Ok(at) = u64::try_from(at) {
            *position = Position::Here(at);
        }
    }
}

/// Puts a description's position back into the kernel, where others see it.
pub(crate) fn publish(fd: c_int, one: &Use) {
    one.private.store(false, Ordering::Relaxed);
    let mut position = lock(&one.position);
    if let Position::Here(at) = *position {
        table::while_it_has(fd, one, || {
            // SAFETY: no pointers.
            unsafe { crate::next::lseek(fd, at as i64, libc::SEEK_SET) };
            *position = Position::Kernel;
        });
    }
}

/// As [`publish`], for a descriptor.
pub(crate) fn publish_fd(fd: c_int) {
    match table::look(fd) {
        Known::Described(one) => publish(fd, &one),
        _ => table::no_longer_private(fd),
    }
}

/// As [`publish`], for all.
pub(crate) fn publish_all() {
    table::all().for_each(publish_fd);
}

/// Has the kernel ask for the attributes of what was imported.
pub(crate) fn refresh(fd: c_int) {
    if let Known::Described(one) = table::look(fd)
        && one.opened().is_some()
    {
        let _ = stat(fd);
    }
}

/// Leaves everything that was imported to the kernel.
pub(crate) fn all_to_kernel() {
    for fd in table::all() {
        if let Known::Described(one) = table::look(fd)
            && let Some(opened) = one.opened()
        {
            let _ = opened.file.write_back(0, u64::MAX, true);
            give_up(fd, &one, Why::Limited);
        }
    }
}

/// Leaves an imported description to the kernel, which learns the file's size.
pub(crate) fn give_up(fd: c_int, one: &Use, why: Why) {
    publish(fd, one);
    if one.opened().is_some() {
        table::while_it_has(fd, one, || {
            let _ = stat(fd);
        });
    }
    if one.give_to_kernel() {
        report::returned(why);
    }
}

/// A file is mapped shared and writable: no server sees what a program stores through the mapping.
pub(crate) fn mapped(fd: c_int) {
    let mut state = STATE.servers.lock();
    let Some(inode) = candidate(&mut state, fd) else {
        return;
    };
    if !state.mapped.contains(&inode) && state.mapped.len() < MAPPED {
        state.mapped.push(inode);
    }
    let all = state.mapped.len() == MAPPED;
    drop(state);
    for fd in table::all() {
        if let Known::Described(one) = table::look(fd)
            && one
                .opened()
                .is_some_and(|opened| all || opened.inode == inode)
        {
            let _ = (one.opened()).map(|opened| opened.file.write_back(0, u64::MAX, true));
            give_up(fd, &one, Why::Mapped);
        }
    }
}

/// Writes what is dirty.
pub(crate) fn flush() {
    let clients: Vec<Client> = STATE
        .servers
        .lock()
        .attached
        .iter()
        .filter_map(|one| one.client.clone())
        .collect();
    for client in clients {
        if let Err(error) = client.flush() {
            trouble(format_args!("writing what is dirty: {error}"));
        }
    }
}

/// Writes what is dirty, and has the kernel learn the sizes: sendfile(2), mappings and appending go by those that it
/// knows.
pub(crate) fn show() {
    flush();
    table::all().for_each(refresh);
}

/// Everything goes through the kernel from now on, and the sessions end.
pub(crate) fn leave() {
    STATE.over.store(true, Ordering::Relaxed);
    // An import that has not seen that comes to its end.
    drop(STATE.servers.lock());
    for fd in table::all() {
        if let Known::Described(one) = table::look(fd) {
            give_up(fd, &one, Why::Unseen);
            drop(table::Closing::begin(fd));
        }
    }
    flush();
    let mut state = STATE.servers.lock();
    let mut open = Vec::new();
    for client in std::mem::take(&mut state.attached)
        .into_iter()
        .filter_map(|one| one.client)
    {
        state.ended.push(client.stats());
        open.extend(client.descriptors());
    }
    drop(state);
    Client::end_common_thread();
    // Calls of other threads that are under way have the last references.
    let until = Instant::now() + LAST_CALLS;
    while open.iter().any(|fd| table::is_own(*fd)) && Instant::now() < until {
        std::thread::sleep(Duration::from_micros(100));
    }
}

/// Whether there is, or may soon be, a session whose threads have descriptors.
pub(crate) fn any_session() -> bool {
    STATE.session.load(Ordering::Relaxed)
}

/// Whether anything was imported.
pub(crate) fn any() -> bool {
    STATE.any.load(Ordering::Relaxed)
}

/// The statistics of all servers' caches.
pub(crate) fn stats() -> Vec<Stats> {
    let state = STATE.servers.lock();
    let clients = state.attached.iter();
    let now = clients.filter_map(|one| Some(one.client.as_ref()?.stats()));
    now.chain(state.ended.iter().copied()).collect()
}

/// Positions are in the kernel, and nothing is imported while this lives.
pub(crate) struct Hold(Guard<'static, Servers, { crate::rank::SERVERS }>);

impl Hold {
    pub(crate) fn new() -> Self {
        let state = STATE.servers.lock();
        table::all().for_each(publish_fd);
        Self(state)
    }

    /// In the parent after a fork: what others opened meanwhile the child may have too.
    pub(crate) fn parent(self) {
        table::all().for_each(table::no_longer_private);
    }

    /// In the child: the sessions are the parent's. Their descriptors are closed here, or a server
    /// would not see the parent's end.
    pub(crate) fn child(mut self) {
        for one in std::mem::take(&mut self.0.attached) {
            for fd in one.client.iter().flat_map(Client::descriptors) {
                // SAFETY: it is this library's own.
                unsafe { crate::next::close(fd) };
            }
            std::mem::forget(one);
        }
        table::forget_all();
        STATE.any.store(false, Ordering::Relaxed);
        promotion::child();
        report::forget();
    }
}
