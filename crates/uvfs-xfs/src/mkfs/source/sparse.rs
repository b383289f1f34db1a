//! Sparse members of tar archives: in headers of old GNU tar, and in PAX format, as GNU tar and bsdtar write them, in
//! versions 0.0, 0.1 and 1.0.

use super::invalid;
use super::member::{self, BLOCK};
use super::pax::up_to_nul;
use std::io::{self, Read};

/// The most parts of a map, so that a short compressed archive can't fill the memory.
const MOST_PARTS: usize = 1 << 20;

/// The holes of a member, as its extended headers tell.
#[derive(Debug, Default)]
pub struct Sparse {
    /// Its real name: the other one has more in it, for programs that do not know these headers.
    pub name: Option<Box<[u8]>>,
    /// Its size with the holes.
    pub size: Option<u64>,
    /// The map is at the beginning of the contents.
    inside: bool,
    /// Offset and length of each part that is there.
    map: Option<Vec<(u64, u64)>>,
    /// Version 0.0 has them one by one.
    offset: u64,
}

fn number(text: &[u8]) -> Option<u64> {
    std::str::from_utf8(text).ok()?.parse().ok()
}

fn bounded(parts: usize) -> io::Result<()> {
    let many = || invalid("it has more than a million parts between holes");
    (parts <= MOST_PARTS).then_some(()).ok_or_else(many)
}

fn senseless() -> io::Error {
    invalid("what it says of its holes makes no sense")
}

impl Sparse {
    /// Takes a part of the map of an old GNU header; an empty field ends it.
    pub fn old(&mut self, fields: &[([u8; 12], [u8; 12])]) -> io::Result<()> {
        let map = self.map.get_or_insert_default();
        for (at, len) in fields.iter().take_while(|(_, len)| len[0] != 0) {
            let number = |field: &[u8]| {
                let n = member::number(field).and_then(|n| u64::try_from(n).ok());
                n.ok_or_else(senseless)
            };
            map.push((number(at)?, number(len)?));
        }
        bounded(map.len())
    }

    /// Takes an extended header, if it is about holes. Fails if it cannot be understood.
    pub fn take(&mut self, key: &[u8], value: &[u8]) -> io::Result<()> {
        let Some(key) = key.strip_prefix(b"GNU.sparse.") else {
            return Ok(());
        };
        let parsed = || number(value).ok_or_else(senseless);
        match key {
            b"name" => self.name = Some(up_to_nul(value).into()),
            b"size" | b"realsize" => self.size = Some(parsed()?),
            b"major" => self.inside = parsed()? == 1,
            b"offset" => self.offset = parsed()?,
            b"numbytes" => {
                let part = (self.offset, parsed()?);
                self.map.get_or_insert_default().push(part);
            }
            b"map" => {
                let numbers: Option<Vec<u64>> = match value {
                    b"" => Some(Vec::new()),
                    _ => value.split(|b| *b == b',').map(number).collect(),
                };
                let numbers = numbers.ok_or_else(senseless)?;
                let (pairs, rest) = numbers.as_chunks::<2>();
                if !rest.is_empty() {
                    return Err(senseless());
                }
                self.map = Some(pairs.iter().map(|[at, len]| (*at, *len)).collect());
            }
            _ => {}
        }
        Ok(())
    }

    /// The parts of a member whose contents `from` begins with, in order and without empty ones;
    /// `None` if it has no holes. `from` is at the first part then.
    pub fn parts(&mut self, from: &mut impl Read) -> io::Result<Option<Vec<(u64, u64)>>> {
        if self.inside {
            self.map = Some(read_map(from)?);
        }
        let (Some(mut map), Some(size)) = (self.map.take(), self.size) else {
            return Ok(None);
        };
        let mut end = 0;
        for (at, len) in &map {
            let fits = *at >= end && at.checked_add(*len).is_some_and(|e| e <= size);
            if !fits {
                return Err(senseless());
            }
            end = at + len;
        }
        map.retain(|(_, len)| *len > 0);
        Ok(Some(map))
    }
}

/// Reads a map: how many parts there are, and the offset and length of each, a number a line.
fn read_map(from: &mut impl Read) -> io::Result<Vec<(u64, u64)>> {
    let mut block = [0; BLOCK];
    let mut at = BLOCK;
    let mut next = || {
        let mut value: Option<u64> = None;
        loop {
            if at == BLOCK {
                from.read_exact(&mut block)?;
                at = 0;
            }
            let byte = block[at];
            at += 1;
            match (byte, value) {
                (b'0'..=b'9', _) => {
                    let more = value.unwrap_or(0).checked_mul(10);
                    let more = more.and_then(|v| v.checked_add(u64::from(byte - b'0')));
                    value = Some(more.ok_or_else(senseless)?);
                }
                (b'\n', Some(v)) => return Ok(v),
                _ => return Err(senseless()),
            }
        }
    };
    let count = next()?;
    // Each takes bytes of the archive, so that this is bounded by it.
    let mut map = Vec::new();
    for _ in 0..count {
        map.push((next()?, next()?));
        bounded(map.len())?;
    }
    Ok(map)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(headers: &[(&str, &str)], contents: &[u8]) -> io::Result<Option<Vec<(u64, u64)>>> {
        let mut s = Sparse::default();
        for (key, value) in headers {
            s.take(format!("GNU.sparse.{key}").as_bytes(), value.as_bytes())?;
        }
        s.parts(&mut &contents[..])
    }

    /// A malformed map is an error; mkfs neither panics nor allocates without bound.
    #[test]
    fn maps_without_sense_are_refused() {
        for map in [
            "0,512,100,5",
            "0,9001",
            "1,2,3",
            "a,b",
            "1,18446744073709551615",
        ] {
            assert!(of(&[("size", "9000"), ("map", map)], b"").is_err(), "{map}");
        }
        let inside = [("major", "1"), ("realsize", "9000")];
        for text in ["9\n0\n", "x", "99999999999999999999999\n", "\n"] {
            let mut contents = text.as_bytes().to_vec();
            contents.resize(512, 0);
            assert!(of(&inside, &contents).is_err(), "{text}");
        }
        assert!(of(&inside, b"1\n0\n").is_err());
    }
}
