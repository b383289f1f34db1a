//! Names the limit behind an error.

use std::io;

use rustix::io::Errno;
use rustix::process::{Resource, getrlimit};

/// An error's words, with the limit of this process that is behind it if there is one: its value, and how to set it.
///
/// ```
/// let error = std::io::Error::from_raw_os_error(2);
/// assert_eq!(uvfs_sys::limits::explain(&error), error.to_string());
/// ```
pub fn explain(error: &io::Error) -> String {
    with(error, Errno::from_io_error(error).and_then(behind))
}

/// As [`explain`], for the error of starting a thread or a process.
pub fn explain_start(error: &io::Error) -> String {
    with(
        error,
        match Errno::from_io_error(error) {
            Some(Errno::AGAIN) => Some(of_threads()),
            errno => errno.and_then(behind),
        },
    )
}

fn with(error: &io::Error, limit: Option<String>) -> String {
    match limit {
        Some(limit) => format!("{error}: {limit}"),
        None => error.to_string(),
    }
}

/// The limit that an error is about, its value, and how to set it.
pub fn behind(errno: Errno) -> Option<String> {
    let current = |resource| getrlimit(resource).current;
    match errno {
        Errno::MFILE => {
            let most = current(Resource::Nofile)?;
            Some(format!(
                "the limit of open files is {most} (raise it with ulimit -n, or a systemd unit's LimitNOFILE=)"
            ))
        }
        Errno::NFILE => Some(
            "the machine's limit of open files is reached (raise it as root: sysctl fs.file-max)"
                .into(),
        ),
        Errno::NOMEM => {
            let kib = current(Resource::As)? >> 10;
            Some(format!(
                "the limit of address space is {kib} KiB (raise it with ulimit -v, or a systemd unit's LimitAS=)"
            ))
        }
        _ => None,
    }
}

fn of_threads() -> String {
    // The C library gives this error also where a thread's stack finds no room.
    if let Some(memory) = behind(Errno::NOMEM) {
        return memory;
    }
    let most = match getrlimit(Resource::Nproc).current {
        Some(most) => most.to_string(),
        None => "unlimited".into(),
    };
    format!(
        "the limit of this user's threads is {most} (raise it with ulimit -u, or a systemd unit's LimitNPROC= and \
         TasksMax=; in a container also pids.max of the control group)"
    )
}
