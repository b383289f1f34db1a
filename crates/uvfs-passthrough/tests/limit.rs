//! Many more files than descriptors. Alone in its binary: the limit is the process's.

mod common;

use common::*;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use uvfs_passthrough::Options;
use uvfs_server::fs::{Node, ROOT};
use uvfs_testing::{Need, has};

const LIMIT: u64 = 200;

/// The server doesn't run out of descriptors on a large tree.
#[test]
fn a_tree_has_ten_times_more_files_than_there_may_be_descriptors() {
    // Without root each inode takes a descriptor.
    if !has(&[Need::Root]) {
        return;
    }
    let old = getrlimit(Resource::Nofile);
    setrlimit(
        Resource::Nofile,
        Rlimit {
            current: Some(LIMIT),
            ..old
        },
    )
    .unwrap();
    on_each_store(|store, source| {
        if store == HELD {
            return;
        }
        for dir in 0..40 {
            std::fs::create_dir(source.join(format!("d{dir}"))).unwrap();
            for file in 0..50 {
                std::fs::write(source.join(format!("d{dir}/f{file}")), format!("{file}")).unwrap();
            }
        }
        let served = Served::new(source, Options::default());
        for round in 0..2 {
            for dir in served.list_all(ROOT, 30, true) {
                assert!(dir.node != Node(0));
                let files = served.list_all(dir.node, 30, true);
                assert_eq!(files.len(), 50);
                for file in files {
                    assert_eq!(
                        served.mode(file.node),
                        libc::S_IFREG | 0o644,
                        "{store} {round}"
                    );
                    let opened = served.open(file.node, libc::O_RDONLY).unwrap();
                    let data = served.read(opened.fh, 0, 10).unwrap();
                    assert_eq!(format!("f{}", String::from_utf8(data).unwrap()), file.name);
                    served.release(opened.fh);
                }
            }
        }
        assert_eq!(served.fs.known_inodes(), 2040);
        let open = std::fs::read_dir("/proc/thread-self/fd").unwrap().count();
        assert!(open < LIMIT as usize, "{open}");
    });
}
