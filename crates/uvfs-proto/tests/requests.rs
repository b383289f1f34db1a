//! Requests in both forms: what the kernel sends parses to what it means, what is cut off is refused,
//! and no bytes make the parser panic.

use std::ffi::{CStr, CString};

use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::select;
use rustix::io::Errno;
use uvfs_proto::abi::*;
use uvfs_proto::request::{Negotiated, Operation, Problem, Records, Request, op_len, split};
use zerocopy::{FromBytes, IntoBytes};

const LATEST: Negotiated = Negotiated {
    minor: KERNEL_MINOR_VERSION,
    flags: InitFlags::SETXATTR_EXT,
};

/// The bytes that an operation is decoded from.
#[derive(Debug, Clone)]
struct Material {
    opcode: Opcode,
    structure: Vec<u8>,
    name: CString,
    other: CString,
    data: Vec<u8>,
    groups: Vec<u32>,
    /// What an extension holds that no server knows.
    unknown: Vec<u8>,
}

fn name() -> impl Strategy<Value = CString> {
    vec(
        any::<u8>().prop_filter("no NUL or slash", |b| ![0, b'/'].contains(b)),
        1..40,
    )
    .prop_filter("no dots", |name| ![&b"."[..], b".."].contains(&&name[..]))
    .prop_map(|name| CString::new(name).unwrap())
}

fn material() -> impl Strategy<Value = Material> {
    (
        select(Opcode::ALL),
        vec(any::<u8>(), 128),
        name(),
        name(),
        vec(any::<u8>(), 0..100),
        vec(any::<u32>(), 0..4),
        vec(any::<u8>(), 0..20),
    )
        .prop_map(
            |(opcode, structure, name, other, data, groups, unknown)| Material {
                opcode,
                structure,
                name,
                other,
                data,
                groups,
                unknown,
            },
        )
}

impl Material {
    fn arg<T: FromBytes>(&self) -> T {
        T::read_from_prefix(&self.structure).unwrap().0
    }

    /// The structure as it is sent, which says how much follows it.
    fn structure(&self, negotiated: Negotiated) -> Vec<u8> {
        let mut bytes = self.structure.clone();
        let size = self.data.len();
        let announced = match self.opcode {
            Opcode::Write | Opcode::NotifyReply => Some((16, size)),
            Opcode::Ioctl => Some((24, size)),
            Opcode::Setxattr => Some((0, size)),
            Opcode::BatchForget => Some((0, size / size_of::<ForgetOne>())),
            _ => None,
        };
        if let Some((at, count)) = announced {
            bytes[at..at + 4].copy_from_slice(&(count as u32).to_ne_bytes());
        }
        bytes.truncate(op_len(self.opcode, negotiated));
        bytes
    }

    /// What follows the structure, but for extensions.
    fn payload(&self) -> Vec<u8> {
        let name = self.name.to_bytes_with_nul();
        match self.opcode {
            Opcode::Lookup
            | Opcode::Unlink
            | Opcode::Rmdir
            | Opcode::Removexattr
            | Opcode::Mknod
            | Opcode::Mkdir
            | Opcode::Link
            | Opcode::Getxattr
            | Opcode::Create
            | Opcode::Tmpfile => name.to_vec(),
            Opcode::Symlink | Opcode::Rename | Opcode::Rename2 => {
                [name, self.other.to_bytes_with_nul()].concat()
            }
            Opcode::Setxattr => [name, &self.data].concat(),
            Opcode::Write | Opcode::NotifyReply | Opcode::Ioctl => self.data.clone(),
            Opcode::BatchForget => Records::<ForgetOne>::new(&self.data).as_bytes().to_vec(),
            _ => vec![],
        }
    }

    /// Extensions as the kernel lays them out: one that is passed over, and the groups.
    fn extensions(&self) -> Vec<u8> {
        let mut bytes = vec![];
        if !self.unknown.is_empty() {
            extend(&mut bytes, 1, &self.unknown);
        }
        if !self.groups.is_empty() {
            let count = [self.groups.len() as u32];
            extend(
                &mut bytes,
                EXT_GROUPS,
                [&count, &self.groups[..]].concat().as_bytes(),
            );
        }
        bytes
    }

    /// The request in its contiguous form, and its header.
    fn message(&self, negotiated: Negotiated, extensions: &[u8]) -> (InHeader, Vec<u8>) {
        let (structure, payload) = (self.structure(negotiated), self.payload());
        let header = InHeader {
            len: (size_of::<InHeader>() + structure.len() + payload.len() + extensions.len())
                as u32,
            opcode: self.opcode as u32,
            total_extlen: (extensions.len() / REC_ALIGN) as u16,
            ..header()
        };
        let bytes = [header.as_bytes(), &structure, &payload, extensions].concat();
        (header, bytes)
    }

