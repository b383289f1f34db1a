//! Programs that others have written for fuser, with one thing changed: the dependency on fuser.
//!
//! The programs are fuser's own examples and two file systems from crates.io. cargo fetches them, and a copy
//! below the target directory gets the changed manifest. Building them takes minutes, so these tests run only with
//! `UVFS_TEST_FULL=1`. They need root and /dev/fuse.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

const HERE: &str = env!("CARGO_MANIFEST_DIR");

/// Whether these tests are not to run, or can't.
fn skipped() -> bool {
    if !uvfs_testing::runs_long() {
        return true;
    }
    // Asked for, so it fails without them.
    assert_eq!(uvfs_testing::Need::Fuse.missing(), None);
    false
}

/// The directory for a program, below the target directory, so that a second run has little to build.
fn place(name: &str) -> PathBuf {
    Path::new(env!("CARGO_TARGET_TMPDIR")).join(name)
}

/// A cargo of its own: it sees nothing of the one that runs this test.
fn cargo(at: &Path, args: &[&str]) -> Command {
    let mut cargo = Command::new(env!("CARGO"));
    for (name, _) in std::env::vars_os() {
        let text = name.to_string_lossy();
        if text.starts_with("CARGO_") && text != "CARGO_HOME" {
            cargo.env_remove(name);
        }
    }
    cargo
        .args(args)
        .current_dir(at)
        .env("CARGO_TARGET_DIR", place("target"))
        .env("CARGO_INCREMENTAL", "0")
        .env("CARGO_PROFILE_DEV_DEBUG", "0");
    cargo
}

fn done(command: &mut Command) -> Output {
    let output = command.output().unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?}: {text}");
    output
}

/// Writes a file, unless it is the same already: cargo builds what has a new time.
fn put(to: &Path, bytes: &[u8]) {
    if fs::read(to).ok().as_deref() != Some(bytes) {
        fs::create_dir_all(to.parent().unwrap()).unwrap();
        fs::write(to, bytes).unwrap();
    }
}

fn copy(from: &Path, to: &Path) {
    for entry in fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let to = to.join(entry.file_name());
        match entry.file_type().unwrap().is_dir() {
            true => copy(&entry.path(), &to),
            false => put(&to, &fs::read(entry.path()).unwrap()),
        }
    }
}

/// Fetches a crate and copies it, with another manifest.
fn published(name: &str, version: &str, manifest: impl FnOnce(&str) -> String) -> PathBuf {
    let (fetch, program) = (place(name).join("fetch"), place(name).join("program"));
    let empty = format!(
        "[package]\nname = \"fetch\"\nedition = \"2024\"\n[lib]\npath = \"/dev/null\"\n\
         [workspace]\n[dependencies]\n{name} = \"={version}\"\n"
    );
    put(&fetch.join("Cargo.toml"), empty.as_bytes());
    let list = done(&mut cargo(&fetch, &["metadata", "--format-version=1"])).stdout;
    let list: serde_json::Value = serde_json::from_slice(&list).unwrap();
    let mut packages = list["packages"].as_array().unwrap().iter();
    let found = packages.find(|package| package["name"] == name).unwrap();
    let source = Path::new(found["manifest_path"].as_str().unwrap());
    let text = fs::read_to_string(source).unwrap();
    let changed = manifest(&text);
    assert_ne!(changed, text, "{name} does not depend on fuser as it did");
    copy(source.parent().unwrap(), &program);
    put(&program.join("Cargo.toml"), changed.as_bytes());
    // The versions of this workspace, for the packages that both have.
    fs::copy(
        Path::new(HERE).join("../../Cargo.lock"),
        program.join("Cargo.lock"),
    )
    .unwrap();
    program
}

/// The dependency that a program has instead of fuser.
fn instead() -> String {
    format!("package = \"uvfs-fuser\"\npath = {HERE:?}\n")
}

