//! Runtimes and running graphs.

use std::ffi::c_char;
use std::time::Duration;

use forebay::{Drain, Feed, Mode, Running, Runtime, Wanted};

use crate::block::forebay_block;
use crate::call::patience;
use crate::graph::forebay_graph;
use crate::{Failure, free, give, invalid, put, shared, status, take, text};

/// Waits for as long as it takes.
pub const FOREBAY_FOREVER: i64 = -1;

/// The devices of this machine, and the workers.
pub struct forebay_runtime(pub(crate) Runtime);

/// A graph that runs.
pub struct forebay_running {
    pub(crate) running: Running,
    feeds: Vec<Feed>,
    drains: Vec<Drain>,
}

/// The device that is meant; none with NULL.
///
/// # Safety
/// As [`text`].
pub(crate) unsafe fn wanted(device: *const c_char) -> Result<Option<Wanted>, Failure> {
    if device.is_null() {
        return Ok(None);
    }
    // SAFETY: the caller's promise.
    Ok(Some(unsafe { text(device, "the device")? }.parse().map_err(|why: String| invalid(&why))?))
}

/// Makes a runtime with the CPU and devices of this kind: "cpu" (none besides), "opencl", "cuda", one of several ("cuda:1"), or NULL
/// for the accelerators that there are. `mode` is "first-available", "fifo", "priority", "data-aware" or "adaptive", or NULL for data-aware.
///
/// # Safety
/// As the rules say.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn forebay_runtime_new(
    device: *const c_char,
    mode: *const c_char,
    runtime: *mut *mut forebay_runtime,
) -> i32 {
    // SAFETY: C's promises.
    status(|| unsafe {
        let mut b = Runtime::builder();
        if let Some(w) = wanted(device)? {
            b = b.only(w)?;
        }
        if !mode.is_null() {
            b = b.mode(text(mode, "the mode")?.parse::<Mode>().map_err(|why| invalid(&why))?);
        }
        give(runtime, forebay_runtime(b.build()?))
    })
}

/// Gives a runtime back; graphs that it runs go on.
///
/// # Safety
/// As the rules say.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn forebay_runtime_free(runtime: *mut forebay_runtime) {
    // SAFETY: C's promise.
    unsafe { free(runtime) };
}

/// How many devices a runtime has, the CPU included.
///
/// # Safety
/// As the rules say.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn forebay_runtime_devices(runtime: *const forebay_runtime, n: *mut usize) -> i32 {
    // SAFETY: C's promises.
    status(|| unsafe { put(n, shared(runtime, "the runtime")?.0.devices().len()) })
}

/// Checks a graph, compiles its kernels and starts it; takes the graph.
///
/// # Safety
/// As the rules say.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn forebay_start(
    runtime: *const forebay_runtime,
    graph: *mut forebay_graph,
    running: *mut *mut forebay_running,
) -> i32 {
    // SAFETY: C's promises.
    status(|| unsafe {
        let g = take(graph, "the graph")?;
        let run = shared(runtime, "the runtime")?.0.start(g.graph)?;
        give(running, forebay_running { running: run, feeds: g.feeds, drains: g.drains })
    })
}

/// Ends a graph: what is under way is done, what waits is dropped.
///
/// # Safety
/// As the rules say. Nobody else is in a call with it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn forebay_running_free(running: *mut forebay_running) {
    // SAFETY: C's promise.
    unsafe { free(running) };
}

fn nth<T: Copy>(all: &[T], n: u32, what: &str) -> Result<T, Failure> {
    all.get(n as usize).copied().ok_or_else(|| invalid(&format!("there is no {what} {n}; there are {}", all.len())))
}

