//! A server of a directory that takes over from another one, whose book has any bytes.

use std::ffi::CStr;
use std::fs;
use std::os::fd::{FromRawFd, IntoRawFd, OwnedFd, RawFd};

use uvfs_passthrough::{Options, Passthrough};
use uvfs_server::FileSystem;
use uvfs_server::fs::{OFlags, OpenHow, Orphans, ROOT};
use uvfs_server::survive::Left;
use uvfs_sys::process::open_descriptors;

#[path = "now.rs"]
mod now;

use now::{CALLER, now};

/// What a server has left.
pub struct Target {
    left: Left,
    /// Its descriptors, each beside a copy: what takes over closes them.
    descriptors: Vec<(RawFd, OwnedFd)>,
    source: tempfile::TempDir,
}

impl Target {
    pub fn new() -> Self {
        let source = tempfile::tempdir().expect("a temporary directory");
        for name in ["one", "two", "three"] {
            fs::write(source.path().join(name), name).unwrap();
        }
        fs::create_dir(source.path().join("dir")).unwrap();
        let before = open_descriptors().unwrap();
        let server = Passthrough::open(source.path(), Options::default()).unwrap();
        let lookup = |name: &CStr| now(server.lookup(&CALLER, ROOT, name)).unwrap().node;
        let [one, two, three, dir] = [c"one", c"two", c"three", c"dir"].map(lookup);
        let how = OpenHow::new(OFlags::RDWR);
        let opens = |node| now(server.open(&CALLER, node, &how)).unwrap().fh;
        let handles = [
            (false, one, opens(one)),
            (false, two, opens(two)),
            (
                true,
                dir,
                now(server.opendir(&CALLER, dir, &how)).unwrap().fh,
            ),
        ];
        let left = Left::by(&server, &[one, two, three, dir], &handles).unwrap();
        // It is killed: nothing is dropped.
        std::mem::forget(server);
        let descriptors = open_descriptors().unwrap();
        let own = descriptors.difference(&before).map(|&fd| {
            // SAFETY: its owner was forgotten.
            let own = unsafe { OwnedFd::from_raw_fd(fd) };
            (fd, own)
        });
        let copies = own.map(|(fd, own)| {
            let copy = rustix::io::fcntl_dupfd_cloexec(&own, 100).unwrap();
            (fd, copy)
        });
        Self {
            left,
            descriptors: copies.collect(),
            source,
        }
    }

    pub fn run(&self, damage: &[u8]) {
        let mut owned = open_descriptors().unwrap();
        for (fd, copy) in &self.descriptors {
            // It is open if the book was refused.
            owned.remove(fd);
            // SAFETY: nothing owns it, and dup2 opens it anew.
            let mut fd = unsafe { OwnedFd::from_raw_fd(*fd) };
            rustix::io::dup2(copy, &mut fd).unwrap();
            let _ = fd.into_raw_fd();
        }
        // SAFETY: those that are not in `owned` were opened here, and given to nothing.
        let orphans = unsafe { Orphans::find(&owned) }.unwrap();
        let server = Passthrough::open(self.source.path(), Options::default()).unwrap();
        self.left.take_over(damage, orphans, &server).unwrap();
    }
}
