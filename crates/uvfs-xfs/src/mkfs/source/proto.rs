//! Prototype files as a source (mkfs.xfs(8), `-p`): words that name each file, its mode, owner and group, and where its
//! contents are.

use super::tree::{Body, Inode, ROOT, Refused, Tree};
use super::{Meta, Root, Time, invalid};
use crate::mkfs::MkfsError;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// The words of a prototype file: apart by white space, without comments, which begin with a colon.
struct Words<'t> {
    text: &'t [u8],
    /// The line of the last word.
    line: usize,
}

impl<'t> Words<'t> {
    fn skip(&mut self, end: impl Fn(u8) -> bool) -> &'t [u8] {
        let n = self.text.iter().position(|b| end(*b));
        let (skipped, rest) = self.text.split_at(n.unwrap_or(self.text.len()));
        self.text = rest;
        self.line += skipped.iter().filter(|b| **b == b'\n').count();
        skipped
    }
}

impl<'t> Iterator for Words<'t> {
    type Item = &'t [u8];

    fn next(&mut self) -> Option<&'t [u8]> {
        let blank = |b: u8| b.is_ascii_whitespace() || b == 0;
        loop {
            self.skip(|b| !blank(b));
            if self.text.first() != Some(&b':') {
                break;
            }
            self.skip(|b| b == b'\n');
        }
        let word = self.skip(blank);
        (!word.is_empty()).then_some(word)
    }
}

/// Reads a prototype file. All files get `time`, as their own times do not count. `spaces`: slashes in names stand for
/// spaces.
///
/// # Errors
/// [`MkfsError::Source`], which names the prototype's line, or the file that contents come from.
pub fn read(file: &Path, spaces: bool, time: Time) -> Result<Root, MkfsError> {
    let text = fs::read(file);
    let text = text.map_err(|e| MkfsError::source(file.into(), "reading it", e))?;
    let mut words = Words {
        text: &text,
        line: 1,
    };
    let made = build(&mut words, file, spaces, time);
    made.map_err(|e| match e {
        Failure::Wrong(why) => {
            let mut path = file.as_os_str().to_owned();
            path.push(format!(":{}", words.line));
            MkfsError::source(path.into(), "reading the prototype", invalid(why))
        }
        Failure::Other(e) => e,
    })
}

enum Failure {
    Wrong(String),
    Other(MkfsError),
}

impl From<&str> for Failure {
    fn from(why: &str) -> Failure {
        Failure::Wrong(why.into())
    }
}

impl From<Refused> for Failure {
    fn from(why: Refused) -> Failure {
        match why {
            Refused::Unfit(why) => why.into(),
            other => Failure::Other(other.of(PathBuf::new())),
        }
    }
}

impl From<MkfsError> for Failure {
    fn from(e: MkfsError) -> Failure {
        Failure::Other(e)
    }
}

fn build(words: &mut Words<'_>, file: &Path, spaces: bool, time: Time) -> Result<Root, Failure> {
    // The tree has no contents of its own, so its temporary files may be anywhere.
    let mut tree = Tree::new(&std::env::temp_dir(), false, None)?;
    // A name and two numbers that have had no meaning for long.
    word(words)?;
    for _ in 0..2 {
        number(words)?;
    }
    let root = described(words, file, time)?;
    if !root.meta.is_dir() {
        return Err("the root has to be a directory".into());
    }
    tree.describe(root);
    let mut open = vec![ROOT];
    while let Some(dir) = open.last().copied() {
        let name = match words.next() {
            None => break,
            Some(b"$") => {
                open.pop();
                continue;
            }
            Some(name) => name,
        };
        let name: Vec<u8> = name
            .iter()
            .map(|b| if spaces && *b == b'/' { b' ' } else { *b })
            .collect();
        if name.contains(&b'/') || name.len() > 255 || name == b"." || name == b".." {
            let name = String::from_utf8_lossy(&name);
            return Err(Failure::Wrong(format!("{name} cannot be a name of a file")));
        }
        let made = described(words, file, time)?;
        if tree.has(dir, &name)? {
            let name = String::from_utf8_lossy(&name);
            return Err(Failure::Wrong(format!("the directory has {name} already")));
        }
        let number = tree.put(dir, &name, &made)?;
        if made.meta.is_dir() {
            open.push(number);
        }
    }
    Ok(tree.finish()?.root())
}

/// What follows a name.
fn described(words: &mut Words<'_>, file: &Path, time: Time) -> Result<Inode, Failure> {
    let format = "six characters for type and mode are expected, such as ---644 or d-g755";
    let [kind, user, group, octal @ ..] = word(words)? else {
        return Err(format.into());
    };
    let mut mode = 0;
    for digit in octal {
        mode = mode << 3 | u16::from(digit.wrapping_sub(b'0'));
    }
    let digits = octal.len() == 3 && octal.iter().all(|d| (b'0'..=b'7').contains(d));
    mode |= match (user, group) {
        (b'-', b'-') => 0,
        (b'u', b'-') => 0o4000,
        (b'-', b'g') => 0o2000,
        (b'u', b'g') => 0o6000,
        _ => return Err(format.into()),
    };
    if !digits {
        return Err(format.into());
    }
    let mut meta = Meta {
        uid: number(words)?,
        gid: number(words)?,
        ..Meta::directory(time)
    };
    let (kind, body) = match kind {
        b'd' => (0o040_000, Body::Directory),
        b'-' => {
            let at = PathBuf::from(std::ffi::OsStr::from_bytes(word(words)?));
            let stat = fs::metadata(&at);
            let stat = stat.map_err(|e| MkfsError::source(at.clone(), "stat", e))?;
            if !stat.is_file() {
                return Err(MkfsError::unfit(at, "contents come from regular files only").into());
            }
            meta.size = stat.len();
            (0o100_000, Body::Host(at))
        }
        b'l' => {
            let target = word(words)?;
            meta.size = target.len() as u64;
            (0o120_000, Body::Symlink(target.into()))
        }
        b'b' | b'c' => {
            meta.rdev = (number(words)?, number(words)?);
            let kind = if *kind == b'b' { 0o060_000 } else { 0o020_000 };
            (kind, Body::Special)
        }
        b'p' => (0o010_000, Body::Special),
        b'r' => {
            let why = "files of space that is only reserved (r) cannot be made";
            return Err(MkfsError::unfit(file.into(), why).into());
        }
        _ => return Err(format.into()),
    };
    meta.mode = kind | mode;
    Ok(Inode {
        meta,
        attrs: Vec::new(),
        body,
    })
}

fn word<'t>(words: &mut Words<'t>) -> Result<&'t [u8], Failure> {
    words.next().ok_or("it ends too early".into())
}

/// A number as strtol(3) reads it with any base.
fn number(words: &mut Words<'_>) -> Result<u32, Failure> {
    let word = String::from_utf8_lossy(word(words)?);
    let parsed = match (word.strip_prefix("0x"), word.strip_prefix('0')) {
        (Some(hex), _) => u32::from_str_radix(hex, 16),
        (None, Some(octal)) if !octal.is_empty() => u32::from_str_radix(octal, 8),
        _ => word.parse(),
    };
    parsed.map_err(|_| Failure::Wrong(format!("{word} is no number")))
}
