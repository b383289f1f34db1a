//! Listings with attributes while others change what is listed.

use std::collections::HashSet;
use std::fs::{self, Permissions};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::harness::*;

/// Files that are changed, and as many that come and go.
const FILES: usize = 600;

/// Two threads list `dir` with attributes, one after the other and the same again, while a third
/// changes files and looks at once whether that shows.
pub fn while_changed(dir: &Path, _: &str) -> String {
    let name = |i: usize| dir.join(format!("stays{i:04}"));
    let stop = AtomicBool::new(false);
    let list = || {
        let mut lists = 0;
        while !stop.load(Ordering::Relaxed) {
            let mut seen = HashSet::new();
            for entry in fs::read_dir(dir).unwrap() {
                let entry = entry.unwrap();
                let name = entry.file_name().into_string().unwrap();
                match entry.metadata() {
                    Ok(found) if name.starts_with("stays") => {
                        assert!(found.is_file() && found.nlink() == 1, "{name}");
                        assert!(seen.insert(name.clone()), "{name} is there twice");
                    }
                    Err(error) if name.starts_with("stays") => panic!("{name}: {error}"),
                    _ => {}
                }
            }
            assert_eq!(seen.len(), FILES);
            lists += 1;
        }
        lists
    };
    let change = || {
        let begun = Instant::now();
        let mut at = 0;
        while begun.elapsed() < Duration::from_millis(if full() { 4000 } else { 1500 }) {
            at += 1;
            let file = name(at * 7 % FILES);
            let mode = 0o400 | (at % 0o200) as u32;
            fs::set_permissions(&file, Permissions::from_mode(mode)).unwrap();
            let len = (at % 50) as u64;
            fs::OpenOptions::new()
                .write(true)
                .open(&file)
                .unwrap()
                .set_len(len)
                .unwrap();
            let passing = dir.join(format!("passes{:04}", at % FILES));
            fs::write(&passing, "x").unwrap();
            let new = dir.join(format!("moved{:04}", at % FILES));
            fs::rename(&passing, &new).unwrap();
            // The answer of an earlier listing about it must not come afterwards.
            for _ in 0..5 {
                let found = fs::metadata(&file).unwrap();
                assert_eq!((found.mode() & 0o777, found.len()), (mode, len), "{file:?}");
                assert!(!passing.exists() && new.exists());
                std::thread::sleep(Duration::from_micros(200));
            }
            fs::remove_file(&new).unwrap();
            assert!(!new.exists());
        }
        stop.store(true, Ordering::Relaxed);
        at
    };
    std::thread::scope(|scope| {
        let lists = [scope.spawn(list), scope.spawn(list)];
        let changes = std::panic::catch_unwind(std::panic::AssertUnwindSafe(change));
        stop.store(true, Ordering::Relaxed);
        let changes = changes.expect("changes show");
        assert!(changes > 10);
        for list in lists {
            assert!(list.join().expect("listings are whole") > 0);
        }
    });
    "good".into()
}

fn changes_show(transport: Transport) {
    if !has(&[Need::Mount(transport)]) {
        return;
    }
    let served = Served::new(&Serve::over(transport));
    for i in 0..FILES {
        fs::write(served.source.join(format!("stays{i:04}")), "x").unwrap();
    }
    let scratch = Scratch::new();
    let report = scratch.path("report");
    let mut child = crate::own_process::call("while_changed", &served.mount.at, "", &report);
    served.mount.run(&mut child).ok();
    assert_eq!(fs::read_to_string(report).unwrap(), "good");
}

/// A listing has each file once that was there all the time.
#[test]
fn changes_show_beside_listings_dev() {
    changes_show(Transport::Dev);
}

/// The same over io_uring.
#[test]
fn changes_show_beside_listings_uring() {
    changes_show(Transport::Uring);
}

/// Two processes read one open directory in turn: between them they get every name once.
#[test]
fn a_listing_that_is_shared_is_whole() {
    if !has(&[Need::Mount(Transport::Dev), Need::Program("python3")]) {
        return;
    }
    let script = r#"exec python3 -c '
import ctypes, os, struct, sys
libc = ctypes.CDLL(None, use_errno=True)
fd = os.open(sys.argv[1], os.O_RDONLY | os.O_DIRECTORY)
def part(fd):
    buf = ctypes.create_string_buffer(4096)
    got = libc.syscall({"x86_64": 217}.get(os.uname().machine, 61), fd, buf, 4096)
    assert got >= 0
    at, names = 0, []
    while at < got:
        ino, off, size, kind = struct.unpack_from("QqHB", buf, at)
        names.append(buf.raw[at + 19 : at + size].split(b"\0")[0].decode())
        at += size
    for name in names:
        os.stat(name, dir_fd=fd)
    return names
seen = []
turn = [os.pipe(), os.pipe()]
child = os.fork()
if child == 0:
    while os.read(turn[0][0], 1):
        text = "\n".join(part(fd)).encode()
        os.write(turn[1][1], struct.pack("I", len(text)) + text)
while True:
    names = part(os.dup(fd))
    os.write(turn[0][1], b"x")
    size = struct.unpack("I", os.read(turn[1][0], 4))[0]
    text = os.read(turn[1][0], size).decode() if size else ""
    theirs = text.split("\n") if text else []
    if not names and not theirs:
        break
    seen += names + theirs
os.kill(child, 9)
seen = [name for name in seen if name not in (".", "..")]
assert len(seen) == len(set(seen)) == 1500, (len(seen), len(set(seen)))
print("good")
' "$1""#;
    for transport in transports() {
        let served = Served::new(&Serve::over(transport));
        for i in 0..1500 {
            fs::write(served.source.join(format!("name{i:04}")), "x").unwrap();
        }
        let text = served
            .mount
            .run(&mut shell(script, &[&served.mount.at]))
            .ok();
        assert_eq!(text, "good\n");
    }
}
