//! `-o` options, in the habit of mount(8) and libfuse.

use std::str::FromStr;
use std::time::Duration;

use rustix::mount::MountFlags;
use uvfs_cli::{Error, Result};
use uvfs_io::engine::EngineKind;
use uvfs_passthrough::{Backed, KeepCache, Options as Passthrough};
use uvfs_queue::wait::{WaitConfig, WaitMode};
use uvfs_server::mount::largest_request;
use uvfs_server::{SessionOptions, Transport};

/// The options of `-o`, for the help.
pub const HELP: &str = "\
Mount options (-o, comma separated; a later one wins):
  ro, rw                     read-only; read-write (default)
  nosuid, nodev, noexec, nosymfollow, sync, dirsync, lazytime
                             as in mount(8), and their opposites. uvfs mount implies nosuid and
                             nodev; mount -t fuse.uvfs by root implies those of nosuid, nodev and
                             noexec that hold for the source or a mount below it
  noatime, nodiratime, relatime, strictatime
                             as in mount(8). By default, and with relatime, the source's own rule
                             holds. strictatime counts what is read from the server, so at least
                             the first read after each open; nodiratime and strictatime need root
                             and a source with file handles
  allow_other                other users may use the mount, under the usual permission checks
  default_permissions        the kernel checks permissions; on with allow_other. Without either
                             only the user who mounts has access, whom the host checks
  auto_unmount               the mount goes when its server is killed
  writeback                  the kernel caches writes and sends them later, in larger pieces
  direct_io                  the kernel caches no data
  uncached                   data is not kept in the host's page cache (RWF_DONTCACHE, Linux
                             6.14), nor for long in the kernel's cache of the mount
  passthrough[=all|direct|auto|off], nopassthrough
                             which open files the kernel reads and writes at the host itself (FUSE
                             passthrough, Linux 6.9, root). auto (the default): files that are open
                             for reading and writing, and O_DIRECT files that are only read or lie
                             in memory. direct: all O_DIRECT files, which then can't switch O_DIRECT
                             or O_APPEND off (dd oflag=direct does at an odd end). auto and direct do
                             nothing with writeback or uncached
  cache=auto|always|never    what the kernel may cache: auto (the default) caches for as long as
                             memory lasts where the server is told of changes of the source (as
                             root, on ext2 to ext4, XFS and tmpfs), and elsewhere for a second;
                             always is for sources that only change through the mount, and lasts a
                             day; never caches no data, names or attributes
  host_locks                 flock and POSIX locks are shared with programs outside of the mount
  xdev                       don't cross into what is mounted below the source
  attr_timeout=S, entry_timeout=S, negative_timeout=S
                             for how many seconds the kernel may cache attributes, names and
                             missing names, whether told of changes or not (where it is not told,
                             1, 1 and 0)
  max_write=BYTES            largest read or write request (at most, and by default, 2 MiB or what
                             fs.fuse.max_pages_limit allows, by default 1 MiB)
  max_readahead=BYTES        largest readahead
  slow=S                     log requests that wait for longer than S seconds; uvfs stats and uvfs top
                             list them (default 10; 0: none)
  fsname=NAME, subtype=NAME  what /proc/mounts shows (default SOURCE and uvfs; an empty subtype
                             makes the type plain fuse)
  transport=T, wait=W, spin_us=N, foreground   as the options of the same names
  memory=BYTES               images: limit of the metadata cache (default 64M)
  engine=sync|aio|uring      images: how metadata is read (default sync)
                             Images are always read-only, and cached for as long as memory lasts;
                             the options of directories mean nothing for them.
  nofail                     by mount(8): a source that does not exist is no failure
  remount                    by mount(8): changes the options above down to strictatime, and no other
  defaults, auto, noauto, user[=NAME], users, owner, group, their opposites, _netdev, x-*, X-*,
  comment=, helper=, uhelper=, silent, loud, iversion, noiversion, nomand   accepted, for fstab";

