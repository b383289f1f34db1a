use super::*;
use crate::Shrinker;
use crate::shrink::tests::Pool;
use std::os::unix::fs::FileExt;

fn until(what: &str, mut done: impl FnMut() -> bool) {
    let end = Instant::now() + Duration::from_secs(30);
    while !done() {
        assert!(Instant::now() < end, "{what}: not within 30 s");
        thread::sleep(Duration::from_millis(2));
    }
}

/// A machine without PSI in `dir`, and a pool to shrink.
fn machine(dir: &Path) -> (MonitorConfig, Arc<Shrinkers>, Arc<Pool>) {
    fs::write(
        dir.join("meminfo"),
        "MemTotal: 1000 kB\nMemAvailable: 500 kB\n",
    )
    .unwrap();
    let config = MonitorConfig {
        psi: dir.join("absent"),
        meminfo: dir.join("meminfo"),
        cgroup: None,
        interval: Duration::from_millis(2),
        ..MonitorConfig::default()
    };
    let pool = Arc::new(Pool(1000.into()));
    let shrinkers = Arc::new(Shrinkers::new());
    let as_shrinker: Arc<dyn Shrinker> = pool.clone();
    shrinkers.register(&as_shrinker);
    (config, shrinkers, pool)
}

/// On a kernel without PSI the monitor shrinks caches when little memory is available.
#[test]
fn without_psi_available_memory_is_looked_at() {
    let dir = tempfile::tempdir().unwrap();
    let (config, shrinkers, pool) = machine(dir.path());
    let monitor = Monitor::start(config, shrinkers).unwrap();
    assert_eq!(monitor.sources(), [Source::MemAvailable]);
    assert_eq!(pool.count(), 1000);
    // In place, as the kernel's files change.
    let meminfo = OpenOptions::new()
        .write(true)
        .open(dir.path().join("meminfo"));
    let low = b"MemTotal: 1000 kB\nMemAvailable:  50 kB\n";
    meminfo.unwrap().write_all_at(low, 0).unwrap();
    until("pool shrinks", || pool.count() < 1000);
}

/// The monitor shrinks caches when the control group is near its limit, page cache not counted.
#[test]
fn a_cgroup_near_its_limit_is_pressure() {
    for files in [
        ["memory.current", "memory.max", "memory.stat", "active_file"],
        [
            "memory.usage_in_bytes",
            "memory.limit_in_bytes",
            "memory.stat",
            "total_active_file",
        ],
    ] {
        let dir = tempfile::tempdir().unwrap();
        let (mut config, shrinkers, pool) = machine(dir.path());
        let [current, limit, stat, cache] = files;
        fs::write(dir.path().join(current), "950\n").unwrap();
        fs::write(dir.path().join(limit), "1000\n").unwrap();
        // Page cache is no pressure: 950 - 500 of 1000.
        fs::write(dir.path().join(stat), format!("{cache} 500\n")).unwrap();
        config.cgroup = Some(dir.path().into());
        let usage = Usage::find(dir.path()).unwrap();
        assert_eq!(usage.percent(), Some(45));
        let monitor = Monitor::start(config, shrinkers).unwrap();
        assert_eq!(
            monitor.sources(),
            [Source::CgroupUsage, Source::MemAvailable]
        );
        assert_eq!(pool.count(), 1000);
        fs::write(dir.path().join(stat), "").unwrap();
        until("pool shrinks", || pool.count() < 1000);
    }
}

/// The room is the least that the machine and each control group have left.
#[test]
fn room_is_what_the_group_and_the_machine_leave() {
    let dir = tempfile::tempdir().unwrap();
    let (mut config, ..) = machine(dir.path());
    // A tenth of 1000 kB stays, in whole hundredths.
    assert_eq!(Room::new(&config).bytes(), 400 << 10);
    fs::write(dir.path().join("memory.current"), "3000\n").unwrap();
    fs::write(dir.path().join("memory.max"), "10000\n").unwrap();
    fs::write(dir.path().join("memory.stat"), "active_file 500\n").unwrap();
    config.cgroup = Some(dir.path().into());
    assert_eq!(Room::new(&config).bytes(), 8500 - 2500);
    // A group within it has no more.
    let inner = dir.path().join("inner");
    fs::create_dir(&inner).unwrap();
    fs::write(inner.join("memory.current"), "100\n").unwrap();
    fs::write(inner.join("memory.max"), "max\n").unwrap();
    config.cgroup = Some(inner);
    assert_eq!(Room::new(&config).bytes(), 8500 - 2500);
    fs::write(dir.path().join("memory.max"), "max\n").unwrap();
    assert_eq!(Room::new(&config).bytes(), 400 << 10);
    config.cgroup = None;
    config.meminfo = dir.path().join("absent");
    assert_eq!(Room::new(&config).bytes(), u64::MAX);
}

/// The monitor uses PSI where the kernel has it, and available memory elsewhere.
#[test]
fn psi_is_used_where_the_kernel_has_it() {
    let config = MonitorConfig::default();
    // Absent without CONFIG_PSI; with psi=0 it can't be opened (psi_memory_open).
    let usable = OpenOptions::new()
        .read(true)
        .write(true)
        .open("/proc/pressure/memory")
        .is_ok();
    let monitor = Monitor::start(config, Arc::new(Shrinkers::new())).unwrap();
    assert_eq!(monitor.sources().contains(&Source::Psi), usable);
    assert_ne!(monitor.sources().contains(&Source::MemAvailable), usable);
}

/// The process's own control group of version 1 is found.
#[test]
fn cgroup_paths() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path().join("v1");
    fs::create_dir_all(root.join("a/b")).unwrap();
    fs::write(root.join("a/b/memory.usage_in_bytes"), "1").unwrap();
    fs::write(dir.path().join("cgroup"), "4:memory:/a/b\n0::/\n").unwrap();
    fs::write(
        dir.path().join("mounts"),
        format!("cgroup {} cgroup rw,memory 0 0\n", root.display()),
    )
    .unwrap();
    assert_eq!(own_cgroup(dir.path()), Some(root.join("a/b")));
}
