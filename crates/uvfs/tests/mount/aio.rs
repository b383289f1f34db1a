//! Programs that use libaio or io_uring under `uvfs run`.

use std::fs;
use std::path::Path;

use crate::harness::*;
use crate::preload::{How, served_any, under};

fn can() -> bool {
    has(&[Need::Mount(Transport::Dev), Need::Uvfs])
}

/// Every call of libaio gives the result that it gives without `uvfs run`.
#[test]
fn libaio_answers_as_the_kernel_does() {
    if !can() || !has(&[Need::Program("cc")]) {
        return;
    }
    if !Path::new("/usr/include/libaio.h").exists() {
        return uvfs_testing::skip("needs libaio.h (libaio-dev), which ./test installs");
    }
    for transport in transports() {
        // Direct files would be the kernel's otherwise.
        let served = Served::new(&Serve::over(transport).option("nopassthrough"));
        let (code, program) = (served.scratch.path("aio.c"), served.scratch.path("aio"));
        fs::write(&code, include_str!("programs/aio.c")).unwrap();
        let build = "cc -O1 -o \"$1\" \"$2\" -laio -lpthread";
        run_within(LATER, &mut shell(build, &[&program, &code])).ok();
        let other = served.scratch.path("other");
        let args = [program.as_path(), &served.at("file"), &other];
        let script = "exec \"$1\" \"$2\" \"$3\"";
        let plain = served.mount.run_within(LATER, &mut shell(script, &args));
        assert!(plain.status.success(), "{plain}");
        let outcome = served
            .mount
            .run_within(LATER, &mut under(How::Eager, script, &args));
        assert!(outcome.status.success(), "{outcome}");
        assert_eq!(outcome.stdout, plain.stdout, "{outcome}");
        assert!(served_any(&outcome), "{outcome}");
        assert!(!outcome.stderr.contains("through the kernel"), "{outcome}");
    }
}

/// fio's checksums hold, and calls that are not served, as io_uring's, agree with those that are.
#[test]
fn fio_verifies_asynchronous_engines() {
    if !can() || !has(&[Need::Program("fio")]) {
        return;
    }
    let served = Served::new(&Serve::over(Transport::Dev).option("nopassthrough"));
    let uring = fs::read_to_string("/proc/sys/kernel/io_uring_disabled");
    let engines: &[_] = match uring.as_deref().map(str::trim) {
        Ok("0") if sandbox::no_io_uring().is_none() => &["libaio", "io_uring"],
        _ => &["libaio"],
    };
    for engine in engines {
        for (direct, depth) in [(0, 1), (0, 32), (1, 1), (1, 32)] {
            let script = format!(
                "fio --name=j --directory=\"$1\" --ioengine={engine} --direct={direct} \
                 --iodepth={depth} --rw=randrw --bsrange=512-16k --size=8m --numjobs=2 \
                 --verify=crc32c --verify_fatal=1 --end_fsync=1 --randseed=7 \
                 --verify_state_save=0 --minimal >/dev/null"
            );
            let mut command = under(How::Eager, &script, &[&served.mount.at]);
            let outcome = served.mount.run_within(LATER, &mut command);
            assert!(
                outcome.status.success(),
                "{engine} {direct} {depth}: {outcome}"
            );
            assert_eq!(served_any(&outcome), *engine == "libaio", "{outcome}");
        }
    }
}
