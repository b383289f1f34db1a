//! A line on the terminal that says how far some work is.

use std::fmt::Display;
use std::io::{IsTerminal, stderr};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread;
use std::time::{Duration, Instant};

/// A line on standard error, where that is a terminal. It is gone once this is dropped.
#[derive(Debug)]
pub struct Progress {
    shown: bool,
}

impl Progress {
    /// Nothing is shown if it is to be `quiet`.
    pub fn new(quiet: bool) -> Self {
        Self {
            shown: !quiet && stderr().is_terminal(),
        }
    }

    /// Shows `text` in place of what was shown before.
    pub fn say(&self, text: impl Display) {
        if self.shown {
            eprint!("\r{text}\x1b[K");
        }
    }

    /// Does some work. Meanwhile the line is what `far` gives, and the seconds that have passed.
    pub fn during<T>(self, far: impl Fn() -> String + Sync, work: impl FnOnce() -> T) -> T {
        if !self.shown {
            return work();
        }
        let (start, line, far) = (Instant::now(), &self, &far);
        thread::scope(|scope| {
            // Dropped once the work has ended, by a panic too.
            let (_working, done) = channel::<()>();
            scope.spawn(move || {
                loop {
                    line.say(format!("{} {} s", far(), start.elapsed().as_secs()));
                    let ended = done.recv_timeout(Duration::from_millis(100));
                    if ended != Err(RecvTimeoutError::Timeout) {
                        break;
                    }
                }
            });
            work()
        })
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.say("");
    }
}
