//! Any bytes as a request: nothing panics, and what parses survives being encoded and parsed
//! again.
#![no_main]

use libfuzzer_sys::fuzz_target;
use uvfs_proto::abi::{InHeader, InitFlags, KERNEL_MINOR_VERSION};
use uvfs_proto::request::{Negotiated, Operation, Request, split};
use zerocopy::{FromBytes, IntoBytes};

fuzz_target!(|input: &[u8]| {
    let Some((&choice, message)) = input.split_first() else {
        return;
    };
    let mut flags = InitFlags::empty();
    flags.set(InitFlags::SETXATTR_EXT, choice & 1 != 0);
    flags.set(InitFlags::EXPORT_SUPPORT, choice & 2 != 0);
    let minor = if choice & 4 != 0 {
        KERNEL_MINOR_VERSION
    } else {
        37
    };
    let negotiated = Negotiated { minor, flags };

    let _ = split(message, negotiated);
    let Ok((mut header, _)) = InHeader::read_from_prefix(message) else {
        return;
    };
    // With the right length, and few opcodes out of range, more of the input gets further.
    let mut message = message.to_vec();
    header.len = message.len() as u32;
    if choice & 8 == 0 {
        header.opcode %= 54;
    }
    message[..size_of::<InHeader>()].copy_from_slice(header.as_bytes());

    let Ok((header, op, payload)) = split(&message, negotiated) else {
        return;
    };
    let Ok(request) = Request::parse(&header, op, payload, negotiated) else {
        return;
    };
    let data = match request.operation {
        Operation::Write(arg) => &payload[..arg.size as usize],
        Operation::NotifyReply(arg) => &payload[..arg.size as usize],
        _ => &[],
    };
    request.security_contexts().for_each(drop);
    let mut op = [0xff; 128];
    let mut payload = vec![];
    let header = request
        .encode(data, negotiated, &mut op, &mut payload)
        .expect("what was parsed can be encoded");
    let again =
        Request::parse(&header, &op, &payload, negotiated).expect("what was encoded can be parsed");
    assert_eq!(again.operation, request.operation);
    assert_eq!(again.supp_groups, request.supp_groups);
    assert_eq!(again.secctx, request.secctx);
});
