//! The targets of the benchmarks that compare a mount with the source itself, with `uvfs-client` and with
//! other servers.

use std::path::PathBuf;

use clap::ValueEnum;
use uvfs_cli::{Error, Result};

use super::common::words;
use super::server::{Kind, Target, check_names, peer};
use super::workspace::Workspace;

/// Servers of other projects.
#[derive(clap::Args)]
pub struct Peers {
    /// Another file server: it is run without a shell, has to stay in the foreground, and is
    /// unmounted at the end
    #[arg(long, value_name = "NAME='COMMAND {source} {mountpoint}'", value_parser = peer)]
    peer: Vec<Target>,
}

impl Peers {
    /// Adds a target for each, whose name has to be a new one. Each serves a directory.
    pub fn add_to(&self, targets: &mut Vec<Target>) -> Result<()> {
        self.peer.iter().try_for_each(Target::serves_source)?;
        self.add_any_to(targets)
    }

    /// The same for servers that may serve a store.
    fn add_any_to(&self, targets: &mut Vec<Target>) -> Result<()> {
        targets.extend(self.peer.iter().cloned());
        check_names(targets)
    }
}

/// An object store in place of the source directory.
#[derive(clap::Args)]
pub struct Stored {
    /// Serve an object store, as `uvfs mount` takes it. Each server begins with an empty cache below --dir ({cache} in the
    /// command of --peer, which needs no {source} then)
    #[arg(long, value_name = "URI", requires = "objects")]
    source: Option<String>,
    /// The directory in which that store has the objects of that bucket and prefix, as gateways to a file system do
    #[arg(long, value_name = "DIR", requires = "source")]
    objects: Option<PathBuf>,
}

impl Stored {
    /// Whether there is one.
    pub fn is_some(&self) -> bool {
        self.source.is_some()
    }

    /// Lets a workspace be over the store.
    pub fn put_below(&self, workspace: Workspace) -> Result<Workspace> {
        match (&self.source, &self.objects) {
            (Some(uri), Some(objects)) => workspace.over_store(uri, objects),
            _ => Ok(workspace),
        }
    }

    /// Of `works` those that can be done: without those that write, whose names `writes` gives, if there is a store. Says
    /// which are left out.
    ///
    /// # Errors
    /// None is left.
    pub fn works<T>(
        &self,
        mut works: Vec<T>,
        writes: impl Fn(&T) -> Option<String>,
    ) -> Result<Vec<T>> {
        let left_out = |name| uvfs_cli::warn(format!("{name}: left out, as a store is read-only"));
        works.retain(|work| !self.is_some() || writes(work).map(left_out).is_none());
        match works.is_empty() {
            true => Err(Error::usage("no work is left that only reads")),
            false => Ok(works),
        }
    }

    /// The targets, as [`Sides::targets`] gives them for a directory. A store has a side client if it has `clients`.
    pub fn targets(
        &self,
        sides: &Sides,
        all: &[Side],
        options: &[&str],
        clients: &[Target],
    ) -> Result<Vec<Target>> {
        if !self.is_some() {
            return sides.targets(all, options, clients);
        }
        let mut all = all.to_vec();
        all.retain(|side| *side != Side::Client || !clients.is_empty());
        let mut targets = sides.without_peers(&all, options, clients)?;
        sides.peers.add_any_to(&mut targets)?;
        Ok(targets)
    }
}

/// The targets to measure.
#[derive(clap::Args)]
pub struct Sides {
    /// The sides to measure [default: all that the benchmark has but mount-dev]
    #[arg(long, value_delimiter = ',', value_name = "LIST")]
    sides: Vec<Side>,
    #[command(flatten)]
    peers: Peers,
}

/// One side, which may have several targets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Side {
    /// the source directory itself
    Native,
    /// `uvfs mount`
    Mount,
    /// `uvfs mount` over /dev/fuse
    MountDev,
    /// `uvfs mount`, with the programs under `uvfs run`
    Run,
    /// `uvfs-client`, without a mount
    Client,
}

impl Side {
    /// The sides that run any program.
    pub const PROGRAMS: [Self; 4] = [Self::Native, Self::Mount, Self::MountDev, Self::Run];
    /// The sides that do single calls.
    pub const CALLS: [Self; 4] = [Self::Native, Self::Mount, Self::MountDev, Self::Client];
}

impl Sides {
    /// The targets of the sides that were asked for, of those in `all` and in that order, and the peers.
    /// `options` are those of each `uvfs mount`, and `clients` the targets of [`Side::Client`].
    pub fn targets(
        &self,
        all: &[Side],
        options: &[&str],
        clients: &[Target],
    ) -> Result<Vec<Target>> {
        let mut targets = self.without_peers(all, options, clients)?;
        self.peers.add_to(&mut targets)?;
        Ok(targets)
    }

    fn without_peers(
        &self,
        all: &[Side],
        options: &[&str],
        clients: &[Target],
    ) -> Result<Vec<Target>> {
        if let Some(side) = self.sides.iter().find(|side| !all.contains(side)) {
            let names: Vec<String> = all.iter().map(|side| words(side).0).collect();
            return Err(Error::usage(format!(
                "--sides: this benchmark has no side {}, but {}",
                words(side).0,
                names.join(", ")
            )));
        }
        let asked = |side: &Side| match self.sides.is_empty() {
            true => *side != Side::MountDev,
            false => self.sides.contains(side),
        };
        let mut targets = Vec::new();
        for &side in all.iter().filter(|side| asked(side)) {
            let name = words(&side).0;
            match side {
                Side::Native => targets.push(Target::native()),
                Side::Mount => targets.push(Target::uvfs(name, options)),
                Side::MountDev => {
                    let options = [options, &["--transport", "dev"]].concat();
                    targets.push(Target::uvfs(name, &options));
                }
                Side::Run => {
                    let kind = Kind::Run;
                    targets.push(Target { name, kind });
                }
                Side::Client => targets.extend_from_slice(clients),
            }
        }
        Ok(targets)
    }
}

/// A target of `uvfs-client`.
pub fn client(name: &str, served: bool, base: bool) -> Target {
    Target {
        name: name.into(),
        kind: Kind::Client { served, base },
    }
}
