//! The direction of dependencies between the modules of a crate.

use std::fmt::Write;
use std::path::{Path, PathBuf};

/// The sources below a directory.
fn sources(directory: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(directory).expect("a directory of sources");
    let paths = entries.map(|entry| entry.expect("an entry").path());
    paths
        .flat_map(|path| match path.is_dir() {
            true => sources(&path),
            false => vec![path],
        })
        .filter(|path| path.extension().is_some_and(|end| end == "rs"))
        .collect()
}

/// The modules that a line of code names by `crate::`.
fn named(line: &str) -> impl Iterator<Item = &str> {
    let code = line.split("//").next().unwrap_or_default();
    code.split("crate::").skip(1).map(|rest| {
        let end = rest.find(|c: char| !c.is_alphanumeric() && c != '_');
        &rest[..end.unwrap_or(rest.len())]
    })
}

/// Fails if a module of a crate uses one that stands above it in `order`, which lists all modules from the top down. A
/// line of `order` may hold several modules, which may use each other. Use of what stands in `lib.rs` itself does not
/// count.
///
/// # Panics
/// With a list of all the uses that go up, and of modules that the order lacks.
pub fn assert_arrows_go_down(manifest_dir: &str, order: &[&str]) {
    let root = Path::new(manifest_dir).join("src");
    let level = |module: &str| {
        let has = |line: &&str| line.split_whitespace().any(|one| one == module);
        order.iter().position(has)
    };
    let mut wrong = String::new();
    for path in sources(&root) {
        let inner = path.strip_prefix(&root).expect("it is below the root");
        let first = inner.components().next().expect("a name");
        let module = first.as_os_str().to_string_lossy().replace(".rs", "");
        if module == "lib" || module == "main" {
            continue;
        }
        let Some(own) = level(&module) else {
            let _ = writeln!(wrong, "{module} has no place in the order");
            continue;
        };
        let text = std::fs::read_to_string(&path).expect("a source");
        for (number, line) in text.lines().enumerate() {
            for used in named(line) {
                if level(used).is_some_and(|other| other < own) {
                    let _ = writeln!(
                        wrong,
                        "{}:{}: {module} uses {used}",
                        inner.display(),
                        number + 1
                    );
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong}");
}
