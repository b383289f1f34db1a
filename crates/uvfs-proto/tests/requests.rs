//! Requests in both forms: what is encoded parses to the same, what is cut off is refused, and no
//! bytes make the parser panic.

use std::ffi::{CStr, CString};

use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::select;
use rustix::io::Errno;
use uvfs_proto::EncodeError;
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
    secctx: Vec<u8>,
}

fn name() -> impl Strategy<Value = CString> {
    vec(
        any::<u8>().prop_filter("no NUL or slash", |b| ![0, b'/'].contains(b)),
        1..40,
    )
    .prop_filter("no dots", |name| ![&b"."[..], b".."].contains(&&name[..]))
    .prop_map(|name| CString::new(name).unwrap())
}

/// Security contexts as the kernel lays them out.
fn secctx() -> impl Strategy<Value = Vec<u8>> {
    vec((name(), vec(any::<u8>(), 0..20)), 0..3).prop_map(|contexts| {
        if contexts.is_empty() {
            return vec![];
        }
        let mut bytes = vec![0; 8];
        for (name, value) in &contexts {
            bytes.extend_from_slice(
                Secctx {
                    size: value.len() as u32,
                    padding: 0,
                }
                .as_bytes(),
            );
            bytes.extend_from_slice(name.as_bytes_with_nul());
            bytes.extend_from_slice(value);
            bytes.resize(bytes.len().next_multiple_of(8), 0);
        }
        let header = SecctxHeader {
            size: bytes.len() as u32,
            nr_secctx: contexts.len() as u32,
        };
        bytes[..8].copy_from_slice(header.as_bytes());
        bytes
    })
}

fn material() -> impl Strategy<Value = Material> {
    (
        select(Opcode::ALL),
        vec(any::<u8>(), 128),
        name(),
        name(),
        vec(any::<u8>(), 0..100),
        vec(any::<u32>(), 0..4),
        secctx(),
    )
        .prop_map(
            |(opcode, structure, name, other, data, groups, secctx)| Material {
                opcode,
                structure,
                name,
                other,
                data,
                groups,
                secctx,
            },
        )
}

impl Material {
    fn arg<T: FromBytes>(&self) -> T {
        T::read_from_prefix(&self.structure).unwrap().0
    }

    /// The data of WRITE and NOTIFY_REPLY.
    fn payload(&self) -> &[u8] {
        match self.opcode {
            Opcode::Write | Opcode::NotifyReply => &self.data,
            _ => &[],
        }
    }

    fn operation(&self, negotiated: Negotiated) -> Operation<'_> {
        let name: &CStr = &self.name;
        let newname: &CStr = &self.other;
        let data = &self.data[..];
        let size = data.len() as u32;
        let records = Records::new(data);
        let ranges = Records::new(data);
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
                Readdirplus Lseek CopyFileRange Setupmapping Syncfs Statx CopyFileRange64 CuseInit;
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
            Removemapping => {
                let count = ranges.len() as u32;
                Operation::Removemapping(RemovemappingIn { count }, ranges)
            },
        }
    }
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

fn round_trip(m: &Material, negotiated: Negotiated) -> Result<(), TestCaseError> {
    let mut request = Request::new(header(), m.operation(negotiated));
    if negotiated.minor >= 38 {
        request.supp_groups = Records::from(&m.groups[..]);
        request.secctx = &m.secctx;
    }

    let mut op = [0xff; 128];
    let mut payload = vec![];
    request.header = request
        .encode(m.payload(), negotiated, &mut op, &mut payload)
        .unwrap();
    prop_assert_eq!(request.header.opcode, m.opcode as u32);
    let parsed = Request::parse(&request.header, &op, &payload, negotiated).unwrap();
    prop_assert_eq!(parsed, request);
    let contexts = SecctxHeader::read_from_prefix(request.secctx)
        .map_or(0, |(header, _)| header.nr_secctx as usize);
    prop_assert_eq!(parsed.security_contexts().count(), contexts);

    let mut bytes = vec![];
    let encoded = request
        .encode_contiguous(m.payload(), negotiated, &mut bytes)
        .unwrap();
    prop_assert_eq!(encoded, request.header);
    let (read, structure, rest) = split(&bytes, negotiated).unwrap();
    prop_assert_eq!(read, request.header);
    prop_assert_eq!(structure, &op[..op_len(m.opcode, negotiated)]);
    prop_assert_eq!(rest, &payload[..]);
    prop_assert_eq!(
        Request::parse(&read, structure, rest, negotiated).unwrap(),
        request
    );
    if let Operation::Write(_) = parsed.operation {
        prop_assert_eq!(&payload[..m.data.len()], &m.data[..]);
    }
    Ok(())
}

