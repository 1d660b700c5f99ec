//! Datablocks: units of data with a lazily coherent view per memory space (PTask sections 4.1 and 5.2).
//!
//! A [`Datablock`] is a counted handle. While a block has several handles its bytes do not change; whoever holds the
//! only handle may write. That one rule makes fan-out free and in-place tasks safe.

mod pool;
mod shelves;
mod views;

use std::ptr::NonNull;
use std::sync::Mutex;
use std::sync::PoisonError;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicUsize, Ordering, fence};

use forebay_hal::cpu::HostMemory;
use half::f16;
pub(crate) use pool::{LEAST_SHARED, Pool};
pub use views::Residency;
use views::Views;

use crate::error::{Error, Result};
use crate::template::{Elem, Layout, Template};

/// Marks that travel with a datablock and drive predicates (bits; combine with `|`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Signals(pub u32);

impl Signals {
    /// No mark.
    pub const NONE: Signals = Signals(0);
    /// First block of a stream.
    pub const BEGIN_STREAM: Signals = Signals(1);
    /// Last block of a stream.
    pub const END_STREAM: Signals = Signals(2);
    /// First block of an iteration group ([`crate::Task::iterations`]).
    pub const BEGIN_ITERATION: Signals = Signals(4);
    /// Last block of an iteration group.
    pub const END_ITERATION: Signals = Signals(8);

    /// The marks and what they are called in words.
    pub const NAMED: [(&str, Signals); 4] = [
        ("begin-stream", Self::BEGIN_STREAM),
        ("end-stream", Self::END_STREAM),
        ("begin-iteration", Self::BEGIN_ITERATION),
        ("end-iteration", Self::END_ITERATION),
    ];

    /// Whether any of `other` is set.
    pub fn any(self, other: Signals) -> bool {
        self.0 & other.0 != 0
    }

    /// The marks that pass from a task's inputs to its outputs.
    pub(crate) fn of_stream(self) -> Signals {
        Signals(self.0 & (Self::BEGIN_STREAM.0 | Self::END_STREAM.0))
    }
}

/// One mark, as [`Signals::NAMED`] calls it.
impl std::str::FromStr for Signals {
    type Err = String;

    fn from_str(s: &str) -> Result<Self, String> {
        let found = Self::NAMED.iter().find(|(name, _)| *name == s);
        found.map(|(_, signals)| *signals).ok_or_else(|| {
            let known = Self::NAMED.map(|(name, _)| name).join(", ");
            format!("unknown mark {s:?}; known: {known}")
        })
    }
}

impl std::ops::BitOr for Signals {
    type Output = Signals;
    fn bitor(self, o: Signals) -> Signals {
        Signals(self.0 | o.0)
    }
}

/// The host's view is up to date and nobody is writing it.
const HOST_VALID: u32 = 1;
/// It is the only valid view and no device is still reading it, so it may be written at once.
const HOST_ONLY: u32 = 2;
/// Bit of `Inner::fast`: there are views on devices.
const ON_DEVICE: u32 = 4;

pub(crate) struct Inner {
    refs: AtomicUsize,
    template: Template,
    /// Elements in this block; for arrays always all of them.
    records: AtomicUsize,
    signals: AtomicU32,
    /// `HOST_*`: what can be answered without the lock. Written under it.
    fast: AtomicU32,
    /// Address of the host view once there is one.
    host: AtomicPtr<u8>,
    views: Mutex<Views>,
    meta: Mutex<Option<Box<[u8]>>>,
    /// Whether `meta` is set, so that recycling need not lock.
    has_meta: AtomicBool,
    /// Where the block returns to; null for blocks of no pool. The pool outlives its blocks (pool.rs).
    home: *const Pool,
    /// Link in the pool's free list.
    next: AtomicPtr<Inner>,
}

// SAFETY: everything mutable is atomic or locked; the host bytes are written only by a sole owner (module rule), and
// `home` outlives the block.
unsafe impl Send for Inner {}
// SAFETY: as above.
unsafe impl Sync for Inner {}

impl Inner {
    /// Whether it has room for so many records or bytes, of which its template has one dimension.
    #[inline]
    pub(crate) fn has_room(&self, records: usize) -> bool {
        self.template.dims[0] >= records
    }

    /// As it came from its pool: full, without marks and metadata.
    #[inline]
    fn unmark(&self) {
        if self.signals.load(Ordering::Relaxed) != 0 {
            self.signals.store(Signals::NONE.0, Ordering::Relaxed);
        }
        self.records.store(self.template.elements(), Ordering::Relaxed);
        if self.has_meta.load(Ordering::Relaxed) {
            self.has_meta.store(false, Ordering::Relaxed);
            *self.meta.lock().unwrap_or_else(PoisonError::into_inner) = None;
        }
    }
}

