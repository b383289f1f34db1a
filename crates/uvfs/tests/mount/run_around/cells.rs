//! The table: which cells there are, and which of them CI runs.

use std::fmt;

use super::build::Program;

/// One program that goes around the C library: see `programs/run_around/around.c` for the words.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cell {
    pub program: Program,
    pub way: &'static str,
    pub place: &'static str,
    pub operation: &'static str,
}

/// Whether the library serves calls of a cell, as far as its report tells.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Serving {
    /// It does, at least until the call around it.
    Some,
    /// It falls back to the kernel from the start.
    None,
    /// Either, or there is no report.
    Any,
}

impl fmt::Display for Cell {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (way, place, operation) = (self.way, self.place, self.operation);
        write!(f, "{:?} {way} {place} {operation}.", self.program)
    }
}

impl Cell {
    /// Whether the program ends, or becomes another, in its operation.
    pub fn ends_early(&self) -> bool {
        matches!(self.operation, "exec" | "exit") && !matches!(self.place, "forked" | "vforked")
    }

    /// Why it is known to differ, if it is.
    pub fn left(&self) -> Option<&'static str> {
        let left = LEFT.iter().find(|(which, _)| which(self));
        left.map(|(_, why)| *why)
    }

    pub fn needs_a_ring(&self) -> bool {
        matches!(self.way, "uring" | "sqpoll")
    }

    pub fn serving(&self) -> Serving {
        if self.place == "ring-before" {
            // The ring ends with the program that made it.
            return match self.operation {
                "exec" => Serving::Any,
                _ => Serving::None,
            };
        }
        let plain = matches!(
            self.program,
            Program::Plain | Program::Linked(_) | Program::Preloaded(_)
        );
        // The report is printed at the end, by whatever the process is then.
        let takes = matches!(self.operation, "look" | "take" | "close_all");
        let reports = !self.ends_early() && !takes;
        match plain && self.place == "main" && reports && self.operation != "limit" {
            true => Serving::Some,
            false => Serving::Any,
        }
    }
}

