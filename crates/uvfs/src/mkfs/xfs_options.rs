//! The options of mkfs.xfs(8): those that can be chosen, and those of which uvfs only makes what is the default there.

use std::fs;
use std::path::{Path, PathBuf};

use uvfs_cli::{Context, Error, Result, size};
use uvfs_xfs::mkfs::{MkfsOptions, parse_uuid};

/// Where the Debian package of xfsprogs has its configuration files.
const CONFIGURATIONS: &str = "/usr/share/xfsprogs/mkfs";

/// One `NAME=VALUE` behind an option. Without a value it means `NAME=1`.
#[derive(Debug, PartialEq)]
struct Part {
    option: char,
    name: String,
    value: Option<String>,
}

/// What is always so: option, name, and the values that say that.
const ALWAYS: [(char, &str, &[&str]); 43] = [
    ('b', "log", &[]),
    ('d', "cowextsize", &["0"]),
    ('d', "concurrency", &["0"]),
    ('d', "daxinherit", &["0"]),
    ('d', "extszinherit", &["0"]),
    ('d', "file", &["0", "1"]),
    ('d', "name", &[]),
    ('d', "noalign", &["0", "1"]),
    ('d', "projinherit", &["0"]),
    ('d', "rtinherit", &["0"]),
    ('d', "su", &["0"]),
    ('d', "sunit", &["0"]),
    ('d', "sw", &["0"]),
    ('d', "swidth", &["0"]),
    ('i', "align", &["1"]),
    ('i', "attr", &["2"]),
    ('i', "exchange", &["0"]),
    ('i', "nrext64", &["0"]),
    ('i', "projid32bit", &["1"]),
    ('i', "sparse", &["1"]),
    ('l', "agnum", &[]),
    ('l', "concurrency", &["0"]),
    ('l', "file", &["0"]),
    ('l', "internal", &["1"]),
    ('l', "lazy-count", &["1"]),
    ('l', "su", &["0"]),
    ('l', "sunit", &["0"]),
    ('l', "version", &["2"]),
    ('m', "autofsck", &["0"]),
    ('m', "bigtime", &["1"]),
    ('m', "crc", &["1"]),
    ('m', "finobt", &["1"]),
    ('m', "inobtcount", &["1"]),
    ('m', "metadir", &["0"]),
    ('m', "nrext64", &["0"]),
    ('m', "reflink", &["1"]),
    ('m', "rmapbt", &["0"]),
    ('n', "ftype", &["1"]),
    ('n', "parent", &["0"]),
    ('n', "version", &["2"]),
    ('r', "noalign", &["0", "1"]),
    ('r', "rtdev", &[]),
    ('r', "size", &[]),
];

/// The sections of a configuration file.
const SECTIONS: [(&str, char); 8] = [
    ("block", 'b'),
    ("data", 'd'),
    ("inode", 'i'),
    ("log", 'l'),
    ("metadata", 'm'),
    ("naming", 'n'),
    ("realtime", 'r'),
    ("sector", 's'),
];

/// Takes the options over: what follows each letter on the command line, `c` for configuration files.
pub fn take(o: &mut MkfsOptions, given: &[(char, &[String])]) -> Result<()> {
    let mut parts = Vec::new();
    for (option, words) in given {
        for word in words.iter().flat_map(|w| w.split(',')) {
            let (name, value) = match word.split_once('=') {
                Some((name, value)) => (name, Some(value.to_owned())),
                None => (word, None),
            };
            match (*option, name, value) {
                ('c', "options", Some(file)) => parts.extend(configuration(Path::new(&file))?),
                ('c', ..) => {
                    let why = format!("-c {word}: options=FILE is expected");
                    return Err(Error::usage(why));
                }
                (option, name, value) => parts.push(Part {
                    option,
                    name: name.into(),
                    value,
                }),
            }
        }
    }
    for (i, part) in parts.iter().enumerate() {
        let same = |p: &Part| (p.option, &p.name) == (part.option, &part.name);
        if parts[..i].iter().any(same) {
            let why = format!("-{} {}: it is given twice", part.option, part.name);
            return Err(Error::usage(why));
        }
    }
    // What others are multiples of comes first.
    let unit = |p: &Part| {
        let sizes = [('b', "size"), ('s', "size"), ('d', "sectsize")];
        !sizes.contains(&(p.option, &p.name))
    };
    parts.sort_by_key(unit);
    parts.iter().try_for_each(|part| part.take(o))?;
    let internal = |p: &&Part| (p.option, p.name.as_str()) == ('l', "internal");
    match parts.iter().find(internal) {
        Some(part) if o.log_device.is_some() => Err(part.wrong("the log is on another device")),
        _ => Ok(()),
    }
}

