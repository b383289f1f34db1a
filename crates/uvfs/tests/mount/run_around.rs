//! Programs that go around the C library while `uvfs run` serves their files: each cell of the matrix is a way into the
//! kernel, a place where that is done, and an operation. The program sees and leaves the same as without `uvfs run` and
//! on the host.

mod build;
mod cells;

use std::collections::{BTreeMap, HashSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use build::{Builds, Program};
use cells::{Cell, Serving};

use crate::harness::*;
use crate::preload::{How, library, served_any, uvfs_run};

/// A cell takes milliseconds: it hangs after this.
const LIMIT: Duration = Duration::from_secs(12);

/// The mount, a directory of the host beside it, and the programs.
struct Matrix {
    served: Served,
    host: PathBuf,
    builds: Builds,
}

/// Where a cell runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Side {
    Host,
    Mount,
    Run,
}

impl Matrix {
    fn new() -> Matrix {
        // Without backing files, so that clients can have every file.
        let served = Served::new(&Serve::over(Transport::Dev).option("nopassthrough"));
        let host = served.scratch.tmpfs("host", "500m");
        let builds = Builds::new(served.scratch.dir("programs"));
        Matrix {
            served,
            host,
            builds,
        }
    }

    /// Runs a cell. Gives what it prints, how it ends, and the files that it leaves.
    fn side(&self, cell: &Cell, number: usize, side: Side) -> Result<(Outcome, String), String> {
        let name = format!("{number}-{side:?}");
        let (at, behind) = match side {
            Side::Host => (self.host.join(&name), self.host.join(&name)),
            _ => (self.served.at(&name), self.served.source.join(&name)),
        };
        fs::create_dir(&behind).map_err(|e| format!("{}: {e}", behind.display()))?;
        let own = self.builds.command(cell, &at);
        let mut command = match side {
            Side::Run => under_run(cell, &own),
            _ => own,
        };
        let mut running = Running::start(&mut command);
        let Some(outcome) = running.wait(LIMIT) else {
            running.kill();
            return Err(format!(
                "{side:?} hangs after:\n{}\n{}",
                tail(&running.stdout(), 8),
                running.stderr()
            ));
        };
        // Through the mount: a client that was killed has its data written when another asks for it.
        let left = left(&at).map_err(|e| format!("{}: {e}", at.display()))?;
        Ok((outcome, left))
    }

    /// Runs a cell everywhere and compares.
    fn cell(&self, cell: &Cell, number: usize) -> Result<(), String> {
        let (host, host_left) = self.side(cell, number, Side::Host)?;
        if !host.stdout.contains("to its end") && !cell.ends_early() {
            return Err(format!("not to its end on the host: {host}"));
        }
        for side in [Side::Mount, Side::Run] {
            let (outcome, left) = self.side(cell, number, side)?;
            if outcome.status != host.status {
                return Err(format!(
                    "{side:?} ends with {}, the host with {}, after\n{}\n{}",
                    outcome.status,
                    host.status,
                    tail(&outcome.stdout, 5),
                    tail(&outcome.stderr, 8)
                ));
            }
            if let Some(different) = difference(&host.stdout, &outcome.stdout) {
                return Err(format!("{side:?}: {different}{}", tail(&outcome.stderr, 4)));
            }
            if left != host_left {
                return Err(format!("{side:?} leaves\n{left}the host\n{host_left}"));
            }
            let says = match (side, cell.serving()) {
                (Side::Run, Serving::Some) => served_any(&outcome),
                (Side::Run, Serving::None) => !served_any(&outcome),
                _ => true,
            };
            if !says {
                let expected = cell.serving();
                return Err(format!("served {expected:?}? {}", tail(&outcome.stderr, 8)));
            }
        }
        Ok(())
    }
}

/// The same command under `uvfs run --report --eager`, with its environment.
fn under_run(cell: &Cell, own: &Command) -> Command {
    let mut command = match cell.operation {
        // Without the report, which has a descriptor.
        "look" => uvfs(),
        _ => uvfs_run(How::Eager),
    };
    if cell.operation == "look" {
        command
            .env("UVFS_PRELOAD", library())
            .args(["run", "--eager"]);
    }
    command
        .arg("--")
        .arg(own.get_program())
        .args(own.get_args());
    for (name, value) in own.get_envs() {
        command.env(name, value.unwrap_or_default());
    }
    command
}

