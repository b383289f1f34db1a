//! A cache that may be larger than the memory that there is.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

use uvfs_client::{Client, Config, Flags};

use crate::common::{connect, rw};

const MIB: usize = 1 << 20;
/// The limits of the control group and of the cache, and the bytes that go through it.
const LIMIT: usize = 96 * MIB;
const CACHE: usize = 512 * MIB;
const DATA: usize = 192 * MIB;

/// A memory control group of this test's own.
struct Group(PathBuf);

impl Group {
    /// In the first hierarchy that lets us: of version 2, or of version 1.
    fn new() -> Option<Self> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let mounts = fs::read_to_string("/proc/self/mounts").ok()?;
        let name = format!(
            "uvfs-test-{}-{}",
            std::process::id(),
            NEXT.fetch_add(1, Ordering::Relaxed)
        );
        mounts.lines().find_map(|line| {
            let mut words = line.split(' ').skip(1);
            let (at, kind, options) = (words.next()?, words.next()?, words.next()?);
            let limit = match kind {
                "cgroup2" => "memory.max",
                "cgroup" if options.split(',').any(|o| o == "memory") => "memory.limit_in_bytes",
                _ => return None,
            };
            let group = Path::new(at).join(&name);
            fs::create_dir(&group).ok()?;
            let group = Group(group);
            fs::write(group.0.join(limit), LIMIT.to_string()).ok()?;
            Some(group)
        })
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        let _ = fs::remove_dir(&self.0);
    }
}

fn block(n: usize) -> Vec<u8> {
    let mut block = vec![n as u8; MIB];
    block[..8].copy_from_slice(&n.to_ne_bytes());
    block
}

/// Not a test by itself: what the next one runs in the group.
#[test]
fn program_in_the_group() {
    let (Some(group), Some(dir)) = (
        std::env::var_os("UVFS_TEST_GROUP"),
        std::env::var_os("UVFS_TEST_GROUP_DIR"),
    ) else {
        return;
    };
    fs::write(Path::new(&group).join("cgroup.procs"), "0").unwrap();
    let config = Config::default()
        .memory(CACHE)
        .yields(std::env::var_os("UVFS_TEST_GROUP_GREEDY").is_none());
    let (_serving, connection) = connect(&dir);
    let client = Client::new(connection, config).unwrap();
    let file = client.open("data", rw()).unwrap();
    for n in 0..DATA / MIB {
        let at = (n * MIB) as u64;
        assert_eq!(file.write_at(&block(n), at, Flags::empty()).unwrap(), MIB);
    }
    let mut back = vec![0; MIB];
    for n in (0..DATA / MIB).chain((0..DATA / MIB).rev()) {
        let at = (n * MIB) as u64;
        assert_eq!(file.read_at(&mut back, at, Flags::empty()).unwrap(), MIB);
        assert!(back == block(n), "MiB {n}");
    }
    // A direct call needs pages of its own, however little there is.
    let large = vec![9; 8 * MIB];
    assert_eq!(file.write_at(&large, 0, Flags::DIRECT).unwrap(), 8 * MIB);
    file.close().unwrap();
    let peak = client.stats().peak_pages as usize * 4096;
    assert!(peak <= LIMIT, "{peak}");
    // It is a cache all the same.
    assert!(peak >= 16 * MIB, "{peak}");
}

/// A program whose cache does not fit its control group is not killed.
#[test]
fn a_cache_above_the_limit_of_its_control_group_gives_way() {
    let Some(group) = Group::new() else {
        return uvfs_testing::skip("needs root and memory control groups");
    };
    // In memory that the group does not pay for, as the first to touch a page does: a disk that others
    // keep busy writes back too slowly for a group of version 1, which is killed then.
    let dir = tempfile::tempdir_in("/dev/shm").unwrap();
    fs::write(dir.path().join("data"), vec![1; DATA]).unwrap();
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "pressure::program_in_the_group", "--nocapture"])
        .env("UVFS_TEST_GROUP", &group.0)
        .env("UVFS_TEST_GROUP_DIR", dir.path())
        .output()
        .unwrap();
    assert!(
        output.status.success(),
        "{}\n{}{}",
        output.status,
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    let size = fs::metadata(dir.path().join("data")).unwrap().len();
    assert_eq!(size, DATA as u64);
}
