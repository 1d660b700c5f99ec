//! Where a grid runs: on the CPU (cpu.rs) or on a CUDA device (cuda.rs).

use std::sync::Arc;

use super::heap::HeapUse;
use super::layout::{Beat, Control, Done, Slot, Task};
use super::{Builder, Error, Result};

/// What the host reaches of a grid's memory. It stays where it is as long as the site.
#[derive(Clone, Copy)]
pub(super) struct HostSide {
    pub(super) slots: [*mut Slot; 2],
    pub(super) done: *mut Done,
    pub(super) calls: *mut Task,
    pub(super) beats: *mut Beat,
    pub(super) control: *mut Control,
    /// All but completions is device memory that the processor reaches: stores are combined, and loads are slow.
    pub(super) mapped: bool,
}

/// A grid's memory, and its blocks.
pub(super) trait Site: Send + Sync {
    fn host_side(&self) -> HostSide;

    /// How many blocks it has.
    fn blocks(&self) -> usize;

    /// Whose memory blocks reach ([`forebay_hal::Device::memory_id`]); none: the host's as it is.
    fn memory_id(&self) -> Option<u64>;

    /// Whether functions can be loaded while blocks run.
    fn loads_beside(&self) -> bool;

    /// Exchanges the task functions. No block runs, or [`Site::loads_beside`].
    fn load(&self, with: &Builder) -> Result<()>;

    /// Starts the blocks. `keep` keeps the site for as long as they run.
    fn run(&self, keep: Arc<dyn Send + Sync>) -> Result<Box<dyn Blocks>>;

    /// What has ended the blocks out of order, if something has.
    fn fault(&self) -> Option<String> {
        None
    }

    /// What is taken of the heap; none without one.
    fn heap_use(&self) -> Option<Result<HeapUse>>;
}

/// Running blocks. Dropped while they run, they are left behind with what they use.
pub(super) trait Blocks: Send + Sync {
    /// Whether all have ended.
    fn have_ended(&self) -> bool;

    /// Waits for their end.
    ///
    /// # Errors
    /// [`Error::Lost`] when they did not end in order.
    fn join(self: Box<Self>) -> Result<()>;
}

impl From<forebay_hal::Error> for Error {
    fn from(e: forebay_hal::Error) -> Self {
        match e {
            forebay_hal::Error::Lost { why, .. } => Error::Lost { why, running: Vec::new() },
            forebay_hal::Error::Compile { log, .. } => Error::Compile(log),
            other => Error::Start(other.to_string()),
        }
    }
}
