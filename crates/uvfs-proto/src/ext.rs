//! What uvfs's own clients and servers say beyond FUSE, over shared memory. The kernel never sends
//! these; their numbers begin at 8192, far from FUSE's.

use std::ffi::CStr;
use std::fmt::Write as _;

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::abi::{Attr, EntryOut, ReadIn};
use crate::import::{IMPORT, ImportIn};
use crate::request::{Payload, Problem, Records, arg};

/// Asks for a lease of the header's node: [`LeaseIn`], answered by [`LeaseOut`].
pub const LEASE: u32 = 8192;
/// Gives a lease back, or keeps less of it: [`LeaseReturnIn`], answered by nothing.
pub const LEASE_RETURN: u32 = 8193;
/// Finds the node of an identity: the payload is the identity, and behind it the path below the root by
/// which the client found the file, if it knows one; the header's node is the root's. Answered as
/// LOOKUP, and counts as one; ESTALE when what had the identity is gone, EOPNOTSUPP when the file
/// system has none. Answers to OPEN and CREATE of clients end with the file's identity: what finds the
/// same file again when the server was restarted. Those to IMPORT end with identity and path.
pub const FIND: u32 = 8195;
/// The longest identity and path together, in bytes.
pub const IDENTITY_MAX: usize = 2048;
/// The code of a notification that recalls a lease: [`NotifyRecallOut`] after the header.
pub const NOTIFY_RECALL: i32 = 8192;

/// No lease: nothing may be cached.
pub const LEASE_NONE: u32 = 0;
/// Pages, size and times may be cached for reading; several clients may hold it.
pub const LEASE_READ: u32 = 1;
/// Writes may be cached too; one client may hold it, and nobody else then caches anything.
pub const LEASE_WRITE: u32 = 2;

/// A request for a lease.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(C)]
pub struct LeaseIn {
    /// [`LEASE_READ`] or [`LEASE_WRITE`].
    pub mode: u32,
    /// Zero.
    pub padding: u32,
}

/// What became of a request for a lease.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(C)]
pub struct LeaseOut {
    /// The mode that was granted; [`LEASE_NONE`] when it was refused.
    pub granted: u32,
    /// When refused: milliseconds after which it is worth asking again.
    pub retry_ms: u32,
    /// The lease's number; later ones are larger. Recalls and returns name it. When refused: 1 if
    /// there is no waiting for it, as the kernel of the mount reads and writes the file without asking
    /// for as long as somebody has it open.
    pub seq: u64,
    /// The attributes at the time of the grant.
    pub attr: Attr,
}

/// Gives a lease back.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(C)]
pub struct LeaseReturnIn {
    /// The lease's number.
    pub seq: u64,
    /// What is kept: [`LEASE_NONE`], or [`LEASE_READ`] of a write lease.
    pub keep: u32,
    /// Zero.
    pub padding: u32,
}

/// Recalls a lease: write what is dirty, then return it.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(C)]
pub struct NotifyRecallOut {
    /// The node.
    pub node: u64,
    /// The lease's number.
    pub seq: u64,
    /// The most that may be kept.
    pub keep: u32,
    /// Zero.
    pub padding: u32,
}

/// LOOKUP, with leases to read of the directory and of what is found, where they can be had at once:
/// the name is the payload. Answered by [`LeasedEntry`], also when there is no such name (its node
/// is 0 then) and the directory's lease makes that worth knowing.
pub const LOOKUP: u32 = 8200;
/// READDIRPLUS, with leases to read of the directory and of each entry. The answer begins with a
/// [`ListedHead`] and the numbers of the entries' leases (0 for none), one for each entry that
/// follows; from [`LISTED_AT`] on it is as READDIRPLUS has it.
pub const LIST: u32 = 8201;
/// What a short regular file holds, and a lease to read that it holds under: [`PeekOut`], then the
/// bytes. EFBIG when they are more than fit ([`PEEK_MAX`]), EAGAIN when there is no lease now, EISDIR
/// of a directory, EOPNOTSUPP where the kernel keeps data of its own.
pub const PEEK: u32 = 8202;
/// A token for an open file of the client's own, to reach it through the mount: the header's node,
/// [`TokenIn`], answered by its 32 bytes. For ten seconds, and once, the mount's root has an entry
/// of the name [`token_name`] that is this file.
pub const TOKEN: u32 = 8203;

