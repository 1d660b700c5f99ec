//! How a program sleeps until the service has something new to say to it, and how the service knows that it has to wake
//! somebody: a system call for every program at every tick would be most of what the service costs.
//!
//! Rules:
//! 1. The service writes what is new, then rings ([`ring`]: the bell counts on), then looks whether anybody sleeps, and
//!    wakes those that do.
//! 2. A program counts itself among the sleepers (`Sleeper::lie_down`), then reads the bell, then looks at what the
//!    service says, and sleeps only as long as the bell is as it was read.
//! 3. Between the first and the second step of either there is a sequentially consistent fence: the service sees the
//!    sleeper, or the sleeper sees the ring and what was written before it.
//! 4. What a program says of its sleepers it says to its own cost: it is woken in vain, or not at all and looks by itself
//!    ([`crate::client::Account::wait`] sleeps for a moment at most).

use crate::sync::{AtomicU32, Ordering, fence};

/// Rings the bell of a program; whether anybody has to be woken.
pub fn ring(bell: &AtomicU32, sleepers: &AtomicU32) -> bool {
    bell.fetch_add(1, Ordering::Release);
    fence(Ordering::SeqCst);
    sleepers.load(Ordering::Relaxed) != 0
}

/// A thread that is about to sleep; it gets up when this is dropped.
pub(crate) struct Sleeper<'a> {
    sleepers: &'a AtomicU32,
    /// What the bell was when it lay down.
    pub(crate) bell: u32,
}

impl<'a> Sleeper<'a> {
    /// From now on it is woken when the bell rings. Before it sleeps it must look once more whether it has to.
    pub(crate) fn lie_down(bell: &AtomicU32, sleepers: &'a AtomicU32) -> Self {
        sleepers.fetch_add(1, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        Sleeper { sleepers, bell: bell.load(Ordering::Acquire) }
    }
}

impl Drop for Sleeper<'_> {
    fn drop(&mut self) {
        // Never below none: the page may have been exchanged meanwhile for one of a new service, on which nobody had lain
        // down.
        let _ = self.sleepers.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |n| n.checked_sub(1));
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn only_who_sleeps_is_woken() {
        let (bell, sleepers) = (AtomicU32::new(u32::MAX), AtomicU32::new(0));
        assert!(!ring(&bell, &sleepers));
        let a = Sleeper::lie_down(&bell, &sleepers);
        let b = Sleeper::lie_down(&bell, &sleepers);
        assert_eq!((a.bell, b.bell), (0, 0));
        assert!(ring(&bell, &sleepers));
        drop(a);
        assert!(ring(&bell, &sleepers), "the other still sleeps");
        drop(b);
        assert!(!ring(&bell, &sleepers));
        assert_eq!(bell.load(Ordering::Relaxed), 3);
        let c = Sleeper::lie_down(&bell, &sleepers);
        // Another page is in the place of this one.
        sleepers.store(0, Ordering::Relaxed);
        drop(c);
        assert!(!ring(&bell, &sleepers));
    }
}

#[cfg(all(test, loom))]
mod loom_tests {
    use super::*;
    use loom::sync::{Arc, Condvar, Mutex};

    /// The kernel's part: a thread sleeps while the word is what it was, and is woken only by a call.
    #[derive(Default)]
    struct Futex {
        queue: Mutex<()>,
        woken: Condvar,
    }

    impl Futex {
        fn wait(&self, word: &AtomicU32, was: u32) {
            let queue = self.queue.lock().unwrap();
            if word.load(Ordering::Relaxed) == was {
                drop(self.woken.wait(queue).unwrap());
            }
        }

        fn wake(&self) {
            let _queue = self.queue.lock().unwrap();
            self.woken.notify_all();
        }
    }

    #[test]
    fn no_ring_is_slept_through() {
        loom::model(|| {
            let all = Arc::new((AtomicU32::new(0), AtomicU32::new(0), AtomicU32::new(0), Futex::default()));
            let program = all.clone();
            // Nobody wakes it but the service, and whoever sleeps for ever is found by the model.
            let t = loom::thread::spawn(move || {
                let (bell, sleepers, allowance, futex) = &*program;
                while allowance.load(Ordering::Relaxed) < 2 {
                    let s = Sleeper::lie_down(bell, sleepers);
                    if allowance.load(Ordering::Relaxed) < 2 {
                        futex.wait(bell, s.bell);
                    }
                }
            });
            let (bell, sleepers, allowance, futex) = &*all;
            for new in 1..=2 {
                allowance.store(new, Ordering::Relaxed);
                if ring(bell, sleepers) {
                    futex.wake();
                }
            }
            t.join().unwrap();
            assert_eq!(sleepers.load(Ordering::Relaxed), 0);
        });
    }
}
