//! A server that is killed: no program hangs on its mount.

use std::process::Command;

use rustix::process::Signal;

use crate::harness::*;

fn server_killed(transport: Transport) {
    if !has(&[Need::Mount(transport)]) {
        return;
    }
    let mut served = Served::new(&Serve::over(transport));
    let at = served.mount.at.clone();
    let mut reader = Running::start(
        shell(
            // An open for appending gets no backing file, with which the shell would go on.
            "exec 3>>\"$1/held\"; while echo x >&3; do sleep 0.01; done",
            &[&at],
        )
        .env("LC_ALL", "C"),
    );
    wait_for("the first write", || {
        served
            .source
            .join("held")
            .metadata()
            .is_ok_and(|m| m.len() > 0)
    });
    served.mount.expect_gone();
    served.mount.server.signal(Signal::KILL);
    served
        .mount
        .server
        .wait(SOON)
        .expect("a killed server ends");
    // A call that was under way when the connection ended may fail with ECONNABORTED.
    let (gone, aborted) = (
        "Transport endpoint is not connected",
        "Software caused connection abort",
    );
    wait_for(gone, || {
        let outcome = served
            .mount
            .run(Command::new("stat").arg(&at).env("LC_ALL", "C"));
        let expected = [gone, aborted].iter().any(|e| outcome.stderr.contains(e));
        assert!(expected, "{outcome}");
        outcome.stderr.contains(gone)
    });
    let outcome = reader
        .wait(SOON)
        .expect("a program with an open file goes on");
    // Shells differ in how they name the error that ended the loop.
    assert!(!outcome.stderr.is_empty(), "{outcome}");
    assert!(mounted(&at).is_some());
    if has(&[Need::Uvfs]) {
        run(uvfs().arg("umount").arg(&at)).ok();
        assert!(mounted(&at).is_none(), "uvfs umount left the dead mount");
        // The mount point serves again.
        Mount::new(&Serve::over(transport), &served.source, &at).unmount();
    }
}

/// No program hangs on the mount of a server that was killed, and it can be mounted again.
#[test]
fn server_killed_dev() {
    server_killed(Transport::Dev);
}

/// The same over io_uring.
#[test]
fn server_killed_uring() {
    server_killed(Transport::Uring);
}
