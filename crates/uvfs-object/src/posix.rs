//! Types, modes, owners and times that user metadata gives a file, by the names that s3fs, rclone and GeeseFS use.

use std::collections::HashMap;
use std::str::FromStr;

use rustix::fs::FileType;

/// Seconds and nanoseconds since 1970.
type Time = (i64, u32);

/// Of values no more is read. All that mean something are shorter.
const LONGEST: usize = 64;
/// The years 1 to 9999. Programs fail to compute with others.
const SECONDS: std::ops::RangeInclusive<i64> = -62_135_596_800..=253_402_300_799;

/// What the metadata of an object says; `None` for what it is silent on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Posix {
    /// A type other than that of a file or directory, with the number of a device.
    pub(crate) special: Option<(FileType, u32)>,
    /// Without the type.
    pub(crate) mode: Option<u32>,
    pub(crate) uid: Option<u32>,
    pub(crate) gid: Option<u32>,
    pub(crate) mtime: Option<Time>,
    pub(crate) atime: Option<Time>,
    pub(crate) ctime: Option<Time>,
}

impl Posix {
    /// Reads metadata, a value by its name. What can't be understood counts as missing: the bucket may be anyone's.
    pub(crate) fn new<'a>(value: impl Fn(&str) -> Option<&'a str>) -> Self {
        let value = |name| value(name).filter(|value| value.len() <= LONGEST);
        let number = |name| number(value(name)?);
        // All ones means "leave it" to chown(2).
        let owner = |name| number(name).filter(|id| *id != u32::MAX);
        let time = |name| time(value(name)?);
        let mode = value("mode").and_then(mode);
        let special = mode.and_then(|mode| match FileType::from_raw_mode(mode) {
            kind @ (FileType::CharacterDevice | FileType::BlockDevice) => {
                Some((kind, number("rdev").unwrap_or(0)))
            }
            kind @ (FileType::Symlink | FileType::Fifo | FileType::Socket) => Some((kind, 0)),
            _ => None,
        });
        Self {
            special,
            mode: mode.map(|mode| mode & 0o7777),
            uid: owner("uid"),
            gid: owner("gid"),
            mtime: time("mtime"),
            atime: time("atime"),
            ctime: time("ctime"),
        }
    }
}

impl Posix {
    /// The metadata of a file with these attributes, or of a directory, as s3fs writes it.
    pub(crate) fn words(&self, kind: FileType) -> HashMap<String, String> {
        let (kind, rdev) = self.special.unwrap_or((kind, 0));
        let mode = self.mode.map(|mode| kind.as_raw_mode() | mode);
        let number = |value: Option<u32>| value.map(|value| value.to_string());
        let time = |(seconds, nanos): Time| match (seconds, nanos) {
            // The fraction of what is before 1970 counts away from it.
            (..0, 1..) if seconds == -1 => format!("-0.{:09}", 1_000_000_000 - nanos),
            (..0, 1..) => format!("{}.{:09}", seconds + 1, 1_000_000_000 - nanos),
            _ => format!("{seconds}.{nanos:09}"),
        };
        let words = [
            ("mode", number(mode)),
            ("uid", number(self.uid)),
            ("gid", number(self.gid)),
            ("mtime", self.mtime.map(time)),
            ("atime", self.atime.map(time)),
            ("rdev", number(Some(rdev).filter(|rdev| *rdev != 0))),
        ];
        let words = words.into_iter();
        words
            .filter_map(|(name, value)| Some((name.to_owned(), value?)))
            .collect()
    }
}

/// A number as strtoul(3) has it with base 0.
fn number(text: &str) -> Option<u32> {
    match text.strip_prefix('0') {
        None => text.parse().ok(),
        Some("") => Some(0),
        Some(rest) => match rest.strip_prefix(['x', 'X']) {
            Some(hex) => u32::from_str_radix(hex, 16).ok(),
            None => u32::from_str_radix(rest, 8).ok(),
        },
    }
}

/// A mode with its type. s3fs writes it as a decimal number (33188), rclone as an octal one (100644). Of files, directories
/// and links, which have all bits, only the mode of a link (41471) is that of something else, too: of a directory that is
/// as good as never met.
fn mode(text: &str) -> Option<u32> {
    const LINK: u32 = 0o120_777;
    let typed = |mode: &u32| {
        let known = FileType::from_raw_mode(*mode) != FileType::Unknown;
        known && *mode <= 0o177_777
    };
    let link = |mode: &u32| FileType::from_raw_mode(*mode) == FileType::Symlink;
    let decimal = number(text);
    let octal = u32::from_str_radix(text, 8).ok();
    let with_type = decimal.filter(|mode| typed(mode) && (!link(mode) || *mode == LINK));
    let with_type = with_type.or(octal.filter(typed));
    with_type.or(decimal.filter(|mode| *mode <= 0o7777))
}

