//! SELinux file contexts: which label a path gets (`file_contexts(5)`, and `selabel_file(5)` of libselinux).

use super::invalid;
use crate::bulk::attr::NewAttr;
use crate::format::*;
use regex::bytes::{Regex, RegexBuilder};
use std::collections::HashMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// The lines of a file of contexts and of those that belong to it.
#[derive(Debug, Clone, Default)]
pub struct Contexts {
    /// The one that counts is the last that matches; those without wildcards come last.
    specs: Vec<Spec>,
    /// Which of them have this prefix: of thousands, a path has few to be compared with.
    by_prefix: HashMap<Vec<u8>, Vec<usize>>,
    /// Beginnings of paths that are looked up as if they had others.
    aliases: Vec<(Vec<u8>, Vec<u8>)>,
}

/// A line.
#[derive(Debug, Clone)]
struct Spec {
    /// What every path begins with that it matches.
    prefix: Vec<u8>,
    /// `None`: the prefix is the whole path.
    expression: Option<Regex>,
    kind: Option<FileType>,
    /// `None`: these files get no label.
    label: Option<Box<[u8]>>,
}

impl Contexts {
    /// Reads `file`, and what there is of `file.homedirs`, `file.local`, `file.subs` and `file.subs_dist`.
    ///
    /// # Errors
    /// The file with what is wrong with it.
    pub fn read(file: &Path) -> Result<Contexts, (PathBuf, io::Error)> {
        let beside = |end: &str| {
            let mut path = file.as_os_str().to_owned();
            path.push(end);
            PathBuf::from(path)
        };
        let mut specs = Vec::new();
        for (path, needed) in [
            (file.to_owned(), true),
            (beside(".homedirs"), false),
            (beside(".local"), false),
        ] {
            match fs::read_to_string(&path) {
                Ok(text) => specs.extend(parse(&text).map_err(|e| (path, invalid(e)))?),
                Err(e) if !needed && e.kind() == io::ErrorKind::NotFound => {}
                Err(e) => return Err((path, e)),
            }
        }
        // A stable sort: among each other they stay in order.
        specs.sort_by_key(|s| s.expression.is_none());
        let mut aliases = Vec::new();
        for path in [beside(".subs"), beside(".subs_dist")] {
            match fs::read_to_string(&path) {
                Ok(text) => aliases.extend(text.lines().rev().filter_map(alias)),
                Err(e) if e.kind() == io::ErrorKind::NotFound => {}
                Err(e) => return Err((path, e)),
            }
        }
        let mut by_prefix: HashMap<_, Vec<usize>> = HashMap::new();
        for (i, spec) in specs.iter().enumerate() {
            by_prefix.entry(spec.prefix.clone()).or_default().push(i);
        }
        Ok(Contexts {
            specs,
            by_prefix,
            aliases,
        })
    }

    /// The label of a path that begins with a slash; `None` if it gets none.
    pub fn label(&self, path: &[u8], kind: FileType) -> Option<&[u8]> {
        let alias = self.aliases.iter().find_map(|(from, to)| {
            let rest = path.strip_prefix(&from[..])?;
            match rest {
                [] => Some(to.clone()),
                [b'/', more @ ..] if to == b"/" => Some([to, more].concat()),
                [b'/', ..] => Some([to, rest].concat()),
                _ => None,
            }
        });
        let path = alias.as_deref().unwrap_or(path);
        let begins = (0..=path.len()).filter_map(|n| self.by_prefix.get(&path[..n]));
        let mut candidates: Vec<usize> = begins.flatten().copied().collect();
        candidates.sort_unstable();
        let matches = |spec: &&Spec| {
            spec.kind.is_none_or(|k| k == kind)
                && match &spec.expression {
                    Some(expression) => expression.is_match(path),
                    None => path == &spec.prefix[..],
                }
        };
        let mut last_first = candidates.iter().rev().map(|i| &self.specs[*i]);
        last_first.find(matches)?.label.as_deref()
    }

