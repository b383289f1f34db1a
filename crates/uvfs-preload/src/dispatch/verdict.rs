//! The effects that a system call around the C library could have on a served file.
//!
//! A call passes only if it is known to leave every descriptor of a file as it is. One that is not known
//! at all may do anything.

use std::ffi::c_int;

use super::Why;
use crate::args::is_plausible;

/// The arguments of a system call.
pub(super) type Words = [usize; 6];

/// How a call is treated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// It can run as it is.
    Pass,
    /// It opens a file.
    Opens,
    /// It asks about a descriptor.
    Asks(c_int),
    /// It uses these files (-1 for none), which go back to the kernel first.
    Uses(c_int, c_int),
    /// It closes or duplicates descriptors.
    Table(Change),
    /// It maps a file with these flags.
    Maps { flags: c_int, fd: c_int },
    /// It ends the thread with a status.
    Leaves(c_int),
    /// It ends the process.
    Ends,
    /// It can't be followed.
    Aside(Why),
}

/// A change of the process's descriptors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Change {
    Close(c_int),
    CloseRange(u32, u32, c_int),
    Dup(c_int),
    /// dup2(2), with the number.
    Dup2(c_int, c_int),
    /// dup3(2), with the number and flags.
    Dup3(c_int, c_int, c_int),
    /// fcntl(2) with F_DUPFD or F_DUPFD_CLOEXEC, and the lowest number.
    Control(c_int, c_int, usize),
}

/// How a call is judged.
#[derive(Clone, Copy)]
enum Kind {
    Unknown,
    Pass,
    /// The first argument is a file.
    First,
    /// So are the first and the second.
    Both,
    /// So are the first and the third.
    FirstAndThird,
    Close,
    CloseRange,
    Dup,
    Dup2,
    Dup3,
    Map,
    Control,
    Message,
    Open,
    Leave,
    End,
    Ring,
    Clone,
    /// Passes unless the argument of this index is a pointer.
    Unless(usize),
    Limit,
    Process,
    /// rt_sigaction(2).
    Handler,
}

const NUMBERS: usize = 470;

/// Judges calls by these kinds.
macro_rules! kinds {
    ($($kind:expr => $($call:ident)*;)*) => {{
        let mut kinds = [Kind::Unknown; NUMBERS];
        $($(kinds[libc::$call as usize] = $kind;)*)*
        kinds
    }};
}

