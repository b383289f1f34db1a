//! The modules of the crate, from the top down.

/// No module uses one above it.
#[test]
fn dependencies_of_modules_go_down() {
    let order = [
        "image", "repair", "check", "tools", "mkfs", "read", "log", "overlay", "walk", "bulk",
        "blocks", "geometry", "error", "format",
    ];
    uvfs_testing::assert_arrows_go_down(env!("CARGO_MANIFEST_DIR"), &order);
}
