//! Clients of stores that programs write to: programs under `uvfs run`, and `uvfs-client`.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::{self, Read};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use rustix::fs::RenameFlags;
use rustix::process::Signal;
use serde_json::Value;
use uvfs_client::{Client, File as ClientFile, Flags, OpenOptions};

use super::InMemory;
use super::clients::{Program, can, python};
use crate::clients::client_of;
use crate::harness::*;
use crate::observe::stats;
use crate::own_process;
use crate::preload::{DATABASES, EVERYDAY, How, agree_on, fsx_on, same_on, served_any, under};
use crate::stores::At;

/// How stores are written. A file with a backing file is left to the kernel by clients.
const WAYS: [&str; 2] = ["write=close", "write=back,nofsync,passthrough=off"];

/// A directory of the host as a store that is written, and its mount.
pub(super) struct Directory {
    pub(super) mount: Mount,
    pub(super) objects: PathBuf,
    scratch: Scratch,
}

impl Directory {
    pub(super) fn new(way: &str) -> Self {
        let scratch = Scratch::new();
        let objects = scratch.dir("objects");
        let cache = format!("cache_dir={}", scratch.path("cache").display());
        let serve = Serve::over(Transport::Dev).option(&cache).option(way);
        let uri = format!("fs://{}", objects.display());
        let mount = Mount::new(&serve, Path::new(&uri), &scratch.dir("mount"));
        Self {
            mount,
            objects,
            scratch,
        }
    }

    /// Runs a function of [`own_process`] on the mount.
    #[track_caller]
    fn call(&self, function: &str, argument: &str) {
        let report = self.scratch.path("report");
        let mut command = own_process::call(function, &self.mount.at, argument, &report);
        self.mount.run_within(LATER, &mut command).ok();
        assert_eq!(fs::read_to_string(report).unwrap(), "ok");
    }
}

/// cp, tar and sort leave the same objects under `uvfs run` as they leave files on the host.
#[test]
fn everyday_programs() {
    if !can() || !has(&[Need::Program("tar")]) {
        return;
    }
    let store = Directory::new("write=close");
    let outcome = same_on(How::Eager, &store.mount, &store.objects, EVERYDAY);
    assert!(served_any(&outcome), "{outcome}");
    store.mount.unmount().ok();
}

/// sqlite and git leave sound files. (They leave no file, so the store has none either.)
#[test]
fn databases_and_repositories() {
    if !can() || !has(&["sqlite3", "git"].map(Need::Program)) {
        return;
    }
    for way in WAYS {
        let store = Directory::new(way);
        let outcome = same_on(How::Eager, &store.mount, &store.mount.at, DATABASES);
        assert!(served_any(&outcome), "{outcome}");
        store.mount.unmount().ok();
    }
}

/// A random mix of calls reads back what was written under `uvfs run`.
#[test]
fn fsx_reads_back() {
    if !can() || !has(&[Need::Tool("fsx")]) {
        return;
    }
    for way in WAYS {
        let store = InMemory::new(&[way], |_| {});
        fsx_on(&store.mount);
        store.mount.unmount().ok();
    }
}

/// A program under `uvfs run` and one without it agree on a file.
#[test]
fn two_programs_agree() {
    if !can() {
        return;
    }
    for way in WAYS {
        let store = InMemory::new(&[way], |_| {});
        agree_on(&store.mount);
        store.mount.unmount().ok();
    }
}

/// A program on the mount and a client see each other's writes, also when the file has lost its name.
#[test]
fn a_client_and_the_kernel_see_one_file() {
    if !can() {
        return;
    }
    for way in WAYS {
        let store = Directory::new(way);
        store.call("one_file", "");
        store.mount.unmount().ok();
    }
}

