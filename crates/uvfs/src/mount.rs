//! `uvfs mount`: serves a directory or an image.

use std::cell::OnceCell;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use clap::ValueHint;
use rustix::event::{PollFd, PollFlags};
use rustix::fs::{FileType, Mode, OFlags};
use rustix::io::Errno;
use rustix::mount::MountFlags;
use rustix::process::{Resource, getrlimit, setrlimit};
use uvfs_cli::{Context, Error, Result, duration, log, warn};
use uvfs_io::device::Device;
use uvfs_io::engine::{Engine, EngineKind};
use uvfs_mem::{Monitor, MonitorConfig, Shrinkers};
use uvfs_passthrough::{Backed, Passthrough};
use uvfs_server::layers::{Layer, ReadOnly};
use uvfs_server::mount::ending::{self, Stage};
use uvfs_server::mount::{self, Ending, Mount, MountOptions};
use uvfs_server::survive;
use uvfs_server::{
    ClientLimits, FileSystem, Server, ServerOptions, Session, SessionOptions, Transport,
};
use uvfs_sys::limits;
use uvfs_sys::process::SignalSet;
use uvfs_xfs::XfsFs;
use uvfs_xfs::blocks::FileBlocks;

use crate::confine;
use crate::daemon::{self, Asked, Report, Side};
use crate::image::{self, Opened, remote};
use crate::options::{self, Options};
use crate::{umount, upgrade};

/// How much of the machine's limit for dirty pages a mount with `-o writeback` may use, in percent. The mount's
/// server dirties pages of the source as it writes, so the mount must not get all of it.
const DIRTY_SHARE: u32 = 10;

/// How long a server that goes on with an image waits until it asks the store again.
#[cfg(feature = "object")]
const PAUSE: Duration = Duration::from_secs(1);

/// Open files that a server's table has room for from the beginning. It takes 8 bytes for each.
const TABLE: u64 = 1 << 15;

const EXAMPLES: &str = "\
Examples:
  uvfs mount /srv/data /mnt
  uvfs mount -o ro,allow_other --transport dev --foreground /srv/data /mnt
  uvfs mount -o writeback,attr_timeout=60,entry_timeout=60 /srv/data /mnt
  uvfs mount disk.img /mnt
  uvfs mount s3://bucket/prefix /mnt
  uvfs umount /mnt

An XFS image (a file or a block device) is served read-only, and so is an object store without -o write=close. The mount point is made if it is missing. The command returns when the mount answers.

Exit status: 0 mounted (with --foreground: unmounted again), 1 failed, 2 wrong usage.";

/// Serve a directory, or an XFS image, at a mount point.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES, after_long_help = format!("{}\n\n{EXAMPLES}", options::help()))]
pub struct Args {
    /// How requests come by: auto takes FUSE-over-io_uring where the kernel has it
    #[arg(long, value_parser = options::one_of(options::TRANSPORTS, options::transport), value_name = "auto|uring|dev", hide_possible_values = true)]
    transport: Option<uvfs_server::Transport>,
    /// The behaviour of a queue that has nothing to do
    #[arg(long, value_parser = options::one_of(options::WAITS, options::wait_mode), value_name = "adaptive|spin|sleep", hide_possible_values = true)]
    wait: Option<uvfs_queue::wait::WaitMode>,
    /// Longest spin: microseconds, or with a unit
    #[arg(long, value_parser = options::spin_time, value_name = "TIME")]
    spin_us: Option<Duration>,
    /// Log requests that wait for longer (default 10 s; 0: none)
    #[arg(long, value_parser = duration, value_name = "TIME")]
    slow: Option<Duration>,
    /// An image: the device of its log, if that is not in the image
    #[arg(long, value_name = "PATH", value_hint = ValueHint::FilePath)]
    logdev: Option<PathBuf>,
    /// Don't go into the background
    #[arg(short, long)]
    foreground: bool,
    /// Mount options; --help lists them
    #[arg(short = 'o', value_name = "OPTIONS")]
    options: Vec<String>,
    /// The directory, image or object store (s3://BUCKET/PREFIX) to serve
    #[arg(value_hint = ValueHint::AnyPath)]
    source: PathBuf,
    /// Where
    #[arg(value_hint = ValueHint::DirPath)]
    mountpoint: PathBuf,
}