/// The first calls use no descriptor of a file, or only its inode; or they name files by their path; or they make
/// descriptors, whose numbers were free.
static KINDS: [Kind; NUMBERS] = kinds! {
    // Memory and time.
    Kind::Pass =>
        SYS_brk SYS_mprotect SYS_munmap SYS_mremap SYS_msync SYS_mincore SYS_madvise
        SYS_process_madvise SYS_mlock SYS_mlock2 SYS_munlock SYS_mlockall SYS_munlockall SYS_mbind
        SYS_set_mempolicy SYS_get_mempolicy SYS_migrate_pages SYS_move_pages SYS_pkey_alloc
        SYS_pkey_free SYS_pkey_mprotect SYS_membarrier SYS_shmget SYS_shmat SYS_shmctl SYS_shmdt
        SYS_time SYS_gettimeofday SYS_clock_gettime SYS_clock_getres SYS_clock_nanosleep
        SYS_nanosleep SYS_times SYS_alarm SYS_getitimer SYS_setitimer SYS_timer_create
        SYS_timer_settime SYS_timer_gettime SYS_timer_getoverrun SYS_timer_delete SYS_timerfd_create
        SYS_timerfd_settime SYS_timerfd_gettime;
    // Threads and processes.
    Kind::Pass =>
        SYS_futex SYS_futex_waitv SYS_set_robust_list SYS_get_robust_list SYS_rseq
        SYS_set_tid_address SYS_gettid SYS_getpid SYS_getppid SYS_getpgid SYS_getpgrp SYS_getsid
        SYS_setpgid SYS_setsid SYS_getuid SYS_geteuid SYS_getgid SYS_getegid SYS_getresuid
        SYS_getresgid SYS_getgroups SYS_capget SYS_sched_yield SYS_sched_getaffinity
        SYS_sched_setaffinity SYS_sched_getscheduler SYS_sched_setscheduler SYS_sched_getparam
        SYS_sched_setparam SYS_sched_get_priority_max SYS_sched_get_priority_min
        SYS_sched_rr_get_interval SYS_sched_getattr SYS_sched_setattr SYS_getpriority
        SYS_setpriority SYS_getrlimit SYS_getrusage SYS_wait4 SYS_waitid SYS_kill SYS_tkill
        SYS_tgkill SYS_rt_sigqueueinfo SYS_rt_tgsigqueueinfo SYS_rt_sigpending SYS_rt_sigtimedwait
        SYS_pause SYS_pidfd_open SYS_pidfd_send_signal SYS_getcpu SYS_uname SYS_sysinfo SYS_syslog
        SYS_getrandom SYS_umask SYS_process_vm_readv SYS_process_vm_writev SYS_kcmp SYS_semget
        SYS_semop SYS_semctl SYS_semtimedop SYS_msgget SYS_msgsnd SYS_msgrcv SYS_msgctl
        SYS_perf_event_open;
    // Files by path, directories, and inodes.
    Kind::Pass =>
        SYS_stat SYS_lstat SYS_newfstatat SYS_statx SYS_access SYS_faccessat SYS_faccessat2
        SYS_truncate SYS_rename SYS_renameat SYS_renameat2 SYS_mkdir SYS_mkdirat SYS_rmdir SYS_link
        SYS_linkat SYS_unlink SYS_unlinkat SYS_symlink SYS_symlinkat SYS_readlink SYS_readlinkat
        SYS_mknod SYS_mknodat SYS_chmod SYS_fchmod SYS_fchmodat SYS_chown SYS_fchown SYS_lchown
        SYS_fchownat SYS_utime SYS_utimes SYS_futimesat SYS_utimensat SYS_statfs SYS_fstatfs
        SYS_getcwd SYS_chdir SYS_fchdir SYS_getdents SYS_getdents64 SYS_setxattr SYS_lsetxattr
        SYS_fsetxattr SYS_getxattr SYS_lgetxattr SYS_fgetxattr SYS_listxattr SYS_llistxattr
        SYS_flistxattr SYS_removexattr SYS_lremovexattr SYS_fremovexattr SYS_sync SYS_syncfs
        SYS_readahead SYS_fadvise64 SYS_flock SYS_inotify_init SYS_inotify_init1
        SYS_inotify_add_watch SYS_inotify_rm_watch SYS_memfd_create SYS_name_to_handle_at
        SYS_open_by_handle_at;
    // Linux AIO: as with libaio's calls that the kernel gets, the server recalls leases.
    Kind::Pass =>
        SYS_io_setup SYS_io_destroy SYS_io_submit SYS_io_cancel SYS_io_getevents;
    // Pipes, sockets and waiting.
    Kind::Pass =>
        SYS_pipe SYS_pipe2 SYS_tee SYS_vmsplice SYS_poll SYS_select SYS_epoll_create
        SYS_epoll_create1 SYS_epoll_ctl SYS_epoll_wait SYS_eventfd SYS_eventfd2 SYS_signalfd
        SYS_signalfd4 SYS_socket SYS_socketpair SYS_bind SYS_connect SYS_listen SYS_accept
        SYS_accept4 SYS_shutdown SYS_getsockname SYS_getpeername SYS_getsockopt SYS_setsockopt
        SYS_sendto SYS_recvfrom SYS_recvmsg SYS_recvmmsg SYS_mq_open SYS_mq_unlink SYS_mq_timedsend
        SYS_mq_timedreceive SYS_mq_getsetattr;
    // Calls whose first argument is a file that they read, write, lock or move in.
    Kind::First =>
        SYS_read SYS_write SYS_pread64 SYS_pwrite64 SYS_readv SYS_writev SYS_preadv SYS_pwritev
        SYS_preadv2 SYS_pwritev2 SYS_lseek SYS_fstat SYS_ioctl SYS_fsync SYS_fdatasync
        SYS_sync_file_range SYS_ftruncate SYS_fallocate;
    Kind::Both => SYS_sendfile;
    Kind::FirstAndThird => SYS_splice SYS_copy_file_range;
    Kind::Close => SYS_close;
    Kind::CloseRange => SYS_close_range;
    Kind::Dup => SYS_dup;
    Kind::Dup2 => SYS_dup2;
    Kind::Dup3 => SYS_dup3;
    Kind::Map => SYS_mmap;
    Kind::Control => SYS_fcntl;
    Kind::Message => SYS_sendmsg;
    Kind::Open => SYS_open SYS_openat SYS_openat2 SYS_creat;
    Kind::Leave => SYS_exit;
    Kind::End => SYS_exit_group;
    Kind::Ring => SYS_io_uring_setup SYS_io_uring_enter SYS_io_uring_register;
    Kind::Clone => SYS_clone SYS_clone3 SYS_fork SYS_vfork;
    // With a signal mask they could block SIGSYS.
    Kind::Unless(5) => SYS_pselect6;
    Kind::Unless(3) => SYS_ppoll;
    Kind::Unless(4) => SYS_epoll_pwait SYS_epoll_pwait2;
    Kind::Handler => SYS_rt_sigaction;
    Kind::Limit => SYS_prlimit64;
    Kind::Process => SYS_prctl;
};

