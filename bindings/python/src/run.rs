//! Runtimes, running graphs, and tasks that are called like functions.

use std::cell::RefCell;
use std::sync::{Arc, Mutex, PoisonError};

use forebay::graph::Drawing;
use forebay::{Datablock, Drain, Feed, Mode, Template, Wanted};
use pyo3::exceptions::{PyKeyError, PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};

use crate::block::{Block, block_for, block_of};
use crate::ending;
use crate::goal::{self, Pursuit};
use crate::graph::{Graph, Task};
use crate::patience::Patience;
use crate::{Closed, raise, stats, word};

/// The devices of this machine, and the workers.
#[pyclass(frozen, module = "forebay")]
pub struct Runtime {
    inner: forebay::Runtime,
}

#[pymethods]
impl Runtime {
    /// A runtime with the CPU and devices of a kind ("cpu": none besides, "opencl", "cuda") or one of several ("cuda:1"), or the
    /// accelerators that there are; mode: "first-available", "fifo", "priority", "data-aware", "adaptive".
    #[new]
    #[pyo3(signature = (device = None, mode = None))]
    fn new(device: Option<&str>, mode: Option<&str>, py: Python<'_>) -> PyResult<Self> {
        let mut b = forebay::Runtime::builder();
        if let Some(d) = device {
            b = b.only(word::<Wanted>(d)?).map_err(raise)?;
        }
        if let Some(m) = mode {
            b = b.mode(word::<Mode>(m)?);
        }
        Ok(Runtime { inner: py.detach(|| b.build()).map_err(raise)? })
    }

    /// Its devices: name and kind of each.
    fn devices(&self) -> Vec<(String, &'static str)> {
        self.inner.devices().into_iter().map(|(name, kind)| (name, kind.name())).collect()
    }

    /// Checks a graph, compiles its kernels and starts it; the graph is the running one's then.
    fn start(&self, graph: &mut Graph, py: Python<'_>) -> PyResult<Running> {
        graph.check()?;
        let (feeds, drains) = (std::mem::take(&mut graph.feeds), std::mem::take(&mut graph.drains));
        let g = graph.take()?;
        let with = |(name, f): (String, Feed)| Some((name, f, g.feed_template(f)?));
        let feeds = feeds.into_iter().filter_map(with).collect();
        let drawing = g.drawing();
        let running = py.detach(|| self.inner.start(g)).map_err(raise)?;
        Ok(Running { inner: Mutex::new(Some(ending::note(running))), feeds, drains, drawing })
    }

    /// A task that is called like a function, under "adaptive" each call on the device that is predicted to end it first. With
    /// several lanes so many calls are done side by side, and `task` is a function that makes a task, called for each of them.
    #[pyo3(signature = (task, lanes = 1))]
    fn accelerate(&self, task: &Bound<'_, PyAny>, lanes: usize) -> PyResult<Accelerated> {
        let one = |t: &Bound<'_, PyAny>| -> PyResult<forebay::Task> { t.cast::<Task>()?.borrow_mut().take() };
        let tasks = if !task.is_callable() && lanes == 1 {
            vec![one(task)?]
        } else if task.is_callable() {
            // How many there may be the library says; it is not for us to make a million tasks first.
            (0..lanes.min(forebay::place::MAX_LANES + 1)).map(|_| one(&task.call0()?)).collect::<PyResult<_>>()?
        } else {
            let why = format!("for {lanes} lanes say a function that makes a task: each lane has its own");
            return Err(PyTypeError::new_err(why));
        };
        let inputs = tasks.first().map(forebay::Task::input_templates).unwrap_or_default();
        let tasks = RefCell::new(tasks);
        let next = || tasks.borrow_mut().pop().unwrap_or_else(|| forebay::Task::new("gone"));
        // Not without the interpreter's lock: the tasks are this thread's until they are made.
        let made = self.inner.accelerate(lanes, next).map_err(raise)?;
        Ok(Accelerated { inner: Mutex::new(Some(ending::note(made))), inputs })
    }
}

