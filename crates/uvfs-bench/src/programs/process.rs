//! Runs one program in an environment that is the same everywhere.

use std::fs::{self, File};
use std::path::Path;
use std::process::{Command, ExitStatus};
use std::time::Duration;

use rustix::process::Signal;
use uvfs_cli::{Context, Error, Result};

use super::super::child::Process;
use super::super::workspace::Workspace;

/// The files for a program's standard output and error, beside the source.
pub const OUTPUT: [&str; 2] = ["program.out", "program.err"];

/// The programs' directory for temporary files and home, beside the source.
pub const TMP: &str = "tmp";

/// A program that takes longer is stuck.
const LIMIT: Duration = Duration::from_secs(300);

/// Runs a program to its end, in an environment that is the same everywhere. Its output goes to files
/// beside the source.
pub fn run(workspace: &Workspace, command: &mut Command, server: Option<&Process>) -> Result<()> {
    let [out, err] = OUTPUT.map(|name| workspace.beside(name));
    let what = || "a program's output".to_string();
    command
        .stdout(File::create(out).context(what)?)
        .stderr(File::create(&err).context(what)?);
    let tmp = workspace.beside(TMP);
    command
        .envs([("LC_ALL", "C"), ("TZ", "UTC"), ("GIT_CONFIG_NOSYSTEM", "1")])
        .envs([("HOME", &tmp), ("XDG_CONFIG_HOME", &tmp), ("TMPDIR", &tmp)]);
    for name in ["GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "MAKEFLAGS"] {
        command.env_remove(name);
    }
    let mut process = Process::spawn(command, Signal::KILL)?;
    process.finish(server, LIMIT)?;
    process.wait(LIMIT);
    match process.status() {
        Some(status) if status.success() => Ok(()),
        status => Err(failure(status, &err)),
    }
}

/// The last words of a program that failed.
fn failure(status: Option<ExitStatus>, err: &Path) -> Error {
    let said = fs::read(err).unwrap_or_default();
    let said = String::from_utf8_lossy(&said);
    let line = said.lines().rfind(|line| !line.trim().is_empty());
    let status = status.map(|status| status.to_string()).unwrap_or_default();
    Error::new(format!("{status}: {}", line.unwrap_or("no word")))
}
