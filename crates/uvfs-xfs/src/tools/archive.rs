//! Writes what is in an image as a tar archive: the format pax of POSIX.1-2017, with the records of GNU tar for extended
//! attributes and holes.

use crate::error::{Error, Result};
use crate::format::*;
use crate::read::inode::{Fork, Inode};
use crate::read::volume::Volume;
use std::collections::HashMap;
use std::io::Write;
use std::path::Path;
use tar::{EntryType, Header};

use super::copy::{Copied, Trust};
use super::tree::walk;
use super::{buffer, last_name, output};

/// Blocks of an archive.
const BLOCK: usize = 512;
/// As many runs of data a file may have.
const MOST_RUNS: usize = 1 << 22;

/// Writes `from`, with all below, as a tar archive: members are called as [`copy_out`](super::copy_out) calls files.
/// Owners are numbers; extended attributes, access control lists, hard links and holes are kept. The last block, which
/// ends an archive, is for [`finish`] to write, so that several trees can go into one.
///
/// # Errors
/// Of `from` itself, and of `out`. Other errors are handed to `report`, and copying goes on.
pub fn archive(
    volume: &Volume,
    from: &[u8],
    out: &mut dyn Write,
    trust: Trust,
    report: &mut dyn FnMut(&Path, &Error),
) -> Result<Copied> {
    let name = last_name(from);
    let trimmed = match from.iter().rposition(|b| *b != b'/') {
        Some(last) => &from[..=last],
        None => b"",
    };
    // What a member's name does not begin with.
    let above = trimmed.len() - name.map_or(0, <[u8]>::len);
    let mut archive = Archive {
        volume,
        out,
        trust,
        links: HashMap::new(),
        done: Copied::default(),
        buf: buffer(volume),
    };
    let errors = walk(
        volume,
        if trimmed.is_empty() { b"/" } else { trimmed },
        true,
        &mut |path, inode| {
            let name = match name {
                Some(_) => path[above..].to_vec(),
                None if path == b"/" => b".".to_vec(),
                None => path[1..].to_vec(),
            };
            archive.member(name, inode)
        },
        report,
    )?;
    Ok(Copied {
        errors,
        ..archive.done
    })
}

/// Writes what ends an archive.
///
/// # Errors
/// [`Error::Output`].
pub fn finish(out: &mut dyn Write) -> Result<()> {
    let written = out.write_all(&[0; 2 * BLOCK]).and_then(|()| out.flush());
    written.map_err(output("writing the archive"))
}

struct Archive<'a> {
    volume: &'a Volume,
    out: &'a mut dyn Write,
    trust: Trust,
    /// The first name of a file with several.
    links: HashMap<u64, Vec<u8>>,
    done: Copied,
    buf: Vec<u8>,
}

/// Records of an extended header.
#[derive(Default)]
struct Records(Vec<u8>);

impl Records {
    fn add(&mut self, key: &[u8], value: &[u8]) {
        // Its length counts itself.
        let rest = key.len() + value.len() + 3;
        let mut len = rest + 1;
        while len != rest + len.to_string().len() {
            len = rest + len.to_string().len();
        }
        self.0.extend_from_slice(len.to_string().as_bytes());
        for part in [b" ", key, b"=", value, b"\n"] {
            self.0.extend_from_slice(part);
        }
    }

    fn number(&mut self, key: &str, value: impl ToString) {
        self.add(key.as_bytes(), value.to_string().as_bytes());
    }
}