/// The parts that a configuration file has. A name without a directory also means one of those that come with mkfs.xfs.
fn configuration(file: &Path) -> Result<Vec<Part>> {
    let with_xfsprogs = || {
        let path = PathBuf::from(CONFIGURATIONS).join(file);
        (file.components().count() == 1 && path.exists()).then_some(path)
    };
    let path = match file.exists() {
        true => file.to_owned(),
        false => with_xfsprogs().unwrap_or_else(|| file.to_owned()),
    };
    let text = fs::read_to_string(&path).context(|| format!("-c options={}", path.display()))?;
    let mut section = None;
    let mut parts = Vec::new();
    for (n, line) in (1..).zip(text.lines()) {
        let wrong = |why: &str| Error::usage(format!("{}:{n}: {why}", path.display()));
        let line = line.trim();
        if line.is_empty() || line.starts_with(['#', ';']) {
            continue;
        }
        if let Some(name) = line.strip_prefix('[').and_then(|l| l.strip_suffix(']')) {
            let known = SECTIONS.iter().find(|(known, _)| *known == name);
            section = Some(known.ok_or_else(|| wrong("there is no such section"))?.1);
            continue;
        }
        let (name, value) = line
            .split_once('=')
            .ok_or_else(|| wrong("NAME=VALUE is expected"))?;
        parts.push(Part {
            option: section.ok_or_else(|| wrong("a [section] has to come first"))?,
            name: name.trim().into(),
            value: Some(value.trim().into()),
        });
    }
    Ok(parts)
}

impl Part {
    fn wrong(&self, why: &str) -> Error {
        let Part {
            option,
            name,
            value,
        } = self;
        let value = value.as_ref().map(|v| format!("={v}"));
        Error::usage(format!(
            "-{option} {name}{}: {why}",
            value.unwrap_or_default()
        ))
    }

    fn value(&self) -> Result<&str> {
        let missing = || self.wrong("NAME=VALUE is expected");
        self.value.as_deref().ok_or_else(missing)
    }

    /// A size, in bytes, or with the suffix `b` in blocks, `s` in sectors.
    fn bytes(&self, o: &MkfsOptions) -> Result<u64> {
        let value = self.value()?;
        let (number, unit) = match value.as_bytes() {
            [b'0'..=b'9', .., b'b'] => (&value[..value.len() - 1], o.block_size),
            [b'0'..=b'9', .., b's'] => (&value[..value.len() - 1], o.sector_size),
            _ => (value, 1),
        };
        let bytes = size(number).map_err(|e| self.wrong(&e))?;
        let product = bytes.checked_mul(unit.into());
        product.ok_or_else(|| self.wrong("too much"))
    }

    /// A size that has to fit into 32 bits.
    fn small(&self, o: &MkfsOptions) -> Result<u32> {
        u32::try_from(self.bytes(o)?).map_err(|_| self.wrong("too much"))
    }

    fn number<T: std::str::FromStr>(&self) -> Result<T> {
        let parsed = self.value()?.parse();
        parsed.map_err(|_| self.wrong("not such a number"))
    }

    fn take(&self, o: &mut MkfsOptions) -> Result<()> {
        match (self.option, self.name.as_str()) {
            ('b', "size") => o.block_size = self.small(o)?,
            ('d', "agcount") => o.agcount = Some(self.number()?),
            ('d', "agsize") => o.agsize = Some(self.bytes(o)?),
            ('d', "size") => o.size = Some(self.bytes(o)?),
            ('d', "sectsize") | ('s', "size") => o.sector_size = self.small(o)?,
            ('i', "size") => o.inode_size = self.small(o)?,
            ('i', "perblock") => {
                let inodes: u32 = self.number()?;
                let size = o.block_size.checked_div(inodes);
                o.inode_size = size.ok_or_else(|| self.wrong("not such a number"))?;
            }
            ('i', "maxpct") => o.max_pct = Some(self.number()?),
            ('l', "size") => o.log_size = Some(self.bytes(o)?),
            ('l', "logdev" | "name") => {
                let again = o.log_device.replace(self.value()?.into());
                if again.is_some() {
                    return Err(self.wrong("the device of the log is given twice"));
                }
            }
            ('m', "uuid") => {
                let uuid = parse_uuid(self.value()?);
                o.uuid = Some(uuid.ok_or_else(|| self.wrong("not a UUID"))?);
            }
            ('l' | 's', "sectsize") => self.only(
                self.small(o)? == o.sector_size,
                "the sector size of the data",
            )?,
            ('n', "size") => self.only(
                self.small(o)? == o.block_size.max(4096),
                "blocks of directories as large as the others, and at least 4096 bytes",
            )?,
            ('r', "extsize") => self.only(
                self.small(o)? == o.block_size.max(4096),
                "no realtime section",
            )?,
            _ => return self.always(),
        }
        Ok(())
    }

    fn only(&self, is_so: bool, what: &str) -> Result<()> {
        match is_so {
            true => Ok(()),
            false => Err(self.wrong(&format!("uvfs only makes file systems with {what}"))),
        }
    }

    fn always(&self) -> Result<()> {
        let known = ALWAYS
            .iter()
            .find(|a| (a.0, a.1) == (self.option, self.name.as_str()));
        let Some((_, name, values)) = known else {
            return Err(self.wrong("there is no such option"));
        };
        match (values, name) {
            ([], &"name") if self.option == 'd' => {
                Err(self.wrong("the image is given without an option"))
            }
            ([], _) => Err(self.wrong("uvfs makes no file systems that have this")),
            (values, name) => {
                let value = self.value.as_deref().unwrap_or("1");
                self.only(values.contains(&value), &format!("{name}={}", values[0]))
            }
        }
    }
}