/// A counted handle to a datablock.
pub struct Datablock(NonNull<Inner>);

// SAFETY: `Inner` is Send and Sync.
unsafe impl Send for Datablock {}
// SAFETY: as above.
unsafe impl Sync for Datablock {}

impl Clone for Datablock {
    fn clone(&self) -> Self {
        self.inner().refs.fetch_add(1, Ordering::Relaxed);
        Datablock(self.0)
    }
}

impl Drop for Datablock {
    #[inline]
    fn drop(&mut self) {
        let refs = &self.inner().refs;
        // A sole owner needs no read-modify-write: nobody else can add a handle.
        if refs.load(Ordering::Acquire) != 1 {
            if refs.fetch_sub(1, Ordering::Release) != 1 {
                return;
            }
            fence(Ordering::Acquire);
        }
        // SAFETY: this was the last handle.
        unsafe { pool::recycle(self.0) };
    }
}

impl Datablock {
    fn fresh(template: Template, home: *const Pool) -> Self {
        let inner = Inner {
            refs: AtomicUsize::new(1),
            records: AtomicUsize::new(template.elements()),
            template,
            signals: AtomicU32::new(0),
            fast: AtomicU32::new(0),
            host: AtomicPtr::new(std::ptr::null_mut()),
            views: Mutex::new(Views::default()),
            meta: Mutex::new(None),
            has_meta: AtomicBool::new(false),
            home,
            next: AtomicPtr::new(std::ptr::null_mut()),
        };
        Datablock(NonNull::from(Box::leak(Box::new(inner))))
    }

    /// A block of zeros in host memory.
    ///
    /// # Errors
    /// [`Error::Size`] for an invalid template, out of memory.
    pub fn zeroed(template: Template) -> Result<Self> {
        Self::holding(template, &[], template.elements())
    }

    /// A block with the elements of `data`; for records and bytes their number is the block's. Where rows are a stride apart they
    /// may be given so, with what is between them, or without that.
    ///
    /// # Errors
    /// [`Error::Block`] when type or number do not fit the template.
    pub fn from_slice<T: bytemuck::Pod>(template: Template, data: &[T]) -> Result<Self> {
        template.validate("datablock")?;
        let records = fits(&template, data)?;
        Self::holding(template, bytemuck::cast_slice(data), records)
    }

    /// A block with these bytes, whatever its elements; a whole number of them. Rows as for [`Datablock::from_slice`].
    ///
    /// # Errors
    /// [`Error::Block`] when the number of bytes does not fit the template.
    pub fn from_bytes(template: Template, bytes: &[u8]) -> Result<Self> {
        template.validate("datablock")?;
        Self::holding(template, bytes, fit_bytes(&template, bytes)?)
    }

    /// A block that begins with these bytes, with zeros behind them. They are written once: who calls a task with data of his own
    /// pays for this each time.
    fn holding(template: Template, bytes: &[u8], records: usize) -> Result<Self> {
        template.validate("datablock")?;
        let b = Self::fresh(template, std::ptr::null());
        let apart = is_apart(&template, bytes);
        let first = if apart { &[] } else { bytes };
        b.inner().begin_with(HostMemory::holding(first, template.bytes())?)?;
        b.set_records(records)?;
        if apart {
            b.set_bytes(bytes)?;
        }
        Ok(b)
    }

    /// Overwrites the block, a sole handle, with these bytes.
    pub(crate) fn set_bytes(&self, bytes: &[u8]) -> Result<()> {
        let t = self.template();
        let records = fit_bytes(&t, bytes)?;
        let p = self.write_host(false)?;
        // SAFETY: the host view has the template's size; as a sole handle's nobody else reads or writes it.
        place(&t, bytes, unsafe { std::slice::from_raw_parts_mut(p, t.bytes()) });
        self.set_records(records)
    }

    /// A block with one element.
    ///
    /// # Errors
    /// None in practice (out of memory).
    pub fn scalar<T: crate::template::Element>(value: T) -> Result<Self> {
        Self::from_slice(Template::scalar::<T>(), &[value])
    }

    /// Overwrites the block with `data`, which needs the only handle.
    ///
    /// # Errors
    /// [`Error::Block`] when type or number do not fit, or the block is shared.
    pub fn assign<T: bytemuck::Pod>(&mut self, data: &[T]) -> Result<()> {
        let t = self.template();
        let records = fits(&t, data)?;
        place(&t, bytemuck::cast_slice(data), self.host_mut_bytes(false)?);
        // What was refused has changed nothing.
        self.set_records(records)
    }

