//! A benchmark from end to end, as short as it can be: what it prints, not how fast anything is.

use std::process::Command;

use serde_json::Value;

/// `uvfs bench uncached` shows every second of both clients, and leaves no files behind.
#[test]
fn uncached_shows_each_second_of_both_clients() {
    let dir = tempfile::tempdir().unwrap();
    let output = Command::new(env!("CARGO_BIN_EXE_uvfs-bench"))
        .args(["uncached", "--quick", "--rounds", "1"])
        .args(["--seconds", "2", "--sides", "client", "--json", "--dir"])
        .arg(dir.path())
        .output()
        .unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{stderr}");
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(report["bench"], "uncached");
    let works = report["works"].as_array().unwrap();
    let names: Vec<_> = works.iter().map(|w| w["name"].as_str().unwrap()).collect();
    let all = ["write", "read"]
        .map(|verb| ["second-1", "second-2", "full"].map(|part| format!("{verb}-{part}")));
    assert_eq!(names, all.concat());
    let setting = |name: &str| report["settings"][name].as_f64().unwrap();
    // The cache has room for a quarter of the files.
    let memory = setting("files") * setting("bytes") / 4.0 / f64::from(1 << 20);
    for work in works {
        let results = work["results"].as_array().unwrap();
        assert_eq!(results.len(), 2, "{work}");
        for (result, target) in results.iter().zip(["client", "client-uncached"]) {
            assert_eq!(result["target"], target);
            assert!(result["rate"]["median"].as_f64().unwrap() > 0.0);
            let held = result["memory_mib"]["median"].as_f64().unwrap();
            // An uncached stream holds what is under way and what is read ahead, about 1 MiB.
            let most = match target {
                "client" => memory,
                _ => 1.25 * setting("files"),
            };
            assert!(held <= most, "{held} of {memory} in {}", work["name"]);
        }
    }
    // Nothing is left behind.
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
}
