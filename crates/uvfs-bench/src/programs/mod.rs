//! `uvfs bench programs`: real programs on a source tree.

mod digest;
mod process;
mod suite;
mod tree;

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io;
use std::path::Path;
use std::process::{ExitCode, Stdio};
use std::time::Instant;

use clap::builder::PossibleValuesParser;
use serde_json::json;

use super::child::ended_cpu_seconds;
use super::common::Common;
use super::interrupt;
use super::measure::Measured;
use super::report::{JSON_HELP, Unit, Work};
use super::runner::{Sample, Say};
use super::server::{Running, Target};
use super::sides::{Side, Sides};
use super::workspace::Workspace;
use digest::Digest;
use process::{OUTPUT, TMP, run};
use suite::Program;
pub use suite::is_installed;
use tree::Size;
use uvfs_cli::{Context, Error, Result};

const EXAMPLES: &str = "\
Examples:
  uvfs bench programs --quick
  uvfs bench programs --rounds 3 --json > result.json
  uvfs bench programs --only git-status,make --sides mount,run
  uvfs bench programs --peer hp='passthrough_hp --foreground {source} {mountpoint}'

The sides are:
  native     the source directory itself
  mount      `uvfs mount`, with its default options
  mount-dev  the same over /dev/fuse
  run        the same mount, with each program under `uvfs run`

In each round each side gets a fresh copy of the tree: a git repository with 41 commits and 4,650
files in 300 directories (38 MiB), 40 C files, 200 Python modules and 300 SQL transactions (with
--quick about a tenth). Each program gets a new mount, so that what it finds does not depend on the
programs before it; where a program is measured twice, the second time is on the same mount. What
was written before is made durable first. Without --quick, a round takes about ten seconds for each
side.

A side fails when a program fails, or when it prints or leaves something else than on the side that
ran it first. A program that is not installed is left out, and a line on standard error says so.

Exit status: 0 all measured, 1 something could not be measured, 2 wrong usage, 130 interrupted.
";

const JSON_NOTE: &str = "
The works are the programs' runs, and `total` with the sum of each round; settings holds the size of
the tree and, as `missing`, the programs that are left out.";

/// The directory in the source where the programs work.
const WORK: &str = "work";

/// The measurements and their options.
#[derive(clap::Args)]
#[command(
    after_help = EXAMPLES,
    after_long_help = [EXAMPLES, "\n", JSON_HELP, JSON_NOTE].concat()
)]
pub struct Args {
    /// Measure these programs only
    #[arg(
        long,
        value_delimiter = ',',
        value_name = "NAMES",
        value_parser = PossibleValuesParser::new(suite::names())
    )]
    only: Vec<String>,
    #[command(flatten)]
    sides: Sides,
    #[command(flatten)]
    common: Common,
}

/// The programs to measure, and the names of those that are not installed.
fn programs(only: &[String]) -> Result<(Vec<&'static Program>, Vec<&'static str>)> {
    let chosen = |p: &&Program| only.is_empty() || only.iter().any(|name| name == p.name);
    let (there, missing): (Vec<_>, Vec<_>) = suite::ALL
        .iter()
        .filter(chosen)
        .partition(|program| program.missing().is_empty());
    for program in &missing {
        let (name, needs) = (program.name, program.missing().join(", "));
        uvfs_cli::warn(format!("{name}: left out: {needs} is not installed"));
    }
    if there.is_empty() {
        return Err(Error::new("no program is left to measure"));
    }
    Ok((there, missing.iter().map(|p| p.name).collect()))
}

/// The output of a program's run, and the tree that it left.
#[derive(Clone, Copy, PartialEq)]
struct Outputs {
    printed: Digest,
    left: Digest,
}

/// The benchmark while it runs.
struct Suite<'w> {
    workspace: &'w Workspace,
    programs: Vec<&'static Program>,
    /// The output and tree that each run has to have, by its name, and the side that had them first.
    expected: BTreeMap<String, (String, Outputs)>,
}

