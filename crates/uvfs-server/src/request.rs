//! A request, decoded once: everything behind a transport works on this and not on bytes.

use std::ffi::CStr;

use rustix::io::Result;
use smallvec::SmallVec;
use uvfs_io::Payload;
use uvfs_proto::abi::{self, InHeader, Opcode, SetattrValid, URING_OP_IN_OUT_SZ};
use uvfs_proto::request::{self, Negotiated, Operation};
use zerocopy::FromBytes;

use crate::fs::{Context, Errno, Origin};
use crate::interrupt::{Cause, Waits};
use crate::lease::Link;

/// Requests that one queue has under way at most; further ones wait in the kernel.
pub const DEPTH: usize = 64;

/// A request as a transport hands it over: bytes, and memory for the answer.
///
/// Header and structure are copies. The sender may still be able to change the payload, so only [`Message::private`]
/// reads it; the data of a WRITE goes to the store unread. The memory is owned until the answer is given.
pub(crate) struct Message {
    pub(crate) header: InHeader,
    /// The opcode's structure, and zeros.
    pub(crate) op: [u8; URING_OP_IN_OUT_SZ],
    /// Bytes of `op` that count.
    pub(crate) op_len: usize,
    /// Names, values, the data of a write: everything behind the structure.
    pub(crate) input: Payload,
    /// Room for the answer's data. May be the same memory as `input`.
    pub(crate) room: Payload,
    /// The number of the slot that it is served in, among those of all queues that read from `/dev/fuse`, or of the entry, in a mount
    /// that outlives its server; else 0.
    pub(crate) slot: usize,
}

/// A private copy of a payload. Most are a name.
pub(crate) type Private = SmallVec<[u8; 320]>;

impl Message {
    /// Whether the payload is data, which is not looked at here.
    fn has_data(&self) -> bool {
        let opcode = Opcode::try_from(self.header.opcode);
        matches!(opcode, Ok(Opcode::Write | Opcode::NotifyReply))
    }

    /// Copies the payload, once, so that its sender can't change what was checked. Empty for data.
    pub(crate) fn private(&self) -> Private {
        let mut copy = Private::new();
        if !self.has_data() {
            copy.resize(self.input.len(), 0);
            self.input.copy_out(0, &mut copy);
        }
        copy
    }

    /// Whether it is a READ of at least `size` bytes for the page cache; the caller of a direct READ waits for that
    /// one. For the transport, which chooses a thread before that thread decodes the request.
    pub(crate) fn is_large_read(&self, size: u32) -> bool {
        let arg = || abi::ReadIn::read_from_prefix(self.structure());
        let direct = libc::O_DIRECT as u32;
        self.header.opcode == Opcode::Read as u32
            && arg().is_ok_and(|(arg, _)| arg.size >= size && arg.flags & direct == 0)
    }

    /// Whether it is a WRITE by which the kernel writes back so many bytes or more of its page cache.
    pub(crate) fn is_large_writeback(&self, size: u32) -> bool {
        let arg = || abi::WriteIn::read_from_prefix(self.structure());
        let cache = abi::WriteFlags::CACHE.bits();
        self.header.opcode == Opcode::Write as u32
            && arg().is_ok_and(|(arg, _)| arg.size >= size && arg.write_flags & cache != 0)
    }

    /// Whether it is a READ or WRITE of a file that is open with O_DIRECT.
    pub(crate) fn is_direct(&self) -> bool {
        let flags = match Opcode::try_from(self.header.opcode) {
            Ok(Opcode::Read) => abi::ReadIn::read_from_prefix(self.structure())
                .map(|(arg, _)| arg.flags)
                .ok(),
            Ok(Opcode::Write) => abi::WriteIn::read_from_prefix(self.structure())
                .map(|(arg, _)| arg.flags)
                .ok(),
            _ => None,
        };
        flags.is_some_and(|flags| flags & libc::O_DIRECT as u32 != 0)
    }

    /// The structure.
    pub(crate) fn structure(&self) -> &[u8] {
        &self.op[..self.op_len]
    }

    /// The caller, as the header names it.
    pub(crate) fn context(&self) -> Context {
        Context {
            unique: self.header.unique,
            uid: self.header.uid,
            gid: self.header.gid,
            pid: self.header.pid,
            group: None,
        }
    }
}

