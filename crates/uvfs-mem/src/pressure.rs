//! Memory pressure: when it is time to give memory back.
//!
//! Three sources, each used where it exists:
//!
//! * the machine's `/proc/pressure/memory` and the own cgroup's `memory.pressure` (version 2),
//!   with a trigger written to the file and poll(2) for `POLLPRI`
//!   (Documentation/accounting/psi.rst);
//! * the own cgroup's usage against its limit, looked at every [`MonitorConfig::interval`]
//!   (both versions of the interface), because a cgroup near its limit reclaims before PSI
//!   reports a stall, and because version 1 has no PSI;
//! * `MemAvailable` against `MemTotal` from `/proc/meminfo`, looked at as often, when the
//!   machine's PSI cannot be used.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Seek, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

use crate::Shrinkers;

/// More than any of the files has.
const GAUGE_MAX: u64 = 1 << 20;

/// Where the monitor looks and when it acts. The paths are there for tests and containers.
#[derive(Debug, Clone)]
pub struct MonitorConfig {
    /// The machine's PSI file.
    pub psi: PathBuf,
    /// The machine's memory numbers.
    pub meminfo: PathBuf,
    /// The own memory cgroup's directory; `None` if there is none or it is the root.
    pub cgroup: Option<PathBuf>,
    /// Tasks stalled for this long in any [`MonitorConfig::window`]: pressure.
    pub stall: Duration,
    /// The window of the trigger. Without CAP_SYS_RESOURCE the kernel takes multiples of two
    /// seconds only.
    pub window: Duration,
    /// How often the sources that must be looked at are looked at.
    pub interval: Duration,
    /// Less than this part of the machine's memory available (in percent): pressure.
    pub available_percent: u64,
    /// More than this part of the cgroup's limit used, page cache not counted (in percent):
    /// pressure.
    pub cgroup_percent: u64,
    /// Under pressure each shrinker is asked for one part in this many.
    pub divisor: usize,
}

impl Default for MonitorConfig {
    fn default() -> Self {
        MonitorConfig {
            psi: "/proc/pressure/memory".into(),
            meminfo: "/proc/meminfo".into(),
            cgroup: own_cgroup(Path::new("/proc/self")),
            stall: Duration::from_millis(150),
            window: Duration::from_secs(2),
            interval: Duration::from_millis(250),
            available_percent: 10,
            cgroup_percent: 85,
            divisor: 4,
        }
    }
}

/// A place that pressure was seen at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Source {
    /// The machine's PSI trigger.
    Psi,
    /// The cgroup's PSI trigger.
    CgroupPsi,
    /// The cgroup's usage near its limit.
    CgroupUsage,
    /// `MemAvailable` low.
    MemAvailable,
}

/// A thread that watches for memory pressure and asks [`Shrinkers`] to give memory back. Ends
/// when dropped.
pub struct Monitor {
    stop: Arc<OwnedFd>,
    thread: Option<JoinHandle<()>>,
    sources: Vec<Source>,
    descriptors: Vec<RawFd>,
}

struct Watch {
    config: MonitorConfig,
    triggers: Vec<(Source, File)>,
    /// Files of cgroups that went away, open for as long as their numbers are known to others.
    spent: Vec<File>,
    usage: Vec<Usage>,
    /// Where it is a source.
    meminfo: Option<Gauge>,
}

/// A file of the kernel's that is read again and again.
enum Gauge {
    /// Opened each time.
    At(PathBuf),
    /// Kept open by the thread.
    Open(File),
    /// It could not be opened when it was to be kept open.
    Absent,
}

/// The cgroup's files of either version.
struct Usage {
    current: Gauge,
    limits: Vec<Gauge>,
    stat: Gauge,
    page_cache: [&'static str; 2],
}

impl Gauge {
    /// From now on it is not opened again. That would take the lowest number that is free for a
    /// moment, and a program that opens a file just then, or calls dup2(2), would get another number
    /// than it counts on, EBUSY, or our file.
    fn keep_open(&mut self, descriptors: &mut Vec<RawFd>) {
        let Self::At(path) = self else { return };
        *self = match File::open(path) {
            Ok(file) => {
                let file = File::from(aside(file.into()));
                descriptors.push(file.as_raw_fd());
                Self::Open(file)
            }
            Err(_) => Self::Absent,
        };
    }

