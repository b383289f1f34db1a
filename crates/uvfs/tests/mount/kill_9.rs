//! Rounds of kill -9: the program, the server or both end in the middle of a mixed load. Data that a call
//! acknowledged is then there to the byte; what was under way is there, or not, or in part.
//!
//! The program notes in a file of the host what it begins and what has ended. Calls on a mount are
//! with the host when they return. Under `uvfs run` they are in the program's cache: the server writes
//! them when the program dies, the program when the server does, and when both die what was synced stays.

use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use rustix::process::Signal;

use crate::harness::*;
use crate::own_process;
use crate::preload::{How, uvfs_run};

/// Rounds of each of the twelve kinds, and with `UVFS_TEST_FULL=1`: a thousand in all.
const ROUNDS: usize = 4;
const FULL_ROUNDS: usize = 84;
/// Files that are written anywhere, and as many that are appended to.
const FILES: usize = 3;
/// Calls that touch each file once.
const FIRST: u64 = 2 * FILES as u64;
const MOST: u64 = 200_000;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Killed {
    Program,
    Server,
    Both,
}

/// Numbers that look random, the same each time.
struct Random(u64);

impl Random {
    fn below(&mut self, n: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut x = self.0;
        x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        (x ^ (x >> 31)) % n
    }
}

/// The bytes that operation number `seq` writes; never zeros.
fn data(seq: u64, len: usize) -> Vec<u8> {
    (0..len as u64)
        .map(|at| 1 + ((seq * 31 + at * 7) % 255) as u8)
        .collect()
}

/// The first name of file number `n`, or the other one, which renaming gives it.
fn file_name(n: usize, other: bool) -> String {
    format!("{}{n}", if other { "other" } else { "file" })
}

/// A call that was begun.
#[derive(Clone, Copy)]
struct Call<'a> {
    seq: u64,
    what: &'a str,
    file: usize,
    at: usize,
    len: usize,
}

impl Call<'_> {
    /// The load's call number `seq`.
    fn random(seq: u64, random: &mut Random) -> Call<'static> {
        let mut file = random.below(FILES as u64) as usize;
        let at = random.below(MOST) as usize;
        let len = 1 + random.below(9000) as usize;
        let mut what = [
            "write", "write", "write", "append", "append", "rename", "sync", "synclog",
        ][random.below(8) as usize];
        if seq < FIRST {
            // Bytes that were not written before the server went stay with the mount that went, too.
            file = seq as usize % FILES;
            what = ["write", "append"][usize::from(seq as usize >= FILES)];
        }
        Call {
            seq,
            what,
            file,
            at,
            len,
        }
    }

    /// The first `done` bytes that the call writes.
    fn bytes(&self, done: usize) -> Vec<u8> {
        let mut bytes = data(self.seq, self.len);
        bytes.truncate(done);
        bytes
    }

    /// All bytes that the call writes. Appends are shorter than writes.
    fn all_bytes(&self) -> Vec<u8> {
        match self.what {
            "append" => self.bytes(400),
            _ => self.bytes(self.len),
        }
    }
}

/// The files of the load, and what it knows about them.
struct Load<'a> {
    dir: &'a Path,
    notes: File,
    files: Vec<File>,
    logs: Vec<File>,
    /// Which files have their other name.
    renamed: [bool; FILES],
    /// Which logs may have the bytes of an append that failed.
    in_doubt: [bool; FILES],
}

impl<'a> Load<'a> {
    fn new(dir: &'a Path, notes: &str) -> Self {
        let mut options = File::options();
        let notes = options.append(true).create(true).open(notes).unwrap();
        let mut options = File::options();
        options.create(true).read(true).write(true);
        let files = (0..FILES).map(|n| options.open(dir.join(file_name(n, false))).unwrap());
        let files = files.collect();
        let mut options = File::options();
        options.create(true).append(true);
        let logs = (0..FILES).map(|n| options.open(dir.join(format!("log{n}"))).unwrap());
        Load {
            dir,
            notes,
            files,
            logs: logs.collect(),
            renamed: [false; FILES],
            in_doubt: [false; FILES],
        }
    }

    fn note(&mut self, text: String) {
        self.notes.write_all(text.as_bytes()).unwrap();
    }

