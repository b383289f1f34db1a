//! The serving side of a benchmark: what is measured, and a file server's life.

use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::io::{self, ErrorKind};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Resource, Signal};
use serde::Serialize;
use uvfs_cli::{Context, Error, Result};
use uvfs_server::mount::unmount;

use super::child::{Process, Waited, own_path, uvfs, wait_any};
use super::client::Job;
use super::interrupt;
use super::store;
use super::workspace::Workspace;

/// How long a server may take until its mount answers.
const START: Duration = Duration::from_secs(20);

/// How long a server may take to end once it is unmounted, and again once it is told to.
const STOP: Duration = Duration::from_secs(5);

/// The same of a server of an object store, which may have to put what was written.
const STOP_STORE: Duration = Duration::from_secs(600);

/// Something that is measured.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Target {
    /// The name in the table and in the JSON.
    pub name: String,
    /// Its server and options.
    #[serde(flatten)]
    pub kind: Kind,
}

/// The server of the files.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(tag = "kind", rename_all = "kebab-case")]
pub enum Kind {
    /// No server: the source itself.
    Native,
    /// `uvfs mount`.
    Uvfs {
        /// Its options before the source.
        options: Vec<String>,
    },
    /// `uvfs mount`, with each program that uses it under `uvfs run`.
    Run,
    /// `uvfs-client`, without a mount.
    Client {
        /// Over shared memory to `uvfs serve`; otherwise with all in one process.
        served: bool,
        /// Whether it is what others are compared with.
        base: bool,
    },
    /// Another server, see [`peer`].
    Peer {
        /// Its command line, with the places for source and mount point.
        command: Vec<String>,
    },
}

/// Another file server, given as `NAME=COMMAND`. The command for an object store has the store's address in its own way;
/// for a directory it has to have `{source}` (see [`Target::serves_source`]).
pub fn peer(text: &str) -> Result<Target, String> {
    let (name, command) = text
        .split_once('=')
        .ok_or("write NAME='COMMAND {source} {mountpoint}'")?;
    let plain = |c: char| c.is_ascii_alphanumeric() || "._+-".contains(c);
    if name.is_empty() || !name.chars().all(plain) {
        return Err(format!(
            "the name {name:?} needs letters, digits or . _ + - only"
        ));
    }
    // No shell runs it.
    let command = shlex::split(command)
        .ok_or("the command has a quote without its end, or ends in a backslash")?;
    if command.is_empty() {
        return Err("the command is empty".into());
    }
    if !command.iter().any(|word| word.contains("{mountpoint}")) {
        return Err("the command has no {mountpoint}".into());
    }
    Ok(Target {
        name: name.into(),
        kind: Kind::Peer { command },
    })
}

impl Target {
    /// The target without a server.
    pub fn native() -> Self {
        Self {
            name: "native".into(),
            kind: Kind::Native,
        }
    }

    /// A target of `uvfs`, with these options.
    pub fn uvfs(name: impl Into<String>, options: &[&str]) -> Self {
        Self {
            name: name.into(),
            kind: Kind::Uvfs {
                options: options.iter().map(ToString::to_string).collect(),
            },
        }
    }

    /// Whether others are compared with this target.
    pub fn is_base(&self) -> bool {
        match self.kind {
            Kind::Native | Kind::Peer { .. } => true,
            Kind::Client { base, .. } => base,
            Kind::Uvfs { .. } | Kind::Run => false,
        }
    }

    /// An error for another server whose command does not say where the source is.
    pub fn serves_source(&self) -> Result<()> {
        match &self.kind {
            Kind::Peer { command } if !command.iter().any(|word| word.contains("{source}")) => {
                let name = &self.name;
                Err(Error::usage(format!(
                    "--peer {name}: the command has no {{source}}"
                )))
            }
            _ => Ok(()),
        }
    }

