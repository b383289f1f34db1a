//! Whether a client may make a request: numbers of nodes and handles can be guessed, and others use
//! the same file system. An allowed request is cut down to what its handle and its sender allow.

use rustix::io::Result;
use uvfs_proto::abi::{ForgetOne, GetattrFlags, LkIn, SetattrIn, SetattrValid, WriteFlags};
use uvfs_proto::request::Operation;

use super::Client;
use crate::fs::{Errno, FileSystem};
use crate::request::Request;

impl<F: FileSystem> Client<F> {
    /// Whether a handle may be read from, and whether it may be written to. The server checks this for
    /// imported handles alone; the file system checks its own.
    pub(super) fn access(&self, node: u64, fh: u64) -> (bool, bool) {
        match self.imported.borrow().get(&(node, fh)) {
            None => (true, true),
            Some((flags, _)) => match *flags as i32 & libc::O_ACCMODE {
                libc::O_RDONLY => (true, false),
                libc::O_WRONLY => (false, true),
                libc::O_RDWR => (true, true),
                _ => (false, false),
            },
        }
    }

    /// EBADF unless the client has the open file, or directory.
    pub(super) fn has(&self, node: u64, fh: u64, is_directory: bool) -> Result<()> {
        match self
            .handles
            .borrow()
            .contains_key(&(node, fh, is_directory))
        {
            true => Ok(()),
            false => Err(Errno::BADF),
        }
    }

    fn reads(&self, node: u64, fh: u64) -> Result<()> {
        self.has(node, fh, false)?;
        self.access(node, fh).0.then_some(()).ok_or(Errno::BADF)
    }

    fn writes(&self, node: u64, fh: u64) -> Result<()> {
        self.has(node, fh, false)?;
        self.access(node, fh).1.then_some(()).ok_or(Errno::BADF)
    }

    fn knows_too(&self, node: u64) -> Result<()> {
        self.knows_node(node).then_some(()).ok_or(Errno::STALE)
    }

    /// Puts the client's own number into an owner of locks, so that no client's can be another's.
    fn owns(&self, owner: &mut u64) -> Result<()> {
        let theirs = u32::try_from(*owner).map_err(|_| Errno::INVAL)?;
        *owner = u64::from(self.number) << 32 | u64::from(theirs);
        Ok(())
    }

    fn locks(&self, node: u64, arg: &mut LkIn) -> Result<()> {
        self.has(node, arg.fh, false)?;
        arg.lk.pid = self.pid;
        self.owns(&mut arg.owner)
    }

    /// Whether the client has all lookups that a FORGET takes back. A node may be there more than
    /// once.
    fn may_forget(&self, mut all: Vec<ForgetOne>) -> Result<()> {
        let lookups = self.link.lookups();
        all.sort_unstable_by_key(|one| one.nodeid);
        let may = all.chunk_by(|a, b| a.nodeid == b.nodeid).all(|same| {
            let mut counts = same.iter().map(|one| one.nlookup);
            let sum = counts.try_fold(0u64, u64::checked_add);
            let has = lookups.get(&same[0].nodeid);
            sum.zip(has).is_some_and(|(sum, &has)| sum <= has)
        });
        may.then_some(()).ok_or(Errno::INVAL)
    }

    /// Whether a request is one that a guest may make.
    fn guest_may(operation: &Operation<'_>) -> bool {
        use Operation::*;
        match operation {
            Read(_) | Write(_) | Flush(_) | Release(_) | Fsync(_) | Fallocate(_) | Lseek(_)
            | CopyFileRange(_) | CopyFileRange64(_) | Getattr(_) | Statx(_) | Forget(_) => true,
            Setattr(arg) => {
                let size = SetattrValid::SIZE | SetattrValid::FH | SetattrValid::LOCKOWNER;
                let valid = SetattrValid::from_bits_retain(arg.valid);
                valid.contains(SetattrValid::SIZE | SetattrValid::FH) && size.contains(valid)
            }
            _ => false,
        }
    }

