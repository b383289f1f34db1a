//! mount(8) and the helper, against the same words for file systems of the kernel; and what a remount
//! changes.

use std::fs;
use std::path::Path;
use std::time::Duration;

use rustix::fs::{AtFlags, CWD, Mode, OFlags, Timespec, Timestamps};
use rustix::mount::{MountFlags, mount_bind, mount_remount};

use crate::harness::*;
use crate::own_process;

const PROGRAMS: &[&str] = &["mount", "findmnt", "setpriv", "unshare", "fusermount3"];

fn needed() -> bool {
    has(&[Need::Mount(Transport::Dev), Need::Uvfs])
        && PROGRAMS.iter().all(|name| has(&[Need::Program(name)]))
}

/// Runs a part of the script for a side, and gives what it says.
fn script(part: &str) -> String {
    let scratch = Scratch::new();
    let program = uvfs_for_all(&scratch);
    let script = scratch.path("mount8.sh");
    fs::write(&script, include_str!("programs/mount8.sh")).unwrap();
    let mut command = command("unshare", ["--mount", "--propagation", "private", "bash"]);
    command.arg(script).arg(program);
    let outcome = run(command.arg(scratch.dir("world")).arg(part));
    eprintln!("{}", outcome.stderr);
    outcome
        .ok()
        .replace(scratch.path("world").to_str().unwrap(), "DIR")
}

/// The same script for the kernel's file systems and for uvfs, with the same outcome.
fn same(part: &str, lines: usize) {
    if !needed() {
        return;
    }
    let kernel = script(&format!("{part} kernel"));
    let uvfs = script(&format!("{part} uvfs"));
    assert!(kernel.lines().count() >= lines, "{kernel}");
    let differences: Vec<_> = kernel
        .lines()
        .zip(uvfs.lines())
        .filter(|(kernel, uvfs)| kernel != uvfs)
        .map(|(kernel, uvfs)| format!("kernel: {kernel}\nuvfs:   {uvfs}\n"))
        .collect();
    assert!(differences.is_empty(), "{}", differences.concat());
    assert_eq!(kernel, uvfs);
}

/// systemd's automount units can mount uvfs.
#[test]
fn an_automount_is_mounted_by_the_automounters_process_group() {
    if !needed() || !has(&[Need::Program("python3")]) {
        return;
    }
    let scratch = Scratch::new();
    let script = scratch.path("automount.py");
    fs::write(&script, include_str!("programs/automount.py")).unwrap();
    let source = scratch.dir("source");
    fs::write(source.join("file"), "content").unwrap();
    let mut command = command("unshare", ["--mount", "--propagation", "private"]);
    command
        .arg("python3")
        .arg(script)
        .arg(uvfs_for_all(&scratch));
    let outcome = run(command.arg(source).arg(scratch.dir("at")));
    assert_eq!(outcome.ok(), "content");
}

/// Options of mount(8) are accepted, and mountinfo shows them.
#[test]
fn options_of_mount8_are_accepted() {
    same("words", 50);
}

/// A mount allows nothing that its source's mount forbids.
#[test]
fn restrictions_of_the_source() {
    same("inherited", 3);
}

/// `nosuid` and `nodev` hold.
#[test]
fn set_user_id_and_devices() {
    same("privileges", 8);
}

/// df(1) shows the sizes of the source.
#[test]
fn df_shows_the_sizes_of_the_source() {
    same("sizes", 3);
}

/// A user can mount what fstab allows him, and nothing else.
#[test]
fn a_user_mounts_what_fstab_allows() {
    same("user", 2);
}

/// Names with spaces survive fstab and mountinfo.
#[test]
fn names_and_fstab() {
    if !needed() {
        return;
    }
    let all = "user_id=0,group_id=0,default_permissions,allow_other,max_read=1048576";
    let expected = format!(
        "\
rw: 0 DIR/source fuse.uvfs DIR/source fuse.uvfs
fsname=a-name,subtype=other: 0 a-name fuse.other a-name fuse.other
subtype=: 0 DIR/source fuse DIR/source fuse
mount -a: 0 1
mount -a: 0 1
remount of fstab: 0 ro,relatime,{all}
remount without fstab: 0 rw,relatime,{all}
remount of both: 0 rw,nosuid,relatime,{all}
remount,bogus: 32 rw,nosuid,relatime,{all}
umount: 0 DIR/at is not a mountpoint
remount,allow_other: 32
nofail: 0 DIR/at is not a mountpoint
nowhere: 32
sloppy: rw,nosuid,relatime rw 
nosuid below: rw,nosuid,relatime rw 
nosuid below, xdev: rw,relatime rw 
"
    );
    assert_eq!(script("names"), expected);
}

/// A mount that is made read-only refuses writes, and takes them again once it is writable: also one that was mounted
/// read-only.
#[test]
fn remount_read_only_and_back() {
    if !has(&[Need::Mount(Transport::Dev), Need::Uvfs]) {
        return;
    }
    let served = Served::new(&Serve::over(Transport::Dev).option("ro"));
    let at = &served.mount.at;
    let write = || served.mount.run(&mut shell("echo x >\"$1/file\"", &[at]));
    let refused = |outcome: Outcome| {
        assert!(
            outcome.stderr.contains("Read-only file system"),
            "{outcome}"
        );
    };
    refused(write());
    mount_remount(at, MountFlags::empty(), "").unwrap();
    // The server follows a moment later.
    wait_for("the server to follow", || write().status.success());
    mount_remount(at, MountFlags::RDONLY, "").unwrap();
    refused(write());
    mount_remount(at, MountFlags::empty(), "").unwrap();
    wait_for("the server to follow", || write().status.success());
}

