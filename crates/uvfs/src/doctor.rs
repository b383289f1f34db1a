//! `uvfs doctor`: says which features that uvfs uses this machine has, and how to switch on the others.

mod checks;
mod probe;

use std::fmt;
use std::io::{self, Write};
use std::process::ExitCode;

use serde::Serialize;
use serde_json::json;
use uvfs_cli::Result;

const EXAMPLES: &str = "\
Examples:
  uvfs doctor
  sudo uvfs doctor                 as root, whose mounts can do more
  uvfs doctor --json

States:
  ok       the feature works here
  off      the feature is not switched on, or only root may use it; \"do\" says
           how to get it
  missing  this kernel or this installation does not have the feature

The answers hold for the user who runs the command, because some features are
only for root. The command changes nothing on the machine. As root it mounts an
empty file system for a moment, in a mount namespace that no other process sees.

The JSON object has: ready (mounts work), and checks, each with name, state,
needed (no mount works without it), found, for, and do (null if the state is not
off). Fields and checks may be added, never removed.

Exit status: 0 mounts work, 1 mounts do not work, 2 wrong usage.";

/// Say which features this machine has, and how to switch on the others.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// As one JSON object
    #[arg(long)]
    json: bool,
}

/// Whether a feature works.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum State {
    Ok,
    Off,
    Missing,
}

impl fmt::Display for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            State::Ok => "ok",
            State::Off => "off",
            State::Missing => "missing",
        })
    }
}

/// One feature, and how this machine has it.
#[derive(Debug, Serialize)]
struct Check {
    name: &'static str,
    /// No mount works without it.
    needed: bool,
    #[serde(rename = "for")]
    good_for: &'static str,
    #[serde(flatten)]
    finding: Finding,
}

impl Check {
    fn new(name: &'static str, good_for: &'static str, finding: Finding) -> Self {
        Self {
            name,
            needed: false,
            good_for,
            finding,
        }
    }

    fn needed(self) -> Self {
        Self {
            needed: true,
            ..self
        }
    }

    fn stops_mounts(&self) -> bool {
        self.needed && self.finding.state != State::Ok
    }
}

/// The result of a check.
#[derive(Debug, Serialize)]
struct Finding {
    state: State,
    found: String,
    #[serde(rename = "do")]
    remedy: Option<String>,
}

impl Finding {
    fn new(state: State, found: &str, remedy: Option<String>) -> Self {
        Self {
            state,
            found: uvfs_cli::plain(found),
            remedy,
        }
    }

    fn ok(found: impl AsRef<str>) -> Self {
        Self::new(State::Ok, found.as_ref(), None)
    }

    fn off(found: impl AsRef<str>, remedy: impl Into<String>) -> Self {
        Self::new(State::Off, found.as_ref(), Some(remedy.into()))
    }

    fn missing(found: impl AsRef<str>) -> Self {
        Self::new(State::Missing, found.as_ref(), None)
    }
}

/// Runs it.
pub fn run(args: Args) -> Result<ExitCode> {
    let checks = checks::all();
    let lacking = checks.iter().filter(|check| check.stops_mounts());
    let lacking: Vec<_> = lacking.map(|check| check.name).collect();
    let ready = lacking.is_empty();
    match args.json {
        true => uvfs_cli::json(&json!({ "ready": ready, "checks": checks }))?,
        false => uvfs_cli::print(|out| lines(out, &checks, &lacking))?,
    }
    Ok(match ready {
        true => ExitCode::SUCCESS,
        false => ExitCode::FAILURE,
    })
}

fn lines(out: &mut dyn Write, checks: &[Check], lacking: &[&str]) -> io::Result<()> {
    for check in checks {
        let Finding {
            state,
            found,
            remedy,
        } = &check.finding;
        writeln!(out, "{state:<8} {:<20} {found}", check.name)?;
        writeln!(out, "{:<8} for: {}", "", check.good_for)?;
        if let Some(remedy) = remedy {
            writeln!(out, "{:<8} do:  {remedy}", "")?;
        }
    }
    match lacking {
        [] => writeln!(out, "\nMounts work here."),
        _ => writeln!(
            out,
            "\nMounts do not work here. They need: {}",
            lacking.join(", ")
        ),
    }
}