/// Of a larger request each slot of a queue would need more memory, and nothing gains.
const MOST_WRITE: u32 = 2 << 20;

/// A mount's options.
#[derive(Clone, Debug)]
pub struct Options {
    pub passthrough: Passthrough,
    pub allow_other: bool,
    pub default_permissions: bool,
    pub auto_unmount: bool,
    pub flags: MountFlags,
    pub max_write: u32,
    pub max_readahead: u32,
    pub uncached: bool,
    pub slow: Duration,
    pub fsname: Option<String>,
    pub subtype: String,
    pub transport: Transport,
    pub wait: WaitConfig,
    pub foreground: bool,
    pub memory: Option<u64>,
    pub engine: EngineKind,
    /// Unknown words mean nothing (`mount -s`).
    pub sloppy: bool,
    /// A source that is not there is no failure.
    pub nofail: bool,
    /// Changes the flags of what is mounted already.
    pub remount: bool,
}

/// The flags of mount(2) by the words that set and clear them.
const FLAGS: &[(&str, &str, MountFlags)] = &[
    ("ro", "rw", MountFlags::RDONLY),
    ("nosuid", "suid", MountFlags::NOSUID),
    ("nodev", "dev", MountFlags::NODEV),
    ("noexec", "exec", MountFlags::NOEXEC),
    ("nosymfollow", "symfollow", MountFlags::NOSYMFOLLOW),
    ("sync", "async", MountFlags::SYNCHRONOUS),
    ("dirsync", "nodirsync", MountFlags::DIRSYNC),
    ("lazytime", "nolazytime", MountFlags::LAZYTIME),
    ("noatime", "atime", MountFlags::NOATIME),
    ("nodiratime", "diratime", MountFlags::NODIRATIME),
    ("relatime", "norelatime", MountFlags::RELATIME),
    ("strictatime", "nostrictatime", MountFlags::STRICTATIME),
];

/// Words with a value.
const VALUES: &[&str] = &[
    "attr_timeout",
    "entry_timeout",
    "negative_timeout",
    "slow",
    "max_write",
    "max_readahead",
    "fsname",
    "subtype",
    "transport",
    "wait",
    "spin_us",
    "memory",
    "engine",
    "cache",
    "passthrough",
    "user",
    "comment",
    "helper",
    "uhelper",
];

impl Default for Options {
    fn default() -> Self {
        Self {
            passthrough: Passthrough::default(),
            allow_other: false,
            default_permissions: false,
            auto_unmount: false,
            flags: MountFlags::NOSUID | MountFlags::NODEV,
            max_write: largest_request(MOST_WRITE),
            max_readahead: 1 << 20,
            uncached: false,
            slow: SessionOptions::default().slow,
            fsname: None,
            subtype: "uvfs".into(),
            transport: Transport::Auto,
            wait: WaitConfig::default(),
            foreground: false,
            memory: None,
            engine: EngineKind::Sync,
            sloppy: false,
            nofail: false,
            remount: false,
        }
    }
}

/// `auto`, `uring` or `dev`.
pub fn transport(word: &str) -> Result<Transport, String> {
    match word {
        "auto" => Ok(Transport::Auto),
        "uring" => Ok(Transport::Uring),
        "dev" => Ok(Transport::Dev),
        _ => Err(format!("{word:?} is none of auto, uring, dev")),
    }
}

/// `adaptive`, `spin` or `sleep`.
pub fn wait_mode(word: &str) -> Result<WaitMode, String> {
    match word {
        "adaptive" => Ok(WaitMode::Adaptive),
        "spin" => Ok(WaitMode::Spin),
        "sleep" => Ok(WaitMode::Sleep),
        _ => Err(format!("{word:?} is none of adaptive, spin, sleep")),
    }
}

