//! Processes that are forked from one that uses Forebay: what was made before the fork is of no use to them. Threads are not there,
//! locks that other threads held stay held, and drivers serve the first process only.
//!
//! Rule: whoever has threads, or what is a driver's, remembers in which process it was made ([`Home`]), and looks before it waits for
//! them, asks the driver for anything, or gives anything back. What cannot be given back is left: a process that was forked
//! mostly ends soon, or begins another program.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

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
