//! How long threads of this process were at work.
//!
//! The process's own clock would be one call, but it is behind by up to a tick for each thread that runs: longer than many tasks.

use std::cell::RefCell;
use std::ffi::{c_int, c_long};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

#[repr(C)]
#[derive(Default)]
struct Timespec {
    seconds: i64,
    nanoseconds: c_long,
}

unsafe extern "C" {
    fn clock_gettime(clock: c_int, at: *mut Timespec) -> c_int;
    fn gettid() -> c_int;
}

/// `CLOCK_THREAD_CPUTIME_ID` of Linux.
const OWN: c_int = 3;
/// Threads that come later are found after so long.
const AGAIN: Duration = Duration::from_millis(200);

/// Threads that are StarPU's workers: what they do is no device's.
static WORKERS: Mutex<Vec<c_int>> = Mutex::new(Vec::new());

fn clock(id: c_int) -> Option<f64> {
    let mut t = Timespec::default();
    // SAFETY: writes one timespec; a clock that is not there is an error.
    let ok = unsafe { clock_gettime(id, &mut t) } == 0;
    ok.then_some(t.seconds as f64 * 1e9 + t.nanoseconds as f64)
}

/// The calling thread is a worker.
pub fn is_worker() {
    // SAFETY: no argument, no error.
    let id = unsafe { gettid() };
    let mut workers = WORKERS.lock().unwrap_or_else(PoisonError::into_inner);
    if !workers.contains(&id) {
        workers.push(id);
    }
}

/// ns that the calling thread has worked.
pub fn own() -> f64 {
    clock(OWN).unwrap_or(0.0)
}

/// ns that each of the process's threads has worked but for the workers and the first one, which is the program's.
fn others() -> Vec<(c_int, f64)> {
    let first = std::process::id() as c_int;
    let workers = WORKERS.lock().unwrap_or_else(PoisonError::into_inner).clone();
    let all = std::fs::read_dir("/proc/self/task").into_iter().flatten().flatten();
    let ids =
        all.filter_map(|e| e.file_name().to_str()?.parse().ok()).filter(|id| *id != first && !workers.contains(id));
    ids.filter_map(|id| Some((id, of(id)?))).collect()
}

/// The clock of another thread, as `pthread_getcpuclockid` makes it.
fn of(thread: c_int) -> Option<f64> {
    clock(!thread << 3 | 6)
}

/// What threads that are no workers had worked when a task began.
#[derive(Default)]
struct Known {
    threads: Vec<(c_int, f64)>,
    looked: Option<Instant>,
}

thread_local! {
    static KNOWN: RefCell<Known> = RefCell::default();
}

/// A task begins for which others work than the caller.
pub fn begins() {
    KNOWN.with_borrow_mut(|k| {
        if k.looked.is_none_or(|at| at.elapsed() > AGAIN) {
            *k = Known { threads: others(), looked: Some(Instant::now()) };
            return;
        }
        k.threads.retain_mut(|(id, worked)| of(*id).map(|now| *worked = now).is_some());
    });
}

/// ns that others have worked since.
pub fn since() -> f64 {
    KNOWN.with_borrow(|k| k.threads.iter().filter_map(|(id, before)| Some((of(*id)? - before).max(0.0))).sum())
}
