//! The notes behind the options in a command's help: read once, shown at the terminal's width or as a manual page.

/// A part of the notes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Block {
    /// The line before a table or examples, without its colon.
    Title(String),
    /// Sentences.
    Prose(String),
    /// A line of a table: a term and what it means; or an example, with an empty meaning.
    Entry(String, String),
    /// An empty line.
    Gap,
}

fn indent(line: &str) -> usize {
    line.len() - line.trim_start().len()
}

/// Reads notes: paragraphs, and tables whose lines are indented by two. The meaning of a term stands behind two
/// spaces, or in the lines below, indented by more.
pub fn read(notes: &str) -> Vec<Block> {
    let mut blocks: Vec<Block> = Vec::new();
    let lines: Vec<&str> = notes.lines().collect();
    for (number, line) in lines.iter().enumerate() {
        let text = line.trim();
        let below = lines.get(number + 1).is_some_and(|next| indent(next) >= 2);
        match (text.is_empty(), indent(line), blocks.last_mut()) {
            (true, _, _) => blocks.push(Block::Gap),
            (_, 0, _) if text.ends_with(':') && below => {
                blocks.push(Block::Title(text.trim_end_matches(':').into()));
            }
            (_, 0, Some(Block::Prose(prose))) => *prose += &format!(" {text}"),
            (_, 0, _) => blocks.push(Block::Prose(text.into())),
            (_, 3.., Some(Block::Entry(_, meaning))) => {
                if !meaning.is_empty() {
                    meaning.push(' ');
                }
                meaning.push_str(text);
            }
            _ => {
                let (term, meaning) = text.split_once("  ").unwrap_or((text, ""));
                blocks.push(Block::Entry(term.into(), meaning.trim().into()));
            }
        }
    }
    blocks
}

/// Breaks text into lines of at most `width`, all but the first indented.
fn wrap(out: &mut String, text: &str, mut column: usize, indent: usize, width: usize) {
    let mut first = true;
    for word in text.split_whitespace() {
        let len = word.chars().count();
        if !first && column + 1 + len > width {
            out.push('\n');
            out.extend(std::iter::repeat_n(' ', indent));
            column = indent;
        } else if !first {
            out.push(' ');
            column += 1;
        }
        out.push_str(word);
        column += len;
        first = false;
    }
    out.push('\n');
}

/// The column of what the terms of a table mean: behind all of them that are not long.
fn column(table: &[Block], width: usize) -> usize {
    let terms = table.iter().map_while(|block| match block {
        Block::Entry(term, meaning) => Some((term.chars().count(), meaning.is_empty())),
        _ => None,
    });
    let lens = terms.filter(|(len, alone)| !alone && len + 4 <= width / 3);
    lens.map(|(len, _)| len + 4).max().unwrap_or(8)
}

/// The notes in lines of at most `width`, where words allow.
pub fn fill(notes: &str, width: usize) -> String {
    let blocks = read(notes);
    let mut out = String::new();
    let mut at = None;
    for (number, block) in blocks.iter().enumerate() {
        match block {
            Block::Gap => out.push('\n'),
            Block::Title(title) => wrap(&mut out, &format!("{title}:"), 0, 0, width),
            Block::Prose(text) => wrap(&mut out, text, 0, 0, width),
            Block::Entry(term, meaning) if meaning.is_empty() => {
                out.push_str(&format!("  {term}\n"));
            }
            Block::Entry(term, meaning) => {
                let column = *at.get_or_insert_with(|| column(&blocks[number..], width));
                out.push_str("  ");
                let len = term.chars().count();
                if len + 4 <= column {
                    out.push_str(&format!("{term:<pad$}", pad = column - 2));
                } else {
                    wrap(&mut out, term, 2, 2, width);
                    out.extend(std::iter::repeat_n(' ', column));
                }
                wrap(&mut out, meaning, column, column, width);
            }
        }
        if !matches!(block, Block::Entry(..)) {
            at = None;
        }
    }
    out.trim_end().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOTES: &str = "\
Options (-o, one):
  ro, rw                     read-only;
                             read-write
  a_word_that_is_much_longer_than_the_others
                             as in mount(8), and its opposite
Examples:
  uvfs x

One.
Two.

Exit status: 0 done.";

    #[test]
    fn notes_are_read() {
        let text = |text: &str| text.to_owned();
        let expected = [
            Block::Title(text("Options (-o, one)")),
            Block::Entry(text("ro, rw"), text("read-only; read-write")),
            Block::Entry(
                text("a_word_that_is_much_longer_than_the_others"),
                text("as in mount(8), and its opposite"),
            ),
            Block::Title(text("Examples")),
            Block::Entry(text("uvfs x"), text("")),
            Block::Gap,
            Block::Prose(text("One. Two.")),
            Block::Gap,
            Block::Prose(text("Exit status: 0 done.")),
        ];
        assert_eq!(read(NOTES), expected);
        assert_eq!(read(""), []);
    }

    /// No line is longer than the terminal is wide.
    #[test]
    fn lines_are_as_long_as_the_terminal_is_wide() {
        let words = |text: &str| {
            text.split_whitespace()
                .map(str::to_owned)
                .collect::<Vec<_>>()
        };
        for width in [44, 60, 80, 100, 200] {
            let filled = fill(NOTES, width);
            assert!(
                filled.lines().all(|line| line.len() <= width),
                "{width}: {filled}"
            );
            assert_eq!(words(&filled), words(NOTES), "{width}");
        }
        assert!(fill(NOTES, 100).contains("  ro, rw  read-only; read-write\n"));
        assert!(fill(NOTES, 100).contains("One. Two."));
    }
}
