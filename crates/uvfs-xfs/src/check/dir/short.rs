//! Checks a directory whose entries lie in its inode.

use super::super::problem::{Place, Structure, show};
use crate::format::*;
use crate::read::inode::Inode;
use crate::walk::dir::{ShortEntry, check_name, short_entries, short_header_len};

use super::DirCheck;

impl DirCheck<'_, '_> {
    pub(super) fn shortform(&mut self, inode: &Inode) {
        let ctx = self.ctx;
        let (g, report) = (ctx.g, ctx.report);
        let place = Place::inode(Structure::ShortDirectory, self.ino);
        self.place = place;
        let data = inode.local_data();
        let Some(&head) = report.sound(place, Dir2SfHeader::at(data, 0)) else {
            return;
        };
        let wide = head.i8count != 0;
        let Ok((parent, entries)) = short_entries(data, wide, g) else {
            return report.bad(place, "ends inside its header");
        };
        let mut narrow_enough = u32::from(parent > u32::MAX.into());
        self.link(b".", self.ino, FileType::Directory);
        self.link(b"..", parent, FileType::Directory);
        let mut at = short_header_len(wide);
        let ftype = g.features.ftype;
        let mut least =
            dir_data_header_len(g.features.crc) + dir_entry_len(1, ftype) + dir_entry_len(2, ftype);
        let mut names: Vec<&[u8]> = Vec::with_capacity(head.count.into());
        for (i, e) in entries.take(head.count.into()).enumerate() {
            let Ok(e) = e else {
                report.incomplete();
                return report.bad(place, format!("entry {i} ends beyond the directory"));
            };
            let ShortEntry {
                name, ino, offset, ..
            } = e;
            at = e.end;
            if name.is_empty() {
                report.bad(place, format!("entry {i} has no name"));
                continue;
            }
            if offset < least || !offset.is_multiple_of(DIR2_DATA_ALIGN) {
                let field = format!("offset of entry {}", show(name));
                report.differ(place, field, format!("at least {least}, aligned"), offset);
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
            let kind = self.file_type(name, e.ftype);
            if check_name(name).is_err() {
                self.bad_entry(name, "has a slash or zero byte in it".into());
            }
            self.link(name, ino, kind);
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
