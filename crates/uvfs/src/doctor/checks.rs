//! The checks of `uvfs doctor`. Each tries the feature itself where that does no harm.

use std::ffi::OsString;
use std::fs;
use std::io;
use std::path::Path;

use rustix::process::{Resource, getrlimit};
use uvfs_io::runtime;
use uvfs_queue::placement;
use uvfs_server::mount;
use uvfs_sys::limits::explain;

use super::{Check, Finding, probe};
use crate::{helper, run};

/// The oldest kernel that uvfs runs on.
const OLDEST: (u32, u32) = (5, 15);
/// Descriptors that a server should have: each open file of the mount takes one.
const OPEN_FILES: u64 = 16384;
/// Bytes of I/O memory that `uvfs check` and `uvfs repair` register with a ring.
const LOCKED: u64 = 64 << 20;

/// Checks, each with what it finds and what that is good for.
macro_rules! checks {
    ($($name:literal, $finding:expr, $good_for:literal;)*) => {
        [$(Check::new($name, $good_for, $finding)),*]
    };
}

/// All checks, the most needed first.
pub(super) fn all() -> Vec<Check> {
    let root = rustix::process::geteuid().is_root();
    let mut checks = vec![
        Check::new("kernel", "uvfs, which needs Linux 5.15 or later", kernel()).needed(),
        Check::new("fuse", "mounts", fuse(root)).needed(),
    ];
    if !root {
        let good_for = "mounts by users other than root";
        checks.push(Check::new("fusermount3", good_for, fusermount()).needed());
        let good_for = "-o allow_other for mounts by users other than root";
        checks.push(Check::new("user_allow_other", good_for, allow_other()));
    }
    checks.extend(checks! {
        "io_uring", rings(1, "works"),
            "file I/O without threads that wait: 1.1 to 1.2 times as many small direct reads, measured on two cores";
        "fuse-over-io_uring", over_io_uring(),
            "faster requests, through a queue for each core; without it mounts use /dev/fuse";
        "passthrough", passthrough(root),
            "databases, linkers and O_DIRECT readers: the kernel serves their files without asking uvfs";
        "fanotify", fanotify(root),
            "longer caching: the kernel keeps names, attributes and data until the source changes, not for 1 s";
        "open files", open_files(), "many open files and clients at once";
        "locked memory", locked_memory(),
            "servers without root, and uvfs check and repair with --engine uring";
        "memory pressure", pressure(), "caches that shrink before the machine runs out of memory";
        "user namespaces", user_namespaces(root),
            "mounts without root or fusermount3, in a namespace of their own (unshare -Urm)";
        "preload library", preload(), "uvfs run";
        "mount helper", mount_helper(), "mount -t fuse.uvfs and lines in /etc/fstab";
    });
    checks
}

/// Reads a file, and trims it.
fn text(path: &str) -> Option<String> {
    Some(fs::read_to_string(path).ok()?.trim().to_owned())
}

fn number(path: &str) -> Option<u64> {
    text(path)?.parse().ok()
}

/// Parses a kernel's release into its major and minor number.
fn version(release: &str) -> Option<(u32, u32)> {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit());
    let mut next = || numbers.next()?.parse().ok();
    Some((next()?, next()?))
}

fn kernel() -> Finding {
    let uname = rustix::system::uname();
    let release = uname.release().to_string_lossy().into_owned();
    let found = format!("Linux {release} ({})", uname.machine().to_string_lossy());
    match version(&release) {
        Some(version) if version < OLDEST => Finding::missing(found),
        _ => Finding::ok(found),
    }
}

fn fuse(root: bool) -> Finding {
    let path = "/dev/fuse";
    match mount::open_device() {
        Ok(_) => mounting(root),
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied && !root => {
            // fusermount3 opens it with the user's rights.
            Finding::off(
                "only root may open /dev/fuse",
                "as root: chmod 666 /dev/fuse",
            )
        }
        Err(_) if !Path::new(path).exists() => Finding::off(
            "there is no /dev/fuse",
            "modprobe fuse (in a container: pass the device in, as docker run --device /dev/fuse does)",
        ),
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => Finding::off(
            error.to_string(),
            "allow the device to this container (docker run --device /dev/fuse)",
        ),
        Err(error) => Finding::off(error.to_string(), "modprobe fuse"),
    }
}

