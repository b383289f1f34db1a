//! The kernel and clients agree on names.

use super::*;

/// A client, and the mount on which the kernel has to see what it does.
struct Both<'a> {
    dir: &'a Path,
    client: Client,
}

impl Both<'_> {
    fn at(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    fn stat(&self, name: &str) -> fs::Metadata {
        fs::symlink_metadata(self.at(name)).unwrap()
    }

    fn missing(&self, name: &str) {
        let gone = fs::symlink_metadata(self.at(name))
            .map(drop)
            .map_err(|e| e.kind());
        assert_eq!(gone, Err(ErrorKind::NotFound), "{name}");
    }
}

/// The kernel sees at once each change of names by a client, whatever it had cached.
pub fn names(dir: &Path, _: &str) -> String {
    let client = client_of(dir);
    let both = Both { dir, client };
    for _ in 0..30 {
        created_and_removed(&both);
        renamed(&both);
        of_the_kernel(&both);
        linked(&both);
        forgotten(&both);
        directories(&both);
    }
    "ok".into()
}

/// A missing name is asked for twice: the second time it is cached.
fn created_and_removed(both: &Both<'_>) {
    both.missing("new");
    both.missing("new");
    drop(both.client.create("new").unwrap());
    assert!(both.stat("new").is_file());
    assert!(names_in(both.dir).contains("new"));
    both.client.unlink("new").unwrap();
    both.missing("new");
    assert!(!names_in(both.dir).contains("new"));
    both.client.symlink("target", "new").unwrap();
    assert_eq!(fs::read_link(both.at("new")).unwrap(), Path::new("target"));
    both.client.unlink("new").unwrap();
    both.missing("new");
}

/// One file's name goes to another.
fn renamed(both: &Both<'_>) {
    fs::write(both.at("one"), "1").unwrap();
    fs::write(both.at("two"), "22").unwrap();
    let open = File::open(both.at("two")).unwrap();
    let (one, two) = (both.stat("one").ino(), both.stat("two").ino());
    assert_eq!(open.metadata().unwrap().nlink(), 1);
    both.client
        .rename("one", "two", RenameFlags::empty())
        .unwrap();
    both.missing("one");
    assert_eq!(both.stat("two").ino(), one);
    assert_eq!(fs::read_to_string(both.at("two")).unwrap(), "1");
    let old = open.metadata().unwrap();
    assert_eq!((old.ino(), old.nlink()), (two, 0));
    fs::write(both.at("one"), "333").unwrap();
    let new = both.stat("one").ino();
    both.client
        .rename("one", "two", RenameFlags::EXCHANGE)
        .unwrap();
    assert_eq!((both.stat("one").ino(), both.stat("two").ino()), (one, new));
    both.client.unlink("one").unwrap();
    both.client.unlink("two").unwrap();
    both.missing("one");
    both.missing("two");
}

/// A name that the kernel moved, and one that it made and removed.
fn of_the_kernel(both: &Both<'_>) {
    fs::write(both.at("from"), "").unwrap();
    both.stat("from");
    fs::rename(both.at("from"), both.at("to")).unwrap();
    both.client.unlink("to").unwrap();
    both.missing("to");
    both.missing("from");
    drop(both.client.create("to").unwrap());
    fs::remove_file(both.at("to")).unwrap();
    both.missing("to");
    drop(both.client.create("to").unwrap());
    assert!(both.stat("to").is_file());
    both.client.unlink("to").unwrap();
}

/// Links are counted.
fn linked(both: &Both<'_>) {
    fs::write(both.at("file"), "").unwrap();
    let open = File::open(both.at("file")).unwrap();
    assert_eq!(both.stat("file").nlink(), 1);
    both.client.link("file", "other").unwrap();
    assert_eq!(both.stat("file").nlink(), 2);
    assert_eq!(open.metadata().unwrap().nlink(), 2);
    assert_eq!(both.stat("other").nlink(), 2);
    both.client.unlink("file").unwrap();
    assert_eq!(both.stat("other").nlink(), 1);
    assert_eq!(open.metadata().unwrap().nlink(), 1);
    both.client.unlink("other").unwrap();
    assert_eq!(open.metadata().unwrap().nlink(), 0);
}

