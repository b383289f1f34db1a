//! Decoding requests, as the server does it once for each.

#![allow(missing_docs, reason = "criterion's macros make public functions")]

use std::ffi::CStr;
use std::hint::black_box;

use criterion::{BatchSize, Criterion, criterion_group, criterion_main};
use uvfs_proto::abi::{CreateIn, InHeader, InitFlags, KERNEL_MINOR_VERSION, ReadIn, WriteIn};
use uvfs_proto::request::{Negotiated, Operation, Request, split};
use zerocopy::FromZeros;

const LATEST: Negotiated = Negotiated {
    minor: KERNEL_MINOR_VERSION,
    flags: InitFlags::SETXATTR_EXT,
};
const NAME: &CStr = c"a-name-of-some-length.rs";

fn encoded(operation: Operation<'_>, data: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    Request::new(InHeader::new_zeroed(), operation)
        .encode_contiguous(data, LATEST, &mut bytes)
        .expect("a valid request");
    bytes
}

fn decode(c: &mut Criterion) {
    let data = [7; 4096];
    let write = WriteIn {
        size: data.len() as u32,
        ..WriteIn::new_zeroed()
    };
    let requests = [
        ("lookup", encoded(Operation::Lookup(NAME), &[])),
        ("read", encoded(Operation::Read(ReadIn::new_zeroed()), &[])),
        ("write 4 KiB", encoded(Operation::Write(write), &data)),
        (
            "create",
            encoded(Operation::Create(CreateIn::new_zeroed(), NAME), &[]),
        ),
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
    group.bench_function("encode a lookup", |b| {
        b.iter_batched(
            Vec::new,
            |mut bytes| {
                let request = Request::new(InHeader::new_zeroed(), Operation::Lookup(NAME));
                request
                    .encode_contiguous(&[], LATEST, &mut bytes)
                    .expect("a valid request");
                bytes
            },
            BatchSize::SmallInput,
        );
    });
}

criterion_group!(benches, decode);
criterion_main!(benches);
