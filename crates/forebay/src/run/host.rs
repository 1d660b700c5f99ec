//! The program's end of a channel: blocking, timed, non-blocking and asynchronous push and pull.
//!
//! Rules: (1) the program's side of the ring is owned by whoever holds `lock`. (2) A waiter, under the lock, sets
//! `waiting` with a read-modify-write, looks at the ring once more, then sleeps. (3) The graph's side changes the ring,
//! then exchanges `waiting` for 0; if it was set, it takes the lock and wakes everybody. As in notify.rs, one of the
//! two sees the other. (4) A closed end accepts nothing; it is closed under the lock, so afterwards nobody notifies.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::task::Waker;
use std::time::{Duration, Instant};

/// How long a waiter looks before it sleeps, at most: about what going to sleep and being woken costs (measured 4 to
/// 45 µs). Half of that after each time it was in vain, down to the least, and all again when it would have been enough:
/// where the device's work is done by the processor, looking takes time from it.
const SPIN: Duration = Duration::from_micros(50);
const LEAST_SPIN: Duration = Duration::from_micros(1);
/// Looks between two glances at the clock.
const LOOKS: u32 = 64;
/// Most futures that wait at one end.
const MAX_WAKERS: usize = 1024;

pub(crate) struct HostEnd {
    lock: Mutex<HostState>,
    changed: Condvar,
    waiting: AtomicU32,
    /// How long to look, ns; only a guess, so several waiters may overwrite each other's.
    spin: AtomicU32,
}

#[derive(Default)]
pub(crate) struct HostState {
    pub(crate) closed: bool,
    wakers: Vec<Waker>,
}

const fn nanos(d: Duration) -> u32 {
    d.subsec_nanos()
}

impl HostEnd {
    pub(crate) fn new() -> Box<Self> {
        Box::new(HostEnd {
            lock: Mutex::default(),
            changed: Condvar::new(),
            waiting: AtomicU32::new(0),
            spin: AtomicU32::new(nanos(SPIN)),
        })
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, HostState> {
        self.lock.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Rule 3; called by the graph's side after a change.
    #[inline]
    pub(crate) fn wake(&self) {
        if self.waiting.swap(0, Ordering::AcqRel) != 0 {
            self.wake_all();
        }
    }

    #[cold]
    pub(crate) fn wake_all(&self) {
        let mut s = self.lock();
        self.changed.notify_all();
        s.wakers.drain(..).for_each(Waker::wake);
    }

    /// Rule 2 for threads: runs `attempt` under the lock until it gives a value or `until` has passed. `hint` says,
    /// without the lock, whether an attempt is worth its while.
    pub(crate) fn wait<T>(
        &self,
        until: Option<Instant>,
        hint: impl Fn() -> bool,
        mut attempt: impl FnMut(&mut HostState) -> Option<T>,
    ) -> Option<T> {
        if let Some(v) = attempt(&mut self.lock()) {
            return Some(v);
        }
        let begun = Instant::now();
        let spin = self.spin.load(Ordering::Relaxed);
        let spin_until = begun + Duration::from_nanos(spin.into());
        let spin_until = until.map_or(spin_until, |u| u.min(spin_until));
        loop {
            for _ in 0..LOOKS {
                if hint()
                    && let Some(v) = attempt(&mut self.lock())
                {
                    return Some(v);
                }
                std::hint::spin_loop();
            }
            if Instant::now() >= spin_until {
                break;
            }
        }
        self.spin.store((spin / 2).max(nanos(LEAST_SPIN)), Ordering::Relaxed);
        forebay_hal::cpu::about_to_block();
        let mut s = self.lock();
        loop {
            self.waiting.swap(1, Ordering::AcqRel);
            if let Some(v) = attempt(&mut s) {
                if begun.elapsed() < SPIN {
                    self.spin.store(nanos(SPIN), Ordering::Relaxed);
                }
                return Some(v);
            }
            s = match until {
                None => self.changed.wait(s).unwrap_or_else(PoisonError::into_inner),
                Some(u) => {
                    let left = u.saturating_duration_since(Instant::now());
                    if left.is_zero() {
                        return None;
                    }
                    self.changed.wait_timeout(s, left).unwrap_or_else(PoisonError::into_inner).0
                }
            };
        }
    }

    /// Rule 2 for futures: registers `waker` unless `attempt` succeeds.
    pub(crate) fn poll<T>(&self, waker: &Waker, mut attempt: impl FnMut(&mut HostState) -> Option<T>) -> Option<T> {
        let mut s = self.lock();
        self.waiting.swap(1, Ordering::AcqRel);
        if let Some(v) = attempt(&mut s) {
            return Some(v);
        }
        if !s.wakers.iter().any(|w| w.will_wake(waker)) {
            if s.wakers.len() >= MAX_WAKERS {
                // Never lose one: the oldest polls again, and registers again.
                s.wakers.remove(0).wake();
            }
            s.wakers.push(waker.clone());
        }
        None
    }
}