/// The directory with fuser's examples. They are built as they are published, by a manifest that names them
/// and what they need.
fn examples() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| {
        let program = published("fuser", "0.18.0", |_| {
            format!(
                "[package]\nname = \"examples\"\nedition = \"2024\"\nbuild = false\n[workspace]\n\
                 [dependencies.fuser]\n{}features = [\"experimental\"]\n\
                 [dependencies]\n\
                 async-trait = \"0.1\"\nbincode = \"1.3\"\nlibc = \"0.2\"\nlog = \"0.4\"\n\
                 parking_lot = \"0.12\"\n\
                 clap = {{ version = \"4.4\", features = [\"cargo\", \"derive\"] }}\n\
                 env_logger = {{ version = \"0.11\", default-features = false }}\n\
                 nix = {{ version = \"0.31\", features = [\"fs\", \"ioctl\", \"mount\", \"poll\", \"process\", \"socket\", \"uio\", \"user\"] }}\n\
                 serde = {{ version = \"1\", features = [\"derive\"] }}\n",
                instead()
            )
        });
        // fuser's own sources, which would be built as the library.
        fs::remove_dir_all(program.join("src")).unwrap();
        done(&mut cargo(&program, &["build", "--quiet", "--examples"]));
        place("target").join("debug/examples")
    })
}

/// An example that serves a mount. The mount ends when this is dropped.
struct Mounted {
    server: Child,
    at: PathBuf,
    dir: tempfile::TempDir,
}

fn is_mounted(at: &Path) -> bool {
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
    (mounts.lines()).any(|line| line.split(' ').nth(4) == at.to_str())
}

fn wait_until(what: &str, mut condition: impl FnMut() -> bool) {
    let end = Instant::now() + Duration::from_secs(20);
    while !condition() {
        assert!(Instant::now() < end, "{what} did not come");
        std::thread::sleep(Duration::from_millis(20));
    }
}

impl Mounted {
    /// Of an example, with arguments in which `{at}` is the mount point and `{dir}` a directory beside it.
    fn new(example: &str, args: &[&str]) -> Option<Self> {
        if skipped() {
            return None;
        }
        let dir = tempfile::tempdir().unwrap();
        let at = dir.path().join("mount");
        fs::create_dir(&at).unwrap();
        let fill = |arg: &&str| {
            arg.replace("{at}", at.to_str().unwrap())
                .replace("{dir}", dir.path().to_str().unwrap())
        };
        let server = Command::new(examples().join(example))
            .args(args.iter().map(fill))
            .spawn();
        let mounted = Self {
            server: server.unwrap(),
            at,
            dir,
        };
        wait_until("the mount", || is_mounted(&mounted.at));
        Some(mounted)
    }

    fn text(&self, name: &str) -> String {
        fs::read_to_string(self.at.join(name)).unwrap()
    }

    fn names(&self) -> Vec<String> {
        let names = fs::read_dir(&self.at).unwrap();
        let mut names: Vec<_> = names
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        let _ = rustix::mount::unmount(&self.at, rustix::mount::UnmountFlags::DETACH);
        let _ = self.server.kill();
        let _ = self.server.wait();
    }
}

/// fuser's example `hello` runs as it is published.
#[test]
fn hello_is_read_with_one_thread_and_with_several() {
    for threads in ["1", "2", "6"] {
        let Some(mounted) = Mounted::new("hello", &["{at}", "--n-threads", threads]) else {
            return;
        };
        assert_eq!(mounted.names(), ["hello.txt", "stats-per-thread"]);
        assert_eq!(mounted.text("hello.txt"), "Hello World!\n");
        let refused = fs::write(mounted.at.join("hello.txt"), "no").unwrap_err();
        assert_eq!(refused.raw_os_error(), Some(libc::EROFS));
    }
}

/// The same of `async_hello`.
#[test]
fn async_hello_is_read() {
    if let Some(mounted) = Mounted::new("async_hello", &["{at}"]) {
        assert_eq!(mounted.names(), ["hello.txt"]);
        assert_eq!(mounted.text("hello.txt"), "Hello World!\n");
    }
}

/// The same of `null`.
#[test]
fn null_has_nothing() {
    if let Some(mounted) = Mounted::new("null", &["{at}"]) {
        let error = fs::metadata(&mounted.at).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::ENOSYS));
    }
}

