//! `uvfs man`: writes a manual page for the command and one for each subcommand, from the text of `--help`.

use std::io;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::CommandFactory;
use clap_mangen::Man;
use clap_mangen::roff::{Roff, roman};
use uvfs_cli::{Context, Result};

const EXAMPLES: &str = "\
Examples:
  uvfs man /usr/local/share/man/man1
  uvfs man . && man ./uvfs-mount.1

Exit status: 0 written, 1 failed, 2 wrong usage.";

/// Write the manual pages.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// The directory for them; it is made if it is missing
    dir: PathBuf,
}

/// Runs it.
pub fn run(args: Args) -> Result<ExitCode> {
    let name = || args.dir.display().to_string();
    std::fs::create_dir_all(&args.dir).context(name)?;
    let mut command = crate::Cli::command();
    command.build();
    write_pages(command, &args.dir)?;
    Ok(ExitCode::SUCCESS)
}

/// Writes the page of a command, and those of its subcommands.
fn write_pages(command: clap::Command, dir: &Path) -> Result<()> {
    for sub in command.get_subcommands().filter(|sub| !sub.is_hide_set()) {
        write_pages(sub.clone(), dir)?;
    }
    let notes = command
        .get_after_long_help()
        .or(command.get_after_help())
        .map(ToString::to_string)
        .unwrap_or_default();
    // clap_mangen would put the notes into one section and fill their tables like prose.
    let man = Man::new(
        command
            .after_help(None::<&str>)
            .after_long_help(None::<&str>),
    )
    .source(concat!("uvfs ", env!("CARGO_PKG_VERSION")))
    .manual("uvfs");
    let path = dir.join(man.get_filename());
    page(&man, &notes)
        .and_then(|page| std::fs::write(&path, page))
        .context(|| path.display().to_string())
}

fn page(man: &Man, notes: &str) -> io::Result<Vec<u8>> {
    let mut page = Vec::new();
    man.render(&mut page)?;
    let mut roff = Roff::default();
    for (title, text) in sections(notes) {
        roff.control("SH", [title.to_uppercase().as_str()]);
        for paragraph in text.split("\n\n") {
            roff.control("PP", []);
            // Indented lines are tables or commands.
            let verbatim = paragraph.lines().any(|line| line.starts_with("  "));
            if verbatim {
                roff.control("nf", []);
            }
            for line in paragraph.lines() {
                roff.text([roman(line)]);
            }
            if verbatim {
                roff.control("fi", []);
            }
        }
    }
    roff.to_writer(&mut page)?;
    Ok(page)
}

/// Splits a command's notes into sections: titles and texts. A section begins with `Exit status:`, or with a
/// line that ends in a colon before an indented one; other paragraphs are in "Notes".
fn sections(notes: &str) -> Vec<(String, String)> {
    let mut sections: Vec<(String, String)> = Vec::new();
    for paragraph in notes.split("\n\n").filter(|text| !text.trim().is_empty()) {
        let (first, rest) = paragraph.split_once('\n').unwrap_or((paragraph, ""));
        if let Some(text) = paragraph.strip_prefix("Exit status: ") {
            sections.push(("Exit status".into(), text.into()));
        } else if let Some(title) = first.strip_suffix(':')
            && rest.starts_with("  ")
        {
            let (title, aside) = title.split_once(" (").unwrap_or((title, ""));
            let aside = match aside.is_empty() {
                true => String::new(),
                false => format!("({aside}\n\n"),
            };
            sections.push((title.into(), format!("{aside}{rest}")));
        } else {
            match sections.last_mut() {
                Some((title, text)) if title == "Notes" => *text += &format!("\n\n{paragraph}"),
                _ => sections.push(("Notes".into(), paragraph.into())),
            }
        }
    }
    sections
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Man pages would lack sections of the commands' help.
    #[test]
    fn notes_become_sections() {
        let notes = "Options (-o, one):\n  ro  read\n\nExamples:\n  uvfs x\n\nOne.\nTwo.\n\nThree.\n\n\
            Exit status: 0 done.";
        let expected = [
            ("Options", "(-o, one)\n\n  ro  read"),
            ("Examples", "  uvfs x"),
            ("Notes", "One.\nTwo.\n\nThree."),
            ("Exit status", "0 done."),
        ];
        let expected = expected.map(|(title, text)| (title.to_owned(), text.to_owned()));
        assert_eq!(sections(notes), expected);
        assert_eq!(sections(""), []);
    }
}
