//! Programs of other kinds under `uvfs run`, and what stands in its way: each works, or falls back to the kernel
//! with one line.

use std::fs;
use std::path::Path;
use std::process::Command;

use crate::harness::*;
use crate::preload::{How, served_any, served_as_on_the_host, under, uvfs_run};

fn can() -> bool {
    has(&[Need::Mount(Transport::Dev), Need::Uvfs])
}

/// Lines on standard error that are no report.
fn words(outcome: &Outcome) -> Vec<&str> {
    let report = ["calls served", "left to the kernel"];
    let lines = outcome.stderr.lines();
    lines
        .filter(|line| !report.iter().any(|words| line.contains(words)))
        .collect()
}

const COPY: &str = "cd \"$1\"; seq 100000 >a; dd if=a of=b bs=5000 status=none; cmp a b; md5sum b";

/// Python's own file tests pass under `uvfs run`.
#[test]
fn python() {
    if !can() || !has(&[Need::Program("python3")]) {
        return;
    }
    let script = r##"python3 - <<'END'
import array, gzip, hashlib, json, mmap, os, pickle, random, shelve, shutil, tempfile, zipfile
rng = random.Random(3)
data = bytes(rng.randrange(256) for _ in range(200_000))
with open("plain", "wb") as f:
    for i in range(0, len(data), 3001): f.write(data[i:i + 3001])
with open("plain", "rb") as f: assert f.read() == data
with open("text", "w+") as f:
    for i in range(5000): print("line", i, file=f)
    f.seek(0); assert sum(1 for _ in f) == 5000
    f.seek(0); f.truncate(100); f.seek(0, 2); f.write("end")
with open("raw", "w+b", buffering=0) as f:
    for i in range(300): f.write(data[i * 100:i * 100 + 100])
    f.seek(1234); assert f.read(500) == data[1234:1734]
with open("plain", "r+b") as f, mmap.mmap(f.fileno(), 0) as m:
    m[1000:1004] = b"mmap"; assert m[5000:5100] == data[5000:5100]
    f.seek(1000); assert f.read(4) == b"mmap"
    m.flush()
with open("plain", "rb") as f, mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ) as m:
    print(hashlib.sha256(m).hexdigest())
with tempfile.TemporaryFile(dir=".") as f:
    f.write(data); f.seek(100); assert f.read(100) == data[100:200]
with tempfile.NamedTemporaryFile(dir=".") as f:
    f.write(b"named"); f.flush(); assert open(f.name, "rb").read() == b"named"
with tempfile.TemporaryDirectory(dir=".") as d:
    for i in range(50): open(f"{d}/{i}", "wb").write(data[:i * 37])
    assert sum(os.path.getsize(f"{d}/{i}") for i in range(50)) == sum(i * 37 for i in range(50))
with gzip.open("g.gz", "wb") as f: f.write(data)
with gzip.open("g.gz", "rb") as f: assert f.read() == data
os.remove("g.gz")
with zipfile.ZipFile("z.zip", "w") as z: z.writestr(zipfile.ZipInfo("one"), data)
with zipfile.ZipFile("z.zip") as z: assert z.read("one") == data and z.testzip() is None
array.array("d", range(1000)).tofile(open("array", "wb"))
a = array.array("d"); a.fromfile(open("array", "rb"), 1000); assert a[999] == 999
pickle.dump({"k": list(range(1000))}, open("pickle", "wb"), 4)
assert pickle.load(open("pickle", "rb"))["k"][500] == 500
json.dump({"a": [1, 2, 3]}, open("json", "w")); assert json.load(open("json"))["a"][2] == 3
shutil.copyfile("plain", "copied"); assert open("copied", "rb").read() == open("plain", "rb").read()
fd = os.open("vector", os.O_RDWR | os.O_CREAT)
assert os.writev(fd, [b"one", b"two", b"three"]) == 11
assert os.sendfile(os.open("sent", os.O_WRONLY | os.O_CREAT), fd, 3, 8) == 8
assert open("sent", "rb").read() == b"twothree"
try:
    import sqlite3
except ImportError:
    raise SystemExit("done")
