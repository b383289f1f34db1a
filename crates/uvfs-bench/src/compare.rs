//! `uvfs bench compare`: whether a second run was faster or slower than a first.

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

use serde::Serialize;
use serde_json::json;
use uvfs_cli::{Error, Result, printed};

use super::report::{All, Row, Unit, Work, columns, digits};
use super::runner::Sample;
use super::stats::Summary;

const EXAMPLES: &str = "\
Examples:
  uvfs bench all --json > before.json
  uvfs bench all --json > after.json
  uvfs bench compare before.json after.json
  uvfs bench compare --fail-above 5 before.json after.json
  uvfs bench compare --json before.json after.json > changes.json

Either file holds what `uvfs bench all` or another benchmark printed with --json. Works and targets that are in
both are compared. The rounds of A and B are paired, first with first and so on, and each pair gives a ratio: the
rate in B divided by that in A, and for programs the time in A divided by that in B, so that above 1 is faster.
`speed` is the median of these ratios, and the interval a 95% bootstrap confidence interval of it (percentiles of
the medians of resampled rounds: all resamples up to six rounds, beyond that 10,000 with a fixed seed). A
difference counts when the whole interval is above or below 1. With three rounds the interval is the range of the
ratios, and one in four pairs of equal targets differs by chance; with five rounds one in sixteen. Several rounds,
an idle machine and --fail-above keep chance out. Where a target has fewer than two rounds, no difference counts.

Exit status: 0 compared, 1 with --fail-above: something became slower by more than that, 2 wrong usage or
a file could not be read.";

const JSON_HELP: &str = "\
JSON: one object with version, a and b (the files), only_a and only_b (BENCH/WORK/TARGET that only one of them
has), and results: bench, work, target, unit (of a and b: ms, op/s, MiB/s), a and b (medians), speed, low
and high (the interval, or null), rounds (pairs), and change: faster, slower or none.";

/// The runs to compare.
#[derive(clap::Args)]
#[command(after_help = EXAMPLES, after_long_help = [EXAMPLES, "\n\n", JSON_HELP].concat())]
pub struct Args {
    /// The first run, as JSON
    a: PathBuf,
    /// The second run, as JSON
    b: PathBuf,
    /// Exit with status 1 when a target became slower by more than this, and the whole interval says so
    #[arg(long, value_name = "PERCENT", value_parser = percent)]
    fail_above: Option<f64>,
    /// Print JSON instead of a table
    #[arg(long)]
    json: bool,
}

fn percent(text: &str) -> Result<f64, String> {
    match text.trim_end_matches('%').parse() {
        Ok(value) if (0.0..100.0).contains(&value) => Ok(value),
        _ => Err("a percentage from 0 to below 100".into()),
    }
}

/// The direction in which a target changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
enum Change {
    Faster,
    Slower,
    None,
}

/// One target on one work in both runs.
#[derive(Debug, Serialize)]
struct Compared {
    bench: String,
    work: String,
    target: String,
    unit: String,
    a: f64,
    b: f64,
    speed: f64,
    low: Option<f64>,
    high: Option<f64>,
    rounds: usize,
    change: Change,
}

/// How fast each round was, in B as a multiple of A.
fn paired(a: &Row, b: &Row) -> Vec<f64> {
    let rate = |sample: &Sample| sample.client.amount / sample.client.seconds;
    let pairs = a.samples.iter().zip(&b.samples);
    pairs
        .map(|(a, b)| rate(b) / rate(a))
        .filter(|ratio| ratio.is_finite() && *ratio > 0.0)
        .collect()
}

/// A 95% confidence interval of the median.
fn interval(values: &[f64]) -> Option<(f64, f64)> {
    let count = values.len();
    if count < 2 {
        return None;
    }
    let median = |picked: &[f64]| Summary::of(picked.iter().copied()).map(|s| s.median);
    let mut medians: Vec<f64> = match count {
        2..=6 => (0..count.pow(count as u32))
            .filter_map(|mut number| {
                let mut pick = || {
                    let value = values[number % count];
                    number /= count;
                    value
                };
                median(&(0..count).map(|_| pick()).collect::<Vec<f64>>())
            })
            .collect(),
        _ => {
            let mut random = fastrand::Rng::with_seed(1);
            let mut pick = || values[random.usize(..count)];
            (0..10_000)
                .filter_map(|_| median(&(0..count).map(|_| pick()).collect::<Vec<f64>>()))
                .collect()
        }
    };
    medians.sort_by(f64::total_cmp);
    let cut = (medians.len() as f64 * 0.025) as usize;
    Some((medians[cut], medians[medians.len() - 1 - cut]))
}

