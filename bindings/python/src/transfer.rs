//! Moving data by hand: engines, memory and streams (docs/transfer.md).

use std::collections::BTreeMap;
use std::ffi::c_int;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use forebay::hal::Buffer;
use forebay::hal::fork::Own;
use forebay::transfer::{self, Bound, Budget, Direction, Host, Kept, Range, Scheduling};
use forebay::{Error, Kind, Wanted};
use pyo3::exceptions::{PyAttributeError, PyBufferError, PyValueError};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};

use crate::view::View;
use crate::{raise, word};

/// A wrong range is the caller's mistake, and not the device's.
fn wrong(e: Error) -> PyErr {
    match e {
        Error::Device(forebay::hal::Error::Invalid { .. }) => PyValueError::new_err(e.to_string()),
        e => raise(e),
    }
}

/// Knows how data gets to one device fastest.
#[pyclass(frozen, module = "forebay")]
pub struct Engine {
    inner: Arc<transfer::Engine>,
}

#[pymethods]
impl Engine {
    /// The engine of the first device of a kind ("cuda", "opencl", "cpu"), of one of several ("cuda:1"), or of the first one that
    /// there is, in this order.
    /// The first time on a machine it measures all ways of moving data, for two seconds at most.
    #[new]
    #[pyo3(signature = (device = None))]
    fn new(device: Option<&str>, py: Python<'_>) -> PyResult<Self> {
        let wanted = device.map(word::<Wanted>).transpose()?;
        Ok(Engine { inner: py.detach(|| transfer::Engine::of(wanted)).map_err(raise)? })
    }

    /// Its device's name.
    #[getter]
    fn device(&self) -> String {
        self.inner.device().info().name.clone()
    }

    /// What a transfer is expected to take when nothing else is in flight, in seconds: as a rule, and when it is slow.
    #[pyo3(signature = (bytes, to_host = false, pinned = false))]
    fn cost(&self, bytes: u64, to_host: bool, pinned: bool) -> (f64, f64) {
        let direction = if to_host { Direction::ToHost } else { Direction::ToDevice };
        let cost = self.inner.cost(direction, bytes, if pinned { Host::Pinned } else { Host::Pageable });
        (cost.median as f64 / 1e9, cost.tail as f64 / 1e9)
    }

    /// Memory of the device.
    fn memory(&self, bytes: usize) -> PyResult<Memory> {
        let cuda = self.inner.device().info().kind == Kind::Cuda;
        Ok(Memory { inner: self.inner.memory(bytes).map_err(raise)?, cuda })
    }

    /// Host memory from which the device copies fastest, zeroed: a buffer that can be written, memoryview(p) or
    /// numpy.frombuffer(p, dtype). Parts of it are as good.
    fn pinned(&self, bytes: usize) -> PyResult<Pinned> {
        Ok(Pinned::of(self, self.inner.pinned(bytes).map_err(raise)?))
    }

    /// A stream of transfers.
    fn stream(&self) -> PyResult<Stream> {
        let stream = Bound::ordinary(&self.inner).map_err(raise)?;
        Ok(Stream { inner: Mutex::new(Some(stream)), engine: self.number() })
    }

    /// A real-time stream of the calling thread, which gets real-time priority or the best that the system allows until the
    /// stream is closed. It may take so many seconds of each period, and spins no longer than that.
    #[pyo3(signature = (run = 0.05, period = 0.1, spin = 0.001))]
    fn real_time(&self, run: f64, period: f64, spin: f64) -> PyResult<Stream> {
        let seconds = |s: f64| Duration::try_from_secs_f64(s).map_err(|e| PyValueError::new_err(format!("{s}: {e}")));
        let budget = Budget { run: seconds(run)?, period: seconds(period)?, spin: seconds(spin)? };
        let stream = Bound::real_time(&self.inner, budget).map_err(raise)?;
        Ok(Stream { inner: Mutex::new(Some(stream)), engine: self.number() })
    }
}