    /// The path that a file has, or would have if it was renamed.
    fn path(&self, n: usize, after_rename: bool) -> PathBuf {
        self.dir.join(file_name(n, self.renamed[n] != after_rename))
    }

    fn attempt(&self, call: Call<'_>, bytes: &[u8]) -> io::Result<usize> {
        let n = call.file;
        match call.what {
            "write" => self.files[n].write_at(bytes, call.at as u64),
            "append" => (&self.logs[n]).write(bytes),
            "rename" => fs::rename(self.path(n, false), self.path(n, true)).map(|()| 0),
            "sync" => self.files[n].sync_data().map(|()| 0),
            _ => self.logs[n].sync_all().map(|()| 0),
        }
    }

    /// Notes that a call was acknowledged; `done` is how many bytes it wrote.
    fn note_end(&mut self, call: Call<'_>, done: usize) {
        self.note(format!("e {} {done}\n", call.seq));
        self.renamed[call.file] ^= call.what == "rename";
    }

    /// Makes a call. While the server is away, a load that `goes_on` makes it again and again.
    /// Gives whether there can be a next call.
    fn make(&mut self, call: Call<'_>, goes_on: bool) -> bool {
        let (what, n, bytes) = (call.what, call.file, call.all_bytes());
        self.note(format!(
            "b {} {what} {n} {} {}\n",
            call.seq, call.at, call.len
        ));
        loop {
            match self.attempt(call, &bytes) {
                Ok(done) => {
                    self.note_end(call, done);
                    return true;
                }
                // The server went, and for a moment there is no mount.
                Err(error) if goes_on => {
                    let gone = error.raw_os_error();
                    let missing = what == "rename" && gone == Some(libc::ENOENT);
                    if missing && self.path(n, true).exists() {
                        self.note_end(call, 0);
                        return true;
                    }
                    if what == "append" {
                        // It may be there; it is not tried again, nor is the file used again.
                        self.in_doubt[n] = true;
                        return true;
                    }
                    let errors = [libc::ENOTCONN, libc::ECONNABORTED, libc::ECANCELED];
                    // The new mount came between the look-ups of a rename's two directories.
                    let between = what == "rename" && gone == Some(libc::EXDEV);
                    let away = between || errors.contains(&gone.unwrap());
                    assert!(away || missing, "{what}: {error}");
                    std::thread::sleep(Duration::from_millis(5));
                }
                Err(_) => return false,
            }
        }
    }
}

/// The load: calls at random until it is killed, fails, or finds the file `stop`. The argument is
/// where the notes go, that file, a seed, and whether it goes on when a server went.
pub fn load(dir: &Path, argument: &str) -> String {
    let [notes, stop, seed, goes_on] = argument.split(' ').collect::<Vec<_>>()[..] else {
        panic!("{argument}");
    };
    let (goes_on, stop) = (goes_on == "true", Path::new(stop));
    let mut random = Random(seed.parse().unwrap());
    let mut load = Load::new(dir, notes);
    load.note("ready\n".into());
    for seq in 0.. {
        if stop.exists() {
            let files = load.files.iter().chain(&load.logs);
            files.for_each(|file| file.sync_all().unwrap());
            return "ok".into();
        }
        let call = Call::random(seq, &mut random);
        if call.what == "append" && load.in_doubt[call.file] {
            continue;
        }
        if !load.make(call, goes_on) {
            return "failed".into();
        }
    }
    unreachable!()
}

/// A file as the model knows it.
#[derive(Default)]
struct Model {
    /// The bytes that are there for sure.
    base: Vec<u8>,
    /// Writes since, that may be there.
    since: Vec<(usize, Vec<u8>)>,
    /// The bytes that are there if all of them are.
    now: Vec<u8>,
}

fn put(file: &mut Vec<u8>, at: usize, bytes: &[u8]) {
    file.resize(file.len().max(at + bytes.len()), 0);
    file[at..at + bytes.len()].copy_from_slice(bytes);
}

impl Model {
    fn write(&mut self, at: usize, bytes: Vec<u8>, acknowledged: bool) {
        if acknowledged {
            put(&mut self.now, at, &bytes);
        }
        self.since.push((at, bytes));
    }

