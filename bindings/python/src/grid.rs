//! The resident grid (docs/resident.md).
//!
//! Rules:
//! 1. Whoever waits, for room, for a task or for the grid's end, does so in parts of [`Patience`], and has neither the
//!    interpreter's lock nor the grid's meanwhile.
//! 2. A grid that is about to end is taken out of its place first: who submits something then is told that it was stopped.
//! 3. Tickets need no grid; it may have ended.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard, Weak};
use std::time::{Duration, Instant};

use forebay::hal::fork::Own;
use forebay::resident::{self, Builder, Call, Completion, Error, TOGETHER};
use forebay::{Kind, Wanted};
use pyo3::exceptions::{PyRuntimeError, PyTimeoutError, PyValueError};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyString, PyTuple};

use crate::patience::Patience;
use crate::view::View;
use crate::{Closed, raise, word};

/// Who waits for room looks once in so long.
const NAP: Duration = Duration::from_micros(100);

/// A grid, until it has ended.
type Place = RwLock<Option<Arc<resident::Grid>>>;

/// Those that there are, for the end of the program.
static NOTED: Own<Vec<Weak<Place>>> = Own::new();

fn raised(e: &Error) -> PyErr {
    let text = e.to_string();
    match e {
        Error::Full(_) | Error::TimedOut { .. } => PyTimeoutError::new_err(text),
        Error::Stopped => Closed::new_err(text),
        Error::Setting { .. } | Error::NoFunction { .. } | Error::Arguments { .. } => PyValueError::new_err(text),
        _ => PyRuntimeError::new_err(text),
    }
}

fn read(place: &Place) -> RwLockReadGuard<'_, Option<Arc<resident::Grid>>> {
    place.read().unwrap_or_else(PoisonError::into_inner)
}

fn write(place: &Place) -> RwLockWriteGuard<'_, Option<Arc<resident::Grid>>> {
    place.write().unwrap_or_else(PoisonError::into_inner)
}

/// Ends one after the tasks that are running. Those that do not end within a second are left behind.
fn leave(place: &Place) {
    let grid = write(place).take();
    drop(grid);
}

/// Ends all that are left.
pub fn end_all() {
    let noted = std::mem::take(&mut *NOTED.lock());
    noted.iter().filter_map(Weak::upgrade).for_each(|place| leave(&place));
}

/// Blocks that stay on a device and take tasks without a launch for each; also a context manager, which drains it at the end.
#[pyclass(frozen, module = "forebay")]
pub struct Grid {
    inner: Arc<Place>,
}

/// A task that was submitted, or several that were submitted together.
#[pyclass(frozen, module = "forebay")]
pub struct Ticket {
    /// None while somebody waits for it, and once its result was handed out.
    inner: Mutex<Option<resident::Ticket>>,
    handed_out: AtomicBool,
}

impl Grid {
    /// Does something with the grid, for moments only.
    fn with<T>(&self, what: impl FnOnce(&Arc<resident::Grid>) -> Result<T, Error>) -> PyResult<T> {
        read(&self.inner).as_ref().ok_or(Error::Stopped).and_then(what).map_err(|e| raised(&e))
    }

    /// The same with something for which there may be no room, until there is.
    fn when_free<T: Send>(
        &self,
        py: Python<'_>,
        timeout: Option<f64>,
        what: impl Fn(&resident::Grid) -> Result<T, Error> + Sync,
    ) -> PyResult<T> {
        let mut wait = Patience::of(timeout)?;
        let once = || read(&self.inner).as_ref().ok_or(Error::Stopped).and_then(|g| what(g));
        let mut came = once();
        if matches!(came, Err(Error::Full(_))) {
            came = py.detach(|| {
                while let Some(time) = wait.next() {
                    let begun = Instant::now();
                    while begun.elapsed() < time {
                        std::thread::sleep(NAP);
                        match once() {
                            Err(Error::Full(_)) => {}
                            other => return other,
                        }
                    }
                }
                once()
            });
            wait.outcome(Ok(()))?;
        }
        came.map_err(|e| raised(&e))
    }

    fn number(&self, function: &Bound<'_, PyAny>) -> PyResult<u32> {
        match function.cast::<PyString>() {
            Ok(name) => self.function(name.to_str()?),
            Err(_) => function.extract(),
        }
    }

    fn call(&self, function: &Bound<'_, PyAny>, args: Option<&Bound<'_, PyAny>>) -> PyResult<Call> {
        let call = Call::new(self.number(function)?);
        let Some(args) = args else { return Ok(call) };
        let view = View::of(args, ffi::PyBUF_SIMPLE)?;
        let (at, n) = view.bytes();
        if n == 0 {
            return Ok(call);
        }
        // SAFETY: so many bytes are there until the view is released, with the interpreter's lock, which is held.
        Ok(call.args(unsafe { std::slice::from_raw_parts(std::ptr::with_exposed_provenance(at), n) }))
    }