impl Engine {
    /// What tells it from others that are there.
    fn number(&self) -> usize {
        Arc::as_ptr(self.inner.device()).cast::<()>() as usize
    }
}

/// Memory of a device.
#[pyclass(frozen, module = "forebay")]
pub struct Memory {
    inner: Buffer,
    cuda: bool,
}

#[pymethods]
impl Memory {
    fn __len__(&self) -> usize {
        self.inner.len()
    }

    /// Its address on the device, or None where it has none.
    #[getter]
    fn address(&self) -> Option<u64> {
        self.inner.address()
    }

    /// As an array of bytes for CuPy, PyTorch, Numba and the like, on CUDA devices; they hold on to this object.
    #[getter]
    fn __cuda_array_interface__<'py>(&self, py: Python<'py>) -> PyResult<pyo3::Bound<'py, PyDict>> {
        let address = self.inner.address().filter(|_| self.cuda);
        let Some(address) = address else {
            return Err(PyAttributeError::new_err("this memory is of no CUDA device"));
        };
        let d = PyDict::new(py);
        d.set_item("shape", (self.inner.len(),))?;
        d.set_item("typestr", "|u1")?;
        d.set_item("data", (address, false))?;
        d.set_item("version", 3)?;
        Ok(d)
    }

    fn __repr__(&self) -> String {
        format!("<forebay.Memory of {} bytes>", self.inner.len())
    }
}

/// All page-locked memory of this module: where each begins, where it ends, and whose it is.
static PINNED: Own<BTreeMap<usize, (usize, usize)>> = Own::new();

fn ranges() -> std::sync::MutexGuard<'static, BTreeMap<usize, (usize, usize)>> {
    PINNED.lock()
}

/// Where so many bytes are for the device of this engine.
fn place(at: usize, bytes: usize, engine: usize) -> Host {
    let ranges = ranges();
    let within =
        ranges.range(..=at).next_back().is_some_and(|(_, (end, of))| *of == engine && bytes <= end.saturating_sub(at));
    if within { Host::Pinned } else { Host::Pageable }
}

/// Host memory from which a device copies fastest.
#[pyclass(frozen, module = "forebay")]
pub struct Pinned {
    /// None while a transfer has it.
    inner: Mutex<Option<transfer::Pinned>>,
    /// Whoever looks at its bytes does meanwhile, too, whatever comes of the transfer.
    _kept: Kept,
    address: usize,
    bytes: usize,
    /// As long as it is there no other one has its number.
    _engine: Arc<transfer::Engine>,
}

impl Pinned {
    fn of(engine: &Engine, inner: transfer::Pinned) -> Self {
        let (address, bytes) = (inner.address().expose_provenance(), inner.len());
        if bytes > 0 {
            ranges().insert(address, (address + bytes, engine.number()));
        }
        let kept = inner.keep();
        Pinned { inner: Mutex::new(Some(inner)), _kept: kept, address, bytes, _engine: engine.inner.clone() }
    }

    fn place(&self) -> MutexGuard<'_, Option<transfer::Pinned>> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        if self.bytes > 0 {
            ranges().remove(&self.address);
        }
    }
}

#[pymethods]
impl Pinned {
    fn __len__(&self) -> usize {
        self.bytes
    }

    /// Touches every page and asks the system to keep it in memory, for as long as this lives; whether it does.
    fn lock(&self) -> PyResult<bool> {
        self.place().as_mut().map(transfer::Pinned::lock).ok_or_else(under_way)
    }

    fn __repr__(&self) -> String {
        format!("<forebay.Pinned of {} bytes>", self.bytes)
    }