/// As PEEK, of several files that the client has leases of, and before any of them was opened: no
/// time of access changes. The payload is the nodes' numbers, as [`PeekAheadIn`] counts them.
/// Answered by a [`PeekedHead`] for each, and its bytes, filled up to a multiple of 8; where there is
/// no room for all of them by the first. What was answered so before and has been read since is named
/// behind them: those files' times of access change now.
pub const PEEK_AHEAD: u32 = 8204;

/// UNLINK, with which the client forgets a node, mostly what the name leads to: [`RemoveIn`], and the
/// name is the payload. Answered as UNLINK, but for ENOSYS. What nobody else has need not be kept then.
/// The node is forgotten whether or not the name could be removed; but not where the request is
/// refused (EINVAL for a node or a count that the client has not, EPERM for a guest).
pub const REMOVE: u32 = 8205;
/// CREATE, with leases to read of the directory and of the file, where they can be had at once. Answered
/// as CREATE, with [`Leases`] between the opened file and its identity.
pub const CREATE: u32 = 8206;
/// WRITE. The answer ends with the attributes after it ([`Attr`]), if those can be had.
pub const WRITE: u32 = 8207;

/// The most files of one [`PEEK_AHEAD`], of either kind.
pub const AHEAD_MAX: usize = 16;
/// The longest file that [`PEEK`] answers, in bytes.
pub const PEEK_MAX: usize = 4096 - 16;
/// The most entries of one [`LIST`].
pub const LISTED_MAX: usize = 256;
/// Where the entries of a [`LIST`] begin.
pub const LISTED_AT: usize = size_of::<ListedHead>() + 8 * LISTED_MAX;

/// A name's node, and leases.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct LeasedEntry {
    /// As LOOKUP has it.
    pub entry: EntryOut,
    /// The new lease of the directory; 0 when there is none, or the client has one.
    pub parent: u64,
    /// The new lease of the node, likewise. The attributes are as of its time.
    pub node: u64,
}

/// The leases of a name that was made.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Leases {
    /// The new lease of the directory; 0 when there is none, or the client has one.
    pub parent: u64,
    /// The new lease of the node, likewise. The attributes are as of its time.
    pub node: u64,
}

/// What a listing begins with.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(C)]
pub struct ListedHead {
    /// The new lease of the directory; 0 when there is none, or the client has one.
    pub parent: u64,
    /// Bytes of entries.
    pub len: u64,
}

/// A short file.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(C)]
pub struct PeekOut {
    /// The new lease of the node; 0 when there is none, or the client has one.
    pub lease: u64,
    /// Bytes that follow.
    pub len: u64,
}

/// How many files are asked for, and how many were read.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(C)]
pub struct PeekAheadIn {
    /// Those to be read, which come first.
    pub ahead: u32,
    /// Those that were used.
    pub used: u32,
}

/// One of several short files.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(C)]
pub struct PeekedHead {
    /// Bytes that follow.
    pub len: u32,
    /// 0, or the errno for which there are none.
    pub error: u32,
}

/// What a client forgets as it removes a name.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(C)]
pub struct RemoveIn {
    /// The node.
    pub node: u64,
    /// Lookups of it, as FORGET has them.
    pub nlookup: u64,
}

/// An open file of the client's own.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(C)]
pub struct TokenIn {
    /// Its handle.
    pub fh: u64,
}

