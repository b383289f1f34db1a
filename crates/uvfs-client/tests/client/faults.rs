//! A file system that fails at its n-th call, for every n up to where a load ends: the caller gets that
//! error, or none, and what a sync acknowledged is there.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};
use std::time::Duration;

use uvfs_client::{Client, Config, Connection, File, Flags, OpenOptions};
use uvfs_passthrough::{Options, Passthrough};
use uvfs_server::fs::{Errno, RenameFlags, Result, XattrFlags};
use uvfs_server::layers::{Call, Faults, Opcode};
use uvfs_server::{ClientLimits, Session, SessionOptions, in_process};

use crate::common::rw;

/// The call of a directory that fails.
struct Worst {
    /// Calls before it.
    left: AtomicI64,
    /// It has failed.
    failed: AtomicBool,
}

impl Worst {
    /// The directory. What takes back a handle does not fail.
    fn fails(
        self: Arc<Self>,
        fs: Passthrough,
        errno: Errno,
    ) -> Faults<Passthrough, impl Fn(&Call) -> Result<usize>> {
        Faults::new(fs, move |call| match call.opcode {
            Opcode::Release | Opcode::Releasedir => Ok(usize::MAX),
            _ if self.left.fetch_sub(1, Ordering::SeqCst) == 0 => {
                self.failed.store(true, Ordering::SeqCst);
                Err(errno.into())
            }
            _ => Ok(usize::MAX),
        })
    }
}

/// A file as the model knows it: the bytes that a sync acknowledged, and those that may be there as well.
#[derive(Default)]
struct Known {
    sure: Vec<u8>,
    /// Acknowledged, and not synced yet.
    written: Vec<(usize, Vec<u8>)>,
    maybe: Vec<(usize, Vec<u8>)>,
}

impl Known {
    fn wrote(&mut self, at: usize, bytes: &[u8], done: &uvfs_client::Result<usize>) {
        let to = match done {
            Ok(n) => {
                assert_eq!(*n, bytes.len());
                &mut self.written
            }
            Err(_) => &mut self.maybe,
        };
        to.push((at, bytes.to_vec()));
    }

    fn synced(&mut self, done: &uvfs_client::Result<()>) {
        for (at, bytes) in self.written.drain(..) {
            if done.is_ok() {
                let end = at + bytes.len();
                self.sure.resize(self.sure.len().max(end), 0);
                self.sure[at..end].copy_from_slice(&bytes);
            }
            // It may be there, or have been overwritten by what failed before and is tried again.
            self.maybe.push((at, bytes));
        }
    }

    fn check(&self, what: &str, found: &[u8]) {
        assert!(
            found.len() >= self.sure.len(),
            "{what}: {} bytes",
            found.len()
        );
        for (i, byte) in found.iter().enumerate() {
            let sure = self.sure.get(i).copied();
            let maybe =
                |(at, bytes): &(usize, Vec<u8>)| bytes.get(i.wrapping_sub(*at)) == Some(byte);
            let fits = sure.unwrap_or(0) == *byte || self.maybe.iter().any(maybe);
            assert!(fits, "{what}: {byte} at {i}, not {sure:?}");
        }
    }
}

/// A client, what it was told, and what it therefore knows.
struct Load<'a> {
    client: &'a Client,
    errno: i32,
    errors: usize,
    files: BTreeMap<&'static str, Known>,
}

