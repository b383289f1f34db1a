//! `-o` options, in the habit of mount(8) and libfuse.

mod words;

use std::path::PathBuf;
use std::time::Duration;

use clap::builder::{PossibleValuesParser, TypedValueParser};
use rustix::mount::MountFlags;
use uvfs_cli::{DURATIONS, Error, Result, SIZES, duration, microseconds, size};
use uvfs_io::engine::EngineKind;
use uvfs_passthrough::{Backed, KeepCache, Options as Passthrough};
use uvfs_queue::wait::{WaitConfig, WaitMode};
use uvfs_server::mount::largest_request;
use uvfs_server::{SessionOptions, Transport};

use words::Foreign;

/// The options of `-o`, for the help.
pub fn help() -> String {
    format!("{OWN}\n\n{}\n\n{SIZES} {DURATIONS}", words::help())
}

const OWN: &str = "\
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
  nonempty                   mount over a directory that is not empty, and hides what is in it;
                             mount -t fuse.uvfs always may
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
  kernel_cache, auto_cache   as in libfuse, data alone: what the kernel has cached of a file stays
                             valid over opens; or does unless the file has changed (default)
  survive                    the mount outlives its server. When a signal kills that, or when it
                             crashes, another one goes on, and no program sees an error. Implies
                             transport=dev; not with host_locks, auto_unmount, or an image in an
                             object store
  survive=fast               the same over FUSE-over-io_uring. The server leaves no core dump
  host_locks                 flock and POSIX locks are shared with programs outside of the mount
  xdev                       don't cross into what is mounted below the source
  attr_timeout=TIME, entry_timeout=TIME, negative_timeout=TIME
                             for how long the kernel may cache attributes, names and missing
                             names, whether told of changes or not (where it is not told, 1 s, 1 s
                             and 0)
  max_write=SIZE             largest read or write request (at most, and by default, 2 MiB or what
                             fs.fuse.max_pages_limit allows, by default 1 MiB)
  max_read=SIZE              largest read request (by default max_write, at least 1 MiB)
  max_readahead=SIZE         largest readahead
  slow=TIME                  log requests that wait for longer; uvfs stats and uvfs top list them
                             (default 10 s; 0: none)
  fsname=NAME, subtype=NAME  what /proc/mounts shows (default SOURCE and uvfs; an empty subtype
                             makes the type plain fuse)
  transport=T, wait=W, spin_us=TIME, foreground
                             as the options of the same names
  memory=SIZE                images: limit of the metadata cache (default 64M); object stores: limit of
                             the memory for data (default 128M)
  engine=sync|aio|uring      images: how metadata is read (default sync)
  logdev=PATH                images: the device of the log, if that is not in the image
                             Images are always read-only, and cached for as long as memory lasts;
                             the options of directories mean nothing for them.
  cache_dir=PATH             object stores: where the local cache is (default uvfs below
                             XDG_CACHE_HOME or ~/.cache)
  cache_size=SIZE            object stores: what it may take (default a tenth of the free space)
  ttl=TIME                   object stores: an open or a lookup does not ask the store for what it
                             said within this time (default 1s); with 0 each open asks. Names and
                             attributes stay valid for as long, and at least for a second
  timeout=TIME               object stores: a request without progress for so long is EIO (default
                             60 s)
  requests=NUMBER            object stores: requests for data at a time (default 64)
  uid=NUMBER, gid=NUMBER     object stores: owner and group of all files (default those who mount)
  file_mode=MODE, dir_mode=MODE
                             object stores: permissions in octal (default 644 and 755)
  metadata                   object stores: types, modes, owners and times come from user metadata,
                             as s3fs and rclone write it, where an object has it. That costs a
                             request for each name whose attributes a program looks at
  write=close                object stores: programs may change files. close and fsync return when the
                             store has what was written. Without this word a store is read-only; it
                             is nosuid and nodev by mount(8), too.
  write=back                 object stores: close and changes of names return when the local cache has
                             them, and the store gets them within seconds; fsync waits for the store.
                             What is left when the mount ends is put by the next one with this cache
  nofsync                    with write=back: fsync waits for the local disk alone
  image                      object stores: the URI names an image. Without this word it does so if
                             the store has an object of that very key; a / at its end says that it
                             does not. memory, timeout and requests are for these images, too.
  nofail                     by mount(8): a source that does not exist is no failure
  remount                    by mount(8): changes the options above down to strictatime, and no other
  defaults, auto, noauto, user[=NAME], users, owner, group, their opposites, _netdev, x-*, X-*, comment=, helper=, uhelper=, silent, loud, iversion, noiversion, nomand
                             accepted, for fstab";