/// A client's request beyond FUSE, as [`crate::request::Operation`] has those of FUSE. CREATE and
/// WRITE are not among them: they differ from FUSE's in their answers alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "the opcode of the same name has a description")]
pub enum Operation<'a> {
    Import(ImportIn),
    Lease(LeaseIn),
    LeaseReturn(LeaseReturnIn),
    Find(&'a [u8]),
    Lookup(&'a CStr),
    List(ReadIn),
    Peek,
    PeekAhead {
        ahead: Records<'a, u64>,
        used: Records<'a, u64>,
    },
    Token(TokenIn),
    /// The node is forgotten also where the name is none.
    Remove(RemoveIn, Result<&'a CStr, Problem>),
}

impl<'a> Operation<'a> {
    /// Parses the structure and the payload of an opcode; nothing for one that is not of these.
    pub fn parse(opcode: u32, op: &[u8], bytes: &'a [u8]) -> Option<Result<Self, Problem>> {
        let mut payload = Payload::new(bytes);
        let parsed = match opcode {
            IMPORT => arg(op).map(Self::Import),
            LEASE => arg(op).map(Self::Lease),
            LEASE_RETURN => arg(op).map(Self::LeaseReturn),
            FIND => Ok(Self::Find(bytes)),
            LOOKUP => payload.name("name").map(Self::Lookup),
            LIST => arg(op).map(Self::List),
            PEEK => Ok(Self::Peek),
            PEEK_AHEAD => arg(op).and_then(|arg| peek_ahead(arg, bytes)),
            TOKEN => arg(op).map(Self::Token),
            REMOVE => arg(op).map(|arg| Self::Remove(arg, payload.name("name"))),
            _ => return None,
        };
        Some(parsed)
    }
}

fn peek_ahead(arg: PeekAheadIn, bytes: &[u8]) -> Result<Operation<'_>, Problem> {
    const NODE: usize = size_of::<u64>();
    let most = AHEAD_MAX * NODE;
    let (ahead, used) = (arg.ahead as usize, arg.used as usize);
    let (ahead, used) = (ahead.saturating_mul(NODE), used.saturating_mul(NODE));
    if ahead > most || used > most || bytes.len() != ahead + used {
        return Err(Problem::Payload {
            need: ahead.saturating_add(used) as u64,
            have: bytes.len(),
        });
    }
    let (ahead, used) = bytes.split_at(ahead);
    Ok(Operation::PeekAhead {
        ahead: Records::new(ahead),
        used: Records::new(used),
    })
}

const TOKEN_NAME: &[u8] = b".uvfs-open-";

/// The name by which a token's file is found in the mount's root.
pub fn token_name(token: &[u8; 32]) -> String {
    let mut name = String::from_utf8_lossy(TOKEN_NAME).into_owned();
    for byte in token {
        let _ = write!(name, "{byte:02x}");
    }
    name
}

/// The token that a name stands for.
pub fn token_of_name(name: &[u8]) -> Option<[u8; 32]> {
    let digits = name.strip_prefix(TOKEN_NAME).filter(|d| d.len() == 64)?;
    let digit = |byte: u8| match byte {
        b'0'..=b'9' => Some(byte - b'0'),
        b'a'..=b'f' => Some(byte - b'a' + 10),
        _ => None,
    };
    let mut token = [0; 32];
    for (byte, pair) in token.iter_mut().zip(digits.chunks_exact(2)) {
        *byte = digit(pair[0])? << 4 | digit(pair[1])?;
    }
    Some(token)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_parsed_or_refused_whatever_they_say() {
        let parse = |opcode, op: &[u8], payload| Operation::parse(opcode, op, payload);
        let remove = RemoveIn {
            node: 5,
            nlookup: 1,
        };
        let no_name = Err(Problem::Name("name"));
        for (name, parsed) in [(&b"f\0"[..], Ok(c"f")), (b"a/b\0", no_name)] {
            let parsed = Some(Ok(Operation::Remove(remove, parsed)));
            assert_eq!(parse(REMOVE, remove.as_bytes(), name), parsed);
        }
        assert!(matches!(parse(REMOVE, &[0; 8], b"f\0"), Some(Err(_))));
        assert!(matches!(parse(LOOKUP, &[], b"f"), Some(Err(_))));
        let nodes = [3u64, 4, 5];
        for (ahead, used, len, fits) in [
            (2, 1, 24, true),
            (0, 0, 0, true),
            (2, 1, 23, false),
            (u32::MAX, u32::MAX, 24, false),
            (AHEAD_MAX as u32 + 1, 0, 24, false),
        ] {
            let op = PeekAheadIn { ahead, used };
            let parsed = parse(PEEK_AHEAD, op.as_bytes(), &nodes.as_bytes()[..len]);
            let Some(Ok(Operation::PeekAhead { ahead: a, used: u })) = parsed else {
                assert!(!fits && matches!(parsed, Some(Err(_))));
                continue;
            };
            assert!(fits && (a.len(), u.len()) == (ahead as usize, used as usize));
        }
        for opcode in [0, crate::abi::Opcode::Read as u32, CREATE, WRITE, u32::MAX] {
            assert_eq!(parse(opcode, &[0; 128], b"f\0"), None);
        }
    }

    #[test]
    fn a_token_has_a_name_and_no_other_name_a_token() {
        let token = std::array::from_fn(|at| (at as u8).wrapping_mul(9));
        let name = token_name(&token);
        assert_eq!(token_of_name(name.as_bytes()), Some(token));
        let bad = name.replace('9', "g");
        for other in ["", ".uvfs-open-", &name[..74], &bad, &(name.clone() + "0")] {
            assert_eq!(token_of_name(other.as_bytes()), None, "{other}");
        }
        assert_eq!(size_of::<LeasedEntry>(), 128 + 16);
        assert_eq!(size_of::<PeekOut>() + PEEK_MAX, 4096);
    }
}
