//! `uvfs doctor` agrees with what a mount on this machine does.

use std::process::Command;

use serde_json::Value;

use crate::harness::*;

/// A check of a diagnosis.
#[track_caller]
fn check<'a>(diagnosis: &'a Value, name: &str) -> &'a Value {
    let checks = diagnosis["checks"].as_array().expect("checks");
    let found = checks.iter().find(|check| check["name"] == name);
    found.unwrap_or_else(|| panic!("no {name}: {diagnosis}"))
}

fn diagnosis(outcome: Outcome) -> Value {
    serde_json::from_str(&outcome.stdout).unwrap_or_else(|error| panic!("{error}: {outcome}"))
}

/// The state of a check. Exactly the checks that are off have a remedy.
#[track_caller]
fn state<'a>(diagnosis: &'a Value, name: &str) -> &'a str {
    let check = check(diagnosis, name);
    assert_eq!(check["state"] == "off", check["do"].is_string(), "{check}");
    check["state"].as_str().expect("a state")
}

/// A mount by root has the features that root was told of.
#[test]
fn root_is_told_what_its_mounts_have() {
    if !has(&[Need::Mount(Transport::Dev), Need::Uvfs]) {
        return;
    }
    let told = run(uvfs().args(["doctor", "--json"]));
    assert!(told.status.success(), "{told}");
    let told = diagnosis(told);
    assert_eq!(told["ready"], true, "{told}");
    let refused = sandbox::no_io_uring().is_some();
    for (name, needed) in [("kernel", true), ("fuse", true), ("io_uring", false)] {
        let expected = if refused && name == "io_uring" {
            "off"
        } else {
            "ok"
        };
        assert_eq!(state(&told, name), expected, "{told}");
        assert_eq!(check(&told, name)["needed"], needed, "{told}");
    }
    let kernel = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
    let found = check(&told, "kernel")["found"].as_str().unwrap();
    assert!(found.contains(kernel.trim()), "{found}");
    let uring = has(&[Need::Mount(Transport::Uring)]);
    assert_eq!(state(&told, "fuse-over-io_uring") == "ok", uring, "{told}");

    let served = Served::new(&Serve::over(Transport::Dev));
    let file = served.source.join("file");
    std::fs::write(&file, "content").unwrap();
    // An open for reading and writing gets a backing file, where the kernel takes those.
    let at = served.mount.at.join("file");
    served
        .mount
        .run(
            Command::new("sh")
                .args(["-c", "exec 3<>\"$1\"; read -r _ <&3 || true", "sh"])
                .arg(at),
        )
        .ok();
    let stats = served
        .mount
        .run(uvfs().args(["stats", "--json"]).arg(&served.mount.at));
    let stats: Value = serde_json::from_str(&stats.ok()).expect("JSON");
    let backed = stats["backed_opens"].as_u64() > Some(0);
    assert_eq!(
        state(&told, "passthrough") == "ok",
        backed,
        "{told} {stats}"
    );
    if stats["watch"]["on"] == true {
        assert_eq!(state(&told, "fanotify"), "ok", "{told}");
    }
    served.mount.unmount();

    let table = run(uvfs().arg("doctor")).ok();
    assert!(table.contains("Mounts work here."), "{table}");
    for check in told["checks"].as_array().unwrap() {
        let name = check["name"].as_str().unwrap();
        assert!(table.contains(name), "no {name}: {table}");
    }
    let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
    assert!(!mounts.contains("uvfs-doctor"), "{mounts}");
}

/// `uvfs doctor` works for users who are not root.
#[test]
fn a_user_is_told_what_takes_root() {
    use Need::Program;
    if !has(&[
        Need::Mount(Transport::Dev),
        Need::Uvfs,
        Program("setpriv"),
        Program("prlimit"),
    ]) {
        return;
    }
    let scratch = Scratch::new();
    let program = uvfs_for_all(&scratch);
    let mut command = command("prlimit", ["--nofile=512:1024", "--memlock=8192"]);
    command.args([
        "setpriv",
        "--reuid=65534",
        "--regid=65534",
        "--clear-groups",
        "--inh-caps=-all",
    ]);
    let outcome = run(command.arg(&program).args(["doctor", "--json"]));
    let code = outcome.status.code();
    let told = diagnosis(outcome);
    for name in ["passthrough", "fanotify"] {
        assert_eq!(state(&told, name), "off", "{told}");
        assert_eq!(check(&told, name)["do"], "mount as root", "{told}");
    }
    for (name, words) in [("open files", "ulimit -Hn"), ("locked memory", "ulimit -l")] {
        assert_eq!(state(&told, name), "off", "{told}");
        let remedy = check(&told, name)["do"].as_str().unwrap();
        assert!(remedy.contains(words), "{remedy}");
    }
    // The library is not beside this copy of the command.
    assert_eq!(state(&told, "preload library"), "off", "{told}");
    // Users mount through fusermount3.
    assert_eq!(check(&told, "fusermount3")["needed"], true, "{told}");
    // A ring takes more locked memory than the limit above. Mounts do without.
    assert_eq!(state(&told, "io_uring"), "off", "{told}");
    let found = check(&told, "io_uring")["found"].as_str().unwrap();
    assert!(
        sandbox::no_io_uring().is_some() || found.contains("ENOMEM") && found.contains("8 KiB"),
        "{found}"
    );
    // The device may be root's alone.
    let ready = ["fusermount3", "fuse"]
        .iter()
        .all(|name| state(&told, name) == "ok");
    assert_eq!(
        (told["ready"].as_bool(), code),
        (Some(ready), Some(i32::from(!ready)))
    );
}

