//! Goals of tasks that are called like functions.

use std::sync::{Mutex, PoisonError};

use forebay::place::{Goal, Pursuit as Inner};
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use crate::ending;

/// A goal that is being pursued; also a context manager, which gives it up at the end.
#[pyclass(frozen, module = "forebay")]
pub struct Pursuit {
    inner: Mutex<Option<Inner>>,
}

/// Calls one of the program's functions on a thread of Forebay's. What it raises is told as an exception that nobody can
/// catch (`sys.unraisablehook`): there is no call that it could come out of.
fn called<T>(
    f: &Py<PyAny>,
    args: impl FnOnce(Python<'_>) -> PyResult<Bound<'_, PyTuple>>,
    as_it: impl FnOnce(&Bound<'_, PyAny>) -> PyResult<T>,
) -> Option<T> {
    Python::try_attach(|py| {
        let said = args(py).and_then(|args| ending::call(f, &args)).and_then(|said| as_it(&said));
        said.map_err(|e| e.write_unraisable(py, Some(f.bind(py)))).ok()
    })
    .flatten()
}

/// The one goal that is given.
pub(crate) fn goal(values: [(&str, Option<f64>); 3], least: bool) -> PyResult<Goal> {
    let mut given = values.into_iter().filter_map(|(name, v)| Some((name, v?))).chain(least.then_some(("least", 0.0)));
    match (given.next(), given.next()) {
        (Some((name, value)), None) => Goal::named(name, value).map_err(PyValueError::new_err),
        _ => Err(PyTypeError::new_err("one goal: throughput, latency or deadline with a number, or least=True")),
    }
}

/// Pursues it.
pub(crate) fn pursue(
    task: &forebay::place::Accelerated,
    goal: Goal,
    tracker: Py<PyAny>,
    lowest: u32,
    fidelity: Option<Py<PyAny>>,
    py: Python<'_>,
) -> PyResult<Pursuit> {
    if fidelity.is_none() && lowest > 0 {
        return Err(PyTypeError::new_err("lower fidelities need a function that is told of them"));
    }
    let functions = std::iter::once(&tracker).chain(&fidelity);
    if functions.into_iter().any(|f| !f.bind(py).is_callable()) {
        return Err(PyTypeError::new_err("tracker and fidelity are functions"));
    }
    // No number is nothing said.
    let tells = move || called(&tracker, |py| Ok(PyTuple::empty(py)), |said| said.extract()).unwrap_or(f64::NAN);
    let hears = move |level: u32| {
        let _: Option<()> = fidelity.as_ref().and_then(|f| called(f, |py| PyTuple::new(py, [level]), |_| Ok(())));
    };
    let inner = py.detach(|| task.pursue(goal, tells, lowest, hears))?;
    Ok(Pursuit { inner: Mutex::new(Some(inner)) })
}

#[pymethods]
impl Pursuit {
    /// The last thousand decisions: when (seconds since the beginning), what the tracker said (None for NaN, for what it raised
    /// and for no answer), and in words what was
    /// done and why. Empty when the goal was given up.
    fn log(&self) -> Vec<(f64, Option<f64>, String)> {
        let inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        let log = inner.as_ref().map(Inner::log).unwrap_or_default();
        log.into_iter().map(|d| (d.at.as_secs_f64(), d.measured.filter(|m| !m.is_nan()), d.line())).collect()
    }

    /// Gives the goal up, and what was asked for it back.
    fn close(&self) {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner).take();
    }

    fn __enter__(slf: Bound<'_, Self>) -> Bound<'_, Self> {
        slf
    }

    #[pyo3(signature = (*_what))]
    fn __exit__(&self, _what: &Bound<'_, PyTuple>) {
        self.close();
    }
}
