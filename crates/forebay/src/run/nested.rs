//! What a worker gives up while a function on it waits for other tasks: its place in the pool, its slot of a device (the CPU, or the
//! one whose kernel has failed), and what its task counts for at the service. Any of these could be what the other tasks need.

use super::dispatch::{self, Lent};
use super::gate::Waits;
use super::runtime::RuntimeInner;
use crate::error::{Error, Result};

/// The thread is a worker, and waits as long as it keeps this.
#[must_use = "the worker waits as long as this is kept"]
pub(crate) struct Nested {
    _slot: Option<Lent>,
    _waits: Option<Waits>,
    _place: forebay_hal::cpu::Blocked,
}

impl RuntimeInner {
    /// Called before a thread sleeps for tasks of this runtime; none if it is no worker.
    ///
    /// # Errors
    /// [`Error::AllWait`].
    pub(crate) fn waits_here(&self) -> Result<Option<Nested>> {
        let place = forebay_hal::cpu::blocks().map_err(|all| Error::AllWait { functions: all.0 })?;
        Ok(place.map(|place| {
            let waits = self.gate.as_ref().map(|gate| gate.waits());
            Nested { _slot: dispatch::lend_slot(), _waits: waits, _place: place }
        }))
    }
}
