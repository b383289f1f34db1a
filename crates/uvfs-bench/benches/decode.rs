//! Decoding requests, as the server does it once for each.

#![allow(missing_docs, reason = "criterion's macros make public functions")]

use std::ffi::CStr;
use std::hint::black_box;

use criterion::{Criterion, criterion_group, criterion_main};
use uvfs_proto::abi::{
    CreateIn, InHeader, InitFlags, KERNEL_MINOR_VERSION, Opcode, ReadIn, WriteIn,
};
use uvfs_proto::request::{Negotiated, Request, split};
use zerocopy::{FromZeros, IntoBytes};

const LATEST: Negotiated = Negotiated {
    minor: KERNEL_MINOR_VERSION,
    flags: InitFlags::SETXATTR_EXT,
};
const NAME: &CStr = c"a-name-of-some-length.rs";

/// A message as the kernel sends it.
fn message(opcode: Opcode, structure: &[u8], payload: &[u8]) -> Vec<u8> {
    let header = InHeader {
        len: (size_of::<InHeader>() + structure.len() + payload.len()) as u32,
        opcode: opcode as u32,
        ..InHeader::new_zeroed()
    };
    [header.as_bytes(), structure, payload].concat()
}

fn decode(c: &mut Criterion) {
    let data = [7; 4096];
    let write = WriteIn {
        size: data.len() as u32,
        ..WriteIn::new_zeroed()
    };
    let (read, create) = (ReadIn::new_zeroed(), CreateIn::new_zeroed());
    let name = NAME.to_bytes_with_nul();
    let requests = [
        ("lookup", message(Opcode::Lookup, &[], name)),
        ("read", message(Opcode::Read, read.as_bytes(), &[])),
        (
            "write 4 KiB",
            message(Opcode::Write, write.as_bytes(), &data),
        ),
        ("create", message(Opcode::Create, create.as_bytes(), name)),
    ];
    let mut group = c.benchmark_group("decode");
    for (name, bytes) in &requests {
        group.bench_function(*name, |b| {
            b.iter(|| {
                let (header, structure, payload) =
                    split(black_box(bytes), LATEST).expect("a valid request");
                let request = Request::parse(&header, structure, payload, LATEST);
                black_box(request.expect("a valid request"));
            });
        });
    }
}

criterion_group!(benches, decode);
criterion_main!(benches);
