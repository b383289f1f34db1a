//! `uvfs stats`.

use std::fmt::{self, Write as _};
use std::io::Write as _;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use rustix::io::Errno;
use uvfs_server::control;
use uvfs_server::stats::Report;

use crate::error::{Context, Error, Result, printed};

const EXAMPLES: &str = "\
Examples:
  uvfs stats /mnt
  uvfs stats --json /mnt

The JSON object has: source, transport, control, socket, pid, uptime_s, requests, errors, bytes_read,
bytes_written, backed_opens, watch (on, why_not, unwatched, events, told, lost), ops (name, count), latency (below_ns, count; of one request in 16), queues
(in_flight, deepest, spins, sleeps, enters), and clients that are attached now (pid, uid, requests,
bytes_read, bytes_written, and says: name, calls, hits, bytes_read, bytes_written, waited_ns). Fields
may be added, never removed.

Files that were opened with O_DIRECT the kernel may read and write itself (uvfs mount -o passthrough):
such opens are counted as backed, and what is read and written through them is not.

A client's requests are the server's count; its calls, their bytes, its cache hits and the time that
it waited are what it says itself, a moment ago.

Watching: on says that the server is told what programs of the host change, and has the kernel cache
until then: events that came, things that the kernel was told to drop, and how often events were lost
and everything was dropped. Off says why the kernel caches for a while only.

Exit status: 0 shown, 1 failed, 2 wrong usage.";

/// Show what a mount has done.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// As one JSON object
    #[arg(long)]
    json: bool,
    /// The mount point
    mountpoint: PathBuf,
}

/// Where the server of a mount listens.
pub fn control_socket(mountpoint: &std::path::Path) -> Result<PathBuf> {
    let name = mountpoint.display();
    let mut value = [0; 4096];
    match rustix::fs::getxattr(mountpoint, uvfs_server::CONTROL_XATTR, &mut value) {
        Ok(len) => {
            use std::os::unix::ffi::OsStrExt;
            Ok(std::ffi::OsStr::from_bytes(&value[..len]).into())
        }
        Err(Errno::NODATA | Errno::OPNOTSUPP | Errno::NOSYS) => {
            Err(Error::new(format!("{name}: not the root of a uvfs mount")))
        }
        Err(Errno::NOTCONN) => Err(Error::new(format!(
            "{name}: its server is dead (uvfs umount {name} takes the mount away)"
        ))),
        Err(error) => Err(Error::new(format!("{name}: {error}"))),
    }
}

/// Runs it.
pub fn run(args: Args) -> Result<ExitCode> {
    let socket = control_socket(&args.mountpoint)?;
    let report = control::ask_stats(&socket).context(|| socket.display().to_string())?;
    let mut text = String::new();
    if args.json {
        text = serde_json::to_string(&report).context(|| "the report".into())?;
        text.push('\n');
    } else {
        print(&report, &mut text).context(|| "the report".into())?;
    }
    printed(std::io::stdout().write_all(text.as_bytes()))?;
    Ok(ExitCode::SUCCESS)
}

fn print(report: &Report, out: &mut String) -> fmt::Result {
    writeln!(out, "source     {}", report.source)?;
    writeln!(out, "transport  {}", report.transport)?;
    writeln!(
        out,
        "server     pid {}, up {} s",
        report.pid, report.uptime_s
    )?;
    if let Some(control) = &report.control {
        writeln!(out, "control    {control}")?;
    }
    if let Some(socket) = &report.socket {
        writeln!(out, "clients    {socket}")?;
    }
    writeln!(
        out,
        "requests   {} ({} answered with an error)",
        report.requests, report.errors
    )?;
    writeln!(out, "read       {} bytes", report.bytes_read)?;
    writeln!(out, "written    {} bytes", report.bytes_written)?;
    writeln!(
        out,
        "backed     {} opens, read and written by the kernel itself",
        report.backed_opens
    )?;
    match &report.watch {
        None => {}
        Some(watch) => match &watch.why_not {
            Some(why) => writeln!(out, "watching   off: {why}")?,
            None => writeln!(
                out,
                "watching   on: {} events, {} told, {} times lost, {} file systems left out",
                watch.events, watch.told, watch.lost, watch.unwatched
            )?,
        },
    }
    writeln!(out, "\n{:<20} {:>12}", "request", "count")?;
    for op in &report.ops {
        writeln!(out, "{:<20} {:>12}", op.name, op.count)?;
    }
    writeln!(
        out,
        "\n{:<20} {:>12}   (one request in 16)",
        "latency below", "count"
    )?;
    for bar in &report.latency {
        writeln!(
            out,
            "{:<20} {:>12}",
            format!("{:?}", Duration::from_nanos(bar.below_ns)),
            bar.count
        )?;
    }
    writeln!(
        out,
        "\n{:<6} {:>10} {:>8} {:>12} {:>12} {:>12}",
        "queue", "in flight", "deepest", "spins", "sleeps", "enters"
    )?;
    for (number, queue) in report.queues.iter().enumerate() {
        writeln!(
            out,
            "{number:<6} {:>10} {:>8} {:>12} {:>12} {:>12}",
            queue.in_flight, queue.deepest, queue.spins, queue.sleeps, queue.enters
        )?;
    }
    print_clients(report, out)
}

fn print_clients(report: &Report, out: &mut String) -> fmt::Result {
    if report.clients.is_empty() {
        return Ok(());
    }
    writeln!(
        out,
        "\n{:<8} {:<15} {:>12} {:>12} {:>12} {:>14} {:>14} {:>10}",
        "client", "name", "calls", "cache hits", "requests", "read", "written", "waited"
    )?;
    for client in &report.clients {
        let says = &client.says;
        let waited = Duration::from_nanos(says.waited_ns).as_secs_f64();
        writeln!(
            out,
            "{:<8} {:<15} {:>12} {:>12} {:>12} {:>14} {:>14} {:>8.3} s",
            client.pid,
            says.name,
            says.calls,
            says.hits,
            client.requests,
            says.bytes_read,
            says.bytes_written,
            waited,
        )?;
    }
    Ok(())
}
