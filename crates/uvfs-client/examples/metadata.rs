//! Names over shared memory: makes, looks at, reads and removes small files, and says how many of
//! each a second. `metadata SOCKET [FILES]`, with the socket of `uvfs serve` or of a mount.

use std::time::Instant;

use uvfs_client::{Client, Config, Flags, OpenOptions, Server};

fn main() -> std::io::Result<()> {
    let mut args = std::env::args().skip(1);
    let socket = args.next().expect("metadata SOCKET [FILES]");
    let files: usize = args
        .next()
        .map_or(20_000, |n| n.parse().expect("a number of files"));
    let client = Client::new(Server::connect(socket)?, Config::default())?;
    client.mkdir("metadata", 0o700)?;
    let names: Vec<_> = (0..files).map(|n| format!("metadata/{n:08}")).collect();
    let phase = |what: &str, each: &dyn Fn(&str) -> std::io::Result<()>| {
        let began = Instant::now();
        for name in &names {
            each(name)?;
        }
        let rate = files as f64 / began.elapsed().as_secs_f64();
        println!("{what:20} {rate:10.0}/s {:8.2} us", 1e6 / rate);
        std::io::Result::Ok(())
    };
    let read = OpenOptions::new().read(true);
    phase("getattr root", &|_| client.stat("").map(drop))?;
    phase("create", &|name| client.create(name).map(drop))?;
    phase("stat", &|name| client.stat(name).map(drop))?;
    phase("unlink", &|name| client.unlink(name))?;
    phase("create and write", &|name| {
        let file = client.create(name)?;
        file.write_at(b"x", 0, Flags::empty()).map(drop)
    })?;
    client.flush()?;
    phase("open and read", &|name| {
        let file = client.open(name, read.clone())?;
        file.read_at(&mut [0; 10], 0, Flags::empty()).map(drop)
    })?;
    phase("unlink", &|name| client.unlink(name))?;
    client.rmdir("metadata")
}
