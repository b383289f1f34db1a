//! The attributes inside an inode, and in a leaf.

use crate::format::*;

/// Where an attribute's value is.
pub(crate) enum Value<'a> {
    Here(&'a [u8]),
    Remote { block: u32, len: u32 },
}

/// An attribute as it is stored.
pub(crate) struct Stored<'a> {
    pub flags: u8,
    pub name: &'a [u8],
    pub value: Value<'a>,
    /// Where its bytes end in the inode's fork or the leaf.
    pub end: usize,
}

impl Stored<'_> {
    /// Whether programs see the attribute.
    pub(crate) fn visible(&self) -> bool {
        self.flags & (ATTR_INCOMPLETE | ATTR_PARENT) == 0
            && self.flags & ATTR_NSP_MASK != ATTR_ROOT | ATTR_SECURE
    }
}

/// The attributes inside an inode, from the first on: as many as are asked for, whatever the header says. After a
/// fault there is only the same fault.
pub(crate) fn short_attrs(data: &[u8]) -> impl Iterator<Item = Result<Stored<'_>, Fault>> {
    let mut at = AttrSfHeader::SIZE;
    std::iter::repeat_with(move || {
        let e = AttrSfEntry::at(data, at)?;
        let name_at = at + AttrSfEntry::SIZE;
        let value_at = name_at + usize::from(e.namelen);
        let end = value_at + usize::from(e.valuelen);
        let value = data.get(value_at..end).ok_or(Fault::Short {
            need: end,
            have: data.len(),
        })?;
        at = end;
        Ok(Stored {
            flags: e.flags,
            name: &data[name_at..value_at],
            value: Value::Here(value),
            end,
        })
    })
}

/// The attribute that an entry of a leaf stands for.
pub(crate) fn leaf_attr<'a>(block: &'a [u8], e: &AttrLeafEntry) -> Result<Stored<'a>, Fault> {
    let at = usize::from(e.nameidx.get());
    let (name_at, namelen, valuelen, remote) = if e.flags & ATTR_LOCAL != 0 {
        let n = AttrNameLocal::at(block, at)?;
        let name_at = at + AttrNameLocal::SIZE;
        (name_at, n.namelen, n.valuelen.get(), None)
    } else {
        let n = AttrNameRemote::at(block, at)?;
        let value = Value::Remote {
            block: n.valueblk.get(),
            len: n.valuelen.get(),
        };
        (at + AttrNameRemote::SIZE, n.namelen, 0, Some(value))
    };
    let value_at = name_at + usize::from(namelen);
    let end = value_at + usize::from(valuelen);
    let value = block.get(value_at..end).ok_or(Fault::Short {
        need: end,
        have: block.len(),
    })?;
    Ok(Stored {
        flags: e.flags,
        name: &block[name_at..value_at],
        // In C the head of a name whose value is elsewhere is rounded up to 12 bytes, and the format counts that.
        end: end + 2 * usize::from(remote.is_some()),
        value: remote.unwrap_or(Value::Here(value)),
    })
}
