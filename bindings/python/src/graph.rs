//! Tasks and graphs.

use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use forebay::{
    Arg, Datablock, Drain, Feed, Geometry, Invocation, Kind, Layout, Predicate, TaskError, TaskId, Template,
};
use pyo3::exceptions::{PyOSError, PyRuntimeError, PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};

use crate::block::{Block, copy_out};
use crate::grid::Grid;
use crate::{ending, raise, word};

/// A unit of work with named ports, and functions and kernels that do it.
#[pyclass(module = "forebay")]
pub struct Task {
    /// None once a graph has it. Under a lock, since a task's functions belong to one thread at a time.
    inner: Mutex<Option<forebay::Task>>,
    inputs: Vec<Handed>,
    outputs: Vec<(String, Template)>,
}

/// What a function gets for one of its arguments.
#[derive(Clone)]
enum Handed {
    /// The block at this input.
    Input(String),
    /// A copy of what comes in where this output will be.
    Before(usize),
}

fn given_away() -> PyErr {
    PyRuntimeError::new_err("the task was given away, to a graph or a runtime: make another one")
}

fn was_started() -> PyErr {
    PyRuntimeError::new_err("the graph was started, which can be done once: make it anew")
}

impl Task {
    pub fn take(&mut self) -> PyResult<forebay::Task> {
        let inner = self.inner.get_mut().unwrap_or_else(PoisonError::into_inner);
        inner.take().ok_or_else(given_away)
    }

    fn get(&mut self) -> PyResult<&mut forebay::Task> {
        let inner = self.inner.get_mut().unwrap_or_else(PoisonError::into_inner);
        inner.as_mut().ok_or_else(given_away)
    }

    fn change(&mut self, f: impl FnOnce(forebay::Task) -> forebay::Task) -> PyResult<()> {
        let t = self.take()?;
        self.inner = Mutex::new(Some(f(t)));
        Ok(())
    }
}

/// What a function raised, and where: nobody else will say so.
fn told(e: &PyErr, py: Python<'_>) -> TaskError {
    let place = e.traceback(py).and_then(|t| t.format().ok()).unwrap_or_default();
    TaskError::from(format!("{e}\n{place}").trim_end().to_owned())
}

/// Calls the user's function: its inputs in order, its outputs as it returns them.
fn call(
    f: &Py<PyAny>,
    inputs: &[Handed],
    outputs: &[(String, Template)],
    inv: &mut Invocation<'_>,
) -> Result<(), TaskError> {
    let mut places =
        outputs.iter().map(|(p, _)| inv.output_bytes(p.as_str())).collect::<Result<Vec<_>, TaskError>>()?;
    let block = |of: &Handed| match of {
        Handed::Input(port) => Ok(inv.block(port.as_str())?.clone()),
        Handed::Before(i) => {
            let (port, t) = &outputs[*i];
            let bytes =
                if t.layout == Layout::Array { t.bytes() } else { inv.out(port.as_str())?.records() * t.elem.size() };
            Ok(Datablock::from_bytes(*t, places[*i].get(..bytes).unwrap_or_default())?)
        }
    };
    let blocks = inputs.iter().map(block).collect::<Result<Vec<_>, TaskError>>()?;
    let called = Python::try_attach(|py| {
        let failed = |e: PyErr| told(&e, py);
        let args = blocks.into_iter().map(|inner| Bound::new(py, Block { inner })).collect::<PyResult<Vec<_>>>();
        let args = PyTuple::new(py, args.map_err(failed)?).map_err(failed)?;
        let returned = ending::call(f, &args).map_err(failed)?;
        let several: Vec<Bound<'_, PyAny>> = match (outputs.len(), returned.cast::<PyTuple>()) {
            (0, _) => Vec::new(),
            (1, _) => vec![returned],
            (n, Ok(t)) if t.len() == n => t.iter().collect(),
            (n, _) => return Err(format!("the function must return a tuple of {n} outputs").into()),
        };
        for (((port, t), data), place) in outputs.iter().zip(several).zip(&mut places) {
            let bytes = copy_out(port, t, &data, place).map_err(failed)?;
            if t.layout == Layout::Array {
                if bytes != t.bytes() {
                    return Err(
                        format!("{bytes} bytes were returned for port {port:?}, which holds {}", t.bytes()).into()
                    );
                }
            } else if !bytes.is_multiple_of(t.elem.size()) {
                return Err(format!("{bytes} bytes are no number of elements of port {port:?}").into());
            } else {
                inv.out(port.as_str())?.set_records(bytes / t.elem.size())?;
            }
        }
        Ok(())
    });
    called.unwrap_or_else(|| Err("Python is ending".into()))
}

