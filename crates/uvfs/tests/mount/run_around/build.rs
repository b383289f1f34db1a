//! The programs of the matrix, compiled when a cell first needs them.

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex, OnceLock};

use super::cells::Cell;
use crate::harness::*;

/// Which program, and what is linked into it or loaded before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Program {
    /// C, with liburing as a shared library.
    Plain,
    /// C, with liburing's object files.
    StaticRing,
    /// C, over libuv.
    Libuv,
    /// C, linked to an allocator.
    Linked(&'static str),
    /// C, with an allocator in LD_PRELOAD.
    Preloaded(&'static str),
    /// C, with a sanitizer.
    Sanitized(&'static str),
    /// C, on musl, dynamic.
    Musl,
    /// C, which starts the same on musl, static.
    MuslChild,
    /// Go with C in it: dynamic.
    Go,
    /// C, which starts Go: static.
    GoChild,
    /// JavaScript.
    Node,
    /// Python with an event loop over libuv.
    Uvloop,
}

const SOURCES: [(&str, &str); 8] = [
    ("around.c", include_str!("../programs/run_around/around.c")),
    ("ways.h", include_str!("../programs/run_around/ways.h")),
    ("places.h", include_str!("../programs/run_around/places.h")),
    ("inside.h", include_str!("../programs/run_around/inside.h")),
    (
        "around.go",
        include_str!("../programs/run_around/around.go"),
    ),
    ("child.go", include_str!("../programs/run_around/child.go")),
    (
        "around.js",
        include_str!("../programs/run_around/around.js"),
    ),
    (
        "around.py",
        include_str!("../programs/run_around/around.py"),
    ),
];

impl Program {
    /// As `LIBRARY.so.VERSION`, whose name a program needs at run time.
    pub const ALLOCATORS: [&'static str; 4] = [
        "libjemalloc.so.2",
        "libmimalloc.so.2.0",
        "libtcmalloc_minimal.so.4",
        "libtcmalloc.so.4",
    ];

    /// The shell script that makes the program `$1` of the sources here; none for what is interpreted.
    fn script(self) -> Option<String> {
        let cc = |flags: &str| format!("cc -O1 -w {flags} -lpthread");
        // The kernel's headers are those of the other C library.
        let musl = |flags: &str| {
            let headers = "-idirafter /usr/include -idirafter /usr/include/$(uname -m)-linux-gnu";
            format!("musl-gcc -O1 -w {flags} {headers} -o \"$1\" around.c")
        };
        Some(match self {
            Program::Plain => cc("-DWITH_URING -o \"$1\" around.c -luring"),
            Program::StaticRing => cc("-DWITH_URING -o \"$1\" around.c -l:liburing.a"),
            Program::Libuv => cc("-DWITH_UV -o \"$1\" around.c -luv"),
            Program::Linked(library) => cc(&format!(
                "-o \"$1\" around.c -Wl,--no-as-needed -l:{library}"
            )),
            Program::Sanitized(which) => cc(&format!("-fsanitize={which} -o \"$1\" around.c")),
            Program::Musl => musl(""),
            Program::MuslChild => musl("-static"),
            Program::Go => {
                "mkdir go; cp around.go around.c *.h go; cd go; go mod init around 2>/dev/null; \
                            CGO_ENABLED=1 go build -o \"$1\""
                    .into()
            }
            Program::GoChild => "CGO_ENABLED=0 go build -o \"$1\" child.go".into(),
            Program::Preloaded(_) | Program::Node | Program::Uvloop => return None,
        })
    }
}

/// Where a program is, or why it could not be made.
type Made = OnceLock<Result<PathBuf, String>>;

/// The programs that were compiled so far.
pub struct Builds {
    at: PathBuf,
    made: Mutex<HashMap<Program, Arc<Made>>>,
}

impl Builds {
    pub fn new(at: PathBuf) -> Builds {
        for (name, text) in SOURCES {
            fs::write(at.join(name), text).expect("a source");
        }
        let made = Mutex::default();
        Builds { at, made }
    }

    /// Whether the machine can make and run a program; says what is missing.
    pub fn has(&self, program: Program) -> bool {
        let Err(why) = self.made(program) else {
            return true;
        };
        let why = format!("{program:?}: {why}");
        match program {
            Program::Plain => uvfs_testing::skip(why),
            // Of the whole matrix, which runs where it is asked for.
            _ => uvfs_testing::say(why),
        }
        false
    }

    fn made(&self, program: Program) -> Result<PathBuf, String> {
        let cell = Arc::clone(self.made.lock().unwrap().entry(program).or_default());
        cell.get_or_init(|| self.make(program)).clone()
    }

    fn make(&self, program: Program) -> Result<PathBuf, String> {
        let Some(script) = program.script() else {
            return self.interpreted(program);
        };
        let name: String = format!("{program:?}")
            .chars()
            .filter(char::is_ascii_alphanumeric)
            .collect();
        let to = self.at.join(name);
        let mut build = shell(&script, &[&to]);
        let outcome = run_within(LATER, build.current_dir(&self.at));
        match outcome.status.success() {
            true => Ok(to),
            false => Err(outcome.to_string()),
        }
    }

    fn interpreted(&self, program: Program) -> Result<PathBuf, String> {
        let (script, test) = match program {
            Program::Node => ("around.js", "node --version"),
            Program::Uvloop => ("around.py", "python3 -c 'import uvloop'"),
            Program::Preloaded(library) => {
                let found = run(&mut shell(
                    "LD_PRELOAD=$1 /bin/true 2>&1",
                    &[Path::new(library)],
                ));
                return match found.stdout.is_empty() {
                    true => self.made(Program::Plain),
                    false => Err(found.stdout),
                };
            }
            _ => unreachable!("it is compiled"),
        };
        match run(&mut shell(test, &[])).status.success() {
            true => Ok(self.at.join(script)),
            false => Err(format!("no {test}")),
        }
    }

    /// The command of a cell in a directory.
    pub fn command(&self, cell: &Cell, at: &Path) -> Command {
        let made = |program| self.made(program).expect("made before");
        let program = made(cell.program);
        let mut own = match cell.program {
            Program::Node => command("node", [&program]),
            Program::Uvloop => command("python3", [&program]),
            Program::MuslChild | Program::GoChild => {
                let mut own = command::<&str>(made(Program::Plain), []);
                own.env("AROUND_CHILD", &program);
                own
            }
            _ => command::<&str>(&program, []),
        };
        match cell.program {
            Program::Preloaded(library) => own.env("LD_PRELOAD", library),
            Program::Node | Program::Uvloop => own.env("UV_USE_IO_URING", cell.way),
            Program::Plain => own.env("AROUND_CHILD", &program),
            _ => &mut own,
        };
        // In the starting program: its child is the one that goes another way.
        let way = match cell.program {
            Program::GoChild => "libc",
            _ => cell.way,
        };
        own.args([way, cell.place, cell.operation]).arg(at);
        own
    }
}
