//! The program's end of a channel: blocking, timed, non-blocking and asynchronous push and pull.
//!
//! Rules: (1) the program's side of the ring is owned by whoever holds `lock`. (2) A waiter, under the lock, sets
//! `waiting` with a read-modify-write, looks at the ring once more, then sleeps. (3) The graph's side changes the ring,
//! then exchanges `waiting` for 0; if it was set, it takes the lock and wakes everybody, now or soon. As in notify.rs, one of the
//! two sees the other. (4) A closed end accepts nothing; it is closed under the lock, so afterwards nobody notifies.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::task::Waker;
use std::time::{Duration, Instant};

use forebay_hal::cpu::{Job, Pool, Worker};

/// Where the pool's workers are at the moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Cores {
    /// All sleep, or nobody knows better: if there is work, a device does it.
    Idle,
    /// Some are at work, and a core is left.
    Some,
    /// At work, on every core.
    Full,
}

impl Cores {
    pub(crate) fn of(pool: &Pool) -> Self {
        match pool.sleepers() {
            0 if pool.is_full() => Cores::Full,
            n if (1..pool.workers()).contains(&n) => Cores::Some,
            _ => Cores::Idle,
        }
    }

    /// How long a waiter looks before it sleeps. Each time in a row that this was in vain, twice as many waiters only glance before
    /// one looks again, up to the most.
    ///
    /// Without a core to spare it is about what going to sleep and being woken costs (measured 4 to 45 µs): where the device's work
    /// is done by the processor, looking takes time from it. Where workers are at it and others have nothing to do, looking takes
    /// nothing from anybody here, and longer pays: what a sleeper is woken with, and what is cold in its caches then, is in the
    /// time of whoever waits (a chain of 1000 small tasks, 85 µs, took half as long again). Where all cores have work looking takes one of
    /// them from who does what is waited for: for as long as that pays where the work is tiny (64 tasks of 50 ns took twice as long with 5 µs).
    fn looks_for(self) -> Duration {
        Duration::from_micros([50, 300, 20][self as usize])
    }
}

const MOST_GLANCES: u32 = 64;
/// Looks between two glances at the clock.
const LOOKS: u32 = 64;
/// Most futures that wait at one end.
const MAX_WAKERS: usize = 1024;

pub(crate) struct HostEnd {
    lock: Mutex<HostState>,
    changed: Condvar,
    waiting: AtomicU32,
    /// For each state of the cores; only a guess, so several waiters may overwrite each other's.
    glances: [Glances; 3],
}

/// Whether looking is worth its while.
#[derive(Default)]
struct Glances {
    /// Waiters that only glance, before one looks.
    left: AtomicU32,
    /// How many, after it was in vain last.
    next: AtomicU32,
}

impl Glances {
    /// Whether the next waiter looks.
    fn looks(&self) -> bool {
        let left = self.left.load(Ordering::Relaxed);
        self.left.store(left.saturating_sub(1), Ordering::Relaxed);
        left == 0
    }

    fn found(&self) {
        self.next.store(0, Ordering::Relaxed);
    }

    fn in_vain(&self) {
        let next = (2 * self.next.load(Ordering::Relaxed)).clamp(1, MOST_GLANCES);
        self.next.store(next, Ordering::Relaxed);
        self.left.store(next, Ordering::Relaxed);
    }
}

#[derive(Default)]
pub(crate) struct HostState {
    pub(crate) closed: bool,
    wakers: Vec<Waker>,
}

