//! The table of a benchmark whose works are runs of programs: a line for each program.

use super::super::server::{Kind, Target};
use super::rows::{Row, TargetReport, WorkReport};
use super::text::{columns, digits};

/// Compares the time that each target took with that of each other.
pub fn compare(rows: &mut [Row]) {
    let medians = rows
        .iter()
        .filter_map(|row| Some((row.target.clone(), row.run_seconds?.median)));
    let medians: Vec<(String, f64)> = medians.collect();
    for row in rows {
        let Some(own) = row.run_seconds else { continue };
        let others = medians.iter().filter(|(name, _)| *name != row.target);
        row.time_ratio = others
            .map(|(name, median)| (name.clone(), own.median / median))
            .collect();
    }
}

/// Milliseconds of each program on each target, and how they compare.
pub fn table(targets: &[TargetReport], works: &[WorkReport]) -> String {
    let measured = targets.iter().filter(|t| t.error.is_none());
    let targets: Vec<&Target> = measured.map(|t| &t.target).collect();
    let pairs = pairs(&targets);
    let mut times = vec![vec![String::new()]];
    for target in &targets {
        times[0].extend([target.name.clone(), "min..max".into()]);
    }
    let mut ratios = vec![vec![String::new()]];
    ratios[0].extend(pairs.iter().map(|(a, b)| format!("{a}/{b}")));
    for work in works {
        times.push(times_of(work, &targets));
        ratios.push(ratios_of(work, &pairs));
    }
    let mut text = format!("\nMilliseconds of a run, median:\n{}", columns(&times));
    if !pairs.is_empty() {
        text += "\nRatios of the medians; below 1, the first of the two is faster:\n";
        text += &columns(&ratios);
    }
    text
}

/// The targets that the table compares: each with native, `uvfs run` with a mount of uvfs, and
/// a mount of uvfs with each peer.
fn pairs<'t>(targets: &[&'t Target]) -> Vec<(&'t str, &'t str)> {
    let compared = |a: &Target, b: &Target| match (&a.kind, &b.kind) {
        (Kind::Native, _) => false,
        (_, Kind::Native) => true,
        (Kind::Run, Kind::Uvfs { .. }) => true,
        (Kind::Uvfs { .. }, Kind::Peer { .. }) => true,
        _ => false,
    };
    let mut pairs = Vec::new();
    for b in targets {
        let first = targets.iter().filter(|a| compared(a, b));
        pairs.extend(first.map(|a| (a.name.as_str(), b.name.as_str())));
    }
    pairs
}

fn row<'r>(work: &'r WorkReport, name: &str) -> Option<&'r Row> {
    work.results.iter().find(|row| row.target == name)
}

fn times_of(work: &WorkReport, targets: &[&Target]) -> Vec<String> {
    let mut line = vec![work.work.name.clone()];
    for target in targets {
        let time = row(work, &target.name).and_then(|row| row.run_seconds);
        line.extend(match time {
            Some(time) => [
                milliseconds(time.median),
                format!("{}..{}", milliseconds(time.min), milliseconds(time.max)),
            ],
            None => ["-", "-"].map(String::from),
        });
    }
    line
}

fn ratios_of(work: &WorkReport, pairs: &[(&str, &str)]) -> Vec<String> {
    let mut line = vec![work.work.name.clone()];
    line.extend(pairs.iter().map(|(a, b)| {
        let ratio = row(work, a).and_then(|row| row.time_ratio.get(*b));
        ratio.map_or("-".into(), |ratio| format!("{ratio:.2}"))
    }));
    line
}

fn milliseconds(seconds: f64) -> String {
    digits(seconds * 1e3)
}

#[cfg(test)]
mod tests {
    use super::super::super::measure::Measured;
    use super::super::super::runner::{Outcome, Sample};
    use super::super::super::server::Peer;
    use super::super::{Report, Unit, WorkInfo};
    use super::*;

    /// The table of `uvfs bench programs` shows the right times, and compares the right sides.
    #[test]
    fn the_table_has_a_line_for_each_program_and_compares_the_sides() {
        let target = |name: &str, kind| Target {
            name: name.into(),
            kind,
        };
        let options = Vec::new;
        let peer: Peer = "hp=hp {source} {mountpoint}".parse().unwrap();
        let targets = vec![
            Target::native(),
            target("mount", Kind::Uvfs { options: options() }),
            target("run", Kind::Run),
            peer.into(),
        ];
        let sample = |seconds| Sample {
            client: Measured {
                amount: 2.0,
                seconds,
                ..Measured::default()
            },
            server_cpu_seconds: None,
        };
        // Two runs each time.
        let outcomes = [0.002, 0.02, 0.2, 2.0].map(|seconds| Outcome {
            samples: vec![[1.0, 2.0, 4.0].map(|n| sample(n * seconds)).into()],
            error: None,
        });
        let work = WorkInfo {
            name: "make".into(),
            title: "make".into(),
            unit: Unit::Run,
        };
        let report = Report::new("programs", ().into(), targets, vec![work], &outcomes);
        let table = report.table();
        let lines: Vec<Vec<&str>> = table
            .lines()
            .map(|line| line.split_whitespace().collect())
            .collect();
        let times = "make 2.00 1.00..4.00 20.0 10.0..40.0 200 100..400 2,000 1,000..4,000";
        assert_eq!(lines[4], times.split(' ').collect::<Vec<_>>());
        let names = [
            "mount/native",
            "run/native",
            "hp/native",
            "run/mount",
            "mount/hp",
        ];
        assert_eq!(lines[7], names);
        let ratios = "make 10.00 100.00 1000.00 10.00 0.01";
        assert_eq!(lines[8], ratios.split(' ').collect::<Vec<_>>());
    }
}
