//! Notifications: what a server tells without being asked. They have the form of a reply with a
//! `unique` of 0 and their code in place of the error.

use std::ffi::CStr;

use zerocopy::{FromBytes, Immutable, IntoBytes};

use crate::EncodeError;
use crate::abi::*;
use crate::request::Records;

/// A notification.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Notification<'a> {
    /// The file of the poll `kh` is ready.
    Poll {
        /// From the [`PollIn`].
        kh: u64,
    },
    /// Drop an inode's cached attributes and, if `off` is not negative, its pages.
    InvalInode {
        /// Node id.
        ino: u64,
        /// First byte; negative for attributes only.
        off: i64,
        /// Bytes; 0 or less means to the end.
        len: i64,
    },
    /// Drop a cached name.
    InvalEntry {
        /// Node id of the directory.
        parent: u64,
        /// The name.
        name: &'a CStr,
        /// Only let the name expire (7.38, [`InitFlags::HAS_EXPIRE_ONLY`]).
        expire_only: bool,
    },
    /// Put data into the page cache.
    Store {
        /// Node id.
        nodeid: u64,
        /// First byte.
        offset: u64,
        /// The data.
        data: &'a [u8],
    },
    /// Send what the page cache holds, in a NOTIFY_REPLY.
    Retrieve {
        /// `unique` of the NOTIFY_REPLY.
        notify_unique: u64,
        /// Node id.
        nodeid: u64,
        /// First byte.
        offset: u64,
        /// Bytes.
        size: u32,
    },
    /// A name was removed.
    Delete {
        /// Node id of the directory.
        parent: u64,
        /// Node id of what had the name.
        child: u64,
        /// The name.
        name: &'a CStr,
    },
    /// Send all pending requests again (7.40).
    Resend,
    /// Every cached name is stale (7.44).
    IncEpoch,
    /// Drop these inodes where they are not in use (7.45).
    Prune {
        /// Their node ids.
        nodeids: Records<'a, u64>,
    },
}

/// A notification that cannot be understood.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotifyError {
    /// No such code.
    #[error("unknown notification code {0}")]
    UnknownCode(i32),
    /// The structure or what follows it is not as long as announced, or a name has a NUL.
    #[error("notification with code {0} is malformed")]
    Malformed(i32),
}

impl<'a> Notification<'a> {
    /// Its code on the wire.
    pub const fn code(&self) -> NotifyCode {
        match self {
            Notification::Poll { .. } => NotifyCode::Poll,
            Notification::InvalInode { .. } => NotifyCode::InvalInode,
            Notification::InvalEntry { .. } => NotifyCode::InvalEntry,
            Notification::Store { .. } => NotifyCode::Store,
            Notification::Retrieve { .. } => NotifyCode::Retrieve,
            Notification::Delete { .. } => NotifyCode::Delete,
            Notification::Resend => NotifyCode::Resend,
            Notification::IncEpoch => NotifyCode::IncEpoch,
            Notification::Prune { .. } => NotifyCode::Prune,
        }
    }

    /// Appends the notification, header first. On an error nothing is appended.
    pub fn encode(&self, out: &mut Vec<u8>) -> Result<(), EncodeError> {
        match *self {
            Notification::Poll { kh } => self.push(&NotifyPollWakeupOut { kh }, &[], out),
            Notification::InvalInode { ino, off, len } => {
                self.push(&NotifyInvalInodeOut { ino, off, len }, &[], out)
            }
            Notification::InvalEntry {
                parent,
                name,
                expire_only,
            } => {
                let namelen = length(name.count_bytes())?;
                let flags = if expire_only { EXPIRE_ONLY } else { 0 };
                let arg = NotifyInvalEntryOut {
                    parent,
                    namelen,
                    flags,
                };
                self.push(&arg, name.to_bytes_with_nul(), out)
            }
            Notification::Store {
                nodeid,
                offset,
                data,
            } => {
                let arg = NotifyStoreOut {
                    nodeid,
                    offset,
                    size: length(data.len())?,
                    padding: 0,
                };
                self.push(&arg, data, out)
            }
            Notification::Retrieve {
                notify_unique,
                nodeid,
                offset,
                size,
            } => {
                let arg = NotifyRetrieveOut {
                    notify_unique,
                    nodeid,
                    offset,
                    size,
                    padding: 0,
                };
                self.push(&arg, &[], out)
            }
            Notification::Delete {
                parent,
                child,
                name,
            } => {
                let namelen = length(name.count_bytes())?;
                let arg = NotifyDeleteOut {
                    parent,
                    child,
                    namelen,
                    padding: 0,
                };
                self.push(&arg, name.to_bytes_with_nul(), out)
            }
            Notification::Resend | Notification::IncEpoch => self.push(&(), &[], out),
            Notification::Prune { nodeids } => {
                let arg = NotifyPruneOut {
                    count: length(nodeids.len())?,
                    ..Default::default()
                };
                self.push(&arg, nodeids.as_bytes(), out)
            }
        }
    }

    fn push<T: IntoBytes + Immutable>(
        &self,
        arg: &T,
        data: &[u8],
        out: &mut Vec<u8>,
    ) -> Result<(), EncodeError> {
        let header = OutHeader {
            len: length(size_of::<OutHeader>() + size_of::<T>() + data.len())?,
            error: self.code() as i32,
            unique: 0,
        };
        out.extend_from_slice(header.as_bytes());
        out.extend_from_slice(arg.as_bytes());
        out.extend_from_slice(data);
        Ok(())
    }

