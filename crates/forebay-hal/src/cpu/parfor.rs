//! Parallel loops: one loop is a counter that helpers draw ranges from, on the caller's stack.
//!
//! Rules: (1) a loop is in the list from `open` to `close`; (2) a helper registers under the list's lock, so a loop that
//! `close` took out gets no new helper; (3) `close` waits until the helpers that it has are gone; so no helper outlives
//! the stack frame.

use std::any::Any;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

/// Most loops that idle workers can join at a time; further loops run on their callers alone.
const MAX_LOOPS: usize = 64;

type Body<'a> = &'a (dyn Fn(usize, usize) + Sync);

pub(super) struct Loop<'a> {
    n: usize,
    grain: usize,
    body: Body<'a>,
    next: AtomicUsize,
    helpers: AtomicUsize,
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
            panicked: AtomicBool::new(false),
            panic: Mutex::new(None),
        }
    }

    pub(super) fn ranges(&self) -> usize {
        self.n.div_ceil(self.grain)
    }

    /// Draws ranges until none is left.
    pub(super) fn help(&self) {
        loop {
            let at = self.next.fetch_add(self.grain, Ordering::Relaxed);
            if at >= self.n || self.panicked.load(Ordering::Relaxed) {
                return;
            }
            let end = (at + self.grain).min(self.n);
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
    len: AtomicUsize,
}

impl Loops {
    pub(super) fn any(&self) -> bool {
        self.len.load(Ordering::Relaxed) > 0
    }

    pub(super) fn open(&self, l: &Loop<'_>) {
        let mut list = self.list.lock().unwrap_or_else(PoisonError::into_inner);
        if list.len() < MAX_LOOPS {
            list.push(LoopPtr(std::ptr::from_ref(l).cast()));
            self.len.store(list.len(), Ordering::SeqCst);
        }
    }

    pub(super) fn close(&self, l: &Loop<'_>) {
        let p = LoopPtr(std::ptr::from_ref(l).cast());
        {
            let mut list = self.list.lock().unwrap_or_else(PoisonError::into_inner);
            list.retain(|&o| o != p);
            self.len.store(list.len(), Ordering::Relaxed);
        }
        let mut spins = 0u32;
        while l.helpers.load(Ordering::Acquire) > 0 {
            spins += 1;
            // A helper that was preempted needs the core more than this loop does.
            if spins < 64 { std::hint::spin_loop() } else { std::thread::yield_now() }
        }
    }

    /// Helps with one open loop, if there is one with ranges left.
    pub(super) fn help_one(&self) {
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
            l.help();
            // The last touch: after this the frame may go.
            l.helpers.fetch_sub(1, Ordering::Release);
        }
    }
}