/// Of a larger request each slot of a queue would need more memory, and nothing gains.
const MOST_WRITE: u32 = 2 << 20;

/// What changes of an object store wait for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Write {
    /// It is read-only.
    #[default]
    No,
    Close,
    Back,
}

/// How an object store is served, as far as words say.
#[derive(Clone, Debug, Default)]
#[cfg_attr(not(feature = "object"), allow(dead_code))]
pub struct Remote {
    pub cache_dir: Option<PathBuf>,
    pub cache_size: Option<u64>,
    pub ttl: Option<Duration>,
    pub timeout: Option<Duration>,
    pub requests: Option<usize>,
    pub metadata: bool,
    pub write: Write,
    pub nofsync: bool,
    pub uid: Option<u32>,
    pub gid: Option<u32>,
    pub file_mode: Option<u32>,
    pub dir_mode: Option<u32>,
}

impl Remote {
    /// Refuses words that a directory or image would be served without.
    pub fn none(&self) -> Result<()> {
        let owners = "owners are the source's; use a source with mapped owners (mount --bind -o X-mount.idmap=)";
        let modes = "modes are the source's; change them there";
        let words = [
            ("uid", self.uid.is_some(), owners),
            ("gid", self.gid.is_some(), owners),
            ("file_mode", self.file_mode.is_some(), modes),
            ("dir_mode", self.dir_mode.is_some(), modes),
            (
                "write",
                self.write != Write::No,
                "a directory is writable unless -o ro says otherwise",
            ),
            ("nofsync", self.nofsync, "a directory's fsync is the host's"),
        ];
        let given = words.into_iter().filter(|(_, given, _)| *given);
        let errors = given.map(|(word, _, why)| {
            Error::usage(format!("-o {word}: only for object stores ({why})"))
        });
        Error::all(errors).map_or(Ok(()), Err)
    }
}

