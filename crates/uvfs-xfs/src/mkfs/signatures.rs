//! The signatures by which libblkid knows file systems, volumes and partition tables that a device may hold already.

/// Bytes of the start of a device in which signatures are looked for: the farthest is that of VMFS, at one MiB.
pub(super) const START: u64 = (1 << 20) + 4096;
/// Bytes of its end.
pub(super) const END: u64 = 1 << 20;

/// Signatures at a place from the start: offset, bytes, name. The more telling ones come first.
const AT_START: &[(usize, &[u8], &str)] = &[
    (0, b"XFSB", "an XFS file system"),
    (1080, &[0x53, 0xef], "an ext2, ext3 or ext4 file system"),
    (65_600, b"_BHRfS_M", "a Btrfs file system"),
    (4120, &BCACHEFS, "a bcachefs file system"),
    (4120, &BCACHE, "a bcache device"),
    (0, b"LUKS\xba\xbe", "a LUKS volume"),
    (16_384, b"SKUL\xba\xbe", "a LUKS volume"),
    (3, b"-FVE-FS-", "a BitLocker volume"),
    (0, b"hsqs", "a SquashFS file system"),
    (0, b"sqsh", "a SquashFS file system"),
    (1024, &[0xe2, 0xe1, 0xf5, 0xe0], "an EROFS file system"),
    (1024, &[0x10, 0x20, 0xf5, 0xf2], "an F2FS file system"),
    (1030, &[0x34, 0x34], "a NILFS2 file system"),
    (32_768, b"JFS1", "a JFS file system"),
    (65_588, b"ReIsErFs", "a ReiserFS file system"),
    (65_588, b"ReIsEr2Fs", "a ReiserFS file system"),
    (65_588, b"ReIsEr3Fs", "a ReiserFS file system"),
    (65_536, b"ReIsEr4", "a Reiser4 file system"),
    (65_536, &[0x01, 0x16, 0x19, 0x70], "a GFS2 file system"),
    (1024, b"OCFSV2", "an OCFS2 file system"),
    (2048, b"OCFSV2", "an OCFS2 file system"),
    (4096, b"OCFSV2", "an OCFS2 file system"),
    (32, b"NXSB", "an APFS container"),
    (1024, b"H+", "an HFS+ file system"),
    (1024, b"HX", "an HFS+ file system"),
    (1024, b"BD", "an HFS file system"),
    (3, b"NTFS    ", "an NTFS file system"),
    (3, b"ReFS\0\0\0\0", "a ReFS file system"),
    (3, b"EXFAT   ", "an exFAT file system"),
    (54, b"FAT", "a FAT file system"),
    (82, b"FAT", "a FAT file system"),
    (3, b"HPFS", "an HPFS file system"),
    (0, &[0x45, 0x3d, 0xcd, 0x28], "a cramfs file system"),
    (0, b"-rom1fs-", "a romfs file system"),
    (0, &[0x31, 0x18, 0x10, 0x06], "a UBIFS file system"),
    (0, b"UBI#", "a UBI volume"),
    (0, b"SFOZ", "a zonefs file system"),
    (1040, &[0x7f, 0x13], "a MINIX file system"),
    (1040, &[0x8f, 0x13], "a MINIX file system"),
    (1040, &[0x68, 0x24], "a MINIX file system"),
    (1040, &[0x78, 0x24], "a MINIX file system"),
    (1048, &[0x5a, 0x4d], "a MINIX file system"),
    (9564, &[0x54, 0x19, 0x01, 0x00], "a UFS file system"),
    (9564, &[0x00, 0x01, 0x19, 0x54], "a UFS file system"),
    (66_908, &[0x19, 0x01, 0x54, 0x19], "a UFS file system"),
    (66_908, &[0x19, 0x54, 0x01, 0x19], "a UFS file system"),
    (32_769, b"CD001", "an ISO 9660 file system"),
    (32_769, b"BEA01", "a UDF file system"),
    (32_769, b"NSR0", "a UDF file system"),
    (1 << 20, &[0x0d, 0xd0, 0x01, 0xc0], "a VMFS volume"),
    (0, b"bluestore block device", "a Ceph BlueStore device"),
    (0, b"dmvdo001", "a VDO volume"),
    (0, b"verity\0\0", "dm-verity hashes"),
    (0, b"integrt\0", "a dm-integrity device"),
    (0, b"SnAp", "a device-mapper snapshot"),
    (516, b"!Stra0tis\x86\xff\x02^\x41rh", "a Stratis device"),
    (4612, b"!Stra0tis\x86\xff\x02^\x41rh", "a Stratis device"),
    (4086, b"SWAPSPACE2", "a swap area"),
    (4086, b"SWAP-SPACE", "a swap area"),
    (4086, b"S1SUSPEND", "a suspended system"),
    (4086, b"S2SUSPEND", "a suspended system"),
    (4086, b"ULSUSPEND", "a suspended system"),
    (4086, b"LINHIB0001", "a suspended system"),
    (65_526, b"SWAPSPACE2", "a swap area"),
    (0, b"LABELONE", "an LVM physical volume"),
    (512, b"LABELONE", "an LVM physical volume"),
    (1024, b"LABELONE", "an LVM physical volume"),
    (1536, b"LABELONE", "an LVM physical volume"),
    (0, &[0xfc, 0x4e, 0x2b, 0xa9], "a RAID member"),
    (4096, &[0xfc, 0x4e, 0x2b, 0xa9], "a RAID member"),
    (512, b"EFI PART", "a GPT partition table"),
    (4096, b"EFI PART", "a GPT partition table"),
    (0, b"ER\x02", "an Apple partition map"),
    (508, &[0xda, 0xbe], "a Sun disk label"),
    (0, &[0x0b, 0xe5, 0xa9, 0x41], "an SGI disk label"),
    (510, &[0x55, 0xaa], "a partition table or boot sector"),
];