    fn operation(&self, negotiated: Negotiated) -> Operation<'_> {
        let name: &CStr = &self.name;
        let newname: &CStr = &self.other;
        let data = &self.data[..];
        let size = data.len() as u32;
        let records = Records::new(data);
        // The arms of the operations that consist of the same parts differ only in their names.
        macro_rules! operation {
            (
                nothing: $($nothing:ident)*;
                structure: $($structure:ident)*;
                name: $($named:ident)*;
                structure and name: $($both:ident)*;
                $($opcode:ident => $operation:expr,)*
            ) => {
                match self.opcode {
                    $(Opcode::$nothing => Operation::$nothing,)*
                    $(Opcode::$structure => Operation::$structure(self.arg()),)*
                    $(Opcode::$named => Operation::$named(name),)*
                    $(Opcode::$both => Operation::$both(self.arg(), name),)*
                    $(Opcode::$opcode => $operation,)*
                }
            };
        }
        operation! {
            nothing: Readlink Statfs Destroy;
            structure:
                Forget Getattr Setattr Open Read Release Fsync Listxattr Flush Init Opendir Readdir
                Releasedir Fsyncdir Getlk Setlk Setlkw Access Interrupt Bmap Poll Fallocate
                Readdirplus Lseek CopyFileRange Syncfs Statx CopyFileRange64;
            name: Lookup Unlink Rmdir Removexattr;
            structure and name: Mknod Mkdir Link Getxattr Create Tmpfile;
            Symlink => Operation::Symlink { name, target: newname },
            Rename => Operation::Rename { arg: self.arg(), name, newname },
            Rename2 => Operation::Rename2 { arg: self.arg(), name, newname },
            Write => Operation::Write(WriteIn { size, ..self.arg() }),
            NotifyReply => Operation::NotifyReply(NotifyRetrieveIn { size, ..self.arg() }),
            Ioctl => Operation::Ioctl(IoctlIn { in_size: size, ..self.arg() }, data),
            Setxattr => {
                let mut arg = SetxattrIn { size, ..self.arg() };
                if !negotiated.flags.contains(InitFlags::SETXATTR_EXT) {
                    (arg.setxattr_flags, arg.padding) = (0, 0);
                }
                Operation::Setxattr(arg, name, data)
            },
            BatchForget => {
                let count = records.len() as u32;
                Operation::BatchForget(BatchForgetIn { count, ..self.arg() }, records)
            },
        }
    }
}

/// Appends an extension.
fn extend(bytes: &mut Vec<u8>, kind: u32, body: &[u8]) {
    let header = ExtHeader {
        size: (size_of::<ExtHeader>() + body.len()) as u32,
        r#type: kind,
    };
    bytes.extend_from_slice(header.as_bytes());
    bytes.extend_from_slice(body);
    bytes.resize(bytes.len().next_multiple_of(REC_ALIGN), 0);
}

fn header() -> InHeader {
    InHeader {
        unique: 77,
        nodeid: 5,
        uid: 1000,
        gid: 100,
        pid: 42,
        ..Default::default()
    }
}

fn negotiated() -> impl Strategy<Value = Negotiated> {
    let old = Negotiated {
        minor: 37,
        flags: InitFlags::empty(),
    };
    select(vec![Negotiated::default(), old, LATEST])
}

fn parses(m: &Material, negotiated: Negotiated) -> Result<(), TestCaseError> {
    let extended = negotiated.minor >= 38;
    let extensions = if extended { m.extensions() } else { vec![] };
    let (header, bytes) = m.message(negotiated, &extensions);
    let (read, structure, rest) = split(&bytes, negotiated).unwrap();
    prop_assert_eq!(read, header);
    prop_assert_eq!(structure, &m.structure(negotiated)[..]);
    // In the split form the structure's area may be longer.
    let longer = [structure, &[0xff; 40]].concat();
    for structure in [structure, &longer] {
        let parsed = Request::parse(&header, structure, rest, negotiated).unwrap();
        prop_assert_eq!(parsed.operation, m.operation(negotiated));
        let groups: Vec<u32> = parsed.supp_groups.iter().collect();
        prop_assert_eq!(&groups[..], if extended { &m.groups[..] } else { &[] });
    }
    Ok(())
}

fn cut_off(m: &Material, negotiated: Negotiated) -> Result<(), TestCaseError> {
    let (_, bytes) = m.message(negotiated, &[]);
    for cut in 0..bytes.len() {
        let mut bytes = bytes[..cut].to_vec();
        prop_assert!(split(&bytes, negotiated).is_err());
        if cut >= 4 {
            bytes[..4].copy_from_slice(&(cut as u32).to_ne_bytes());
        }
        let result = split(&bytes, negotiated).and_then(|(header, op, payload)| {
            Request::parse(&header, op, payload, negotiated).map(|_| ())
        });
        // An INIT may be that of an older kernel.
        let short_init = m.opcode == Opcode::Init && cut >= 40 + COMPAT_INIT_IN_SIZE;
        prop_assert_eq!(result.is_ok(), short_init, "cut at {}: {:?}", cut, result);
    }
    Ok(())
}

