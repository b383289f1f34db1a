//! The server, the program, or both are killed at any moment: nothing that the program was told is done is lost, and nothing
//! is half.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Stdio};
use std::time::Duration;

use super::*;
use crate::preload::{How, uvfs_run};
use crate::stores::Seaweed;

/// Makes the calls that it reads, and says what came of each: nothing, or its errno.
const PROGRAM: &str = r#"
import os, sys
os.chdir(sys.argv[1])
def write(name, byte, size):
    fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    data = bytes([int(byte)]) * int(size)
    for at in range(0, len(data), 50000):
        os.write(fd, data[at:at + 50000])
    os.close(fd)
calls = {"write": write, "rename": os.rename, "unlink": os.unlink, "mkdir": os.mkdir, "rmdir": os.rmdir}
print("ready", flush=True)
for line in sys.stdin:
    name, *args = line.split()
    try:
        calls[name](*args)
        print(0, flush=True)
    except OSError as error:
        print(error.errno, flush=True)
"#;

/// A file, a directory or nothing that a name may lead to.
#[derive(Clone, Debug, PartialEq, Eq)]
enum May {
    Nothing,
    Directory,
    /// So many of these bytes.
    File(u8, usize),
    /// A program was killed while it wrote a file: any number of these bytes, up to so many.
    Begun(u8, usize),
}

impl May {
    fn allows(&self, has: &Self) -> bool {
        match (self, has) {
            (Self::Begun(_, _), Self::File(_, 0)) => true,
            (Self::Begun(byte, most), Self::File(other, len)) => byte == other && len <= most,
            _ => self == has,
        }
    }
}

/// A name, and what is there before and after a call. A name comes once in a call.
type Change = (String, May, May);

/// A tree as programs were told that it is.
struct Model {
    random: Random,
    /// By their paths. More than one where a call did not return.
    names: BTreeMap<String, Vec<May>>,
    /// Of the call that did not return, if it moves files: from where and to where, each of which may be what it is.
    moving: Vec<(String, String, May)>,
}

impl Model {
    fn below(&mut self, limit: u64) -> u64 {
        self.random.next() % limit
    }

    /// All is known of it while no call is under way.
    fn is(&self, name: &str) -> May {
        match self.names.get(name).map(Vec::as_slice) {
            None => May::Nothing,
            Some([one]) => one.clone(),
            Some(more) => panic!("{name} may be {more:?}"),
        }
    }

    fn set(&mut self, name: &str, may: Vec<May>) {
        match may[..] {
            [May::Nothing] => drop(self.names.remove(name)),
            _ => drop(self.names.insert(name.to_owned(), may)),
        }
    }

    fn directory(&mut self) -> String {
        format!("d{}", self.below(3))
    }

    /// A name in a directory that is there.
    fn name(&mut self) -> String {
        let (directory, name) = (self.directory(), self.below(6));
        match self.is(&directory) {
            May::Directory => format!("{directory}/{name}"),
            _ => format!("{name}"),
        }
    }

    fn inside(&self, directory: &str) -> Vec<(String, May)> {
        let inside = format!("{directory}/");
        let names = self.names.range(inside.clone()..);
        let names = names.take_while(|(name, _)| name.starts_with(&inside));
        names
            .map(|(name, _)| (name.clone(), self.is(name)))
            .collect()
    }

    /// The next call, and what it changes.
    fn next(&mut self) -> Option<(String, Vec<Change>)> {
        let change = |model: &Self, name: &str, to: May| (name.to_owned(), model.is(name), to);
        let call = self.below(16);
        Some(match call {
            0 => {
                let directory = self.directory();
                let call = match (self.is(&directory), self.inside(&directory).len()) {
                    (May::Nothing, _) => ("mkdir", May::Directory),
                    (_, 0) => ("rmdir", May::Nothing),
                    _ => return None,
                };
                let changes = vec![change(self, &directory, call.1)];
                (format!("{} {directory}", call.0), changes)
            }
            1 => {
                let (from, to) = (self.directory(), self.directory());
                if self.is(&from) != May::Directory || self.is(&to) != May::Nothing {
                    return None;
                }
                let mut changes = vec![
                    change(self, &from, May::Nothing),
                    change(self, &to, May::Directory),
                ];
                for (name, is) in self.inside(&from) {
                    changes.push(change(self, &name, May::Nothing));
                    let moved = name.replacen(&from, &to, 1);
                    changes.push((moved, May::Nothing, is));
                }
                (format!("rename {from} {to}"), changes)
            }
            2..5 => {
                let name = self.name();
                if self.is(&name) == May::Nothing {
                    return None;
                }
                let changes = vec![change(self, &name, May::Nothing)];
                (format!("unlink {name}"), changes)
            }
            5..8 => {
                let (from, to) = (self.name(), self.name());
                let is = self.is(&from);
                if is == May::Nothing || from == to {
                    return None;
                }
                let changes = vec![change(self, &from, May::Nothing), change(self, &to, is)];
                (format!("rename {from} {to}"), changes)
            }
            _ => {
                let name = self.name();
                // Lengths tell two files of the same byte apart.
                let (byte, len) = (self.below(250) as u8, self.below(200_000) as usize);
                let changes = vec![change(self, &name, May::File(byte, len))];
                (format!("write {name} {byte} {len}"), changes)
            }
        })
    }

