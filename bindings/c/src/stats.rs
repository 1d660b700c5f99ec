//! What there is, and what was done where.

use std::ffi::{CString, c_char, c_void};

use forebay::TaskStats;

use crate::call::forebay_accelerated;
use crate::run::{forebay_running, forebay_runtime};
use crate::{Failure, invalid, shared, status};

/// What is told of a device: its name and its kind, which hold until the function returns.
pub type forebay_device_teller =
    Option<unsafe extern "C" fn(user: *mut c_void, name: *const c_char, kind: *const c_char)>;

/// Numbers of one task; all of it holds until the function that is told of them returns.
#[repr(C)]
pub struct forebay_task_numbers {
    /// Its name.
    pub name: *const c_char,
    /// "waiting", "queued", "executing" or "completed".
    pub state: *const c_char,
    /// How often it was done so far.
    pub invocations: u64,
    /// What it takes lately, nanoseconds; 0 for tasks that need no scheduling.
    pub run_ns: u64,
    /// How long it waits for a device lately, nanoseconds.
    pub wait_ns: u64,
    /// How often it was done on each device, in the order of [`forebay_runtime_list`].
    pub by_device: *const u64,
    /// How many devices there are.
    pub devices: usize,
}

/// What is told of a task.
pub type forebay_task_teller = Option<unsafe extern "C" fn(user: *mut c_void, task: *const forebay_task_numbers)>;

fn text(of: &str) -> CString {
    CString::new(of.replace('\0', " ")).unwrap_or_default()
}

/// Calls `hears` for each device of a runtime, the CPU included, before it returns.
///
/// # Safety
/// As the rules say.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn forebay_runtime_list(
    runtime: *const forebay_runtime,
    hears: forebay_device_teller,
    user: *mut c_void,
) -> i32 {
    // SAFETY: C's promises.
    status(|| unsafe {
        let hears = hears.ok_or_else(|| invalid("the function is NULL"))?;
        for (name, kind) in shared(runtime, "the runtime")?.0.devices() {
            let (name, kind) = (text(&name), text(kind.name()));
            hears(user, name.as_ptr(), kind.as_ptr());
        }
        Ok(())
    })
}

/// # Safety
/// `user` is what the function takes.
unsafe fn tell(all: &[TaskStats], hears: forebay_task_teller, user: *mut c_void) -> Result<(), Failure> {
    let hears = hears.ok_or_else(|| invalid("the function is NULL"))?;
    for t in all {
        let (name, state) = (text(&t.name), text(t.state));
        let numbers = forebay_task_numbers {
            name: name.as_ptr(),
            state: state.as_ptr(),
            invocations: t.invocations,
            run_ns: t.avg_run_ns,
            wait_ns: t.avg_wait_ns,
            by_device: t.by_device.as_ptr(),
            devices: t.by_device.len(),
        };
        // SAFETY: the caller's promise.
        unsafe { hears(user, &raw const numbers) };
    }
    Ok(())
}

/// Calls `hears` for each task of a running graph, in the order of their addition, before it returns: where it was done, how often
/// and how fast.
///
/// # Safety
/// As the rules say.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn forebay_running_tasks(
    running: *const forebay_running,
    hears: forebay_task_teller,
    user: *mut c_void,
) -> i32 {
    // SAFETY: C's promises.
    status(|| unsafe { tell(&shared(running, "the graph")?.running.snapshot().tasks, hears, user) })
}

/// The same of a task that is called like a function, for each of its lanes.
///
/// # Safety
/// As the rules say.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn forebay_accelerated_tasks(
    task: *const forebay_accelerated,
    hears: forebay_task_teller,
    user: *mut c_void,
) -> i32 {
    // SAFETY: C's promises.
    status(|| unsafe { tell(&shared(task, "the task")?.0.stats(), hears, user) })
}
