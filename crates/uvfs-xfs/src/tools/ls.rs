//! Lists directories as ls(1) does.

use crate::error::{Error, Result};
use crate::format::*;
use crate::read::inode::Time;
use crate::read::volume::Volume;
use std::borrow::Cow;
use std::collections::HashSet;
use std::ffi::OsStr;
use std::io::{self, Write};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use super::{BATCH, SORT_LIMIT, output, twice};

/// How [`ls`] lists.
#[derive(Debug, Clone, Copy, Default)]
pub struct LsOptions {
    /// Mode, links, owner, group, size and modification time before each name.
    pub long: bool,
    /// Directories below as well.
    pub recursive: bool,
    /// The directory's path before its entries, as always with `recursive`.
    pub heading: bool,
    /// Names that begin with a dot, "." and ".." too.
    pub all: bool,
    /// Sizes with a unit of a power of 1024.
    pub human: bool,
    /// Names as ls(1) shows them on a terminal: quoted for a shell, without control characters. Else as they are.
    pub quoted: bool,
}

/// Lists `path` as `ls` does: a directory's entries by name, or one file. A path that cannot be read
/// further down is handed to `report` (path and error), and listing goes on; gives how often that
/// was.
pub fn ls(
    volume: &Volume,
    path: &[u8],
    options: LsOptions,
    out: &mut dyn Write,
    report: &mut dyn FnMut(&Path, &Error),
) -> Result<usize> {
    let write_failed = output("writing the listing");
    let start = volume.resolve(path, false)?;
    if !start.is_dir() {
        line(volume, path, start.ino, options, out, report).map_err(write_failed)?;
        return Ok(0);
    }
    let mut errors = 0;
    let mut report = |p: &Path, e: &Error| {
        errors += 1;
        report(p, e);
    };
    let mut seen = HashSet::from([start.ino]);
    let mut todo = vec![(path.to_vec(), start)];
    let mut first = true;
    while let Some((path, dir)) = todo.pop() {
        if options.recursive || options.heading {
            let gap = if first { "" } else { "\n" };
            let head = [gap.as_bytes(), &name_of(&path, options), b":\n"].concat();
            out.write_all(&head).map_err(&write_failed)?;
        }
        first = false;
        let shown = |name: &[u8]| options.all || !name.starts_with(b".");
        let mut entries: Vec<(Vec<u8>, u64, FileType)> = Vec::new();
        let mut next = 0;
        let mut below = Vec::new();
        loop {
            let mut more = false;
            let read = volume.readdir(&dir, next, &mut |e| {
                if entries.len() >= SORT_LIMIT {
                    more = true;
                    return false;
                }
                next = e.next;
                if shown(e.name) {
                    entries.push((e.name.to_vec(), e.ino, e.file_type));
                }
                true
            });
            if let Err(e) = read {
                report(as_path(&path), &e);
            }
            entries.sort_by(|a, b| a.0.cmp(&b.0));
            for (at, (name, ino, kind)) in entries.iter().enumerate() {
                if options.long && at % BATCH == 0 {
                    let batch = entries[at..].iter().take(BATCH);
                    volume.readahead_inodes(batch.map(|entry| entry.1));
                }
                line(volume, name, *ino, options, out, &mut report).map_err(&write_failed)?;
                let directory = matches!(kind, FileType::Directory | FileType::Unknown);
                if options.recursive && directory && name != b"." && name != b".." {
                    below.push((name.clone(), *ino));
                }
            }
            entries.clear();
            if !more {
                break;
            }
        }
        volume.readahead_inodes(below.iter().map(|(_, ino)| *ino));
        // Last in, first out: the first name is listed next.
        for (name, ino) in below.into_iter().rev() {
            let child = join(&path, &name);
            match volume.inode(ino) {
                Ok(i) if !i.is_dir() => {}
                Ok(i) if seen.insert(ino) => {
                    volume.readahead_dir(&i);
                    todo.push((child, i));
                }
                Ok(_) => report(as_path(&child), &twice(&dir, ino)),
                Err(e) if !options.long => report(as_path(&child), &e),
                Err(_) => {} // Reported with its line.
            }
        }
    }
    Ok(errors)
}

