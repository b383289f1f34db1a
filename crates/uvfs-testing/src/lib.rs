//! Whether this machine can run a test.
//!
//! A test that needs something of the machine asks [`has`] first, or calls [`skip`] once it finds that something
//! is missing. Both print a line that says why the test does not run; `./test` collects these lines. Where the
//! environment has `CI`, both fail the test: a skipped test would look like one that passed.

mod arrows;
pub mod outlives;

use std::fmt::Display;
use std::fs::File;
use std::io::Write;
use std::path::PathBuf;

pub use arrows::assert_arrows_go_down;

/// Something of the machine that a test cannot do without.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Need {
    /// The rights of root.
    Root,
    /// A mount over /dev/fuse. Implies root.
    Fuse,
    /// A mount over FUSE-over-io_uring. Implies root.
    Uring,
    /// A program on the PATH or in a directory of root's programs.
    Program(&'static str),
}

impl Need {
    /// The need of a test that mounts over a transport: "dev" or "uring".
    pub fn mount_over(transport: &str) -> Self {
        match transport {
            "uring" => Need::Uring,
            _ => Need::Fuse,
        }
    }

    /// Names what the machine lacks, if it does not meet this need.
    pub fn missing(self) -> Option<String> {
        match self {
            Need::Root => {
                let root = rustix::process::geteuid().is_root();
                (!root).then(|| "root".into())
            }
            Need::Fuse => Need::Root.missing().or_else(|| {
                let device = File::options().read(true).write(true).open("/dev/fuse");
                device.is_err().then(|| "/dev/fuse".into())
            }),
            Need::Uring => Need::Fuse.missing().or_else(|| {
                let enabled = "/sys/module/fuse/parameters/enable_uring";
                let value = std::fs::read_to_string(enabled).unwrap_or_default();
                (value.trim() != "Y")
                    .then(|| format!("FUSE-over-io_uring (Linux 6.14, echo Y > {enabled})"))
            }),
            Need::Program(name) => find_program(name)
                .is_none()
                .then(|| format!("{name}, which ./test installs")),
        }
    }
}

/// Where a program is: on the PATH, or in a directory of root's programs.
fn find_program(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path)
        .chain(["/usr/sbin".into(), "/sbin".into()])
        .map(|dir| dir.join(name))
        .find(|file| file.exists())
}

/// Whether the machine has all of this. If it lacks something, the test has to end: see [`skip`].
pub fn has(needs: &[Need]) -> bool {
    match needs.iter().find_map(|need| need.missing()) {
        Some(missing) => {
            skip(format_args!("needs {missing}"));
            false
        }
        None => true,
    }
}

/// Says why the test that calls this does not run here.
///
/// # Panics
/// Where the environment has `CI`.
pub fn skip(why: impl Display) {
    let in_ci = std::env::var_os("CI").is_some();
    assert!(!in_ci, "in CI no test is skipped: {}: {why}", test());
    say(why);
}

/// As [`skip`], but in CI too, for a test that is to run only on some machines, or when it is asked for.
pub fn say(why: impl Display) {
    // Not eprintln!, whose output the test runner drops when the test passes.
    let _ = writeln!(std::io::stderr(), "skipped: {}: {why}", test());
}

/// Whether the long variants of tests are asked for, by `UVFS_TEST_FULL=1`.
pub fn full() -> bool {
    std::env::var_os("UVFS_TEST_FULL").is_some_and(|full| !full.is_empty())
}

/// Whether a test that is a long variant as a whole is to run; says so if not.
pub fn runs_long() -> bool {
    if !full() {
        say("a long variant, with UVFS_TEST_FULL=1");
    }
    full()
}

/// The name of the test that calls this: its thread has the same.
fn test() -> String {
    let thread = std::thread::current();
    thread.name().unwrap_or("a test").to_owned()
}