    fn text(&self) -> Option<String> {
        let mut file = match self {
            Self::At(path) => return fs::read_to_string(path).ok(),
            Self::Open(file) => file,
            Self::Absent => return None,
        };
        file.rewind().ok()?;
        let mut text = String::new();
        let len = file.take(GAUGE_MAX + 1).read_to_string(&mut text).ok()?;
        (len as u64 <= GAUGE_MAX).then_some(text)
    }

    fn number(&self) -> Option<u64> {
        self.text()?.trim().parse().ok()
    }

    /// Of /proc/meminfo.
    fn available_percent(&self) -> Option<u64> {
        let text = self.text()?;
        let total = field(&text, "MemTotal").filter(|&t| t > 0)?;
        Some(field(&text, "MemAvailable")?.saturating_mul(100) / total)
    }
}

impl Monitor {
    /// Starts watching on behalf of `shrinkers`. Sources that do not exist or may not be used
    /// are left out; [`Monitor::sources`] says what is left.
    ///
    /// # Errors
    /// When the thread or its event descriptor cannot be made.
    pub fn start(config: MonitorConfig, shrinkers: Arc<Shrinkers>) -> io::Result<Monitor> {
        let mut triggers = Vec::new();
        if let Some(file) = trigger(&config.psi, &config) {
            triggers.push((Source::Psi, file));
        }
        if let Some(dir) = &config.cgroup
            && let Some(file) = trigger(&dir.join("memory.pressure"), &config)
        {
            triggers.push((Source::CgroupPsi, file));
        }
        let mut usage = Usage::find_all(&config);
        let mut meminfo = Gauge::At(config.meminfo.clone());
        let has_psi = triggers.iter().any(|(source, _)| *source == Source::Psi);
        let has_meminfo = !has_psi && meminfo.available_percent().is_some();
        let mut sources: Vec<_> = triggers.iter().map(|(source, _)| *source).collect();
        sources.extend((!usage.is_empty()).then_some(Source::CgroupUsage));
        sources.extend(has_meminfo.then_some(Source::MemAvailable));
        if sources.is_empty() {
            tracing::warn!("no source of memory pressure: caches only keep to their limits");
        }
        let stop = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let stop = Arc::new(aside(stop));
        let mut descriptors = vec![stop.as_raw_fd()];
        descriptors.extend(triggers.iter().map(|(_, file)| file.as_raw_fd()));
        if has_meminfo {
            meminfo.keep_open(&mut descriptors);
        }
        for usage in &mut usage {
            usage.keep_open(&mut descriptors);
        }
        let watch = Watch {
            config,
            triggers,
            spent: Vec::new(),
            usage,
            meminfo: has_meminfo.then_some(meminfo),
        };
        let thread = {
            let stop = stop.clone();
            thread::Builder::new()
                .name("uvfs-pressure".into())
                .spawn(move || watch.run(&stop, &shrinkers))?
        };
        Ok(Monitor {
            stop,
            thread: Some(thread),
            sources,
            descriptors,
        })
    }

    /// The watched sources.
    pub fn sources(&self) -> &[Source] {
        &self.sources
    }

