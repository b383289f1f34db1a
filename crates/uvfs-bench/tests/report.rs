//! `uvfs bench report` and `compare`, on results that are made up.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use roxmltree::{Document, Node, ParsingOptions};
use serde_json::{Value, json};
use uvfs_testing::{Need, has};

/// Names that try to take over the page.
const HOSTILE: &str = "<script>alert('1')</script>\"><img src=x onerror=\"alert(1)\">&amp;";

fn uvfs(arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_uvfs-bench"));
    command.args(arguments).output().expect("uvfs-bench")
}

fn summary(median: f64) -> Value {
    json!({"median": median, "min": median * 0.9, "max": median * 1.1})
}

/// A work with a row for each target, the second half as fast as the first, and so on.
fn work(name: &str, unit: &str, targets: &[&str], rate: f64) -> Value {
    let row = |(index, target): (usize, &&str)| {
        let rate = rate / (index + 1) as f64;
        let samples = [0.9, 1.0, 1.1].map(|part| {
            json!({"amount": rate * part, "seconds": 1.0, "cpu_seconds": 0.5,
                   "server_cpu_seconds": null})
        });
        let mut row = json!({
            "target": target, "samples": samples, "rate": summary(rate),
            "client_cpu_us": summary(1.5), "server_cpu_us": null,
            "latency_us": summary(1e6 / rate), "latency_p99_us": summary(4e6 / rate),
            "ratio": {targets[0]: 1.0 / (index + 1) as f64},
        });
        if unit == "run" {
            row["run_seconds"] = summary(1.0 / rate);
            row["time_ratio"] = json!({targets[0]: (index + 1) as f64});
        }
        row
    };
    let results: Vec<Value> = targets.iter().enumerate().map(row).collect();
    json!({"name": name, "title": format!("the work {name}"), "unit": unit, "results": results})
}

fn run(bench: &str, targets: &[&str], works: Vec<Value>) -> Value {
    let target = |name: &str| match name {
        "native" => json!({"name": name, "kind": "native", "error": null}),
        _ => json!({"name": name, "kind": "peer", "command": [HOSTILE, "{source}"], "error": null}),
    };
    let mut targets: Vec<Value> = targets.iter().map(|name| target(name)).collect();
    targets.push(json!({"name": "broken", "kind": "uvfs", "options": [], "error": HOSTILE}));
    json!({
        "version": 1, "bench": bench, "uvfs": "0.1.0", "kernel": "6.18.0", "cpus": 2,
        "settings": {"rounds": 3, "quick": true}, "targets": targets, "works": works,
    })
}

/// The output of `uvfs bench all --json`, made up.
fn all() -> Value {
    let sides = ["native", "mount", HOSTILE];
    let checkers = ["xfs_repair", "sync-large", "uring-large"];
    let checked = |name| work(name, "run", &checkers, 100.0);
    let works = |names: &[&str], unit| -> Vec<Value> {
        let works = names.iter().enumerate();
        works
            .map(|(index, name)| work(name, unit, &sides, 1000.0 * (index + 1) as f64))
            .collect()
    };
    let stores = [
        "read-one-0us",
        "read-one-100us",
        "write-many-0us",
        "write-many-100us",
    ];
    let points = ["stat-1p-0n", "stat-4p-0n", "stat-1p-2n", "stat-4p-2n"];
    json!({
        "version": 1, "bench": "all", "command": ["uvfs", "bench", "all", HOSTILE], "seconds": 12.5,
        "failures": [{"bench": "other", "error": HOSTILE}],
        "runs": [
            run("wakeup", &sides, works(&["read-1", "stat"], "op")),
            run("writeback", &sides, works(&["write-1k", "discard-1m"], "MiB")),
            run("direct", &sides, works(&stores, "MiB")),
            // Of a benchmark that an earlier version had.
            run("uncached", &sides, works(&["write-second-1", "write-full"], "MiB")),
            run("check", &checkers, ["cold", "warm"].map(checked).into()),
            run("programs", &sides, works(&["git-clone", "make", "total"], "run")),
            run("load", &sides, works(&points, "op")),
        ],
    })
}

