//! The cache in a control group with little memory.

use super::*;

const CHILD: &str = "UVFS_BUF_TEST_IMAGE";
const METADATA: u64 = 160 << 20;

/// Runs in the cgroup: reads all of the image several times, in no order, from two threads.
fn child(path: &Path) {
    let blocks = METADATA / 4096;
    for kind in EngineKind::ALL {
        let Some(target) = open(path, kind, limit(6 << 20)) else {
            continue;
        };
        target.set_groups(1 << 15);
        let shrinkers = Arc::new(Shrinkers::new());
        let shrinker = target.shrinker();
        shrinkers.register(&shrinker);
        let _monitor = Monitor::start(MonitorConfig::default(), shrinkers).unwrap();
        std::thread::scope(|scope| {
            for thread in 0..2 {
                let target = &target;
                scope.spawn(move || {
                    for n in 0..blocks {
                        // 7919 is prime: a walk over all blocks in no useful order.
                        let n = (n * 7919 + thread * 31) % blocks;
                        let ahead = block((n + 7919) % blocks);
                        target.readahead([&ahead[..]], &Addressed, Prefetch::Exact);
                        target.read(&block(n), &Addressed).unwrap();
                    }
                });
            }
        });
        let memory = target.memory();
        assert!(memory.resident <= memory.limit);
        assert!(target.stats().evictions > blocks);
    }
}

/// The memory of a control group in which only pressure limits the cache.
const GROUP: usize = 64 << 20;

/// The program in that group: it fills a cache that may be larger than the group, no faster than the monitor looks.
fn held_back(path: &Path) {
    for kind in EngineKind::ALL {
        let Some(target) = open(path, kind, limit(METADATA as usize)) else {
            continue;
        };
        target.set_groups(1 << 15);
        let shrinkers = Arc::new(Shrinkers::new());
        let shrinker = target.shrinker();
        shrinkers.register(&shrinker);
        let config = MonitorConfig {
            interval: Duration::from_millis(1),
            ..MonitorConfig::default()
        };
        let _monitor = Monitor::start(config, shrinkers).unwrap();
        let mut most = 0;
        for n in 0..METADATA / 4096 {
            target.read(&block(n), &Addressed).unwrap();
            if n % 32 == 0 {
                std::thread::sleep(Duration::from_millis(2));
                most = most.max(target.memory().resident);
                assert!(most < GROUP, "{kind}: {most} resident after {n}");
            }
        }
        assert!(most > GROUP / 4, "{kind}: only {most} resident");
    }
}

/// A memory cgroup of either version, removed at the end.
struct Cgroup(PathBuf);

impl Cgroup {
    fn new(limit: u64) -> Result<Cgroup, String> {
        let name = format!("uvfs-buf-test-{}-{limit}", std::process::id());
        let roots = [
            ("/sys/fs/cgroup/memory", "memory.limit_in_bytes"),
            ("/sys/fs/cgroup", "memory.max"),
        ];
        for (root, file) in roots {
            let dir = Path::new(root).join(&name);
            if fs::create_dir(&dir).is_err() {
                continue;
            }
            let group = Cgroup(dir);
            if group.0.join(file).exists() {
                fs::write(group.0.join(file), limit.to_string()).map_err(|e| e.to_string())?;
                return Ok(group);
            }
        }
        Err("no memory cgroup can be made".into())
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        // The last task may still be on its way out.
        let end = Instant::now() + Duration::from_secs(10);
        while fs::remove_dir(&self.0).is_err() && Instant::now() < end {
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

/// Runs one of this program's tests in a memory control group, with an image.
fn in_a_group(limit: u64, test: &str) {
    let group = match Cgroup::new(limit) {
        Ok(group) => group,
        Err(why) => {
            let needs = "needs root and the memory controller";
            return uvfs_testing::skip(format_args!("{needs}: {why}"));
        }
    };
    let dir = tempfile::tempdir().unwrap();
    let path = image(dir.path(), METADATA / 4096);
    // A shell joins the group and becomes the test, so that all its memory is counted there.
    let mut child = Command::new("sh")
        .args([
            "-c",
            r#"echo $$ > "$1/cgroup.procs" && shift && exec "$@""#,
            "sh",
        ])
        .arg(&group.0)
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", test])
        .env(CHILD, &path)
        .spawn()
        .unwrap();
    let end = Instant::now() + Duration::from_secs(300);
    let status = loop {
        if let Some(status) = child.try_wait().unwrap() {
            break status;
        }
        if Instant::now() > end {
            child.kill().unwrap();
            child.wait().unwrap();
            panic!("not finished within 5 minutes");
        }
        std::thread::sleep(Duration::from_millis(20));
    };
    assert!(status.success(), "in the cgroup: {status}");
}

/// Reading all metadata succeeds in a control group of a tenth of its size.
#[test]
fn finishes_in_a_cgroup_of_a_tenth_of_the_metadata() {
    match std::env::var_os(CHILD) {
        Some(path) => child(Path::new(&path)),
        None => in_a_group(
            METADATA / 10,
            "pressure::finishes_in_a_cgroup_of_a_tenth_of_the_metadata",
        ),
    }
}

/// Its monitor keeps the cache within the group, whose limit is below the cache's own.
#[test]
fn pressure_in_a_control_group_holds_the_cache_back() {
    match std::env::var_os(CHILD) {
        Some(path) => held_back(Path::new(&path)),
        None => in_a_group(
            GROUP as u64,
            "pressure::pressure_in_a_control_group_holds_the_cache_back",
        ),
    }
}
