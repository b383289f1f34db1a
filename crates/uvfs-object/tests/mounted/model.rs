//! Random calls on a mount, while objects change behind it, against a map in memory.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io::{self, ErrorKind, Read};
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use fastrand::Rng;
use uvfs_testing::{Need, has};

use crate::fake::Fake;
use crate::stores::At;
use crate::{MIB, Served, serve};

const LONG: Duration = Duration::from_secs(5);
/// The kernel keeps attributes for a second; and a busy machine is slow to compare them.
const KEPT: Duration = Duration::from_secs(3);
const DIRECTORIES: [&str; 3] = ["", "one/", "one/two/"];
const NAMES: u32 = 5;

/// The objects of one key, the last of them now.
#[derive(Default)]
struct Past(Vec<(Instant, Option<Vec<u8>>)>);

impl Past {
    fn now(&self) -> Option<&Vec<u8>> {
        self.0.last()?.1.as_ref()
    }

    /// The sizes that a program may be told: `None` where there was no object.
    fn sizes(&self) -> Vec<Option<u64>> {
        let ended = self.0.iter().skip(1).map(|(since, _)| *since);
        let ended = ended.chain([Instant::now()]);
        let all = self.0.iter().zip(ended);
        let recent = all.filter(|(_, ended)| ended.elapsed() < KEPT);
        let size = |object: &Option<Vec<u8>>| Some(object.as_ref()?.len() as u64);
        let mut sizes: Vec<_> = recent.map(|((_, object), _)| size(object)).collect();
        if self
            .0
            .first()
            .is_none_or(|(since, _)| since.elapsed() < KEPT)
        {
            sizes.push(None);
        }
        sizes
    }
}

struct Model<'a, S> {
    store: &'a S,
    served: Served,
    random: Rng,
    objects: BTreeMap<String, Past>,
    /// Open files, and what each was opened as.
    open: Vec<(String, File, Vec<u8>)>,
    puts: usize,
}

fn errno(error: &io::Error) -> Option<i32> {
    error.raw_os_error()
}

impl<S: At> Model<'_, S> {
    fn key(&mut self) -> String {
        let directory = DIRECTORIES[self.random.usize(..DIRECTORIES.len())];
        format!("model/{directory}f{}", self.random.u32(..NAMES))
    }

    fn step(&mut self) {
        let key = self.key();
        let path = self.served.at(&key);
        let object = self.objects.entry(key.clone()).or_default();
        match self.random.u32(..10) {
            0 | 1 => {
                // No two of one size: a directory's files have no ETag, and their times are coarse.
                self.puts += 1;
                let most = [100, 70_000, 2 * MIB][self.random.usize(..3)];
                let mut new = vec![0; self.random.usize(..most) / 4096 * 4096 + self.puts % 4096];
                self.random.fill(&mut new);
                self.store.put(&key, &new);
                object.0.push((Instant::now(), Some(new)));
            }
            2 if object.now().is_some() => {
                self.store.remove(&key);
                object.0.push((Instant::now(), None));
            }
            3 | 4 => match (fs::read(&path), object.now()) {
                (Ok(found), Some(now)) => assert!(found == *now, "{key}: other contents"),
                (Err(error), None) => assert_eq!(error.kind(), ErrorKind::NotFound, "{key}"),
                (found, now) => panic!(
                    "{key}: {:?}, not {:?}",
                    found.map(|all| all.len()),
                    now.map(Vec::len)
                ),
            },
            5 => {
                let found = match fs::metadata(&path) {
                    Ok(found) => Some(found.len()),
                    Err(error) if error.kind() == ErrorKind::NotFound => None,
                    Err(error) => panic!("{key}: {error}"),
                };
                assert!(
                    object.sizes().contains(&found),
                    "{key}: {found:?} of {:?}",
                    object.sizes()
                );
            }
            6 => match (File::open(&path), object.now()) {
                (Ok(file), Some(now)) => {
                    let now = now.clone();
                    self.open.truncate(5);
                    self.open.insert(0, (key, file, now));
                }
                (Err(error), None) => assert_eq!(error.kind(), ErrorKind::NotFound, "{key}"),
                (found, now) => panic!("{key}: {found:?}, not {:?}", now.map(Vec::len)),
            },
            7 | 8 => self.read_an_open_file(),
            _ => self.list(),
        }
    }

    /// The contents are those of the open; they can be gone, but not become others.
    fn read_an_open_file(&mut self) {
        if self.open.is_empty() {
            return;
        }
        let (key, file, content) = &self.open[self.random.usize(..self.open.len())];
        let at = self.random.usize(..content.len() + 2);
        let mut data = vec![0; self.random.usize(1..200_000)];
        let is_now = self.objects[key].now() == Some(content);
        match file.read_at(&mut data, at as u64) {
            Ok(len) => {
                let rest = content.get(at..).unwrap_or_default();
                assert!(len > 0 || rest.is_empty(), "{key}: an early end at {at}");
                assert!(
                    rest.starts_with(&data[..len]),
                    "{key}: other contents at {at}"
                );
            }
            Err(error) => {
                assert!(
                    errno(&error) == Some(libc::ESTALE) && !is_now,
                    "{key}: {error}"
                );
            }
        }
    }

    fn list(&mut self) {
        let directory = DIRECTORIES[self.random.usize(..DIRECTORIES.len())];
        let prefix = format!("model/{directory}");
        let mut found = BTreeSet::new();
        match fs::read_dir(self.served.at(&prefix)) {
            Ok(list) => {
                for entry in list {
                    let entry = entry.unwrap();
                    if entry.file_type().unwrap().is_file() {
                        found.insert(format!("{prefix}{}", entry.file_name().to_str().unwrap()));
                    }
                }
            }
            Err(error) => assert_eq!(error.kind(), ErrorKind::NotFound, "{prefix}"),
        }
        let there = self.objects.iter().filter(|(_, past)| past.now().is_some());
        let there = there.map(|(key, _)| key.clone());
        let there = there.filter(|key| {
            key.strip_prefix(&prefix)
                .is_some_and(|name| !name.contains('/'))
        });
        assert_eq!(found, there.collect(), "{prefix}");
    }
}

