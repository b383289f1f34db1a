//! Which mounts' paths may be served: what /proc says of mounts and of this process, read.

/// Capabilities without which even root is refused things (linux/capability.h): CAP_CHOWN,
/// CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH, CAP_FOWNER, CAP_FSETID.
const CAPABILITIES: u64 = 0b11111;

/// As /proc/self/mountinfo has it.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Seen {
    pub(crate) point: Vec<u8>,
    pub(crate) device: u64,
    pub(crate) noexec: bool,
}

/// A field of /proc/self/status.
pub(crate) fn field<'a>(status: &'a str, name: &str) -> Option<&'a str> {
    status
        .lines()
        .find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))
}

/// Whether this process may do all that the server of a mount with these options may.
fn entitled(status: &str, options: &str) -> bool {
    let ids = |name| {
        let ids: Option<Vec<u32>> = field(status, name)?
            .split_whitespace()
            .map(|id| id.parse().ok())
            .collect();
        let ids = ids?;
        // All four: what it is and what it uses for files.
        let first = *ids.first()?;
        ids.iter().all(|id| *id == first).then_some(first)
    };
    let (Some(user), Some(_)) = (ids("Uid"), ids("Gid")) else {
        return false;
    };
    if user == 0 {
        let capabilities = field(status, "CapEff").map(str::trim);
        let capabilities = capabilities.and_then(|hex| u64::from_str_radix(hex, 16).ok());
        return capabilities.is_some_and(|have| have & CAPABILITIES == CAPABILITIES);
    }
    let has = |option: &str| options.split(',').any(|one| one == option);
    has(&format!("user_id={user}")) && !has("allow_other") && !has("default_permissions")
}

/// A path of mountinfo without its octal escapes.
fn unescaped(text: &str) -> Vec<u8> {
    let mut bytes = Vec::new();
    let mut rest = text.as_bytes();
    while let Some((&first, tail)) = rest.split_first() {
        let octal = tail.get(..3).and_then(|digits| {
            let digits = std::str::from_utf8(digits).ok()?;
            u8::from_str_radix(digits, 8).ok()
        });
        match (first, octal) {
            (b'\\', Some(byte)) => {
                bytes.push(byte);
                rest = &tail[3..];
            }
            _ => {
                bytes.push(first);
                rest = tail;
            }
        }
    }
    bytes
}

/// What is below a directory's path: nothing for other paths.
pub(crate) fn below<'a>(point: &[u8], path: &'a [u8]) -> Option<&'a [u8]> {
    match path.strip_prefix(point)? {
        b"" => Some(b""),
        rest => rest.strip_prefix(b"/"),
    }
}

/// The mounts of a mountinfo whose paths can be served, for a process with this status.
pub(crate) fn served_mounts(mountinfo: &str, status: &str) -> Vec<Seen> {
    let mut all: Vec<Vec<u8>> = Vec::new();
    let mut ours = Vec::new();
    for line in mountinfo.lines() {
        // proc_pid_mountinfo(5): id, parent, device, root, point, options, fields, "-", type,
        // source, options of the file system.
        let mut parts = line.split(" - ");
        let (Some(first), Some(second)) = (parts.next(), parts.next()) else {
            continue;
        };
        let first: Vec<&str> = first.split(' ').collect();
        let second: Vec<&str> = second.split(' ').collect();
        let (Some(device), Some(root), Some(point), Some(options)) =
            (first.get(2), first.get(3), first.get(4), first.get(5))
        else {
            continue;
        };
        let point = unescaped(point);
        all.push(point.clone());
        let device = device.split_once(':').and_then(|(major, minor)| {
            Some(libc::makedev(major.parse().ok()?, minor.parse().ok()?))
        });
        let kind = second.first();
        if kind == Some(&"fuse.uvfs")
            && *root == "/"
            && options.split(',').next() == Some("rw")
            // The file system's own, after its source.
            && second.get(2).is_some_and(|own| own.split(',').next() == Some("rw"))
            && point != b"/"
            && let Some(device) = device
            && entitled(status, second.get(2).unwrap_or(&""))
        {
            let noexec = options.split(',').any(|one| one == "noexec");
            ours.push(Seen {
                point,
                device,
                noexec,
            });
        }
    }
    // Others below, or above at the same place, are the kernel's to find.
    ours.retain(|one| {
        let there = all
            .iter()
            .filter(|other| below(&one.point, other).is_some());
        there.count() == 1
    });
    ours
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROOT: &str =
        "Uid:\t0\t0\t0\t0\nGid:\t0\t0\t0\t0\nCapEff:\t000001ffffffffff\nUmask:\t0022\n";

    #[test]
    fn who_may_do_all_is_served() {
        assert!(entitled(
            ROOT,
            "rw,user_id=0,default_permissions,allow_other"
        ));
        assert!(!entitled(&ROOT.replace("ff\n", "fd\n"), "rw,user_id=0"));
        assert!(!entitled(&ROOT.replace("\t0\n", "\t5\n"), "rw,user_id=0"));
        let user = "Uid:\t7\t7\t7\t7\nGid:\t7\t7\t7\t7\nCapEff:\t0\n";
        assert!(entitled(user, "rw,user_id=7,group_id=7"));
        assert!(!entitled(user, "rw,user_id=8,group_id=7"));
        assert!(!entitled(user, "rw,user_id=7,default_permissions"));
        assert!(!entitled("", "rw,user_id=0"));
    }

    #[test]
    fn mounts_alone_at_their_place_are_served() {
        let line = |at: &str, kind: &str| {
            format!("30 1 0:50 / {at} rw,nosuid shared:1 - {kind} /src rw,user_id=0\n")
        };
        let one = line("/mnt/a\\040b", "fuse.uvfs");
        let seen = |text: &str| served_mounts(text, ROOT);
        let found = seen(&(line("/", "ext4") + &one));
        assert_eq!(found.len(), 1);
        assert_eq!(found[0].point, b"/mnt/a b");
        assert_eq!(found[0].device, libc::makedev(0, 50));
        assert!(seen(&(one.clone() + &line("/mnt/a\\040b/c", "tmpfs"))).is_empty());
        assert!(seen(&(one.clone() + &line("/mnt/a\\040b", "tmpfs"))).is_empty());
        assert_eq!(seen(&(one + &line("/mnt/a\\040bc", "tmpfs"))).len(), 1);
        assert!(seen(&line("/m", "fuse.other")).is_empty());
        assert!(seen(&line("/m", "fuse.uvfs").replace(" rw,nosuid", " ro")).is_empty());
    }

    #[test]
    fn a_path_is_below_or_not() {
        assert_eq!(below(b"/mnt", b"/mnt"), Some(&b""[..]));
        assert_eq!(below(b"/mnt", b"/mnt/a"), Some(&b"a"[..]));
        assert_eq!(below(b"/mnt", b"/mnta"), None);
        assert_eq!(below(b"/mnt", b"/mn"), None);
    }
}