/// Root's right is tried; that of fusermount3 would show in the user's mount namespace.
fn mounting(root: bool) -> Finding {
    if let Some(obstacle) = mount::obstacle() {
        return Finding::off(obstacle.why, obstacle.remedy);
    }
    match root.then(probe::mounting) {
        Some(Err(error)) => Finding::off(error.to_string(), "allow mount(2) to this container"),
        _ => Finding::ok("/dev/fuse"),
    }
}

fn fusermount() -> Finding {
    match run::find(&OsString::from("fusermount3")) {
        Some(path) => Finding::ok(path.display().to_string()),
        None => Finding::off("not on the PATH", "apt install fuse3"),
    }
}

fn allow_other() -> Finding {
    let conf = text("/etc/fuse.conf").unwrap_or_default();
    match conf.lines().any(|line| line.trim() == "user_allow_other") {
        true => Finding::ok("by /etc/fuse.conf"),
        false => Finding::off(
            "not in /etc/fuse.conf",
            "as root: echo user_allow_other >> /etc/fuse.conf",
        ),
    }
}

/// Whether the kernel lets this user have so many rings.
fn rings(count: usize, works: &str) -> Finding {
    match runtime::refusal(count) {
        Ok(None) => Finding::ok(works),
        Ok(Some(refused)) => Finding::off(refused.why(), refused.remedy()),
        Err(error) => Finding::missing(explain(&error)),
    }
}

fn over_io_uring() -> Finding {
    let page = rustix::param::page_size();
    match mount::uring_parameter() {
        None if !Path::new("/sys/module/fuse").exists() => {
            Finding::off("the fuse module is not loaded", "as root: modprobe fuse")
        }
        None => Finding::missing("this kernel does not have it (it came with Linux 6.14)"),
        Some(_) if page != 4096 => Finding::missing(format!(
            "used with pages of 4 KiB only, and this kernel has {} KiB",
            page >> 10
        )),
        Some(true) => {
            // Each core's thread has a ring.
            let cores = placement::allowed_cores().map_or(1, |cores| cores.len());
            rings(cores, "switched on")
        }
        Some(false) => Finding::off(
            "switched off",
            "as root: echo Y > /sys/module/fuse/parameters/enable_uring (at each boot: echo 'options fuse \
             enable_uring=Y' > /etc/modprobe.d/uvfs.conf, or fuse.enable_uring=Y on the kernel's command line)",
        ),
    }
}

/// How to get rights of root's that this process lacks.
fn rights(root: bool) -> Option<&'static str> {
    use rustix::thread::{CapabilitySet, capabilities};
    let needed = CapabilitySet::SYS_ADMIN | CapabilitySet::DAC_READ_SEARCH;
    let all = ["0", "0", "4294967295"];
    let map = text("/proc/self/uid_map").unwrap_or_default();
    if !root {
        Some("mount as root")
    } else if !map.split_whitespace().eq(all) {
        Some("mount as the machine's root, not as that of a user namespace")
    } else if !capabilities(None).is_ok_and(|now| now.effective.contains(needed)) {
        Some("docker run --cap-add SYS_ADMIN --cap-add DAC_READ_SEARCH")
    } else {
        None
    }
}

fn without(why: &str, root: bool) -> Finding {
    match rights(root) {
        Some(remedy) => Finding::off(why, remedy),
        None => Finding::missing(why),
    }
}

fn passthrough(root: bool) -> Finding {
    if !root {
        return without("only for root (CAP_SYS_ADMIN)", root);
    }
    match probe::takes_backing_files() {
        Ok(true) => Finding::ok("the kernel takes backing files"),
        Ok(false) => Finding::missing("this kernel does not have it (it came with Linux 6.9)"),
        Err(error) => without(&format!("could not be tried: {error}"), root),
    }
}

fn fanotify(root: bool) -> Finding {
    match uvfs_passthrough::can_watch() {
        Ok(()) => Finding::ok("with file handles (for sources on ext2 to ext4, XFS and tmpfs)"),
        Err(why) => without(&why, root),
    }
}

