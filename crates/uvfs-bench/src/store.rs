//! A store for the benchmarks, as a FUSE file system: it takes small pieces and its time, or throws data away. Its
//! files are named by numbers.

use std::ffi::CStr;
use std::fs::File as HostFile;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use rustix::mount::MountFlags;
use serde::{Deserialize, Serialize};
use uvfs_client::Connection;
use uvfs_io::ops::{self, File};
use uvfs_passthrough::{Options, Passthrough};
use uvfs_proto::abi::{Attr, InitFlags};
use uvfs_server::fs::{
    Attributes, Config, Context, Entry, Errno, Handle, IoHow, Node, OFlags, OpenFlags, OpenHow,
    Opened, Payload, ROOT, Result, SessionHandle, SetAttr,
};
use uvfs_server::layers::{Latency, Opcode};
use uvfs_server::mount::{MountOptions, mount};
use uvfs_server::{
    ClientLimits, FileSystem, InProcess, Server, ServerOptions, Session, SessionOptions, in_process,
};

/// Nothing changes but through the mount.
const TTL: Duration = Duration::from_secs(3600);

/// The store to serve until it is unmounted.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StoreJob {
    /// Where to mount it.
    pub mountpoint: PathBuf,
    /// The contents of every file. Without them what is written is thrown away, and the kernel of the mount
    /// caches writes.
    pub data: Option<PathBuf>,
    /// The size of every file.
    pub bytes: u64,
    /// The most that one request carries.
    pub piece: u32,
    /// Microseconds that each piece takes longer.
    pub latency_us: u64,
    /// Over /dev/fuse, also where io_uring can be had.
    pub dev: bool,
}

impl StoreJob {
    /// Serves it.
    pub fn run(&self) -> io::Result<()> {
        let store = Store::slow(self.data.as_deref(), self.latency_us, self.bytes)?;
        let mount_options = MountOptions {
            name: "uvfs-bench-store".into(),
            subtype: "uvfs-bench-store".into(),
            allow_other: false,
            default_permissions: true,
            flags: MountFlags::NOSUID | MountFlags::NODEV,
            max_read: self.piece,
            ..MountOptions::default()
        };
        let device = mount(&self.mountpoint, &mount_options)?.device()?;
        let options = SessionOptions {
            max_write: self.piece,
            ..SessionOptions::default()
        };
        let session = Arc::new(Session::new(store, device, options));
        let transport = match self.dev {
            true => uvfs_server::Transport::Dev,
            false => uvfs_server::Transport::Auto,
        };
        let options = ServerOptions {
            transport,
            ..ServerOptions::default()
        };
        Server::start(session, options)?.wait();
        Ok(())
    }
}

struct Store {
    data: Option<Arc<File>>,
    bytes: u64,
}

/// A file's number, behind the root's.
fn node(name: &CStr) -> Option<Node> {
    let number: u32 = name.to_str().ok()?.parse().ok()?;
    Some(Node(u64::from(number) + 2))
}

/// A connection to a file system in this process, which serves it until the first value is dropped.
fn connect(fs: impl FileSystem) -> io::Result<(InProcess, Connection)> {
    let session = Arc::new(Session::unmounted(fs, SessionOptions::default())?);
    let (serving, socket) = in_process(&session, ClientLimits::default())?;
    Ok((serving, socket.into()))
}

/// A connection to a directory of the host.
pub fn directory(path: &Path) -> io::Result<(InProcess, Connection)> {
    connect(Passthrough::open(path, Options::default()).map_err(io::Error::other)?)
}

/// A connection to a store whose files have these contents and this size; see [`StoreJob`].
pub fn slow(
    data: Option<&Path>,
    latency_us: u64,
    bytes: u64,
) -> io::Result<(InProcess, Connection)> {
    connect(Store::slow(data, latency_us, bytes)?)
}

impl Store {
    fn slow(data: Option<&Path>, latency_us: u64, bytes: u64) -> io::Result<Latency<Self>> {
        let open = |path| HostFile::options().read(true).write(true).open(path);
        let data = data.map(open).transpose()?;
        let data = data.map(|file| Arc::new(File::from(rustix::fd::OwnedFd::from(file))));
        let time = Duration::from_micros(latency_us);
        Ok(Latency::new(Self { data, bytes }, time).only(&[Opcode::Read, Opcode::Write]))
    }

    fn attr(&self, node: Node) -> Attr {
        let (mode, size) = match node {
            ROOT => (libc::S_IFDIR | 0o755, 0),
            _ => (libc::S_IFREG | 0o644, self.bytes),
        };
        Attr {
            ino: node.0,
            mode,
            size,
            nlink: 1,
            uid: rustix::process::getuid().as_raw(),
            gid: rustix::process::getgid().as_raw(),
            ..Default::default()
        }
    }
}

impl FileSystem for Store {
    fn init(&self, config: &mut Config, _: Arc<dyn SessionHandle>) -> Result<()> {
        let discards = self.data.is_none();
        config.wanted.set(InitFlags::WRITEBACK_CACHE, discards);
        Ok(())
    }

    async fn lookup(&self, _: &Context, parent: Node, name: &CStr) -> Result<Entry> {
        let node = node(name).filter(|_| parent == ROOT).ok_or(Errno::NOENT)?;
        Ok(Entry::new(self.attr(node), TTL))
    }

    async fn getattr(&self, _: &Context, node: Node, _: Option<Handle>) -> Result<Attributes> {
        Ok(Attributes::new(self.attr(node), TTL))
    }

    async fn setattr(&self, _: &Context, node: Node, _: &SetAttr) -> Result<Attributes> {
        Ok(Attributes::new(self.attr(node), TTL))
    }

    async fn open(&self, _: &Context, _: Node, how: &OpenHow) -> Result<Opened> {
        // Nothing is to come from a cache. The kernel has all pieces of a direct call under way where the
        // caller, not the server, asked for direct I/O.
        let cached = self.data.is_none() || how.flags.contains(OFlags::DIRECT);
        let mut flags = OpenFlags::PARALLEL_DIRECT_WRITES;
        flags.set(OpenFlags::DIRECT_IO, !cached);
        Ok(Opened::default().with_flags(flags))
    }

    async fn read(&self, _: &Context, _: Node, how: &IoHow, data: &Payload) -> Result<usize> {
        match &self.data {
            Some(file) => Ok(ops::read_at(file, data, how.offset, 0).await?),
            None => Err(Errno::IO.into()),
        }
    }

    async fn write(&self, _: &Context, _: Node, how: &IoHow, data: &Payload) -> Result<usize> {
        match &self.data {
            Some(file) => Ok(ops::write_at(file, data, how.offset, 0).await?),
            None => Ok(data.len()),
        }
    }

    async fn fsync(&self, _: &Context, _: Node, _: Handle, _: bool) -> Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The name of a file of the store leads to a node of its own.
    #[test]
    fn a_name_gives_a_node() {
        assert_ne!(node(c"0"), node(c"3"));
        assert_ne!(node(c"0").unwrap(), ROOT);
        for name in [c"", c"-", c"-1", c"x", c"99999999999"] {
            assert_eq!(node(name), None, "{name:?}");
        }
    }
}
