//! How a client attaches: one message each way over a unix socket, with descriptors.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix,
};

/// Bytes of either message.
const SIZE: usize = 32;
const MAGIC: u32 = 0x7566_7661;
const VERSION: u32 = 2;
const MAX_FDS: usize = 2;

/// The contents of a message besides its descriptors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Message {
    /// From the server: 0, or the errno with which it refuses. From a client: 0.
    pub errno: i32,
    /// From the server: the largest read or write in bytes. From a client: 0.
    pub max_payload: u32,
    /// From the server: what it serves, the same whenever the same source is served; zeros when
    /// it can't tell. From a client: zeros.
    pub source: [u8; 16],
}

/// Moves a descriptor out of the way of the program's own, which may count on low numbers; where
/// that can't be, it stays.
pub fn aside(fd: OwnedFd) -> OwnedFd {
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile);
    let most = limit.current.unwrap_or(1 << 16).min(1 << 16) as i32;
    let high = most / 4 * 3;
    // Under `uvfs run` one that the C library made is there already, and known not to be the program's.
    if fd.as_raw_fd() >= high.min(500) {
        return fd;
    }
    rustix::io::fcntl_dupfd_cloexec(&fd, high).unwrap_or(fd)
}

/// A socket to attach through, aside as by [`aside`], and not connected yet.
///
/// # Errors
/// The errors of socket(2).
pub fn socket() -> io::Result<UnixStream> {
    // The C library's call, not the kernel's: under `uvfs run` it is one that keeps the new descriptor
    // from a program that closes everything.
    // SAFETY: numbers.
    let fd = unsafe { libc::socket(libc::AF_UNIX, libc::SOCK_STREAM | libc::SOCK_CLOEXEC, 0) };
    uvfs_sys::checked(fd)?;
    // SAFETY: it was just made, and no other code knows it.
    let socket = unsafe { OwnedFd::from_raw_fd(fd) };
    Ok(aside(socket).into())
}

/// Connects it, which may be tried again when it fails.
///
/// # Errors
/// The errors of connect(2), and ENAMETOOLONG for a path that no socket can have.
pub fn connect(socket: &UnixStream, path: &Path) -> io::Result<()> {
    let address = SocketAddrUnix::new(path)?;
    Ok(rustix::net::connect(socket, &address)?)
}

/// The process at the other end of a socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Peer {
    /// Its number, 0 when it is in a pid namespace that this process doesn't see.
    pub pid: u32,
    /// Its user.
    pub uid: u32,
    /// Its group.
    pub gid: u32,
}

/// The process at the other end of a connected socket (SO_PEERCRED, unix(7)).
///
/// # Errors
/// The errors of getsockopt(2).
pub fn peer(socket: impl AsFd) -> io::Result<Peer> {
    let mut peer = libc::ucred {
        pid: 0,
        uid: 0,
        gid: 0,
    };
    let mut len = size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: the structure and its length live over the call, and any bits are a ucred.
    let result = unsafe {
        libc::getsockopt(
            socket.as_fd().as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut peer).cast(),
            &raw mut len,
        )
    };
    uvfs_sys::checked(result)?;
    Ok(Peer {
        pid: peer.pid as u32,
        uid: peer.uid,
        gid: peer.gid,
    })
}

/// Sends a message with up to two descriptors.
///
/// # Errors
/// The errors of sendmsg(2).
pub fn send(socket: impl AsFd, message: Message, fds: &[BorrowedFd<'_>]) -> io::Result<()> {
    assert!(fds.len() <= MAX_FDS);
    let mut bytes = [0; SIZE];
    for (i, word) in [MAGIC, VERSION, message.errno as u32, message.max_payload]
        .into_iter()
        .enumerate()
    {
        bytes[i * 4..][..4].copy_from_slice(&word.to_ne_bytes());
    }
    bytes[16..].copy_from_slice(&message.source);
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() {
        let fits = control.push(SendAncillaryMessage::ScmRights(fds));
        debug_assert!(fits, "the space is for as many as are allowed");
    }
    let sent = rustix::io::retry_on_intr(|| {
        rustix::net::sendmsg(
            &socket,
            &[IoSlice::new(&bytes)],
            &mut control,
            SendFlags::NOSIGNAL,
        )
    })?;
    if sent == SIZE {
        Ok(())
    } else {
        Err(io::ErrorKind::WriteZero.into())
    }
}

/// Receives a message with at most two descriptors.
///
/// # Errors
/// `InvalidData` for what is no such message; EMFILE where the descriptors are more than this process may have;
/// those of recvmsg(2).
pub fn receive(socket: impl AsFd) -> io::Result<(Message, Vec<OwnedFd>)> {
    let mut bytes = [0; SIZE];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    // With a timeout even a stop and its end interrupt it (signal(7)).
    let received = rustix::io::retry_on_intr(|| {
        rustix::net::recvmsg(
            &socket,
            &mut [IoSliceMut::new(&mut bytes)],
            &mut control,
            RecvFlags::CMSG_CLOEXEC,
        )
    })?;
    let mut fds = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            fds.extend(rights);
        }
    }
    if fds.len() < MAX_FDS && received.flags.contains(ReturnFlags::CTRUNC) {
        // There were more than this process may have open.
        return Err(rustix::io::Errno::MFILE.into());
    }
    if received.bytes == 0 {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    let word = |i: usize| u32::from_ne_bytes([0, 1, 2, 3].map(|k| bytes[i * 4 + k]));
    if received.bytes != SIZE || word(0) != MAGIC || word(1) != VERSION {
        return Err(io::Error::new(
            io::ErrorKind::InvalidData,
            "no attach message of this version",
        ));
    }
    Ok((
        Message {
            errno: word(2) as i32,
            max_payload: word(3),
            source: bytes[16..].try_into().expect("16 bytes"),
        },
        fds,
    ))
}
