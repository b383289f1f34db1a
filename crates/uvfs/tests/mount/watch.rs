//! Changes that programs of the host make to the source behind a mount whose kernel caches for as long
//! as nothing changes.

use std::collections::BTreeMap;
use std::fs::{self, File, FileTimes, OpenOptions, Permissions};
use std::io::Write;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt, chown, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant, SystemTime};

use rustix::fs::{RenameFlags, XattrFlags, renameat_with};
use rustix::process::Signal;

use crate::harness::*;

/// A change that was not seen by then never will be.
const SEEN: Duration = Duration::from_secs(5);

/// Host file systems that are watched, and how many changes are made on each.
const KINDS: [(&str, Transport, usize); 3] = [
    ("tmpfs", Transport::Uring, 4000),
    ("ext4", Transport::Dev, 3000),
    ("xfs", Transport::Uring, 3000),
];

/// A source of a kind, and where it is mounted.
fn source(scratch: &Scratch, kind: &str) -> PathBuf {
    match kind {
        "tmpfs" => scratch.tmpfs("source", "300m"),
        kind => scratch.image("source", kind),
    }
}

fn needs(kind: &str, transport: Transport) -> bool {
    let mut needs = vec![Need::Mount(transport), Need::Uvfs];
    match kind {
        "ext4" => needs.push(Need::Program("mkfs.ext4")),
        "xfs" => needs.push(Need::Program("mkfs.xfs")),
        _ => {}
    }
    has(&needs)
}

fn stats(mount: &Mount) -> serde_json::Value {
    let text = mount
        .run(uvfs().args(["stats", "--json"]).arg(&mount.at))
        .ok();
    serde_json::from_str(&text).expect("JSON")
}

/// Runs a function of this program that uses the mount; the mount and the source are its arguments.
fn play(function: &str, mount: &Mount, source: &Path, scratch: &Scratch) -> String {
    let report = scratch.path(function);
    let source = source.to_str().expect("a name");
    let mut child = crate::child::call(function, &mount.at, source, &report);
    mount.run_within(LATER, &mut child).ok();
    fs::read_to_string(report).expect("a report")
}

/// Two views of one tree: the host's, and the mount's.
struct Both<'a> {
    host: &'a Path,
    mount: &'a Path,
    took: Vec<Duration>,
}

impl Both<'_> {
    /// Fills the kernel's caches with what there is, or isn't, under some names.
    fn cache(&self, names: &[&str]) {
        for _ in 0..2 {
            for name in names {
                let path = self.mount.join(name);
                let _ = path.symlink_metadata();
                let _ = fs::read(&path);
                let _ = fs::read_dir(&path).map(Iterator::count);
                let parent = path.parent().expect("a parent");
                let _ = fs::read_dir(parent).map(Iterator::count);
            }
        }
    }

    /// Waits until the mount shows what has changed.
    fn seen(&mut self, what: &str, done: impl Fn(&Path) -> bool) {
        assert!(done(self.host), "{what}: not even on the host");
        let began = Instant::now();
        while !done(self.mount) {
            assert!(began.elapsed() < SEEN, "{what}: not seen");
            std::thread::sleep(Duration::from_micros(100));
        }
        self.took.push(began.elapsed());
    }
}

fn mode(path: &Path) -> Option<u32> {
    Some(path.symlink_metadata().ok()?.mode() & 0o7777)
}

fn listed(path: &Path) -> bool {
    let names = fs::read_dir(path.parent().expect("a parent"));
    let name = path.file_name().expect("a name");
    names.is_ok_and(|mut names| names.any(|entry| entry.is_ok_and(|it| it.file_name() == name)))
}

/// A store through a shared mapping of a file of one page, which is closed before it is unmapped.
fn store(path: &Path, byte: u8) {
    let file = OpenOptions::new().read(true).write(true).open(path);
    let file = file.expect("a file");
    let prot = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: a new mapping of a page that the file has, used and taken away here alone.
    unsafe {
        let fd = file.as_raw_fd();
        let page = libc::mmap(std::ptr::null_mut(), 4096, prot, libc::MAP_SHARED, fd, 0);
        assert_ne!(page, libc::MAP_FAILED);
        drop(file);
        page.cast::<u8>().write_volatile(byte);
        libc::munmap(page, 4096);
    }
}

const CHANGES: usize = 18;