    /// All that was acknowledged is there for sure.
    fn sure(&mut self, under_way: Option<(usize, Vec<u8>)>) {
        self.base = self.now.clone();
        self.since.clear();
        self.since.extend(under_way);
    }

    fn check(&self, name: &str, found: &[u8]) {
        let ends = self.since.iter().map(|(at, bytes)| at + bytes.len());
        let most = ends.max().unwrap_or(0).max(self.base.len());
        let sizes = self.base.len()..=most;
        assert!(
            sizes.contains(&found.len()),
            "{name}: {} of {sizes:?}",
            found.len()
        );
        for (i, byte) in found.iter().enumerate() {
            let kept = self.base.get(i).copied().unwrap_or(0) == *byte;
            let written = || {
                let of = |(at, bytes): &(usize, Vec<u8>)| bytes.get(i.wrapping_sub(*at)).copied();
                self.since.iter().any(|one| of(one) == Some(*byte))
            };
            assert!(
                kept || written(),
                "{name}: the byte {byte} at {i} comes from no write"
            );
        }
    }
}

/// The state of the files by the notes.
struct Noted {
    /// The files, then the logs.
    files: Vec<Model>,
    /// The names that each file may have.
    names: Vec<Vec<String>>,
    /// Bytes that may be there: in which of `files`, from where on, and which.
    in_doubt: Vec<(usize, usize, Vec<u8>)>,
    /// How many calls were acknowledged.
    acknowledged: usize,
}

impl Noted {
    fn read(notes: &str) -> Self {
        let mut noted = Noted {
            files: (0..2 * FILES).map(|_| Model::default()).collect(),
            names: (0..FILES).map(|n| vec![file_name(n, false)]).collect(),
            in_doubt: Vec::new(),
            acknowledged: 0,
        };
        let mut under_way: Option<Call<'_>> = None;
        // Without the last line if it was cut off.
        let whole = notes.rfind('\n').map_or("", |end| &notes[..end]);
        for line in whole.lines() {
            let words: Vec<_> = line.split(' ').collect();
            let number = |at: usize| words[at].parse::<usize>().unwrap();
            match words[0] {
                "b" => {
                    let begun = Call {
                        seq: number(1) as u64,
                        what: words[2],
                        file: number(3),
                        at: number(4),
                        len: number(5),
                    };
                    if let Some(call) = under_way.replace(begun) {
                        noted.unanswered(call);
                    }
                }
                "e" => {
                    let call = under_way.take().expect("it was begun");
                    assert_eq!(call.seq, number(1) as u64);
                    noted.answered(call, number(2));
                }
                _ => assert_eq!(line, "ready"),
            }
        }
        if let Some(call) = under_way {
            noted.unanswered(call);
        }
        noted
    }

    /// Which of `files` the call writes, and from where on.
    fn place(&self, call: Call<'_>) -> (usize, usize) {
        let log = FILES + call.file;
        match call.what {
            "append" => (log, self.files[log].now.len()),
            _ => (call.file, call.at),
        }
    }

    /// Takes in a call that was acknowledged; `done` is how many bytes it wrote.
    fn answered(&mut self, call: Call<'_>, done: usize) {
        self.acknowledged += 1;
        match call.what {
            "write" | "append" => {
                let (file, at) = self.place(call);
                self.files[file].write(at, call.bytes(done), true);
                // Bytes behind a part that was acknowledged were under way when the server went.
                let all = call.all_bytes();
                if done < all.len() {
                    self.in_doubt.push((file, at, all));
                }
            }
            "rename" => {
                let other = self.names[call.file][0].starts_with("file");
                self.names[call.file] = vec![file_name(call.file, other)];
            }
            "sync" => self.files[call.file].sure(None),
            _ => self.files[FILES + call.file].sure(None),
        }
    }

    /// Takes in a call that was begun and not acknowledged. It may have been carried out.
    fn unanswered(&mut self, call: Call<'_>) {
        match call.what {
            "write" | "append" => {
                let (file, at) = self.place(call);
                self.in_doubt.push((file, at, call.all_bytes()));
            }
            "rename" => {
                self.names[call.file] = [false, true].map(|it| file_name(call.file, it)).into()
            }
            _ => {}
        }
    }
}

