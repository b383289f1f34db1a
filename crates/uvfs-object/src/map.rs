//! The format of a map: the file beside a cached object's data that says what of it is there.
//!
//! A header of [`ENTRIES`] bytes, little-endian: the magic number, the CRC-32C of what follows, the object's size, seconds and
//! nanoseconds of Last-Modified, the lengths of key and ETag, both. Then 8 bytes for each piece: 0 if it is missing, else
//! [`THERE`] and the CRC-32C of the piece.

use crate::store::Version;

const MAGIC: &[u8; 8] = b"uvfsmap1";
/// Where the entries begin.
pub(crate) const ENTRIES: u64 = 8192;
/// The bit of an entry whose piece is there.
pub(crate) const THERE: u64 = 1 << 32;

const CHECKED: usize = 12;
const FIXED: usize = 24;
const NONE_NANOS: u32 = u32::MAX;
const NONE_ETAG: u16 = u16::MAX;

/// The smallest piece, as a power of two.
const PIECE_LOG: u32 = 16;
/// The pieces of the largest object: larger ones have larger pieces.
const PIECES_LOG: u32 = 20;

/// The length of a piece of an object of this size, as a power of two.
pub(crate) fn piece_log(size: u64) -> u32 {
    let log = u64::BITS - size.saturating_sub(1).leading_zeros();
    log.saturating_sub(PIECES_LOG).max(PIECE_LOG)
}

/// The header of a map. `None` if key and ETag are too long for it.
pub(crate) fn header(key: &str, version: &Version) -> Option<Vec<u8>> {
    let described = describe(key, version)?;
    let mut all = Vec::with_capacity(ENTRIES as usize);
    all.extend(MAGIC);
    all.extend([0; 4]);
    all.extend(described);
    all.resize(ENTRIES as usize, 0);
    let sum = crc32c::crc32c(&all[CHECKED..]);
    all[MAGIC.len()..CHECKED].copy_from_slice(&sum.to_le_bytes());
    Some(all)
}

/// Reads a header: the key and the version. `None` for anything else.
pub(crate) fn parse(header: &[u8]) -> Option<(String, Version)> {
    let header = header.get(..ENTRIES as usize)?;
    let (magic, rest) = header.split_first_chunk()?;
    let (sum, rest) = rest.split_first_chunk()?;
    if magic != MAGIC || u32::from_le_bytes(*sum) != crc32c::crc32c(rest) {
        return None;
    }
    described(rest)
}

/// The part of a header that has the key and the version. `None` if they are too long.
pub(crate) fn describe(key: &str, version: &Version) -> Option<Vec<u8>> {
    let etag = version.etag.as_deref();
    let key_len = u16::try_from(key.len()).ok()?;
    let etag_len = etag.map_or(Some(NONE_ETAG), |etag| {
        u16::try_from(etag.len())
            .ok()
            .filter(|len| *len < NONE_ETAG)
    })?;
    let (seconds, nanos) = version.modified.unwrap_or((0, NONE_NANOS));
    let mut all = Vec::with_capacity(FIXED + key.len() + etag.map_or(0, str::len));
    all.extend(version.size.to_le_bytes());
    all.extend(seconds.to_le_bytes());
    all.extend(nanos.to_le_bytes());
    all.extend(key_len.to_le_bytes());
    all.extend(etag_len.to_le_bytes());
    debug_assert_eq!(all.len(), FIXED);
    all.extend(key.as_bytes());
    all.extend(etag.unwrap_or_default().as_bytes());
    (all.len() + CHECKED <= ENTRIES as usize).then_some(all)
}

/// Reads what [`describe`] wrote, and what may follow. `None` for anything else.
pub(crate) fn described(bytes: &[u8]) -> Option<(String, Version)> {
    let (size, rest) = bytes.split_first_chunk()?;
    let (seconds, rest) = rest.split_first_chunk()?;
    let (nanos, rest) = rest.split_first_chunk()?;
    let (key_len, rest) = rest.split_first_chunk()?;
    let (etag_len, rest) = rest.split_first_chunk()?;
    let nanos = u32::from_le_bytes(*nanos);
    let (key, rest) = rest.split_at_checked(u16::from_le_bytes(*key_len).into())?;
    let etag = match u16::from_le_bytes(*etag_len) {
        NONE_ETAG => None,
        len => Some(rest.get(..len.into())?),
    };
    let version = Version {
        etag: etag
            .map(|etag| String::from_utf8(etag.into()))
            .transpose()
            .ok()?,
        modified: (nanos != NONE_NANOS).then(|| (u64::from_le_bytes(*seconds), nanos)),
        size: u64::from_le_bytes(*size),
    };
    Some((String::from_utf8(key.into()).ok()?, version))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_header_comes_back(
            key in "[ -~]{0,1200}",
            etag in proptest::option::of("[ -~]{0,200}"),
            modified in proptest::option::of((any::<u64>(), 0..1_000_000_000_u32)),
            size: u64,
        ) {
            let version = Version { etag, modified, size };
            let bytes = header(&key, &version).unwrap();
            let (found, same) = parse(&bytes).unwrap();
            prop_assert_eq!(found, key);
            prop_assert_eq!(same.etag, version.etag);
            prop_assert_eq!((same.modified, same.size), (version.modified, version.size));
        }

        #[test]
        fn a_changed_header_is_refused(at in 0..ENTRIES as usize, bit in 0..8_u32) {
            let version = Version { etag: Some("\"e\"".into()), modified: None, size: 3 };
            let mut bytes = header("key", &version).unwrap();
            bytes[at] ^= 1_u8 << bit;
            prop_assert!(parse(&bytes).is_none());
        }

        #[test]
        fn any_bytes_are_read_without_a_panic(bytes in proptest::collection::vec(any::<u8>(), 0..9000)) {
            let mut bytes = bytes;
            let _ = parse(&bytes);
            // Also behind a checksum that is right.
            bytes.resize(ENTRIES as usize, 0);
            bytes[..8].copy_from_slice(MAGIC);
            let sum = crc32c::crc32c(&bytes[CHECKED..]);
            bytes[8..12].copy_from_slice(&sum.to_le_bytes());
            let _ = parse(&bytes);
        }
    }

    #[test]
    fn a_large_object_has_large_pieces() {
        assert_eq!(piece_log(0), 16);
        assert_eq!(piece_log(1 << 36), 16);
        assert_eq!(piece_log((1 << 36) + 1), 17);
        assert_eq!(piece_log(u64::MAX), 44);
    }

    #[test]
    fn what_is_too_long_has_no_header() {
        assert!(header(&"k".repeat(8200), &Version::default()).is_none());
        assert!(header(&"k".repeat(70_000), &Version::default()).is_none());
    }
}
