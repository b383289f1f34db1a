//! Stores that programs write to by `-o write=close`.

use std::collections::BTreeMap;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use super::*;

/// What a name may have: `None` where there is no file.
type May = Vec<Option<Vec<u8>>>;

/// A program that writes and renames files until a call fails. What it was told, and what it was not told at last.
struct Writer {
    random: Random,
    files: BTreeMap<String, May>,
}

impl Writer {
    fn below(&mut self, limit: u64) -> u64 {
        self.random.next() % limit
    }

    fn name(&mut self) -> String {
        format!("{}", self.below(12))
    }

    /// One call after another. Their results are noted when they return.
    fn run(&mut self, dir: &Path, end: &AtomicBool) {
        while !end.load(Ordering::Relaxed) {
            if self.step(dir).is_err() {
                return;
            }
        }
    }

    fn step(&mut self, dir: &Path) -> io::Result<()> {
        let (one, two) = (self.name(), self.name());
        let had = |files: &BTreeMap<String, May>, name: &str| match files.get(name) {
            Some(may) => may[0].clone(),
            None => None,
        };
        match self.below(8) {
            0 => {
                let before = had(&self.files, &one);
                self.files.insert(one.clone(), vec![before.clone(), None]);
                match fs::remove_file(dir.join(&one)) {
                    Err(error) if error.kind() == io::ErrorKind::NotFound => {
                        assert_eq!(before, None, "{one}");
                    }
                    done => done?,
                }
                self.files.insert(one, vec![None]);
            }
            1 if one != two => {
                let (from, to) = (had(&self.files, &one), had(&self.files, &two));
                if let Some(content) = from {
                    let content = Some(content);
                    // A copy and a removal, in this order.
                    self.files.insert(one.clone(), vec![content.clone(), None]);
                    self.files.insert(two.clone(), vec![to, content.clone()]);
                    fs::rename(dir.join(&one), dir.join(&two))?;
                    self.files.insert(one, vec![None]);
                    self.files.insert(two, vec![content]);
                }
            }
            _ => {
                let len = self.below(200_000) as usize;
                let byte = self.below(256) as u8;
                let content = Some([&[byte; 1][..], &vec![byte; len]].concat());
                let before = had(&self.files, &one);
                self.files
                    .insert(one.clone(), vec![before, content.clone()]);
                write(&dir.join(&one), content.as_ref().unwrap())?;
                self.files.insert(one, vec![content]);
            }
        }
        Ok(())
    }
}

/// Writes a file anew, with the error of close(2).
fn write(path: &Path, content: &[u8]) -> io::Result<()> {
    use io::Write;
    let mut file = File::create(path)?;
    for part in content.chunks(50_000) {
        file.write_all(part)?;
    }
    rustix::io::dup(&file).map(|other| {
        // Its close(2) is the first, and its result is that of FLUSH.
        drop(other);
    })?;
    file.sync_all()
}

#[test]
fn nothing_acknowledged_is_lost_when_the_server_is_killed() {
    killed_again_and_again(&["write=close", "timeout=10"]);
}

#[test]
fn nothing_acknowledged_is_lost_that_waits_for_the_store() {
    killed_again_and_again(&["write=back,nofsync", "timeout=10"]);
}

/// A name that a program removed stays away if the server is killed while another program makes it anew, and contents that
/// were closed stay if it is killed while they are replaced.
#[test]
fn what_is_written_anew_when_the_server_is_killed() {
    if !has(&[Need::Mount(Transport::Dev), Need::Uvfs]) {
        return;
    }
    let store = InMemory::new(&["write=back", "timeout=10"], |fake| {
        fake.put("removed", b"at first");
    });
    let InMemory {
        mut mount,
        proxy,
        fake,
        scratch: _scratch,
        serve,
    } = store;
    let at = mount.at.clone();
    fs::write(at.join("closed"), b"closed").unwrap();
    fs::remove_file(at.join("removed")).unwrap();
    let files = ["removed", "closed"].map(|name| {
        use io::Write;
        let mut file = File::create(at.join(name)).unwrap();
        file.write_all(b"half").unwrap();
        file
    });
    mount.expect_gone();
    mount.server.signal(Signal::KILL);
    mount.server.wait(SOON).expect("it is killed");
    unmount_by_force(&at);
    drop((files, mount));
    let next = Mount::new(&serve, Path::new(&InMemory::uri(&fake, &proxy)), &at);
    assert!(!at.join("removed").exists());
    assert_eq!(fs::read(at.join("closed")).unwrap(), b"closed");
    next.unmount().ok();
    let bucket = fake.bucket();
    assert!(!bucket.objects.contains_key("p/removed"));
    assert_eq!(bucket.objects["p/closed"].contents, b"closed");
    let beside = |key: &&String| key.starts_with("p/removed.interrupted-");
    assert_eq!(bucket.objects.keys().filter(beside).count(), 1);
}

