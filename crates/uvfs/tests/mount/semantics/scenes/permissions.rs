//! Permissions: modes, groups, access control lists.

use super::*;

/// The file of the user nobody with a mode and a capability.
fn fresh(s: &Scene, mode: u32) {
    let file = s.file("file", "content");
    fs::fchown(
        &file,
        Some(Uid::from_raw(NOBODY)),
        Some(Gid::from_raw(NOBODY)),
    )
    .unwrap();
    s.chmod("file", mode).unwrap();
    // No capability outlives another user's write either.
    let capability = b"\x01\0\0\x02\x01\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0";
    fs::setxattr(
        s.at("file"),
        "security.capability",
        capability,
        XattrFlags::empty(),
    )
    .unwrap();
}

/// Notes what is left of both.
fn look(s: &mut Scene, step: &str) {
    s.note(step, s.who("file"));
    let mut value = [0; 64];
    let capability = fs::getxattr(s.at("file"), "security.capability", &mut value[..]);
    s.note(&format!("{step} (capability)"), capability);
}

/// Notes which set-id bits and capabilities each kind of fallocate leaves.
fn setuid_clearing_by_fallocate(s: &mut Scene, mode: u32) {
    let path = s.at("file");
    let step = |what: &str| format!("{what} {mode:o}");
    fresh(s, mode);
    s.done(
        &step("fallocate call"),
        as_nobody(|| {
            fs::open(&path, OFlags::WRONLY, Mode::empty())
                .and_then(|f| fs::fallocate(&f, FallocateFlags::empty(), 0, 100))
        }),
    );
    look(s, &step("fallocate"));
    let keep = FallocateFlags::KEEP_SIZE;
    for (name, flags) in [
        ("keep", keep),
        ("punch", FallocateFlags::PUNCH_HOLE | keep),
        ("zero", FallocateFlags::ZERO_RANGE),
    ] {
        fresh(s, mode);
        let done = as_nobody(|| {
            fs::open(&path, OFlags::WRONLY, Mode::empty())
                .and_then(|f| fs::fallocate(&f, flags, 0, 3))
        });
        s.done(&step(&format!("fallocate {name} call")), done);
        match done {
            Ok(()) => look(s, &step(&format!("fallocate {name}"))),
            // FUSE takes capabilities before it asks whether the host can do it.
            Err(_) => s.note(&step(&format!("refused fallocate {name}")), s.who("file")),
        }
    }
}

pub fn setuid_clearing(s: &mut Scene) {
    for mode in [0o6777, 0o6755, 0o2767, 0o4666, 0o2666] {
        let path = s.at("file");
        let step = |what: &str| format!("{what} {mode:o}");
        fresh(s, mode);
        look(s, &step("before"));
        let write = |path: &Path| {
            fs::open(path, OFlags::WRONLY, Mode::empty()).and_then(|f| io::write(&f, b"x"))
        };
        s.note(&step("write call"), as_nobody(|| write(&path)));
        look(s, &step("write as owner"));
        fresh(s, mode);
        s.note(
            &step("other's write call"),
            as_user(1000, 1000, &[], || write(&path)),
        );
        look(s, &step("write as other"));
        fresh(s, mode);
        write(&path).unwrap();
        look(s, &step("write as root"));
        fresh(s, mode);
        s.done(
            &step("truncate call"),
            as_nobody(|| {
                fs::open(&path, OFlags::WRONLY, Mode::empty()).and_then(|f| fs::ftruncate(&f, 3))
            }),
        );
        look(s, &step("truncate as owner"));
        fresh(s, mode);
        s.done(
            &step("open truncating call"),
            as_nobody(|| fs::open(&path, OFlags::WRONLY | OFlags::TRUNC, Mode::empty())),
        );
        look(s, &step("open truncating"));
        fresh(s, mode);
        s.done(
            &step("chown call"),
            as_nobody(|| fs::chown(&path, None, Some(Gid::from_raw(NOBODY)))),
        );
        look(s, &step("chown as owner"));
        fresh(s, mode);
        s.done(
            &step("root's chown call"),
            fs::chown(&path, Some(Uid::from_raw(1)), None),
        );
        look(s, &step("chown as root"));
        setuid_clearing_by_fallocate(s, mode);
        fresh(s, mode);
        s.done(
            &step("chmod call"),
            as_user(NOBODY, NOBODY, &[], || {
                fs::chmod(&path, Mode::from_raw_mode(mode))
            }),
        );
        look(s, &step("chmod as owner"));
    }
    // The owner is not in the file's group.
    fresh(s, 0o755);
    fs::chown(s.at("file"), None, Some(Gid::from_raw(5))).unwrap();
    let path = s.at("file");
    s.done(
        "setgid of a strange group",
        as_nobody(|| fs::chmod(&path, Mode::from_raw_mode(0o2755))),
    );
    look(s, "strange group");
    s.done(
        "setgid of a supplementary group",
        as_user(NOBODY, NOBODY, &[5], || {
            fs::chmod(&path, Mode::from_raw_mode(0o2755))
        }),
    );
    look(s, "supplementary group");
}