    /// As [`Datablock::assign`], with bytes, whatever the elements are; rows as for [`Datablock::from_slice`].
    ///
    /// # Errors
    /// [`Error::Block`] when the number of bytes does not fit the template, or the block is shared.
    pub fn assign_bytes(&mut self, bytes: &[u8]) -> Result<()> {
        let t = self.template();
        let records = fit_bytes(&t, bytes)?;
        place(&t, bytes, self.host_mut_bytes(false)?);
        self.set_records(records)
    }

    /// The handle as an address, for a channel's ring; [`Datablock::from_raw`] takes it back.
    pub(crate) fn into_raw(self) -> *mut Inner {
        let p = self.0.as_ptr();
        std::mem::forget(self);
        p
    }

    /// # Safety
    /// `p` came from [`Datablock::into_raw`], and is taken back once.
    pub(crate) unsafe fn from_raw(p: *mut Inner) -> Self {
        // SAFETY: never null, by the contract.
        Datablock(unsafe { NonNull::new_unchecked(p) })
    }

    pub(crate) fn inner(&self) -> &Inner {
        // SAFETY: a handle keeps the block alive.
        unsafe { self.0.as_ref() }
    }

    /// What it holds.
    pub fn template(&self) -> Template {
        self.inner().template
    }

    /// Number of elements in it (for arrays: all of the template's).
    pub fn records(&self) -> usize {
        self.inner().records.load(Ordering::Relaxed)
    }

    /// Sets the number of elements of a block of records or bytes.
    ///
    /// # Errors
    /// [`Error::Block`] above the template's maximum, or for another number than an array has.
    pub fn set_records(&self, n: usize) -> Result<()> {
        let t = self.template();
        if n > t.elements() || (t.layout == Layout::Array && n != t.elements()) {
            return Err(Error::Block { block: t.to_string(), want: format!("{n} elements were announced") });
        }
        self.inner().records.store(n, Ordering::Relaxed);
        Ok(())
    }

    /// Bytes of its elements, gaps between rows included.
    pub fn bytes(&self) -> usize {
        let t = &self.inner().template;
        if t.layout == Layout::Array { t.bytes() } else { self.records().saturating_mul(t.elem.size()) }
    }

    /// Its marks.
    pub fn signals(&self) -> Signals {
        Signals(self.inner().signals.load(Ordering::Relaxed))
    }

    /// Replaces its marks.
    pub fn set_signals(&self, s: Signals) {
        self.inner().signals.store(s.0, Ordering::Relaxed);
    }

    /// The block with these marks.
    pub fn with_signals(self, s: Signals) -> Self {
        self.set_signals(s);
        self
    }

    /// The metadata that travels with it, if any (offsets of variable-length elements, a header, a name).
    pub fn meta(&self) -> Option<Vec<u8>> {
        self.inner().meta.lock().unwrap_or_else(PoisonError::into_inner).as_ref().map(|m| m.to_vec())
    }

    /// Attaches metadata, at most 1 MiB.
    ///
    /// # Errors
    /// [`Error::Block`] above that.
    pub fn set_meta(&self, bytes: &[u8]) -> Result<()> {
        const MAX_META: usize = 1 << 20;
        if bytes.len() > MAX_META {
            let want = format!("{} B of metadata, more than {MAX_META} B, were given", bytes.len());
            return Err(Error::Block { block: self.template().to_string(), want });
        }
        *self.inner().meta.lock().unwrap_or_else(PoisonError::into_inner) = Some(bytes.into());
        self.inner().has_meta.store(true, Ordering::Relaxed);
        Ok(())
    }

    /// Full, without marks and metadata.
    pub(crate) fn unmark(&self) {
        self.inner().unmark();
    }

    /// Whether this is the only handle, so that the block may be written.
    pub fn is_unique(&self) -> bool {
        self.inner().refs.load(Ordering::Acquire) == 1
    }

    /// Whether it can be written without waiting for anything: this is the only handle, and no device copies from or to its host
    /// memory any more.
    pub fn is_free(&self) -> bool {
        self.is_unique() && (self.inner().fast.load(Ordering::Acquire) & HOST_ONLY != 0 || self.inner().is_at_rest())
    }

    // Not of a copy of the template: small tasks ask this for every invocation.
    #[inline]
    fn holds<T: bytemuck::Pod>(&self) -> Result<()> {
        holds::<T>(&self.inner().template)
    }

