//! System calls that a program is refused, as a container's seccomp profile refuses them.

use std::collections::BTreeMap;
use std::io;
use std::os::unix::process::CommandExt;
use std::process::Command;

use rustix::io::Errno;
use seccompiler::{BpfProgram, SeccompAction, SeccompFilter, TargetArch};

/// All of io_uring's.
pub const IO_URING: &[libc::c_long] = &[
    libc::SYS_io_uring_setup,
    libc::SYS_io_uring_enter,
    libc::SYS_io_uring_register,
];

/// Refuses system calls with this error to `command` and all that it starts. As root without no_new_privs, so
/// that fusermount3 gets root's rights.
pub fn refuse(command: &mut Command, calls: &[libc::c_long], errno: Errno) {
    let filter = SeccompFilter::new(
        calls
            .iter()
            .map(|&call| (call, Vec::new()))
            .collect::<BTreeMap<_, _>>(),
        SeccompAction::Allow,
        SeccompAction::Errno(errno.raw_os_error() as u32),
        TargetArch::try_from(std::env::consts::ARCH).expect("a known architecture"),
    );
    let mut program = BpfProgram::try_from(filter.expect("a filter")).expect("a short filter");
    // A container's profile has the calls of 32-bit programs, too; this one would kill for them.
    let other_architecture = &mut program[2].k;
    assert_eq!(*other_architecture, libc::SECCOMP_RET_KILL_PROCESS);
    *other_architecture = libc::SECCOMP_RET_ALLOW;
    let install = move || {
        let filter = libc::sock_fprog {
            len: program.len() as u16,
            filter: program.as_ptr().cast_mut().cast(),
        };
        // SAFETY: the kernel copies the filter, which lives over the call.
        let set =
            || unsafe { libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &filter) };
        // SAFETY: takes no pointers.
        let give_up = || unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) };
        // A program that starts as another user has to give up what set-user-id programs would give it.
        match set() == 0 || (give_up() == 0 && set() == 0) {
            true => Ok(()),
            false => Err(io::Error::last_os_error()),
        }
    };
    // SAFETY: the closure makes system calls alone, and allocates nothing.
    unsafe { command.pre_exec(install) };
}

/// With which error `UVFS_TEST_NO_IO_URING` has every program refused io_uring.
pub fn no_io_uring() -> Option<Errno> {
    let value = std::env::var("UVFS_TEST_NO_IO_URING").ok()?;
    Some(match value.as_str() {
        "1" | "EPERM" => Errno::PERM,
        "ENOSYS" => Errno::NOSYS,
        "ENOMEM" => Errno::NOMEM,
        other => panic!("UVFS_TEST_NO_IO_URING={other}: neither 1, EPERM, ENOSYS nor ENOMEM"),
    })
}
