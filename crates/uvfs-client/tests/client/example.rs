//! The example of a whole file system does what the guide says, served in its three ways.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::Path;
use std::process::Command;
use std::sync::Arc;

use rustix::fs::RenameFlags;
use uvfs_client::{Client, Config, Connection, Flags, OpenOptions};
use uvfs_server::{ClientLimits, Mounted, Options, Session, SessionOptions, in_process};

#[path = "../../../uvfs-server/examples/memory/fs.rs"]
mod memory;

use memory::Memory;

/// The example on `at`, also for clients. Nothing where this machine can't mount.
fn mounted(at: &Path) -> Option<Mounted<Memory>> {
    let mut options = Options::named("memory");
    options.server.clients = Some(ClientLimits::default());
    match uvfs_server::mount(Memory::new(), at, options) {
        Ok(mounted) => Some(mounted),
        Err(error) => {
            uvfs_testing::skip(error);
            None
        }
    }
}

/// The example of a file system in memory works when it is mounted.
#[test]
fn a_mount_is_a_file_system() {
    let dir = tempfile::tempdir().unwrap();
    let at = dir.path();
    let Some(mounted) = mounted(at) else { return };
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let run = |program: &str, arguments: &[&Path]| {
        let ended = Command::new(program).args(arguments).status().unwrap();
        assert!(ended.success(), "{program} {arguments:?}");
    };
    let copy = at.join("copy");
    run("cp", &[Path::new("-a"), &source, &copy]);
    run("diff", &[Path::new("-r"), &source, &copy]);

    let file = at.join("file");
    fs::write(&file, "one").unwrap();
    fs::hard_link(&file, at.join("other")).unwrap();
    fs::write(&file, "two and more").unwrap();
    assert_eq!(fs::read(at.join("other")).unwrap(), b"two and more");
    assert_eq!(fs::metadata(&file).unwrap().nlink(), 2);
    symlink("file", at.join("link")).unwrap();
    assert_eq!(fs::read_link(at.join("link")).unwrap(), Path::new("file"));
    fs::set_permissions(&file, fs::Permissions::from_mode(0o640)).unwrap();
    assert_eq!(fs::metadata(at.join("link")).unwrap().mode(), 0o100640);

    let full = fs::remove_dir(&copy).unwrap_err();
    assert_eq!(full.raw_os_error(), Some(libc::ENOTEMPTY));
    fs::rename(&file, copy.join("moved")).unwrap();
    assert!(!file.exists() && copy.join("moved").exists());
    // Under a name that something has already, which goes.
    fs::rename(copy.join("moved"), at.join("link")).unwrap();
    assert_eq!(fs::metadata(at.join("link")).unwrap().size(), 12);
    fs::remove_dir_all(&copy).unwrap();
    let mut left: Vec<_> = fs::read_dir(at)
        .unwrap()
        .map(|e| e.unwrap().file_name())
        .collect();
    left.sort();
    assert_eq!(left, ["link", "other"]);

    // A file without a name lives as long as it is open.
    let open = fs::File::open(at.join("other")).unwrap();
    fs::remove_file(at.join("other")).unwrap();
    fs::remove_file(at.join("link")).unwrap();
    assert_eq!(std::io::read_to_string(&open).unwrap(), "two and more");
    drop(open);

    mounted.unmount().unwrap();
    mounted.wait();
    assert_eq!(fs::read_dir(at).unwrap().count(), 0, "it is unmounted");
}

/// The example serves clients.
#[test]
fn a_client_takes_over_a_file_of_the_mount() {
    let dir = tempfile::tempdir().unwrap();
    let at = dir.path();
    let Some(_mounted) = mounted(at) else { return };
    let open = fs::File::options();
    let ours = open
        .clone()
        .read(true)
        .write(true)
        .create(true)
        .open(at.join("f"))
        .unwrap();
    let token = uvfs_client::Token::of(std::os::fd::AsFd::as_fd(&ours)).unwrap();
    let server = Connection::connect(token.socket()).unwrap();
    let client = Client::new(server, Config::default()).unwrap();
    let file = client.import_token(&token).unwrap();
    file.write_at(b"by a client", 0, Flags::empty()).unwrap();
    assert_eq!(fs::read(at.join("f")).unwrap(), b"by a client");
    file.close().unwrap();
}

/// The example works in a process without a mount.
#[test]
fn a_program_uses_it_without_a_mount() {
    let session = Session::unmounted(Memory::new(), SessionOptions::default()).unwrap();
    let (_server, socket) = in_process(&Arc::new(session), ClientLimits::default()).unwrap();
    let client = Client::new(Connection::from(socket), Config::default()).unwrap();
    client.mkdir("dir", 0o755).unwrap();
    let new = OpenOptions::new().read(true).write(true).create(true);
    let file = client.open("dir/file", new).unwrap();
    file.write_at(b"in this process", 0, Flags::empty())
        .unwrap();
    assert_eq!(client.stat("dir/file").unwrap().size, 15);
    // Equal handles, as this file system gives them, are still two: one is closed, and the other goes on.
    let again = || client.open("dir/file", OpenOptions::new().read(true));
    let (first, second) = (again().unwrap(), again().unwrap());
    first.close().unwrap();
    let mut bytes = [0; 2];
    assert_eq!(second.read_at(&mut bytes, 0, Flags::DIRECT).unwrap(), 2);
    assert_eq!(&bytes, b"in");
    second.close().unwrap();
    client
        .rename("dir/file", "file", RenameFlags::empty())
        .unwrap();
    client.rmdir("dir").unwrap();
    let mut bytes = [0; 4];
    assert_eq!(file.read_at(&mut bytes, 11, Flags::empty()).unwrap(), 4);
    assert_eq!(&bytes, b"cess");
}
