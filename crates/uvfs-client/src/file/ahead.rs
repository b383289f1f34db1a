//! Readahead: what is read before it is asked for, and what the caller says about that.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::{File, PAGE};
use crate::cache::Fill;
use crate::error::{Doing, Result};
use crate::types::Lease;
use uvfs_sys::lock;

/// The first readahead window, in pages.
const FIRST_WINDOW: u64 = 16;

/// The caller's advice about its reads, as posix_fadvise(2).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Advice {
    /// Nothing.
    Normal,
    /// Sequential: read further ahead.
    Sequential,
    /// Random: read nothing ahead.
    Random,
    /// The range will be read soon: start reading it.
    WillNeed,
    /// The range will not be needed: write what is dirty of it, and drop it.
    DontNeed,
}

/// How an open file is read.
#[derive(Debug, Default)]
pub(super) struct Ahead {
    /// The page after the last one that was asked for.
    expect: u64,
    /// The page after the window.
    end: u64,
    /// Pages of the window; 0 when reads are not sequential.
    window: u64,
}

impl File {
    /// Tells what the caller knows about its reads of a range; for the first three, of the file.
    ///
    /// # Errors
    /// With [`Advice::DontNeed`], that of the writeback.
    pub fn advise(&self, advice: Advice, offset: u64, len: u64) -> Result<()> {
        let f = &*self.0;
        let (first, last) = (offset / PAGE, offset.saturating_add(len.max(1) - 1) / PAGE);
        match advice {
            Advice::Normal | Advice::Sequential | Advice::Random => {
                f.advice.store(advice as u8, Ordering::Relaxed);
            }
            Advice::WillNeed if f.readable => {
                f.inode.lease(Lease::Read);
                let _ = f.inode.fill(&f.handle, first, last, false, false);
            }
            Advice::WillNeed => {}
            Advice::DontNeed => {
                let written = self.retried(|| f.inode.write_and_wait(first, last));
                written.doing("writing back", &f.name)?;
                f.inode.invalidate_range(first, last, None);
            }
        }
        Ok(())
    }

    /// Starts reading what is missing for a read of `page..=last`, and more if reads are
    /// sequential.
    pub(super) fn read_missing(&self, page: u64, last: u64, dontcache: bool) -> Arc<Fill> {
        let f = &*self.0;
        let max = self.window_limit();
        let mut end = last + 1;
        {
            let mut ahead = lock(&f.ahead);
            let sequential = page == ahead.expect || page == ahead.end;
            if sequential && max > 0 {
                ahead.window = self.next_window(ahead.window, max);
                end = end.max(page + ahead.window);
                ahead.end = end;
                f.mark.store(page + (end - page) / 2, Ordering::Relaxed);
            } else {
                ahead.window = 0;
                ahead.end = end;
                f.mark.store(u64::MAX, Ordering::Relaxed);
            }
            ahead.expect = last + 1;
        }
        f.cache.counters.readahead_pages(end - last - 1);
        f.inode.fill(&f.handle, page, end - 1, dontcache, true)
    }

    /// The reader has come to the middle of the window: start the next one.
    pub(super) fn read_ahead(&self, dontcache: bool) {
        let f = &*self.0;
        let max = self.window_limit();
        let (first, n) = {
            let mut ahead = lock(&f.ahead);
            if ahead.window == 0 || max == 0 {
                return;
            }
            ahead.window = self.next_window(ahead.window, max);
            let first = ahead.end;
            ahead.end += ahead.window;
            f.mark.store(first, Ordering::Relaxed);
            (first, ahead.window)
        };
        f.cache.counters.readahead_pages(n);
        let _ = f
            .inode
            .fill(&f.handle, first, first + n - 1, dontcache, false);
    }

    /// The window after one of so many pages: a larger one, unless the cache is too small for what is read ahead.
    fn next_window(&self, window: u64, max: u64) -> u64 {
        let wanted = match self.0.inode.wasted.swap(false, Ordering::Relaxed) {
            true => window / 2,
            false => window * 2,
        };
        wanted.clamp(FIRST_WINDOW.min(max), max)
    }

    /// How many pages a window may have.
    fn window_limit(&self) -> u64 {
        let max = self.0.cache.config.readahead as u64 / PAGE;
        match self.0.advice.load(Ordering::Relaxed) {
            a if a == Advice::Random as u8 => 0,
            a if a == Advice::Sequential as u8 => max * 2,
            _ => max,
        }
    }
}
