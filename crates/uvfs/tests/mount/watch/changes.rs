//! Each kind of change on the host is seen on the mount.

use super::*;

pub const CHANGES: usize = 18;

/// Makes the change with this number, all of whose files are in `d`, `e` and below.
pub fn change(both: &mut Both<'_>, number: usize) {
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
            // The new file is opened by its name alone.
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

pub fn changes_are_seen((kind, transport, count): (&str, Transport, usize)) {
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

/// A change on the host would never show on the mount.
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