/// Makes the change with this number, all of whose files are in `d`, `e` and below.
fn change(both: &mut Both<'_>, number: usize) {
    let host = both.host.to_owned();
    let at = |name: &str| host.join(name);
    let (file, other) = (format!("d/file{}", number % 7), "e/other".to_owned());
    let new = format!("d/new{number}");
    both.cache(&[&file, &other, &new, "d", "e", "d/tree/below/leaf"]);
    let text = format!("{number:<4096}").into_bytes();
    let shows = |name: &str| {
        let (name, text) = (name.to_owned(), text.clone());
        move |root: &Path| fs::read(root.join(&name)).is_ok_and(|it| it == text)
    };
    let what = format!("change {number} ({})", number % CHANGES);
    let opened = |path: PathBuf| OpenOptions::new().write(true).open(path).expect("a file");
    match number % CHANGES {
        0 => {
            fs::write(at(&file), &text).unwrap();
            both.seen(&what, shows(&file));
        }
        1 => {
            // Of the same length and time.
            let mut old = fs::read(at(&file)).unwrap();
            old[1000] = old[1000].wrapping_add(1);
            let time = fs::metadata(at(&file)).unwrap().modified().unwrap();
            let opened = opened(at(&file));
            opened.write_all_at(&old[1000..1001], 1000).unwrap();
            opened
                .set_times(FileTimes::new().set_modified(time))
                .unwrap();
            both.seen(&what, |root| {
                fs::read(root.join(&file)).is_ok_and(|it| it == old)
            });
        }
        2 => {
            let mut options = OpenOptions::new();
            let mut opened = options.append(true).open(at(&other)).unwrap();
            let len = opened.metadata().unwrap().len();
            opened.write_all(b"more").unwrap();
            both.seen(&what, |root| {
                let read = fs::read(root.join("e/other")).unwrap_or_default();
                read.len() as u64 == len + 4 && read.ends_with(b"more")
            });
        }
        3 => {
            let len = (number % 4000) as u64 + 10;
            opened(at(&file)).set_len(len).unwrap();
            both.seen(&what, |root| {
                let len_of = |path: &Path| fs::metadata(path).is_ok_and(|it| it.len() == len);
                len_of(&root.join(&file)) && fs::read(root.join(&file)).unwrap().len() as u64 == len
            });
            fs::write(at(&file), &text).unwrap();
            both.seen(&what, shows(&file));
        }
        4 => {
            let wanted = 0o600 | (number / CHANGES % 0o100) as u32;
            fs::set_permissions(at(&file), Permissions::from_mode(wanted)).unwrap();
            both.seen(&what, |root| mode(&root.join(&file)) == Some(wanted));
        }
        5 => {
            let uid = number as u32;
            chown(at(&file), Some(uid), Some(uid)).unwrap();
            both.seen(&what, |root| {
                fs::metadata(root.join(&file)).is_ok_and(|it| it.uid() == uid && it.gid() == uid)
            });
        }
        6 => {
            let time = SystemTime::UNIX_EPOCH + Duration::new(number as u64, 5000);
            let opened = opened(at(&file));
            opened
                .set_times(FileTimes::new().set_modified(time))
                .unwrap();
            both.seen(&what, |root| {
                let shown = fs::metadata(root.join(&file)).and_then(|it| it.modified());
                shown.is_ok_and(|it| it == time)
            });
        }
        7 => {
            rustix::fs::setxattr(at(&file), "user.test", &text[..9], XattrFlags::empty()).unwrap();
            let changed = |root: &Path| {
                let it = fs::metadata(root.join(&file)).unwrap();
                (it.ctime(), it.ctime_nsec())
            };
            let now = changed(&host);
            both.seen(&what, |root| changed(root) == now);
        }
        8 => {
            fs::write(at(&new), &text).unwrap();
            both.seen(&what, |root| listed(&root.join(&new)));
            both.seen(&what, shows(&new));
            fs::remove_file(at(&new)).unwrap();
            both.seen(&what, |root| {
                !root.join(&new).exists() && !listed(&root.join(&new))
            });
        }
        9 => {
            // What came to be is opened by its name alone.
            fs::write(at(&new), &text).unwrap();
            both.seen(&what, shows(&new));
            both.cache(&[&new]);
            fs::remove_file(at(&new)).unwrap();
            both.seen(&what, |root| File::open(root.join(&new)).is_err());
        }
        10 => {
            let (from, to) = (at(&file), at(&new));
            let ino = fs::metadata(&from).unwrap().ino();
            fs::rename(&from, &to).unwrap();
            both.seen(&what, |root| {
                let found = fs::metadata(root.join(&new)).is_ok_and(|it| it.ino() == ino);
                found && !root.join(&file).exists()
            });
            both.cache(&[&file, &new]);
            fs::rename(&to, &from).unwrap();
            both.seen(&what, |root| {
                let found = fs::metadata(root.join(&file)).is_ok_and(|it| it.ino() == ino);
                found && !root.join(&new).exists() && !listed(&root.join(&new))
            });
        }
        11 => {
            fs::rename(at("d/tree"), at("e/moved")).unwrap();
            fs::write(at("e/moved/below/leaf"), &text).unwrap();
            both.seen(&what, shows("e/moved/below/leaf"));
            both.seen(&what, |root| !root.join("d/tree/below/leaf").exists());
            both.cache(&["e/moved/below/leaf", "d/tree/below"]);
            fs::rename(at("e/moved"), at("d/tree")).unwrap();
            both.seen(&what, shows("d/tree/below/leaf"));
            both.seen(&what, |root| !root.join("e/moved").exists());
        }
        12 => {
            fs::write(at("e/over"), &text).unwrap();
            both.cache(&["e/over", &file]);
            fs::rename(at("e/over"), at(&file)).unwrap();
            both.seen(&what, shows(&file));
        }
        13 => {
            // By a name in another directory, which the mount was never asked for.
            fs::hard_link(at(&file), at("unseen/link")).unwrap();
            let links = |count| {
                let file = file.clone();
                move |root: &Path| {
                    fs::metadata(root.join(&file)).is_ok_and(|it| it.nlink() == count)
                }
            };
            both.seen(&what, links(2));
            both.cache(&[&file]);
            fs::write(at("unseen/link"), &text).unwrap();
            both.seen(&what, shows(&file));
            both.cache(&[&file]);
            fs::remove_file(at("unseen/link")).unwrap();
            both.seen(&what, links(1));
        }
        14 => {
            let byte = number as u8;
            store(&at(&file), byte);
            both.seen(&what, |root| {
                fs::read(root.join(&file)).is_ok_and(|it| it[0] == byte)
            });
        }
        15 => {
            let target = format!("target{number}");
            symlink(&target, at("e/new")).unwrap();
            both.cache(&["e/link", "e/new"]);
            fs::rename(at("e/new"), at("e/link")).unwrap();
            both.seen(&what, |root| {
                fs::read_link(root.join("e/link")).is_ok_and(|it| it == Path::new(&target))
            });
        }
        16 => {
            let links = |root: &Path| fs::metadata(root.join("d")).unwrap().nlink();
            fs::create_dir(at(&new)).unwrap();
            let now = links(&host);
            both.seen(&what, |root| root.join(&new).is_dir() && links(root) == now);
            both.cache(&[&new, &format!("{new}/inside")]);
            fs::write(at(&format!("{new}/inside")), &text).unwrap();
            both.seen(&what, shows(&format!("{new}/inside")));
            fs::remove_dir_all(at(&new)).unwrap();
            both.seen(&what, |root| {
                !root.join(&new).exists() && links(root) == now - 1
            });
        }
        _ => {
            let (a, b) = (at(&file), at(&other));
            let numbers = |root: &Path| {
                [&file, &other].map(|name| fs::metadata(root.join(name)).unwrap().ino())
            };
            let cwd = rustix::fs::CWD;
            renameat_with(cwd, &a, cwd, &b, RenameFlags::EXCHANGE).unwrap();
            let now = numbers(&host);
            both.seen(&what, |root| numbers(root) == now);
            both.seen(&what, |root| {
                fs::read(root.join(&file)).unwrap() == fs::read(&a).unwrap()
            });
            fs::write(&a, &text).unwrap();
            fs::write(&b, &text).unwrap();
            both.seen(&what, shows(&other));
        }
    }
}

