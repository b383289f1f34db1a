//! Gives up what a server has no use for, so that who takes it over has little.
//!
//! A root server of a directory keeps the capabilities that serving takes. The threads that serve an image
//! need next to nothing: they get an empty set but for two, may open no file but what the kernel tells
//! (`/proc`, `/sys`), `/dev/fuse` and their own sockets, and are refused system calls that nothing of theirs
//! makes. Threads begin with what the one has that starts them; the program's first thread, which does no
//! more than wait and unmount, stays as it was.

use std::collections::BTreeMap;
use std::io;

use landlock::{
    ABI, Access, AccessFs, AccessNet, Ruleset, RulesetAttr, RulesetCreatedAttr, RulesetStatus,
    path_beneath_rules,
};
use rustix::thread::{CapabilitySet, capabilities, set_capabilities};
use seccompiler::{BpfProgram, SeccompAction, SeccompFilter, TargetArch};

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

/// For a server of an image, before its threads begin; what this kernel can't do is left out.
pub fn image_server() {
    if let Err(error) = keep(FOR_IMAGES) {
        tracing::warn!(%error, "the server keeps capabilities that it does not need");
    }
    match confine_files() {
        Ok(RulesetStatus::FullyEnforced) => {}
        Ok(status) => tracing::info!(?status, "this kernel's Landlock confines only in part"),
        Err(error) => tracing::warn!(%error, "Landlock does not confine this server"),
    }
    if let Err(error) = refuse_calls() {
        tracing::warn!(%error, "no system call is refused to this server");
    }
}

fn confine_files() -> Result<RulesetStatus, Box<dyn std::error::Error>> {
    let abi = ABI::V5;
    let sockets = uvfs_server::control::directory()?;
    let own = AccessFs::MakeSock | AccessFs::RemoveFile | AccessFs::ReadDir;
    let status = Ruleset::default()
        .handle_access(AccessFs::from_all(abi))?
        .handle_access(AccessNet::from_all(abi))?
        .create()?
        .add_rules(path_beneath_rules(
            ["/proc", "/sys"],
            AccessFs::ReadFile | AccessFs::ReadDir,
        ))?
        .add_rules(path_beneath_rules(["/dev/fuse"], AccessFs::from_all(abi)))?
        .add_rules(path_beneath_rules([sockets], own))?
        .restrict_self()?;
    Ok(status.ruleset)
}

/// System calls by which who takes a server over would go on from there.
const REFUSED: &[libc::c_long] = &[
    libc::SYS_acct,
    libc::SYS_add_key,
    libc::SYS_adjtimex,
    libc::SYS_bpf,
    libc::SYS_chroot,
    libc::SYS_clock_adjtime,
    libc::SYS_clock_settime,
    libc::SYS_delete_module,
    libc::SYS_execve,
    libc::SYS_execveat,
    libc::SYS_finit_module,
    libc::SYS_fsconfig,
    libc::SYS_fsmount,
    libc::SYS_fsopen,
    libc::SYS_fspick,
    libc::SYS_init_module,
    libc::SYS_kexec_file_load,
    libc::SYS_kexec_load,
    libc::SYS_keyctl,
    libc::SYS_linkat,
    libc::SYS_mknodat,
    libc::SYS_mount,
    libc::SYS_mount_setattr,
    libc::SYS_move_mount,
    libc::SYS_open_by_handle_at,
    libc::SYS_open_tree,
    libc::SYS_perf_event_open,
    libc::SYS_personality,
    libc::SYS_pidfd_getfd,
    libc::SYS_pivot_root,
    libc::SYS_process_vm_readv,
    libc::SYS_process_vm_writev,
    libc::SYS_ptrace,
    libc::SYS_quotactl,
    libc::SYS_reboot,
    libc::SYS_renameat2,
    libc::SYS_request_key,
    libc::SYS_setgid,
    libc::SYS_setgroups,
    libc::SYS_setns,
    libc::SYS_setregid,
    libc::SYS_setresgid,
    libc::SYS_setresuid,
    libc::SYS_setreuid,
    libc::SYS_settimeofday,
    libc::SYS_setuid,
    libc::SYS_swapoff,
    libc::SYS_swapon,
    libc::SYS_syslog,
    libc::SYS_symlinkat,
    libc::SYS_umount2,
    libc::SYS_unshare,
    libc::SYS_userfaultfd,
];

fn refuse_calls() -> Result<(), Box<dyn std::error::Error>> {
    let rules: BTreeMap<_, _> = REFUSED.iter().map(|&call| (call, Vec::new())).collect();
    let filter = SeccompFilter::new(
        rules,
        SeccompAction::Allow,
        SeccompAction::Errno(libc::EPERM as u32),
        TargetArch::try_from(std::env::consts::ARCH)?,
    )?;
    seccompiler::apply_filter(&BpfProgram::try_from(filter)?)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::process::Command;

    use super::*;

    /// A malicious image that takes over the check could open files or start programs.
    #[test]
    fn a_confined_thread_opens_no_file_and_starts_no_program() {
        let confined = std::thread::spawn(|| {
            let status = confine_files().unwrap();
            refuse_calls().unwrap();
            let errno = |error: io::Error| error.raw_os_error();
            if status == RulesetStatus::FullyEnforced {
                assert_eq!(
                    fs::read("/etc/passwd").map_err(errno),
                    Err(Some(libc::EACCES))
                );
                let made = fs::write("/tmp/uvfs-confined", "").map_err(errno);
                assert_eq!(made, Err(Some(libc::EACCES)));
            } else {
                uvfs_testing::skip("needs Landlock");
            }
            assert!(fs::read("/proc/self/status").is_ok());
            let chroot = rustix::process::chroot("/proc").unwrap_err();
            assert_eq!(chroot, rustix::io::Errno::PERM);
            assert!(Command::new("/bin/true").status().is_err());
        });
        confined.join().unwrap();
        assert!(
            fs::read("/etc/passwd").is_ok(),
            "other threads are as before"
        );
    }
}
