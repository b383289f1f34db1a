//! What is opened with O_DIRECT: the kernel reads and writes the host's file itself, where it may,
//! and nobody sees anything but the one file.

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

use rustix::mm::{MapFlags, MsyncFlags, ProtFlags};
use rustix::process::Signal;
use uvfs_client::{Client, Config, File as ClientFile, Flags, OpenOptions, Server, Token};

use crate::child;
use crate::harness::*;
use crate::preload::{How, under};

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
        eprintln!("skipped: no FUSE passthrough (Linux 6.9)");
    }
    can
}

const COPY: &str = "cd \"$1\"; head -c 1M /dev/urandom >from; \
    dd if=from of=to bs=64k iflag=direct oflag=direct status=none; cmp from to";

fn copy(at: &Path) -> std::process::Command {
    shell(COPY, &[at])
}

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
            // What was open for writing by now may not be closed yet.
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

/// A source that lies on other file systems, which the kernel refuses.
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
        eprintln!("skipped: no overlayfs");
        return;
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

/// One of those who use the file at the same time.
enum Opened {
    Kernel(File),
    Client(ClientFile),
}

fn sum(bytes: &[u8]) -> u64 {
    let add = |sum: u64, b: &u8| sum.wrapping_mul(0x100_0000_01b3) ^ u64::from(*b);
    bytes
        .iter()
        .fold(0xcbf2_9ce4_8422_2325 ^ bytes.len() as u64, add)
}

fn client_of(dir: &Path) -> Client {
    let mut value = [0; 256];
    let len = rustix::fs::getxattr(dir, "user.uvfs.socket", &mut value).unwrap();
    let socket = Path::new(OsStr::from_bytes(&value[..len]));
    let config = Config {
        memory: 8 << 20,
        ..Config::default()
    };
    Client::new(Server::connect(socket).unwrap(), config).unwrap()
}

impl Opened {
    fn read(&self, at: u64, len: usize) -> u64 {
        let mut pages = Box::new(Pages([0; 16 * PAGE]));
        let n = match self {
            Self::Kernel(file) => file.read_at(&mut pages.0[..len], at).unwrap(),
            Self::Client(file) => file
                .read_at(&mut pages.0[..len], at, Flags::empty())
                .unwrap(),
        };
        sum(&pages.0[..n])
    }

    fn write(&self, at: u64, len: usize, byte: u8) -> u64 {
        let pages = Box::new(Pages([byte; 16 * PAGE]));
        let n = match self {
            Self::Kernel(file) => file.write_at(&pages.0[..len], at).unwrap(),
            Self::Client(file) => file.write_at(&pages.0[..len], at, Flags::empty()).unwrap(),
        };
        n as u64
    }

    /// Through a mapping of the page there.
    fn mapped(&self, at: u64, len: usize, byte: Option<u8>) -> u64 {
        let Self::Kernel(file) = self else {
            return u64::MAX;
        };
        let prot = match byte {
            Some(_) => ProtFlags::READ | ProtFlags::WRITE,
            None => ProtFlags::READ,
        };
        // SAFETY: a new mapping of a page that the file has.
        unsafe {
            let null = std::ptr::null_mut();
            // A mapping ends where the kernel last knew the file to end.
            file.metadata().unwrap();
            let map = rustix::mm::mmap(null, PAGE, prot, MapFlags::SHARED, file, at).unwrap();
            let here = NonNull::new(map.cast::<u8>()).unwrap();
            if let Some(byte) = byte {
                here.write_bytes(byte, len);
                rustix::mm::msync(map, PAGE, MsyncFlags::SYNC).unwrap();
            }
            let mut seen = vec![0; len];
            here.as_ptr().copy_to(seen.as_mut_ptr(), len);
            rustix::mm::munmap(map, PAGE).unwrap();
            sum(&seen)
        }
    }

    fn cut(&self, size: u64) {
        match self {
            Self::Kernel(file) => file.set_len(size).unwrap(),
            Self::Client(file) => file.set_len(size).unwrap(),
        }
    }

    fn size(&self) -> u64 {
        match self {
            Self::Kernel(file) => file.metadata().unwrap().len(),
            Self::Client(file) => file.current_size().unwrap(),
        }
    }
}

