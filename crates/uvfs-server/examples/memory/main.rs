//! The file system of `fs.rs`, served in three ways. `memory MOUNTPOINT` mounts it, and lets programs under
//! `uvfs run` use it over shared memory; `memory` alone uses it in this process.

mod fs;

use std::sync::Arc;

use fs::Memory;
use uvfs_client::{Client, Config, Connection, Flags, OpenOptions};
use uvfs_server::{ClientLimits, Options, Session, SessionOptions, in_process};

fn main() -> std::io::Result<()> {
    if let Some(mountpoint) = std::env::args_os().nth(1) {
        let mut options = Options::named("memory");
        options.mount.allow_other = true;
        // For programs under `uvfs run`.
        options.server.clients = Some(ClientLimits::default());
        uvfs_server::mount(Memory::new(), mountpoint, options)?.wait();
        return Ok(());
    }
    let session = Session::unmounted(Memory::new(), SessionOptions::default())?;
    let (_server, socket) = in_process(&Arc::new(session), ClientLimits::default())?;
    let client = Client::new(Connection::from(socket), Config::default())?;
    client.mkdir("dir", 0o755)?;
    let options = OpenOptions::new().read(true).write(true).create(true);
    let file = client.open("dir/file", options)?;
    file.write_at(b"in this process", 0, Flags::empty())?;
    println!("dir/file has {} bytes", client.stat("dir/file")?.size);
    Ok(())
}
