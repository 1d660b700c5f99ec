//! What was done where, as lists and pictures.

use forebay::TaskStats;
use pyo3::prelude::*;
use pyo3::types::PyDict;

/// A dictionary for each task.
pub fn tasks<'py>(all: &[TaskStats], py: Python<'py>) -> PyResult<Vec<Bound<'py, PyDict>>> {
    let one = |t: &TaskStats| {
        let d = PyDict::new(py);
        d.set_item("name", &t.name)?;
        d.set_item("state", t.state)?;
        d.set_item("invocations", t.invocations)?;
        d.set_item("by_device", &t.by_device)?;
        d.set_item("run", t.avg_run_ns as f64 / 1e9)?;
        d.set_item("wait", t.avg_wait_ns as f64 / 1e9)?;
        d.set_item("region", &t.region)?;
        d.set_item("refused", &t.refused)?;
        Ok(d)
    };
    all.iter().map(one).collect()
}
