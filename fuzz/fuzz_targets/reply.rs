//! Any bytes as what a server sends: notifications and directory entries.
#![no_main]

use libfuzzer_sys::fuzz_target;
use uvfs_proto::abi::OutHeader;
use uvfs_proto::notify::Notification;
use uvfs_proto::reply::{DirBuf, direntpluses, dirents};

fuzz_target!(|input: &[u8]| {
    let Some((&choice, bytes)) = input.split_first() else {
        return;
    };
    if let Ok(notification) = Notification::parse(i32::from(choice), bytes) {
        let mut encoded = vec![];
        notification
            .encode(&mut encoded)
            .expect("what was parsed can be encoded");
        let body = &encoded[size_of::<OutHeader>()..];
        assert_eq!(
            Notification::parse(i32::from(choice), body),
            Ok(notification)
        );
    }

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

    let mut dir = DirBuf::new(&mut buf);
    let mut entries = vec![];
    for (entry, name) in direntpluses(bytes).map_while(Result::ok) {
        let dirent = entry.dirent;
        dir.push_plus(
            &entry.entry_out,
            dirent.ino,
            dirent.off,
            dirent.r#type,
            name,
        )
        .expect("it came from as many bytes");
        entries.push((entry, name));
    }
    let len = dir.len();
    assert!(direntpluses(&buf[..len]).map(Result::unwrap).eq(entries));
});