/// A mount point, and whether it has to go again when mounting fails.
struct Place {
    path: PathBuf,
    made: bool,
    /// The source, and what a next program that serves the mount has of it: the directory, the image and the device of its log, or
    /// the lock of a store's cache.
    kept: OnceCell<(PathBuf, Vec<RawFd>)>,
}

impl Place {
    fn new(path: PathBuf, made: bool) -> Self {
        Self {
            path,
            made,
            kept: OnceCell::new(),
        }
    }
}

/// Runs it.
pub fn run(args: Args) -> Result<ExitCode> {
    let mut options = Options::default();
    options.parse(args.options.iter().flat_map(|list| list.split(',')))?;
    options.transport = args.transport.unwrap_or(options.transport);
    options.wait.mode = args.wait.unwrap_or(options.wait.mode);
    options.wait.spin = args.spin_us.unwrap_or(options.wait.spin);
    options.slow = args.slow.unwrap_or(options.slow);
    options.foreground |= args.foreground;
    options.logdev = args.logdev.or(options.logdev);
    if options.remount {
        return Err(Error::usage(
            "-o remount: mount(8) does that (mount -o remount,ro MOUNTPOINT)",
        ));
    }
    start(&args.source, &args.mountpoint, options)
}

/// Serves `source` at `mountpoint`, which is made if it is missing.
pub fn start(source: &Path, mountpoint: &Path, mut options: Options) -> Result<ExitCode> {
    // The only user of the mount is the one that the host checks anyway; asking for the attributes
    // of each directory on the way would be for nothing.
    options.default_permissions |= options.allow_other;
    options.passthrough.checks_permissions = options.default_permissions;
    options.passthrough.rules = rules(options.flags);

    let replaced = (upgrade::replaced().as_mut()).map(|replaced| {
        let opened = std::mem::take(&mut replaced.opened);
        (replaced.source.clone(), replaced.at.clone(), opened)
    });
    if let Some((source, path, opened)) = replaced {
        let opened = Source::again(opened, &source)?;
        options.transport = survives_over(&options)?;
        let place = Place::new(path, false);
        return serve(&source, opened, &place, options);
    }
    // The server may have another working directory.
    if let Some(path) = &mut options.logdev {
        *path = (path.canonicalize()).context(|| path.display().to_string())?;
    }
    let uri = image::remote::uri(source);
    if options.survive {
        options.transport = survives_over(&options)?;
    }
    if uri.is_none() {
        options.remote.none()?;
    }
    let (source, image) = match uri {
        Some(_) => (source.to_owned(), None),
        None => directory_or_image(source, options.logdev.as_deref())?,
    };
    let place = place(mountpoint)?;
    if !options.nonempty {
        hides_nothing(&source, &place.path)?;
    }
    // Errors before the mount are reported while there still is a terminal.
    let opened = match (uri, image) {
        (Some(uri), _) => Ok(Source::Uri(uri.into(), None)),
        (None, Some(image)) => Ok(Source::Image(image)),
        (None, None) => open_directory(&source, &place.path).map(Source::Directory),
    };
    let served = opened.and_then(|opened| serve(&source, opened, &place, options));
    if served.is_err() && place.made {
        let _ = std::fs::remove_dir(&place.path);
    }
    served
}

/// The transport of a mount that outlives its server, if the other options allow that.
fn survives_over(options: &Options) -> Result<Transport> {
    let why = match options {
        _ if options.auto_unmount => "auto_unmount: the mount is to stay when its server is killed",
        _ if options.passthrough.host_locks => {
            "host_locks: the next server would not have the locks"
        }
        _ if options.transport == Transport::Uring => return Ok(Transport::Uring),
        _ => return Ok(Transport::Dev),
    };
    Err(Error::usage(format!("-o survive: not with {why}")))
}