    /// The descriptors that it has open for as long as it lives.
    pub fn descriptors(&self) -> &[RawFd] {
        &self.descriptors
    }
}

impl Drop for Monitor {
    fn drop(&mut self) {
        // Writing 1 to an eventfd at 0 cannot fail.
        let _ = rustix::io::write(&*self.stop, &1u64.to_ne_bytes());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Watch {
    fn run(mut self, stop: &OwnedFd, shrinkers: &Shrinkers) {
        let polled = !self.usage.is_empty() || self.meminfo.is_some();
        let mut next_look = Instant::now();
        loop {
            let wait = polled.then(|| next_look.saturating_duration_since(Instant::now()));
            let wait = wait.map(|d| Timespec::try_from(d).expect("a short time"));
            let mut fds = vec![PollFd::from_borrowed_fd(stop.as_fd(), PollFlags::IN)];
            for (_, file) in &self.triggers {
                fds.push(PollFd::from_borrowed_fd(file.as_fd(), PollFlags::PRI));
            }
            match poll(&mut fds, wait.as_ref()) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(error) => {
                    tracing::error!(%error, "watching for memory pressure ends");
                    return;
                }
            }
            let seen: Vec<PollFlags> = fds.iter().map(PollFd::revents).collect();
            drop(fds);
            if !seen[0].is_empty() {
                return;
            }
            let mut source = None;
            for (index, (kind, file)) in std::mem::take(&mut self.triggers).into_iter().enumerate()
            {
                let events = seen[index + 1];
                // An error means that the cgroup went away: stop listening to it.
                if events.contains(PollFlags::ERR) {
                    self.spent.push(file);
                    continue;
                }
                if events.contains(PollFlags::PRI) {
                    source = Some(kind);
                }
                self.triggers.push((kind, file));
            }
            if polled && Instant::now() >= next_look {
                next_look = Instant::now() + self.config.interval;
                source = source.or_else(|| self.look());
            }
            if let Some(source) = source {
                let freed = shrinkers.shrink(self.config.divisor);
                tracing::debug!(?source, freed, "memory pressure");
            }
        }
    }

    fn look(&self) -> Option<Source> {
        let near = |usage: &Usage| usage.percent() > Some(self.config.cgroup_percent);
        if self.usage.iter().any(near) {
            return Some(Source::CgroupUsage);
        }
        let available = self.meminfo.as_ref()?.available_percent()?;
        (available < self.config.available_percent).then_some(Source::MemAvailable)
    }
}

/// How much more memory there is to take: a cache that grows asks now and then. A [`Monitor`] alone
/// comes too late for one that grows by gigabytes in a second.
pub struct Room {
    usage: Vec<Usage>,
    meminfo: Gauge,
    cgroup_percent: u64,
    available_percent: u64,
}

impl Room {
    /// As a [`Monitor`] of this configuration sees it.
    pub fn new(config: &MonitorConfig) -> Self {
        Self {
            usage: Usage::find_all(config),
            meminfo: Gauge::At(config.meminfo.clone()),
            cgroup_percent: config.cgroup_percent,
            available_percent: config.available_percent,
        }
    }

    /// Bytes that can be taken before there is pressure; `u64::MAX` where nothing is known.
    pub fn bytes(&self) -> u64 {
        let groups = self.usage.iter().filter_map(Usage::used_and_limit);
        let group = groups.map(|(used, limit)| {
            (limit / 100)
                .saturating_mul(self.cgroup_percent)
                .saturating_sub(used)
        });
        let group = group.min().unwrap_or(u64::MAX);
        let text = self.meminfo.text().unwrap_or_default();
        let machine = field(&text, "MemTotal").zip(field(&text, "MemAvailable"));
        let machine = machine.map_or(u64::MAX, |(total, available)| {
            available
                .saturating_sub(total / 100 * self.available_percent)
                .saturating_mul(1024)
        });
        group.min(machine)
    }
}

/// Moves a descriptor out of the way of the program's own, where there is room for that.
fn aside(fd: OwnedFd) -> OwnedFd {
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile);
    let most = limit.current.unwrap_or(1 << 16).min(1 << 16) as i32;
    rustix::io::fcntl_dupfd_cloexec(&fd, most / 4 * 3).unwrap_or(fd)
}

/// A PSI file with our trigger written to it, or `None` where that does not work.
fn trigger(path: &Path, config: &MonitorConfig) -> Option<File> {
    let mut file = OpenOptions::new()
        .read(true)
        .write(true)
        .custom_flags(rustix::fs::OFlags::NONBLOCK.bits() as i32)
        .open(path)
        .ok()?;
    let line = format!(
        "some {} {}\0",
        config.stall.as_micros(),
        config.window.as_micros()
    );
    match file.write_all(line.as_bytes()) {
        Ok(()) => Some(aside(file.into()).into()),
        Err(error) => {
            tracing::debug!(path = %path.display(), %error, "no PSI trigger");
            None
        }
    }
}

/// The value of `key` in a file of lines "key value" or "key: value kB".
fn field(text: &str, key: &str) -> Option<u64> {
    text.lines().find_map(|line| {
        let mut words = line.split_ascii_whitespace();
        (words.next()?.trim_end_matches(':') == key).then(|| words.next()?.parse().ok())?
    })
}

impl Usage {
    /// Of the own group and those that it is in, whose limits count as well.
    fn find_all(config: &MonitorConfig) -> Vec<Usage> {
        let own = config.cgroup.iter();
        own.flat_map(|dir| dir.ancestors().map_while(Usage::find))
            .collect()
    }

