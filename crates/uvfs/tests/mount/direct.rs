//! Files that are opened with O_DIRECT: the kernel reads and writes the host's file itself, where it may,
//! and all programs and clients see the one file.

mod agreement;

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{BufRead, BufReader, Write};
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::ptr::NonNull;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::mm::{MapFlags, MsyncFlags, ProtFlags};
use rustix::process::Signal;
use uvfs_client::{Client, Config, Connection, File as ClientFile, Flags, OpenOptions, Token};

use crate::harness::*;
use crate::own_process;
use crate::preload::{How, under};
pub use agreement::worker;

const PAGE: usize = 4096;

/// A figure of `uvfs stats --json`.
fn figure(mount: &Mount, name: &str) -> u64 {
    let json = run(uvfs().args(["stats", "--json"]).arg(&mount.at)).ok();
    let json: serde_json::Value = serde_json::from_str(&json).unwrap();
    json[name]
        .as_u64()
        .unwrap_or_else(|| panic!("{name}: {json}"))
}

/// How many requests of a kind there were.
fn requests(mount: &Mount, name: &str) -> u64 {
    let json = run(uvfs().args(["stats", "--json"]).arg(&mount.at)).ok();
    let json: serde_json::Value = serde_json::from_str(&json).unwrap();
    let ops = json["ops"].as_array().unwrap().iter();
    let of = ops.filter(|op| op["name"] == name);
    of.map(|op| op["count"].as_u64().unwrap()).sum()
}

fn backed(mount: &Mount) -> u64 {
    figure(mount, "backed_opens")
}

/// Whether the kernel gives out the host's files here at all.
fn can(transport: Transport) -> bool {
    if !has(&[Need::Mount(transport), Need::Uvfs]) {
        return false;
    }
    let served = Served::new(&Serve::over(transport));
    served.mount.run(&mut copy(&served.mount.at)).ok();
    let can = backed(&served.mount) > 0;
    if !can {
        uvfs_testing::say("no FUSE passthrough (Linux 6.9)");
    }
    can
}

const COPY: &str = "cd \"$1\"; head -c 1M /dev/urandom >from; \
    dd if=from of=to bs=64k iflag=direct oflag=direct status=none; cmp from to";

fn copy(at: &Path) -> std::process::Command {
    shell(COPY, &[at])
}

/// Direct reads and writes go to the host without requests to the server.
#[test]
fn the_kernel_reads_and_writes_by_itself() {
    for transport in transports() {
        if !can(transport) {
            continue;
        }
        for (option, expected) in [
            ("", 2),
            ("passthrough=direct", 2),
            ("host_locks", 2),
            ("direct_io", 2),
            ("cache=always", 2),
            ("nopassthrough", 0),
            ("passthrough=off", 0),
            ("uncached", 0),
            ("writeback", 0),
            ("noatime", 2),
        ] {
            let served = Served::new(&Serve::over(transport).option(option));
            // A file that was open for writing by now may not be closed yet.
            fs::write(served.source.join("from"), [7; 1 << 20]).unwrap();
            let script = "cd \"$1\"; dd if=from of=to bs=64k iflag=direct oflag=direct status=none";
            served
                .mount
                .run(&mut shell(script, &[&served.mount.at]))
                .ok();
            assert_eq!(backed(&served.mount), expected, "-o {option}");
            let moved = requests(&served.mount, "READ") + requests(&served.mount, "WRITE");
            assert_eq!(moved == 0, expected > 0, "-o {option}: {moved}");
            assert_eq!(fs::read(served.source.join("to")).unwrap(), [7; 1 << 20]);
            served.mount.unmount().ok();
        }
    }
}

/// The server reads and writes the files that the kernel refuses as backing files.
#[test]
fn what_the_kernel_refuses_goes_through_the_server() {
    if !has(&[Need::Mount(Transport::Dev), Need::Uvfs]) {
        return;
    }
    let scratch = Scratch::new();
    let layers = scratch.tmpfs("layers", "64m");
    for dir in ["upper", "lower", "work"] {
        fs::create_dir(layers.join(dir)).unwrap();
    }
    let source = scratch.dir("source");
    let options = "lowerdir=lower,upperdir=upper,workdir=work";
    let mounted = run(
        command("mount", ["-t", "overlay", "overlay", "-o", options])
            .arg(&source)
            .current_dir(&layers),
    );
    if !mounted.status.success() {
        return uvfs_testing::say("no overlayfs");
    }
    let mount = Mount::new(&Serve::over(Transport::Dev), &source, &scratch.dir("mount"));
    for _ in 0..3 {
        mount.run(&mut copy(&mount.at)).ok();
    }
    assert_eq!(backed(&mount), 0);
    assert!(requests(&mount, "READ") > 0);
    mount.unmount().ok();
}

