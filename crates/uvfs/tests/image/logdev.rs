//! Images whose log is in another file: made, and read and repaired clean and dirty.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use rustix::process::{Signal, kill_process};
use uvfs_testing::outlives::worker;

use crate::fixture::*;
use crate::harness::*;

/// The kernel's loop devices of an image and of its log, which go when it is dropped.
struct Loops(Vec<String>);

impl Loops {
    fn new(of: &[&Path]) -> Loops {
        let attach = |path: &&Path| {
            let said = run(command("losetup", ["-f", "--show"]).arg(path)).ok();
            said.trim().to_owned()
        };
        Loops(of.iter().map(attach).collect())
    }
}

impl Drop for Loops {
    fn drop(&mut self) {
        run(command("losetup", ["-d"]).args(&self.0));
    }
}

/// An image and its log.
struct Pair<'a> {
    scratch: &'a Scratch,
    image: PathBuf,
    log: PathBuf,
}

impl Pair<'_> {
    fn new<'a>(scratch: &'a Scratch, at: &Path, name: &str) -> Pair<'a> {
        Pair {
            scratch,
            image: at.join(name),
            log: at.join(format!("{name}-log")),
        }
    }

    /// Runs a script in the kernel's mount of it.
    fn kernel(&self, options: &str, script: &mut Command) -> String {
        let loops = Loops::new(&[&self.image, &self.log]);
        let at = self.scratch.path("kernel");
        let _ = fs::create_dir(&at);
        let options = format!("{options},logdev={}", loops.0[1]);
        run(command("mount", ["-t", "xfs", "-o", &options, &loops.0[0]]).arg(&at)).ok();
        let said = run(script.current_dir(&at));
        run(Command::new("umount").arg(&at)).ok();
        drop(loops);
        said.ok()
    }

    fn uvfs(&self, command: &str, args: &[&str]) -> Outcome {
        let mut run_this = uvfs();
        run_this.arg(command).arg("--logdev").arg(&self.log);
        run(run_this.arg(&self.image).args(args))
    }

    #[track_caller]
    fn sound(&self) {
        self.uvfs("check", &[]).ok();
        let mut repair = command("xfs_repair", ["-n", "-f", "-l"]);
        run(repair.arg(&self.log).arg(&self.image)).ok();
    }
}

/// Superblock and log are those of mkfs.xfs, byte for byte; the kernel mounts the image, and every command reads it, also once
/// the log is dirty.
#[test]
fn an_image_with_a_log_of_its_own() {
    if !has(&NEEDS) || !has(&[Need::Program("xfs_repair")]) {
        return;
    }
    let scratch = Scratch::new();
    let disk = scratch.tmpfs("disk", "900m");
    let uuid = "uuid=6f5e3c1a-0a3f-4a68-9a3f-3f4b5a9f3a10";
    let theirs = Pair::new(&scratch, &disk, "theirs");
    for (path, size) in [(&theirs.image, 400), (&theirs.log, 70)] {
        fs::File::create(path).unwrap().set_len(size << 20).unwrap();
    }
    let ours = Pair::new(&scratch, &disk, "ours");
    let external = |log: &str| format!("logdev={log},size=70m");
    for sector in ["512", "4096"] {
        let sector = format!("size={sector}");
        let loops = Loops::new(&[&theirs.image, &theirs.log]);
        let log = external(&loops.0[1]);
        let options = ["-q", "-f", "-m", uuid, "-s", &sector, "-l"];
        run(command("mkfs.xfs", options).args([&log, &loops.0[0]])).ok();
        drop(loops);
        let log = external(ours.log.to_str().unwrap());
        let mut make = uvfs();
        make.args(["mkfs", "--json", "-f", "-m", uuid, "-s", &sector]);
        let made = run(make.args(["--size", "400M", "-l", &log]).arg(&ours.image)).ok();
        let made: serde_json::Value = serde_json::from_str(&made).unwrap();
        assert_eq!(made["log_device"], ours.log.to_str().unwrap());
        ours.sound();
        // mkfs.xfs leaves the checksum of the record out.
        let log = |pair: &Pair<'_>| {
            let mut log = fs::read(&pair.log).unwrap();
            log[32..36].fill(0);
            log
        };
        assert!(log(&ours) == log(&theirs), "the logs differ");
        let superblock = |pair: &Pair<'_>| fs::read(&pair.image).unwrap()[..512].to_vec();
        assert_eq!(superblock(&ours), superblock(&theirs));
    }
    let files = scratch.dir("files");
    fs::write(files.join("file"), "of the source").unwrap();
    let log = external(ours.log.to_str().unwrap());
    let mut make = uvfs();
    make.args(["mkfs", "-q", "-f", "--size", "auto", "-l", &log, "--from"]);
    run(make.arg(&files).arg(&ours.image)).ok();
    ours.sound();
    let refused = run(uvfs().arg("ls").arg(&ours.image));
    assert!(refused.stderr.contains("--logdev"), "{refused}");
    let change = r#"mkdir -p dir && date >dir/new-$1 && ln -s file link-$1 && setfattr -n user.a -v b file
