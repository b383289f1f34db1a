//! The kernel, programs and clients see one file, also when some read and write it directly.

use super::*;

/// One of the users of the file at the same time.
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
        let mut command = own_process::call("direct_worker", at, path.to_str().unwrap(), &report);
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

/// A worker that sets the size of the file sets one below this.
const LARGEST: u64 = 40 * PAGE as u64;

/// Two processes and a client that have one file open, and the file as each of them should see it.
struct Shared {
    workers: [Worker; 3],
    /// The host's file.
    host: PathBuf,
    model: Vec<u8>,
    random: Random,
    seed: u64,
    /// The steps that the workers were told to take, for messages.
    log: Vec<String>,
}

impl Shared {
    fn start(served: &Served, seed: u64) -> Self {
        let workers = ["one", "two", "client"].map(|name| Worker::start(served, name));
        let host = served.source.join("file");
        fs::write(&host, "").unwrap();
        Self {
            workers,
            host,
            model: Vec::new(),
            random: Random(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1),
            seed,
            log: Vec::new(),
        }
    }

    /// Has one worker open the file in one of its slots, or use the slot if it is open. Of four
    /// opens by the processes, `direct_of_four` are direct.
    fn step(&mut self, direct_of_four: u64) {
        let number = self.random.below(3) as usize;
        let slot = self.random.below(SLOTS as u64) as usize;
        let Some(opened) = self.workers[number].slots[slot] else {
            return self.open(number, slot, direct_of_four);
        };
        let is_client = self.workers[number].is_client;
        let Some((words, expected)) = self.draw(slot as u64, opened, is_client) else {
            self.log.push(format!("{number}.{slot} closes"));
            return self.workers[number].close(slot);
        };
        self.log.push(format!("{number}.{slot} {words:?}"));
        let got = self.workers[number].ask(words);
        assert_eq!(
            got,
            expected,
            "seed {}, size {}\n{}",
            self.seed,
            self.model.len(),
            self.log[self.log.len().saturating_sub(40)..].join("\n")
        );
    }

    fn open(&mut self, number: usize, slot: usize, direct_of_four: u64) {
        let (worker, random) = (&mut self.workers[number], &mut self.random);
        let direct = !worker.is_client && random.below(4) < direct_of_four;
        let flags = if direct { libc::O_DIRECT } else { 0 };
        let (create, reads) = (random.below(3) / 2, random.below(2));
        let reads = if worker.is_client { 0 } else { reads };
        let opens = format!("{number}.{slot} opens {flags:#x} {create} {reads}");
        self.log.push(opens);
        worker.ask([OPEN, slot as u64, flags as u64, create, reads]);
        worker.slots[slot] = Some((direct, reads == 1));
    }

    /// Draws an operation on an open slot, and does it to the model. Returns what to ask of the
    /// worker and what it should answer, or `None` if the worker is to close the slot.
    fn draw(
        &mut self,
        slot: u64,
        (direct, only_read): (bool, bool),
        is_client: bool,
    ) -> Option<([u64; 5], u64)> {
        let page = PAGE as u64;
        let random = &mut self.random;
        let (from, len) = match direct {
            true => (random.below(32) * page, (1 + random.below(8)) * page),
            false => (random.below(32 * page), 1 + random.below(8 * page)),
        };
        let byte = random.below(256);
        let what = match random.below(16) {
            8..=11 | 14 if only_read => 3,
            what => what,
        };
        Some(match what {
            0..=2 => return None,
            3..=7 => ([READ, slot, from, len, 0], self.seen(from, len)),
            8..=11 => {
                let end = (from + len) as usize;
                self.model.resize(self.model.len().max(end), 0);
                self.model[from as usize..end].fill(byte as u8);
                ([WRITE, slot, from, len, byte], len)
            }
            12 | 13 if !is_client && !self.model.is_empty() => {
                let size = self.model.len() as u64;
                let from = random.below(size) / page * page;
                let len = page.min(size - from);
                if only_read || random.below(2) == 0 {
                    ([MAP_READ, slot, from, len, 0], self.seen(from, len))
                } else {
                    self.model[from as usize..(from + len) as usize].fill(byte as u8);
                    ([MAP_WRITE, slot, from, len, byte], self.seen(from, len))
                }
            }
            14 => {
                let size = random.below(LARGEST);
                self.model.resize(size as usize, 0);
                ([CUT, slot, size, 0, 0], 0)
            }
            _ => ([SIZE, slot, 0, 0, 0], self.model.len() as u64),
        })
    }

    /// The answer of a worker that reads these bytes.
    fn seen(&self, from: u64, len: u64) -> u64 {
        let size = self.model.len() as u64;
        let end = (from + len).min(size).max(from.min(size));
        sum(&self.model[from.min(end) as usize..end as usize])
    }

    fn all_close(&mut self) {
        self.log.push("all close".into());
        for (worker, slot) in (0..3).flat_map(|w| (0..SLOTS).map(move |s| (w, s))) {
            self.workers[worker].close(slot);
        }
    }

    fn all_end(&mut self) {
        for worker in &mut self.workers {
            (0..SLOTS).for_each(|slot| worker.close(slot));
            worker
                .stream
                .get_ref()
                .shutdown(std::net::Shutdown::Both)
                .unwrap();
            worker.running.wait(SOON).expect("it ends").ok();
        }
    }

    fn compare_with_host(&self) {
        assert!(
            fs::read(&self.host).unwrap() == self.model,
            "seed {}: the host's file",
            self.seed
        );
    }
}

/// Two processes and a client have one file open in all ways, one doing something at a time: each
/// sees what the others did.
fn everybody_sees_one_file(served: &Served, seed: u64, rounds: usize) {
    let mut shared = Shared::start(served, seed);
    for round in 0..rounds {
        // In half of the rounds most opens are direct.
        let direct_of_four = 1 + 2 * (round as u64 % 2);
        for _ in 0..shared.random.below(60) {
            shared.step(direct_of_four);
        }
        if shared.random.below(3) == 0 {
            shared.all_close();
            shared.compare_with_host();
        }
    }
    shared.all_end();
    shared.compare_with_host();
}

/// Each seed on a source in memory and on one on a disk, side by side: they mostly wait.
fn one_file(option: &str) {
    let (seeds, rounds) = if full() { (12, 200) } else { (2, 40) };
    for transport in transports() {
        if !can(transport) {
            continue;
        }
        std::thread::scope(|scope| {
            for (seed, on_disk) in (0..seeds).flat_map(|seed| [(seed, false), (seed, true)]) {
                let serve = Serve::over(transport).option(option);
                if on_disk && !has(&[Need::Program("mkfs.ext4")]) {
                    continue;
                }
                scope.spawn(move || {
                    let served = match on_disk {
                        false => Served::new(&serve),
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
                });
            }
        });
    }
}

/// A reader sees the last finished write where only some opens are direct.
#[test]
fn everybody_sees_one_file_when_some_of_it_is_direct() {
    one_file("");
}

/// A reader sees the last finished write, with `passthrough=direct`.
#[test]
fn everybody_sees_one_file_when_all_that_is_direct_is_the_kernels() {
    one_file("passthrough=direct");
}

/// A reader sees the last finished write, with `passthrough=all`.
#[test]
fn everybody_sees_one_file_when_all_of_it_is_the_kernels() {
    one_file("passthrough");
}

/// A reader sees the last finished write, without backing files.
#[test]
fn everybody_sees_one_file_when_nothing_of_it_is_the_kernels() {
    one_file("nopassthrough");
}
