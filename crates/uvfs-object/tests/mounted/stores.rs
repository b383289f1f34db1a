//! Stores to serve, and what puts objects into them.

use std::fs;
use std::io::ErrorKind;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use opendal::Operator;
use tokio::runtime::Runtime;

const KEY: &str = "tests";
const SECRET: &str = "of-uvfs-object";
/// Volume servers of a cluster.
const VOLUMES: usize = 3;
/// Where all servers of a store listen.
const LOOPBACK: [&str; 2] = ["-ip=127.0.0.1", "-ip.bind=127.0.0.1"];

/// A store that a test fills.
pub trait At {
    fn uri(&self) -> String;
    fn put(&self, key: &str, contents: &[u8]);
    fn put_directory(&self, key: &str);
    fn remove(&self, key: &str);
    /// Names that this store can have and others can't.
    fn names(&self) -> &'static [&'static str] {
        &[]
    }
}

/// OpenDAL's service for directories.
pub struct DirectoryStore(tempfile::TempDir);

impl DirectoryStore {
    pub fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }
}

impl At for DirectoryStore {
    fn uri(&self) -> String {
        format!("fs://{}", self.0.path().display())
    }

    fn put(&self, key: &str, contents: &[u8]) {
        let path = self.0.path().join(key);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        // As a store does it: in one step.
        let new = self
            .0
            .path()
            .join(format!(".new-{:?}", std::thread::current().id()));
        fs::write(&new, contents).unwrap();
        fs::rename(new, path).unwrap();
    }

    fn put_directory(&self, key: &str) {
        fs::create_dir_all(self.0.path().join(key)).unwrap();
    }

    fn remove(&self, key: &str) {
        fs::remove_file(self.0.path().join(key)).unwrap();
    }

    fn names(&self) -> &'static [&'static str] {
        // SeaweedFS lists no directory whose name has one.
        &["back\\slash"]
    }
}

/// A SeaweedFS of its own: a master, volume servers and a filer with S3, on loopback.
pub struct Seaweed {
    /// One that is all of it, or a cluster's: volume servers first.
    processes: Vec<Child>,
    address: SocketAddr,
    ports: Vec<u16>,
    bucket: Bucket,
    dir: tempfile::TempDir,
}

/// A store as OpenDAL has it, for tests that fill it.
pub struct Bucket {
    operator: Operator,
    runtime: Runtime,
}

impl Bucket {
    pub fn new(operator: Operator) -> Self {
        Self {
            operator,
            runtime: Runtime::new().unwrap(),
        }
    }

    pub fn put(&self, key: &str, contents: &[u8]) {
        let write = self.operator.write(key, contents.to_vec());
        self.runtime.block_on(write).unwrap();
    }

    pub fn put_directory(&self, key: &str) {
        let key = format!("{key}/");
        self.runtime
            .block_on(self.operator.create_dir(&key))
            .unwrap();
    }

    pub fn remove(&self, key: &str) {
        self.runtime.block_on(self.operator.delete(key)).unwrap();
    }
}

/// A port that is free, and so is the one 10,000 above, where SeaweedFS has its other protocol. The kernel gives neither to
/// connections, and other processes of tests take others.
pub fn port(ports: &mut Vec<u16>) -> u16 {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let free = |port| TcpListener::bind(("127.0.0.1", port)).is_ok();
    loop {
        let next = std::process::id() * 16 + NEXT.fetch_add(1, Ordering::Relaxed);
        let port = 10_000 + (next % 10_000) as u16;
        if free(port) && free(port + 10_000) {
            ports.push(port);
            return port;
        }
    }
}

fn with_keys(uri: &str) -> String {
    format!("{uri}&access_key_id={KEY}&secret_access_key={SECRET}&region=us-east-1")
}

/// A server of SeaweedFS, which ends with the test's thread however that ends.
fn weed(dir: &Path, what: &str, args: &[String]) -> Child {
    let data = dir.join(what);
    fs::create_dir(&data).unwrap();
    let log = fs::File::create(data.join("log")).unwrap();
    let program = what.trim_end_matches(|c: char| c.is_ascii_digit());
    let mut command = Command::new("setpriv");
    command
        .args(["--pdeathsig", "KILL", "weed", program])
        .args(LOOPBACK)
        .args(args);
    command.current_dir(&data).stdin(Stdio::null());
    command
        .stdout(log.try_clone().unwrap())
        .stderr(log)
        .spawn()
        .unwrap()
}

/// The options of S3. It has servers of fixed ports beside it, which are switched off.
fn s3(dir: &Path, port: u16) -> [String; 5] {
    let config = dir.join("s3.json");
    let identities = format!(
        r#"{{"identities":[{{"name":"t","credentials":[{{"accessKey":"{KEY}","secretKey":"{SECRET}"}}],"actions":["Admin","Read","Write","List"]}}]}}"#
    );
    fs::write(&config, identities).unwrap();
    [
        "-s3".into(),
        "-s3.port.iceberg=0".into(),
        "-s3.port.lance=0".into(),
        format!("-s3.port={port}"),
        format!("-s3.config={}", config.display()),
    ]
}