#[repr(align(4096))]
struct Pages([u8; 16 * PAGE]);

pub fn client_of(dir: &Path) -> Client {
    let mut value = [0; 256];
    let len = rustix::fs::getxattr(dir, "user.uvfs.socket", &mut value).unwrap();
    let socket = Path::new(OsStr::from_bytes(&value[..len]));
    let config = Config::default().memory(8 << 20);
    Client::new(Connection::connect(socket).unwrap(), config).unwrap()
}

/// Opens of both kinds at once, by many threads and by processes that are killed: none fails.
pub fn opener(dir: &Path, seed: &str) -> String {
    let work = |seed: u64| {
        let mut random = Random(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1);
        let mut held: Vec<File> = Vec::new();
        let mut pages = Box::new(Pages([0; 16 * PAGE]));
        for step in 0..3000 {
            let path = dir.join(format!("file{}", random.below(3)));
            let mut options = File::options();
            let direct = random.below(2) == 0;
            options.read(true).write(true).create(random.below(2) == 0);
            options.custom_flags(if direct { libc::O_DIRECT } else { 0 });
            let file = match options.open(&path) {
                Ok(file) => file,
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => continue,
                Err(error) => panic!("{step}: {error}"),
            };
            let page = random.below(16);
            file.write_all_at(&pages.0[..PAGE], page * PAGE as u64)
                .unwrap();
            let _ = file
                .read_at(&mut pages.0[..PAGE], page * PAGE as u64)
                .unwrap();
            if random.below(4) == 0 {
                held.push(file);
            }
            if held.len() > 4 || random.below(64) == 0 {
                held.clear();
            }
            if random.below(50) == 0 {
                let _ = fs::remove_file(path);
            }
        }
    };
    let seed: u64 = seed.parse().unwrap();
    std::thread::scope(|scope| {
        let threads = [1, 2, 3].map(|n| scope.spawn(move || work(seed * 3 + n)));
        threads
            .into_iter()
            .for_each(|thread| thread.join().unwrap());
    });
    "ok".into()
}

/// Opens of one file in different ways at once succeed.
#[test]
fn no_open_fails() {
    for transport in transports() {
        if !can(transport) {
            continue;
        }
        for option in ["", "passthrough"] {
            let served = Served::new(&Serve::over(transport).option(option));
            let start = |name: &str, seed: u64| {
                let report = served.scratch.path(name);
                let seed = seed.to_string();
                let at = &served.mount.at;
                (
                    Running::start(&mut own_process::call("direct_opener", at, &seed, &report)),
                    report,
                )
            };
            let mut good = [start("a", 1), start("b", 2)];
            for round in 0..6 {
                let (mut killed, _) = start("killed", 10 + round);
                std::thread::sleep(Duration::from_millis(40));
                killed.kill();
            }
            for (running, report) in &mut good {
                running.wait(LATER).expect("it ends").ok();
                assert_eq!(fs::read_to_string(report).unwrap(), "ok");
            }
            let log = served.mount.server.stderr();
            assert!(!log.contains("panicked"), "{log}");
            // All is closed, so that it begins anew.
            fs::write(served.source.join("from"), [7; 1 << 20]).unwrap();
            let before = backed(&served.mount);
            let script = "cd \"$1\"; dd if=from of=to bs=64k iflag=direct oflag=direct status=none";
            served
                .mount
                .run(&mut shell(script, &[&served.mount.at]))
                .ok();
            assert!(backed(&served.mount) >= before + 2);
            served.mount.unmount().ok();
        }
    }
}

/// Reads ten bytes, asserts that they are the same, and returns one.
fn first_byte(file: &ClientFile) -> u8 {
    let mut bytes = [0; 10];
    assert_eq!(file.read_at(&mut bytes, 0, Flags::empty()).unwrap(), 10);
    assert!(bytes.iter().all(|b| *b == bytes[0]));
    bytes[0]
}

/// Whether the client reads the file without asking the server.
fn is_cached(client: &Client, file: &ClientFile) -> bool {
    let asked = || {
        let stats = client.stats();
        stats.read_requests + stats.direct_requests
    };
    let before = asked();
    first_byte(file);
    asked() == before
}

/// Whether the kernel has the file for itself, so that the server gives no token of it.
fn is_the_kernels(file: &File) -> bool {
    match Token::of(file.as_fd()) {
        Ok(_) => false,
        Err(error) => {
            assert_eq!(error.errno(), Errno::BUSY, "{error}");
            true
        }
    }
}

