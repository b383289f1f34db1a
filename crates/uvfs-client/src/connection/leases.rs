//! Leases, and open files that are taken over by a token.

use std::time::Duration;

use rustix::fs::OFlags;
use rustix::io;
use uvfs_proto::ext;
use uvfs_proto::import::{IMPORT, ImportIn, ImportOut};
use zerocopy::IntoBytes;

use super::codec::{parse, wire};
use super::{Connection, SEQ_BITS};
use crate::types::{Entry, Grant, Imported, Lease, NodeId};

impl Connection {
    /// Asks for a lease of an inode. Without one nothing of the inode may be cached.
    pub fn lease(&self, node: NodeId, lease: Lease) -> io::Result<Grant> {
        let op = ext::LeaseIn {
            mode: wire(lease),
            padding: 0,
        };
        let channel = self.living()?;
        let node = self.node(&channel, node)?;
        let reply = channel.call(ext::LEASE, node, op.as_bytes(), &[], &[])?;
        let out: ext::LeaseOut = parse(&reply)?;
        Ok(if out.granted == ext::LEASE_NONE {
            let retry = Duration::from_millis(out.retry_ms.into());
            match out.seq {
                0 => Grant::Refused(retry),
                _ => Grant::Taken(retry),
            }
        } else {
            Grant::Granted {
                session: channel.generation,
                seq: channel.generation << SEQ_BITS | out.seq,
                attr: out.attr,
            }
        })
    }

    /// Gives a lease back, or keeps less of it.
    pub fn return_lease(&self, node: NodeId, seq: u64, keep: Lease) {
        // One of a server that is gone went with it.
        if let Ok(channel) = self.current()
            && channel.generation == seq >> SEQ_BITS
            && let Ok(node) = self.node(&channel, node)
        {
            let op = ext::LeaseReturnIn {
                seq: seq & ((1 << SEQ_BITS) - 1),
                keep: wire(keep),
                padding: 0,
            };
            channel.tell(ext::LEASE_RETURN, node, op.as_bytes());
        }
    }

    /// Takes over an open file by the secret of a [`crate::Token`].
    pub fn import(&self, secret: &[u8; 32]) -> io::Result<Imported> {
        let op = ImportIn { token: *secret };
        let channel = self.living()?;
        let reply = channel.call(IMPORT, 0, op.as_bytes(), &[], &[])?;
        let out: ImportOut = parse(&reply)?;
        let identity = &reply[size_of::<ImportOut>()..];
        let flags = OFlags::from_bits_retain(out.flags);
        let mut known = self.known();
        let node = known.looked_up(channel.generation, out.nodeid, None)?;
        let handle = known.opened(channel.generation, node, out.fh, flags, identity, true)?;
        Ok(Imported {
            entry: Entry {
                node,
                attr: out.attr,
            },
            handle,
            flags,
        })
    }
}