if [ "$1" = dirty ]; then xfs_io -x -c 'shutdown -f' .; fi"#;
    for state in ["clean", "dirty"] {
        ours.kernel("rw", &mut shell(change, &[Path::new(state)]));
        // What the kernel shows of a copy.
        let copy = Pair::new(&scratch, &disk, "copy");
        for (from, to) in [(&ours.image, &copy.image), (&ours.log, &copy.log)] {
            fs::copy(from, to).unwrap();
        }
        let expected = copy.kernel(
            "rw,noatime",
            &mut shell("find . | sort && cat dir/new-*", &[]),
        );
        let at = scratch.dir(&format!("at-{state}"));
        let serve = Serve::over(Transport::Dev).option(&format!("logdev={}", ours.log.display()));
        let mount = Mount::new(&serve.option("survive"), &ours.image, &at);
        let shown = || {
            let mut show = shell("find . | sort && cat dir/new-*", &[]);
            mount.run(show.current_dir(&at)).ok()
        };
        same(&shown(), &expected);
        // The next server has the same log.
        let old = worker(mount.server.pid()).expect("a worker");
        kill_process(old, Signal::KILL).unwrap();
        same(&shown(), &expected);
        run(uvfs().arg("upgrade").arg(&at)).ok();
        same(&shown(), &expected);
        mount.unmount().ok();
        let new = format!("new-{state}");
        let listing = ours.uvfs("ls", &["/dir"]).ok();
        assert!(listing.contains(&new), "{listing}");
        let path = format!("/dir/{new}");
        assert!(expected.contains(&ours.uvfs("cat", &[&path]).ok()));
        assert!(ours.uvfs("stat", &["/file"]).ok().contains("user.a"));
        let copied = scratch.path(&format!("copied-{state}"));
        let to = copied.to_str().unwrap();
        let mut copying = uvfs();
        copying.args(["cp", "-r", "--logdev"]).arg(&ours.log);
        let from = format!("{}:/dir", ours.image.display());
        run(copying.args([&from, to])).ok();
        assert!(copied.join(&new).exists());
        ours.uvfs("check", &[]).ok();
    }
    for (command, verdict) in [("check", "clean"), ("repair", "mended")] {
        let said: serde_json::Value =
            serde_json::from_str(&ours.uvfs(command, &["--json"]).ok()).unwrap();
        assert_eq!(said["verdict"], verdict);
        assert_eq!(said["log_device"], ours.log.to_str().unwrap());
    }
    ours.sound();
    let listing = ours.kernel("rw", &mut shell("find .", &[]));
    assert!(listing.contains("new-dirty"), "{listing}");
}

/// An image and its log that lie in the source are left out of it, as GNU tar leaves out the archive that it writes.
#[test]
fn what_is_made_inside_of_the_source_is_left_out() {
    let scratch = Scratch::new();
    let files = scratch.dir("files");
    fs::write(files.join("file"), "of the source").unwrap();
    let made = Pair::new(&scratch, &files, "image");
    let log = format!("logdev={},size=16m", made.log.display());
    let mut make = uvfs();
    make.args(["mkfs", "-q", "--size", "auto", "-l", &log, "--from"]);
    run(make.arg(&files).arg(&made.image)).ok();
    assert_eq!(made.uvfs("ls", &["-a", "/"]).ok(), ".\n..\nfile\n");
}