proptest! {
    /// A server parses each request to what its bytes mean.
    #[test]
    fn requests_parse_to_what_they_mean(m in material(), negotiated in negotiated()) {
        for &opcode in Opcode::ALL {
            parses(&Material { opcode, ..m.clone() }, negotiated)?;
        }
    }

    /// A request that is cut off is refused.
    #[test]
    fn what_is_cut_off_is_refused(m in material(), negotiated in negotiated()) {
        for &opcode in Opcode::ALL {
            cut_off(&Material { opcode, ..m.clone() }, negotiated)?;
        }
    }

    /// A damaged request is parsed or refused without a panic.
    #[test]
    fn damaged_requests_do_not_panic(
        m in material(),
        negotiated in negotiated(),
        damage in vec((any::<proptest::sample::Index>(), any::<u8>()), 1..6),
    ) {
        let (_, mut bytes) = m.message(LATEST, &m.extensions());
        for (index, value) in damage {
            let index = index.index(bytes.len());
            bytes[index] = value;
        }
        let len = bytes.len() as u32;
        bytes[..4].copy_from_slice(&len.to_ne_bytes());
        if let Ok((header, op, payload)) = split(&bytes, negotiated)
            && let Ok(request) = Request::parse(&header, op, payload, negotiated)
        {
            let _ = format!("{request:?}");
        }
    }

    /// Random bytes are parsed or refused without a panic.
    #[test]
    fn any_bytes_do_not_panic(
        mut header in vec(any::<u8>(), 40),
        opcode in prop_oneof![any::<u32>(), select(Opcode::ALL).prop_map(|op| op as u32)],
        extlen in prop_oneof![Just(0), any::<u16>(), 0..8u16],
        op in vec(any::<u8>(), 0..130),
        payload in vec(any::<u8>(), 0..200),
        negotiated in negotiated(),
    ) {
        let _ = split(&payload, negotiated);
        header[4..8].copy_from_slice(&opcode.to_ne_bytes());
        header[36..38].copy_from_slice(&extlen.to_ne_bytes());
        let header = InHeader::read_from_bytes(&header).unwrap();
        if let Err(error) = Request::parse(&header, &op, &payload, negotiated) {
            prop_assert_eq!((error.opcode, error.unique), (header.opcode, header.unique));
            let unknown = Opcode::try_from(opcode).is_err();
            prop_assert_eq!(error.errno(), if unknown { Errno::NOSYS } else { Errno::INVAL });
        }
    }
}

fn problem(opcode: Opcode, payload: &[u8], negotiated: Negotiated) -> Option<Problem> {
    let header = InHeader {
        opcode: opcode as u32,
        ..header()
    };
    Request::parse(&header, &[0; 128], payload, negotiated)
        .err()
        .map(|error| error.problem)
}

/// A name of an entry that is empty, `.`, `..` or has a slash is refused.
#[test]
fn names_of_entries_are_checked() {
    for bad in [&b"\0"[..], b"a/b\0", b"/\0", b".\0", b"..\0"] {
        for opcode in [
            Opcode::Lookup,
            Opcode::Mknod,
            Opcode::Mkdir,
            Opcode::Unlink,
            Opcode::Rmdir,
            Opcode::Link,
            Opcode::Create,
        ] {
            assert_eq!(
                problem(opcode, bad, LATEST),
                Some(Problem::Name("name")),
                "{opcode:?}"
            );
        }
        let symlink = [bad, b"target\0"].concat();
        assert_eq!(
            problem(Opcode::Symlink, &symlink, LATEST),
            Some(Problem::Name("name"))
        );
        for opcode in [Opcode::Rename, Opcode::Rename2] {
            let old = [bad, b"x\0"].concat();
            assert_eq!(
                problem(opcode, &old, LATEST),
                Some(Problem::Name("old name"))
            );
            let new = [b"x\0", bad].concat();
            assert_eq!(
                problem(opcode, &new, LATEST),
                Some(Problem::Name("new name"))
            );
        }
    }
    let export = Negotiated {
        flags: LATEST.flags | InitFlags::EXPORT_SUPPORT,
        ..LATEST
    };
    assert_eq!(problem(Opcode::Lookup, b"..\0", export), None);
    assert_eq!(
        problem(Opcode::Unlink, b"..\0", export),
        Some(Problem::Name("name"))
    );
    assert_eq!(problem(Opcode::Symlink, b"name\0../a/b\0", LATEST), None);
    assert_eq!(problem(Opcode::Tmpfile, b"/\0", LATEST), None);
    assert_eq!(problem(Opcode::Removexattr, b"user.a/b\0", LATEST), None);
}

