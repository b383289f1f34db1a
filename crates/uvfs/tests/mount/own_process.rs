//! Functions of this test program that run in a process of their own, so that a mount that
//! hangs stops that process and not the tests: the program starts itself with a function's
//! name in the environment.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

#[cfg(feature = "object")]
use crate::remote;
use crate::{
    backed, clients, direct, failing_host, full_disk, hostile, kill_9, listings, lock_waiters,
    mount8, outcomes, removed_on_the_host, requests, semantics, tree, uncached, view, watch,
};

/// A function: from the directory to work in and an argument to a report.
type Function = fn(&Path, &str) -> String;

const FUNCTIONS: &[(&str, Function)] = &[
    ("scenes", semantics::scenes::play),
    ("walk", tree::walk),
    ("lock_waiters", lock_waiters::lock_waiters),
    ("fill", full_disk::fill),
    ("while_changed", listings::while_changed),
    ("hold_and_read", removed_on_the_host::hold_and_read),
    ("one_file", clients::one_file),
    ("names", clients::names),
    ("random_names", clients::random_names),
    ("hostile", clients::hostile),
    ("guest", clients::guest),
    ("greedy", clients::greedy),
    ("until_the_end", clients::until_the_end),
    ("until_it_is_back", clients::until_it_is_back),
    ("refused", clients::refused),
    ("stream", uncached::stream),
    ("backed_work", backed::work),
    ("direct_worker", direct::worker),
    ("direct_opener", direct::opener),
    ("direct_leases", direct::leases),
    ("direct_holder", direct::holder),
    ("host_changes", watch::host_changes),
    ("host_races", watch::races),
    ("host_look", watch::look),
    ("host_mounts", watch::mounts_below),
    ("make_files", requests::make),
    ("beside", requests::beside),
    ("access_times", mount8::access_times),
    ("outcomes", outcomes::all),
    ("executed_after", outcomes::executed_after),
    ("kill_9", kill_9::load),
    ("failing", failing_host::failing),
    ("leaseholder", hostile::leaseholder),
    ("crowd", hostile::crowd),
    ("crowd_of_open_files", hostile::crowd_of_open_files),
    ("attach_with_hung_files", hostile::attach_with_hung_files),
    ("signalled", hostile::signalled),
    ("grown", view::grown),
    ("beside_direct_writer", view::beside_direct_writer),
    #[cfg(feature = "object")]
    ("store_by_paths", remote::clients::by_paths),
    #[cfg(feature = "object")]
    ("store_closes", remote::written::closes),
    #[cfg(feature = "object")]
    ("store_one_name", remote::written::one_name),
    #[cfg(feature = "object")]
    ("store_random_calls", remote::written::random_calls),
];

/// The command that runs a function. The report goes to the file `report`.
pub fn call(function: &str, dir: &Path, argument: &str, report: &Path) -> Command {
    let mut command = Command::new(std::env::current_exe().expect("this program"));
    command
        .args([
            "--exact",
            "own_process::entry",
            "--nocapture",
            "--test-threads=1",
        ])
        .env("RUST_BACKTRACE", "0")
        .env("UVFS_TEST_CHILD", function)
        .env("UVFS_TEST_CHILD_DIR", dir)
        .env("UVFS_TEST_CHILD_ARGUMENT", argument)
        .env("UVFS_TEST_CHILD_REPORT", report);
    command
}

/// Does nothing when run as a test.
#[test]
fn entry() {
    let Ok(name) = std::env::var("UVFS_TEST_CHILD") else {
        return;
    };
    let path = |name| PathBuf::from(std::env::var_os(name).expect(name));
    let (_, function) = FUNCTIONS
        .iter()
        .find(|f| f.0 == name)
        .expect("a known function");
    let argument = std::env::var("UVFS_TEST_CHILD_ARGUMENT").expect("an argument");
    let report = function(&path("UVFS_TEST_CHILD_DIR"), &argument);
    fs::write(path("UVFS_TEST_CHILD_REPORT"), report).expect("report");
}
