//! What tests need to try books with any bytes in them.

use std::ffi::CStr;
use std::io;

use uvfs_proto::abi::UNIQUE_RESEND;
use uvfs_proto::request::Operation;
use uvfs_sys::process::Orphans;

use super::book::Book;
use super::ledger::Ledger;
use crate::fs::{Context, Errno, FileSystem, Handle, Node, Origin, Payload};
use crate::request::Request;

/// The name that requests which come again remove.
const NAME: &CStr = c"no such name";

fn removes(unique: u64, room: &Payload) -> Request<'_> {
    Request {
        origin: Origin::Kernel,
        cx: Context {
            unique,
            uid: 0,
            gid: 0,
            pid: 0,
            group: None,
        },
        node: 1,
        operation: Operation::Unlink(NAME),
        data: Payload::default(),
        room,
    }
}

/// The words of a book, by their places, that a server has left.
#[doc(hidden)]
#[derive(Clone, Debug)]
pub struct Left(Vec<(usize, u64)>);

impl Left {
    /// What a server leaves that has given the kernel these nodes, and opened these files and directories.
    ///
    /// # Errors
    /// When there can be no book.
    pub fn by<F: FileSystem>(
        fs: &F,
        nodes: &[Node],
        handles: &[(bool, Node, Handle)],
    ) -> io::Result<Self> {
        let ledger = Ledger::new(Book::create()?, None, rustix::process::getpid());
        let room = Payload::default();
        for unique in 2..8 {
            let request = removes(unique, &room);
            ledger.begins(fs, unique as usize, &request);
            ledger.note(unique, 5);
            if unique % 2 == 0 {
                ledger.ends(fs, &request, &mut Err(Errno::NOENT));
            }
        }
        if let Some(fs) = fs.survive() {
            ledger.note_all(fs, nodes, handles);
        }
        Ok(Self(ledger.book().words()))
    }

    /// Has a file system take over what is left when `damage` was done to it, and a few requests come. Whatever the bytes
    /// are, this ends, and nothing panics.
    ///
    /// # Errors
    /// When there can be no book.
    pub fn take_over<F: FileSystem>(
        &self,
        damage: &[u8],
        orphans: Orphans,
        fs: &F,
    ) -> io::Result<()> {
        let book = Book::create()?;
        book.set_words(&self.0);
        book.damage(damage);
        book.args();
        let ledger = Ledger::new(book, Some(orphans), rustix::process::getpid());
        let _ = ledger.init();
        let Some(survive) = fs.survive() else {
            return Ok(());
        };
        let Ok(nodes) = ledger.restore(survive) else {
            return Ok(());
        };
        for unique in 0..9 {
            let room = Payload::default();
            let request = removes(unique | UNIQUE_RESEND, &room);
            ledger.begins(fs, unique as usize, &request);
            ledger.again(request.cx.unique);
            ledger.ends(fs, &request, &mut Err(Errno::NOENT));
        }
        let _ = ledger.devices(|| Ok(Vec::new()));
        ledger.note_all(survive, &nodes, &[]);
        ledger.settle();
        Ok(())
    }
}