impl Suite<'_> {
    /// Runs every program on one side; a sample for each run, and their sum.
    fn round(&mut self, target: &Target, say: Say<'_>) -> Result<Vec<Sample>> {
        tree::copy(self.workspace, WORK)?;
        let mut samples = Vec::new();
        for program in self.programs.clone() {
            interrupt::check()?;
            say(program.name);
            // Writeback of earlier programs' data must not run during this one.
            sync(&self.workspace.source())?;
            let running = target.start(self.workspace)?;
            for name in program.runs() {
                let sample = self.one(program, &name, target, &running);
                let sample = sample.map_err(|e| running.blame(e));
                samples.push(sample.context(|| name)?);
            }
        }
        samples.push(total(&samples));
        Ok(samples)
    }

    /// Runs a program once, and compares what it does with what it did elsewhere.
    fn one(
        &mut self,
        program: &Program,
        name: &str,
        target: &Target,
        running: &Running<'_>,
    ) -> Result<Sample> {
        let sample = measure(self.workspace, program, running)?;
        // Data that the kernel of the mount has not written yet.
        sync(running.path())?;
        let outputs =
            outputs(self.workspace, program).context(|| "looking at its output".into())?;
        match self.expected.get(name) {
            None => {
                let first = (target.name.clone(), outputs);
                self.expected.insert(name.into(), first);
            }
            Some((first, expected)) if expected.printed != outputs.printed => {
                return Err(Error::new(format!(
                    "it printed something else than on {first}"
                )));
            }
            Some((first, expected)) if *expected != outputs => {
                return Err(Error::new(format!(
                    "it left something else than on {first}"
                )));
            }
            Some(_) => {}
        }
        Ok(sample)
    }
}

/// Writes what is dirty in the file system of `path`.
fn sync(path: &Path) -> Result<()> {
    let synced = File::open(path).and_then(|dir| Ok(rustix::fs::syncfs(dir)?));
    synced.context(|| format!("writing back {}", path.display()))
}

/// Runs a program and takes its time, that of its children included.
fn measure(workspace: &Workspace, program: &Program, running: &Running<'_>) -> Result<Sample> {
    let (name, arguments) = program.command.split_first().expect("each has a name");
    let server_before = running.cpu_seconds()?;
    let cpu_before = ended_cpu_seconds();
    let start = Instant::now();
    for _ in 0..program.starts {
        let mut command = running.command(name);
        command.args(arguments).stdin(Stdio::null());
        command.current_dir(running.path().join(WORK));
        run(workspace, &mut command, running.process())?;
    }
    let seconds = start.elapsed().as_secs_f64();
    let server_cpu_seconds = running.cpu_since(server_before)?;
    Ok(Sample {
        client: Measured {
            amount: program.starts.into(),
            seconds,
            cpu_seconds: ended_cpu_seconds() - cpu_before,
            ..Measured::default()
        },
        server_cpu_seconds,
    })
}

/// Looks at what a program printed, and in the source, behind the server's back, at what it left.
fn outputs(workspace: &Workspace, program: &Program) -> io::Result<Outputs> {
    let work = workspace.source().join(WORK);
    Ok(Outputs {
        printed: Digest::lines(&workspace.beside(OUTPUT[0]))?,
        left: match program.leaves {
            Some((path, except)) => Digest::tree(&work.join(path), except)?,
            None => Digest::default(),
        },
    })
}

/// All programs once.
fn total(samples: &[Sample]) -> Sample {
    let sum = |value: fn(&Sample) -> f64| samples.iter().map(|s| value(s) / s.client.amount).sum();
    Sample {
        client: Measured {
            amount: 1.0,
            seconds: sum(|s| s.client.seconds),
            cpu_seconds: sum(|s| s.client.cpu_seconds),
            ..Measured::default()
        },
        server_cpu_seconds: samples
            .iter()
            .all(|s| s.server_cpu_seconds.is_some())
            .then(|| sum(|s| s.server_cpu_seconds.unwrap_or_default())),
    }
}

/// The programs' runs and their sum as the report shows them.
fn works(programs: &[&Program]) -> Vec<Work> {
    let runs = programs.iter().flat_map(|program| {
        let runs = program.runs().into_iter();
        runs.map(|name| Work::new(name, program.title, Unit::Run))
    });
    let total = Work::new("total", "all of them, each once", Unit::Run);
    runs.chain([total]).collect()
}

/// Runs the benchmark and prints what it found.
pub fn bench(args: Args) -> Result<ExitCode> {
    let common = &args.common;
    let targets = args.sides.targets(&Side::PROGRAMS, &[], &[])?;
    let (programs, missing) = programs(&args.only)?;
    if !is_installed("git") {
        return Err(Error::new("git is not installed: it makes the tree"));
    }
    let size = common.pick(Size::QUICK, Size::FULL);
    let works = works(&programs);
    // The copies, and the page cache of the mount over them.
    let workspace = args.common.workspace(2 * size.bytes())?;
    fs::create_dir(workspace.beside(TMP)).context(|| "creating a directory".into())?;
    tree::generate(&workspace, &size)?;
    let mut suite = Suite {
        workspace: &workspace,
        programs,
        expected: BTreeMap::new(),
    };
    let settings = json!({"files": size.files, "commits": size.commits + 1, "missing": missing});
    let round = |_, target: &Target, say: Say<'_>| suite.round(target, say);
    common.measure("programs", &targets, works, settings, round)
}