    /// Parses what follows the header of a notification with this code (the header's `error`).
    /// As in the kernel, nothing may follow what the notification announces.
    pub fn parse(code: i32, body: &'a [u8]) -> Result<Self, NotifyError> {
        const CODES: [NotifyCode; 9] = [
            NotifyCode::Poll,
            NotifyCode::InvalInode,
            NotifyCode::InvalEntry,
            NotifyCode::Store,
            NotifyCode::Retrieve,
            NotifyCode::Delete,
            NotifyCode::Resend,
            NotifyCode::IncEpoch,
            NotifyCode::Prune,
        ];
        let known = CODES
            .into_iter()
            .find(|&known| known as i32 == code)
            .ok_or(NotifyError::UnknownCode(code))?;
        Self::parse_body(known, body).ok_or(NotifyError::Malformed(code))
    }

    fn parse_body(code: NotifyCode, body: &'a [u8]) -> Option<Self> {
        Some(match code {
            NotifyCode::Poll => {
                let arg = NotifyPollWakeupOut::read_from_bytes(body).ok()?;
                Notification::Poll { kh: arg.kh }
            }
            NotifyCode::InvalInode => {
                let arg = NotifyInvalInodeOut::read_from_bytes(body).ok()?;
                Notification::InvalInode {
                    ino: arg.ino,
                    off: arg.off,
                    len: arg.len,
                }
            }
            NotifyCode::InvalEntry => {
                let (arg, rest) = NotifyInvalEntryOut::read_from_prefix(body).ok()?;
                Notification::InvalEntry {
                    parent: arg.parent,
                    name: name(arg.namelen, rest)?,
                    expire_only: arg.flags & EXPIRE_ONLY != 0,
                }
            }
            NotifyCode::Store => {
                let (arg, data) = NotifyStoreOut::read_from_prefix(body).ok()?;
                if arg.size as usize != data.len() {
                    return None;
                }
                Notification::Store {
                    nodeid: arg.nodeid,
                    offset: arg.offset,
                    data,
                }
            }
            NotifyCode::Retrieve => {
                let arg = NotifyRetrieveOut::read_from_bytes(body).ok()?;
                Notification::Retrieve {
                    notify_unique: arg.notify_unique,
                    nodeid: arg.nodeid,
                    offset: arg.offset,
                    size: arg.size,
                }
            }
            NotifyCode::Delete => {
                let (arg, rest) = NotifyDeleteOut::read_from_prefix(body).ok()?;
                Notification::Delete {
                    parent: arg.parent,
                    child: arg.child,
                    name: name(arg.namelen, rest)?,
                }
            }
            NotifyCode::Resend | NotifyCode::IncEpoch if !body.is_empty() => return None,
            NotifyCode::Resend => Notification::Resend,
            NotifyCode::IncEpoch => Notification::IncEpoch,
            NotifyCode::Prune => {
                let (arg, rest) = NotifyPruneOut::read_from_prefix(body).ok()?;
                let nodeids = Records::new(rest);
                if nodeids.len() != arg.count as usize || nodeids.as_bytes().len() != rest.len() {
                    return None;
                }
                Notification::Prune { nodeids }
            }
        })
    }
}

fn length(len: usize) -> Result<u32, EncodeError> {
    u32::try_from(len).map_err(|_| EncodeError::TooLong("the notification"))
}

/// The name of this length that is, with its NUL, all of `bytes`.
fn name(namelen: u32, bytes: &[u8]) -> Option<&CStr> {
    let name = CStr::from_bytes_with_nul(bytes).ok()?;
    (name.count_bytes() == namelen as usize).then_some(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A notification that is encoded and parsed is the same.
    #[test]
    fn notifications_round_trip() {
        let nodeids = [3u64, 4, 5];
        let all = [
            Notification::Poll { kh: 9 },
            Notification::InvalInode {
                ino: 2,
                off: -1,
                len: 0,
            },
            Notification::InvalEntry {
                parent: 1,
                name: c"a name",
                expire_only: true,
            },
            Notification::Store {
                nodeid: 2,
                offset: 4096,
                data: b"data",
            },
            Notification::Retrieve {
                notify_unique: 8,
                nodeid: 2,
                offset: 5,
                size: 6,
            },
            Notification::Delete {
                parent: 1,
                child: 2,
                name: c"gone",
            },
            Notification::Resend,
            Notification::IncEpoch,
            Notification::Prune {
                nodeids: Records::from(&nodeids[..]),
            },
        ];
        for (i, notification) in all.into_iter().enumerate() {
            let mut bytes = vec![];
            notification.encode(&mut bytes).unwrap();
            let (header, body) = OutHeader::read_from_prefix(&bytes).unwrap();
            let expected = OutHeader {
                len: bytes.len() as u32,
                error: i as i32 + 1,
                unique: 0,
            };
            assert_eq!(header, expected);
            assert_eq!(Notification::parse(header.error, body), Ok(notification));
            for cut in 0..body.len() {
                assert_eq!(
                    Notification::parse(header.error, &body[..cut]),
                    Err(NotifyError::Malformed(header.error)),
                );
            }
            let longer = [body, b"x"].concat();
            assert!(Notification::parse(header.error, &longer).is_err());
        }
        assert_eq!(
            Notification::parse(10, &[]),
            Err(NotifyError::UnknownCode(10))
        );
    }
}