/// Finds the source on the host, and opens it if it is an image.
fn directory_or_image(source: &Path, logdev: Option<&Path>) -> Result<(PathBuf, Option<Image>)> {
    let name = || source.display().to_string();
    let source = source.canonicalize().context(name)?;
    let kind = std::fs::metadata(&source)
        .context(|| source.display().to_string())?
        .file_type();
    let image = if kind.is_dir() {
        None
    } else if kind.is_file() || kind.is_block_device() {
        Some(Image::open(&source, logdev)?)
    } else {
        return Err(Error::new(format!(
            "{}: neither a directory nor an image",
            source.display()
        )));
    };
    Ok((source, image))
}

/// Finds or makes the mount point.
fn place(path: &Path) -> Result<Place> {
    let name = || path.display().to_string();
    unmounted(path)?;
    match std::fs::metadata(path) {
        Ok(meta) if !meta.is_dir() => {
            return Err(Error::new(format!(
                "{}: the mount point is not a directory",
                name()
            )));
        }
        Ok(_) => {}
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            std::fs::create_dir_all(path).context(|| format!("making {}", name()))?;
            let path = path.canonicalize().context(name)?;
            return Ok(Place::new(path, true));
        }
        Err(error) => return Err(Error::new(format!("{}: {error}", name()))),
    }
    let path = path.canonicalize().context(name)?;
    Ok(Place::new(path, false))
}

/// Refuses a mount point where uvfs is mounted, and one whose server is dead or hangs. stat(2) does not tell: the
/// kernel may have the attributes of the root.
fn unmounted(path: &Path) -> Result<()> {
    // One that is missing is made.
    let Ok(real) = mount::real_path(path) else {
        return Ok(());
    };
    let line = mount::mounted(&real).context(|| "/proc/self/mountinfo".into())?;
    let Some(line) = line.filter(|line| line.kind.starts_with("fuse")) else {
        return Ok(());
    };
    let name = path.display();
    let what = match daemon::ask(&real)? {
        Asked::Dead => {
            format!("a dead server's mount is still there (uvfs umount {name} takes it away)")
        }
        Asked::Silent => {
            format!("mounted, and its server does not answer (uvfs umount --force {name} ends it)")
        }
        Asked::Answers if mount::subtype(&line.kind) == "uvfs" => {
            "already mounted (uvfs umount takes it away)".into()
        }
        Asked::Answers => return Ok(()),
    };
    Err(Error::new(format!("{name}: {what}")))
}

/// Refuses a mount point that is not empty, as the mount would hide what is there. A directory that is mounted on
/// itself hides nothing.
fn hides_nothing(source: &Path, path: &Path) -> Result<()> {
    let name = path.display();
    if path == Path::new("/") {
        return Err(Error::new(
            "/: the mount would hide the whole system (-o nonempty mounts all the same)",
        ));
    }
    if source == path {
        return Ok(());
    }
    // A user who may not list it has nothing there to hide.
    let holds = std::fs::read_dir(path).is_ok_and(|mut list| list.next().is_some());
    match holds {
        true => Err(Error::new(format!(
            "{name}: the mount point is not empty, and the mount would hide what it holds (-o nonempty mounts all \
             the same)"
        ))),
        false => Ok(()),
    }
}

/// The opened source.
enum Source {
    Directory(OwnedFd),
    Image(Image),
    /// An object store, or an image in one; and what the program from before has its cache locked by.
    Uri(String, Option<OwnedFd>),
}

impl Source {
    /// What an earlier program of this process has opened.
    fn again(opened: Vec<OwnedFd>, source: &Path) -> Result<Self> {
        let name = || source.display().to_string();
        let mut opened = opened.into_iter();
        let first = opened.next().ok_or_else(|| io::Error::from(Errno::BADF));
        let first = first.context(name)?;
        if let Some(uri) = image::remote::uri(source) {
            return Ok(Self::Uri(uri.into(), Some(first)));
        }
        let stat = rustix::fs::fstat(&first).context(name)?;
        if FileType::from_raw_mode(stat.st_mode) == FileType::Directory {
            return Ok(Self::Directory(first));
        }
        let device = Device::again(first, source).map_err(|error| Error::new(error.to_string()))?;
        Ok(Self::Image(Image {
            device: Arc::new(device),
            log: opened.next().map(File::from),
        }))
    }
}

