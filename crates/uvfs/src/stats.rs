//! `uvfs stats`.

mod metrics;

use std::io::{self, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use clap::ValueHint;
use rustix::io::Errno;
use uvfs_cli::{Context, Error, Result, printable, printed};
use uvfs_server::stats::{Report, StuckRequest};
use uvfs_server::{control, mount};

use crate::umount::{absolute, serves};

const EXAMPLES: &str = "\
Examples:
  uvfs stats /mnt
  uvfs stats --json /mnt
  uvfs stats --prometheus /mnt /srv/x > /var/lib/node_exporter/uvfs.prom

The JSON object has: version, source, transport, control, socket, pid, uptime_s,
requests, errors, failures (op, errno, count), bytes_read, bytes_written, backed_opens, watch (on, why_not,
unwatched, events, told, lost), survive (keeper, programs, generation,
sent_again), ops (name, count), latency (below_ns, count; of
one request in 16), latency_ns (the sum of these latencies), queues (in_flight,
deepest, spins, sleeps, enters), counts (name, count), clients that are attached now (pid, uid,
requests, bytes_read, bytes_written, and says: name, calls, hits, bytes_read,
bytes_written, waited_ns), leases (read, write), and stuck (opcode, node, file,
pid, age_ms, waits_for). Fields may be added, never removed.

A stuck request has waited for longer than uvfs mount --slow. It is listed with
its file (a request about a name: with the directory), the thread that made it,
and what it waits for. The server also logs it (see UVFS_LOG in uvfs --help).

The metrics are the same numbers, as
uvfs_requests_total{mount=\"/mnt\",op=\"READ\"}, in the text format of OpenMetrics,
which Prometheus reads.

The kernel reads and writes some files by itself (uvfs mount -o passthrough), and
tells the server of no byte. uvfs_backed_opens_total counts the opens of these
files, whose bytes are missing in the others.

With -o survive a mount outlives its server. The counts above begin anew with each
server. The generation is the number of this one, and the requests that the kernel
sent again are those that a killed server had not answered.

The counts are the file system's own. A mount of an object store has requests to
the store (stat, list and read, retries included), the bytes of contents that
came, retries, requests that failed for good, and of the bytes that programs and
the kernel's readahead asked the server for, those that the cache had and those
that it had not. As metrics they are uvfs_fs_store_read_requests_total and so on.

The server counts a client's requests. The client itself reports its calls,
their bytes, its cache hits and the time that it waited, a moment ago.

Watching is on if the server learns what programs change behind the mount. The
kernel then caches until something changes: counted are the events that came, the
names and files that the kernel was told to drop, and how often events were lost
and everything was dropped. If watching is off, the reason follows, and the
kernel caches for a short time only.

Exit status: 0 shown, 1 failed, 2 wrong usage.";

/// Show what a mount has done.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// As one JSON object
    #[arg(long)]
    json: bool,
    /// As metrics for Prometheus; the label `mount` is the mount point
    #[arg(long, conflicts_with = "json")]
    prometheus: bool,
    /// The mount point (several with --prometheus)
    #[arg(required = true, value_name = "MOUNTPOINT", value_hint = ValueHint::DirPath)]
    mountpoints: Vec<PathBuf>,
}

/// The control socket of the one server that has the mount open, if it is this user's. The mount is not asked: its
/// source may hang, or its file system have no extended attributes.
fn socket_of_server(mountpoint: &Path) -> Option<PathBuf> {
    let line = mount::mounted(&absolute(mountpoint).ok()?).ok()??;
    let minor = line.device.strip_prefix("0:")?;
    let sockets = std::fs::read_dir(control::directory().ok()?).ok()?;
    let mut serving = sockets.flatten().filter(|socket| {
        let name = socket.file_name();
        let pid = (name.to_str()).and_then(|name| name.strip_suffix(".sock")?.split('-').next());
        let pid = pid.and_then(|pid| pid.parse().ok());
        // A killed server leaves its sockets, and another process may have its number now.
        pid.is_some_and(|pid| serves(pid, minor)) && UnixStream::connect(socket.path()).is_ok()
    });
    // Of a process with several mounts each has a socket.
    let one = serving.next()?;
    serving.next().is_none().then(|| one.path())
}

/// Where the server of a mount listens.
pub fn control_socket(mountpoint: &Path) -> Result<PathBuf> {
    if let Some(socket) = socket_of_server(mountpoint) {
        return Ok(socket);
    }
    let name = mountpoint.display();
    let mut value = [0; 4096];
    match rustix::fs::getxattr(mountpoint, uvfs_server::CONTROL_XATTR, &mut value) {
        Ok(len) => {
            use std::os::unix::ffi::OsStrExt;
            Ok(std::ffi::OsStr::from_bytes(&value[..len]).into())
        }
        Err(Errno::NODATA | Errno::OPNOTSUPP | Errno::NOSYS) => Err(Error::new(format!(
            "{name}: not the root of a uvfs mount, or its file system has no extended attributes"
        ))),
        Err(Errno::NOTCONN) => Err(Error::new(format!(
            "{name}: its server is dead (uvfs umount {name} takes the mount away)"
        ))),
        Err(error) => Err(Error::new(format!("{name}: {error}"))),
    }
}

/// Runs it.
pub fn run(args: Args) -> Result<ExitCode> {
    if args.prometheus {
        return print_metrics(&args.mountpoints);
    }
    let [mountpoint] = args.mountpoints.as_slice() else {
        return Err(Error::usage(
            "stats: give one mount point (several only with --prometheus)",
        ));
    };
    let report = ask(mountpoint)?;
    if args.json {
        uvfs_cli::json(&report)?;
    } else {
        uvfs_cli::print(|out| print(&report, out))?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Asks a mount's server.
pub fn ask(mountpoint: &Path) -> Result<Report> {
    let socket = control_socket(mountpoint)?;
    control::ask_stats(&socket).context(|| socket.display().to_string())
}

fn print_metrics(mountpoints: &[PathBuf]) -> Result<ExitCode> {
    let mut reports = Vec::new();
    for mountpoint in mountpoints {
        let name = mountpoint
            .canonicalize()
            .unwrap_or_else(|_| mountpoint.clone());
        reports.push((name.display().to_string(), ask(mountpoint)?));
    }
    let text = metrics::text(&reports).context(|| "the metrics".into())?;
    printed(std::io::stdout().write_all(text.as_bytes()))?;
    Ok(ExitCode::SUCCESS)
}

fn print(report: &Report, out: &mut dyn Write) -> io::Result<()> {
    writeln!(out, "source     {}", uvfs_cli::printable(&report.source))?;
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
            Some(why) => writeln!(out, "watching   off: {}", uvfs_cli::plain(why))?,
            None => writeln!(
                out,
                "watching   on: {} events, {} told, {} times lost, {} file systems left out",
                watch.events, watch.told, watch.lost, watch.unwatched
            )?,
        },
    }
    if let Some(survive) = &report.survive {
        writeln!(
            out,
            "survives   server number {}, {} requests sent again",
            survive.generation, survive.sent_again
        )?;
    }
    writeln!(out, "\n{:<20} {:>12}", "request", "count")?;
    for op in &report.ops {
        writeln!(out, "{:<20} {:>12}", op.name, op.count)?;
    }
    if !report.failures.is_empty() {
        writeln!(
            out,
            "\n{:<20} {:<16} {:>12}",
            "answered with", "error", "count"
        )?;
    }
    for failure in &report.failures {
        let (op, errno) = (&failure.op, &failure.errno);
        writeln!(out, "{op:<20} {errno:<16} {:>12}", failure.count)?;
    }
    if !report.counts.is_empty() {
        writeln!(out, "\n{:<20} {:>12}", "file system", "count")?;
    }
    for one in &report.counts {
        writeln!(out, "{:<20} {:>12}", printable(&one.name), one.count)?;
    }
    writeln!(
        out,
        "\n{:<20} {:>12}   (one request in 16)",
        "latency below", "count"
    )?;
    for bar in report.latency.iter().filter(|bar| bar.count > 0) {
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
    print_clients(report, out)?;
    print_stuck(report, out)
}

fn print_stuck(report: &Report, out: &mut dyn Write) -> io::Result<()> {
    if report.stuck.is_empty() {
        return Ok(());
    }
    writeln!(
        out,
        "\n{:<12} {:>10} {:>8}  {:<16} file",
        "stuck", "age", "pid", "waits for"
    )?;
    for request in &report.stuck {
        writeln!(
            out,
            "{:<12} {:>8.1} s {:>8}  {:<16} {}",
            request.opcode,
            request.age_ms as f64 / 1e3,
            request.pid,
            request.waits_for,
            file_of(request)
        )?;
    }
    Ok(())
}

/// A stuck request's file for the terminal: its path, escaped, or its number.
pub fn file_of(request: &StuckRequest) -> String {
    match &request.file {
        Some(path) => printable(path).into_owned(),
        None => format!("node {}", request.node),
    }
}

fn print_clients(report: &Report, out: &mut dyn Write) -> io::Result<()> {
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
