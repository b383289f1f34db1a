//! The access set of a request: the nodes and names that it looks at and changes. Leases and the
//! invalidation of the kernel's caches go by it.

use std::ffi::CStr;

use smallvec::SmallVec;
use uvfs_proto::abi::{self, SetattrValid};
use uvfs_proto::request::Operation;

use crate::fs::IOC_WRITE;
use crate::lease::Access::{self, Change, Direct, Look};

/// The part of a node that a request looks at or changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Part {
    /// Its bytes and its attributes.
    Data,
    /// Attributes alone, of those that the kernel may cache without a lifetime.
    Attributes,
    /// How many names it has.
    Links,
}

/// A node that a request uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Use {
    pub(crate) node: u64,
    pub(crate) access: Access,
    pub(crate) part: Part,
}

impl Use {
    /// The whole of a node.
    pub(crate) fn data(node: u64, access: Access) -> Self {
        let part = Part::Data;
        Self { node, access, part }
    }
}

/// The access set of one request.
///
/// Clients cache no names, so what changes only those of a directory recalls nothing.
#[derive(Debug)]
pub(crate) struct AccessSet<'a> {
    pub(crate) nodes: SmallVec<[Use; 2]>,
    /// The names that it gives to nodes or takes from them, each with its directory.
    pub(crate) names: SmallVec<[(u64, &'a CStr); 2]>,
    /// The bytes of a file that it changes, as an invalidation names them: offset, and length or 0.
    pub(crate) range: (i64, i64),
}

impl<'a> AccessSet<'a> {
    fn uses(nodes: &[(u64, Access, Part)]) -> Self {
        let of = |&(node, access, part)| Use { node, access, part };
        Self {
            nodes: nodes.iter().map(of).collect(),
            names: SmallVec::new(),
            range: (0, 0),
        }
    }

    /// Of a request that no lease is in the way of.
    pub(crate) fn nothing() -> Self {
        Self::uses(&[])
    }

    /// A name is made or removed.
    fn name(node: u64, name: &'a CStr) -> Self {
        Self {
            names: SmallVec::from_slice(&[(node, name)]),
            ..Self::nothing()
        }
    }

    fn moves(from: (u64, &'a CStr), to: (u64, &'a CStr)) -> Self {
        Self {
            names: SmallVec::from_slice(&[from, to]),
            ..Self::nothing()
        }
    }

    fn opens(node: u64, arg: &abi::OpenIn) -> Self {
        let has = |flag: i32| arg.flags & flag as u32 != 0;
        match (has(libc::O_TRUNC), has(libc::O_DIRECT)) {
            (true, _) => Self::uses(&[(node, Change, Part::Data)]),
            (false, true) => Self::uses(&[(node, Direct, Part::Data)]),
            (false, false) => Self::nothing(),
        }
    }

    fn copies(node: u64, arg: &abi::CopyFileRangeIn) -> Self {
        let to = (arg.nodeid_out, Change, Part::Data);
        match arg.nodeid_out == node {
            true => Self::uses(&[to]),
            false => Self::uses(&[(node, Look, Part::Data), to]),
        }
    }

    /// The access set of a request about `node`. Every operation has an arm, so that a new one does
    /// not compile without an answer.
    pub(crate) fn of(node: u64, operation: &Operation<'a>) -> Self {
        use Operation::*;
        match *operation {
            // A file system that does something at a close(2) does it with what clients wrote.
            Read(_) | Getattr(_) | Statx(_) | Lseek(_) | Bmap(_) | Flush(_) => {
                Self::uses(&[(node, Look, Part::Data)])
            }
            Write(arg) => Self {
                range: (arg.offset.min(i64::MAX as u64) as i64, arg.size.into()),
                ..Self::uses(&[(node, Change, Part::Data)])
            },
            Fallocate(_) => Self::uses(&[(node, Change, Part::Data)]),
            Setattr(arg) => {
                let valid = SetattrValid::from_bits_retain(arg.valid);
                let part = match valid.contains(SetattrValid::SIZE) {
                    true => Part::Data,
                    false => Part::Attributes,
                };
                Self::uses(&[(node, Change, part)])
            }
            Setxattr(..) | Removexattr(_) => Self::uses(&[(node, Change, Part::Attributes)]),
            // Flags are set by commands that bring data, which the number of one tells (ioctl(2)).
            Ioctl(arg, _) if arg.cmd & IOC_WRITE != 0 => {
                Self::uses(&[(node, Change, Part::Attributes)])
            }
            Open(arg) => Self::opens(node, &arg),
            CopyFileRange(arg) | CopyFileRange64(arg) => Self::copies(node, &arg),
            // CREATE also where it finds the file there: that is not known before.
            Create(_, name) | Mknod(_, name) | Mkdir(_, name) | Symlink { name, .. } => {
                Self::name(node, name)
            }
            Link(arg, name) => {
                let linked = (arg.oldnodeid, Change, Part::Links);
                Self {
                    nodes: Self::uses(&[linked]).nodes,
                    ..Self::name(node, name)
                }
            }
            Unlink(name) | Rmdir(name) => Self::name(node, name),
            Rename { arg, name, newname } => Self::moves((node, name), (arg.newdir, newname)),
            Rename2 { arg, name, newname } => Self::moves((node, name), (arg.newdir, newname)),
            // Nothing that a cache holds, or, in answers, what is checked as it is read.
            Lookup(_) | Readlink | Statfs | Fsync(_) | Getxattr(..) | Listxattr(_) | Init(_)
            | Opendir(_) | Readdir(_) | Readdirplus(_) | Fsyncdir(_) | Access(_) | Destroy
            | Ioctl(..) | Syncfs(_) | Tmpfile(..) | Forget(_) | BatchForget(..) | Release(_)
            | Releasedir(_) | Getlk(_) | Setlk(_) | Setlkw(_) | Interrupt(_) | Poll(_)
            | NotifyReply(_) => Self::nothing(),
        }
    }
}

#[cfg(test)]
mod tests {
    use uvfs_proto::abi::{InHeader, Opcode};
    use uvfs_proto::request::{Negotiated, Request};
    use zerocopy::IntoBytes;

    use super::*;

    const NODE: u64 = 40;
    const OTHER: u64 = 50;

    /// The nodes, and the names, of a request.
    type Found = (Vec<(u64, Access, Part)>, Vec<(u64, Vec<u8>)>);

    fn set(opcode: Opcode, structure: &[u8], payload: &[u8]) -> Found {
        let header = InHeader {
            opcode: opcode as u32,
            nodeid: NODE,
            ..Default::default()
        };
        let mut op = [0; 128];
        op[..structure.len()].copy_from_slice(structure);
        let request = Request::parse(&header, &op, payload, Negotiated::default()).unwrap();
        let set = AccessSet::of(NODE, &request.operation);
        let nodes = set.nodes.iter().map(|one| (one.node, one.access, one.part));
        let names = (set.names.iter()).map(|(node, name)| (*node, name.to_bytes().to_vec()));
        (nodes.collect(), names.collect())
    }

    /// Every opcode, and what of it has to recall leases.
    #[test]
    fn requests_say_what_they_change() {
        use Part::{Attributes, Data, Links};
        // With a structure of zeros.
        for &opcode in Opcode::ALL {
            use Opcode::*;
            let expected: &[_] = match opcode {
                Read | Getattr | Statx | Lseek | Bmap | Flush => &[(NODE, Look, Data)],
                Write | Fallocate => &[(NODE, Change, Data)],
                Setattr | Setxattr | Removexattr => &[(NODE, Change, Attributes)],
                Link | CopyFileRange | CopyFileRange64 => continue,
                _ => &[],
            };
            assert_eq!(set(opcode, &[], b"name\0to\0").0, expected, "{opcode:?}");
        }
        let of = |opcode, words: &[u32]| set(opcode, words.as_bytes(), b"name\0to\0").0;
        // The first field of the structures of SETATTR and OPEN.
        let (size, mode) = (SetattrValid::SIZE.bits(), SetattrValid::MODE.bits());
        assert_eq!(of(Opcode::Setattr, &[size | mode]), [(NODE, Change, Data)]);
        assert_eq!(of(Opcode::Setattr, &[mode]), [(NODE, Change, Attributes)]);
        let open = |flags: i32| of(Opcode::Open, &[flags as u32]);
        assert_eq!(open(libc::O_DIRECT), [(NODE, Direct, Data)]);
        assert_eq!(open(libc::O_RDWR), []);
        assert_eq!(open(libc::O_TRUNC | libc::O_DIRECT), [(NODE, Change, Data)]);
        for opcode in [Opcode::CopyFileRange, Opcode::CopyFileRange64] {
            let copy = |nodeid_out| abi::CopyFileRangeIn {
                nodeid_out,
                ..Default::default()
            };
            let both = vec![(NODE, Look, Data), (OTHER, Change, Data)];
            assert_eq!(set(opcode, copy(OTHER).as_bytes(), &[]).0, both);
            assert_eq!(
                set(opcode, copy(NODE).as_bytes(), &[]).0,
                [(NODE, Change, Data)]
            );
        }
        // FS_IOC_SETFLAGS, FS_IOC_GETFLAGS, and what imports ask for.
        let token = uvfs_proto::import::TOKEN_IOCTL;
        for (cmd, changes) in [(0x4008_6602, true), (0x8008_6601, false), (token, false)] {
            let ioctl = abi::IoctlIn {
                cmd,
                ..Default::default()
            };
            let nodes = set(Opcode::Ioctl, ioctl.as_bytes(), &[]).0;
            assert_eq!(!nodes.is_empty(), changes, "{nodes:?}");
        }
        // The other node is the first field.
        let first = |opcode, node: u64| set(opcode, node.as_bytes(), b"name\0to\0").0;
        let linked = vec![(OTHER, Change, Links)];
        assert_eq!(first(Opcode::Link, OTHER), linked);
    }

    /// The server finds each name that a request changes.
    #[test]
    fn requests_say_which_names_they_change() {
        let made = set(Opcode::Symlink, &[], b"name\0target\0").1;
        assert_eq!(made, [(NODE, b"name".to_vec())]);
        let moved = abi::RenameIn { newdir: OTHER };
        let moved = set(Opcode::Rename, moved.as_bytes(), b"from\0to\0").1;
        assert_eq!(moved, [(NODE, b"from".to_vec()), (OTHER, b"to".to_vec())]);
        let removed = set(Opcode::Unlink, &[], b"name\0").1;
        assert_eq!(removed, [(NODE, b"name".to_vec())]);
        assert_eq!(set(Opcode::Lookup, &[], b"name\0").1, []);
    }
}