/// A graph that runs; also a context manager, which closes it at the end.
#[pyclass(frozen, module = "forebay")]
pub struct Running {
    inner: Mutex<Option<Arc<forebay::Running>>>,
    feeds: Vec<(String, Feed, Template)>,
    drains: Vec<(String, Drain)>,
    drawing: Drawing,
}

impl Running {
    fn get(&self) -> PyResult<Arc<forebay::Running>> {
        let inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        inner.clone().ok_or_else(|| Closed::new_err("the graph was closed"))
    }
}

/// The one of that name, or the only one.
fn find<'a, T>(all: &'a [T], wanted: Option<&str>, name: impl Fn(&T) -> &str, what: &str) -> PyResult<&'a T> {
    match (wanted, all) {
        (None, [only]) => Ok(only),
        _ => {
            let known: Vec<&str> = all.iter().map(&name).collect();
            let why = || PyKeyError::new_err(format!("no {what} {wanted:?}; there are: {}", known.join(", ")));
            all.iter().find(|f| Some(name(f)) == wanted).ok_or_else(why)
        }
    }
}

#[pymethods]
impl Running {
    /// Pushes a block, or anything with a buffer, into a feed (its name may be left out if there is only one). Waits for room
    /// for as long as it takes, or `timeout` seconds; then TimeoutError.
    #[pyo3(signature = (data, feed = None, timeout = None))]
    fn push(&self, data: &Bound<'_, PyAny>, feed: Option<&str>, timeout: Option<f64>, py: Python<'_>) -> PyResult<()> {
        let (_, feed, template) = find(&self.feeds, feed, |f| &f.0, "feed")?;
        let (run, mut wait) = (self.get()?, Patience::of(timeout)?);
        let block = block_for(&run, *feed, *template, data)?;
        let pushed = py.detach(|| match timeout {
            Some(0.0) => run.try_push(*feed, block).map_err(|(_, e)| e),
            _ => run.push_while(*feed, block, || wait.next()),
        });
        wait.outcome(pushed)
    }

    /// Pulls the next block from a drain; waits as push does.
    #[pyo3(signature = (drain = None, timeout = None))]
    fn pull(&self, drain: Option<&str>, timeout: Option<f64>, py: Python<'_>) -> PyResult<Block> {
        let (_, drain) = find(&self.drains, drain, |d| &d.0, "drain")?;
        let (run, mut wait) = (self.get()?, Patience::of(timeout)?);
        let pulled = py.detach(|| match timeout {
            Some(0.0) => run.try_pull(*drain),
            _ => run.pull_while(*drain, || wait.next()),
        });
        Ok(Block { inner: wait.outcome(pulled)? })
    }

    /// Stops the graph: no task begins any more, and those that run are waited for, for as long as it takes or `timeout`
    /// seconds; then TimeoutError, and they end when they end.
    #[pyo3(signature = (timeout = None))]
    fn stop(&self, timeout: Option<f64>, py: Python<'_>) -> PyResult<()> {
        let (run, mut wait) = (self.get()?, Patience::of(timeout)?);
        let stopped = py.detach(|| run.stop_while(|| wait.next()));
        wait.outcome(stopped)
    }

    /// Lets a stopped graph go on.
    fn run(&self, py: Python<'_>) -> PyResult<()> {
        let run = self.get()?;
        py.detach(|| run.run()).map_err(raise)
    }

    /// Empties a stopped graph's channels and begins anew, also after an error.
    fn reset(&self, py: Python<'_>) -> PyResult<()> {
        let run = self.get()?;
        py.detach(|| run.reset()).map_err(raise)
    }

