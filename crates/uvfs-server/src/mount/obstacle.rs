//! Why the kernel refuses to mount, as it does in a container, and what to add.

use std::fmt;

use rustix::io::Errno;
use rustix::thread::{CapabilitySet, capabilities, capability_is_in_bounding_set, no_new_privs};

/// A reason why this process may not mount. Displayed with the remedy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Obstacle {
    /// The reason.
    pub why: &'static str,
    /// How to get it.
    pub remedy: &'static str,
}

impl fmt::Display for Obstacle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.why, self.remedy)
    }
}

/// The reason why this process, and a fusermount3 that it starts, lack the right to mount. With the right the kernel may
/// refuse all the same.
pub fn obstacle() -> Option<Obstacle> {
    const RIGHT: CapabilitySet = CapabilitySet::SYS_ADMIN;
    if capabilities(None).is_ok_and(|now| now.effective.contains(RIGHT)) {
        return None;
    }
    let root = rustix::process::geteuid().is_root();
    if root || matches!(capability_is_in_bounding_set(RIGHT), Ok(false)) {
        return Some(Obstacle {
            why: "mounting takes CAP_SYS_ADMIN, which this container lacks",
            remedy: "docker run --cap-add SYS_ADMIN",
        });
    }
    no_new_privs().unwrap_or(false).then_some(Obstacle {
        why: "fusermount3 gets no rights where no_new_privs is set",
        remedy: "leave out --security-opt no-new-privileges, or a systemd unit's NoNewPrivileges=",
    })
}

/// A likely reason for an error of mount(2).
pub(super) fn behind(errno: Errno) -> Option<Obstacle> {
    let why = match errno {
        Errno::PERM => "a seccomp profile may refuse mount(2)",
        Errno::ACCESS => "a security module may refuse it, as AppArmor does by Docker's profile",
        _ => return None,
    };
    let remedy = "docker run --security-opt seccomp=unconfined --security-opt apparmor=unconfined";
    Some(obstacle().unwrap_or(Obstacle { why, remedy }))
}
