//! The identity of a file of the host, and how it is hashed.

use crate::sys::FileHandle;
use rustix::fs::Statx;
use std::hash::{BuildHasher, Hash, Hasher, RandomState};
use std::sync::LazyLock;

/// The key of an inode of the host.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Key {
    /// Of the rest. Made once: for each name it is used several times, and when a set grows.
    pub(super) hash: u64,
    pub(super) mount: u64,
    /// st_dev and st_ino.
    pub(crate) device: (u32, u32),
    pub(crate) ino: u64,
    /// Tells apart uses of the same inode number. `None` where a held descriptor keeps it in use.
    pub(crate) handle: Option<FileHandle>,
}

impl Key {
    /// Of the inode with these attributes, on a mount with this id.
    pub(crate) fn new(mount: u64, st: &Statx, handle: Option<FileHandle>) -> Self {
        let device = (st.stx_dev_major, st.stx_dev_minor);
        Self::of(mount, device, st.stx_ino, handle)
    }

    pub(crate) fn of(mount: u64, device: (u32, u32), ino: u64, handle: Option<FileHandle>) -> Self {
        static SEED: LazyLock<RandomState> = LazyLock::new(RandomState::new);
        let mut hasher = SEED.build_hasher();
        hasher.write_u64(ino);
        if let Some(handle) = &handle {
            // With the number it is nearly always enough.
            hasher.write(handle.parts().1);
        }
        Self {
            hash: hasher.finish(),
            mount,
            device,
            ino,
            handle,
        }
    }
}

impl Hash for Key {
    fn hash<H: Hasher>(&self, state: &mut H) {
        state.write_u64(self.hash);
    }
}

/// Takes the hash that a key has for what it is.
#[derive(Default)]
pub(super) struct AsIs(u64);

impl Hasher for AsIs {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, _: &[u8]) {
        unreachable!("keys write a number")
    }

    fn write_u64(&mut self, hash: u64) {
        self.0 = hash;
    }
}
