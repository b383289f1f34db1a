//! A file system written for fuser outlives its process: the example `mirror`, killed while programs read and write. Needs
//! root and /dev/fuse.

use std::os::unix::process::ExitStatusExt;
use std::process::Command;

use rustix::process::Signal;
use uvfs_fuser::{Config, Filesystem, MountOption, Session};
use uvfs_testing::outlives::{Server, example, killed_under_load};
use uvfs_testing::{Need, has};

/// No call fails, and no change is lost or made twice.
#[test]
fn a_mirror_outlives_its_process() {
    let source = tempfile::tempdir().unwrap();
    let without = "links,symlinks,fifos,unnamed,attributes,exchanges";
    let mut mirror = Command::new(example("mirror"));
    killed_under_load(mirror.arg(source.path()), without);
}

/// A file that has lost its name stays open, and a signal ends the mount, also when the process is not the first.
#[test]
fn what_was_open_stays_open_until_the_end() {
    if !has(&[Need::Fuse]) {
        return;
    }
    let source = tempfile::tempdir().unwrap();
    let server = Server::start(Command::new(example("mirror")).arg(source.path()));
    let script = "echo gone > gone; exec 3<>gone; rm gone; : > ready; until [ -e go ]; do sleep 0.01; done; \
                  read line <&3; [ \"$line\" = gone ]; echo more >&3";
    let mut holds = Command::new("sh")
        .args(["-ec", script])
        .current_dir(&server.at)
        .spawn()
        .unwrap();
    while !source.path().join("ready").exists() {
        assert!(holds.try_wait().unwrap().is_none(), "it goes on");
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    for _ in 0..3 {
        server.replaced(Signal::KILL);
    }
    let go = Command::new("touch").arg(server.at.join("go")).status();
    assert!(go.unwrap().success());
    assert!(holds.wait().unwrap().success());
    let ended = server.ends_by(Signal::TERM);
    assert!(ended.success(), "{ended}");
}

/// A process that ends by such a signal is not replaced: the mount ends, and so does the keeper.
#[test]
fn a_signal_that_is_left_alone_ends_it() {
    if !has(&[Need::Fuse]) {
        return;
    }
    let source = tempfile::tempdir().unwrap();
    let mut mirror = Command::new(example("mirror"));
    let server = Server::start(mirror.arg(source.path()).arg("leave_signals"));
    server.replaced(Signal::KILL);
    let ended = server.ends_by(Signal::TERM);
    assert_eq!(ended.signal(), Some(Signal::TERM.as_raw()), "{ended}");
}

/// Without [`Filesystem::survive`] it is refused before anything is mounted.
#[test]
fn what_can_not_survive_is_refused() {
    struct Plain;
    impl Filesystem for Plain {}
    let at = tempfile::tempdir().unwrap();
    let mut config = Config::default();
    config.mount_options = vec![MountOption::CUSTOM("survive".into())];
    let refused = Session::new(Plain, at.path(), &config).map(drop);
    let refused = refused.unwrap_err().to_string();
    assert!(refused.contains("Filesystem::survive"), "{refused}");
}
