use crate::read::inode::Time;

use super::*;

/// `uvfs image stat` shows right dates.
#[test]
fn times_are_shown() {
    let show = |sec, nsec| format_time(Time { sec, nsec });
    assert_eq!(show(0, 0), "1970-01-01 00:00:00.000000000 +0000");
    assert_eq!(show(-1, 999_999_999), "1969-12-31 23:59:59.999999999 +0000");
    assert_eq!(show(951_782_400, 5), "2000-02-29 00:00:00.000000005 +0000");
    assert_eq!(
        show(13_569_465_600, 0),
        "2400-01-01 00:00:00.000000000 +0000"
    );
    assert_eq!(
        show(-2_147_483_648, 0),
        "1901-12-13 20:45:52.000000000 +0000"
    );
}

/// `uvfs image ls` shows modes as ls(1) does.
#[test]
fn modes_are_shown() {
    assert_eq!(mode_string(0o100644), "-rw-r--r--");
    assert_eq!(mode_string(0o047777), "drwsrwsrwt");
    assert_eq!(mode_string(0o127000), "l--S--S--T");
}

/// A name in an image sends no control characters to the terminal.
#[test]
fn names_are_escaped() {
    assert_eq!(escape(b"plain \xc3\xa4"), "plain \u{e4}");
    assert_eq!(escape(b"a\nb\\c\x1b[1m\xff"), "a\\012b\\\\c\\033[1m\\377");
}
