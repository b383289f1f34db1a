//! Archives of any bytes whose headers have right checksums, for the property test and the fuzz target of the reader.

use std::io::Cursor;
use uvfs_xfs::mkfs::Archive;
use uvfs_xfs::mkfs::source::{self, Root};

/// Names that lead to each other in most ways.
const NAMES: [&[u8]; 20] = [
    b"a",
    b"b",
    b"d/",
    b"d",
    b"d/x",
    b"d/e/f",
    b"l",
    b"l/x",
    b"l/l/y",
    b"m",
    b".wh.a",
    b".wh.d",
    b".wh..wh..opq",
    b"d/.wh..wh..opq",
    b"d/.wh.x",
    b"l/.wh..wh..opq",
    b"",
    b".",
    b"../a",
    b"/d/../..",
];
const KEYS: [&[u8]; 18] = [
    b"path",
    b"linkpath",
    b"size",
    b"uid",
    b"mtime",
    b"atime",
    b"GNU.sparse.map",
    b"GNU.sparse.size",
    b"GNU.sparse.major",
    b"GNU.sparse.realsize",
    b"GNU.sparse.offset",
    b"GNU.sparse.numbytes",
    b"GNU.sparse.name",
    b"SCHILY.xattr.user.a%3D",
    b"LIBARCHIVE.xattr.user.b%20",
    b"SCHILY.acl.access",
    b"SCHILY.acl.default",
    b"SCHILY.xattr.system.posix_acl_access",
];
const VALUES: [&[u8]; 8] = [
    b"",
    b"0",
    b"5",
    b"0,5,600,5",
    b"-1.5",
    b"18446744073709551615",
    b"user::rwx,user:5:r--,group::r--,mask::rw-,other::---",
    b"9223372036854775807",
];
const KINDS: [u8; 19] = *b"\x000123457SDxgLKVMXZ6";

/// Choices out of bytes; zeros when there are no more.
struct Input<'a>(&'a [u8]);

impl<'a> Input<'a> {
    fn byte(&mut self) -> u8 {
        self.bytes(1).first().copied().unwrap_or(0)
    }

    fn bytes(&mut self, n: usize) -> &'a [u8] {
        let (taken, rest) = self.0.split_at(n.min(self.0.len()));
        self.0 = rest;
        taken
    }

    fn of(&mut self, all: &[&'a [u8]]) -> &'a [u8] {
        match usize::from(self.byte()) {
            n if n < 224 => all[n % all.len()],
            n => self.bytes(n - 220),
        }
    }

    /// A field of a header.
    fn number(&mut self, len: usize) -> Vec<u8> {
        let mut field = match self.byte() {
            n @ 0..=199 => format!("{:o}", n / 8).into_bytes(),
            200..=220 => b"\x80".to_vec(),
            _ => self.bytes(len).to_vec(),
        };
        field.resize(len, 0);
        field
    }
}

fn member(input: &mut Input<'_>, to: &mut Vec<u8>) {
    let kind = KINDS[usize::from(input.byte()) % KINDS.len()];
    let mut block = [0; 512];
    let mut put = |at: usize, bytes: &[u8], most: usize| {
        let n = bytes.len().min(most);
        block[at..at + n].copy_from_slice(&bytes[..n]);
    };
    put(0, input.of(&NAMES), 100);
    for (at, len) in [(100, 8), (108, 8), (116, 8), (136, 12)] {
        put(at, &input.number(len), len);
    }
    put(157, input.of(&NAMES), 100);
    let magic: &[u8] = if input.byte() & 1 == 0 {
        b"ustar\x0000"
    } else {
        b"ustar  \0"
    };
    put(257, magic, 8);
    put(156, &[kind], 1);
    let mut contents = Vec::new();
    match kind {
        b'x' | b'g' | b'X' => {
            for _ in 0..input.byte() % 5 {
                let (key, value) = (input.of(&KEYS), input.of(&VALUES));
                let len = key.len() + value.len() + 3;
                let len = len + (len + 2).to_string().len();
                contents.extend_from_slice(format!("{len} ").as_bytes());
                contents.extend_from_slice(&[key, b"=", value, b"\n"].concat());
            }
        }
        b'S' => {
            for at in (386..482).step_by(12).chain([483]) {
                put(at, &input.number(12), 12);
            }
            put(482, &[input.byte() & 1], 1);
            contents.extend_from_slice(input.bytes(80));
        }
        b'L' | b'K' => contents.extend_from_slice(input.of(&NAMES)),
        _ => {
            let n = usize::from(input.byte());
            contents.extend_from_slice(input.bytes(n));
        }
    }
    let size = match input.byte() {
        0..=230 => format!("{:o}", contents.len()).into_bytes(),
        _ => input.number(12),
    };
    put(124, &size, 12);
    put(148, b"        ", 8);
    let sum: u32 = block.iter().map(|b| u32::from(*b)).sum();
    block[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    to.extend_from_slice(&block);
    to.extend_from_slice(&contents);
    to.resize(to.len().next_multiple_of(512), 0);
}

/// One to three archives.
fn archives(input: &[u8]) -> Vec<Vec<u8>> {
    let mut input = Input(input);
    // The bytes as they are: most of them are no archive.
    if input.byte() == 255 {
        return vec![input.0.to_vec()];
    }
    let mut archives = vec![Vec::new()];
    while !input.0.is_empty() {
        if let Some(last) = archives.last_mut() {
            member(&mut input, last);
        }
        if input.byte() > 250 && archives.len() < 3 {
            archives.push(Vec::new());
        }
    }
    for archive in &mut archives {
        archive.resize(archive.len() + 1024, 0);
    }
    archives
}

/// The archives that these bytes stand for.
pub fn from_bytes(input: &[u8]) -> Vec<Archive> {
    let each = archives(input).into_iter().map(|bytes| Archive {
        name: "archive".into(),
        from: Box::new(Cursor::new(bytes)),
    });
    each.collect()
}

/// Reads the archives, and what they hold.
pub fn read(input: &[u8]) {
    let size = Some(1 << 20);
    let Ok(root) = source::tar::read(from_bytes(input), &std::env::temp_dir(), size) else {
        return;
    };
    walk(&root);
}

fn walk(root: &Root) {
    let mut todo = vec![root.dir.clone()];
    let mut buf = vec![0; 4096];
    while let Some(dir) = todo.pop() {
        for entry in dir.list().unwrap() {
            assert!((1..=255).contains(&entry.name.len()), "{entry:?}");
            assert!(
                !entry.name.contains(&b'/') && !entry.name.contains(&0),
                "{entry:?}"
            );
            if entry.meta.is_dir() {
                todo.push(dir.clone().enter(&entry.name).unwrap().unwrap());
            } else if let Some(reader) = dir.open(&entry.name).unwrap() {
                reader.read_at(0, &mut buf).unwrap();
                let last = entry.meta.size.saturating_sub(buf.len() as u64);
                reader.read_at(last, &mut buf).unwrap();
            }
        }
    }
}
