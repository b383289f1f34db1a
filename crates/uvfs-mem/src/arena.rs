//! The arena: one mapping, slabs of size classes, a hard limit.
//!
//! The mapping is made once and never grows, so that no allocation takes the process's memory
//! map for writing. It is divided into slabs of [`SLAB`] bytes. A slab serves objects of one
//! size class (512 B to 64 KiB), found through a bitmap of 128 bits; larger objects take a run
//! of neighbouring slabs. A slab whose last object was freed can serve any class again. Its
//! pages stay until [`Arena::trim`], so a busy cache does not fault them in again and again.

use std::fmt;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};

/// The size of a slab in bytes: the grain in which memory is taken and given back.
pub const SLAB: usize = 64 << 10;
/// The smallest object in bytes.
pub const MIN_OBJECT: usize = 512;
/// The largest object in bytes that shares slabs with others; larger ones get whole slabs.
pub const MAX_SLAB_OBJECT: usize = SLAB;

const CLASSES: usize = (MAX_SLAB_OBJECT / MIN_OBJECT).ilog2() as usize + 1;
const NONE: u32 = u32::MAX;

/// The arena's limit is reached (or its mapping too broken up for a large object).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NoMemory;

impl fmt::Display for NoMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the arena's memory limit is reached")
    }
}

impl std::error::Error for NoMemory {}

/// A pool of memory with a hard limit; clones share it.
#[derive(Clone)]
pub struct Arena(Arc<Region>);

/// The contents of an arena, in bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ArenaStats {
    /// The most that may be in use.
    pub limit: usize,
    /// The sizes of live objects, rounded up to their class, with the bytes charged for them.
    pub used: usize,
    /// Slabs that hold a live object, with what was charged: this is what the limit bounds.
    pub in_use: usize,
    /// Slabs whose pages may be resident: those in use and empty ones not yet given back.
    pub resident: usize,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Use {
    Free,
    /// Objects of class n.
    Class(u8),
    /// The first slab of a run of n, one object.
    Run(u32),
    /// A later slab of a run.
    Tail,
}

struct Slab {
    role: Use,
    /// Bit set: that object is free.
    free: u128,
    /// Neighbours in the list of slabs of this class that have free objects.
    next: u32,
    prev: u32,
    /// In `State::spare` (perhaps no longer free: checked when taken out).
    listed: bool,
    /// Pages may be resident.
    resident: bool,
}

struct State {
    limit: usize,
    charged: usize,
    object_bytes: usize,
    used_slabs: usize,
    resident_slabs: usize,
    slabs: Vec<Slab>,
    spare: Vec<u32>,
    partial: [u32; CLASSES],
}

struct Region {
    base: NonNull<u8>,
    max_slabs: usize,
    /// No page is ever given back.
    pinned: bool,
    state: Mutex<State>,
}

// SAFETY: the region owns its mapping; the pointer is only used to compute addresses of
// objects, each of which belongs to exactly one `Block`, and all bookkeeping is under the mutex.
unsafe impl Send for Region {}
// SAFETY: as above.
unsafe impl Sync for Region {}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: the mapping was made by `Arena::new` with this length, and every `Block` holds
        // an `Arc` of the region, so none is left that points into it.
        let result = unsafe { munmap(self.base.as_ptr().cast(), self.max_slabs * SLAB) };
        if let Err(error) = result {
            tracing::warn!(%error, "unmapping an arena");
        }
    }
}

/// The class whose objects hold `len` bytes.
fn class_of(len: usize) -> usize {
    (len.max(MIN_OBJECT).next_power_of_two() / MIN_OBJECT).ilog2() as usize
}

fn class_size(class: usize) -> usize {
    MIN_OBJECT << class
}

/// The bitmap of a slab of this class with every object free.
fn all_free(class: usize) -> u128 {
    let objects = SLAB / class_size(class);
    if objects == 128 {
        u128::MAX
    } else {
        (1 << objects) - 1
    }
}

impl State {
    fn unlink(&mut self, index: u32, class: usize) {
        let (prev, next) = {
            let slab = &self.slabs[index as usize];
            (slab.prev, slab.next)
        };
        match prev {
            NONE => self.partial[class] = next,
            p => self.slabs[p as usize].next = next,
        }
        if next != NONE {
            self.slabs[next as usize].prev = prev;
        }
    }

