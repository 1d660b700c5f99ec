//! Forebay for Python (docs/python.md): the same graphs, tasks and blocks, and nothing that a program could crash with.
//!
//! Rules:
//! 1. Blocks are read through Python's buffer protocol, without a copy; whoever looks at one keeps it alive. What comes in, an
//!    array or bytes, is copied once.
//! 2. The interpreter's lock is not held while anything waits, so functions of tasks can run meanwhile.
//! 3. A function of a task gets its inputs as blocks, which it may keep, and returns its outputs, which are copied.
//! 4. An exception in a function is the task's failure, with its text and where it came from.
//! 5. Ctrl-C ends whatever waits; a program that ends waits for the functions that run (`ending`).

// A panic here would be the end of somebody else's process.
#![deny(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::unreachable, clippy::todo)]

mod block;
mod ending;
mod goal;
mod graph;
mod grid;
mod patience;
mod run;
mod stats;
mod transfer;
mod view;

use pyo3::exceptions::{PyRuntimeError, PyTimeoutError, PyValueError};
use pyo3::prelude::*;

pyo3::create_exception!(forebay, Closed, PyRuntimeError, "The graph was stopped or has ended.");

/// Forebay's error as an exception.
pub(crate) fn raise(e: forebay::Error) -> PyErr {
    use forebay::Error;
    let text = e.to_string();
    match e {
        Error::WouldBlock { .. } | Error::StillRunning { .. } => PyTimeoutError::new_err(text),
        Error::NotRunning { .. } => Closed::new_err(text),
        Error::Failed { .. } | Error::Device(_) | Error::Forked { .. } | Error::AllWait { .. } => {
            PyRuntimeError::new_err(text)
        }
        _ => PyValueError::new_err(text),
    }
}

/// A word of the user's.
pub(crate) fn word<T: std::str::FromStr<Err = String>>(text: &str) -> PyResult<T> {
    text.parse().map_err(PyValueError::new_err)
}

/// Accelerators as first-class resources.
#[pymodule(name = "forebay")]
fn forebay_module(m: &Bound<'_, PyModule>) -> PyResult<()> {
    m.add("__version__", env!("CARGO_PKG_VERSION"))?;
    m.add("Closed", m.py().get_type::<Closed>())?;
    m.add_class::<block::Block>()?;
    m.add_class::<graph::Task>()?;
    m.add_class::<graph::Graph>()?;
    m.add_class::<run::Runtime>()?;
    m.add_class::<run::Running>()?;
    m.add_class::<run::Accelerated>()?;
    m.add_class::<run::Pending>()?;
    m.add_class::<goal::Pursuit>()?;
    m.add_class::<grid::Grid>()?;
    m.add_class::<grid::Ticket>()?;
    m.add_class::<transfer::Engine>()?;
    m.add_class::<transfer::Memory>()?;
    m.add_class::<transfer::Pinned>()?;
    m.add_class::<transfer::Stream>()?;
    m.add_class::<transfer::InFlight>()?;
    m.add_function(wrap_pyfunction!(graph::load, m)?)?;
    // What the interpreter calls, before anything of it is gone.
    m.py().import("atexit")?.call_method1("register", (wrap_pyfunction!(ending::at_the_end, m)?,))?;
    Ok(())
}
