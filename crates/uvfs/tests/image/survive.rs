//! `uvfs mount IMAGE -o survive`: the mount goes on when its server is killed or replaced, with the same contents.

use std::fs;
use std::process::Command;
use std::time::{Duration, Instant};

use rustix::process::{Signal, kill_process};
use uvfs_server::stats::{Report, SurviveReport};
use uvfs_testing::outlives::{PAUSE, kills, worker};

use crate::fixture::*;
use crate::harness::*;

const UPGRADES: u64 = 5;

pub fn survives() -> Serve {
    Serve::over(Transport::Dev).option("survive")
}

pub fn counts(mount: &Mount) -> SurviveReport {
    let outcome = run(uvfs().args(["stats", "--json"]).arg(&mount.at)).ok();
    let report: Report = serde_json::from_str(&outcome).unwrap();
    report.survive.expect("the mount outlives its server")
}

/// Programs that read all of the mount, for so long.
pub fn load(mount: &Mount, time: Duration) -> Running {
    Running::start(
        Command::new("python3")
            .args(["-c", include_str!("programs/reads.py")])
            .arg(&mount.at)
            .arg(time.as_secs_f64().to_string()),
    )
}

/// Kills the server, and replaces its program, while programs read.
fn replaced_under_load(mount: &Mount) {
    let time = PAUSE * (kills() + 8 * UPGRADES as u32);
    let mut load = load(mount, time);
    let began = Instant::now();
    let (mut killed, mut upgraded) = (0, 0);
    while load.ended().is_none() && killed < kills() {
        std::thread::sleep(PAUSE);
        if let Some(worker) = worker(mount.server.pid())
            && kill_process(worker, Signal::KILL).is_ok()
        {
            killed += 1;
        }
    }
    while load.ended().is_none() && upgraded < UPGRADES && began.elapsed() < time {
        std::thread::sleep(PAUSE);
        run(uvfs().arg("upgrade").arg(&mount.at)).ok();
        upgraded += 1;
    }
    let outcome = load.wait(time + SOON).expect("the programs end").ok();
    eprintln!("{killed} kills, {upgraded} upgrades: {outcome}");
    let counts = counts(mount);
    assert!(counts.generation > u64::from(kills() / 2), "{counts:?}");
    assert_eq!(counts.programs, upgraded + 1, "{counts:?}");
    assert!(upgraded > 0);
}

/// Kills the server.
pub fn kill(mount: &Mount) {
    let old = worker(mount.server.pid()).expect("a worker");
    kill_process(old, Signal::KILL).unwrap();
}

/// Of an image with a dirty log.
fn an_image_is_replaced_under_load(serve: &Serve) {
    if !has(&NEEDS) || !has(&[Need::Program("python3")]) {
        return;
    }
    let scratch = Scratch::new();
    let image = Image::filled(&scratch);
    image.crash();
    let mount = Mount::new(serve, &image.path, &scratch.dir("mount"));
    let describe = || mount.run(&mut describe(&mount.at, false)).ok();
    let before = describe();
    assert!(before.contains("new "), "{before}");
    replaced_under_load(&mount);
    same(&describe(), &before);
    mount.unmount().ok();
}

/// No call fails, and the image stays what it was, with what only its log holds.
#[test]
fn a_killed_server_of_an_image_is_replaced() {
    an_image_is_replaced_under_load(&survives());
}

/// The same with a ring for metadata, and hardly any memory for it.
#[test]
fn a_killed_server_of_an_image_is_replaced_with_little_memory() {
    let serve = survives().option("memory=4M").option("engine=uring");
    an_image_is_replaced_under_load(&serve);
}

/// The next server, and the next program, serve the image that was mounted, also when another one has its name by then.
#[test]
fn another_image_of_the_same_name_is_not_taken() {
    if !has(&NEEDS) {
        return;
    }
    let scratch = Scratch::new();
    let image = Image::filled(&scratch);
    let mount = Mount::new(&survives(), &image.path, &scratch.dir("mount"));
    let other = Image::empty(&scratch, "other");
    fs::remove_file(&image.path).unwrap();
    fs::copy(&other.path, &image.path).unwrap();
    let shown = || mount.run(Command::new("cat").arg(mount.at.join("a/hello")));
    kill(&mount);
    assert_eq!(shown().ok(), "hello\n");
    run(uvfs().arg("upgrade").arg(&mount.at)).ok();
    assert_eq!(shown().ok(), "hello\n");
    assert_eq!(counts(&mount).programs, 2);
    mount.unmount().ok();
}

/// A block device stays claimed all the time.
#[test]
fn a_device_stays_claimed() {
    if !has(&NEEDS) {
        return;
    }
    let scratch = Scratch::new();
    let image = Image::filled(&scratch);
    let device = run(command("losetup", ["--find", "--show"]).arg(&image.path)).ok();
    let device = Device(device.trim().to_owned());
    let mount = Mount::new(&survives(), device.0.as_ref(), &scratch.dir("mount"));
    let refused = || {
        let at = scratch.path("kernel");
        let _ = fs::create_dir(&at);
        let outcome = run(command("mount", ["-t", "xfs"]).arg(&device.0).arg(&at));
        assert_ne!(outcome.status.code(), Some(0), "{outcome}");
    };
    for _ in 0..2 {
        kill(&mount);
        refused();
        let cat = mount.run(Command::new("cat").arg(mount.at.join("a/hello")));
        assert_eq!(cat.ok(), "hello\n");
        run(uvfs().arg("upgrade").arg(&mount.at)).ok();
        refused();
    }
    mount.unmount().ok();
}

/// A loop device, which goes when this is dropped.
struct Device(String);

impl Drop for Device {
    fn drop(&mut self) {
        run(command("losetup", ["-d"]).arg(&self.0));
    }
}
