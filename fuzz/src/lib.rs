//! Code that several fuzz targets share. It is a library, so that cargo compiles the server and the client once for all
//! targets.

#[path = "../../crates/uvfs-client/tests/client/common/mod.rs"]
mod common;
#[path = "../../crates/uvfs-xfs/tests/mkfs/members.rs"]
pub mod members;
#[path = "../../crates/uvfs-xfs/tests/common/mutate.rs"]
pub mod mutate;
#[path = "../../crates/uvfs-client/tests/client/fuzz/targets.rs"]
pub mod targets;
