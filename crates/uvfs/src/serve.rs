//! `uvfs serve`: serves a directory to clients over shared memory, without a mount.

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use clap::ValueHint;
use uvfs_cli::{Context, Result, duration};
use uvfs_passthrough::Passthrough;
use uvfs_server::slow::Slow;
use uvfs_server::{ClientLimits, Clients, Session, SessionOptions};

use crate::daemon::block_signals;
use crate::mount::raise_limit;
use crate::options;

const EXAMPLES: &str = "\
Examples:
  uvfs serve /srv/data --socket /run/user/1000/data.sock

Serves until SIGTERM, SIGINT or SIGHUP. Only programs of the same user, and root, may attach. When it
is started again with the same source and socket, they go on with what they had open.

Exit status: 0 ended by a signal, 1 failed, 2 wrong usage.";

/// Serve a directory to programs that attach through a socket.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// Where programs attach
    #[arg(long, value_name = "PATH", value_hint = ValueHint::FilePath)]
    socket: PathBuf,
    /// The behaviour of a client's queue that has nothing to do
    #[arg(long, value_parser = options::one_of(options::WAITS, options::wait_mode), value_name = "adaptive|spin|sleep", hide_possible_values = true)]
    wait: Option<uvfs_queue::wait::WaitMode>,
    /// Longest spin: microseconds, or with a unit
    #[arg(long, value_parser = options::spin_time, value_name = "TIME")]
    spin_us: Option<Duration>,
    /// Most clients at a time
    #[arg(long, default_value_t = ClientLimits::default().clients, value_name = "N")]
    max_clients: usize,
    /// Log requests that wait for longer (0: none)
    #[arg(long, value_parser = duration, value_name = "TIME", default_value = "10s")]
    slow: Duration,
    /// The directory to serve
    #[arg(value_hint = ValueHint::DirPath)]
    source: PathBuf,
}

/// Runs it.
pub fn run(args: Args) -> Result<ExitCode> {
    let name = args.source.display().to_string();
    let signals = block_signals();
    // Each open file of a client is one here.
    raise_limit();
    let fs = Passthrough::open(&args.source, uvfs_passthrough::Options::default())
        .context(|| name.clone())?;
    let options = SessionOptions {
        source: name.clone(),
        slow: args.slow,
        ..SessionOptions::default()
    };
    let session = Arc::new(Session::unmounted(fs, options).context(|| name)?);
    let mut limits = ClientLimits {
        clients: args.max_clients,
        ..ClientLimits::default()
    };
    limits.wait.mode = args.wait.unwrap_or(limits.wait.mode);
    limits.wait.spin = args.spin_us.unwrap_or(limits.wait.spin);
    let _slow = Slow::start(&session).context(|| "a thread".into())?;
    let clients = Clients::listen(session, &args.socket, limits)
        .context(|| args.socket.display().to_string())?;
    if let Ok(Some(refused)) = uvfs_io::runtime::refusal(1) {
        uvfs_cli::warn(refused.to_string());
    }
    let signal = signals.wait(None);
    tracing::info!(signal, "ending");
    drop(clients);
    Ok(ExitCode::SUCCESS)
}
