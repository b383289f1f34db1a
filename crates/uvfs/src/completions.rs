//! `uvfs completions`: writes a shell's completions of this command line.

use std::process::ExitCode;

use clap::CommandFactory;
use clap_complete::Shell;
use uvfs_cli::{Result, printed};

const EXAMPLES: &str = "\
Examples:
  uvfs completions bash > /etc/bash_completion.d/uvfs
  uvfs completions zsh > /usr/local/share/zsh/site-functions/_uvfs
  uvfs completions fish > ~/.config/fish/completions/uvfs.fish

Exit status: 0 written, 1 failed, 2 wrong usage.";

/// Write a shell's completions to standard output.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// The shell
    shell: Shell,
}

/// Runs it.
pub fn run(args: Args) -> Result<ExitCode> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut crate::Cli::command(), "uvfs", &mut script);
    printed(std::io::Write::write_all(&mut std::io::stdout(), &script))?;
    Ok(ExitCode::SUCCESS)
}