impl Seaweed {
    /// One process.
    pub fn start() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let mut ports = Vec::new();
        let address = SocketAddr::from(([127, 0, 0, 1], port(&mut ports)));
        let mut args = ["-filer", "-dir=.", "-volume.max=20"]
            .map(str::to_owned)
            .to_vec();
        args.extend(s3(dir.path(), address.port()));
        args.extend(
            ["master", "volume", "filer"].map(|part| format!("-{part}.port={}", port(&mut ports))),
        );
        let server = weed(dir.path(), "server", &args);
        Self::of(vec![server], address, ports, dir)
    }

    /// A master, three volume servers and a filer, which keep two copies of everything.
    pub fn cluster() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let mut ports = Vec::new();
        let address = SocketAddr::from(([127, 0, 0, 1], port(&mut ports)));
        let master = port(&mut ports);
        let mut volume = |n| {
            let args = [
                "-dir=.".into(),
                "-max=20".into(),
                format!("-port={}", port(&mut ports)),
                format!("-master=127.0.0.1:{master}"),
            ];
            weed(dir.path(), &format!("volume{n}"), &args)
        };
        let mut processes: Vec<_> = (0..VOLUMES).map(&mut volume).collect();
        let args = [
            "-mdir=.".into(),
            "-defaultReplication=001".into(),
            format!("-port={master}"),
        ];
        processes.push(weed(dir.path(), "master", &args));
        let mut args = vec![
            "-defaultReplicaPlacement=001".into(),
            format!("-port={}", port(&mut ports)),
            format!("-master=127.0.0.1:{master}"),
        ];
        args.extend(s3(dir.path(), address.port()));
        processes.push(weed(dir.path(), "filer", &args));
        Self::of(processes, address, ports, dir)
    }

    fn of(
        processes: Vec<Child>,
        address: SocketAddr,
        ports: Vec<u16>,
        dir: tempfile::TempDir,
    ) -> Self {
        let _ = rustls::crypto::ring::default_provider().install_default();
        opendal_http_transport_reqwest::install_default();
        opendal::init_default_registry();
        let uri = with_keys(&format!("s3://bucket?endpoint=http://{address}"));
        let bucket = Bucket::new(Operator::from_uri(uri.as_str()).unwrap());
        let mut store = Self {
            processes,
            address,
            ports,
            bucket,
            dir,
        };
        store.ready();
        store
    }

    /// kill -9 of one volume server of a cluster.
    pub fn lose_a_volume_server(&mut self) {
        let mut lost = self.processes.remove(0);
        lost.kill().unwrap();
        lost.wait().unwrap();
    }

    /// Waits until it takes objects. The first put makes the bucket.
    fn ready(&mut self) {
        let begun = Instant::now();
        loop {
            let ended = self
                .processes
                .iter_mut()
                .any(|one| one.try_wait().unwrap().is_some());
            let late = begun.elapsed() > Duration::from_secs(60);
            let why = match TcpStream::connect(self.address) {
                Err(error) => error.to_string(),
                Ok(_) => {
                    match (self.bucket.runtime).block_on(self.bucket.operator.write("ready", "x")) {
                        Ok(_) => return self.remove("ready"),
                        Err(error) => error.to_string(),
                    }
                }
            };
            assert!(!ended && !late, "weed: {why}\n{}", self.logs());
            std::thread::sleep(Duration::from_millis(200));
        }
    }

    /// The end of each server's log.
    fn logs(&self) -> String {
        let servers = fs::read_dir(self.dir.path()).unwrap();
        let logs =
            servers.filter_map(|dir| fs::read_to_string(dir.unwrap().path().join("log")).ok());
        let ends = logs.map(|log| log[log.len().saturating_sub(2000)..].to_owned());
        ends.collect::<Vec<_>>().join("\n\n")
    }

    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// An object with user metadata.
    pub fn put_with(&self, key: &str, contents: &str, metadata: &[(&str, &str)]) {
        let metadata = metadata
            .iter()
            .map(|(name, value)| (name.to_string(), value.to_string()));
        let write = (self.bucket.operator).write_with(key, contents.to_owned());
        let write = write.user_metadata(metadata.collect::<Vec<_>>());
        let put = self.bucket.runtime.block_on(async move { write.await });
        put.unwrap();
    }

    /// The same store by another address.
    pub fn uri_at(&self, address: SocketAddr) -> String {
        with_keys(&format!("s3://bucket?endpoint=http://{address}"))
    }
}

impl At for Seaweed {
    fn uri(&self) -> String {
        self.uri_at(self.address)
    }

    fn put(&self, key: &str, contents: &[u8]) {
        self.bucket.put(key, contents);
    }

    fn put_directory(&self, key: &str) {
        self.bucket.put_directory(key);
    }

    fn remove(&self, key: &str) {
        self.bucket.remove(key);
    }
}

impl Drop for Seaweed {
    fn drop(&mut self) {
        for process in &mut self.processes {
            match process.kill() {
                Err(error) if error.kind() != ErrorKind::InvalidInput => eprintln!("weed: {error}"),
                _ => {}
            }
            let _ = process.wait();
        }
        // They leave two sockets for each port.
        for port in &self.ports {
            for server in ["master", "volume", "filer", "s3"] {
                let http = format!("/tmp/seaweedfs-{server}-{port}.sock");
                let grpc = format!("/tmp/seaweedfs-{server}-grpc-{}.sock", port + 10_000);
                let _ = (fs::remove_file(http), fs::remove_file(grpc));
            }
        }
    }
}