/// The tree that [`change`] works on.
fn plant(source: &Path) {
    for dir in ["d", "e", "unseen", "d/tree", "d/tree/below"] {
        fs::create_dir(source.join(dir)).unwrap();
    }
    for file in 0..7 {
        fs::write(source.join(format!("d/file{file}")), vec![b'x'; 4096]).unwrap();
    }
    fs::write(source.join("d/tree/below/leaf"), "x").unwrap();
    fs::write(source.join("e/other"), vec![b'y'; 4096]).unwrap();
    symlink("nowhere", source.join("e/link")).unwrap();
}

/// Makes changes of every kind, as many as a file says, and waits for each to be seen.
pub fn host_changes(mount: &Path, host: &str) -> String {
    let host = Path::new(host);
    let count = fs::read_to_string(host.join("count")).unwrap();
    let (count, took) = (count.parse::<usize>().unwrap(), Vec::new());
    let mut both = Both { host, mount, took };
    for number in 0..count {
        change(&mut both, number);
    }
    both.took.sort();
    let at = |part: usize| both.took[(both.took.len() - 1) * part / 1000];
    let (median, most, last) = (at(500), at(990), at(1000));
    format!(
        "{} looks: half within {median:?}, 99% within {most:?}, all within {last:?}",
        both.took.len()
    )
}