impl HostEnd {
    pub(crate) fn new() -> Arc<Self> {
        Arc::new(HostEnd {
            lock: Mutex::default(),
            changed: Condvar::new(),
            waiting: AtomicU32::new(0),
            glances: Default::default(),
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

    /// The same, as soon as this worker has time for it.
    #[inline]
    pub(crate) fn wake_soon(self: &Arc<Self>, worker: &Worker) {
        unsafe fn wake(data: *const (), _: &Worker) {
            // SAFETY: given up by `into_raw` below, and taken back once.
            unsafe { Arc::from_raw(data.cast::<HostEnd>()) }.wake_all();
        }
        if self.waiting.swap(0, Ordering::AcqRel) != 0 {
            let data = Arc::into_raw(self.clone()).cast();
            // SAFETY: `data` is a count of this end, which keeps it.
            unsafe { worker.soon(Job { run: wake, data, cost_ns: 0 }) };
        }
    }

    #[cold]
    pub(crate) fn wake_all(&self) {
        let mut s = self.lock();
        self.changed.notify_all();
        s.wakers.drain(..).for_each(Waker::wake);
    }

    /// Rule 2 for threads: runs `attempt` under the lock until it gives a value or `until` has passed. `cores` says how they are
    /// used at the moment. `hint` says, without the lock, whether an attempt is worth its while. While it
    /// sleeps it keeps what `blocks` gives; with what that fails with this does, too.
    pub(crate) fn wait<T, B, E>(
        &self,
        until: Option<Instant>,
        cores: impl Fn() -> Cores,
        blocks: impl FnOnce() -> Result<B, E>,
        hint: impl Fn() -> bool,
        mut attempt: impl FnMut(&mut HostState) -> Option<T>,
    ) -> Result<Option<T>, E> {
        if let Some(v) = attempt(&mut self.lock()) {
            return Ok(Some(v));
        }
        let begun = Instant::now();
        let before = cores();
        let glances = &self.glances[before as usize];
        let looks = glances.looks();
        let spin_until = if looks { begun + before.looks_for() } else { begun };
        let spin_until = until.map_or(spin_until, |u| u.min(spin_until));
        loop {
            for _ in 0..LOOKS {
                if hint()
                    && let Some(v) = attempt(&mut self.lock())
                {
                    if looks {
                        glances.found();
                    }
                    return Ok(Some(v));
                }
                std::hint::spin_loop();
            }
            let now = Instant::now();
            // What others have found to do meanwhile comes first.
            if now >= spin_until || now >= begun + cores().looks_for() {
                break;
            }
        }
        if looks {
            glances.in_vain();
        }
        let _blocks = blocks()?;
        let mut s = self.lock();
        loop {
            self.waiting.swap(1, Ordering::AcqRel);
            if let Some(v) = attempt(&mut s) {
                return Ok(Some(v));
            }
            s = match until {
                None => self.changed.wait(s).unwrap_or_else(PoisonError::into_inner),
                Some(u) => {
                    let left = u.saturating_duration_since(Instant::now());
                    if left.is_zero() {
                        return Ok(None);
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_looks_in_vain_looks_seldom_and_who_finds_looks_always() {
        let g = Glances::default();
        let looks = |n: usize| (0..n).filter(|_| g.looks()).count();
        for glances in [1, 2, 4, 8, 16, 32, 64, 64] {
            assert_eq!(looks(1), 1);
            g.in_vain();
            assert_eq!(looks(glances), 0);
        }
        assert_eq!(looks(1), 1);
        g.found();
        assert_eq!(looks(5), 5);
        g.in_vain();
        assert_eq!(looks(3), 2);
    }

    #[test]
    fn waiting_in_vain_is_noticed_for_each_state_of_the_machine_by_itself() {
        let end = HostEnd::new();
        let next = |cores: Cores| end.glances[cores as usize].next.load(Ordering::Relaxed);
        let soon = || Some(Instant::now() + Duration::from_millis(2));
        let blocks = || Ok::<_, ()>(());
        let all = [Cores::Idle, Cores::Some, Cores::Full];
        for (n, cores) in (1..).zip(all) {
            assert_eq!(end.wait(soon(), || cores, blocks, || false, |_| None::<()>), Ok(None));
            assert_eq!(all.map(next).iter().sum::<u32>(), n, "{cores:?}");
            assert_eq!(next(cores), 1);
        }
        // The next one glances, and the one after that finds it by looking.
        let mut tries = 0;
        let mut second = |_: &mut HostState| {
            tries += 1;
            (tries == 2).then_some(())
        };
        let some = || Cores::Some;
        assert_eq!(end.wait(None, some, blocks, || false, |_| Some(())), Ok(Some(())));
        assert_eq!(end.wait(soon(), some, blocks, || false, |_| None::<()>), Ok(None));
        assert_eq!(next(Cores::Some), 1);
        assert_eq!(end.wait(None, some, blocks, || true, &mut second), Ok(Some(())));
        assert_eq!(next(Cores::Some), 0);
    }
}