impl Load<'_> {
    /// An error is the one that was made.
    fn told<T>(&mut self, what: &str, done: uvfs_client::Result<T>) -> uvfs_client::Result<T> {
        if let Err(error) = &done {
            let code = error.errno().raw_os_error();
            // A file that could not be made is not there later.
            let missing = self.errors > 0 && [libc::ENOENT, libc::ENODATA].contains(&code);
            assert!(code == self.errno || missing, "{what}: {error}");
            self.errors += 1;
        }
        done
    }

    fn write(
        &mut self,
        name: &'static str,
        file: &File,
        at: usize,
        len: usize,
        byte: u8,
        how: Flags,
    ) {
        let bytes = vec![byte; len];
        let done = self.told("write", file.write_at(&bytes, at as u64, how));
        let known = self.files.entry(name).or_default();
        known.wrote(at, &bytes, &done);
        if how.contains(Flags::DSYNC) {
            known.synced(&done.map(drop));
        }
    }

    fn sync(&mut self, name: &'static str, file: &File) {
        let done = self.told("sync", file.sync_all());
        self.files.entry(name).or_default().synced(&done);
    }

    fn open(&mut self, name: &str, options: OpenOptions) -> Option<File> {
        let done = self.client.open(name, options);
        self.told("open", done).ok()
    }

    fn run(&mut self) {
        let client = self.client;
        if self.told("mkdir", client.mkdir("d", 0o755)).is_err() {
            client.mkdir("d", 0o755).expect("it fails once");
        }
        if let Some(file) = self.open("d/a", rw()) {
            self.write("a", &file, 0, 150_000, 1, Flags::empty());
            self.sync("a", &file);
            for (at, byte) in [(10, 2), (70_000, 3), (149_000, 4)] {
                self.write("a", &file, at, 5000, byte, Flags::empty());
            }
            self.sync("a", &file);
            self.write("a", &file, 8192, 8192, 5, Flags::DIRECT);
            self.sync("a", &file);
            self.write("a", &file, 50_000, 100, 6, Flags::DSYNC);
            self.write("a", &file, 100_000, 9000, 7, Flags::DONTCACHE);
            self.sync("a", &file);
            let _ = self.told("close", file.close());
        }
        if let Some(log) = self.open("d/log", rw().append(true)) {
            let mut at = 0;
            for line in 0..6u8 {
                let bytes = [b'a' + line; 50];
                let done = self.told("append", log.append(&bytes, Flags::empty()));
                let known = self.files.entry("log").or_default();
                match done {
                    Ok(n) => {
                        at = n as usize;
                        known.wrote(at, &bytes, &Ok(50));
                    }
                    // At the end, if at all.
                    Err(error) => known.wrote(at + 50, &bytes, &Err(error)),
                }
                self.sync("log", &log);
            }
        }
        let names = ["d/a", "d/b"];
        if self
            .told(
                "rename",
                client.rename(names[0], names[1], RenameFlags::empty()),
            )
            .is_ok()
        {
            // Back, as a check expects it.
            let back = client.rename(names[1], names[0], RenameFlags::empty());
            if self.told("rename", back).is_err() {
                client
                    .rename(names[1], names[0], RenameFlags::empty())
                    .expect("it fails once");
            }
        }
        let _ = self.told(
            "setxattr",
            client.setxattr("d/a", "user.x", b"value", XattrFlags::empty()),
        );
        let _ = self
            .told("getxattr", client.getxattr("d/a", "user.x"))
            .map_err(drop);
        let _ = self.told("readdir", client.readdir("d"));
        let _ = self.told("stat", client.stat("d/a"));
        let _ = self.told("statfs", client.statfs());
        if let Some(file) = self.open("d/a", OpenOptions::new().read(true)) {
            let mut bytes = vec![0; 200_000];
            let _ = self.told("read", file.read_at(&mut bytes, 0, Flags::empty()));
        }
        if let Some(file) = self.open("d/gone", rw()) {
            let _ = self.told("write", file.write_at(b"gone", 0, Flags::empty()));
            drop(file);
            let _ = self.told("unlink", client.unlink("d/gone"));
        }
    }
}