fn write(dir: &Path, name: &str, value: &Value) -> PathBuf {
    let path = dir.join(name);
    fs::write(&path, value.to_string()).unwrap();
    path
}

/// The page of the results above.
fn page(dir: &Path) -> PathBuf {
    let (results, page) = (write(dir, "all.json", &all()), dir.join("report.html"));
    let output = uvfs(&["report", results.to_str().unwrap(), page.to_str().unwrap()]);
    assert!(output.status.success(), "{output:?}");
    page
}

/// Whether it is part of the table of medians, not of that with all figures.
fn is_of_medians(node: &Node) -> bool {
    let mut tables = node.ancestors().filter(|n| n.has_tag_name("table"));
    tables.any(|table| table.attribute("class") == Some("medians"))
}

fn parsed(page: &str) -> Document<'_> {
    let options = ParsingOptions {
        allow_dtd: true,
        ..ParsingOptions::default()
    };
    Document::parse_with_options(page, options).expect("well-formed")
}

fn text(node: Node) -> String {
    let nodes = node.descendants().filter(Node::is_text);
    nodes.filter_map(|node| node.text()).collect()
}

/// `uvfs bench report` shows every benchmark.
#[test]
fn the_page_has_every_table_and_plots() {
    let dir = tempfile::tempdir().unwrap();
    let page = fs::read_to_string(page(dir.path())).unwrap();
    let document = parsed(&page);
    let sections: Vec<Node> = document
        .descendants()
        .filter(|n| n.has_tag_name("section"))
        .collect();
    let runs = all()["runs"].as_array().unwrap().clone();
    assert_eq!(sections.len(), runs.len());
    for (section, run) in sections.iter().zip(&runs) {
        let bench = run["bench"].as_str().unwrap();
        let of = |tag: &'static str| section.descendants().filter(move |n| n.has_tag_name(tag));
        assert!(
            of("h2").any(|h| h.attribute("id") == Some(bench)),
            "{bench}"
        );
        assert!(
            of("svg").any(|svg| svg.attribute("role") == Some("img")),
            "{bench}: a plot"
        );
        let bodies: Vec<Node> = of("tbody").filter(|body| !is_of_medians(body)).collect();
        let works = run["works"].as_array().unwrap();
        assert_eq!(bodies.len(), works.len(), "{bench}");
        for (body, work) in bodies.iter().zip(works) {
            let rows: Vec<Node> = body.children().filter(|n| n.has_tag_name("tr")).collect();
            assert!(text(rows[0]).starts_with(work["name"].as_str().unwrap()));
            let targets = work["results"].as_array().unwrap();
            assert_eq!(rows.len(), targets.len() + 1, "{bench}");
            for (row, target) in rows[1..].iter().zip(targets) {
                let cells: Vec<String> = row.children().map(text).collect();
                assert_eq!(cells[0], target["target"].as_str().unwrap());
                assert!(cells[2].contains(".."), "the spread: {cells:?}");
            }
        }
    }
    // Both states of the cache, and the speed-up against xfs_repair as a ratio of times.
    let check = text(sections[4]);
    for part in ["cold", "warm", "× xfs_repair", "30.0 ms", "3.00"] {
        assert!(check.contains(part), "{part} in {check}");
    }
}

/// The page of one benchmark: the rows of its medians, and the titles of its plots.
fn shown(bench: &str, targets: &[&str], works: &[(&str, &str)]) -> (Vec<String>, Vec<String>) {
    let dir = tempfile::tempdir().unwrap();
    let made = works
        .iter()
        .map(|(name, unit)| work(name, unit, targets, 1200.0));
    let value = run(bench, targets, made.collect());
    let (results, page) = (
        write(dir.path(), "run.json", &value),
        dir.path().join("page"),
    );
    let output = uvfs(&["report", results.to_str().unwrap(), page.to_str().unwrap()]);
    assert!(output.status.success(), "{output:?}");
    let page = fs::read_to_string(page).unwrap();
    let document = parsed(&page);
    let all = |tag: &'static str| document.descendants().filter(move |n| n.has_tag_name(tag));
    let cells =
        |row: Node| -> Vec<String> { row.children().filter(Node::is_element).map(text).collect() };
    let rows = all("tr")
        .filter(is_of_medians)
        .map(|row| cells(row).join("|"));
    (rows.collect(), all("figcaption").map(text).collect())
}

