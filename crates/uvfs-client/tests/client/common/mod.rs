//! Helpers of several tests of the client.
#![allow(dead_code)] // Each test binary uses a part of it.

pub mod faulty;
pub mod raw;

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use uvfs_client::{Connection, OpenOptions};
use uvfs_passthrough::Passthrough;
use uvfs_server::{ClientLimits, InProcess, Session, SessionOptions, in_process};

/// Generous: the machine may be loaded.
pub const DEADLINE: Duration = Duration::from_secs(60);

/// To read and write, made if need be.
pub fn rw() -> OpenOptions {
    OpenOptions::new().read(true).write(true).create(true)
}

/// A session that serves a directory, without a mount; the directory is made if need be.
pub fn session(source: impl AsRef<Path>) -> Arc<Session<Passthrough>> {
    std::fs::create_dir_all(&source).unwrap();
    let fs = Passthrough::open(source, uvfs_passthrough::Options::default()).unwrap();
    Arc::new(Session::unmounted(fs, SessionOptions::default()).unwrap())
}

/// A connection to a server in this process, which serves a directory until the first value is dropped.
pub fn connect(source: impl AsRef<Path>) -> (InProcess, Connection) {
    let (serving, socket) = in_process(&session(source), ClientLimits::default()).unwrap();
    (serving, Connection::from(socket))
}

/// Waits until `check` says so.
pub fn eventually(what: &str, mut check: impl FnMut() -> bool) {
    let deadline = Instant::now() + DEADLINE;
    while !check() {
        assert!(Instant::now() < deadline, "waited too long: {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Numbers that look random, the same each time.
pub struct Random(pub u64);

impl Random {
    /// The next one.
    pub fn below(&mut self, n: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut x = self.0;
        x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        (x ^ (x >> 31)) % n
    }
}
