//! Text for people: what reaches a terminal.

use std::borrow::Cow;
use std::io::{self, Write};

/// The text without control characters: each of their bytes becomes `\` and three octal digits. A name, of a file of
/// the host, of an image or of an archive, may hold any, and a terminal would obey them.
///
/// ```
/// assert_eq!(uvfs_cli::printable("a\x1b[31m\n"), r"a\033[31m\012");
/// ```
pub fn printable(text: &str) -> Cow<'_, str> {
    if !text.contains(char::is_control) {
        return Cow::Borrowed(text);
    }
    let mut safe = String::with_capacity(text.len() + 16);
    for c in text.chars() {
        match c.is_control() {
            true => (c.encode_utf8(&mut [0; 4]).bytes())
                .for_each(|byte| safe.push_str(&format!("\\{byte:03o}"))),
            false => safe.push(c),
        }
    }
    Cow::Owned(safe)
}

/// Writes text for people, line by line: as [`printable`], but for the ends of lines and tabs, which are the writer's.
/// A name that is printed has to be escaped on its own if it may hold these.
#[derive(Debug)]
pub struct Printable<W>(pub W);

impl<W: Write> Write for Printable<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let special = |byte: &u8| (*byte < b' ' || *byte >= 0x7f) && !matches!(byte, b'\n' | b'\t');
        if !bytes.iter().any(special) {
            self.0.write_all(bytes)?;
            return Ok(bytes.len());
        }
        let mut safe = String::with_capacity(bytes.len() + 16);
        for c in String::from_utf8_lossy(bytes).chars() {
            match c {
                '\n' | '\t' => safe.push(c),
                c => safe += &printable(c.encode_utf8(&mut [0; 4])),
            }
        }
        self.0.write_all(safe.as_bytes())?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

/// An error's words as people read them: without the number that the standard library puts behind each error of the
/// operating system, and on one line.
///
/// ```
/// assert_eq!(uvfs_cli::plain("x: No such file or directory (os error 2)"), "x: No such file or directory");
/// ```
pub fn plain(message: &str) -> String {
    const MARK: &str = " (os error ";
    let mut plain = String::with_capacity(message.len());
    let mut rest = message;
    while let Some(at) = rest.find(MARK) {
        let (before, behind) = rest.split_at(at);
        plain.push_str(before);
        let number = &behind[MARK.len()..];
        let end = number.find(')');
        let digits = end.map_or("", |end| &number[..end]);
        rest = match digits.parse::<i32>() {
            Ok(_) => &number[digits.len() + 1..],
            Err(_) => {
                plain.push_str(MARK);
                number
            }
        };
    }
    plain.push_str(rest);
    printable(&plain).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_control_character_is_left() {
        assert_eq!(printable("plain ünïcode"), "plain ünïcode");
        assert_eq!(printable("\u{9b}31m\u{7f}"), r"\302\23331m\177");
        // Escaping twice, as on the way through another process, changes nothing.
        assert_eq!(printable(&printable("\x1b]0;x\x07")), r"\033]0;x\007");
        let mut out = Printable(Vec::new());
        out.write_all(b"a\tb\n\x1b[2J\xff\xc2\x9b\r\n").unwrap();
        assert_eq!(
            String::from_utf8(out.0).unwrap(),
            "a\tb\n\\033[2J\u{fffd}\\302\\233\\015\n"
        );
    }

    #[test]
    fn numbers_of_errors_go() {
        let error = io::Error::from_raw_os_error(2);
        assert!(error.to_string().contains("os error"));
        assert_eq!(
            plain(&format!("a: {error}: b")),
            "a: No such file or directory: b"
        );
        for odd in [
            "x (os error )",
            "x (os error two)",
            "x (os error 2",
            " (os error ",
        ] {
            assert_eq!(plain(odd), odd);
        }
        assert_eq!(plain("a\nuvfs: b"), r"a\012uvfs: b");
    }
}
