//! The table of a benchmark whose works are runs of programs: a line for each program.

use super::super::server::{Kind, Target};
use super::{Report, Row, WorkReport, columns, thousands};

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
pub fn table(report: &Report) -> String {
    let measured = report.targets.iter().filter(|t| t.error.is_none());
    let targets: Vec<&Target> = measured.map(|t| &t.target).collect();
    let pairs = pairs(&targets);
    let mut head = vec![String::new()];
    for target in &targets {
        head.extend([format!("{} ms", target.name), "min..max".into()]);
    }
    head.extend(pairs.iter().map(|(a, b)| format!("{a}/{b}")));
    let mut lines = vec![head];
    lines.extend(report.works.iter().map(|work| line(work, &targets, &pairs)));
    let head = "Milliseconds of a run; where a ratio is below 1, the first of the two is faster";
    format!("\n{head}\n{}", columns(&lines))
}

/// Which targets are compared in the table: each with native, `uvfs run` with a mount of uvfs, and
/// a mount of uvfs with each peer.
fn pairs<'t>(targets: &[&'t Target]) -> Vec<(&'t str, &'t str)> {
    let compared = |a: &Target, b: &Target| match (&a.kind, &b.kind) {
        (Kind::Native, _) => false,
        (_, Kind::Native) => true,
        (Kind::Run { .. }, Kind::Uvfs { .. }) => true,
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

fn line(work: &WorkReport, targets: &[&Target], pairs: &[(&str, &str)]) -> Vec<String> {
    let row = |name: &str| work.results.iter().find(|row| row.target == name);
    let mut line = vec![work.work.name.clone()];
    for target in targets {
        line.extend(match row(&target.name).and_then(|row| row.run_seconds) {
            Some(time) => [
                milliseconds(time.median),
                format!("{}..{}", milliseconds(time.min), milliseconds(time.max)),
            ],
            None => ["-", "-"].map(String::from),
        });
    }
    line.extend(pairs.iter().map(|(a, b)| {
        let ratio = row(a).and_then(|row| row.time_ratio.get(*b));
        ratio.map_or("-".into(), |ratio| format!("{ratio:.2}"))
    }));
    line
}

/// Three digits or more.
fn milliseconds(seconds: f64) -> String {
    match seconds * 1e3 {
        ms if ms < 9.995 => format!("{ms:.2}"),
        ms if ms < 99.95 => format!("{ms:.1}"),
        ms => thousands(ms),
    }
}