/// A result: BENCH/WORK/TARGET, its benchmark, its work and its row.
type Found<'r> = (String, &'r str, &'r Work, &'r Row);

/// Every result of a run.
fn results(all: &All) -> Vec<Found<'_>> {
    let works = (all.runs.iter()).flat_map(|run| run.works.iter().map(move |work| (run, work)));
    let rows = works.flat_map(|(run, work)| work.results.iter().map(move |row| (run, work, row)));
    rows.map(|(run, work, row)| {
        let name = format!("{}/{}/{}", run.bench, work.name, row.target);
        (name, run.bench.as_str(), work, row)
    })
    .collect()
}

/// Everything that is in both, and the names of what is in one of them only.
fn compare(a: &All, b: &All) -> (Vec<Compared>, [Vec<String>; 2]) {
    let (a, b) = (results(a), results(b));
    let only = |these: &[Found<'_>], others: &[Found<'_>]| {
        let names = these.iter().map(|(name, ..)| name);
        let alone = |name: &&String| !others.iter().any(|(other, ..)| other == *name);
        names.filter(alone).cloned().collect()
    };
    let both = a.iter().filter_map(|(name, bench, work, row)| {
        let (.., pair) = b.iter().find(|(other, ..)| other == name)?;
        let (first, second) = row.value(work.unit).zip(pair.value(work.unit))?;
        let ratios = paired(row, pair);
        let bounds = interval(&ratios);
        Some(Compared {
            bench: bench.to_string(),
            work: work.name.clone(),
            target: row.target.clone(),
            unit: work.measure().into(),
            a: first.median,
            b: second.median,
            speed: match Summary::of(ratios.iter().copied()) {
                Some(paired) => paired.median,
                None if work.unit == Unit::Run => first.median / second.median,
                None => second.median / first.median,
            },
            low: bounds.map(|(low, _)| low),
            high: bounds.map(|(_, high)| high),
            rounds: ratios.len(),
            change: match bounds {
                Some((low, _)) if low > 1.0 => Change::Faster,
                Some((_, high)) if high < 1.0 => Change::Slower,
                _ => Change::None,
            },
        })
    });
    (both.collect(), [only(&a, &b), only(&b, &a)])
}

/// The names of what one run alone has that the table shows.
const SHOWN: usize = 6;

fn table(results: &[Compared], only: &[Vec<String>; 2]) -> String {
    let heads = ["", "target", "A", "B", "", "speed", "95% interval", ""];
    let mut lines = vec![heads.map(String::from).to_vec()];
    for one in results {
        lines.push(vec![
            format!("{} {}", one.bench, one.work),
            one.target.clone(),
            digits(one.a),
            digits(one.b),
            one.unit.clone(),
            format!("{:.3}", one.speed),
            match one.low.zip(one.high) {
                Some((low, high)) => format!("{low:.3}..{high:.3}"),
                None => "-".into(),
            },
            match one.change {
                Change::Faster => "faster".into(),
                Change::Slower => "slower".into(),
                Change::None => String::new(),
            },
        ]);
    }
    let mut text = columns(&lines);
    for (names, file) in only.iter().zip(["A", "B"]) {
        if !names.is_empty() {
            let shown = names.iter().take(SHOWN).cloned().collect::<Vec<_>>();
            text += &format!("\nOnly in {file}: {}", shown.join(", "));
            text += &match names.len().saturating_sub(SHOWN) {
                0 => "\n".to_string(),
                more => format!(" and {more} more, which --json lists\n"),
            };
        }
    }
    let count = |change| results.iter().filter(|r| r.change == change).count();
    text + &format!(
        "\n{} compared: {} faster, {} slower\n",
        results.len(),
        count(Change::Faster),
        count(Change::Slower)
    )
}

