//! The `uvfs` command and the file system that it mounts, tested as a user would use them: the
//! server is a process of its own, every use of the mount is in another one, and every wait has
//! a deadline.
//!
//! Needs root and /dev/fuse; a test that misses something says so and is skipped, except where
//! the environment has `CI`. Run by `./test` at the root of the repository, which installs the
//! programs that are used here. See [`harness`] for the environment's variables.

mod aio;
mod around;
mod backed;
mod bench;
mod clients;
mod command_line;
mod direct;
mod doctor;
mod failing_host;
#[cfg(feature = "object")]
#[allow(dead_code, reason = "shared with the tests of mounted stores")]
#[path = "../../../uvfs-object/tests/mounted/fake.rs"]
mod fake;
mod fsx;
mod full_disk;
mod harness;
mod hostile;
mod idle;
mod kill_9;
mod killed_server;
mod listings;
mod lock_waiters;
mod mount8;
mod observe;
mod outcomes;
mod own_process;
mod pjdfstest;
mod preload;
mod programs;
#[cfg(feature = "object")]
#[allow(dead_code, reason = "shared with the tests of mounted stores")]
#[path = "../../../uvfs-object/tests/mounted/proxy.rs"]
mod proxy;
mod read_only;
mod refused;
#[cfg(feature = "object")]
mod remote;
mod removed_on_the_host;
mod requests;
mod run_around;
mod run_files;
mod run_programs;
mod semantics;
mod small_files;
#[cfg(feature = "object")]
#[allow(dead_code, reason = "shared with the tests of mounted stores")]
#[path = "../../../uvfs-object/tests/mounted/stores.rs"]
mod stores;
mod streams;
mod survive;
mod tree;
mod uncached;
mod unprivileged;
mod view;
mod watch;