/// close(2) of a program under `uvfs run`, and of a client, stores what it wrote, and says so if another writer was faster.
#[test]
fn a_close_stores_the_file() {
    if !can() {
        return;
    }
    let store = InMemory::new(&["write=close"], |fake| {
        fake.put("file", b"at first");
        fake.put("overtaken", b"at first");
    });
    let contents = |key: &str| store.fake.bucket().objects[key].contents.clone();
    let sign = store.scratch.path("sign");
    let program = r#"
import os, sys, time
dir, sign = sys.argv[1:]
fd = os.open(dir + "/file", os.O_RDWR)
os.pwrite(fd, b"changed", 3)
os.close(fd)
fd = os.open(dir + "/new", os.O_WRONLY | os.O_CREAT | os.O_EXCL)
for n in range(300): os.write(fd, b"%08d" % n * 100)
os.close(fd)
fd = os.open(dir + "/overtaken", os.O_WRONLY | os.O_APPEND)
os.write(fd, b" and then")
open(sign, "w").close()
while os.path.exists(sign): time.sleep(0.01)
try: os.close(fd)
except OSError as error: print(os.strerror(error.errno))
"#;
    let mut command = python(true, program, &[&store.mount.at, &sign]);
    let mut running = Running::start(command.env("LC_ALL", "C"));
    wait_for("the program's first part", || sign.exists());
    // The program still runs.
    assert_eq!(contents("p/file"), b"at changed");
    let new: Vec<u8> = (0..300)
        .flat_map(|n| format!("{n:08}").repeat(100).into_bytes())
        .collect();
    assert!(contents("p/new") == new);
    store.fake.put("overtaken", b"by another writer");
    fs::remove_file(&sign).unwrap();
    let outcome = running.wait(SOON).expect("it ends");
    assert!(served_any(&outcome), "{outcome}");
    assert_eq!(outcome.ok(), "Stale file handle\n");
    assert_eq!(contents("p/overtaken"), b"by another writer");
    let report = store.scratch.path("report");
    let mut client = own_process::call("store_closes", &store.mount.at, "", &report);
    store.mount.run(&mut client).ok();
    assert_eq!(fs::read_to_string(report).unwrap(), "ok");
    assert_eq!(contents("p/made"), b"made");
    assert_eq!(contents("p/empty"), b"");
    store.mount.unmount().ok();
}

/// Files that a client makes and closes.
pub fn closes(dir: &Path, _: &str) -> String {
    let client = client_of(dir);
    let file = client.create("made").unwrap();
    file.write_at(b"made", 0, Flags::empty()).unwrap();
    file.close().unwrap();
    client.create("empty").unwrap().close().unwrap();
    "ok".into()
}

/// A client that is killed gives its files back, with all that it wrote.
#[test]
fn a_client_is_killed() {
    if !can() {
        return;
    }
    let work = r#"
fd = os.open(path, os.O_RDWR | os.O_CREAT)
for n in range(5000): os.write(fd, b"%08d" % n)
meanwhile()
"#;
    for way in WAYS {
        let store = InMemory::new(&[way], |_| {});
        let mut program = Program::start(&store, true, work);
        program.running.kill();
        wait_for("the client's end", || {
            stats(&store.mount.at)["clients"] == Value::Array(Vec::new())
        });
        let all: String = (0..5000).map(|n| format!("{n:08}")).collect();
        let mut cat = command("cat", [&store.at("file")]);
        assert!(store.mount.run(&mut cat).ok() == all, "{way}");
        let mut rename = command("mv", [&store.at("file"), &store.at("other")]);
        store.mount.run(&mut rename).ok();
        store.mount.unmount().ok();
        let bucket = store.fake.bucket();
        let keys: Vec<_> = bucket.objects.keys().map(String::as_str).collect();
        assert_eq!(keys, ["p/other"], "{way}");
        assert!(
            bucket.objects["p/other"].contents == all.as_bytes(),
            "{way}"
        );
    }
}