    /// Ends it by `end`, which is told how long it may take and fails with a timeout.
    fn end(
        &self,
        py: Python<'_>,
        timeout: Option<f64>,
        end: impl Fn(&mut resident::Grid, Duration) -> Result<(), Error> + Sync,
    ) -> PyResult<()> {
        let mut wait = Patience::of(timeout)?;
        let ended = py.detach(|| {
            let Some(mut grid) = write(&self.inner).take() else { return Err(Error::Stopped) };
            let Some(alone) = Arc::get_mut(&mut grid) else {
                *write(&self.inner) = Some(grid);
                return Err(Error::Start("graphs use it: close those first".into()));
            };
            let mut ended = Ok(());
            while let Some(time) = wait.next() {
                ended = end(alone, time);
                if !matches!(ended, Err(Error::TimedOut { .. })) {
                    drop(grid);
                    return ended;
                }
            }
            // It can be asked to end again.
            *write(&self.inner) = Some(grid);
            ended
        });
        wait.outcome(Ok(()))?;
        match ended {
            Err(Error::Start(why)) => Err(PyRuntimeError::new_err(format!("the grid cannot end: {why}"))),
            other => other.map_err(|e| raised(&e)),
        }
    }

    /// For a task of a graph, which has a part in it then.
    pub fn of_a_task(&self, function: &str) -> PyResult<Arc<resident::Grid>> {
        self.with(|g| g.function(function).map(|_| g.clone()))
    }
}

#[pymethods]
impl Grid {
    /// Starts a grid with the task functions in `source`, CUDA C++ as docs/resident.md says; `functions` are the names of those
    /// that may be submitted or made by tasks. On `device`: "cpu" (which needs a C++ compiler), "cuda", "cuda:1", or CUDA if it is
    /// there. `heap`: bytes that tasks may allocate; `ring`: tasks that may be submitted and not done.
    #[new]
    #[pyo3(signature = (source, functions, device = None, *, blocks = None, threads = None, ring = None, heap = None))]
    #[allow(clippy::too_many_arguments, reason = "Python's are named")]
    fn new(
        source: &str,
        functions: Vec<String>,
        device: Option<&str>,
        blocks: Option<usize>,
        threads: Option<usize>,
        ring: Option<usize>,
        heap: Option<u64>,
        py: Python<'_>,
    ) -> PyResult<Self> {
        let wanted = device.map(word::<Wanted>).transpose()?;
        let mut b = Builder::new(source).functions(functions);
        b = blocks.into_iter().fold(b, Builder::blocks);
        b = threads.into_iter().fold(b, Builder::threads);
        b = ring.into_iter().fold(b, Builder::ring);
        b = heap.into_iter().fold(b, Builder::heap);
        let started = py.detach(|| {
            let found = match wanted {
                Some(w) => w.find().map_err(|e| raise(e.into()))?,
                None => forebay::hal::discover(&[Kind::Cuda]).0,
            };
            let started = found.first().map_or_else(|| b.start_on_cpu(), |d| b.start_on(d));
            started.map_err(|e| raised(&e))
        })?;
        let inner = Arc::new(RwLock::new(Some(Arc::new(started))));
        let mut noted = NOTED.lock();
        noted.retain(|w| w.strong_count() > 0);
        noted.push(Arc::downgrade(&inner));
        Ok(Grid { inner })
    }

    /// How many blocks it has.
    #[getter]
    fn blocks(&self) -> PyResult<usize> {
        self.with(|g| Ok(g.size()))
    }

    /// The number of a function, which is found faster by it.
    fn function(&self, name: &str) -> PyResult<u32> {
        self.with(|g| g.function(name))
    }

    /// Submits a task: a function, by name or number, with what it is given, anything that has a buffer of 32 bytes at most, for
    /// `count` items from `first` on; with `fuel`, a limit on the units of work that it and all that comes of it may use. Waits while
    /// there is no room, for as long as it takes or `timeout` seconds; then TimeoutError.
    #[pyo3(signature = (function, args = None, *, first = 0, count = 1, fuel = 0, urgent = false, timeout = None))]
    #[allow(clippy::too_many_arguments, reason = "Python's are named")]
    fn submit(
        &self,
        function: &Bound<'_, PyAny>,
        args: Option<&Bound<'_, PyAny>>,
        first: u64,
        count: u64,
        fuel: u32,
        urgent: bool,
        timeout: Option<f64>,
    ) -> PyResult<Ticket> {
        let call = self.call(function, args)?.range(first, count).fuel(fuel);
        let call = if urgent { call.urgent() } else { call };
        Ok(Ticket::of(self.when_free(function.py(), timeout, |g| g.try_submit(call))?))
    }

