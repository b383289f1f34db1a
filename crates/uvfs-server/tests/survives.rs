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

/// A terminal's Ctrl-C waits for the mount's users, as it does without a keeper: the worker gets it once.
#[test]
fn a_terminal_interrupts_once() {
    if !has(&[Need::Fuse, Need::Program("python3")]) {
        return;
    }
    let at = tempfile::tempdir().unwrap();
    let terminal = r#"
import os, pty, sys, time
kept, at = sys.argv[1:]
pid, terminal = pty.fork()
if pid == 0:
    os.execv(kept, [kept, at])
said = b""
def says(word):
    global said
    while word not in said:
        said += os.read(terminal, 1000)
def mounted():
    return " %s " % at in open("/proc/self/mountinfo").read()
says(b"serves")
held = os.open(at + "/held", os.O_CREAT | os.O_RDWR)
os.write(terminal, b"")
says(b"^C")
time.sleep(0.3)
stays = mounted()
os.close(held)
status = os.waitpid(pid, 0)[1]
sys.exit(0 if stays and status == 0 and not mounted() else "%s %s" % (stays, status))
"#;
    let mut terminal = Command::new("python3")
        .args(["-c", terminal])
        .args([example("kept"), at.path().canonicalize().unwrap()])
        .spawn()
        .unwrap();
    let ended = terminal.wait().unwrap();
    assert!(ended.success(), "{ended}");
}

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
