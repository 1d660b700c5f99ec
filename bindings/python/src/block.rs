//! Datablocks, as buffers.

use std::ffi::{CString, c_int, c_void};

use forebay::{Datablock, Elem, Feed, Layout, Signals, Template};
use pyo3::exceptions::{PyBufferError, PyValueError};
use pyo3::ffi;
use pyo3::prelude::*;

use crate::view::with_bytes;
use crate::{raise, word};

/// A unit of data. Anything that takes a buffer can read it: memoryview(block), numpy.asarray(block).
#[pyclass(frozen, module = "forebay")]
pub struct Block {
    pub inner: Datablock,
}

/// A block of this template with the bytes of `data`, which may be a block already.
pub fn block_of(template: Template, data: &Bound<'_, PyAny>) -> PyResult<Datablock> {
    if let Ok(b) = data.cast::<Block>() {
        return Ok(b.get().inner.clone());
    }
    with_bytes(data, &template, |bytes| Datablock::from_bytes(template, bytes))?.map_err(raise)
}

/// A block for this feed with the bytes of `data`, which may be a block already. It is of the feed's own memory, which is taken
/// again and again, and page-locked where the runtime has a GPU.
pub fn block_for(
    run: &forebay::Running,
    feed: Feed,
    template: Template,
    data: &Bound<'_, PyAny>,
) -> PyResult<Datablock> {
    if let Ok(b) = data.cast::<Block>() {
        return Ok(b.get().inner.clone());
    }
    let mut block = run.acquire(feed).map_err(raise)?;
    if !block.is_free() {
        // A device still reads what it held last. Who waits for that could not be interrupted; a push that waits for room can.
        return block_of(template, data);
    }
    with_bytes(data, &template, |bytes| block.assign_bytes(bytes))?.map_err(raise)?;
    Ok(block)
}

/// The element as Python's struct module writes it; none for records.
fn format(e: Elem) -> Option<&'static str> {
    Some(match e {
        Elem::U8 => "B",
        Elem::I8 => "b",
        Elem::U16 => "H",
        Elem::I16 => "h",
        Elem::U32 => "I",
        Elem::I32 => "i",
        Elem::U64 => "Q",
        Elem::I64 => "q",
        Elem::F16 => "e",
        Elem::F32 => "f",
        Elem::F64 => "d",
        Elem::Record(_) => return None,
    })
}

/// What a view's arrays are kept in until it is released.
struct Shape {
    format: CString,
    shape: Vec<ffi::Py_ssize_t>,
    strides: Vec<ffi::Py_ssize_t>,
}

impl Shape {
    fn of(b: &Datablock) -> Self {
        let t = b.template();
        let size = t.elem.size();
        // Records without a number of their own are bytes.
        let (code, size) = format(t.elem).map_or(("B", 1), |c| (c, size));
        let per = t.elem.size() / size;
        let [x, y, z] = t.dims;
        let (shape, strides) = match t.layout {
            Layout::Array => {
                let row = t.row_bytes();
                let mut all = vec![(z, row * y), (y, row), (x, size * per)];
                while all.len() > 1 && all.first().is_some_and(|(n, _)| *n == 1) {
                    all.remove(0);
                }
                if per > 1 {
                    all.push((per, size));
                }
                all.into_iter().unzip()
            }
            _ => (vec![b.bytes() / size], vec![size]),
        };
        let long = |v: Vec<usize>| v.into_iter().map(|n| n as ffi::Py_ssize_t).collect();
        Shape { format: CString::new(code).unwrap_or_default(), shape: long(shape), strides: long(strides) }
    }
}

#[pymethods]
impl Block {
    /// A block of a template, "f32[640x480]", "u32<=1000" or "bytes<=4096", with the bytes of `data`, or zeros; with these
    /// marks, which predicates go by.
    #[new]
    #[pyo3(signature = (template, data = None, signals = None))]
    fn new(template: &str, data: Option<&Bound<'_, PyAny>>, signals: Option<Vec<String>>) -> PyResult<Self> {
        let t: Template = word(template)?;
        let inner = match data {
            Some(d) => with_bytes(d, &t, |bytes| Datablock::from_bytes(t, bytes))?.map_err(raise)?,
            None => Datablock::zeroed(t).map_err(raise)?,
        };
        let marks = signals.unwrap_or_default();
        let marks = marks.iter().map(|s| word::<Signals>(s)).collect::<PyResult<Vec<_>>>()?;
        inner.set_signals(marks.into_iter().fold(Signals::NONE, |all, s| all | s));
        Ok(Block { inner })
    }

