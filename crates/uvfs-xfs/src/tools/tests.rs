use super::*;

/// A name in an image sends no control characters to the terminal.
#[test]
fn names_are_escaped() {
    assert_eq!(escape(b"plain \xc3\xa4"), "plain \u{e4}");
    assert_eq!(escape(b"a\nb\\c\x1b[1m\xff"), "a\\012b\\\\c\\033[1m\\377");
}