/// Opens the file with O_DIRECT, which recalls the client's lease and gives the file to the kernel.
fn direct_open_recalls_lease(path: &Path, client: &Client, file: &ClientFile) -> File {
    let mut options = File::options();
    options.read(true).write(true).custom_flags(libc::O_DIRECT);
    let mut direct = None;
    wait_for("the host's file", || {
        // The kernel releases a closed file a little later. While a file is open that is not backed,
        // another open is not backed either.
        drop(direct.take());
        wait_for("a lease", || is_cached(client, file));
        direct = Some(options.open(path).unwrap());
        direct.as_ref().is_some_and(is_the_kernels)
    });
    direct.expect("the host's file")
}

/// The client and both opens of the kernel see each other's writes and sizes.
fn nobody_misses_a_change(client: &Client, file: &ClientFile, direct: &File, buffered: &File) {
    let mut pages = Box::new(Pages([0; 16 * PAGE]));
    for round in 4..40u8 {
        assert!(!is_cached(client, file));
        pages.0.fill(round);
        match round % 2 {
            0 => direct.write_all_at(&pages.0[..PAGE], 0).unwrap(),
            _ => buffered.write_all_at(&[round; 10], 0).unwrap(),
        }
        assert_eq!(first_byte(file), round);
        let other = round.wrapping_add(100);
        file.write_at(&[other; 10], 5000, Flags::empty()).unwrap();
        direct
            .read_exact_at(&mut pages.0[..PAGE], PAGE as u64)
            .unwrap();
        assert_eq!(pages.0[5000 - PAGE], other);
        let mut bytes = [0; 10];
        buffered.read_exact_at(&mut bytes, 5000).unwrap();
        assert_eq!(bytes, [other; 10]);
        let size = 2 * PAGE as u64 + u64::from(round);
        file.set_len(size).unwrap();
        assert_eq!(direct.metadata().unwrap().len(), size);
        direct.set_len(size + 1).unwrap();
        assert_eq!(file.current_size().unwrap(), size + 1);
    }
}

fn an_append_waits_for_nobody(client: &Client, file: &ClientFile, buffered: &File) {
    let began = Instant::now();
    let end = file.current_size().unwrap();
    let log = client
        .open("file", OpenOptions::new().append(true))
        .unwrap();
    log.append(b"more", Flags::empty()).unwrap();
    assert!(
        began.elapsed() < Duration::from_secs(5),
        "{:?}",
        began.elapsed()
    );
    assert_eq!(buffered.metadata().unwrap().len(), end + 4);
}

/// Leases and tokens of a file before, while, and after the kernel has it for itself.
pub fn leases(dir: &Path, _: &str) -> String {
    let path = dir.join("file");
    fs::write(&path, [1; 2 * PAGE]).unwrap();
    let client = client_of(dir);
    let options = OpenOptions::new().read(true).write(true);
    let file = client.open("file", options).unwrap();
    let direct = direct_open_recalls_lease(&path, &client, &file);
    let buffered = File::options().read(true).write(true).open(&path).unwrap();
    assert!(is_the_kernels(&buffered));
    nobody_misses_a_change(&client, &file, &direct, &buffered);
    an_append_waits_for_nobody(&client, &file, &buffered);
    // Afterwards all is as it was.
    drop(direct);
    assert!(!is_cached(&client, &file), "one is open");
    buffered.write_all_at(&[77; 10], 0).unwrap();
    drop(buffered);
    wait_for("a lease again", || is_cached(&client, &file));
    assert_eq!((first_byte(&file), fs::read(&path).unwrap()[0]), (77, 77));
    let plain = File::open(&path).unwrap();
    assert!(!is_the_kernels(&plain));
    "ok".into()
}

/// A client gets no lease of a file that the kernel changes without a request.
#[test]
fn nobody_has_leases_of_what_is_the_kernels() {
    for transport in transports() {
        if can(transport) {
            let served = Served::new(&Serve::over(transport));
            let report = served.scratch.path("report");
            let mut command = own_process::call("direct_leases", &served.mount.at, "", &report);
            served.mount.run(&mut command).ok();
            assert_eq!(fs::read_to_string(report).unwrap(), "ok");
            served.mount.unmount().ok();
        }
    }
}

