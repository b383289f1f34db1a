//! The rights of a caller when a program of the host has changed a file since the kernel checked. The tests stand for
//! the kernel: they look a name up, change the file on the host, and then send the request that the kernel allowed.

mod common;

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::path::Path;
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use common::*;
use uvfs_passthrough::Options;
use uvfs_server::FileSystem;
use uvfs_server::fs::{
    Context, Errno, FileType, Mode, NewNode, Node, OFlags, OpenHow, Opened, ROOT, RenameFlags,
    SetAttr, SetTime, XattrFlags,
};
use uvfs_testing::{Need, has};

/// A group of the caller that no request names.
const OTHER_GROUP: u32 = 77;
/// FMODE_EXEC: the kernel opens a file to execute it.
const EXECUTES: i32 = 0x20;

/// A process of the user of [`USER`] whose requests these are.
struct Caller(Child);

impl Caller {
    fn new(then: &[&str]) -> Self {
        let mut command = Command::new("setpriv");
        command.args(["--reuid=4321", "--regid=8765", "--groups=77"]);
        let caller = Self(command.args(then).args(["sleep", "60"]).spawn().unwrap());
        let name = format!("/proc/{}/comm", caller.0.id());
        let end = Instant::now() + Duration::from_secs(30);
        while fs::read_to_string(&name).unwrap() != "sleep\n" {
            assert!(Instant::now() < end, "the caller has not begun");
            std::thread::sleep(Duration::from_millis(1));
        }
        caller
    }

    fn context(&self) -> Context {
        Context {
            pid: self.0.id(),
            ..USER
        }
    }
}