/// Of a server that is killed what was closed stays. A program goes on with the file that it was writing, and with others.
#[test]
fn a_server_is_killed_under_a_client() {
    if !can() {
        return;
    }
    let work = r#"
def told(call):
    try: return call()
    except OSError as error: return os.strerror(error.errno)
def whole(name):
    fd = os.open(name, os.O_RDONLY)
    try: return os.pread(fd, 1 << 20, 0)
    finally: os.close(fd)
fd = os.open(path, os.O_RDWR | os.O_CREAT)
for n in range(5000): os.write(fd, b"%08d" % n)
os.close(fd)
read = os.open(path, os.O_RDONLY)
os.pread(read, 10, 0)
fd = os.open(path + "2", os.O_RDWR | os.O_CREAT)
os.write(fd, b"half")
meanwhile()
print(os.pwrite(fd, b"more", 4), os.fsync(fd), told(lambda: os.close(fd)), whole(path + "2"))
print(len(whole(path)), told(lambda: os.pread(read, 10, 8)))
fd = os.open(path + "3", os.O_RDWR | os.O_CREAT)
print(os.write(fd, b"next"), os.fsync(fd), os.close(fd), whole(path + "3"))
"#;
    for way in WAYS {
        let mut store = InMemory::new(&[way], |_| {});
        let program = Program::start(&store, true, work);
        let mount = &mut store.mount;
        mount.expect_gone();
        mount.server.signal(Signal::KILL);
        mount.server.wait(SOON).expect("it is killed");
        unmount_by_force(&mount.at);
        let uri = InMemory::uri(&store.fake, &store.proxy);
        let again = Mount::new(&store.serve, Path::new(&uri), &store.mount.at);
        program.goes_on();
        let outcome = program.ends();
        assert!(served_any(&outcome), "{outcome}");
        let told = outcome.ok();
        let lines: Vec<_> = told.lines().collect();
        // By the kernel, whose mount has ended: it has nothing to write.
        let gone = "Transport endpoint is not connected";
        assert_eq!(
            lines[0],
            format!("4 None {gone} b'halfmore'"),
            "{way}: {told}"
        );
        assert!(lines[1].starts_with("40000 "), "{way}: {told}");
        assert_eq!(lines[2], "4 None None b'next'", "{way}: {told}");
        again.unmount().ok();
        let bucket = store.fake.bucket();
        let contents = |key: &str| bucket.objects.get(key).map(|object| &object.contents[..]);
        assert_eq!(contents("p/file").map(<[u8]>::len), Some(40_000), "{way}");
        assert_eq!(contents("p/file2"), Some(&b"halfmore"[..]), "{way}");
        assert_eq!(contents("p/file3"), Some(&b"next"[..]), "{way}");
        let keys: Vec<_> = bucket.objects.keys().collect();
        assert_eq!(keys, ["p/file", "p/file2", "p/file3"], "{way}");
    }
}

/// An open file of the mount, by the kernel or by a client.
enum Held {
    Kernel(File),
    Client(ClientFile),
}

impl Held {
    fn read(&self, at: u64, len: usize) -> io::Result<Vec<u8>> {
        let mut bytes = vec![0; len];
        let done = match self {
            Self::Kernel(file) => file.read_at(&mut bytes, at)?,
            Self::Client(file) => file.read_at(&mut bytes, at, Flags::empty())?,
        };
        bytes.truncate(done);
        Ok(bytes)
    }

    fn write(&self, at: u64, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Self::Kernel(file) => file.write_at(bytes, at),
            Self::Client(file) => Ok(file.write_at(bytes, at, Flags::empty())?),
        }
    }

    fn append(&self, bytes: &[u8]) -> io::Result<()> {
        match self {
            Self::Kernel(file) => io::Write::write_all(&mut &*file, bytes),
            Self::Client(file) => Ok(file.append(bytes, Flags::empty()).map(drop)?),
        }
    }

    fn cut(&self, len: u64) -> io::Result<()> {
        match self {
            Self::Kernel(file) => file.set_len(len),
            Self::Client(file) => Ok(file.set_len(len)?),
        }
    }

    fn sync(&self) -> io::Result<()> {
        match self {
            Self::Kernel(file) => file.sync_all(),
            Self::Client(file) => Ok(file.sync_all()?),
        }
    }

    fn close(self) -> io::Result<()> {
        match self {
            Self::Kernel(_) => Ok(()),
            Self::Client(file) => Ok(file.close()?),
        }
    }
}

/// How a file is opened.
#[derive(Clone, Copy, Debug, Default)]
struct Opening {
    write: bool,
    append: bool,
    truncate: bool,
    create: bool,
    new: bool,
}

/// A directory as programs see it, by the kernel's calls and perhaps by a client's.
struct Place<'a> {
    dir: &'a Path,
    client: Option<&'a Client>,
}

