//! Gives up what a program has no use for, so that an attacker who takes it over has little.
//!
//! A root server of a directory keeps the capabilities that serving takes. The code that reads an image, which may
//! come from anywhere, is confined by lists of what it may do: the threads that serve one, and the commands that look
//! into one or make one of an archive. They get next to no capabilities, open only the files that they are told to
//! (Landlock), and make only the system calls of a list (seccomp); others fail with EPERM.
//!
//! Threads begin with what the one has that starts them. A server's first thread, which does no more than wait and
//! unmount, stays as it was.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};

use landlock::{
    ABI, Access, AccessFs, AccessNet, CompatLevel, Compatible, Ruleset, RulesetAttr,
    RulesetCreatedAttr, RulesetStatus, Scope, path_beneath_rules,
};
use rustix::thread::{CapabilitySet, capabilities, set_capabilities};
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
    SeccompRule, TargetArch,
};
use uvfs_io::engine::EngineKind;
use uvfs_sys::SYS_FCHMODAT2;

/// To serve a directory: files of all users are reached by handles (DAC_READ_SEARCH), made for callers
/// (SETUID, SETGID, and SETPCAP for the securebit that goes with it), read, written and changed in every way;
/// SYS_ADMIN is for fanotify, backing files, trusted attributes and unmounting, SYS_NICE and IPC_LOCK are for
/// the threads and their rings. Not CAP_SYS_RESOURCE, whose holder no disk quota binds.
const FOR_DIRECTORIES: CapabilitySet = CapabilitySet::CHOWN
    .union(CapabilitySet::DAC_OVERRIDE)
    .union(CapabilitySet::DAC_READ_SEARCH)
    .union(CapabilitySet::FOWNER)
    .union(CapabilitySet::FSETID)
    .union(CapabilitySet::IPC_LOCK)
    .union(CapabilitySet::LINUX_IMMUTABLE)
    .union(CapabilitySet::MAC_ADMIN)
    .union(CapabilitySet::MAC_OVERRIDE)
    .union(CapabilitySet::MKNOD)
    .union(CapabilitySet::SETFCAP)
    .union(CapabilitySet::SETGID)
    .union(CapabilitySet::SETPCAP)
    .union(CapabilitySet::SETUID)
    .union(CapabilitySet::SYS_ADMIN)
    .union(CapabilitySet::SYS_NICE);

/// To serve an image.
const FOR_IMAGES: CapabilitySet = CapabilitySet::IPC_LOCK.union(CapabilitySet::SYS_NICE);

/// To serve an object store: SYS_ADMIN is for mounting and backing files, the others are for the threads and their
/// rings. The cache's files are the server's own.
#[cfg(feature = "object")]
const FOR_STORES: CapabilitySet = FOR_IMAGES.union(CapabilitySet::SYS_ADMIN);

/// Gives up all capabilities of this thread, and of those that it starts, but `kept`.
fn keep(kept: CapabilitySet) -> io::Result<()> {
    let mut now = capabilities(None)?;
    now.effective &= kept;
    now.permitted &= kept;
    now.inheritable &= kept;
    Ok(set_capabilities(None, now)?)
}

/// For a server of a directory, before its threads begin.
pub fn directory_server() {
    if let Err(error) = keep(FOR_DIRECTORIES) {
        tracing::warn!(%error, "the server keeps capabilities that it does not need; disk quotas do not bind \
            the users of this mount");
    }
}

/// For a server of an object store, before its threads begin. What it talks to is known only by name, so neither files nor
/// system calls are restricted.
#[cfg(feature = "object")]
pub fn store_server() {
    if let Err(error) = keep(FOR_STORES) {
        tracing::warn!(%error, "the server keeps capabilities that it does not need");
    }
}

/// For a server of an image, before its threads begin; what this kernel can't do is left out.
pub fn image_server() {
    // It makes nothing but sockets, each with the mode that it is to have.
    rustix::process::umask(rustix::fs::Mode::empty());
    let sockets = uvfs_server::control::directory();
    let files = Files {
        fuse: true,
        sockets: sockets.ok(),
        ..Files::default()
    };
    confine(FOR_IMAGES, &files, &[BASE, RINGS, SERVING]);
}

