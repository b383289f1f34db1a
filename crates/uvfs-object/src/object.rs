//! The pieces of one version of an object: which are in the cache, which are under way, and who waits for them.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use rustix::fs::{FallocateFlags, Timespec, Timestamps, UTIME_NOW, UTIME_OMIT};
use rustix::io::Errno;
use tokio::runtime::Handle;
use tokio::sync::{Semaphore, watch};
use uvfs_io::ops;
use uvfs_server::fs::{Error, Result};

use crate::cache::{Cache, Id};
use crate::map::{ENTRIES, THERE, piece_log};
use crate::store::{Store, Version};

/// Bytes of one request to the store, at most.
const RUN: u64 = 4 << 20;

/// One version of an object, and its pieces in the cache.
pub(crate) struct Object {
    pub(crate) id: Id,
    pub(crate) key: String,
    pub(crate) version: Version,
    /// The length of a piece, as a power of two.
    piece_log: u32,
    data: Arc<ops::File>,
    /// The same file.
    file: File,
    map: File,
    state: Mutex<Pieces>,
    /// This mount wrote all pieces that are there, or has compared their checksums. It outlives the object.
    verified: Arc<AtomicBool>,
    /// A piece has come, or will not.
    changed: watch::Sender<()>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Piece {
    Missing,
    /// An earlier mount wrote it; its checksum was not compared yet.
    Found,
    UnderWay,
    Good,
}

struct Pieces {
    pieces: Vec<Piece>,
    /// How many are [`Piece::Good`].
    good: usize,
    /// Requests that failed, and how the last one did.
    failures: u64,
    failure: Option<(Errno, Arc<str>)>,
    /// Reads of the data file that are under way.
    pins: Vec<Range<usize>>,
    /// Nodes for which the kernel reads the data file by itself.
    backed: usize,
}

/// Keeps pieces in the data file while they are read.
pub(crate) struct Pinned<'a> {
    object: &'a Object,
    pieces: Range<usize>,
}

impl Drop for Pinned<'_> {
    fn drop(&mut self) {
        let mut state = self.object.state();
        let at = state.pins.iter().position(|pin| *pin == self.pieces);
        state.pins.swap_remove(at.expect("it was pinned"));
    }
}

/// The store, the cache and the threads that all objects get their pieces by.
#[derive(Clone)]
pub(crate) struct Fetch {
    pub(crate) store: Store,
    pub(crate) runtime: Handle,
    pub(crate) cache: Arc<Cache>,
    /// One for each request that may be under way.
    pub(crate) permits: Arc<Semaphore>,
}

impl Object {
    /// Takes over the files of a version. The data file has the object's size.
    pub(crate) fn new(
        id: Id,
        key: String,
        version: Version,
        file: File,
        map: File,
        verified: Arc<AtomicBool>,
    ) -> io::Result<Self> {
        let piece_log = piece_log(version.size);
        let count = version.size.div_ceil(1 << piece_log) as usize;
        let mut entries = vec![0; 8 * count];
        let mut known = 0;
        while known < entries.len() {
            match map.read_at(&mut entries[known..], ENTRIES + known as u64)? {
                0 => break,
                n => known += n,
            }
        }
        let there = match verified.load(Ordering::Relaxed) {
            true => Piece::Good,
            false => Piece::Found,
        };
        let found = |entry: &[u8; 8]| match u64::from_le_bytes(*entry) & THERE {
            0 => Piece::Missing,
            _ => there,
        };
        let (entries, _) = entries.as_chunks();
        let pieces: Vec<_> = entries.iter().map(found).collect();
        let good = pieces.iter().filter(|piece| **piece == Piece::Good).count();
        Ok(Self {
            id,
            key,
            version,
            piece_log,
            data: Arc::new(ops::File::from(std::os::fd::OwnedFd::from(
                file.try_clone()?,
            ))),
            file,
            map,
            state: Mutex::new(Pieces {
                pieces,
                good,
                failures: 0,
                failure: None,
                pins: Vec::new(),
                backed: 0,
            }),
            verified,
            changed: watch::Sender::new(()),
        })
    }

