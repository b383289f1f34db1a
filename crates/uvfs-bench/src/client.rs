//! The using side of a benchmark, as a process of its own (`uvfs bench client JOB`).
//!
//! A job comes as one JSON argument and its result goes as one JSON line to standard output.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::time::Duration;

use rustix::process::Signal;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use uvfs_cli::{Context, Error, Result};

use super::child::{Process, own_path};
use super::common::words;
use super::direct::job::DirectJob;
use super::load::job::LoadJob;
use super::measure::Measured;
use super::remote::job::RemoteJob;
use super::store::StoreJob;
use super::uncached::job::StreamsJob;
use super::wakeup::job::WakeupJob;
use super::writeback::job::WritebackJob;

/// A client that takes this much longer than its job says is stuck.
const PATIENCE: Duration = Duration::from_secs(60);

/// The task of a client process.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "job", rename_all = "kebab-case")]
pub enum Job {
    /// Wait until another file system than that of device number `old_dev` answers at `path`.
    WaitMounted { path: PathBuf, old_dev: u64 },
    /// Wait until a server listens at the socket.
    WaitSocket { path: PathBuf },
    /// See [`DirectJob`].
    Direct(DirectJob),
    /// See [`WritebackJob`].
    Writeback(WritebackJob),
    /// See [`LoadJob`].
    Load(LoadJob),
    /// See [`RemoteJob`].
    Remote(RemoteJob),
    /// See [`StreamsJob`].
    Streams(StreamsJob),
    /// See [`StoreJob`].
    Store(StoreJob),
    /// Keep a CPU busy until the process is ended.
    Spin,
    /// See [`WakeupJob`].
    Wakeup(WakeupJob),
}

impl Job {
    /// Starts a client process for this job.
    pub fn spawn(&self) -> Result<Process> {
        self.spawn_by(Command::new(own_path()?))
    }

    /// The same by a command that runs uvfs with the arguments that are added.
    pub fn spawn_by(&self, mut command: Command) -> Result<Process> {
        self.add_to(&mut command)?;
        Process::spawn(
            command
                .stdin(Stdio::null())
                .stdout(Stdio::piped())
                .stderr(Stdio::piped()),
            Signal::KILL,
        )
    }

    /// Adds the arguments that have this command run this job.
    pub fn add_to(&self, command: &mut Command) -> Result<()> {
        let job = serde_json::to_string(self).context(|| "describing a job".into())?;
        command.args(["client", &job]);
        Ok(())
    }

    /// Runs this job in a client process. Ends early when `server` does.
    pub fn run<T: DeserializeOwned>(&self, server: Option<&Process>) -> Result<T> {
        let limit = match self {
            Job::Wakeup(job) => PATIENCE + Duration::from_secs_f64(2.0 * job.seconds),
            // A slow server of an object store is measured too.
            Job::Remote(_) | Job::Writeback(_) | Job::Streams(_) => 10 * PATIENCE,
            _ => PATIENCE,
        };
        let mut client = self.spawn()?;
        client.finish(server, limit)?;
        finished(&mut client)
    }
}

/// The result of a client that has ended.
pub fn finished<T: DeserializeOwned>(client: &mut Process) -> Result<T> {
    let (out, err) = client.output();
    client.wait(PATIENCE);
    match client.status() {
        Some(status) if status.success() => {
            serde_json::from_str(&out).context(|| "reading the client's result".into())
        }
        _ => {
            let line = err.lines().rfind(|l| !l.trim().is_empty());
            let line = line.unwrap_or("the client ended without a word");
            Err(Error::new(line.trim_start_matches("uvfs: ")))
        }
    }
}

/// The hidden command's arguments.
#[derive(clap::Args)]
pub struct Args {
    /// The job, as JSON.
    job: String,
}

/// Does the job and prints its result.
pub fn run(args: Args) -> Result<ExitCode> {
    let job: Job =
        serde_json::from_str(&args.job).map_err(|e| Error::usage(format!("the job: {e}")))?;
    let measured = match job {
        Job::Load(job) => return answer(&job.run().context(|| "one of many".into())?),
        Job::Store(job) => {
            job.run().context(|| "a store".into())?;
            return Ok(ExitCode::SUCCESS);
        }
        Job::Spin => loop {
            std::hint::spin_loop();
        },
        Job::WaitMounted { path, old_dev } => wait_mounted(&path, old_dev)?,
        Job::WaitSocket { path } => wait_socket(&path),
        Job::Direct(job) => job.run().context(|| "direct calls".into())?,
        Job::Writeback(job) => job.run().context(|| "buffered writes".into())?,
        Job::Streams(job) => job.run().context(|| "streams".into())?,
        Job::Remote(job) => job.run().context(|| words(&job.work).0)?,
        Job::Wakeup(job) => job.run().context(|| words(&job.work).0)?,
    };
    answer(&measured)
}

fn answer(measured: &impl Serialize) -> Result<ExitCode> {
    let line = serde_json::to_string(measured).context(|| "describing the result".into())?;
    println!("{line}");
    Ok(ExitCode::SUCCESS)
}

fn wait_mounted(path: &Path, old_dev: u64) -> Result<Measured> {
    // The parent bounds this.
    while fs::metadata(path).map_or(true, |m| m.dev() == old_dev) {
        std::thread::sleep(Duration::from_millis(5));
    }
    Ok(Measured::default())
}

fn wait_socket(path: &Path) -> Measured {
    // The parent bounds this.
    while UnixStream::connect(path).is_err() {
        std::thread::sleep(Duration::from_millis(5));
    }
    Measured::default()
}