pub fn permission(s: &mut Scene) {
    s.file("secret", "secret");
    s.chmod("secret", 0o600).unwrap();
    s.file("readable", "x");
    fs::mkdir(s.at("closed"), Mode::from(0o700)).unwrap();
    s.file("closed/file", "x");
    fs::mkdir(s.at("passable"), Mode::from(0o711)).unwrap();
    s.file("passable/file", "x");
    let open = |path: PathBuf, flags| as_nobody(move || fs::open(path, flags, Mode::empty()));
    s.done("read secret", open(s.at("secret"), OFlags::RDONLY));
    s.done("write readable", open(s.at("readable"), OFlags::WRONLY));
    s.done(
        "truncate readable",
        open(s.at("readable"), OFlags::RDONLY | OFlags::TRUNC),
    );
    s.done(
        "noatime of another's",
        open(s.at("readable"), OFlags::RDONLY | OFlags::NOATIME),
    );
    s.done("into closed", open(s.at("closed/file"), OFlags::RDONLY));
    s.done("list closed", open(s.at("closed"), OFlags::RDONLY));
    s.done("into passable", open(s.at("passable/file"), OFlags::RDONLY));
    s.done("list passable", open(s.at("passable"), OFlags::RDONLY));
    let path = |name: &str| s.at(name);
    let (a, b) = (path("readable"), path("new"));
    let results = as_nobody(|| {
        [
            (
                "create",
                fs::open(&b, OFlags::CREATE | OFlags::WRONLY, Mode::from(0o644)).map(drop),
            ),
            ("mkdir", fs::mkdir(&b, Mode::from(0o755))),
            ("symlink", fs::symlink("x", &b)),
            ("link", fs::link(&a, &b)),
            ("unlink", fs::unlink(&a)),
            ("rename", fs::rename(&a, &b)),
            ("chmod", fs::chmod(&a, Mode::from(0o777))),
            ("chown", fs::chown(&a, Some(Uid::from_raw(NOBODY)), None)),
            ("utimens", fs::utimensat(CWD, &a, &now(), AtFlags::empty())),
            (
                "xattr",
                fs::setxattr(&a, "user.x", b"y", XattrFlags::empty()),
            ),
            (
                "truncate",
                fs::open(&a, OFlags::RDONLY, Mode::empty()).and_then(|f| fs::ftruncate(f, 0)),
            ),
        ]
    });
    results
        .into_iter()
        .for_each(|(step, result)| s.done(step, result));
    // A group that only the supplementary list has.
    s.chmod("secret", 0o640).unwrap();
    fs::chown(s.at("secret"), None, Some(Gid::from_raw(77))).unwrap();
    let secret = s.at("secret");
    let read = || fs::open(&secret, OFlags::RDONLY, Mode::empty());
    s.done("without the group", as_user(NOBODY, NOBODY, &[78], read));
    s.done("with the group", as_user(NOBODY, NOBODY, &[78, 77], read));
}

pub fn sticky(s: &mut Scene) {
    fs::mkdir(s.at("dir"), Mode::from(0o777)).unwrap();
    s.chmod("dir", 0o1777).unwrap();
    s.file("dir/root's", "");
    s.file("dir/nobody's", "");
    let owner = Some(Uid::from_raw(NOBODY));
    fs::chown(s.at("dir/nobody's"), owner, None).unwrap();
    let (theirs, own) = (s.at("dir/root's"), s.at("dir/nobody's"));
    s.done(
        "rename another's",
        as_nobody(|| fs::rename(&theirs, theirs.with_extension("x"))),
    );
    s.done("unlink another's", as_nobody(|| fs::unlink(&theirs)));
    s.done("unlink own", as_nobody(|| fs::unlink(&own)));
}

