//! The threads that read the source: they list directories ahead of the walk, and copy contents to
//! the device.

use super::source::{SourceDir, SourceEntry, SourceReader};
use super::{MkfsError, MkfsProgress};
use std::collections::VecDeque;
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, OnceLock};
use uvfs_io::device::Device;
use uvfs_io::engine::{self, Engine, EngineConfig, EngineKind, Io, IoExtent, Op};
use uvfs_mem::Arena;
use uvfs_sys::{lock, wait};

/// Writes that each thread has on their way at most.
const DEPTH: usize = 2;
/// Jobs that wait for a thread, for each thread.
const JOBS: usize = 8;
/// Entries of directories that are listed ahead.
const ENTRIES_AHEAD: usize = 10_000;
/// Directories that are listed ahead.
const DIRS_AHEAD: usize = 32;

/// A file whose contents are copied.
pub(crate) struct SourceFile {
    dir: Arc<dyn SourceDir>,
    name: Box<[u8]>,
    /// As it was listed, in bytes.
    size: u64,
    /// Opened once for all pieces of a file that has several; `None` if it is gone.
    reader: OnceLock<Option<SourceReader>>,
    several: bool,
}

impl SourceFile {
    /// The file `name` in `dir`, which was listed with this size. `several`: more than one piece of it is read.
    pub fn new(
        dir: Arc<dyn SourceDir>,
        name: Box<[u8]>,
        size: u64,
        several: bool,
    ) -> Arc<SourceFile> {
        Arc::new(SourceFile {
            dir,
            name,
            size,
            reader: OnceLock::new(),
            several,
        })
    }

    fn open(&self, progress: &MkfsProgress) -> Result<Option<SourceReader>, MkfsError> {
        let reader = self.dir.open(&self.name)?;
        let size = reader.as_ref().map(SourceReader::changeable_size);
        let what = match size {
            None => "removed or replaced while it was copied: zeros stand for its contents",
            Some(Some(now)) if now != self.size => {
                "changed its size while it was copied: its contents are cut off, or zeros follow them"
            }
            Some(_) => return Ok(reader),
        };
        progress.note_changed(self.dir.path(&self.name), what);
        Ok(reader)
    }

    /// Fills `buf`. Data that is no longer there becomes zeros, and is noted.
    fn read(&self, offset: u64, buf: &mut [u8], progress: &MkfsProgress) -> Result<(), MkfsError> {
        let once;
        let reader = match (self.several, self.reader.get()) {
            (true, Some(reader)) => reader,
            (true, None) => {
                let reader = self.open(progress)?;
                self.reader.get_or_init(|| reader)
            }
            (false, _) => {
                once = self.open(progress)?;
                &once
            }
        };
        let Some(reader) = reader else {
            buf.fill(0);
            return Ok(());
        };
        let path = || self.dir.path(&self.name);
        let read = reader.read_at(offset, buf);
        let read = read.map_err(|e| MkfsError::source(path(), "reading it", e))?;
        if read < buf.len() {
            let what = "became shorter while it was copied: zeros follow its contents";
            progress.note_changed(path(), what);
        }
        Ok(())
    }
}

/// A part of a file that goes to a part of a job's range; the rest of the range becomes zeros.
pub(crate) struct FilePiece {
    pub file: Arc<SourceFile>,
    /// In the file.
    pub offset: u64,
    /// In the range.
    pub at: usize,
    pub len: usize,
}

/// A range of the device to be filled.
pub(crate) struct Job {
    pub offset: u64,
    pub len: usize,
    /// In order, apart from each other.
    pub pieces: Vec<FilePiece>,
}

/// A listed directory.
pub(crate) type Listing = (Arc<dyn SourceDir>, Vec<SourceEntry>);

/// Subdirectories by name, with what the walk carries for each.
pub(crate) type Below<T> = Vec<(Box<[u8]>, T)>;

