//! The Linux file I/O path in user space: mount, inspect and measure.
//!
//! Each subcommand is a module with `pub struct Args` (clap) and
//! `pub fn run(args: Args) -> Result<ExitCode>`. Adding one is a `mod` line and a line in
//! [`Command`].

mod bench;
mod check;
mod completions;
mod confine;
mod daemon;
mod doctor;
mod helper;
mod image;
mod man;
mod mkfs;
mod mount;
mod options;
mod repair;
mod run;
mod serve;
mod stats;
mod top;
mod umount;
mod upgrade;

use std::ffi::OsString;
use std::process::ExitCode;

use clap::{CommandFactory, Parser, Subcommand};
use uvfs_cli::{Context, Result, answer, end, json_errors, log};

use crate::image::{cat, cp, ls, stat};

const EXAMPLES: &str = "\
Examples:
  uvfs mount /srv/data /mnt        serve a directory; returns when the mount answers
  uvfs stats /mnt                  what it has done
  uvfs top /mnt                    what it is doing now
  uvfs run -- make -C /mnt/src     a program over shared memory instead of the kernel
  uvfs umount /mnt
  uvfs mkfs --from root disk.img   an XFS image of a directory, without root
  uvfs check disk.img              is an XFS file system sound?
  uvfs repair disk.img             repair it
  uvfs mount disk.img /mnt         serve an XFS image, read-only
  uvfs ls -lR disk.img /etc        look into one without mounting it
  uvfs bench wakeup --quick        measure
  uvfs doctor                      which features this machine has, and how to switch them on
  uvfs COMMAND --help              more examples and all options

Environment:
  UVFS_LOG          what to log: error (the default), warn, info, debug, trace, or a filter by
                    target such as uvfs_server=debug; on stderr, or in the system's log
                    (journalctl -t uvfs) by a mount in the background
  UVFS_LOG_FORMAT   text (the default) or json

Sizes are bytes, or a number with K, M, G, T or P (KiB to PiB) for powers of 1024, as in 65536, 64K, 1.5GiB. Durations
are seconds, or a number with us, ms, s, min, h or d, as in 2.5, 500ms, 1h.

With --json an error is one JSON object on standard error, and the exit status is the same.

Exit status:
  0    success
  1    failure; check: the file system is damaged; repair: damage is left; doctor: mounts do not work; bench compare:
       slower than allowed; cp, ls: something could not be read or written
  2    wrong usage; check, repair: they could not run
  3    check, repair: the log of the file system is dirty
  32   mount -t fuse.uvfs: the mount failed (1: wrong usage), as mount(8) says
  126  run: the program can't be executed (127: it is not there; else the exit status is the program's)";

/// The Linux file I/O path in user space.
#[derive(Parser)]
#[command(name = "uvfs", version, after_help = EXAMPLES, propagate_version = true)]
#[command(disable_help_subcommand = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

/// Declares [`Command`] and its dispatch, one line for each subcommand.
macro_rules! commands {
    ($($(#[$meta:meta])* $variant:ident => $module:ident,)*) => {
        #[derive(Subcommand)]
        #[expect(clippy::large_enum_variant, reason = "there is one value")]
        enum Command {
            $($(#[$meta])* $variant($module::Args),)*
        }

        impl Command {
            fn run(self) -> Result<ExitCode> {
                match self {
                    $(Command::$variant(args) => $module::run(args),)*
                }
            }
        }
    };
}

commands! {
    /// Serve a directory at a mount point.
    Mount => mount,
    /// Serve a directory to programs that attach through a socket, without a mount.
    Serve => serve,
    /// Run a program whose I/O on a mount goes over shared memory.
    Run => run,
    /// Unmount, and clean up after a server that died.
    Umount => umount,
    /// Have a mount served by the program that is installed now.
    Upgrade => upgrade,
    /// Show what a mount has done: requests, latency, queues.
    Stats => stats,
    /// Watch what a mount is doing, in the terminal.
    Top => top,
    /// Check an XFS image or device.
    Check => check,
    /// Repair an XFS image or device.
    Repair => repair,
    /// Make an XFS image, empty or from a directory.
    Mkfs => mkfs,
    /// List a directory of an XFS image.
    Ls => ls,
    /// Write a file of an XFS image to standard output.
    Cat => cat,
    /// Describe a file of an XFS image.
    Stat => stat,
    /// Copy out of an XFS image.
    Cp => cp,
    /// Say which features this machine has, and how to switch on the others.
    Doctor => doctor,
    /// Measure file systems side by side.
    Bench => bench,
    /// Make `mount -t fuse.uvfs` and fstab lines work.
    InstallHelper => helper,
    /// Write a shell's completions to standard output.
    Completions => completions,
    /// Write the manual pages.
    Man => man,
}

/// The command line of `uvfs run`, which is part of a program's start: describing those of all commands
/// takes longer than what it does.
#[derive(Parser)]
#[command(
    name = "uvfs",
    version,
    propagate_version = true,
    disable_help_subcommand = true
)]
struct RunCli {
    #[command(subcommand)]
    command: RunCommand,
}

#[derive(Subcommand)]
enum RunCommand {
    /// Run a program whose I/O on a mount goes over shared memory.
    Run(run::Args),
}

/// Parses the command line and runs the subcommand it names.
fn run(argv: Vec<OsString>) -> Result<ExitCode> {
    let parsed = match argv.get(1).is_some_and(|name| name == "run") {
        true => RunCli::try_parse_from(&argv).map(|cli| match cli.command {
            RunCommand::Run(args) => Command::Run(args),
        }),
        false => {
            let own = argv.iter().take_while(|word| *word != "--");
            json_errors(own.into_iter().any(|word| word == "--json"));
            log::init();
            Cli::try_parse_from(&argv).map(|cli| cli.command)
        }
    };
    match parsed {
        Ok(command) => command.run(),
        // Help and version come this way as well, with status 0.
        Err(error) => answer(error, Cli::command(), argv),
    }
}

fn main() -> ExitCode {
    let begun = upgrade::begin();
    let argv: Vec<OsString> = std::env::args_os().collect();
    let outcome = match helper::is_called(argv.first()) {
        true => {
            log::init();
            helper::called(&argv)
        }
        false => run(argv),
    };
    upgrade::end();
    end(begun.context(|| "taking over a mount".into()).and(outcome))
}
