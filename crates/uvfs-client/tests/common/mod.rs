//! What several tests of the client need.

use std::time::Duration;

use uvfs_client::OpenOptions;

/// Generous: the machine may be loaded.
pub const DEADLINE: Duration = Duration::from_secs(60);

/// To read and write, made if need be.
pub fn rw() -> OpenOptions {
    OpenOptions::new().read(true).write(true).create(true)
}

/// Numbers that look random, the same each time.
pub struct Random(pub u64);

impl Random {
    /// The next one.
    pub fn below(&mut self, n: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut x = self.0;
        x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        (x ^ (x >> 31)) % n
    }
}