/// Held while a test's writer runs. A process that another test of this process starts inherits the writer's file for a moment,
/// and closes it: a close(2) like any other, by which a half-written file is stored.
static NO_FORKS: Mutex<()> = Mutex::new(());

/// A server that is killed at any moment loses nothing that a program was told is done, and leaves nothing half: the next
/// mount puts what is left.
fn killed_again_and_again(options: &[&str]) {
    if !has(&[Need::Mount(Transport::Dev), Need::Uvfs]) {
        return;
    }
    let _alone = NO_FORKS.lock().unwrap_or_else(PoisonError::into_inner);
    let kills = std::env::var("UVFS_KILLS").map_or(15, |kills| kills.parse().unwrap());
    let store = InMemory::new(options, |_| {});
    let InMemory {
        mount,
        proxy,
        fake,
        scratch: _scratch,
        serve,
    } = store;
    let uri = InMemory::uri(&fake, &proxy);
    let mut mount = Some(mount);
    let mut writer = Writer {
        random: Random(1),
        files: BTreeMap::new(),
    };
    let mut left = 0;
    for kill in 0..kills {
        let mut now = mount.take().expect("it is mounted");
        let at = now.at.clone();
        let end = AtomicBool::new(false);
        // With write=back the store gets nothing within the first second.
        let pause = 5 + writer.below(150) + if kill % 8 == 7 { 1200 } else { 0 };
        let pause = Duration::from_millis(pause);
        std::thread::scope(|scope| {
            scope.spawn(|| writer.run(&at, &end));
            std::thread::sleep(pause);
            now.expect_gone();
            now.server.signal(Signal::KILL);
            now.server.wait(SOON).expect("it is killed");
            end.store(true, Ordering::Relaxed);
            unmount_by_force(&at);
        });
        drop(now);
        // The next mount ends when the store has all.
        let next = Mount::new(&serve, Path::new(&uri), &at);
        for (name, may) in &writer.files {
            let has = fs::read(at.join(name)).ok();
            let told = told(&has, may);
            assert!(may.contains(&has), "{kill}: {name} on the mount: {told}");
        }
        next.unmount().ok();
        let bucket = fake.bucket();
        for (key, object) in &bucket.objects {
            let name = key.strip_prefix("p/").unwrap();
            assert!(!name.contains(".conflict-"), "{kill}: {name}");
            left += usize::from(name.contains(".interrupted-"));
            let is_whole = object.contents.windows(2).all(|two| two[0] == two[1]);
            assert!(is_whole, "{kill}: {name}");
        }
        for (name, may) in &mut writer.files {
            let object = bucket.objects.get(&format!("p/{name}"));
            let has = object.map(|object| object.contents.clone());
            let told = told(&has, may);
            assert!(may.contains(&has), "{kill}: {name} in the store: {told}");
            // What it is from now on.
            *may = vec![has];
        }
        drop(bucket);
        fake.bucket()
            .objects
            .retain(|key, _| !key.contains(".interrupted-"));
        mount = Some(Mount::new(&serve, Path::new(&uri), &at));
    }
    println!(
        "{kills} kills, {left} files interrupted, {} puts",
        fake.bucket().asked.len()
    );
    mount.unwrap().unmount().ok();
}

/// Contents by their bytes and lengths.
fn told(has: &Option<Vec<u8>>, may: &May) -> String {
    let short = |one: &Option<Vec<u8>>| one.as_ref().map(|all| (all.first().copied(), all.len()));
    let may: Vec<_> = may.iter().map(short).collect();
    format!("{:?} instead of {may:?}", short(has))
}

/// A mount is writable by its option alone, and not by fstab's `rw`.
#[test]
fn a_store_is_written_by_the_option() {
    let Some(store) = Stored::new() else {
        return;
    };
    for (options, writes) in [
        ("rw", false),
        ("write=close", true),
        ("write=close,ro", false),
    ] {
        run(store.mount().args(["-o", options])).ok();
        let written = fs::write(store.at.join("new"), options);
        assert_eq!(written.is_ok(), writes, "{options}");
        store.unmount();
    }
    assert_eq!(
        fs::read(store.scratch.path("store/new")).unwrap(),
        b"write=close"
    );
    let outcome = run(uvfs()
        .args(["mount", "-o", "write=close"])
        .arg(store.scratch.path("store"))
        .arg(&store.at));
    assert_eq!(outcome.status.code(), Some(2), "{outcome}");
    assert!(
        outcome.stderr.contains("-o write: only for object stores"),
        "{outcome}"
    );
}