const BCACHEFS: [u8; 16] = [
    0xc6, 0x85, 0x73, 0xf6, 0x66, 0xce, 0x90, 0xa9, 0xd9, 0x6a, 0x60, 0xcf, 0x80, 0x3d, 0xf7, 0xef,
];
/// That of bcache, which bcachefs had before Linux 6.7 too.
const BCACHE: [u8; 16] = [
    0xc6, 0x85, 0x73, 0xf6, 0x4e, 0x1a, 0x45, 0xca, 0x82, 0x65, 0xf5, 0x7f, 0x48, 0xba, 0x6d, 0x81,
];

/// Signatures at a place from the end: bytes before the end, bytes, name.
const AT_END: &[(usize, &[u8], &str)] = &[
    (512, b"EFI PART", "the copy of a GPT partition table"),
    (4096, b"EFI PART", "the copy of a GPT partition table"),
    (8192, &[0xfc, 0x4e, 0x2b, 0xa9], "a RAID member"),
    (
        1024,
        b"Intel Raid ISM Cfg Sig. ",
        "a member of an Intel RAID",
    ),
    (512, b"DDF\x11", "a member of a DDF RAID"),
    (512, &[0xde, 0x11, 0xde, 0x11], "a member of a DDF RAID"),
];

/// Begins a superblock of version 0.90, in the byte order of the machine that wrote it.
const RAID_MAGIC: [[u8; 4]; 2] = [[0xfc, 0x4e, 0x2b, 0xa9], [0xa9, 0x2b, 0x4e, 0xfc]];

/// The labels of ZFS: each has its uberblocks in its second half.
const ZFS_LABEL: usize = 256 << 10;
const ZFS_MAGIC: [[u8; 8]; 2] = [0x00ba_b10c_u64.to_le_bytes(), 0x00ba_b10c_u64.to_be_bytes()];

/// The name of what the [`START`] and the [`END`] of a device, or as much as there is, belong to.
pub(super) fn find(start: &[u8], end: &[u8]) -> Option<&'static str> {
    let is = |at: &[u8], offset: usize, bytes: &[u8]| {
        at.get(offset..).is_some_and(|rest| rest.starts_with(bytes))
    };
    let first = AT_START
        .iter()
        .find(|(offset, bytes, _)| is(start, *offset, bytes));
    if let Some((_, _, name)) = first {
        return Some(name);
    }
    if zfs(start) || zfs(&end[end.len() % ZFS_LABEL..]) {
        return Some("a member of a ZFS pool");
    }
    let last = AT_END.iter().find(|(before, bytes, _)| {
        end.len()
            .checked_sub(*before)
            .is_some_and(|at| is(end, at, bytes))
    });
    if let Some((_, _, name)) = last {
        return Some(name);
    }
    // At a multiple of 64 KiB from the start, so at any sector of what was read.
    let raid = end.chunks_exact(512).any(|sector| {
        let word = |at: usize| [sector[at], sector[at + 1], sector[at + 2], sector[at + 3]];
        RAID_MAGIC.iter().any(|magic| word(0) == *magic)
            && [90_u32.to_le_bytes(), 90_u32.to_be_bytes()].contains(&word(8))
    });
    raid.then_some("a RAID member")
}

/// Whether one of the labels in these bytes has an uberblock.
fn zfs(bytes: &[u8]) -> bool {
    bytes.chunks_exact(ZFS_LABEL).any(|label| {
        label[ZFS_LABEL / 2..]
            .chunks_exact(1024)
            .any(|uberblock| ZFS_MAGIC.iter().any(|magic| uberblock.starts_with(magic)))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Each signature is found in an otherwise empty device, and zeros hold nothing.
    #[test]
    fn each_signature_is_found() {
        let zeros = || (vec![0; START as usize], vec![0; END as usize]);
        let (start, end) = zeros();
        assert_eq!(find(&start, &end), None);
        assert_eq!(find(&[], &[]), None);
        for (at, bytes, _) in AT_START {
            let mut start = start.clone();
            start[*at..at + bytes.len()].copy_from_slice(bytes);
            assert!(find(&start, &end).is_some(), "{bytes:x?} at {at}");
        }
        for (before, bytes, name) in AT_END {
            let mut end = end.clone();
            let at = end.len() - before;
            end[at..at + bytes.len()].copy_from_slice(bytes);
            assert_eq!(find(&start, &end), Some(*name));
        }
    }

    /// A pool's member has labels at both ends; either is enough.
    #[test]
    fn zfs_is_found_by_any_label() {
        for label in 0..4 {
            let (mut start, mut end) = (vec![0; START as usize], vec![0; END as usize]);
            let half = &mut if label < 2 { &mut start } else { &mut end };
            let len = half.len();
            let at = [0, ZFS_LABEL, len - 2 * ZFS_LABEL, len - ZFS_LABEL][label]
                + ZFS_LABEL / 2
                + 5 * 1024;
            half[at..at + 8].copy_from_slice(&ZFS_MAGIC[label % 2]);
            assert_eq!(find(&start, &end), Some("a member of a ZFS pool"));
        }
    }
}
