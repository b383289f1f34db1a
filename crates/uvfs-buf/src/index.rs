//! The table that finds a buffer by its address: a lock for each group of sectors.

use crate::inner::Inner;
use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::{Arc, Mutex};

/// Disk addresses are multiples of the block size and near each other: multiply, and fold the
/// high half in.
#[derive(Default)]
pub(crate) struct DaddrHasher(u64);

impl Hasher for DaddrHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.write_u64(u64::from(byte));
        }
    }

    fn write_u64(&mut self, n: u64) {
        let mixed = u128::from(self.0 ^ n ^ 0x9e37_79b9_7f4a_7c15) * 0xd6e8_feb8_6659_fd93;
        self.0 = (mixed as u64) ^ (mixed >> 64) as u64;
    }
}

/// First address and length in sectors.
pub(crate) type Key = (u64, u64);

pub(crate) type Buffers = HashMap<Key, Arc<Inner>, BuildHasherDefault<DaddrHasher>>;

pub(crate) type Group = Mutex<Buffers>;

pub(crate) struct Index {
    pub(crate) sectors_per_group: u64,
    pub(crate) groups: Vec<Group>,
}

impl Index {
    /// The most groups; a device with more shares them.
    const MAX_GROUPS: u64 = 4096;

    pub(crate) fn new(sectors_per_group: u64, sectors: u64) -> Index {
        let sectors_per_group = sectors_per_group.max(1);
        let count = sectors
            .div_ceil(sectors_per_group)
            .clamp(1, Self::MAX_GROUPS);
        Index {
            sectors_per_group,
            groups: (0..count).map(|_| Group::default()).collect(),
        }
    }

    pub(crate) fn group(&self, daddr: u64) -> &Group {
        let number = daddr / self.sectors_per_group % self.groups.len() as u64;
        &self.groups[number as usize]
    }
}

pub(crate) fn key(inner: &Inner) -> Key {
    (inner.daddr(), inner.sectors)
}