/// An opened image. Its descriptors stay open as long as this process lives, for the next server.
struct Image {
    device: Arc<Device>,
    /// The device of its log, if that is another.
    log: Option<File>,
}

impl Image {
    /// Opens an image, looks whether it is one that can be served, and warns of what may be stale.
    fn open(source: &Path, logdev: Option<&Path>) -> Result<Self> {
        let open = |path: &Path| File::open(path).context(|| path.display().to_string());
        let image = Self {
            device: image::open_device(source, false)?,
            log: logdev.map(open).transpose()?,
        };
        // The cache that serves is made in the process that serves.
        image.read(EngineKind::Sync, image::MEMORY)?.warn(source);
        Ok(image)
    }

    /// The file system on it, read through a cache of its own.
    fn read(&self, engine: EngineKind, memory: u64) -> Result<Opened> {
        let log = (self.log.as_ref()).map(|log| FileBlocks::new(log.try_clone()?));
        let log = log.transpose().context(|| "the device of the log".into())?;
        image::open_volume(&self.device, log, engine, memory)
    }

    fn descriptors(&self) -> Vec<RawFd> {
        let log = self.log.as_ref().map(AsRawFd::as_raw_fd);
        let device = self.device.as_fd().as_raw_fd();
        std::iter::once(device).chain(log).collect()
    }
}

fn serve(source: &Path, opened: Source, place: &Place, options: Options) -> Result<ExitCode> {
    let split = match upgrade::replaced().is_some() {
        true => Report::none(options.foreground).map(Side::Server),
        false => daemon::split(&place.path, !options.foreground),
    };
    let mut report = match split? {
        Side::Server(report) => report,
        Side::Parent(result) => return result,
    };
    raise_limit();
    // Before the first thread starts: a signal to a thread that does not block it would end the server without
    // unmounting. `mounted` blocks them again, to wait for them.
    daemon::block_signals();
    let served = match opened {
        Source::Directory(root) => {
            confine::directory_server();
            let fs = match upgrade::replaced().is_some() {
                true => Passthrough::again(root, options.passthrough.clone()),
                false => Passthrough::new(root, options.passthrough.clone()),
            };
            fs.context(|| source.display().to_string()).and_then(|fs| {
                let _ = (place.kept).set((source.to_owned(), vec![fs.root().as_raw_fd()]));
                let prepare = |session: &_| follow_remounts(session, &place.path);
                mounted(
                    |_| Ok(fs),
                    prepare,
                    || {},
                    source,
                    place,
                    &options,
                    &mut report,
                )
            })
        }
        Source::Image(image) => {
            let memory = options.memory.unwrap_or(image::MEMORY);
            let engine = options.engine;
            let _ = place.kept.set((source.to_owned(), image.descriptors()));
            let read = |_| image.read(engine, memory);
            serve_image(read, None, source, place, options, &mut report)
        }
        Source::Uri(uri, cache) => mount_uri(&uri, cache, place, options, &mut report),
    };
    match served {
        Err(error) if report.failed(&error) => Ok(ExitCode::from(error.code())),
        other => other,
    }
}

/// An image, with the counts of the engine that reads it.
struct Counted {
    image: XfsFs,
    engine: Option<Arc<dyn Engine>>,
    _gives_way: Option<Monitor>,
}

impl Layer for Counted {
    type Inner = XfsFs;

    fn inner(&self) -> &XfsFs {
        &self.image
    }

    fn counts(&self) -> Vec<(&'static str, u64)> {
        (self.engine.as_ref()).map_or_else(Vec::new, |engine| engine.counts())
    }
}

