//! Two mounts change the same names: what a program was told is done is in the store, under its name or beside it.

use std::fs::{self, File, OpenOptions};
use std::io::{Error, Read, Result, Seek, SeekFrom, Write};
use std::path::Path;
use std::time::{Duration, Instant};

use fastrand::Rng;
use uvfs_object::Writes;

use crate::stores::At;
use crate::writes::close;
use crate::{Served, serve};

/// Names that all writers change.
const NAMES: [&str; 3] = ["x", "y", "z"];
/// Writers of each mount.
const WRITERS: usize = 3;
/// Calls of a writer in a round.
const CALLS: usize = 25;
/// The promises of the two mounts, in turn.
const PROMISES: [[Writes; 2]; 3] = [
    [Writes::Close, Writes::Close],
    [Writes::Close, Writes::Back],
    [Writes::Back, Writes::Back],
];

/// Lines that a writer was told are written, and those that it was told are beside.
#[derive(Default, Debug)]
struct Told {
    done: Vec<String>,
    refused: Vec<String>,
}

/// Rounds with each pair of promises, or as many as begin within an hour.
pub fn two_mounts_write(store: &(impl At + Sync)) {
    let begun = Instant::now();
    let hour = Duration::from_secs(3600);
    let (mut lines, mut beside) = (0, 0);
    for round in 0.. {
        match uvfs_testing::full() {
            true if begun.elapsed() > hour => break,
            false if round == PROMISES.len() => break,
            _ => {}
        }
        let (all, conflicts) = one_round(store, round);
        (lines, beside) = (lines + all, beside + conflicts);
    }
    println!(
        "{lines} lines, {beside} of them beside, {:?}",
        begun.elapsed()
    );
    assert!(lines > 30);
}

fn one_round(store: &(impl At + Sync), round: usize) -> (usize, usize) {
    let promises = PROMISES[round % PROMISES.len()];
    let mounts = promises.map(|writes| serve(&store.uri(), |options| options.writes = writes));
    let dir = format!("pair-{round}");
    fs::create_dir(mounts[0].at(&dir)).unwrap();
    for name in NAMES {
        let mut file = File::create_new(mounts[0].at(&dir).join(name)).unwrap();
        file.write_all(b"at first\n").unwrap();
        file.sync_all().unwrap();
    }
    let told = std::thread::scope(|scope| {
        let writers = (0..2 * WRITERS).map(|writer| {
            let at = mounts[writer % 2].at(&dir);
            scope.spawn(move || write(&at, writer, round))
        });
        let writers: Vec<_> = writers.collect();
        let told = writers.into_iter().map(|writer| writer.join().unwrap());
        told.collect::<Vec<_>>()
    });
    drop(mounts);
    let again = serve(&store.uri(), |_| {});
    let (objects, beside) = contents(&again, &dir);
    for told in &told {
        // A line of which close(2) said that another version is there is kept, too.
        for line in told.done.iter().chain(&told.refused) {
            let is_there = objects.contains(line) || beside.contains(line);
            assert!(is_there, "{promises:?}, round {round}: {line:?} is nowhere");
        }
    }
    let done = told.iter().map(|told| told.done.len()).sum();
    (done, beside.len())
}

/// The lines of the files that have a name of their own, and those of conflicts.
fn contents(served: &Served, dir: &str) -> (Vec<String>, Vec<String>) {
    let (mut objects, mut beside) = (Vec::new(), Vec::new());
    for entry in fs::read_dir(served.at(dir)).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap();
        let text = fs::read_to_string(&path).unwrap();
        let lines = text.lines().map(str::to_owned);
        match name.contains(".conflict-") {
            false => objects.extend(lines),
            true => beside.extend(lines),
        }
    }
    (objects, beside)
}

/// A rename takes the version that another mount put, and not the one that this mount knew.
pub fn a_file_that_changed_is_renamed(store: &impl At) {
    let mounts = [0, 1].map(|_| serve(&store.uri(), |options| options.writes = Writes::Close));
    for dir in [false, true] {
        let (name, new) = match dir {
            false => ("renamed", "renamed-new"),
            true => ("in/renamed", "in-new/renamed"),
        };
        let [here, there] = mounts.each_ref().map(|mount| mount.at(name));
        if dir {
            fs::create_dir(mounts[0].at("in")).unwrap();
        }
        fs::write(&here, b"one\n").unwrap();
        let open = File::open(&here).unwrap();
        assert_eq!(fs::read(&here).unwrap(), b"one\n");
        append(&there, "two", false).ok().unwrap();
        match dir {
            false => fs::rename(&here, mounts[0].at(new)).unwrap(),
            true => fs::rename(mounts[0].at("in"), mounts[0].at("in-new")).unwrap(),
        }
        let moved = mounts[0].at(new);
        append(&moved, "three", false).ok().unwrap();
        assert_eq!(fs::read(&moved).unwrap(), b"one\ntwo\nthree\n");
        assert_eq!(fs::read(mounts[1].at(new)).unwrap(), b"one\ntwo\nthree\n");
        drop(open);
    }
}

