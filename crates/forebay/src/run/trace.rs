//! What ran when, for timelines.
//!
//! Where the environment names a folder in [`TRACE_VARIABLE`], every graph of the process is recorded, and leaves a file
//! there when it is torn down or the process exits: [`Recording`] as JSON. Nobody is disturbed when that cannot be written.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use forebay_hal::Direction;
use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};

/// Names the folder to which all graphs' recordings go.
pub const TRACE_VARIABLE: &str = "FOREBAY_TRACE";
/// Most spans that one graph keeps; later ones are counted only.
const MAX_SPANS: usize = 1 << 20;
/// Most copies that one device keeps.
const MAX_COPIES: usize = 1 << 18;

/// One invocation of a task.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
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

/// One copy between a device and the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CopySpan {
    /// Device number in the runtime.
    pub device: usize,
    /// To the device, or else from it.
    pub to_device: bool,
    /// How many bytes.
    pub bytes: u64,
    /// Begin, ns since the runtime started.
    pub begin_ns: u64,
    /// End of the copy when the processor made it, or else of the issue.
    pub end_ns: u64,
}

/// What one graph did.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Recording {
    /// The process.
    pub pid: u32,
    /// The graph's name.
    pub graph: String,
    /// The runtime's start on the system's monotonic clock, ns: what all times here are counted from.
    pub epoch_ns: u64,
    /// Names of tasks, by number.
    pub tasks: Vec<String>,
    /// Names of devices, by number.
    pub devices: Vec<String>,
    /// Invocations.
    pub spans: Vec<Span>,
    /// Copies of the runtime that no other graph's recording has.
    pub copies: Vec<CopySpan>,
    /// Spans and copies for which there was no room.
    pub dropped: u64,
}

impl Recording {
    /// Writes it to a file of its own in `folder`.
    pub(crate) fn write(&self, folder: &Path) -> std::io::Result<PathBuf> {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let path = folder.join(format!("{}-{}.json", self.pid, NUMBER.fetch_add(1, Ordering::Relaxed)));
        std::fs::write(&path, serde_json::to_vec(self)?)?;
        Ok(path)
    }
}

/// A moment on the system's monotonic clock, ns.
pub(crate) fn monotonic_ns(at: Instant) -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    let now_ns = now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64;
    now_ns.saturating_sub(at.elapsed().as_nanos() as u64)
}

/// Things that are kept up to a number, and counted beyond it.
struct Kept<T>(Mutex<(Vec<T>, u64)>);

impl<T> Default for Kept<T> {
    fn default() -> Self {
        Kept(Mutex::new((Vec::new(), 0)))
    }
}

impl<T> Kept<T> {
    fn push(&self, most: usize, t: T) {
        let mut s = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if s.0.len() < most {
            s.0.push(t);
        } else {
            s.1 += 1;
        }
    }

    /// What there is so far, and how many did not fit.
    fn take(&self) -> (Vec<T>, u64) {
        let mut s = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        (std::mem::take(&mut s.0), std::mem::take(&mut s.1))
    }
}

#[derive(Default)]
pub(crate) struct Trace(Kept<Span>);

impl Trace {
    pub(crate) fn record(&self, task: u32, device: usize, worker: usize, begin_ns: u64, end_ns: u64) {
        self.0.push(MAX_SPANS, Span { task, device, worker, begin_ns, end_ns });
    }

    pub(crate) fn take(&self) -> (Vec<Span>, u64) {
        self.0.take()
    }
}

/// A device's copies, from the first traced graph on.
pub(crate) struct Copies {
    epoch: Instant,
    kept: Kept<CopySpan>,
}

impl Copies {
    pub(crate) fn new(epoch: Instant) -> Self {
        Copies { epoch, kept: Kept::default() }
    }

    pub(crate) fn record(&self, device: usize, direction: Direction, bytes: usize, begun: Instant) {
        let at = |i: Instant| i.saturating_duration_since(self.epoch).as_nanos() as u64;
        let (begin_ns, end_ns) = (at(begun), at(Instant::now()));
        let to_device = direction == Direction::ToDevice;
        self.kept.push(MAX_COPIES, CopySpan { device, to_device, bytes: bytes as u64, begin_ns, end_ns });
    }

    pub(crate) fn take(&self) -> (Vec<CopySpan>, u64) {
        self.kept.take()
    }
}
