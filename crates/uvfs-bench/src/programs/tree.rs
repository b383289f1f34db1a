//! The files that the programs work on: a source tree as a git repository with history, C files, Python
//! modules, SQL statements. It is the same each time.

use std::fmt::Write;
use std::fs;
use std::io;
use std::path::Path;
use std::process::{Command, Stdio};

use fastrand::Rng;
use uvfs_cli::{Context, Result};

use super::super::workspace::Workspace;
use super::process::run;
use super::suite;

/// The directory beside the source with the tree that each side gets a copy of.
const TEMPLATE: &str = "template";

/// The file beside the source with what git makes the repository from.
const STREAM: &str = "stream";

/// Makes the repository from it.
const IMPORT: &str = "git -C tree fast-import --quiet <../stream";

/// Makes all files old.
const AGE: &str = "find . -exec touch -h -d @1700000000 {} +";

/// When the first commit was made, in seconds since 1970.
const EPOCH: u64 = 1_700_000_000;

/// Bytes of files in a source tree, from a twentieth of the files to the next.
const SIZES: [u64; 20] = [
    120, 300, 500, 750, 1000, 1300, 1700, 2100, 2600, 3200, 3900, 4800, 5900, 7300, 9000, 11_000,
    14_000, 19_000, 29_000, 60_000,
];

/// How much there is.
pub struct Size {
    /// Files of the source tree.
    pub files: u64,
    /// Its directories at the top, each with [`SUBDIRS`] below.
    pub dirs: u64,
    /// Commits after the first.
    pub commits: u64,
    /// C files to compile.
    pub units: u64,
    /// Python packages, with ten modules each.
    pub packages: u64,
    /// SQL transactions.
    pub transactions: u64,
}

/// Directories in each directory at the top.
pub const SUBDIRS: u64 = 14;

impl Size {
    /// As of a source tree of middling size.
    pub const FULL: Size = Size {
        files: 4650,
        dirs: 20,
        commits: 40,
        units: 40,
        packages: 20,
        transactions: 300,
    };

    /// For a short run.
    pub const QUICK: Size = Size {
        files: 500,
        dirs: 3,
        commits: 8,
        units: 6,
        packages: 4,
        transactions: 40,
    };

    /// Bytes that a side takes up at most.
    pub fn bytes(&self) -> u64 {
        // The tree, its history, and four copies.
        self.files * SIZES.iter().sum::<u64>() / SIZES.len() as u64 * 8
    }
}

/// Makes what the sides get copies of.
pub fn generate(workspace: &Workspace, size: &Size) -> Result<()> {
    let template = workspace.beside(TEMPLATE);
    let what = || format!("filling {}", template.display());
    let mut text = Text::new();
    let stream = workspace.beside(STREAM);
    fs::create_dir(&template).context(what)?;
    fs::write(&stream, history(size, &mut text)).context(what)?;
    let prepare = |words: &[&str]| prepare(workspace, words);
    prepare(&["git", "init", "-q", "-b", "main", "tree"])?;
    prepare(&["sh", "-ec", IMPORT])?;
    fs::remove_file(&stream).context(what)?;
    prepare(&["git", "-C", "tree", "reset", "-q", "--hard"])?;
    prepare(&["tar", "-c", "-f", "tree.tar", "--exclude=.git", "tree"])?;
    fs::write(template.join("small"), text.bytes(1000)).context(what)?;
    c_files(&template.join("csrc"), size.units, &mut text).context(what)?;
    sql(&template.join("sql"), size.transactions, &mut text).context(what)?;
    python(&template.join("py"), size.packages, &mut text).context(what)?;
    // Git reads a file again that is not older than its index, and Python's compiled modules name
    // the time of their source.
    prepare(&["sh", "-ec", AGE])?;
    if suite::is_installed("python3") {
        prepare(&["python3", "-m", "compileall", "-q", "py"])?;
    }
    Ok(())
}

/// Puts a copy in place of what is in the source under the name `name`.
pub fn copy(workspace: &Workspace, name: &str) -> Result<()> {
    workspace.clear(name)?;
    // The workspace sees to it that it is UTF-8.
    let to = workspace.source().join(name);
    prepare(workspace, &["cp", "-a", ".", &to.to_string_lossy()])
}

/// Runs a program in the template.
fn prepare(workspace: &Workspace, words: &[&str]) -> Result<()> {
    let mut command = Command::new(words[0]);
    command.args(&words[1..]).stdin(Stdio::null());
    command.current_dir(workspace.beside(TEMPLATE));
    run(workspace, &mut command, None).context(|| words[0].to_string())
}

/// Text like a program's, the same each time.
struct Text {
    random: Rng,
    words: Vec<String>,
}

impl Text {
    fn new() -> Self {
        let mut random = Rng::with_seed(1);
        let syllables = [
            "ba", "ko", "ri", "tel", "num", "str", "ad", "ix", "po", "ver",
        ];
        let mut word = || {
            let parts = 1 + random.u64(..3);
            (0..=parts).fold(String::new(), |word, _| {
                word + syllables[random.u64(..10) as usize]
            })
        };
        let words = (0..1000).map(|_| word()).collect();
        Self { random, words }
    }

    fn word(&mut self) -> &str {
        let index = self.random.u64(..self.words.len() as u64) as usize;
        &self.words[index]
    }

    fn line(&mut self, text: &mut String) {
        text.push('\t');
        text.push_str(self.word());
        text.push_str(" = ");
        text.push_str(self.word());
        text.push('(');
        text.push_str(self.word());
        text.push_str(", ");
        let rare = self.random.u64(..4000) == 0;
        text.push_str(if rare { "needle" } else { self.word() });
        let number = self.random.u64(..100_000);
        // Writing to a string does not fail.
        let _ = writeln!(text, ", {number});");
    }

