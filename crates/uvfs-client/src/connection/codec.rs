//! Requests and replies of [`super::Connection`] to and from the wire.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;

use rustix::io::{self, Errno};
use uvfs_proto::abi;
use uvfs_proto::ext;
use zerocopy::{FromBytes, Immutable, KnownLayout};

use crate::types::{Entry, Lease, LockKind, LockRequest, Recall};

pub(super) fn joined(names: &[&OsStr]) -> io::Result<Vec<u8>> {
    let mut inline = Vec::with_capacity(names.iter().map(|name| name.len() + 1).sum());
    for name in names {
        if name.as_bytes().contains(&0) {
            return Err(Errno::INVAL);
        }
        inline.extend_from_slice(name.as_bytes());
        inline.push(0);
    }
    Ok(inline)
}

pub(super) fn parse<T: FromBytes + KnownLayout + Immutable>(bytes: &[u8]) -> io::Result<T> {
    T::read_from_prefix(bytes)
        .map(|(value, _)| value)
        .map_err(|_| malformed())
}

/// For an answer that is shorter than it must be.
pub(super) fn malformed() -> Errno {
    tracing::error!("the server's answer is malformed");
    Errno::IO
}

/// The errno of a header, which has it negated.
pub(super) fn refusal(error: i32) -> Errno {
    match error.checked_neg() {
        Some(code @ 1..=4095) => Errno::from_raw_os_error(code),
        _ => malformed(),
    }
}

pub(super) fn wire(lease: Lease) -> u32 {
    match lease {
        Lease::None => ext::LEASE_NONE,
        Lease::Read => ext::LEASE_READ,
        Lease::Write => ext::LEASE_WRITE,
    }
}

pub(super) fn entry_of(bytes: &[u8]) -> io::Result<Entry> {
    let out: abi::EntryOut = parse(bytes)?;
    if out.nodeid == 0 {
        return Err(Errno::NOENT);
    }
    Ok(Entry {
        node: out.nodeid,
        attr: out.attr,
    })
}

pub(super) fn lock_in(handle: u64, request: &LockRequest) -> abi::LkIn {
    let flags = if request.flock {
        abi::LkFlags::FLOCK
    } else {
        abi::LkFlags::empty()
    };
    let kind = match request.kind {
        Some(LockKind::Shared) => libc::F_RDLCK,
        Some(LockKind::Exclusive) => libc::F_WRLCK,
        None => libc::F_UNLCK,
    };
    abi::LkIn {
        fh: handle,
        owner: request.owner.into(),
        lk: abi::FileLock {
            start: request.start,
            end: request.end,
            r#type: kind as u32,
            pid: 0,
        },
        lk_flags: flags.bits(),
        padding: 0,
    }
}

/// A recall; nothing for what is not understood.
pub(super) fn recall_of(bytes: &[u8]) -> Option<Recall> {
    let (header, rest) = abi::OutHeader::read_from_prefix(bytes).ok()?;
    let (recall, _) = ext::NotifyRecallOut::read_from_prefix(rest).ok()?;
    (header.unique == 0 && header.error == ext::NOTIFY_RECALL).then_some(Recall {
        node: recall.node,
        seq: recall.seq,
        keep: if recall.keep == ext::LEASE_READ {
            Lease::Read
        } else {
            Lease::None
        },
    })
}
