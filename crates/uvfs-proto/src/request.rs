//! Requests, parsed from the split and the contiguous form.

mod payload;
mod records;

use std::ffi::CStr;
use std::fmt;

use rustix::io::Errno;
use zerocopy::FromBytes;

use crate::abi::*;
use crate::rec_align;
use payload::short_arg;
pub(crate) use payload::{Payload, arg};
pub use records::Records;

/// The version and features that client and server agreed on in INIT.
///
/// The default is what holds before: the oldest version and no features. Accept
/// [`InitFlags::SECURITY_CTX`] only from 7.38 on, as requests do not say before where their
/// security contexts begin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Negotiated {
    /// Minor version.
    pub minor: u32,
    /// Features that both sides set.
    pub flags: InitFlags,
}

impl Default for Negotiated {
    fn default() -> Self {
        Self {
            minor: MIN_MINOR_VERSION,
            flags: InitFlags::empty(),
        }
    }
}

/// First minor version whose requests have extensions.
const EXTENSIONS_MINOR: u32 = 38;

/// A request that cannot be understood.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("request {unique}, {}: {problem}", OpcodeName(*.opcode))]
pub struct ParseError {
    /// The request's opcode as it was read; 0 if the header is missing.
    pub opcode: u32,
    /// The request to which an error can be replied; 0 if the header is missing.
    pub unique: u64,
    /// The defect that was found.
    pub problem: Problem,
}

impl ParseError {
    /// The errno to reply with: ENOSYS for an unknown opcode, else EINVAL.
    pub fn errno(&self) -> Errno {
        match self.problem {
            Problem::UnknownOpcode => Errno::NOSYS,
            _ => Errno::INVAL,
        }
    }
}

/// An opcode's name, or its number if it has none.
struct OpcodeName(u32);

impl fmt::Display for OpcodeName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match Opcode::try_from(self.0) {
            Ok(opcode) => f.write_str(opcode.name()),
            Err(_) => write!(f, "opcode {}", self.0),
        }
    }
}

