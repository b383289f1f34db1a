//! A file system with one file: `cargo run -p uvfs-server --example hello -- MOUNTPOINT`, then
//! `cat MOUNTPOINT/hello`; `umount MOUNTPOINT` ends it.

use std::{ffi::CStr, time::Duration};
use uvfs_server::{FileSystem, Options, fs::*};

const HELLO: Node = Node(2);
const TEXT: &[u8] = b"Hello from user space\n";

struct Hello;

fn attributes(node: Node) -> Attributes {
    let attr = match node {
        ROOT => attr(ROOT, FileType::Directory, 0o555),
        _ => Attr {
            size: TEXT.len() as u64,
            ..attr(HELLO, FileType::RegularFile, 0o444)
        },
    };
    Attributes::new(attr, Duration::from_secs(3600))
}

impl FileSystem for Hello {
    async fn lookup(&self, _: &Context, _: Node, name: &CStr) -> Result<Entry> {
        match name.to_bytes() {
            b"hello" => Ok(attributes(HELLO).into()),
            _ => Err(Errno::NOENT.into()),
        }
    }

    async fn getattr(&self, _: &Context, node: Node, _: Option<Handle>) -> Result<Attributes> {
        Ok(attributes(node))
    }

    async fn read(&self, _: &Context, _: Node, how: &IoHow, data: &Payload) -> Result<usize> {
        Ok(read_from(TEXT, how.offset, data))
    }

    async fn readdir(&self, _: &Context, _: Node, _: Handle, sink: &mut dyn DirSink) -> Result<()> {
        list(ROOT, [(HELLO, FileType::RegularFile, &b"hello"[..])], sink);
        Ok(())
    }
}

fn main() -> std::io::Result<()> {
    let mountpoint = std::env::args_os().nth(1).expect("usage: hello MOUNTPOINT");
    uvfs_server::mount(Hello, mountpoint, Options::named("hello").read_only())?.wait();
    Ok(())
}
