//! Manual pages, from the text of `--help`.

use std::io;
use std::path::Path;

use clap::{Arg, Command};
use clap_mangen::Man;
use clap_mangen::roff::{Inline, Roff, bold, italic, roman};

use crate::notes::{self, Block};
use crate::{Context, Result};

/// A page of a command without its notes, which clap_mangen would fill like prose.
fn page_of(command: &Command) -> Man {
    let command = command
        .clone()
        .after_help(None::<&str>)
        .after_long_help(None::<&str>);
    Man::new(command)
        .source(concat!("uvfs ", env!("CARGO_PKG_VERSION")))
        .manual("uvfs")
}

/// Writes the page of a command that was built ([`Command::build`]), and those of its subcommands, into a directory,
/// which is made if it is missing.
///
/// # Errors
/// When a page can't be written.
pub fn write_pages(command: Command, dir: &Path) -> Result<()> {
    std::fs::create_dir_all(dir).context(|| dir.display().to_string())?;
    for sub in command.get_subcommands().filter(|sub| !sub.is_hide_set()) {
        write_pages(sub.clone(), dir)?;
    }
    let notes = (command.get_after_long_help())
        .or(command.get_after_help())
        .map(ToString::to_string)
        .unwrap_or_default();
    write(
        &page_of(&command),
        &[synopsis(&command)],
        &notes,
        dir,
        |man, page| {
            man.render_description_section(page)?;
            man.render_options_section(page)?;
            match command.has_subcommands() {
                true => man.render_subcommands_section(page),
                false => Ok(()),
            }
        },
    )
}

/// Writes a page: its synopsis by lines, the sections that `between` renders, and the notes.
fn write(
    man: &Man,
    synopsis: &[Vec<Inline>],
    notes: &str,
    dir: &Path,
    between: impl FnOnce(&Man, &mut Vec<u8>) -> io::Result<()>,
) -> Result<()> {
    let path = dir.join(man.get_filename());
    let page = || -> io::Result<Vec<u8>> {
        let mut page = Vec::new();
        man.render_title(&mut page)?;
        man.render_name_section(&mut page)?;
        let mut roff = Roff::default();
        roff.control("SH", ["SYNOPSIS"]);
        for (number, line) in synopsis.iter().enumerate() {
            if number > 0 {
                roff.control("br", []);
            }
            roff.text(line.clone());
        }
        roff.to_writer(&mut page)?;
        between(man, &mut page)?;
        extra(notes).to_writer(&mut page)?;
        Ok(page)
    };
    page()
        .and_then(|page| std::fs::write(&path, page))
        .context(|| path.display().to_string())
}

/// A page that is no command's, in section 8: what the program is for, how it is called, and more in the form of the notes
/// of a command's help.
///
/// # Errors
/// When the page can't be written.
pub fn write_page(
    name: &'static str,
    about: &'static str,
    synopsis: &[Vec<Inline>],
    notes: &str,
    dir: &Path,
) -> Result<()> {
    let man = page_of(&Command::new(name).about(about)).section("8");
    write(&man, synopsis, notes, dir, |_, _| Ok(()))
}

/// The synopsis of a command: each option with the name of its value.
fn synopsis(command: &Command) -> Vec<Inline> {
    let mut line = vec![bold(command.get_bin_name().unwrap_or(command.get_name()))];
    let asks = |arg: &Arg| ["help", "version"].contains(&arg.get_id().as_str());
    let shown = |arg: &&Arg| !arg.is_hide_set() && !asks(arg);
    for arg in command.get_arguments().filter(shown) {
        let (open, close) = match arg.is_required_set() {
            true => (" ", ""),
            false => (" [", "]"),
        };
        line.push(roman(open));
        let names = [
            arg.get_short().map(|short| format!("-{short}")),
            arg.get_long().map(|long| format!("--{long}")),
        ];
        let names: Vec<_> = names.into_iter().flatten().collect();
        if !names.is_empty() {
            line.push(bold(names.join("|")));
        }
        if arg.is_positional() || arg.get_action().takes_values() {
            let id = arg.get_id().as_str().to_uppercase();
            let value = arg.get_value_names().map(|names| {
                let names: Vec<_> = names.iter().map(|name| name.as_str()).collect();
                names.join(" ")
            });
            let space = if names.is_empty() { "" } else { " " };
            line.extend([roman(space), italic(value.unwrap_or(id))]);
            let many = arg
                .get_num_args()
                .is_some_and(|range| range.max_values() > 1);
            let repeated =
                matches!(arg.get_action(), clap::ArgAction::Append) && arg.is_positional();
            if many || repeated {
                line.push(roman("..."));
            }
        }
        line.push(roman(close));
    }
    if command.has_subcommands() {
        line.extend([roman(" "), italic("COMMAND")]);
    }
    line
}

/// The notes as sections.
fn extra(notes: &str) -> Roff {
    let mut roff = Roff::default();
    // Words of options are to be copied as they are.
    roff.control("nh", []);
    let mut section = String::new();
    let mut begin = |roff: &mut Roff, title: &str| {
        if section != title {
            roff.control("SH", [title.to_uppercase().as_str()]);
            section = title.to_owned();
        }
    };
    for block in notes::read(notes) {
        match block {
            Block::Gap => {}
            Block::Title(title) => {
                let (title, aside) = title.split_once(" (").unwrap_or((title.as_str(), ""));
                begin(&mut roff, title);
                if !aside.is_empty() {
                    roff.text([roman(format!("({aside}"))]);
                }
            }
            Block::Prose(text) => {
                let status = text.strip_prefix("Exit status: ");
                begin(
                    &mut roff,
                    if status.is_some() {
                        "Exit status"
                    } else {
                        "Notes"
                    },
                );
                roff.control("PP", []);
                roff.text([roman(status.unwrap_or(&text))]);
            }
            // An example.
            Block::Entry(term, meaning) if meaning.is_empty() => {
                roff.control("PP", []);
                roff.control("nf", []);
                roff.text([roman(format!("  {term}"))]);
                roff.control("fi", []);
            }
            Block::Entry(term, meaning) => {
                roff.control("TP", []);
                roff.text([bold(term)]);
                roff.text([roman(meaning)]);
            }
        }
    }
    roff
}