/// The system calls of an engine besides those of all.
fn of_engine(engine: EngineKind) -> &'static [libc::c_long] {
    match engine {
        EngineKind::Uring => RINGS,
        _ => &[],
    }
}

/// For a command that looks into an image that it has opened.
pub fn reader(engine: EngineKind) {
    let calls = [BASE, of_engine(engine)];
    confine(CapabilitySet::empty(), &Files::default(), &calls);
}

/// For a command that looks at all of an image that it has opened, or repairs it. Its findings may not fit into memory.
pub fn checker() {
    let files = Files {
        scratch: vec![std::env::temp_dir()],
        ..Files::default()
    };
    // A superuser's directory for temporary files may be another user's.
    let kept = CapabilitySet::DAC_OVERRIDE;
    confine(kept, &files, &[BASE, RINGS, MAKING]);
}

/// For a command that makes an image, perhaps with a log of its own, and a temporary file in `scratch`, from what it has
/// opened or what is in a directory.
pub fn maker(image: &Path, log: Option<&Path>, scratch: &Path, from: Option<&PathBuf>) {
    let mut files = Files {
        read: from.cloned(),
        scratch: vec![scratch.to_owned()],
        ..Files::default()
    };
    files
        .images
        .extend(image.exists().then(|| image.to_owned()));
    match log {
        Some(log) if log.exists() => files.images.push(log.to_owned()),
        Some(log) => files.scratch.push(uvfs_sys::directory_of(log).to_owned()),
        None => {}
    }
    // Without them a superuser could open less than its own files.
    let kept = CapabilitySet::DAC_OVERRIDE | CapabilitySet::DAC_READ_SEARCH;
    confine(kept, &files, &[BASE, RINGS, MAKING]);
}

/// For a command that copies out of an image: into a directory, or to what is not there yet.
pub fn copier(destination: &Path, engine: EngineKind) {
    let directory = match destination.is_dir() {
        true => destination,
        false => uvfs_sys::directory_of(destination),
    };
    let files = Files {
        copies: Some(directory.to_owned()),
        ..Files::default()
    };
    // Owners, modes and devices are as in the image.
    let kept = FOR_DIRECTORIES - (CapabilitySet::SETPCAP | CapabilitySet::SETUID);
    let calls = [BASE, MAKING, COPYING, of_engine(engine)];
    confine(kept, &files, &calls);
}

/// Which files a confined thread may open, besides what `/proc` and `/sys` tell.
#[derive(Default)]
struct Files {
    /// `/dev/fuse`.
    fuse: bool,
    /// Sockets that it makes in this directory.
    sockets: Option<PathBuf>,
    /// Images, or devices.
    images: Vec<PathBuf>,
    /// Regular files, in these directories.
    scratch: Vec<PathBuf>,
    /// Everything in this directory, to be read.
    read: Option<PathBuf>,
    /// Everything, in this directory.
    copies: Option<PathBuf>,
}

fn confine(capabilities: CapabilitySet, files: &Files, calls: &[&[libc::c_long]]) {
    if let Err(error) = keep(capabilities) {
        tracing::warn!(%error, "capabilities that are not needed are kept");
    }
    match confine_files(files) {
        Ok(RulesetStatus::FullyEnforced) => {}
        Ok(status) => tracing::info!(?status, "this kernel's Landlock confines only in part"),
        Err(error) => tracing::warn!(%error, "Landlock does not confine this program"),
    }
    if let Err(error) = allow_calls(calls) {
        tracing::warn!(%error, "no system call is refused to this program");
    }
}

