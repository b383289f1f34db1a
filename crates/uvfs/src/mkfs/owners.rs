//! The owners that files get: options as GNU tar and unshare(1) have them.

use std::fs;
use std::path::{Path, PathBuf};

use uvfs_cli::{Context, Error, Result};
use uvfs_xfs::mkfs::source::{IdRange, Others, Owners};

/// Users or groups.
#[derive(Debug, Clone, Copy)]
pub struct Kind {
    /// Where their names are.
    pub file: &'static str,
    /// The option that gives all files the same.
    pub one: &'static str,
}

/// Users.
pub const USERS: Kind = Kind {
    file: "/etc/passwd",
    one: "--owner",
};
/// Groups.
pub const GROUPS: Kind = Kind {
    file: "/etc/group",
    one: "--group",
};

impl Kind {
    /// The number that a word stands for: a number, `+` and a number, a name, or `NAME:NUMBER`.
    fn id(self, word: &str) -> Result<u32, String> {
        let word = word.rsplit_once(':').map_or(word, |(_, number)| number);
        let number = word.strip_prefix('+').unwrap_or(word);
        if !number.is_empty() && number.bytes().all(|b| b.is_ascii_digit()) {
            let id = number.parse().ok().filter(|id| *id != u32::MAX);
            return id.ok_or(format!("{word} is too large"));
        }
        let names = fs::read(self.file).map_err(|e| format!("{}: {e}", self.file))?;
        let names = String::from_utf8_lossy(&names);
        let fields = names
            .lines()
            .map(|line| line.split(':').collect::<Vec<_>>());
        let found = fields
            .filter(|f| f[0] == word)
            .find_map(|f| f.get(2)?.parse().ok());
        found.ok_or_else(|| format!("{word} is neither a number nor a name in {}", self.file))
    }

    /// What the options say. `map`: lines of OLD and NEW. `ranges`: `FROM:TO:COUNT`.
    pub fn owners(
        self,
        one: Option<&str>,
        map: Option<&PathBuf>,
        ranges: &[String],
    ) -> Result<Owners> {
        let mut owners = Owners::default();
        if let Some(map) = map {
            owners.ranges = self.map(map)?;
        }
        for text in ranges {
            let range = range(text).ok_or_else(|| {
                Error::usage(format!("{text}: FROM:TO:COUNT is expected, with numbers"))
            })?;
            owners.ranges.push(range);
            owners.others = Others::Refused;
        }
        if let Some(one) = one {
            let id = self.id(one);
            let id = id.map_err(|e| Error::usage(format!("{} {one}: {e}", self.one)))?;
            owners.others = Others::Set(id);
        }
        Ok(owners)
    }

    fn map(self, file: &Path) -> Result<Vec<IdRange>> {
        let text = fs::read_to_string(file).context(|| file.display().to_string())?;
        let mut ranges = Vec::new();
        for (n, line) in (1..).zip(text.lines()) {
            let line = line.split('#').next().unwrap_or_default();
            let words: Vec<&str> = line.split_whitespace().collect();
            let wrong = |why: &str| Error::usage(format!("{}:{n}: {why}", file.display()));
            let (from, to) = match words[..] {
                [] => continue,
                [from, to] => (from, to),
                _ => return Err(wrong("an old and a new owner are expected")),
            };
            ranges.push(IdRange {
                from: self.id(from).map_err(|e| wrong(&e))?,
                to: self.id(to).map_err(|e| wrong(&e))?,
                count: 1,
            });
        }
        Ok(ranges)
    }
}

fn range(text: &str) -> Option<IdRange> {
    let numbers: Option<Vec<u32>> = text.split(':').map(|n| n.parse().ok()).collect();
    match numbers?[..] {
        [from, to, count] if count > 0 => {
            from.checked_add(count - 1)?;
            to.checked_add(count - 1)?;
            Some(IdRange { from, to, count })
        }
        _ => None,
    }
}
