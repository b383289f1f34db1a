//! Whether io_uring can be used here, and why not.

use std::fmt;
use std::io;

use rustix::io::Errno;
use rustix::process::{Resource, getrlimit};

use super::ring;

/// Why io_uring can't be used: the kernel, or a sandbox, refuses it. Displayed with what to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Refused(Errno);

/// Why this process can't use so many rings at a time, if any of io_uring's three system calls is refused.
///
/// # Errors
/// Another error of theirs, as that of a limit of descriptors.
pub fn refusal(rings: usize) -> io::Result<Option<Refused>> {
    match (0..rings)
        .map(|_| ring::build())
        .collect::<io::Result<Vec<_>>>()
    {
        Ok(_) => Ok(None),
        Err(error) => Refused::new(&error).map(Some).ok_or(error),
    }
}

impl Refused {
    /// The refusal, if an error of a ring's system calls is one.
    pub(crate) fn new(error: &io::Error) -> Option<Self> {
        let errno = Errno::from_io_error(error)?;
        let refusals = [
            Errno::PERM,
            Errno::ACCESS,
            Errno::NOSYS,
            Errno::NOMEM,
            // The flags of a ring are newer than the kernel.
            Errno::INVAL,
        ];
        refusals.contains(&errno).then_some(Self(errno))
    }

    /// The name of the error, and its meaning.
    pub fn why(self) -> String {
        match self.0 {
            Errno::PERM | Errno::ACCESS => match disabled() {
                Some(value @ (1 | 2)) => {
                    format!("EPERM: the sysctl kernel.io_uring_disabled is {value}")
                }
                _ => "EPERM: a seccomp profile refuses it, as a container's may".into(),
            },
            Errno::NOSYS => "ENOSYS: a sandbox hides it, or the kernel was built without it".into(),
            Errno::NOMEM => match getrlimit(Resource::Memlock).current {
                Some(limit) => format!(
                    "ENOMEM: the limit of locked memory, {} KiB, has no room for its rings",
                    limit >> 10
                ),
                None => "ENOMEM: there is no memory for a ring".into(),
            },
            _ => "EINVAL: this kernel's is too old (uvfs uses it from Linux 5.19 on)".into(),
        }
    }

    /// How to get it.
    pub fn remedy(self) -> &'static str {
        match self.0 {
            Errno::PERM | Errno::ACCESS if matches!(disabled(), Some(1 | 2)) => {
                "as root: sysctl kernel.io_uring_disabled=0"
            }
            Errno::PERM | Errno::ACCESS | Errno::NOSYS => {
                "allow io_uring_setup, io_uring_enter and io_uring_register in its seccomp profile"
            }
            Errno::NOMEM => "set ulimit -l 65536, or a systemd unit's LimitMEMLOCK=64M",
            _ => "boot a newer kernel",
        }
    }
}

/// What root has set: 1 keeps it from most processes, 2 from all.
fn disabled() -> Option<u8> {
    let text = std::fs::read_to_string("/proc/sys/kernel/io_uring_disabled").ok()?;
    text.trim().parse().ok()
}

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "io_uring is refused, which makes file I/O slower ({}; {})",
            self.why(),
            self.remedy()
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_of_descriptors_is_no_refusal() {
        let refused = |errno: Errno| Refused::new(&errno.into());
        for errno in [Errno::PERM, Errno::NOSYS, Errno::NOMEM] {
            assert!(refused(errno).is_some(), "{errno}");
        }
        assert_eq!(refused(Errno::MFILE), None);
        let text = refused(Errno::NOSYS).unwrap().to_string();
        assert!(
            text.contains("ENOSYS") && text.contains("io_uring_register"),
            "{text}"
        );
    }
}
