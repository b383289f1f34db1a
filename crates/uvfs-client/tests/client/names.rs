//! Random calls about names and attributes, on a client and on a directory of the host: every
//! result, every errno and the trees at the end must agree.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use proptest::prelude::*;
use rustix::fs::{
    AtFlags, CWD, FileType, Mode, Nsecs, RenameFlags, Timespec, Timestamps, UTIME_OMIT, XattrFlags,
};
use uvfs_client::{Client, Config, Connection, Error, Flags, OpenOptions, SetAttr};

use crate::common::connect;

type Name = &'static str;

/// Files, directories and what is in them; small, so that calls meet.
const NAMES: [Name; 9] = ["a", "b", "d", "e", "d/a", "d/b", "d/d", "d/d/a", "e/a"];
const XATTRS: [Name; 2] = ["user.one", "user.two"];

#[derive(Debug, Clone)]
enum Call {
    Create(Name),
    Write(Name, usize),
    Mkdir(Name),
    Mkfifo(Name),
    Symlink(Name, Name),
    Link(Name, Name),
    Unlink(Name),
    Rmdir(Name),
    Rename(Name, Name, RenameFlags),
    Chmod(Name, u32),
    Times(Name, i64),
    Truncate(Name, u64),
    SetXattr(Name, Name, usize, XattrFlags),
    GetXattr(Name, Name),
    RemoveXattr(Name, Name),
    ListXattr(Name),
    Stat(Name),
    Lstat(Name),
    Readlink(Name),
    Readdir(Name),
}

fn name() -> impl Strategy<Value = Name> {
    prop::sample::select(&NAMES[..])
}

fn call() -> impl Strategy<Value = Call> {
    let xattr = || prop::sample::select(&XATTRS[..]);
    let flags = prop::sample::select(vec![
        RenameFlags::empty(),
        RenameFlags::NOREPLACE,
        RenameFlags::EXCHANGE,
    ]);
    prop_oneof![
        3 => name().prop_map(Call::Create),
        2 => (name(), 1..9000usize).prop_map(|(n, len)| Call::Write(n, len)),
        3 => name().prop_map(Call::Mkdir),
        1 => name().prop_map(Call::Mkfifo),
        // Relative to where the link is; none leads up, as the client's root is no host's directory.
        2 => (name(), name()).prop_map(|(target, n)| Call::Symlink(target, n)),
        2 => (name(), name()).prop_map(|(old, new)| Call::Link(old, new)),
        2 => name().prop_map(Call::Unlink),
        1 => name().prop_map(Call::Rmdir),
        3 => (name(), name(), flags).prop_map(|(old, new, flags)| Call::Rename(old, new, flags)),
        1 => (name(), 0o400..0o777u32).prop_map(|(n, mode)| Call::Chmod(n, mode)),
        1 => (name(), 0..2_000_000_000i64).prop_map(|(n, time)| Call::Times(n, time)),
        1 => (name(), 0..9000u64).prop_map(|(n, size)| Call::Truncate(n, size)),
        2 => (name(), xattr(), 0..300usize, (0..3u32).prop_map(XattrFlags::from_bits_retain))
            .prop_map(|(n, x, len, flags)| Call::SetXattr(n, x, len, flags)),
        1 => (name(), xattr()).prop_map(|(n, x)| Call::GetXattr(n, x)),
        1 => (name(), xattr()).prop_map(|(n, x)| Call::RemoveXattr(n, x)),
        1 => name().prop_map(Call::ListXattr),
        2 => name().prop_map(Call::Stat),
        2 => name().prop_map(Call::Lstat),
        1 => name().prop_map(Call::Readlink),
        1 => name().prop_map(Call::Readdir),
    ]
}

/// The outcome of a call, in a form that both sides have.
type Outcome = Result<String, i32>;

fn outcome<T>(result: Result<T, impl Into<Error>>, show: impl FnOnce(T) -> String) -> Outcome {
    match result {
        Ok(value) => Ok(show(value)),
        Err(e) => Err(e.into().errno().raw_os_error()),
    }
}

fn done(result: Result<(), impl Into<Error>>) -> Outcome {
    outcome(result, |()| String::new())
}

fn shown(mode: u32, nlink: u32, size: u64) -> String {
    // Directories have sizes of their own kind.
    let size = if mode & libc::S_IFMT == libc::S_IFDIR {
        0
    } else {
        size
    };
    format!("{:o} {nlink} {size}", mode & libc::S_IFMT)
}

