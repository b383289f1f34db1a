//! The mount table, /proc/self/mountinfo (proc_pid_mountinfo(5)).

use std::ffi::OsString;
use std::io;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

/// A line of /proc/self/mountinfo.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MountLine {
    /// The mount's number, as long as it is there.
    pub id: u64,
    /// The device number of its file system, as `MAJOR:MINOR`.
    pub device: String,
    /// Where it is mounted.
    pub at: PathBuf,
    /// The options of this mount, comma separated.
    pub options: String,
    /// The type of its file system.
    pub kind: String,
    /// What is mounted, as its file system says.
    pub source: String,
    /// The options of its file system, comma separated.
    pub file_system: String,
}

impl MountLine {
    /// Reads a line; `None` if it makes no sense.
    pub fn parse(line: &[u8]) -> Option<Self> {
        let mut words = line.split(|&byte| byte == b' ');
        let text = |word: &[u8]| String::from_utf8_lossy(word).into_owned();
        let id = std::str::from_utf8(words.next()?).ok()?.parse().ok()?;
        let device = text(words.nth(1)?);
        let at = PathBuf::from(OsString::from_vec(unescape(words.nth(1)?)));
        let options = text(words.next()?);
        let mut words = words.skip_while(|word| *word != b"-").skip(1);
        let kind = text(words.next()?);
        let source = text(&unescape(words.next()?));
        let file_system = text(words.next()?);
        Some(Self {
            id,
            device,
            at,
            options,
            kind,
            source,
            file_system,
        })
    }
}

/// The mounts that this process sees, by /proc/self/mountinfo, in the order in which they were made.
///
/// # Errors
/// When /proc can't be read.
pub fn table() -> io::Result<Vec<MountLine>> {
    let table = std::fs::read("/proc/self/mountinfo")?;
    let lines = table.split(|&byte| byte == b'\n');
    Ok(lines.filter_map(MountLine::parse).collect())
}

/// The mount at `path`, the last one if there are several.
///
/// # Errors
/// When /proc can't be read.
pub fn mounted(path: &Path) -> io::Result<Option<MountLine>> {
    Ok(table()?.into_iter().rfind(|line| line.at == path))
}

/// Undoes the octal escapes of mountinfo (proc_pid_mountinfo(5)); other text stays as it is.
fn unescape(text: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(text.len());
    let mut rest = text;
    while let Some((&byte, after)) = rest.split_first() {
        let code = (byte == b'\\')
            .then(|| after.get(..3))
            .flatten()
            .and_then(|digits| std::str::from_utf8(digits).ok())
            .and_then(|digits| u8::from_str_radix(digits, 8).ok());
        match code {
            Some(code) => {
                out.push(code);
                rest = &after[3..];
            }
            None => {
                out.push(byte);
                rest = after;
            }
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Mount points with spaces in their path are found.
    #[test]
    fn mountinfo_is_unescaped() {
        assert_eq!(unescape(br"/a\040b\134c\01"), br"/a b\c\01");
        let line = br"36 35 98:0 /mnt1 /mnt\0402\134 rw,noatime master:1 - ext3 /dev/root rw";
        let expected = MountLine {
            id: 36,
            device: "98:0".into(),
            at: r"/mnt 2\".into(),
            options: "rw,noatime".into(),
            kind: "ext3".into(),
            source: "/dev/root".into(),
            file_system: "rw".into(),
        };
        assert_eq!(MountLine::parse(line), Some(expected));
        for bad in [
            "",
            "x 2 3:4 / /a rw - b c d",
            "1 2 3 4",
            "1 2 3:4 / /a rw - b c",
        ] {
            assert_eq!(MountLine::parse(bad.as_bytes()), None, "{bad}");
        }
        let proc = mounted(Path::new("/proc")).unwrap().unwrap();
        assert_eq!(proc.kind, "proc");
        assert_eq!(mounted(Path::new("/proc/self")).unwrap(), None);
    }
}