    /// Starts this target's server, if it has one, and waits until its mount answers. The server of an object store
    /// begins with an empty cache.
    pub fn start<'w>(&self, workspace: &'w Workspace) -> Result<Running<'w>> {
        let stored = workspace.stored().filter(|_| self.kind != Kind::Native);
        let Some((uri, name)) = stored else {
            return self.start_over(workspace, workspace.source());
        };
        workspace.empty_cache()?;
        let mut running = self.start_over(workspace, uri.into())?;
        running.path.push(name);
        Ok(running)
    }

    /// The same over another source.
    pub fn start_over<'w>(&self, workspace: &'w Workspace, source: PathBuf) -> Result<Running<'w>> {
        let place = match self.is_served() {
            true => Address::Socket(workspace.socket()),
            false => Address::Mount(workspace.mountpoint()),
        };
        let (server, path) = match self.command(workspace, &source)? {
            Some(command) => {
                let path = place.path().to_owned();
                (Some(Server::start(command, workspace, place)?), path)
            }
            None => (None, source),
        };
        let wrapper = match &self.kind {
            Kind::Run => vec![uvfs().into_os_string(), "run".into(), "--".into()],
            _ => Vec::new(),
        };
        Ok(Running {
            server,
            path,
            wrapper,
        })
    }

    fn is_served(&self) -> bool {
        matches!(self.kind, Kind::Client { served: true, .. })
    }

    fn command(&self, workspace: &Workspace, source: &Path) -> Result<Option<Command>> {
        let mountpoint = workspace.mountpoint();
        Ok(Some(match &self.kind {
            Kind::Native | Kind::Client { served: false, .. } => return Ok(None),
            Kind::Uvfs { .. } | Kind::Run => {
                let mut command = Command::new(uvfs());
                command.args(["mount", "--foreground"]);
                if let Kind::Uvfs { options } = &self.kind {
                    command.args(options);
                }
                if workspace.stored().is_some() {
                    let cache = workspace.cache();
                    command.args(["-o", &format!("cache_dir={}", cache.display())]);
                }
                command.args([source, &mountpoint]);
                command
            }
            Kind::Client { .. } => {
                let mut command = Command::new(uvfs());
                command.args(["serve", "--socket"]);
                command.args([&workspace.socket(), source]);
                command
            }
            Kind::Peer { command } => {
                // Both are UTF-8: the workspace sees to it.
                let words = command.iter().map(|word| {
                    let word = word.replace("{source}", &source.to_string_lossy());
                    let cache = workspace.cache();
                    let word = word.replace("{cache}", &cache.to_string_lossy());
                    OsString::from(word.replace("{mountpoint}", &mountpoint.to_string_lossy()))
                });
                let words: Vec<OsString> = words.collect();
                let mut command = Command::new(&words[0]);
                command.args(&words[1..]);
                command
            }
        }))
    }
}

/// Starts a store.
pub fn start_store<'w>(workspace: &'w Workspace, store: store::StoreJob) -> Result<Running<'w>> {
    let path = store.mountpoint.clone();
    let mut command = Command::new(own_path()?);
    Job::Store(store).add_to(&mut command)?;
    let server = Server::start(command, workspace, Address::Mount(path.clone()))?;
    Ok(Running {
        server: Some(server),
        path,
        wrapper: Vec::new(),
    })
}

/// An error when two targets have the same name.
pub fn check_names(targets: &[Target]) -> Result<()> {
    for (i, target) in targets.iter().enumerate() {
        if targets[..i].iter().any(|t| t.name == target.name) {
            return Err(Error::usage(format!(
                "{}: named twice (give each peer a name of its own)",
                target.name
            )));
        }
    }
    Ok(())
}

/// A target that is ready to be used.
pub struct Running<'w> {
    server: Option<Server<'w>>,
    path: PathBuf,
    /// The prefix of a program's own words.
    wrapper: Vec<OsString>,
}

impl Running<'_> {
    /// Where the client finds what is in the source: a directory, or a server's socket.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// A command that runs `program` as this target's users do.
    pub fn command(&self, program: impl AsRef<OsStr>) -> Command {
        match self.wrapper.split_first() {
            None => Command::new(program),
            Some((first, rest)) => {
                let mut command = Command::new(first);
                command.args(rest).arg(program);
                command
            }
        }
    }

    /// The server's process.
    pub fn process(&self) -> Option<&Process> {
        self.server.as_ref().map(|s| &s.process)
    }

    /// CPU seconds that the server has used so far; nothing where there is no server.
    pub fn cpu_seconds(&self) -> Result<Option<f64>> {
        self.process().map(Process::cpu_seconds).transpose()
    }

    /// CPU seconds that the server has used since it had used `before`.
    pub fn cpu_since(&self, before: Option<f64>) -> Result<Option<f64>> {
        let now = self.cpu_seconds()?;
        Ok(before.zip(now).map(|(before, now)| now - before))
    }

    /// Adds what the server said last to an error about its work.
    pub fn blame(&self, error: Error) -> Error {
        match &self.server {
            Some(server) => server.blame(error),
            None => error,
        }
    }
}

/// Where a server's users find it.
enum Address {
    Mount(PathBuf),
    Socket(PathBuf),
}

impl Address {
    fn path(&self) -> &Path {
        match self {
            Address::Mount(path) | Address::Socket(path) => path,
        }
    }
}

/// A file server, mounted or at a socket; unmounted and ended when dropped.
struct Server<'w> {
    process: Process,
    place: Address,
    log: PathBuf,
    /// Goes after it.
    workspace: &'w Workspace,
}

