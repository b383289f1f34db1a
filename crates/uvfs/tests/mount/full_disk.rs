//! A source without room.

use std::fs::{self, File};
use std::io::Write;
use std::path::Path;

use rustix::io::Errno;

use crate::harness::*;
use crate::own_process;

/// Writes until it fails, or closing or fsync does; reports the error and what came of it.
pub fn fill(dir: &Path, _: &str) -> String {
    let path = dir.join("large");
    let mut file = File::create(&path).unwrap();
    let block = vec![7; 65536];
    let written = (0..256).try_for_each(|_| file.write_all(&block));
    let result = written.and_then(|()| file.sync_all());
    let error = result.map_or_else(|e| e.raw_os_error().unwrap_or(0), |()| 0);
    drop(file);
    fs::remove_file(&path).unwrap();
    let again = fs::write(dir.join("small"), vec![8; 65536]).is_ok();
    let content = fs::read(dir.join("small")).unwrap_or_default();
    format!("{error} {again} {}", content == vec![8; 65536])
}

fn source_full(transport: Transport) {
    if !has(&[Need::Mount(transport)]) {
        return;
    }
    let scratch = Scratch::new();
    let source = scratch.tmpfs("source", "2m");
    let at = scratch.dir("mount");
    for option in ["", "writeback", "direct_io"] {
        let mount = Mount::new(&Serve::over(transport).option(option), &source, &at);
        let report = scratch.path("report");
        mount
            .run(&mut own_process::call("fill", &at, "", &report))
            .ok();
        let expected = format!("{} true true", Errno::NOSPC.raw_os_error());
        assert_eq!(
            fs::read_to_string(report).unwrap(),
            expected,
            "-o {option:?}"
        );
        mount.unmount();
    }
}

/// A full source gives ENOSPC, and loses no data that a write has acknowledged.
#[test]
fn source_full_dev() {
    source_full(Transport::Dev);
}

/// The same over io_uring.
#[test]
fn source_full_uring() {
    source_full(Transport::Uring);
}
