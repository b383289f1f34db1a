//! The part behind a request's structure: names, data and records, each with its bounds checked.

use std::ffi::CStr;
use zerocopy::{FromBytes, Immutable, IntoBytes};

use super::{Problem, Records};

/// Reads names and values off the front of a payload.
pub(crate) struct Payload<'a> {
    pub(super) rest: &'a [u8],
    pub(super) dots: bool,
}

impl<'a> Payload<'a> {
    /// All of a payload in which no name is "." or "..".
    pub(crate) fn new(rest: &'a [u8]) -> Self {
        Self { rest, dots: false }
    }

    /// A string of any content.
    pub(super) fn string(&mut self, what: &'static str) -> Result<&'a CStr, Problem> {
        let string =
            CStr::from_bytes_until_nul(self.rest).map_err(|_| Problem::Unterminated(what))?;
        self.rest = &self.rest[string.count_bytes() + 1..];
        Ok(string)
    }

    /// The name of a directory entry.
    pub(crate) fn name(&mut self, what: &'static str) -> Result<&'a CStr, Problem> {
        let name = self.string(what)?;
        match name.to_bytes() {
            b"" => Err(Problem::Name(what)),
            b"." | b".." if !self.dots => Err(Problem::Name(what)),
            bytes if bytes.contains(&b'/') => Err(Problem::Name(what)),
            _ => Ok(name),
        }
    }

    /// As many bytes as a structure announces.
    pub(super) fn data(&self, size: u64) -> Result<&'a [u8], Problem> {
        usize::try_from(size)
            .ok()
            .and_then(|size| self.rest.get(..size))
            .ok_or(Problem::Payload {
                need: size,
                have: self.rest.len(),
            })
    }

    /// As many records as a structure announces.
    pub(super) fn records<T: FromBytes>(&self, count: u32) -> Result<Records<'a, T>, Problem> {
        Ok(Records::new(
            self.data(u64::from(count) * size_of::<T>() as u64)?,
        ))
    }
}

/// A copy of the structure at the start of `op`.
pub(crate) fn arg<T: FromBytes>(op: &[u8]) -> Result<T, Problem> {
    match T::read_from_prefix(op) {
        Ok((arg, _)) => Ok(arg),
        Err(_) => Err(Problem::Structure {
            need: size_of::<T>(),
            have: op.len(),
        }),
    }
}

/// A copy of the structure in the first bytes of `op`, from `min` to all of it; zeros for the
/// rest.
pub(super) fn short_arg<T: FromBytes + IntoBytes + Immutable>(
    op: &[u8],
    min: usize,
) -> Result<T, Problem> {
    if op.len() < min {
        return Err(Problem::Structure {
            need: min,
            have: op.len(),
        });
    }
    let mut arg = T::new_zeroed();
    let len = op.len().min(size_of::<T>());
    arg.as_mut_bytes()[..len].copy_from_slice(&op[..len]);
    Ok(arg)
}
