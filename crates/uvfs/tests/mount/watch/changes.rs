//! Each kind of change on the host is seen on the mount.

use super::*;

/// Of the files that changes work on, the one that is neither `file` nor `new`.
const OTHER: &str = "e/other";

/// A change that the host makes, and what it is made with.
struct Change<'a, 'b> {
    both: &'a mut Both<'b>,
    number: usize,
    /// For messages.
    what: &'a str,
    /// A file that is there.
    file: &'a str,
    /// A name that is not.
    new: &'a str,
    /// Bytes that no file has yet.
    text: &'a [u8],
}

/// Makes a change on the host, and waits until the mount shows it.
type Make = fn(&mut Change<'_, '_>);

/// Every kind of change. Each works on the tree of [`plant`], and leaves it with the same names.
const CHANGES: [(&str, Make); 18] = [
    ("rewritten", rewritten),
    ("same length and time", same_length_and_time),
    ("appended", appended),
    ("cut", cut),
    ("mode", mode_set),
    ("owner", owner_set),
    ("time", time_set),
    ("extended attribute", attribute_set),
    ("made and removed", made_and_removed),
    ("opened by name", opened_by_name),
    ("renamed", renamed),
    ("directory renamed", directory_renamed),
    ("replaced", replaced),
    ("linked", linked),
    ("stored by a mapping", stored_by_mapping),
    ("symbolic link replaced", symlink_replaced),
    ("directory made", directory_made),
    ("exchanged", exchanged),
];

/// Makes the change with this number.
fn change(both: &mut Both<'_>, number: usize) {
    let (name, make) = CHANGES[number % CHANGES.len()];
    let file = &format!("d/file{}", number % 7);
    let new = &format!("d/new{number}");
    both.cache(&[file, OTHER, new, "d", "e", "d/tree/below/leaf"]);
    make(&mut Change {
        both,
        number,
        what: &format!("change {number} ({name})"),
        file,
        new,
        text: format!("{number:<4096}").as_bytes(),
    });
}

impl Change<'_, '_> {
    fn on_host(&self, name: &str) -> PathBuf {
        self.both.host.join(name)
    }

    /// Opens the file for writing, on the host.
    fn opened(&self) -> File {
        let path = self.on_host(self.file);
        OpenOptions::new().write(true).open(path).expect("a file")
    }

    fn seen(&mut self, done: impl Fn(&Path) -> bool) {
        self.both.seen(self.what, done);
    }

    /// The file with this name has the new text.
    fn text_seen(&mut self, name: &str) {
        let text = self.text;
        self.seen(|root| fs::read(root.join(name)).is_ok_and(|it| it == text));
    }
}

/// Whether a file's attributes are as wanted.
fn shows(path: &Path, wanted: impl Fn(&fs::Metadata) -> bool) -> bool {
    fs::metadata(path).is_ok_and(|it| wanted(&it))
}

fn rewritten(c: &mut Change<'_, '_>) {
    fs::write(c.on_host(c.file), c.text).unwrap();
    c.text_seen(c.file);
}

fn same_length_and_time(c: &mut Change<'_, '_>) {
    let path = c.on_host(c.file);
    let mut bytes = fs::read(&path).unwrap();
    bytes[1000] = bytes[1000].wrapping_add(1);
    let time = fs::metadata(&path).unwrap().modified().unwrap();
    let opened = c.opened();
    opened.write_all_at(&bytes[1000..1001], 1000).unwrap();
    opened
        .set_times(FileTimes::new().set_modified(time))
        .unwrap();
    let file = c.file;
    c.seen(|root| fs::read(root.join(file)).is_ok_and(|it| it == bytes));
}

fn appended(c: &mut Change<'_, '_>) {
    let mut options = OpenOptions::new();
    let mut opened = options.append(true).open(c.on_host(OTHER)).unwrap();
    let len = opened.metadata().unwrap().len();
    opened.write_all(b"more").unwrap();
    c.seen(|root| {
        let read = fs::read(root.join(OTHER)).unwrap_or_default();
        read.len() as u64 == len + 4 && read.ends_with(b"more")
    });
}

