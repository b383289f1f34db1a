//! Checks a directory whose entries lie in its inode.

use super::super::ctx::Gathered;
use super::super::problem::{Place, Structure, show};
use crate::format::*;
use crate::inode::Inode;

use super::DirCheck;

impl DirCheck<'_, '_> {
    pub(super) fn shortform(&mut self, inode: &Inode, out: &mut Gathered) {
        let ctx = self.ctx;
        let (g, report) = (ctx.g, ctx.report);
        let place = Place::inode(Structure::ShortDirectory, self.ino);
        self.place = place;
        let data = inode.local_data();
        let Some(&head) = report.sound(place, Dir2SfHeader::at(data, 0)) else {
            return;
        };
        let wide = head.i8count != 0;
        let ino_len = if wide { 8 } else { 4 };
        let ino_at = |at: usize| -> Option<u64> {
            if wide {
                Be64::at(data, at).ok().map(|v| v.get())
            } else {
                Be32::at(data, at).ok().map(|v| v.get().into())
            }
        };
        let Some(parent) = ino_at(Dir2SfHeader::SIZE) else {
            return report.bad(place, "ends inside its header");
        };
        let mut narrow_enough = u32::from(parent > u32::MAX.into());
        self.link(b".", self.ino, FileType::Directory, out);
        self.link(b"..", parent, FileType::Directory, out);
        let mut at = Dir2SfHeader::SIZE + ino_len;
        let ftype = g.features.ftype;
        let mut least =
            dir_data_header_len(g.features.crc) + dir_entry_len(1, ftype) + dir_entry_len(2, ftype);
        let mut names: Vec<&[u8]> = Vec::with_capacity(head.count.into());
        for i in 0..head.count {
            let entry = Dir2SfEntry::at(data, at).ok().copied();
            let name_at = at + Dir2SfEntry::SIZE;
            let named = entry.and_then(|e| {
                let n = usize::from(e.namelen);
                let name = data.get(name_at..name_at + n)?;
                let byte = if ftype { *data.get(name_at + n)? } else { 0 };
                let end = name_at + n + usize::from(ftype);
                Some((e, name, byte, ino_at(end)?, end + ino_len))
            });
            let Some((e, name, byte, ino, end)) = named else {
                report.incomplete();
                return report.bad(place, format!("entry {i} ends beyond the directory"));
            };
            at = end;
            if name.is_empty() {
                report.bad(place, format!("entry {i} has no name"));
                continue;
            }
            let offset = usize::from(e.offset.get());
            if offset < least || !offset.is_multiple_of(DIR2_DATA_ALIGN) {
                report.differ(
                    place,
                    format!("offset of entry {}", show(name)),
                    format!("at least {least}, aligned"),
                    offset,
                );
            }
            least = least.max(offset + dir_entry_len(name.len(), ftype));
            narrow_enough += u32::from(ino > u32::MAX.into());
            if matches!(name, b"." | b"..") {
                report.bad(place, format!("an entry named {}", show(name)));
                continue;
            }
            if names.iter().any(|n| g.same_name(n, name)) {
                report.bad(place, format!("two entries named {}", show(name)));
            }
            names.push(name);
            let kind = self.file_type(name, byte);
            self.link(name, ino, kind, out);
        }
        report.same(place, "i8count", narrow_enough, u32::from(head.i8count));
        report.same(place, "di_size", at, data.len());
        // A short form directory must fit in a block when it grows.
        let index = (usize::from(head.count) + 2) * Dir2LeafEntry::SIZE + Dir2BlockTail::SIZE;
        if least + index > g.dir_block_size as usize {
            report.bad(place, "its entries' offsets do not fit in a block");
        }
    }
}