    fn link(&mut self, index: u32, class: usize) {
        let head = self.partial[class];
        let slab = &mut self.slabs[index as usize];
        slab.prev = NONE;
        slab.next = head;
        if head != NONE {
            self.slabs[head as usize].prev = index;
        }
        self.partial[class] = index;
    }

    fn room_for(&self, slabs: usize, charge: usize) -> bool {
        (self.used_slabs + slabs) * SLAB + self.charged + charge <= self.limit
    }

    /// Says whether the slab's pages may be absent.
    fn occupy(&mut self, index: u32, role: Use) -> bool {
        let slab = &mut self.slabs[index as usize];
        assert_eq!(slab.role, Use::Free, "slab taken twice");
        slab.role = role;
        self.used_slabs += 1;
        let absent = !slab.resident;
        if absent {
            slab.resident = true;
            self.resident_slabs += 1;
        }
        absent
    }

    fn vacate(&mut self, index: u32) {
        let slab = &mut self.slabs[index as usize];
        slab.role = Use::Free;
        self.used_slabs -= 1;
        if !slab.listed {
            slab.listed = true;
            self.spare.push(index);
        }
    }

    /// One more slab of the mapping, never used before.
    fn fresh(&mut self, max_slabs: usize) -> Option<u32> {
        if self.slabs.len() == max_slabs {
            return None;
        }
        self.slabs.push(Slab {
            role: Use::Free,
            free: 0,
            next: NONE,
            prev: NONE,
            listed: false,
            resident: false,
        });
        Some(self.slabs.len() as u32 - 1)
    }

    fn take_one(&mut self, max_slabs: usize) -> Option<u32> {
        while let Some(index) = self.spare.pop() {
            let slab = &mut self.slabs[index as usize];
            slab.listed = false;
            if slab.role == Use::Free {
                return Some(index);
            }
        }
        self.fresh(max_slabs)
    }

    /// `count` free slabs side by side; returns the first.
    fn take_run(&mut self, count: usize, max_slabs: usize) -> Option<u32> {
        let mut run = 0;
        for index in 0..self.slabs.len() {
            run = if self.slabs[index].role == Use::Free {
                run + 1
            } else {
                0
            };
            if run == count {
                return Some((index + 1 - count) as u32);
            }
        }
        // `run` free slabs end the used part of the mapping: extend them.
        let first = self.slabs.len() - run;
        if first + count > max_slabs {
            return None;
        }
        while self.slabs.len() < first + count {
            let index = self.fresh(max_slabs)?;
            let slab = &mut self.slabs[index as usize];
            slab.listed = true;
            self.spare.push(index);
        }
        Some(first as u32)
    }
}

impl Region {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn slab_base(&self, index: u32) -> NonNull<u8> {
        assert!((index as usize) < self.max_slabs);
        // SAFETY: the offset is below the mapping's length (asserted).
        unsafe { self.base.add(index as usize * SLAB) }
    }

    /// Gives the pages of empty slabs back to the kernel until at most `keep` slabs are resident.
    fn release_empty(&self, state: &mut State, keep: usize) -> usize {
        if self.pinned {
            return 0;
        }
        let mut released = 0;
        let mut index = 0;
        while index < state.slabs.len() && state.resident_slabs > keep {
            let first = index;
            while index < state.slabs.len()
                && state.slabs[index].role == Use::Free
                && state.slabs[index].resident
                && state.resident_slabs > keep
            {
                state.slabs[index].resident = false;
                state.resident_slabs -= 1;
                index += 1;
            }
            let count = index - first;
            if count == 0 {
                index += 1;
                continue;
            }
            released += count;
            let start = self.slab_base(first as u32);
            // SAFETY: these slabs are inside the mapping and free: no `Block` points into them,
            // and none can be made while the state is locked.
            let result =
                unsafe { madvise(start.as_ptr().cast(), count * SLAB, Advice::LinuxDontNeed) };
            if let Err(error) = result {
                tracing::warn!(%error, "giving memory back");
            }
        }
        released * SLAB
    }

    /// Has the kernel provide the pages of slabs at once, instead of by one fault for each. They
    /// count as resident already.
    fn populate(&self, first: u32, count: usize) {
        let start = self.slab_base(first);
        // SAFETY: the slabs are inside the mapping, and populating changes no content. Kernels
        // before 5.14 refuse the advice; the pages then come by faults.
        let _ = unsafe {
            madvise(
                start.as_ptr().cast(),
                count * SLAB,
                Advice::LinuxPopulateWrite,
            )
        };
    }