/// Serves an image until it is unmounted. `read` opens it in the process that serves, and is told whether an earlier one has served
/// the mount; `engine` is one that has counts.
fn serve_image(
    read: impl FnOnce(bool) -> Result<Opened>,
    engine: Option<Arc<dyn Engine>>,
    source: &Path,
    place: &Place,
    mut options: Options,
    report: &mut Report,
) -> Result<ExitCode> {
    options.flags |= MountFlags::RDONLY;
    let idmapped = options.default_permissions;
    let make = |goes_on| {
        let opened = read(goes_on)?;
        // The cache gives way when the machine, or the control group, runs out of memory.
        let shrinkers = Arc::new(Shrinkers::new());
        shrinkers.register(&opened.target.shrinker());
        let monitor = Monitor::start(MonitorConfig::default(), shrinkers)
            .inspect_err(|error| tracing::warn!(%error, "memory pressure is not watched"))
            .ok();
        // The kernel refuses changes, and this the changes of clients.
        Ok(ReadOnly::new(Counted {
            image: XfsFs::new(Arc::new(opened.volume)).idmapped(idmapped),
            engine,
            _gives_way: monitor,
        }))
    };
    let confine = confine::image_server;
    mounted(make, |_| {}, confine, source, place, &options, report)
}

/// Serves what a URI names until it is unmounted: an image, if there is an object of that very key, else a store. `kept` is what
/// an earlier program has given the keeper.
#[cfg(feature = "object")]
fn mount_uri(
    uri: &str,
    kept: Option<OwnedFd>,
    place: &Place,
    options: Options,
    report: &mut Report,
) -> Result<ExitCode> {
    use uvfs_object::ObjectEngine;

    confine::store_server();
    let name = remote::shown(Path::new(uri));
    let failed = || name.display().to_string();
    let how = remote::options(options.remote.timeout, options.remote.requests);
    let engine = match &kept {
        Some(described) => ObjectEngine::again(uri, &how, described.as_fd()),
        None => ObjectEngine::open(uri, &how, false),
    };
    let Some(engine) = engine.context(failed)? else {
        return match options.image && kept.is_none() {
            true => Err(remote::missing(uri)),
            false => mount_store(uri, kept, place, options, report),
        };
    };
    let memory = options.memory.unwrap_or(image::MEMORY);
    let open = || image::open_remote(engine.clone(), memory, name);
    let counts: Option<Arc<dyn Engine>> = Some(engine.clone());
    if !options.survive {
        let opened = open()?;
        opened.warn(name);
        return serve_image(|_| Ok(opened), counts, name, place, options, report);
    }
    let described = kept.map_or_else(|| engine.describe(), Ok).context(failed)?;
    let _ = place.kept.set((uri.into(), vec![described.as_raw_fd()]));
    let read = |goes_on: bool| {
        if !goes_on {
            return open().inspect(|opened| opened.warn(name));
        }
        loop {
            // An earlier server has read it, so it is the store that fails, and programs wait for that.
            let error = match open() {
                Ok(opened) => return Ok(opened),
                Err(error) => error,
            };
            if let Ok(false) = engine.is_current() {
                let name = name.display();
                return Err(Error::new(format!("{name}: has changed in the store")));
            }
            tracing::warn!(%error, "{}: not served yet", name.display());
            if daemon::block_signals().wait(Some(PAUSE)).is_some() {
                return Err(error);
            }
        }
    };
    serve_image(read, counts, name, place, options, report)
}

#[cfg(not(feature = "object"))]
fn mount_uri(
    uri: &str,
    _: Option<OwnedFd>,
    _: &Place,
    _: Options,
    _: &mut Report,
) -> Result<ExitCode> {
    Err(remote::no_stores(uri))
}