/// Cells, and why they differ.
type Left = (fn(&Cell) -> bool, &'static str);

/// The cells that still differ, and why. The whole matrix runs them, too, and says which of them differ no more.
const LEFT: [Left; 3] = [
    (
        |cell| {
            let child = matches!(cell.place, "forked" | "vforked" | "child");
            child && cell.operation == "setfl"
        },
        "another process switches O_APPEND of a description that is served here",
    ),
    (
        |cell| cell.place == "vforked" && cell.operation == "look",
        "the child of a vfork sees the library's own descriptors",
    ),
    (
        |cell| cell.operation == "stdout",
        "streams write at the kernel's position",
    ),
];

/// The calls that change what a descriptor or a position is.
const OPERATIONS: [&str; 12] = [
    "close",
    "reopen",
    "open",
    "dup2",
    "dup3",
    "close_range",
    "lseek",
    "read",
    "write",
    "mmap",
    "fork",
    "exec",
];

/// Other operations that the library has to know of.
const MORE: [&str; 18] = [
    "none",
    "close_all",
    "take",
    "look",
    "race",
    "thread_exit",
    "raw_exit",
    "strict",
    "filter",
    "dup",
    "spawn",
    "setfl",
    "append",
    "truncate",
    "sendfile",
    "send",
    "limit",
    "exit",
];

/// Functions of the C library that make calls inside it (`programs/run_around/inside.h`).
const INSIDE: [&str; 9] = [
    "stdout", "perror", "aio", "allocate", "daemon", "login", "wordexp", "popen", "stream",
];

/// Threads, processes and signals (`programs/run_around/places.h`).
const PLACES: [&str; 41] = [
    "early",
    "thread-before",
    "thread-awake",
    "thread-after",
    "raw-thread-before",
    "raw-thread",
    "files-clone",
    "raw-vforked",
    "vforked",
    "forked",
    "unshared",
    "unshared-raw",
    "masked",
    "masked-libc",
    "masked-before",
    "handler",
    "handler-raw",
    "handler-after",
    "handler-raw-after",
    "ignored",
    "ignored-raw",
    "default-raw",
    "in-handler",
    "in-handler-alt",
    "trapped",
    "dispatch",
    "dispatch-before",
    "child",
    "clone-thread",
    "timer-thread",
    "c11-thread",
    "masked-attr",
    "sighold",
    "sigsetmask",
    "context",
    "longjmp",
    "masked-return",
    "sysv-handler",
    "storm",
    "busy",
    "main",
];

fn cell(program: Program, way: &'static str, place: &'static str, operation: &'static str) -> Cell {
    Cell {
        program,
        way,
        place,
        operation,
    }
}

/// The cells that CI runs: one compiled program, milliseconds each.
pub fn few() -> Vec<Cell> {
    [
        ("syscall", "main", "reopen"),
        ("asm", "main", "dup2"),
        ("asm", "main", "lseek"),
        ("asm", "main", "fork"),
        ("asm", "early", "dup"),
        ("asm", "thread-before", "close_range"),
        ("asm", "masked", "write"),
        ("asm", "handler", "reopen"),
        ("asm", "longjmp", "reopen"),
        ("asm", "main", "look"),
        ("asm", "main", "open"),
        ("asm", "main", "append"),
        ("libc", "main", "perror"),
        ("asm", "forked", "sendfile"),
        ("asm", "main", "thread_exit"),
        ("asm", "main", "raw_exit"),
        ("asm", "main", "strict"),
        ("asm", "main", "filter"),
        ("int80", "main", "take"),
        ("int80", "main", "close_all"),
        ("int80", "raw-thread", "close"),
        ("uring", "main", "reopen"),
        ("uring", "ring-before", "write"),
    ]
    .map(|(way, place, operation)| cell(Program::Plain, way, place, operation))
    .to_vec()
}

/// Every cell.
pub fn all() -> Vec<Cell> {
    let mut cells = few();
    let mut add = |one: Cell| {
        // A mapping of a file that is empty yet faults anywhere. The ring can't close itself, and is one thread's.
        let none = (one.place == "early" && one.operation == "mmap")
            || (one.needs_a_ring() && matches!(one.operation, "close_all" | "race"));
        if !none && !cells.contains(&one) {
            cells.push(one);
        }
    };
    let every = || OPERATIONS.into_iter().chain(MORE);
    for way in ["libc", "syscall", "asm", "int80", "uring", "sqpoll"] {
        for operation in every() {
            add(cell(Program::Plain, way, "main", operation));
        }
    }
    for place in PLACES {
        for operation in every() {
            add(cell(Program::Plain, "asm", place, operation));
        }
        for operation in ["none", "reopen", "dup2", "lseek", "write", "fork", "spawn"] {
            add(cell(Program::Plain, "libc", place, operation));
        }
    }
    for operation in OPERATIONS {
        for way in ["uring", "sqpoll"] {
            add(cell(Program::Plain, way, "ring-before", operation));
        }
        add(cell(Program::StaticRing, "uring", "main", operation));
        add(cell(Program::Libuv, "libuv", "main", operation));
        for way in ["libc", "asm"] {
            for allocator in Program::ALLOCATORS {
                add(cell(Program::Linked(allocator), way, "main", operation));
                add(cell(Program::Preloaded(allocator), way, "main", operation));
            }
            for sanitizer in ["address", "thread"] {
                add(cell(Program::Sanitized(sanitizer), way, "main", operation));
            }
            add(cell(Program::MuslChild, way, "child", operation));
        }
        add(cell(Program::Go, "go", "main", operation));
        add(cell(Program::GoChild, "go", "child", operation));
        for ring in ["0", "1"] {
            // Node has none of the others.
            if !matches!(operation, "dup2" | "dup3" | "close_range" | "lseek") {
                add(cell(Program::Node, ring, "main", operation));
            }
            add(cell(Program::Uvloop, ring, "main", operation));
        }
    }
    for operation in INSIDE {
        add(cell(Program::Plain, "libc", "main", operation));
    }
    add(cell(Program::Musl, "libc", "main", "none"));
    cells
}
