//! A file system with one file: `cargo run -p uvfs-server --example hello -- MOUNTPOINT`, then
//! `cat MOUNTPOINT/hello`; `umount MOUNTPOINT` ends it.

use std::ffi::CStr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use uvfs_proto::abi::Attr;
use uvfs_server::fs::{
    Attributes, Context, DirEntry, DirSink, Entry, Errno, IoHow, OpenHow, Opened, Payload, ROOT,
    Result,
};
use uvfs_server::mount::{MountOptions, mount};
use uvfs_server::{FileSystem, Server, ServerOptions, Session, SessionOptions};

const HELLO: u64 = 2;
const TEXT: &[u8] = b"Hello from user space\n";
const TTL: Duration = Duration::from_secs(3600);

struct Hello;

fn attr(node: u64) -> Result<Attr> {
    match node {
        ROOT => Ok(Attr {
            ino: ROOT,
            mode: libc::S_IFDIR | 0o755,
            nlink: 2,
            ..Default::default()
        }),
        HELLO => Ok(Attr {
            ino: HELLO,
            mode: libc::S_IFREG | 0o444,
            nlink: 1,
            size: TEXT.len() as u64,
            ..Default::default()
        }),
        _ => Err(Errno::STALE),
    }
}

impl FileSystem for Hello {
    async fn lookup(&self, _: &Context, parent: u64, name: &CStr) -> Result<Entry> {
        if (parent, name) != (ROOT, c"hello") {
            return Err(Errno::NOENT);
        }
        Ok(Entry {
            node: HELLO,
            generation: 0,
            attr: attr(HELLO)?,
            attr_ttl: TTL,
            entry_ttl: TTL,
        })
    }

    async fn getattr(&self, _: &Context, node: u64, _: Option<u64>) -> Result<Attributes> {
        Ok(Attributes {
            attr: attr(node)?,
            ttl: TTL,
        })
    }

    async fn open(&self, _: &Context, _: u64, how: &OpenHow) -> Result<Opened> {
        match how.flags & libc::O_ACCMODE as u32 {
            0 => Ok(Opened::default()),
            _ => Err(Errno::ROFS),
        }
    }

    async fn read(&self, _: &Context, _: u64, how: &IoHow, data: &Payload) -> Result<usize> {
        let rest = TEXT.get(how.offset as usize..).unwrap_or_default();
        let len = rest.len().min(data.len());
        data.copy_in(0, &rest[..len]);
        Ok(len)
    }

    async fn opendir(&self, _: &Context, _: u64, _: &OpenHow) -> Result<Opened> {
        Ok(Opened::default())
    }

    async fn readdir(
        &self,
        _: &Context,
        _: u64,
        _: u64,
        offset: u64,
        sink: &mut dyn DirSink,
    ) -> Result<()> {
        let all: [(u64, u32, &[u8]); 3] = [
            (ROOT, libc::DT_DIR.into(), b"."),
            (ROOT, libc::DT_DIR.into(), b".."),
            (HELLO, libc::DT_REG.into(), b"hello"),
        ];
        for (number, (ino, kind, name)) in (1..).zip(all).skip(offset as usize) {
            if !sink.add(DirEntry {
                ino,
                next: number,
                kind,
                name,
            }) {
                break;
            }
        }
        Ok(())
    }
}

fn main() -> std::io::Result<()> {
    let Some(mountpoint) = std::env::args_os().nth(1) else {
        eprintln!("usage: hello MOUNTPOINT");
        std::process::exit(2);
    };
    let options = MountOptions {
        name: "hello".into(),
        subtype: "hello".into(),
        allow_other: false,
        default_permissions: true,
        flags: rustix::mount::MountFlags::RDONLY,
        max_read: 1 << 20,
    };
    let device = mount(Path::new(&mountpoint), &options)?;
    let session = Arc::new(Session::new(Hello, device, SessionOptions::default()));
    Server::start(session, ServerOptions::default())?.wait();
    Ok(())
}