/// Microseconds to spin, at most a second.
pub fn spin_time(word: &str) -> Result<Duration, String> {
    match word.parse::<u64>() {
        Ok(micros) if micros <= 1_000_000 => Ok(Duration::from_micros(micros)),
        _ => Err(format!(
            "{word:?} is no number of microseconds up to 1000000"
        )),
    }
}

/// A size of the metadata cache.
pub fn memory(word: &str) -> Result<u64, String> {
    /// The cache must hold a few of the largest structures at a time.
    const LEAST: u64 = 4 << 20;
    let size = bytes(word)?;
    if size < LEAST {
        return Err(format!("at least {}M are needed", LEAST >> 20));
    }
    Ok(size)
}

/// Bytes, with an optional K, M or G of 1024.
pub fn bytes(word: &str) -> Result<u64, String> {
    let (digits, shift) = match word.as_bytes().last() {
        Some(b'k' | b'K') => (&word[..word.len() - 1], 10),
        Some(b'm' | b'M') => (&word[..word.len() - 1], 20),
        Some(b'g' | b'G') => (&word[..word.len() - 1], 30),
        _ => (word, 0),
    };
    digits
        .parse::<u64>()
        .ok()
        .and_then(|number| number.checked_mul(1 << shift))
        .ok_or_else(|| format!("{word:?} is no number of bytes (such as 65536, 64K or 1M)"))
}

pub fn seconds(word: &str) -> Result<Duration, String> {
    f64::from_str(word)
        .ok()
        .and_then(|seconds| Duration::try_from_secs_f64(seconds).ok())
        .ok_or_else(|| format!("{word:?} is no number of seconds"))
}

impl Options {
    /// Takes in a comma separated list.
    pub fn parse(&mut self, list: &str) -> Result<()> {
        for word in list.split(',').filter(|word| !word.is_empty()) {
            self.word(word)
                .map_err(|why| Error::usage(format!("-o {word}: {why}")))?;
        }
        Ok(())
    }

    fn cache(&mut self, word: &str) -> Result<(), String> {
        let (keep, ttl) = match word {
            "auto" => (KeepCache::Unchanged, Passthrough::default().attr_ttl),
            "always" => (KeepCache::Always, Duration::from_secs(86400)),
            "never" => (KeepCache::Never, Duration::ZERO),
            _ => return Err("is none of auto, always, never".into()),
        };
        self.passthrough.keep_cache = keep;
        self.passthrough.watch = word == "auto";
        self.passthrough.direct_io = word == "never";
        (self.passthrough.attr_ttl, self.passthrough.entry_ttl) = (ttl, ttl);
        Ok(())
    }

    fn unknown(&self, why: &str) -> Result<(), String> {
        match self.sloppy {
            true => Ok(()),
            false => Err(format!("{why} (uvfs mount --help lists them)")),
        }
    }