impl<'w> Server<'w> {
    fn start(mut command: Command, workspace: &'w Workspace, place: Address) -> Result<Self> {
        let path = place.path().to_owned();
        let probe = match place {
            Address::Mount(_) => {
                let old_dev = fs::metadata(&path)
                    .context(|| path.display().to_string())?
                    .dev();
                Job::WaitMounted { path, old_dev }
            }
            Address::Socket(_) => Job::WaitSocket { path },
        };
        let log_path = place.path().with_extension("log");
        let log = File::create(&log_path).context(|| "creating the server's log".into())?;
        let errors = log.try_clone().context(|| "the server's log".into())?;
        command.stdin(Stdio::null()).stdout(log).stderr(errors);
        let process = Process::spawn(&mut command, Signal::TERM)?;
        // From here on, dropping it cleans up.
        let mut server = Self {
            process,
            place,
            log: log_path,
            workspace,
        };
        let mut probe = probe.spawn()?;
        let error = match wait_any(&[&probe, &server.process], START) {
            Waited::Ended(0) => {
                probe.wait(STOP);
                match probe.status() {
                    Some(status) if status.success() => return Ok(server),
                    _ => Error::new("looking for the server failed"),
                }
            }
            Waited::Ended(_) => {
                server.process.wait(STOP);
                let status = server.process.status().map(|s| s.to_string());
                Error::new(format!(
                    "the server ended before it answered: {} (it has to stay in the \
                     foreground)",
                    status.unwrap_or_default()
                ))
            }
            Waited::TimedOut => Error::new(format!("no answer after {} s", START.as_secs())),
            Waited::Interrupted => interrupt::check()
                .err()
                .unwrap_or(Error::new("interrupted")),
        };
        probe.signal(Signal::KILL);
        let error = server.blame(error);
        drop(server);
        // It may have hung in the file system until now.
        probe.wait(STOP);
        Err(error)
    }

    /// Adds the last lines of the server's log.
    fn blame(&self, error: Error) -> Error {
        let log = fs::read(&self.log).unwrap_or_default();
        let log = String::from_utf8_lossy(&log);
        let lines = log.lines().map(str::trim).filter(|line| !line.is_empty());
        let mut last: Vec<&str> = lines.rev().take(3).collect();
        if last.is_empty() {
            return error;
        }
        last.reverse();
        let words = last.join(" | ");
        Error::new(format!("{error}; its last words: {words}")).with_code(error.code())
    }
}

impl Drop for Server<'_> {
    fn drop(&mut self) {
        match &self.place {
            Address::Mount(mountpoint) => {
                let mountpoint = mountpoint.clone();
                self.unmount(&mountpoint);
            }
            Address::Socket(_) => self.process.signal(Signal::TERM),
        }
        let stop = match self.workspace.stored() {
            Some(_) => STOP_STORE,
            None => STOP,
        };
        for signal in [Signal::TERM, Signal::KILL] {
            if self.process.wait(stop) {
                break;
            }
            tracing::warn!("the server does not end, sending it {signal:?}");
            self.process.signal(signal);
        }
        if !self.process.wait(STOP) {
            uvfs_cli::warn("a server does not end after SIGKILL; it is left behind");
        }
        // For processes that it may have started, unless they ended as well.
        self.process.signal(Signal::TERM);
    }
}

impl Server<'_> {
    fn unmount(&mut self, mountpoint: &Path) {
        // A client that has just ended may still be letting go of its files.
        let deadline = Instant::now() + Duration::from_secs(2);
        let alive = self.process.status().is_none();
        let kind = |result: &io::Result<()>| result.as_ref().err().map(io::Error::kind);
        let mut result = unmount(mountpoint, false);
        while alive && kind(&result) == Some(ErrorKind::ResourceBusy) && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(10));
            result = unmount(mountpoint, false);
        }
        // EINVAL: it isn't mounted.
        if !matches!(kind(&result), None | Some(ErrorKind::InvalidInput)) {
            tracing::warn!(
                "unmounting {}: {result:?}, forcing it",
                mountpoint.display()
            );
            let _ = unmount(mountpoint, true);
        }
    }
}

/// Raises this process's limit of open files as far as it may go, for the servers inherit it
/// and several of them hold a descriptor per file.
pub fn raise_file_limit() -> Result<()> {
    let mut limit = rustix::process::getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    rustix::process::setrlimit(Resource::Nofile, limit)
        .context(|| "raising the limit of open files".into())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `--peer` starts the command that it is given, and keeps arguments with spaces or equal signs whole.
    #[test]
    fn a_peer_is_a_name_and_a_command() {
        let text = r#"a.b-c='my server' -o "source={source},x=\"1\"" \ {mountpoint} ''"#;
        let Target { name, kind } = peer(text).unwrap();
        assert_eq!(name, "a.b-c");
        let Kind::Peer { command } = kind else {
            panic!("{kind:?} is no peer");
        };
        let words = [
            "my server",
            "-o",
            "source={source},x=\"1\"",
            " {mountpoint}",
            "",
        ];
        assert_eq!(command, words);
    }

    /// A mistake in `--peer` is refused with the reason before the benchmark runs.
    #[test]
    fn what_is_no_peer_is_refused_with_the_reason() {
        for (text, word) in [
            ("hp", "NAME="),
            ("=x {source} {mountpoint}", "name"),
            ("a b=x {source} {mountpoint}", "name"),
            ("hp=", "empty"),
            ("hp=x {source}", "{mountpoint}"),
            ("hp=x '{source} {mountpoint}", "without its end"),
            ("hp=x {source} {mountpoint} \\", "backslash"),
        ] {
            let e = peer(text).unwrap_err();
            assert!(e.contains(word), "{text}: {e}");
        }
        let e = peer("hp=x {mountpoint}").unwrap().serves_source();
        assert!(e.unwrap_err().to_string().contains("{source}"));
    }
}
