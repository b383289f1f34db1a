//! A store that throws away what is written: what is left is the writers' and the cache's own cost.

use std::io;
use std::os::fd::RawFd;
use std::sync::Arc;

use uvfs_client::backend::{Backend, FileOps, Limits, Op, PageIo, Request, SharedServer};
use uvfs_queue::arena::Arena;

/// Around a real store, which has the names.
pub struct Discard<B>(pub B);

impl<B: Backend> Backend for Discard<B> {
    fn pages(&self) -> &dyn PageIo {
        self
    }
    fn files(&self) -> &dyn FileOps {
        self.0.files()
    }
    fn shared(&self) -> Option<&dyn SharedServer> {
        self.0.shared()
    }
}

impl<B: Backend> PageIo for Discard<B> {
    fn submit(&self, batch: &mut Vec<Request>) {
        for request in batch.extract_if(.., |request| request.op == Op::Write) {
            (request.done)(Ok(request.len));
        }
        self.0.pages().submit(batch);
    }
    fn attach(&self, arena: &Arc<Arena>) -> io::Result<()> {
        self.0.pages().attach(arena)
    }
    fn limits(&self) -> Limits {
        self.0.pages().limits()
    }
    fn help(&self, done: &mut dyn FnMut() -> bool) {
        self.0.pages().help(done);
    }
    fn descriptors(&self) -> Vec<RawFd> {
        self.0.pages().descriptors()
    }
    fn reserved_pages(&self) -> u32 {
        self.0.pages().reserved_pages()
    }
    fn carry_out(&self, batch: &mut Vec<Request>) {
        self.submit(batch);
    }
    fn poll(&self, _: &mut dyn FnMut() -> bool) {}
}