    /// Its marks: "begin-stream", "end-stream", "begin-iteration", "end-iteration".
    #[getter]
    fn signals(&self) -> Vec<&'static str> {
        let has = self.inner.signals();
        Signals::NAMED.iter().filter(|(_, s)| has.any(*s)).map(|(name, _)| *name).collect()
    }

    /// Waits until its bytes are made, wherever that is; whoever reads them waits of himself.
    fn wait(&self, py: Python<'_>) -> PyResult<()> {
        py.detach(|| self.inner.wait()).map_err(raise)
    }

    /// What it holds.
    #[getter]
    fn template(&self) -> String {
        self.inner.template().to_string()
    }

    /// How many elements it has.
    fn __len__(&self) -> usize {
        self.inner.records()
    }

    fn __repr__(&self) -> String {
        format!("<forebay.Block {} with {} elements>", self.inner.template(), self.inner.records())
    }

    /// Its bytes, copied.
    fn tobytes(&self, py: Python<'_>) -> PyResult<Vec<u8>> {
        py.detach(|| self.inner.as_bytes().map(<[u8]>::to_vec)).map_err(raise)
    }

    /// Itself as a NumPy array, without a copy.
    fn numpy<'py>(slf: Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        slf.py().import("numpy")?.call_method1("asarray", (slf,))
    }

    /// # Safety
    /// Python's: `view` may be filled in, and is given back to `__releasebuffer__`.
    unsafe fn __getbuffer__(slf: Bound<'_, Self>, view: *mut ffi::Py_buffer, flags: c_int) -> PyResult<()> {
        if view.is_null() {
            return Err(PyBufferError::new_err("there is no view to fill in"));
        }
        if flags & ffi::PyBUF_WRITABLE != 0 {
            return Err(PyBufferError::new_err("a block cannot be written; make another one"));
        }
        let b = &slf.get().inner;
        let shape = Box::new(Shape::of(b));
        let item = shape.strides.last().copied().unwrap_or(1);
        let with_gaps = |size, (s, n): (&ffi::Py_ssize_t, &ffi::Py_ssize_t)| (*s == size).then_some(size * n);
        let contiguous = shape.strides.iter().zip(&shape.shape).rev().try_fold(item, with_gaps);
        let asked = |what: c_int| flags & what == what;
        let strided = asked(ffi::PyBUF_STRIDES);
        let in_order = !strided || asked(ffi::PyBUF_C_CONTIGUOUS) || asked(ffi::PyBUF_ANY_CONTIGUOUS);
        if contiguous.is_none() && (in_order || asked(ffi::PyBUF_F_CONTIGUOUS)) {
            return Err(PyBufferError::new_err("its rows have gaps, which the reader does not allow for"));
        }
        if asked(ffi::PyBUF_F_CONTIGUOUS) && shape.shape.len() > 1 {
            return Err(PyBufferError::new_err("its rows, not its columns, lie one after the other"));
        }
        // Waits for whoever makes it on a device.
        let bytes = slf.py().detach(|| b.as_bytes()).map_err(raise)?;
        let (address, len) = (bytes.as_ptr(), shape.shape.iter().product::<ffi::Py_ssize_t>() * item);
        let kept = Box::into_raw(shape);
        // SAFETY: Python's view, which is ours to fill in; the bytes live as long as the block, to which the view holds on;
        // the shape lives until the view is released.
        unsafe {
            (*view).buf = address.cast_mut().cast::<c_void>();
            (*view).obj = slf.into_any().into_ptr();
            (*view).len = len;
            (*view).readonly = 1;
            (*view).itemsize = item;
            (*view).format = match flags & ffi::PyBUF_FORMAT {
                0 => std::ptr::null_mut(),
                _ => (*kept).format.as_ptr().cast_mut(),
            };
            (*view).ndim = (*kept).shape.len() as c_int;
            (*view).shape = match flags & ffi::PyBUF_ND {
                0 => std::ptr::null_mut(),
                _ => (*kept).shape.as_mut_ptr(),
            };
            (*view).strides = if strided { (*kept).strides.as_mut_ptr() } else { std::ptr::null_mut() };
            (*view).suboffsets = std::ptr::null_mut();
            (*view).internal = kept.cast();
        }
        Ok(())
    }

    /// # Safety
    /// Python's: a view that `__getbuffer__` filled in, once.
    unsafe fn __releasebuffer__(&self, view: *mut ffi::Py_buffer) {
        // SAFETY: as said.
        drop(unsafe { Box::from_raw((*view).internal.cast::<Shape>()) });
    }
}

/// What a function returned for one output.
pub fn copy_out(port: &str, t: &Template, data: &Bound<'_, PyAny>, to: &mut [u8]) -> PyResult<usize> {
    let named = |e: PyErr| PyValueError::new_err(format!("port {port:?}: {}", e.value(data.py())));
    with_bytes(data, t, |bytes| {
        let (row, used) = (t.row_bytes(), t.dims[0] * t.elem.size());
        if t.layout == Layout::Array && row > used && bytes.len() == t.elements() * t.elem.size() {
            // Rows without what is between them here.
            let rows = bytes.chunks_exact(used).zip(to.chunks_exact_mut(row));
            rows.for_each(|(from, to)| to[..used].copy_from_slice(from));
            return Ok(t.bytes());
        }
        let Some(room) = to.get_mut(..bytes.len()) else {
            let why = format!("{} bytes were returned for port {port:?}, which holds {}", bytes.len(), to.len());
            return Err(PyValueError::new_err(why));
        };
        room.copy_from_slice(bytes);
        Ok(bytes.len())
    })
    .map_err(named)?
}