/// Does to `file` what it is told over a socket: a client if that is named so, else by the kernel.
pub fn worker(dir: &Path, socket: &str) -> String {
    let mut socket_out = UnixStream::connect(socket).unwrap();
    let client = socket.ends_with("client").then(|| client_of(dir));
    let mut slots: [Option<Opened>; SLOTS] = [const { None }; SLOTS];
    let lines = BufReader::new(socket_out.try_clone().unwrap()).lines();
    for line in lines {
        let line = line.unwrap();
        let words: Vec<u64> = line.split(' ').map(|word| word.parse().unwrap()).collect();
        let &[what, slot, at, len, byte] = &words[..] else {
            panic!("{line}");
        };
        let (slot, size, byte) = (&mut slots[slot as usize], len as usize, byte as u8);
        let open = || slot.as_ref().expect("it is open");
        let answer = match what {
            OPEN => {
                *slot = Some(match &client {
                    Some(client) => {
                        let options = OpenOptions::new().read(true).write(true);
                        Opened::Client(client.open("file", options).unwrap())
                    }
                    None => {
                        let mut options = File::options();
                        let writes = byte == 0;
                        options.read(true).write(writes).create(writes && len != 0);
                        options.custom_flags(at as i32);
                        Opened::Kernel(options.open(dir.join("file")).unwrap())
                    }
                });
                0
            }
            CLOSE => {
                if let Some(Opened::Client(file)) = slot {
                    file.sync_all().unwrap();
                }
                *slot = None;
                0
            }
            READ => open().read(at, size),
            WRITE => open().write(at, size, byte),
            MAP_READ => open().mapped(at, size, None),
            MAP_WRITE => open().mapped(at, size, Some(byte)),
            CUT => {
                open().cut(at);
                0
            }
            SIZE => open().size(),
            _ => panic!("{line}"),
        };
        writeln!(socket_out, "{answer}").unwrap();
    }
    "ok".into()
}

const OPEN: u64 = 0;
const CLOSE: u64 = 1;
const READ: u64 = 2;
const WRITE: u64 = 3;
const MAP_READ: u64 = 4;
const MAP_WRITE: u64 = 5;
const CUT: u64 = 6;
const SIZE: u64 = 7;
const SLOTS: usize = 3;

struct Worker {
    running: Running,
    stream: BufReader<UnixStream>,
    /// Of each slot: not open, or whether with O_DIRECT, and whether for reading only.
    slots: [Option<(bool, bool)>; SLOTS],
    is_client: bool,
}

impl Worker {
    fn start(served: &Served, name: &str) -> Self {
        let path = served.scratch.path(name);
        let listener = UnixListener::bind(&path).unwrap();
        let report = served.scratch.path(&format!("{name}.report"));
        let at = &served.mount.at;
        let mut command = child::call("direct_worker", at, path.to_str().unwrap(), &report);
        let running = Running::start(&mut command);
        let (stream, _) = listener.accept().unwrap();
        stream.set_read_timeout(Some(SOON)).unwrap();
        Self {
            running,
            stream: BufReader::new(stream),
            slots: [None; SLOTS],
            is_client: name.ends_with("client"),
        }
    }

    /// Has it do something; what it answers.
    fn ask(&mut self, words: [u64; 5]) -> u64 {
        let line = words.map(|word| word.to_string()).join(" ") + "\n";
        self.stream.get_mut().write_all(line.as_bytes()).unwrap();
        let mut answer = String::new();
        let read = self.stream.read_line(&mut answer);
        answer.trim().parse().unwrap_or_else(|_| {
            std::thread::sleep(Duration::from_millis(200));
            panic!("{words:?}: {read:?}\n{}", self.running.stderr())
        })
    }

    fn close(&mut self, slot: usize) {
        if self.slots[slot].take().is_some() {
            self.ask([CLOSE, slot as u64, 0, 0, 0]);
        }
    }
}

/// xorshift.
struct Random(u64);

impl Random {
    fn below(&mut self, n: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) % n
    }
}