for mode in ("delete", "wal"):
    db = sqlite3.connect("db"); db.execute(f"pragma journal_mode={mode}")
    db.execute("create table if not exists t(a integer primary key, b)")
    with db: db.executemany("insert into t(b) values(?)", ((f"row {i}",) for i in range(2000)))
    try:
        with db: db.execute("delete from t"); raise KeyError
    except KeyError: pass
    print(db.execute("select count(*), max(b) from t").fetchone(), db.execute("pragma integrity_check").fetchone())
    db.close()
os.remove("db"); print("done")
END
    "##;
    served_as_on_the_host(script);
}

/// A program that can't be preloaded runs under `uvfs run`.
#[test]
fn a_static_program_runs_as_ever() {
    if !can() || !has(&[Need::Program("cc")]) {
        return;
    }
    let served = Served::new(&Serve::for_clients(Transport::Dev));
    let (code, program) = (served.scratch.path("s.c"), served.scratch.path("s"));
    let text = "#include <stdio.h>\nint main(int n, char **a) { FILE *f = fopen(a[n - 1], \"w\"); \
                fputs(\"static\", f); return fclose(f); }";
    fs::write(&code, text).unwrap();
    let build = "cc -static -o \"$1\" \"$2\"";
    run_within(LATER, &mut shell(build, &[&program, &code])).ok();
    let mut command = uvfs_run(How::Eager);
    command.arg("--");
    command.arg(&program).arg(served.at("file"));
    let outcome = served.mount.run(&mut command);
    assert!(outcome.status.success(), "{outcome}");
    let lines = words(&outcome);
    assert!(
        lines.len() == 1 && lines[0].contains("statically linked"),
        "{outcome}"
    );
    assert_eq!(fs::read(served.source.join("file")).unwrap(), b"static");
    // As a child of another program: without a word.
    let script = "\"$1\" \"$2\"; cat \"$2\"";
    let outcome = served.mount.run(&mut under(
        How::Eager,
        script,
        &[&program, &served.at("other")],
    ));
    assert_eq!(outcome.stdout, "static", "{outcome}");
    assert!(words(&outcome).is_empty(), "{outcome}");
}

/// `uvfs run` works beside another preloaded library, with an allocator and a write(2) of its own.
#[test]
fn other_preloaded_libraries_and_allocators() {
    if !can() || !has(&[Need::Program("cc")]) {
        return;
    }
    let served = Served::new(&Serve::for_clients(Transport::Dev));
    let (code, other) = (served.scratch.path("o.c"), served.scratch.path("other.so"));
    let text = r##"
        #define _GNU_SOURCE
        #include <dlfcn.h>
        #include <errno.h>
        #include <stdint.h>
        #include <stdio.h>
        #include <stdlib.h>
        #include <string.h>
        #include <unistd.h>
        // Never frees; the size lies before each piece.
        static char room[512 << 20] __attribute__((aligned(4096)));
        static size_t used;
        static void *take(size_t align, size_t size) {
            if (align < 16) align = 16;
            size_t old = __atomic_fetch_add(&used, size + align + 16, __ATOMIC_RELAXED);
            if (old + size + align + 16 > sizeof room) { errno = ENOMEM; return NULL; }
            uintptr_t at = ((uintptr_t)room + old + 16 + align - 1) / align * align;
            ((size_t *)at)[-1] = size;
            return (void *)at;
        }
        void *malloc(size_t n) { return take(16, n); }
        void free(void *p) { (void)p; }
        void *calloc(size_t n, size_t m) { return take(16, n * m); }
        void *realloc(void *p, size_t n) {
            void *q = take(16, n);
            if (p && q) { size_t old = ((size_t *)p)[-1]; memcpy(q, p, old < n ? old : n); }
            return q;
        }
        void *memalign(size_t a, size_t n) { return take(a, n); }
        void *aligned_alloc(size_t a, size_t n) { return take(a, n); }
        int posix_memalign(void **p, size_t a, size_t n) { return (*p = take(a, n)) ? 0 : ENOMEM; }
        size_t malloc_usable_size(void *p) { return p ? ((size_t *)p)[-1] : 0; }
        static long writes;
        ssize_t write(int fd, const void *from, size_t n) {
            ssize_t (*next)(int, const void *, size_t) = dlsym(RTLD_NEXT, "write");
            writes++;
            return next(fd, from, n);
        }
        __attribute__((destructor)) static void say(void) {
            if (getenv("SAY") && writes) dprintf(atoi(getenv("SAY")), "counted\n");
        }
    "##;
    fs::write(&code, text).unwrap();
    let build = "cc -O1 -fno-builtin -shared -fPIC -o \"$1\" \"$2\" -ldl";
    run_within(LATER, &mut shell(build, &[&other, &code])).ok();
    let plain = run(&mut shell(COPY, &[&served.scratch.dir("host")])).ok();
    let mut command = under(How::Eager, COPY, &[&served.mount.at]);
    command.env("LD_PRELOAD", &other).env("SAY", "2");
    let outcome = served.mount.run_within(LATER, &mut command);
    assert!(
        outcome.status.success() && served_any(&outcome),
        "{outcome}"
    );
    assert_eq!(outcome.stdout, plain, "{outcome}");
    // It was called as well.
    assert!(words(&outcome).contains(&"counted"), "{outcome}");
    assert!(
        words(&outcome).iter().all(|line| *line == "counted"),
        "{outcome}"
    );
}

