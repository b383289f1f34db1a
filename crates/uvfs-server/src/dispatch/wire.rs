//! Between the structures of the wire and those of `FileSystem`.

use uvfs_proto::abi::{self, GetattrFlags, SetattrValid};
use uvfs_proto::reply;

use super::Outcome;
use crate::fs::*;
use crate::reply::{Body, Reply};

/// The kernel's limit for a value and for a list of names (XATTR_SIZE_MAX).
const XATTR_MAX: usize = 65536;

pub(crate) fn entry_out(entry: &Entry) -> abi::EntryOut {
    let mut out = abi::EntryOut {
        nodeid: entry.node.0,
        generation: entry.generation,
        attr: entry.attr,
        ..Default::default()
    };
    out.set_entry_ttl(entry.entry_ttl);
    out.set_attr_ttl(entry.attr_ttl);
    out
}

pub(super) fn attr_out(attributes: &Attributes) -> abi::AttrOut {
    let (attr_valid, attr_valid_nsec) = reply::ttl(attributes.ttl);
    abi::AttrOut {
        attr_valid,
        attr_valid_nsec,
        dummy: 0,
        attr: attributes.attr,
    }
}

pub(super) fn set_attr(arg: &abi::SetattrIn) -> SetAttr {
    use SetattrValid as Valid;
    let valid = Valid::from_bits_retain(arg.valid);
    let has = |flag| valid.contains(flag);
    let time = |flag, now, secs: u64, nanos| match has(now) {
        _ if !has(flag) => None,
        true => Some(SetTime::Now),
        false => Some(SetTime::At(secs as i64, nanos)),
    };
    SetAttr {
        mode: has(Valid::MODE).then(|| Mode::from_raw_mode(arg.mode)),
        kind: has(Valid::MODE)
            .then(|| FileType::from_raw_mode(arg.mode))
            .filter(|&kind| kind != FileType::Unknown),
        uid: has(Valid::UID).then_some(arg.uid),
        gid: has(Valid::GID).then_some(arg.gid),
        size: has(Valid::SIZE).then_some(arg.size),
        atime: time(Valid::ATIME, Valid::ATIME_NOW, arg.atime, arg.atimensec),
        mtime: time(Valid::MTIME, Valid::MTIME_NOW, arg.mtime, arg.mtimensec),
        ctime: has(Valid::CTIME).then_some(SetTime::At(arg.ctime as i64, arg.ctimensec)),
        fh: has(Valid::FH).then_some(Handle(arg.fh)),
        kill_suidgid: has(Valid::KILL_SUIDGID),
    }
}

pub(super) fn lock(arg: &abi::LkIn, wait: bool) -> (LockHow, Lock) {
    let flock = abi::LkFlags::from_bits_retain(arg.lk_flags).contains(abi::LkFlags::FLOCK);
    let how = LockHow {
        fh: Handle(arg.fh),
        owner: LockOwner(arg.owner),
        flock,
        wait,
    };
    let lock = Lock {
        start: arg.lk.start,
        end: arg.lk.end,
        kind: arg.lk.r#type,
        pid: arg.lk.pid,
    };
    (how, lock)
}

/// The answer of getxattr(2) and listxattr(2) for a buffer of `size` bytes; 0 asks for the length.
pub(super) fn sized(value: &[u8], size: u32) -> Outcome {
    if value.len() > XATTR_MAX {
        return Err(Errno::TOOBIG.into());
    }
    if size == 0 {
        return Ok(Reply::of(&abi::GetxattrOut {
            size: value.len() as u32,
            padding: 0,
        }));
    }
    if value.len() > size as usize {
        return Err(Errno::RANGE.into());
    }
    Ok(Reply::Bytes(Body::from_slice(value)))
}

pub(super) fn data_only(arg: &abi::FsyncIn) -> bool {
    arg.fsync_flags & abi::FSYNC_FDATASYNC != 0
}

pub(super) fn new_node(kind: FileType, mode: u32, umask: u32, rdev: u32) -> NewNode {
    let mode = Mode::from_raw_mode(mode);
    let umask = Mode::from_raw_mode(umask);
    NewNode {
        kind,
        mode,
        umask,
        rdev,
    }
}

/// The type that mknod(2) makes, which takes none for a regular file.
pub(super) fn type_of(mode: u32) -> FileType {
    match mode & libc::S_IFMT {
        0 => FileType::RegularFile,
        _ => FileType::from_raw_mode(mode),
    }
}

pub(super) fn with_fh(flags: u32, fh: u64) -> Option<Handle> {
    GetattrFlags::from_bits_retain(flags)
        .contains(GetattrFlags::FH)
        .then_some(Handle(fh))
}

pub(super) fn created((entry, opened): (Entry, Opened)) -> Reply {
    Reply::Created(entry_out(&entry), opened.into())
}
