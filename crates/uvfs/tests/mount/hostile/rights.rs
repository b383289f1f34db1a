//! Users whose rights a program of the host has changed since the kernel looked.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::path::Path;
use std::process::Command;

use super::users::user;
use crate::harness::*;

/// Does something to the files below `$1`, whose attributes the kernel has cached, each time after the file `$2` says
/// that the host has changed them; prints the errors.
const TRIES: &str = "import errno, os, sys, time\n\
    at, sign = sys.argv[1] + '/', sys.argv[2]\n\
    def look(name):\n\
    \x20 try: os.stat(at + name)\n\
    \x20 except FileNotFoundError: pass\n\
    for name in 'closed', 'made', 'replaced', 'moved', 'given', 'cut': look(name)\n\
    os.close(os.open(at + 'closed', os.O_RDONLY))\n\
    open(sign + '.looked', 'w').close()\n\
    while not os.path.exists(sign): time.sleep(0.01)\n\
    tries = {\n\
    \x20 'open': lambda: os.open(at + 'closed', os.O_RDONLY),\n\
    \x20 'create': lambda: os.open(at + 'made', os.O_CREAT | os.O_RDWR),\n\
    \x20 'unlink': lambda: os.unlink(at + 'replaced'),\n\
    \x20 'rename': lambda: os.rename(at + 'own', at + 'moved'),\n\
    \x20 'chmod': lambda: os.chmod(at + 'given', 0o6777),\n\
    \x20 'truncate': lambda: os.truncate(at + 'cut', 0),\n\
    }\n\
    for name, call in tries.items():\n\
    \x20 try: call(); print(name, 'done')\n\
    \x20 except OSError as e: print(name, errno.errorcode[e.errno])";

/// What [`TRIES`] prints that `tries` runs, with the path of the mount, on files below `source` that the host changes.
fn tried(source: &Path, scratch: &Scratch, mut tries: Command, at: &Path) -> String {
    let source = |name: &str| source.join(name);
    fs::set_permissions(source(""), fs::Permissions::from_mode(0o1777)).unwrap();
    for name in ["closed", "replaced", "moved", "given", "cut", "own"] {
        fs::write(source(name), name).unwrap();
        chown(source(name), Some(user()), Some(user())).unwrap();
    }
    chown(source("closed"), Some(0), Some(0)).unwrap();
    let sign = scratch.path("sign");
    fs::set_permissions(sign.parent().unwrap(), fs::Permissions::from_mode(0o777)).unwrap();
    let mut tries = Running::start(tries.args(["-c", TRIES]).arg(at).arg(&sign));
    let looked = sign.with_extension("looked");
    wait_for("the kernel to know all files", || {
        looked.exists() || tries.ended().is_some()
    });
    // Another user's, under the same names.
    let secret = |name: &str| {
        fs::write(source("secret"), "secret").unwrap();
        fs::set_permissions(source("secret"), fs::Permissions::from_mode(0o600)).unwrap();
        fs::rename(source("secret"), source(name)).unwrap();
    };
    fs::set_permissions(source("closed"), fs::Permissions::from_mode(0o600)).unwrap();
    for name in ["made", "replaced", "moved"] {
        secret(name);
    }
    for name in ["given", "cut"] {
        chown(source(name), Some(0), Some(0)).unwrap();
        fs::set_permissions(source(name), fs::Permissions::from_mode(0o600)).unwrap();
    }
    fs::write(&sign, "").unwrap();
    let told = tries.wait(SOON).expect("nothing waits").ok();
    for name in ["made", "replaced", "moved"] {
        assert_eq!(fs::read_to_string(source(name)).unwrap(), "secret");
    }
    let mode = fs::metadata(source("given")).unwrap().mode() & 0o7777;
    assert_eq!(mode, 0o600, "{told}");
    told
}

/// The kernel believes for an hour what it was told.
const FOR_AN_HOUR: &str = "attr_timeout=3600,entry_timeout=3600,negative_timeout=3600";

/// The host checks again what the kernel has checked by old attributes: no user reads, changes or removes other
/// users' files.
#[test]
fn what_the_kernel_checked_by_old_attributes_the_host_checks_again() {
    for transport in transports() {
        if !has(&[Need::Uvfs, Need::Program("python3")]) {
            return;
        }
        let served = Served::new(&Serve::over(transport).option(FOR_AN_HOUR));
        let at = &served.mount.at;
        let told = tried(&served.source, &served.scratch, as_user(at), at);
        let expected = "open EACCES\ncreate EACCES\nunlink EPERM\nrename EPERM\nchmod EPERM\ntruncate EACCES\n";
        assert_eq!(told, expected, "{transport}");
        assert_eq!(
            fs::read_to_string(served.source.join("cut")).unwrap(),
            "cut"
        );
    }
}

