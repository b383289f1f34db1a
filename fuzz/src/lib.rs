//! What several fuzz targets share. A library, so that the server and the client are compiled once for all of them.

#[path = "../../crates/uvfs-xfs/tests/common/mutate.rs"]
pub mod mutate;
#[path = "../../crates/uvfs-client/tests/client/fuzz/targets.rs"]
pub mod targets;