fn cut(c: &mut Change<'_, '_>) {
    let (file, len) = (c.file, (c.number % 4000) as u64 + 10);
    c.opened().set_len(len).unwrap();
    c.seen(|root| {
        let path = root.join(file);
        shows(&path, |it| it.len() == len) && fs::read(&path).unwrap().len() as u64 == len
    });
    rewritten(c);
}

fn mode_set(c: &mut Change<'_, '_>) {
    let (file, wanted) = (c.file, 0o600 | (c.number / CHANGES.len() % 0o100) as u32);
    fs::set_permissions(c.on_host(file), Permissions::from_mode(wanted)).unwrap();
    c.seen(|root| mode(&root.join(file)) == Some(wanted));
}

fn owner_set(c: &mut Change<'_, '_>) {
    let (file, id) = (c.file, c.number as u32);
    chown(c.on_host(file), Some(id), Some(id)).unwrap();
    c.seen(|root| shows(&root.join(file), |it| it.uid() == id && it.gid() == id));
}

fn time_set(c: &mut Change<'_, '_>) {
    let (file, time) = (
        c.file,
        SystemTime::UNIX_EPOCH + Duration::new(c.number as u64, 5000),
    );
    let times = FileTimes::new().set_modified(time);
    c.opened().set_times(times).unwrap();
    c.seen(|root| shows(&root.join(file), |it| it.modified().unwrap() == time));
}

fn attribute_set(c: &mut Change<'_, '_>) {
    let (file, path) = (c.file, c.on_host(c.file));
    rustix::fs::setxattr(&path, "user.test", &c.text[..9], XattrFlags::empty()).unwrap();
    let now = fs::metadata(&path).unwrap();
    let now = (now.ctime(), now.ctime_nsec());
    c.seen(|root| shows(&root.join(file), |it| (it.ctime(), it.ctime_nsec()) == now));
}

fn made_and_removed(c: &mut Change<'_, '_>) {
    let new = c.new;
    fs::write(c.on_host(new), c.text).unwrap();
    c.seen(|root| listed(&root.join(new)));
    c.text_seen(new);
    fs::remove_file(c.on_host(new)).unwrap();
    c.seen(|root| !root.join(new).exists() && !listed(&root.join(new)));
}

/// The new file is opened by its name alone.
fn opened_by_name(c: &mut Change<'_, '_>) {
    let new = c.new;
    fs::write(c.on_host(new), c.text).unwrap();
    c.text_seen(new);
    c.both.cache(&[new]);
    fs::remove_file(c.on_host(new)).unwrap();
    c.seen(|root| File::open(root.join(new)).is_err());
}

fn renamed(c: &mut Change<'_, '_>) {
    let (file, new) = (c.file, c.new);
    let (from, to) = (c.on_host(file), c.on_host(new));
    let ino = fs::metadata(&from).unwrap().ino();
    fs::rename(&from, &to).unwrap();
    c.seen(|root| shows(&root.join(new), |it| it.ino() == ino) && !root.join(file).exists());
    c.both.cache(&[file, new]);
    fs::rename(&to, &from).unwrap();
    c.seen(|root| {
        let found = shows(&root.join(file), |it| it.ino() == ino);
        found && !root.join(new).exists() && !listed(&root.join(new))
    });
}

fn directory_renamed(c: &mut Change<'_, '_>) {
    fs::rename(c.on_host("d/tree"), c.on_host("e/moved")).unwrap();
    fs::write(c.on_host("e/moved/below/leaf"), c.text).unwrap();
    c.text_seen("e/moved/below/leaf");
    c.seen(|root| !root.join("d/tree/below/leaf").exists());
    c.both.cache(&["e/moved/below/leaf", "d/tree/below"]);
    fs::rename(c.on_host("e/moved"), c.on_host("d/tree")).unwrap();
    c.text_seen("d/tree/below/leaf");
    c.seen(|root| !root.join("e/moved").exists());
}

