//! `uvfs man`: writes a manual page for the command, one for each subcommand, and one for mount(8)'s helper, from the
//! text of `--help`.

use std::path::PathBuf;
use std::process::{Command, ExitCode};

use clap::{CommandFactory, ValueHint};
use clap_mangen::roff::{bold, italic, roman};
use uvfs_cli::man::{write_page, write_pages};
use uvfs_cli::{Context, Result, beside};

use crate::{helper, options};

const EXAMPLES: &str = "\
Examples:
  uvfs man /usr/local/share/man/man1
  uvfs man . && man ./uvfs-mount.1

The page mount.fuse.uvfs(8), about lines of fstab, is written beside the others, or into man8 if the directory is called
man1.

Exit status: 0 written, 1 failed, 2 wrong usage.";

/// Write the manual pages.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// The directory for them; it is made if it is missing
    #[arg(value_hint = ValueHint::DirPath)]
    dir: PathBuf,
}

/// Runs it.
pub fn run(args: Args) -> Result<ExitCode> {
    let mut command = crate::Cli::command();
    command.build();
    write_pages(command, &args.dir)?;
    // The pages of a command of its own, where that is installed.
    let mut bench = Command::new(beside("uvfs-bench"));
    let _ = bench.arg("man").arg(&args.dir).status();
    let eight = match args.dir.file_name() {
        Some(name) if name == "man1" => args.dir.with_file_name("man8"),
        _ => args.dir.clone(),
    };
    std::fs::create_dir_all(&eight).context(|| eight.display().to_string())?;
    let line = |call, words| vec![bold(call), roman(" "), italic(words)];
    write_page(
        helper::NAME,
        "mount a directory or an XFS image by mount(8) or a line of fstab",
        &[
            line("mount -t fuse.uvfs", "SOURCE MOUNTPOINT [-o OPTIONS]"),
            line(
                helper::NAME,
                "SOURCE MOUNTPOINT [-sfnv] [-N NAMESPACE] [-o OPTIONS]",
            ),
        ],
        &format!("{}\n\n{}", helper::PAGE, options::help()),
        &eight,
    )?;
    Ok(ExitCode::SUCCESS)
}
