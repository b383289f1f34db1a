//! Encodes requests: for clients, and for tests of the parser.

use crate::abi::*;
use crate::{EncodeError, rec_align};
use std::ffi::CStr;
use zerocopy::{FromZeros, Immutable, IntoBytes};

use super::{EXTENSIONS_MINOR, Negotiated, Operation, Request, op_len, secctx_is_valid};

impl<'a> Operation<'a> {
    /// The structure's bytes, and the pieces that make up the payload, for callers that write them to
    /// memory of their own kind. The data of WRITE and NOTIFY_REPLY is not among the pieces.
    pub fn parts(&self, negotiated: Negotiated) -> (&[u8], [&'a [u8]; 2]) {
        const NONE: &[u8] = &[];
        fn bytes<T: IntoBytes + Immutable>(arg: &T) -> &[u8] {
            arg.as_bytes()
        }
        let nul = CStr::to_bytes_with_nul;
        match self {
            Operation::Readlink | Operation::Statfs | Operation::Destroy => (NONE, [NONE; 2]),
            Operation::Lookup(name)
            | Operation::Unlink(name)
            | Operation::Rmdir(name)
            | Operation::Removexattr(name) => (NONE, [nul(name), NONE]),
            Operation::Symlink { name, target } => (NONE, [nul(name), nul(target)]),
            Operation::Mknod(arg, name) => (bytes(arg), [nul(name), NONE]),
            Operation::Mkdir(arg, name) => (bytes(arg), [nul(name), NONE]),
            Operation::Link(arg, name) => (bytes(arg), [nul(name), NONE]),
            Operation::Create(arg, name) | Operation::Tmpfile(arg, name) => {
                (bytes(arg), [nul(name), NONE])
            }
            Operation::Getxattr(arg, name) => (bytes(arg), [nul(name), NONE]),
            Operation::Rename { arg, name, newname } => (bytes(arg), [nul(name), nul(newname)]),
            Operation::Rename2 { arg, name, newname } => (bytes(arg), [nul(name), nul(newname)]),
            Operation::Setxattr(arg, name, value) => (
                &bytes(arg)[..op_len(Opcode::Setxattr, negotiated)],
                [nul(name), value],
            ),
            Operation::Ioctl(arg, data) => (bytes(arg), [data, NONE]),
            Operation::BatchForget(arg, records) => (bytes(arg), [records.as_bytes(), NONE]),
            Operation::Removemapping(arg, records) => (bytes(arg), [records.as_bytes(), NONE]),
            Operation::Forget(arg) => (bytes(arg), [NONE; 2]),
            Operation::Getattr(arg) => (bytes(arg), [NONE; 2]),
            Operation::Setattr(arg) => (bytes(arg), [NONE; 2]),
            Operation::Open(arg) | Operation::Opendir(arg) => (bytes(arg), [NONE; 2]),
            Operation::Read(arg) | Operation::Readdir(arg) | Operation::Readdirplus(arg) => {
                (bytes(arg), [NONE; 2])
            }
            Operation::Write(arg) => (bytes(arg), [NONE; 2]),
            Operation::Release(arg) | Operation::Releasedir(arg) => (bytes(arg), [NONE; 2]),
            Operation::Fsync(arg) | Operation::Fsyncdir(arg) => (bytes(arg), [NONE; 2]),
            Operation::Listxattr(arg) => (bytes(arg), [NONE; 2]),
            Operation::Flush(arg) => (bytes(arg), [NONE; 2]),
            Operation::Init(arg) => (bytes(arg), [NONE; 2]),
            Operation::Getlk(arg) | Operation::Setlk(arg) | Operation::Setlkw(arg) => {
                (bytes(arg), [NONE; 2])
            }
            Operation::Access(arg) => (bytes(arg), [NONE; 2]),
            Operation::Interrupt(arg) => (bytes(arg), [NONE; 2]),
            Operation::Bmap(arg) => (bytes(arg), [NONE; 2]),
            Operation::Poll(arg) => (bytes(arg), [NONE; 2]),
            Operation::NotifyReply(arg) => (bytes(arg), [NONE; 2]),
            Operation::Fallocate(arg) => (bytes(arg), [NONE; 2]),
            Operation::Lseek(arg) => (bytes(arg), [NONE; 2]),
            Operation::CopyFileRange(arg) | Operation::CopyFileRange64(arg) => {
                (bytes(arg), [NONE; 2])
            }
            Operation::Setupmapping(arg) => (bytes(arg), [NONE; 2]),
            Operation::Syncfs(arg) => (bytes(arg), [NONE; 2]),
            Operation::Statx(arg) => (bytes(arg), [NONE; 2]),
            Operation::CuseInit(arg) => (bytes(arg), [NONE; 2]),
        }
    }

    /// Whether what follows the structure is as long as the structure says.
    fn check_sizes(&self, data: &[u8]) -> Result<(), EncodeError> {
        let (said, given) = match self {
            Operation::Write(arg) => (arg.size.into(), data.len()),
            Operation::NotifyReply(arg) => (arg.size.into(), data.len()),
            Operation::Setxattr(arg, _, value) => (arg.size.into(), value.len()),
            Operation::Ioctl(arg, data) => (arg.in_size.into(), data.len()),
            Operation::BatchForget(arg, records) => (
                u64::from(arg.count) * size_of::<ForgetOne>() as u64,
                records.as_bytes().len(),
            ),
            Operation::Removemapping(arg, records) => (
                u64::from(arg.count) * size_of::<RemovemappingOne>() as u64,
                records.as_bytes().len(),
            ),
            _ => (0, data.len()),
        };
        let given = given as u64;
        if said == given {
            Ok(())
        } else {
            Err(EncodeError::Size { said, given })
        }
    }
}

impl<'a> Request<'a> {
    /// Bytes of the extensions.
    fn extensions_len(&self) -> usize {
        let groups = match self.supp_groups.as_bytes().len() {
            0 => 0,
            len => size_of::<ExtHeader>() + size_of::<SuppGroups>() + len,
        };
        rec_align(self.secctx.len()) + rec_align(groups)
    }

