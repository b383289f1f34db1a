//! A tree with a hundred times more files than the server may have descriptors.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use crate::harness::*;
use crate::own_process;

const DESCRIPTORS: u32 = 256;
const DIRECTORIES: usize = 100;
const FILES: usize = 256;

fn walked_under_a_descriptor_limit(transport: Transport) {
    if !has(&[Need::Mount(transport)]) {
        return;
    }
    let served = Served::new(&Serve::over(transport).descriptors(DESCRIPTORS));
    // At the source itself: it is the walk that is tested.
    for directory in 0..DIRECTORIES {
        let dir = served.source.join(directory.to_string());
        fs::create_dir(&dir).unwrap();
        for file in 0..FILES {
            fs::write(dir.join(file.to_string()), format!("{directory}/{file}")).unwrap();
        }
    }
    let report = served.scratch.path("report");
    let mut walk = own_process::call("walk", &served.mount.at, "", &report);
    served.mount.run_within(LATER, &mut walk).ok();
    let expected = (DIRECTORIES * FILES).to_string();
    assert_eq!(
        fs::read_to_string(report).unwrap(),
        format!("{expected} {expected}")
    );
    served.mount.unmount();
}

/// Walks, stats and reads the tree twice; reports how many files were right each time.
pub fn walk(dir: &Path, _: &str) -> String {
    [1, 2].map(|_| walk_once(dir).to_string()).join(" ")
}

fn walk_once(root: &Path) -> usize {
    let mut right = 0;
    for directory in fs::read_dir(root).unwrap() {
        for file in fs::read_dir(directory.unwrap().path()).unwrap() {
            let path = file.unwrap().path();
            let expected = path.strip_prefix(root).unwrap().to_str().unwrap();
            let meta = path
                .symlink_metadata()
                .unwrap_or_else(|e| panic!("{expected}: {e}"));
            let content = fs::read_to_string(&path).unwrap_or_else(|e| panic!("{expected}: {e}"));
            assert_eq!((content.as_str(), meta.nlink()), (expected, 1));
            assert_eq!(meta.len(), expected.len() as u64);
            right += 1;
        }
    }
    right
}

/// A large tree is found again as it was made.
#[test]
fn walked_under_a_descriptor_limit_over_dev() {
    walked_under_a_descriptor_limit(Transport::Dev);
}

/// The same over io_uring.
#[test]
fn walked_under_a_descriptor_limit_over_uring() {
    walked_under_a_descriptor_limit(Transport::Uring);
}