enum Slot {
    Waiting,
    Running,
    Done(Result<Listing, MkfsError>),
    Taken,
}

/// A directory to be listed.
pub(crate) struct Ticket {
    parent: Arc<dyn SourceDir>,
    /// Empty: `parent` itself.
    name: Box<[u8]>,
    slot: Mutex<Slot>,
    done: Condvar,
}

impl Ticket {
    pub fn new(parent: Arc<dyn SourceDir>, name: Box<[u8]>) -> Arc<Ticket> {
        Arc::new(Ticket {
            parent,
            name,
            slot: Mutex::new(Slot::Waiting),
            done: Condvar::new(),
        })
    }

    fn list(&self, progress: &MkfsProgress) -> Result<Listing, MkfsError> {
        let dir = match self.name.is_empty() {
            true => Some(self.parent.clone()),
            false => self.parent.clone().enter(&self.name)?,
        };
        let Some(dir) = dir else {
            let what = "removed or replaced before it was listed: it is empty";
            progress.note_changed(self.parent.path(&self.name), what);
            return Ok((self.parent.clone(), Vec::new()));
        };
        let entries = dir.list()?;
        Ok((dir, entries))
    }

    /// Lists it unless another thread does.
    fn run(&self, ahead: &AtomicUsize, progress: &MkfsProgress) {
        let mut slot = lock(&self.slot);
        if !matches!(*slot, Slot::Waiting) {
            return;
        }
        *slot = Slot::Running;
        drop(slot);
        let listed = self.list(progress);
        if let Ok((_, entries)) = &listed {
            ahead.fetch_add(entries.len(), Ordering::Relaxed);
        }
        *lock(&self.slot) = Slot::Done(listed);
        self.done.notify_all();
    }
}

#[derive(Default)]
struct PoolState {
    /// Directories to be listed ahead, the next one last.
    scans: Vec<Arc<Ticket>>,
    jobs: VecDeque<Job>,
    /// Nothing more will come.
    closed: bool,
    error: Option<MkfsError>,
}

/// The work that the threads share.
pub(crate) struct WorkPool<'a> {
    state: Mutex<PoolState>,
    /// There is work, or the end.
    work: Condvar,
    /// There is room for jobs, or an error.
    room: Condvar,
    threads: usize,
    /// Entries that were listed ahead and not yet taken.
    ahead: AtomicUsize,
    progress: &'a MkfsProgress,
}

/// Where jobs write.
pub(crate) struct Output {
    pub device: Arc<Device>,
    pub kind: EngineKind,
    pub image: PathBuf,
}

impl<'a> WorkPool<'a> {
    pub fn new(threads: usize, progress: &'a MkfsProgress) -> WorkPool<'a> {
        WorkPool {
            state: Mutex::default(),
            work: Condvar::new(),
            room: Condvar::new(),
            threads: threads.max(1),
            ahead: AtomicUsize::new(0),
            progress,
        }
    }

    /// Runs `lead` while the threads work for it, and ends when they have done all that it asked
    /// for. The first error is the outcome. Without an output there can be no jobs.
    pub fn run<T>(
        &self,
        output: Option<&Output>,
        lead: impl FnOnce() -> Result<T, MkfsError>,
    ) -> Result<T, MkfsError> {
        let led = std::thread::scope(|s| {
            for _ in 0..self.threads {
                s.spawn(|| {
                    if let Err(e) = self.worker(output) {
                        self.fail(e);
                    }
                });
            }
            // Also when the lead panics, the threads end.
            let _close = Close(self);
            let led = lead();
            if led.is_err() {
                let mut state = lock(&self.state);
                state.jobs.clear();
                state.scans.clear();
            }
            led
        });
        match lock(&self.state).error.take() {
            // A thread's error is the reason for which the walk gave up, if it did.
            Some(e) => Err(e),
            None => led,
        }
    }

    fn fail(&self, e: MkfsError) {
        let mut state = lock(&self.state);
        state.error.get_or_insert(e);
        state.jobs.clear();
        drop(state);
        self.room.notify_all();
    }

    /// Gives a job to the threads; waits while they have enough to do.
    pub fn push(&self, job: Job) -> Result<(), MkfsError> {
        let mut state = lock(&self.state);
        while state.error.is_none() && state.jobs.len() >= JOBS * self.threads {
            state = wait(&self.room, state);
        }
        if state.error.is_some() {
            return Err(MkfsError::Stopped);
        }
        state.jobs.push_back(job);
        drop(state);
        self.work.notify_one();
        Ok(())
    }

    /// Has directories listed ahead: `next` are those that will be wanted, the first one last.
    pub fn list_ahead<'t>(&self, next: impl Iterator<Item = &'t Arc<Ticket>>) {
        if self.ahead.load(Ordering::Relaxed) > ENTRIES_AHEAD {
            return;
        }
        let mut state = lock(&self.state);
        state.scans.clear();
        let waiting = next.filter(|t| matches!(*lock(&t.slot), Slot::Waiting));
        state.scans.extend(waiting.cloned());
        let any = !state.scans.is_empty();
        drop(state);
        if any {
            self.work.notify_one();
        }
    }

