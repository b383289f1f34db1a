//! The baseline: writeback that copies each page and keeps the copies in a tree.
//!
//! It is what a client has to do whose server must not hold the pages themselves: every page is
//! copied to a temporary one, found again in a tree, and ended by itself, each step under a lock.
//! Only the benchmark has it.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::RawFd;
use std::sync::{Arc, Mutex, OnceLock};

use uvfs_client::NodeId;
use uvfs_client::backend::{Backend, FileOps, Limits, Op, PageIo, Request, SharedServer};
use uvfs_queue::arena::{Arena, PAGE_SIZE};
use uvfs_queue::pair::Seg;
use uvfs_sys::lock;

/// A store that gets copies of the pages.
pub struct Copying<B> {
    store: B,
    arena: OnceLock<Arc<Arena>>,
    /// As many as the cache has pages, so that there is always one.
    reserved: u32,
    copies: Arc<Mutex<Copies>>,
}

#[derive(Default)]
struct Copies {
    idle: Vec<u32>,
    /// By inode and page of the file; the number takes apart copies of one page.
    busy: BTreeMap<(NodeId, u64, u32), u32>,
}

impl<B> Copying<B> {
    /// For a cache of `memory` bytes.
    pub fn new(store: B, memory: usize) -> Self {
        Self {
            store,
            arena: OnceLock::new(),
            reserved: memory.div_ceil(PAGE_SIZE) as u32,
            copies: Arc::default(),
        }
    }

    fn copy(&self, request: &mut Request) {
        let arena = self.arena.get().expect("attached before any request");
        let pages_start = arena.seg(0, 0, 0).offset;
        let mut keys = Vec::new();
        let mut segs = Vec::new();
        let mut at = request.offset;
        for seg in &request.segs {
            let (mut from, end) = (seg.offset, seg.offset + u64::from(seg.len));
            while from < end {
                let start = (from - pages_start) as usize % PAGE_SIZE;
                let page = ((from - pages_start) as usize / PAGE_SIZE) as u32;
                let len = (PAGE_SIZE - start).min((end - from) as usize);
                let mut copies = lock(&self.copies);
                let copy = copies.idle.pop().expect("a copy for each page");
                let key = (request.node, at / PAGE_SIZE as u64, copy);
                copies.busy.insert(key, copy);
                drop(copies);
                arena.copy_page(page, copy, start, len);
                segs.push(Seg {
                    offset: arena.seg(copy, start, len).offset,
                    len: len as u32,
                });
                keys.push(key);
                from += len as u64;
                at += len as u64;
            }
        }
        request.segs = segs;
        let copies = self.copies.clone();
        let done = std::mem::replace(&mut request.done, Box::new(|_| ()));
        request.done = Box::new(move |result| {
            for key in keys {
                let mut copies = lock(&copies);
                let copy = copies.busy.remove(&key).expect("it is under writeback");
                copies.idle.push(copy);
            }
            done(result);
        });
    }
}

impl<B: Backend> Backend for Copying<B> {
    fn pages(&self) -> &dyn PageIo {
        self
    }
    fn files(&self) -> &dyn FileOps {
        self.store.files()
    }
    fn shared(&self) -> Option<&dyn SharedServer> {
        self.store.shared()
    }
}

impl<B: Backend> PageIo for Copying<B> {
    fn attach(&self, arena: &Arc<Arena>) -> io::Result<()> {
        let pages = arena.pages();
        lock(&self.copies).idle = (pages - self.reserved..pages).rev().collect();
        self.arena.set(arena.clone()).expect("attached once");
        self.store.pages().attach(arena)
    }
    fn reserved_pages(&self) -> u32 {
        self.reserved
    }
    fn limits(&self) -> Limits {
        self.store.pages().limits()
    }
    fn submit(&self, batch: &mut Vec<Request>) {
        for request in batch
            .iter_mut()
            .filter(|r| r.op == Op::Write && r.writeback)
        {
            self.copy(request);
        }
        self.store.pages().submit(batch);
    }
    fn help(&self, done: &mut dyn FnMut() -> bool) {
        self.store.pages().help(done);
    }
    fn descriptors(&self) -> Vec<RawFd> {
        self.store.pages().descriptors()
    }
    fn carry_out(&self, batch: &mut Vec<Request>) {
        self.submit(batch);
    }
    fn poll(&self, _: &mut dyn FnMut() -> bool) {}
}
