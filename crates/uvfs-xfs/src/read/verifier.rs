//! Verifiers for the buffer cache: each tests the magic number and checksums of a kind of metadata buffer when it is
//! read, and seals the checksums before it is written. Clusters of inodes are read without one:
//! [`Inode::parse`](super::inode::Inode::parse) tests each inode's checksum.
//!
//! Where each structure keeps its checksum is in [`crate::format`]; version 5 only.

use crate::format::*;
use uvfs_buf::{Corrupt, Verifier};

/// A buffer whose first structure starts with one of these magic numbers and has its checksum at
/// this offset, over the whole buffer.
struct Checksummed {
    name: &'static str,
    magics: &'static [u32],
    /// Where the magic number is, and how many bits of the word there are its own.
    magic_at: usize,
    magic_bits: u32,
    crc_offset: usize,
    references: u8,
}

impl Verifier for Checksummed {
    fn name(&self) -> &'static str {
        self.name
    }

    fn verify(&self, _daddr: u64, bytes: &[u8]) -> Result<(), Corrupt> {
        let word = Be32::at(bytes, self.magic_at).map_err(fault)?.get();
        check_magic(self.magics, word >> (32 - self.magic_bits))?;
        check_crc(bytes, self.crc_offset).map_err(fault)
    }

    fn seal(&self, _daddr: u64, bytes: &mut [u8]) {
        if bytes.len() >= self.crc_offset + 4 {
            store_crc(bytes, self.crc_offset);
        }
    }

    fn references(&self) -> u8 {
        self.references
    }
}

fn fault(f: Fault) -> Corrupt {
    Corrupt::from(f.to_string())
}

/// Checks that a magic number is one of these.
fn check_magic(magics: &[u32], found: u32) -> Result<(), Corrupt> {
    let expected = magics[0];
    match magics.contains(&found) {
        true => Ok(()),
        false => Err(fault(Fault::Magic { expected, found })),
    }
}

macro_rules! blocks {
    ($($(#[$meta:meta])* $name:ident: $text:literal, $magics:expr, $at:literal, $bits:literal, $crc:expr, $refs:literal;)*) => {$(
        $(#[$meta])*
        pub static $name: &dyn Verifier = &Checksummed {
            name: $text,
            magics: &$magics,
            magic_at: $at,
            magic_bits: $bits,
            crc_offset: $crc,
            references: $refs,
        };
    )*};
}

const fn tag(m: &[u8; 4]) -> u32 {
    u32::from_be_bytes(*m)
}

blocks! {
    /// A B-tree block of an allocation group.
    BTREE_SHORT: "B-tree block",
        [tag(b"AB3B"), tag(b"AB3C"), tag(b"IAB3"), tag(b"FIB3"), tag(b"RMB3"), tag(b"R3FC")],
        0, 32, BTREE_SHORT_CRC_OFFSET, 4;
    /// A block of a fork's B-tree.
    BTREE_LONG: "bmbt block", [tag(b"BMA3")], 0, 32, BTREE_LONG_CRC_OFFSET, 2;
    /// A directory data, single-block or free index block.
    DIR_DATA: "directory data block", [DIR3_DATA_MAGIC, DIR3_BLOCK_MAGIC, DIR3_FREE_MAGIC],
        0, 32, DIR3_DATA_CRC_OFFSET, 1;
    /// A leaf or node block of a directory or of attributes.
    DA: "directory or attribute leaf or node",
        [DIR3_LEAF1_MAGIC as u32, DIR3_LEAFN_MAGIC as u32, DA3_NODE_MAGIC as u32, ATTR3_LEAF_MAGIC as u32],
        8, 16, DA3_CRC_OFFSET, 2;
    /// A block of a remote attribute value, or an extent of a remote symbolic link.
    REMOTE: "remote value block", [ATTR3_RMT_MAGIC, SYMLINK_MAGIC], 0, 32, REMOTE_CRC_OFFSET, 1;
}

/// A buffer of whole inodes of `size` bytes.
struct Inodes {
    size: usize,
}

impl Verifier for Inodes {
    fn name(&self) -> &'static str {
        "inodes"
    }

    fn verify(&self, _daddr: u64, bytes: &[u8]) -> Result<(), Corrupt> {
        for inode in bytes.chunks(self.size) {
            let d = DinodeV2::at(inode, 0).map_err(fault)?;
            check_magic(&[DINODE_MAGIC.into()], d.magic.get().into())?;
            check_crc(inode, DINODE_CRC_OFFSET).map_err(fault)?;
        }
        Ok(())
    }

    fn seal(&self, _daddr: u64, bytes: &mut [u8]) {
        for inode in bytes.chunks_exact_mut(self.size) {
            store_crc(inode, DINODE_CRC_OFFSET);
        }
    }

    fn references(&self) -> u8 {
        3
    }
}

/// A buffer of whole inodes of `inode_size` bytes: 512, 1024 or 2048.
pub fn inodes(inode_size: u32) -> &'static dyn Verifier {
    match inode_size {
        1024 => &Inodes { size: 1024 },
        2048 => &Inodes { size: 2048 },
        _ => &Inodes { size: 512 },
    }
}

