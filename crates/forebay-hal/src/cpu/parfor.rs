//! Parallel loops: one loop is a counter that helpers draw ranges from, on the caller's stack.
//!
//! Rules: (1) a loop is in the list from `open` to `close`; (2) a helper registers under the list's lock, so a loop that
//! `close` took out gets no new helper; (3) `close` waits until the helpers that it has are gone; so no helper outlives
//! the stack frame; (4) who has a loop wakes one worker, and each helper that comes while there are ranges to draw wakes
//! [`WAKES`] more, until as many were woken as can be of use. Waking takes microseconds: a machine with a hundred cores would
//! spend longer on that than many a loop takes, and has them all awake a few steps later this way.

use std::any::Any;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

/// Most loops that idle workers can join at a time; further loops run on their callers alone.
const MAX_LOOPS: usize = 64;

/// Workers that a helper wakes before it helps.
const WAKES: usize = 2;

type Body<'a> = &'a (dyn Fn(usize, usize) + Sync);

pub(super) struct Loop<'a> {
    n: usize,
    grain: usize,
    body: Body<'a>,
    next: AtomicUsize,
    helpers: AtomicUsize,
    /// Workers that were woken for it.
    woken: AtomicUsize,
    /// It is among those that are counted as having ranges left.
    counted: AtomicBool,
    panicked: AtomicBool,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
}

impl<'a> Loop<'a> {
    pub(super) fn new(n: usize, grain: usize, body: Body<'a>) -> Self {
        Loop {
            n,
            grain,
            body,
            next: AtomicUsize::new(0),
            helpers: AtomicUsize::new(0),
            woken: AtomicUsize::new(0),
            counted: AtomicBool::new(false),
            panicked: AtomicBool::new(false),
            panic: Mutex::new(None),
        }
    }

    /// Wakes some for it, as many as still can be of use, by what wakes one (rule 4).
    pub(super) fn call(&self, some: usize, wake: impl Fn()) {
        let ranges = self.n.div_ceil(self.grain);
        for _ in 0..some {
            // Whoever calls draws the next one himself.
            let drawn = self.next.load(Ordering::Relaxed) / self.grain + 1;
            if drawn >= ranges || self.woken.fetch_add(1, Ordering::Relaxed) + 1 >= ranges {
                return;
            }
            wake();
        }
    }

    /// Draws ranges until none is left.
    pub(super) fn help(&self, loops: &Loops) {
        loop {
            let at = self.next.fetch_add(self.grain, Ordering::Relaxed);
            if at >= self.n || self.panicked.load(Ordering::Relaxed) {
                return;
            }
            let end = (at + self.grain).min(self.n);
            if end == self.n {
                loops.is_drawn(self);
            }
            let r = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| (self.body)(at, end)));
            if let Err(why) = r {
                self.panicked.store(true, Ordering::Relaxed);
                self.panic.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(why);
                return;
            }
        }
    }

    pub(super) fn rethrow(&self) {
        if let Some(why) = self.panic.lock().unwrap_or_else(PoisonError::into_inner).take() {
            std::panic::resume_unwind(why);
        }
    }
}

/// A loop's address without its lifetime; valid while it is in the list (rule 1 and 3).
#[derive(Clone, Copy, PartialEq)]
struct LoopPtr(*const ());

// SAFETY: `Loop` is Sync (atomics, a Mutex and a Sync body); the pointer's validity is rule 3.
unsafe impl Send for LoopPtr {}

#[derive(Default)]
pub(super) struct Loops {
    list: Mutex<Vec<LoopPtr>>,
    /// How many there are.
    open: AtomicUsize,
    /// How many of them have ranges left, so that nobody asks the lock in vain.
    left: AtomicUsize,
}

impl Loops {
    pub(super) fn any(&self) -> bool {
        self.left.load(Ordering::Relaxed) > 0
    }