impl Drop for Caller {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn chmod(path: &Path, mode: u32) {
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
}

fn open(served: &Served, cx: &Context, node: Node, flags: i32) -> Result<Opened> {
    let how = OpenHow::new(OFlags::from_bits_retain(flags as u32));
    now(served.fs.open(cx, node, &how))
}

/// A directory that all may write to, served to all users, a caller who shows in /proc, and how two other callers
/// appear: one of another pid namespace, and one with every capability in a user namespace of its own.
fn on_a_shared_directory(test: fn(&Served, &Path, &Context, &[Context])) {
    if !has(&[
        Need::Root,
        Need::Program("setpriv"),
        Need::Program("unshare"),
    ]) {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let source = dir.path();
    chmod(source, 0o777);
    let served = Served::new(source, Options::default());
    let (caller, contained) = (Caller::new(&[]), Caller::new(&["unshare", "--user"]));
    let all = [caller.context(), USER, contained.context()];
    test(&served, source, &all[0], &all);
    // The thread is the server's again.
    served.create(&ROOT_USER, ROOT, "root", 0o600);
    assert_eq!(fs::metadata(source.join("root")).unwrap().uid(), 0);
    assert_eq!(rustix::process::getgroups().unwrap(), []);
}

/// A caller opens no file of another user that was made between its lookup and its CREATE.
#[test]
fn create_does_not_open_what_the_kernel_did_not_check() {
    on_a_shared_directory(|served, source, _, all| {
        for cx in all {
            let path = source.join("file");
            fs::write(&path, "secret").unwrap();
            chmod(&path, 0o600);
            let create = |flags| {
                let made = served.try_create(cx, ROOT, "file", 0o666, 0, flags as u32);
                made.map(|(entry, opened)| {
                    served.release(opened.fh);
                    entry.attr.uid
                })
            };
            assert_eq!(create(libc::O_RDWR), Err(Errno::STALE));
            assert_eq!(create(libc::O_RDWR | libc::O_EXCL), Err(Errno::EXIST));
            // Even one that it may open: its sticky directory may forbid that (fs.protected_regular).
            chmod(&path, 0o666);
            assert_eq!(create(libc::O_RDWR), Err(Errno::STALE));
            // Two programs of one user make the same file: that is no reason to fail.
            chown(&path, Some(USER.uid), None).unwrap();
            assert_eq!(create(libc::O_RDWR), Ok(USER.uid));
            chmod(&path, 0o400);
            assert_eq!(create(libc::O_RDWR), Err(Errno::STALE));
            fs::remove_file(&path).unwrap();
        }
    });
}

/// A caller reads nothing that was written after the file was closed to it.
#[test]
fn open_checks_again_what_has_changed() {
    on_a_shared_directory(|served, source, caller, all| {
        let path = source.join("file");
        fs::write(&path, "public").unwrap();
        let look_up = |mode: u32| {
            chmod(&path, mode);
            served.lookup(ROOT, "file").unwrap().node
        };
        let opens = |cx: &Context, node, flags| {
            open(served, cx, node, flags).map(|opened| served.release(opened.fh))
        };
        for cx in all {
            let node = look_up(0o644);
            assert_eq!(opens(cx, node, libc::O_RDONLY), Ok(()));
            chmod(&path, 0o604);
            assert_eq!(opens(cx, node, libc::O_RDONLY), Ok(()), "it may still");
        }
        // Where /proc shows who asks.
        for cx in [&all[0], &all[2]] {
            let node = look_up(0o666);
            chmod(&path, 0o600);
            assert_eq!(opens(cx, node, libc::O_RDONLY), Err(Errno::STALE));
            let node = look_up(0o666);
            chmod(&path, 0o644);
            assert_eq!(opens(cx, node, libc::O_RDWR), Err(Errno::STALE));
            assert_eq!(
                opens(cx, node, libc::O_RDONLY | EXECUTES),
                Err(Errno::STALE)
            );
            // By its supplementary group.
            chown(&path, None, Some(OTHER_GROUP)).unwrap();
            chmod(&path, 0o750);
            assert_eq!(opens(cx, node, libc::O_RDONLY), Ok(()));
            assert_eq!(opens(cx, node, libc::O_RDONLY | EXECUTES), Ok(()));
            assert_eq!(opens(cx, node, libc::O_WRONLY), Err(Errno::STALE));
            chown(&path, Some(0), Some(0)).unwrap();
        }
        // The kernel is not told what a client asks.
        let node = look_up(0o644);
        chmod(&path, 0o600);
        let client = Context {
            unique: 1 << 62,
            ..ROOT_USER
        };
        now(served.fs.getattr(&client, node, None)).unwrap();
        assert_eq!(opens(caller, node, libc::O_RDONLY), Err(Errno::STALE));
        now(served.fs.getattr(&ROOT_USER, node, None)).unwrap();
        assert_eq!(
            opens(caller, node, libc::O_RDONLY),
            Ok(()),
            "the kernel has checked"
        );
        assert_eq!(opens(&ROOT_USER, node, libc::O_RDWR), Ok(()));
        // A directory that is opened to be listed.
        fs::create_dir(source.join("dir")).unwrap();
        let node = served.lookup(ROOT, "dir").unwrap().node;
        chmod(&source.join("dir"), 0o700);
        let listed = now(served.fs.opendir(caller, node, &OpenHow::default()));
        assert!(matches!(listed.err(), Some(Errno::STALE | Errno::NOSYS)));
    });
}

/// A caller removes and replaces no other users' files in a directory such as /tmp.
#[test]
fn the_sticky_bit_holds_for_what_the_name_is_now() {
    on_a_shared_directory(|served, source, _, all| {
        chmod(source, 0o1777);
        let at = |name: &str| source.join(name);
        for cx in all {
            for name in ["own", "other", "replaced"] {
                fs::write(at(name), name).unwrap();
            }
            for name in ["own_dir", "other_dir"] {
                fs::create_dir(at(name)).unwrap();
            }
            for name in ["own", "own_dir"] {
                chown(at(name), Some(USER.uid), None).unwrap();
            }
            let rename = |from: &str, to: &str, flags| {
                let (from, to) = (c(from), c(to));
                now(served.fs.rename(cx, ROOT, &from, ROOT, &to, flags)).map(drop)
            };
            let none = RenameFlags::empty();
            let unlink = |name: &str| now(served.fs.unlink(cx, ROOT, &c(name))).map(drop);
            let rmdir = |name: &str| now(served.fs.rmdir(cx, ROOT, &c(name))).map(drop);
            assert_eq!(unlink("other"), Err(Errno::PERM));
            assert_eq!(rmdir("other_dir"), Err(Errno::PERM));
            assert_eq!(rename("other", "taken", none), Err(Errno::PERM));
            assert_eq!(rename("own", "other", none), Err(Errno::PERM));
            let exchange = rename("own", "other", RenameFlags::EXCHANGE);
            assert_eq!(exchange, Err(Errno::PERM));
            assert_eq!(fs::read_to_string(at("other")).unwrap(), "other");
            assert_eq!(rename("own", "moved", none), Ok(()));
            assert_eq!(unlink("moved"), Ok(()));
            assert_eq!(rmdir("own_dir"), Ok(()));
            for name in ["other", "replaced"] {
                fs::remove_file(at(name)).unwrap();
            }
            fs::remove_dir(at("other_dir")).unwrap();
        }
    });
}

/// A caller makes and removes no names in a directory that was closed to it.
#[test]
fn names_change_only_where_the_caller_may_write_now() {
    on_a_shared_directory(|served, source, cx, _| {
        let dir = source.join("dir");
        fs::create_dir(&dir).unwrap();
        chmod(&dir, 0o777);
        fs::write(dir.join("file"), "").unwrap();
        // Links of others' files may be forbidden (fs.protected_hardlinks).
        chown(dir.join("file"), Some(USER.uid), None).unwrap();
        let parent = served.lookup(ROOT, "dir").unwrap().node;
        let node = served.walk("dir/file").unwrap().node;
        let new = NewNode {
            kind: FileType::Fifo,
            mode: Mode::from_raw_mode(0o666),
            umask: Mode::empty(),
            rdev: 0,
        };
        let fs = &served.fs;
        let (file, other, none) = (c"file", c"new", RenameFlags::empty());
        let all = |made: &str| {
            let made = c(made);
            [
                served
                    .try_create(cx, parent, made.to_str().unwrap(), 0o666, 0, 2)
                    .map(drop),
                now(fs.mkdir(cx, parent, other, &new)).map(drop),
                now(fs.rmdir(cx, parent, other)).map(drop),
                now(fs.mknod(cx, parent, other, &new)).map(drop),
                now(fs.unlink(cx, parent, other)).map(drop),
                now(fs.symlink(cx, parent, other, c"to")).map(drop),
                now(fs.rename(cx, parent, other, parent, c"moved", none)).map(drop),
                now(fs.unlink(cx, parent, c"moved")).map(drop),
                now(fs.rename(cx, parent, file, ROOT, file, none)).map(drop),
                now(fs.rename(cx, ROOT, file, parent, file, none)).map(drop),
            ]
        };
        assert_eq!(all("first"), [Ok(()); 10]);
        chmod(&dir, 0o755);
        let mut refused = [Err(Errno::ACCESS); 10];
        // Names that were not made can't be removed, and those that are moved out stay.
        for name in [2, 4, 6, 7, 9] {
            refused[name] = Err(Errno::NOENT);
        }
        assert_eq!(all("second"), refused);
        assert_eq!(
            now(fs.unlink(cx, parent, file)).map(drop),
            Err(Errno::ACCESS)
        );
        assert_eq!(
            now(fs.link(cx, node, parent, c"link")).map(drop),
            Err(Errno::ACCESS)
        );
        // Its group may write.
        chown(&dir, None, Some(OTHER_GROUP)).unwrap();
        chmod(&dir, 0o775);
        assert_eq!(all("third"), [Ok(()); 10]);
    });
}

/// The former owner of a file changes no attributes of it.
#[test]
fn attributes_change_only_for_who_owns_the_file_now() {
    on_a_shared_directory(|served, source, caller, all| {
        let path = source.join("file");
        fs::write(&path, "contents").unwrap();
        chown(&path, Some(USER.uid), Some(USER.gid)).unwrap();
        let node = served.lookup(ROOT, "file").unwrap().node;
        let set = |cx: &Context, set: SetAttr| now(served.fs.setattr(cx, node, &set)).map(drop);
        let mode = |mode| SetAttr {
            mode: Some(Mode::from_raw_mode(mode)),
            ..SetAttr::default()
        };
        let gid = |gid| SetAttr {
            gid: Some(gid),
            ..SetAttr::default()
        };
        let times = SetAttr {
            mtime: Some(SetTime::At(1, 0)),
            ..SetAttr::default()
        };
        let size = SetAttr {
            size: Some(3),
            ..SetAttr::default()
        };
        let label = |cx: &Context| {
            let set = served
                .fs
                .setxattr(cx, node, c"user.x", b"y", XattrFlags::empty(), false);
            now(set)
        };
        for cx in all {
            assert_eq!(set(cx, mode(0o640)), Ok(()));
            assert_eq!(set(cx, times), Ok(()));
            assert_eq!(set(cx, size), Ok(()));
            assert_ne!(label(cx), Err(Errno::ACCESS));
        }
        assert_eq!(set(caller, gid(OTHER_GROUP)), Ok(()));
        assert_eq!(set(caller, gid(USER.gid)), Ok(()));
        assert_eq!(set(caller, gid(3)), Err(Errno::PERM));
        chown(&path, Some(0), Some(0)).unwrap();
        for cx in [&all[0], &all[2]] {
            assert_eq!(set(cx, mode(0o6777)), Err(Errno::PERM));
            assert_eq!(set(cx, gid(OTHER_GROUP)), Err(Errno::PERM));
            assert_eq!(set(cx, times), Err(Errno::PERM));
            assert_eq!(set(cx, size), Err(Errno::ACCESS));
            assert!(matches!(label(cx), Err(Errno::ACCESS | Errno::OPNOTSUPP)));
        }
        let now = fs::metadata(&path).unwrap();
        assert_eq!((now.mode() & 0o7777, now.gid(), now.len()), (0o640, 0, 3));
    });
}