    /// Has a program make one call after another until one does not return. Says how many did.
    fn run(&mut self, program: &mut Program, server_is_killed: bool) -> usize {
        for calls in 0.. {
            let Some((call, changes)) = self.next() else {
                continue;
            };
            self.moving.clear();
            if call.starts_with("rename") {
                let from = changes.iter().filter(|(_, _, to)| *to == May::Nothing);
                let to = changes.iter().filter(|(_, _, to)| *to != May::Nothing);
                let pairs = from.zip(to);
                self.moving = pairs
                    .map(|((from, is, _), (to, _, _))| (from.clone(), to.clone(), is.clone()))
                    .collect();
            }
            for (name, before, after) in &changes {
                let mut may = vec![before.clone(), after.clone()];
                if let (May::File(byte, len), true) = (after, call.starts_with("write")) {
                    may.push(May::Begun(*byte, *len));
                }
                self.names.insert(name.clone(), may);
            }
            match program.call(&call) {
                Some(0) => {}
                None => return calls,
                Some(libc::ENOTCONN | libc::ECONNABORTED | libc::EIO) if server_is_killed => {
                    return calls;
                }
                Some(code) => panic!("{call}: errno {code}"),
            }
            self.moving.clear();
            for (name, _, after) in changes {
                self.set(&name, vec![after]);
            }
        }
        unreachable!("it ends with the program")
    }

    /// Whether what moves is where it was or where it goes to.
    fn keeps(&self, has: &BTreeMap<String, May>) -> bool {
        let mut moving = self.moving.iter();
        moving.all(|(from, to, what)| [from, to].iter().any(|name| has.get(*name) == Some(what)))
    }

    /// Compares a tree with what it may be, and gives what it is.
    fn check(&self, at: &Path, where_: &str, program_was_killed: bool) -> BTreeMap<String, May> {
        let has = tree(at);
        let is = |name: &str| has.get(name).cloned().unwrap_or(May::Nothing);
        let all: BTreeSet<_> = self.names.keys().chain(has.keys()).collect();
        for name in all {
            // A file that a program was writing, and which the killed server did not bring to its name.
            if name.contains(".interrupted-") {
                continue;
            }
            let nothing = vec![May::Nothing];
            let may = self.names.get(name).unwrap_or(&nothing);
            let mut may = may.iter();
            let fits = |may: &May| match may {
                May::Begun(..) => program_was_killed && may.allows(&is(name)),
                _ => may.allows(&is(name)),
            };
            let told = self.names.get(name);
            assert!(
                may.any(fits),
                "{where_}: {name} is {:?} instead of {told:?}",
                is(name)
            );
        }
        let moving = &self.moving;
        assert!(
            self.keeps(&has),
            "{where_}: not all of {moving:?} in {has:?}"
        );
        has
    }
}

/// All names below a directory. A file that is not made of one byte is a failure.
fn tree(at: &Path) -> BTreeMap<String, May> {
    let mut all = BTreeMap::new();
    let mut directories = vec![PathBuf::new()];
    while let Some(directory) = directories.pop() {
        for entry in fs::read_dir(at.join(&directory)).unwrap() {
            let entry = entry.unwrap();
            let name = directory.join(entry.file_name());
            let is = match entry.file_type().unwrap().is_dir() {
                true => {
                    directories.push(name.clone());
                    May::Directory
                }
                false => {
                    let content = read(&entry.path());
                    let byte = content.first().copied().unwrap_or_default();
                    let is_whole = content.iter().all(|one| *one == byte);
                    assert!(is_whole, "{name:?} is made of two files");
                    May::File(byte, content.len())
                }
            };
            all.insert(name.into_os_string().into_string().unwrap(), is);
        }
    }
    all
}

/// A request of the killed server may reach the store only now: the version that was opened is gone then.
fn read(path: &Path) -> Vec<u8> {
    loop {
        match fs::read(path) {
            Err(error) if error.raw_os_error() == Some(libc::ESTALE) => {}
            content => return content.unwrap(),
        }
    }
}

/// A process that makes calls.
struct Program {
    process: Child,
    calls: ChildStdin,
    answers: BufReader<ChildStdout>,
}

impl Program {
    fn start(at: &Path, by: By) -> Self {
        let mut command = Command::new("setpriv");
        command.args(["--pdeathsig", "KILL"]);
        if by == By::Client {
            let serves = uvfs_run(How::Eager);
            let envs = serves.get_envs();
            command.envs(envs.filter_map(|(name, value)| Some((name, value?))));
            command.arg(serves.get_program()).args(serves.get_args());
            command.arg("--");
        }
        command.args(["python3", "-c", PROGRAM]).arg(at);
        let process = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn();
        let mut process = process.unwrap();
        let calls = process.stdin.take().unwrap();
        let mut answers = BufReader::new(process.stdout.take().unwrap());
        answers.read_line(&mut String::new()).unwrap();
        Self {
            process,
            calls,
            answers,
        }
    }