    /// Its elements, copied to the host first if they are only elsewhere (and waiting for whoever writes them there).
    ///
    /// With a stride the gaps between rows are part of the slice.
    ///
    /// # Errors
    /// [`Error::Block`] for another type; device errors from the copy.
    #[inline]
    pub fn as_slice<T: bytemuck::Pod>(&self) -> Result<&[T]> {
        self.holds::<T>()?;
        let bytes = self.host_bytes()?;
        Ok(bytemuck::cast_slice(bytes))
    }

    /// Its elements for writing, which needs the only handle.
    ///
    /// # Errors
    /// As [`Datablock::as_slice`], and [`Error::Block`] when the block is shared.
    pub fn as_mut_slice<T: bytemuck::Pod>(&mut self) -> Result<&mut [T]> {
        self.holds::<T>()?;
        let n = self.bytes();
        Ok(bytemuck::cast_slice_mut(&mut self.host_mut_bytes(true)?[..n]))
    }

    /// Its bytes, whatever the elements are; as [`Datablock::as_slice`].
    ///
    /// # Errors
    /// Device errors from the copy.
    pub fn as_bytes(&self) -> Result<&[u8]> {
        self.host_bytes()
    }

    /// Its bytes for writing: those of its elements, and the room for more behind them.
    ///
    /// # Errors
    /// [`Error::Block`] when the block is shared; device errors from the copy.
    pub fn as_mut_bytes(&mut self) -> Result<&mut [u8]> {
        self.host_mut_bytes(true)
    }

    /// Its first element, whatever number that is.
    pub(crate) fn number(&self) -> Option<f64> {
        let bytes = self.host_bytes().ok()?;
        fn first<T: bytemuck::AnyBitPattern>(bytes: &[u8]) -> Option<T> {
            bytes.get(..size_of::<T>()).map(bytemuck::pod_read_unaligned)
        }
        match self.template().elem {
            Elem::U8 => first::<u8>(bytes).map(f64::from),
            Elem::I8 => first::<i8>(bytes).map(f64::from),
            Elem::U16 => first::<u16>(bytes).map(f64::from),
            Elem::I16 => first::<i16>(bytes).map(f64::from),
            Elem::U32 => first::<u32>(bytes).map(f64::from),
            Elem::I32 => first::<i32>(bytes).map(f64::from),
            Elem::U64 => first::<u64>(bytes).map(|v| v as f64),
            Elem::I64 => first::<i64>(bytes).map(|v| v as f64),
            Elem::F16 => first::<f16>(bytes).map(f64::from),
            Elem::F32 => first::<f32>(bytes).map(f64::from),
            Elem::F64 => first::<f64>(bytes),
            Elem::Record(_) => None,
        }
    }

    #[inline]
    pub(crate) fn host_bytes(&self) -> Result<&[u8]> {
        let p = self.read_host()?;
        // SAFETY: the host view has the template's size, is valid now, and stays unchanged while handles are shared;
        // a sole owner needs `&mut self` to change it.
        Ok(unsafe { std::slice::from_raw_parts(p, self.bytes()) })
    }

    fn host_mut_bytes(&mut self, keep: bool) -> Result<&mut [u8]> {
        if !self.is_unique() {
            let want = "a block with one handle is needed for writing".to_owned();
            return Err(Error::Block { block: format!("{} with several handles", self.template()), want });
        }
        let p = self.write_host(keep)?;
        // SAFETY: the host view has the template's size; `&mut self` on the only handle makes access exclusive.
        Ok(unsafe { std::slice::from_raw_parts_mut(p, self.template().bytes()) })
    }
}

/// Whether elements of such a block can be read as this type.
#[inline]
fn holds<T: bytemuck::Pod>(t: &Template) -> Result<()> {
    if t.elem.holds::<T>() && t.stride.is_multiple_of(size_of::<T>()) { Ok(()) } else { Err(not::<T>(t)) }
}

#[cold]
fn not<T>(t: &Template) -> Error {
    Error::Block { block: t.to_string(), want: format!("{} is wanted", std::any::type_name::<T>()) }
}

/// How many elements a block with this in it has, if it may have that in it.
fn fits<T: bytemuck::Pod>(t: &Template, data: &[T]) -> Result<usize> {
    holds::<T>(t)?;
    let want = || format!("{} elements were given", data.len());
    records_in(t, size_of_val(data)).ok_or_else(|| Error::Block { block: t.to_string(), want: want() })
}

fn fit_bytes(t: &Template, bytes: &[u8]) -> Result<usize> {
    let want = || format!("{} B were given", bytes.len());
    records_in(t, bytes.len()).ok_or_else(|| Error::Block { block: t.to_string(), want: want() })
}

