//! The end of a client: what it left dirty is written, and what it had is taken back.

use std::cell::Cell;
use std::rc::Rc;

use foldhash::HashMap;
use futures_util::future::join_all;
use uvfs_io::Payload;
use uvfs_proto::abi::{self, WriteFlags};
use uvfs_proto::request::Operation;
use uvfs_queue::arena::DirtyBytes;

use super::Client;
use super::tasks::{contained, yield_now};
use crate::fs::FileSystem;
use crate::pipeline::execute;
use crate::reply::{Outcome, Reply};

/// Of so many dirty pages it is found out at a time whether they may be written; others on the thread are served
/// in between.
const AT_ONCE: usize = 256;

/// Runs tasks until all have ended; none waits for another, and one that panics ends alone.
async fn side_by_side(tasks: impl Iterator<Item: Future<Output = ()>>) {
    join_all(tasks.map(contained)).await;
}

impl<F: FileSystem> Client<F> {
    async fn ask(&self, node: u64, operation: Operation<'_>, data: Payload) -> Outcome {
        let none = Payload::default();
        let request = self.request(node, operation, data, &none);
        execute(&self.session, &self.stats, &request).await
    }

    /// Writes what the client left dirty: through files that it had open, and where it says. Whether
    /// that was all. Each file is written by itself, and its lease then ends: one on a mount that hangs
    /// holds up no other.
    pub(crate) async fn salvage(self: &Rc<Self>) -> bool {
        let (mut files, mut lost) = (HashMap::<u64, Vec<DirtyBytes>>::default(), 0);
        for (count, dirty) in self.arena.dirty().enumerate() {
            if count % AT_ONCE == AT_ONCE - 1 {
                yield_now().await;
            }
            match self.may_be_written(&dirty) {
                true => files.entry(dirty.node).or_default().push(dirty),
                false => lost += u64::from(dirty.seg.len),
            }
        }
        let coherence = &self.session.coherence;
        coherence.give_up(&self.link, |node| !files.contains_key(&node));
        let all = files.values().flatten();
        let left: u64 = lost + all.map(|dirty| u64::from(dirty.seg.len)).sum::<u64>();
        let written = Rc::new(Cell::new(0));
        side_by_side(files.into_iter().map(|(node, dirty)| {
            let (me, written) = (self.clone(), written.clone());
            async move {
                for dirty in dirty {
                    let done = me.salvage_one(&dirty).await;
                    written.set(written.get() + u64::from(done));
                }
                me.session.coherence.forget(&me.link, node);
            }
        }))
        .await;
        let (written, pid) = (written.get(), self.pid);
        let lost = left - written;
        if left > 0 {
            tracing::warn!(written, lost, pid, "wrote what a client left dirty");
        }
        self.salvaged.set(true);
        lost == 0
    }

    /// Whether dirty bytes are of a file that the client had open for writing, and has a write lease of: without,
    /// they were written already, and others' data is there now.
    fn may_be_written(&self, dirty: &DirtyBytes) -> bool {
        let (node, fh) = (dirty.node, dirty.handle);
        let open = self.has(node, fh, false).is_ok() && self.access(node, fh).1;
        open && self.session.coherence.writes(&self.link, node)
    }

    /// Writes a run of dirty bytes; how many of them were written.
    async fn salvage_one(&self, dirty: &DirtyBytes) -> u32 {
        let (node, fh) = (dirty.node, dirty.handle);
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
    pub(crate) async fn release(self: &Rc<Self>) {
        let handles = std::mem::take(&mut *self.handles.borrow_mut());
        side_by_side(
            handles
                .into_iter()
                .map(|((node, fh, is_directory), count)| {
                    let me = self.clone();
                    async move {
                        let arg = abi::ReleaseIn {
                            fh,
                            ..Default::default()
                        };
                        for _ in 0..count {
                            let release = match is_directory {
                                true => Operation::Releasedir(arg),
                                false => Operation::Release(arg),
                            };
                            let _ = me.ask(node, release, Payload::default()).await;
                        }
                    }
                }),
        )
        .await;
        let lookups = std::mem::take(&mut *self.link.lookups());
        self.forgot_nodes(lookups.len());
        for (node, nlookup) in lookups {
            let forget = Operation::Forget(abi::ForgetIn { nlookup });
            let _ = self.ask(node, forget, Payload::default()).await;
        }
    }
}