/// Serves an object store until it is unmounted.
#[cfg(feature = "object")]
fn mount_store(
    uri: &str,
    cache: Option<OwnedFd>,
    place: &Place,
    mut options: Options,
    report: &mut Report,
) -> Result<ExitCode> {
    use uvfs_object::{ObjectFs, Prepared, Writes};

    use crate::options::Write;

    let words = &options.remote;
    let mut how = uvfs_object::Options::default();
    how.cache_dir = words.cache_dir.clone();
    how.cache_size = words.cache_size;
    how.ttl = words.ttl.unwrap_or(how.ttl);
    how.timeout = words.timeout.unwrap_or(how.timeout);
    how.requests = words.requests.unwrap_or(how.requests);
    how.memory = options.memory.unwrap_or(how.memory);
    how.metadata = words.metadata;
    how.writes = match words.write {
        _ if options.flags.contains(MountFlags::RDONLY) => Writes::No,
        Write::No => Writes::No,
        Write::Close => Writes::Close,
        Write::Back => Writes::Back,
    };
    if words.nofsync && words.write != Write::Back {
        return Err(Error::usage("-o nofsync: only with -o write=back"));
    }
    how.local_fsync = words.nofsync;
    how.uid = words.uid.unwrap_or(how.uid);
    how.gid = words.gid.unwrap_or(how.gid);
    how.file_mode = words.file_mode.unwrap_or(how.file_mode);
    how.dir_mode = words.dir_mode.unwrap_or(how.dir_mode);
    how.backing_files = options.passthrough.passthrough != Backed::Off;
    let name = remote::shown(Path::new(uri));
    let writes = how.writes != Writes::No;
    let prepared = match cache {
        Some(cache) => Prepared::again(uri, &how, cache),
        None => Prepared::new(uri, &how, options.survive),
    };
    let prepared = prepared.context(|| name.display().to_string())?;
    let _ = place
        .kept
        .set((uri.into(), vec![prepared.cache().as_raw_fd()]));
    let open = |goes_on| {
        let fs = ObjectFs::serve(prepared, how, goes_on);
        fs.context(|| name.display().to_string())
    };
    // The store has no users: the kernel checks the modes that the mount shows.
    options.default_permissions = true;
    if writes {
        return mounted(open, |_| {}, || {}, name, place, &options, report);
    }
    options.flags |= MountFlags::RDONLY;
    let open = |goes_on| open(goes_on).map(ReadOnly::new);
    mounted(open, |_| {}, || {}, name, place, &options, report)
}

/// Whether the mount point lies in the source, whatever path leads there: a bind mount of the source that
/// shares its mounts would show the mount in the source, and the server would come to serve itself.
fn contains(source: &Path, mountpoint: &Path) -> io::Result<bool> {
    let identity = |path: &Path| std::fs::metadata(path).map(|meta| (meta.dev(), meta.ino()));
    let source = identity(source)?;
    for part in mountpoint.ancestors() {
        if identity(part)? == source {
            return Ok(true);
        }
    }
    Ok(false)
}

fn open_directory(source: &Path, mountpoint: &Path) -> Result<OwnedFd> {
    let name = || source.display().to_string();
    let flags = OFlags::DIRECTORY | OFlags::CLOEXEC;
    // Opened for reading to be sure that it can be; served from a descriptor that needs no right.
    rustix::fs::open(source, flags | OFlags::RDONLY, Mode::empty()).context(name)?;
    if contains(source, mountpoint).context(name)? {
        return mount::clone_tree(source).map_err(|error| {
            Error::new(format!(
                "{}: contains its own mount point, which only root can serve: {error}",
                name()
            ))
        });
    }
    rustix::fs::open(source, flags | OFlags::PATH, Mode::empty()).context(name)
}

/// Unmounts what was mounted unless all went well.
struct Unmount(Option<Mount>);

impl Drop for Unmount {
    fn drop(&mut self) {
        if let Some(mount) = &self.0 {
            let _ = mount.detach();
        }
    }
}

/// The rules that the server sees to, of those that mount(2) is asked for.
fn rules(flags: MountFlags) -> MountFlags {
    let mut rules = flags
        & (MountFlags::RDONLY
            | MountFlags::NOATIME
            | MountFlags::NODIRATIME
            | MountFlags::STRICTATIME);
    if rules.contains(MountFlags::STRICTATIME) {
        rules -= MountFlags::NOATIME;
    }
    rules
}

/// The rules of an existing mount, from its line of mountinfo.
fn rules_of(line: &mount::MountLine) -> MountFlags {
    let has = |word: &str| line.options.split(',').any(|option| option == word);
    let mut rules = MountFlags::empty();
    // A bind mount of it may be writable where this one is not.
    let read_only = line.file_system.split(',').any(|option| option == "ro");
    rules.set(MountFlags::RDONLY, read_only);
    rules.set(MountFlags::NOATIME, has("noatime"));
    rules.set(MountFlags::NODIRATIME, has("nodiratime"));
    let strict = !has("noatime") && !has("relatime");
    rules.set(MountFlags::STRICTATIME, strict);
    rules
}