fn changes_are_seen((kind, transport, count): (&str, Transport, usize)) {
    if !needs(kind, transport) {
        return;
    }
    let scratch = Scratch::new();
    let source = source(&scratch, kind);
    plant(&source);
    fs::write(source.join("count"), count.to_string()).unwrap();
    let mount = Mount::new(&Serve::over(transport), &source, &scratch.dir("mount"));
    let report = play("host_changes", &mount, &source, &scratch);
    println!("{kind}: {report}");
    let watch = &stats(&mount)["watch"];
    assert_eq!(watch["on"], true, "{watch}");
    assert!(watch["events"].as_u64() >= Some(count as u64), "{watch}");
    assert_eq!(
        (&watch["lost"], &watch["unwatched"]),
        (&0.into(), &0.into()),
        "{watch}"
    );
}

#[test]
fn changes_are_seen_on_tmpfs() {
    changes_are_seen(KINDS[0]);
}

#[test]
fn changes_are_seen_on_ext4() {
    changes_are_seen(KINDS[1]);
}

#[test]
fn changes_are_seen_on_xfs() {
    changes_are_seen(KINDS[2]);
}

/// All that a program sees of a tree.
fn view(root: &Path) -> BTreeMap<PathBuf, String> {
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
fn agree(host: &Path, mount: &Path, names: &[String], what: &str) -> Duration {
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

/// Numbers that look random.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) as usize % sides
    }
}

fn racing_names() -> Vec<String> {
    let name = |number: usize| format!("{}/name{}", ["d", "e"][number % 2], number / 2);
    (0..12).map(name).collect()
}

/// One change of few names, or of what they lead to. Whether it succeeds doesn't matter.
fn race_host(host: &Path, names: &[String], dice: &mut Dice) {
    let (a, b) = (
        &names[dice.roll(names.len())],
        &names[dice.roll(names.len())],
    );
    let (a, b) = (host.join(a), host.join(b));
    let width = 20 + dice.roll(3);
    let text = format!("{:<width$}", dice.0);
    let _ = match dice.roll(9) {
        0 | 1 => fs::write(&a, text),
        2 => fs::remove_file(&a).or_else(|_| fs::remove_dir(&a)),
        3 => fs::rename(&a, &b),
        4 => fs::hard_link(&a, &b),
        5 => fs::create_dir(&a),
        6 => symlink(&text, &a),
        7 => fs::set_permissions(&a, Permissions::from_mode(0o600 + dice.roll(64) as u32)),
        _ => OpenOptions::new()
            .append(true)
            .open(&a)
            .and_then(|mut file| file.write_all(text.as_bytes())),
    };
}

