//! How many requests of each kind the kernel sends for what real programs do.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;

use rustix::fs::{Gid, Mode, OFlags, Timespec, Timestamps, UTIME_OMIT, Uid};
use rustix::mm::{MapFlags, ProtFlags};

use crate::harness::*;
use crate::own_process;

/// Files that a program makes.
const FILES: u32 = 100;

/// How often each request came, as the server counts.
fn counts(mount: &Mount) -> BTreeMap<String, u64> {
    let text = run(uvfs().args(["stats", "--json"]).arg(&mount.at)).ok();
    let report: serde_json::Value = serde_json::from_str(&text).expect("JSON");
    let ops = report["ops"].as_array().expect("requests");
    ops.iter()
        .map(|op| {
            let name = op["name"].as_str().expect("a name").to_string();
            (name, op["count"].as_u64().expect("a count"))
        })
        .collect()
}

/// Makes files as the program with this name does, in `dir`.
pub fn make(dir: &Path, program: &str) -> String {
    for number in 0..FILES {
        let path = dir.join(format!("file{number}"));
        let create = |path: &Path| {
            let mut options = File::options();
            let options = options.write(true).custom_flags(libc::O_EXCL);
            options.create_new(true).mode(0o600).open(path).unwrap()
        };
        match program {
            "git" => {
                fs::symlink_metadata(&path).unwrap_err();
                let mut file = create(&path);
                file.write_all(&[b'g'; 3000]).unwrap();
                assert_eq!(rustix::fs::fstat(&file).unwrap().st_size, 3000);
            }
            "tar" => {
                let mut file = create(&path);
                file.write_all(&[b't'; 9728]).unwrap();
                file.write_all(&[b't'; 512]).unwrap();
                let time = |tv_nsec| Timespec { tv_sec: 1, tv_nsec };
                let times = Timestamps {
                    last_access: time(UTIME_OMIT as _),
                    last_modification: time(0),
                };
                rustix::fs::futimens(&file, &times).unwrap();
                let (uid, gid) = (Uid::from_raw(1), Gid::from_raw(1));
                rustix::fs::fchown(&file, Some(uid), Some(gid)).unwrap();
                rustix::fs::fchmod(&file, Mode::from(0o644)).unwrap();
            }
            // As `cat >file`.
            "shell" => {
                let mut options = File::options();
                let mut file = options.write(true).create(true).truncate(true).open(&path);
                file.as_mut().unwrap().write_all(&[b's'; 1 << 19]).unwrap();
            }
            _ => panic!("{program}"),
        }
    }
    String::new()
}

fn programs_cost_few_requests(transport: Transport) {
    if !has(&[Need::Mount(transport), Need::Uvfs]) {
        return;
    }
    // No other request may come, but for releases, which come late.
    let expected: [(&str, &[(&str, u64)]); 3] = [
        (
            "git",
            &[("LOOKUP", 2), ("CREATE", 1), ("WRITE", 1), ("GETATTR", 1)],
        ),
        (
            "tar",
            &[
                ("LOOKUP", 1),
                ("CREATE", 1),
                ("WRITE", 2),
                ("SETATTR", 3),
                // A change of owners takes a file's capabilities away.
                ("GETXATTR", 1),
            ],
        ),
        (
            "shell",
            &[
                ("LOOKUP", 1),
                ("CREATE", 1),
                // After one large file the next ones have a backing file. Before its first write the kernel asks
                // for capabilities.
                ("GETXATTR", 1),
                // RELEASE may come after the next CREATE.
                ("WRITE", 1),
            ],
        ),
    ];
    for (program, kinds) in expected {
        // For one user: with permission checks the kernel asks for the directory's mode again after each
        // file. Slow machines must not outlive attributes.
        let mut serve = Serve::over(transport);
        serve.options = vec!["attr_timeout=600".into(), "entry_timeout=600".into()];
        let served = Served::new(&serve);
        let report = served.scratch.path("report");
        let before = counts(&served.mount);
        let mut make = own_process::call("make_files", &served.mount.at, program, &report);
        served.mount.run(&mut make).ok();
        let after = counts(&served.mount);
        for (kind, count) in after {
            if ["RELEASE", "FORGET", "BATCH_FORGET"].contains(&kind.as_str()) {
                continue;
            }
            let came = count - before.get(&kind).copied().unwrap_or(0);
            let each = kinds.iter().find(|it| it.0 == kind).map_or(0, |it| it.1);
            // Starting and ending the program, and asking for the counts, costs a few.
            let most = each * u64::from(FILES) + 12;
            assert!(came <= most, "{program}: {came} {kind}, not {most}");
        }
        let size = match program {
            "git" => 3000,
            "tar" => 10240,
            _ => 1 << 19,
        };
        for number in 0..FILES {
            let host = served.source.join(format!("file{number}"));
            assert_eq!(fs::metadata(host).unwrap().len(), size);
        }
        served.mount.unmount().ok();
    }
}

/// Everyday programs cost no more requests than are listed here: each shows as time.
#[test]
fn programs_cost_few_requests_dev() {
    programs_cost_few_requests(Transport::Dev);
}