    /// Gives an inode's attributes the label of its path. A path without one keeps what the source has.
    pub(super) fn apply(&self, path: &[u8], mode: u16, attrs: &mut Vec<NewAttr>) {
        let Some(label) = self.label(path, FileType::from_mode(mode)) else {
            return;
        };
        attrs.retain(|a| (a.flags, &a.name[..]) != (ATTR_SECURE, b"selinux"));
        attrs.push(NewAttr {
            flags: ATTR_SECURE,
            name: b"selinux"[..].into(),
            // lsetfilecon(3) counts the byte at its end.
            value: [label, b"\0"].concat().into(),
        });
        super::host::sort_attributes(attrs);
    }
}

fn alias(line: &str) -> Option<(Vec<u8>, Vec<u8>)> {
    let mut words = line.split_whitespace();
    let (from, to) = (words.next()?, words.next()?);
    (!from.starts_with('#')).then(|| (from.into(), to.into()))
}

fn parse(text: &str) -> Result<Vec<Spec>, String> {
    let lines = (1..).zip(text.lines().map(str::trim));
    let lines = lines.filter(|(_, l)| !l.is_empty() && !l.starts_with('#'));
    lines
        .map(|(n, line)| spec(line).map_err(|why| format!("line {n}: {why}")))
        .collect()
}

fn spec(line: &str) -> Result<Spec, String> {
    let words: Vec<&str> = line.split_whitespace().collect();
    let (path, kind, label) = match words[..] {
        [path, label] => (path, None, label),
        [path, kind, label] => (path, Some(file_type(kind)?), label),
        _ => return Err("a path, a type if need be, and a label are expected".into()),
    };
    let label = (label != "<<none>>").then(|| label.as_bytes().into());
    let (prefix, whole) = prefix(path);
    let expression = match whole {
        true => None,
        false => {
            let built = RegexBuilder::new(&format!(r"\A(?:{path})\z"))
                .unicode(false)
                .dot_matches_new_line(true)
                .build();
            Some(built.map_err(|e| format!("the expression {path}: {e}"))?)
        }
    };
    Ok(Spec {
        prefix,
        expression,
        kind,
        label,
    })
}

fn file_type(word: &str) -> Result<FileType, String> {
    Ok(match word {
        "--" => FileType::Regular,
        "-d" => FileType::Directory,
        "-c" => FileType::CharDevice,
        "-b" => FileType::BlockDevice,
        "-p" => FileType::Fifo,
        "-s" => FileType::Socket,
        "-l" => FileType::Symlink,
        _ => return Err(format!("{word} is none of the types -- -b -c -d -l -p -s")),
    })
}

/// What an expression begins with before anything that has a meaning, and whether that is all of it.
fn prefix(expression: &str) -> (Vec<u8>, bool) {
    let bytes = expression.as_bytes();
    if has_alternatives(bytes) {
        return (Vec::new(), false);
    }
    let mut out = Vec::new();
    let mut at = 0;
    while at < bytes.len() {
        let (byte, next) = match bytes[at..] {
            [b'\\', c, ..] if c.is_ascii_punctuation() => (c, at + 2),
            [b'\\', ..] => return (out, false),
            [c, ..] if b".^$?*+|[({".contains(&c) => return (out, false),
            [c, ..] => (c, at + 1),
            [] => break,
        };
        // The next sign may make this one optional.
        if bytes.get(next).is_some_and(|c| b"?*+{".contains(c)) {
            return (out, false);
        }
        out.push(byte);
        at = next;
    }
    (out, true)
}

/// Whether there is a `|` outside of all parentheses: then nothing is certain of how a path begins.
fn has_alternatives(expression: &[u8]) -> bool {
    let (mut depth, mut class, mut escaped) = (0u32, false, false);
    for byte in expression {
        match byte {
            _ if escaped => {
                escaped = false;
                continue;
            }
            b'[' => class = true,
            b']' => class = false,
            b'(' if !class => depth += 1,
            b')' if !class => depth = depth.saturating_sub(1),
            b'|' if !class && depth == 0 => return true,
            _ => {}
        }
        escaped = *byte == b'\\';
    }
    false
}