/// The files of a directory: sizes and bytes.
fn left(dir: &Path) -> std::io::Result<String> {
    let mut files: Vec<_> = fs::read_dir(dir)?.collect::<Result<_, _>>()?;
    files.sort_by_key(fs::DirEntry::file_name);
    let mut text = String::new();
    for file in files {
        let bytes = fs::read(file.path())?;
        let sum = bytes.iter().fold(5381u64, |sum, byte| {
            sum.wrapping_mul(33).wrapping_add((*byte).into())
        });
        text += &format!(
            "  {}: {} bytes, {sum:x}\n",
            file.file_name().display(),
            bytes.len()
        );
    }
    Ok(text)
}

fn tail(text: &str, lines: usize) -> String {
    let all: Vec<&str> = text.lines().collect();
    all[all.len().saturating_sub(lines)..].join("\n")
}

/// The first line that differs, with what led to it.
fn difference(host: &str, other: &str) -> Option<String> {
    if host == other {
        return None;
    }
    let same = host.lines().zip(other.lines()).take_while(|(a, b)| a == b);
    let same = same.count();
    let line = |text: &str| text.lines().nth(same).unwrap_or("(its end)").to_owned();
    let before = tail(&host.lines().take(same).collect::<Vec<_>>().join("\n"), 3);
    Some(format!(
        "after\n{before}\nhost:  {}\nother: {}\n",
        line(host),
        line(other)
    ))
}

/// Runs cells, and fails with all that differ.
fn run_cells(cells: &[Cell]) {
    let matrix = Matrix::new();
    let programs: HashSet<Program> = cells.iter().map(|cell| cell.program).collect();
    let there = |program: &Program| matrix.builds.has(*program);
    let programs: HashSet<Program> = programs.into_iter().filter(there).collect();
    let rings = has_rings();
    let there = |cell: &&Cell| programs.contains(&cell.program) && (rings || !cell.needs_a_ring());
    let cells: Vec<&Cell> = cells.iter().filter(there).collect();
    let (next, failed) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    let known = Mutex::new(BTreeMap::<&str, (u32, u32)>::new());
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                loop {
                    let number = next.fetch_add(1, Ordering::Relaxed);
                    let Some(cell) = cells.get(number) else { break };
                    let result = matrix.cell(cell, number);
                    match (result, cell.left()) {
                        (Err(why), None) => failed.lock().unwrap().push(format!("{cell} {why}")),
                        (result, Some(why)) => {
                            let mut known = known.lock().unwrap();
                            let (all, differ) = known.entry(why).or_insert((0, 0));
                            *all += 1;
                            *differ += u32::from(result.is_err());
                        }
                        (Ok(()), None) => {}
                    }
                }
            });
        }
    });
    for (why, (all, differ)) in known.into_inner().unwrap() {
        uvfs_testing::say(format_args!("{differ} of {all} cells still differ: {why}"));
    }
    let mut failed = failed.into_inner().unwrap();
    failed.sort();
    assert!(
        failed.is_empty(),
        "{} of {} cells differ:\n{}",
        failed.len(),
        cells.len(),
        failed.join("\n")
    );
}

fn can() -> bool {
    // The programs have instructions of x86-64 in them.
    cfg!(target_arch = "x86_64")
        && has(&[Need::Mount(Transport::Dev), Need::Uvfs, Need::Program("cc")])
}

/// Whether programs may have an io_uring here.
fn has_rings() -> bool {
    let disabled = fs::read_to_string("/proc/sys/kernel/io_uring_disabled").unwrap_or_default();
    let has = disabled.trim() == "0" && sandbox::no_io_uring().is_none();
    if !has {
        uvfs_testing::say("needs io_uring, which the kernel or UVFS_TEST_NO_IO_URING refuses");
    }
    has
}

/// Calls that do not pass through the C library leave the table of descriptors right, and data goes into the right
/// file, at the right place.
#[test]
fn a_few_cells() {
    if can() {
        run_cells(&cells::few());
    }
}

/// As [`a_few_cells`], of every way, place, operation and program that the machine has.
#[test]
fn the_whole_matrix() {
    if uvfs_testing::runs_long() && can() {
        let mut cells = cells::all();
        if let Ok(only) = std::env::var("UVFS_TEST_CELLS") {
            cells.retain(|cell| only.split(' ').all(|word| cell.to_string().contains(word)));
        }
        run_cells(&cells);
    }
}
