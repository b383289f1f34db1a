//! Notifications: what a server tells without being asked. They have the form of a reply with a
//! `unique` of 0 and their code in place of the error.

use rustix::io::{Errno, Result};
use zerocopy::{Immutable, IntoBytes};

use crate::abi::{NotifyCode, OutHeader};

/// A notification: its header, its structure, and what follows that. EINVAL if that is too much for the length in the
/// header, and so for one in the structure.
pub fn message<T: IntoBytes + Immutable>(
    code: NotifyCode,
    arg: &T,
    data: &[u8],
) -> Result<Vec<u8>> {
    let len = size_of::<OutHeader>() + size_of::<T>() + data.len();
    let header = OutHeader {
        len: u32::try_from(len).map_err(|_| Errno::INVAL)?,
        error: code as i32,
        unique: 0,
    };
    let mut message = Vec::with_capacity(len);
    message.extend_from_slice(header.as_bytes());
    message.extend_from_slice(arg.as_bytes());
    message.extend_from_slice(data);
    Ok(message)
}

#[cfg(test)]
mod tests {
    use zerocopy::FromBytes;

    use super::*;
    use crate::abi::NotifyStoreOut;

    /// A notification has its code and its length in front, and ends with what it hands over.
    #[test]
    fn a_notification_is_header_structure_and_data() {
        let store = NotifyStoreOut {
            nodeid: 2,
            offset: 4096,
            size: 4,
            padding: 0,
        };
        let bytes = message(NotifyCode::Store, &store, b"data").unwrap();
        let (header, body) = OutHeader::read_from_prefix(&bytes).unwrap();
        let expected = OutHeader {
            len: 16 + 24 + 4,
            error: 4,
            unique: 0,
        };
        assert_eq!((header, bytes.len()), (expected, 44));
        assert_eq!(
            NotifyStoreOut::read_from_prefix(body),
            Ok((store, &b"data"[..]))
        );
        let resend = message(NotifyCode::Resend, &(), &[]).unwrap();
        let header = OutHeader::read_from_bytes(&resend[..]).unwrap();
        assert_eq!((header.len, header.error), (16, 7));
    }
}
