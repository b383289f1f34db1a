//! `uvfs bench all`: every benchmark one after another, and the report of all.

use std::fs::{self, File};
use std::io::{self, IsTerminal, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use clap::ValueEnum;
use rustix::process::Signal;
use tempfile::{NamedTempFile, TempDir};
use uvfs_cli::{Context, Error, Result, printed};

use super::child::{Process, Waited, own_path, uvfs, wait_any};
use super::common::words;
use super::report::{All, Failure, Report, columns};
use super::{interrupt, page};

const EXAMPLES: &str = "\
Examples:
  uvfs bench all --quick --report report.html
  uvfs bench all --json > result.json
  uvfs bench all --only wakeup,load --report report.html
  uvfs bench all --peer hp='passthrough_hp --foreground {source} {mountpoint}' --report report.html
  uvfs bench report result.json report.html
  uvfs bench compare before.json after.json

Runs the benchmarks one after another, each as a process of its own, with --quick in two minutes, otherwise
in fifteen on two CPUs. A benchmark that fails is named, and the others go on. The page of --report needs no
network and no script, and has a table and plots for each benchmark. `check` measures a small image that is
made for it unless --image names one; cold runs are cold only where it is on a disk (--dir, by default
the directory for temporary files). The others work in /dev/shm unless --dir is given.

Exit status: 0 all measured, 1 something could not be measured, 2 wrong usage, 130 interrupted.";

const JSON_HELP: &str = "\
JSON (--json), one object on standard output: version (1), bench (all), command (this command line),
seconds (of all), runs (the JSON object of each benchmark, see its own --help), and failures (those that
gave none: bench and error).";

/// The benchmarks to run, and the place of their report.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES, after_long_help = [EXAMPLES, "\n\n", JSON_HELP].concat())]
pub struct Args {
    /// Run these only
    #[arg(long, value_delimiter = ',', value_name = "NAMES")]
    only: Vec<BenchName>,
    /// Measure for a shorter time, on less data
    #[arg(long)]
    quick: bool,
    /// How many times each target is measured [default: 3, with --quick 2]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=1000))]
    rounds: Option<u32>,
    /// Another file server, for all benchmarks that use mounts: it is run without a shell, has to stay
    /// in the foreground, and is unmounted at the end
    #[arg(long, value_name = "NAME='COMMAND {source} {mountpoint}'", value_parser = peer)]
    peer: Vec<String>,
    /// The XFS image that `check` measures [default: one that is made]
    #[arg(long)]
    image: Option<PathBuf>,
    /// Where the benchmarks make their private directories
    #[arg(long)]
    dir: Option<PathBuf>,
    /// Write all tables and plots to this file, as HTML
    #[arg(long, value_name = "FILE.html")]
    report: Option<PathBuf>,
    /// Print JSON instead of a table
    #[arg(long)]
    json: bool,
}

/// Looks whether it is a peer, and leaves it as it is.
fn peer(text: &str) -> Result<String, String> {
    let peer = super::server::peer(text)?;
    let serves = peer.serves_source().map_err(|error| error.to_string());
    serves.map(|()| text.to_string())
}

/// The benchmarks, in the order in which they run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum BenchName {
    Wakeup,
    Writeback,
    Direct,
    Check,
    Programs,
    Load,
}

impl BenchName {
    /// Arguments that keep all of them together short enough.
    fn shorter(self, quick: bool) -> &'static [&'static str] {
        match (self, quick) {
            (BenchName::Check, _) => &[],
            (BenchName::Wakeup, true) => &["--quick", "--work", "read-1,create,stat,read,unlink"],
            (BenchName::Direct, true) => &["--quick", "--latency-us", "0,1000"],
            (BenchName::Load, true) => &["--quick", "--work", "direct,stat,open"],
            (BenchName::Load, false) => &["--seconds", "0.3", "--processes", "1,2,4,8"],
            (_, true) => &["--quick"],
            (_, false) => &[],
        }
    }
}

/// The directory for what the benchmarks print and for the image of `check`.
struct ScratchDir {
    dir: TempDir,
    /// Files of the image.
    files: u64,
}

