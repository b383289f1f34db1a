//! A mount of a directory outlives its server: docs/survive.md.

use std::ffi::CStr;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::SystemTime;

use rustix::fs::OFlags;
use rustix::io::Errno;
use uvfs_io::ops::File;
use uvfs_server::fs::{Again, Context, Handle, Node, Orphans, Saved, Survive};

use crate::inode::BackingUse;
use crate::open_file::{By, OpenFile};
use crate::sys;
use crate::{Passthrough, Source};

impl Survive for Passthrough {
    fn save_node(&self, node: Node, to: &mut Vec<u8>) -> io::Result<()> {
        Ok(self.0.save_inode(node, to)?)
    }

    fn save_handle(&self, directory: bool, fh: Handle, to: &mut Vec<u8>) -> io::Result<()> {
        let numbers = match directory {
            true => {
                let dir = self.0.dirs.get(fh).ok_or(Errno::BADF)?;
                vec![dir.as_fd().as_raw_fd()]
            }
            false => self.0.file(fh)?.saved(),
        };
        to.extend(numbers.iter().flat_map(|number| number.to_ne_bytes()));
        Ok(())
    }

    fn restores_in_parallel(&self) -> bool {
        true
    }

    fn restore_node(
        &self,
        node: Node,
        lookups: u64,
        saved: &[u8],
        orphans: &Orphans,
    ) -> io::Result<()> {
        Ok(self.0.restore_inode(node, lookups, saved, orphans)?)
    }

    fn restore_handle(
        &self,
        directory: bool,
        node: Node,
        fh: Handle,
        saved: &[u8],
        orphans: &Orphans,
    ) -> io::Result<()> {
        let inode = self.0.inode(node)?;
        let mut saved = Saved(saved);
        let [fd] = saved.numbers()?;
        let st = orphans.look(fd, sys::stat).ok_or(Errno::BADF)??;
        let device = (st.stx_dev_major, st.stx_dev_minor);
        if inode.key.ino != st.stx_ino || inode.key.device != device {
            return Err(Errno::STALE.into());
        }
        let fd = orphans.claim(fd)?;
        let restored = match directory {
            true => self.0.restore_dir(inode, fd, fh),
            false => {
                let [asked, by, backing, writer, flags] = saved.numbers()?;
                let by = match by {
                    0 => By::Backed,
                    1 => By::Plain,
                    2 => By::Around,
                    _ => return Err(Errno::INVAL.into()),
                };
                inode.opens.fetch_add(1, Ordering::AcqRel);
                let file = OpenFile {
                    fd: Arc::new(File::new(fd, inode.mount.in_memory)),
                    inode,
                    asked: OFlags::from_bits_retain(asked as u32),
                    by,
                    writer: (writer != 0).then_some(writer as u32),
                    written: AtomicU64::new(0),
                    direct: flags & 1 != 0,
                    appends: flags & 2 != 0,
                };
                self.0.restore_file(Arc::new(file), fh, backing)
            }
        };
        match restored {
            true => Ok(()),
            false => Err(Errno::EXIST.into()),
        }
    }

    fn restored(&self, _: &Orphans) {
        self.0.inodes.restored();
        self.0.files.restored();
        self.0.dirs.restored();
        if let Some(watcher) = self.0.restored.get() {
            let _ = watcher.send(());
        }
    }

    fn drop_handle(&self, directory: bool, fh: Handle) {
        match directory {
            true => drop(self.0.dirs.remove(fh)),
            false => drop(self.0.release_file(fh)),
        }
    }
}

impl OpenFile {
    /// The numbers that it is restored from.
    fn saved(&self) -> Vec<i32> {
        let by = match self.by {
            By::Backed => 0,
            By::Plain => 1,
            By::Around => 2,
            By::Client => 3,
        };
        let backing = self.inode.state().backing.map_or(0, |backing| backing.id);
        vec![
            self.as_fd().as_raw_fd(),
            self.asked.bits() as i32,
            by,
            backing,
            self.writer.unwrap_or(0) as i32,
            i32::from(self.direct) | i32::from(self.appends) << 1,
        ]
    }
}

impl Source {
    /// Counts an open file of the kernel's as `begin_use` has, and gives it its number.
    fn restore_file(&self, file: Arc<OpenFile>, fh: Handle, backing: i32) -> bool {
        if !self.files.restore(fh, file.clone()) {
            return false;
        }
        let mut state = file.inode.state();
        state.open = Arc::downgrade(&file.fd);
        match file.by {
            By::Around | By::Client => {}
            By::Plain => state.plain += 1,
            By::Backed => {
                let mappable = file.asked & OFlags::ACCMODE == OFlags::RDWR;
                let first = state.backing.is_none();
                let known = state.backing.get_or_insert(BackingUse {
                    id: backing,
                    opens: 0,
                    mappable: false,
                });
                known.opens += 1;
                known.mappable |= mappable;
                if first && let Some(session) = self.session.get() {
                    session.restored_backing(file.inode.node);
                }
            }
        }
        if file.by == By::Client {
            state.open = Weak::new();
        }
        true
    }

    /// Whether the mount outlives this server, so that a handler notes what it is about to do.
    pub(crate) fn outlives(&self) -> bool {
        self.session.get().is_some_and(|session| session.outlives())
    }

    /// What an earlier server had begun of this request.
    pub(crate) fn again(&self, cx: &Context) -> Option<Again> {
        self.session.get()?.again(cx)
    }

    pub(crate) fn note(&self, cx: &Context, note: u64) {
        if let Some(session) = self.session.get() {
            session.note(cx, note);
        }
    }

    /// Whether an earlier server has made this name for the same request.
    pub(crate) fn made_before(&self, cx: &Context, dir: BorrowedFd<'_>, name: &CStr) -> bool {
        let Some(again) = self.again(cx) else {
            return false;
        };
        sys::stat_at(dir, name).is_ok_and(|st| {
            let born = match st.stx_btime.tv_sec {
                0 => st.stx_ctime,
                _ => st.stx_btime,
            };
            let since = again.began.duration_since(SystemTime::UNIX_EPOCH);
            let since = since.unwrap_or_default();
            (born.tv_sec as u64, born.tv_nsec) >= (since.as_secs(), since.subsec_nanos())
        })
    }
}