/// A defect of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Problem {
    /// No such opcode in protocol 7.45.
    #[error("unknown opcode")]
    UnknownOpcode,
    /// Fewer bytes than a header has.
    #[error("{0} bytes hold no header")]
    NoHeader(usize),
    /// The header's `len` is not the message's.
    #[error("the header says {said} bytes, the message has {have}")]
    Length {
        /// The length in the header.
        said: u32,
        /// Bytes in the message.
        have: usize,
    },
    /// The opcode's structure is cut off.
    #[error("its structure has {need} bytes, {have} are there")]
    Structure {
        /// Bytes of the structure.
        need: usize,
        /// Bytes given.
        have: usize,
    },
    /// A string has no NUL at its end.
    #[error("its {0} does not end")]
    Unterminated(&'static str),
    /// An entry's name is empty, has a slash, or is a dot name where none can be.
    #[error("its {0} is no name of a directory entry")]
    Name(&'static str),
    /// Fewer bytes follow than the structure announces.
    #[error("it announces {need} bytes of payload, {have} are there")]
    Payload {
        /// Bytes announced.
        need: u64,
        /// Bytes given.
        have: usize,
    },
    /// The extensions at the request's end.
    #[error("malformed extension: {0}")]
    Extension(&'static str),
}

/// The operation of a request: one variant an opcode, with a copy of its structure and references to
/// its names and values.
///
/// The names of directory entries are not empty and have no slash (but for the kernel's "/" in
/// TMPFILE). "." and ".." come in LOOKUP only, and only with [`InitFlags::EXPORT_SUPPORT`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(
    missing_docs,
    reason = "`Opcode` has a line on each; the fields are the kernel's"
)]
pub enum Operation<'a> {
    Lookup(&'a CStr),
    Forget(ForgetIn),
    Getattr(GetattrIn),
    Setattr(SetattrIn),
    Readlink,
    Symlink {
        name: &'a CStr,
        target: &'a CStr,
    },
    Mknod(MknodIn, &'a CStr),
    Mkdir(MkdirIn, &'a CStr),
    Unlink(&'a CStr),
    Rmdir(&'a CStr),
    Rename {
        arg: RenameIn,
        name: &'a CStr,
        newname: &'a CStr,
    },
    Link(LinkIn, &'a CStr),
    Open(OpenIn),
    Read(ReadIn),
    /// The data is the payload, which has at least `size` bytes.
    Write(WriteIn),
    Statfs,
    Release(ReleaseIn),
    Fsync(FsyncIn),
    /// The value has `size` bytes.
    Setxattr(SetxattrIn, &'a CStr, &'a [u8]),
    Getxattr(GetxattrIn, &'a CStr),
    Listxattr(GetxattrIn),
    Removexattr(&'a CStr),
    Flush(FlushIn),
    /// Zeros stand for what an older kernel does not send.
    Init(InitIn),
    Opendir(OpenIn),
    Readdir(ReadIn),
    Releasedir(ReleaseIn),
    Fsyncdir(FsyncIn),
    Getlk(LkIn),
    Setlk(LkIn),
    Setlkw(LkIn),
    Access(AccessIn),
    Create(CreateIn, &'a CStr),
    Interrupt(InterruptIn),
    Bmap(BmapIn),
    Destroy,
    /// The data has `in_size` bytes.
    Ioctl(IoctlIn, &'a [u8]),
    Poll(PollIn),
    /// The data is the payload, which has at least `size` bytes.
    NotifyReply(NotifyRetrieveIn),
    /// There are `count` records.
    BatchForget(BatchForgetIn, Records<'a, ForgetOne>),
    Fallocate(FallocateIn),
    Readdirplus(ReadIn),
    Rename2 {
        arg: Rename2In,
        name: &'a CStr,
        newname: &'a CStr,
    },
    Lseek(LseekIn),
    CopyFileRange(CopyFileRangeIn),
    Syncfs(SyncfsIn),
    Tmpfile(CreateIn, &'a CStr),
    Statx(StatxIn),
    CopyFileRange64(CopyFileRangeIn),
}

/// A parsed request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request<'a> {
    /// The operation.
    pub operation: Operation<'a>,
    /// The caller's supplementary groups; the kernel sends one, the parent directory's, if the
    /// caller is in it ([`InitFlags::CREATE_SUPP_GROUP`]).
    pub supp_groups: Records<'a, u32>,
}

/// Bytes of the structure between header and payload.
///
/// That of INIT may be as short as [`COMPAT_INIT_IN_SIZE`] from kernels before 7.36.
pub const fn op_len(opcode: Opcode, negotiated: Negotiated) -> usize {
    match opcode {
        Opcode::Setxattr if !negotiated.flags.contains(InitFlags::SETXATTR_EXT) => {
            COMPAT_SETXATTR_IN_SIZE
        }
        _ => opcode.structure_len(),
    }
}

/// Cuts a contiguous message, as read from `/dev/fuse`, into header, structure and payload.
pub fn split(bytes: &[u8], negotiated: Negotiated) -> Result<(InHeader, &[u8], &[u8]), ParseError> {
    let Ok((header, rest)) = InHeader::read_from_prefix(bytes) else {
        return Err(ParseError {
            opcode: 0,
            unique: 0,
            problem: Problem::NoHeader(bytes.len()),
        });
    };
    let fail = |problem| ParseError {
        opcode: header.opcode,
        unique: header.unique,
        problem,
    };
    if header.len as usize != bytes.len() {
        return Err(fail(Problem::Length {
            said: header.len,
            have: bytes.len(),
        }));
    }
    let opcode = Opcode::try_from(header.opcode).map_err(|_| fail(Problem::UnknownOpcode))?;
    let mut need = op_len(opcode, negotiated);
    if opcode == Opcode::Init && rest.len() < need {
        need = rest.len().max(COMPAT_INIT_IN_SIZE);
    }
    let (op, payload) = rest.split_at_checked(need).ok_or_else(|| {
        fail(Problem::Structure {
            need,
            have: rest.len(),
        })
    })?;
    Ok((header, op, payload))
}

impl<'a> Operation<'a> {
    /// Its opcode.
    pub const fn opcode(&self) -> Opcode {
        macro_rules! opcode {
            ($($variant:ident)*) => {
                match self { $(Operation::$variant { .. } => Opcode::$variant,)* }
            };
        }
        opcode! {
            Lookup Forget Getattr Setattr Readlink Symlink Mknod Mkdir Unlink Rmdir Rename Link
            Open Read Write Statfs Release Fsync Setxattr Getxattr Listxattr Removexattr Flush Init
            Opendir Readdir Releasedir Fsyncdir Getlk Setlk Setlkw Access Create Interrupt Bmap
            Destroy Ioctl Poll NotifyReply BatchForget Fallocate Readdirplus Rename2 Lseek
            CopyFileRange Syncfs Tmpfile Statx CopyFileRange64
        }
    }

    fn parse(
        opcode: Opcode,
        op: &[u8],
        payload: &'a [u8],
        negotiated: Negotiated,
    ) -> Result<Self, Problem> {
        let dots = opcode == Opcode::Lookup && negotiated.flags.contains(InitFlags::EXPORT_SUPPORT);
        let mut payload = Payload {
            dots,
            ..Payload::new(payload)
        };
        Ok(match opcode {
            Opcode::Lookup => Operation::Lookup(payload.name("name")?),
            Opcode::Forget => Operation::Forget(arg(op)?),
            Opcode::Getattr => Operation::Getattr(arg(op)?),
            Opcode::Setattr => Operation::Setattr(arg(op)?),
            Opcode::Readlink => Operation::Readlink,
            Opcode::Symlink => Operation::Symlink {
                name: payload.name("name")?,
                target: payload.string("target")?,
            },
            Opcode::Mknod => Operation::Mknod(arg(op)?, payload.name("name")?),
            Opcode::Mkdir => Operation::Mkdir(arg(op)?, payload.name("name")?),
            Opcode::Unlink => Operation::Unlink(payload.name("name")?),
            Opcode::Rmdir => Operation::Rmdir(payload.name("name")?),
            Opcode::Rename => Operation::Rename {
                arg: arg(op)?,
                name: payload.name("old name")?,
                newname: payload.name("new name")?,
            },
            Opcode::Link => Operation::Link(arg(op)?, payload.name("name")?),
            Opcode::Open => Operation::Open(arg(op)?),
            Opcode::Read => Operation::Read(arg(op)?),
            Opcode::Write => {
                let arg: WriteIn = arg(op)?;
                payload.data(arg.size.into())?;
                Operation::Write(arg)
            }
            Opcode::Statfs => Operation::Statfs,
            Opcode::Release => Operation::Release(arg(op)?),
            Opcode::Fsync => Operation::Fsync(arg(op)?),
            Opcode::Setxattr => {
                let len = op_len(opcode, negotiated);
                let arg: SetxattrIn = short_arg(&op[..op.len().min(len)], len)?;
                let name = payload.string("attribute's name")?;
                Operation::Setxattr(arg, name, payload.data(arg.size.into())?)
            }
            Opcode::Getxattr => Operation::Getxattr(arg(op)?, payload.string("attribute's name")?),
            Opcode::Listxattr => Operation::Listxattr(arg(op)?),
            Opcode::Removexattr => Operation::Removexattr(payload.string("attribute's name")?),
            Opcode::Flush => Operation::Flush(arg(op)?),
            Opcode::Init => Operation::Init(short_arg(op, COMPAT_INIT_IN_SIZE)?),
            Opcode::Opendir => Operation::Opendir(arg(op)?),
            Opcode::Readdir => Operation::Readdir(arg(op)?),
            Opcode::Releasedir => Operation::Releasedir(arg(op)?),
            Opcode::Fsyncdir => Operation::Fsyncdir(arg(op)?),
            Opcode::Getlk => Operation::Getlk(arg(op)?),
            Opcode::Setlk => Operation::Setlk(arg(op)?),
            Opcode::Setlkw => Operation::Setlkw(arg(op)?),
            Opcode::Access => Operation::Access(arg(op)?),
            Opcode::Create => Operation::Create(arg(op)?, payload.name("name")?),
            Opcode::Interrupt => Operation::Interrupt(arg(op)?),
            Opcode::Bmap => Operation::Bmap(arg(op)?),
            Opcode::Destroy => Operation::Destroy,
            Opcode::Ioctl => {
                let arg: IoctlIn = arg(op)?;
                Operation::Ioctl(arg, payload.data(arg.in_size.into())?)
            }
            Opcode::Poll => Operation::Poll(arg(op)?),
            Opcode::NotifyReply => {
                let arg: NotifyRetrieveIn = arg(op)?;
                payload.data(arg.size.into())?;
                Operation::NotifyReply(arg)
            }
            Opcode::BatchForget => {
                let arg: BatchForgetIn = arg(op)?;
                Operation::BatchForget(arg, payload.records(arg.count)?)
            }
            Opcode::Fallocate => Operation::Fallocate(arg(op)?),
            Opcode::Readdirplus => Operation::Readdirplus(arg(op)?),
            Opcode::Rename2 => Operation::Rename2 {
                arg: arg(op)?,
                name: payload.name("old name")?,
                newname: payload.name("new name")?,
            },
            Opcode::Lseek => Operation::Lseek(arg(op)?),
            Opcode::CopyFileRange => Operation::CopyFileRange(arg(op)?),
            Opcode::Syncfs => Operation::Syncfs(arg(op)?),
            // The file has no name: what the kernel sends in its place is no entry.
            Opcode::Tmpfile => Operation::Tmpfile(arg(op)?, payload.string("name")?),
            Opcode::Statx => Operation::Statx(arg(op)?),
            Opcode::CopyFileRange64 => Operation::CopyFileRange64(arg(op)?),
        })
    }
}

impl<'a> Request<'a> {
    /// Parses a request in split form.
    ///
    /// `op` starts with the opcode's structure and may be longer than it; `payload` is what
    /// follows the structure. Bytes after what the opcode needs are ignored; extensions end
    /// with the payload. The header's `len` is not looked at.
    pub fn parse(
        header: &InHeader,
        op: &[u8],
        payload: &'a [u8],
        negotiated: Negotiated,
    ) -> Result<Self, ParseError> {
        let fail = |problem| ParseError {
            opcode: header.opcode,
            unique: header.unique,
            problem,
        };
        let opcode = Opcode::try_from(header.opcode).map_err(|_| fail(Problem::UnknownOpcode))?;
        let extensions = if negotiated.minor >= EXTENSIONS_MINOR {
            usize::from(header.total_extlen) * REC_ALIGN
        } else {
            0
        };
        let Some(end) = payload.len().checked_sub(extensions) else {
            return Err(fail(Problem::Payload {
                need: extensions as u64,
                have: payload.len(),
            }));
        };
        let (payload, extensions) = payload.split_at(end);
        let operation = Operation::parse(opcode, op, payload, negotiated).map_err(fail)?;
        Ok(Self {
            operation,
            supp_groups: supp_groups(extensions).map_err(fail)?,
        })
    }
}

/// The groups among a request's extensions. Security contexts are of no use to a server that stores none, and are
/// passed over, as is what this crate does not know.
fn supp_groups(mut bytes: &[u8]) -> Result<Records<'_, u32>, Problem> {
    let mut found = Records::default();
    while !bytes.is_empty() {
        let (header, _) = ExtHeader::read_from_prefix(bytes)
            .map_err(|_| Problem::Extension("no room for its header"))?;
        let size = header.size as usize;
        if size < size_of::<ExtHeader>() || size > bytes.len() {
            return Err(Problem::Extension("its size is out of range"));
        }
        if header.r#type == EXT_GROUPS {
            let (groups, rest) = SuppGroups::read_from_prefix(&bytes[size_of::<ExtHeader>()..size])
                .map_err(|_| Problem::Extension("no number of groups"))?;
            found = Payload::new(rest)
                .records(groups.nr_groups)
                .map_err(|_| Problem::Extension("groups are cut off"))?;
        }
        // `bytes` is a whole number of alignments, so the padding is there too.
        bytes = &bytes[rec_align(size)..];
    }
    Ok(found)
}
