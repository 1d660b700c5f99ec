//! The resident grid: blocks that stay on a device and take tasks without a launch for each (docs/resident.md).

use std::ffi::{c_char, c_void};
use std::time::Duration;

use forebay::Kind;
use forebay::hal::discover;
use forebay::resident::{ARGS, Builder, Call, Error, Grid, Ticket};

use crate::run::FOREBAY_FOREVER;
use crate::{
    FOREBAY_AGAIN, FOREBAY_CLOSED, FOREBAY_FAILED, Failure, free, give, invalid, known, put, shared, status, text,
};

/// Bytes of a task's result.
pub const FOREBAY_RESULT: usize = 40;
const _: () = assert!(FOREBAY_RESULT == forebay::resident::RESULT);

/// A grid that runs.
pub struct forebay_grid(Grid);

/// A task that was submitted; one thread's at a time.
pub struct forebay_ticket(Option<Ticket>);

/// What to submit. All zeros but the function is a task without arguments, for one item, with all the fuel that it wants.
#[repr(C)]
pub struct forebay_grid_call {
    /// The number of its function.
    pub function: u32,
    /// Units of work that it and all that comes of it may use; 0 for as many as they want.
    pub fuel: u32,
    /// Its arguments, and how many bytes they are: 32 at most.
    pub args: *const c_void,
    /// Bytes at `args`.
    pub bytes: usize,
    /// Its first item.
    pub first: u64,
    /// How many items it is for, from there on. 0 is 1 item; a range of none is not to be had from C.
    pub count: u64,
    /// Not 0: before what is not urgent.
    pub urgent: i32,
}

impl forebay_grid_call {
    /// # Safety
    /// `args` may be read for as many bytes as it says.
    unsafe fn get(&self) -> Result<Call, Failure> {
        if self.bytes > ARGS {
            return Err(Error::Arguments { is: self.bytes }.into());
        }
        let mut made = Call::new(self.function).fuel(self.fuel).range(self.first, self.count.max(1));
        if self.bytes > 0 {
            if self.args.is_null() {
                return Err(invalid("the arguments are NULL"));
            }
            // SAFETY: by the contract.
            made = made.args(unsafe { std::slice::from_raw_parts(self.args.cast(), self.bytes) });
        }
        Ok(if self.urgent != 0 { made.urgent() } else { made })
    }
}

impl From<Error> for Failure {
    fn from(e: Error) -> Self {
        let code = match e {
            Error::Full(_) | Error::TimedOut { .. } => FOREBAY_AGAIN,
            Error::Stopped => FOREBAY_CLOSED,
            _ => FOREBAY_FAILED,
        };
        Failure(code, e.to_string())
    }
}

/// Starts a grid with the task functions in `source`, CUDA C++ as docs/resident.md says; `functions` has the names of those
/// that may be submitted or made by tasks, with spaces between them. On `device`: "cpu", "cuda", or NULL for CUDA if it is
/// there. `blocks`: 0 for as many as there is room for. `heap`: bytes that tasks may allocate, or 0.
///
/// # Safety
/// As the rules say.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn forebay_grid_new(
    source: *const c_char,
    functions: *const c_char,
    device: *const c_char,
    blocks: usize,
    heap: u64,
    grid: *mut *mut forebay_grid,
) -> i32 {
    // SAFETY: C's promises.
    status(|| unsafe {
        if grid.is_null() {
            return Err(invalid("the place for the grid is NULL"));
        }
        let names = text(functions, "the functions")?.split_whitespace();
        let mut b = Builder::new(text(source, "the source")?).functions(names);
        if blocks > 0 {
            b = b.blocks(blocks);
        }
        if heap > 0 {
            b = b.heap(heap);
        }
        let kind = match device.is_null() {
            true => None,
            false => Some(text(device, "the device")?.parse::<Kind>().map_err(|why| invalid(&why))?),
        };
        let (found, missing) = discover(&[kind.unwrap_or(Kind::Cuda)]);
        let started = match (found.first(), kind) {
            (Some(d), _) => b.start_on(d)?,
            (None, None) => b.start_on_cpu()?,
            (None, Some(_)) => {
                let why = missing.first().map_or_else(|| "there is none".into(), |(_, e)| e.to_string());
                return Err(Failure(FOREBAY_FAILED, why));
            }
        };
        give(grid, forebay_grid(started))
    })
}

/// Ends a grid after the tasks that are running, and gives it back. Tickets stay good, and must be freed.
///
/// # Safety
/// As the rules say. Nobody else is in a call with it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn forebay_grid_free(grid: *mut forebay_grid) {
    // SAFETY: C's promise.
    unsafe { free(grid) };
}

/// The number of a function.
///
/// # Safety
/// As the rules say.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn forebay_grid_function(
    grid: *const forebay_grid,
    name: *const c_char,
    number: *mut u32,
) -> i32 {
    // SAFETY: C's promises.
    status(|| unsafe { put(number, shared(grid, "the grid")?.0.function(text(name, "the name")?)?) })
}

