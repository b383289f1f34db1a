//! File systems whose mounts outlive their server.

use std::io;
use std::time::SystemTime;

pub use uvfs_sys::process::Orphans;

use super::{Errno, Handle, Node};

/// The most bytes that [`Survive::save_node`] and [`Survive::save_handle`] may give.
pub const MOST_SAVED: usize = 4096;

/// A request that an earlier server had begun and did not answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Again {
    /// When it was begun, by the clock of files' times (CLOCK_REALTIME_COARSE).
    pub began: SystemTime,
    /// What the file system noted then ([`SessionHandle::note`](super::SessionHandle::note)).
    pub note: Option<u64>,
}

/// Reads what [`Survive`] has saved, from its beginning on.
#[derive(Clone, Copy, Debug)]
pub struct Saved<'a>(pub &'a [u8]);

impl Saved<'_> {
    /// The next bytes.
    ///
    /// # Errors
    /// EINVAL when there are fewer.
    pub fn take<const N: usize>(&mut self) -> Result<[u8; N], Errno> {
        let (taken, rest) = self.0.split_first_chunk().ok_or(Errno::INVAL)?;
        self.0 = rest;
        Ok(*taken)
    }

    /// The next words, in the byte order of the machine.
    ///
    /// # Errors
    /// As [`Saved::take`].
    pub fn words<const N: usize>(&mut self) -> Result<[u64; N], Errno> {
        let mut words = [0; N];
        for word in &mut words {
            *word = u64::from_ne_bytes(self.take()?);
        }
        Ok(words)
    }

    /// The next signed numbers of four bytes, for instance of descriptors.
    ///
    /// # Errors
    /// As [`Saved::take`].
    pub fn numbers<const N: usize>(&mut self) -> Result<[i32; N], Errno> {
        let mut numbers = [0; N];
        for number in &mut numbers {
            *number = i32::from_ne_bytes(self.take()?);
        }
        Ok(numbers)
    }
}

/// A file system whose mount outlives its server: the next server gets its nodes and open files, and serves on. See
/// [`survive`](crate::survive) for how a program has that.
///
/// The session counts lookups and keeps what this trait saves, in memory that a crash leaves as it was. A server that was
/// killed leaves its descriptors open. So what is saved of an open file may be the number of its descriptor, which the
/// next server claims.
///
/// Requests that change something may come again after they were done: see
/// [`SessionHandle::again`](super::SessionHandle::again).
///
/// All methods have a default, for a file system whose numbers of nodes and handles mean the same to each server:
///
/// ```
/// use uvfs_server::FileSystem;
/// use uvfs_server::fs::Survive;
///
/// struct Unchanging;
///
/// impl FileSystem for Unchanging {
///     fn survive(&self) -> Option<&dyn Survive> {
///         Some(self)
///     }
/// }
///
/// impl Survive for Unchanging {}
/// ```
#[allow(unused_variables)]
pub trait Survive: Send + Sync {
    /// Appends to `to` what the next server finds the node by, at most [`MOST_SAVED`] bytes. It is called when the kernel
    /// is about to be given the node for the first time, when it has lost its last name, and for
    /// [`SessionHandle::save_again`](super::SessionHandle::save_again). Up to 216 bytes cost least. By default the number is enough.
    ///
    /// # Errors
    /// The node will be stale (ESTALE) for the next server.
    fn save_node(&self, node: Node, to: &mut Vec<u8>) -> io::Result<()> {
        Ok(())
    }

    /// Appends to `to` what the next server needs of an open file, or of a directory, at most [`MOST_SAVED`] bytes. A
    /// handle for which it appends nothing, as by default, is not restored: its number tells the next server all.
    ///
    /// The kernel may release once more what a server that was killed had closed. So a file system with a table of open
    /// files gives none a number that an earlier server may have given another.
    ///
    /// # Errors
    /// The handle will be unknown (EBADF) to the next server.
    fn save_handle(&self, directory: bool, fh: Handle, to: &mut Vec<u8>) -> io::Result<()> {
        Ok(())
    }

    /// Whether several threads may restore nodes at a time, in any order. By default one thread does, and those that
    /// were saved last come first.
    fn restores_in_parallel(&self) -> bool {
        false
    }

    /// Makes a node known, under its old number and with so many lookups. It is called after
    /// [`init`](super::FileSystem::init) and before any other request, and not for the root. By default the file system
    /// knows the node, and counts no lookups.
    ///
    /// The bytes are those that another version of the program may have saved. Check them, and what is claimed by them.
    ///
    /// # Errors
    /// The node is stale (ESTALE) from now on.
    fn restore_node(
        &self,
        node: Node,
        lookups: u64,
        saved: &[u8],
        orphans: &Orphans,
    ) -> io::Result<()> {
        Ok(())
    }

    /// Makes an open file, or a directory, of a restored node known under its old number.
    ///
    /// # Errors
    /// The handle is unknown (EBADF) from now on.
    fn restore_handle(
        &self,
        directory: bool,
        node: Node,
        fh: Handle,
        saved: &[u8],
        orphans: &Orphans,
    ) -> io::Result<()> {
        Ok(())
    }

    /// All nodes and handles are restored: requests come from now on. What is left of `orphans` is closed then.
    ///
    /// The kernel keeps names for as long as it was told. A file system that has the kernel drop them when they change reports
    /// [`HostChange::Anything`](super::HostChange::Anything) here, if the last server may have been killed in between.
    fn restored(&self, orphans: &Orphans) {}

    /// Drops a restored handle, of which the kernel was never told.
    fn drop_handle(&self, directory: bool, fh: Handle) {}
}
