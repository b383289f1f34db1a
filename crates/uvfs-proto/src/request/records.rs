//! Arrays of structures in requests.

use std::fmt;
use std::marker::PhantomData;
use zerocopy::{FromBytes, Immutable, IntoBytes};

/// Fixed-size records in bytes of any alignment.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Records<'a, T> {
    bytes: &'a [u8],
    record: PhantomData<T>,
}

impl<T> Default for Records<'_, T> {
    fn default() -> Self {
        Self {
            bytes: &[],
            record: PhantomData,
        }
    }
}

impl<'a, T: FromBytes> Records<'a, T> {
    /// The records' bytes; what is left after the last whole record is dropped.
    pub fn new(bytes: &'a [u8]) -> Self {
        let whole = bytes.len() / size_of::<T>() * size_of::<T>();
        Self {
            bytes: &bytes[..whole],
            record: PhantomData,
        }
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.bytes.len() / size_of::<T>()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// Copies of the records, in order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = T> + use<'a, T> {
        self.bytes
            .chunks_exact(size_of::<T>())
            .map(|chunk| T::read_from_bytes(chunk).expect("a chunk has a record's size"))
    }

    /// The records' bytes.
    pub fn as_bytes(&self) -> &'a [u8] {
        self.bytes
    }
}

impl<'a, T: FromBytes + IntoBytes + Immutable> From<&'a [T]> for Records<'a, T> {
    fn from(records: &'a [T]) -> Self {
        Self::new(records.as_bytes())
    }
}

impl<T: FromBytes + fmt::Debug> fmt::Debug for Records<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.iter()).finish()
    }
}