    fn word(&mut self, word: &str) -> Result<(), String> {
        let (name, value) = match word.split_once('=') {
            Some((name, value)) => (name, Some(value)),
            None => (word, None),
        };
        let wanted = || value.ok_or_else(|| format!("needs a value, as in {name}=..."));
        let foreign = name.starts_with("x-") || name.starts_with("X-");
        if value.is_some() && !VALUES.contains(&name) && !foreign {
            return self.unknown("unknown option, or one that takes no value");
        }
        let flag = |word: &(&str, &str, _)| name == word.0 || name == word.1;
        if let Some((set, _, flag)) = FLAGS.iter().find(|word| flag(word)) {
            self.flags.set(*flag, name == *set);
            return Ok(());
        }
        match name {
            "allow_other" => self.allow_other = true,
            "default_permissions" => self.default_permissions = true,
            "auto_unmount" => self.auto_unmount = true,
            "writeback" => self.passthrough.writeback = true,
            "direct_io" => self.passthrough.direct_io = true,
            "uncached" => {
                self.uncached = true;
                self.passthrough.uncached = true;
            }
            "passthrough" | "nopassthrough" => {
                self.passthrough.passthrough = match (name, value) {
                    ("nopassthrough", None) | (_, Some("off")) => Backed::Off,
                    (_, None | Some("all")) => Backed::All,
                    (_, Some("direct")) => Backed::Direct,
                    (_, Some("auto")) => Backed::Auto,
                    _ => return Err("is none of all, direct, auto, off".into()),
                };
            }
            "cache" => self.cache(wanted()?)?,
            "host_locks" => self.passthrough.host_locks = true,
            "xdev" => self.passthrough.xdev = true,
            "attr_timeout" | "entry_timeout" | "negative_timeout" => {
                let time = seconds(wanted()?)?;
                let passthrough = &mut self.passthrough;
                passthrough.watch = false;
                match name {
                    "attr_timeout" => passthrough.attr_ttl = time,
                    "entry_timeout" => passthrough.entry_ttl = time,
                    _ => passthrough.negative_ttl = time,
                }
            }
            "max_write" => {
                let size = bytes(wanted()?)?;
                if !(4096..=u64::from(MOST_WRITE)).contains(&size) || size % 4096 != 0 {
                    return Err("has to be a multiple of 4096 from 4096 to 2097152".into());
                }
                self.max_write = largest_request(size as u32);
            }
            "max_readahead" => {
                self.max_readahead = u32::try_from(bytes(wanted()?)?)
                    .map_err(|_| "has to be below 4 GiB".to_owned())?;
            }
            "slow" => self.slow = seconds(wanted()?)?,
            "fsname" => self.fsname = Some(wanted()?.to_owned()),
            "subtype" => self.subtype = wanted()?.to_owned(),
            "transport" => self.transport = transport(wanted()?)?,
            "wait" => self.wait.mode = wait_mode(wanted()?)?,
            "spin_us" => self.wait.spin = spin_time(wanted()?)?,
            "memory" => self.memory = Some(memory(wanted()?)?),
            "engine" => self.engine = wanted()?.parse()?,
            "foreground" => self.foreground = true,
            "nofail" => self.nofail = true,
            "remount" => self.remount = true,
            // mount(8) passes on the flags that some of these imply.
            "defaults" | "auto" | "noauto" | "user" | "nouser" | "users" | "nousers" | "owner"
            | "noowner" | "group" | "nogroup" | "_netdev" | "silent" | "loud" | "iversion"
            | "noiversion" | "nomand" | "comment" | "helper" | "uhelper" => {}
            _ if foreign => {}
            _ => return self.unknown("unknown option"),
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A mount option would be ignored, or misspelt ones accepted.
    #[test]
    fn a_later_word_wins_and_nonsense_is_refused() {
        let mut options = Options::default();
        options
            .parse("ro,rw,attr_timeout=2.5,,max_write=64K,x-systemd.requires=/a")
            .unwrap();
        assert!(!options.flags.contains(MountFlags::RDONLY));
        assert_eq!(options.passthrough.attr_ttl, Duration::from_millis(2500));
        assert_eq!(options.max_write, 65536);
        assert_eq!(options.passthrough.passthrough, Backed::Auto);
        for (words, backed) in [
            ("passthrough", Backed::All),
            ("nopassthrough", Backed::Off),
            ("passthrough=direct", Backed::Direct),
            ("passthrough=auto", Backed::Auto),
            ("passthrough=off", Backed::Off),
            ("nopassthrough,passthrough=all", Backed::All),
        ] {
            options.parse(words).unwrap();
            assert_eq!(options.passthrough.passthrough, backed, "{words}");
        }
        for bad in [
            "nonsense",
            "ro=1",
            "passthrough=some",
            "passthrough=",
            "nopassthrough=off",
            "max_write=5000",
            "attr_timeout",
            "attr_timeout=-1",
        ] {
            assert_eq!(options.parse(bad).unwrap_err().code(), 2, "{bad}");
        }
    }
}
