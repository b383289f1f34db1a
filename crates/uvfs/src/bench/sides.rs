//! The targets of the benchmarks that compare programs on a mount, inside and outside `uvfs run`.

use super::server::{Kind, Peer, Target, check_names};
use crate::error::Result;

/// Which targets to measure.
#[derive(clap::Args)]
pub struct Sides {
    /// The sides to measure
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "native,mount,run",
        value_name = "LIST"
    )]
    sides: Vec<Side>,
    /// Another file server: it is run without a shell, has to stay in the foreground, and is
    /// unmounted at the end
    #[arg(long, value_name = "NAME='COMMAND {source} {mountpoint}'")]
    peer: Vec<Peer>,
}

#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Side {
    /// the source directory itself
    Native,
    /// `uvfs mount`
    Mount,
    /// `uvfs mount`, with the programs under `uvfs run`
    Run,
}

impl From<Side> for Target {
    fn from(side: Side) -> Self {
        let (name, kind) = match side {
            Side::Native => return Target::native(),
            Side::Mount => (
                "mount",
                Kind::Uvfs {
                    options: Vec::new(),
                },
            ),
            Side::Run => ("run", Kind::Run),
        };
        Target {
            name: name.into(),
            kind,
        }
    }
}

impl Sides {
    /// The sides that were asked for, in a fixed order, and the peers.
    pub fn targets(&self) -> Result<Vec<Target>> {
        let all = [Side::Native, Side::Mount, Side::Run];
        let sides = all.into_iter().filter(|side| self.sides.contains(side));
        let mut targets: Vec<Target> = sides.map(Target::from).collect();
        targets.extend(self.peer.iter().cloned().map(Target::from));
        check_names(&targets)?;
        Ok(targets)
    }
}
