//! Any bytes as the directory entries that a server sends.
#![no_main]

use libfuzzer_sys::fuzz_target;
use uvfs_proto::reply::{DirBuf, dirents};

fuzz_target!(|bytes: &[u8]| {
    let mut buf = vec![0; bytes.len()];
    let mut dir = DirBuf::new(&mut buf);
    let mut entries = vec![];
    for (entry, name) in dirents(bytes).map_while(Result::ok) {
        dir.push(entry.ino, entry.off, entry.r#type, name)
            .expect("it came from as many bytes");
        entries.push((entry, name));
    }
    let len = dir.len();
    assert!(dirents(&buf[..len]).map(Result::unwrap).eq(entries));
});
