//! The access set of a request: the nodes and names that it looks at and changes. Leases, the
//! invalidation of the kernel's caches, and the count of untracked requests all go by it.

use std::ffi::CStr;

use smallvec::SmallVec;
use uvfs_proto::abi::{self, SetattrValid};
use uvfs_proto::request::Operation;

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
    /// The names in a directory, and with them its size and times.
    Names,
}

/// A node that a request uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Use {
    pub(crate) node: u64,
    pub(crate) access: Access,
    pub(crate) part: Part,
}

/// The access set of one request.
///
/// UNLINK, RMDIR and RENAME don't say which node loses a name, and it is not in the set; a client
/// that caches attributes which change with that holds a lease of the directory as well, and this
/// one is recalled.
#[derive(Debug)]
pub(crate) struct AccessSet<'a> {
    pub(crate) nodes: SmallVec<[Use; 2]>,
    /// The names that it gives to nodes or takes from them, each with its directory.
    pub(crate) names: SmallVec<[(u64, &'a CStr); 2]>,
    /// The name by which the kernel may keep the entry in the reply.
    pub(crate) entry: Option<(u64, &'a CStr)>,
    /// The bytes of a file that it changes, as an invalidation names them: offset, and length or 0.
    pub(crate) range: (i64, i64),
    /// It changes something that may be cached, or brings attributes without naming their node, so
    /// it has to be known of even before there are clients.
    pub(crate) counted: bool,
}

impl<'a> AccessSet<'a> {
    fn uses(nodes: &[(u64, Access, Part)]) -> Self {
        let of = |&(node, access, part)| Use { node, access, part };
        Self {
            nodes: nodes.iter().map(of).collect(),
            names: SmallVec::new(),
            entry: None,
            range: (0, 0),
            counted: true,
        }
    }

    fn nothing() -> Self {
        Self::uses(&[])
    }

    fn uncounted(self) -> Self {
        Self {
            counted: false,
            ..self
        }
    }

    /// A name is made, and the reply is its entry.
    fn makes(node: u64, name: &'a CStr) -> Self {
        Self {
            entry: Some((node, name)),
            ..Self::removes(node, name)
        }
    }

    fn removes(node: u64, name: &'a CStr) -> Self {
        Self {
            names: SmallVec::from_slice(&[(node, name)]),
            ..Self::uses(&[(node, Change, Part::Names)])
        }
    }

    fn moves(from: (u64, &'a CStr), to: (u64, &'a CStr)) -> Self {
        let directories = [from.0, to.0].map(|node| (node, Change, Part::Names));
        let different = if from.0 == to.0 { 1 } else { 2 };
        Self {
            names: SmallVec::from_slice(&[from, to]),
            ..Self::uses(&directories[..different])
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
        match *operation {
            Operation::Read(_) | Operation::Getattr(_) | Operation::Statx(_) => {
                Self::uses(&[(node, Look, Part::Data)]).uncounted()
            }
            Operation::Lseek(_) | Operation::Bmap(_) => Self::uses(&[(node, Look, Part::Data)]),
            Operation::Write(arg) => Self {
                range: (arg.offset.min(i64::MAX as u64) as i64, arg.size.into()),
                ..Self::uses(&[(node, Change, Part::Data)])
            },
            Operation::Fallocate(_) => Self::uses(&[(node, Change, Part::Data)]),
            Operation::Setattr(arg) => {
                let valid = SetattrValid::from_bits_retain(arg.valid);
                let part = match valid.contains(SetattrValid::SIZE) {
                    true => Part::Data,
                    false => Part::Attributes,
                };
                Self::uses(&[(node, Change, part)])
            }
            Operation::Setxattr(..) | Operation::Removexattr(_) => {
                Self::uses(&[(node, Change, Part::Attributes)])
            }
            // Flags are set by commands that bring data, which the number of one tells (ioctl(2)).
            Operation::Ioctl(arg, _) if arg.cmd >> 30 & 1 != 0 => {
                Self::uses(&[(node, Change, Part::Attributes)])
            }
            Operation::Open(arg) => Self::opens(node, &arg),
            Operation::CopyFileRange(arg) | Operation::CopyFileRange64(arg) => {
                Self::copies(node, &arg)
            }
            // CREATE also where it finds the file there: that is not known before.
            Operation::Create(_, name)
            | Operation::Mknod(_, name)
            | Operation::Mkdir(_, name)
            | Operation::Symlink { name, .. } => Self::makes(node, name),
            Operation::Link(arg, name) => {
                let nodes = [
                    (arg.oldnodeid, Change, Part::Links),
                    (node, Change, Part::Names),
                ];
                Self {
                    nodes: Self::uses(&nodes).nodes,
                    ..Self::makes(node, name)
                }
            }
            Operation::Unlink(name) | Operation::Rmdir(name) => Self::removes(node, name),
            Operation::Rename { arg, name, newname } => {
                Self::moves((node, name), (arg.newdir, newname))
            }
            Operation::Rename2 { arg, name, newname } => {
                Self::moves((node, name), (arg.newdir, newname))
            }
            Operation::Lookup(name) => Self {
                entry: Some((node, name)),
                ..Self::nothing()
            },
            // Nothing that anybody caches, or, in answers, what is checked as it is read.
            Operation::Readlink
            | Operation::Statfs
            | Operation::Fsync(_)
            | Operation::Getxattr(..)
            | Operation::Listxattr(_)
            | Operation::Init(_)
            | Operation::Opendir(_)
            | Operation::Readdir(_)
            | Operation::Readdirplus(_)
            | Operation::Fsyncdir(_)
            | Operation::Access(_)
            | Operation::Destroy
            | Operation::Ioctl(..)
            | Operation::Setupmapping(_)
            | Operation::Removemapping(..)
            | Operation::Syncfs(_)
            | Operation::Tmpfile(..)
            | Operation::CuseInit(_) => Self::nothing(),
            Operation::Forget(_)
            | Operation::BatchForget(..)
            | Operation::Release(_)
            | Operation::Releasedir(_)
            | Operation::Flush(_)
            | Operation::Getlk(_)
            | Operation::Setlk(_)
            | Operation::Setlkw(_)
            | Operation::Interrupt(_)
            | Operation::Poll(_)
            | Operation::NotifyReply(_) => Self::nothing().uncounted(),
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

    /// Every opcode, and what of it has to recall leases: those of who cached names in a directory,
    /// attributes or data.
    #[test]
    fn requests_say_what_they_change() {
        use Part::{Attributes, Data, Links, Names};
        let of = |opcode, structure: &[u8]| set(opcode, structure, b"name\0to\0").0;
        let size = abi::SetattrIn {
            valid: (SetattrValid::SIZE | SetattrValid::MODE).bits(),
            ..Default::default()
        };
        let mode = abi::SetattrIn {
            valid: SetattrValid::MODE.bits(),
            ..Default::default()
        };
        let open = |flags: i32| abi::OpenIn {
            flags: flags as u32,
            open_flags: 0,
        };
        let copy = |nodeid_out| abi::CopyFileRangeIn {
            nodeid_out,
            ..Default::default()
        };
        let ioctl = |cmd| abi::IoctlIn {
            cmd,
            ..Default::default()
        };
        let rename = |newdir| abi::RenameIn { newdir };
        let rename2 = |newdir| abi::Rename2In {
            newdir,
            ..Default::default()
        };
        let link = abi::LinkIn { oldnodeid: OTHER };
        for &opcode in Opcode::ALL {
            let expected: &[_] = match opcode {
                Opcode::Read | Opcode::Getattr | Opcode::Statx | Opcode::Lseek | Opcode::Bmap => {
                    &[(NODE, Look, Data)]
                }
                Opcode::Write | Opcode::Fallocate => &[(NODE, Change, Data)],
                Opcode::Setattr | Opcode::Setxattr | Opcode::Removexattr => {
                    &[(NODE, Change, Attributes)]
                }
                // Also one that finds the file there: that is not known before.
                Opcode::Create
                | Opcode::Mknod
                | Opcode::Mkdir
                | Opcode::Symlink
                | Opcode::Unlink
                | Opcode::Rmdir => &[(NODE, Change, Names)],
                // Below.
                Opcode::Link
                | Opcode::Rename
                | Opcode::Rename2
                | Opcode::CopyFileRange
                | Opcode::CopyFileRange64 => continue,
                _ => &[],
            };
            assert_eq!(of(opcode, &[]), expected, "{opcode:?}");
        }
        assert_eq!(of(Opcode::Setattr, size.as_bytes()), [(NODE, Change, Data)]);
        assert_eq!(
            of(Opcode::Setattr, mode.as_bytes()),
            [(NODE, Change, Attributes)]
        );
        let direct = open(libc::O_RDONLY | libc::O_DIRECT);
        assert_eq!(of(Opcode::Open, direct.as_bytes()), [(NODE, Direct, Data)]);
        assert_eq!(of(Opcode::Open, open(libc::O_RDWR).as_bytes()), []);
        let truncates = open(libc::O_WRONLY | libc::O_TRUNC);
        assert_eq!(
            of(Opcode::Open, truncates.as_bytes()),
            [(NODE, Change, Data)]
        );
        for opcode in [Opcode::CopyFileRange, Opcode::CopyFileRange64] {
            let (to, within) = (copy(OTHER), copy(NODE));
            let both = [(NODE, Look, Data), (OTHER, Change, Data)];
            assert_eq!(of(opcode, to.as_bytes()), both);
            assert_eq!(of(opcode, within.as_bytes()), [(NODE, Change, Data)]);
        }
        // FS_IOC_SETFLAGS, FS_IOC_GETFLAGS, and what imports ask for.
        let change = [(NODE, Change, Attributes)];
        assert_eq!(of(Opcode::Ioctl, ioctl(0x4008_6602).as_bytes()), change);
        assert_eq!(of(Opcode::Ioctl, ioctl(0x8008_6601).as_bytes()), []);
        let token = ioctl(uvfs_proto::import::TOKEN_IOCTL);
        assert_eq!(of(Opcode::Ioctl, token.as_bytes()), []);
        assert_eq!(
            of(Opcode::Link, link.as_bytes()),
            [(OTHER, Change, Links), (NODE, Change, Names)]
        );
        let both = [(NODE, Change, Names), (OTHER, Change, Names)];
        assert_eq!(of(Opcode::Rename, rename(OTHER).as_bytes()), both);
        assert_eq!(of(Opcode::Rename2, rename2(OTHER).as_bytes()), both);
        assert_eq!(of(Opcode::Rename, rename(NODE).as_bytes()), both[..1]);
        assert_eq!(of(Opcode::Rename2, rename2(NODE).as_bytes()), both[..1]);
    }

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
