//! A file system of the library outlives its server: the example `kept`, killed while programs read and write. Needs root
//! and /dev/fuse.

use std::fs;
use std::process::Command;

use rustix::process::Signal;
use uvfs_server::fs::Survive;
use uvfs_server::{FileSystem, Options, mount};
use uvfs_testing::outlives::{Server, example, killed_under_load};
use uvfs_testing::{Need, has};

fn kept() -> Command {
    Command::new(example("kept"))
}

/// No call fails, and no change is lost or made twice.
#[test]
fn what_a_file_system_keeps_outlives_its_server() {
    let without = "links,symlinks,unnamed,attributes,exchanges";
    killed_under_load(&mut kept(), without);
}

/// What programs have written is there afterwards, also in a file that has lost its name.
#[test]
fn contents_stay() {
    if !has(&[Need::Fuse]) {
        return;
    }
    let server = Server::start(&mut kept());
    let shell = |script: &str| {
        let mut shell = Command::new("sh");
        shell.args(["-ec", script]).current_dir(&server.at);
        shell
    };
    let mut holds = shell(
        "echo gone > gone; exec 3<>gone; rm gone; : > ready; until [ -e go ]; do sleep 0.01; done; read line <&3; \
         [ \"$line\" = gone ]",
    );
    let mut holds = holds.spawn().unwrap();
    let done = |script: &str| assert!(shell(script).status().unwrap().success(), "{script}");
    done("until [ -e ready ]; do sleep 0.01; done; mkdir a; echo text > a/b; mv a c");
    for _ in 0..3 {
        server.replaced(Signal::KILL);
        done("[ \"$(cat c/b)\" = text ]; [ ! -e a ]; [ ! -e gone ]");
    }
    done(": > go");
    assert!(holds.wait().unwrap().success());
    server.unmount();
}

/// A signal ends the mount as it does any of the library, also when the server is not the first.
#[test]
fn a_signal_ends_it() {
    if !has(&[Need::Fuse]) {
        return;
    }
    let server = Server::start(&mut kept());
    server.replaced(Signal::ABORT);
    let ended = server.ends_by(Signal::TERM);
    assert!(ended.success(), "{ended}");
}

/// A file system that could.
struct Could;

impl FileSystem for Could {
    fn survive(&self) -> Option<&dyn Survive> {
        Some(self)
    }
}

impl Survive for Could {}

/// A process with threads can't be forked: it is refused, and nothing stays mounted. This is a thread of the test's.
#[test]
fn a_process_with_threads_is_refused() {
    if !has(&[Need::Fuse]) {
        return;
    }
    let at = tempfile::tempdir().unwrap();
    let mut options = Options::named("could");
    options.survive = true;
    let refused = mount(Could, at.path(), options).map(drop).unwrap_err();
    assert!(refused.to_string().contains("second thread"), "{refused}");
    assert!(fs::read_dir(at.path()).unwrap().next().is_none());
}

/// What it can't be had with is refused before anything is mounted.
#[test]
fn what_can_not_survive_is_refused() {
    struct Plain;
    impl FileSystem for Plain {}
    let at = tempfile::tempdir().unwrap();
    let mut options = Options::named("plain");
    options.survive = true;
    let refused = mount(Plain, at.path(), options).map(drop).unwrap_err();
    assert!(refused.to_string().contains("FileSystem::survive"));
    assert!(fs::read_dir(at.path()).unwrap().next().is_none());
}
