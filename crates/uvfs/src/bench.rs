//! `uvfs bench`: the benchmarks, which are a command of their own.

use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::process::{Command, ExitCode};

use uvfs_cli::{Error, Result, beside};

/// Measure file systems side by side.
#[derive(clap::Args)]
#[command(disable_help_flag = true, disable_version_flag = true)]
pub struct Args {
    /// The benchmark and its options: uvfs bench --help lists them
    #[arg(
        trailing_var_arg = true,
        allow_hyphen_values = true,
        value_name = "BENCHMARK"
    )]
    arguments: Vec<OsString>,
}

/// Becomes that command.
pub fn run(args: Args) -> Result<ExitCode> {
    let program = beside("uvfs-bench");
    let error = Command::new(&program).args(args.arguments).exec();
    Err(Error::new(format!(
        "{}: {error} (cargo build --release -p uvfs-bench makes it, beside this command)",
        program.display()
    )))
}