/// The HTML report has the table and the plots that it promises.
#[test]
fn the_page_has_the_medians_of_each_benchmark_and_its_plots() {
    let holds = |found: &[String], wanted: &str| {
        assert!(
            found.iter().any(|one| one == wanted),
            "{wanted} in {found:#?}"
        );
    };
    let clients = ["native", "client-copying", "client"];
    let sizes = ["write-1k", "write-4k", "write-1m"].map(|name| (name, "MiB"));
    let (rows, plots) = shown("writeback", &clients, &sizes);
    holds(&rows, "||native|client-copying|client|broken");
    for work in ["write-1k", "write-4k", "write-1m"] {
        holds(&rows, &format!("{work}|MiB/s|1,200|600|400|-"));
    }
    holds(&plots, "Medians");

    let clients = ["native", "client", "client-one-at-a-time"];
    let works = ["read-one-100us", "write-many-100us"];
    let (rows, plots) = shown("direct", &clients, &works.map(|name| (name, "MiB")));
    holds(&rows, "||native|client|client-one-at-a-time|broken");
    holds(&rows, "read-one-100us|MiB/s|1,200|600|400|-");
    holds(&rows, "write-many-100us|MiB/s|1,200|600|400|-");
    holds(&plots, "Reads of 2 MiB, one at a time");
    holds(&plots, "Writes of 128 KiB, 16 at a time");

    let sides = ["native", "dev-sleep", "dev-spin"];
    let works = ["read-1", "create"].map(|name| (name, "op"));
    let (rows, plots) = shown("wakeup", &sides, &works);
    holds(&rows, "create|op/s|1,200|600|400|-");
    holds(&plots, "Latency: median (bar) and 99th percentile (dot)");

    let works = ["git-clone", "total"].map(|name| (name, "run"));
    let (rows, plots) = shown("programs", &["native", "mount"], &works);
    holds(&rows, "git-clone|ms|0.83|1.67|-");
    holds(
        &plots,
        "Time of each program, as a multiple of that on native",
    );
}

/// No name in a result runs a script in the reader's browser.
#[test]
fn nothing_is_loaded_and_names_stay_names() {
    let dir = tempfile::tempdir().unwrap();
    let page = fs::read_to_string(page(dir.path())).unwrap();
    let document = parsed(&page);
    for node in document.descendants().filter(Node::is_element) {
        let tag = node.tag_name().name();
        assert!(
            !["script", "img", "link", "iframe", "object", "use"].contains(&tag),
            "{tag}"
        );
        for attribute in node.attributes() {
            let (name, value) = (attribute.name(), attribute.value());
            assert!(!name.starts_with("on") && name != "src", "{name}={value}");
            assert!(name != "href" || value.starts_with('#'), "{name}={value}");
        }
    }
    for outside in ["http:", "https:", "url(", "@import"] {
        assert!(!page.contains(outside), "{outside}");
    }
    let shown = text(document.root_element());
    let times = shown.matches(HOSTILE).count();
    // The command line, a failure, an error and a command of each run but check, and table and legends.
    assert!(times > 20, "the names are shown as they are: {times}");
}