    /// The data file, for reads of pinned pieces and as a backing file.
    pub(crate) fn data(&self) -> &Arc<ops::File> {
        &self.data
    }

    /// Whether all pieces are there.
    pub(crate) fn is_complete(&self) -> bool {
        let state = self.state();
        state.good == state.pieces.len()
    }

    /// Lets the kernel read the data file by itself for one node, if all pieces are there. They stay until
    /// [`Object::not_backed`].
    pub(crate) fn back(&self) -> bool {
        let mut state = self.state();
        let complete = state.good == state.pieces.len();
        state.backed += usize::from(complete);
        complete
    }

    /// The kernel reads the data file by itself since before this server.
    pub(crate) fn backed_before(&self) {
        self.state().backed += 1;
    }

    /// The kernel reads the data file no more for a node.
    pub(crate) fn not_backed(&self) {
        self.state().backed -= 1;
    }

    /// Waits until a range of bytes is in the data file, requests what is missing of it and of `ahead`, and keeps it there.
    ///
    /// # Errors
    /// ESTALE when the store has another version, EIO and EACCES of the store, ENOSPC when the cache has no room.
    pub(crate) async fn have(
        self: &Arc<Self>,
        fetch: &Fetch,
        range: Range<u64>,
        ahead: Range<u64>,
    ) -> Result<Pinned<'_>> {
        let wanted = self.pieces(range.clone());
        let mut changed = self.changed.subscribe();
        let failures = {
            let state = self.state();
            let (len, missing) = (range.end - range.start, self.missing(&state, &range));
            fetch.store.counters.read(len, missing);
            state.failures
        };
        // In one look: what a request for `wanted` did not bring by the second is not to be requested for `ahead` again.
        self.start(fetch, wanted.clone().chain(self.pieces(ahead)));
        loop {
            let given_back;
            {
                let mut state = self.state();
                let pieces = &state.pieces[wanted.clone()];
                if pieces.iter().all(|piece| *piece == Piece::Good) {
                    state.pins.push(wanted.clone());
                    return Ok(Pinned {
                        object: self,
                        pieces: wanted,
                    });
                }
                if state.failures != failures
                    && pieces.contains(&Piece::Missing)
                    && let Some((errno, why)) = &state.failure
                {
                    return Err(Error::new(*errno, why.to_string()));
                }
                given_back =
                    (pieces.iter()).any(|piece| matches!(piece, Piece::Missing | Piece::Found));
            }
            // Only then: a request that has failed since this look is not to be made again.
            if given_back {
                self.start(fetch, wanted.clone());
            }
            // The object keeps the sender.
            let _ = changed.changed().await;
        }
    }

    /// Copies a range that is in the data file to the same place of another file.
    pub(crate) fn copy_to(&self, to: &File, range: Range<u64>) -> io::Result<()> {
        let (mut from, mut at) = (range.start, range.start);
        while from < range.end {
            let rest = (range.end - from) as usize;
            let copied =
                rustix::fs::copy_file_range(&self.file, Some(&mut from), to, Some(&mut at), rest)?;
            if copied == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
        }
        Ok(())
    }

    /// How many bytes of a range are not in the data file.
    fn missing(&self, state: &Pieces, range: &Range<u64>) -> u64 {
        if state.good == state.pieces.len() {
            return 0;
        }
        let there = |n: &usize| matches!(state.pieces[*n], Piece::Good | Piece::Found);
        let gone = self.pieces(range.clone()).filter(|n| !there(n));
        gone.map(|n| {
            let piece = self.bytes(n..n + 1);
            piece.end.min(range.end) - piece.start.max(range.start)
        })
        .sum()
    }

    /// Requests all that is missing, for a later open.
    pub(crate) fn fetch(self: &Arc<Self>, fetch: &Fetch) {
        self.start(fetch, self.pieces(0..self.version.size));
    }

    /// Gives pieces back from the beginning on, until `bytes` are free, and says how many are. What is read stays.
    pub(crate) fn give_back(&self, bytes: u64) -> u64 {
        let mut state = self.state();
        if state.backed > 0 {
            return 0;
        }
        let mut freed = 0;
        for n in 0..state.pieces.len() {
            if freed >= bytes {
                break;
            }
            let free = matches!(state.pieces[n], Piece::Good | Piece::Found);
            if !free || state.pins.iter().any(|pin| pin.contains(&n)) {
                continue;
            }
            // The entry first: it must not be there without the piece.
            if self.map.write_all_at(&[0; 8], entry(n)).is_err() {
                break;
            }
            let range = self.bytes(n..n + 1);
            let len = range.end - range.start;
            let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            if let Err(error) = rustix::fs::fallocate(&self.file, punch, range.start, len) {
                tracing::debug!(%error, "the cache's file system frees no part of a file");
            }
            state.good -= usize::from(state.pieces[n] == Piece::Good);
            state.pieces[n] = Piece::Missing;
            freed += len;
        }
        freed
    }

    fn state(&self) -> MutexGuard<'_, Pieces> {
        uvfs_sys::lock(&self.state)
    }

    /// The pieces that a range of bytes touches.
    fn pieces(&self, range: Range<u64>) -> Range<usize> {
        if range.is_empty() {
            return 0..0;
        }
        let end = range
            .end
            .min(self.version.size)
            .div_ceil(1 << self.piece_log);
        let start = (range.start >> self.piece_log).min(end);
        start as usize..end as usize
    }

    fn bytes(&self, pieces: Range<usize>) -> Range<u64> {
        let end = (pieces.end as u64) << self.piece_log;
        (pieces.start as u64) << self.piece_log..end.min(self.version.size)
    }

    /// Begins to get what is missing of these pieces.
    fn start(self: &Arc<Self>, fetch: &Fetch, wanted: impl Iterator<Item = usize>) {
        let longest = ((RUN >> self.piece_log) as usize).max(1);
        let mut runs: Vec<(Piece, Range<usize>)> = Vec::new();
        let mut state = self.state();
        for n in wanted {
            let piece = state.pieces[n];
            if !matches!(piece, Piece::Missing | Piece::Found) {
                continue;
            }
            state.pieces[n] = Piece::UnderWay;
            match runs.last_mut() {
                Some((kind, run)) if *kind == piece && run.end == n && run.len() < longest => {
                    run.end = n + 1;
                }
                _ => runs.push((piece, n..n + 1)),
            }
        }
        drop(state);
        for (kind, run) in runs {
            let (object, fetch) = (self.clone(), fetch.clone());
            let runtime = fetch.runtime.clone();
            if kind == Piece::Found {
                runtime.spawn_blocking(move || {
                    let lost = object.verify(run);
                    fetch.cache.shrunk(&object, lost);
                });
            } else {
                runtime.spawn(async move {
                    let result = object.get(&fetch, run.clone()).await;
                    object.ended(run, result);
                });
            }
        }
    }

    /// A request has ended. What it did not bring is missing again.
    fn ended(&self, run: Range<usize>, result: Result<()>) {
        let mut state = self.state();
        for piece in &mut state.pieces[run] {
            if *piece == Piece::UnderWay {
                *piece = Piece::Missing;
            }
        }
        if let Err(error) = result {
            state.failures += 1;
            state.failure = Some((error.errno(), error.to_string().into()));
        }
        drop(state);
        self.changed.send_replace(());
    }

    /// Compares the checksums of pieces that an earlier mount wrote, and says how many bytes are damaged.
    fn verify(&self, run: Range<usize>) -> u64 {
        let mut buffer = vec![0; 1 << 16];
        let mut lost = 0;
        for n in run.clone() {
            let good = self.sum(n, &mut buffer).is_ok_and(|same| same);
            if good {
                self.arrived(n);
            } else {
                let (key, piece) = (&self.key, n);
                tracing::warn!(
                    key,
                    piece,
                    "a piece in the cache is damaged: it is requested again"
                );
                let range = self.bytes(n..n + 1);
                lost += range.end - range.start;
            }
        }
        self.ended(run, Ok(()));
        // Under way may be others that were found.
        let settled = |piece: &Piece| matches!(piece, Piece::Missing | Piece::Good);
        if self.state().pieces.iter().all(settled) {
            self.verified.store(true, Ordering::Relaxed);
        }
        lost
    }

    fn sum(&self, n: usize, buffer: &mut [u8]) -> io::Result<bool> {
        let mut noted = [0; 8];
        self.map.read_exact_at(&mut noted, entry(n))?;
        let mut range = self.bytes(n..n + 1);
        let mut sum = 0;
        while !range.is_empty() {
            let len = buffer.len().min((range.end - range.start) as usize);
            self.file.read_exact_at(&mut buffer[..len], range.start)?;
            sum = crc32c::crc32c_append(sum, &buffer[..len]);
            range.start += len as u64;
        }
        Ok(u64::from_le_bytes(noted) == THERE | u64::from(sum))
    }

    /// A piece is in the data file, and the map says so.
    fn arrived(&self, n: usize) {
        let mut state = self.state();
        debug_assert_eq!(state.pieces[n], Piece::UnderWay);
        state.pieces[n] = Piece::Good;
        state.good += 1;
        drop(state);
        self.changed.send_replace(());
    }

    /// Requests pieces from the store, and writes them as they come.
    async fn get(self: &Arc<Self>, fetch: &Fetch, run: Range<usize>) -> Result<()> {
        let (store, range) = (&fetch.store, self.bytes(run.clone()));
        let _permit = store.permit(&self.key, &fetch.permits).await?;
        let begin = store.fetch(&self.key, &self.version, range.clone());
        let mut stream = begin.await?;
        // Without conditions it is known only at the end whether all is of one version.
        let at_once = store.is_conditional(&self.version);
        let mut sums = Vec::new();
        let (mut at, mut sum, mut n) = (range.start, 0, run.start);
        while let Some(buffer) = store.next(&self.key, &mut stream).await? {
            for mut bytes in buffer {
                while !bytes.is_empty() && n < run.end {
                    let end = self.bytes(n..n + 1).end;
                    let part = bytes.split_to(bytes.len().min((end - at) as usize));
                    fetch
                        .cache
                        .with_room(|| self.file.write_all_at(&part, at))?;
                    sum = crc32c::crc32c_append(sum, &part);
                    at += part.len() as u64;
                    if at == end {
                        match at_once {
                            true => self.keep(fetch, n, sum)?,
                            false => sums.push((n, sum)),
                        }
                        (sum, n) = (0, n + 1);
                    }
                }
            }
        }
        if at != range.end {
            let why = format!("object {:?} ends at {at}, before {}", self.key, range.end);
            return Err(Error::new(Errno::STALE, why));
        }
        store.still(&self.key, &self.version).await?;
        sums.into_iter()
            .try_for_each(|(n, sum)| self.keep(fetch, n, sum))
    }

    /// A piece was written.
    fn keep(self: &Arc<Self>, fetch: &Fetch, n: usize, sum: u32) -> Result<()> {
        let noted = (THERE | u64::from(sum)).to_le_bytes();
        let note = || self.map.write_all_at(&noted, entry(n));
        fetch.cache.with_room(note)?;
        let range = self.bytes(n..n + 1);
        self.arrived(n);
        fetch.cache.grown(self, range.end - range.start);
        Ok(())
    }
}

impl Drop for Object {
    fn drop(&mut self) {
        // The next mount evicts by it.
        let times = Timestamps {
            last_access: Timespec {
                tv_sec: 0,
                tv_nsec: UTIME_OMIT,
            },
            last_modification: Timespec {
                tv_sec: 0,
                tv_nsec: UTIME_NOW,
            },
        };
        let _ = rustix::fs::futimens(self.map.as_fd(), &times);
    }
}

/// Where the map has the entry of a piece.
fn entry(n: usize) -> u64 {
    ENTRIES + 8 * n as u64
}
