//! Neighbours that try to harm a mount, or to use it against others.

mod descriptors;
mod leases;
mod rights;
mod silent;
mod users;

use std::fs;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::process::Command;
use std::time::{Duration, Instant};

use crate::harness::*;
pub use leases::{crowd, leaseholder, signalled};
pub use silent::{attach_with_hung_files, crowd_of_open_files};

/// The transport of tests that are about something else.
const ANY: Transport = Transport::Dev;

/// Whether a source contains the mount point does not depend on the path, so no server serves its own mount.
#[test]
fn a_source_that_contains_its_mount_point_by_another_path() {
    if !has(&[Need::Mount(ANY), Need::Uvfs]) {
        return;
    }
    let scratch = Scratch::new();
    // A mount of its own that shares what is mounted below it.
    let source = scratch.tmpfs("source", "64m");
    run(Command::new("mount").arg("--make-shared").arg(&source)).ok();
    let other = scratch.dir("other");
    run(Command::new("mount").arg("--bind").arg(&source).arg(&other)).ok();
    fs::create_dir(source.join("mnt")).unwrap();
    fs::write(source.join("mnt/hidden"), "here").unwrap();
    let mount = Mount::new(
        &Serve::over(ANY).option("nonempty"),
        &source,
        &other.join("mnt"),
    );
    let listing = run_within(
        Duration::from_secs(20),
        Command::new("find")
            .arg(&mount.at)
            .arg("-name")
            .arg("hidden"),
    )
    .ok();
    assert_eq!(
        listing.trim(),
        mount.at.join("mnt/hidden").display().to_string()
    );
}

/// A client of the control socket that takes its time does not hold up the server's end.
#[test]
fn a_slow_client_of_the_control_socket_holds_up_nobody() {
    if !has(&[Need::Mount(ANY), Need::Uvfs, Need::Program("getfattr")]) {
        return;
    }
    let served = Served::new(&Serve::over(ANY));
    let path = run(Command::new("getfattr")
        .args(["--only-values", "-n", "user.uvfs.control"])
        .arg(&served.mount.at))
    .ok();
    let mut slow = UnixStream::connect(path.trim_end_matches('\0')).unwrap();
    let began = Instant::now();
    // It never ends its line, and never stops for as long as one call may wait.
    let ended = std::iter::from_fn(|| {
        std::thread::sleep(Duration::from_millis(300));
        Some(slow.write_all(b"s"))
    })
    .take(100)
    .any(|sent| sent.is_err());
    assert!(ended, "the server listens to it still");
    println!("dropped after {:?}", began.elapsed());
    let mut rest = Vec::new();
    let _ = slow.read_to_end(&mut rest);
    served.mount.unmount().ok();
}