impl Place<'_> {
    fn open(&self, name: &str, how: Opening) -> io::Result<Held> {
        if let Some(client) = self.client {
            let options = OpenOptions::new()
                .read(true)
                .write(how.write && !how.append);
            let options = options.append(how.append).truncate(how.truncate);
            let options = options.create(how.create).create_new(how.new);
            return Ok(Held::Client(client.open(name, options)?));
        }
        let mut options = File::options();
        options.read(true).write(how.write && !how.append);
        options.append(how.append).truncate(how.truncate);
        options.create(how.create).create_new(how.new);
        Ok(Held::Kernel(options.open(self.dir.join(name))?))
    }

    fn read(&self, name: &str) -> io::Result<Vec<u8>> {
        match (self.client, self.open(name, Opening::default())?) {
            // The kernel opens a directory, but reads none.
            (_, Held::Kernel(mut file)) => {
                let mut all = Vec::new();
                file.read_to_end(&mut all).map(|_| all)
            }
            (_, file) => file.read(0, 1 << 20),
        }
    }

    fn look(&self, name: &str) -> io::Result<(bool, u64)> {
        Ok(match self.client {
            Some(client) => {
                let attr = client.stat(name)?;
                let is_dir = attr.mode & libc::S_IFMT == libc::S_IFDIR;
                (is_dir, if is_dir { 0 } else { attr.size })
            }
            None => {
                let meta = fs::symlink_metadata(self.dir.join(name))?;
                (meta.is_dir(), if meta.is_dir() { 0 } else { meta.len() })
            }
        })
    }

    fn list(&self, name: &str) -> io::Result<BTreeSet<String>> {
        Ok(match self.client {
            Some(client) => {
                let all = client.readdir(name)?.into_iter();
                all.map(|entry| entry.name.into_string().unwrap()).collect()
            }
            None => {
                let all = fs::read_dir(self.dir.join(name))?;
                all.map(|entry| entry.unwrap().file_name().into_string().unwrap())
                    .collect()
            }
        })
    }

    fn unlink(&self, name: &str) -> io::Result<()> {
        match self.client {
            Some(client) => Ok(client.unlink(name)?),
            None => fs::remove_file(self.dir.join(name)),
        }
    }

    fn rmdir(&self, name: &str) -> io::Result<()> {
        match self.client {
            Some(client) => Ok(client.rmdir(name)?),
            None => fs::remove_dir(self.dir.join(name)),
        }
    }

    fn mkdir(&self, name: &str) -> io::Result<()> {
        match self.client {
            Some(client) => Ok(client.mkdir(name, 0o755)?),
            None => fs::create_dir(self.dir.join(name)),
        }
    }

    fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        match self.client {
            Some(client) => Ok(client.rename(from, to, RenameFlags::empty())?),
            None => {
                let (from, to) = (self.dir.join(from), self.dir.join(to));
                // A rename(2) between directories can't be the first to find a directory that a client has moved (Linux
                // 6.18): `__d_unalias` then gives up with ESTALE.
                for path in [&from, &to] {
                    let _ = fs::symlink_metadata(path);
                }
                fs::rename(from, to)
            }
        }
    }
}

/// What a call answered, to compare: an error is its number.
fn told<T>(result: io::Result<T>) -> Result<T, Option<i32>> {
    let number = |error: &uvfs_client::Error| error.errno().raw_os_error();
    result.map_err(|error| {
        let by_client = error.get_ref().and_then(|error| error.downcast_ref());
        error.raw_os_error().or(by_client.map(number))
    })
}

/// The last calls.
fn tail(calls: &[String]) -> String {
    calls[calls.len().saturating_sub(15)..].join("\n")
}