fn as_path(bytes: &[u8]) -> &Path {
    Path::new(OsStr::from_bytes(bytes))
}

fn join(dir: &[u8], name: &[u8]) -> Vec<u8> {
    let slash: &[u8] = match dir.is_empty() || dir.ends_with(b"/") {
        true => b"",
        false => b"/",
    };
    [dir, slash, name].concat()
}

/// Writes one line of a listing.
fn line(
    volume: &Volume,
    name: &[u8],
    ino: u64,
    options: LsOptions,
    out: &mut dyn Write,
    report: &mut dyn FnMut(&Path, &Error),
) -> io::Result<()> {
    if !options.long {
        return out.write_all(&[&name_of(name, options), &b"\n"[..]].concat());
    }
    let inode = match volume.inode(ino) {
        Ok(i) => i,
        Err(e) => {
            report(as_path(name), &e);
            out.write_all(b"??????????   ? ? ? ? ? ")?;
            return out.write_all(&[&name_of(name, options), &b"\n"[..]].concat());
        }
    };
    let size = match inode.file_type() {
        FileType::CharDevice | FileType::BlockDevice => {
            format!("{}, {}", inode.rdev.0, inode.rdev.1)
        }
        _ if options.human => human(inode.size),
        _ => inode.size.to_string(),
    };
    write!(
        out,
        "{} {:>3} {:>5} {:>5} {size:>12} {} ",
        mode_string(inode.mode),
        inode.nlink,
        inode.uid,
        inode.gid,
        format_time(inode.mtime),
    )?;
    out.write_all(&name_of(name, options))?;
    if inode.file_type() == FileType::Symlink {
        match volume.readlink(&inode) {
            Ok(target) => out.write_all(&[b" -> ", &*name_of(&target, options)].concat())?,
            Err(e) => report(as_path(name), &e),
        }
    }
    writeln!(out)
}

fn name_of(name: &[u8], options: LsOptions) -> Cow<'_, [u8]> {
    match options.quoted {
        true => Cow::Owned(quote(name).into_bytes()),
        false => Cow::Borrowed(name),
    }
}

/// A size with a unit, rounded up, as `ls -h` shows it.
pub fn human(size: u64) -> String {
    let (mut unit, mut shift) = (0, 0);
    while unit < 6 && size.div_ceil(1 << shift) >= 1024 {
        unit += 1;
        shift += 10;
    }
    if unit == 0 {
        return size.to_string();
    }
    let tenths = (u128::from(size) * 10).div_ceil(1 << shift);
    let letter = char::from(b" KMGTPE"[unit]);
    match tenths {
        ..100 => format!("{}.{}{letter}", tenths / 10, tenths % 10),
        _ => format!("{}{letter}", size.div_ceil(1 << shift)),
    }
}