    /// Whether some loop has not ended, though nothing may be left of it to help with.
    pub(super) fn are_open(&self) -> bool {
        self.open.load(Ordering::Relaxed) > 0
    }

    /// A loop has no ranges left, or is about to go.
    fn is_drawn(&self, l: &Loop<'_>) {
        if l.counted.swap(false, Ordering::Relaxed) {
            self.left.fetch_sub(1, Ordering::Relaxed);
        }
    }

    pub(super) fn open(&self, l: &Loop<'_>) {
        let mut list = self.list.lock().unwrap_or_else(PoisonError::into_inner);
        if list.len() < MAX_LOOPS {
            l.counted.store(true, Ordering::Relaxed);
            list.push(LoopPtr(std::ptr::from_ref(l).cast()));
            self.open.store(list.len(), Ordering::Relaxed);
            self.left.fetch_add(1, Ordering::SeqCst);
        }
    }

    pub(super) fn close(&self, l: &Loop<'_>) {
        let p = LoopPtr(std::ptr::from_ref(l).cast());
        {
            let mut list = self.list.lock().unwrap_or_else(PoisonError::into_inner);
            list.retain(|&o| o != p);
            self.open.store(list.len(), Ordering::Relaxed);
        }
        // After a panic some were not drawn.
        self.is_drawn(l);
        let mut spins = 0u32;
        while l.helpers.load(Ordering::Acquire) > 0 {
            spins += 1;
            // A helper that was preempted needs the core more than this loop does.
            if spins < 64 { std::hint::spin_loop() } else { std::thread::yield_now() }
        }
    }

    /// Helps with one open loop, if there is one with ranges left, and wakes others for it.
    pub(super) fn help_one(&self, wake: impl Fn()) {
        let found = {
            let list = self.list.lock().unwrap_or_else(PoisonError::into_inner);
            list.iter().rev().copied().find_map(|p| {
                // SAFETY: the loop is in the list, so its frame is alive (rules 1 and 3).
                let l: &Loop<'static> = unsafe { &*p.0.cast() };
                (l.next.load(Ordering::Relaxed) < l.n).then(|| {
                    l.helpers.fetch_add(1, Ordering::Relaxed);
                    l
                })
            })
        };
        if let Some(l) = found {
            l.call(WAKES, wake);
            l.help(self);
            // The last touch: after this the frame may go.
            l.helpers.fetch_sub(1, Ordering::Release);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn as_many_are_woken_as_can_be_of_use_and_nobody_asks_for_what_is_drawn() {
        let (loops, woken) = (Loops::default(), AtomicUsize::new(0));
        let call = |l: &Loop<'_>, some| {
            let before = woken.load(Ordering::Relaxed);
            l.call(some, || _ = woken.fetch_add(1, Ordering::Relaxed));
            woken.load(Ordering::Relaxed) - before
        };
        let seen = Mutex::new(Vec::new());
        let body = |at: usize, end: usize| {
            // The last range has been drawn, and is still being done.
            seen.lock().unwrap().push((at, end, loops.any(), loops.are_open()));
        };
        let l = Loop::new(10, 3, &body);
        loops.open(&l);
        // Four ranges: three others, whoever calls them.
        assert_eq!((call(&l, 1), call(&l, 1), call(&l, 5), call(&l, 1)), (1, 1, 1, 0));
        l.help(&loops);
        let one = |at, end, any| (at, end, any, true);
        assert_eq!(*seen.lock().unwrap(), [one(0, 3, true), one(3, 6, true), one(6, 9, true), one(9, 10, false)]);
        loops.close(&l);
        assert!(!loops.any() && !loops.are_open());
        // Nobody for the last range: its drawer does it himself.
        let l = Loop::new(10, 3, &body);
        loops.open(&l);
        l.next.store(9, Ordering::Relaxed);
        assert_eq!(call(&l, 2), 0);
        loops.close(&l);
        assert!(!loops.any());
    }
}
