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

/// Programs by their names, with what they need and do, their command lines, and what else holds for them.
macro_rules! programs {
    ($(
        $name:literal [$($needs:literal)*] $title:literal:
            $($word:literal)* $(, $more:ident($($value:expr),*))?;
    )*) => {
        &[$(Program::new($name, $title, &[$($needs),*], &[$($word),*])$(.$more($($value),*))?),*]
    };
}

/// Every program, in the order in which they run. The last one removes the tree.
///
/// Git's own files are left out where they hold a path (`.git/config` of a clone) or inode numbers
/// (`.git/index`), which differ from side to side.
pub const ALL: &[Program] = programs! {
    "git-clone" ["git"] "git clones the repository, objects copied as from a remote one":
        "git" "clone" "-q" "--no-local" "tree" "clone", leaves("clone", ".git");
    "git-status" ["git"] "git compares the work tree with the index":
        "git" "-C" "tree" "status" "--porcelain", twice();
    "git-log" ["git"] "git shows all commits with the files that they changed":
        "git" "-C" "tree" "log" "--stat";
    "grep" ["grep"] "grep searches all files for a word":
        "grep" "-r" "needle" "tree", twice();
    "ripgrep" ["rg"] "ripgrep searches the work tree for a word, with several threads":
        "rg" "needle" "tree", twice();
    "cp" ["cp"] "cp -a copies the tree":
        "cp" "-a" "tree" "copy", leaves("copy", "index");
    "tar-create" ["tar"] "tar packs the work tree into a file outside of the mount":
        "tar" "-c" "--sort=name" "--exclude=.git" "tree", twice();
    "tar-extract" ["tar"] "tar unpacks the work tree":
        "tar" "-x" "-f" "tree.tar" "--one-top-level=extracted", leaves("extracted", "");
    "du" ["du"] "du adds up the sizes":
        "du" "-s" "tree", twice();
    "find" ["find"] "find lists the files above a size":
        "find" "tree" "-size" "+16k" "-not" "-name" "index", twice();
    "stat" ["stat"] "a shell starts stat for each file of a directory level":
        "sh" "-ec" "for f in tree/*/*.c; do stat -c '%n %s %a' \"$f\"; done";
    "make" ["make" "cc"] "make -j2 compiles small C files":
        "make" "-s" "-j2" "-C" "csrc", leaves("csrc", "");
    "sqlite" ["sqlite3"] "sqlite3 makes a database by many small transactions, and asks for something in it":
        "sqlite3" "-batch" "db" ".read sql/work.sql", leaves("db", "");
    "python" ["python3"] "python3 starts and imports many modules":
        "python3" "py/main.py", twice();
    "sh-cat" ["cat"] "a shell script starts cat of a small file 200 times":
        "sh" "-ec" "i=0; while [ $i -lt 200 ]; do cat small; i=$((i + 1)); done";
    "sh-true" [] "a shell script starts /bin/true 500 times and touches nothing of the mount":
        "sh" "-ec" "cd /; i=0; while [ $i -lt 500 ]; do /bin/true; i=$((i + 1)); done";
    "start" [] "/bin/true once: with run, what `uvfs run` itself takes":
        "/bin/true", starts(20);
    "rm" ["rm"] "rm -r removes the tree":
        "rm" "-r" "tree", leaves("tree", "");
};

/// The names of all programs.
pub fn names() -> Vec<&'static str> {
    ALL.iter().map(|program| program.name).collect()
}