impl ScratchDir {
    fn new(args: &Args) -> Result<Self> {
        let parent = args.dir.clone().unwrap_or_else(std::env::temp_dir);
        let dir = tempfile::Builder::new()
            .prefix("uvfs-bench.")
            .tempdir_in(&parent)
            .context(|| parent.display().to_string())?;
        let files = if args.quick { 5_000 } else { 100_000 };
        Ok(Self { dir, files })
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Makes an image of many small files.
    fn image(&self) -> Result<PathBuf> {
        let (tree, image) = (self.path("tree"), self.path("image"));
        let what = || format!("filling {}", tree.display());
        for number in 0..self.files {
            let dir = tree.join(format!("d{}", number / 250));
            if number % 250 == 0 {
                interrupt::check()?;
                fs::create_dir_all(&dir).context(what)?;
            }
            let name = format!("a file with a name of middling length, number {number}");
            fs::write(dir.join(name), [0x5a; 100]).context(what)?;
        }
        let mut command = Command::new(uvfs());
        command
            .args(["mkfs", "--quiet", "--from"])
            .arg(&tree)
            .arg(&image);
        if !finish(&mut command)?.success() {
            return Err(Error::new("making an image failed"));
        }
        fs::remove_dir_all(&tree).context(|| format!("removing {}", tree.display()))?;
        Ok(image)
    }
}

/// The command line of a benchmark.
fn command(bench: BenchName, args: &Args, scratch: &ScratchDir) -> Result<Command> {
    let mut command = Command::new(own_path()?);
    command.args([&words(&bench).0, "--json"]);
    let rounds = args.rounds.unwrap_or(if args.quick { 2 } else { 3 });
    command.args(["--rounds", &rounds.to_string()]);
    if bench == BenchName::Check {
        command.arg(match &args.image {
            Some(image) => image.clone(),
            None => scratch.image()?,
        });
        return Ok(command);
    }
    command.args(bench.shorter(args.quick));
    for peer in &args.peer {
        command.arg("--peer").arg(peer);
    }
    if let Some(dir) = &args.dir {
        command.arg("--dir").arg(dir);
    }
    Ok(command)
}

/// Runs a command to its end, and has it clean up when this process is interrupted. Its output goes to
/// standard error.
fn finish(command: &mut Command) -> Result<std::process::ExitStatus> {
    const LIMIT: Duration = Duration::from_secs(24 * 3600);
    const PATIENCE: Duration = Duration::from_secs(30);
    command.stdin(Stdio::null());
    let mut process = Process::spawn(command, Signal::TERM)?;
    if !matches!(wait_any(&[&process], LIMIT), Waited::Ended(_)) {
        process.signal(Signal::TERM);
        if !process.wait(PATIENCE) {
            process.signal(Signal::KILL);
        }
    }
    process.wait(PATIENCE);
    interrupt::check()?;
    process.status().ok_or(Error::new("it does not end"))
}

/// Runs a benchmark; gives its report, and whether it measured everything.
fn report(bench: BenchName, args: &Args, scratch: &ScratchDir) -> Result<(Report, bool)> {
    let path = scratch.path("output");
    let what = || "its output".to_string();
    let mut command = command(bench, args, scratch)?;
    command.stdout(File::create(&path).context(what)?);
    let status = finish(&mut command)?;
    let output = fs::read(&path).context(what)?;
    match serde_json::from_slice(&output) {
        Ok(report) => Ok((report, status.success())),
        Err(_) => Err(Error::new(format!("{status}, without a report"))),
    }
}

/// The page while it has no name yet, so that an interrupted run leaves none behind.
fn page_file(path: &Path) -> Result<NamedTempFile> {
    // The umask takes its part from it.
    tempfile::Builder::new()
        .prefix(".uvfs-report.")
        .permissions(fs::Permissions::from_mode(0o666))
        .tempfile_in(uvfs_sys::directory_of(path))
        .context(|| path.display().to_string())
}

fn write_page(all: &All, mut file: NamedTempFile, path: &Path) -> Result<()> {
    let what = || path.display().to_string();
    file.write_all(page::page(all).as_bytes()).context(what)?;
    file.persist(path).context(what)?;
    Ok(())
}

/// A table for each benchmark: medians, a line for each work.
fn table(runs: &[Report]) -> String {
    let table = |run: &Report| format!("{}, medians:\n{}\n", run.bench, columns(&run.medians()));
    runs.iter().map(table).collect()
}

/// Runs the benchmarks and prints or writes what they found.
pub fn run(args: Args) -> Result<ExitCode> {
    interrupt::install()?;
    let file = args.report.as_deref().map(page_file).transpose()?;
    let scratch = ScratchDir::new(&args)?;
    let chosen = |bench: &&BenchName| args.only.is_empty() || args.only.contains(bench);
    let benches: Vec<BenchName> = BenchName::value_variants()
        .iter()
        .filter(chosen)
        .copied()
        .collect();
    let mut all = All {
        command: std::env::args().collect(),
        ..All::of(Vec::new())
    };
    let start = Instant::now();
    let mut code = ExitCode::SUCCESS;
    for (number, bench) in benches.iter().enumerate() {
        let (name, _) = words(bench);
        if io::stderr().is_terminal() {
            eprintln!("{name} ({} of {})", number + 1, benches.len());
        }
        match report(*bench, &args, &scratch) {
            Ok((report, whole)) => {
                all.runs.push(report);
                if !whole {
                    code = ExitCode::FAILURE;
                }
            }
            Err(e) => {
                interrupt::check()?;
                uvfs_cli::warn(format!("{name}: not measured: {e}"));
                code = ExitCode::FAILURE;
                let (bench, error) = (name, e.to_string());
                all.failures.push(Failure { bench, error });
            }
        }
    }
    all.seconds = start.elapsed().as_secs_f64();
    let text = match args.json {
        // Strings and numbers only: there is nothing that JSON could refuse.
        true => serde_json::to_string_pretty(&all).expect("valid JSON") + "\n",
        false => table(&all.runs),
    };
    printed(io::stdout().lock().write_all(text.as_bytes()))?;
    if let (Some(file), Some(path)) = (file, &args.report) {
        write_page(&all, file, path)?;
    }
    Ok(code)
}

const PAGE_EXAMPLES: &str = "\
Examples:
  uvfs bench all --json > result.json
  uvfs bench report result.json report.html

Exit status: 0 written, 1 failed, 2 wrong usage.";

/// The page of results that are there.
#[derive(clap::Args)]
#[command(after_help = PAGE_EXAMPLES)]
pub struct PageArgs {
    /// The output of `uvfs bench all --json`, or of another benchmark
    results: PathBuf,
    /// The file to write, as HTML
    page: PathBuf,
}

/// Writes the page.
pub fn run_page(args: PageArgs) -> Result<ExitCode> {
    let all = All::load(&args.results)?;
    write_page(&all, page_file(&args.page)?, &args.page)?;
    Ok(ExitCode::SUCCESS)
}
