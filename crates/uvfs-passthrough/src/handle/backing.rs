//! Open files that the kernel reads and writes by itself: see docs/backing-files.md.

use crate::inode::{BackingUse, Inode};
use crate::meta::has_set_id;
use crate::{Backed, Source, creds};
use rustix::fs::{OFlags, SeekFrom, Statx};
use rustix::io::Errno;
use std::os::fd::BorrowedFd;
use std::sync::atomic::Ordering;

use super::{asked_direct, takes_direct};
use crate::open_file::{By, OpenFile};

/// Files of so many bytes get a backing file when they are opened for reading only or for writing only.
const LARGE_FILE: u64 = 1 << 20;
/// Files that may be written get a backing file while the host has room for so many bytes.
const ROOM: u64 = 64 << 20;

/// Whether the host has room for more data. A write that finds it full makes the server free the files
/// that are removed and not yet forgotten. The kernel's writes to a backing file would fail.
fn has_room(fd: BorrowedFd<'_>) -> bool {
    rustix::fs::fstatfs(fd).is_ok_and(|host| {
        // Without a limit a tmpfs has no blocks.
        host.f_blocks == 0 || host.f_bavail.saturating_mul(host.f_bsize.unsigned_abs()) >= ROOM
    })
}

impl Source {
    /// Counts an open of the kernel's, and decides whether it gets a backing file; which.
    ///
    /// The kernel has each inode in one of two modes (fs/fuse/iomode.c): while an open with a backing
    /// file lives, others have to have the same; while an open that its page cache is used by lives
    /// (also FOPEN_DIRECT_IO ones, once they are mapped), none may have one. Else open(2) fails with
    /// EIO. It leaves a mode before it sends the RELEASE, and enters one after the answer, so the
    /// counts here are on the safe side if they change in one step with the decision.
    pub(super) fn begin_use(
        &self,
        inode: &Inode,
        fd: BorrowedFd<'_>,
        asked: OFlags,
        file: &Statx,
        thread: u32,
    ) -> (By, i32) {
        let writes = asked & OFlags::ACCMODE == OFlags::WRONLY;
        let writes_much = writes && self.writers.begin(thread);
        let mut state = inode.state();
        // RELEASE comes late: the kernel may have closed the backed file before this one got its set-user-id bits.
        if state.backing.is_some() && writes && has_set_id(file) {
            return (By::Around, 0);
        }
        let mappable = asked & OFlags::ACCMODE == OFlags::RDWR;
        if let Some(backing) = &mut state.backing {
            backing.opens += 1;
            backing.mappable |= mappable;
            let id = backing.id;
            assert_eq!(state.plain, 0, "opens with a backing file and without");
            state.told = state.told.filter(|_| !state.is_mappable());
            return (By::Backed, id);
        }
        if state.plain == 0
            && self.wants_backing(inode, asked, file, writes_much)
            && (asked & OFlags::ACCMODE == OFlags::RDONLY || has_room(fd))
            && let Some(id) = self.register(inode, fd, asked)
        {
            state.backing = Some(BackingUse {
                id,
                opens: 1,
                mappable,
            });
            state.told = state.told.filter(|_| !mappable);
            state.was_backed = true;
            return (By::Backed, id);
        }
        state.plain += 1;
        (By::Plain, 0)
    }

    /// The kernel has closed a file, or never got to know of it.
    pub(super) fn end_use(&self, file: &OpenFile) {
        if let Some(thread) = file.writer {
            let written = match file.by {
                By::Backed => rustix::fs::seek(file, SeekFrom::End(0)).unwrap_or(0),
                By::Plain | By::Around | By::Client => file.written.load(Ordering::Relaxed),
            };
            self.writers.end(thread, written);
        }
        let inode = &file.inode;
        let mut state = inode.state();
        match file.by {
            By::Around | By::Client => {}
            By::Plain => {
                assert!(state.backing.is_none() && state.plain > 0, "it was open");
                state.plain -= 1;
            }
            By::Backed => {
                assert_eq!(state.plain, 0, "opens with a backing file and without");
                let backing = state.backing.as_mut().expect("it was open");
                backing.opens -= 1;
                if backing.opens == 0 {
                    let id = backing.id;
                    state.backing = None;
                    if let Some(session) = self.session.get() {
                        // Under the lock, so that a next open registers after this.
                        session.unregister_backing(inode.node, id);
                    }
                }
            }
        }
    }

    /// Whether an open of this file is one to begin with a backing file.
    fn wants_backing(&self, inode: &Inode, asked: OFlags, file: &Statx, writes_much: bool) -> bool {
        let (direct, appends) = (asked_direct(asked), asked.contains(OFlags::APPEND));
        let wanted = match self.options.passthrough {
            Backed::Off => false,
            Backed::Auto if direct => {
                let reads = asked & OFlags::ACCMODE == OFlags::RDONLY;
                reads || inode.mount.in_memory && !appends
            }
            Backed::Auto if self.options.direct_io => false,
            Backed::Auto if asked & OFlags::ACCMODE == OFlags::RDWR => !appends,
            Backed::Auto => !appends && (writes_much || file.stx_size >= LARGE_FILE),
            Backed::Direct => direct,
            Backed::All => true,
        };
        wanted
            // Whether a write leaves set-user-id bits depends on the writer, whom the host does not know.
            && !has_set_id(file)
            && self.passes_through.load(Ordering::Relaxed)
            && inode.is_regular()
            && self.keeps_times(inode)
            && !self.backing_refused.load(Ordering::Relaxed)
            && !inode.mount.no_backing.load(Ordering::Relaxed)
    }

    /// Registers a file with the kernel. After a refusal that will stay one it is not tried again.
    fn register(&self, inode: &Inode, fd: BorrowedFd<'_>, asked: OFlags) -> Option<i32> {
        let session = self.session.get()?;
        let all = self.options.passthrough == Backed::All;
        // The kernel writes as the thread that registered the file, for every caller.
        let _nobody = (self.creds.nobody(inode.mount.reserves)).and_then(|spender| spender.here());
        let registered = match all || !asked_direct(asked) || takes_direct(fd) {
            true => creds::without_fsetid(|| session.register_backing(inode.node, fd)),
            false => Err(Errno::OPNOTSUPP.into()),
        };
        let error = match registered {
            Ok(id) => return Some(id),
            Err(error) => error,
        };
        match Errno::from_io_error(&error) {
            // A client has a lease.
            Some(Errno::BUSY) => return None,
            Some(Errno::NOMEM | Errno::NFILE | Errno::MFILE | Errno::INTR) => {}
            // The file system is stacked on others, or has no such files.
            Some(Errno::LOOP | Errno::OPNOTSUPP) => {
                inode.mount.no_backing.store(true, Ordering::Relaxed);
            }
            _ => self.backing_refused.store(true, Ordering::Relaxed),
        }
        match all {
            true => tracing::warn!(%error, "a backing file is refused; going on without"),
            false => tracing::debug!(%error, "a backing file is refused; going on without"),
        }
        None
    }
}
