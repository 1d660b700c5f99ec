//! Kernels that stay on a device until they are told to end, and calls of the driver that would wait for them.
//!
//! Rules:
//! 1. The driver frees memory and loads code only when every kernel has ended, whoever launched it. Neither is begun while a
//!    kernel stays: what is to be freed is put aside until the last one has ended, and code is refused.
//! 2. A kernel that is to stay is announced before it is launched, and launched when nothing that was begun before is under
//!    way any more: the thread that frees something would wait for it, for as long as it stays.
//! 3. Who waits by rule 2 has announced himself before, so that those he waits for become no more.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use super::sys::Driver;

/// Frees something.
pub(super) type Free = Box<dyn FnOnce(&'static Driver) + Send>;

#[derive(Default)]
struct State {
    /// Those that stay, and those that are announced.
    kernels: usize,
    /// Calls under way that would wait for them.
    between: usize,
    /// For the end of the last kernel.
    after: Vec<Free>,
}

/// The kernels that stay on a device.
#[derive(Default)]
pub(super) struct Stay {
    state: Mutex<State>,
    /// Told when `between` becomes 0.
    none_between: Condvar,
}

/// No kernel stays, and none comes while this is held.
pub(super) struct Between<'a>(&'a Stay);

impl Stay {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// For a call that would wait for kernels that stay; none if there are some.
    pub(super) fn between(&self) -> Option<Between<'_>> {
        let mut state = self.state();
        (state.kernels == 0).then(|| {
            state.between += 1;
            Between(self)
        })
    }

    /// The same, for a call that is put aside if there are some.
    pub(super) fn between_or_after<F: FnOnce(&'static Driver) + Send + 'static>(
        &self,
        free: F,
    ) -> Option<(F, Between<'_>)> {
        let mut state = self.state();
        if state.kernels > 0 {
            state.after.push(Box::new(free));
            return None;
        }
        state.between += 1;
        Some((free, Between(self)))
    }

    /// A kernel is about to come (rules 2 and 3).
    pub(super) fn occupy(&self) {
        let mut state = self.state();
        state.kernels += 1;
        let none = self.none_between.wait_while(state, |s| s.between > 0);
        drop(none.unwrap_or_else(PoisonError::into_inner));
    }

    /// One has ended, or did not come: what was put aside, if it was the last one.
    #[must_use]
    pub(super) fn leave(&self) -> Vec<Free> {
        let mut state = self.state();
        state.kernels -= 1;
        if state.kernels == 0 { std::mem::take(&mut state.after) } else { Vec::new() }
    }
}

impl Drop for Between<'_> {
    fn drop(&mut self) {
        let mut state = self.0.state();
        state.between -= 1;
        if state.between == 0 {
            self.0.none_between.notify_all();
        }
    }
}