impl Archive<'_> {
    fn write(&mut self, bytes: &[u8]) -> Result<()> {
        let written = self.out.write_all(bytes);
        written.map_err(output("writing the archive"))
    }

    /// Fills the block in which `len` bytes end.
    fn pad(&mut self, len: u64) -> Result<()> {
        let left = (BLOCK - (len % BLOCK as u64) as usize) % BLOCK;
        self.write(&[0; BLOCK][..left])
    }

    /// Writes an inode under a name. An error that is not of the output leaves the archive whole: zeros stand for what
    /// could not be read.
    fn member(&mut self, mut name: Vec<u8>, inode: &Inode) -> Result<()> {
        if let Some(first) = self.links.get(&inode.ino).cloned() {
            self.done.links += 1;
            let records = Records::default();
            return self.head(&name, &first, EntryType::Link, inode, 0, records);
        }
        let (mut map, mut link) = (Vec::new(), Vec::new());
        let kind = match inode.file_type() {
            FileType::Regular => {
                map = self.runs(inode)?;
                EntryType::Regular
            }
            FileType::Directory => {
                name.push(b'/');
                EntryType::Directory
            }
            FileType::Symlink => {
                link = self.volume.readlink(inode)?;
                EntryType::Symlink
            }
            FileType::Fifo => EntryType::Fifo,
            FileType::Socket => {
                self.done.sockets_left_out += 1;
                return Ok(());
            }
            FileType::Unknown => return Err(Error::Unsupported("this type of file is".into())),
            _ if !self.trust.devices => {
                self.done.devices_left_out += 1;
                return Ok(());
            }
            FileType::BlockDevice => EntryType::Block,
            FileType::CharDevice | FileType::Whiteout => EntryType::Char,
        };
        let mut records = Records::default();
        let attributes = self.attributes(inode, &mut records);
        let data: u64 = map.iter().map(|(_, len)| len).sum();
        let mut holes = Vec::new();
        if kind == EntryType::Regular && data < inode.size {
            holes = holes_map(&map, inode.size);
            records.number("GNU.sparse.major", 1);
            records.number("GNU.sparse.minor", 0);
            records.add(b"GNU.sparse.name", &name);
            records.number("GNU.sparse.realsize", inode.size);
        }
        let stored = data + holes.len() as u64;
        self.head(&name, &link, kind, inode, stored, records)?;
        self.write(&holes)?;
        let contents = self.contents(inode, &map)?;
        self.pad(stored)?;
        match kind {
            EntryType::Directory => self.done.directories += 1,
            _ => self.done.files += 1,
        }
        if kind != EntryType::Directory && inode.nlink > 1 {
            self.links.insert(inode.ino, name);
        }
        attributes.and(contents)
    }

    /// Where a file has data: offset and length in bytes.
    fn runs(&self, inode: &Inode) -> Result<Vec<(u64, u64)>> {
        let log = self.volume.geometry().blocklog;
        let blocks = inode.size.div_ceil(1 << log);
        let mut runs: Vec<(u64, u64)> = Vec::new();
        self.volume.map(inode, Fork::Data, 0, blocks, &mut |e| {
            let (start, end) = (e.startoff << log, (e.end() << log).min(inode.size));
            if e.unwritten || start >= end {
                return Ok(true);
            }
            match runs.last_mut() {
                Some((at, len)) if *at + *len == start => *len = end - *at,
                _ => runs.push((start, end - start)),
            }
            match runs.len() > MOST_RUNS {
                true => Err(Error::Unsupported("a file with so many holes is".into())),
                false => Ok(true),
            }
        })?;
        Ok(runs)
    }

    /// Writes the data. The inner error is of the image.
    fn contents(&mut self, inode: &Inode, map: &[(u64, u64)]) -> Result<Result<()>> {
        let mut outcome = Ok(());
        let mut buf = std::mem::take(&mut self.buf);
        for (start, len) in map {
            let (mut at, end) = (*start, start + len);
            while at < end {
                let want = (end - at).min(buf.len() as u64) as usize;
                let n = match self.volume.read(inode, at, &mut buf[..want]) {
                    Ok(n) => n,
                    Err(e) => {
                        outcome = Err(e);
                        0
                    }
                };
                buf[n..want].fill(0);
                self.write(&buf[..want])?;
                self.done.bytes += n as u64;
                at += want as u64;
            }
        }
        self.buf = buf;
        Ok(outcome)
    }

    /// Adds extended attributes; gives the last error.
    fn attributes(&mut self, inode: &Inode, records: &mut Records) -> Result<()> {
        let mut names = Vec::new();
        let mut outcome = self.volume.xattr_names(inode, &mut |name| {
            // ACLs go under the name that every file system knows.
            if !name.starts_with(b"trusted.SGI_ACL_") {
                names.push(name.to_vec());
            }
            true
        });
        for name in names {
            if name == b"security.capability" && !self.trust.rights {
                self.done.rights_taken_off += 1;
                continue;
            }
            match self.volume.xattr(inode, &name) {
                Ok(value) => {
                    let mut key = b"SCHILY.xattr.".to_vec();
                    for b in &name {
                        match b {
                            b'%' | b'=' => key.extend_from_slice(format!("%{b:02X}").as_bytes()),
                            b => key.push(*b),
                        }
                    }
                    records.add(&key, &value);
                }
                Err(e) => outcome = Err(e),
            }
        }
        outcome
    }

    /// Writes the headers of a member with so many bytes.
    fn head(
        &mut self,
        name: &[u8],
        link: &[u8],
        kind: EntryType,
        inode: &Inode,
        size: u64,
        mut records: Records,
    ) -> Result<()> {
        const NAME: usize = 100;
        const OCTAL_7: u64 = 0o777_7777;
        const OCTAL_11: u64 = 0o777_7777_7777;
        let mut mode = u32::from(inode.mode & 0o7777);
        if !self.trust.rights && !inode.is_dir() && mode & 0o6000 != 0 {
            mode &= !0o6000;
            if kind != EntryType::Link {
                self.done.rights_taken_off += 1;
            }
        }
        let mut header = Header::new_ustar();
        header.set_entry_type(kind);
        header.set_mode(mode);
        let mut number = |key: &str, value: u64, most: u64| {
            let fits = value <= most;
            if !fits {
                records.number(key, value);
            }
            if fits { value } else { 0 }
        };
        header.set_uid(number("uid", inode.uid.into(), OCTAL_7));
        header.set_gid(number("gid", inode.gid.into(), OCTAL_7));
        header.set_size(number("size", size, OCTAL_11));
        let time = inode.mtime;
        match u64::try_from(time.sec) {
            Ok(sec) if time.nsec == 0 && sec <= OCTAL_11 => header.set_mtime(sec),
            _ => {
                header.set_mtime(0);
                let whole = i128::from(time.sec) * 1_000_000_000 + i128::from(time.nsec);
                let sign = if whole < 0 { "-" } else { "" };
                let (sec, nsec) = (whole.abs() / 1_000_000_000, whole.abs() % 1_000_000_000);
                records.add(b"mtime", format!("{sign}{sec}.{nsec:09}").as_bytes());
            }
        }
        for (key, value, at) in [("path", name, 0), ("linkpath", link, 157)] {
            let n = value.len().min(NAME);
            header.as_mut_bytes()[at..at + n].copy_from_slice(&value[..n]);
            if value.len() > NAME {
                records.add(key.as_bytes(), value);
            }
        }
        if matches!(kind, EntryType::Char | EntryType::Block) {
            let (major, minor) = inode.rdev;
            let set = header
                .set_device_major(major)
                .and_then(|()| header.set_device_minor(minor));
            set.map_err(output("writing the archive"))?;
        }
        header.set_cksum();
        if !records.0.is_empty() {
            let len = records.0.len() as u64;
            let mut extended = Header::new_ustar();
            extended.set_entry_type(EntryType::XHeader);
            let label = b"PaxHeaders/member";
            extended.as_mut_bytes()[..label.len()].copy_from_slice(label);
            extended.set_mode(0o644);
            extended.set_uid(0);
            extended.set_gid(0);
            extended.set_mtime(0);
            extended.set_size(len);
            extended.set_cksum();
            self.write(extended.as_bytes())?;
            self.write(&records.0)?;
            self.pad(len)?;
        }
        self.write(header.as_bytes())
    }
}

/// The map that the contents of a file with holes begin with (GNU tar, "PAX Format, Version 1.0").
fn holes_map(runs: &[(u64, u64)], size: u64) -> Vec<u8> {
    let ends = runs.last().is_some_and(|(at, len)| at + len == size);
    let last = (!ends).then_some((size, 0));
    let all = runs.iter().copied().chain(last);
    let mut text = format!("{}\n", all.clone().count());
    all.for_each(|(at, len)| text += &format!("{at}\n{len}\n"));
    let mut map = text.into_bytes();
    map.resize(map.len().next_multiple_of(BLOCK), 0);
    map
}
