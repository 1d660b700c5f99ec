//! What is submitted to a grid, and what comes back.

#[cfg(doc)]
use super::Grid;
use super::layout::{ARGS, RESULT};

/// A task to submit.
#[derive(Clone, Copy, Debug)]
pub struct Call {
    pub(super) function: u32,
    pub(super) args: [u8; ARGS],
    pub(super) given: usize,
    pub(super) first: u64,
    pub(super) count: u64,
    pub(super) fuel: u32,
    pub(super) urgent: bool,
}

impl Call {
    /// A call of a function ([`Grid::function`]).
    pub fn new(function: u32) -> Self {
        Call { function, args: [0; ARGS], given: 0, first: 0, count: 1, fuel: 0, urgent: false }
    }

    /// With these arguments, as the function wants them; [`ARGS`] bytes at most.
    pub fn args(mut self, bytes: &[u8]) -> Self {
        let n = bytes.len().min(ARGS);
        self.args[..n].copy_from_slice(&bytes[..n]);
        self.given = bytes.len();
        self
    }

    /// For `count` items from `first` on, done in pieces by whoever has time. None at all is done at once.
    pub fn range(mut self, first: u64, count: u64) -> Self {
        (self.first, self.count) = (first, count);
        self
    }

    /// With a limit on the tasks and units that it and all that comes of it may use.
    pub fn fuel(mut self, units: u32) -> Self {
        self.fuel = units;
        self
    }

    /// Before what is not urgent.
    pub fn urgent(mut self) -> Self {
        self.urgent = true;
        self
    }
}

/// What came of a task.
#[derive(Clone, Copy, Debug)]
pub struct Completion {
    /// What its functions wrote.
    pub result: [u8; RESULT],
}

impl Completion {
    /// The first bytes of the result as a value.
    pub fn result_as<T: bytemuck::Pod>(&self) -> T {
        let n = size_of::<T>().min(RESULT);
        let mut value = T::zeroed();
        bytemuck::bytes_of_mut(&mut value)[..n].copy_from_slice(&self.result[..n]);
        value
    }
}