/// A block for a feed, with any contents: to be filled through forebay_block_data_mut, which waits for a device that still reads
/// what the block held last, and pushed there. Where many are pushed this is the way: it takes the feed's own memory again and
/// again, which is page-locked where the runtime has a GPU.
///
/// # Safety
/// As the rules say.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn forebay_acquire(
    running: *const forebay_running,
    feed: u32,
    block: *mut *mut forebay_block,
) -> i32 {
    // SAFETY: C's promises.
    status(|| unsafe {
        let r = shared(running, "the graph")?;
        give(block, forebay_block(r.running.acquire(nth(&r.feeds, feed, "feed")?)?))
    })
}

/// Pushes a block into a feed, and takes it. Waits for room for so long, ms: 0 not at all, FOREBAY_FOREVER until there is.
/// FOREBAY_AGAIN when there was none; the block is gone then, too.
///
/// # Safety
/// As the rules say.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn forebay_push(
    running: *const forebay_running,
    feed: u32,
    block: *mut forebay_block,
    wait_ms: i64,
) -> i32 {
    // SAFETY: C's promises.
    status(|| unsafe {
        let b = take(block, "the block")?.0;
        let r = shared(running, "the graph")?;
        let feed = nth(&r.feeds, feed, "feed")?;
        let pushed = match wait_ms {
            0 => r.running.try_push(feed, b).map_err(|(_, e)| e),
            ..=FOREBAY_FOREVER => r.running.push(feed, b),
            ms => r.running.push_timeout(feed, b, Duration::from_millis(ms.unsigned_abs())),
        };
        Ok(pushed?)
    })
}

/// Pulls the next block from a drain; waits as [`forebay_push`] does.
///
/// # Safety
/// As the rules say.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn forebay_pull(
    running: *const forebay_running,
    drain: u32,
    wait_ms: i64,
    block: *mut *mut forebay_block,
) -> i32 {
    // SAFETY: C's promises.
    status(|| unsafe {
        if block.is_null() {
            // Before anything is pulled that nobody would get.
            return Err(invalid("the place for the block is NULL"));
        }
        let r = shared(running, "the graph")?;
        let drain = nth(&r.drains, drain, "drain")?;
        let b = match wait_ms {
            0 => r.running.try_pull(drain)?,
            ..=FOREBAY_FOREVER => r.running.pull(drain)?,
            ms => r.running.pull_timeout(drain, Duration::from_millis(ms.unsigned_abs()))?,
        };
        give(block, forebay_block(b))
    })
}

/// Stops a graph: no task begins any more, and those that run are waited for.
///
/// # Safety
/// As the rules say.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn forebay_stop(running: *const forebay_running) -> i32 {
    // SAFETY: C's promises.
    status(|| unsafe { Ok(shared(running, "the graph")?.running.stop()?) })
}

/// The same; waits for tasks that run as [`forebay_push`] does for room. FOREBAY_AGAIN when one did not end in time: no other begins,
/// and it ends when it ends.
///
/// # Safety
/// As the rules say.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn forebay_stop_within(running: *const forebay_running, wait_ms: i64) -> i32 {
    // SAFETY: C's promises.
    status(|| unsafe {
        let r = shared(running, "the graph")?;
        Ok(r.running.stop_while(patience(wait_ms))?)
    })
}

/// Lets a stopped graph go on.
///
/// # Safety
/// As the rules say.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn forebay_run(running: *const forebay_running) -> i32 {
    // SAFETY: C's promises.
    status(|| unsafe { Ok(shared(running, "the graph")?.running.run()?) })
}

/// Empties a stopped graph's channels and begins anew, also after an error.
///
/// # Safety
/// As the rules say.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn forebay_reset(running: *const forebay_running) -> i32 {
    // SAFETY: C's promises.
    status(|| unsafe { Ok(shared(running, "the graph")?.running.reset()?) })
}

/// FOREBAY_OK while nothing has failed; otherwise why the graph stopped.
///
/// # Safety
/// As the rules say.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn forebay_running_error(running: *const forebay_running) -> i32 {
    // SAFETY: C's promises.
    status(|| unsafe { shared(running, "the graph")?.running.error().map_or(Ok(()), |e| Err(e.into())) })
}
