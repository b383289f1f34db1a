//! Identities find files again when their server was restarted.

mod common;

use std::os::unix::fs::MetadataExt;
use std::path::Path;

use common::*;
use proptest::prelude::*;
use uvfs_passthrough::Options;
use uvfs_server::fs::{ClientSupport, Errno, Node, ROOT};

/// Another server of the same source.
fn again(source: &Path) -> Served {
    Served::new(source, Options::default())
}

/// A node's identity, and where its file is.
fn whole(served: &Served, node: Node) -> Vec<u8> {
    let identity = served.fs.identity(node).unwrap();
    [identity, served.fs.path(node).unwrap()].concat()
}

/// After a restart a client finds the same file by an identity, or none.
#[test]
fn an_identity_means_one_file_for_ever() {
    on_each_store(|store, source| {
        let served = again(source);
        let dir = served.mkdir(&ROOT_USER, ROOT, "dir", 0o777).node;
        let [kept, renamed, linked, replaced, removed] =
            ["kept", "renamed", "linked", "replaced", "removed"].map(|name| {
                let (entry, _) = served.create(&ROOT_USER, dir, name, 0o666);
                (entry.attr.ino, whole(&served, entry.node))
            });
        let root = served.fs.identity(ROOT).unwrap();
        let folder = whole(&served, dir);
        drop(served);
        let at = |name: &str| source.join("dir").join(name);
        std::fs::rename(at("renamed"), source.join("moved")).unwrap();
        std::fs::hard_link(at("linked"), at("link")).unwrap();
        std::fs::write(at("new"), "").unwrap();
        std::fs::rename(at("new"), at("replaced")).unwrap();
        std::fs::remove_file(at("removed")).unwrap();
        std::fs::write(at("removed"), "").unwrap();

        let served = again(source);
        let find = |identity: &[u8]| now(served.fs.find(&ROOT_USER, identity));
        assert_eq!(served.fs.identity(ROOT), Some(root), "{store}");
        for (ino, identity) in [&kept, &linked] {
            let entry = find(identity).unwrap();
            assert_eq!(entry.attr.ino, *ino, "{store}");
            // Counted as a lookup: it is the node that others find by its name.
            let dir = served.lookup(ROOT, "dir").unwrap().node;
            let name = ["kept", "linked"][usize::from(*ino == linked.0)];
            assert_eq!(served.lookup(dir, name).unwrap().node, entry.node);
        }
        assert!(find(&folder).is_ok(), "{store}");
        for (_, identity) in [&replaced, &removed] {
            assert_eq!(find(identity).err(), Some(Errno::STALE), "{store}");
        }
        // By its handle, where this process may open handles; never another file.
        match find(&renamed.1) {
            Ok(entry) => assert_eq!(entry.attr.ino, renamed.0, "{store}"),
            Err(errno) => assert_eq!(errno, Errno::STALE, "{store}"),
        }
    });
}

/// By an identity a client reaches no files outside of the source.
#[test]
fn an_identity_leads_nowhere_out_of_the_source() {
    let outer = tempfile::tempdir().unwrap();
    let [inside, outside] = ["inside", "outside"].map(|name| {
        let dir = outer.path().join(name);
        std::fs::create_dir(&dir).unwrap();
        std::fs::write(dir.join("file"), name).unwrap();
        dir
    });
    std::os::unix::fs::symlink(&outside, inside.join("link")).unwrap();
    // The file's identity as the server of the other directory tells it, with paths that lead there.
    let other = again(&outside);
    let entry = other.lookup(ROOT, "file").unwrap();
    let identity = &other.fs.identity(entry.node).unwrap()[..];
    let served = again(&inside);
    for path in [
        "file",
        "link/file",
        "../outside/file",
        "/file",
        "",
        "link/../../outside/file",
    ] {
        let forged = [identity, path.as_bytes()].concat();
        let found = now(served.fs.find(&ROOT_USER, &forged));
        assert_eq!(found.err(), Some(Errno::STALE), "{path}");
    }
    let absolute = [identity, outside.join("file").to_str().unwrap().as_bytes()].concat();
    let found = now(served.fs.find(&ROOT_USER, &absolute));
    assert_eq!(found.err(), Some(Errno::STALE));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    /// Bytes that clients make up find the file itself or nothing, and break nothing.
    #[test]
    fn made_up_identities(
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..6),
        cut in prop::option::of(any::<prop::sample::Index>()),
        more in prop::collection::vec(any::<u8>(), 0..20),
        noise in prop::collection::vec(any::<u8>(), 0..200),
    ) {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("file"), "").unwrap();
        let ino = dir.path().join("file").metadata().unwrap().ino();
        let served = again(dir.path());
        let entry = served.lookup(ROOT, "file").unwrap();
        let mut identity = whole(&served, entry.node);
        for (at, byte) in changes {
            let at = at.index(identity.len());
            identity[at] = byte;
        }
        if let Some(cut) = cut {
            identity.truncate(cut.index(identity.len()));
        }
        identity.extend_from_slice(&more);
        for bytes in [&identity, &noise] {
            if let Ok(found) = now(served.fs.find(&ROOT_USER, bytes)) {
                prop_assert_eq!(found.attr.ino, ino);
            }
        }
    }
}