/// If a server whose /proc does not show the caller acted as root, users in other pid namespaces could change and remove
/// other users' files.
#[test]
fn whose_a_file_is_the_host_checks_for_callers_that_are_not_seen() {
    if !has(&[Need::Mount(super::ANY), Need::Uvfs])
        || !has(&["python3", "unshare", "nsenter"].map(Need::Program))
    {
        return;
    }
    let scratch = Scratch::new();
    let (source, at) = (scratch.tmpfs("source", "1m"), scratch.dir("mount"));
    let mut server = command("unshare", ["--pid", "--fork", "--kill-child"]);
    server.args(["--mount-proc", env!("CARGO_BIN_EXE_uvfs"), "mount"]);
    server.args(["--foreground", "-o", "allow_other", "-o", FOR_AN_HOUR]);
    let mut server = Running::start(server.args([&source, &at]));
    let unshare = server.pid();
    let inside = || fs::read_to_string(format!("/proc/{unshare}/task/{unshare}/children"));
    let mounted = || {
        let table =
            inside().and_then(|pid| fs::read_to_string(format!("/proc/{}/mountinfo", pid.trim())));
        table.is_ok_and(|table| table.contains(&format!(" {} ", at.display())))
    };
    wait_for("the mount", || mounted() || server.ended().is_some());
    let (server_pid, user) = (inside().unwrap(), user().to_string());
    let mut tries = command("nsenter", ["--mount", "--target", server_pid.trim()]);
    tries.args(["--setuid", &user, "--setgid", &user, "python3"]);
    let told = tried(&source, &scratch, tries, &at);
    server.kill();
    for refused in ["unlink EPERM", "rename EPERM", "chmod EPERM"] {
        assert!(told.contains(refused), "no {refused}: {told}");
    }
}

/// Python, run by the user.
fn as_user(at: &Path) -> Command {
    use std::os::unix::process::CommandExt;
    let mut command = Command::new("python3");
    command.uid(user()).gid(user()).current_dir(at);
    command
}

/// A server that checks again counts the caller's supplementary groups.
#[test]
fn a_supplementary_group_is_enough() {
    if !has(&[
        Need::Mount(super::ANY),
        Need::Uvfs,
        Need::Program("setpriv"),
    ]) {
        return;
    }
    const GROUP: u32 = 7_777;
    let served = Served::new(&Serve::over(super::ANY));
    // The kernel has the root's attributes before the source changes: see `uvfs_server::mount::mount`.
    (served.mount)
        .run(Command::new("stat").arg(&served.mount.at))
        .ok();
    let dir = served.source.join("shared");
    fs::create_dir(&dir).unwrap();
    chown(&dir, None, Some(GROUP)).unwrap();
    fs::set_permissions(&dir, fs::Permissions::from_mode(0o2770)).unwrap();
    let script = "cd \"$1/shared\"; umask 007; echo one >a; mkdir d; ln -s a l; ln a h; mkfifo p; mv a b; \
        rm h; chmod 600 b; rmdir d; cat b; ls";
    let user = user().to_string();
    let mut member = Command::new("setpriv");
    member.args(["--reuid", &user, "--regid", &user, "--groups", "7777"]);
    member
        .args(["sh", "-euc", script, "sh"])
        .arg(&served.mount.at);
    assert_eq!(served.mount.run(&mut member).ok(), "one\nb\nl\np\n");
    // Or by an entry of its ACL.
    if has(&[Need::Program("setfacl")]) {
        let listed = served.source.join("listed");
        fs::create_dir(&listed).unwrap();
        run(Command::new("setfacl")
            .args(["-m", "g:7777:rwx"])
            .arg(&listed))
        .ok();
        let mut member = Command::new("setpriv");
        member.args(["--reuid", &user, "--regid", &user, "--groups", "7777"]);
        member.args(["mkdir"]).arg(served.at("listed/made"));
        served.mount.run(&mut member).ok();
    }
    let made = fs::metadata(dir.join("b")).unwrap();
    assert_eq!((made.gid(), made.mode() & 0o7777), (GROUP, 0o600));
}
