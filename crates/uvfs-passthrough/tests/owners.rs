//! Whose files are made, and what takes privileges away from them.

mod common;

use std::os::unix::fs::{MetadataExt, PermissionsExt, chown, symlink};
use std::path::Path;

use common::*;
use uvfs_passthrough::Options;
use uvfs_server::FileSystem;
use uvfs_server::fs::{
    Context, Errno, FallocateFlags, FileType, IoHow, Mode, NewNode, Node, OFlags, OpenHow, ROOT,
    SetAttr, XattrFlags,
};
use uvfs_testing::{Need, has};

fn chmod(path: &Path, mode: u32) {
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
}

/// New files belong to the caller.
#[test]
fn what_is_made_is_the_callers() {
    if !has(&[Need::Root]) {
        return;
    }
    on_each_store(|store, source| {
        // Only root may write here: the kernel has checked the caller.
        chmod(source, 0o755);
        let served = Served::new(source, Options::default());
        let owner = |name: &str| {
            let st = std::fs::symlink_metadata(source.join(name)).unwrap();
            (st.uid(), st.gid(), st.mode() & 0o7777)
        };
        served.create(&USER, ROOT, "file", 0o6777);
        assert_eq!(owner("file"), (4321, 8765, 0o6755), "{store}");
        served.mkdir(&USER, ROOT, "dir", 0o1777);
        assert_eq!(owner("dir"), (4321, 8765, 0o1755));
        now(served.fs.symlink(&USER, ROOT, c"link", c"x")).unwrap();
        assert_eq!(owner("link").0, 4321);
        let fifo = NewNode {
            kind: FileType::Fifo,
            mode: Mode::from_raw_mode(0o666),
            umask: Mode::from_raw_mode(0o077),
            rdev: 0,
        };
        now(served.fs.mknod(&USER, ROOT, c"fifo", &fifo)).unwrap();
        assert_eq!(owner("fifo"), (4321, 8765, 0o600));
        let device = NewNode {
            kind: FileType::CharacterDevice,
            mode: Mode::from_raw_mode(0o600),
            umask: Mode::empty(),
            rdev: 0x103,
        };
        assert_eq!(
            now(served.fs.mknod(&USER, ROOT, c"null", &device)).err(),
            Some(Errno::PERM)
        );
        let null = now(served.fs.mknod(&ROOT_USER, ROOT, c"null", &device)).unwrap();
        assert_eq!(null.attr.rdev, 0x103);
        assert_eq!(
            served.open(null.node, libc::O_RDONLY).err(),
            Some(Errno::NXIO)
        );
        // The next of this thread is root's again, with another umask.
        served
            .try_create(&ROOT_USER, ROOT, "root", 0o666, 0o007, 0)
            .unwrap();
        assert_eq!(owner("root"), (0, 0, 0o660));
        // And in threads that run at the same time.
        std::thread::scope(|scope| {
            for uid in 1000..1008 {
                let (served, source) = (&served, source);
                scope.spawn(move || {
                    let cx = Context {
                        uid,
                        gid: uid + 1,
                        ..USER
                    };
                    let umask = uid & 0o77;
                    for n in 0..100 {
                        let name = format!("{uid}-{n}");
                        let (_, opened) = served
                            .try_create(&cx, ROOT, &name, 0o777, umask, 1)
                            .unwrap();
                        served.release(opened.fh);
                        let st = std::fs::metadata(source.join(&name)).unwrap();
                        let expected = (uid, uid + 1, 0o777 & !umask);
                        assert_eq!((st.uid(), st.gid(), st.mode() & 0o7777), expected);
                    }
                });
            }
        });
        let nobody = Context {
            uid: u32::MAX,
            ..USER
        };
        let refused = served.try_create(&nobody, ROOT, "nobody", 0o600, 0, 0);
        assert_eq!(refused.err(), Some(Errno::OVERFLOW));
    });
}