/// Follows the flags of the mount, which a remount changes without asking the server.
fn follow_remounts(session: &Arc<Session<Passthrough>>, path: &Path) {
    let session = Arc::downgrade(session);
    let path = path.to_owned();
    let follow = move || -> io::Result<()> {
        // Opened first: it is ready when the table has changed since.
        let table = File::open("/proc/self/mountinfo")?;
        let Some(id) = mount::mounted(&path)?.map(|line| line.id) else {
            return Ok(());
        };
        while let Some(line) = mount::table()?.into_iter().find(|line| line.id == id) {
            match session.upgrade() {
                Some(session) => session.fs().remounted(rules_of(&line)),
                None => break,
            }
            let mut ready = [PollFd::new(&table, PollFlags::PRI)];
            rustix::io::retry_on_intr(|| rustix::event::poll(&mut ready, None))?;
        }
        Ok(())
    };
    let warn = |error| tracing::warn!(%error, "remounts are not followed");
    let thread = std::thread::Builder::new();
    if let Err(error) = thread.spawn(move || follow().unwrap_or_else(warn)) {
        warn(error);
    }
}

/// Mounts a file system, and serves it until the mount has ended. `make` makes it in the process that serves, and may
/// start threads. It is told whether an earlier process has served the mount.
fn mounted<F: FileSystem>(
    make: impl FnOnce(bool) -> Result<F>,
    prepare: impl FnOnce(&Arc<Session<F>>),
    confine: impl FnOnce() + Send,
    source: &Path,
    place: &Place,
    options: &Options,
    report: &mut Report,
) -> Result<ExitCode> {
    let path = place.path.as_path();
    let signals = daemon::block_signals();
    let name = options
        .fsname
        .clone()
        .unwrap_or_else(|| source.display().to_string());
    let mount_options = MountOptions {
        name: name.clone(),
        subtype: options.subtype.clone(),
        allow_other: options.allow_other,
        default_permissions: options.default_permissions,
        flags: options.flags,
        // Reads of the page cache stay as large where only writes are to be small.
        max_read: (options.max_read).unwrap_or(options.max_write.max(1 << 20)),
        auto_unmount: options.auto_unmount,
    };
    let made = match &*upgrade::replaced() {
        Some(replaced) => replaced
            .kept
            .device()
            .and_then(|device| mount::held(path, device)),
        None => mount::mount(path, &mount_options),
    };
    let made = made.context(|| path.display().to_string())?;
    // The program that this one replaces may go on with the mount.
    let mut unmount = Unmount(upgrade::replaced().is_none().then(|| made.clone()));
    let worker = match place.kept.get() {
        Some((source, opened)) if options.survive => {
            let kept = upgrade::replaced().take().map(|replaced| replaced.kept);
            let mut keeper = upgrade::Own {
                foreground: options.foreground,
                at: path,
                source,
                opened,
            };
            let worker = survive::keep(&made, kept, &mut keeper);
            Some(worker.context(|| path.display().to_string())?)
        }
        _ => None,
    };
    let goes_on = worker
        .as_ref()
        .is_some_and(|worker| worker.before().is_some());
    let session = Arc::new(Session::new(
        make(goes_on)?,
        made.device().context(|| path.display().to_string())?,
        SessionOptions {
            source: name,
            max_write: options.max_write,
            max_readahead: options.max_readahead,
            uncached: options.uncached,
            slow: options.slow,
            all_backed: options.passthrough.passthrough == Backed::All,
            synchronous: options.flags.contains(MountFlags::SYNCHRONOUS),
        },
    ));
    if let Some(worker) = &worker {
        let outlives = session.outlives(worker.ledger());
        outlives.context(|| path.display().to_string())?;
    }
    prepare(&session);
    let server_options = ServerOptions {
        transport: options.transport,
        wait: options.wait,
        clients: Some(ClientLimits {
            guests: options.allow_other,
            ..ClientLimits::default()
        }),
    };
    // On a thread of its own, from which all threads that serve begin.
    let start = || {
        confine();
        Server::start(session, server_options)
    };
    let server = std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().spawn_scoped(scope, start)?;
        (thread.join()).unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    });
    let failed = |error: io::Error| {
        let why = limits::explain_start(&error);
        Error::new(format!("{}: {why}", path.display()))
    };
    let server = server.map_err(failed)?;
    if let Some(worker) = &worker
        && let Some(before) = worker.before()
    {
        report.leaves_terminal();
        tracing::error!("{}: {before}; this one goes on", path.display());
        let cut_off = end_on_signals(signals, made).map_err(failed)?;
        unmount.0 = None;
        worker.ready();
        return ended(server, &cut_off, path);
    }
    report.answers().context(|| path.display().to_string())?;
    if let Err(error) = mount::set_readahead(path, options.max_readahead) {
        tracing::debug!(%error, "readahead stays as the kernel has it");
    }
    if options.passthrough.writeback
        && let Err(error) = mount::set_dirty_share(path, DIRTY_SHARE)
    {
        tracing::debug!(%error, "the kernel's limit for dirty pages stays");
    }
    if let Some(why) = server.fallback() {
        warn(format!("serving over /dev/fuse: {why}"));
    }
    let cut_off = end_on_signals(signals, made).map_err(failed)?;
    unmount.0 = None;
    report.ready()?;
    match &worker {
        // Its keeper is the process that systemd knows.
        Some(worker) => {
            report.leaves_terminal();
            worker.ready();
        }
        None => report.tells_systemd()?,
    }
    ended(server, &cut_off, path)
}

