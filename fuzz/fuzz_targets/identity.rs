//! Any bytes as the identity and path of a file (the payload of FIND): they find a file below the source
//! that has this identity, or nothing.
//!
//! The input's first byte chooses bytes as they come, or an identity that a server told, with another
//! name or a few other bytes: few inputs would get past the comparison otherwise.
#![no_main]

#[path = "../../crates/uvfs-passthrough/tests/taken_over/now.rs"]
mod now;

use std::path::Path;
use std::sync::OnceLock;

use libfuzzer_sys::fuzz_target;
use now::{CALLER, now};
use uvfs_passthrough::{Options, Passthrough};
use uvfs_server::FileSystem;
use uvfs_server::fs::{ClientSupport, Entry, ROOT};

/// Bytes of an identity before the file's handle, whose length is the last four of them.
const FIXED: usize = 36;

fn serve(source: &Path) -> Passthrough {
    Passthrough::open(source, Options::default()).expect("a directory can be served")
}

fn lookup(fs: &Passthrough, path: &str) -> Entry {
    let names = path.split('/').filter(|name| !name.is_empty());
    let first: Option<Entry> = None;
    names
        .fold(first, |parent, name| {
            let parent = parent.map_or(ROOT, |entry| entry.node);
            let name = std::ffi::CString::new(name).expect("names have no zeros");
            Some(now(fs.lookup(&CALLER, parent, &name)).expect("it was made"))
        })
        .expect("a path has names")
}

/// A served directory beside one that is not, and identities of what is in both.
struct World {
    fs: Passthrough,
    identities: Vec<Vec<u8>>,
    /// Inode numbers of everything that is served.
    served: Vec<u64>,
    // Goes at the end.
    _dir: tempfile::TempDir,
}

fn world() -> &'static World {
    static WORLD: OnceLock<World> = OnceLock::new();
    WORLD.get_or_init(|| {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let [inside, outside] = ["inside", "outside"].map(|name| dir.path().join(name));
        for dir in [&inside, &outside] {
            std::fs::create_dir_all(dir.join("dir/deep")).unwrap();
            for name in ["file", "dir/file", "dir/deep/file", "renamed", "removed"] {
                std::fs::write(dir.join(name), name).unwrap();
            }
        }
        std::os::unix::fs::symlink(&outside, inside.join("link")).unwrap();
        let (fs, other) = (serve(&inside), serve(&outside));
        let mut identities = vec![];
        let mut served = vec![];
        for fs in [&fs, &other] {
            identities.extend(fs.identity(ROOT));
            let paths = [
                "file",
                "dir",
                "dir/file",
                "dir/deep/file",
                "renamed",
                "removed",
            ];
            for entry in paths.map(|path| lookup(fs, path)) {
                let parts = [fs.identity(entry.node), fs.path(entry.node)];
                identities.push(parts.map(Option::unwrap_or_default).concat());
                served.push(entry.attr.ino);
            }
        }
        served.truncate(served.len() / 2);
        served.push(now(fs.getattr(&CALLER, ROOT, None)).unwrap().attr.ino);
        served.push(lookup(&fs, "link").attr.ino);
        served.push(lookup(&fs, "dir/deep").attr.ino);
        std::fs::rename(inside.join("renamed"), inside.join("dir/moved")).unwrap();
        std::fs::remove_file(inside.join("removed")).unwrap();
        World {
            fs: serve(&inside),
            identities,
            served,
            _dir: dir,
        }
    })
}

fn handle_len(identity: &[u8]) -> usize {
    u32::from_ne_bytes(identity[FIXED - 4..FIXED].try_into().unwrap()) as usize
}

/// The identity that an input stands for.
fn identity(world: &World, input: &[u8]) -> Vec<u8> {
    let Some((&choice, rest)) = input.split_first() else {
        return vec![];
    };
    let (how, which) = (choice & 3, usize::from(choice >> 2));
    let told = &world.identities[which % world.identities.len()];
    let head = FIXED + handle_len(told);
    match how {
        0 => rest.to_vec(),
        // Another name.
        1 => [&told[..head], rest].concat(),
        // Another handle, of any length.
        2 => {
            let (len, handle) = rest.split_first().unwrap_or((&0, &[]));
            let len = u32::from(*len) * handle.len() as u32 / 128;
            [&told[..FIXED - 4], &len.to_ne_bytes(), handle].concat()
        }
        // Other bytes here and there.
        _ => {
            let mut identity = told.clone();
            for change in rest.chunks_exact(2) {
                let at = usize::from(change[0]);
                match identity.get_mut(at) {
                    Some(byte) => *byte ^= change[1],
                    None => identity.truncate(usize::from(change[1])),
                }
            }
            identity
        }
    }
}

fuzz_target!(|input: &[u8]| {
    let world = world();
    let identity = identity(world, input);
    let Ok(found) = now(world.fs.find(&CALLER, &identity)) else {
        return;
    };
    assert!(
        world.served.contains(&found.attr.ino),
        "what was found is not served"
    );
    // The same but for the name, which may be another one, and the handle, which it may do without: a
    // server that may not open handles tells none.
    let told = world.fs.identity(found.node).expect("it was found");
    assert_eq!(identity[..FIXED - 8], told[..FIXED - 8]);
    let head = FIXED + handle_len(&identity);
    if head > FIXED {
        assert_eq!(identity[..head], told[..head]);
    }
    if found.node != ROOT {
        world.fs.forget(found.node, 1);
    }
});