/// Of two names a client looked at one, and forgets the file with it.
fn forgotten(both: &Both<'_>) {
    fs::write(both.at("file"), "data").unwrap();
    fs::hard_link(both.at("file"), both.at("other")).unwrap();
    let open = File::open(both.at("other")).unwrap();
    assert_eq!(both.client.lstat("file").unwrap().nlink, 2);
    assert_eq!(both.stat("other").nlink(), 2);
    both.client.unlink("file").unwrap();
    both.missing("file");
    assert_eq!(open.metadata().unwrap().nlink(), 1);
    assert_eq!(both.stat("other").nlink(), 1);
    assert_eq!(both.client.lstat("other").unwrap().nlink, 1);
    both.client.unlink("other").unwrap();
    both.missing("other");
    assert_eq!(open.metadata().unwrap().nlink(), 0);
    let mut data = [0; 5];
    assert_eq!(open.read_at(&mut data, 0).unwrap(), 4);
    assert_eq!(&data[..4], b"data");
}

/// Directories: their own attributes, and what is below one that moves.
fn directories(both: &Both<'_>) {
    let (links, time) = (both.stat(".").nlink(), both.stat(".").modified().unwrap());
    both.client.mkdir("dir", 0o700).unwrap();
    assert_eq!(both.stat(".").nlink(), links + 1);
    assert!(both.stat(".").modified().unwrap() >= time);
    fs::create_dir(both.at("dir/sub")).unwrap();
    fs::write(both.at("dir/sub/child"), "child").unwrap();
    assert_eq!(both.stat("dir").nlink(), 3);
    std::env::set_current_dir(both.at("dir/sub")).unwrap();
    assert!(Path::new("child").exists());
    both.client
        .rename("dir", "moved", RenameFlags::empty())
        .unwrap();
    both.missing("dir");
    both.missing("dir/sub/child");
    assert_eq!(
        fs::read_to_string(both.at("moved/sub/child")).unwrap(),
        "child"
    );
    assert_eq!(fs::read_to_string("child").unwrap(), "child");
    assert_eq!(std::env::current_dir().unwrap(), both.at("moved/sub"));
    both.client
        .rename("moved/sub/child", "moved/child", RenameFlags::empty())
        .unwrap();
    assert!(!Path::new("child").exists());
    assert!(Path::new("../child").exists());
    assert!(names_in(Path::new(".")).is_empty());
    both.client.unlink("moved/child").unwrap();
    assert!(!Path::new("../child").exists());
    both.client.rmdir("moved/sub").unwrap();
    assert_eq!(fs::metadata(".").unwrap().nlink(), 0);
    both.missing("moved/sub");
    assert_eq!(both.stat("moved").nlink(), 2);
    std::env::set_current_dir(both.dir).unwrap();
    both.client.rmdir("moved").unwrap();
    both.missing("moved");
    assert_eq!(both.stat(".").nlink(), links);
}

/// The number of directories in which [`random_names`] changes names.
const DIRS: usize = 3;
/// The number of names that each of them may have.
const NAMES: usize = 5;

/// The numbers of a directory and of a name in it.
type Place = (usize, usize);

/// The names that some directories should have, with each file's number and kind.
type Names = BTreeMap<Place, (u64, bool)>;

fn dir_name(d: usize) -> String {
    format!("d{d}")
}

fn path((d, n): Place) -> String {
    format!("d{d}/n{n}")
}

fn below(random: &mut Random, n: usize) -> usize {
    (random.next() >> 20) as usize % n
}