/// Waits for the end of a mount.
fn ended<F: FileSystem>(server: Server<F>, cut_off: &AtomicBool, path: &Path) -> Result<ExitCode> {
    server.wait();
    match cut_off.load(Ordering::Relaxed) {
        true => Err(Error::new(format!(
            "{}: its users were cut off",
            path.display()
        ))),
        false => Ok(ExitCode::SUCCESS),
    }
}

/// Tells the user who ends a server what it waits for: on the terminal, or in the system's log.
fn say(what: &str) {
    match log::is_system() {
        true => tracing::error!("{what}"),
        false => warn(what),
    }
}

/// Starts the thread that waits for the signals, which end the mount step by step ([`Ending`]). The flag is set if
/// they have cut off its users.
fn end_on_signals(signals: SignalSet, mount: Mount) -> io::Result<Arc<AtomicBool>> {
    let cut_off = Arc::new(AtomicBool::new(false));
    let outcome = cut_off.clone();
    std::thread::Builder::new().spawn(move || {
        let mut ending = Ending::new(mount, say, umount::users_by_child);
        loop {
            let again = ending.is_pending().then_some(ending::AGAIN);
            if let Some(signal) = signals.wait(again) {
                if ending.stage() == Stage::Aborted {
                    std::process::exit(1);
                }
                // Before the abort, with which the server ends.
                let aborts = ending.stage() == Stage::Detached;
                outcome.store(aborts, Ordering::Relaxed);
                ending.signal(signal);
            }
            ending.tick();
        }
    })?;
    Ok(cut_off)
}

/// Raises the limit of open files, and has the kernel make its table of them as large at once.
///
/// The kernel doubles the table when it is full. In a process with threads each doubling waits for an RCU grace
/// period, 10 to 25 ms, and so do the programs whose requests open the files. So this is called before the first thread.
pub fn raise_limit() {
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    if let Err(error) = setrlimit(Resource::Nofile, limit) {
        tracing::debug!(%error, "the limit of open files stays");
    }
    let most = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    let last = most.min(TABLE) - 1;
    let grow = || -> io::Result<()> {
        let any = File::open("/")?;
        rustix::io::fcntl_dupfd_cloexec(&any, last as i32)?;
        Ok(())
    };
    if let Err(error) = grow() {
        tracing::debug!(%error, "the table of open files stays small");
    }
}