/// The shorter INIT of kernels before 7.36 is accepted.
#[test]
fn an_old_kernels_init_has_zeros_for_the_rest() {
    let mut bytes = vec![];
    let init = InitIn {
        major: 7,
        minor: 34,
        flags: 0x0fff_ffff,
        ..Default::default()
    };
    let header = InHeader {
        len: 56,
        opcode: Opcode::Init as u32,
        ..header()
    };
    bytes.extend_from_slice(header.as_bytes());
    bytes.extend_from_slice(&init.as_bytes()[..16]);
    let (header, op, payload) = split(&bytes, Negotiated::default()).unwrap();
    let request = Request::parse(&header, op, payload, Negotiated::default()).unwrap();
    assert_eq!(request.operation, Operation::Init(init));
    assert_eq!(init.init_flags().bits(), 0x0fff_ffff);
}

/// A CREATE keeps its supplementary group behind a security context, and extensions that are cut off are refused.
#[test]
fn a_kernels_create_with_extensions() {
    // CREATE "f" as Linux sends it with a security context and one supplementary group.
    let mut payload = b"f\0".to_vec();
    let context = b"system_u:object_r:t:s0\0";
    let len = 8 + 8 + "security.selinux\0".len() + context.len();
    let size = len.next_multiple_of(8) as u32;
    // The size and the number of the contexts, and the size of the one.
    for word in [size, 1, context.len() as u32, 0] {
        payload.extend_from_slice(&word.to_ne_bytes());
    }
    payload.extend_from_slice(b"security.selinux\0");
    payload.extend_from_slice(context);
    payload.resize(2 + size as usize, 0);
    for word in [16u32, EXT_GROUPS, 1, 1234] {
        payload.extend_from_slice(&word.to_ne_bytes());
    }
    let header = InHeader {
        opcode: Opcode::Create as u32,
        total_extlen: (size as u16 + 16) / 8,
        ..header()
    };
    let arg = CreateIn {
        flags: 2,
        mode: 0o100644,
        umask: 0o22,
        open_flags: 0,
    };
    let request = Request::parse(&header, arg.as_bytes(), &payload, LATEST).unwrap();
    assert_eq!(request.operation, Operation::Create(arg, c"f"));
    assert_eq!(request.supp_groups.iter().collect::<Vec<_>>(), [1234]);

    // Before 7.38 that part of the header was padding.
    let old = Negotiated {
        minor: 37,
        ..LATEST
    };
    let request = Request::parse(&header, arg.as_bytes(), &payload, old).unwrap();
    assert!(request.supp_groups.is_empty());

    for cut in 1..=16 {
        let payload = &payload[..payload.len() - cut];
        let error = Request::parse(&header, arg.as_bytes(), payload, LATEST).unwrap_err();
        assert_eq!(error.errno(), Errno::INVAL);
    }
}

/// A batch forgets as many nodes as it counts, and is refused if it has fewer.
#[test]
fn a_batch_forgets_what_it_counts() {
    let forget = [
        ForgetOne {
            nodeid: 2,
            nlookup: 3,
        },
        ForgetOne {
            nodeid: 4,
            nlookup: 5,
        },
    ];
    let header = InHeader {
        opcode: Opcode::BatchForget as u32,
        ..header()
    };
    let arg = BatchForgetIn { count: 1, dummy: 0 };
    let request = Request::parse(&header, arg.as_bytes(), forget.as_bytes(), LATEST).unwrap();
    assert_eq!(
        request.operation,
        Operation::BatchForget(arg, Records::from(&forget[..1]))
    );
    let arg = BatchForgetIn {
        count: u32::MAX,
        dummy: 0,
    };
    let error = Request::parse(&header, arg.as_bytes(), forget.as_bytes(), LATEST).unwrap_err();
    assert_eq!(
        error.problem,
        Problem::Payload {
            need: 16 * u64::from(u32::MAX),
            have: 32
        }
    );
}

/// An error names the request, its opcode and the fault.
#[test]
fn errors_name_the_request() {
    let header = InHeader {
        opcode: 999,
        ..header()
    };
    let error = Request::parse(&header, &[], &[], LATEST).unwrap_err();
    assert_eq!(error.errno(), Errno::NOSYS);
    assert_eq!(error.to_string(), "request 77, opcode 999: unknown opcode");
    let header = InHeader {
        opcode: Opcode::Write as u32,
        ..header
    };
    let error = Request::parse(&header, &[0; 39], &[], LATEST).unwrap_err();
    assert_eq!(
        error.to_string(),
        "request 77, WRITE: its structure has 40 bytes, 39 are there",
    );
}
