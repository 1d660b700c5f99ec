//! Processes that are forked from one that uses Forebay: what was made before the fork is of no use to them. Threads are not there,
//! locks that other threads held stay held, and drivers serve the first process only.
//!
//! Rule: whoever has threads, or what is a driver's, remembers in which process it was made ([`Home`]), and looks before it waits for
//! them, asks the driver for anything, or gives anything back. What cannot be given back is left: a process that was forked
//! mostly ends soon, or begins another program. What all of a process shares is its own ([`Own`]).

use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Why something does not work.
pub const WHY: &str = "it was made by the process that this one was forked from";

/// Why there are no devices.
pub(crate) const UNUSABLE: &str = "the process that this one was forked from has used them, and drivers serve no other one after \
                                   that; start it anew instead of forking it, or fork it before devices are used";

/// How many forks lie between the first process and this one.
static FORKS: AtomicU32 = AtomicU32::new(0);

extern "C" fn forked() {
    FORKS.fetch_add(1, Ordering::Relaxed);
}

/// The process that something was made in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Home(u32);

impl Home {
    /// This one.
    pub fn here() -> Self {
        static WATCHED: AtomicBool = AtomicBool::new(false);
        if !WATCHED.swap(true, Ordering::Relaxed) {
            // SAFETY: the function does what one may do in a child: it adds to an atomic. (Without memory for the entry, forks are not
            // seen.)
            unsafe { libc::pthread_atfork(None, None, Some(forked)) };
        }
        Home(FORKS.load(Ordering::Relaxed))
    }

    /// Whether that is this process. A load and a comparison.
    #[inline]
    pub fn is_here(self) -> bool {
        self.0 == FORKS.load(Ordering::Relaxed)
    }
}

/// What each process has one of, behind a lock; for statics. A process that was forked begins with an empty one: another thread
/// may have held the first one's lock at that moment, and nobody would let go of it.
pub struct Own<T>(AtomicPtr<(Home, Mutex<T>)>);

// `Send`, since threads hand it to each other: the pointer itself would not ask for that.
impl<T: Default + Send> Own<T> {
    /// Nothing yet.
    #[allow(clippy::new_without_default, reason = "only statics have one")]
    pub const fn new() -> Self {
        Own(AtomicPtr::new(null_mut()))
    }

    /// This process's.
    pub fn lock(&self) -> MutexGuard<'_, T> {
        let mut at = self.0.load(Ordering::Acquire);
        loop {
            // SAFETY: null, or what was made below, which is never freed: threads of this process may have it, and of the
            // first one's nobody knows in which state it is.
            if let Some((home, all)) = unsafe { at.as_ref() }
                && home.is_here()
            {
                return all.lock().unwrap_or_else(PoisonError::into_inner);
            }
            let made = Box::into_raw(Box::new((Home::here(), Mutex::new(T::default()))));
            at = match self.0.compare_exchange(at, made, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => made,
                Err(anothers) => {
                    // SAFETY: made above, and nobody else has it.
                    drop(unsafe { Box::from_raw(made) });
                    anothers
                }
            };
        }
    }
}
