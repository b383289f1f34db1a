//! The end of a client: what it left dirty is written, and what it had is taken back.

use uvfs_io::Payload;
use uvfs_proto::abi::{self, WriteFlags};
use uvfs_proto::request::Operation;
use uvfs_queue::arena::DirtyBytes;

use super::Client;
use crate::fs::FileSystem;
use crate::pipeline::execute;
use crate::reply::{Outcome, Reply};

impl<F: FileSystem> Client<F> {
    async fn ask(&self, node: u64, operation: Operation<'_>, data: Payload) -> Outcome {
        let none = Payload::default();
        let request = self.request(node, operation, data, &none);
        execute(&self.session, &self.stats, &request).await
    }

    /// Writes what the client left dirty: through files that it had open, and where it says. Whether
    /// that was all.
    pub(crate) async fn salvage(&self) -> bool {
        let (mut written, mut lost) = (0, 0);
        for dirty in self.arena.dirty() {
            let done = self.salvage_one(&dirty).await;
            written += done;
            lost += dirty.seg.len - done;
        }
        if written + lost > 0 {
            let pid = self.pid;
            tracing::warn!(written, lost, pid, "wrote what a client left dirty");
        }
        self.salvaged.set(true);
        lost == 0
    }

    /// Writes a run of dirty bytes; how many of them were written.
    async fn salvage_one(&self, dirty: &DirtyBytes) -> u32 {
        let (node, fh) = (dirty.node, dirty.handle);
        let open = self.has(node, fh, false).is_ok() && self.access(node, fh).1;
        // Without the lease they were written already, and others' data is there now.
        if !open || !self.session.coherence.writes(&self.link, node) {
            return 0;
        }
        let mut write_flags = WriteFlags::CACHE;
        write_flags.set(WriteFlags::KILL_SUIDGID, self.uid != 0);
        let mut done = 0;
        while done < dirty.seg.len {
            let arg = abi::WriteIn {
                fh,
                offset: dirty.file_offset + u64::from(done),
                size: dirty.seg.len - done,
                write_flags: write_flags.bits(),
                ..Default::default()
            };
            let start = dirty.seg.offset as usize;
            let left = start + done as usize..start + dirty.seg.len as usize;
            let data = Payload::from(self.memory.slice(left));
            match self.ask(node, Operation::Write(arg), data).await {
                Ok(Reply::Written(out)) if out.size > 0 => done += out.size,
                _ => break,
            }
        }
        done
    }

    /// Takes back the client's handles and lookups.
    pub(crate) async fn release(&self) {
        let handles = std::mem::take(&mut *self.handles.borrow_mut());
        for (node, fh, is_directory) in handles {
            let arg = abi::ReleaseIn {
                fh,
                ..Default::default()
            };
            let release = match is_directory {
                true => Operation::Releasedir(arg),
                false => Operation::Release(arg),
            };
            let _ = self.ask(node, release, Payload::default()).await;
        }
        let lookups = std::mem::take(&mut *self.link.lookups());
        for (node, nlookup) in lookups {
            let forget = Operation::Forget(abi::ForgetIn { nlookup });
            let _ = self.ask(node, forget, Payload::default()).await;
        }
    }
}