    fn alloc(&self, len: usize, charge: usize) -> Result<NonNull<u8>, NoMemory> {
        let mut state = self.state();
        let mut absent = None;
        let at = if len <= MAX_SLAB_OBJECT {
            let class = class_of(len);
            let mut index = state.partial[class];
            if index == NONE {
                if !state.room_for(1, charge) {
                    return Err(NoMemory);
                }
                index = state.take_one(self.max_slabs).ok_or(NoMemory)?;
                if state.occupy(index, Use::Class(class as u8)) {
                    absent = Some((index, 1));
                }
                state.slabs[index as usize].free = all_free(class);
                state.link(index, class);
            } else if !state.room_for(0, charge) {
                return Err(NoMemory);
            }
            let slab = &mut state.slabs[index as usize];
            debug_assert_eq!(slab.role, Use::Class(class as u8));
            let object = slab.free.trailing_zeros();
            slab.free &= !(1 << object);
            if slab.free == 0 {
                state.unlink(index, class);
            }
            state.object_bytes += class_size(class);
            let offset = object as usize * class_size(class);
            assert!(offset + class_size(class) <= SLAB);
            // SAFETY: the offset stays inside the slab (asserted).
            unsafe { self.slab_base(index).add(offset) }
        } else {
            let count = len.div_ceil(SLAB);
            if !state.room_for(count, charge) {
                return Err(NoMemory);
            }
            let first = state.take_run(count, self.max_slabs).ok_or(NoMemory)?;
            let mut any = state.occupy(first, Use::Run(count as u32));
            for index in first + 1..first + count as u32 {
                any |= state.occupy(index, Use::Tail);
            }
            absent = any.then_some((first, count));
            state.object_bytes += count * SLAB;
            self.slab_base(first)
        };
        state.charged += charge;
        if state.resident_slabs * SLAB + state.charged > state.limit {
            let keep = state.limit.saturating_sub(state.charged) / SLAB;
            self.release_empty(&mut state, keep);
        }
        drop(state);
        if let Some((first, count)) = absent
            && !self.pinned
        {
            self.populate(first, count);
        }
        Ok(at)
    }

    fn free(&self, at: NonNull<u8>, charge: usize) {
        let offset = at.as_ptr() as usize - self.base.as_ptr() as usize;
        let index = (offset / SLAB) as u32;
        let mut state = self.state();
        state.charged -= charge;
        match state.slabs[index as usize].role {
            Use::Class(class) => {
                let class = class as usize;
                let object = (offset % SLAB) / class_size(class);
                let slab = &mut state.slabs[index as usize];
                let was_full = slab.free == 0;
                assert_eq!(slab.free & (1 << object), 0, "object freed twice");
                slab.free |= 1 << object;
                let empty = slab.free == all_free(class);
                state.object_bytes -= class_size(class);
                match (was_full, empty) {
                    (true, false) => state.link(index, class),
                    (false, true) => {
                        state.unlink(index, class);
                        state.vacate(index);
                    }
                    (true, true) => state.vacate(index),
                    (false, false) => {}
                }
            }
            Use::Run(count) => {
                for slab in index..index + count {
                    state.vacate(slab);
                }
                state.object_bytes -= count as usize * SLAB;
            }
            role => unreachable!("a block in a slab that is {role:?}"),
        }
    }
}

impl Arena {
    /// Reserves address space for an arena that holds at most `limit` bytes (at least one slab).
    /// No memory is used before it is allocated.
    ///
    /// # Errors
    /// The errors of mmap(2).
    pub fn new(limit: usize) -> std::io::Result<Arena> {
        // Twice the limit, so that runs of slabs are found in a mapping that is broken up.
        Arena::map(limit, limit.max(SLAB).div_ceil(SLAB) * 2, false)
    }

    /// An arena of `limit` bytes whose memory never goes back to the kernel before the arena does,
    /// in huge pages where there are any: for memory that the kernel keeps track of, such as
    /// buffers registered with a ring. [`Arena::trim`] does nothing.
    ///
    /// # Errors
    /// The errors of mmap(2).
    pub fn pinned(limit: usize) -> std::io::Result<Arena> {
        Arena::map(limit, limit.max(SLAB).div_ceil(SLAB), true)
    }