/// A POSIX ACL as the kernel keeps it: version 2, then tag, permissions and id of each entry.
/// An access control list as its extended attribute has it, of tags, permissions and ids.
pub fn acl(entries: &[(u16, u16, u32)]) -> Vec<u8> {
    let mut bytes = 2u32.to_le_bytes().to_vec();
    for (tag, permissions, id) in entries {
        bytes.extend(tag.to_le_bytes());
        bytes.extend(permissions.to_le_bytes());
        bytes.extend(id.to_le_bytes());
    }
    bytes
}

/// Makes a file; its mode and owners.
fn created(s: &Scene, name: &str, mode: u32) -> io::Result<String> {
    let flags = OFlags::CREATE | OFlags::WRONLY;
    fs::open(s.at(name), flags, Mode::from_raw_mode(mode)).unwrap();
    s.who(name)
}

pub fn umask_and_acls(s: &mut Scene) {
    for mask in [0, 0o027, 0o777] {
        rustix::process::umask(Mode::from(mask));
        s.note(
            &format!("file under {mask:o}"),
            created(s, &format!("f{mask:o}"), 0o666),
        );
        let dir = format!("d{mask:o}");
        fs::mkdir(s.at(&dir), Mode::from(0o777)).unwrap();
        s.note(&format!("directory under {mask:o}"), s.who(&dir));
        let fifo = format!("p{mask:o}");
        fs::mknodat(CWD, s.at(&fifo), FileType::Fifo, Mode::from(0o666), 0).unwrap();
        s.note(&format!("fifo under {mask:o}"), s.who(&fifo));
    }
    acls(s);
}

/// The id of an ACL's entries that name no user and no group.
const NO_ID: u32 = u32::MAX;

/// Sets the ACL that `which` names: `access` or `default`.
fn set_acl(s: &Scene, name: &str, which: &str, value: &[u8]) -> io::Result<()> {
    fs::setxattr(
        s.at(name),
        format!("system.posix_acl_{which}"),
        value,
        XattrFlags::empty(),
    )
}

fn get_acl(s: &Scene, name: &str, which: &str) -> io::Result<Vec<u8>> {
    let mut value = [0; 256];
    fs::getxattr(
        s.at(name),
        format!("system.posix_acl_{which}"),
        &mut value[..],
    )
    .map(|n| value[..n].to_vec())
}

fn acls(s: &mut Scene) {
    let default = acl(&[
        (1, 7, NO_ID),
        (2, 6, NOBODY),
        (4, 5, NO_ID),
        (8, 4, 77),
        (0x10, 7, NO_ID),
        (0x20, 1, NO_ID),
    ]);
    let access = acl(&[
        (1, 7, NO_ID),
        (2, 6, NOBODY),
        (4, 0, NO_ID),
        (0x10, 6, NO_ID),
        (0x20, 0, NO_ID),
    ]);
    rustix::process::umask(Mode::from(0o077));
    acls_are_inherited(s, &default);
    rustix::process::umask(Mode::from(0o022));
    acls_of_files(s, &access, &default);
    s.done(
        "remove default",
        fs::removexattr(s.at("acl"), "system.posix_acl_default"),
    );
    s.note("without default", created(s, "acl/file2", 0o666));
    acls_set_by_nobody(s, &access);
}

/// Files and directories get their ACLs from the default one of their directory.
fn acls_are_inherited(s: &mut Scene, default: &[u8]) {
    fs::mkdir(s.at("acl"), Mode::from(0o755)).unwrap();
    s.chmod("acl", 0o755).unwrap();
    s.done("set default", set_acl(s, "acl", "default", default));
    s.note("inherited mode", created(s, "acl/file", 0o666));
    s.note("inherited", get_acl(s, "acl/file", "access"));
    fs::mkdir(s.at("acl/sub"), Mode::from(0o777)).unwrap();
    s.note("directory", s.who("acl/sub"));
    s.note("directory's access", get_acl(s, "acl/sub", "access"));
    s.note("directory's default", get_acl(s, "acl/sub", "default"));
}

