//! The lead among a client's tasks: the task that has it takes the next request.
//!
//! It takes a request and answers it itself; only when that has to wait for something, the lead passes on
//! ([`Lead::pass`]), to a task that rests or to a new one. So a request that need not wait costs no hand-over, and
//! one that waits does not keep others from being taken.
//!
//! Tasks of a [`uvfs_io::runtime::Runtime`] may be woken for what they no longer wait for. So the lead
//! is free until some task has taken it, and a task is listed as resting exactly while
//! it rests: the lead is never left to one that is busy.

use std::cell::{Cell, RefCell};
use std::task::{Poll, Waker};

/// The lead among tasks of one thread.
#[derive(Debug, Default)]
pub(super) struct Lead {
    /// No task has it.
    free: Cell<bool>,
    /// The task that was woken, or made, to take the lead and has not run yet. There is one while the lead is free.
    called: Cell<Option<u32>>,
    /// Tasks that rest, by number.
    resting: RefCell<Vec<(u32, Waker)>>,
    /// How many tasks there are.
    tasks: Cell<u32>,
    /// No task gets it any more.
    closed: Cell<bool>,
}

impl Lead {
    /// Gives the lead away. Where all other tasks are busy, the number of one to be made, which begins with
    /// [`Lead::taken`].
    ///
    /// # Panics
    /// When it was given away already.
    pub(super) fn pass(&self) -> Option<u32> {
        let was_free = self.free.replace(true);
        assert!(!was_free, "who passes the lead has it");
        if self.called.get().is_some() {
            // Another task took the lead before the called one ran. The called one takes it now, unless another is
            // first again.
            return None;
        }
        // Not in the condition: the borrow would last while the task is woken.
        let resting = self.resting.borrow_mut().pop();
        let (number, made) = match resting {
            Some((number, waker)) => {
                waker.wake();
                (number, None)
            }
            None => {
                let number = self.tasks.get();
                self.tasks.set(number + 1);
                (number, Some(number))
            }
        };
        self.called.set(Some(number));
        made
    }

    /// No task gets the lead from now on, and those that rest end.
    pub(super) fn close(&self) {
        self.closed.set(true);
        let resting = std::mem::take(&mut *self.resting.borrow_mut());
        for (_, waker) in resting {
            waker.wake();
        }
    }

    /// Rests until the lead is free, and takes it; false once it is closed.
    pub(super) async fn taken(&self, number: u32) -> bool {
        std::future::poll_fn(|cx| {
            if self.closed.get() {
                return Poll::Ready(false);
            }
            if self.called.get() == Some(number) {
                self.called.set(None);
            }
            let mut resting = self.resting.borrow_mut();
            let listed = resting.iter().position(|&(n, _)| n == number);
            if self.free.take() {
                if let Some(at) = listed {
                    resting.swap_remove(at);
                }
                return Poll::Ready(true);
            }
            if listed.is_none() {
                resting.push((number, cx.waker().clone()));
            }
            Poll::Pending
        })
        .await
    }
}

#[cfg(test)]
mod tests {
    use std::pin::{Pin, pin};
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::task::{Context, Wake};

    use super::*;

    #[derive(Default)]
    struct Woken(AtomicUsize);

    impl Wake for Woken {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// A task that takes the lead, and its waker's calls.
    struct Task<'a>(Pin<&'a mut dyn Future<Output = bool>>, Arc<Woken>);

    impl Task<'_> {
        fn takes(&mut self) -> bool {
            let waker = Waker::from(self.1.clone());
            self.0
                .as_mut()
                .poll(&mut Context::from_waker(&waker))
                .is_ready()
        }