    /// # Safety
    /// Python's: `view` may be filled in.
    unsafe fn __getbuffer__(slf: pyo3::Bound<'_, Self>, view: *mut ffi::Py_buffer, flags: c_int) -> PyResult<()> {
        if view.is_null() {
            return Err(PyBufferError::new_err("there is no view to fill in"));
        }
        let (address, bytes) = (slf.get().address, slf.get().bytes);
        let len = ffi::Py_ssize_t::try_from(bytes).map_err(|e| PyBufferError::new_err(e.to_string()))?;
        // SAFETY: Python's view; the bytes live as long as this object, to which the view holds on.
        let filled = unsafe {
            ffi::PyBuffer_FillInfo(view, slf.as_ptr(), std::ptr::with_exposed_provenance_mut(address), len, 0, flags)
        };
        if filled != 0 {
            return Err(PyErr::fetch(slf.py()));
        }
        Ok(())
    }
}

/// Transfers in order; also a context manager, which closes it at the end. A real-time one is only for the thread that made it.
#[pyclass(frozen, module = "forebay")]
pub struct Stream {
    inner: Mutex<Option<Bound>>,
    engine: usize,
}

/// Transfers that were begun and are waited for later.
#[pyclass(frozen, module = "forebay")]
pub struct InFlight {
    inner: Mutex<Option<transfer::InFlight>>,
    stream: Py<Stream>,
    memory: Py<Pinned>,
}

#[pymethods]
impl InFlight {
    /// Waits for it; its host memory can be sent again then.
    fn wait(&self, py: Python<'_>) -> PyResult<()> {
        let started = self.inner.lock().unwrap_or_else(PoisonError::into_inner).take();
        let started = started.ok_or_else(|| PyValueError::new_err("this transfer was waited for before"))?;
        let back = self.stream.get().with(py, |s| s.stream()?.finish(started))?;
        *self.memory.get().place() = Some(back);
        Ok(())
    }
}

fn under_way() -> PyErr {
    PyValueError::new_err("a transfer of this memory is under way, or was never waited for")
}

fn closed() -> PyErr {
    PyValueError::new_err("the stream is closed")
}

impl Stream {
    /// Does something with the stream. The interpreter's lock is not held meanwhile: whoever has the stream may want it.
    fn with<T: Send>(&self, py: Python<'_>, what: impl Send + FnOnce(&mut Bound) -> Result<T, Error>) -> PyResult<T> {
        py.detach(|| match &mut *self.lock() {
            Some(stream) => what(stream).map_err(wrong),
            None => Err(closed()),
        })
    }

    fn lock(&self) -> MutexGuard<'_, Option<Bound>> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn transfer(
        &self,
        py: Python<'_>,
        direction: Direction,
        memory: &Memory,
        offset: usize,
        view: &View,
    ) -> PyResult<()> {
        let (at, bytes) = view.bytes();
        let host = place(at, bytes, self.engine);
        self.with(py, |s| {
            let at = std::ptr::with_exposed_provenance_mut(at);
            // SAFETY: the bytes are there until the view is released, and writable where it was asked for so; in page-locked
            // memory of this engine's device where it was found to be. Who else changes them is Python's matter, as with
            // every buffer; they are reached by address only.
            unsafe { s.transfer(direction, &memory.inner, offset, at, bytes, host) }
        })
    }
}

impl Stream {
    fn start(
        slf: &pyo3::Bound<'_, Self>,
        direction: Direction,
        memory: &Memory,
        pinned: &pyo3::Bound<'_, Pinned>,
        offset: usize,
    ) -> PyResult<InFlight> {
        let (all, bytes) = (memory.inner.len(), pinned.get().bytes);
        if offset.checked_add(bytes).is_none_or(|end| end > all) {
            return Err(PyValueError::new_err(format!("{bytes} bytes at {offset} of a buffer of {all} B")));
        }
        // In this order: whoever waits for another transfer has the stream, and then wants the place of its memory.
        let this = pinned.get();
        let started = slf.get().with(slf.py(), |s| {
            let s = s.stream()?;
            let Some(taken) = this.place().take() else { return Ok(None) };
            let started = match direction {
                Direction::ToDevice => s.start_write(&memory.inner, offset, taken),
                Direction::ToHost => s.start_read(&memory.inner, offset, taken),
            };
            started.map(Some)
        })?;
        let inner = Mutex::new(Some(started.ok_or_else(under_way)?));
        Ok(InFlight { inner, stream: slf.clone().unbind(), memory: pinned.clone().unbind() })
    }

