//! `uvfs top`: shows what a mount is doing, in the terminal, until the user quits.

mod frame;

use std::fmt::Write as _;
use std::io::{IsTerminal, Write as _};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::ValueHint;
use ratatui::Terminal;
use ratatui::backend::TestBackend;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEventKind, KeyModifiers};
use uvfs_cli::{Context, Error, Result, duration, printed};
use uvfs_server::stats::Report;

use crate::stats;

const EXAMPLES: &str = "\
Examples:
  uvfs top /mnt
  uvfs top --interval 5 /mnt
  uvfs top --once /mnt             one frame as text, for a log or a mail

Rates are of the last interval. Boxes:
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
        let text = once(&name, &first, &second)?;
        printed(std::io::stdout().write_all(text.as_bytes()))?;
        return Ok(ExitCode::SUCCESS);
    }
    if !std::io::stdout().is_terminal() || !std::io::stdin().is_terminal() {
        return Err(Error::usage(
            "top: not a terminal (--once prints a frame as text)",
        ));
    }
    let mut terminal = ratatui::try_init().context(|| "the terminal".into())?;
    let outcome = follow(&mut terminal, &args, &name, first);
    ratatui::try_restore().context(|| "the terminal".into())?;
    outcome.map(|()| ExitCode::SUCCESS)
}

/// Draws one frame as text.
fn once(name: &str, before: &Sample, now: &Sample) -> Result<String> {
    let height = frame::HEIGHT.max(now.report.stuck.len() as u16 + frame::HEIGHT - 3);
    let mut terminal =
        Terminal::new(TestBackend::new(frame::WIDTH, height)).context(|| "a frame".into())?;
    terminal
        .draw(|frame| frame::draw(frame, name, before, now, ""))
        .context(|| "a frame".into())?;
    let buffer = terminal.backend().buffer();
    let mut text = String::new();
    for y in 0..height {
        let line: String = (0..frame::WIDTH).map(|x| buffer[(x, y)].symbol()).collect();
        writeln!(text, "{}", line.trim_end()).context(|| "a frame".into())?;
    }
    Ok(text)
}

/// Draws until the user quits.
fn follow(
    terminal: &mut ratatui::DefaultTerminal,
    args: &Args,
    name: &str,
    first: Sample,
) -> Result<()> {
    let terminal_failed = || "the terminal".to_owned();
    let mut before = first;
    let mut now = Sample::take(&args.mountpoint)?;
    let mut frozen = false;
    loop {
        let keys = match frozen {
            true => "frozen: space continues, q quits",
            false => "q quits, space freezes",
        };
        terminal
            .draw(|frame| frame::draw(frame, name, &before, &now, keys))
            .context(terminal_failed)?;
        let left = args.interval.saturating_sub(now.at.elapsed());
        if event::poll(left).context(terminal_failed)? {
            match event::read().context(terminal_failed)? {
                Event::Key(key) if key.kind == KeyEventKind::Press => match key.code {
                    KeyCode::Char('q') | KeyCode::Esc => return Ok(()),
                    KeyCode::Char('c') if key.modifiers.contains(KeyModifiers::CONTROL) => {
                        return Ok(());
                    }
                    KeyCode::Char(' ') => frozen = !frozen,
                    _ => {}
                },
                _ => {}
            }
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