    /// What was done where so far, a dictionary for each task: its `name` and `state`, how many `invocations`, how many of them
    /// `by_device` (in the order of Runtime.devices()), what it takes and waits for lately (`run`, `wait`, seconds), the `region` that
    /// it is fused into or None, and the devices that `refused` it, by number, with the reason.
    fn tasks<'py>(&self, py: Python<'py>) -> PyResult<Vec<Bound<'py, PyDict>>> {
        stats::tasks(&self.get()?.snapshot().tasks, py)
    }

    /// The graph as a picture, the text of an SVG file, with how full its channels are now and how often its tasks ran.
    fn svg(&self) -> PyResult<String> {
        Ok(self.drawing.svg(Some(&self.get()?.snapshot())))
    }

    /// The same where notebooks ask for it.
    fn _repr_svg_(&self) -> PyResult<String> {
        self.svg()
    }

    /// Ends the graph; whoever waits in push or pull gets Closed. Waits for functions that run, until Ctrl-C; they end when they
    /// end.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let run = self.inner.lock().unwrap_or_else(PoisonError::into_inner).take();
        run.map_or(Ok(()), |run| ending::close(run, py))
    }

    fn __enter__(slf: Bound<'_, Self>) -> Bound<'_, Self> {
        slf
    }

    #[pyo3(signature = (*_what))]
    fn __exit__(&self, _what: &Bound<'_, PyTuple>, py: Python<'_>) -> PyResult<()> {
        self.close(py)
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        ending::close_unheard(self.inner.lock().unwrap_or_else(PoisonError::into_inner).take());
    }
}

/// A task that is called like a function; also a context manager, which closes it at the end.
#[pyclass(frozen, module = "forebay")]
pub struct Accelerated {
    inner: Mutex<Option<Arc<forebay::place::Accelerated>>>,
    inputs: Vec<Template>,
}

impl Accelerated {
    fn task(&self) -> PyResult<Arc<forebay::place::Accelerated>> {
        let task = self.inner.lock().unwrap_or_else(PoisonError::into_inner).clone();
        task.ok_or_else(|| Closed::new_err("it was closed"))
    }
}

/// A call whose outputs come later.
#[pyclass(frozen, module = "forebay")]
pub struct Pending {
    inner: Mutex<Option<forebay::place::Pending>>,
}

/// Outputs as a function returns them: one, or a tuple.
fn returned<'py>(made: Vec<Datablock>, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
    let mut made = made.into_iter().map(|inner| Ok(Bound::new(py, Block { inner })?.into_any()));
    match (made.next(), made.len()) {
        (Some(one), 0) => one,
        (first, _) => Ok(PyTuple::new(py, first.into_iter().chain(made).collect::<PyResult<Vec<_>>>()?)?.into_any()),
    }
}

impl Accelerated {
    fn send(
        &self,
        inputs: &Bound<'_, PyTuple>,
        wait: &mut Patience,
        py: Python<'_>,
    ) -> PyResult<forebay::place::Pending> {
        if inputs.len() != self.inputs.len() {
            let why = format!("{} inputs instead of {}", inputs.len(), self.inputs.len());
            return Err(PyValueError::new_err(why));
        }
        let blocks = inputs.iter().zip(&self.inputs).map(|(d, t)| block_of(*t, &d));
        let blocks = blocks.collect::<PyResult<Vec<Datablock>>>()?;
        let task = self.task()?;
        let sent = py.detach(|| task.spawn_while(&blocks, || wait.next()));
        wait.outcome(sent)
    }
}