    /// Submits many tasks together, which costs a fraction of submitting each: for each its function and what it is given. A
    /// ticket for each 1024 of them, which is done when all of these are; they share a result. Waits for room as submit does; after
    /// TimeoutError those for whose 1024 there was room are submitted, and nobody has their tickets.
    #[pyo3(signature = (calls, *, urgent = false, timeout = None))]
    fn submit_all(
        &self,
        calls: Vec<(Bound<'_, PyAny>, Option<Bound<'_, PyAny>>)>,
        urgent: bool,
        timeout: Option<f64>,
        py: Python<'_>,
    ) -> PyResult<Vec<Ticket>> {
        let one = |(function, args): &(Bound<'_, PyAny>, Option<Bound<'_, PyAny>>)| {
            let call = self.call(function, args.as_ref())?;
            Ok(if urgent { call.urgent() } else { call })
        };
        let calls = calls.iter().map(one).collect::<PyResult<Vec<_>>>()?;
        let some = |some: &[Call]| Ok(Ticket::of(self.when_free(py, timeout, |g| g.try_submit_together(some))?));
        calls.chunks(TOGETHER).map(some).collect()
    }

    /// What is taken of the heap that tasks allocate from, and what is left, in bytes; None without one.
    fn heap<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyDict>>> {
        let use_ = py.detach(|| self.with(|g| Ok(g.heap())))?;
        let Some(h) = use_ else { return Ok(None) };
        let d = PyDict::new(py);
        let refused = h.foreign + h.interior + h.twice;
        let all = [("arena", h.arena), ("free", h.free), ("longest", h.longest), ("slots", h.slots)];
        for (name, value) in all.into_iter().chain([("large", h.large), ("slack", h.slack), ("refused", refused)]) {
            d.set_item(name, value)?;
        }
        Ok(Some(d))
    }

    /// Ends it after all that was submitted is done, for which it waits as long as it takes or `timeout` seconds; then TimeoutError,
    /// nothing more can be submitted, and it can be called again. Tickets stay good.
    #[pyo3(signature = (timeout = None))]
    fn drain(&self, timeout: Option<f64>, py: Python<'_>) -> PyResult<()> {
        self.end(py, timeout, resident::Grid::drain_within)
    }

    /// Ends it after the tasks that are running; as drain. What was not begun is Closed for whoever waits for it.
    #[pyo3(signature = (timeout = None))]
    fn stop(&self, timeout: Option<f64>, py: Python<'_>) -> PyResult<()> {
        self.end(py, timeout, resident::Grid::stop_within)
    }

    fn __enter__(slf: Bound<'_, Self>) -> Bound<'_, Self> {
        slf
    }

    /// Drains it; after an exception it is stopped, and tasks that do not end within a second are left behind.
    #[pyo3(signature = (*what))]
    fn __exit__(&self, what: &Bound<'_, PyTuple>, py: Python<'_>) -> PyResult<()> {
        if what.get_item(0).is_ok_and(|raised| !raised.is_none()) {
            py.detach(|| leave(&self.inner));
            return Ok(());
        }
        match self.drain(None, py) {
            Err(e) if e.is_instance_of::<Closed>(py) => Ok(()),
            other => other,
        }
    }
}

impl Drop for Grid {
    fn drop(&mut self) {
        // Tasks that run are waited for, a second at most.
        if Python::try_attach(|py| py.detach(|| leave(&self.inner))).is_none() {
            leave(&self.inner);
        }
    }
}

#[pymethods]
impl Ticket {
    /// Waits until the task and all that came of it are done, for as long as it takes or `timeout` seconds; then TimeoutError, which
    /// names a block that is stuck if there is one, and it can be waited for again. Returns the 40 bytes of its result, once.
    #[pyo3(signature = (timeout = None))]
    fn wait<'py>(&self, timeout: Option<f64>, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        let mut wait = Patience::of(timeout)?;
        let ticket = self.lock().take();
        let mut ticket =
            Some(ticket.ok_or_else(|| PyValueError::new_err("this ticket's result was handed out before"))?);
        let came: Result<Completion, Error> = py.detach(|| {
            let mut came = Err(Error::Stopped);
            while let Some(time) = wait.next() {
                let Some(t) = ticket.take() else { break };
                match t.wait_for(time) {
                    Ok(done) => return Ok(done),
                    Err((e, back)) => (came, ticket) = (Err(e), back),
                }
            }
            came
        });
        self.handed_out.store(ticket.is_none(), Ordering::Relaxed);
        *self.lock() = ticket;
        wait.outcome(Ok(()))?;
        Ok(PyBytes::new(py, &came.map_err(|e| raised(&e))?.result))
    }

    /// Whether it is done.
    fn done(&self) -> bool {
        self.handed_out.load(Ordering::Relaxed) || self.lock().as_ref().is_some_and(resident::Ticket::is_done)
    }
}

impl Ticket {
    fn of(ticket: resident::Ticket) -> Self {
        Ticket { inner: Mutex::new(Some(ticket)), handed_out: AtomicBool::new(false) }
    }

    fn lock(&self) -> MutexGuard<'_, Option<resident::Ticket>> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