/// AutoUnmount unmounts when the server is killed.
#[test]
fn auto_unmount_outlives_a_server_that_is_killed() {
    if let Some(mut mounted) = Mounted::new("hello", &["{at}", "--auto-unmount"]) {
        assert_eq!(mounted.text("hello.txt"), "Hello World!\n");
        mounted.server.kill().unwrap();
        mounted.server.wait().unwrap();
        wait_until("the end of the mount", || !is_mounted(&mounted.at));
    }
}

/// The same of `simple`.
#[test]
fn simple_keeps_files() {
    let args = ["--data-dir", "{dir}/data", "--mount-point", "{at}"];
    let Some(mounted) = Mounted::new("simple", &args) else {
        return;
    };
    let at = |name: &str| mounted.at.join(name);
    let data: Vec<u8> = (0..3_000_000u32).map(|at| (at % 251) as u8).collect();
    fs::write(at("file"), &data).unwrap();
    assert!(fs::read(at("file")).unwrap() == data, "as it was written");
    fs::create_dir(at("dir")).unwrap();
    fs::rename(at("file"), at("dir/moved")).unwrap();
    fs::hard_link(at("dir/moved"), at("link")).unwrap();
    std::os::unix::fs::symlink("dir/moved", at("symlink")).unwrap();
    assert_eq!(mounted.names(), ["dir", "link", "symlink"]);
    assert!(fs::read(at("symlink")).unwrap() == data, "through a link");
    fs::set_permissions(at("link"), fs::Permissions::from_mode(0o600)).unwrap();
    let mode = fs::metadata(at("dir/moved")).unwrap().permissions().mode();
    assert_eq!(mode & 0o7777, 0o600, "of both names");
    let set = rustix::fs::XattrFlags::empty();
    rustix::fs::setxattr(at("link"), "user.a", b"value", set).unwrap();
    let mut value = [0; 16];
    let len = rustix::fs::getxattr(at("link"), "user.a", &mut value).unwrap();
    assert_eq!(&value[..len], b"value");
    fs::remove_file(at("link")).unwrap();
    fs::remove_dir(at("dir")).expect_err("the directory is not empty");
    fs::remove_file(at("dir/moved")).unwrap();
    fs::remove_dir(at("dir")).unwrap();
    assert_eq!(mounted.names(), ["symlink"]);
    assert!(mounted.dir.path().join("data").is_dir());
}

/// The same of `ioctl`.
#[test]
fn ioctl_gets_and_sets_a_size() {
    let Some(mounted) = Mounted::new("ioctl", &["{at}"]) else {
        return;
    };
    let program = "import fcntl, struct, sys\n\
        file = open(sys.argv[1], 'rb')\n\
        get, set = 0x80084500, 0x40084501\n\
        fcntl.ioctl(file, set, struct.pack('N', 77))\n\
        print(struct.unpack('N', fcntl.ioctl(file, get, bytes(8)))[0])\n";
    let mut python = Command::new("python3");
    let asked = done(python.args(["-c", program]).arg(mounted.at.join("fioc")));
    assert_eq!(String::from_utf8_lossy(&asked.stdout).trim(), "77");
}

/// The same of `passthrough`.
#[test]
fn passthrough_reads_the_backing_file() {
    let data = fs::read_to_string("/etc/profile").unwrap();
    for example in ["passthrough", "passthrough_fork"] {
        let Some(mounted) = Mounted::new(example, &["{at}"]) else {
            return;
        };
        assert_eq!(mounted.text("passthrough"), data, "{example}");
    }
}

/// The same of the `notify` examples.
#[test]
fn notifications_reach_the_kernel() {
    for example in ["notify_inval_inode", "notify_inval_entry"] {
        let args = ["{at}", "--update-interval", "0.1"];
        let Some(mounted) = Mounted::new(example, &args) else {
            return;
        };
        // The clock is in the file, or is the name of the file.
        let clock = || match mounted.names().pop() {
            Some(name) if example == "notify_inval_inode" => mounted.text(&name),
            name => name.unwrap(),
        };
        let first = clock();
        wait_until("another time", || clock() != first);
    }
}