    fn find(dir: &Path) -> Option<Usage> {
        let gauge = |name| Gauge::At(dir.join(name));
        let v2 = Usage {
            current: gauge("memory.current"),
            limits: vec![gauge("memory.max"), gauge("memory.high")],
            stat: gauge("memory.stat"),
            page_cache: ["active_file", "inactive_file"],
        };
        let v1 = Usage {
            current: gauge("memory.usage_in_bytes"),
            limits: vec![gauge("memory.limit_in_bytes")],
            stat: gauge("memory.stat"),
            page_cache: ["total_active_file", "total_inactive_file"],
        };
        [v2, v1]
            .into_iter()
            .find(|usage| usage.current.number().is_some())
    }

    fn keep_open(&mut self, descriptors: &mut Vec<RawFd>) {
        self.current.keep_open(descriptors);
        self.limits
            .iter_mut()
            .for_each(|limit| limit.keep_open(descriptors));
        self.stat.keep_open(descriptors);
    }

    /// Used part of the limit in percent, page cache not counted; 0 without a limit.
    fn percent(&self) -> Option<u64> {
        let (used, limit) = self.used_and_limit()?;
        Some((u128::from(used) * 100 / u128::from(limit.max(1))) as u64)
    }

    /// Bytes used, page cache not counted, and the limit; that is `u64::MAX` without one.
    fn used_and_limit(&self) -> Option<(u64, u64)> {
        // Files that hold "max" are no limit.
        let limits = self.limits.iter().filter_map(Gauge::number);
        let limit = limits.min().unwrap_or(u64::MAX);
        let stat = self.stat.text().unwrap_or_default();
        let cache: u64 = self
            .page_cache
            .iter()
            .filter_map(|key| field(&stat, key))
            .sum();
        Some((self.current.number()?.saturating_sub(cache), limit))
    }
}

/// The directory of the own memory cgroup: the version 2 hierarchy if memory is controlled
/// there, else version 1's (cgroups(7)). `None` for the root, which has no limit.
fn own_cgroup(proc_self: &Path) -> Option<PathBuf> {
    let groups = fs::read_to_string(proc_self.join("cgroup")).ok()?;
    let mounts = fs::read_to_string(proc_self.join("mounts")).ok()?;
    // "id:controllers:path"; version 2 has id 0 and no controllers.
    let path_of = |want: fn(&str) -> bool| {
        groups.lines().find_map(|line| {
            let mut parts = line.splitn(3, ':');
            let (_, controllers, path) = (parts.next()?, parts.next()?, parts.next()?);
            want(controllers).then_some(path.trim_start_matches('/'))
        })
    };
    let mount_of = |want: fn(&str, &str) -> bool| {
        mounts.lines().find_map(|line| {
            let words: Vec<_> = line.split_ascii_whitespace().collect();
            let (&at, &kind, &options) = (words.get(1)?, words.get(2)?, words.get(3)?);
            want(kind, options).then(|| PathBuf::from(at))
        })
    };
    let v2 = mount_of(|kind, _| kind == "cgroup2")
        .zip(path_of(str::is_empty))
        .map(|(mount, path)| mount.join(path))
        .filter(|dir| dir.join("memory.current").exists());
    v2.or_else(|| {
        mount_of(|kind, options| kind == "cgroup" && options.split(',').any(|o| o == "memory"))
            .zip(path_of(|controllers| {
                controllers.split(',').any(|c| c == "memory")
            }))
            .filter(|(_, path)| !path.is_empty())
            .map(|(mount, path)| mount.join(path))
            .filter(|dir| dir.join("memory.usage_in_bytes").exists())
    })
}

#[cfg(test)]
mod tests;
