//! Programs and servers in different namespaces.

use super::*;

const SCRIPT: &str = "import os, sys\n\
    fd = os.open(sys.argv[1] + '/file', os.O_CREAT | os.O_RDWR)\n\
    for at in range(100): os.pwrite(fd, b'x' * 1000, at * 1000)\n\
    os.fsync(fd)\n\
    print(os.pread(fd, 5, 99_995), os.fstat(fd).st_size)";

/// A server sees the number 0 of a client outside of its pid namespace, and serves it.
#[test]
fn a_server_in_a_pid_namespace_serves_programs_outside_of_it() {
    if !can() || !has(&["unshare", "python3"].map(Need::Program)) {
        return;
    }
    let scratch = Scratch::new();
    let (source, at) = (scratch.dir("source"), scratch.dir("mount"));
    let mut apart = command("unshare", ["--pid", "--fork", "--kill-child"]);
    apart.args([env!("CARGO_BIN_EXE_uvfs"), "mount", "--foreground"]);
    apart.args(["-o", "allow_other,default_permissions,passthrough=direct"]);
    let mut server = Running::start(apart.arg(&source).arg(&at));
    wait_for("the mount", || mounted(&at).is_some());
    let mut program = uvfs_run(How::Eager);
    program.args(["--", "python3", "-c", SCRIPT]).arg(&at);
    let outcome = run(&mut program);
    let unmounted = run(Command::new("umount").arg(&at));
    if !unmounted.status.success() {
        unmount_by_force(&at);
    }
    assert!(served_any(&outcome), "{outcome}");
    assert_eq!(outcome.ok(), "b'xxxxx' 100000\n");
    assert_eq!(fs::read(source.join("file")).unwrap(), vec![b'x'; 100_000]);
    unmounted.ok();
    server.wait(SOON).expect("it ends with its mount").ok();
}