/// Calls and changes, one after another.
pub fn random_calls(store: &impl At) {
    let seed = std::env::var("UVFS_TEST_SEED")
        .ok()
        .and_then(|seed| seed.parse().ok());
    let seed = seed.unwrap_or_else(|| fastrand::u64(..));
    eprintln!("UVFS_TEST_SEED={seed} repeats this");
    let served = serve(&store.uri(), |_| {});
    let random = Rng::with_seed(seed);
    let mut model = Model {
        store,
        served,
        random,
        objects: BTreeMap::new(),
        open: Vec::new(),
        puts: 0,
    };
    let begun = Instant::now();
    let mut steps = 0;
    while begun.elapsed() < LONG {
        model.step();
        steps += 1;
    }
    assert!(steps > 100, "{steps} steps");
}

/// Readers of an object that is put again and again get one version, or ESTALE.
pub fn versions_under_readers(store: &(impl At + Sync)) {
    const SIZE: usize = 3 * MIB;
    store.put("model/again", &vec![0; SIZE]);
    let served = serve(&store.uri(), |_| {});
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let readers: Vec<_> = (0..3)
            .map(|_| {
                scope.spawn(|| {
                    let mut seen = BTreeSet::new();
                    while !over.load(Ordering::Relaxed) {
                        let mut data = Vec::new();
                        let whole = File::open(served.at("model/again"));
                        match whole.and_then(|mut file| file.read_to_end(&mut data)) {
                            Ok(len) => assert_eq!(len, SIZE),
                            Err(error) => assert_eq!(errno(&error), Some(libc::ESTALE), "{error}"),
                        }
                        let first = data.first().copied().unwrap_or_default();
                        assert!(data.iter().all(|byte| *byte == first), "a mix");
                        seen.insert(first);
                    }
                    seen.len()
                })
            })
            .collect();
        let begun = Instant::now();
        for version in (1..=255_u8).cycle() {
            if begun.elapsed() > LONG {
                break;
            }
            store.put("model/again", &vec![version; SIZE]);
            // A directory's versions of one size are told apart by their times, which have a tick of up to 10 ms.
            std::thread::sleep(Duration::from_millis(20 + u64::from(version % 7) * 20));
        }
        over.store(true, Ordering::Relaxed);
        for reader in readers {
            assert!(reader.join().unwrap() > 3, "it saw changes");
        }
    });
}

#[test]
fn of_a_store_in_memory() {
    if has(&[Need::Fuse]) {
        let fake = Fake::start();
        random_calls(&fake);
        versions_under_readers(&fake);
    }
}