/// The first blocks of an allocation group: superblock, AGF, AGI and AGFL, a sector each. The
/// superblock tells the size of the sectors.
struct AgHeaders;

/// The magic number of each of the four sectors, and where its checksum is.
const HEADERS: [(u32, usize); 4] = [
    (SB_MAGIC, SB_CRC_OFFSET),
    (AGF_MAGIC, AGF_CRC_OFFSET),
    (AGI_MAGIC, AGI_CRC_OFFSET),
    (AGFL_MAGIC, AGFL_CRC_OFFSET),
];

/// Bytes of a sector, as the superblock in the first one says.
fn sector_size(bytes: &[u8]) -> usize {
    let sb = Superblock::at(bytes, 0).ok();
    sb.and_then(Superblock::sector_size).unwrap_or(512)
}

impl Verifier for AgHeaders {
    fn name(&self) -> &'static str {
        "allocation group headers"
    }

    fn verify(&self, _daddr: u64, bytes: &[u8]) -> Result<(), Corrupt> {
        let sector = sector_size(bytes);
        for (i, (magic, crc)) in HEADERS.into_iter().enumerate() {
            let Some(s) = bytes.get(i * sector..(i + 1) * sector) else {
                return Err("they do not fit".into());
            };
            check_magic(&[magic], Be32::at(s, 0).map_err(fault)?.get())?;
            check_crc(s, crc).map_err(fault)?;
        }
        Ok(())
    }

    fn seal(&self, _daddr: u64, bytes: &mut [u8]) {
        let sector = sector_size(bytes);
        for (s, (_, crc)) in bytes.chunks_exact_mut(sector).zip(HEADERS) {
            store_crc(s, crc);
        }
    }

    fn references(&self) -> u8 {
        7
    }
}

/// The headers of an allocation group in one buffer.
pub static AG_HEADERS: &dyn Verifier = &AgHeaders;

#[cfg(test)]
mod tests {
    use super::*;

    /// Blocks that uvfs writes pass verification, and damaged ones fail it.
    #[test]
    fn what_is_sealed_verifies_and_what_is_changed_does_not() {
        let mut node = vec![0u8; 4096];
        Be16::new(DA3_NODE_MAGIC).put(&mut node, 8);
        DA.seal(0, &mut node);
        DA.verify(0, &node).unwrap();
        node[100] ^= 1;
        assert!(DA.verify(0, &node).is_err());
        let mut chunk = vec![0u8; 64 * 512];
        for i in 0..64 {
            Be16::new(DINODE_MAGIC).put(&mut chunk, i * 512);
        }
        inodes(512).seal(0, &mut chunk);
        inodes(512).verify(0, &chunk).unwrap();
        chunk[63 * 512 + 300] ^= 1;
        assert!(inodes(512).verify(0, &chunk).is_err());
        assert!(AG_HEADERS.verify(0, &[0; 2048]).is_err());
    }
}