/// A mount's options.
#[derive(Clone, Debug)]
pub struct Options {
    pub passthrough: Passthrough,
    pub allow_other: bool,
    pub default_permissions: bool,
    /// The mount may hide what its mount point holds.
    pub nonempty: bool,
    /// The mount goes with its server, however that ends.
    pub auto_unmount: bool,
    /// The mount outlives its server.
    pub survive: bool,
    pub flags: MountFlags,
    pub max_write: u32,
    /// At least `max_write`, if none.
    pub max_read: Option<u32>,
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
    /// The device of an image's log.
    pub logdev: Option<PathBuf>,
    pub remote: Remote,
    /// The source is an image, and not a store.
    pub image: bool,
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

macro_rules! words {
    ($($word:ident)*) => {
        &[$(stringify!($word)),*]
    };
}

/// Words with a value; `passthrough` may have one, and so may `user`.
const VALUES: &[&str] = words! {
    attr_timeout cache cache_dir cache_size comment dir_mode engine entry_timeout file_mode fsname gid
    helper logdev max_read max_readahead max_write memory negative_timeout passthrough requests slow spin_us
    subtype survive timeout transport ttl uhelper uid user wait write
};

/// Words without one, but for those in [`FLAGS`].
const PLAIN: &[&str] = words! {
    allow_other auto_cache auto_unmount default_permissions direct_io foreground host_locks
    image kernel_cache metadata nofail nonempty nopassthrough remount uncached writeback xdev
};

/// Words of fstab, whose work mount(8) does; it passes on the flags that some of these imply.
const FSTAB: &[&str] = words! {
    _netdev auto defaults group iversion loud noauto nogroup noiversion nomand noowner nouser
    nousers owner silent users
};

impl Default for Options {
    fn default() -> Self {
        Self {
            passthrough: Passthrough::default(),
            allow_other: false,
            default_permissions: false,
            nonempty: false,
            auto_unmount: false,
            survive: false,
            flags: MountFlags::NOSUID | MountFlags::NODEV,
            max_write: largest_request(MOST_WRITE),
            max_read: None,
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
            logdev: None,
            remote: Remote::default(),
            image: false,
            sloppy: false,
            nofail: false,
            remount: false,
        }
    }
}

/// The values of `transport`.
pub const TRANSPORTS: [&str; 3] = ["auto", "uring", "dev"];
/// The values of `wait`.
pub const WAITS: [&str; 3] = ["adaptive", "spin", "sleep"];
/// The values of `engine`.
pub const ENGINES: [&str; 3] = ["sync", "aio", "uring"];

/// An argument's values for the help and for completions, and what they mean.
pub fn one_of<T: Clone + Send + Sync + 'static>(
    values: [&'static str; 3],
    meaning: impl Fn(&str) -> Result<T, String> + Clone + Send + Sync + 'static,
) -> impl TypedValueParser<Value = T> {
    PossibleValuesParser::new(values).try_map(move |word| meaning(&word))
}

fn unknown_value(word: &str, values: &[&str]) -> String {
    let near = words::nearest(word, values.iter().copied());
    let hint = near.map_or(String::new(), |near| format!(" (did you mean {near}?)"));
    format!("{word:?} is none of {}{hint}", values.join(", "))
}

/// `auto`, `uring` or `dev`.
pub fn transport(word: &str) -> Result<Transport, String> {
    match word {
        "auto" => Ok(Transport::Auto),
        "uring" => Ok(Transport::Uring),
        "dev" => Ok(Transport::Dev),
        _ => Err(unknown_value(word, &TRANSPORTS)),
    }
}

/// `adaptive`, `spin` or `sleep`.
pub fn wait_mode(word: &str) -> Result<WaitMode, String> {
    match word {
        "adaptive" => Ok(WaitMode::Adaptive),
        "spin" => Ok(WaitMode::Spin),
        "sleep" => Ok(WaitMode::Sleep),
        _ => Err(unknown_value(word, &WAITS)),
    }
}

/// `sync`, `aio` or `uring`.
pub fn engine(word: &str) -> Result<EngineKind, String> {
    word.parse().map_err(|_| unknown_value(word, &ENGINES))
}

/// How long to spin: microseconds, or a duration with a unit; at most a second.
pub fn spin_time(word: &str) -> Result<Duration, String> {
    match microseconds(word)? {
        time if time <= Duration::from_secs(1) => Ok(time),
        _ => Err(format!("{word}: at most 1s")),
    }
}

/// A size of the metadata cache.
pub fn memory(word: &str) -> Result<u64, String> {
    /// The cache must hold a few of the largest structures at a time.
    const LEAST: u64 = 4 << 20;
    let size = size(word)?;
    if size < LEAST {
        return Err(format!("at least {}M are needed", LEAST >> 20));
    }
    Ok(size)
}

/// The number of a user or group.
fn owner(word: &str) -> Result<u32, String> {
    // All ones means "leave it" to chown(2).
    let number = word.parse().ok().filter(|id| *id != u32::MAX);
    number.ok_or_else(|| format!("{word:?} is no number (id -u NAME and id -g NAME give it)"))
}

/// Permission bits. Programs would run as another user with those of set-user-id.
fn permissions(word: &str) -> Result<u32, String> {
    let mode = u32::from_str_radix(word, 8)
        .ok()
        .filter(|mode| *mode <= 0o777);
    mode.ok_or_else(|| format!("{word:?} is no octal number from 0 to 777"))
}

impl Options {
    /// Takes in words. The error names all that can't be taken.
    pub fn parse<'a>(&mut self, words: impl IntoIterator<Item = &'a str>) -> Result<()> {
        let words = words.into_iter().filter(|word| !word.is_empty());
        let outcomes = words.map(|word| (word, self.word(word)));
        let errors = outcomes.filter_map(|(word, outcome)| {
            let why = outcome.err()?;
            Some(Error::usage(format!("-o {word}: {why}")))
        });
        Error::all(errors).map_or(Ok(()), Err)
    }

    fn cache(&mut self, word: &str) -> Result<(), String> {
        let (keep, ttl) = match word {
            "auto" => (KeepCache::Unchanged, Passthrough::default().attr_ttl),
            "always" => (KeepCache::Always, Duration::from_secs(86400)),
            "never" => (KeepCache::Never, Duration::ZERO),
            _ => return Err(unknown_value(word, &["auto", "always", "never"])),
        };
        self.passthrough.keep_cache = keep;
        self.passthrough.watch = word == "auto";
        self.passthrough.direct_io = word == "never";
        (self.passthrough.attr_ttl, self.passthrough.entry_ttl) = (ttl, ttl);
        Ok(())
    }

