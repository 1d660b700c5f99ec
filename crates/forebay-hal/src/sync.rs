//! What sleeping workers share: the standard library's, or loom's when it explores all interleavings.

#[cfg(all(loom, test))]
pub(crate) use loom::{
    sync::Mutex,
    sync::atomic::{AtomicBool, AtomicUsize, Ordering, fence},
    thread::yield_now,
};
#[cfg(not(all(loom, test)))]
pub(crate) use std::{
    sync::Mutex,
    sync::atomic::{AtomicBool, AtomicUsize, Ordering, fence},
    thread::yield_now,
};

/// Where one thread waits. Whoever wakes it before it does so keeps it from it once.
#[cfg(not(all(loom, test)))]
#[derive(Default)]
pub(crate) struct Parker(std::sync::OnceLock<std::thread::Thread>);

#[cfg(not(all(loom, test)))]
impl Parker {
    /// It is the calling thread's: said before anybody wakes it, and before it waits.
    pub(crate) fn sit(&self) {
        let _ = self.0.set(std::thread::current());
    }

    /// Until it is woken, or for no reason.
    pub(crate) fn park(&self) {
        std::thread::park();
    }

    pub(crate) fn unpark(&self) {
        self.0.get().into_iter().for_each(std::thread::Thread::unpark);
    }
}

/// The same of what loom knows: its own unparking also ends the wait for a lock.
#[cfg(all(loom, test))]
pub(crate) struct Parker(Mutex<bool>, loom::sync::Condvar);

#[cfg(all(loom, test))]
impl Default for Parker {
    fn default() -> Self {
        Parker(Mutex::new(false), loom::sync::Condvar::new())
    }
}

#[cfg(all(loom, test))]
impl Parker {
    pub(crate) fn sit(&self) {}

    pub(crate) fn park(&self) {
        let mut woken = self.0.lock().unwrap();
        while !*woken {
            woken = self.1.wait(woken).unwrap();
        }
        *woken = false;
    }

    pub(crate) fn unpark(&self) {
        *self.0.lock().unwrap() = true;
        self.1.notify_one();
    }
}