fn confine_files(files: &Files) -> Result<RulesetStatus, Box<dyn std::error::Error>> {
    let abi = ABI::V6;
    let read = AccessFs::ReadFile | AccessFs::ReadDir;
    let sockets = AccessFs::MakeSock | AccessFs::RemoveFile | AccessFs::ReadDir;
    let regular =
        read | AccessFs::WriteFile | AccessFs::MakeReg | AccessFs::RemoveFile | AccessFs::Truncate;
    let fuse = files.fuse.then_some("/dev/fuse");
    let status = Ruleset::default()
        .set_compatibility(CompatLevel::BestEffort)
        .handle_access(AccessFs::from_all(abi))?
        .handle_access(AccessNet::from_all(abi))?
        .scope(Scope::from_all(abi))?
        .create()?
        .add_rules(path_beneath_rules(["/proc", "/sys"], read))?
        .add_rules(path_beneath_rules(fuse, AccessFs::from_all(abi)))?
        .add_rules(path_beneath_rules(&files.sockets, sockets))?
        .add_rules(path_beneath_rules(&files.read, read))?
        .add_rules(path_beneath_rules(&files.images, AccessFs::from_all(abi)))?
        .add_rules(path_beneath_rules(&files.scratch, regular))?
        .add_rules(path_beneath_rules(
            &files.copies,
            AccessFs::from_all(abi) & !AccessFs::Execute,
        ))?
        .restrict_self()?;
    Ok(status.ruleset)
}