/// A name as ls(1) shows it on a terminal: in quotes where a shell would need them, with control characters and bytes
/// that are no UTF-8 as octal numbers.
pub fn quote(name: &[u8]) -> String {
    let text = std::str::from_utf8(name).ok();
    let plain = text.filter(|text| !text.contains(char::is_control));
    let special = |(at, c): (usize, char)| match c {
        '#' | '~' => at == 0,
        '{' | '}' => name.len() == 1,
        c => " !\"$&'()*;<=>?[\\^`|".contains(c),
    };
    match plain {
        Some("") => return "''".into(),
        Some(text) if !text.char_indices().any(special) => return text.into(),
        Some(text) if text.contains('\'') && !text.contains(['"', '$', '\\', '`', '!']) => {
            return format!("\"{text}\"");
        }
        _ => {}
    }
    let mut quoted = String::from("'");
    // In the part of the quotes where a shell reads octal numbers.
    let mut escaped = false;
    let switch = |quoted: &mut String, escaped: &mut bool, to: bool| {
        if to != *escaped {
            quoted.push_str(if to { "'$'" } else { "''" });
            *escaped = to;
        }
    };
    for chunk in name.utf8_chunks() {
        for c in chunk.valid().chars() {
            if c == '\'' {
                // This ends either part.
                quoted.push_str("'\\''");
                escaped = false;
                continue;
            }
            switch(&mut quoted, &mut escaped, c.is_control());
            match c {
                c if !c.is_control() => quoted.push(c),
                '\x07'..='\r' => {
                    let letter = b"abtnvfr"[c as usize - 7];
                    quoted.extend(['\\', char::from(letter)]);
                }
                c => push_octal(&mut quoted, c.encode_utf8(&mut [0; 4]).as_bytes()),
            }
        }
        if !chunk.invalid().is_empty() {
            switch(&mut quoted, &mut escaped, true);
            push_octal(&mut quoted, chunk.invalid());
        }
    }
    quoted.push('\'');
    quoted
}

/// A name with control characters and backslashes escaped, so that it stays on its line and
/// cannot drive a terminal. Bytes that are not UTF-8 are escaped too.
pub fn escape(name: &[u8]) -> String {
    let mut s = String::with_capacity(name.len());
    for chunk in name.utf8_chunks() {
        for c in chunk.valid().chars() {
            match c {
                '\\' => s.push_str("\\\\"),
                c if c.is_control() => push_octal(&mut s, c.encode_utf8(&mut [0; 4]).as_bytes()),
                c => s.push(c),
            }
        }
        push_octal(&mut s, chunk.invalid());
    }
    s
}

/// Adds bytes as octal numbers.
fn push_octal(s: &mut String, bytes: &[u8]) {
    bytes.iter().for_each(|b| s.push_str(&format!("\\{b:03o}")));
}

/// A mode as `ls -l` shows it.
pub fn mode_string(mode: u16) -> String {
    let kind = match FileType::from_mode(mode) {
        FileType::Regular => '-',
        FileType::Directory => 'd',
        FileType::CharDevice | FileType::Whiteout => 'c',
        FileType::BlockDevice => 'b',
        FileType::Fifo => 'p',
        FileType::Socket => 's',
        FileType::Symlink => 'l',
        FileType::Unknown => '?',
    };
    let mut s = String::from(kind);
    for (shift, special, letter) in [(6, 0o4000, 's'), (3, 0o2000, 's'), (0, 0o1000, 't')] {
        let bits = mode >> shift;
        s.push(if bits & 4 != 0 { 'r' } else { '-' });
        s.push(if bits & 2 != 0 { 'w' } else { '-' });
        s.push(match (mode & special != 0, bits & 1 != 0) {
            (true, true) => letter,
            (true, false) => letter.to_ascii_uppercase(),
            (false, true) => 'x',
            (false, false) => '-',
        });
    }
    s
}

/// A time in UTC, as `ls --time-style=full-iso` shows it.
pub fn format_time(t: Time) -> String {
    let (days, second) = (t.sec.div_euclid(86_400), t.sec.rem_euclid(86_400));
    // Civil date from days since 1970, in years that begin on the first of March.
    let z = days + 719_468;
    let era = z.div_euclid(146_097);
    let day_of_era = z.rem_euclid(146_097);
    let year_of_era =
        (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let march_month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * march_month + 2) / 5 + 1;
    let month = if march_month < 10 {
        march_month + 3
    } else {
        march_month - 9
    };
    let year = year_of_era + era * 400 + i64::from(month <= 2);
    format!(
        "{year:04}-{month:02}-{day:02} {:02}:{:02}:{:02}.{:09} +0000",
        second / 3600,
        second / 60 % 60,
        second % 60,
        t.nsec
    )
}