/// New files have the permissions and the group that they get on the host.
#[test]
fn groups_and_default_acls_come_from_the_directory() {
    if !has(&[Need::Root]) {
        return;
    }
    on_each_store(|store, source| {
        chown(source, None, Some(77)).unwrap();
        chmod(source, 0o2777);
        let served = Served::new(source, Options::default());
        let (file, _) = served.create(&USER, ROOT, "file", 0o2775);
        assert_eq!(
            (file.attr.gid, file.attr.mode & 0o7777),
            (77, 0o755),
            "{store}"
        );
        let member = Context {
            group: Some(77),
            ..USER
        };
        let (file, _) = served.create(&member, ROOT, "member", 0o2775);
        assert_eq!((file.attr.gid, file.attr.mode & 0o7777), (77, 0o2755));
        let dir = served.mkdir(&USER, ROOT, "dir", 0o755);
        assert_eq!((dir.attr.gid, dir.attr.mode & 0o7777), (77, 0o2755));

        // user::rwx, group::rwx, mask::rwx, other::r-x as a default: the umask has no say.
        let mut acl = 2u32.to_le_bytes().to_vec();
        for (tag, perm) in [(1u16, 7u16), (4, 7), (0x10, 7), (0x20, 5)] {
            acl.extend(tag.to_le_bytes());
            acl.extend(perm.to_le_bytes());
            acl.extend(u32::MAX.to_le_bytes());
        }
        let name = c"system.posix_acl_default";
        match now(served
            .fs
            .setxattr(&USER, dir.node, name, &acl, XattrFlags::empty(), false))
        {
            Err(Errno::OPNOTSUPP) => eprintln!("{store} has no ACLs"),
            result => {
                result.unwrap();
                assert_eq!(now(served.fs.getxattr(&USER, dir.node, name)).unwrap(), acl);
                let made = served
                    .try_create(&USER, dir.node, "acl", 0o666, 0o077, 0)
                    .unwrap()
                    .0;
                assert_eq!(made.attr.mode & 0o777, 0o664, "{store}");
            }
        }
        // An access list takes set-group-id where the kernel says so.
        let name = c"system.posix_acl_access";
        let node = served.lookup(ROOT, "member").unwrap().node;
        match now(served
            .fs
            .setxattr(&USER, node, name, &acl, XattrFlags::empty(), true))
        {
            Err(Errno::OPNOTSUPP) => {}
            result => {
                result.unwrap();
                assert_eq!(served.mode(node) & 0o7777, 0o775);
            }
        }
    });
}

/// A write clears set-user-id and set-group-id when the request says so.
#[test]
fn writing_takes_privileges_when_it_is_said_to() {
    on_each_store(|store, source| {
        let served = Served::new(source, Options::default());
        let (entry, opened) = served.create(&ROOT_USER, ROOT, "file", 0o700);
        let path = source.join("file");
        let reset = |mode| chmod(&path, mode);
        let mode = || served.mode(entry.node) & 0o7777;
        let how = IoHow::new(opened.fh, 0);
        let mut kill = how;
        kill.kill_suidgid = true;

        reset(0o6755);
        served.write(how, b"x").unwrap();
        if is_root() {
            assert_eq!(mode(), 0o6755, "{store}");
        }
        served.write(kill, b"x").unwrap();
        assert_eq!(mode(), 0o755);
        // Without group execution the bit is for locking, not for running.
        reset(0o6745);
        served.write(kill, b"x").unwrap();
        assert_eq!(mode(), if is_root() { 0o2745 } else { mode() });

        reset(0o6755);
        let (file, fh) = (served.fs.clone(), opened.fh);
        run(async move {
            file.fallocate(&USER, Node(0), fh, 0, 100, FallocateFlags::empty())
                .await
        })
        .unwrap();
        assert_eq!(mode(), 0o755);
    });
}

/// Truncation clears set-user-id and set-group-id when the request says so.
#[test]
fn truncating_takes_privileges_when_it_is_said_to() {
    on_each_store(|_, source| {
        let served = Served::new(source, Options::default());
        let (entry, _) = served.create(&ROOT_USER, ROOT, "file", 0o700);
        let fs = &served.fs;
        let reset = |mode| chmod(&source.join("file"), mode);
        let mode = || served.mode(entry.node) & 0o7777;

        reset(0o6745);
        if is_root() {
            // The file's group is root's: others lose it.
            let kill = SetAttr {
                size: Some(9),
                kill_suidgid: true,
                ..Default::default()
            };
            let attr = now(fs.setattr(&USER, entry.node, &kill)).unwrap().attr;
            assert_eq!(attr.mode & 0o7777, 0o745);
        }

        reset(0o6755);
        let mut kill = OpenHow::new(OFlags::WRONLY | OFlags::TRUNC);
        kill.kill_suidgid = true;
        let truncated = now(fs.open(&ROOT_USER, entry.node, &kill)).unwrap();
        assert_eq!(mode(), 0o755);
        served.release(truncated.fh);

        reset(0o6755);
        let kill = SetAttr {
            size: Some(5),
            kill_suidgid: true,
            ..Default::default()
        };
        let attr = now(fs.setattr(&ROOT_USER, entry.node, &kill)).unwrap().attr;
        assert_eq!((attr.mode & 0o7777, attr.size), (0o755, 5));
    });
}