/// One load, of which call number `n` fails; whether there was one.
fn fails_at(n: i64, errno: Errno) -> bool {
    let dir = tempfile::tempdir().unwrap();
    let source = dir.path().join("source");
    std::fs::create_dir(&source).unwrap();
    let worst = Arc::new(Worst {
        left: AtomicI64::new(i64::MAX),
        failed: AtomicBool::new(false),
    });
    let fs = Passthrough::open(&source, Options::default()).unwrap();
    let fs = worst.clone().fails(fs, errno);
    let session = Arc::new(Session::unmounted(fs, SessionOptions::default()).unwrap());
    let (serving, socket) = in_process(&session, ClientLimits::default()).unwrap();
    let config = Config::default()
        .memory(4 << 20)
        .writeback_after(Duration::from_secs(3600));
    let client = Client::new(Connection::from(socket), config).unwrap();
    let mut load = Load {
        client: &client,
        errno: errno.raw_os_error(),
        errors: 0,
        files: BTreeMap::new(),
    };
    worst.left.store(n, Ordering::SeqCst);
    load.run();
    worst.left.store(i64::MAX, Ordering::SeqCst);
    let (files, errors) = (std::mem::take(&mut load.files), load.errors);
    let failed = worst.failed.load(Ordering::SeqCst);
    assert!(
        failed || errors == 0,
        "nothing failed, and {errors} calls did"
    );
    drop(client);
    drop(serving);
    for (name, known) in files {
        let found = std::fs::read(Path::new(&source).join("d").join(name)).unwrap_or_default();
        known.check(&format!("{name}, {errno} at call {n}"), &found);
    }
    failed
}

fn fails_everywhere(errno: Errno) {
    let calls = (0..).take_while(|&n| fails_at(n, errno)).count();
    println!("{calls} calls, each of which failed once");
    assert!(calls > 30, "{calls}");
}

/// ENOSPC at any call loses no data that was synced before.
#[test]
fn no_space_at_any_call_loses_nothing_that_was_synced() {
    fails_everywhere(Errno::NOSPC);
}

/// The same with EIO.
#[test]
fn an_io_error_at_any_call_loses_nothing_that_was_synced() {
    fails_everywhere(Errno::IO);
}

const PAGE: u64 = 4096;
const PAGES: u64 = 64;
const BAD: u64 = 16;

/// A page that can't be read fails no other page, whichever way a program reads.
#[test]
fn a_page_that_cannot_be_read_takes_no_other_with_it() {
    let pages = |pages: std::ops::Range<u64>| -> Vec<u8> {
        pages
            .flat_map(|page| vec![page as u8; PAGE as usize])
            .collect()
    };
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("f"), pages(0..PAGES)).unwrap();
    let fs = Passthrough::open(dir.path(), Options::default()).unwrap();
    // Nor can anything together with it.
    let fs = Faults::new(fs, |call| {
        let bad = call.range.start < (BAD + 1) * PAGE && call.range.end > BAD * PAGE;
        match bad && call.opcode == Opcode::Read {
            true => Err(Errno::IO.into()),
            false => Ok(usize::MAX),
        }
    });
    let session = Arc::new(Session::unmounted(fs, SessionOptions::default()).unwrap());
    for submitted in [false, true] {
        let (serving, socket) = in_process(&session, ClientLimits::default()).unwrap();
        let client = Client::new(Connection::from(socket), Config::default()).unwrap();
        let file = client.open("f", OpenOptions::new().read(true)).unwrap();
        let read = |first: u64| -> uvfs_client::Result<Vec<u8>> {
            let mut buf = vec![0xff; ((PAGES - first) * PAGE) as usize];
            if submitted {
                return file
                    .submit_read_at(buf, first * PAGE, Flags::empty())
                    .wait();
            }
            let n = file.read_at(&mut buf, first * PAGE, Flags::empty())?;
            buf.truncate(n);
            Ok(buf)
        };
        assert!(read(0).unwrap() == pages(0..BAD), "{submitted}");
        let error = read(BAD).unwrap_err();
        assert_eq!(error.errno(), Errno::IO, "{submitted}");
        assert!(
            read(BAD + 1).unwrap() == pages(BAD + 1..PAGES),
            "{submitted}"
        );
        drop(file);
        drop(client);
        drop(serving);
    }
}