#[pymethods]
impl Task {
    /// A task; ports are given as {"name": "f32[640x480]"}. Sticky inputs keep their block until another one comes.
    #[new]
    #[pyo3(signature = (name, inputs = None, outputs = None, sticky = None))]
    fn new(
        name: &str,
        inputs: Option<&Bound<'_, PyDict>>,
        outputs: Option<&Bound<'_, PyDict>>,
        sticky: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<Self> {
        let mut made =
            Task { inner: Mutex::new(Some(forebay::Task::new(name))), inputs: Vec::new(), outputs: Vec::new() };
        let ports = |d: Option<&Bound<'_, PyDict>>| -> PyResult<Vec<(String, Template)>> {
            let pair = |(n, t): (Bound<'_, PyAny>, Bound<'_, PyAny>)| -> PyResult<(String, Template)> {
                Ok((n.extract()?, word(&t.extract::<String>()?)?))
            };
            d.map_or(Ok(Vec::new()), |d| d.iter().map(pair).collect())
        };
        for (n, t) in ports(inputs)? {
            made.change(|k| k.input(&n, t))?;
            made.inputs.push(Handed::Input(n));
        }
        for (n, t) in ports(sticky)? {
            made.change(|k| k.sticky(&n, t))?;
            made.inputs.push(Handed::Input(n));
        }
        for (n, t) in ports(outputs)? {
            made.change(|k| k.output(&n, t))?;
            made.outputs.push((n, t));
        }
        Ok(made)
    }

    /// Adds a port of any kind: "input", "sticky", "output", "inout" or "meta" (one number) of a template; "size" of the output
    /// that its number sizes; "initializer" of the input that it stands in for at the start; "in-place", an output, of the input
    /// whose block it is; "geometry" and "iterations" of nothing.
    #[pyo3(signature = (kind, name, of = ""))]
    fn port(&mut self, kind: &str, name: &str, of: &str) -> PyResult<()> {
        let task = self.get()?;
        task.add_port(kind, name, of).map_err(PyValueError::new_err)?;
        self.outputs = task.output_templates();
        let last = self.outputs.len().saturating_sub(1);
        match kind {
            "input" | "sticky" | "meta" => self.inputs.push(Handed::Input(name.into())),
            "inout" => self.inputs.push(Handed::Before(last)),
            "in-place" => {
                let taken = |h: &&mut Handed| matches!(h, Handed::Input(port) if port == of);
                self.inputs.iter_mut().find(taken).into_iter().for_each(|h| *h = Handed::Before(last));
            }
            // What only the runtime needs is not handed to functions.
            _ => {}
        }
        Ok(())
    }

    /// Has invocations come in groups of n: outputs carry "begin-iteration" and "end-iteration".
    fn iterations(&mut self, n: u64) -> PyResult<()> {
        self.change(|k| k.iterations(n))
    }

    /// Lets a function do the work on the CPU: it gets a block for each input and returns a buffer for the output, or a
    /// tuple of them. It can be used as a decorator.
    fn host(&mut self, function: Py<PyAny>, py: Python<'_>) -> PyResult<Py<PyAny>> {
        if !function.bind(py).is_callable() {
            return Err(PyTypeError::new_err("the function cannot be called"));
        }
        let back = function.clone_ref(py);
        let (inputs, outputs) = (self.inputs.clone(), self.outputs.clone());
        self.change(|k| k.host(move |inv| call(&function, &inputs, &outputs, inv)))?;
        Ok(back)
    }

    /// Lets a kernel do the work, on devices of one kind ("opencl", "cuda") or of both. Its arguments are the ports in the
    /// order of their declaration, inputs first, or what is said: ["x", "y", "items.x", "u32:5"].
    #[pyo3(signature = (source, entry, args = None, kind = None))]
    fn kernel(&mut self, source: &str, entry: &str, args: Option<Vec<String>>, kind: Option<&str>) -> PyResult<()> {
        let kind = kind.map(word::<Kind>).transpose()?;
        let args = args.map(|all| all.iter().map(|a| word::<Arg>(a)).collect::<PyResult<Vec<_>>>()).transpose()?;
        self.get()?.add_kernel(kind, source, entry, args).map_err(raise)
    }

    /// Lets a function of a resident grid do the work: it is called for the items of the iteration space, a range at a time, and
    /// finds what is at port `i`, in the order of their declaration, inputs first, by `fb_span(t, i)`. The grid ends after the graph.
    fn resident(&mut self, grid: &Grid, function: &str) -> PyResult<()> {
        let grid = grid.of_a_task(function)?;
        self.change(|k| k.resident(&grid, function))
    }

