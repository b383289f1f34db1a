//! The programs, and what each of them does.

use std::path::PathBuf;

/// A program that is measured. It runs in the directory that holds what [`super::tree`] makes.
pub struct Program {
    /// The name on the command line.
    pub name: &'static str,
    /// The commands that it runs.
    pub title: &'static str,
    /// The programs that have to be installed for it.
    pub needs: &'static [&'static str],
    /// Its name and arguments.
    pub command: &'static [&'static str],
    /// Whether it is measured a second time on the same mount.
    pub twice: bool,
    /// How many times it is started for one measurement.
    pub starts: u32,
    /// The tree that it makes or changes, and the names of files in it that differ from run to run.
    pub leaves: Option<(&'static str, &'static str)>,
}

impl Program {
    const fn new(
        name: &'static str,
        title: &'static str,
        needs: &'static [&'static str],
        command: &'static [&'static str],
    ) -> Self {
        Self {
            name,
            title,
            needs,
            command,
            twice: false,
            starts: 1,
            leaves: None,
        }
    }

    const fn twice(self) -> Self {
        Self {
            twice: true,
            ..self
        }
    }

    const fn starts(self, starts: u32) -> Self {
        Self { starts, ..self }
    }

    const fn leaves(self, path: &'static str, except: &'static str) -> Self {
        Self {
            leaves: Some((path, except)),
            ..self
        }
    }

    /// The names of its measurements.
    pub fn runs(&self) -> Vec<String> {
        if self.twice {
            vec![
                format!("{}-first", self.name),
                format!("{}-second", self.name),
            ]
        } else {
            vec![self.name.to_string()]
        }
    }

    /// The programs that it needs and that are not installed.
    pub fn missing(&self) -> Vec<&'static str> {
        let missing = |name: &&&str| !is_installed(name);
        self.needs.iter().filter(missing).copied().collect()
    }
}

/// Whether there is a program of this name on the PATH.
pub fn is_installed(name: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let mut places = std::env::split_paths(&path).map(|dir: PathBuf| dir.join(name));
    places.any(|place| place.is_file())
}

/// Every program, in the order in which they run. The last one removes the tree.
///
/// Git's own files are left out where they hold a path (`.git/config` of a clone) or inode numbers
/// (`.git/index`), which differ from side to side.
pub const ALL: &[Program] = &[
    Program::new(
        "git-clone",
        "git clones the repository, objects copied as from a remote one",
        &["git"],
        &["git", "clone", "-q", "--no-local", "tree", "clone"],
    )
    .leaves("clone", ".git"),
    Program::new(
        "git-status",
        "git compares the work tree with the index",
        &["git"],
        &["git", "-C", "tree", "status", "--porcelain"],
    )
    .twice(),
    Program::new(
        "git-log",
        "git shows all commits with the files that they changed",
        &["git"],
        &["git", "-C", "tree", "log", "--stat"],
    ),
    Program::new(
        "grep",
        "grep searches all files for a word",
        &["grep"],
        &["grep", "-r", "needle", "tree"],
    )
    .twice(),
    Program::new(
        "ripgrep",
        "ripgrep searches the work tree for a word, with several threads",
        &["rg"],
        &["rg", "needle", "tree"],
    )
    .twice(),
    Program::new(
        "cp",
        "cp -a copies the tree",
        &["cp"],
        &["cp", "-a", "tree", "copy"],
    )
    .leaves("copy", "index"),
    Program::new(
        "tar-create",
        "tar packs the work tree into a file outside of the mount",
        &["tar"],
        &["tar", "-c", "--sort=name", "--exclude=.git", "tree"],
    )
    .twice(),
    Program::new(
        "tar-extract",
        "tar unpacks the work tree",
        &["tar"],
        &["tar", "-x", "-f", "tree.tar", "--one-top-level=extracted"],
    )
    .leaves("extracted", ""),
    Program::new("du", "du adds up the sizes", &["du"], &["du", "-s", "tree"]).twice(),
    Program::new(
        "find",
        "find lists the files above a size",
        &["find"],
        &["find", "tree", "-size", "+16k", "-not", "-name", "index"],
    )
    .twice(),
    Program::new(
        "stat",
        "a shell starts stat for each file of a directory level",
        &["stat"],
        &[
            "sh",
            "-ec",
            "for f in tree/*/*.c; do stat -c '%n %s %a' \"$f\"; done",
        ],
    ),
    Program::new(
        "make",
        "make -j2 compiles small C files",
        &["make", "cc"],
        &["make", "-s", "-j2", "-C", "csrc"],
    )
    .leaves("csrc", ""),
    Program::new(
        "sqlite",
        "sqlite3 makes a database by many small transactions, and asks for something in it",
        &["sqlite3"],
        &["sqlite3", "-batch", "db", ".read sql/work.sql"],
    )
    .leaves("db", ""),
    Program::new(
        "python",
        "python3 starts and imports many modules",
        &["python3"],
        &["python3", "py/main.py"],
    )
    .twice(),
    Program::new(
        "sh-cat",
        "a shell script starts cat of a small file 200 times",
        &["cat"],
        &[
            "sh",
            "-ec",
            "i=0; while [ $i -lt 200 ]; do cat small; i=$((i + 1)); done",
        ],
    ),
    Program::new(
        "sh-true",
        "a shell script starts /bin/true 500 times and touches nothing of the mount",
        &[],
        &[
            "sh",
            "-ec",
            "cd /; i=0; while [ $i -lt 500 ]; do /bin/true; i=$((i + 1)); done",
        ],
    ),
    Program::new(
        "start",
        "/bin/true once: with run, what `uvfs run` itself takes",
        &[],
        &["/bin/true"],
    )
    .starts(20),
    Program::new(
        "rm",
        "rm -r removes the tree",
        &["rm"],
        &["rm", "-r", "tree"],
    )
    .leaves("tree", ""),
];

/// The names of all programs.
pub fn names() -> Vec<&'static str> {
    ALL.iter().map(|program| program.name).collect()
}