fn goes_on_through_the_kernel(served: &Served, command: &mut Command) {
    let host = served.scratch.path("host");
    let _ = fs::create_dir(&host);
    let plain = run(&mut shell(COPY, &[&host])).ok();
    let outcome = served.mount.run_within(LATER, command);
    assert!(outcome.status.success(), "{outcome}");
    assert_eq!(outcome.stdout, plain, "{outcome}");
    assert!(!served_any(&outcome), "{outcome}");
    let lines = words(&outcome);
    // Of each process at most one: of bash, dd, cmp and md5sum.
    assert!(!lines.is_empty() && lines.len() <= 4, "{outcome}");
    let all = |line: &&str| line.contains("going on through the kernel");
    assert!(lines.iter().all(all), "{outcome}");
}

/// A program goes on through the kernel if the server speaks another version of the protocol.
#[test]
fn an_old_server() {
    if !can() || !has(&[Need::Program("python3"), Need::Program("getfattr")]) {
        return;
    }
    let served = Served::new(&Serve::for_clients(Transport::Dev));
    let mut ask = command("getfattr", ["--only-values", "-n", "user.uvfs.socket"]);
    let socket = served.mount.run(ask.arg(&served.mount.at)).ok();
    fs::remove_file(&socket).unwrap();
    let program = r#"
import socket, struct, sys
s = socket.socket(socket.AF_UNIX); s.bind(sys.argv[1]); s.listen(64)
while True:
    c, _ = s.accept(); c.recv(16); c.send(struct.pack("=IIiI", 0x75667661, 0, 0, 4096)); c.close()
"#;
    let mut old = command("python3", ["-c", program]);
    let mut old = Running::start(old.arg(&socket));
    wait_for("the old server", || Path::new(&socket).exists());
    goes_on_through_the_kernel(&served, &mut under(How::Eager, COPY, &[&served.mount.at]));
    old.kill();
}

/// A program near its memory limit runs under `uvfs run` as it does without.
#[test]
fn memory_at_its_limits() {
    if !can() {
        return;
    }
    let served = Served::new(&Serve::for_clients(Transport::Dev));
    let with_cache = |size: &str, script: &str| {
        let mut command = uvfs_run(How::Eager);
        command.args(["--cache", size, "--", "bash", "-euo", "pipefail"]);
        command.args(["-c", script, "bash"]).arg(&served.mount.at);
        command
    };
    // More than a server gives.
    goes_on_through_the_kernel(&served, &mut with_cache("5G", COPY));
    // Far less than what is written and read.
    let script = "cd \"$1\"; seq 2000000 >a; dd if=a of=b bs=64k status=none & \
                  dd if=a of=c bs=3M iflag=fullblock status=none & wait; \
                  dd if=a of=d bs=4M oflag=direct iflag=fullblock status=none || cp a d; \
                  cmp a b; cmp a c; cmp a d; echo same";
    let outcome = served
        .mount
        .run_within(LATER, &mut with_cache("1M", script));
    assert_eq!(outcome.stdout, "same\n", "{outcome}");
    assert!(served_any(&outcome), "{outcome}");
}