    /// Where all memory of a pinned arena is: address and length.
    pub fn pinned_range(&self) -> Option<(*mut u8, usize)> {
        let range = (self.0.base.as_ptr(), self.0.max_slabs * SLAB);
        self.0.pinned.then_some(range)
    }

    fn map(limit: usize, max_slabs: usize, pinned: bool) -> std::io::Result<Arena> {
        let limit = limit.max(SLAB);
        if max_slabs >= NONE as usize {
            return Err(std::io::ErrorKind::InvalidInput.into());
        }
        let length = max_slabs * SLAB;
        // SAFETY: a new private mapping at an address that the kernel chooses.
        let base = unsafe {
            mmap_anonymous(
                std::ptr::null_mut(),
                length,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE | MapFlags::NORESERVE,
            )?
        };
        // A huge page would make 2 MiB resident for one slab; what is pinned is resident anyway.
        // Kernels without transparent huge pages refuse the advice, and need none.
        let huge = match pinned {
            true => Advice::LinuxHugepage,
            false => Advice::LinuxNoHugepage,
        };
        // SAFETY: the range is the mapping just made.
        let _ = unsafe { madvise(base, length, huge) };
        Ok(Arena(Arc::new(Region {
            base: NonNull::new(base.cast()).expect("mmap never returns address zero"),
            max_slabs,
            pinned,
            state: Mutex::new(State {
                limit,
                charged: 0,
                object_bytes: 0,
                used_slabs: 0,
                resident_slabs: 0,
                slabs: Vec::with_capacity(max_slabs.min(4096)),
                spare: Vec::new(),
                partial: [NONE; CLASSES],
            }),
        })))
    }

    /// Memory for `len` bytes (not zero), aligned to its size class (at least 512 bytes, at most
    /// 4 KiB is promised). Its first contents are arbitrary.
    ///
    /// # Errors
    /// [`NoMemory`] at the limit: evict something and try again.
    pub fn alloc(&self, len: usize) -> Result<Block, NoMemory> {
        self.alloc_charged(len, 0)
    }

    /// As [`Arena::alloc`], and counts `charge` bytes more against the limit for as long as the
    /// block lives: what its owner needs elsewhere to keep track of it.
    ///
    /// # Errors
    /// [`NoMemory`] at the limit: evict something and try again.
    pub fn alloc_charged(&self, len: usize, charge: usize) -> Result<Block, NoMemory> {
        assert!(len > 0, "an empty block");
        let at = self.0.alloc(len, charge)?;
        Ok(Block {
            region: self.0.clone(),
            at,
            len,
            charge,
        })
    }

    /// Gives the pages of empty slabs back to the kernel; returns how many bytes.
    pub fn trim(&self) -> usize {
        let mut state = self.0.state();
        self.0.release_empty(&mut state, 0)
    }

    /// The current use.
    pub fn stats(&self) -> ArenaStats {
        let state = self.0.state();
        ArenaStats {
            limit: state.limit,
            used: state.object_bytes + state.charged,
            in_use: state.used_slabs * SLAB + state.charged,
            resident: state.resident_slabs * SLAB + state.charged,
        }
    }
}

impl fmt::Debug for Arena {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Arena").field(&self.stats()).finish()
    }
}

/// A piece of an arena's memory, owned; goes back when dropped.
pub struct Block {
    region: Arc<Region>,
    at: NonNull<u8>,
    len: usize,
    charge: usize,
}

// SAFETY: a block is the only owner of its bytes, as a `Box<[u8]>` would be.
unsafe impl Send for Block {}
// SAFETY: shared access only reads.
unsafe impl Sync for Block {}

impl Block {
    /// The address of the first byte, for I/O by the kernel into memory that the I/O owns.
    pub fn as_ptr(&self) -> *mut u8 {
        self.at.as_ptr()
    }
}

impl Deref for Block {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the bytes are mapped (the region is kept by the `Arc`), were zeroed by the
        // kernel or written since, and belong to this block alone.
        unsafe { std::slice::from_raw_parts(self.at.as_ptr(), self.len) }
    }
}

impl DerefMut for Block {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `deref`, and `self` is borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.at.as_ptr(), self.len) }
    }
}

impl fmt::Debug for Block {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Block({:p}, {} bytes)", self.at, self.len)
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        self.region.free(self.at, self.charge);
    }
}

#[cfg(test)]
mod tests;