/// One look at them, or a change that only the owner of a file would make.
fn race_mount(mount: &Path, names: &[String], dice: &mut Dice) {
    let path = mount.join(&names[dice.roll(names.len())]);
    match dice.roll(12) {
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
    let rounds = if full() { 400 } else { 60 };
    let mut took = Vec::new();
    for round in 0..rounds {
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let (names, stop) = (&names, &stop);
            for thread in 0..3 {
                scope.spawn(move || {
                    let mut dice = Dice(round * 10 + thread + 1);
                    while !stop.load(Ordering::Relaxed) {
                        race_mount(mount, names, &mut dice);
                    }
                });
            }
            let mut dice = Dice(round * 10 + 9);
            let began = Instant::now();
            while began.elapsed() < Duration::from_millis(150) {
                race_host(host, names, &mut dice);
                if dice.roll(4) == 0 {
                    std::thread::sleep(Duration::from_micros(dice.roll(300) as u64));
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

fn races_end_well((kind, transport, _): (&str, Transport, usize)) {
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

#[test]
fn races_end_well_on_tmpfs() {
    races_end_well(KINDS[0]);
}

#[test]
fn races_end_well_on_ext4() {
    races_end_well(KINDS[1]);
}

#[test]
fn races_end_well_on_xfs() {
    races_end_well(KINDS[2]);
}

/// The names that are looked at when events were lost.
fn lost_names() -> Vec<String> {
    let name = |number: usize| format!("d/{}{number}", ["file", "missing"][number % 2]);
    (0..200).map(name).collect()
}

/// Fills the kernel's caches, or waits until the mount shows what the host has.
pub fn look(mount: &Path, host: &str) -> String {
    let took = agree(
        Path::new(host),
        mount,
        &lost_names(),
        "after events were lost",
    );
    format!("{took:?}")
}

/// More changes than the kernel keeps events of, while the server can't take them.
#[test]
fn lost_events_are_made_up_for() {
    if !needs("tmpfs", Transport::Uring) {
        return;
    }
    let scratch = Scratch::new();
    let source = scratch.tmpfs("source", "1g");
    plant(&source);
    for name in lost_names().iter().step_by(2) {
        fs::write(source.join(name), "old").unwrap();
    }
    let mount = Mount::new(
        &Serve::over(Transport::Uring),
        &source,
        &scratch.dir("mount"),
    );
    play("host_look", &mount, &source, &scratch);
    mount.server.signal(Signal::STOP);
    // None of these is alike.
    for number in 0..100_000 {
        let path = source.join(format!("unseen/{number}"));
        File::create(&path).unwrap();
    }
    for (number, name) in lost_names().iter().enumerate() {
        let path = source.join(name);
        match number % 4 {
            0 => fs::write(&path, "new").unwrap(),
            2 => fs::remove_file(&path).unwrap(),
            _ => fs::create_dir(&path).unwrap(),
        }
    }
    fs::rename(source.join("d/tree"), source.join("e/tree")).unwrap();
    fs::remove_dir_all(source.join("unseen")).unwrap();
    mount.server.signal(Signal::CONT);
    println!(
        "agreed after {}",
        play("host_look", &mount, &source, &scratch)
    );
    let watch = &stats(&mount)["watch"];
    assert!(watch["lost"].as_u64() >= Some(1), "{watch}");
}

/// Requests that something made the kernel send, by kind.
fn requests(mount: &Mount, run: impl FnOnce()) -> BTreeMap<String, u64> {
    let count = || -> BTreeMap<String, u64> {
        let stats = stats(mount);
        let ops = stats["ops"].as_array().expect("a list").clone();
        let one = |op: serde_json::Value| {
            let name = op["name"].as_str().expect("a name").to_owned();
            (name, op["count"].as_u64().expect("a number"))
        };
        ops.into_iter().map(one).collect()
    };
    let before = count();
    run();
    let mut after = count();
    for (name, count) in before {
        *after.get_mut(&name).expect("it was there") -= count;
    }
    after.retain(|_, count| *count > 0);
    after
}

const PASS: &str = r#"
cd "$1"; find . -printf '%p %s %m %T@ %n %l\n'; ls -R; tar cf - . | md5sum; du -s --apparent-size .
grep -r nothing-has-this . || true; for i in $(seq 50); do test -e missing$i || true; done
stat -c '%n %s' d/*; readlink e/link
"#;

#[test]
fn what_is_unchanged_is_not_asked_for_again() {
    if !has(&[Need::Mount(Transport::Uring), Need::Uvfs]) {
        return;
    }
    let scratch = Scratch::new();
    let source = scratch.tmpfs("source", "300m");
    plant(&source);
    for number in (0..300).step_by(6) {
        let size = number * number;
        fs::write(source.join(format!("d/sized{number}")), vec![b'.'; size]).unwrap();
    }
    let mount = Mount::new(
        &Serve::over(Transport::Uring),
        &source,
        &scratch.dir("mount"),
    );
    let pass = || mount.run(&mut shell(PASS, &[&mount.at])).ok();
    let first = pass();
    let mut left = BTreeMap::new();
    // The second pass asks for times of access that the first one changed. Pages may go at any time, as
    // the machine needs memory for something else.
    for _ in 0..10 {
        std::thread::sleep(Duration::from_millis(1100));
        left = requests(&mount, || assert_eq!(pass(), first));
        left.retain(|name, _| !["OPEN", "RELEASE"].contains(&name.as_str()));
        // Of `stats` itself, which asks where the server's socket is, and of `find` and `du`.
        let few = ["GETXATTR", "STATFS"];
        left.retain(|name, count| *count > 8 || !few.contains(&name.as_str()));
        if left.is_empty() {
            break;
        }
    }
    assert!(left.is_empty(), "{left:?}");
    // Programs that use the mount cause no events that lead anywhere.
    let script = r#"cd "$1"; cp -a d copy; mv copy other; chmod -R a+r other; rm -r other"#;
    mount.run(&mut shell(script, &[&mount.at])).ok();
    let watch = &stats(&mount)["watch"];
    assert_eq!(
        (&watch["events"], &watch["told"]),
        (&0.into(), &0.into()),
        "{watch}"
    );
}

/// A directory that the host has just made can be worked in: being told of its name costs nobody a
/// working directory.
#[test]
fn a_new_name_is_not_dropped() {
    if !needs("tmpfs", Transport::Uring) {
        return;
    }
    let served = Served::new(&Serve::over(Transport::Uring));
    let script = r#"
for i in $(seq 100); do
    [ ! -e "$2/new$i" ]
    mkdir "$1/new$i"
    until cd "$2/new$i" 2>/dev/null; do :; done
    sleep 0.0$((i % 10))
    [ "$(/bin/pwd)" = "$2/new$i" ]
    echo $i >file; cd /
done; cat "$1"/new*/file | sort -n | tail -1"#;
    let mut work = shell(script, &[&served.source, &served.mount.at]);
    assert_eq!(served.mount.run(&mut work).ok(), "100\n");
}

/// A mount or an unmount below the source is seen as well.
pub fn mounts_below(mount: &Path, host: &str) -> String {
    let (host, took) = (Path::new(host), Vec::new());
    let mut both = Both { host, mount, took };
    let tree = host.join("d/tree");
    let there = |root: &Path| root.join("d/tree/inside").exists();
    for _ in 0..5 {
        both.cache(&["d", "d/tree", "d/tree/below", "d/tree/inside"]);
        let mut mounting = command("mount", ["-t", "tmpfs", "below"]);
        run(mounting.arg(&tree)).ok();
        fs::write(tree.join("inside"), "x").unwrap();
        both.seen("a mount", there);
        both.cache(&["d/tree", "d/tree/inside"]);
        fs::remove_file(tree.join("inside")).unwrap();
        both.seen("a change below a mount", |root| !there(root));
        run(command("umount", ["--lazy"]).arg(&tree)).ok();
        both.seen("an unmount", |root| root.join("d/tree/below/leaf").exists());
    }
    "good".into()
}

#[test]
fn mounts_below_the_source_are_seen() {
    if !needs("tmpfs", Transport::Uring) {
        return;
    }
    let served = Served::new(&Serve::over(Transport::Uring));
    plant(&served.source);
    play(
        "host_mounts",
        &served.mount,
        &served.source,
        &served.scratch,
    );
}

#[test]
fn who_does_not_watch_says_why() {
    if !has(&[Need::Mount(Transport::Dev), Need::Uvfs]) {
        return;
    }
    let why = |option: &str, source: Option<&Path>| {
        let scratch = Scratch::new();
        let own = scratch.tmpfs("source", "16m");
        let serve = Serve::over(Transport::Dev).option(option);
        let mount = Mount::new(&serve, source.unwrap_or(&own), &scratch.dir("mount"));
        let text = mount.run(uvfs().arg("stats").arg(&mount.at)).ok();
        let line = text.lines().find(|line| line.starts_with("watching"));
        line.expect("a line").to_owned()
    };
    assert!(why("", None).contains(" on: "));
    for option in [
        "cache=always",
        "cache=never",
        "attr_timeout=1",
        "negative_timeout=0",
    ] {
        assert!(
            why(option, None).contains("off: the mount's options"),
            "{option}"
        );
    }
    assert!(why("cache=always,cache=auto", None).contains(" on: "));
    assert!(why("writeback", None).contains("off: the kernel caches writes"));
    // A file system that others may change elsewhere.
    let scratch = Scratch::new();
    let dirs = scratch.tmpfs("dirs", "16m");
    for dir in ["lower", "upper", "work", "over"] {
        fs::create_dir(dirs.join(dir)).unwrap();
    }
    let over = scratch.dir("over");
    let options = "lowerdir=lower,upperdir=upper,workdir=work,nfs_export=off";
    let mut overlay = Command::new("mount");
    overlay
        .current_dir(&dirs)
        .args(["-t", "overlay", "-o", options, "overlay"]);
    if run(overlay.arg(&over)).status.success() {
        let line = why("", Some(&over));
        assert!(line.contains("off: "), "{line}");
    }
}