/// `uvfs run` leaves it to the kernel, and serves the rest.
#[test]
fn programs_leave_it_to_the_kernel() {
    if !has(&[Need::Program("python3")]) {
        return;
    }
    const SCRIPT: &str = r#"exec python3 -c '
import mmap, os, sys
os.chdir(sys.argv[1])
page = mmap.mmap(-1, 4096); page[:] = b"d" * 4096
d = os.open("direct", os.O_RDWR | os.O_CREAT | os.O_DIRECT)
for i in range(50):
    assert os.pwritev(d, [page], i * 4096) == 4096 and os.preadv(d, [page], i * 4096) == 4096
# A thread'"'"'s first file gets a backing file, the next one none.
os.open("first", os.O_WRONLY | os.O_CREAT)
b = os.open("buffered", os.O_WRONLY | os.O_CREAT)
for i in range(50): assert os.pwrite(b, b"text", i * 4) == 4
print(os.fstat(d).st_size, os.fstat(b).st_size)
# A file that is only looked up, and listed with its contents, hinders no direct open.
for i in range(20):
    (entry,) = [e for e in os.scandir(".") if e.name == "seen"]
    assert entry.stat().st_size == os.stat("seen").st_size == 4096
    s = os.open("seen", os.O_RDONLY | os.O_DIRECT)
    assert os.preadv(s, [page], 0) == 4096 and page[:] == b"s" * 4096
    os.close(s)
' "$1""#;
    for transport in transports() {
        if !can(transport) {
            continue;
        }
        let served = Served::new(&Serve::over(transport));
        fs::write(served.scratch.path("source/seen"), [b's'; 4096]).unwrap();
        let mut command = under(How::Eager, SCRIPT, &[&served.mount.at]);
        let outcome = served.mount.run(&mut command);
        assert!(outcome.status.success(), "{outcome}");
        assert_eq!(outcome.stdout, "204800 200\n", "{outcome}");
        assert!(crate::preload::served_any(&outcome), "{outcome}");
        assert!(!outcome.stderr.contains("through the kernel"), "{outcome}");
        assert_eq!(backed(&served.mount), 22);
        let read = figure(&served.mount, "bytes_read");
        assert!(read < 50 * 4096, "{read}");
        served.mount.unmount().ok();
    }
}

/// Waits with a file open, until it is told to go on.
pub fn holder(dir: &Path, flag: &str) -> String {
    let (path, flag) = (dir.join("file"), PathBuf::from(flag));
    let mut options = File::options();
    options.read(true).write(true).create(true);
    let file = options.custom_flags(libc::O_DIRECT).open(&path).unwrap();
    let pages = Box::new(Pages([9; 16 * PAGE]));
    file.write_all_at(&pages.0[..PAGE], 0).unwrap();
    fs::write(flag.join("ready"), "").unwrap();
    wait_for("the server's end", || flag.join("go").exists());
    // Calls that are under way meanwhile are aborted or cancelled.
    wait_for("ENOTCONN", || {
        let (open, stat) = (errno(File::open(&path)), errno(fs::metadata(dir)));
        [open, stat] == [libc::ENOTCONN; 2]
    });
    // The data is with the host; the kernel may still serve the write.
    let _ = file.write_at(&pages.0[..PAGE], 0);
    assert!(file.as_raw_fd() > 0);
    "ok".into()
}

fn errno<T: std::fmt::Debug>(result: std::io::Result<T>) -> i32 {
    result.unwrap_err().raw_os_error().unwrap()
}

/// A file that the kernel reads by itself ends with its server and its mount.
#[test]
fn a_killed_server_leaves_a_dead_mount() {
    for transport in transports() {
        if !can(transport) {
            continue;
        }
        let serve = Serve::over(transport);
        let mut served = Served::new(&serve);
        let (report, flag) = (served.scratch.path("report"), served.scratch.dir("flag"));
        let at = served.mount.at.clone();
        let argument = flag.to_str().unwrap().to_owned();
        let mut holder = Running::start(&mut own_process::call(
            "direct_holder",
            &at,
            &argument,
            &report,
        ));
        wait_for("the file to be open", || flag.join("ready").exists());
        assert_eq!(backed(&served.mount), 1);
        served.mount.expect_gone();
        served.mount.server.signal(Signal::KILL);
        served.mount.server.wait(SOON).expect("it is killed");
        fs::write(flag.join("go"), "").unwrap();
        holder.wait(SOON).expect("nothing hangs").ok();
        assert_eq!(fs::read_to_string(&report).unwrap(), "ok");
        assert_eq!(fs::read(served.source.join("file")).unwrap(), [9; PAGE]);
        run(uvfs().arg("umount").arg(&at)).ok();
        let again = Mount::new(&serve, &served.source, &at);
        again.run(&mut copy(&again.at)).ok();
        again.unmount().ok();
    }
}