    /// The header, with its lengths and opcode filled in.
    fn encoded_header(&self, data: &[u8], negotiated: Negotiated) -> Result<InHeader, EncodeError> {
        self.operation.check_sizes(data)?;
        if !self.secctx.is_empty() && !secctx_is_valid(self.secctx) {
            return Err(EncodeError::SecurityContexts);
        }
        let extensions = self.extensions_len();
        if extensions > 0 && negotiated.minor < EXTENSIONS_MINOR {
            return Err(EncodeError::Extensions(negotiated.minor));
        }
        let (op, pieces) = self.operation.parts(negotiated);
        let len = size_of::<InHeader>()
            + op.len()
            + pieces.iter().map(|piece| piece.len()).sum::<usize>()
            + data.len()
            + extensions;
        Ok(InHeader {
            len: u32::try_from(len).map_err(|_| EncodeError::TooLong("the request"))?,
            opcode: self.operation.opcode() as u32,
            total_extlen: u16::try_from(extensions / REC_ALIGN)
                .map_err(|_| EncodeError::TooLong("the extensions"))?,
            ..self.header
        })
    }

    fn push_payload(&self, data: &[u8], pieces: [&[u8]; 2], out: &mut Vec<u8>) {
        pieces
            .into_iter()
            .for_each(|piece| out.extend_from_slice(piece));
        out.extend_from_slice(data);
        // Extensions are aligned to their own start, which need not be aligned.
        let start = out.len();
        out.extend_from_slice(self.secctx);
        out.resize(start + rec_align(out.len() - start), 0);
        if !self.supp_groups.is_empty() {
            let groups = self.supp_groups.as_bytes();
            let size = size_of::<ExtHeader>() + size_of::<SuppGroups>() + groups.len();
            // Both fit: the extensions' length was checked when the header was made.
            let header = ExtHeader {
                size: size as u32,
                r#type: EXT_GROUPS,
            };
            let count = SuppGroups {
                nr_groups: self.supp_groups.len() as u32,
            };
            out.extend_from_slice(header.as_bytes());
            out.extend_from_slice(count.as_bytes());
            out.extend_from_slice(groups);
            out.resize(start + rec_align(out.len() - start), 0);
        }
    }

    /// Encodes in split form: writes the structure to the start of `op` (the rest becomes zero),
    /// appends the payload to `payload`, and gives the header. `data` is that of WRITE or
    /// NOTIFY_REPLY, else empty. On an error nothing is written.
    pub fn encode(
        &self,
        data: &[u8],
        negotiated: Negotiated,
        op: &mut [u8; URING_OP_IN_OUT_SZ],
        payload: &mut Vec<u8>,
    ) -> Result<InHeader, EncodeError> {
        let header = self.encoded_header(data, negotiated)?;
        let (structure, pieces) = self.operation.parts(negotiated);
        op.zero();
        op[..structure.len()].copy_from_slice(structure);
        self.push_payload(data, pieces, payload);
        Ok(header)
    }

    /// Appends the request in contiguous form; else as [`encode`](Self::encode).
    pub fn encode_contiguous(
        &self,
        data: &[u8],
        negotiated: Negotiated,
        out: &mut Vec<u8>,
    ) -> Result<InHeader, EncodeError> {
        let header = self.encoded_header(data, negotiated)?;
        let (structure, pieces) = self.operation.parts(negotiated);
        out.extend_from_slice(header.as_bytes());
        out.extend_from_slice(structure);
        self.push_payload(data, pieces, out);
        Ok(header)
    }
}
