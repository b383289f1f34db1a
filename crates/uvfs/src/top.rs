//! `uvfs top`: shows what a mount is doing, in the terminal, until the user quits.

mod frame;

use std::io::{IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::ValueHint;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::termios::{OptionalActions, Termios, tcgetattr, tcgetwinsize, tcsetattr};
use uvfs_cli::{Context, Error, Result, duration, printed};
use uvfs_server::stats::Report;

use crate::stats;

const EXAMPLES: &str = "\
Examples:
  uvfs top /mnt
  uvfs top --interval 5 /mnt
  uvfs top --once /mnt             one frame as text, for a log or a mail

Rates are of the last interval. Tables:
  queues          one line for each thread of the server: requests under way
                  now, the most there ever were, and how the thread waits
  latency         half of the timed requests (one in 16) took less than the
                  time at 50 %, and so on
  requests        by kind, the busiest first
  clients         programs attached over shared memory (uvfs run): their calls,
                  and how many of these their caches served
  stuck requests  requests that have waited for longer than uvfs mount --slow,
                  with their file and what they wait for

Keys: q or Esc quits; the space bar freezes the display and continues it.

Exit status: 0 ended by the user, 1 failed (the mount is gone), 2 wrong usage.";

/// Watch what a mount is doing, in the terminal.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// Print one frame as text, and end
    #[arg(long)]
    once: bool,
    /// Time between frames
    #[arg(long, value_name = "TIME", value_parser = interval, default_value = "1s")]
    interval: Duration,
    /// The mount point
    #[arg(value_hint = ValueHint::DirPath)]
    mountpoint: PathBuf,
}

/// Parses an interval of at least 0.1 s.
fn interval(word: &str) -> Result<Duration, String> {
    match duration(word)? {
        time if time >= Duration::from_millis(100) => Ok(time),
        _ => Err("at least 100ms".into()),
    }
}

/// A server's figures, the machine's memory, and when they were asked for.
struct Sample {
    report: Report,
    memory: Memory,
    at: Instant,
}

impl Sample {
    fn take(mountpoint: &Path) -> Result<Self> {
        let report = stats::ask(mountpoint)?;
        Ok(Self {
            memory: Memory::now(report.pid),
            report,
            at: Instant::now(),
        })
    }
}

/// The machine's memory in KiB, and the percentage of the last ten seconds in which some or all tasks waited
/// for memory; `None` if the kernel doesn't say.
struct Memory {
    available: Option<u64>,
    total: Option<u64>,
    server: Option<u64>,
    some: Option<String>,
    full: Option<String>,
}

impl Memory {
    fn now(server: u32) -> Self {
        let text = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
        let field = |text: &str, name: &str| -> Option<u64> {
            let line = text.lines().find_map(|line| line.strip_prefix(name))?;
            line.split_whitespace().next()?.parse().ok()
        };
        let meminfo = text("/proc/meminfo");
        let pressure = text("/proc/pressure/memory");
        let average = |name: &str| {
            let line = pressure.lines().find_map(|line| line.strip_prefix(name))?;
            let (value, _) = line.trim_start().strip_prefix("avg10=")?.split_once(' ')?;
            Some(value.to_owned())
        };
        Self {
            available: field(&meminfo, "MemAvailable:"),
            total: field(&meminfo, "MemTotal:"),
            server: field(&text(&format!("/proc/{server}/status")), "VmRSS:"),
            some: average("some"),
            full: average("full"),
        }
    }
}

