//! The threads that serve clients: one for each core, however many clients there are.

use std::future::poll_fn;
use std::io;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::{Poll, Waker};
use std::thread::JoinHandle;

use rustix::net::{Shutdown, shutdown};
use slab::Slab;
use uvfs_io::ops::File;
use uvfs_io::runtime::{self, Remote, Runtime};
use uvfs_queue::placement;
use uvfs_queue::wait::WaitConfig;

use crate::client::tasks::contained;
use uvfs_sys::lock;

/// The threads, each with a runtime. Dropping the pool tells the clients that the server ends, and
/// waits until they were served to the end.
pub(super) struct Pool {
    workers: Vec<(Arc<Worker>, Remote)>,
    threads: Vec<JoinHandle<()>>,
}

/// One thread of the pool, as other threads see it.
#[derive(Default)]
struct Worker(Mutex<State>);

#[derive(Default)]
struct State {
    /// The sockets of the clients that this thread serves.
    sockets: Slab<Arc<File>>,
    /// No more clients come.
    stopping: bool,
    /// Wakes the task that waits for the last client's end.
    waker: Option<Waker>,
}

impl Worker {
    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.0)
    }

    fn run(self: Arc<Self>, wait: WaitConfig, started: &Sender<io::Result<Remote>>) {
        let runtime = match Runtime::new(wait) {
            Ok(runtime) => runtime,
            Err(error) => {
                let _ = started.send(Err(error));
                return;
            }
        };
        let _ = started.send(Ok(runtime.remote()));
        let served = poll_fn(move |cx| {
            let mut state = self.state();
            if state.stopping && state.sockets.is_empty() {
                return Poll::Ready(());
            }
            state.waker = Some(cx.waker().clone());
            Poll::Pending
        });
        if let Err(error) = runtime.block_on(served) {
            tracing::error!(%error, "a thread that serves clients ended");
        }
    }
}

/// A client's place on a worker.
struct Seat {
    worker: Arc<Worker>,
    key: usize,
}

impl Drop for Seat {
    fn drop(&mut self) {
        let waker = {
            let mut state = self.worker.state();
            state.sockets.remove(self.key);
            state.waker.take()
        };
        if let Some(waker) = waker {
            waker.wake();
        }
    }
}

impl Pool {
    /// Starts the threads.
    ///
    /// # Errors
    /// When a thread or its ring can't be had.
    pub(super) fn start(wait: WaitConfig) -> io::Result<Self> {
        let mut pool = Self {
            workers: Vec::new(),
            threads: Vec::new(),
        };
        for _ in placement::allowed_cores()? {
            let worker = Arc::new(Worker::default());
            let (theirs, (started, remote)) = (worker.clone(), channel());
            let thread = std::thread::Builder::new()
                .name("uvfs-clients".into())
                .spawn(move || theirs.run(wait, &started))?;
            pool.threads.push(thread);
            let remote = remote
                .recv()
                .map_err(|_| io::Error::other("a thread for clients did not start"))??;
            pool.workers.push((worker, remote));
        }
        Ok(pool)
    }

    /// Serves a client on the thread that has the fewest. A panic of `client` ends its future alone.
    pub(super) fn serve<S>(&self, socket: Arc<File>, client: impl FnOnce() -> S + Send + 'static)
    where
        S: Future<Output = ()> + 'static,
    {
        let load = |(worker, _): &&(Arc<Worker>, Remote)| worker.state().sockets.len();
        let (worker, remote) = self
            .workers
            .iter()
            .min_by_key(load)
            .expect("there are cores");
        let seat = Seat {
            key: worker.state().sockets.insert(socket),
            worker: worker.clone(),
        };
        remote.call(move || {
            runtime::spawn(async move {
                contained(client()).await;
                drop(seat);
            });
        });
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        for (worker, _) in &self.workers {
            let waker = {
                let mut state = worker.state();
                state.stopping = true;
                for (_, socket) in &state.sockets {
                    // The other end is closed when what the client left dirty has been written.
                    let _ = shutdown(&**socket, Shutdown::Read);
                }
                state.waker.take()
            };
            if let Some(waker) = waker {
                waker.wake();
            }
        }
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}