/// Compares what is in a directory with the notes. `synced`: only what was synced has to be there.
/// Gives how many calls were acknowledged.
fn check(notes: &str, dir: &Path, synced: bool) -> usize {
    let mut noted = Noted::read(notes);
    for (at, model) in noted.files.iter_mut().enumerate() {
        if !synced {
            model.sure(None);
        }
        for (_, start, bytes) in noted.in_doubt.iter().filter(|(file, ..)| *file == at) {
            model.write(*start, bytes.clone(), false);
        }
    }
    for (n, names) in noted.names.iter().enumerate() {
        let there: Vec<_> = names
            .iter()
            .filter(|name| dir.join(name).exists())
            .collect();
        assert_eq!(there.len(), 1, "one of {names:?}");
        noted.files[n].check(there[0], &fs::read(dir.join(there[0])).unwrap());
        let log = format!("log{n}");
        noted.files[FILES + n].check(&log, &fs::read(dir.join(&log)).unwrap());
    }
    noted.acknowledged
}

struct Round {
    served: Served,
    again: Option<Mount>,
}

/// One round; gives how many calls were acknowledged.
fn round(transport: Transport, under_run: bool, killed: Killed, seed: u64) -> usize {
    let serve = match under_run {
        true => Serve::for_clients(transport),
        false => Serve::over(transport),
    };
    let mut round = Round {
        served: Served::new(&serve),
        again: None,
    };
    let served = &mut round.served;
    let (notes, stop) = (served.scratch.path("notes"), served.scratch.path("stop"));
    let report = served.scratch.path("report");
    let goes_on = under_run && killed == Killed::Server;
    let argument = format!("{} {} {seed} {goes_on}", notes.display(), stop.display());
    let plain = own_process::call("kill_9", &served.mount.at, &argument, &report);
    let mut command = match under_run {
        false => plain,
        true => under(plain),
    };
    let mut program = Running::start(&mut command);
    let noted = || fs::read_to_string(&notes).unwrap_or_default();
    wait_for("the load", || {
        noted().matches("\ne ").count() > FIRST as usize
    });
    let mut random = Random(seed);
    std::thread::sleep(Duration::from_millis(5 + random.below(150)));
    let dies = |program: &mut Running| {
        program.signal(Signal::KILL);
    };
    match killed {
        Killed::Program => dies(&mut program),
        Killed::Server => {}
        Killed::Both => {
            served.mount.server.signal(Signal::KILL);
            dies(&mut program);
        }
    }
    if killed != Killed::Program {
        round.again = Some(round.served.comes_back(&serve, || {}));
    }
    if goes_on {
        std::thread::sleep(Duration::from_millis(random.below(100)));
        fs::write(&stop, "").unwrap();
    }
    let outcome = program.wait(SOON).expect("the program ends");
    if goes_on {
        assert!(outcome.status.success(), "{outcome}");
        assert_eq!(fs::read_to_string(&report).unwrap(), "ok");
    }
    // By the mount: what the server still writes for a dead client is waited for.
    let synced = under_run && killed == Killed::Both;
    let copy = round.served.scratch.dir("copy");
    let mount = round.again.as_ref().unwrap_or(&round.served.mount);
    let copies = &mut Command::new("cp");
    mount
        .run(copies.arg("-r").arg(mount.at.join(".")).arg(&copy))
        .ok();
    let compare = |dir: &Path| {
        let compared = std::panic::catch_unwind(|| check(&noted(), dir, synced));
        compared.unwrap_or_else(|panic| {
            let notes = noted();
            let last = notes.lines().rev().take(12).collect::<Vec<_>>();
            eprintln!("the last notes, backwards: {last:#?}");
            std::panic::resume_unwind(panic)
        })
    };
    let acknowledged = compare(&copy);
    // And the host has the same.
    compare(&round.served.source);
    if let Some(again) = round.again.take() {
        again.unmount().ok();
    }
    acknowledged
}

/// A command under `uvfs run`, with its environment.
fn under(command: Command) -> Command {
    let mut run = uvfs_run(How::Eager);
    run.env("UVFS_RUN_RECONNECT", "90").arg("--");
    run.arg(command.get_program()).args(command.get_args());
    for (name, value) in command.get_envs() {
        if let Some(value) = value {
            run.env(name, value);
        }
    }
    run
}

