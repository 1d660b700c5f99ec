//! Waiting that signals end.

use std::time::{Duration, Instant};

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::raise;

/// Whoever waits looks once in so long whether a signal has come, Ctrl-C for example: its handler runs when Python is asked, in
/// the main thread.
const SIGNALS: Duration = Duration::from_millis(50);

/// How long somebody waits: for ever, or so long; and what a signal's handler has raised meanwhile.
pub struct Patience {
    until: Option<Instant>,
    begun: bool,
    raised: Option<PyErr>,
}

impl Patience {
    pub fn of(seconds: Option<f64>) -> PyResult<Self> {
        let limit = seconds.map(Duration::try_from_secs_f64).transpose();
        let limit = limit.map_err(|e| PyValueError::new_err(e.to_string()))?;
        let until = limit.and_then(|l| Instant::now().checked_add(l));
        Ok(Patience { until, begun: false, raised: None })
    }

    /// How long now, without the interpreter's lock; none when the time is over or something was raised.
    pub fn next(&mut self) -> Option<Duration> {
        let first = !std::mem::replace(&mut self.begun, true);
        if !first {
            self.raised = Python::try_attach(|py| py.check_signals()).and_then(Result::err);
        }
        let left = self.until.map_or(SIGNALS, |u| u.saturating_duration_since(Instant::now()));
        (first || (self.raised.is_none() && !left.is_zero())).then(|| left.min(SIGNALS))
    }

    /// What came of it, or what was raised.
    pub fn outcome<T>(&mut self, came: Result<T, forebay::Error>) -> PyResult<T> {
        self.raised.take().map_or_else(|| came.map_err(raise), Err)
    }
}