    /// Answers a word that is none of this command's.
    fn others(&mut self, word: &str, name: &str) -> Result<(), String> {
        match words::foreign(name) {
            Some(Foreign::Always) => return Ok(()),
            Some(Foreign::Is(other)) => return self.word(other),
            _ if self.sloppy => return Ok(()),
            Some(Foreign::Not(instead)) => return Err(format!("not offered ({instead})")),
            None => {}
        }
        let flags = FLAGS.iter().flat_map(|(set, clear, _)| [*set, *clear]);
        let own = [VALUES, PLAIN, FSTAB].concat();
        let known = flags.chain(own.iter().copied()).chain(words::names());
        let known: Vec<_> = known.collect();
        let near = match name != word && known.contains(&name) {
            true => return Err("takes no value".into()),
            false => words::nearest(name, known.into_iter()),
        };
        Err(match near {
            Some(near) => format!("unknown option (did you mean {near}?)"),
            None => "unknown option (uvfs mount --help lists them)".into(),
        })
    }

    fn word(&mut self, word: &str) -> Result<(), String> {
        let (name, value) = match word.split_once('=') {
            Some((name, value)) => (name, Some(value)),
            None => (word, None),
        };
        let wanted = || value.ok_or_else(|| format!("needs a value, as in {name}=..."));
        if name.starts_with("x-") || name.starts_with("X-") {
            return Ok(());
        }
        if value.is_some() && !VALUES.contains(&name) {
            return self.others(word, name);
        }
        let flag = |word: &(&str, &str, _)| name == word.0 || name == word.1;
        if let Some((set, _, flag)) = FLAGS.iter().find(|word| flag(word)) {
            self.flags.set(*flag, name == *set);
            return Ok(());
        }
        match name {
            "allow_other" => self.allow_other = true,
            "default_permissions" => self.default_permissions = true,
            "nonempty" => self.nonempty = true,
            "image" => self.image = true,
            "auto_unmount" => self.auto_unmount = true,
            "kernel_cache" => self.passthrough.keep_cache = KeepCache::Always,
            "auto_cache" => self.passthrough.keep_cache = KeepCache::Unchanged,
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
                    (_, Some(word)) => {
                        return Err(unknown_value(word, &["all", "direct", "auto", "off"]));
                    }
                };
            }
            "cache" => self.cache(wanted()?)?,
            "host_locks" => self.passthrough.host_locks = true,
            "xdev" => self.passthrough.xdev = true,
            "attr_timeout" | "entry_timeout" | "negative_timeout" => {
                let time = duration(wanted()?)?;
                let passthrough = &mut self.passthrough;
                passthrough.watch = false;
                match name {
                    "attr_timeout" => passthrough.attr_ttl = time,
                    "entry_timeout" => passthrough.entry_ttl = time,
                    _ => passthrough.negative_ttl = time,
                }
            }
            "max_write" => {
                let size = size(wanted()?)?;
                if !(4096..=u64::from(MOST_WRITE)).contains(&size) || size % 4096 != 0 {
                    return Err("has to be a multiple of 4096 from 4096 to 2097152".into());
                }
                self.max_write = largest_request(size as u32);
            }
            "max_read" => {
                // libfuse's 0 is no limit, and the kernel's least is a page.
                self.max_read = match size(wanted()?)? {
                    0 => None,
                    size if size >= 4096 => Some(size.min(u64::from(u32::MAX)) as u32),
                    _ => return Err("has to be 0 (no limit) or at least 4096".into()),
                };
            }
            "max_readahead" => {
                self.max_readahead = u32::try_from(size(wanted()?)?)
                    .map_err(|_| "has to be below 4 GiB".to_owned())?;
            }
            "slow" => self.slow = duration(wanted()?)?,
            "fsname" => self.fsname = Some(wanted()?.to_owned()),
            "subtype" => self.subtype = wanted()?.to_owned(),
            "transport" => self.transport = transport(wanted()?)?,
            "wait" => self.wait.mode = wait_mode(wanted()?)?,
            "spin_us" => self.wait.spin = spin_time(wanted()?)?,
            "memory" => self.memory = Some(memory(wanted()?)?),
            "logdev" => self.logdev = Some(wanted()?.into()),
            "engine" => self.engine = engine(wanted()?)?,
            "cache_dir" => self.remote.cache_dir = Some(wanted()?.into()),
            "cache_size" => self.remote.cache_size = Some(size(wanted()?)?),
            "ttl" => self.remote.ttl = Some(duration(wanted()?)?),
            "timeout" => match duration(wanted()?)? {
                Duration::ZERO => return Err("has to be more than 0".into()),
                time => self.remote.timeout = Some(time),
            },
            "requests" => {
                let number = wanted()?.parse().ok().filter(|n| (1..=1024).contains(n));
                self.remote.requests = Some(number.ok_or("has to be from 1 to 1024")?);
            }
            "metadata" => self.remote.metadata = true,
            "write" => match wanted()? {
                "close" => self.remote.write = Write::Close,
                "back" => self.remote.write = Write::Back,
                word => return Err(unknown_value(word, &["close", "back"])),
            },
            "nofsync" => self.remote.nofsync = true,
            "uid" => self.remote.uid = Some(owner(wanted()?)?),
            "gid" => self.remote.gid = Some(owner(wanted()?)?),
            "file_mode" => self.remote.file_mode = Some(permissions(wanted()?)?),
            "dir_mode" => self.remote.dir_mode = Some(permissions(wanted()?)?),
            "foreground" => self.foreground = true,
            "survive" => {
                self.survive = true;
                match value {
                    None => {}
                    Some("fast") => self.transport = Transport::Uring,
                    Some(word) => return Err(unknown_value(word, &["fast"])),
                }
            }
            "nofail" => self.nofail = true,
            "remount" => self.remount = true,
            "user" | "comment" | "helper" | "uhelper" => {}
            _ if FSTAB.contains(&name) => {}
            _ => return self.others(word, name),
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The last of several words holds, and misspelt ones are refused.
    #[test]
    fn a_later_word_wins_and_nonsense_is_refused() {
        let mut options = Options::default();
        options
            .parse("ro,rw,attr_timeout=2.5,,max_write=64K,x-systemd.requires=/a".split(','))
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
            options.parse(words.split(',')).unwrap();
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
            "uid=root",
            "gid=-1",
            "uid=4294967295",
            "file_mode=4755",
            "file_mode=rw",
            "dir_mode=0x1ff",
            "dir_mode",
            "metadata=1",
            "write",
            "write=never",
        ] {
            assert_eq!(options.parse([bad]).unwrap_err().code(), 2, "{bad}");
        }
    }

    /// Owners and modes are for what has none of its own.
    #[test]
    fn owners_and_modes_of_stores() {
        let mut options = Options::default();
        options
            .parse("uid=0,gid=100,file_mode=0640,dir_mode=750,metadata".split(','))
            .unwrap();
        let remote = &options.remote;
        assert_eq!((remote.uid, remote.gid), (Some(0), Some(100)));
        assert_eq!(
            (remote.file_mode, remote.dir_mode),
            (Some(0o640), Some(0o750))
        );
        assert!(remote.metadata);
        let error = remote.none().unwrap_err();
        assert_eq!((error.code(), error.messages().len()), (2, 4));
        assert!(Options::default().remote.none().is_ok());
    }

    /// mount -s takes unknown words, and no wrong values.
    #[test]
    fn a_sloppy_mount_takes_unknown_words() {
        let mut options = Options {
            sloppy: true,
            ..Options::default()
        };
        let error = options.parse("ro,zzz,cache=alway,big_writes".split(','));
        let expected =
            "-o cache=alway: \"alway\" is none of auto, always, never (did you mean always?)";
        assert_eq!(error.unwrap_err().messages(), [expected]);
    }

    /// Words of libfuse mean what they mean there.
    #[test]
    fn words_of_libfuse() {
        let mut options = Options::default();
        let words = "auto_unmount,nonempty,kernel_cache,max_read=128K,noforget,use_ino,hard_remove,\
            writeback_cache,io_uring,remember=10,ac_attr_timeout=1,no_remote_lock,intr";
        options.parse(words.split(',')).unwrap();
        assert!(options.auto_unmount && options.nonempty && options.passthrough.writeback);
        assert_eq!(options.max_read, Some(128 << 10));
        assert_eq!(options.passthrough.keep_cache, KeepCache::Always);
        options.parse(["auto_cache", "max_read=0"]).unwrap();
        assert_eq!(options.passthrough.keep_cache, KeepCache::Unchanged);
        assert_eq!(options.max_read, None);
        assert!(options.parse(["max_read=100"]).is_err());
    }

    /// The help has the words that can be typed, and no others.
    #[test]
    fn every_word_is_known() {
        for word in PLAIN.iter().chain(FSTAB) {
            Options::default().parse([*word]).unwrap();
            let is_fstab = FSTAB.contains(word);
            assert!(is_fstab || OWN.contains(word), "{word} is not in the help");
        }
        for word in VALUES {
            let error = Options::default().parse([format!("{word}=\u{1}").as_str()]);
            let unknown = error.is_err_and(|error| error.to_string().contains("unknown option"));
            assert!(!unknown, "{word}");
            assert!(OWN.contains(&word.to_string()), "{word} is not in the help");
        }
    }
}
