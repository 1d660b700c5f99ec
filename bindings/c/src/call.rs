//! Tasks that are called like functions.

use std::cell::{Cell, RefCell};
use std::time::{Duration, Instant};

use forebay::Datablock;
use forebay::place::{Accelerated, Pending};

use crate::block::forebay_block;
use crate::run::{FOREBAY_FOREVER, forebay_runtime};
use crate::task::forebay_task;
use crate::{Failure, free, give, invalid, known, shared, status, take};

/// A task that is called like a function.
pub struct forebay_accelerated(pub(crate) Accelerated);

/// A call whose outputs come later.
pub struct forebay_pending(Pending);

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

/// Whether there is room for so many outputs; for none nothing is needed.
fn room(made: usize, outputs: *mut *mut forebay_block, n: usize) -> Result<(), Failure> {
    if made != n || (outputs.is_null() && n > 0) {
        return Err(invalid(&format!(
            "there are {made} outputs and room for {}",
            if outputs.is_null() { 0 } else { n }
        )));
    }
    Ok(())
}

/// Gives a call's outputs to C: all of them, or none.
///
/// # Safety
/// `outputs` is NULL or has `n` places.
unsafe fn hand_out(made: Vec<Datablock>, outputs: *mut *mut forebay_block, n: usize) -> Result<(), Failure> {
    room(made.len(), outputs, n)?;
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
        let (blocks, task) = (blocks(inputs, n_inputs)?, &shared(task, "the task")?.0);
        // Before anything is done that nobody would get.
        room(task.outputs(), outputs, n_outputs)?;
        hand_out(task.call(&blocks)?, outputs, n_outputs)
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
        if call.is_null() {
            // Before anything is begun that nobody would get.
            return Err(invalid("the place for the call is NULL"));
        }
        let blocks = blocks(inputs, n_inputs)?;
        give(call, forebay_pending(shared(task, "the task")?.0.spawn(&blocks)?))
    })
}

/// The same, and waits so long for that at most, ms: 0 not at all, FOREBAY_FOREVER as long as it takes. FOREBAY_AGAIN when there
/// was no room.
///
/// # Safety
/// As the rules say; `inputs` has as many places as is said.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn forebay_spawn_within(
    task: *const forebay_accelerated,
    inputs: *const *const forebay_block,
    n_inputs: usize,
    wait_ms: i64,
    call: *mut *mut forebay_pending,
) -> i32 {
    // SAFETY: C's promises.
    status(|| unsafe {
        if call.is_null() {
            // Before anything is begun that nobody would get.
            return Err(invalid("the place for the call is NULL"));
        }
        let blocks = blocks(inputs, n_inputs)?;
        give(call, forebay_pending(shared(task, "the task")?.0.spawn_while(&blocks, patience(wait_ms))?))
    })
}

/// How long to wait, and then how much longer. It is looked once, even by who does not wait at all.
pub(crate) fn patience(wait_ms: i64) -> impl FnMut() -> Option<Duration> {
    let (begun, mut looked) = (Instant::now(), false);
    move || {
        if wait_ms <= FOREBAY_FOREVER {
            return Some(Duration::MAX);
        }
        let left = Duration::from_millis(wait_ms.unsigned_abs()).saturating_sub(begun.elapsed());
        (!left.is_zero() || !std::mem::replace(&mut looked, true)).then_some(left)
    }
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

/// The same, and waits so long at most, ms: 0 not at all, FOREBAY_FOREVER as long as it takes. FOREBAY_AGAIN when the outputs
/// did not come: only then the call is not taken, and can be waited for again.
///
/// # Safety
/// As the rules say; `outputs` has as many places as is said.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn forebay_wait_within(
    call: *mut forebay_pending,
    wait_ms: i64,
    outputs: *mut *mut forebay_block,
    n_outputs: usize,
) -> i32 {
    // SAFETY: C's promises.
    status(|| unsafe {
        let made = known(call, "the call")?.0.wait_while(patience(wait_ms));
        if !matches!(made, Err(forebay::Error::WouldBlock { .. })) {
            drop(take(call, "the call")?);
        }
        hand_out(made?, outputs, n_outputs)
    })
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

/// Ends it: no call begins any more, and what is made or has not begun is FOREBAY_CLOSED. Waits for calls that run, so long at most, ms:
/// 0 not at all, FOREBAY_FOREVER as long as it takes. FOREBAY_AGAIN when one did not end in time; it ends when it ends.
///
/// # Safety
/// As the rules say.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn forebay_accelerated_stop_within(task: *const forebay_accelerated, wait_ms: i64) -> i32 {
    // SAFETY: C's promises.
    status(|| unsafe { Ok(shared(task, "the task")?.0.stop_while(patience(wait_ms))?) })
}

/// Gives it back. Waits for calls that run.
///
/// # Safety
/// As the rules say. Nobody else is in a call with it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn forebay_accelerated_free(task: *mut forebay_accelerated) {
    // SAFETY: C's promise.
    unsafe { free(task) };
}