fn open_files() -> Finding {
    match getrlimit(Resource::Nofile).maximum {
        Some(limit) if limit < OPEN_FILES => Finding::off(
            format!("at most {limit}"),
            format!("ulimit -Hn {OPEN_FILES} (a systemd unit: LimitNOFILE={OPEN_FILES})"),
        ),
        Some(limit) => Finding::ok(format!("at most {limit}")),
        None => Finding::ok("no limit"),
    }
}

fn locked_memory() -> Finding {
    use rustix::thread::{CapabilitySet, capabilities};
    let free = capabilities(None).is_ok_and(|now| now.effective.contains(CapabilitySet::IPC_LOCK));
    match getrlimit(Resource::Memlock).current {
        _ if free => Finding::ok("no limit (CAP_IPC_LOCK)"),
        Some(limit) if limit < LOCKED => Finding::off(
            format!("at most {} KiB", limit >> 10),
            format!(
                "ulimit -l {} (a systemd unit: LimitMEMLOCK=64M)",
                LOCKED >> 10
            ),
        ),
        Some(limit) => Finding::ok(format!("at most {} KiB", limit >> 10)),
        None => Finding::ok("no limit"),
    }
}

fn pressure() -> Finding {
    match text("/proc/pressure/memory") {
        Some(_) => Finding::ok("/proc/pressure/memory"),
        None if Path::new("/proc/pressure").exists() => Finding::off(
            "pressure stall information is switched off",
            "boot with psi=1 on the kernel's command line",
        ),
        None => Finding::missing(
            "this kernel has no pressure stall information; caches look at free memory instead",
        ),
    }
}

fn user_namespaces(root: bool) -> Finding {
    if !Path::new("/proc/self/ns/user").exists() {
        return Finding::missing("this kernel has none");
    }
    if number("/proc/sys/user/max_user_namespaces") == Some(0) {
        return Finding::off(
            "switched off",
            "as root: sysctl user.max_user_namespaces=15000",
        );
    }
    for (path, refuses, setting) in [
        (
            "/proc/sys/kernel/unprivileged_userns_clone",
            0,
            "kernel.unprivileged_userns_clone=1",
        ),
        (
            "/proc/sys/kernel/apparmor_restrict_unprivileged_userns",
            1,
            "kernel.apparmor_restrict_unprivileged_userns=0",
        ),
    ] {
        if !root && number(path) == Some(refuses) {
            return Finding::off("only for root", format!("as root: sysctl {setting}"));
        }
    }
    match probe::user_namespace() {
        Ok(()) => Finding::ok("allowed"),
        Err(error) => Finding::off(
            error.to_string(),
            "allow unshare(2) with CLONE_NEWUSER in the seccomp profile of this container",
        ),
    }
}

fn preload() -> Finding {
    match run::library() {
        Ok(path) => Finding::ok(path.display().to_string()),
        Err(error) => Finding::off(
            error.to_string(),
            "cargo build --release makes it beside the command",
        ),
    }
}

fn mount_helper() -> Finding {
    let found = ["/sbin", "/usr/sbin"].map(|dir| Path::new(dir).join(helper::NAME));
    match found.iter().find(|path| path.exists()) {
        Some(path) => Finding::ok(path.display().to_string()),
        None => Finding::off(
            format!("no {} in /sbin", helper::NAME),
            "as root: uvfs install-helper",
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `uvfs doctor` reads the kernel's version.
    #[test]
    fn releases_have_numbers() {
        assert_eq!(version("6.18.0-rc3+"), Some((6, 18)));
        assert_eq!(version("5.4"), Some((5, 4)));
        assert_eq!(version("5.10.0-28-amd64"), Some((5, 10)));
        assert_eq!(version("unknown"), None);
        assert!(version("5.4.0") < Some(OLDEST) && version("6.1.0") > Some(OLDEST));
    }

    /// Each check of `uvfs doctor --json` has a name of its own.
    #[test]
    fn every_check_has_a_name_of_its_own() {
        let checks = all();
        for (at, check) in checks.iter().enumerate() {
            assert!(
                checks[..at].iter().all(|other| other.name != check.name),
                "{check:?}"
            );
            assert!(!check.finding.found.is_empty(), "{check:?}");
        }
    }
}