    /// The listing of a directory, by whomever.
    pub fn listing(&self, ticket: &Ticket) -> Result<Listing, MkfsError> {
        let mut slot = lock(&ticket.slot);
        if matches!(*slot, Slot::Waiting) {
            *slot = Slot::Taken;
            drop(slot);
            return ticket.list(self.progress);
        }
        while matches!(*slot, Slot::Running) {
            slot = wait(&ticket.done, slot);
        }
        match std::mem::replace(&mut *slot, Slot::Taken) {
            Slot::Done(listed) => {
                if let Ok((_, entries)) = &listed {
                    self.ahead.fetch_sub(entries.len(), Ordering::Relaxed);
                }
                listed
            }
            _ => ticket.list(self.progress),
        }
    }

    fn worker(&self, output: Option<&Output>) -> Result<(), MkfsError> {
        let mut writer: Option<Writer> = None;
        loop {
            let mut state = lock(&self.state);
            let (scan, job) = loop {
                if state.error.is_some() {
                    drop(state);
                    return writer.map_or(Ok(()), Writer::finish);
                }
                let enough = self.ahead.load(Ordering::Relaxed) > ENTRIES_AHEAD;
                if !enough && let Some(t) = state.scans.pop() {
                    break (Some(t), None);
                }
                if let Some(j) = state.jobs.pop_front() {
                    break (None, Some(j));
                }
                if state.closed {
                    drop(state);
                    return writer.map_or(Ok(()), Writer::finish);
                }
                state = wait(&self.work, state);
            };
            let more = !state.scans.is_empty();
            drop(state);
            if more {
                self.work.notify_one();
            }
            if let Some(t) = scan {
                t.run(&self.ahead, self.progress);
            }
            if let Some(job) = job {
                self.room.notify_one();
                let w = match (&mut writer, output) {
                    (Some(w), _) => w,
                    (None, Some(output)) => writer.insert(Writer::new(output)?),
                    (None, None) => return Err(MkfsError::Stopped),
                };
                let len = job.len as u64;
                w.copy(job, self.progress)?;
                self.progress.bytes.fetch_add(len, Ordering::Relaxed);
            }
        }
    }
}

struct Close<'p, 'a>(&'p WorkPool<'a>);

impl Drop for Close<'_, '_> {
    fn drop(&mut self) {
        lock(&self.0.state).closed = true;
        self.0.work.notify_all();
    }
}

/// A thread's own engine, with its writes on their way.
struct Writer {
    engine: Arc<dyn Engine>,
    memory: Arena,
    image: PathBuf,
    done: Vec<Io>,
}