/// The page in a browser: red, green and blue of each pixel.
fn screenshot(page: &Path, dark: bool, dir: &Path) -> Vec<[u8; 3]> {
    let path = dir.join(if dark { "dark.png" } else { "light.png" });
    let output = Command::new("chromium")
        .args([
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
        ])
        .args(["--disable-dev-shm-usage", "--window-size=1200,2400"])
        .arg(format!("--user-data-dir={}", dir.join("profile").display()))
        .arg(format!(
            "--blink-settings=preferredColorScheme={}",
            if dark { 0 } else { 1 }
        ))
        .arg(format!("--screenshot={}", path.display()))
        .arg(format!("file://{}", page.display()))
        .output()
        .expect("chromium");
    assert!(output.status.success(), "{output:?}");
    let file = std::io::BufReader::new(fs::File::open(&path).expect("a screenshot"));
    let mut reader = png::Decoder::new(file).read_info().unwrap();
    let mut bytes = vec![0; reader.output_buffer_size().unwrap()];
    let info = reader.next_frame(&mut bytes).unwrap();
    assert_eq!((info.width, info.height), (1200, 2400));
    let samples = info.color_type.samples();
    bytes
        .chunks(samples)
        .map(|pixel| [pixel[0], pixel[1], pixel[2]])
        .collect()
}

/// A browser shows the page's text and plots, in light and in dark.
#[test]
fn a_browser_shows_it_in_light_and_dark() {
    if !has(&[Need::Program("chromium")]) {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let page = page(dir.path());
    for dark in [false, true] {
        let pixels = screenshot(&page, dark, dir.path());
        let brightness = |p: &[u8; 3]| p.iter().map(|c| u32::from(*c)).sum::<u32>() / 3;
        let bright = pixels.iter().filter(|p| brightness(p) > 128).count() as f64;
        let part = bright / pixels.len() as f64;
        assert!(
            if dark { part < 0.2 } else { part > 0.8 },
            "dark: {dark}, bright: {part}"
        );
        // Text and lines stand out, and the plots have colours.
        assert!((0.005..0.995).contains(&part), "an empty page: {part}");
        let colored = |p: &&[u8; 3]| p.iter().max().unwrap() - p.iter().min().unwrap() > 80;
        assert!(
            pixels.iter().filter(colored).count() > 1000,
            "dark: {dark}: no colours"
        );
    }
}

/// `uvfs bench compare` tells a change from noise.
#[test]
fn compare_tells_a_difference_from_chance() {
    let dir = tempfile::tempdir().unwrap();
    let before = all();
    let mut after = all();
    // The second target of a work takes twice as long in each round.
    let row = &mut after["runs"][5]["works"][1]["results"][1];
    for round in 0..3 {
        row["samples"][round]["seconds"] = json!(2.0);
    }
    row["run_seconds"] = summary(2.0 * 0.001);
    let [before, after] = [("a.json", &before), ("b.json", &after)]
        .map(|(name, value)| write(dir.path(), name, value).display().to_string());
    let status = |arguments: &[&str]| {
        let output = uvfs(&[&["compare"][..], arguments].concat());
        (output.status.code(), output)
    };
    assert_eq!(status(&[&before, &before, "--fail-above", "0"]).0, Some(0));
    let (code, output) = status(&[&before, &after, "--json"]);
    assert_eq!(code, Some(0), "{output:?}");
    let value: Value = serde_json::from_slice(&output.stdout).unwrap();
    let results = value["results"].as_array().unwrap();
    let changed: Vec<_> = results
        .iter()
        .filter(|one| one["change"] != "none")
        .collect();
    assert_eq!(changed.len(), 1);
    assert_eq!(changed[0]["change"], "slower");
    let place = ["bench", "work", "target"].map(|field| changed[0][field].as_str().unwrap());
    assert_eq!(place, ["programs", "make", "mount"]);
    assert_eq!(status(&[&before, &after, "--fail-above", "40"]).0, Some(1));
    assert_eq!(status(&[&before, &after, "--fail-above", "60"]).0, Some(0));
    // Faster is no failure.
    assert_eq!(status(&[&after, &before, "--fail-above", "0"]).0, Some(0));
    assert_eq!(status(&[&before]).0, Some(2));
    assert_eq!(status(&[&before, "/no/such/file"]).0, Some(2));
    let other = write(dir.path(), "other.json", &json!({"runs": []}));
    assert_eq!(status(&[&before, other.to_str().unwrap()]).0, Some(2));
}