/// Runs it.
pub fn run(args: Args) -> Result<ExitCode> {
    let first = Sample::take(&args.mountpoint)?;
    let path = args.mountpoint.canonicalize();
    let path = path.as_deref().unwrap_or(&args.mountpoint);
    let name = path.display().to_string();
    if args.once {
        std::thread::sleep(args.interval);
        let second = Sample::take(&args.mountpoint)?;
        let rows = frame::ROWS.max(second.report.stuck.len() + frame::ROWS - 3);
        let lines = frame::lines(&name, &first, &second, frame::COLUMNS, rows);
        let text: String = lines
            .iter()
            .map(|line| format!("{}\n", line.text))
            .collect();
        printed(std::io::stdout().write_all(text.as_bytes()))?;
        return Ok(ExitCode::SUCCESS);
    }
    if !std::io::stdout().is_terminal() || !std::io::stdin().is_terminal() {
        return Err(Error::usage(
            "top: not a terminal (--once prints a frame as text)",
        ));
    }
    let _screen = Screen::enter().context(|| "the terminal".into())?;
    follow(&args, &name, first).map(|()| ExitCode::SUCCESS)
}

/// The terminal's other screen, without a cursor, with keys as they are pressed. Dropping it brings back the first.
struct Screen(Termios);

impl Screen {
    fn enter() -> std::io::Result<Self> {
        let before = tcgetattr(std::io::stdin())?;
        let mut raw = before.clone();
        raw.make_raw();
        tcsetattr(std::io::stdin(), OptionalActions::Flush, &raw)?;
        let screen = Self(before);
        // `?7l`: the terminal cuts off lines that are too long.
        std::io::stdout().write_all(b"\x1b[?1049h\x1b[?25l\x1b[?7l")?;
        Ok(screen)
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        let _ = std::io::stdout().write_all(b"\x1b[?7h\x1b[?25h\x1b[?1049l");
        let _ = std::io::stdout().flush();
        let _ = tcsetattr(std::io::stdin(), OptionalActions::Flush, &self.0);
    }
}

/// The keys that are pressed within this time; none after it.
fn keys(limit: Duration) -> std::io::Result<Vec<u8>> {
    let stdin = std::io::stdin();
    let limit = Timespec::try_from(limit).ok();
    match poll(&mut [PollFd::new(&stdin, PollFlags::IN)], limit.as_ref()) {
        // A terminal that changes its size interrupts: it is drawn anew.
        Ok(0) | Err(Errno::INTR) => return Ok(Vec::new()),
        other => other?,
    };
    let mut keys = vec![0; 64];
    let len = rustix::io::read(&stdin, &mut keys[..])?;
    keys.truncate(len);
    // A terminal that is gone: as if it had said to quit.
    Ok(if len == 0 { b"q".into() } else { keys })
}

/// Draws until the user quits.
fn follow(args: &Args, name: &str, first: Sample) -> Result<()> {
    let what = || "the terminal".to_owned();
    let mut before = first;
    let mut now = Sample::take(&args.mountpoint)?;
    let mut frozen = false;
    loop {
        let size = tcgetwinsize(std::io::stdout()).context(what)?;
        let (columns, rows) = (usize::from(size.ws_col), usize::from(size.ws_row));
        let mut text = String::from("\x1b[H");
        for line in frame::lines(name, &before, &now, columns, rows.saturating_sub(1)) {
            text += &format!("\x1b[{}m{}\x1b[m\x1b[K\r\n", line.style, line.text);
        }
        text += match frozen {
            true => "\x1b[2mfrozen: space continues, q quits\x1b[m\x1b[J",
            false => "\x1b[2mq quits, space freezes\x1b[m\x1b[J",
        };
        let mut out = std::io::stdout();
        out.write_all(text.as_bytes()).context(what)?;
        out.flush().context(what)?;
        let left = args.interval.saturating_sub(now.at.elapsed());
        let keys = keys(left).context(what)?;
        // Escape alone: other keys begin with it. Ctrl-C comes as 3.
        if keys == b"\x1b" || keys.iter().any(|key| matches!(key, b'q' | 3)) {
            return Ok(());
        }
        frozen ^= keys.contains(&b' ');
        if now.at.elapsed() < args.interval {
            continue;
        }
        let next = Sample::take(&args.mountpoint)?;
        if frozen {
            // Asked only to notice that the mount is gone.
            now.at = next.at;
        } else {
            before = std::mem::replace(&mut now, next);
        }
    }
}