/// Without /dev/fuse mounts do not work, and the command says so.
#[test]
fn a_machine_without_fuse_is_not_ready() {
    if !has(&[
        Need::Mount(Transport::Dev),
        Need::Uvfs,
        Need::Program("unshare"),
    ]) {
        return;
    }
    let without_dev = |arguments: &[&str]| {
        let script = "mount -t tmpfs tmpfs /dev; exec \"$@\"";
        let mut command = Command::new("unshare");
        command.args(["--mount", "sh", "-c", script, "sh"]);
        run(command.arg(env!("CARGO_BIN_EXE_uvfs")).args(arguments))
    };
    let outcome = without_dev(&["doctor", "--json"]);
    assert_eq!(outcome.status.code(), Some(1), "{outcome}");
    let told = diagnosis(outcome);
    assert_eq!(told["ready"], false, "{told}");
    assert_eq!(state(&told, "fuse"), "off", "{told}");
    assert_eq!(state(&told, "passthrough"), "missing", "{told}");
    let table = without_dev(&["doctor"]);
    assert_eq!(table.status.code(), Some(1), "{table}");
    for word in [
        "there is no /dev/fuse",
        "modprobe fuse",
        "do not work here. They need: fuse",
    ] {
        assert!(table.stdout.contains(word), "no {word:?}: {table}");
    }
}

/// A device that only root may open is not called ready for users, whom fusermount3 does not help there.
#[test]
fn a_device_for_root_alone_is_not_ready_for_users() {
    use Need::Program;
    if !has(&[
        Need::Mount(Transport::Dev),
        Need::Uvfs,
        Program("setpriv"),
        Program("unshare"),
    ]) {
        return;
    }
    let scratch = Scratch::new();
    let program = uvfs_for_all(&scratch);
    let device = scratch.tmpfs("device", "1m").join("fuse");
    let script = "mknod \"$1\" c 10 229 && chmod \"$2\" \"$1\" && mount --bind \"$1\" /dev/fuse && \
        exec setpriv --reuid=65534 --regid=65534 --clear-groups --inh-caps=-all \"$3\" doctor --json";
    for (mode, expected) in [("600", "off"), ("666", "ok")] {
        let _ = std::fs::remove_file(&device);
        let mut command = Command::new("unshare");
        command.args(["--mount", "sh", "-c", script, "sh"]);
        let outcome = run(command.arg(&device).arg(mode).arg(&program));
        let told = diagnosis(outcome);
        assert_eq!(state(&told, "fuse"), expected, "{mode}: {told}");
    }
}

/// Root in a container learns from doctor and from mount what the container refuses, and how to get it.
#[test]
fn what_a_container_refuses_is_told() {
    if !has(&[
        Need::Mount(Transport::Dev),
        Need::Uvfs,
        Need::Program("setpriv"),
    ]) {
        return;
    }
    let scratch = Scratch::new();
    let (source, at) = (scratch.tmpfs("source", "1m"), scratch.dir("mount"));
    let add = "--cap-add SYS_ADMIN";
    let handles = "--cap-add DAC_READ_SEARCH";
    // The right that root lacks, the call that is refused, what `uvfs mount` says, and the checks with their remedies.
    type Case<'a> = (
        &'a str,
        Option<libc::c_long>,
        Option<&'a str>,
        &'a [(&'a str, &'a str)],
    );
    let cases: &[Case<'_>] = &[
        (
            "-sys_admin",
            None,
            Some(add),
            &[("fuse", add), ("passthrough", add), ("fanotify", add)],
        ),
        ("-dac_read_search", None, None, &[("fanotify", handles)]),
        (
            "-net_raw",
            Some(libc::SYS_mount),
            Some("seccomp"),
            &[("fuse", "mount(2)")],
        ),
        (
            "-net_raw",
            Some(libc::SYS_unshare),
            None,
            &[("user namespaces", "seccomp")],
        ),
    ];
    for (lacks, call, refusal, checks) in cases {
        let program = |arguments: &[&str]| {
            let mut command = command("setpriv", ["--bounding-set", lacks, "--inh-caps", lacks]);
            command.arg(env!("CARGO_BIN_EXE_uvfs")).args(arguments);
            if let Some(call) = call {
                sandbox::refuse(&mut command, &[*call], rustix::io::Errno::PERM);
            }
            command
        };
        let mounting = run(program(&["mount", "--transport", "dev"]).args([&source, &at]));
        unmount_by_force(&at);
        assert_eq!(mounting.status.success(), refusal.is_none(), "{mounting}");
        let said = refusal.unwrap_or_default();
        assert!(mounting.stderr.contains(said), "no {said:?}: {mounting}");
        let outcome = run(&mut program(&["doctor", "--json"]));
        assert!(!outcome.stdout.contains("os error"), "{outcome}");
        let told = diagnosis(outcome);
        assert_eq!(told["ready"], refusal.is_none(), "{told}");
        for (name, remedy) in *checks {
            assert_eq!(state(&told, name), "off", "{told}");
            let found = check(&told, name)["do"].as_str().unwrap();
            assert!(found.contains(remedy), "{name}: {found}");
        }
    }
}
