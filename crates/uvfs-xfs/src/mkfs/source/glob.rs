//! Patterns of names, with the meaning that GNU tar gives those of `--exclude` (its manual, "Controlling
//! Pattern-Matching", without options): a pattern is compared with a whole path, and with what follows each slash of it;
//! wildcards match slashes and leading dots.

use regex::bytes::{RegexSet, RegexSetBuilder};

/// Patterns, of which each path is compared with all.
#[derive(Debug, Clone)]
pub struct Patterns(RegexSet);

impl Default for Patterns {
    fn default() -> Patterns {
        Patterns(RegexSet::empty())
    }
}

impl Patterns {
    /// Patterns of paths that begin with `./`. One that begins with a slash matches from there on.
    ///
    /// # Errors
    /// Names the pattern that is no such one.
    pub fn new<P: AsRef<str>>(patterns: &[P]) -> Result<Patterns, String> {
        let all = patterns.iter().flat_map(|p| expressions(p.as_ref()));
        let set = RegexSetBuilder::new(all).size_limit(256 << 20).build();
        let set = set.map_err(|_| {
            let wrong = |p: &&P| RegexSet::new(expressions(p.as_ref())).is_err();
            match patterns.iter().find(wrong) {
                Some(p) => format!("{:?} is no pattern", p.as_ref()),
                None => "the patterns are too many".into(),
            }
        })?;
        Ok(Patterns(set))
    }

    /// There is none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether one of them matches this path, which begins with `.`.
    pub fn matches(&self, path: &[u8]) -> bool {
        !self.is_empty() && self.0.is_match(path)
    }
}

/// How fnmatch(3) takes texts apart: it compares characters first, then bytes.
#[derive(Clone, Copy, PartialEq)]
enum Unit {
    Characters,
    Bytes,
}

/// The regular expressions for a pattern as fnmatch(3) reads it.
fn expressions(pattern: &str) -> [String; 2] {
    let bytes: String = pattern.bytes().map(char::from).collect();
    [
        Unit::Characters.expression(pattern),
        Unit::Bytes.expression(&bytes),
    ]
}

impl Unit {
    fn expression(self, pattern: &str) -> String {
        let mut out = String::from(match self {
            Unit::Characters => "(?s)",
            Unit::Bytes => "(?s-u)",
        });
        out += match pattern.starts_with('/') {
            true => r"\A\.",
            false => r"\A(?:(?-u:.*)/)?",
        };
        let mut rest = pattern.chars();
        while let Some(c) = rest.next() {
            match c {
                '*' => out += "(?-u:.*)",
                '?' => out += ".",
                '[' => match self.bracket(rest.as_str()) {
                    Some((class, after)) => {
                        out += &class;
                        rest = after.chars();
                    }
                    None => out += r"\[",
                },
                '\\' => out += &self.literal(rest.next().unwrap_or('\\')),
                c => out += &self.literal(c),
            }
        }
        out + r"\z"
    }

    fn literal(self, c: char) -> String {
        match c {
            c if self == Unit::Bytes && !c.is_ascii() => format!(r"\x{:02x}", u32::from(c)),
            c if c.is_ascii_punctuation() => format!("\\{c}"),
            c => c.into(),
        }
    }

    /// The class that a bracket expression begins, and what follows it; `None` if it does not end.
    fn bracket(self, text: &str) -> Option<(String, &str)> {
        let (not, text) = match text.strip_prefix(['!', '^']) {
            Some(text) => (true, text),
            None => (false, text),
        };
        let mut rest = text.chars();
        let mut class = String::from(if not { "[^" } else { "[" });
        let mut first = true;
        loop {
            let c = match rest.next()? {
                ']' if !first => return Some((class + "]", rest.as_str())),
                '[' if rest.as_str().starts_with(':') => {
                    let (name, after) = rest.as_str()[1..].split_once(":]")?;
                    class += &self.named(name);
                    rest = after.chars();
                    first = false;
                    continue;
                }
                '\\' => rest.next()?,
                c => c,
            };
            class += &self.literal(c);
            let mut ahead = rest.clone();
            if ahead.next() == Some('-') && !ahead.as_str().starts_with(']') {
                let to = match ahead.next()? {
                    '\\' => ahead.next()?,
                    to => to,
                };
                class += &format!("-{}", self.literal(to));
                rest = ahead;
            }
            first = false;
        }
    }

    /// The class of this name, as a locale with UTF-8 has it.
    fn named(self, name: &str) -> String {
        match (self, name) {
            (Unit::Characters, "alpha") => r"\p{Alphabetic}".into(),
            (Unit::Characters, "alnum") => r"\p{Alphabetic}0-9".into(),
            (Unit::Characters, "lower") => r"\p{Lowercase}".into(),
            (Unit::Characters, "upper") => r"\p{Uppercase}".into(),
            (_, name) => format!("[:{name}:]"),
        }
    }
}