/// A file that is made after another mount removed the one of its name is a new one, and what a program writes to the old one is
/// kept beside.
pub fn a_file_that_is_gone_is_made_anew(store: &impl At) {
    let mounts = [0, 1].map(|_| serve(&store.uri(), |options| options.writes = Writes::Close));
    let [here, there] = mounts.each_ref().map(|mount| mount.at("gone"));
    fs::write(&here, vec![b'x'; 5000]).unwrap();
    let mut old = OpenOptions::new().append(true).open(&here).unwrap();
    fs::remove_file(&there).unwrap();
    append(&here, "new", false).ok().unwrap();
    assert_eq!(fs::read(&here).unwrap(), b"new\n");
    let mut both = OpenOptions::new().append(true).open(&here).unwrap();
    both.write_all(b"both\n").unwrap();
    old.write_all(b"old\n").unwrap();
    assert_eq!(fs::read(&here).unwrap(), b"new\nboth\n");
    close(both).unwrap();
    assert_eq!(close(old).unwrap_err().raw_os_error(), Some(libc::ESTALE));
    drop(mounts);
    let again = serve(&store.uri(), |_| {});
    assert_eq!(fs::read(again.at("gone")).unwrap(), b"new\nboth\n");
    let beside = fs::read_dir(again.mounted.path()).unwrap();
    let beside = beside.map(|entry| entry.unwrap().path());
    let is_beside = |path: &std::path::PathBuf| path.to_str().unwrap().contains("gone.conflict-");
    let beside: Vec<_> = beside.filter(is_beside).collect();
    assert_eq!(beside.len(), 1);
    assert!(fs::read(&beside[0]).unwrap().ends_with(b"xold\n"));
}

/// One writer: each of its calls adds one line, and keeps those that are there.
fn write(dir: &Path, writer: usize, round: usize) -> Told {
    let mut random = Rng::with_seed((round * 2 * WRITERS + writer) as u64);
    let mut told = Told::default();
    for n in 0..CALLS {
        let line = format!("{writer}-{n}");
        let path = dir.join(NAMES[random.usize(..NAMES.len())]);
        let call = random.u8(..8);
        let done = match call {
            0..3 => append(&path, &line, false),
            3 => append(&path, &line, true),
            4 => write_anew(&path, &line, false),
            5 => write_anew(&path, &line, true),
            6 => move_new(dir, &line),
            _ => move_away(&path, &line),
        };
        match done {
            Ok(()) => told.done.push(line),
            Err(Failed::Refused(line)) => told.refused.push(line),
            Err(Failed::Before(error)) => {
                // Another writer has moved it away, or put a version while this one was opened. SeaweedFS fails to copy an object
                // that is replaced meanwhile, now and then.
                let code = error.raw_os_error().unwrap();
                let renames = call >= 6 && code == libc::EIO;
                let known = [libc::ESTALE, libc::ENOENT, libc::EEXIST];
                assert!(known.contains(&code) || renames, "{call}, {line}: {error}");
            }
        }
    }
    told
}

/// Why a line is not at its name.
enum Failed {
    /// Nothing was written.
    Before(Error),
    /// close(2) or fsync(2) said that another writer's version is there: this line is beside it.
    Refused(String),
}

impl From<Error> for Failed {
    fn from(error: Error) -> Self {
        Self::Before(error)
    }
}

fn end(file: File, line: &str, synced: Result<()>) -> std::result::Result<(), Failed> {
    let closed = close(file);
    match synced.and(closed) {
        Ok(()) => Ok(()),
        Err(error) if error.raw_os_error() == Some(libc::ESTALE) => {
            Err(Failed::Refused(line.to_owned()))
        }
        Err(error) => panic!("{line}: {error}"),
    }
}

/// Opens a file, or makes it, and keeps other writers of this mount away.
fn open(path: &Path, how: &mut OpenOptions) -> Result<File> {
    let file = how.read(true).create(true).open(path)?;
    rustix::fs::flock(&file, rustix::fs::FlockOperation::LockExclusive)?;
    Ok(file)
}

fn append(path: &Path, line: &str, sync: bool) -> std::result::Result<(), Failed> {
    let mut file = open(path, OpenOptions::new().append(true))?;
    file.write_all(format!("{line}\n").as_bytes())?;
    let synced = if sync { file.sync_all() } else { Ok(()) };
    end(file, line, synced)
}

/// Reads all, and writes it again with a line more: over what is there, or into the emptied file.
fn write_anew(path: &Path, line: &str, empties: bool) -> std::result::Result<(), Failed> {
    let mut file = open(path, OpenOptions::new().write(true).truncate(false))?;
    let mut text = String::new();
    file.read_to_string(&mut text)?;
    text = format!("{line}\n{text}");
    if empties {
        file.set_len(0)?;
    }
    file.seek(SeekFrom::Start(0))?;
    file.write_all(text.as_bytes())?;
    end(file, line, Ok(()))
}

/// A file of its own, which gets its name as editors give one.
fn move_new(dir: &Path, line: &str) -> std::result::Result<(), Failed> {
    let path = dir.join(format!("new-{line}"));
    let mut file = File::create_new(&path)?;
    file.write_all(format!("{line}\n").as_bytes())?;
    end(file, line, Ok(()))?;
    fs::rename(&path, dir.join(format!("own-{line}")))?;
    Ok(())
}

/// Another name, and a line more under it. The next writer makes the file anew.
fn move_away(path: &Path, line: &str) -> std::result::Result<(), Failed> {
    let other = path.with_file_name(format!("moved-{line}"));
    fs::rename(path, &other)?;
    append(&other, line, false)
}
