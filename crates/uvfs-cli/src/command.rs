//! A command line: its help, and its end.

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::Command;
use clap::error::ErrorKind;

use crate::{Error, Result, complain, notes};

/// The widest that help is, and its width where there is no terminal.
const WIDTH: usize = 100;

/// The width of the terminal that help is shown on.
fn width() -> usize {
    let terminal = rustix::termios::tcgetwinsize(std::io::stdout());
    let columns = terminal.map_or(0, |size| usize::from(size.ws_col));
    match columns {
        0 => WIDTH,
        columns => columns.clamp(40, WIDTH),
    }
}

/// The command with all notes in lines of this width, so that nothing is wrapped twice.
fn filled(command: Command, width: usize) -> Command {
    let fill = |notes: Option<&clap::builder::StyledStr>| {
        notes.map(|notes| notes::fill(&notes.to_string(), width))
    };
    let (short, long) = (
        fill(command.get_after_help()),
        fill(command.get_after_long_help()),
    );
    let names = command
        .get_subcommands()
        .map(|sub| sub.get_name().to_owned());
    let names: Vec<_> = names.collect();
    let mut command = command.term_width(width);
    if let Some(notes) = short {
        command = command.after_help(notes);
    }
    if let Some(notes) = long {
        command = command.after_long_help(notes);
    }
    for name in names {
        command = command.mut_subcommand(name, |sub| filled(sub, width));
    }
    command
}

/// Answers arguments that `command` does not run by: with help, the version, or all that is wrong with them.
///
/// # Errors
/// Wrong usage.
pub fn answer(error: clap::Error, command: Command, argv: Vec<OsString>) -> Result<ExitCode> {
    let is_help = matches!(
        error.kind(),
        ErrorKind::DisplayHelp | ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand
    );
    let error = match is_help {
        true => filled(command, width())
            .try_get_matches_from(argv)
            .err()
            .unwrap_or(error),
        false => error,
    };
    if matches!(error.exit_code(), 0) || is_help {
        let _ = error.print();
        return Ok(ExitCode::from(error.exit_code() as u8));
    }
    let text = error.render().to_string();
    let lines = text
        .lines()
        .map(str::trim_end)
        .filter(|line| !line.is_empty());
    let errors = lines.map(|line| Error::usage(line.strip_prefix("error: ").unwrap_or(line)));
    Err(Error::all(errors).unwrap_or_else(|| Error::usage("wrong usage")))
}

/// The exit status of a command, whose error is shown.
pub fn end(outcome: Result<ExitCode>) -> ExitCode {
    outcome.unwrap_or_else(|error| {
        complain(&error);
        ExitCode::from(error.code())
    })
}

/// The program of this name: beside this one, or else on the PATH.
pub fn beside(name: &str) -> PathBuf {
    let own = std::env::current_exe().ok();
    let there = own.map(|own| own.with_file_name(name));
    there
        .filter(|path| path.exists())
        .unwrap_or_else(|| name.into())
}
