//! A proxy before an object store by which each request takes longer.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::time::Duration;

use uvfs_cli::{Context, Error, Result};

const ENDPOINT: &str = "endpoint=http://";

/// Puts a proxy before the endpoint of a store's URI, for the life of this process, and gives the URI by way of it.
pub fn before(uri: &str, latency: Duration) -> Result<String> {
    let why = "for latency the URI has to have an endpoint=http://HOST:PORT";
    let (head, rest) = uri.split_once(ENDPOINT).ok_or(Error::usage(why))?;
    let end = rest.find('&').unwrap_or(rest.len());
    let (endpoint, rest) = rest.split_at(end);
    let (store, path) = endpoint.split_at(endpoint.find('/').unwrap_or(endpoint.len()));
    let store = match store.contains(':') {
        true => store.to_owned(),
        false => format!("{store}:80"),
    };
    let what = || "a proxy before the store".into();
    let listener = TcpListener::bind("127.0.0.1:0").context(what)?;
    let address = listener.local_addr().context(what)?;
    std::thread::spawn(move || {
        for client in listener.incoming().map_while(std::io::Result::ok) {
            let store = store.clone();
            std::thread::spawn(move || {
                let server = TcpStream::connect(&store);
                server.and_then(|server| connect(client, server, latency))
            });
        }
    });
    Ok(format!("{head}{ENDPOINT}{address}{path}{rest}"))
}

/// Passes on what both send. The client of a store sends a request once it has the answer to the one before, and none that is
/// longer than this buffer reads an image.
fn connect(client: TcpStream, server: TcpStream, latency: Duration) -> std::io::Result<()> {
    client.set_nodelay(true)?;
    server.set_nodelay(true)?;
    let (from, to) = (client.try_clone()?, server.try_clone()?);
    std::thread::spawn(move || pass(from, to, latency));
    pass(server, client, Duration::ZERO);
    Ok(())
}

fn pass(mut from: TcpStream, mut to: TcpStream, latency: Duration) {
    let mut data = vec![0; 64 << 10];
    while let Ok(len @ 1..) = from.read(&mut data) {
        std::thread::sleep(latency);
        if to.write_all(&data[..len]).is_err() {
            break;
        }
    }
    let _ = (from.shutdown(Shutdown::Both), to.shutdown(Shutdown::Both));
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The client finds the proxy where the store was, and what it says gets there.
    #[test]
    fn the_proxy_takes_the_place_of_the_store() {
        let store = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = store.local_addr().unwrap();
        let uri = format!("s3://b/k?region=r&{ENDPOINT}{address}/base&access_key_id=k");
        let by_proxy = before(&uri, Duration::from_millis(1)).unwrap();
        assert_ne!(uri, by_proxy);
        let (head, rest) = by_proxy.split_once(ENDPOINT).unwrap();
        let (proxy, rest) = rest.split_once('/').unwrap();
        assert_eq!((head, rest), ("s3://b/k?region=r&", "base&access_key_id=k"));
        let mut client = TcpStream::connect(proxy).unwrap();
        client.write_all(b"asked").unwrap();
        let (mut served, _) = store.accept().unwrap();
        let mut data = [0; 5];
        served.read_exact(&mut data).unwrap();
        assert_eq!(&data, b"asked");
        served.write_all(b"told!").unwrap();
        client.read_exact(&mut data).unwrap();
        assert_eq!(&data, b"told!");
        assert!(before("s3://b/k?region=r", Duration::ZERO).is_err());
    }
}
