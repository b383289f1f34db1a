//! A real stall for memory, in a control group made for it, reaches the monitor.

use std::fs::{self, File};
use std::io::{Read, Seek, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use uvfs_mem::{Monitor, MonitorConfig, Shrinker, Shrinkers, Source};

const CHILD: &str = "UVFS_MEM_TEST_FILE";
/// The group's memory, and the size of a file that is larger.
const LIMIT: u64 = 24 << 20;
const FILE: usize = 64 << 20;

/// Reads a file again and again that does not fit into the group.
fn thrash(path: &Path) {
    let mut file = File::options()
        .read(true)
        .write(true)
        .create(true)
        .truncate(true)
        .open(path)
        .unwrap();
    let mut piece = vec![7; 1 << 20];
    for _ in 0..FILE / piece.len() {
        file.write_all(&piece).unwrap();
    }
    file.sync_all().unwrap();
    loop {
        file.rewind().unwrap();
        while file.read(&mut piece).unwrap() > 0 {}
    }
}

/// A group of version 2, whose stalls are counted, with a limit of its own or one by a group of version 1.
struct Group {
    dirs: Vec<PathBuf>,
}

impl Group {
    fn new() -> Option<Self> {
        let name = format!("uvfs-mem-test-{}", std::process::id());
        let root = ["/sys/fs/cgroup/unified", "/sys/fs/cgroup"]
            .map(Path::new)
            .into_iter()
            .find(|root| root.join("cgroup.subtree_control").exists())?;
        let _ = fs::write(root.join("cgroup.subtree_control"), "+memory");
        let mut group = Self {
            dirs: vec![root.join(&name)],
        };
        fs::create_dir(&group.dirs[0]).ok()?;
        if fs::write(group.dirs[0].join("memory.max"), LIMIT.to_string()).is_err() {
            let limited = Path::new("/sys/fs/cgroup/memory").join(&name);
            fs::create_dir(&limited).ok()?;
            group.dirs.push(limited.clone());
            fs::write(limited.join("memory.limit_in_bytes"), LIMIT.to_string()).ok()?;
        }
        fs::read(group.dirs[0].join("memory.pressure")).ok()?;
        Some(group)
    }

    /// A shell joins the groups and becomes this program.
    fn start(&self, file: &Path) -> Child {
        let joins = "while [ \"$1\" != -- ]; do echo $$ >\"$1/cgroup.procs\"; shift; done; shift; exec \"$@\"";
        Command::new("sh")
            .args(["-ec", joins, "sh"])
            .args(&self.dirs)
            .arg("--")
            .arg(std::env::current_exe().unwrap())
            .args(["--exact", "a_stall_in_a_control_group_is_answered"])
            .env(CHILD, file)
            .spawn()
            .unwrap()
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        // The last task may still be on its way out.
        let end = Instant::now() + Duration::from_secs(10);
        for dir in &self.dirs {
            while fs::remove_dir(dir).is_err() && Instant::now() < end {
                thread::sleep(Duration::from_millis(10));
            }
        }
    }
}

struct Pool(AtomicUsize);

impl Shrinker for Pool {
    fn name(&self) -> &str {
        "pool"
    }
    fn count(&self) -> usize {
        self.0.load(Ordering::Relaxed)
    }
    fn scan(&self, bytes: usize) -> usize {
        self.0.fetch_sub(bytes, Ordering::Relaxed);
        bytes
    }
}

/// The monitor shrinks the pool after a stall in a control group, which no source but the group's trigger
/// can see.
#[test]
fn a_stall_in_a_control_group_is_answered() {
    if let Some(path) = std::env::var_os(CHILD) {
        return thrash(Path::new(&path));
    }
    let Some(group) = Group::new() else {
        let needs = "needs a control group that counts stalls (root, PSI, cgroup version 2)";
        return uvfs_testing::skip(needs);
    };
    // On a disk: what is in memory only can't be dropped.
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let config = MonitorConfig {
        psi: dir.path().join("absent"),
        meminfo: dir.path().join("absent"),
        cgroup: Some(group.dirs[0].clone()),
        stall: Duration::from_millis(50),
        // The group's use is no pressure by itself here.
        cgroup_percent: 1000,
        ..MonitorConfig::default()
    };
    let pool = Arc::new(Pool(1000.into()));
    let shrinkers = Arc::new(Shrinkers::new());
    let as_shrinker: Arc<dyn Shrinker> = pool.clone();
    shrinkers.register(&as_shrinker);
    let monitor = Monitor::start(config, shrinkers).unwrap();
    assert!(monitor.sources().contains(&Source::CgroupPsi));
    thread::sleep(Duration::from_millis(300));
    assert_eq!(pool.count(), 1000);
    let mut child = group.start(&dir.path().join("file"));
    let end = Instant::now() + Duration::from_secs(60);
    while pool.count() == 1000 && Instant::now() < end && child.try_wait().unwrap().is_none() {
        thread::sleep(Duration::from_millis(10));
    }
    let ended = child.try_wait().unwrap();
    child.kill().unwrap();
    child.wait().unwrap();
    let stalls = fs::read_to_string(group.dirs[0].join("memory.pressure")).unwrap();
    assert!(pool.count() < 1000, "{ended:?} {stalls}");
}
