//! What the commands count in an image: the same, and what the kernel and xfs_db say.

use serde_json::Value;

use crate::fixture::*;
use crate::harness::*;

/// Features, as arguments of mkfs.xfs.
const FEATURES: [&str; 6] = [
    "-m reflink=1",
    "-m rmapbt=1,reflink=1 -b size=1024",
    "-m finobt=0,reflink=0,inobtcount=0 -i sparse=0",
    "-m bigtime=0 -n size=16384",
    "-i nrext64=1,size=1024 -s size=4096",
    "-m rmapbt=1 -d agcount=3 -b size=16384 -i size=2048",
];

fn counted(command: &[&str], image: &str) -> Value {
    let said = run(uvfs().args(command).arg("--json").arg(image));
    // A repair that only would replay a log says so by its exit status.
    serde_json::from_str(&said.stdout).unwrap_or_else(|e| panic!("{e}: {said}"))
}

/// Asserts that check and repair count what xfs_db finds in the superblock, and give the inodes in use, blocks and free
/// blocks.
#[track_caller]
fn counts(image: &str) -> [u64; 3] {
    let of = |v: &Value| ["inodes", "blocks", "free_blocks"].map(|name| v[name].as_u64().unwrap());
    let check = counted(&["check"], image);
    let mended = counted(&["repair", "-n"], image);
    assert_eq!(of(&check), of(&mended), "check and repair");
    let fields = "p icount ifree dblocks fdblocks";
    let said = run(&mut command(
        "xfs_db",
        ["-r", "-c", "sb 0", "-c", fields, image],
    ))
    .ok();
    let numbers: Vec<u64> = (said.lines())
        .map(|line| line.rsplit(' ').next().unwrap().parse().unwrap())
        .collect();
    let [icount, ifree, dblocks, fdblocks] = numbers[..] else {
        panic!("{said}");
    };
    assert_eq!(of(&check), [icount - ifree, dblocks, fdblocks], "xfs_db");
    assert_eq!(check["allocated_inodes"], icount);
    of(&check)
}

/// mkfs, check, repair, ls and stat count the same inodes, blocks and names in images with each set of features.
#[test]
fn all_commands_count_the_same() {
    if !has(&NEEDS) || !has(&[Need::Program("xfs_db")]) {
        return;
    }
    /// Of the realtime section; no directory leads to them.
    const HIDDEN: u64 = 2;
    let scratch = Scratch::new();
    let image = Image::empty(&scratch, "counted");
    for features in FEATURES {
        let mut make = command("mkfs.xfs", ["-q", "-f"]);
        run(make.args(features.split(' ')).arg(&image.path)).ok();
        counts(image.arg());
        image.write(FILL);
        let [inodes, ..] = counts(image.arg());
        let kernel = image.mount("ro,noatime");
        let count = |script: &str| -> u64 {
            let said = run(shell(script, &[]).current_dir(&kernel)).ok();
            said.trim().parse().unwrap()
        };
        assert_eq!(
            count("find . -printf '%i\\n' | sort -u | wc -l") + HIDDEN,
            inodes,
            "{features}"
        );
        let names = count("find . -mindepth 1 | wc -l");
        let listed = run(uvfs().args(["ls", "-R", "--json", image.arg(), "/"])).ok();
        let listed: Value = serde_json::from_str(&listed).unwrap();
        let listed = listed["entries"].as_array().unwrap();
        let below = listed.iter().filter(|e| e["path"] != "/").count();
        assert_eq!(below as u64, names, "{features}");
        let root = run(uvfs().args(["stat", "--json", image.arg(), "/"])).ok();
        let root: Value = serde_json::from_str(&root).unwrap();
        assert_eq!(root["nlink"], count("stat -c %h ."), "{features}");
        let made = scratch.path("made");
        let (made, from) = (made.to_str().unwrap(), kernel.to_str().unwrap());
        let mkfs = ["mkfs", "--force", "--from", from, "--size", "350M"];
        let dry = counted(&[&mkfs[..], &["--dry-run"]].concat(), made);
        let of = counted(&mkfs, made);
        image.unmount(&kernel);
        assert_eq!(dry["inodes"], of["inodes"], "{features}");
        let told = ["inodes", "blocks", "free_blocks"].map(|name| of[name].as_u64().unwrap());
        assert_eq!(told, counts(made), "{features}");
        assert_eq!(told[0], inodes, "{features}");
        // With a dirty log, as after the kernel's mount.
        image.crash();
        let dirty = counted(&["check"], image.arg());
        let mended = counted(&["repair", "-n"], image.arg());
        let at = image.mount("rw");
        image.unmount(&at);
        let [inodes, blocks, free] = counts(image.arg());
        for counted in [dirty, mended] {
            assert_eq!(counted["inodes"], inodes, "{features}");
            assert_eq!(counted["blocks"], blocks, "{features}");
            // Blocks behind the ends of files, and unlinked inodes, the kernel frees at mount.
            assert_eq!(counted["free_blocks"], free, "{features}");
        }
    }
}