fn cut_off(m: &Material, negotiated: Negotiated) -> Result<(), TestCaseError> {
    let request = Request::new(header(), m.operation(negotiated));
    let mut bytes = vec![];
    request
        .encode_contiguous(m.payload(), negotiated, &mut bytes)
        .unwrap();
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
    /// A server parses each request to what the client encoded.
    #[test]
    fn encoded_requests_parse_to_the_same(m in material(), negotiated in negotiated()) {
        for &opcode in Opcode::ALL {
            round_trip(&Material { opcode, ..m.clone() }, negotiated)?;
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
        let mut request = Request::new(header(), m.operation(LATEST));
        request.supp_groups = Records::from(&m.groups[..]);
        request.secctx = &m.secctx;
        let mut bytes = vec![];
        request.encode_contiguous(m.payload(), LATEST, &mut bytes).unwrap();
        for (index, value) in damage {
            let index = index.index(bytes.len());
            bytes[index] = value;
        }
        let len = bytes.len() as u32;
        bytes[..4].copy_from_slice(&len.to_ne_bytes());
        if let Ok((header, op, payload)) = split(&bytes, negotiated)
            && let Ok(request) = Request::parse(&header, op, payload, negotiated)
        {
            request.security_contexts().for_each(drop);
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
        match Request::parse(&header, &op, &payload, negotiated) {
            Ok(request) => request.security_contexts().for_each(drop),
            Err(error) => {
                prop_assert_eq!((error.opcode, error.unique), (header.opcode, header.unique));
                let unknown = Opcode::try_from(opcode).is_err();
                prop_assert_eq!(error.errno(), if unknown { Errno::NOSYS } else { Errno::INVAL });
            }
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

/// A CREATE keeps its supplementary group and its security context.
#[test]
fn a_kernels_create_with_extensions() {
    // CREATE "f" as Linux sends it with a security context and one supplementary group.
    let mut payload = b"f\0".to_vec();
    let context = b"system_u:object_r:t:s0\0";
    let len = 8 + 8 + "security.selinux\0".len() + context.len();
    let size = len.next_multiple_of(8) as u32;
    payload.extend_from_slice(SecctxHeader { size, nr_secctx: 1 }.as_bytes());
    payload.extend_from_slice(
        Secctx {
            size: context.len() as u32,
            padding: 0,
        }
        .as_bytes(),
    );
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
    let contexts: Vec<_> = request.security_contexts().collect();
    assert_eq!(contexts, [(c"security.selinux", &context[..])]);

    // Before 7.38 that part of the header was padding.
    let old = Negotiated {
        minor: 37,
        ..LATEST
    };
    let request = Request::parse(&header, arg.as_bytes(), &payload, old).unwrap();
    assert!(request.supp_groups.is_empty() && request.secctx.is_empty());

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

/// A request that does not fit, or says another size than it has, is not encoded.
#[test]
fn what_does_not_fit_is_not_encoded() {
    let mut out = vec![];
    let write = Operation::Write(WriteIn {
        size: 4,
        ..Default::default()
    });
    assert_eq!(
        Request::new(header(), write).encode_contiguous(b"abc", LATEST, &mut out),
        Err(EncodeError::Size { said: 4, given: 3 }),
    );
    let read = Operation::Read(ReadIn::default());
    assert_eq!(
        Request::new(header(), read).encode_contiguous(b"abc", LATEST, &mut out),
        Err(EncodeError::Size { said: 0, given: 3 }),
    );
    let mut request = Request::new(header(), Operation::Mkdir(MkdirIn::default(), c"d"));
    request.secctx = &[1, 2, 3];
    assert_eq!(
        request.encode_contiguous(&[], LATEST, &mut out),
        Err(EncodeError::SecurityContexts),
    );
    request.secctx = &[];
    request.supp_groups = Records::from(&[1u32][..]);
    let old = Negotiated {
        minor: 37,
        ..LATEST
    };
    assert_eq!(
        request.encode_contiguous(&[], old, &mut out),
        Err(EncodeError::Extensions(37)),
    );
    let groups = vec![0u32; 200_000];
    request.supp_groups = Records::from(&groups[..]);
    assert_eq!(
        request.encode_contiguous(&[], LATEST, &mut out),
        Err(EncodeError::TooLong("the extensions")),
    );
    assert!(out.is_empty());
}