fn on_client(client: &Client, call: &Call) -> Outcome {
    let attr = |a: uvfs_client::Attr| shown(a.mode, a.nlink, a.size);
    match *call {
        Call::Create(n) => outcome(client.create(n), |_| String::new()),
        Call::Write(n, len) => {
            let write = || {
                let file = client.open(n, OpenOptions::new().write(true))?;
                file.write_at(&vec![7; len], 100, Flags::empty())?;
                file.close()
            };
            done(write())
        }
        Call::Mkdir(n) => done(client.mkdir(n, 0o755)),
        Call::Mkfifo(n) => done(client.mknod(n, libc::S_IFIFO | 0o644, 0)),
        Call::Symlink(to, n) => done(client.symlink(to, n)),
        Call::Link(old, new) => done(client.link(old, new)),
        Call::Unlink(n) => done(client.unlink(n)),
        Call::Rmdir(n) => done(client.rmdir(n)),
        Call::Rename(old, new, flags) => done(client.rename(old, new, flags)),
        Call::Chmod(n, mode) => {
            let set = SetAttr {
                mode: Some(mode),
                ..SetAttr::default()
            };
            outcome(client.setattr(n, &set), |a| format!("{:o}", a.mode & 0o777))
        }
        Call::Times(n, time) => {
            let set = SetAttr {
                mtime: Some((time, 5)),
                ..SetAttr::default()
            };
            outcome(client.setattr(n, &set), |a| {
                format!("{:?}", (a.mtime as i64, a.mtimensec))
            })
        }
        Call::Truncate(n, size) => {
            let set = SetAttr {
                size: Some(size),
                ..SetAttr::default()
            };
            outcome(client.setattr(n, &set), attr)
        }
        Call::SetXattr(n, x, len, flags) => done(client.setxattr(n, x, &vec![3; len], flags)),
        Call::GetXattr(n, x) => outcome(client.getxattr(n, x), |v| format!("{v:?}")),
        Call::RemoveXattr(n, x) => done(client.removexattr(n, x)),
        Call::ListXattr(n) => outcome(client.listxattr(n), |mut list| {
            list.retain(|x| x.as_bytes().starts_with(b"user."));
            list.sort();
            format!("{list:?}")
        }),
        Call::Stat(n) => outcome(client.stat(n), attr),
        Call::Lstat(n) => outcome(client.lstat(n), attr),
        Call::Readlink(n) => outcome(client.readlink(n), |to| format!("{to:?}")),
        Call::Readdir(n) => outcome(client.readdir(n), |mut list| {
            list.sort_by(|a, b| a.name.cmp(&b.name));
            let list: Vec<_> = list
                .iter()
                .map(|e| (&e.name, (e.kind.as_raw_mode() >> 12) as u8))
                .collect();
            format!("{list:?}")
        }),
    }
}

fn on_host(root: &Path, call: &Call) -> Outcome {
    let at = |n: Name| root.join(n);
    let attr = |m: std::fs::Metadata| shown(m.mode(), m.nlink() as u32, m.size());
    match *call {
        Call::Create(n) => outcome(std::fs::File::create_new(at(n)), |_| String::new()),
        Call::Write(n, len) => {
            let write = || {
                let file = std::fs::OpenOptions::new().write(true).open(at(n))?;
                file.write_all_at(&vec![7; len], 100)
            };
            done(write())
        }
        Call::Mkdir(n) => done(std::fs::create_dir(at(n))),
        Call::Mkfifo(n) => {
            let mode = Mode::from(0o644);
            done(rustix::fs::mknodat(CWD, at(n), FileType::Fifo, mode, 0))
        }
        Call::Symlink(to, n) => done(std::os::unix::fs::symlink(to, at(n))),
        Call::Link(old, new) => done(std::fs::hard_link(at(old), at(new))),
        Call::Unlink(n) => done(rustix::fs::unlink(at(n))),
        Call::Rmdir(n) => done(std::fs::remove_dir(at(n))),
        Call::Rename(old, new, flags) => {
            done(rustix::fs::renameat_with(CWD, at(old), CWD, at(new), flags))
        }
        Call::Chmod(n, mode) => {
            let set = std::fs::set_permissions(at(n), PermissionsExt::from_mode(mode));
            outcome(set, |()| format!("{mode:o}"))
        }
        Call::Times(n, time) => {
            let set = set_modified(&at(n), time, 5);
            outcome(set, |()| format!("{:?}", (time, 5)))
        }
        Call::Truncate(n, size) => {
            let set = || {
                let file = std::fs::OpenOptions::new().write(true).open(at(n))?;
                file.set_len(size)?;
                file.metadata()
            };
            outcome(set(), attr)
        }
        Call::SetXattr(n, x, len, flags) => {
            done(rustix::fs::setxattr(at(n), x, &vec![3; len], flags))
        }
        Call::GetXattr(n, x) => {
            let mut value = vec![0; 1000];
            let got = rustix::fs::getxattr(at(n), x, &mut value[..]);
            outcome(got, |len| format!("{:?}", &value[..len]))
        }
        Call::RemoveXattr(n, x) => done(rustix::fs::removexattr(at(n), x)),
        Call::ListXattr(n) => outcome(user_xattrs(&at(n)), |list| format!("{list:?}")),
        Call::Stat(n) => outcome(std::fs::metadata(at(n)), attr),
        Call::Lstat(n) => outcome(std::fs::symlink_metadata(at(n)), attr),
        Call::Readlink(n) => outcome(std::fs::read_link(at(n)), |to| format!("{to:?}")),
        Call::Readdir(n) => outcome(names_and_kinds(&at(n)), |list| format!("{list:?}")),
    }
}

