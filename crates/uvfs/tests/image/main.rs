//! The commands on XFS images, against the kernel's view of the same image: `ls`, `cat`, `stat`,
//! `cp`, `check`, `mkfs`, and `mount` over both transports.
//!
//! Needs root, loop devices, mkfs.xfs, XFS in the kernel and, for mounting, /dev/fuse; a test that
//! misses something says so and is skipped, except where the environment has `CI`. Run by `./test`
//! at the root of the repository, which installs the programs that are used here.

#[allow(
    dead_code,
    unused_imports,
    reason = "shared with the tests of mounted directories"
)]
#[path = "../mount/harness.rs"]
mod harness;

mod check;
mod commands;
mod counts;
#[cfg(feature = "object")]
#[allow(dead_code, reason = "shared with the tests of mounted stores")]
#[path = "../../../uvfs-object/tests/mounted/fake.rs"]
mod fake;
mod fixture;
mod logdev;
mod mkfs;
#[cfg(feature = "object")]
#[allow(dead_code, reason = "shared with the tests of mounted stores")]
#[path = "../../../uvfs-object/tests/mounted/proxy.rs"]
mod proxy;
mod repair;
mod served;
#[cfg(feature = "object")]
mod stored;
#[cfg(feature = "object")]
#[allow(dead_code, reason = "shared with the tests of mounted stores")]
#[path = "../../../uvfs-object/tests/mounted/stores.rs"]
mod stores;
mod survive;
