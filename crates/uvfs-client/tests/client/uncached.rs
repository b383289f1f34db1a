//! Uncached calls, all the way down: what the client drops, the host's page cache does not keep
//! either.

use std::fs::File as HostFile;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use uvfs_client::{Client, Config, Connection, Flags, OpenOptions};
use uvfs_io::ops::{self, DONTCACHE, cached_bytes};
use uvfs_io::runtime::Runtime;
use uvfs_io::{IoBuf, Payload};
use uvfs_queue::wait::WaitConfig;
use uvfs_server::{ClientLimits, Clients};

use crate::common::{rw, session};

const MIB: usize = 1 << 20;
const SIZE: usize = 16 * MIB;

/// A directory on a file system that can do RWF_DONTCACHE: below the build's own, or on a loop
/// device.
struct Place {
    dir: tempfile::TempDir,
    loop_mount: Option<PathBuf>,
}

impl Drop for Place {
    fn drop(&mut self) {
        if let Some(path) = &self.loop_mount {
            let _ = Command::new("umount").arg(path).status();
        }
    }
}

fn can_drop_behind(dir: &Path) -> bool {
    let file = HostFile::create(dir.join("probe")).unwrap();
    if cached_bytes(&file).is_err() {
        return false;
    }
    let runtime = Runtime::new(WaitConfig::default()).unwrap();
    let fd = Arc::new(ops::File::from(std::os::fd::OwnedFd::from(file)));
    let written = runtime.block_on(async move {
        let data = Payload::from(IoBuf::alloc(4096).unwrap());
        ops::write_at(&fd, &data, 0, DONTCACHE).await
    });
    std::fs::remove_file(dir.join("probe")).unwrap();
    written.unwrap() == Ok(4096)
}

fn place() -> Option<Place> {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    if can_drop_behind(dir.path()) {
        return Some(Place {
            dir,
            loop_mount: None,
        });
    }
    let (image, at) = (dir.path().join("image"), dir.path().join("mnt"));
    std::fs::create_dir(&at).unwrap();
    HostFile::create(&image)
        .unwrap()
        .set_len(128 << 20)
        .unwrap();
    let run = |command: &mut Command| command.output().is_ok_and(|out| out.status.success());
    let mounted = run(Command::new("mkfs.ext4").arg("-q").arg(&image))
        && run(Command::new("mount")
            .args(["-o", "loop"])
            .arg(&image)
            .arg(&at));
    let place = Place {
        dir,
        loop_mount: mounted.then(|| at.clone()),
    };
    if mounted && can_drop_behind(&at) {
        return Some(place);
    }
    uvfs_testing::say("needs a file system with RWF_DONTCACHE (Linux 6.14, ext4 or xfs)");
    None
}

impl Place {
    fn path(&self) -> &Path {
        self.loop_mount.as_deref().unwrap_or(self.dir.path())
    }
}

/// How much of the file the host caches once it has stopped changing its mind: what was written is
/// dropped when its writeback has ended.
fn cached_at_last(path: &Path, most: usize) -> usize {
    let file = HostFile::open(path).unwrap();
    let deadline = Instant::now() + Duration::from_secs(20);
    loop {
        let now = cached_bytes(&file).unwrap() as usize;
        if now <= most || Instant::now() > deadline {
            return now;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Writes and reads a file of its own with `flags`; how much of it the host then has cached.
fn written_and_read(connection: Connection, data: &Path, flags: Flags) -> (usize, usize) {
    let config = Config::default().memory(4 * MIB);
    let most = if flags.contains(Flags::DONTCACHE) {
        MIB
    } else {
        usize::MAX
    };
    let client = Client::new(connection, config).unwrap();
    let file = client.open("written", rw()).unwrap();
    let block = vec![0x5a; MIB];
    for at in (0..SIZE).step_by(MIB) {
        file.write_at(&block, at as u64, flags).unwrap();
    }
    file.sync_all().unwrap();
    let written = cached_at_last(&data.join("written"), most);

    let mut host = HostFile::create(data.join("read")).unwrap();
    for _ in 0..SIZE / MIB {
        host.write_all(&block).unwrap();
    }
    host.sync_all().unwrap();
    rustix::fs::fadvise(&host, 0, None, rustix::fs::Advice::DontNeed).unwrap();
    assert_eq!(cached_bytes(&host).unwrap(), 0);
    let file = client.open("read", OpenOptions::new().read(true)).unwrap();
    let mut back = vec![0; MIB];
    for at in (0..SIZE).step_by(MIB) {
        assert_eq!(file.read_at(&mut back, at as u64, flags).unwrap(), MIB);
        assert!(back == block);
    }
    (written, cached_at_last(&data.join("read"), most))
}

fn serve(place: &Place, data: &Path) -> (Clients, PathBuf) {
    let socket = place.dir.path().join("sock");
    let clients = Clients::listen(session(data), &socket, ClientLimits::default()).unwrap();
    (clients, socket)
}

/// Uncached calls leave nothing in the host's page cache.
#[test]
fn the_host_keeps_nothing_of_uncached_calls() {
    let Some(place) = place() else { return };
    let data = place.path().join("served");
    std::fs::create_dir(&data).unwrap();
    for flags in [
        Flags::DONTCACHE,
        Flags::empty(),
        Flags::DONTCACHE | Flags::DIRECT,
    ] {
        let (_server, socket) = serve(&place, &data);
        let connection = Connection::connect(socket).unwrap();
        let (written, read) = written_and_read(connection, &data, flags);
        if flags.contains(Flags::DONTCACHE) {
            assert!(written <= MIB, "written: {written}");
            assert!(read <= MIB, "read: {read}");
        } else {
            assert!(written >= SIZE / 2, "written: {written}");
            assert!(read >= SIZE / 2, "read: {read}");
        }
        std::fs::remove_file(data.join("written")).unwrap();
        std::fs::remove_file(data.join("read")).unwrap();
    }
}

/// Where the host can't (tmpfs), the data comes through all the same.
#[test]
fn a_host_without_it_is_asked_once_and_then_left_alone() {
    let Ok(dir) = tempfile::tempdir_in("/dev/shm") else {
        return uvfs_testing::skip("no /dev/shm");
    };
    let place = Place {
        dir,
        loop_mount: None,
    };
    let data = place.path().join("data");
    std::fs::create_dir(&data).unwrap();
    let (_server, socket) = serve(&place, &data);
    let client = Client::new(
        Connection::connect(socket).unwrap(),
        Config::default().memory(2 * MIB),
    )
    .unwrap();
    let file = client.open("f", rw()).unwrap();
    let bytes: Vec<u8> = (0..3 * MIB).map(|i| (i / 5) as u8).collect();
    for _ in 0..2 {
        file.write_at(&bytes, 0, Flags::DONTCACHE).unwrap();
        file.sync_data().unwrap();
        assert!(std::fs::read(data.join("f")).unwrap() == bytes);
        let mut back = vec![0; bytes.len()];
        let n = file.read_at(&mut back, 0, Flags::DONTCACHE).unwrap();
        assert!(n == bytes.len() && back == bytes);
    }
}
