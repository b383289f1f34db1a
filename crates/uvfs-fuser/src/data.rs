//! Reads and writes of a program's file system, and the memory that they move.

use uvfs_server::fs::{self, Context, Node, Payload, Result};

use crate::adapter::*;
use crate::reply::Data;
use crate::*;

pub(crate) fn lock_owner(owner: fs::LockOwner) -> LockOwner {
    LockOwner(owner.0)
}

pub(crate) fn open_flags(flags: fs::OFlags) -> OpenFlags {
    OpenFlags(flags.bits() as i32)
}

impl<FS: Filesystem> Adapter<FS> {
    pub(crate) async fn read_file(
        &self,
        cx: &Context,
        node: Node,
        how: &fs::IoHow,
        data: &Payload,
    ) -> Result<usize> {
        in_range([how.offset])?;
        let (how, room) = (*how, data.clone());
        let read = self.ask(cx, move |fs, req, sender| {
            let size = room.len() as u32;
            fs.read(
                req,
                INodeNo(node.0),
                FileHandle(how.fh.0),
                how.offset,
                size,
                open_flags(how.flags),
                how.owner.map(lock_owner),
                ReplyData::new(sender, Some(room)),
            );
        });
        match read.await? {
            Data::Placed(read) => Ok(read),
            Data::Bytes(_) => Err(fs::Errno::IO.into()),
        }
    }

    pub(crate) async fn write_file(
        &self,
        cx: &Context,
        node: Node,
        how: &fs::IoHow,
        data: &Payload,
    ) -> Result<usize> {
        in_range([how.offset])?;
        let (how, data, buffers) = (*how, data.clone(), self.buffers.clone());
        // A handler on a thread of its own may read the data after its reply, when the kernel may already have
        // the memory for the next request.
        let copied = self.calls.are_elsewhere() || data.parts().len() != 1;
        let copy = copied.then(|| {
            let mut bytes = buffers.take(data.len());
            data.copy_out(0, &mut bytes[..data.len()]);
            bytes
        });
        let written = self.ask(cx, move |fs, req, reply| {
            let bytes = match &copy {
                Some(copy) => &copy[..data.len()],
                // SAFETY: the kernel has filled this memory, which belongs to this process alone as adapters
                // serve no clients. It writes there again only once the request is answered. That is done by
                // this thread, which is in the handler as long as the slice is used.
                None => unsafe { data.bytes() }.unwrap_or_default(),
            };
            let mut flags = WriteFlags::empty();
            flags.set(WriteFlags::FUSE_WRITE_CACHE, how.from_cache);
            flags.set(WriteFlags::FUSE_WRITE_LOCKOWNER, how.owner.is_some());
            flags.set(WriteFlags::FUSE_WRITE_KILL_SUIDGID, how.kill_suidgid);
            fs.write(
                req,
                INodeNo(node.0),
                FileHandle(how.fh.0),
                how.offset,
                bytes,
                flags,
                open_flags(how.flags),
                how.owner.map(lock_owner),
                reply,
            );
            if let Some(copy) = copy {
                buffers.give_back(copy);
            }
        });
        Ok(written.await? as usize)
    }
}
