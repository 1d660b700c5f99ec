//! A device as one runtime uses it: one queue, and a bound on what is in flight.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use forebay_hal::{Device, Fence, Kind, Queue, Result};

/// Invocations that may be in flight on a device when throughput counts.
pub(crate) const DEPTH_THROUGHPUT: usize = 32;
/// While the oldest invocation in flight is older than this, no more than two are: what is issued far ahead of slow
/// kernels gains no throughput and costs latency.
const MAX_AHEAD: Duration = Duration::from_millis(2);
/// Invocations in flight when order counts: one running, one ready behind it.
pub(crate) const DEPTH_PRIORITY: usize = 2;

/// A device of a runtime.
pub(crate) struct DeviceHandle {
    /// Number in the runtime; 0 is the CPU.
    pub(crate) index: usize,
    pub(crate) device: Arc<dyn Device>,
    queue: Mutex<Issue>,
    depth: usize,
    /// Bytes moved to and from the device.
    pub(crate) copied: AtomicU64,
    /// Invocations issued.
    pub(crate) invocations: AtomicU64,
}

/// The queue and the fences of the latest invocations; locked while a task is issued.
pub(crate) struct Issue {
    pub(crate) queue: Box<dyn Queue>,
    in_flight: VecDeque<(Fence, Instant)>,
}

impl DeviceHandle {
    pub(crate) fn new(index: usize, device: Arc<dyn Device>, depth: usize) -> Result<Arc<Self>> {
        let queue = device.queue()?;
        Ok(Arc::new(DeviceHandle {
            index,
            device,
            queue: Mutex::new(Issue { queue, in_flight: VecDeque::with_capacity(depth + 1) }),
            depth,
            copied: AtomicU64::new(0),
            invocations: AtomicU64::new(0),
        }))
    }

    /// The CPU shares the host's memory: no views, no copies.
    pub(crate) fn is_host(&self) -> bool {
        self.device.info().host_memory
    }

    pub(crate) fn kind(&self) -> Kind {
        self.device.info().kind
    }

    /// Lock rank: after a block's views, before nothing.
    pub(crate) fn lock(&self) -> MutexGuard<'_, Issue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn wait(&self, fence: Fence) -> Result<()> {
        self.lock().queue.wait(fence)
    }

    pub(crate) fn count_copy(&self, bytes: usize) {
        self.copied.fetch_add(bytes as u64, Ordering::Relaxed);
    }
}

impl Issue {
    /// Ends the issue of one invocation; blocks while more than `depth` are in flight.
    pub(crate) fn invocation_issued(&mut self, depth: usize) -> Result<()> {
        let fence = self.queue.fence()?;
        let now = Instant::now();
        if self.in_flight.back().is_none_or(|(f, _)| *f != fence) {
            self.in_flight.push_back((fence, now));
        }
        while let Some(&(oldest, since)) = self.in_flight.front() {
            let late = self.in_flight.len() > DEPTH_PRIORITY && now.duration_since(since) > MAX_AHEAD;
            if self.in_flight.len() > depth || late {
                self.queue.wait(oldest)?;
            } else if !self.queue.done(oldest)? {
                break;
            }
            self.in_flight.pop_front();
        }
        Ok(())
    }
}

impl DeviceHandle {
    pub(crate) fn depth(&self) -> usize {
        self.depth
    }
}