/// Sets the time of the last change of data, and leaves that of the last access.
fn set_modified(path: &Path, tv_sec: i64, tv_nsec: Nsecs) -> rustix::io::Result<()> {
    let times = Timestamps {
        last_access: Timespec {
            tv_sec: 0,
            tv_nsec: UTIME_OMIT,
        },
        last_modification: Timespec { tv_sec, tv_nsec },
    };
    rustix::fs::utimensat(CWD, path, &times, AtFlags::empty())
}

/// The names of the file's extended attributes that are a user's, sorted.
fn user_xattrs(path: &Path) -> rustix::io::Result<Vec<OsString>> {
    let mut list = vec![0; 1000];
    let len = rustix::fs::listxattr(path, &mut list[..])?;
    let mut names: Vec<_> = list[..len]
        .split(|&b| b == 0)
        .filter(|x| x.starts_with(b"user."))
        .map(|x| OsStr::from_bytes(x).to_owned())
        .collect();
    names.sort();
    Ok(names)
}

/// The names in the directory with the type of each as readdir(3) has it, sorted.
fn names_and_kinds(dir: &Path) -> io::Result<Vec<(OsString, u8)>> {
    let mut list: Vec<_> = std::fs::read_dir(dir)?
        .map(|e| {
            let e = e.unwrap();
            let mode = std::fs::symlink_metadata(e.path()).unwrap().mode();
            (e.file_name(), (mode >> 12) as u8)
        })
        .collect();
    list.sort();
    Ok(list)
}

/// Whether the host follows the name to a regular file: others are not opened here, as opening
/// a fifo waits for its other end.
fn is_file(path: &Path) -> bool {
    std::fs::metadata(path).is_ok_and(|m| m.is_file())
}

fn tree(root: &Path) -> BTreeMap<PathBuf, (String, Vec<u8>)> {
    let mut found = BTreeMap::new();
    let mut todo = vec![root.to_owned()];
    while let Some(dir) = todo.pop() {
        for entry in std::fs::read_dir(dir).unwrap() {
            let path = entry.unwrap().path();
            let meta = std::fs::symlink_metadata(&path).unwrap();
            let content = if meta.is_file() {
                // Readable whatever its mode is: these tests may not be root's.
                let _ = std::fs::set_permissions(&path, PermissionsExt::from_mode(0o600));
                std::fs::read(&path).unwrap()
            } else if meta.is_dir() {
                todo.push(path.clone());
                Vec::new()
            } else {
                Vec::new()
            };
            let name = path.strip_prefix(root).unwrap().to_owned();
            let shown = shown(meta.mode(), meta.nlink() as u32, meta.size());
            found.insert(name, (shown, content));
        }
    }
    found
}

fn run(calls: &[Call], connection: Connection, data: &Path, host: &Path) {
    let config = Config::default().memory(1 << 20);
    let client = Client::new(connection, config).unwrap();
    for (i, call) in calls.iter().enumerate() {
        match *call {
            Call::Write(n, _) | Call::Truncate(n, _) if !is_file(&host.join(n)) => continue,
            // A directory that its owner can't enter is for root alone the same as any.
            Call::Chmod(n, _) if std::fs::metadata(host.join(n)).is_ok_and(|m| m.is_dir()) => {
                continue;
            }
            _ => {}
        }
        let (want, got) = (on_host(host, call), on_client(&client, call));
        assert_eq!(got, want, "call {i}: {call:?}");
    }
    let all = client.statfs().unwrap();
    assert!(all.blocks > 0 && all.namelen > 0);
    client.flush().unwrap();
    assert_eq!(tree(data), tree(host));
}

fn dirs() -> (tempfile::TempDir, PathBuf, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let (data, host) = (dir.path().join("data"), dir.path().join("host"));
    std::fs::create_dir(&data).unwrap();
    std::fs::create_dir(&host).unwrap();
    (dir, data, host)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 120, max_shrink_iters: 2000, ..ProptestConfig::default() })]

    /// Every sequence of changes of names gives the host's tree.
    #[test]
    fn names_are_names(calls in prop::collection::vec(call(), 1..60)) {
        let (_dir, data, host) = dirs();
        let (_serving, connection) = connect(&data);
        run(&calls, connection, &data, &host);
    }
}
