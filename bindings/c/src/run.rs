//! Runtimes, running graphs, and tasks that are called like functions.

use std::cell::{Cell, RefCell};
use std::ffi::c_char;
use std::time::Duration;

use forebay::place::{Accelerated, Pending};
use forebay::{Datablock, Drain, Feed, Kind, Mode, Running, Runtime};

use crate::block::forebay_block;
use crate::graph::forebay_graph;
use crate::task::forebay_task;
use crate::{Failure, free, give, invalid, put, shared, status, take, text};

/// Waits for as long as it takes.
pub const FOREBAY_FOREVER: i64 = -1;

/// The devices of this machine, and the workers.
pub struct forebay_runtime(Runtime);

/// A graph that runs.
pub struct forebay_running {
    running: Running,
    feeds: Vec<Feed>,
    drains: Vec<Drain>,
}

/// A task that is called like a function.
pub struct forebay_accelerated(pub(crate) Accelerated);

/// A call whose outputs come later.
pub struct forebay_pending(Pending);

/// Makes a runtime with the CPU and devices of this kind: "cpu" (none besides), "opencl", "cuda", or NULL for the accelerators
/// that there are. `mode` is "first-available", "fifo", "priority", "data-aware" or "adaptive", or NULL for data-aware.
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
        if !device.is_null() {
            b = b.only(text(device, "the device")?.parse::<Kind>().map_err(|why| invalid(&why))?)?;
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

/// Stops a graph: no task begins any more.
///
/// # Safety
/// As the rules say.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn forebay_stop(running: *const forebay_running) -> i32 {
    // SAFETY: C's promises.
    status(|| unsafe { Ok(shared(running, "the graph")?.running.stop()?) })
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

/// Makes a task that is called like a function, each call on the device that is predicted to end it first, if the runtime's mode
/// is "adaptive"; takes the task.
///
/// # Safety
/// As the rules say.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn forebay_accelerate(
    runtime: *const forebay_runtime,
    task: *mut forebay_task,
    made: *mut *mut forebay_accelerated,
) -> i32 {
    // SAFETY: C's promises.
    status(|| unsafe {
        let task = Cell::new(Some(take(task, "the task")?.0));
        // There is one lane, which is made once.
        let once = || task.take().unwrap_or_else(|| forebay::Task::new("gone"));
        give(made, forebay_accelerated(shared(runtime, "the runtime")?.0.accelerate(1, once)?))
    })
}

/// The same with a lane for each of `n` tasks that are all alike, at most 16: so many calls are done side by side. Takes all
/// tasks.
///
/// # Safety
/// As the rules say; `tasks` has `n` places.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn forebay_accelerate_lanes(
    runtime: *const forebay_runtime,
    tasks: *const *mut forebay_task,
    n: usize,
    made: *mut *mut forebay_accelerated,
) -> i32 {
    // SAFETY: C's promises.
    status(|| unsafe {
        let tasks = match (tasks.is_null(), n) {
            (_, 0) => &[][..],
            (true, _) => return Err(invalid("the tasks are NULL")),
            (false, n) => std::slice::from_raw_parts(tasks, n),
        };
        // All are taken before anything can fail.
        let tasks: Vec<_> = tasks.iter().map(|t| take(*t, "a task")).collect();
        let tasks = tasks.into_iter().map(|t| Ok(t?.0)).collect::<Result<Vec<_>, Failure>>()?;
        let (lanes, tasks) = (tasks.len(), RefCell::new(tasks));
        let next = || tasks.borrow_mut().pop().unwrap_or_else(|| forebay::Task::new("gone"));
        give(made, forebay_accelerated(shared(runtime, "the runtime")?.0.accelerate(lanes, next)?))
    })
}

/// The blocks that C means.
///
/// # Safety
/// NULL, or `n` places with live blocks.
unsafe fn blocks(inputs: *const *const forebay_block, n: usize) -> Result<Vec<Datablock>, Failure> {
    let blocks = match (inputs.is_null(), n) {
        (_, 0) => &[][..],
        (true, _) => return Err(invalid("the inputs are NULL")),
        // SAFETY: the caller's promise.
        (false, n) => unsafe { std::slice::from_raw_parts(inputs, n) },
    };
    // SAFETY: the caller's promise.
    blocks.iter().map(|b| Ok(unsafe { shared(*b, "an input") }?.0.clone())).collect()
}

/// Gives a call's outputs to C: all of them, or none.
///
/// # Safety
/// `outputs` is NULL or has `n` places.
unsafe fn hand_out(made: Vec<Datablock>, outputs: *mut *mut forebay_block, n: usize) -> Result<(), Failure> {
    if made.len() != n || outputs.is_null() {
        return Err(invalid(&format!("there are {} outputs and room for {n}", made.len())));
    }
    for (i, b) in made.into_iter().enumerate() {
        // SAFETY: the caller's promise.
        unsafe { give(outputs.add(i), forebay_block(b)) }?;
    }
    Ok(())
}

/// Calls it with blocks for its inputs in the order of their ports, which stay the caller's, and waits for its outputs, which
/// are the caller's then.
///
/// # Safety
/// As the rules say; `inputs` and `outputs` have as many places as is said.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn forebay_call(
    task: *const forebay_accelerated,
    inputs: *const *const forebay_block,
    n_inputs: usize,
    outputs: *mut *mut forebay_block,
    n_outputs: usize,
) -> i32 {
    // SAFETY: C's promises.
    status(|| unsafe {
        let blocks = blocks(inputs, n_inputs)?;
        hand_out(shared(task, "the task")?.0.call(&blocks)?, outputs, n_outputs)
    })
}

/// Calls it and does not wait: the outputs come by [`forebay_wait`]. Waits only while each lane has as many calls as it may.
///
/// # Safety
/// As the rules say; `inputs` has as many places as is said.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn forebay_spawn(
    task: *const forebay_accelerated,
    inputs: *const *const forebay_block,
    n_inputs: usize,
    call: *mut *mut forebay_pending,
) -> i32 {
    // SAFETY: C's promises.
    status(|| unsafe {
        let blocks = blocks(inputs, n_inputs)?;
        give(call, forebay_pending(shared(task, "the task")?.0.spawn(&blocks)?))
    })
}

/// Waits for the outputs of a call, which are the caller's then; takes the call.
///
/// # Safety
/// As the rules say; `outputs` has as many places as is said.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn forebay_wait(
    call: *mut forebay_pending,
    outputs: *mut *mut forebay_block,
    n_outputs: usize,
) -> i32 {
    // SAFETY: C's promises.
    status(|| unsafe { hand_out(take(call, "the call")?.0.wait()?, outputs, n_outputs) })
}

/// Gives up a call whose outputs nobody wants.
///
/// # Safety
/// As the rules say.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn forebay_pending_free(call: *mut forebay_pending) {
    // SAFETY: C's promise.
    unsafe { free(call) };
}

/// Gives it back.
///
/// # Safety
/// As the rules say. Nobody else is in a call with it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn forebay_accelerated_free(task: *mut forebay_accelerated) {
    // SAFETY: C's promise.
    unsafe { free(task) };
}
