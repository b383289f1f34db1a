//! Programs whose calls don't all go through the C library, under `uvfs run`: each leaves what it leaves without
//! it, because the library sees those calls as well, or falls back to the kernel.

use std::fs;
use std::process::Command;

use crate::harness::*;
use crate::preload::{How, served_any, under, uvfs_run};
use crate::run_files::compiled;

fn can() -> bool {
    has(&[Need::Mount(Transport::Dev), Need::Uvfs])
}

/// Runs a part of `programs/around.c` on the mount, plainly and under `uvfs run`, and compares. `aside` is the
/// reason for which it falls back to the kernel in the end, if it does.
fn same(part: &str, aside: Option<&str>) {
    if !can() || !cfg!(target_arch = "x86_64") || !has(&[Need::Program("cc")]) {
        return;
    }
    // Without backing files, which the kernel would serve.
    let served = Served::new(&Serve::over(Transport::Dev).option("nopassthrough"));
    let program = compiled(&served.scratch, "around", include_str!("programs/around.c"));
    let run_in = |dir: &str, command: &mut Command| {
        fs::create_dir(served.source.join(dir)).unwrap();
        command.arg(&program).arg(served.at(dir)).arg(part);
        let outcome = served.mount.run_within(LATER, command);
        assert!(outcome.status.success(), "{outcome}");
        outcome
    };
    let plain = run_in("plain", &mut Command::new("env"));
    let mut command = uvfs_run(How::Eager);
    command.arg("--");
    let outcome = run_in("run", &mut command);
    assert_eq!(outcome.stdout, plain.stdout, "{outcome}");
    let trees = ["plain", "run"].map(|dir| served.source.join(dir));
    run(Command::new("diff").arg("-r").args(trees)).ok();
    match aside {
        Some(words) => assert!(outcome.stderr.contains(words), "{outcome}"),
        None => assert!(
            !outcome.stderr.contains("falls back to the kernel"),
            "{outcome}"
        ),
    }
    // No report counts the files of a process that is replaced or ended in the kernel.
    if !["ends", "executes"].contains(&part) {
        assert!(served_any(&outcome), "{outcome}");
    }
}

/// Descriptors that are closed, duplicated or moved around the C library lead to the right files.
#[test]
fn descriptors() {
    same("table", None);
}

/// Calls in a signal handler work, and a program gets its SIGSYS.
#[test]
fn signal_handlers() {
    same("signals", Some("handles or blocks SIGSYS"));
}

/// Other threads' calls are seen.
#[test]
fn threads() {
    same("threads", None);
}

/// A thread that blocks all signals for a moment, as it does while it makes another, is waited for.
#[test]
fn blocked_signals() {
    same("blocked", None);
}

/// A process that the C library did not make shares the file's position.
#[test]
fn processes() {
    same("processes", Some("made around the C library"));
}

/// Duplicates from before the process was served are known.
#[test]
fn duplicates_from_before() {
    same("early", None);
}

/// No data is lost with a process that ends, or becomes another program, around the C library.
#[test]
fn the_end() {
    same("ends", None);
    same("executes", None);
}

/// A program ends with the last of its own threads, and not before.
#[test]
fn the_last_thread() {
    same("last", None);
}

/// The kernel has the positions that requests of an io_uring use.
#[test]
fn an_io_uring() {
    let uring = fs::read_to_string("/proc/sys/kernel/io_uring_disabled").unwrap_or_default();
    if uring.trim() == "0" {
        same("ring", Some("uses io_uring"));
    }
}

/// A call by the 32-bit entry, which can't be followed, is noticed.
#[test]
fn the_old_entry() {
    same("old_entry", Some("can't be followed"));
}

/// libuv closes files by an io_uring and by the C library. A write to the file that has the number next goes to that.
#[test]
fn node() {
    if !can() || !has(&[Need::Program("node")]) {
        return;
    }
    let served = Served::new(&Serve::over(Transport::Dev).option("nopassthrough"));
    let script = r#"
        cd "$1"; printf hello >A
        node -e '
            const fs = require("fs"), b = Buffer.alloc(4096, "a"), fd = fs.openSync("A", "r+");
            for (let i = 0; i < 4000; i++) fs.writeSync(fd, b, 0, 4096, 4096 * (i % 16));
            fs.close(fd, () => fs.open("B", "w+", (e, g) => { fs.writeSync(g, "this belongs to B\n"); process.exit(); }));
        '
        head -c 9 A; wc -c <A; cat B; rm A B
    "#;
    for ring in ["0", "1"] {
        let mut command = under(How::AsItPays, script, &[&served.mount.at]);
        command.env("UV_USE_IO_URING", ring);
        let outcome = served.mount.run_within(LATER, &mut command);
        assert!(outcome.status.success(), "{outcome}");
        assert_eq!(
            outcome.stdout, "aaaaaaaaa65536\nthis belongs to B\n",
            "{outcome}"
        );
        // Without a ring it is served.
        assert!(ring == "1" || served_any(&outcome), "{outcome}");
    }
}

/// A program with a sanitizer starts, and so does any with a library whose path has a space or a colon.
#[test]
fn sanitizers_and_awkward_paths() {
    if !can() || !has(&[Need::Program("cc")]) {
        return;
    }
    let served = Served::new(&Serve::over(Transport::Dev).option("nopassthrough"));
    let code = served.scratch.path("s.c");
    let source = r#"
        #include <fcntl.h>
        #include <stdlib.h>
        #include <string.h>
        #include <unistd.h>
        int main(int n, char **words) {
            int fd = open(words[1], O_RDWR | O_CREAT | O_TRUNC, 0644);
            char *text = malloc(5); memcpy(text, "text\n", 5);
            for (int i = 0; i < 9; i++) if (write(fd, text, 5) != 5) return 3;
            free(text); return close(fd);
        }
    "#;
    fs::write(&code, source).unwrap();
    let wrote = |words: &[&str], library: &std::path::Path| {
        let program = served.scratch.path("program");
        let mut build = Command::new("cc");
        build.args(words).arg("-o").arg(&program).arg(&code);
        if !run_within(LATER, &mut build).status.success() {
            return uvfs_testing::skip(format_args!("{words:?} can't be built"));
        }
        let mut command = uvfs_run(How::Eager);
        command.env("UVFS_PRELOAD", library).arg("--");
        command.arg(&program).arg(served.at("file"));
        let outcome = served.mount.run_within(LATER, &mut command);
        assert!(outcome.status.success(), "{words:?}: {outcome}");
        let text = fs::read_to_string(served.source.join("file")).unwrap();
        assert_eq!(text, "text\n".repeat(9));
        assert!(!outcome.stderr.contains("ld.so"), "{outcome}");
        fs::remove_file(served.source.join("file")).unwrap();
    };
    let library = crate::preload::library();
    for sanitizer in ["address", "thread", "undefined"] {
        wrote(&[&format!("-fsanitize={sanitizer}")], &library);
    }
    for name in ["a space", "a:colon"] {
        let dir = served.scratch.dir(name);
        let copy = dir.join("libuvfs_preload.so");
        fs::copy(&library, &copy).unwrap();
        wrote(&[], &copy);
    }
}
