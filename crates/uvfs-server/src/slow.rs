//! Requests that wait for long: the server logs each with what it waits for, and `uvfs stats` lists them.
//!
//! See `docs/slow-requests.md`.

use std::collections::HashSet;
use std::io;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, SyncSender, channel, sync_channel};
use std::sync::{Arc, Weak};
use std::thread::JoinHandle;
use std::time::Duration;

use crate::fs::{FileSystem, Node};
use crate::interrupt::Cause;
use crate::session::Session;
use crate::session::stuck::MOST;
use crate::stats::opcode_name;
use uvfs_sys::lock;

/// A thread that logs requests which wait for long. It ends when this is dropped.
pub struct Slow {
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Slow {
    /// Starts the thread, unless the session's `slow` is zero.
    ///
    /// # Errors
    /// When no thread can be started.
    pub fn start<F: FileSystem>(session: &Arc<Session<F>>) -> io::Result<Option<Self>> {
        let slow = session.options.slow;
        if slow.is_zero() {
            return Ok(None);
        }
        // Finding a path may hang as the file system does, so another thread does it, which is never joined.
        let (ask, asked) = sync_channel(MOST);
        let weak = Arc::downgrade(session);
        let namer = weak.clone();
        std::thread::Builder::new()
            .name("uvfs-names".into())
            .spawn(move || find_names(&namer, &asked))?;
        let (stop, stopped) = channel();
        let thread = std::thread::Builder::new()
            .name("uvfs-slow".into())
            .spawn(move || watch(&weak, slow, &stopped, &ask))?;
        Ok(Some(Self {
            stop: Some(stop),
            thread: Some(thread),
        }))
    }
}

impl Drop for Slow {
    fn drop(&mut self) {
        self.stop = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn find_names<F: FileSystem>(session: &Weak<Session<F>>, asked: &Receiver<u64>) {
    for node in asked {
        let Some(session) = session.upgrade() else {
            return;
        };
        let path = (session.fs().clients()).and_then(|clients| clients.path(Node(node)));
        let path = path.map(|path| format!("/{}", String::from_utf8_lossy(&path)));
        if let Some(name) = lock(&session.slow).get_mut(&node) {
            *name = path;
        }
    }
}

fn watch<F: FileSystem>(
    session: &Weak<Session<F>>,
    slow: Duration,
    stopped: &Receiver<()>,
    ask: &SyncSender<u64>,
) {
    let period = (slow / 4).clamp(Duration::from_millis(50), Duration::from_secs(5));
    let mut told = HashSet::new();
    while let Err(RecvTimeoutError::Timeout) = stopped.recv_timeout(period) {
        let Some(session) = session.upgrade() else {
            return;
        };
        let waiting = session.interrupts.longer_than(slow, MOST);
        let mut names = lock(&session.slow);
        names.retain(|node, _| waiting.iter().any(|(waits, _)| waits.node == *node));
        told.retain(|unique| waiting.iter().any(|(waits, _)| waits.unique == *unique));
        for (waits, since) in waiting {
            if let Some(name) = names.get(&waits.node) {
                // A program that waits for a lock chose to wait.
                if waits.cause != Cause::Lock && told.insert(waits.unique) {
                    tracing::error!(
                        opcode = opcode_name(waits.opcode),
                        node = waits.node,
                        file = name.as_deref().unwrap_or("?"),
                        pid = waits.pid,
                        seconds = since.elapsed().as_secs_f32(),
                        "a request waits for {}",
                        waits.cause.name()
                    );
                }
            } else if ask.try_send(waits.node).is_ok() {
                names.insert(waits.node, None);
            }
        }
    }
}
