//! Other objects' buffers.

use std::ffi::{CStr, c_int, c_void};

use forebay::{Elem, Layout, Template};
use pyo3::exceptions::PyValueError;
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

    /// What its items are, in the words of Python's struct module, and how many bytes each has.
    fn items(&self) -> (String, usize) {
        let size = usize::try_from(self.0.itemsize).unwrap_or(1);
        if self.0.format.is_null() {
            return ("B".into(), size);
        }
        // SAFETY: text of the buffer's owner, which stays until the view is released.
        let text = unsafe { CStr::from_ptr(self.0.format) };
        (text.to_string_lossy().into_owned(), size)
    }

    /// How many items it has along each of its dimensions, the outermost first; none if it does not say.
    fn shape(&self) -> Vec<usize> {
        let n = usize::try_from(self.0.ndim).unwrap_or(0);
        if self.0.shape.is_null() || n == 0 {
            return Vec::new();
        }
        // SAFETY: so many numbers of the buffer's owner, which stay until the view is released.
        let shape = unsafe { std::slice::from_raw_parts(self.0.shape, n) };
        shape.iter().map(|n| usize::try_from(*n).unwrap_or(0)).collect()
    }
}

impl Drop for View {
    fn drop(&mut self) {
        // SAFETY: filled in by `of`, released once; made and dropped within a call from Python, which has the lock.
        unsafe { ffi::PyBuffer_Release(&raw mut *self.0) }
    }
}

/// The element that a buffer's items are: none for bytes of whatever it may be.
fn element(format: &str, size: usize) -> Result<Option<Elem>, ()> {
    let (swapped, code) = match format.as_bytes() {
        [b'@' | b'=' | b'<', code] | [code] => (false, *code),
        [b'>' | b'!', code] => (size > 1, *code),
        _ => return Err(()),
    };
    if swapped {
        return Err(());
    }
    Ok(Some(match (code, size) {
        (b'B' | b'c', 1) => return Ok(None),
        (b'?', 1) => Elem::U8,
        (b'b', 1) => Elem::I8,
        (b'H', 2) => Elem::U16,
        (b'h', 2) => Elem::I16,
        (b'I' | b'L', 4) => Elem::U32,
        (b'i' | b'l', 4) => Elem::I32,
        (b'L' | b'Q' | b'N', 8) => Elem::U64,
        (b'l' | b'q' | b'n', 8) => Elem::I64,
        (b'e', 2) => Elem::F16,
        (b'f', 4) => Elem::F32,
        (b'd', 8) => Elem::F64,
        _ => return Err(()),
    }))
}

/// As NumPy calls it.
fn dtype(e: Elem) -> String {
    let name = e.name();
    let (kind, bits) = name.split_at(1);
    let kind = match kind {
        "u" => "uint",
        "i" => "int",
        "f" => "float",
        _ => return name,
    };
    format!("{kind}{bits}")
}

/// Numbers are taken for those of a template only if they are: with the right number of bytes in all, others would be silently
/// garbage. What says that it is bytes may be anything, and so may a record be.
fn check(format: &str, size: usize, t: &Template) -> PyResult<()> {
    if t.layout == Layout::Bytes || matches!(t.elem, Elem::Record(_)) {
        return Ok(());
    }
    let is = element(format, size);
    if is.is_ok_and(|is| is.is_none_or(|is| is == t.elem)) {
        return Ok(());
    }
    let is = is.ok().flatten().map_or_else(|| format!("items of format {format:?}"), dtype);
    let wanted = dtype(t.elem);
    Err(PyValueError::new_err(format!(
        "{is} was given for {t}, which takes {wanted}: convert it, as by .astype({wanted:?})"
    )))
}

/// How many items an array of this shape has; none if they cannot be counted.
fn count(shape: &[usize]) -> Option<usize> {
    shape.iter().try_fold(1usize, |n, d| n.checked_mul(*d))
}

/// After how many items each dimension of this shape, which has `whole` of them, begins anew, but for the ends.
fn seams(shape: &[usize], whole: usize) -> Vec<usize> {
    let from_inside = shape.iter().rev().scan(1usize, |n, d| {
        *n = n.saturating_mul(*d);
        Some(*n)
    });
    from_inside.filter(|n| *n != 1 && *n != whole).collect()
}

/// A picture whose sides are exchanged has as many bytes. An array may be flat, may say less than the template (rows only) or more
/// (the channels of a pixel that are side by side in a row); but rows of another length are torn.
fn check_shape(format: &str, size: usize, shape: &[usize], t: &Template) -> PyResult<()> {
    let [x, y, z] = t.dims;
    let takes = [z, y, x];
    let numbers = element(format, size).is_ok_and(|is| is.unwrap_or(Elem::U8) == t.elem);
    // With another number of them that is what is wrong, and said elsewhere.
    let Some(whole) = count(shape).filter(|n| Some(*n) == count(&takes)) else { return Ok(()) };
    if t.layout != Layout::Array || !numbers {
        return Ok(());
    }
    let (has, wants) = (seams(shape, whole), seams(&takes, whole));
    let within = |a: &[usize], b: &[usize]| a.iter().all(|n| b.contains(n));
    if within(&has, &wants) || within(&wants, &has) {
        return Ok(());
    }
    let written = |shape: &[usize]| shape.iter().map(usize::to_string).collect::<Vec<_>>().join(", ");
    let takes = takes.get(takes.iter().take_while(|n| **n == 1).count()..).unwrap_or_default();
    Err(PyValueError::new_err(format!(
        "an array of shape ({}) was given for {t}, which takes ({}): transpose it, or flatten it if its order is right",
        written(shape),
        written(takes)
    )))
}

/// Calls `f` with the bytes of anything that has a buffer and whose items may be such a template's: where they are, or, if they are
/// not in one piece and in order there, copied.
pub fn with_bytes<R>(data: &Bound<'_, PyAny>, t: &Template, f: impl FnOnce(&[u8]) -> R) -> PyResult<R> {
    let Ok(view) = View::of(data, ffi::PyBUF_ND | ffi::PyBUF_FORMAT) else {
        let view = PyMemoryView::from(data)?;
        let (format, size) = (view.getattr("format")?.extract::<String>()?, view.getattr("itemsize")?.extract()?);
        check(&format, size, t)?;
        check_shape(&format, size, &view.getattr("shape")?.extract::<Vec<usize>>()?, t)?;
        let copy = view.call_method0("tobytes")?;
        return Ok(f(copy.cast::<PyBytes>()?.as_bytes()));
    };
    let (format, size) = view.items();
    check(&format, size, t)?;
    check_shape(&format, size, &view.shape(), t)?;
    let (at, n) = view.bytes();
    if n == 0 {
        return Ok(f(&[]));
    }
    // SAFETY: so many bytes are there until the view is released, behind `f`. The interpreter's lock is held meanwhile: who changes
    // them all the same does so behind Python's back, as for every reader of a buffer.
    Ok(f(unsafe { std::slice::from_raw_parts(std::ptr::with_exposed_provenance(at), n) }))
}
