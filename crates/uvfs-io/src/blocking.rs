//! System calls that may block and that io_uring cannot do, on a small shared pool of threads.

use std::collections::VecDeque;
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Condvar, Mutex, OnceLock};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

/// At most this many threads run blocking calls; further ones wait their turn.
const MAX_THREADS: usize = 8;
/// A thread with nothing to do for so long ends.
const IDLE: Duration = Duration::from_secs(5);

type Job = Box<dyn FnOnce() + Send>;

#[derive(Default)]
struct State {
    jobs: VecDeque<Job>,
    threads: usize,
    idle: usize,
}

#[derive(Default)]
struct Pool {
    state: Mutex<State>,
    work: Condvar,
}

fn pool() -> &'static Pool {
    static POOL: OnceLock<Pool> = OnceLock::new();
    POOL.get_or_init(Pool::default)
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    // A job's panic is caught in `run`, so a poisoned lock still guards consistent state.
    mutex
        .lock()
        .unwrap_or_else(|poisoned| poisoned.into_inner())
}

fn worker() {
    let pool = pool();
    let mut state = lock(&pool.state);
    loop {
        if let Some(job) = state.jobs.pop_front() {
            drop(state);
            job();
            state = lock(&pool.state);
            continue;
        }
        state.idle += 1;
        let (next, timeout) = pool
            .work
            .wait_timeout(state, IDLE)
            .unwrap_or_else(|poisoned| poisoned.into_inner());
        state = next;
        state.idle -= 1;
        if timeout.timed_out() && state.jobs.is_empty() {
            state.threads -= 1;
            return;
        }
    }
}

struct Slot<T> {
    result: Option<std::thread::Result<T>>,
    waker: Option<Waker>,
}

struct Call<T>(Arc<Mutex<Slot<T>>>);

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

/// Runs `call` on another thread and gives its result. Once begun it runs to its end, even if the
/// future is dropped; a panic in it goes on in the one who awaits.
pub async fn run<T: Send + 'static>(call: impl FnOnce() -> T + Send + 'static) -> T {
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
    submit(job);
    Call(slot).await
}

fn submit(job: Job) {
    let pool = pool();
    let mut state = lock(&pool.state);
    state.jobs.push_back(job);
    if state.idle < state.jobs.len() && state.threads < MAX_THREADS {
        let spawned = std::thread::Builder::new()
            .name("uvfs-blocking".into())
            .spawn(worker);
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