/// Calls by the kernel and by two clients, at random, each compared with the same call on a directory of the host.
pub fn random_calls(dir: &Path, argument: &str) -> String {
    let (seed, host) = argument.split_once(' ').unwrap();
    let (clients, host) = ([client_of(dir), client_of(dir)], Path::new(host));
    let mut random = Random(seed.parse().unwrap());
    let mut held: Vec<(Held, Held, Opening, String)> = Vec::new();
    let mut last = Vec::new();
    let plain = Place {
        dir: host,
        client: None,
    };
    for name in ["d0", "d1"] {
        fs::create_dir(dir.join(name)).unwrap();
        plain.mkdir(name).unwrap();
    }
    for step in 0..1500_u32 {
        let mut below = |n: u64| random.below(n);
        let mut name = || {
            let directory = ["", "d0/", "d1/"][below(3) as usize];
            format!("{directory}n{}", below(4))
        };
        let (one, two) = (name(), name());
        let by = below(4) as usize;
        let place = Place {
            dir,
            client: clients.get(by),
        };
        let who = ["client 0", "client 1", "kernel", "kernel"][by];
        let (at, len) = (below(100_000), 1 + below(50_000) as usize);
        let bytes = vec![1 + (step % 255) as u8; len];
        let what = below(14);
        last.push(format!(
            "{step}: {who} does {what} of {one} {two} at {at}, {len} bytes"
        ));
        macro_rules! same {
            ($one:expr, $two:expr) => {
                let (seen, expected) = (told($one), told($two));
                if seen != expected {
                    let short = |all: String| all.chars().take(200).collect::<String>();
                    let (seen, expected) = (format!("{seen:?}"), format!("{expected:?}"));
                    panic!(
                        "{}, not {}, after\n{}",
                        short(seen),
                        short(expected),
                        tail(&last)
                    );
                }
            };
        }
        match what {
            0..=2 => {
                let how = Opening {
                    write: true,
                    append: below(4) == 0,
                    truncate: false,
                    create: true,
                    new: what == 0,
                };
                let how = Opening {
                    truncate: !how.append && !how.new && below(3) == 0,
                    ..how
                };
                match (place.open(&one, how), plain.open(&one, how)) {
                    (Ok(file), Ok(expected)) => {
                        let done = match how.append {
                            true => [file.append(&bytes), expected.append(&bytes)].map(told),
                            false => [&file, &expected]
                                .map(|file| told(file.write(at, &bytes).map(drop))),
                        };
                        assert_eq!(done, [Ok(()), Ok(())], "{}", tail(&last));
                        if below(2) == 0 && held.len() < 5 {
                            held.push((file, expected, how, format!("{who} {one}")));
                        } else {
                            same!(file.close(), expected.close());
                        }
                    }
                    (seen, expected) => {
                        same!(seen.map(drop), expected.map(drop));
                    }
                }
            }
            3 => {
                same!(place.read(&one), plain.read(&one));
            }
            4 => {
                same!(place.look(&one), plain.look(&one));
            }
            5 => {
                same!(place.unlink(&one), plain.unlink(&one));
            }
            6 | 7 if one != two => {
                same!(place.rename(&one, &two), plain.rename(&one, &two));
            }
            8 => {
                same!(place.mkdir(&one), plain.mkdir(&one));
            }
            9 => {
                same!(place.rmdir(&one), plain.rmdir(&one));
            }
            10 => {
                let name = ["d0", "d1"][below(2) as usize];
                same!(place.list(name), plain.list(name));
            }
            _ if held.is_empty() => {}
            _ => {
                let index = below(held.len() as u64) as usize;
                let (file, expected, how, name) = &held[index];
                let what = below(6);
                last.push(format!(
                    "{step}: {what} of the open {name} at {at}, {len} bytes"
                ));
                match what {
                    0 | 1 => {
                        same!(file.read(at, len), expected.read(at, len));
                    }
                    2 => {
                        same!(file.cut(at), expected.cut(at));
                    }
                    3 => {
                        same!(file.sync(), expected.sync());
                    }
                    4 if how.append => {
                        same!(file.append(&bytes), expected.append(&bytes));
                    }
                    4 => {
                        same!(file.write(at, &bytes), expected.write(at, &bytes));
                    }
                    _ => {
                        let (file, expected, ..) = held.swap_remove(index);
                        same!(file.close(), expected.close());
                    }
                }
            }
        }
    }
    for (file, ..) in held {
        file.close().unwrap();
    }
    "ok".into()
}

