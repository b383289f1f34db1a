//! Rounds over all targets in turn.

use serde::{Deserialize, Serialize};
use uvfs_cli::{Progress, Result};

use super::client::Job;
use super::interrupt;
use super::measure::Measured;
use super::server::{Running, Target};

/// One measurement of one work on one target.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Sample {
    /// The client's figures.
    #[serde(flatten)]
    pub client: Measured,
    /// CPU time of the server in the meantime, in seconds; nothing where there is no server.
    pub server_cpu_seconds: Option<f64>,
}

/// The samples of one target, or why there are none.
#[derive(Debug, Default)]
pub struct Outcome {
    /// By work, in the order of the works, a sample for each round.
    pub samples: Vec<Vec<Sample>>,
    /// Why it could not be measured to the end.
    pub error: Option<String>,
}

/// Shows which work is under way.
pub type Say<'a> = &'a dyn Fn(&str);

/// Runs `round` for each target in turn, `rounds` times, beginning with another target each
/// time so that none is always first. `round` returns one sample for each of `works` works, or nothing
/// for those that the target does not have. A target whose round fails is not tried again, and what it gave before does not count.
///
/// # Errors
/// Only when the benchmark was interrupted.
pub fn interleave<S: Into<Option<Sample>>>(
    rounds: usize,
    targets: &[Target],
    works: usize,
    mut round: impl FnMut(usize, &Target, Say<'_>) -> Result<Vec<S>>,
) -> Result<Vec<Outcome>> {
    let mut outcomes: Vec<Outcome> = targets.iter().map(|_| empty(works)).collect();
    let (progress, all) = (Progress::new(false), rounds * targets.len());
    for done in 0..all {
        let (number, turn) = (done / targets.len(), done % targets.len());
        let index = (number + turn) % targets.len();
        let (target, outcome) = (&targets[index], &mut outcomes[index]);
        if outcome.error.is_some() {
            continue;
        }
        interrupt::check()?;
        let say = |work: &str| progress.say(format!("{done}/{all} {} {work}", target.name));
        say("");
        match round(number, target, &say) {
            Ok(samples) => {
                assert_eq!(samples.len(), works, "a sample for each work");
                for (all, one) in outcome.samples.iter_mut().zip(samples) {
                    all.extend(one.into());
                }
            }
            Err(e) => {
                interrupt::check()?;
                *outcome = empty(works);
                outcome.error = Some(e.to_string());
            }
        }
    }
    Ok(outcomes)
}

fn empty(works: usize) -> Outcome {
    Outcome {
        samples: vec![Vec::new(); works],
        error: None,
    }
}

/// Runs a client's job on a running target and adds the server's CPU time.
pub fn measure(running: &Running<'_>, job: &Job) -> Result<Sample> {
    let before = running.cpu_seconds()?;
    Ok(Sample {
        client: job.run(running.process())?,
        server_cpu_seconds: running.cpu_since(before)?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use uvfs_cli::Error;

    fn target(name: &str) -> Target {
        Target {
            name: name.into(),
            ..Target::native()
        }
    }

    fn sample(amount: f64) -> Sample {
        Sample {
            client: Measured {
                amount,
                seconds: 1.0,
                cpu_seconds: 0.5,
                ..Measured::default()
            },
            server_cpu_seconds: None,
        }
    }

    /// Each target has its turn in every round, and each is first equally often.
    #[test]
    fn every_target_has_its_turn_in_every_round_and_each_is_first_once() {
        let targets = [target("a"), target("b"), target("c")];
        let mut order = String::new();
        let outcomes = interleave(3, &targets, 2, |round, target, _| {
            order += &target.name;
            Ok(vec![sample(round as f64), sample(10.0)])
        })
        .unwrap();
        assert_eq!(order, "abcbcacab");
        for outcome in outcomes {
            assert_eq!(outcome.samples.len(), 2);
            assert_eq!(outcome.samples[0], [0.0, 1.0, 2.0].map(sample));
            assert!(outcome.error.is_none());
        }
    }

    /// One broken server does not end the benchmark, and its partial figures don't count.
    #[test]
    fn a_target_that_fails_is_left_out_and_the_others_go_on() {
        let targets = [target("good"), target("bad")];
        let mut tried = 0;
        let outcomes = interleave(4, &targets, 1, |round, target, _| {
            if target.name == "bad" {
                tried += 1;
                if round == 1 {
                    return Err(Error::new("broke"));
                }
            }
            Ok(vec![sample(1.0)])
        })
        .unwrap();
        assert_eq!(tried, 2);
        assert_eq!(outcomes[0].samples[0].len(), 4);
        assert_eq!(outcomes[1].samples, [vec![]]);
        assert_eq!(outcomes[1].error.as_deref(), Some("broke"));
    }
}
