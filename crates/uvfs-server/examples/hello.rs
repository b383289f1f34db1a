//! A file system with one file: `cargo run -p uvfs-server --example hello -- MOUNTPOINT`, then
//! `cat MOUNTPOINT/hello`; `umount MOUNTPOINT` ends it.

use std::ffi::CStr;
use std::time::Duration;

use uvfs_server::fs::*;
use uvfs_server::{FileSystem, Options};

const HELLO: u64 = 2;
const TEXT: &[u8] = b"Hello from user space\n";
const TTL: Duration = Duration::from_secs(3600);

struct Hello;

fn attributes(node: u64) -> Attr {
    match node {
        ROOT => attr(ROOT, FileType::Directory, 0o755),
        _ => Attr {
            size: TEXT.len() as u64,
            ..attr(HELLO, FileType::RegularFile, 0o444)
        },
    }
}

impl FileSystem for Hello {
    async fn lookup(&self, _: &Context, _: u64, name: &CStr) -> Result<Entry> {
        match name.to_bytes() {
            b"hello" => Ok(Entry::new(attributes(HELLO), TTL)),
            _ => Err(Errno::NOENT),
        }
    }

    async fn getattr(&self, _: &Context, node: u64, _: Option<u64>) -> Result<Attributes> {
        Ok(Attributes::new(attributes(node), TTL))
    }

    async fn open(&self, _: &Context, _: u64, how: &OpenHow) -> Result<Opened> {
        match how.writes() {
            true => Err(Errno::ROFS),
            false => Ok(Opened::default()),
        }
    }

    async fn read(&self, _: &Context, _: u64, how: &IoHow, data: &Payload) -> Result<usize> {
        Ok(read_from(TEXT, how.offset, data))
    }

    async fn readdir(
        &self,
        _: &Context,
        _: u64,
        _: u64,
        offset: u64,
        sink: &mut dyn DirSink,
    ) -> Result<()> {
        let (dir, file) = (FileType::Directory, FileType::RegularFile);
        let all = [
            (ROOT, dir, &b"."[..]),
            (ROOT, dir, b".."),
            (HELLO, file, b"hello"),
        ];
        list(all, offset, sink);
        Ok(())
    }
}

fn main() -> std::io::Result<()> {
    let mountpoint = std::env::args_os().nth(1).expect("usage: hello MOUNTPOINT");
    uvfs_server::mount(Hello, mountpoint, Options::named("hello"))?.wait();
    Ok(())
}
