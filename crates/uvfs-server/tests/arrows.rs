//! The modules of the server, from the top down.

/// No module uses one above it.
#[test]
fn dependencies_of_modules_go_down() {
    let order = [
        "mounted",
        "server",
        "transport",
        "client",
        "pipeline",
        "stage",
        "dispatch",
        "control slow",
        "session",
        "drop_behind",
        "coherence",
        "survive",
        "request",
        "lease",
        "stats",
        "switch",
        "reply",
        "token",
        "interrupt",
        "signals",
        "layers",
        "mount notify fs",
        "guide",
    ];
    uvfs_testing::assert_arrows_go_down(env!("CARGO_MANIFEST_DIR"), &order);
}