#[pymethods]
impl Accelerated {
    /// Calls it with blocks or anything with a buffer; a block, or a tuple of them.
    #[pyo3(signature = (*inputs))]
    fn __call__<'py>(&self, inputs: &Bound<'py, PyTuple>, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let mut wait = Patience::of(None)?;
        let mut call = self.send(inputs, &mut wait, py)?;
        // Without the interpreter's lock to the end: who lets go of a call may wait for others for a moment.
        let came = py.detach(|| {
            let came = call.wait_while(|| wait.next());
            drop(call);
            came
        });
        returned(wait.outcome(came)?, py)
    }

    /// The same without waiting for the outputs: `f.spawn(x).wait()` is `f(x)`.
    #[pyo3(signature = (*inputs))]
    fn spawn(&self, inputs: &Bound<'_, PyTuple>, py: Python<'_>) -> PyResult<Pending> {
        Ok(Pending { inner: Mutex::new(Some(self.send(inputs, &mut Patience::of(None)?, py)?)) })
    }

    /// Ends it: no call begins any more, and whoever waits for one that has not begun gets Closed. Waits for functions that
    /// run, until Ctrl-C; they end when they end.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let task = self.inner.lock().unwrap_or_else(PoisonError::into_inner).take();
        task.map_or(Ok(()), |task| ending::close(task, py))
    }

    fn __enter__(slf: Bound<'_, Self>) -> Bound<'_, Self> {
        slf
    }

    #[pyo3(signature = (*_what))]
    fn __exit__(&self, _what: &Bound<'_, PyTuple>, py: Python<'_>) -> PyResult<()> {
        self.close(py)
    }

    /// What was done where so far, as of Running, for each lane.
    fn tasks<'py>(&self, py: Python<'py>) -> PyResult<Vec<Bound<'py, PyDict>>> {
        stats::tasks(&self.task()?.stats(), py)
    }

    /// Pursues a goal from now on: `throughput` of what `tracker` counts in a second, `latency` (seconds for a call, as it
    /// measures it), `deadline` (all of the work, of which it says the part that is done, within so many seconds), or the
    /// `least` of what it says. Every half second `tracker` is called; while the goal is missed the task gets more lanes, then
    /// a larger share from the service, and last `fidelity(level)` is called, with levels from 0 (best) to `lowest`. What the
    /// functions raise goes to sys.unraisablehook.
    #[pyo3(signature = (tracker, *, throughput = None, latency = None, deadline = None, least = false, lowest = 0, fidelity = None))]
    #[allow(clippy::too_many_arguments, reason = "Python's are named")]
    fn pursue(
        &self,
        tracker: Py<PyAny>,
        throughput: Option<f64>,
        latency: Option<f64>,
        deadline: Option<f64>,
        least: bool,
        lowest: u32,
        fidelity: Option<Py<PyAny>>,
        py: Python<'_>,
    ) -> PyResult<Pursuit> {
        let values = [("throughput", throughput), ("latency", latency), ("deadline", deadline)];
        goal::pursue(&*self.task()?, goal::goal(values, least)?, tracker, lowest, fidelity, py)
    }
}

#[pymethods]
impl Pending {
    /// Waits for the outputs, which come once; for as long as it takes, or `timeout` seconds; then TimeoutError, and it can be
    /// waited for again.
    #[pyo3(signature = (timeout = None))]
    fn wait<'py>(&self, timeout: Option<f64>, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let mut wait = Patience::of(timeout)?;
        let call = self.inner.lock().unwrap_or_else(PoisonError::into_inner).take();
        let mut call = call.ok_or_else(|| PyValueError::new_err("this call's outputs were handed out before"))?;
        let came = py.detach(|| call.wait_while(|| wait.next()));
        if let Err(forebay::Error::WouldBlock { .. }) = came {
            *self.inner.lock().unwrap_or_else(PoisonError::into_inner) = Some(call);
        }
        returned(wait.outcome(came)?, py)
    }
}

impl Drop for Pending {
    fn drop(&mut self) {
        let call = self.inner.lock().unwrap_or_else(PoisonError::into_inner).take();
        if ending::ending() {
            // Whoever lets go of the last of it would wait for functions that may never end (ending, rule 4).
            return std::mem::forget(call);
        }
        // It has to be told, and whoever is being told waits for functions that need the interpreter.
        let _ = Python::try_attach(|py| py.detach(|| drop(call)));
    }
}

impl Drop for Accelerated {
    fn drop(&mut self) {
        ending::close_unheard(self.inner.lock().unwrap_or_else(PoisonError::into_inner).take());
    }
}