/// Rounds of one kind. Each kind is a test, so that none takes longer than a test may.
fn rounds(transport: Transport, under_run: bool, killed: Killed) {
    if !has(&[Need::Mount(transport), Need::Uvfs]) {
        return;
    }
    let rounds = if full() { FULL_ROUNDS } else { ROUNDS };
    let kind = (transport as u64) << 4 | u64::from(under_run) << 2 | killed as u64;
    let (mut acknowledged, mut random) = (0, Random(kind));
    for number in 0..rounds {
        let seed = random.below(u64::MAX);
        println!("round {number}: {transport:?}, under uvfs run: {under_run}, {killed:?}, {seed}");
        acknowledged += round(transport, under_run, killed, seed);
    }
    println!("{rounds} rounds, {acknowledged} calls acknowledged, none lost");
    assert!(acknowledged > 20 * rounds, "there was a load");
}

macro_rules! nothing_acknowledged_is_lost_by_kill {
    ($($name:ident: $transport:ident, $under_run:literal, $killed:ident;)*) => { $(
        /// No write that was acknowledged is lost.
        #[test]
        fn $name() {
            rounds(Transport::$transport, $under_run, Killed::$killed);
        }
    )* };
}
nothing_acknowledged_is_lost_by_kill! {
    nothing_is_lost_of_a_killed_program_dev: Dev, false, Program;
    nothing_is_lost_of_a_killed_program_uring: Uring, false, Program;
    nothing_is_lost_of_a_killed_program_under_uvfs_run_dev: Dev, true, Program;
    nothing_is_lost_of_a_killed_program_under_uvfs_run_uring: Uring, true, Program;
    nothing_is_lost_of_a_killed_server_dev: Dev, false, Server;
    nothing_is_lost_of_a_killed_server_uring: Uring, false, Server;
    nothing_is_lost_of_a_killed_server_under_uvfs_run_dev: Dev, true, Server;
    nothing_is_lost_of_a_killed_server_under_uvfs_run_uring: Uring, true, Server;
    nothing_is_lost_when_both_are_killed_dev: Dev, false, Both;
    nothing_is_lost_when_both_are_killed_uring: Uring, false, Both;
    nothing_is_lost_when_both_are_killed_under_uvfs_run_dev: Dev, true, Both;
    nothing_is_lost_when_both_are_killed_under_uvfs_run_uring: Uring, true, Both;
}

/// The comparison notices what is lost.
#[test]
fn the_notes_tell_what_is_lost() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| -> PathBuf { dir.path().join(name) };
    let notes = "ready\nb 0 write 0 10 5\ne 0 5\nb 1 append 0 0 3\ne 1 3\nb 2 sync 0 0 1\ne 2 0\n\
                 b 3 write 0 12 5\ne 3 5\nb 4 write 0 12 9\n";
    for n in 0..FILES {
        fs::write(at(&format!("file{n}")), "").unwrap();
        fs::write(at(&format!("log{n}")), "").unwrap();
    }
    fs::write(at("log0"), data(1, 3)).unwrap();
    let mut file = vec![0; 10];
    file.extend(data(0, 5));
    let fails = |synced| std::panic::catch_unwind(|| check(notes, dir.path(), synced)).is_err();
    fs::write(at("file0"), &file).unwrap();
    assert!(fails(false), "the acknowledged write is missing");
    assert!(!fails(true), "it was not synced");
    put(&mut file, 12, &data(3, 5));
    fs::write(at("file0"), &file).unwrap();
    assert!(!fails(false) && !fails(true));
    put(&mut file, 12, &data(4, 2));
    fs::write(at("file0"), &file).unwrap();
    assert!(!fails(false), "what was under way may be there in part");
    file[11] ^= 1;
    fs::write(at("file0"), &file).unwrap();
    assert!(fails(false) && fails(true), "what was synced has changed");
    file[11] ^= 1;
    fs::write(at("file0"), &file[..11]).unwrap();
    assert!(fails(true), "what was synced is cut off");
    fs::write(at("file0"), &file).unwrap();
    fs::write(at("log0"), data(1, 2)).unwrap();
    assert!(fails(false), "a part of what was appended is missing");
}
