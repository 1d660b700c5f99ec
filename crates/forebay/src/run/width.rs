//! How many workers of a process are at tasks at a time while it has little credit.
//!
//! Credit says whether a process may work, not on how many cores. One that uses all that it gets, on every core for a part of
//! the time, is in the way of others meanwhile: who has threads for fewer cores than its share lacks time on them for good.
//!
//! Rules:
//! 1. With little credit as many workers are at tasks as the process's share is cores, and one at least.
//! 2. With enough credit all are: what it has is more than these use up. That is what its share is beyond whole cores, or what
//!    others leave.
//! 3. Who is one too many waits with its task until another one has nothing to do, or there is enough credit, or for
//!    [`TURN`]: then it begins, and the next one of the others that asks waits.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// For so long a worker waits at most.
const TURN: Duration = Duration::from_millis(20);

/// Workers that wait.
#[derive(Default)]
pub(super) struct Width {
    waiting: Mutex<usize>,
    /// The same, for who hasn't the lock.
    waits: AtomicUsize,
    changed: Condvar,
}

impl Width {
    /// A worker is about to begin, one of `at_work()`, where `width` may; waits if it is one too many, unless it `may` all the
    /// same. Before it waits it says so (`blocks`).
    pub(super) fn pass(&self, at_work: impl Fn() -> usize, width: usize, may: impl Fn() -> bool, blocks: fn()) {
        let lock = || self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        let mut waiting = lock();
        if at_work().saturating_sub(*waiting) <= width {
            return;
        }
        blocks();
        *waiting += 1;
        self.waits.store(*waiting, Ordering::Relaxed);
        let end = Instant::now() + TURN;
        loop {
            let left = end.saturating_duration_since(Instant::now());
            // Without those who wait, as this one does.
            if left.is_zero() || at_work().saturating_sub(*waiting) < width || may() {
                break;
            }
            waiting = self.changed.wait_timeout(waiting, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        *waiting -= 1;
        self.waits.store(*waiting, Ordering::Relaxed);
    }

    /// Something is different: somebody who waits looks again. Whoever is about to wait at this moment does so for a turn.
    #[inline]
    pub(super) fn changed(&self) {
        if self.waits.load(Ordering::Relaxed) != 0 {
            self.changed.notify_one();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_too_many_waits_until_another_has_nothing_to_do_or_may_or_its_turn_has_come() {
        let w = Width::default();
        let at_work = AtomicUsize::new(2);
        let took = |width: usize, may: bool| {
            let begun = Instant::now();
            w.pass(|| at_work.load(Ordering::Relaxed), width, || may, || {});
            begun.elapsed()
        };
        let waits = |n: usize| {
            let begun = Instant::now();
            while w.waits.load(Ordering::Relaxed) != n {
                assert!(begun.elapsed().as_secs() < 10);
                std::thread::yield_now();
            }
        };
        assert!(took(2, false) < TURN && took(1, true) < TURN);
        assert!(took(1, false) >= TURN, "nothing happens");
        std::thread::scope(|s| {
            at_work.store(3, Ordering::Relaxed);
            let first = s.spawn(|| took(2, false));
            waits(1);
            // With that one waiting there are as many as may be.
            assert!(took(2, false) < TURN);
            at_work.store(2, Ordering::Relaxed);
            w.changed();
            assert!(first.join().unwrap() < 50 * TURN);
        });
        assert_eq!((w.waits.load(Ordering::Relaxed), *w.waiting.lock().unwrap()), (0, 0));
        w.changed();
    }
}
