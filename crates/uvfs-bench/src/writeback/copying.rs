//! The baseline: writeback that copies each page and keeps the copies in a tree.
//!
//! It is what a client has to do whose server must not hold the pages themselves: every page is
//! copied to a temporary one, found again in a tree, and ended by itself, each step under a lock.
//! Only the benchmark has it.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use uvfs_client::layer::{Op, PageIo, Request};
use uvfs_client::{Client, Config, Connection, NodeId};
use uvfs_queue::arena::{Arena, PAGE_SIZE};
use uvfs_queue::pair::Seg;
use uvfs_sys::lock;

/// A layer that sends copies of the pages.
struct Copying {
    below: Arc<Connection>,
    arena: Arc<Arena>,
    copies: Arc<Mutex<Copies>>,
}

#[derive(Default)]
struct Copies {
    idle: Vec<u32>,
    /// By inode and page of the file; the number takes apart copies of one page.
    busy: BTreeMap<(NodeId, u64, u32), u32>,
}

/// A client whose writeback copies each page.
pub fn client(connection: Connection, memory: usize) -> uvfs_client::Result<Client> {
    // As many as the cache has pages, so that there is always one.
    let reserved = memory.div_ceil(PAGE_SIZE) as u32;
    let config = Config::default().memory(memory);
    Client::layered(connection, config, reserved, |arena, below| {
        let end = arena.pages() - Connection::RESERVED_PAGES;
        let copies = Copies {
            idle: (end - reserved..end).rev().collect(),
            ..Copies::default()
        };
        Arc::new(Copying {
            below,
            arena: arena.clone(),
            copies: Arc::new(Mutex::new(copies)),
        })
    })
}

impl Copying {
    fn copy(&self, request: &mut Request) {
        let arena = &self.arena;
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

impl PageIo for Copying {
    fn submit(&self, batch: &mut Vec<Request>) {
        for request in batch
            .iter_mut()
            .filter(|r| r.op == Op::Write && r.writeback)
        {
            self.copy(request);
        }
        self.below.submit(batch);
    }

    fn poll(&self, done: &mut dyn FnMut() -> bool) {
        self.below.poll(done);
    }
}