    /// `None` from a program that is gone.
    fn call(&mut self, call: &str) -> Option<i32> {
        writeln!(self.calls, "{call}").ok()?;
        let mut answer = String::new();
        self.answers.read_line(&mut answer).ok()?;
        answer.trim_end().parse().ok()
    }

    fn kill(process: i32) {
        rustix::process::kill_process(
            rustix::process::Pid::from_raw(process).unwrap(),
            Signal::KILL,
        )
        .unwrap();
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// The way of the program's calls.
#[derive(Clone, Copy, PartialEq, Eq)]
enum By {
    Kernel,
    /// The client that `uvfs run` makes of it.
    Client,
}

#[test]
fn nothing_acknowledged_is_lost_when_server_or_program_are_killed() {
    let fake = Fake::start();
    killed_again_and_again(&fake.uri(), "write=close", By::Kernel, 18);
}

#[test]
fn nothing_acknowledged_is_lost_that_waits_for_the_store() {
    let fake = Fake::start();
    killed_again_and_again(&fake.uri(), "write=back,nofsync", By::Kernel, 18);
}

#[test]
fn nothing_acknowledged_to_a_client_is_lost() {
    let fake = Fake::start();
    for options in ["write=close", "write=back,nofsync"] {
        killed_again_and_again(&fake.uri(), options, By::Client, 6);
    }
}

#[test]
fn nothing_acknowledged_is_lost_over_a_real_store() {
    if !has(&[Need::Program("weed")]) {
        return;
    }
    let store = Seaweed::start();
    for options in ["write=close", "write=back,nofsync"] {
        killed_again_and_again(&store.uri(), options, By::Kernel, 4);
    }
}

fn killed_again_and_again(uri: &str, options: &str, by: By, kills: u64) {
    if !has(&[Need::Mount(Transport::Dev), Need::Uvfs]) {
        return;
    }
    let kills = std::env::var("UVFS_KILLS").map_or(kills, |kills| kills.parse().unwrap());
    // A prefix, so that the command does not ask before whether this is an image.
    let uri = uri.replacen('?', &format!("/{}/?", options.len()), 1);
    let uri = Path::new(&uri);
    let scratch = Scratch::new();
    let (at, fresh) = (scratch.dir("mount"), scratch.dir("fresh"));
    let over = |cache: &str| {
        let cache = format!("cache_dir={}", scratch.path(cache).display());
        Serve::over(Transport::Dev)
            .option(&cache)
            .option("timeout=10")
    };
    let (serve, reader) = (over("cache").option(options), over("other"));
    let mut model = Model {
        random: Random(std::process::id().into()),
        names: BTreeMap::new(),
        moving: Vec::new(),
    };
    println!("from {}", std::process::id());
    let (mut calls, mut interrupted) = (0, BTreeSet::new());
    for kill in 0..kills {
        let mut mount = Mount::new(&serve, uri, &at);
        let (server, program) = [(true, false), (false, true), (true, true)][(kill % 3) as usize];
        // A client would wait for the next server.
        let program = program || by == By::Client;
        let mut writer = Program::start(&at, by);
        let process = writer.process.id() as i32;
        // With write=back the store gets nothing within the first five seconds.
        let pause = 30 + model.below(150) + if kill % 8 == 7 { 5200 } else { 0 };
        if server {
            mount.expect_gone();
        }
        std::thread::scope(|scope| {
            scope.spawn(|| calls += model.run(&mut writer, server));
            std::thread::sleep(Duration::from_millis(pause));
            if program {
                Program::kill(process);
            }
            if server {
                mount.server.signal(Signal::KILL);
                mount.server.wait(SOON).expect("it is killed");
                unmount_by_force(&at);
            }
        });
        drop(writer);
        if !server {
            mount.unmount().ok();
        } else {
            drop(mount);
        }
        // It ends when the store has all.
        let next = Mount::new(&serve, uri, &at);
        model.check(&at, &format!("{kill}: on the next mount"), program);
        next.unmount().ok();
        let stored = Mount::new(&reader, uri, &fresh);
        let has = model.check(&fresh, &format!("{kill}: in the store"), program);
        stored.unmount().ok();
        model.moving.clear();
        model.names.clear();
        for (name, is) in has {
            assert!(!name.contains(".conflict-"), "{kill}: {name}");
            // The model goes on from here.
            model.set(&name, vec![is]);
            interrupted.extend(Some(name).filter(|name| name.contains(".interrupted-")));
        }
    }
    println!(
        "{kills} kills, {calls} calls, {} files interrupted",
        interrupted.len()
    );
}