fn place(random: &mut Random) -> Place {
    (below(random, DIRS), below(random, NAMES))
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Change {
    Create,
    Mkdir,
    Unlink,
    Rmdir,
    Rename,
    Link,
    Exchange,
    ExchangeDirs,
}

/// One change of names, by the kernel or by the client.
struct Step {
    change: Change,
    one: Place,
    /// The second name of a change that has two.
    two: Place,
    by_kernel: bool,
}

impl Step {
    /// Draws a change. Returns `None` if it would fail with the names that there are.
    fn draw(random: &mut Random, names: &Names) -> Option<Self> {
        let (one, two) = (place(random), place(random));
        let by_kernel = below(random, 2) == 0;
        let what = below(random, 8);
        let change = match (what, names.get(&one), names.get(&two)) {
            (0 | 1, None, _) => Change::Create,
            (2, None, _) => Change::Mkdir,
            (0..=2, Some((_, false)), _) => Change::Unlink,
            (0..=2, Some((_, true)), _) => Change::Rmdir,
            (3 | 4, Some((old, is_dir)), target)
                if target.is_none_or(|(ino, dir)| dir == is_dir && ino != old) =>
            {
                Change::Rename
            }
            (5, Some((_, false)), None) => Change::Link,
            (6, Some(_), Some(_)) => Change::Exchange,
            (7, ..) if one.0 != two.0 && below(random, 4) == 0 => Change::ExchangeDirs,
            _ => return None,
        };
        Some(Self {
            change,
            one,
            two,
            by_kernel,
        })
    }

    /// The paths of the names or directories that the step changes.
    fn paths(&self) -> (String, String) {
        match self.change {
            Change::ExchangeDirs => (dir_name(self.one.0), dir_name(self.two.0)),
            _ => (path(self.one), path(self.two)),
        }
    }

    fn perform(&self, both: &Both<'_>) {
        let (from, to) = self.paths();
        let (at, new) = (both.at(&from), both.at(&to));
        let client = &both.client;
        match (self.change, self.by_kernel) {
            (Change::Create, true) => drop(File::create_new(at).unwrap()),
            (Change::Create, false) => drop(client.create(from).unwrap()),
            (Change::Mkdir, true) => fs::create_dir(at).unwrap(),
            (Change::Mkdir, false) => client.mkdir(from, 0o755).unwrap(),
            (Change::Unlink, true) => fs::remove_file(at).unwrap(),
            (Change::Unlink, false) => client.unlink(from).unwrap(),
            (Change::Rmdir, true) => fs::remove_dir(at).unwrap(),
            (Change::Rmdir, false) => client.rmdir(from).unwrap(),
            (Change::Rename, true) => fs::rename(at, new).unwrap(),
            (Change::Rename, false) => client.rename(from, to, RenameFlags::empty()).unwrap(),
            (Change::Link, true) => fs::hard_link(at, new).unwrap(),
            (Change::Link, false) => client.link(from, to).unwrap(),
            (Change::Exchange | Change::ExchangeDirs, true) => {
                renameat_with(CWD, at, CWD, new, RenameFlags::EXCHANGE).unwrap();
            }
            (Change::Exchange | Change::ExchangeDirs, false) => {
                client.rename(from, to, RenameFlags::EXCHANGE).unwrap();
            }
        }
    }

    /// Makes the change in the names that there should be. The step was performed before.
    fn apply(&self, names: &mut Names, both: &Both<'_>) {
        let (one, two) = (self.one, self.two);
        match self.change {
            Change::Create | Change::Mkdir => {
                let name = path(one);
                let ino = match self.by_kernel {
                    true => both.stat(&name).ino(),
                    false => both.client.lookup(&name).unwrap().1.ino,
                };
                names.insert(one, (ino, self.change == Change::Mkdir));
            }
            Change::Unlink | Change::Rmdir => {
                names.remove(&one);
            }
            Change::Rename => {
                let moved = names.remove(&one).unwrap();
                names.insert(two, moved);
            }
            Change::Link => {
                names.insert(two, names[&one]);
            }
            Change::Exchange => {
                let (a, b) = (names[&one], names[&two]);
                names.extend([(one, b), (two, a)]);
            }
            Change::ExchangeDirs => {
                let swap = |d| match d {
                    d if d == one.0 => two.0,
                    d if d == two.0 => one.0,
                    d => d,
                };
                let all = std::mem::take(names).into_iter();
                *names = all.map(|((d, n), what)| ((swap(d), n), what)).collect();
            }
        }
    }
}

/// Asserts that the kernel sees in directory `d` the names that there should be, and that the
/// client sees the same for the names of the last step.
fn compare(both: &Both<'_>, names: &Names, d: usize, step: &Step, tail: &str) {
    let links = |ino| names.values().filter(|what| what.0 == ino).count() as u64;
    let mut listed = BTreeSet::new();
    for n in 0..NAMES {
        let name = path((d, n));
        let expected = names.get(&(d, n)).map(|&(ino, is_dir)| {
            listed.insert(format!("n{n}"));
            (ino, if is_dir { 2 } else { links(ino) })
        });
        let seen = fs::symlink_metadata(both.at(&name)).ok();
        let seen = seen.map(|meta| (meta.ino(), meta.nlink()));
        assert_eq!(seen, expected, "the kernel, {name} after\n{tail}");
        if (d, n) == step.one || (d, n) == step.two {
            let seen = both.client.lookup(&name).ok();
            let seen = seen.map(|(_, attr)| (attr.ino, u64::from(attr.nlink)));
            assert_eq!(seen, expected, "the client, {name} after\n{tail}");
        }
    }
    let at = both.at(&dir_name(d));
    assert_eq!(names_in(&at), listed, "d{d} after\n{tail}");
    let below = names.iter().filter(|(at, what)| at.0 == d && what.1);
    let links = 2 + below.count() as u64;
    let seen = fs::metadata(&at).unwrap().nlink();
    assert_eq!(seen, links, "d{d} after\n{tail}");
}

/// Changes names at random, and compares the directories of each change after it.
fn change_and_compare(both: &Both<'_>, random: &mut Random) {
    let mut names = Names::new();
    let mut last = Vec::new();
    for number in 0..400 {
        let Some(step) = Step::draw(random, &names) else {
            continue;
        };
        let (from, to) = step.paths();
        let (change, by_kernel) = (step.change, step.by_kernel);
        last.push(format!(
            "{number}: {change:?} {from} {to} kernel {by_kernel}"
        ));
        step.perform(both);
        step.apply(&mut names, both);
        let tail = last[last.len().saturating_sub(12)..].join("\n");
        let mut dirs = BTreeSet::from([step.one.0, step.two.0]);
        if number % 20 == 0 {
            dirs.extend(0..DIRS);
        }
        for d in dirs {
            compare(both, &names, d, &step, &tail);
        }
    }
}

/// Looks once at every name that may be there, and lists every directory.
fn look_at_all(dir: &Path) {
    for d in 0..DIRS {
        let at = dir.join(dir_name(d));
        for n in 0..NAMES {
            let _ = fs::symlink_metadata(at.join(format!("n{n}")));
        }
        let entries = fs::read_dir(&at).into_iter().flatten();
        entries.for_each(|entry| drop(entry.and_then(|entry| entry.metadata())));
    }
}

/// Clients and the kernel change names in the same directories, one after the other and at random,
/// while others look at them all the time.
pub fn random_names(dir: &Path, seed: &str) -> String {
    let client = client_of(dir);
    let both = Both { dir, client };
    let mut random = Random(seed.parse::<u64>().unwrap() * 2 + 1);
    for d in 0..DIRS {
        fs::create_dir(both.at(&dir_name(d))).unwrap();
    }
    let over = AtomicBool::new(false);
    let look = || {
        while !over.load(Ordering::Relaxed) {
            look_at_all(dir);
        }
    };
    let run = || change_and_compare(&both, &mut random);
    std::thread::scope(|scope| {
        scope.spawn(look);
        scope.spawn(look);
        let done = std::panic::catch_unwind(std::panic::AssertUnwindSafe(run));
        over.store(true, Ordering::Relaxed);
        if let Err(panic) = done {
            std::panic::resume_unwind(panic);
        }
    });
    "ok".into()
}

/// The kernel no longer shows names that a client removed.
#[test]
fn the_kernel_sees_what_a_client_does_to_names() {
    for transport in [Transport::Dev, Transport::Uring] {
        if has(&[Need::Mount(transport), Need::Uvfs]) {
            in_child(
                &Served::new(&Serve::for_clients(transport)),
                "names",
                "",
                None,
            );
            in_child(&Served::new(&long_lived(transport)), "names", "", None);
        }
    }
}

/// After changes by both, clients and the kernel have the same names.
#[test]
fn clients_and_the_kernel_agree_on_names() {
    for transport in [Transport::Dev, Transport::Uring] {
        if has(&[Need::Mount(transport), Need::Uvfs]) {
            let served = Served::new(&long_lived(transport));
            in_child(&served, "random_names", "1", None);
            let served = Served::new(&Serve::for_clients(transport));
            in_child(&served, "random_names", "2", None);
        }
    }
}
