//! The threads that handlers run on.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, RwLock};
use std::thread::JoinHandle;
use std::{io, panic};
use uvfs_sys::lock;

use crate::Filesystem;

/// The program's file system, until it is destroyed.
pub(crate) struct Held<FS: Filesystem>(RwLock<Option<FS>>);

impl<FS: Filesystem> Held<FS> {
    pub(crate) fn new(fs: FS) -> Self {
        Self(RwLock::new(Some(fs)))
    }

    /// Calls a handler. Once the file system is destroyed, drops the call and its reply, which answers EIO.
    pub(crate) fn with<T>(&self, call: impl FnOnce(&FS) -> T) -> Option<T> {
        let fs = (self.0.read()).unwrap_or_else(|poisoned| poisoned.into_inner());
        fs.as_ref().map(call)
    }

    /// Calls a function that needs the file system alone.
    pub(crate) fn with_mut<T>(&self, call: impl FnOnce(&mut FS) -> T) -> Option<T> {
        let mut fs = (self.0.write()).unwrap_or_else(|poisoned| poisoned.into_inner());
        fs.as_mut().map(call)
    }

    pub(crate) fn destroy(&self) {
        let fs = (self.0.write())
            .unwrap_or_else(|poisoned| poisoned.into_inner())
            .take();
        if let Some(mut fs) = fs {
            fs.destroy();
        }
    }
}

impl<FS: Filesystem> Drop for Held<FS> {
    fn drop(&mut self) {
        self.destroy();
    }
}

type Job<FS> = Box<dyn FnOnce(&FS) + Send>;

/// The threads that handlers run on, chosen by how many the program wants at once.
enum Place<FS> {
    /// On the queues' threads, one at a time.
    OneByOne(Mutex<()>),
    /// On the queues' threads.
    Queues,
    /// On threads of their own, as there are not enough queues.
    Pool(Mutex<Option<Sender<Job<FS>>>>),
}

/// Calls a file system's handlers.
pub(crate) struct Calls<FS: Filesystem> {
    held: Arc<Held<FS>>,
    place: Place<FS>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

impl<FS: Filesystem> Calls<FS> {
    /// Runs at most `wanted` handlers at once.
    pub(crate) fn new(held: Arc<Held<FS>>, wanted: usize, queues: usize) -> io::Result<Self> {
        let mut threads = Vec::new();
        let place = match wanted {
            0 | 1 => Place::OneByOne(Mutex::default()),
            _ if wanted <= queues => Place::Queues,
            _ => {
                let (jobs, taken) = channel();
                let taken = Arc::new(Mutex::new(taken));
                for number in 0..wanted {
                    let (held, taken) = (held.clone(), taken.clone());
                    let thread = std::thread::Builder::new()
                        .name(format!("uvfs-fuser-{number}"))
                        .spawn(move || work(&held, &taken))?;
                    threads.push(thread);
                }
                Place::Pool(Mutex::new(Some(jobs)))
            }
        };
        Ok(Self {
            held,
            place,
            threads: Mutex::new(threads),
        })
    }

    /// Whether handlers run on threads of their own, and not on the one that calls [`Calls::call`].
    pub(crate) fn are_elsewhere(&self) -> bool {
        matches!(self.place, Place::Pool(_))
    }

    pub(crate) fn call(&self, call: impl FnOnce(&FS) + Send + 'static) {
        match &self.place {
            Place::OneByOne(turn) => {
                let _turn = lock(turn);
                self.held.with(call);
            }
            Place::Queues => drop(self.held.with(call)),
            Place::Pool(jobs) => {
                if let Some(jobs) = &*lock(jobs) {
                    // Without a thread that takes it, its reply is dropped, which answers EIO.
                    let _ = jobs.send(Box::new(call));
                }
            }
        }
    }

    /// Waits for the handlers that still run on threads of their own.
    pub(crate) fn end(&self) {
        if let Place::Pool(jobs) = &self.place {
            drop(lock(jobs).take());
        }
        for thread in std::mem::take(&mut *lock(&self.threads)) {
            let _ = thread.join();
        }
    }
}

impl<FS: Filesystem> Drop for Calls<FS> {
    fn drop(&mut self) {
        self.end();
    }
}

fn work<FS: Filesystem>(held: &Held<FS>, jobs: &Mutex<Receiver<Job<FS>>>) {
    loop {
        let job = lock(jobs).recv();
        let Ok(job) = job else { return };
        // A handler that panics drops its reply. That fails its request alone, as on a queue's thread.
        let _ = panic::catch_unwind(panic::AssertUnwindSafe(|| held.with(job)));
    }
}
