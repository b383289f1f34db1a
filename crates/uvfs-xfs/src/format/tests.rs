use super::*;

/// An extent record gives the blocks that the format says.
#[test]
fn extent_records_unpack() {
    let rec = ExtentRecord {
        l0: Be64::new((1 << 63) | (0x12_3456_789a << 9)),
        l1: Be64::new((0x1_2345_6789u64 << 21) | 0x1f_fffe),
    };
    let e = rec.unpack();
    assert_eq!(
        e,
        Extent {
            startoff: 0x12_3456_789a,
            startblock: 0x1_2345_6789,
            blockcount: 0x1f_fffe,
            unwritten: true
        }
    );
    let all = ExtentRecord {
        l0: Be64::new(u64::MAX >> 1),
        l1: Be64::new(u64::MAX),
    }
    .unpack();
    assert_eq!(all.startoff, (1 << 54) - 1);
    assert_eq!(all.startblock, (1 << 52) - 1);
    assert!(!all.unwritten);
}

/// Names have the hashes by which large directories find them.
#[test]
fn name_hashes() {
    assert_eq!(da_hashname(b"."), 0x2e);
    assert_eq!(da_hashname(b".."), 0x172e);
    assert_eq!(da_hashname(b""), 0);
    assert_eq!(da_hashname_ci(b"ABC"), da_hashname_ci(b"abc"));
}

/// Times are right, also before 1970 and after 2038.
#[test]
fn times() {
    assert_eq!(timestamp(0, false), (0, 0));
    assert_eq!(timestamp(0xffff_ffff_0000_0005, false), (-1, 5));
    assert_eq!(timestamp(0, true), (-(1 << 31), 0));
    assert_eq!(timestamp((1u64 << 31) * 1_000_000_000 + 7, true), (0, 7));
}

/// Records that repair and mkfs write are read back as they were.
#[test]
fn records_pack_as_they_unpack() {
    for e in [
        Extent {
            startoff: (1 << 54) - 1,
            startblock: (1 << 52) - 1,
            blockcount: MAX_EXTENT_BLOCKS,
            unwritten: false,
        },
        Extent {
            startoff: 0x12_3456_789a,
            startblock: 0x1_2345_6789,
            blockcount: 1,
            unwritten: true,
        },
    ] {
        assert_eq!(ExtentRecord::pack(&e).unpack(), e);
    }
    let c = InodeChunk {
        startino: 128,
        holemask: 0xff00,
        count: 32,
        freecount: 16,
        free: u64::MAX << 16,
    };
    assert_eq!(InobtRecord::pack(&c, true).unpack(true), c);
    let whole = InodeChunk::new(128, 0, 0xff);
    let record = InobtRecord::pack(&whole, false);
    assert_eq!((record.unpack(false), record.counts.get()), (whole, 8));
    for t in [
        (0, 7),
        (-1, 999_999_999),
        (13_569_465_600, 123),
        (-(1 << 31), 0),
    ] {
        assert_eq!(timestamp(bigtime_stamp(t.0, t.1), true), t);
    }
    assert_eq!(bigtime_stamp(i64::MIN, 5), 0);
    assert_eq!(bigtime_stamp(i64::MAX, 5), bigtime_stamp(1 << 60, 0));
}

/// The holes of sparse chunks hold no inodes.
#[test]
fn sparse_chunks() {
    let r = InobtRecord {
        startino: Be32::new(128),
        counts: Be32::new(0xff00_2010),
        free: Be64::new(u64::MAX),
    };
    let c = r.unpack(true);
    assert_eq!((c.holemask, c.count, c.freecount), (0xff00, 32, 16));
    assert_eq!(c.holes(), 0xffff_ffff_0000_0000);
    assert_eq!(r.unpack(false).count, 64);
}

/// A checksum tells a damaged block from a sound one.
#[test]
fn crcs() {
    let mut b = vec![7u8; 512];
    store_crc(&mut b, 100);
    assert_eq!(check_crc(&b, 100), Ok(()));
    b[3] ^= 1;
    assert!(matches!(check_crc(&b, 100), Err(Fault::Crc { .. })));
    assert!(matches!(check_crc(&b, 510), Err(Fault::Short { .. })));
}
