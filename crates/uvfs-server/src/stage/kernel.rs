//! Answers the kernel's requests, in every stage, and notifies the kernel of what the answers can't say: its page
//! cache may be older, or newer, than what a handler reads or writes (`coherence/opens.rs`), and some answers have no
//! field for all that changed.

use std::ffi::CStr;

use uvfs_proto::abi::{self, NotifyCode, OpenFlags};
use uvfs_proto::import::{TOKEN_IOCTL, TokenOut};
use uvfs_proto::request::Operation;
use zerocopy::IntoBytes;

use crate::coherence::Since;
use crate::dispatch::{self, SEEK_DATA, SEEK_HOLE};
use crate::fs::{Errno, FileSystem, Handle, IOC_WRITE, Node, OFlags};
use crate::notify;
use crate::reply::{Body, OpenReply, Outcome, Reply};
use crate::request::Request;
use crate::session::Session;

/// Answers a request of the kernel's, by [`dispatch::answer`].
pub(super) async fn answer<F: FileSystem>(session: &Session<F>, request: &Request<'_>) -> Outcome {
    let (coherence, node) = (&session.coherence, request.node);
    match &request.operation {
        Operation::Read(arg) => {
            coherence.sees(node, arg, request.room.len());
            let outcome = dispatch::answer(session, request).await;
            if let Ok(Reply::Read(len)) = outcome {
                session.moved(node, arg.offset, len);
            }
            outcome
        }
        Operation::Write(arg) => {
            let outcome = dispatch::answer(session, request).await;
            if let Ok(Reply::Written(out)) = &outcome {
                session.moved(node, arg.offset, out.size as usize);
            }
            if coherence.may_go_past(arg) {
                // Rare, and large.
                Box::pin(coherence.direct_write(node, arg)).await;
            }
            outcome
        }
        Operation::Open(arg) => {
            let since = coherence.now();
            let mut outcome = dispatch::answer(session, request).await;
            if let Ok(Reply::Opened(file)) = &mut outcome {
                if file.changed {
                    session.drop_attributes(node);
                }
                if let Some(contents) = file.contents.take() {
                    give_contents(session, node, &contents, since);
                }
                opened(session, node, arg.flags, file);
            }
            outcome
        }
        Operation::Create(arg, _) | Operation::Tmpfile(arg, _) => {
            let outcome = dispatch::answer(session, request).await;
            if let Ok(Reply::Created(entry, file)) = &outcome {
                opened(session, entry.nodeid, arg.flags, file);
            }
            outcome
        }
        Operation::Release(arg) => {
            coherence.released(node, arg.fh, OFlags::from_bits_retain(arg.flags));
            dispatch::answer(session, request).await
        }
        Operation::Lseek(arg) if coherence.may_be_dirty(node) => {
            Box::pin(seek_written(session, request, arg)).await
        }
        Operation::Setattr(_) => super::in_turn(session, request).await,
        Operation::Setxattr(_, name, _) | Operation::Removexattr(name) => {
            let outcome = dispatch::answer(session, request).await;
            if outcome.is_ok() && is_part_of_mode(name) {
                session.drop_attributes(node);
            }
            outcome
        }
        Operation::Ioctl(arg, _) if arg.cmd == TOKEN_IOCTL => token(session, request, arg),
        Operation::Ioctl(arg, _) => {
            let outcome = dispatch::answer(session, request).await;
            if outcome.is_ok() && arg.cmd & IOC_WRITE != 0 {
                // It changed attributes that the kernel has, such as the time of a change.
                session.drop_attributes(node);
            }
            outcome
        }
        _ => dispatch::answer(session, request).await,
    }
}

/// Gives a program a token of an open file, for a client.
fn token<F: FileSystem>(
    session: &Session<F>,
    request: &Request<'_>,
    arg: &abi::IoctlIn,
) -> Outcome {
    let token = session.token_for(Node(request.node), Handle(arg.fh), request.cx.uid);
    let token = dispatch::end(Some(token), request.operation.opcode().name(), request.node)?;
    let mut answer = Body::from_slice(abi::IoctlOut::default().as_bytes());
    let room = size_of::<TokenOut>().min(arg.out_size as usize);
    answer.extend_from_slice(&token.as_bytes()[..room]);
    Ok(Reply::Bytes(answer))
}

/// Gives the kernel all that is in a file, with the answer to its open.
fn give_contents<F: FileSystem>(session: &Session<F>, node: u64, data: &[u8], since: Since) {
    // A client may have changed them since they were read. In a mount that outlives its server, an earlier server may have the
    // request that has locked the page.
    if !session.coherence.tracks() && session.ledger().is_none() {
        let contents = notify::store(node, 0, data);
        session.tell(node, NotifyCode::Store, &contents, data);
        session.coherence.shows_pages(node, since);
    }
}

/// Notes an open of the kernel's, and counts what `uvfs stats` shows of one.
fn opened<F: FileSystem>(session: &Session<F>, node: u64, flags: u32, file: &OpenReply) {
    let back = session.kernel_writes_back();
    let flags = OFlags::from_bits_retain(flags);
    session.coherence.opened(node, flags, &file.out, back);
    if OpenFlags::from_bits_retain(file.out.open_flags).contains(OpenFlags::PASSTHROUGH) {
        session.counts_backed_open();
    }
}

/// Whether an extended attribute is an access control list. Setting one may change the mode, which the answer does
/// not carry. Other attributes change only ctime, which the kernel updates by itself.
fn is_part_of_mode(name: &CStr) -> bool {
    name.to_bytes().starts_with(b"system.")
}

/// An LSEEK, where the kernel may have dirty pages in what the file system takes for a hole: it writes them back first.
/// Where the file system has data there is nothing to write.
async fn seek_written<F: FileSystem>(
    session: &Session<F>,
    request: &Request<'_>,
    arg: &abi::LseekIn,
) -> Outcome {
    let seek = async |offset, whence| {
        let arg = abi::LseekIn {
            offset,
            whence,
            ..*arg
        };
        match dispatch::answer(session, &request.like(request.node, Operation::Lseek(arg))).await? {
            Reply::Sought(out) => Ok(out.offset),
            _ => Err(Errno::IO),
        }
    };
    let mut written = arg.offset;
    loop {
        let found = seek(arg.offset, arg.whence).await;
        // The hole that the answer goes by; one without an end goes on behind the end of the file.
        let (begin, end) = match (arg.whence, found) {
            (SEEK_DATA, Ok(data)) => (arg.offset, Some(data)),
            (SEEK_HOLE, Ok(hole)) => (hole, seek(hole, SEEK_DATA).await.ok()),
            (_, Err(Errno::NXIO)) => (arg.offset, None),
            _ => (u64::MAX, None),
        };
        let begin = begin.max(written);
        if end.is_some_and(|end| end <= begin) || begin == u64::MAX {
            return found.map(|offset| Reply::Sought(abi::LseekOut { offset }));
        }
        let coherence = &session.coherence;
        coherence.write_back_hole(request.node, begin, end).await;
        written = end.unwrap_or(u64::MAX);
    }
}