        fn woken(&self) -> usize {
            self.1.0.load(Ordering::Relaxed)
        }
    }

    type Boxed<'a> = Pin<Box<dyn Future<Output = ()> + 'a>>;

    fn numbers(lead: &Lead) -> Vec<u32> {
        lead.resting.borrow().iter().map(|&(n, _)| n).collect()
    }

    /// A task that rests gets the lead next; a new task is made only when none rests.
    #[test]
    fn one_has_it_and_the_next_is_made_only_when_none_rests() {
        let lead = Lead::default();
        assert_eq!(lead.pass(), Some(0));
        let (mut first, mut second) = (pin!(lead.taken(0)), pin!(lead.taken(1)));
        let mut first = Task(first.as_mut(), Arc::default());
        let mut second = Task(second.as_mut(), Arc::default());
        assert!(first.takes(), "it was free");
        // Busy: no task rests.
        assert_eq!(lead.pass(), Some(1));
        assert!(second.takes());
        // Done with its request, the first rests, and is the next to lead.
        let again = pin!(lead.taken(0));
        let mut again = Task(again, Arc::default());
        assert!(!again.takes() && !again.takes());
        assert_eq!(numbers(&lead), [0], "listed once");
        assert_eq!((lead.pass(), again.woken()), (None, 1));
        assert!(again.takes() && numbers(&lead).is_empty());
        assert_eq!(lead.tasks.get(), 2);
    }

    /// A task that is woken for something else may take the free lead, and is not listed as resting then.
    #[test]
    fn who_is_woken_for_something_else_may_take_it_and_is_not_listed_then() {
        let lead = Lead::default();
        assert_eq!(lead.pass(), Some(0));
        assert!(Task(pin!(lead.taken(0)), Arc::default()).takes());
        let (mut early, mut late) = (pin!(lead.taken(1)), pin!(lead.taken(2)));
        let mut early = Task(early.as_mut(), Arc::default());
        let mut late = Task(late.as_mut(), Arc::default());
        assert!(!early.takes() && !late.takes());
        // The lead is meant for one, and the other comes by first.
        assert_eq!((lead.pass(), early.woken(), late.woken()), (None, 0, 1));
        assert!(early.takes(), "it is free");
        assert!(!late.takes(), "it was taken");
        // It is busy from now on. New requests are left to the one that rests, not to it.
        assert_eq!(numbers(&lead), [2]);
        assert_eq!((lead.pass(), early.woken(), late.woken()), (None, 0, 2));
        assert!(late.takes() && numbers(&lead).is_empty());
    }

    /// No task is made while one that was called for the lead has not come by.
    #[test]
    fn no_more_tasks_are_made_while_one_that_was_called_is_yet_to_come() {
        let lead = Lead::default();
        assert_eq!(lead.pass(), Some(0));
        // It has not begun, and others that are done with their requests come by before it.
        for number in [7, 8, 9] {
            assert!(Task(pin!(lead.taken(number)), Arc::default()).takes());
            assert_eq!(lead.pass(), None);
        }
        let mut new = pin!(lead.taken(0));
        assert!(Task(new.as_mut(), Arc::default()).takes());
        assert_eq!((lead.pass(), lead.tasks.get()), (Some(1), 2));
        // One that comes too late rests, and is called when the lead is passed on.
        assert!(Task(pin!(lead.taken(7)), Arc::default()).takes());
        let late = pin!(lead.taken(1));
        let mut late = Task(late, Arc::default());
        assert!(!late.takes());
        assert_eq!((lead.pass(), late.woken()), (None, 1));
        assert!(late.takes());
    }

    const DEPTH: u32 = 4;
    const REQUESTS: u32 = 60;

    /// A client's queue, and the tasks that serve it.
    #[derive(Default)]
    struct World {
        lead: Lead,
        /// Requests that were sent, taken, and answered.
        sent: Cell<u32>,
        taken: Cell<u32>,
        answered: Cell<u32>,
        /// The leader that has nothing to take.
        sleeps: RefCell<Option<Waker>>,
        made: RefCell<Vec<u32>>,
    }
    impl World {
        fn pass(&self) {
            if let Some(number) = self.lead.pass() {
                assert!(number <= DEPTH, "a task too many");
                self.made.borrow_mut().push(number);
            }
        }

        async fn work(&self, number: u32, waits: u64) {
            loop {
                self.lead.taken(number).await;
                let mut leads = true;
                while leads {
                    std::future::poll_fn(|cx| {
                        if self.taken.get() < self.sent.get() {
                            return Poll::Ready(());
                        }
                        *self.sleeps.borrow_mut() = Some(cx.waker().clone());
                        Poll::Pending
                    })
                    .await;
                    let request = self.taken.replace(self.taken.get() + 1);
                    let mut polls = waits >> (request % 60) & 3;
                    std::future::poll_fn(|cx| {
                        polls = polls.saturating_sub(1);
                        if polls == 0 {
                            return Poll::Ready(());
                        }
                        if std::mem::take(&mut leads) {
                            self.pass();
                        }
                        cx.waker().wake_by_ref();
                        Poll::Pending
                    })
                    .await;
                    self.answered.set(self.answered.get() + 1);
                }
            }
        }
    }

    /// However tasks are polled, no request is left and no task too many is made.
    #[test]
    fn in_no_order_is_a_request_left_or_a_task_too_many_made() {
        let mut random = 1u64;
        let mut next = || {
            random = random
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            random >> 20
        };
        for _ in 0..2000 {
            let world = World::default();
            let waits = next() << 20 ^ next();
            let mut tasks: Vec<(Boxed<'_>, Arc<Woken>)> = Vec::new();
            world.pass();
            while world.answered.get() < REQUESTS {
                for number in world.made.take() {
                    let new = Arc::new(Woken(AtomicUsize::new(1)));
                    tasks.push((Box::pin(world.work(number, waits)), new));
                }
                let under_way = world.sent.get() - world.answered.get();
                if world.sent.get() < REQUESTS && under_way < DEPTH && next() & 1 == 0 {
                    world.sent.set(world.sent.get() + 1);
                    if let Some(leader) = world.sleeps.take() {
                        leader.wake();
                    }
                }
                let woken = tasks.iter().enumerate();
                let woken = woken.filter(|(_, task)| task.1.0.load(Ordering::Relaxed) > 0);
                let woken: Vec<usize> = woken.map(|(at, _)| at).collect();
                let under_way = world.sent.get() - world.answered.get();
                assert!(!woken.is_empty() || under_way == 0, "a request is left");
                // Now and then for nothing.
                let at = match (next() & 7, woken.len()) {
                    (0, _) | (_, 0) => next() as usize % tasks.len(),
                    (_, n) => woken[next() as usize % n],
                };
                let (task, woken) = &mut tasks[at];
                woken.0.store(0, Ordering::Relaxed);
                let waker = Waker::from(woken.clone());
                let polled = task.as_mut().poll(&mut Context::from_waker(&waker));
                assert!(polled.is_pending());
            }
        }
    }

    /// Tasks end that rest when the lead is closed, or come to rest later.
    #[test]
    fn once_it_is_closed_tasks_rest_no_longer() {
        let lead = Lead::default();
        assert_eq!(lead.pass(), Some(0));
        assert!(Task(pin!(lead.taken(0)), Arc::default()).takes());
        let mut resting = pin!(lead.taken(1));
        let mut resting = Task(resting.as_mut(), Arc::default());
        assert!(!resting.takes());
        lead.close();
        assert_eq!(resting.woken(), 1);
        let waker = Waker::from(resting.1.clone());
        let polled = resting.0.as_mut().poll(&mut Context::from_waker(&waker));
        assert_eq!(polled, Poll::Ready(false));
        // Also one that is passed on, or that comes later.
        lead.pass();
        let mut late = pin!(lead.taken(2));
        let polled = late.as_mut().poll(&mut Context::from_waker(&waker));
        assert_eq!(polled, Poll::Ready(false));
    }

    /// A lead that is free can't be passed.
    #[test]
    #[should_panic(expected = "who passes the lead has it")]
    fn it_is_passed_once() {
        let lead = Lead::default();
        lead.pass();
        lead.pass();
    }
}