/// A new owner clears set-user-id and set-group-id, and new contents clear capabilities.
#[test]
fn a_new_owner_and_new_contents_take_privileges() {
    // Only root gives files away.
    if !has(&[Need::Root]) {
        return;
    }
    on_each_store(|store, source| {
        let served = Served::new(source, Options::default());
        let (entry, opened) = served.create(&ROOT_USER, ROOT, "file", 0o700);
        let fs = &served.fs;
        chmod(&source.join("file"), 0o6755);
        let owner = SetAttr {
            uid: Some(USER.uid),
            ..Default::default()
        };
        let attr = now(fs.setattr(&ROOT_USER, entry.node, &owner))
            .unwrap()
            .attr;
        assert_eq!((attr.mode & 0o7777, attr.uid), (0o755, USER.uid));

        // VFS_CAP_REVISION_2 with CAP_NET_RAW.
        let mut cap = 0x0200_0001u32.to_le_bytes().to_vec();
        cap.extend([0, 0x20, 0, 0].iter().chain(&[0; 12]));
        let name = c"security.capability";
        now(fs.setxattr(
            &ROOT_USER,
            entry.node,
            name,
            &cap,
            XattrFlags::empty(),
            false,
        ))
        .unwrap();
        assert_eq!(now(fs.getxattr(&USER, entry.node, name)).unwrap(), cap);
        let how = IoHow::new(opened.fh, 0);
        served.write(how, b"x").unwrap();
        let gone = now(fs.getxattr(&USER, entry.node, name));
        assert_eq!(gone.err(), Some(Errno::NODATA), "{store}");
    });
}

/// Extended attributes are kept, and shown only to users who may see them.
#[test]
fn extended_attributes_of_every_namespace() {
    on_each_store(|store, source| {
        std::fs::write(source.join("file"), b"").unwrap();
        symlink("file", source.join("link")).unwrap();
        let served = Served::new(source, Options::default());
        let fs = &served.fs;
        let file = served.lookup(ROOT, "file").unwrap().node;
        let link = served.lookup(ROOT, "link").unwrap().node;
        if now(fs.setxattr(&USER, file, c"user.a", b"1", XattrFlags::empty(), false))
            == Err(Errno::OPNOTSUPP)
        {
            eprintln!("{store} has no user attributes");
            return;
        }
        let create = XattrFlags::CREATE;
        let again = now(fs.setxattr(&USER, file, c"user.a", b"2", create, false));
        assert_eq!(again, Err(Errno::EXIST));
        let long = vec![b'v'; 600];
        now(fs.setxattr(&USER, file, c"user.long", &long, XattrFlags::empty(), false)).unwrap();
        assert_eq!(now(fs.getxattr(&USER, file, c"user.long")).unwrap(), long);
        assert_eq!(now(fs.getxattr(&USER, file, c"user.a")).unwrap(), b"1");
        assert_eq!(
            now(fs.getxattr(&USER, file, c"user.b")).err(),
            Some(Errno::NODATA)
        );
        let listed = |cx, node| String::from_utf8(now(fs.listxattr(cx, node)).unwrap()).unwrap();
        assert!(listed(&USER, file).contains("user.a\0"), "{store}");
        // Links have none of users'.
        let on_link = now(fs.setxattr(&USER, link, c"user.a", b"", XattrFlags::empty(), false));
        assert_eq!(on_link, Err(Errno::PERM));
        if is_root() {
            for node in [file, link] {
                now(fs.setxattr(
                    &ROOT_USER,
                    node,
                    c"trusted.t",
                    b"secret",
                    XattrFlags::empty(),
                    false,
                ))
                .unwrap();
                assert_eq!(
                    now(fs.getxattr(&ROOT_USER, node, c"trusted.t")).unwrap(),
                    b"secret"
                );
                assert!(listed(&ROOT_USER, node).contains("trusted.t\0"));
                assert!(!listed(&USER, node).contains("trusted"));
                let hidden = now(fs.getxattr(&USER, node, c"trusted.t"));
                assert_eq!(hidden.err(), Some(Errno::NODATA));
                let refused =
                    now(fs.setxattr(&USER, node, c"trusted.t", b"", XattrFlags::empty(), false));
                assert_eq!(refused, Err(Errno::PERM));
                assert_eq!(
                    now(fs.removexattr(&USER, node, c"trusted.t")),
                    Err(Errno::PERM)
                );
                assert_eq!(now(fs.removexattr(&ROOT_USER, node, c"trusted.t")), Ok(()));
            }
        }
        assert_eq!(now(fs.removexattr(&USER, file, c"user.a")), Ok(()));
        assert_eq!(
            now(fs.removexattr(&USER, file, c"user.a")),
            Err(Errno::NODATA)
        );
    });
}