    /// Sets the static priority: more comes first.
    fn priority(&mut self, priority: i32) -> PyResult<()> {
        self.change(|k| k.priority(priority))
    }

    /// Sets the iteration space instead of the one that the templates imply.
    #[pyo3(signature = (x, y = 1, z = 1))]
    fn geometry(&mut self, x: usize, y: usize, z: usize) -> PyResult<()> {
        self.change(|k| k.geometry(Geometry::new(x, y, z)))
    }
}

/// Tasks and the channels between them.
#[pyclass(module = "forebay")]
pub struct Graph {
    /// None once it was started.
    inner: Mutex<Option<forebay::Graph>>,
    pub feeds: Vec<(String, Feed)>,
    pub drains: Vec<(String, Drain)>,
}

impl Graph {
    fn graph(&mut self) -> PyResult<&mut forebay::Graph> {
        let inner = self.inner.get_mut().unwrap_or_else(PoisonError::into_inner);
        inner.as_mut().ok_or_else(was_started)
    }

    pub fn take(&mut self) -> PyResult<forebay::Graph> {
        let inner = self.inner.get_mut().unwrap_or_else(PoisonError::into_inner);
        inner.take().ok_or_else(was_started)
    }

    fn end<'a>(&mut self, name: &'a str) -> PyResult<(TaskId, &'a str)> {
        self.graph()?.end(name).map_err(raise)
    }
}

#[pymethods]
impl Graph {
    #[new]
    fn new(name: &str) -> Self {
        Graph { inner: Mutex::new(Some(forebay::Graph::new(name))), feeds: Vec::new(), drains: Vec::new() }
    }

    /// Adds a task, which is the graph's then.
    fn add(&mut self, task: &mut Task) -> PyResult<()> {
        // A graph that cannot have it leaves it.
        let graph = self.graph()?;
        graph.add(task.take()?).map(drop).map_err(raise)
    }

    /// Connects an output with an input: connect("blur.y", "edges.x"). Blocks pass that `when` lets pass, "unless end-iteration".
    #[pyo3(signature = (output, input, capacity = 4, when = "always"))]
    fn connect(&mut self, output: &str, input: &str, capacity: usize, when: &str) -> PyResult<()> {
        let (from, to) = (self.end(output)?, self.end(input)?);
        self.graph()?.connect_with(from, to, capacity, word::<Predicate>(when)?).map_err(raise)
    }

    /// Makes a channel into which the program pushes; its name is the port's.
    #[pyo3(signature = (input, capacity = 4))]
    fn feed(&mut self, input: &str, capacity: usize) -> PyResult<String> {
        let to = self.end(input)?;
        let feed = self.graph()?.feed(to, capacity).map_err(raise)?;
        self.feeds.push((input.into(), feed));
        Ok(input.into())
    }

    /// Makes a channel from which the program pulls; its name is the port's.
    #[pyo3(signature = (output, capacity = 4, when = "always"))]
    fn drain(&mut self, output: &str, capacity: usize, when: &str) -> PyResult<String> {
        let from = self.end(output)?;
        let drain = self.graph()?.drain_with(from, capacity, word::<Predicate>(when)?).map_err(raise)?;
        self.drains.push((output.into(), drain));
        Ok(output.into())
    }

    /// The graph as a picture, the text of an SVG file.
    fn svg(&mut self) -> PyResult<String> {
        Ok(self.graph()?.drawing().svg(None))
    }

    /// The same where notebooks ask for it.
    fn _repr_svg_(&mut self) -> PyResult<String> {
        self.svg()
    }

    /// Checks the graph as its start would.
    pub fn check(&mut self) -> PyResult<()> {
        self.graph()?.check().map_err(raise)
    }
}

/// An error of the system's as Python raises it: with its number, its words and the path.
fn io(e: std::io::Error, path: &Path) -> PyErr {
    match e.raw_os_error() {
        Some(number) => {
            let text = e.to_string();
            let words = text.split(" (os error").next().unwrap_or_default().to_owned();
            PyOSError::new_err((number, words, path.display().to_string()))
        }
        None => e.into(),
    }
}

/// Reads a graph file.
#[pyfunction]
pub fn load(path: PathBuf) -> PyResult<Graph> {
    let g = forebay::graph::load(&path, &forebay::graph::Library::standard()).map_err(|e| match e {
        // What is not there is Python's FileNotFoundError. (Asked only now: a pipe can be read once.)
        forebay::Error::File { line: 0, .. } => std::fs::read(&path).err().map_or_else(|| raise(e), |e| io(e, &path)),
        e => raise(e),
    })?;
    let (feeds, drains) = (g.feeds(), g.drains());
    Ok(Graph { inner: Mutex::new(Some(g)), feeds, drains })
}