/// An ACL says who may open a file, and its mask is the group's part of the mode.
fn acls_of_files(s: &mut Scene, access: &[u8], default: &[u8]) {
    s.file("file", "x");
    s.chmod("file", 0o600).unwrap();
    let path = s.at("file");
    let open = |flags| as_nobody(|| fs::open(&path, flags, Mode::empty()));
    s.done("before", open(OFlags::RDWR));
    s.done("set access", set_acl(s, "file", "access", access));
    s.done("after", open(OFlags::RDWR));
    s.note("mode is the mask", s.who("file"));
    s.chmod("file", 0o640).unwrap();
    s.done("mask read only, write", open(OFlags::RDWR));
    s.done("mask read only, read", open(OFlags::RDONLY));
    s.note("after chmod", get_acl(s, "file", "access"));
    let malformed = b"\x02\0\0\0xyz";
    s.done("malformed", set_acl(s, "file", "access", malformed));
    s.done("default of a file", set_acl(s, "file", "default", default));
    let minimal = acl(&[(1, 6, NO_ID), (4, 4, NO_ID), (0x20, 0, NO_ID)]);
    s.done("minimal", set_acl(s, "file", "access", &minimal));
    s.note("minimal mode", s.who("file"));
    s.note("minimal is none", get_acl(s, "file", "access"));
}

/// A user may set the ACL only of a file that they own. The file loses its setgid bit if the user
/// is not in its group.
fn acls_set_by_nobody(s: &mut Scene, access: &[u8]) {
    let set = |s: &Scene| as_nobody(|| set_acl(s, "file", "access", access));
    s.done("set another's", set(s));
    fs::chown(
        s.at("file"),
        Some(Uid::from_raw(NOBODY)),
        Some(Gid::from_raw(5)),
    )
    .unwrap();
    s.chmod("file", 0o2750).unwrap();
    s.done("set own", set(s));
    s.note("setgid after", s.who("file"));
}

pub fn groups(s: &mut Scene) {
    fs::mkdir(s.at("dir"), Mode::from(0o777)).unwrap();
    fs::chown(s.at("dir"), None, Some(Gid::from_raw(77))).unwrap();
    s.chmod("dir", 0o2777).unwrap();
    fs::mkdir(s.at("plain"), Mode::from(0o777)).unwrap();
    s.chmod("plain", 0o777).unwrap();
    for dir in ["dir", "plain"] {
        for (who, groups) in [("member", &[77, 78][..]), ("stranger", &[][..])] {
            let at = |name: &str| s.at(&format!("{dir}/{who}-{name}"));
            let (file, sub, fifo, link) = (at("file"), at("sub"), at("fifo"), at("link"));
            as_user(NOBODY, NOBODY, groups, || {
                let flags = OFlags::CREATE | OFlags::WRONLY;
                fs::open(&file, flags, Mode::from_raw_mode(0o2775)).unwrap();
                fs::mkdir(&sub, Mode::from(0o775)).unwrap();
                fs::mknodat(CWD, &fifo, FileType::Fifo, Mode::from_raw_mode(0o664), 0).unwrap();
                fs::symlink("x", &link).unwrap();
            });
            for kind in ["file", "sub", "fifo", "link"] {
                s.note(
                    &format!("{dir} {who} {kind}"),
                    s.who(&format!("{dir}/{who}-{kind}")),
                );
            }
            let path = s.at(&format!("{dir}/{who}-file"));
            let given = as_user(NOBODY, NOBODY, groups, || {
                fs::chown(&path, None, Some(Gid::from_raw(78)))
            });
            s.done(&format!("{dir} {who} gives to group 78"), given);
        }
    }
    // Only a supplementary group may write here.
    fs::mkdir(s.at("shared"), Mode::from(0o770)).unwrap();
    fs::chown(s.at("shared"), None, Some(Gid::from_raw(78))).unwrap();
    s.chmod("shared", 0o770).unwrap();
    let path = s.at("shared/file");
    let create = || fs::open(&path, OFlags::CREATE | OFlags::WRONLY, Mode::from(0o644));
    s.done(
        "stranger creates in shared",
        as_user(NOBODY, NOBODY, &[77], create),
    );
    s.done(
        "member creates in shared",
        as_user(NOBODY, NOBODY, &[77, 78], create),
    );
    s.note("member's file", s.who("shared/file"));
    let link = s.at("shared/link");
    let (from, to) = (s.at("shared/file"), s.at("shared/moved"));
    s.done(
        "member links",
        as_user(NOBODY, NOBODY, &[78], || fs::symlink("x", &link)),
    );
    s.done(
        "member renames",
        as_user(NOBODY, NOBODY, &[78], || fs::rename(&from, &to)),
    );
    s.done(
        "member removes",
        as_user(NOBODY, NOBODY, &[78], || fs::unlink(&to)),
    );
}