/// The same of `poll`.
#[test]
fn poll_wakes_a_client() {
    if let Some(mounted) = Mounted::new("poll", &["{at}"]) {
        let mut client = Command::new(examples().join("poll_client"));
        let output = done(client.current_dir(&mounted.at)).stdout;
        let lines = String::from_utf8_lossy(&output).lines().count();
        assert_eq!(lines, 16, "one for each time that poll(2) returned");
    }
}

/// A manifest with the dependency on fuser changed, outside of this workspace. It can name fuser twice, once for
/// another system.
fn on_uvfs(manifest: &str) -> String {
    let mut lines: Vec<_> = manifest.lines().map(str::to_owned).collect();
    for at in 1..lines.len() {
        if lines[at - 1].ends_with("dependencies.fuser]") {
            lines[at] = instead();
        }
    }
    lines.join("\n") + "\n[workspace]\n"
}

/// A published crate that builds on fuser runs over uvfs.
#[test]
fn easy_fuser_passes_its_tests() {
    if skipped() {
        return;
    }
    let program = published("easy_fuser", "0.7.1", on_uvfs);
    let mut tests = cargo(&program, &["test", "--no-fail-fast"]);
    for test in [
        "async_test",
        "hard_link_test",
        "integration_test",
        "offset_test",
    ] {
        tests.args(["--test", test]);
    }
    done(&mut tests);
}

/// A FLAC file of one artist and title, with this sound.
fn flac(sound: &[u8]) -> Vec<u8> {
    let tags = ["ARTIST=Someone", "TITLE=Something"];
    let mut comments = Vec::new();
    comments.extend(0u32.to_le_bytes());
    comments.extend((tags.len() as u32).to_le_bytes());
    for tag in tags {
        comments.extend((tag.len() as u32).to_le_bytes());
        comments.extend(tag.as_bytes());
    }
    // Blocks of 4,096 samples, at 44,100 Hz, two channels of 16 bits.
    let mut info = vec![0x10, 0, 0x10, 0, 0, 0, 0, 0, 0, 0];
    info.extend((44_100u64 << 44 | 1 << 41 | 15 << 36).to_be_bytes());
    info.extend([0; 16]);
    let mut file = b"fLaC".to_vec();
    for (kind, block) in [(0, info), (0x84, comments)] {
        file.extend((kind << 24 | block.len() as u32).to_be_bytes());
        file.extend(block);
    }
    file.extend(sound);
    file
}

/// The command `musefs` as it is published, on its crate `musefs-fuse` with the changed line.
#[test]
fn musefs_serves_music() {
    if skipped() {
        return;
    }
    let changed = published("musefs-fuse", "1.3.0", on_uvfs);
    let root = place("musefs");
    let patch = format!("patch.crates-io.musefs-fuse.path={changed:?}");
    let install = [
        "install", "--quiet", "--debug", "--config", &patch, "--root",
    ];
    let mut install = cargo(&changed, &install);
    done(install.arg(&root).args(["musefs", "--version", "=1.3.0"]));
    let musefs = || Command::new(root.join("bin/musefs"));
    let dir = tempfile::tempdir().unwrap();
    let [music, list, at] = ["music", "list", "mount"].map(|name| dir.path().join(name));
    fs::create_dir(&music).unwrap();
    fs::create_dir(&at).unwrap();
    let sound: Vec<u8> = (0..500_000u32).map(|at| (at % 251) as u8).collect();
    fs::write(music.join("a.flac"), flac(&sound)).unwrap();
    done(musefs().arg("scan").arg(&music).arg("--db").arg(&list));
    let mut mount = musefs();
    mount.arg("mount").arg(&at).arg("--db").arg(&list);
    let server = mount
        .args(["--template", "$artist/$title"])
        .spawn()
        .unwrap();
    let mut mounted = Mounted { server, at, dir };
    wait_until("the mount", || is_mounted(&mounted.at));
    assert_eq!(mounted.names(), ["Someone"]);
    let file = fs::read(mounted.at.join("Someone/Something.flac")).unwrap();
    assert!(file.starts_with(b"fLaC") && file.ends_with(&sound));
    let server = rustix::process::Pid::from_child(&mounted.server);
    rustix::process::kill_process(server, rustix::process::Signal::TERM).unwrap();
    assert!(mounted.server.wait().unwrap().success());
    assert!(!is_mounted(&mounted.at));
}
