//! System calls that may block and that io_uring cannot do, on small pools of threads: one that all
//! share, others of users, and others for what may never end.

use std::collections::{HashMap, VecDeque};
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Condvar, Mutex, OnceLock};
use std::task::{Context, Poll, Waker};
use std::time::Duration;
use uvfs_queue::placement;
use uvfs_sys::{lock, wait_while};

/// Threads of the pool that all share.
const MAX_THREADS: usize = 8;
/// A thread with nothing to do for so long ends.
const IDLE: Duration = Duration::from_secs(5);

type Job = Box<dyn FnOnce() + Send>;

#[derive(Default)]
struct PoolState {
    jobs: VecDeque<Job>,
    threads: usize,
    idle: usize,
}

/// A pool of threads that begin as they are needed, and end when there is nothing to do.
pub struct Pool {
    /// At most so many threads run calls; further calls wait their turn.
    most: usize,
    state: Mutex<PoolState>,
    work: Condvar,
}

fn shared() -> &'static Arc<Pool> {
    static POOL: OnceLock<Arc<Pool>> = OnceLock::new();
    POOL.get_or_init(|| Pool::new(MAX_THREADS))
}

fn worker(pool: &Pool) {
    placement::unbind();
    let mut state = lock(&pool.state);
    loop {
        if let Some(job) = state.jobs.pop_front() {
            drop(state);
            job();
            state = lock(&pool.state);
            continue;
        }
        state.idle += 1;
        let timeout;
        (state, timeout) = wait_while(&pool.work, state, IDLE, |state| state.jobs.is_empty());
        state.idle -= 1;
        if timeout.timed_out() {
            state.threads -= 1;
            return;
        }
    }
}

struct Slot<T> {
    result: Option<std::thread::Result<T>>,
    waker: Option<Waker>,
}

/// The result of a call, once it has ended.
pub struct Call<T>(Arc<Mutex<Slot<T>>>);

impl<T> Future for Call<T> {
    type Output = T;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<T> {
        let mut slot = lock(&self.0);
        match slot.result.take() {
            Some(Ok(value)) => Poll::Ready(value),
            Some(Err(panic)) => std::panic::resume_unwind(panic),
            None => {
                slot.waker = Some(cx.waker().clone());
                Poll::Pending
            }
        }
    }
}

/// Runs `call` on a thread of the shared pool: see [`Pool::run`].
pub async fn run<T: Send + 'static>(call: impl FnOnce() -> T + Send + 'static) -> T {
    shared().run(call).await
}

impl Pool {
    /// Of at most so many threads.
    pub fn new(most: usize) -> Arc<Self> {
        Arc::new(Self {
            most,
            state: Mutex::default(),
            work: Condvar::new(),
        })
    }

    /// Runs `call` on another thread and gives its result. It runs to its end, even if the future is
    /// dropped; a panic in it goes on in the task that awaits.
    pub fn run<T: Send + 'static>(
        self: &Arc<Self>,
        call: impl FnOnce() -> T + Send + 'static,
    ) -> Call<T> {
        let (result, job) = call_of(call);
        submit(self, job);
        result
    }

    /// Runs `call` on another thread; it says by itself that it has ended, and does not panic.
    pub(crate) fn start(self: &Arc<Self>, call: impl FnOnce() + Send + 'static) {
        submit(self, Box::new(call));
    }
}

/// Pools of users, so that no user's calls wait for another's.
pub struct PerUser {
    /// The most threads of a user's pool.
    most: usize,
    pools: Mutex<HashMap<u32, Arc<Pool>>>,
}

impl PerUser {
    /// Each user's pool has at most `most` threads.
    pub fn new(most: usize) -> Self {
        Self {
            most,
            pools: Mutex::default(),
        }
    }

    /// Runs `call` on one of the user's threads: see [`Pool::run`].
    pub fn run<T: Send + 'static>(
        &self,
        user: u32,
        call: impl FnOnce() -> T + Send + 'static,
    ) -> Call<T> {
        // Without the lock: where no thread can be had, the call runs in this one.
        self.pool(user).run(call)
    }

    fn pool(&self, user: u32) -> Arc<Pool> {
        let mut pools = lock(&self.pools);
        if !pools.contains_key(&user) {
            // Threads hold their pool, so a pool that only this map holds is idle.
            pools.retain(|_, pool| Arc::strong_count(pool) > 1);
        }
        let new = || Pool::new(self.most);
        pools.entry(user).or_insert_with(new).clone()
    }
}

fn call_of<T: Send + 'static>(call: impl FnOnce() -> T + Send + 'static) -> (Call<T>, Job) {
    let slot = Arc::new(Mutex::new(Slot {
        result: None,
        waker: None,
    }));
    let theirs = slot.clone();
    let job: Job = Box::new(move || {
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(call));
        let waker = {
            let mut slot = lock(&theirs);
            slot.result = Some(result);
            slot.waker.take()
        };
        if let Some(waker) = waker {
            waker.wake();
        }
    });
    (Call(slot), job)
}

fn submit(pool: &Arc<Pool>, job: Job) {
    let mut state = lock(&pool.state);
    state.jobs.push_back(job);
    if state.idle < state.jobs.len() && state.threads < pool.most {
        let theirs = pool.clone();
        let spawned = std::thread::Builder::new()
            .name("uvfs-blocking".into())
            .spawn(move || worker(&theirs));
        match spawned {
            Ok(_) => state.threads += 1,
            // No thread to be had: do it here rather than never.
            Err(_) if state.threads == 0 => {
                let job = state.jobs.pop_back();
                drop(state);
                if let Some(job) = job {
                    job();
                }
                return;
            }
            Err(_) => {}
        }
    }
    drop(state);
    pool.work.notify_one();
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use super::*;

    /// A user's calls that take long keep no other user's waiting.
    #[test]
    fn no_user_waits_for_another() {
        let pools = PerUser::new(MAX_THREADS);
        let (end, ended) = channel::<()>();
        let ended = Arc::new(Mutex::new(ended));
        for _ in 0..3 * MAX_THREADS {
            let ended = ended.clone();
            drop(pools.run(1, move || lock(&ended).recv()));
        }
        let (done, other) = channel();
        drop(pools.run(2, move || done.send(())));
        let waited = other.recv_timeout(Duration::from_secs(20));
        drop(end);
        assert_eq!(waited, Ok(()));
    }
}