    fn may_setattr(&self, node: u64, arg: &mut SetattrIn) -> Result<()> {
        let valid = SetattrValid::from_bits_retain(arg.valid);
        if valid.contains(SetattrValid::FH) {
            // As ftruncate(2): EINVAL for what is not open for writing.
            self.has(node, arg.fh, false)?;
            self.writes(node, arg.fh).map_err(|_| Errno::INVAL)?;
        }
        // The file system's callers have no privileges here unless they are root.
        if self.uid != 0 && valid.contains(SetattrValid::SIZE) {
            arg.valid |= SetattrValid::KILL_SUIDGID.bits();
        }
        self.owns(&mut arg.lock_owner)
    }

    /// Refuses what the client may not do, and constrains the rest. Every operation has an arm, so
    /// that a new one does not compile without an answer.
    pub(super) fn authorize(&self, request: &mut Request<'_>) -> Result<()> {
        use Operation::*;
        let node = request.node;
        if !matches!(request.operation, Statfs) {
            self.knows_too(node)?;
        }
        if self.guest.is_some() && !Self::guest_may(&request.operation) {
            return Err(Errno::PERM);
        }
        match &mut request.operation {
            // Between the kernel and the server alone, or about others' requests.
            Init(_) | Destroy | Interrupt(_) | NotifyReply(_) | Poll(_) | Ioctl(..) => {
                Err(Errno::NOSYS)
            }
            Forget(arg) => {
                let has = self.link.lookups().get(&node).copied();
                let may = has.is_some_and(|has| arg.nlookup <= has);
                may.then_some(()).ok_or(Errno::INVAL)
            }
            BatchForget(_, records) => self.may_forget(records.iter().collect()),
            Read(arg) => {
                self.reads(node, arg.fh)?;
                self.owns(&mut arg.lock_owner)
            }
            Write(arg) => {
                self.writes(node, arg.fh)?;
                if let Some(&(flags, _)) = self.imported.borrow().get(&(node, arg.fh)) {
                    arg.flags = flags;
                }
                if self.uid != 0 {
                    arg.write_flags |= WriteFlags::KILL_SUIDGID.bits();
                }
                self.owns(&mut arg.lock_owner)
            }
            Fallocate(arg) => self.writes(node, arg.fh),
            Release(arg) => {
                self.has(node, arg.fh, false)?;
                self.owns(&mut arg.lock_owner)
            }
            Flush(arg) => {
                self.has(node, arg.fh, false)?;
                self.owns(&mut arg.lock_owner)
            }
            Fsync(arg) => self.has(node, arg.fh, false),
            Lseek(arg) => self.has(node, arg.fh, false),
            Getlk(arg) | Setlk(arg) | Setlkw(arg) => self.locks(node, arg),
            Readdir(arg) | Readdirplus(arg) => {
                self.has(node, arg.fh, true)?;
                self.owns(&mut arg.lock_owner)
            }
            Releasedir(arg) => {
                self.has(node, arg.fh, true)?;
                self.owns(&mut arg.lock_owner)
            }
            Fsyncdir(arg) => self.has(node, arg.fh, true),
            CopyFileRange(arg) | CopyFileRange64(arg) => {
                self.reads(node, arg.fh_in)?;
                self.writes(arg.nodeid_out, arg.fh_out)
            }
            Getattr(arg) => self.may_look(node, arg.getattr_flags, arg.fh),
            Statx(arg) => self.may_look(node, arg.getattr_flags, arg.fh),
            Setattr(arg) => self.may_setattr(node, arg),
            Rename { arg, .. } => self.knows_too(arg.newdir),
            Rename2 { arg, .. } => self.knows_too(arg.newdir),
            Link(arg, _) => self.knows_too(arg.oldnodeid),
            // Of the request's own node, and names in it.
            Lookup(_)
            | Readlink
            | Symlink { .. }
            | Mknod(..)
            | Mkdir(..)
            | Unlink(_)
            | Rmdir(_)
            | Open(_)
            | Statfs
            | Setxattr(..)
            | Getxattr(..)
            | Listxattr(_)
            | Removexattr(_)
            | Opendir(_)
            | Access(_)
            | Create(..)
            | Bmap(_)
            | Syncfs(_)
            | Tmpfile(..) => Ok(()),
        }
    }

    fn may_look(&self, node: u64, flags: u32, fh: u64) -> Result<()> {
        match GetattrFlags::from_bits_retain(flags).contains(GetattrFlags::FH) {
            true => self.has(node, fh, false).or(self.has(node, fh, true)),
            false => Ok(()),
        }
    }
}
