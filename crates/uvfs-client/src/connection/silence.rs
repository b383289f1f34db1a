//! Whether a server that lives still answers.

use std::sync::Mutex;
use std::time::{Duration, Instant};

use uvfs_sys::lock;

/// The longest step between two looks that counts in full. A client that was stopped, or a machine that
/// slept, has not listened meanwhile.
const STEP: Duration = Duration::from_millis(500);

/// The result of a look at a session.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Sign {
    /// The server answers, or no request waits.
    Lives,
    /// Half of the time is over: a request that every server answers at once tells a slow file from a
    /// silent server.
    Ask,
    /// The server has answered nothing for the whole time.
    Silent,
}

/// For how long a server has answered nothing while requests were under way.
#[derive(Debug, Default)]
pub(crate) struct Silence(Mutex<Answers>);

#[derive(Debug, Default)]
struct Answers {
    /// Answers that had come by the last look.
    answers: u64,
    /// When the last look was, if requests were under way then.
    looked: Option<Instant>,
    silent: Duration,
    asked: bool,
}

impl Silence {
    /// Looks at a session of which so many answers were taken, `waiting` when requests are under way.
    pub(crate) fn look(&self, now: Instant, waiting: bool, answers: u64, bound: Duration) -> Sign {
        let state = &mut *lock(&self.0);
        // A request may be younger than the look before it, so time counts from the first look that finds it.
        let before = std::mem::replace(&mut state.looked, waiting.then_some(now));
        if !waiting || answers != state.answers {
            (state.answers, state.silent, state.asked) = (answers, Duration::ZERO, false);
            return Sign::Lives;
        }
        state.silent += before.map_or(Duration::ZERO, |at| (now - at).min(STEP));
        if state.silent >= bound {
            return Sign::Silent;
        }
        if state.silent * 2 >= bound && !std::mem::replace(&mut state.asked, true) {
            return Sign::Ask;
        }
        Sign::Lives
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BOUND: Duration = Duration::from_secs(2);

    /// Only time in which the client runs counts as a server's silence, and enough of it ends the session.
    #[test]
    fn only_time_without_answers_counts_and_that_in_steps() {
        let (silence, start) = (Silence::default(), Instant::now());
        let at = |ms| start + Duration::from_millis(ms);
        let look = |ms, waiting, answers| silence.look(at(ms), waiting, answers, BOUND);
        assert_eq!(look(0, true, 0), Sign::Lives);
        // The client was stopped for a minute.
        assert_eq!(look(60_000, true, 0), Sign::Lives);
        assert_eq!(look(60_400, true, 0), Sign::Lives);
        assert_eq!(look(60_500, true, 0), Sign::Ask);
        assert_eq!(look(60_900, true, 0), Sign::Lives, "asked once");
        // It answered.
        assert_eq!(look(61_000, true, 1), Sign::Lives);
        for ms in (61_200..62_000).step_by(200) {
            assert_eq!(look(ms, true, 1), Sign::Lives);
        }
        assert_eq!(look(62_000, true, 1), Sign::Ask);
        // Nothing is under way.
        assert_eq!(look(62_200, false, 1), Sign::Lives);
        // A request that was sent after the last look, at 62,399 say.
        for ms in (62_400..64_400).step_by(200) {
            assert_ne!(look(ms, true, 1), Sign::Silent, "{ms}");
        }
        assert_eq!(look(64_400, true, 1), Sign::Silent);
    }
}