/// Two processes and a client have one file open in all ways, one doing something at a time: each
/// sees what the others did.
fn everybody_sees_one_file(served: &Served, seed: u64, rounds: usize) {
    const LARGEST: u64 = 40 * PAGE as u64;
    let mut workers = ["one", "two", "client"].map(|name| Worker::start(served, name));
    let mut random = Random(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1);
    let host = served.source.join("file");
    fs::write(&host, "").unwrap();
    let mut model: Vec<u8> = Vec::new();
    let mut log = Vec::new();
    for round in 0..rounds {
        for _ in 0..random.below(60) {
            let number = random.below(3) as usize;
            let worker = &mut workers[number];
            let slot = random.below(SLOTS as u64) as usize;
            let at = slot as u64;
            let Some((direct, only_read)) = worker.slots[slot] else {
                // In half of the rounds most of them are direct.
                let direct = !worker.is_client && random.below(4) < 1 + 2 * (round as u64 % 2);
                let flags = if direct { libc::O_DIRECT } else { 0 };
                let (create, reads) = (random.below(3) / 2, random.below(2));
                let reads = if worker.is_client { 0 } else { reads };
                log.push(format!("{number}.{slot} opens {flags:#x} {create} {reads}"));
                worker.ask([OPEN, at, flags as u64, create, reads]);
                worker.slots[slot] = Some((direct, reads == 1));
                continue;
            };
            let page = PAGE as u64;
            let (from, len) = match direct {
                true => (random.below(32) * page, (1 + random.below(8)) * page),
                false => (random.below(32 * page), 1 + random.below(8 * page)),
            };
            let byte = random.below(256);
            let seen = |from: u64, len: u64| {
                let end = (from + len)
                    .min(model.len() as u64)
                    .max(from.min(model.len() as u64));
                sum(&model[from.min(end) as usize..end as usize])
            };
            let what = match random.below(16) {
                8..=11 | 14 if only_read => 3,
                what => what,
            };
            let (words, expected) = match what {
                0..=2 => {
                    log.push(format!("{number}.{slot} closes"));
                    worker.close(slot);
                    continue;
                }
                3..=7 => ([READ, at, from, len, 0], seen(from, len)),
                8..=11 => {
                    let end = (from + len) as usize;
                    model.resize(model.len().max(end), 0);
                    model[from as usize..end].fill(byte as u8);
                    ([WRITE, at, from, len, byte], len)
                }
                12 | 13 if !worker.is_client && !model.is_empty() => {
                    let from = random.below(model.len() as u64) / page * page;
                    let len = page.min(model.len() as u64 - from);
                    if only_read || random.below(2) == 0 {
                        ([MAP_READ, at, from, len, 0], seen(from, len))
                    } else {
                        let part = &mut model[from as usize..(from + len) as usize];
                        part.fill(byte as u8);
                        let expected = sum(part);
                        ([MAP_WRITE, at, from, len, byte], expected)
                    }
                }
                14 => {
                    let size = random.below(LARGEST);
                    model.resize(size as usize, 0);
                    ([CUT, at, size, 0, 0], 0)
                }
                _ => ([SIZE, at, 0, 0, 0], model.len() as u64),
            };
            log.push(format!("{number}.{slot} {words:?}"));
            let got = worker.ask(words);
            let tail = || log[log.len().saturating_sub(40)..].join("\n");
            assert_eq!(
                got,
                expected,
                "seed {seed}, size {}\n{}",
                model.len(),
                tail()
            );
        }
        if random.below(3) == 0 {
            log.push("all close".into());
            for (worker, slot) in (0..3).flat_map(|w| (0..SLOTS).map(move |s| (w, s))) {
                workers[worker].close(slot);
            }
            assert!(
                fs::read(&host).unwrap() == model,
                "seed {seed}: the host's file"
            );
        }
    }
    for worker in &mut workers {
        (0..SLOTS).for_each(|slot| worker.close(slot));
        worker
            .stream
            .get_ref()
            .shutdown(std::net::Shutdown::Both)
            .unwrap();
        worker.running.wait(SOON).expect("it ends").ok();
    }
    assert!(
        fs::read(&host).unwrap() == model,
        "seed {seed}: the host's file"
    );
}

fn one_file(option: &str) {
    let (seeds, rounds) = if full() { (12, 200) } else { (2, 40) };
    for transport in transports() {
        if !can(transport) {
            continue;
        }
        for (seed, on_disk) in (0..seeds).flat_map(|seed| [(seed, false), (seed, true)]) {
            let serve = Serve::over(transport).option(option);
            let served = match on_disk {
                false => Served::new(&serve),
                true if !has(&[Need::Program("mkfs.ext4")]) => continue,
                true => {
                    let scratch = Scratch::new();
                    let source = scratch.ext4("source");
                    let mount = Mount::new(&serve, &source, &scratch.dir("mount"));
                    Served {
                        mount,
                        source,
                        scratch,
                    }
                }
            };
            everybody_sees_one_file(&served, 2 * seed + 1, rounds);
            assert_eq!(backed(&served.mount) > 0, option != "nopassthrough");
            served.mount.unmount().ok();
        }
    }
}

#[test]
fn everybody_sees_one_file_when_some_of_it_is_direct() {
    one_file("");
}

#[test]
fn everybody_sees_one_file_when_all_that_is_direct_is_the_kernels() {
    one_file("passthrough=direct");
}

#[test]
fn everybody_sees_one_file_when_all_of_it_is_the_kernels() {
    one_file("passthrough");
}

#[test]
fn everybody_sees_one_file_when_nothing_of_it_is_the_kernels() {
    one_file("nopassthrough");
}

/// Opens of both kinds at once, by many and by some who are killed: none fails.
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
                    Running::start(&mut child::call("direct_opener", at, &seed, &report)),
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

