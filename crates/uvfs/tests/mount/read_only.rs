//! A read-only source, and a read-only mount.

use std::fs;

use rustix::mount::MountFlags;

use crate::harness::*;

/// Asserts that everything that would change the file system fails with EROFS.
fn assert_read_only(mount: &Mount) {
    for (script, works) in [
        ("cat \"$1/file\"; ls \"$1\"; stat \"$1/file\"", true),
        ("echo >>\"$1/file\"", false),
        ("echo >\"$1/new\"", false),
        ("mkdir \"$1/new\"", false),
        ("rm \"$1/file\"", false),
        ("mv \"$1/file\" \"$1/other\"", false),
        ("chmod 600 \"$1/file\"", false),
        ("ln -s x \"$1/new\"", false),
        ("truncate -s 0 \"$1/file\"", false),
        ("setfattr -n user.x -v y \"$1/file\"", false),
    ] {
        let outcome = mount.run(shell(script, &[&mount.at]).env("LC_ALL", "C"));
        assert_eq!(outcome.status.success(), works, "{outcome}");
        assert!(
            works || outcome.stderr.contains("Read-only file system"),
            "{outcome}"
        );
    }
}

/// Changes on a read-only source fail with EROFS.
#[test]
fn source_read_only() {
    if !has(&[Need::Mount(Transport::Dev)]) {
        return;
    }
    let scratch = Scratch::new();
    let source = scratch.tmpfs("source", "2m");
    fs::write(source.join("file"), "content").unwrap();
    rustix::mount::mount_remount(&source, MountFlags::RDONLY, "").unwrap();
    let mount = Mount::new(&Serve::over(Transport::Dev), &source, &scratch.dir("mount"));
    assert_read_only(&mount);
    mount.unmount();
}

/// With `-o ro` no program changes the source.
#[test]
fn mounted_read_only() {
    if !has(&[Need::Mount(Transport::Dev), Need::Uvfs]) {
        return;
    }
    let scratch = Scratch::new();
    let source = scratch.tmpfs("source", "2m");
    fs::write(source.join("file"), "content").unwrap();
    let serve = Serve::over(Transport::Dev).option("ro");
    let mount = Mount::new(&serve, &source, &scratch.dir("mount"));
    assert!(
        mounted(&mount.at)
            .unwrap()
            .options
            .iter()
            .any(|o| o == "ro")
    );
    assert_read_only(&mount);
    mount.unmount();
}