/// Submits a task. Waits for room if `wait` is not 0; else FOREBAY_AGAIN when there is none. `ticket` may be NULL: nobody
/// waits for the task then.
///
/// # Safety
/// As the rules say; the call's `args` may be read for as many bytes as it says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn forebay_grid_submit(
    grid: *const forebay_grid,
    call: *const forebay_grid_call,
    wait: i32,
    ticket: *mut *mut forebay_ticket,
) -> i32 {
    // SAFETY: C's promises.
    status(|| unsafe {
        let (g, made) = (&shared(grid, "the grid")?.0, shared(call, "the call")?.get()?);
        let t = if wait != 0 { g.submit(made)? } else { g.try_submit(made)? };
        if ticket.is_null() { Ok(()) } else { give(ticket, forebay_ticket(Some(t))) }
    })
}

/// Tasks that can be submitted together, at most.
pub const FOREBAY_TOGETHER: usize = 1024;
const _: () = assert!(FOREBAY_TOGETHER == forebay::resident::TOGETHER);

/// Submits `n` tasks together, 1 to FOREBAY_TOGETHER of them, which costs a fraction of submitting each: their one ticket is
/// done when all of them are, and they share a result. They have their fuel together, if all have some, and are urgent if the
/// first one is. Waits for room. `ticket` may be NULL.
///
/// # Safety
/// As the rules say; `calls` has `n` of them, and the `args` of each may be read for as many bytes as it says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn forebay_grid_submit_all(
    grid: *const forebay_grid,
    calls: *const forebay_grid_call,
    n: usize,
    ticket: *mut *mut forebay_ticket,
) -> i32 {
    // SAFETY: C's promises.
    status(|| unsafe {
        let g = &shared(grid, "the grid")?.0;
        shared(calls, "the calls")?;
        if !(1..=FOREBAY_TOGETHER).contains(&n) {
            return Err(invalid(&format!("{n} tasks together; 1 to {FOREBAY_TOGETHER} are allowed")));
        }
        let calls = std::slice::from_raw_parts(calls, n).iter().map(|c| c.get());
        let t = g.submit_all(calls.collect::<Result<Vec<_>, _>>()?)?.pop();
        if ticket.is_null() { Ok(()) } else { give(ticket, forebay_ticket(t)) }
    })
}

/// Waits until a task and all that came of it are done, for so many ms: 0 not at all, FOREBAY_FOREVER for as long as it takes.
/// FOREBAY_AGAIN when it is not done by then; the reason names a block that is stuck, if there is one. `result`, if not NULL,
/// gets FOREBAY_RESULT bytes. A result is had once; the ticket is freed all the same.
///
/// # Safety
/// As the rules say; `result` is NULL or may be written for FOREBAY_RESULT bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn forebay_grid_wait(
    grid: *const forebay_grid,
    ticket: *mut forebay_ticket,
    wait_ms: i64,
    result: *mut c_void,
) -> i32 {
    // SAFETY: C's promises.
    status(|| unsafe {
        let (g, t) = (&shared(grid, "the grid")?.0, known(ticket, "the ticket")?);
        let inner = t.0.take().ok_or_else(|| invalid("the ticket's result was had before"))?;
        let done = match wait_ms {
            ..=FOREBAY_FOREVER => g.wait(inner)?,
            ms => match g.wait_for(inner, Duration::from_millis(ms.unsigned_abs())) {
                Ok(done) => done,
                Err((e, back)) => {
                    t.0 = back;
                    return Err(e.into());
                }
            },
        };
        if !result.is_null() {
            std::ptr::copy_nonoverlapping(done.result.as_ptr(), result.cast(), FOREBAY_RESULT);
        }
        Ok(())
    })
}

/// Gives a ticket back; its task goes on.
///
/// # Safety
/// As the rules say.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn forebay_ticket_free(ticket: *mut forebay_ticket) {
    // SAFETY: C's promise.
    unsafe { free(ticket) };
}

/// Ends a grid after all that was submitted is done.
///
/// # Safety
/// As the rules say. Nobody else is in a call with it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn forebay_grid_drain(grid: *mut forebay_grid) -> i32 {
    // SAFETY: C's promises.
    status(|| unsafe { Ok(known(grid, "the grid")?.0.drain()?) })
}

/// The same, but waits so many ms at most: FOREBAY_AGAIN when it takes longer; the reason names a block that is stuck. Nothing
/// more can be submitted then, and this or forebay_grid_stop can be called again.
///
/// # Safety
/// As the rules say. Nobody else is in a call with it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn forebay_grid_drain_within(grid: *mut forebay_grid, wait_ms: u32) -> i32 {
    // SAFETY: C's promises.
    status(|| unsafe { Ok(known(grid, "the grid")?.0.drain_within(Duration::from_millis(wait_ms.into()))?) })
}

/// Ends a grid after the tasks that are running, and waits for them so many ms at most. FOREBAY_AGAIN when they take longer;
/// the reason names one that is stuck. What was not begun is FOREBAY_CLOSED for whoever waits for it.
///
/// # Safety
/// As the rules say. Nobody else is in a call with it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn forebay_grid_stop(grid: *mut forebay_grid, wait_ms: u32) -> i32 {
    // SAFETY: C's promises.
    status(|| unsafe { Ok(known(grid, "the grid")?.0.stop_within(Duration::from_millis(wait_ms.into()))?) })
}