/// Clients and the kernel have the files and names of a directory of the host, after any calls by all of them.
#[test]
fn random_calls_of_clients_and_the_kernel() {
    if !can() {
        return;
    }
    // UVFS_TEST_SEED repeats one.
    let seed = std::env::var("UVFS_TEST_SEED").ok();
    let seeds = match seed.and_then(|seed| seed.parse().ok()) {
        Some(seed) => seed..seed + 1,
        None => 0..if full() { 20 } else { 2_u32 },
    };
    for (way, seed) in WAYS
        .into_iter()
        .flat_map(|way| seeds.clone().map(move |seed| (way, seed)))
    {
        println!("{way}, {seed}");
        let store = Directory::new(way);
        let host = store.scratch.dir("host");
        store.call("store_random_calls", &format!("{seed} {}", host.display()));
        store.mount.unmount().ok();
        run(Command::new("diff").arg("-r").args([&store.objects, &host])).ok();
    }
}

/// Two clients, and the kernel, that make one name: one of them makes it, and the others open it or hear that it is there.
pub fn one_name(dir: &Path, _: &str) -> String {
    let clients = [client_of(dir), client_of(dir)];
    for round in 0..100 {
        let (name, directory) = (format!("file{round}"), format!("dir{round}"));
        let made: usize = std::thread::scope(|scope| {
            let by_client = |client: &Client| {
                let made = client.create(&name).map(drop).is_ok();
                let too = OpenOptions::new().write(true).create(true).append(true);
                let file = client.open(&name, too).unwrap();
                file.append(b"line\n", Flags::empty()).unwrap();
                file.close().unwrap();
                usize::from(made) + usize::from(client.mkdir(&directory, 0o755).is_ok())
            };
            let by_kernel = || {
                let made = File::create_new(dir.join(&name)).is_ok();
                let mut file = File::options();
                let mut file = file
                    .append(true)
                    .create(true)
                    .open(dir.join(&name))
                    .unwrap();
                io::Write::write_all(&mut file, b"line\n").unwrap();
                drop(file);
                usize::from(made) + usize::from(fs::create_dir(dir.join(&directory)).is_ok())
            };
            let mut all: Vec<_> = clients
                .iter()
                .map(|client| scope.spawn(move || by_client(client)))
                .collect();
            all.push(scope.spawn(by_kernel));
            all.into_iter().map(|one| one.join().unwrap()).sum()
        });
        assert_eq!(made, 2, "{round}");
        let lines = fs::read_to_string(dir.join(&name)).unwrap();
        assert_eq!(lines, "line\n".repeat(3), "{round}");
    }
    "ok".into()
}

#[test]
fn a_name_is_made_once() {
    if !can() {
        return;
    }
    for way in WAYS {
        let store = Directory::new(way);
        store.call("store_one_name", "");
        store.mount.unmount().ok();
        let names = fs::read_dir(&store.objects).unwrap().count();
        assert_eq!(names, 200, "{way}");
    }
}

/// A program under `uvfs run` that maps a file it writes goes on through the kernel, with what it wrote.
#[test]
fn a_mapped_file_goes_on_through_the_kernel() {
    if !can() {
        return;
    }
    let store = InMemory::new(&["write=close"], |_| {});
    let script = r#"exec python3 -c '
import mmap, os, sys
fd = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
for n in range(4096): os.write(fd, b"%08d" % n)
memory = mmap.mmap(fd, 32768)
print(memory[800:808], os.pread(fd, 8, 1600))
memory[0:8] = b"by store"
memory.flush()
print(os.pread(fd, 8, 0))
os.pwrite(fd, b"by write", 16)
print(memory[16:24])
os.close(fd)
' "$1""#;
    let outcome = store
        .mount
        .run(&mut under(How::Eager, script, &[&store.at("file")]));
    assert!(served_any(&outcome), "{outcome}");
    let expected = "b'00000100' b'00000200'\nb'by store'\nb'by write'\n";
    assert_eq!(outcome.ok(), expected);
    store.mount.unmount().ok();
    let object = store.fake.bucket().objects["p/file"].contents.clone();
    assert_eq!(&object[..24], b"by store00000001by write");
    assert_eq!(object.len(), 32_768);
}
