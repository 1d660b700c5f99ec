//! Programs that exit while graphs run, by `exit` or the end of `main`.
//!
//! What drivers have is destroyed then, while workers give them work: Intel's OpenCL driver has ended the process by a signal for
//! that, now and then.
//!
//! Rules:
//! 1. A graph with tasks that a device may do, or that is recorded, is known from its start on, without being kept.
//! 2. What is called at the exit is registered when the first such graph with a device of a kind starts: behind what that kind's
//!    driver has registered, so that it is called before that.
//! 3. All graphs are stopped then; what runs is waited for, and so are their devices, [`LIMIT`] at most, and by another thread:
//!    whoever exits may hold any lock, and a function may never end. Recordings are left behind. Nothing is freed.
//! 4. A process that was forked stops none of the first one's.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use forebay_hal::Kind;
use forebay_hal::fork::Own;

use super::node::Core;

/// How long an exit may take for it.
const LIMIT: Duration = Duration::from_secs(1);

/// Rule 4: the one that has noted any.
static PROCESS: AtomicU32 = AtomicU32::new(0);
/// Rule 1.
static GRAPHS: Own<Vec<Weak<Core>>> = Own::new();

/// Makes a graph that is about to start one of those (rules 1 and 2).
pub(super) fn note(core: &Arc<Core>) {
    let for_devices = || core.runtime.devices.iter().any(|d| !d.is_host()) && core.nodes.iter().any(|n| n.managed);
    if core.runtime.recordings.is_none() && !for_devices() {
        return;
    }
    PROCESS.store(std::process::id(), Ordering::SeqCst);
    let mut graphs = GRAPHS.lock();
    graphs.retain(|g| g.strong_count() > 0);
    graphs.push(Arc::downgrade(core));
    drop(graphs);
    static REGISTERED: AtomicU32 = AtomicU32::new(0);
    let bit = |kind| 1u32 << Kind::ALL.iter().position(|k| *k == kind).unwrap_or(Kind::ALL.len());
    let kinds = core.runtime.devices.iter().fold(0, |all, d| all | bit(d.kind()));
    if REGISTERED.fetch_or(kinds, Ordering::SeqCst) & kinds != kinds {
        // SAFETY: a plain call; the function may be called at any time. (Without memory for the entry, it is not.)
        unsafe { libc::atexit(exits) };
    }
}

/// Rule 3.
extern "C" fn exits() {
    static CALLED: AtomicBool = AtomicBool::new(false);
    if PROCESS.load(Ordering::SeqCst) != std::process::id() || CALLED.swap(true, Ordering::SeqCst) {
        return;
    }
    let (ended, has_ended) = std::sync::mpsc::channel::<()>();
    let until = Instant::now() + LIMIT;
    let ends = move || {
        stop_all(until);
        drop(ended);
    };
    if std::thread::Builder::new().name("forebay-exit".into()).spawn(ends).is_ok() {
        // It says nothing: it is dropped.
        let _ = has_ended.recv_timeout(LIMIT);
    }
}

fn stop_all(until: Instant) {
    let noted = std::mem::take(&mut *GRAPHS.lock());
    let mut all: Vec<Arc<Core>> = noted.iter().filter_map(Weak::upgrade).filter(|c| c.runtime.is_here()).collect();
    // None begins anything any more before one of them is waited for. (What is torn down has been waited for.)
    all.retain(|core| core.halt(None, |_| {}).is_ok());
    let mut left = || Some(until.saturating_duration_since(Instant::now())).filter(|left| !left.is_zero());
    all.iter().for_each(|core| _ = core.halt(Some(&mut left), |_| {}));
    for device in all.iter().flat_map(|core| core.runtime.devices.iter()).filter(|d| !d.is_host()) {
        let _ = device.finish();
    }
    all.iter().for_each(|core| core.leave_recording());
    // Whoever drops the last of one waits for its functions.
    std::mem::forget(all);
}