    fn batch(
        &self,
        py: Python<'_>,
        direction: Direction,
        memory: &Memory,
        view: &View,
        ranges: &[(u64, u64, u64)],
    ) -> PyResult<()> {
        let (at, bytes) = view.bytes();
        let host = place(at, bytes, self.engine);
        let all: Vec<Range> = ranges.iter().map(|&(host, device, bytes)| Range { host, device, bytes }).collect();
        self.with(py, |s| {
            let at = std::ptr::with_exposed_provenance_mut(at);
            // SAFETY: as in `transfer`.
            unsafe { s.stream()?.transfer_batch(direction, &memory.inner, at, bytes, host, &all) }
        })
    }
}

#[pymethods]
impl Stream {
    /// Sends the bytes of anything that has a buffer; they have arrived when this returns.
    #[pyo3(signature = (memory, data, offset = 0))]
    fn write(&self, memory: &Memory, data: &pyo3::Bound<'_, PyAny>, offset: usize) -> PyResult<()> {
        let view = View::of(data, ffi::PyBUF_SIMPLE)?;
        self.transfer(data.py(), Direction::ToDevice, memory, offset, &view)
    }

    /// Fills anything that has a writable buffer.
    #[pyo3(signature = (memory, into, offset = 0))]
    fn read(&self, memory: &Memory, into: &pyo3::Bound<'_, PyAny>, offset: usize) -> PyResult<()> {
        let view = View::of(into, ffi::PyBUF_WRITABLE)?;
        self.transfer(into.py(), Direction::ToHost, memory, offset, &view)
    }

    /// Sends several parts of anything that has a buffer at once, for one wait: for each its place there, its place on the device,
    /// and how many bytes.
    fn write_batch(
        &self,
        memory: &Memory,
        data: &pyo3::Bound<'_, PyAny>,
        ranges: Vec<(u64, u64, u64)>,
    ) -> PyResult<()> {
        let view = View::of(data, ffi::PyBUF_SIMPLE)?;
        self.batch(data.py(), Direction::ToDevice, memory, &view, &ranges)
    }

    /// Brings several parts at once.
    fn read_batch(&self, memory: &Memory, into: &pyo3::Bound<'_, PyAny>, ranges: Vec<(u64, u64, u64)>) -> PyResult<()> {
        let view = View::of(into, ffi::PyBUF_WRITABLE)?;
        self.batch(into.py(), Direction::ToHost, memory, &view, &ranges)
    }

    /// Begins to send all of page-locked memory of this device, which is not to be written until the transfer was waited for.
    /// Later transfers of the stream come behind it.
    #[pyo3(signature = (memory, data, offset = 0))]
    fn start_write(
        slf: &pyo3::Bound<'_, Self>,
        memory: &Memory,
        data: &pyo3::Bound<'_, Pinned>,
        offset: usize,
    ) -> PyResult<InFlight> {
        Self::start(slf, Direction::ToDevice, memory, data, offset)
    }

    /// Begins to fill page-locked memory, which is not to be used until the transfer was waited for.
    #[pyo3(signature = (memory, into, offset = 0))]
    fn start_read(
        slf: &pyo3::Bound<'_, Self>,
        memory: &Memory,
        into: &pyo3::Bound<'_, Pinned>,
        offset: usize,
    ) -> PyResult<InFlight> {
        Self::start(slf, Direction::ToHost, memory, into, offset)
    }

