use serde_json::json;

use super::super::server::{Kind, peer};
use super::text::thousands;
use super::*;

fn sample(rate: f64, server: Option<f64>) -> Sample {
    Sample {
        client: Measured {
            amount: rate * 2.0,
            seconds: 2.0,
            cpu_seconds: 1.0,
            ..Measured::default()
        },
        server_cpu_seconds: server,
    }
}

fn report() -> Report {
    let peer = peer("hp=hp {source} {mountpoint}").unwrap();
    let uvfs = Target::uvfs("dev-spin", &["--wait=spin"]);
    let broken = Target {
        name: "broken".into(),
        kind: Kind::Client {
            served: true,
            base: false,
        },
    };
    let outcome = |rates: &[f64], server| Outcome {
        samples: vec![rates.iter().map(|&r| sample(r, server)).collect()],
        error: None,
    };
    let failed = Outcome {
        samples: vec![vec![]],
        error: Some("no ring".into()),
    };
    Report::new(
        "wakeup",
        json!({"rounds": 3}),
        &[Target::native(), uvfs, peer, broken],
        vec![Work::new("read-1", "reads", Unit::Op)],
        &[
            outcome(&[1e6, 3e6, 2e6], None),
            outcome(&[5e5, 4e5, 6e5], Some(0.5)),
            outcome(&[1e5, 1e5, 1e5], Some(3.0)),
            failed,
        ],
    )
}

/// `--json` prints the fields that `--help` documents.
#[test]
fn the_json_has_the_documented_shape() {
    let report = report();
    let json: Value = serde_json::from_str(&report.json()).unwrap();
    assert_eq!(json["version"], 1);
    assert_eq!(json["bench"], "wakeup");
    assert_eq!(json["settings"], json!({"rounds": 3}));
    assert!(json["kernel"].is_string() && json["uvfs"].is_string());
    assert!(json["cpus"].as_u64().unwrap() > 0);
    assert_eq!(
        json["targets"],
        json!([
            {"name": "native", "kind": "native", "error": null},
            {"name": "dev-spin", "kind": "uvfs", "options": ["--wait=spin"], "error": null},
            {"name": "hp", "kind": "peer", "command": ["hp", "{source}", "{mountpoint}"],
             "error": null},
            {"name": "broken", "kind": "client", "served": true, "base": false,
             "error": "no ring"},
        ])
    );
    let work = &json["works"][0];
    assert_eq!(work["name"], "read-1");
    assert_eq!(work["unit"], "op");
    let rows = work["results"].as_array().unwrap();
    assert_eq!(rows.len(), 3);
    assert_eq!(
        rows[1],
        json!({
            "target": "dev-spin",
            "samples": [
                {"amount": 1e6, "seconds": 2.0, "cpu_seconds": 1.0, "server_cpu_seconds": 0.5},
                {"amount": 8e5, "seconds": 2.0, "cpu_seconds": 1.0, "server_cpu_seconds": 0.5},
                {"amount": 12e5, "seconds": 2.0, "cpu_seconds": 1.0, "server_cpu_seconds": 0.5},
            ],
            "rate": {"median": 5e5, "min": 4e5, "max": 6e5},
            "client_cpu_us": {"median": 1.0, "min": 1.0 / 1.2, "max": 1.25},
            "server_cpu_us": {"median": 0.5, "min": 0.5 / 1.2, "max": 0.625},
            "ratio": {"native": 0.25, "hp": 5.0},
        })
    );
    assert_eq!(rows[0]["server_cpu_us"], Value::Null);
    for field in [
        "samples",
        "rate",
        "client_cpu_us",
        "server_cpu_us",
        "memory_mib",
        "latency_us",
        "latency_p99_us",
        "read_mib",
        "slowest",
        "ratio",
        "run_seconds",
        "time_ratio",
    ] {
        assert!(JSON_HELP.contains(field), "{field} is documented");
    }
}

/// A benchmark's table has each figure in its column, and says which target failed.
#[test]
fn the_table_shows_medians_spread_cpu_and_ratios() {
    let table = report().table();
    let line = table.lines().find(|l| l.contains("dev-spin")).unwrap();
    let cells: Vec<&str> = line.split_whitespace().collect();
    assert_eq!(
        cells,
        [
            "dev-spin",
            "500,000",
            "op/s",
            "400,000..600,000",
            "0.25",
            "5.00",
            "1.00",
            "0.50"
        ]
    );
    assert!(!table.contains("broken"));
    assert_eq!(
        report().failures().collect::<Vec<_>>(),
        [("broken", "no ring")]
    );
}

/// Large numbers in tables have commas.
#[test]
fn numbers_get_commas() {
    assert_eq!(thousands(0.4), "0");
    assert_eq!(thousands(999.0), "999");
    assert_eq!(thousands(1000.0), "1,000");
    assert_eq!(thousands(1234567.8), "1,234,568");
}

/// The table of `uvfs bench programs` shows the right times, and compares the right sides.
#[test]
fn the_table_has_a_line_for_each_program_and_compares_the_sides() {
    let target = |name: &str, kind| Target {
        name: name.into(),
        kind,
    };
    let options = Vec::new;
    let peer = peer("hp=hp {source} {mountpoint}").unwrap();
    let targets = [
        Target::native(),
        target("mount", Kind::Uvfs { options: options() }),
        target("run", Kind::Run),
        peer,
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
        samples: vec![[1.0, 2.0, 4.0].map(|n| sample(n * seconds)).into(); 5],
        error: None,
    });
    let works = ["make", "a", "b", "c", "d"].map(|name| Work::new(name, name, Unit::Run));
    let report = Report::new("programs", ().into(), &targets, works.into(), &outcomes);
    let table = report.table();
    let lines: Vec<Vec<&str>> = table
        .lines()
        .map(|line| line.split_whitespace().collect())
        .collect();
    let words = |line: &'static str| line.split(' ').collect::<Vec<_>>();
    assert_eq!(lines[3], ["native", "mount", "run", "hp"]);
    let times = "make ms 2.00 (1.00..4.00) 20.0 (10.0..40.0) 200 (100..400) 2,000 (1,000..4,000)";
    assert_eq!(lines[4], words(times));
    assert_eq!(lines[10], words("Divided by those of native:"));
    assert_eq!(lines[12], words("make ms - 10.00 100.00 1000.00"));
    assert_eq!(lines[18], words("Divided by those of mount:"));
    assert_eq!(lines[20], words("make ms 0.10 - 10.00 100.00"));
}