/// A decoded request. Names and values are borrowed from the private copy of the payload.
pub(crate) struct Request<'a> {
    pub(crate) origin: Origin<&'a Link>,
    pub(crate) cx: Context,
    /// The node that the request is about.
    pub(crate) node: u64,
    pub(crate) operation: Operation<'a>,
    /// The data of a WRITE or NOTIFY_REPLY.
    pub(crate) data: Payload,
    /// Room for the answer's data.
    pub(crate) room: &'a Payload,
}

impl<'a> Request<'a> {
    /// Decodes a message, with its [`Message::private`] payload.
    pub(crate) fn decode(
        message: &'a Message,
        private: &'a [u8],
        origin: Origin<&'a Link>,
        negotiated: Negotiated,
    ) -> Result<Self> {
        let mut cx = message.context();
        let mut data = Payload::default();
        let operation = match Opcode::try_from(message.header.opcode) {
            Ok(Opcode::Write) => Operation::Write(write(message, &mut data)?),
            Ok(Opcode::NotifyReply) => Operation::NotifyReply(notify_reply(message, &mut data)?),
            _ => {
                let op = message.structure();
                let parsed = request::Request::parse(&message.header, op, private, negotiated);
                let parsed = parsed.map_err(|error| {
                    tracing::warn!(%error, "refused");
                    error.errno()
                })?;
                cx.group = parsed.supp_groups.iter().next();
                parsed.operation
            }
        };
        Ok(Self {
            origin,
            cx,
            node: message.header.nodeid,
            operation,
            data,
            room: &message.room,
        })
    }

    /// Another request by the same sender, under the same number.
    pub(crate) fn like(&self, node: u64, operation: Operation<'a>) -> Self {
        Self {
            node,
            operation,
            data: Payload::default(),
            ..*self
        }
    }

    /// This request's entry in the table of requests that wait, for when its handler has to.
    pub(crate) fn waits(&self) -> Waits {
        let cause = match self.operation {
            Operation::Setlkw(_) => Cause::Lock,
            _ => Cause::FileSystem,
        };
        let opcode = self.operation.opcode() as u32;
        Waits::new(&self.cx, opcode, self.node, cause)
    }

    /// Whether it is a SETATTR that sets the size of a file.
    pub(crate) fn sets_size(&self) -> bool {
        matches!(self.operation, Operation::Setattr(arg)
            if SetattrValid::from_bits_retain(arg.valid).contains(SetattrValid::SIZE))
    }

    /// The name by which the kernel may keep the entry in the answer.
    pub(crate) fn entry_name(&self) -> Option<&'a CStr> {
        use Operation::*;
        match self.operation {
            Lookup(name)
            | Create(_, name)
            | Mknod(_, name)
            | Mkdir(_, name)
            | Symlink { name, .. }
            | Link(_, name) => Some(name),
            _ => None,
        }
    }

    /// A CREATE that truncates the file if there is one: which one is not known before.
    pub(crate) fn truncating_create(&self) -> Option<abi::CreateIn> {
        let (truncate, new) = (libc::O_TRUNC as u32, libc::O_EXCL as u32);
        match self.operation {
            Operation::Create(arg, _) if arg.flags & (truncate | new) == truncate => Some(arg),
            _ => None,
        }
    }
}

fn write(message: &Message, data: &mut Payload) -> Result<abi::WriteIn> {
    let (arg, _) = abi::WriteIn::read_from_prefix(message.structure()).map_err(|_| Errno::INVAL)?;
    let (size, have) = (arg.size as usize, message.input.len());
    if size > have {
        tracing::warn!(size, have, "refused: a WRITE without its data");
        return Err(Errno::INVAL);
    }
    *data = message.input.slice(0..size);
    Ok(arg)
}

fn notify_reply(message: &Message, data: &mut Payload) -> Result<abi::NotifyRetrieveIn> {
    const STRUCTURE: usize = size_of::<abi::NotifyRetrieveIn>();
    let mut structure = [0; STRUCTURE];
    let input = &message.input;
    // Over io_uring (seen with 6.18) the structure comes in the payload, before the data.
    let all = (message.header.len as usize).checked_sub(size_of::<InHeader>());
    if all == Some(input.len()) && input.len() >= STRUCTURE {
        input.copy_out(0, &mut structure);
        *data = input.slice(STRUCTURE..input.len());
    } else {
        let op = message.structure().get(..STRUCTURE);
        structure.copy_from_slice(op.ok_or(Errno::INVAL)?);
        *data = input.clone();
    }
    Ok(zerocopy::transmute!(structure))
}
