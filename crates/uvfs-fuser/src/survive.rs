//! Mounts that outlive their process, which fuser does not have.
//!
//! With `MountOption::CUSTOM("survive")`, a mount goes on when the process that serves it is killed or crashes.
//! [`Session::new`](crate::Session::new), [`mount`](crate::mount()) and [`spawn_mount`](crate::spawn_mount) then split the
//! process: a keeper waits, and a worker serves, in which they go on. If the worker is killed, they go on in the next one,
//! with the file system as it was at the call, and all descriptors. There must be no other thread at the call.
//!
//! The file system has [`Filesystem::survive`]. Changes of names come again after they may have
//! been done: [`Request::again`](crate::Request::again) tells. The example `mirror` does it all.
//!
//! A [`BackingId`](crate::BackingId) is lost with its process: the kernel reads and writes what is open by it until the file
//! is closed, and holds the registration until the mount ends.

use std::io;

use uvfs_server::fs::Errno;
pub use uvfs_server::fs::{Again, Handle, Node, Orphans, Survive};

use crate::Filesystem;
use crate::adapter::Adapter;

impl<FS: Filesystem> Adapter<FS> {
    /// Asks the program's file system.
    fn outliving<T>(&self, ask: impl FnOnce(&dyn Survive) -> io::Result<T>) -> io::Result<T> {
        let asked = self.held.with(|fs| fs.survive().map(ask));
        asked.flatten().unwrap_or(Err(Errno::OPNOTSUPP.into()))
    }
}

impl<FS: Filesystem> Survive for Adapter<FS> {
    fn save_node(&self, node: Node, to: &mut Vec<u8>) -> io::Result<()> {
        self.outliving(|fs| fs.save_node(node, to))
    }

    fn save_handle(&self, directory: bool, fh: Handle, to: &mut Vec<u8>) -> io::Result<()> {
        self.outliving(|fs| fs.save_handle(directory, fh, to))
    }

    fn restores_in_parallel(&self) -> bool {
        self.outliving(|fs| Ok(fs.restores_in_parallel()))
            .unwrap_or(false)
    }

    fn restore_node(
        &self,
        node: Node,
        lookups: u64,
        saved: &[u8],
        orphans: &Orphans,
    ) -> io::Result<()> {
        self.outliving(|fs| fs.restore_node(node, lookups, saved, orphans))
    }

    fn restore_handle(
        &self,
        directory: bool,
        node: Node,
        fh: Handle,
        saved: &[u8],
        orphans: &Orphans,
    ) -> io::Result<()> {
        self.outliving(|fs| fs.restore_handle(directory, node, fh, saved, orphans))
    }

    fn restored(&self, orphans: &Orphans) {
        let _ = self.outliving(|fs| {
            fs.restored(orphans);
            Ok(())
        });
    }

    fn drop_handle(&self, directory: bool, fh: Handle) {
        let _ = self.outliving(|fs| {
            fs.drop_handle(directory, fh);
            Ok(())
        });
    }
}
