//! The targets of the benchmarks that compare a mount with the source itself, with `uvfs-client` and with
//! other servers.

use clap::ValueEnum;
use uvfs_cli::{Error, Result};

use super::common::words;
use super::server::{Kind, Target, check_names, peer};

/// Servers of other projects.
#[derive(clap::Args)]
pub struct Peers {
    /// Another file server: it is run without a shell, has to stay in the foreground, and is
    /// unmounted at the end
    #[arg(long, value_name = "NAME='COMMAND {source} {mountpoint}'", value_parser = peer)]
    peer: Vec<Target>,
}

impl Peers {
    /// Adds a target for each, whose name has to be a new one.
    pub fn add_to(&self, targets: &mut Vec<Target>) -> Result<()> {
        targets.extend(self.peer.iter().cloned());
        check_names(targets)
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
            let mut options: Vec<String> = options.iter().map(ToString::to_string).collect();
            let kind = match side {
                Side::Native => Kind::Native,
                Side::Mount => Kind::Uvfs { options },
                Side::MountDev => {
                    options.extend(["--transport".into(), "dev".into()]);
                    Kind::Uvfs { options }
                }
                Side::Run => Kind::Run,
                Side::Client => {
                    targets.extend_from_slice(clients);
                    continue;
                }
            };
            let name = words(&side).0;
            targets.push(Target { name, kind });
        }
        self.peers.add_to(&mut targets)?;
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