    /// Whole lines, `bytes` bytes or a little more.
    fn bytes(&mut self, bytes: u64) -> String {
        let mut text = String::with_capacity(bytes as usize + 100);
        while (text.len() as u64) < bytes {
            self.line(&mut text);
        }
        text
    }

    /// The contents of a file of a source tree.
    fn file(&mut self) -> String {
        let part = self.random.u64(..19) as usize;
        let (from, to) = (SIZES[part], SIZES[part + 1]);
        let bytes = from + self.random.u64(..to - from);
        self.bytes(bytes)
    }
}

/// The input from which `git fast-import` makes the repository.
fn history(size: &Size, text: &mut Text) -> Vec<u8> {
    const ENDINGS: [&str; 8] = ["c", "c", "c", "c", "h", "h", "txt", "py"];
    let mut files: Vec<(String, String)> = Vec::new();
    for number in 0..size.files {
        let dir = number % (size.dirs * (1 + SUBDIRS));
        let (top, sub) = (dir % size.dirs, dir / size.dirs);
        let ending = ENDINGS[text.random.u64(..8) as usize];
        let name = format!("{}{number}.{ending}", text.word());
        let path = match sub {
            0 => format!("part{top:02}/{name}"),
            _ => format!("part{top:02}/sub{sub:02}/{name}"),
        };
        files.push((path, text.file()));
    }
    let mut stream = Vec::new();
    let all: Vec<usize> = (0..files.len()).collect();
    commit(&mut stream, 0, &files, &all);
    for number in 1..=size.commits {
        let changed = text.random.choose_multiple(0..files.len(), 15);
        for &index in &changed {
            text.line(&mut files[index].1);
        }
        commit(&mut stream, number, &files, &changed);
    }
    stream
}

/// Adds a commit to a stream for `git fast-import`.
fn commit(stream: &mut Vec<u8>, number: u64, files: &[(String, String)], changed: &[usize]) {
    let message = format!("Commit {number}");
    let time = EPOCH + number * 3600;
    let mut head = format!("commit refs/heads/main\ncommitter A <a@example.org> {time} +0000\n");
    let _ = writeln!(head, "data {}\n{message}", message.len());
    stream.extend(head.as_bytes());
    for &index in changed {
        let (path, contents) = &files[index];
        let head = format!("M 644 inline {path}\ndata {}\n", contents.len());
        stream.extend(head.as_bytes());
        stream.extend(contents.as_bytes());
        stream.push(b'\n');
    }
}

fn c_files(dir: &Path, units: u64, text: &mut Text) -> io::Result<()> {
    fs::create_dir(dir)?;
    let makefile = "objects := main.o $(patsubst %.c,%.o,$(sort $(wildcard unit*.c)))\n\
                    app: $(objects)\n\tcc -o $@ $^\n\
                    %.o: %.c units.h\n\tcc -O1 -c -o $@ $<\n";
    fs::write(dir.join("Makefile"), makefile)?;
    let (mut header, mut calls) = (String::new(), String::new());
    for unit in 0..units {
        let _ = writeln!(header, "int unit{unit}(int n);");
        let _ = writeln!(calls, "\tn += unit{unit}(n);");
        let mut code = String::from("#include <stdio.h>\n#include \"units.h\"\n");
        for function in 0..20 {
            let (name, factor) = (text.word().to_string(), text.random.u64(..1000));
            let _ = writeln!(
                code,
                "static int {name}_{function}(int n) {{ if (n > {factor}) puts(\"{name}\"); \
                 return n * {factor} + {function}; }}"
            );
            let _ = writeln!(
                code,
                "int unit{unit}_{function}(int n) {{ return {name}_{function}(n); }}"
            );
        }
        let _ = writeln!(code, "int unit{unit}(int n) {{ return unit{unit}_3(n); }}");
        fs::write(dir.join(format!("unit{unit:02}.c")), code)?;
    }
    fs::write(dir.join("units.h"), header)?;
    let main =
        format!("#include \"units.h\"\nint main(int n, char **a) {{\n{calls}\treturn n == 0; }}\n");
    fs::write(dir.join("main.c"), main)
}

fn sql(dir: &Path, transactions: u64, text: &mut Text) -> io::Result<()> {
    fs::create_dir(dir)?;
    let mut script = String::from(
        "create table t(id integer primary key, word text, line text);\n\
         create index words on t(word);\n",
    );
    for id in 0..transactions {
        let word = text.word().to_string();
        let line = text.bytes(100);
        let _ = writeln!(script, "insert into t values({id}, '{word}', '{line}');");
    }
    script += "select word, count(*), sum(length(line)) from t group by word;\n\
               pragma integrity_check;\n";
    fs::write(dir.join("work.sql"), script)
}

fn python(dir: &Path, packages: u64, text: &mut Text) -> io::Result<()> {
    fs::create_dir(dir)?;
    for package in 0..packages {
        let path = dir.join(format!("package{package:02}"));
        fs::create_dir(&path)?;
        fs::write(path.join("__init__.py"), "")?;
        for module in 0..10 {
            let mut code = String::new();
            for function in 0..20 {
                let (a, b) = (text.word().to_string(), text.word().to_string());
                let _ = writeln!(
                    code,
                    "def f{function}(a, b):\n    return '{a}', '{b}', a + b\n"
                );
            }
            let _ = writeln!(code, "VALUE = {}", text.random.u64(..1000));
            fs::write(path.join(format!("module{module}.py")), code)?;
        }
    }
    let main = format!(
        "import importlib\n\
         names = [f'package{{p:02}}.module{{m}}' for p in range({packages}) for m in range(10)]\n\
         print(sum(importlib.import_module(name).VALUE for name in names))\n"
    );
    fs::write(dir.join("main.py"), main)
}
