//! Stores to serve, and what puts objects into them.

use std::fs;
use std::io::ErrorKind;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use opendal::Operator;
use tokio::runtime::Runtime;

const KEY: &str = "tests";
const SECRET: &str = "of-uvfs-object";

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

/// A SeaweedFS of its own: a master, a volume server and a filer with S3, on loopback.
pub struct Seaweed {
    process: Child,
    address: SocketAddr,
    bucket: Operator,
    runtime: Runtime,
    _dir: tempfile::TempDir,
}

/// A port that was free a moment ago, and so was the one 10,000 above, where SeaweedFS has its other protocol.
fn port() -> u16 {
    loop {
        let free = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = free.local_addr().unwrap().port();
        if let Some(other) = port.checked_add(10_000)
            && TcpListener::bind(("127.0.0.1", other)).is_ok()
        {
            return port;
        }
    }
}

fn with_keys(uri: &str) -> String {
    format!("{uri}&access_key_id={KEY}&secret_access_key={SECRET}&region=us-east-1")
}

impl Seaweed {
    pub fn start() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let config = dir.path().join("s3.json");
        let identities = format!(
            r#"{{"identities":[{{"name":"t","credentials":[{{"accessKey":"{KEY}","secretKey":"{SECRET}"}}],"actions":["Admin","Read","Write","List"]}}]}}"#
        );
        fs::write(&config, identities).unwrap();
        let address = SocketAddr::from(([127, 0, 0, 1], port()));
        let log = fs::File::create(dir.path().join("log")).unwrap();
        let process = Command::new("weed")
            .args([
                "server",
                "-filer",
                "-s3",
                "-ip=127.0.0.1",
                "-ip.bind=127.0.0.1",
                "-volume.max=20",
            ])
            .arg(format!("-dir={}", dir.path().display()))
            .arg(format!("-s3.config={}", config.display()))
            .arg(format!("-s3.port={}", address.port()))
            .args(["master", "volume", "filer"].map(|part| format!("-{part}.port={}", port())))
            .current_dir(dir.path())
            .stdin(Stdio::null())
            .stdout(log.try_clone().unwrap())
            .stderr(log)
            .spawn()
            .unwrap();
        let runtime = Runtime::new().unwrap();
        let _ = rustls::crypto::ring::default_provider().install_default();
        opendal_http_transport_reqwest::install_default();
        opendal::init_default_registry();
        let uri = with_keys(&format!("s3://bucket?endpoint=http://{address}"));
        let bucket = Operator::from_uri(uri.as_str()).unwrap();
        let store = Self {
            process,
            address,
            bucket,
            runtime,
            _dir: dir,
        };
        store.ready();
        store
    }

    /// Waits until it takes objects. The first put makes the bucket.
    fn ready(&self) {
        let begun = Instant::now();
        loop {
            if TcpStream::connect(self.address).is_ok() {
                let made = self.runtime.block_on(self.bucket.write("ready", "x"));
                let failed = match made {
                    Ok(_) => return self.remove("ready"),
                    Err(error) => error,
                };
                assert!(begun.elapsed() < Duration::from_secs(60), "{failed}");
            }
            assert!(
                begun.elapsed() < Duration::from_secs(60),
                "weed does not listen"
            );
            std::thread::sleep(Duration::from_millis(200));
        }
    }

    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// An object with user metadata.
    pub fn put_with(&self, key: &str, contents: &str, metadata: &[(&str, &str)]) {
        let metadata = metadata
            .iter()
            .map(|(name, value)| (name.to_string(), value.to_string()));
        let write = self.bucket.write_with(key, contents.to_owned());
        let write = write.user_metadata(metadata.collect::<Vec<_>>());
        self.runtime.block_on(async move { write.await }).unwrap();
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
        let write = self.bucket.write(key, contents.to_vec());
        self.runtime.block_on(write).unwrap();
    }

    fn put_directory(&self, key: &str) {
        let key = format!("{key}/");
        self.runtime.block_on(self.bucket.create_dir(&key)).unwrap();
    }

    fn remove(&self, key: &str) {
        self.runtime.block_on(self.bucket.delete(key)).unwrap();
    }
}

impl Drop for Seaweed {
    fn drop(&mut self) {
        match self.process.kill() {
            Err(error) if error.kind() != ErrorKind::InvalidInput => eprintln!("weed: {error}"),
            _ => {}
        }
        let _ = self.process.wait();
    }
}