/// Leases and tokens of a file before, while, and after the kernel has it for itself.
pub fn leases(dir: &Path, _: &str) -> String {
    let path = dir.join("file");
    fs::write(&path, [1; 2 * PAGE]).unwrap();
    let client = client_of(dir);
    let open = || {
        let options = OpenOptions::new().read(true).write(true);
        client.open("file", options).unwrap()
    };
    let read = |file: &ClientFile, at: u64| {
        let mut bytes = [0; 10];
        assert_eq!(file.read_at(&mut bytes, at, Flags::empty()).unwrap(), 10);
        assert!(bytes.iter().all(|b| *b == bytes[0]));
        bytes[0]
    };
    let is_cached = |file: &ClientFile| {
        let asked = || {
            let stats = client.stats();
            stats.read_requests + stats.direct_requests
        };
        let before = asked();
        read(file, 0);
        asked() == before
    };
    let direct = || {
        let mut options = File::options();
        options.read(true).write(true).custom_flags(libc::O_DIRECT);
        options.open(&path).unwrap()
    };
    let is_the_kernels = |file: &File| match Token::of(file.as_fd()) {
        Ok(_) => false,
        Err(error) => {
            assert_eq!(error.raw_os_error(), Some(libc::EBUSY), "{error}");
            true
        }
    };
    let mut pages = Box::new(Pages([2; 16 * PAGE]));
    // The client has a lease, which a direct open recalls.
    let file = open();
    let mut mine = None;
    wait_for("the host's file", || {
        // The kernel releases a closed file a little later. While a file is open that is not backed,
        // another open is not backed either.
        drop(mine.take());
        wait_for("a lease", || is_cached(&file));
        mine = Some(direct());
        mine.as_ref().is_some_and(is_the_kernels)
    });
    let mine = mine.expect("the host's file");
    let buffered = File::options().read(true).write(true).open(&path).unwrap();
    assert!(is_the_kernels(&buffered));
    for round in 4..40u8 {
        assert!(!is_cached(&file));
        pages.0.fill(round);
        match round % 2 {
            0 => mine.write_all_at(&pages.0[..PAGE], 0).unwrap(),
            _ => buffered.write_all_at(&[round; 10], 0).unwrap(),
        }
        assert_eq!(read(&file, 0), round);
        let other = round.wrapping_add(100);
        file.write_at(&[other; 10], 5000, Flags::empty()).unwrap();
        mine.read_exact_at(&mut pages.0[..PAGE], PAGE as u64)
            .unwrap();
        assert_eq!(pages.0[5000 - PAGE], other);
        let mut bytes = [0; 10];
        buffered.read_exact_at(&mut bytes, 5000).unwrap();
        assert_eq!(bytes, [other; 10]);
        let size = 2 * PAGE as u64 + u64::from(round);
        file.set_len(size).unwrap();
        assert_eq!(mine.metadata().unwrap().len(), size);
        mine.set_len(size + 1).unwrap();
        assert_eq!(file.current_size().unwrap(), size + 1);
    }
    // An append waits for nobody.
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
    drop(log);
    // Afterwards all is as it was.
    drop(mine);
    assert!(!is_cached(&file), "one is open");
    buffered.write_all_at(&[77; 10], 0).unwrap();
    drop(buffered);
    wait_for("a lease again", || is_cached(&file));
    assert_eq!((read(&file, 0), fs::read(&path).unwrap()[0]), (77, 77));
    let plain = File::open(&path).unwrap();
    assert!(!is_the_kernels(&plain));
    "ok".into()
}

#[test]
fn nobody_has_leases_of_what_is_the_kernels() {
    for transport in transports() {
        if can(transport) {
            let served = Served::new(&Serve::over(transport));
            let report = served.scratch.path("report");
            let mut command = child::call("direct_leases", &served.mount.at, "", &report);
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
b = os.open("buffered", os.O_WRONLY | os.O_CREAT)
for i in range(50): assert os.pwrite(b, b"text", i * 4) == 4
print(os.fstat(d).st_size, os.fstat(b).st_size)
# What is only looked up, and listed with its contents, is in nobody'"'"'s way.
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
        assert_eq!(backed(&served.mount), 21);
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
    // What was written is with the host; the kernel may still serve it.
    let _ = file.write_at(&pages.0[..PAGE], 0);
    assert!(file.as_raw_fd() > 0);
    "ok".into()
}

fn errno<T: std::fmt::Debug>(result: std::io::Result<T>) -> i32 {
    result.unwrap_err().raw_os_error().unwrap()
}

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
        let mut holder = Running::start(&mut child::call("direct_holder", &at, &argument, &report));
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