fn records_in(t: &Template, bytes: usize) -> Option<usize> {
    let (size, all) = (t.elem.size().max(1), t.elements());
    if t.layout == Layout::Array {
        return (bytes == t.bytes() || bytes == all * size).then_some(all);
    }
    (bytes <= t.bytes() && bytes.is_multiple_of(size)).then_some(bytes / size)
}

/// Whether rows lie apart in such a block and side by side in these bytes, which fit.
fn is_apart(t: &Template, bytes: &[u8]) -> bool {
    t.stride != 0 && !bytes.is_empty() && bytes.len() < t.bytes()
}

/// Puts what fits where it belongs; what is between rows stays.
fn place(t: &Template, bytes: &[u8], to: &mut [u8]) {
    if !is_apart(t, bytes) {
        return to[..bytes.len()].copy_from_slice(bytes);
    }
    let row = t.dims[0] * t.elem.size();
    to.chunks_mut(t.row_bytes()).zip(bytes.chunks(row)).for_each(|(to, from)| to[..row].copy_from_slice(from));
}

impl Elem {
    /// Whether a Rust type can stand for this element: the type itself, or any plain type of a record's size.
    pub fn holds<T: bytemuck::Pod>(self) -> bool {
        use std::any::TypeId;
        let t = TypeId::of::<T>();
        match self {
            Elem::U8 => t == TypeId::of::<u8>(),
            Elem::I8 => t == TypeId::of::<i8>(),
            Elem::U16 => t == TypeId::of::<u16>(),
            Elem::I16 => t == TypeId::of::<i16>(),
            Elem::U32 => t == TypeId::of::<u32>(),
            Elem::I32 => t == TypeId::of::<i32>(),
            Elem::U64 => t == TypeId::of::<u64>(),
            Elem::I64 => t == TypeId::of::<i64>(),
            Elem::F16 => t == TypeId::of::<f16>(),
            Elem::F32 => t == TypeId::of::<f32>(),
            Elem::F64 => t == TypeId::of::<f64>(),
            Elem::Record(n) => size_of::<T>() == n as usize && align_of::<T>() <= 64,
        }
    }
}

impl std::fmt::Debug for Datablock {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Datablock({}, {} elements, {:?})", self.template(), self.records(), self.signals())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn writing_needs_the_only_handle_and_the_right_type() {
        let mut a = Datablock::from_slice(Template::records::<u32>(4), &[1u32, 2, 3]).unwrap();
        assert_eq!(a.as_slice::<u32>().unwrap(), [1, 2, 3]);
        assert!(a.as_slice::<f32>().is_err());
        let b = a.clone();
        assert!(a.as_mut_slice::<u32>().is_err());
        assert!(a.assign(&[7u32]).is_err());
        assert_eq!(b.as_slice::<u32>().unwrap(), [1, 2, 3], "refused, and changed all the same");
        drop(b);
        a.as_mut_slice::<u32>().unwrap()[0] = 9;
        assert_eq!(a.as_slice::<u32>().unwrap(), [9, 2, 3]);
        assert!(a.set_records(5).is_err());
        assert!(Datablock::from_slice(Template::array::<u32>([4]), &[1u32]).is_err());
    }
    #[test]
    fn rows_that_are_apart_are_given_side_by_side_or_as_they_lie() {
        let t = Template::array::<u16>([3, 2]).with_stride(10);
        let mut a = Datablock::from_slice(t, &[1u16, 2, 3, 4, 5, 6]).unwrap();
        let apart = [1u16, 2, 3, 0, 0, 4, 5, 6, 0, 0];
        assert_eq!(a.as_slice::<u16>().unwrap(), apart);
        let b = Datablock::from_slice(t, a.as_slice::<u16>().unwrap()).unwrap();
        assert_eq!(b.as_slice::<u16>().unwrap(), apart);
        let c = Datablock::from_bytes(t, bytemuck::cast_slice(&[1u16, 2, 3, 4, 5, 6])).unwrap();
        assert_eq!(c.as_slice::<u16>().unwrap(), apart);
        // What is between rows stays.
        a.as_mut_slice::<u16>().unwrap()[3] = 9;
        a.assign(&[7u16; 6]).unwrap();
        assert_eq!(a.as_slice::<u16>().unwrap(), [7, 7, 7, 9, 0, 7, 7, 7, 0, 0]);
        for n in [0, 5, 7, 9, 11] {
            assert!(Datablock::from_slice(t, &vec![1u16; n]).is_err() && a.assign(&vec![1u16; n]).is_err(), "{n}");
        }
        assert_eq!(a.records(), 6);
    }
}