/// By which rule access times move, as mount(2) is told and /proc/self/mountinfo shows it.
const RULES: &[(&str, MountFlags)] = &[
    ("relatime", MountFlags::RELATIME),
    ("noatime", MountFlags::NOATIME),
    (
        "nodiratime",
        MountFlags::NODIRATIME.union(MountFlags::RELATIME),
    ),
    ("strictatime", MountFlags::STRICTATIME),
];

/// The access times that reads move, below a directory.
pub fn access_times(dir: &Path, _: &str) -> String {
    let mut report = String::new();
    let at = |path: &Path| {
        let stat = rustix::fs::stat(path).unwrap();
        (stat.st_atime, stat.st_atime_nsec)
    };
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Realtime).tv_sec;
    let time = |ago| Timespec {
        tv_sec: now - ago,
        tv_nsec: 0,
    };
    // Modified since it was read: with relatime the first read moves the access time.
    let times = Timestamps {
        last_access: time(2000),
        last_modification: time(1000),
    };
    let read = |path: &Path, flags: OFlags| {
        let file = rustix::fs::open(path, OFlags::RDONLY | flags, Mode::empty()).unwrap();
        let mut room = vec![0u8; 8192];
        // Aligned, for O_DIRECT.
        let skip = room.as_ptr().align_offset(4096);
        assert_eq!(
            rustix::io::read(&file, &mut room[skip..skip + 4096]),
            Ok(4096)
        );
    };
    let list = |path: &Path, _| assert_eq!(fs::read_dir(path).unwrap().count(), 1);
    let sub = dir.join("directory");
    fs::create_dir_all(&sub).unwrap();
    let file = sub.join("file");
    fs::write(&file, vec![b'x'; 40960]).unwrap();
    type Read<'a> = &'a dyn Fn(&Path, OFlags);
    let cases: [(&str, &Path, Read, OFlags); 3] = [
        ("read", &file, &read, OFlags::empty()),
        ("direct read", &file, &read, OFlags::DIRECT),
        ("listing", &sub, &list, OFlags::empty()),
    ];
    for (name, path, look, flags) in cases {
        rustix::fs::utimensat(CWD, path, &times, AtFlags::empty()).unwrap();
        for time in ["first", "second"] {
            let before = at(path);
            next_file_time();
            look(path, flags);
            report += &format!("{name}, {time} time: {}\n", at(path) > before);
        }
    }
    report
}

/// Options of the mount and a remount keep the rules for access times, also with backing files.
#[test]
fn access_times_by_the_rules_of_the_mount() {
    if !has(&[
        Need::Mount(Transport::Dev),
        Need::Uvfs,
        Need::Program("mkfs.ext4"),
    ]) {
        return;
    }
    let scratch = Scratch::new();
    let (at, bound) = (scratch.dir("mount"), scratch.dir("bound"));
    let report = scratch.path("report");
    let mut differences = String::new();
    for (kind, source) in [
        ("ext4", scratch.ext4("ext4")),
        ("tmpfs", scratch.tmpfs("tmpfs", "64m")),
    ] {
        mount_bind(&source, &bound).unwrap();
        let mut expected = Vec::new();
        for (name, flags) in RULES {
            mount_remount(&bound, MountFlags::BIND | *flags, "").unwrap();
            run(&mut own_process::call("access_times", &bound, "", &report)).ok();
            expected.push((name, flags, fs::read_to_string(&report).unwrap()));
        }
        rustix::mount::unmount(&bound, rustix::mount::UnmountFlags::empty()).unwrap();
        for option in ["", "passthrough=all", "nopassthrough"] {
            let compare = |mount: &Mount, rule: &str, how: &str, expected: &str| {
                mount
                    .run(&mut own_process::call("access_times", &at, "", &report))
                    .ok();
                let got = fs::read_to_string(&report).unwrap();
                let mut differences = String::new();
                for (expected, got) in expected.lines().zip(got.lines()) {
                    // docs/differences.md: the kernel has the listing, and does not ask again.
                    let cached = how == "remounted" && expected == "listing, second time: true";
                    if expected != got && !cached {
                        differences += &format!(
                            "{kind} {option:?} {how} {rule}: {expected} on the host, {got}\n"
                        );
                    }
                }
                differences
            };
            let serve = Serve::over(Transport::Dev).option(option);
            for (rule, _, expected) in &expected {
                let mount = Mount::new(&serve.clone().option(rule), &source, &at);
                differences += &compare(&mount, rule, "mounted", expected);
                mount.unmount();
            }
            let mount = Mount::new(&serve, &source, &at);
            for (rule, flags, expected) in &expected {
                mount_remount(&at, **flags, "").unwrap();
                // The server follows a moment later.
                let mut found = String::new();
                wait_until(Duration::from_secs(5), || {
                    found = compare(&mount, rule, "remounted", expected);
                    found.is_empty()
                });
                differences += &found;
            }
            mount.unmount();
        }
    }
    assert!(differences.is_empty(), "{differences}");
}