/// Compares, and prints what it found.
pub fn run(args: Args) -> Result<ExitCode> {
    let load = |path| All::load(path).map_err(|e: Error| e.with_code(2));
    let (results, only) = compare(&load(&args.a)?, &load(&args.b)?);
    let slower = |limit: f64| {
        let bound = 1.0 - limit / 100.0;
        let rows = results
            .iter()
            .filter(move |r| r.change == Change::Slower && r.high.is_some_and(|high| high < bound));
        rows.collect::<Vec<_>>()
    };
    let text = match args.json {
        true => {
            let [only_a, only_b] = &only;
            let value = json!({
                "version": 1, "a": args.a.display().to_string(), "b": args.b.display().to_string(),
                "only_a": only_a, "only_b": only_b, "results": results,
            });
            format!("{value:#}\n")
        }
        false => table(&results, &only),
    };
    printed(std::io::stdout().lock().write_all(text.as_bytes()))?;
    let failed = args.fail_above.map(slower).unwrap_or_default();
    for one in &failed {
        uvfs_cli::warn(format!(
            "{} {}: {} is slower: {:.3} times as fast",
            one.bench, one.work, one.target, one.speed
        ));
    }
    Ok(match failed.is_empty() {
        true => ExitCode::SUCCESS,
        false => ExitCode::FAILURE,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all(bench: &str, unit: &str, rounds: &[f64]) -> All {
        let samples: Vec<_> = rounds
            .iter()
            .map(|seconds| json!({"amount": 1.0, "seconds": seconds}))
            .collect();
        let of = |value: fn(f64) -> f64| Summary::of(rounds.iter().map(|s| value(*s)));
        let run = json!({
            "version": 1, "bench": bench, "uvfs": "0", "targets": [{"name": "t"}],
            "works": [{"name": "w", "title": "w", "unit": unit, "results": [{
                "target": "t", "samples": samples, "rate": of(|s| 1.0 / s), "run_seconds": of(|s| s),
            }]}],
        });
        All::of(vec![serde_json::from_value(run).unwrap()])
    }

    fn one(unit: &str, a: &[f64], b: &[f64]) -> Compared {
        let (mut found, only) = compare(&all("x", unit, a), &all("x", unit, b));
        assert_eq!((found.len(), only), (1, [vec![], vec![]]));
        found.remove(0)
    }

    /// `uvfs bench compare` finds a change of speed, and its direction.
    #[test]
    fn a_difference_beyond_the_spread_is_found_in_time_and_in_rate() {
        let (before, after) = ([1.0, 1.1, 0.9, 1.0, 1.05], [2.0, 2.1, 1.9, 2.2, 2.0]);
        for unit in ["run", "op"] {
            let slower = one(unit, &before, &after);
            assert_eq!(slower.change, Change::Slower);
            assert!((slower.speed - 0.5).abs() < 1e-9, "{slower:?}");
            assert!(slower.high.unwrap() < 0.6, "{slower:?}");
            let faster = one(unit, &after, &before);
            assert_eq!(faster.change, Change::Faster);
            assert!((faster.speed - 2.0).abs() < 1e-9, "{faster:?}");
        }
    }

    /// `uvfs bench compare` reports no change of speed that is within the noise.
    #[test]
    fn a_difference_within_the_spread_is_none() {
        let (a, b) = ([1.0, 1.2, 0.9, 1.1, 1.0], [1.1, 1.0, 1.0, 1.2, 0.9]);
        assert_eq!(one("op", &a, &b).change, Change::None);
        let (many_a, many_b) = (a.repeat(4), b.repeat(4));
        assert_eq!(one("op", &many_a, &many_b).change, Change::None);
        // One round has no spread.
        let single = one("op", &[1.0], &[5.0]);
        assert_eq!((single.change, single.low), (Change::None, None));
    }

    /// The confidence interval of `uvfs bench compare` is that of the median.
    #[test]
    fn the_interval_is_that_of_the_median() {
        assert_eq!(interval(&[2.0, 1.0, 3.0]), Some((1.0, 3.0)));
        let values: Vec<f64> = (1..=101).map(f64::from).collect();
        let (low, high) = interval(&values).unwrap();
        // The exact interval by order statistics is 41 to 61.
        assert!(
            (38.0..=44.0).contains(&low) && (58.0..=64.0).contains(&high),
            "{low} {high}"
        );
    }

    /// `uvfs bench compare` names each benchmark that only one of the runs has.
    #[test]
    fn the_names_of_one_run_only_are_listed() {
        let (found, only) = compare(&all("x", "op", &[1.0]), &all("y", "op", &[1.0]));
        assert!(found.is_empty());
        assert_eq!(only, [vec!["x/w/t".to_string()], vec!["y/w/t".to_string()]]);
    }
}