impl Writer {
    fn new(output: &Output) -> Result<Writer, MkfsError> {
        let failed = |e: std::io::Error| MkfsError::Write {
            image: output.image.clone(),
            error: format!("starting the {} engine: {e}", output.kind),
        };
        let config = EngineConfig {
            depth: DEPTH,
            ..EngineConfig::default()
        };
        let engine = engine::open(output.kind, output.device.clone(), config).map_err(failed)?;
        // Blocks of a size that the arena has no class for take whole slabs.
        let memory =
            Arena::new((DEPTH + 2) * (super::space::REGION_BYTES as usize * 2)).map_err(failed)?;
        Ok(Writer {
            engine,
            memory,
            image: output.image.clone(),
            done: Vec::new(),
        })
    }

    fn copy(&mut self, job: Job, progress: &MkfsProgress) -> Result<(), MkfsError> {
        let mut memory = loop {
            match self.memory.alloc(job.len) {
                Ok(m) if self.engine.in_flight() < DEPTH => break m,
                refused => {
                    drop(refused);
                    if self.reap(true)? == 0 {
                        return Err(self.failed("no memory for its contents"));
                    }
                }
            }
        };
        let mut end = 0;
        for p in &job.pieces {
            memory[end..p.at].fill(0);
            end = p.at + p.len;
            p.file.read(p.offset, &mut memory[p.at..end], progress)?;
        }
        memory[end..].fill(0);
        let extent = IoExtent {
            offset: job.offset,
            len: job.len,
        };
        let mut ios = vec![Io::new(Op::Write, 0, [extent], [memory])];
        while !ios.is_empty() {
            self.engine.submit(&mut ios);
            if !ios.is_empty() {
                self.reap(true)?;
            }
        }
        self.reap(false)?;
        Ok(())
    }

    fn failed(&self, why: &str) -> MkfsError {
        MkfsError::Write {
            image: self.image.clone(),
            error: why.into(),
        }
    }

    fn reap(&mut self, wait: bool) -> Result<usize, MkfsError> {
        let n = self.engine.reap(wait, &mut self.done);
        for io in self.done.drain(..) {
            if let Some(errno) = io.error() {
                let at = io.extents.first().map_or(0, |e| e.offset);
                return Err(MkfsError::Write {
                    image: self.image.clone(),
                    error: format!("at byte {at}: {}", std::io::Error::from(errno)),
                });
            }
        }
        Ok(n)
    }

    fn finish(mut self) -> Result<(), MkfsError> {
        while self.engine.in_flight() > 0 {
            self.reap(true)?;
        }
        Ok(())
    }
}

/// A walk over all directories of a source, in depth and in the order of names, while the next ones
/// are listed ahead. Each directory carries a `T`.
pub(crate) struct SourceWalk<'p, 'a, T> {
    pool: &'p WorkPool<'a>,
    /// The next one last.
    stack: Vec<(Arc<Ticket>, T)>,
}

impl<'p, 'a, T> SourceWalk<'p, 'a, T> {
    pub fn new(pool: &'p WorkPool<'a>, root: Arc<dyn SourceDir>, with: T) -> SourceWalk<'p, 'a, T> {
        SourceWalk {
            pool,
            stack: vec![(Ticket::new(root, Box::default()), with)],
        }
    }

    /// The next directory.
    pub fn next(&mut self) -> Result<Option<(Listing, T)>, MkfsError> {
        let Some((ticket, with)) = self.stack.pop() else {
            return Ok(None);
        };
        let from = self.stack.len().saturating_sub(DIRS_AHEAD);
        self.pool
            .list_ahead(self.stack[from..].iter().map(|(t, _)| t));
        Ok(Some((self.pool.listing(&ticket)?, with)))
    }

    /// Adds the subdirectories of the directory that was given last, in the order of names.
    pub fn descend(&mut self, dir: &Arc<dyn SourceDir>, below: Below<T>) {
        let ticket = |(name, with)| (Ticket::new(dir.clone(), name), with);
        self.stack.extend(below.into_iter().rev().map(ticket));
    }
}
