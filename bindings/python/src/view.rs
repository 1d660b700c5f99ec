//! Other objects' buffers.

use std::ffi::{c_int, c_void};

use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyMemoryView};

/// Somebody's buffer, held until this is dropped, with the interpreter's lock.
pub struct View(Box<ffi::Py_buffer>);

impl View {
    pub fn of(data: &Bound<'_, PyAny>, flags: c_int) -> PyResult<Self> {
        let mut view = Box::new(ffi::Py_buffer::new());
        // SAFETY: an object, and a view to be filled in that stays where it is.
        match unsafe { ffi::PyObject_GetBuffer(data.as_ptr(), &raw mut *view, flags) } {
            0 => Ok(View(view)),
            _ => Err(PyErr::fetch(data.py())),
        }
    }

    /// Where its bytes are, and how many.
    pub fn bytes(&self) -> (usize, usize) {
        (self.0.buf.cast::<c_void>().expose_provenance(), usize::try_from(self.0.len).unwrap_or(0))
    }
}

impl Drop for View {
    fn drop(&mut self) {
        // SAFETY: filled in by `of`, released once; made and dropped within a call from Python, which has the lock.
        unsafe { ffi::PyBuffer_Release(&raw mut *self.0) }
    }
}

/// Calls `f` with the bytes of anything that has a buffer: where they are, or, if they are not in one piece and in order there, copied.
pub fn with_bytes<R>(data: &Bound<'_, PyAny>, f: impl FnOnce(&[u8]) -> R) -> PyResult<R> {
    let Ok(view) = View::of(data, ffi::PyBUF_SIMPLE) else {
        let copy = PyMemoryView::from(data)?.call_method0("tobytes")?;
        return Ok(f(copy.cast::<PyBytes>()?.as_bytes()));
    };
    let (at, n) = view.bytes();
    if n == 0 {
        return Ok(f(&[]));
    }
    // SAFETY: so many bytes are there until the view is released, behind `f`. The interpreter's lock is held meanwhile: who changes
    // them all the same does so behind Python's back, as for every reader of a buffer.
    Ok(f(unsafe { std::slice::from_raw_parts(std::ptr::with_exposed_provenance(at), n) }))
}
