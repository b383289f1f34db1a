//! A store that throws away what is written: what is left is the writers' and the cache's own cost.

use std::ffi::OsStr;
use std::io;
use std::sync::Arc;

use uvfs_client::backend::{Limits, NewFile, Op, Request};
use uvfs_client::{Attr, Backend, Entry, NodeId, SetAttr};
use uvfs_queue::arena::Arena;

/// Around a real store, which has the names.
pub struct Discard<B>(pub B);

impl<B: Backend> Backend for Discard<B> {
    fn submit(&self, batch: &mut Vec<Request>) {
        for request in batch.extract_if(.., |request| request.op == Op::Write) {
            (request.done)(Ok(request.len));
        }
        self.0.submit(batch);
    }
    // Of the rest, what writing files needs.
    fn attach(&self, arena: &Arc<Arena>) -> io::Result<()> {
        self.0.attach(arena)
    }
    fn limits(&self) -> Limits {
        self.0.limits()
    }
    fn help(&self, done: &mut dyn FnMut() -> bool) {
        self.0.help(done);
    }
    fn lookup(&self, parent: NodeId, name: &OsStr) -> io::Result<Entry> {
        self.0.lookup(parent, name)
    }
    fn forget(&self, node: NodeId, lookups: u64) {
        self.0.forget(node, lookups);
    }
    fn getattr(&self, node: NodeId) -> io::Result<Attr> {
        self.0.getattr(node)
    }
    fn setattr(&self, node: NodeId, set: &SetAttr) -> io::Result<Attr> {
        self.0.setattr(node, set)
    }
    fn create(&self, p: NodeId, n: &OsStr, new: NewFile) -> io::Result<(Entry, u64)> {
        self.0.create(p, n, new)
    }
    fn release(&self, node: NodeId, handle: u64) {
        self.0.release(node, handle);
    }
    fn fsync(&self, node: NodeId, handle: u64, data_only: bool) -> io::Result<()> {
        self.0.fsync(node, handle, data_only)
    }
}