/// Whether a prctl(2) only names something, asks, or sets what has nothing to do with calls.
fn is_harmless_option(option: usize) -> bool {
    const PR_SET_VMA: c_int = 0x5356_4d41;
    let harmless = [
        libc::PR_SET_NAME,
        libc::PR_GET_NAME,
        libc::PR_SET_PDEATHSIG,
        libc::PR_GET_PDEATHSIG,
        libc::PR_GET_DUMPABLE,
        libc::PR_SET_TIMERSLACK,
        libc::PR_GET_TIMERSLACK,
        libc::PR_CAPBSET_READ,
        libc::PR_SET_THP_DISABLE,
        libc::PR_GET_THP_DISABLE,
        PR_SET_VMA,
    ];
    harmless.iter().any(|one| *one as usize == option)
}

/// Judges a call. `arguments` may point to memory of the program, which is there where the call is valid.
pub(super) fn verdict(number: usize, arguments: &Words) -> Verdict {
    use Verdict::{Aside, Asks, Ends, Leaves, Maps, Opens, Pass, Table, Uses};
    let fd = |index: usize| arguments[index] as c_int;
    match KINDS.get(number).copied().unwrap_or(Kind::Unknown) {
        Kind::Unknown => Aside(Why::Call),
        Kind::Pass => Pass,
        Kind::First => Uses(fd(0), -1),
        Kind::Both => Uses(fd(0), fd(1)),
        Kind::FirstAndThird => Uses(fd(0), fd(2)),
        Kind::Close => Table(Change::Close(fd(0))),
        // One that gives the thread descriptors of its own.
        Kind::CloseRange if fd(2) & libc::CLOSE_RANGE_UNSHARE as c_int != 0 => Aside(Why::Threads),
        Kind::CloseRange => Table(Change::CloseRange(fd(0) as u32, fd(1) as u32, fd(2))),
        Kind::Dup => Table(Change::Dup(fd(0))),
        Kind::Dup2 => Table(Change::Dup2(fd(0), fd(1))),
        Kind::Dup3 => Table(Change::Dup3(fd(0), fd(1), fd(2))),
        Kind::Map if fd(3) & libc::MAP_ANONYMOUS != 0 => Pass,
        Kind::Map => Maps {
            flags: fd(3),
            fd: fd(4),
        },
        Kind::Control => match fd(1) {
            libc::F_GETFD | libc::F_SETFD | libc::F_GETFL => Asks(fd(0)),
            libc::F_DUPFD | libc::F_DUPFD_CLOEXEC => {
                Table(Change::Control(fd(0), fd(1), arguments[2]))
            }
            _ => Uses(fd(0), -1),
        },
        Kind::Message => {
            let message = arguments[1] as *const libc::msghdr;
            let there = is_plausible(message.cast(), size_of::<libc::msghdr>());
            // SAFETY: the caller's message. It may carry descriptors to other processes.
            match there && unsafe { (*message).msg_controllen } > 0 {
                true => Aside(Why::Call),
                false => Pass,
            }
        }
        Kind::Open => Opens,
        Kind::Leave => Leaves(fd(0)),
        Kind::End => Ends,
        Kind::Ring => Aside(Why::Ring),
        Kind::Clone => Aside(Why::Threads),
        Kind::Unless(index) if arguments[index] == 0 => Pass,
        Kind::Unless(_) => Aside(Why::Signals),
        Kind::Limit if fd(1) != libc::RLIMIT_FSIZE as c_int || arguments[2] == 0 => Pass,
        Kind::Limit => Aside(Why::Call),
        Kind::Process if is_harmless_option(arguments[0]) => Pass,
        Kind::Process => Aside(Why::Call),
        Kind::Handler if arguments[1] == 0 => Pass,
        Kind::Handler => Aside(Why::Signals),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A call that is not listed may do anything to a descriptor.
    #[test]
    fn unknown_calls_can_not_be_followed() {
        for number in [NUMBERS - 1, NUMBERS, 1 << 30, usize::MAX] {
            assert_eq!(verdict(number, &[0; 6]), Verdict::Aside(Why::Call));
        }
        for number in [
            libc::SYS_execve,
            libc::SYS_unshare,
            libc::SYS_pidfd_getfd,
            libc::SYS_seccomp,
            libc::SYS_rt_sigprocmask,
            libc::SYS_rt_sigreturn,
            libc::SYS_sigaltstack,
            libc::SYS_setrlimit,
        ] {
            assert_eq!(verdict(number as usize, &[3; 6]), Verdict::Aside(Why::Call));
        }
    }

    /// Files whose positions the kernel moves, or whose memory it shares, are found.
    #[test]
    fn files_are_found_among_the_arguments() {
        let of = |number: i64, arguments: Words| verdict(number as usize, &arguments);
        assert_eq!(
            of(libc::SYS_lseek, [7, 0, 1, 0, 0, 0]),
            Verdict::Uses(7, -1)
        );
        assert_eq!(
            of(libc::SYS_sendfile, [5, 6, 0, 9, 0, 0]),
            Verdict::Uses(5, 6)
        );
        assert_eq!(
            of(libc::SYS_splice, [5, 0, 6, 0, 9, 0]),
            Verdict::Uses(5, 6)
        );
        let table = Verdict::Table;
        assert_eq!(of(libc::SYS_close, [5; 6]), table(Change::Close(5)));
        assert_eq!(
            of(libc::SYS_dup2, [5, 6, 0, 0, 0, 0]),
            table(Change::Dup2(5, 6))
        );
        assert_eq!(
            of(libc::SYS_close_range, [5, 9, 0, 0, 0, 0]),
            table(Change::CloseRange(5, 9, 0))
        );
        assert_eq!(
            of(libc::SYS_mmap, [0, 4096, 3, 1, 9, 0]),
            Verdict::Maps { flags: 1, fd: 9 }
        );
        let anonymous = (libc::MAP_ANONYMOUS | libc::MAP_PRIVATE) as usize;
        assert_eq!(
            of(libc::SYS_mmap, [0, 4096, 3, anonymous, usize::MAX, 0]),
            Verdict::Pass
        );
        let append = [3, libc::F_SETFL as usize, 0, 0, 0, 0];
        assert_eq!(of(libc::SYS_fcntl, append), Verdict::Uses(3, -1));
        let duplicate = [3, libc::F_DUPFD as usize, 9, 0, 0, 0];
        let change = Change::Control(3, libc::F_DUPFD, 9);
        assert_eq!(of(libc::SYS_fcntl, duplicate), table(change));
    }

    /// Descriptors that leave in a message, and masks that block SIGSYS, are noticed.
    #[test]
    fn arguments_behind_pointers_count() {
        // SAFETY: plain data.
        let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
        let send = |message: &libc::msghdr| {
            let at = std::ptr::from_ref(message) as usize;
            verdict(libc::SYS_sendmsg as usize, &[3, at, 0, 0, 0, 0])
        };
        assert_eq!(send(&message), Verdict::Pass);
        message.msg_controllen = 24;
        assert_eq!(send(&message), Verdict::Aside(Why::Call));
        let wait = |mask| verdict(libc::SYS_epoll_pwait as usize, &[3, 0, 1, 0, mask, 8]);
        assert_eq!(wait(0), Verdict::Pass);
        assert_eq!(wait(4096), Verdict::Aside(Why::Signals));
        let limit = |kind: u32, new| {
            verdict(
                libc::SYS_prlimit64 as usize,
                &[0, kind as usize, new, 0, 0, 0],
            )
        };
        assert_eq!(limit(libc::RLIMIT_FSIZE, 0), Verdict::Pass);
        assert_eq!(limit(libc::RLIMIT_NOFILE, 4096), Verdict::Pass);
        assert_eq!(limit(libc::RLIMIT_FSIZE, 4096), Verdict::Aside(Why::Call));
    }
}