/// System calls, and those that only this architecture still has.
macro_rules! calls {
    ($($call:ident)* $(; x86_64: $($older:ident)*)?) => {{
        use libc::*;
        &[$($call,)* $($(#[cfg(target_arch = "x86_64")] $older,)*)?]
    }};
}

/// The calls of every program: memory, threads, time, and what is done with descriptors. Opening is Landlock's to
/// allow.
const BASE: &[libc::c_long] = calls! {
    SYS_brk SYS_clock_getres SYS_clock_gettime SYS_clock_nanosleep SYS_close SYS_close_range
    SYS_copy_file_range SYS_dup SYS_dup3 SYS_epoll_create1 SYS_epoll_ctl SYS_epoll_pwait
    SYS_eventfd2 SYS_exit SYS_exit_group SYS_faccessat SYS_faccessat2 SYS_fadvise64 SYS_fcntl
    SYS_fdatasync SYS_flock SYS_fstat SYS_fstatfs SYS_fsync SYS_futex SYS_futex_waitv
    SYS_get_mempolicy SYS_get_robust_list SYS_getcpu SYS_getcwd SYS_getdents64 SYS_getegid
    SYS_geteuid SYS_getgid SYS_getpid SYS_getppid SYS_getpriority SYS_getrandom SYS_getrusage
    SYS_gettid SYS_gettimeofday SYS_getuid SYS_io_cancel SYS_io_destroy SYS_io_getevents
    SYS_io_setup SYS_io_submit SYS_ioctl SYS_lseek SYS_madvise SYS_membarrier SYS_memfd_create
    SYS_mlock SYS_mmap SYS_mprotect SYS_mremap SYS_munlock SYS_munmap SYS_nanosleep SYS_newfstatat
    SYS_openat SYS_pipe2 SYS_ppoll SYS_prctl SYS_pread64 SYS_preadv SYS_preadv2 SYS_pwrite64
    SYS_pwritev SYS_pwritev2 SYS_read SYS_readlinkat SYS_readv SYS_restart_syscall SYS_rseq
    SYS_rt_sigaction SYS_rt_sigprocmask SYS_rt_sigreturn SYS_rt_sigtimedwait
    SYS_sched_get_priority_max SYS_sched_get_priority_min SYS_sched_getaffinity SYS_sched_getparam
    SYS_sched_getscheduler SYS_sched_setaffinity SYS_sched_yield
    SYS_set_robust_list SYS_set_tid_address SYS_setpriority SYS_sigaltstack SYS_statfs SYS_statx
    SYS_sysinfo SYS_timerfd_create SYS_timerfd_settime SYS_umask SYS_uname SYS_write SYS_writev;
    x86_64:
    SYS_access SYS_arch_prctl SYS_dup2 SYS_epoll_wait SYS_getrlimit SYS_lstat SYS_open SYS_poll
    SYS_readlink SYS_stat SYS_time
};

/// Of programs that use io_uring. This list does not confine what a ring does: that takes Landlock.
const RINGS: &[libc::c_long] = calls! {
    SYS_io_uring_enter SYS_io_uring_register SYS_io_uring_setup
};

/// A server's: its sockets, what it does with descriptors that clients hand over, and the memory that a mount shares with its next
/// server.
const SERVING: &[libc::c_long] = calls! {
    SYS_accept4 SYS_bind SYS_ftruncate SYS_getpeername SYS_getsockname SYS_getsockopt SYS_listen SYS_recvfrom
    SYS_recvmsg SYS_sendmsg SYS_sendto SYS_setsockopt SYS_shutdown SYS_timer_create SYS_timer_delete
    SYS_timer_settime SYS_unlinkat SYS_vmsplice;
    x86_64:
    SYS_unlink
};

/// Of programs that write files.
const MAKING: &[libc::c_long] = calls! {
    SYS_fallocate SYS_ftruncate SYS_sync_file_range SYS_unlinkat;
    x86_64:
    SYS_unlink
};

/// Of programs that make files of every kind, with all that belongs to them.
const COPYING: &[libc::c_long] = calls! {
    SYS_fchmod SYS_fchmodat SYS_FCHMODAT2 SYS_fchown SYS_fchownat SYS_flistxattr SYS_fsetxattr
    SYS_lsetxattr SYS_linkat SYS_mkdirat SYS_mknodat SYS_openat2 SYS_renameat2 SYS_setxattr
    SYS_symlinkat SYS_utimensat;
    x86_64:
    SYS_chmod SYS_lchown SYS_mkdir SYS_rmdir SYS_symlink
};

/// Puts a character into a terminal's input (ioctl_tty(2)); C libraries give it different types.
const TIOCSTI: u64 = 0x5412;
/// Pastes, on a console of the machine (ioctl_console(2)).
const TIOCLINUX: u64 = 0x541c;

/// A rule for the first argument, or another, of a system call.
fn only(argument: u8, cmp: SeccompCmpOp, value: u64) -> seccompiler::Result<SeccompRule> {
    let length = SeccompCmpArgLen::Dword;
    let condition =
        SeccompCondition::new(argument, length, cmp, value).map_err(seccompiler::Error::Backend)?;
    SeccompRule::new(vec![condition]).map_err(seccompiler::Error::Backend)
}

fn apply(
    rules: BTreeMap<libc::c_long, Vec<SeccompRule>>,
    others: SeccompAction,
    these: SeccompAction,
) -> Result<(), Box<dyn std::error::Error>> {
    let arch = TargetArch::try_from(std::env::consts::ARCH)?;
    let filter = SeccompFilter::new(rules, others, these, arch)?;
    seccompiler::apply_filter(&BpfProgram::try_from(filter)?)?;
    Ok(())
}

fn allow_calls(lists: &[&[libc::c_long]]) -> Result<(), Box<dyn std::error::Error>> {
    let lists = lists.iter().copied();
    let mut rules: BTreeMap<_, _> =
        (lists.clone().flatten().map(|&call| (call, Vec::new()))).collect();
    // New threads, and nothing else that clone(2) makes.
    let thread = (libc::CLONE_VM | libc::CLONE_FS | libc::CLONE_FILES | libc::CLONE_THREAD) as u64;
    let threads = only(0, SeccompCmpOp::MaskedEq(thread), thread)?;
    rules.insert(libc::SYS_clone, vec![threads]);
    // Its arguments are in memory, where a filter can't see them. The C library then takes clone(2).
    rules.insert(libc::SYS_clone3, Vec::new());
    // Limits of its own.
    rules.insert(libc::SYS_prlimit64, vec![only(0, SeccompCmpOp::Eq, 0)?]);
    // Signals to itself, as abort(3) has it.
    let own = u64::from(std::process::id());
    rules.insert(libc::SYS_tgkill, vec![only(0, SeccompCmpOp::Eq, own)?]);
    if lists.clone().any(|list| list == SERVING) {
        let unix = only(0, SeccompCmpOp::Eq, libc::AF_UNIX as u64)?;
        rules.insert(libc::SYS_socket, vec![unix]);
        // Sockets get their mode before they have a name.
        let modes = [
            only(1, SeccompCmpOp::Eq, 0o600)?,
            only(1, SeccompCmpOp::Eq, 0o666)?,
        ];
        rules.insert(libc::SYS_fchmod, modes.into());
    }
    // The filter that came last is asked first, and the strictest answer holds.
    let missing = BTreeMap::from([
        (libc::SYS_clone3, Vec::new()),
        (
            libc::SYS_ioctl,
            // A shell takes for typed what is put into a terminal's input.
            vec![
                only(1, SeccompCmpOp::Eq, TIOCSTI)?,
                only(1, SeccompCmpOp::Eq, TIOCLINUX)?,
            ],
        ),
    ]);
    let (eperm, enosys) = (libc::EPERM as u32, libc::ENOSYS as u32);
    apply(missing, SeccompAction::Allow, SeccompAction::Errno(enosys))?;
    // The second filter takes a system call that the first has to allow.
    apply(rules, SeccompAction::Errno(eperm), SeccompAction::Allow)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::{PermissionsExt, chown};
    use std::os::unix::net::UnixStream;
    use std::process::Command;

    use super::*;

    /// A reader that a malicious image has taken over opens and changes no files, starts no programs, and ends none.
    #[test]
    fn a_confined_thread_does_only_what_it_is_for() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        fs::write(at("file"), "").unwrap();
        let socket = std::os::unix::net::UnixListener::bind(at("socket")).unwrap();
        let errno = |error: io::Error| error.raw_os_error();
        std::thread::scope(|scope| {
            let confined = scope.spawn(|| {
                let status = confine_files(&Files::default()).unwrap();
                allow_calls(&[BASE]).unwrap();
                if status == RulesetStatus::FullyEnforced {
                    let open = fs::read("/etc/passwd").map_err(errno);
                    assert_eq!(open, Err(Some(libc::EACCES)));
                    let made = fs::write(at("made"), "").map_err(errno);
                    assert_eq!(made, Err(Some(libc::EACCES)));
                } else {
                    uvfs_testing::skip("needs Landlock");
                }
                assert!(fs::read("/proc/self/status").is_ok());
                let mode = fs::Permissions::from_mode(0o777);
                let refused = [
                    fs::set_permissions(at("file"), mode),
                    chown(at("file"), Some(1), None),
                    UnixStream::connect(at("socket")).map(drop),
                    Command::new("/bin/true").status().map(drop),
                    fs::remove_file(at("file")),
                    rustix::process::chroot("/proc").map_err(io::Error::from),
                    rustix::process::test_kill_process(rustix::process::getppid().unwrap())
                        .map_err(io::Error::from),
                    rustix::fs::setxattr(
                        at("file"),
                        c"user.a",
                        b"b",
                        rustix::fs::XattrFlags::empty(),
                    )
                    .map_err(io::Error::from),
                ];
                for (call, refused) in refused.into_iter().enumerate() {
                    assert_eq!(refused.map_err(errno), Err(Some(libc::EPERM)), "{call}");
                }
                // And it does have threads.
                assert_eq!(std::thread::spawn(|| 7).join().unwrap(), 7);
            });
            confined.join().unwrap();
        });
        drop(socket);
        assert!(
            fs::read("/etc/passwd").is_ok(),
            "other threads are as before"
        );
    }

    /// Landlock keeps a confined server from signalling other processes, and from sockets without a path.
    #[test]
    fn a_confined_server_signals_and_reaches_nobody() {
        use rustix::net::{AddressFamily, SocketAddrUnix, SocketType};
        let name = SocketAddrUnix::new_abstract_name(b"uvfs-confine-test").unwrap();
        let listener = rustix::net::socket(AddressFamily::UNIX, SocketType::STREAM, None).unwrap();
        rustix::net::bind(&listener, &name).unwrap();
        rustix::net::listen(&listener, 1).unwrap();
        let confined = std::thread::spawn(move || {
            let status = confine_files(&Files::default()).unwrap();
            if status != RulesetStatus::FullyEnforced {
                return uvfs_testing::skip("needs Landlock's scopes");
            }
            let socket =
                rustix::net::socket(AddressFamily::UNIX, SocketType::STREAM, None).unwrap();
            let reached = rustix::net::connect(&socket, &name);
            assert_eq!(reached, Err(rustix::io::Errno::PERM));
            let parent = rustix::process::getppid().unwrap();
            let signalled = rustix::process::test_kill_process(parent);
            assert_eq!(signalled, Err(rustix::io::Errno::PERM));
        });
        confined.join().unwrap();
    }
}