fn replaced(c: &mut Change<'_, '_>) {
    fs::write(c.on_host("e/over"), c.text).unwrap();
    c.both.cache(&["e/over", c.file]);
    fs::rename(c.on_host("e/over"), c.on_host(c.file)).unwrap();
    c.text_seen(c.file);
}

/// By a name in another directory, which the mount was never asked for.
fn linked(c: &mut Change<'_, '_>) {
    let (file, link) = (c.file, c.on_host("unseen/link"));
    fs::hard_link(c.on_host(file), &link).unwrap();
    c.seen(|root| shows(&root.join(file), |it| it.nlink() == 2));
    c.both.cache(&[file]);
    fs::write(&link, c.text).unwrap();
    c.text_seen(file);
    c.both.cache(&[file]);
    fs::remove_file(&link).unwrap();
    c.seen(|root| shows(&root.join(file), |it| it.nlink() == 1));
}

fn stored_by_mapping(c: &mut Change<'_, '_>) {
    let (file, byte) = (c.file, c.number as u8);
    store(&c.on_host(file), byte);
    c.seen(|root| fs::read(root.join(file)).is_ok_and(|it| it[0] == byte));
}

fn symlink_replaced(c: &mut Change<'_, '_>) {
    let target = format!("target{}", c.number);
    symlink(&target, c.on_host("e/new")).unwrap();
    c.both.cache(&["e/link", "e/new"]);
    fs::rename(c.on_host("e/new"), c.on_host("e/link")).unwrap();
    c.seen(|root| fs::read_link(root.join("e/link")).is_ok_and(|it| it == Path::new(&target)));
}

fn directory_made(c: &mut Change<'_, '_>) {
    let (new, inside) = (c.new, &format!("{}/inside", c.new));
    let links = |root: &Path| fs::metadata(root.join("d")).unwrap().nlink();
    fs::create_dir(c.on_host(new)).unwrap();
    let now = links(c.both.host);
    c.seen(|root| root.join(new).is_dir() && links(root) == now);
    c.both.cache(&[new, inside]);
    fs::write(c.on_host(inside), c.text).unwrap();
    c.text_seen(inside);
    fs::remove_dir_all(c.on_host(new)).unwrap();
    c.seen(|root| !root.join(new).exists() && links(root) == now - 1);
}

fn exchanged(c: &mut Change<'_, '_>) {
    let file = c.file;
    let (a, b) = (c.on_host(file), c.on_host(OTHER));
    let numbers = |root: &Path| [file, OTHER].map(|it| fs::metadata(root.join(it)).unwrap().ino());
    let cwd = rustix::fs::CWD;
    renameat_with(cwd, &a, cwd, &b, RenameFlags::EXCHANGE).unwrap();
    let now = numbers(c.both.host);
    c.seen(|root| numbers(root) == now);
    c.seen(|root| fs::read(root.join(file)).unwrap() == fs::read(&a).unwrap());
    fs::write(&a, c.text).unwrap();
    fs::write(&b, c.text).unwrap();
    c.text_seen(OTHER);
}

/// The tree that [`change`] works on.
pub fn plant(source: &Path) {
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

pub fn changes_are_seen((kind, transport): (&str, Transport)) {
    if !needs(kind, transport) {
        return;
    }
    // Of each kind of change that many.
    let count = CHANGES.len() * if full() { 200 } else { 50 };
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

/// A change on the host shows on the mount.
#[test]
fn changes_are_seen_on_tmpfs() {
    changes_are_seen(KINDS[0]);
}

/// The same on ext4.
#[test]
fn changes_are_seen_on_ext4() {
    changes_are_seen(KINDS[1]);
}

/// The same on XFS.
#[test]
fn changes_are_seen_on_xfs() {
    changes_are_seen(KINDS[2]);
}
