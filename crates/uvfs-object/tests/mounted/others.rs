//! Stores of other services than S3: the same promises, as far as OpenDAL and the server let a mount keep them.
//!
//! `./test` installs `rclone` for WebDAV. The others are tried where their servers are on the PATH: `azurite-blob` (`npm install
//! azurite`) and `fake-gcs-server` (`go install github.com/fsouza/fake-gcs-server@latest`), with `--features
//! uvfs-object/azblob,uvfs-object/gcs`.

use std::any::Any;
use std::fs::{self, File};
use std::io::Write;
use std::net::TcpStream;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use opendal::layers::RetryLayer;
use uvfs_object::Writes;
use uvfs_testing::{Need, has, say};

use crate::stores::{At, Bucket, port};
use crate::*;

/// The account that every Azurite has.
const ACCOUNT: &str = "devstoreaccount1";
const KEY: &str =
    "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw==";
/// Makes a container, which OpenDAL can't: endpoint, account and key are the arguments.
const CONTAINER: &str = r#"
import base64, email.utils, hashlib, hmac, sys, urllib.request
endpoint, account, key = sys.argv[1:]
named = {"x-ms-date": email.utils.formatdate(usegmt=True), "x-ms-version": "2021-12-02"}
lines = "".join(f"{name}:{value}\n" for name, value in named.items())
text = f"PUT{12 * chr(10)}{lines}/{account}/{account}/bucket\nrestype:container"
sign = hmac.new(base64.b64decode(key), text.encode(), hashlib.sha256).digest()
named["Authorization"] = f"SharedKey {account}:{base64.b64encode(sign).decode()}"
urllib.request.urlopen(urllib.request.Request(f"{endpoint}/bucket?restype=container", method="PUT", headers=named))
"#;

/// A store, and the server that has it.
struct Other {
    uri: String,
    bucket: Bucket,
    _server: Box<dyn Any + Send + Sync>,
}

/// A server that ends with its test.
struct Program(Child, tempfile::TempDir);

impl Drop for Program {
    fn drop(&mut self) {
        let _ = (self.0.kill(), self.0.wait());
    }
}

/// Starts a program that listens at a port of loopback. Its arguments are separated by white space; `{port}` stands for the port
/// and `{data}` for a directory that has an empty `bucket`.
fn program(name: &str, args: &str) -> (Program, u16) {
    let dir = tempfile::tempdir().unwrap();
    let (port, data) = (port(&mut Vec::new()), dir.path().join("data"));
    fs::create_dir_all(data.join("bucket")).unwrap();
    let log = File::create(dir.path().join("log")).unwrap();
    let args = args.split_whitespace().map(|word| {
        let word = word.replace("{port}", &port.to_string());
        word.replace("{data}", data.to_str().unwrap())
    });
    let mut command = Command::new("setpriv");
    command.args(["--pdeathsig", "KILL", name]).args(args);
    command.stdin(Stdio::null());
    command.stdout(log.try_clone().unwrap()).stderr(log);
    let mut server = Program(command.spawn().unwrap(), dir);
    let begun = Instant::now();
    while TcpStream::connect(("127.0.0.1", port)).is_err() {
        let ended = server.0.try_wait().unwrap().is_some();
        let late = begun.elapsed() > Duration::from_secs(60);
        let log = || fs::read_to_string(server.1.path().join("log")).unwrap();
        assert!(!ended && !late, "{name}: {}", log());
        std::thread::sleep(Duration::from_millis(20));
    }
    (server, port)
}

impl Other {
    fn new(uri: String, server: impl Any + Send + Sync) -> Self {
        let bucket = uvfs_object::operator(uri.as_str()).unwrap();
        Self {
            // Servers of WebDAV refuse to make two files of one new directory at a time.
            bucket: Bucket::new(bucket.layer(RetryLayer::new())),
            uri,
            _server: Box::new(server),
        }
    }
}

impl At for Other {
    fn uri(&self) -> String {
        self.uri.clone()
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

/// Whether the machine has a server that CI does without, and this build the service.
fn is_there(server: &'static str, service: bool) -> bool {
    let needs = [Need::Fuse, Need::Program("setpriv"), Need::Program(server)];
    let missing = needs.into_iter().find_map(Need::missing);
    let missing = missing.or_else(|| (!service).then(|| "its feature of uvfs-object".into()));
    if let Some(missing) = &missing {
        say(format_args!("needs {missing}"));
    }
    missing.is_none()
}

/// The promises that hold on a store that keeps no conditions of puts, takes no parts, and shows a file while it is put.
fn of_each(store: &Other) {
    reads(store);
    writes::small_files(store);
}

/// The promises that hold where an object changes in one step.
fn of_objects(store: &Other) {
    of_each(store);
    the_cache_has_a_limit(store);
    model::random_calls(store);
    model::versions_under_readers(store);
    crate::pair::two_mounts_write(store);
}

#[test]
fn over_azure() {
    if !is_there("azurite-blob", cfg!(feature = "azblob")) {
        return;
    }
    let args = "--skipApiVersionCheck --silent --blobPort {port} --location {data}";
    let (server, port) = program("azurite-blob", args);
    let endpoint = format!("http://127.0.0.1:{port}/{ACCOUNT}");
    let mut made = Command::new("python3");
    made.args(["-c", CONTAINER, &endpoint, ACCOUNT, KEY]);
    assert!(made.status().unwrap().success());
    let key = KEY.replace('+', "%2B");
    let uri =
        format!("azblob://bucket?endpoint={endpoint}&account_name={ACCOUNT}&account_key={key}");
    let store = Other::new(uri, server);
    of_objects(&store);
    writes::a_large_file_is_stored(&store);
    writes::parts_go_while_a_file_is_written(&store);
    writes::a_large_file_is_not_overwritten(&store);
}

#[test]
fn over_gcs() {
    if !is_there("fake-gcs-server", cfg!(feature = "gcs")) {
        return;
    }
    let args = "-scheme=http -host=127.0.0.1 -port={port} -public-host=127.0.0.1:{port} \
                -backend=memory -data={data}";
    let (server, port) = program("fake-gcs-server", args);
    let endpoint = format!("endpoint=http://127.0.0.1:{port}");
    let uri = format!("gcs://bucket?{endpoint}&skip_signature=true");
    // This server lacks the uploads of parts by which OpenDAL replaces large objects.
    of_objects(&Other::new(uri, server));
}

#[test]
fn over_webdav() {
    if has(&[
        Need::Fuse,
        Need::Program("rclone"),
        Need::Program("setpriv"),
    ]) {
        let (server, port) = program("rclone", "serve webdav --addr=127.0.0.1:{port} {data}");
        let uri = format!("webdav:///bucket?endpoint=http://127.0.0.1:{port}");
        let store = Other::new(uri, server);
        of_each(&store);
        a_file_may_be_too_large(&store);
    }
}

/// A store that takes an object by one request alone gets none that is larger than the memory for it.
fn a_file_may_be_too_large(store: &Other) {
    let served = serve(&store.uri(), |options| options.writes = Writes::Close);
    let fitting = bytes(32 * MIB, 1);
    fs::write(served.at("fitting"), &fitting).unwrap();
    let fresh = serve(&store.uri(), |_| {});
    assert!(fs::read(fresh.at("fitting")).unwrap() == fitting);
    let mut file = File::create_new(served.at("larger")).unwrap();
    file.write_all(&fitting).unwrap();
    file.write_all(b"x").unwrap();
    let error = file.sync_all().unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::EFBIG), "{error}");
    fs::remove_file(served.at("larger")).unwrap();
}