/// A decimal number of seconds (s3fs, rclone), or a time as RFC 3339 has it (rclone).
fn time(text: &str) -> Option<Time> {
    let (whole, fraction) = text.split_once('.').unwrap_or((text, ""));
    let is_number = fraction.bytes().all(|byte| byte.is_ascii_digit());
    let time = match whole.parse::<i64>() {
        Ok(seconds) if is_number => {
            let digits = &fraction[..fraction.len().min(9)];
            let nanos = format!("{digits:0<9}").parse().ok()?;
            match whole.starts_with('-') && nanos > 0 {
                true => (seconds.checked_sub(1)?, 1_000_000_000 - nanos),
                false => (seconds, nanos),
            }
        }
        _ => {
            let time = opendal::raw::Timestamp::from_str(text).ok()?;
            uvfs_server::fs::timespec(time.into())
        }
    };
    SECONDS.contains(&time.0).then_some(time)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn read(pairs: &[(&str, &'static str)]) -> Posix {
        Posix::new(|name| Some(pairs.iter().find(|(has, _)| *has == name)?.1))
    }

    #[test]
    fn modes_of_all_writers_are_read() {
        for (text, expected) in [
            // s3fs: a file, a directory, a link, a FIFO.
            ("33188", Some(0o100_644)),
            ("16877", Some(0o040_755)),
            ("41471", Some(0o120_777)),
            ("4516", Some(0o010_644)),
            // rclone.
            ("100644", Some(0o100_644)),
            ("100755", Some(0o100_755)),
            ("0100664", Some(0o100_664)),
            ("40755", Some(0o040_755)),
            ("120777", Some(0o120_777)),
            // Permissions alone.
            ("0640", Some(0o640)),
            ("420", Some(0o644)),
            ("0", Some(0)),
            ("", None),
            ("-1", None),
            ("rw-r--r--", None),
            ("4294967295", None),
            ("1100644", None),
        ] {
            assert_eq!(mode(text), expected, "{text:?}");
        }
        let all = [0o040_000, 0o100_000].map(|kind| kind..=kind | 0o7777);
        for wanted in all.into_iter().flatten().chain([0o120_777]) {
            assert_eq!(mode(&wanted.to_string()), Some(wanted));
            let octal = format!("{wanted:o}");
            assert!(mode(&octal) == Some(wanted) || octal == "41471", "{octal}");
        }
    }

    #[test]
    fn times_of_all_writers_are_read() {
        for (text, expected) in [
            ("1354040105", Some((1_354_040_105, 0))),
            ("1354040105.123456789", Some((1_354_040_105, 123_456_789))),
            ("1354040105.5", Some((1_354_040_105, 500_000_000))),
            (
                "1354040105.1234567891234",
                Some((1_354_040_105, 123_456_789)),
            ),
            ("-1.25", Some((-2, 750_000_000))),
            ("-0.25", Some((-1, 750_000_000))),
            ("2012-11-27T18:15:05.5Z", Some((1_354_040_105, 500_000_000))),
            ("2012-11-27T20:15:05+02:00", Some((1_354_040_105, 0))),
            ("253402300800", None),
            ("99999999999999999999", None),
            ("1.-5", None),
            ("", None),
            ("yesterday", None),
        ] {
            assert_eq!(time(text), expected, "{text:?}");
        }
    }

    #[test]
    fn special_files_have_a_type() {
        let device = read(&[("mode", "8612"), ("rdev", "0x103"), ("uid", "7")]);
        assert_eq!(device.special, Some((FileType::CharacterDevice, 259)));
        assert_eq!((device.mode, device.uid), (Some(0o644), Some(7)));
        assert_eq!(read(&[("mode", "33188"), ("rdev", "259")]).special, None);
        let link = read(&[("mode", "41471"), ("gid", "-1"), ("uid", "4294967295")]);
        assert_eq!(link.special, Some((FileType::Symlink, 0)));
        assert_eq!((link.uid, link.gid), (None, None));
        assert_eq!(read(&[]), Posix::default());
    }

    proptest! {
        #[test]
        fn what_is_written_is_read(mode in 0..=0o7777_u32, uid in 0..u32::MAX, time in SECONDS, nanos in 0..1_000_000_000_u32) {
            let kinds = [None, Some((FileType::Symlink, 0)), Some((FileType::CharacterDevice, 259))];
            for special in kinds {
                // The mode of a link is always the same.
                let mode = if special == Some((FileType::Symlink, 0)) { 0o777 } else { mode };
                let posix = Posix { special, mode: Some(mode), uid: Some(uid), gid: Some(7), mtime: Some((time, nanos)), atime: Some((7, nanos)), ..Posix::default() };
                let words = posix.words(FileType::RegularFile);
                let read = Posix::new(|name| words.get(name).map(String::as_str));
                prop_assert_eq!(read, posix);
            }
        }

        #[test]
        fn any_value_is_read_without_a_panic(value in "[-+.:0-9TZx ]{0,80}|.{0,80}") {
            let posix = Posix::new(|_| Some(&value));
            prop_assert!(posix.mode.is_none_or(|mode| mode <= 0o7777));
            for time in [posix.mtime, posix.atime, posix.ctime].into_iter().flatten() {
                prop_assert!(SECONDS.contains(&time.0) && time.1 < 1_000_000_000);
            }
        }
    }
}