/// The same over io_uring.
#[test]
fn programs_cost_few_requests_uring() {
    programs_cost_few_requests(Transport::Uring);
}

/// Data written through a descriptor for writing only shows at once by all other means, and the
/// other way round.
pub fn beside(dir: &Path, host: &str) -> String {
    let path = dir.join("file");
    let writes = File::options().write(true).create_new(true).open(&path);
    let writer = writes.unwrap();
    let reader = File::open(&path).unwrap();
    let both = File::options().read(true).write(true).open(&path).unwrap();
    let mut appender = File::options().append(true).open(&path).unwrap();
    let len = 8 << 12;
    let mut expected = vec![0_u8; len];
    writer.write_all_at(&expected, 0).unwrap();
    // SAFETY: a new mapping of a file that stays as long as it is used.
    let map = unsafe {
        let (prot, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED);
        rustix::mm::mmap(std::ptr::null_mut(), len, prot, flags, both.as_fd(), 0).unwrap()
    };
    let map = map.cast::<u8>();
    let mut random = 1_u32;
    let mut below = |end: u32| {
        random = random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        ((random >> 16) % end) as usize
    };
    for round in 0..400 {
        let byte = round as u8 | 1;
        let at = below(len as u32 - 5000);
        let part = 1 + below(5000);
        let bytes = vec![byte; part];
        match round % 4 {
            0 | 1 => writer.write_all_at(&bytes, at as u64).unwrap(),
            2 => both.write_all_at(&bytes, at as u64).unwrap(),
            // SAFETY: `at` and `part` are within the mapping.
            _ => unsafe {
                map.add(at).write_bytes(byte, part);
                rustix::mm::msync(map.cast(), len, rustix::mm::MsyncFlags::SYNC).unwrap();
            },
        }
        expected[at..at + part].fill(byte);
        if round % 7 == 0 {
            appender.write_all(b"end").unwrap();
            expected.extend(b"end");
            assert_eq!(writer.metadata().unwrap().len(), expected.len() as u64);
        }
        if round % 50 == 49 {
            writer.set_len(len as u64).unwrap();
            expected.truncate(len);
        }
        let mut seen = vec![0; expected.len()];
        reader.read_exact_at(&mut seen, 0).unwrap();
        assert!(seen == expected, "read in round {round}");
        // SAFETY: the mapping has `len` bytes; no other thread uses it now.
        let mapped = unsafe { std::slice::from_raw_parts(map, len) };
        assert!(mapped == &expected[..len], "mapped in round {round}");
        assert!(fs::read(host).unwrap() == expected, "host in round {round}");
    }
    // SAFETY: the mapping above, no longer used.
    unsafe { rustix::mm::munmap(map.cast(), len).unwrap() };

    flags_are_switched(&writer, &reader, &mut expected);

    // One call with many parts stays one.
    let parts = vec![std::io::IoSlice::new(b"part"); 1000];
    let written = (&writer).write_vectored(&parts).unwrap();
    assert_eq!(written, 4000);
    expected.extend(b"part".repeat(1000));
    assert!(fs::read(host).unwrap() == expected, "many parts");
    String::new()
}

/// Switches O_DIRECT and O_APPEND of an open file, whose content is `expected`, on and off.
fn flags_are_switched(mut writer: &File, mut reader: &File, expected: &mut Vec<u8>) {
    let block = vec![b'd'; 8192];
    let aligned = block.as_ptr().align_offset(4096);
    let block = &block[aligned..aligned + 4096];
    rustix::fs::fcntl_setfl(writer, OFlags::DIRECT).unwrap();
    writer.write_all_at(block, 4096).unwrap();
    rustix::fs::fcntl_setfl(writer, OFlags::empty()).unwrap();
    writer.write_all_at(b"odd", 1).unwrap();
    rustix::fs::fcntl_setfl(writer, OFlags::APPEND).unwrap();
    writer.seek(SeekFrom::Start(0)).unwrap();
    writer.write_all(b"appended").unwrap();
    expected[4096..8192].fill(b'd');
    expected[1..4].copy_from_slice(b"odd");
    expected.extend(b"appended");
    let mut seen = Vec::new();
    reader.read_to_end(&mut seen).unwrap();
    assert!(seen == *expected, "after the switches");
}

/// A reader sees writes that came another way: by a mapping, directly, or appended.
#[test]
fn writers_and_readers_of_all_kinds_agree() {
    for transport in transports() {
        if !has(&[Need::Mount(transport)]) {
            continue;
        }
        for option in ["", "cache=always", "passthrough=all"] {
            let scratch = Scratch::new();
            for (name, source) in [
                ("tmpfs", scratch.tmpfs("tmpfs", "64m")),
                ("ext4", scratch.ext4("ext4")),
            ] {
                let at = scratch.dir(&format!("mount-{name}"));
                let mount = Mount::new(&Serve::over(transport).option(option), &source, &at);
                let (report, host) = (scratch.path("report"), source.join("file"));
                let host = host.to_str().unwrap();
                mount
                    .run(&mut own_process::call("beside", &at, host, &report))
                    .ok();
                mount.unmount().ok();
            }
        }
    }
}
