//! Any bytes as a request: nothing panics.
#![no_main]

use libfuzzer_sys::fuzz_target;
use uvfs_proto::abi::{InHeader, InitFlags, KERNEL_MINOR_VERSION};
use uvfs_proto::request::{Negotiated, Request, split};
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
    if let Ok(request) = Request::parse(&header, op, payload, negotiated) {
        assert_eq!(request.operation.opcode() as u32, header.opcode);
        request.supp_groups.iter().for_each(drop);
    }
});
