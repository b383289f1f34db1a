//! The end of a mount by signals, step by step: for `signals.rs`, and for `uvfs mount` (`end_on_signals`).

use std::io;
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::io::Errno;

use super::Mount;

/// How often to look whether a busy mount can be unmounted.
pub const AGAIN: Duration = Duration::from_millis(250);

/// How far the end of a mount has come. (`stage/` has another kind of stage.)
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// No signal came.
    Served,
    /// Being unmounted; what the kernel has to write is written.
    Unmounting,
    /// Unmounted as soon as its users are done.
    Waiting,
    /// Out of the tree, and served until its users are done.
    Detached,
    /// Aborted: calls of its users fail.
    Aborted,
}

/// What signals do to a mount. The first one unmounts. If the mount is in use, SIGINT waits for its users and says
/// who they are, as a person is there to read it; other signals, and a second SIGINT, detach it: it leaves the tree
/// and is served until its last user is done, so that no change is lost. One more signal cuts the users off.
#[derive(Debug)]
pub struct Ending {
    mount: Mount,
    stage: Stage,
    /// The first signal was SIGINT.
    patient: bool,
    attempt: Option<JoinHandle<io::Result<()>>>,
    say: fn(&str),
    users: fn(&Mount) -> String,
}

impl Ending {
    /// Of a mount. `say` gets the messages, and `users` names the mount's users, as [`Mount::users`] does.
    pub fn new(mount: Mount, say: fn(&str), users: fn(&Mount) -> String) -> Self {
        Self {
            mount,
            stage: Stage::Served,
            patient: false,
            attempt: None,
            say,
            users,
        }
    }

    /// How far the end has come.
    pub fn stage(&self) -> Stage {
        self.stage
    }

    /// Whether [`Ending::tick`] is to be called again after [`AGAIN`].
    pub fn is_pending(&self) -> bool {
        self.attempt.is_some() || self.stage == Stage::Waiting
    }

    /// Takes the next step. It does not block: a thread unmounts, which may have to wait for a slow store.
    pub fn signal(&mut self, signal: i32) {
        match self.stage {
            Stage::Served => {
                self.patient = signal == libc::SIGINT;
                self.stage = Stage::Unmounting;
                self.attempt(Mount::unmount);
            }
            Stage::Unmounting | Stage::Waiting => self.detach(),
            Stage::Detached | Stage::Aborted => self.abort(),
        }
    }

    /// Looks how the last attempt went, and tries again while the mount is in use.
    pub fn tick(&mut self) {
        if self.attempt.as_ref().is_some_and(|one| !one.is_finished()) {
            return;
        }
        let outcome = self.attempt.take().map(JoinHandle::join);
        match outcome {
            Some(Ok(Err(error))) => self.failed(&error),
            None if self.stage == Stage::Waiting => self.attempt(Mount::unmount),
            // Once it is unmounted, the kernel ends the connection, and with that the server's threads end
            // (`Server::wait`).
            _ => {}
        }
    }

    fn failed(&mut self, error: &io::Error) {
        let busy = error.raw_os_error() == Some(Errno::BUSY.raw_os_error());
        match self.stage {
            Stage::Waiting if busy => {}
            Stage::Unmounting if busy && self.patient => {
                self.stage = Stage::Waiting;
                let users = (self.users)(&self.mount);
                self.say(&format!(
                    "in use by {users}: waits until they are done (once more detaches it now)"
                ));
            }
            Stage::Unmounting if busy => self.detach(),
            Stage::Unmounting | Stage::Waiting => {
                self.say(&format!("can't be unmounted: {error}"));
                self.detach();
            }
            _ => self.say(&format!("can't be detached: {error}")),
        }
    }

    fn detach(&mut self) {
        let busy = self.stage == Stage::Waiting || self.attempt.is_none();
        self.stage = Stage::Detached;
        self.attempt(Mount::detach);
        let why = match busy {
            true => format!("serves {} until they are done", (self.users)(&self.mount)),
            false => "still writes what the kernel holds".into(),
        };
        self.say(&format!("detached: {why} (once more cuts them off)"));
    }

    fn abort(&mut self) {
        self.stage = Stage::Aborted;
        match self.mount.abort() {
            Ok(()) => self.say("cut off: programs that used it get errors"),
            Err(error) => self.say(&format!("can't be cut off: {error}")),
        }
    }

    fn attempt(&mut self, work: fn(&Mount) -> io::Result<()>) {
        let mount = self.mount.clone();
        let thread = std::thread::Builder::new().name("uvfs-unmount".into());
        match thread.spawn(move || work(&mount)) {
            Ok(thread) => self.attempt = Some(thread),
            Err(error) => self.say(&format!("no thread to unmount it: {error}")),
        }
    }

    fn say(&self, what: &str) {
        (self.say)(&format!("{}: {what}", self.mount.at().display()));
    }
}
