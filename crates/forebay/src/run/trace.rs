//! What ran when, for timelines.

use std::sync::{Mutex, PoisonError};

/// Most spans that one graph keeps; later ones are counted only.
const MAX_SPANS: usize = 1 << 20;

/// One invocation of a task.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// Task, by its number in order of addition.
    pub task: u32,
    /// Device number in the runtime; 0 is the CPU.
    pub device: usize,
    /// Worker that ran or issued it.
    pub worker: usize,
    /// Begin, ns since the runtime started.
    pub begin_ns: u64,
    /// End of the function, or of the issue on asynchronous devices.
    pub end_ns: u64,
}

#[derive(Default)]
pub(crate) struct Trace {
    spans: Mutex<(Vec<Span>, u64)>,
}

impl Trace {
    pub(crate) fn record(&self, task: u32, device: usize, worker: usize, begin_ns: u64, end_ns: u64) {
        let mut s = self.spans.lock().unwrap_or_else(PoisonError::into_inner);
        if s.0.len() < MAX_SPANS {
            s.0.push(Span { task, device, worker, begin_ns, end_ns });
        } else {
            s.1 += 1;
        }
    }

    /// The spans so far, and how many did not fit.
    pub(crate) fn take(&self) -> (Vec<Span>, u64) {
        let mut s = self.spans.lock().unwrap_or_else(PoisonError::into_inner);
        (std::mem::take(&mut s.0), std::mem::take(&mut s.1))
    }
}
