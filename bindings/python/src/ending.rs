//! Programs that end while functions of tasks run.
//!
//! Rules:
//! 1. Graphs and tasks that are called like functions are noted when they are made ([`note`]). Trackers of goals are not: nobody
//!    waits for what they say.
//! 2. When the interpreter is about to end (`atexit`), all of it is stopped: no function begins any more, and those that run
//!    are waited for, as whoever closes a graph does; Ctrl-C ends the waiting. Resident grids end
//!    after that.
//! 3. A thread that is in a function then still stays where it is ([`call`]) until the process ends. Before Python 3.14 the
//!    interpreter would end the thread in the middle of it, and with it, since there are frames of ours, the process by a signal.
//! 4. Nobody waits for such a thread: what is freed from then on is left alone if anything of it still runs.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use forebay::hal::fork::Own;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use crate::patience::Patience;

/// What runs and can be stopped.
pub trait Stops: Send + Sync {
    /// As [`forebay::Running::stop_while`].
    fn stop_while(&self, patience: &mut dyn FnMut() -> Option<Duration>) -> forebay::Result<()>;
}

impl Stops for forebay::Running {
    fn stop_while(&self, patience: &mut dyn FnMut() -> Option<Duration>) -> forebay::Result<()> {
        forebay::Running::stop_while(self, patience)
    }
}

impl Stops for forebay::place::Accelerated {
    fn stop_while(&self, patience: &mut dyn FnMut() -> Option<Duration>) -> forebay::Result<()> {
        forebay::place::Accelerated::stop_while(self, patience)
    }
}

/// Rule 1.
static NOTED: Own<Vec<Weak<dyn Stops>>> = Own::new();
/// Rule 4.
static ENDING: AtomicBool = AtomicBool::new(false);

/// Whether the interpreter is about to end.
pub fn ending() -> bool {
    ENDING.load(Ordering::SeqCst)
}

/// Makes it one of those that are stopped at the end.
pub fn note<T: Stops + 'static>(made: T) -> Arc<T> {
    let made = Arc::new(made);
    let weak: Weak<T> = Arc::downgrade(&made);
    let mut noted = NOTED.lock();
    noted.retain(|w| w.strong_count() > 0);
    noted.push(weak);
    made
}

/// Rule 2. Raises what a signal's handler raises.
#[pyfunction]
pub fn at_the_end(py: Python<'_>) -> PyResult<()> {
    ENDING.store(true, Ordering::SeqCst);
    let noted = std::mem::take(&mut *NOTED.lock());
    let all: Vec<Arc<dyn Stops>> = noted.iter().filter_map(Weak::upgrade).collect();
    let mut wait = Patience::of(None)?;
    py.detach(|| {
        // None begins anything any more before one of them is waited for.
        all.iter().for_each(|one| _ = one.stop_while(&mut || None));
        all.iter().for_each(|one| _ = one.stop_while(&mut || wait.next()));
        // Others that have a part in them let go of them; if nobody has, rule 4.
        all.into_iter().for_each(give_back);
        // Nothing of the program is in their tasks, so they need no more than a moment.
        crate::grid::end_all();
    });
    wait.outcome(Ok(()))
}

/// Lets go of what was stopped. If somebody is at its functions still, another thread waits for that and does.
fn give_back<T: Stops + ?Sized + 'static>(one: Arc<T>) {
    let runs = |patience| matches!(one.stop_while(patience), Err(forebay::Error::StillRunning { .. }));
    if !runs(&mut || None) {
        return;
    }
    let waiting = one.clone();
    let waits = move || {
        // Before it lets go: whoever does last must not have to wait, perhaps with the interpreter's lock.
        let _ = waiting.stop_while(&mut || Some(Duration::MAX));
        drop(waiting);
    };
    let waits = (!ending()).then(|| std::thread::Builder::new().name("forebay-teardown".into()).spawn(waits));
    if !matches!(waits, Some(Ok(_))) {
        std::mem::forget(one);
    }
}

/// Stops something and lets go of it; other threads' waits for it end. What a signal's handler raises ends the waiting and is
/// returned; functions that run end when they end.
pub fn close<T: Stops + ?Sized + 'static>(one: Arc<T>, py: Python<'_>) -> PyResult<()> {
    let mut wait = Patience::of(None)?;
    // Without the interpreter's lock, which functions that run need.
    py.detach(|| {
        let _ = match ending() {
            true => one.stop_while(&mut || None),
            false => one.stop_while(&mut || wait.next()),
        };
        give_back(one);
    });
    wait.outcome(Ok(()))
}

/// The same where nothing can be raised.
pub fn close_unheard<T: Stops + ?Sized + 'static>(one: Option<Arc<T>>) {
    let Some(one) = one else { return };
    let mut one = Some(one);
    let heard = Python::try_attach(|py| {
        let Some(one) = one.take() else { return };
        // An exception may be on its way, which is why this is let go of.
        let on_its_way = PyErr::take(py);
        if let Err(e) = close(one, py) {
            match e.is_instance_of::<pyo3::exceptions::PyKeyboardInterrupt>(py) {
                // For whoever looks next.
                // SAFETY: may be called at any time.
                true => unsafe { ffi::PyErr_SetInterrupt() },
                false => e.write_unraisable(py, None),
            }
        }
        on_its_way.into_iter().for_each(|e| e.restore(py));
    });
    // Without an interpreter nothing of it runs any more that could be waited for.
    if heard.is_none() {
        std::mem::forget(one);
    }
}

/// Keeps the thread here, if it is ended.
struct Stays;

impl Drop for Stays {
    fn drop(&mut self) {
        loop {
            std::thread::park();
        }
    }
}

mod raw {
    use pyo3::ffi::PyObject;

    unsafe extern "C-unwind" {
        // As in pyo3::ffi, but that a thread's end may come out of it: a forced unwinding, which no frame of ours is to see but
        // the one that calls this. (pyo3 does the same where it asks for the interpreter's lock.)
        pub fn PyObject_CallObject(callable: *mut PyObject, args: *mut PyObject) -> *mut PyObject;
    }
}

/// Calls one of the program's functions on a thread of Forebay's (rule 3).
pub fn call<'py>(f: &Py<PyAny>, args: &Bound<'py, PyTuple>) -> PyResult<Bound<'py, PyAny>> {
    let stays = Stays;
    // SAFETY: an object and a tuple, which are held meanwhile, with the interpreter's lock. What unwinds comes through the
    // interpreter's own frames, which are made for it, and ends here: `stays` is dropped first and never returns, so nothing
    // that is borrowed by frames above is let go of.
    let returned = unsafe { raw::PyObject_CallObject(f.as_ptr(), args.as_ptr()) };
    std::mem::forget(stays);
    // SAFETY: a reference of our own, or null and an exception that is set.
    unsafe { Bound::from_owned_ptr_or_err(args.py(), returned) }
}