    /// Sends bytes without proof of arrival, where the processor stores them itself: they arrive soon, and before whatever this
    /// stream posts to that memory afterwards. A doorbell for a kernel of your own, that is. Nothing that was started may use that
    /// part of the memory any more.
    #[pyo3(signature = (memory, data, offset = 0))]
    fn post(&self, memory: &Memory, data: &pyo3::Bound<'_, PyAny>, offset: usize) -> PyResult<()> {
        let view = View::of(data, ffi::PyBUF_SIMPLE)?;
        let (at, n) = view.bytes();
        self.with(data.py(), |s| {
            let bytes = match n {
                0 => &[],
                // SAFETY: the bytes are there until the view is released; who changes them is Python's matter, as in `transfer`.
                n => unsafe { std::slice::from_raw_parts(std::ptr::with_exposed_provenance(at), n) },
            };
            s.stream()?.post(&memory.inner, offset, bytes)
        })
    }

    /// Copies within the device.
    #[pyo3(signature = (from_, from_at, to, to_at, bytes))]
    fn copy(
        &self,
        from_: &Memory,
        from_at: usize,
        to: &Memory,
        to_at: usize,
        bytes: usize,
        py: Python<'_>,
    ) -> PyResult<()> {
        self.with(py, |s| s.stream()?.copy(&from_.inner, from_at, &to.inner, to_at, bytes))
    }

    /// Copies to another device, whose stream `other` is: directly, if that one reaches this one's memory, else by way of the host.
    #[allow(clippy::too_many_arguments, reason = "a place on either device")]
    fn relay(
        &self,
        from_: &Memory,
        from_at: usize,
        other: &Stream,
        to: &Memory,
        to_at: usize,
        bytes: usize,
        py: Python<'_>,
    ) -> PyResult<()> {
        if std::ptr::eq(self, other) {
            return Err(PyValueError::new_err("both streams are the same: copy() copies within a device"));
        }
        py.detach(|| {
            // Two threads that copy to and fro take both locks in one order.
            let (mut mine, mut others);
            if std::ptr::from_ref(self) < std::ptr::from_ref(other) {
                mine = self.lock();
                others = other.lock();
            } else {
                others = other.lock();
                mine = self.lock();
            }
            match (&mut *mine, &mut *others) {
                (Some(a), Some(b)) => {
                    let copied =
                        a.stream().and_then(|a| a.relay(&from_.inner, from_at, b.stream()?, &to.inner, to_at, bytes));
                    copied.map_err(wrong)
                }
                _ => Err(closed()),
            }
        })
    }

    /// From now on transfers are to arrive within so many seconds: they go by the way whose slow copies are fastest. None goes
    /// back to the way that is fastest as a rule.
    fn set_deadline(&self, seconds: Option<f64>, py: Python<'_>) -> PyResult<()> {
        let within = seconds.map(Duration::try_from_secs_f64).transpose();
        let within = within.map_err(|e| PyValueError::new_err(format!("a deadline: {e}")))?;
        self.with(py, |s| {
            s.stream()?.set_deadline(within);
            Ok(())
        })
    }

    /// What a real-time stream got of what it asked for, in words, whether its memory is locked, and in how many periods it used
    /// up its budget; None for others.
    #[getter]
    fn protection(&self, py: Python<'_>) -> PyResult<Option<(String, bool, u64)>> {
        let got = self.with(py, |s| Ok(s.protection()))?;
        Ok(got.map(|(p, overruns)| {
            let how: Scheduling = p.scheduling;
            (how.to_string(), p.locked, overruns)
        }))
    }

    /// Ends it after what it began; a real-time one gives its thread's priority back.
    fn close(&self, py: Python<'_>) {
        py.detach(|| drop(self.lock().take()));
    }

    fn __enter__(slf: pyo3::Bound<'_, Self>) -> pyo3::Bound<'_, Self> {
        slf
    }

    #[pyo3(signature = (*_what))]
    fn __exit__(&self, _what: &pyo3::Bound<'_, PyTuple>, py: Python<'_>) {
        self.close(py);
    }
}
