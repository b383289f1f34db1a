//! The host and the mount change the same names at once.

use super::*;

/// All that a program sees of a tree.
pub fn view(root: &Path) -> BTreeMap<PathBuf, String> {
    let mut all = BTreeMap::new();
    let mut open = vec![root.to_owned()];
    while let Some(path) = open.pop() {
        let Ok(it) = path.symlink_metadata() else {
            // It may be in an old listing, which the views then differ by.
            all.insert(path.strip_prefix(root).unwrap().to_owned(), "gone".into());
            continue;
        };
        let contents = match it.file_type() {
            kind if kind.is_dir() => {
                let names = fs::read_dir(&path).into_iter().flatten().flatten();
                open.extend(names.map(|entry| entry.path()));
                String::new()
            }
            kind if kind.is_symlink() => format!("{:?}", fs::read_link(&path)),
            _ => String::from_utf8_lossy(&fs::read(&path).unwrap_or_default()).into_owned(),
        };
        // A directory's size and times are the host's as well.
        let attributes = (
            it.mode(),
            it.uid(),
            it.nlink(),
            it.len(),
            it.mtime(),
            it.mtime_nsec(),
        );
        let name = path.strip_prefix(root).unwrap().to_owned();
        all.insert(
            name,
            format!("{attributes:?} {} {contents}", it.ctime_nsec()),
        );
    }
    all
}

/// Waits until both views are the same, and gives how long that took.
pub fn agree(host: &Path, mount: &Path, names: &[String], what: &str) -> Duration {
    let began = Instant::now();
    loop {
        let (on_host, shown) = (view(host), view(mount));
        // Names that are missing are not in a view.
        let there = |root: &Path| {
            names
                .iter()
                .map(|name| root.join(name).exists())
                .collect::<Vec<_>>()
        };
        if on_host == shown && there(host) == there(mount) {
            return began.elapsed();
        }
        if began.elapsed() > 2 * SEEN {
            let differ = |(name, it): &(&PathBuf, &String)| shown.get(*name) != Some(*it);
            let differ: Vec<_> = on_host.iter().filter(differ).take(3).collect();
            let shown: Vec<_> = differ.iter().map(|(name, _)| shown.get(*name)).collect();
            panic!("{what}: {differ:?} is shown as {shown:?}");
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

pub fn racing_names() -> Vec<String> {
    let name = |number: usize| format!("{}/name{}", ["d", "e"][number % 2], number / 2);
    (0..12).map(name).collect()
}

/// One change of few names, or of what they lead to. Whether it succeeds doesn't matter.
pub fn race_host(host: &Path, names: &[String], random: &mut Random) {
    let (a, b) = (
        &names[random.below(names.len() as u64) as usize],
        &names[random.below(names.len() as u64) as usize],
    );
    let (a, b) = (host.join(a), host.join(b));
    let width = 20 + random.below(3) as usize;
    let text = format!("{:<width$}", random.0);
    let _ = match random.below(9) {
        0 | 1 => fs::write(&a, text),
        2 => fs::remove_file(&a).or_else(|_| fs::remove_dir(&a)),
        3 => fs::rename(&a, &b),
        4 => fs::hard_link(&a, &b),
        5 => fs::create_dir(&a),
        6 => symlink(&text, &a),
        7 => fs::set_permissions(&a, Permissions::from_mode(0o600 + random.below(64) as u32)),
        _ => OpenOptions::new()
            .append(true)
            .open(&a)
            .and_then(|mut file| file.write_all(text.as_bytes())),
    };
}

/// One look at them, or a change that only the owner of a file would make.
pub fn race_mount(mount: &Path, names: &[String], random: &mut Random) {
    let path = mount.join(&names[random.below(names.len() as u64) as usize]);
    match random.below(12) {
        0 => drop(view(&mount.join("d"))),
        1 | 2 => {
            for entry in fs::read_dir(path.parent().unwrap()).unwrap().flatten() {
                let _ = entry.metadata();
            }
        }
        3 => drop(fs::set_permissions(&path, Permissions::from_mode(0o700))),
        4 => drop(
            OpenOptions::new()
                .write(true)
                .create(true)
                .truncate(false)
                .open(&path),
        ),
        5 => drop(fs::read_link(&path)),
        6..9 => drop(fs::read(&path)),
        _ => drop(path.symlink_metadata()),
    }
}

/// The host changes names, contents and attributes while others look at them through the mount: in
/// the end both agree, and soon.
pub fn races(mount: &Path, host: &str) -> String {
    let (host, names) = (Path::new(host), racing_names());
    let rounds = if full() { 400 } else { 24 };
    let mut took = Vec::new();
    for round in 0..rounds {
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let (names, stop) = (&names, &stop);
            for thread in 0..3 {
                scope.spawn(move || {
                    let mut random = Random(round * 10 + thread + 1);
                    while !stop.load(Ordering::Relaxed) {
                        race_mount(mount, names, &mut random);
                    }
                });
            }
            let mut random = Random(round * 10 + 9);
            let began = Instant::now();
            while began.elapsed() < Duration::from_millis(150) {
                race_host(host, names, &mut random);
                if random.below(4) == 0 {
                    std::thread::sleep(Duration::from_micros(random.below(300)));
                }
            }
            stop.store(true, Ordering::Relaxed);
        });
        took.push(agree(host, mount, &names, &format!("round {round}")));
    }
    took.sort();
    format!(
        "{rounds} rounds: half agree within {:?}, all within {:?}",
        took[took.len() / 2],
        took[took.len() - 1]
    )
}

pub fn races_end_well((kind, transport): (&str, Transport)) {
    if !needs(kind, transport) {
        return;
    }
    let scratch = Scratch::new();
    let source = source(&scratch, kind);
    for dir in ["d", "e"] {
        fs::create_dir(source.join(dir)).unwrap();
    }
    let mount = Mount::new(&Serve::over(transport), &source, &scratch.dir("mount"));
    println!("{kind}: {}", play("host_races", &mount, &source, &scratch));
    assert_eq!(stats(&mount)["watch"]["on"], true);
}

/// A change on the host that races with a lookup leaves no old entry in the kernel.
#[test]
fn races_end_well_on_tmpfs() {
    races_end_well(KINDS[0]);
}

/// The same on ext4.
#[test]
fn races_end_well_on_ext4() {
    races_end_well(KINDS[1]);
}

/// The same on XFS.
#[test]
fn races_end_well_on_xfs() {
    races_end_well(KINDS[2]);
}
