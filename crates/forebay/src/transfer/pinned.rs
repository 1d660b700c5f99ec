//! Host memory from which a device copies fastest.

use std::collections::BTreeMap;
use std::ops::{Deref, DerefMut, Range};
use std::ptr::NonNull;

use forebay_hal::fork::Own;
use forebay_hal::{Buffer, Device};

use super::curve::Host;
use crate::error::Result;

/// Page-locked memory of a device (ordinary memory, where devices have none), zeroed; the handle is its only one.
pub struct Pinned {
    // Goes first.
    locked: Option<Locked>,
    pub(super) buffer: Buffer,
    // Of the buffer, which is asked once: the question takes as long as a copy of a few bytes.
    at: NonNull<u8>,
    bytes: usize,
}

// SAFETY: it owns the bytes at `at`, as a `Vec` would: they are the buffer's, which is `Send` and `Sync`, and `&Pinned` only
// reads them.
unsafe impl Send for Pinned {}
// SAFETY: as above.
unsafe impl Sync for Pinned {}

impl Pinned {
    pub(super) fn new(device: &dyn Device, bytes: usize) -> Result<Self> {
        let buffer = device.alloc_host(bytes)?;
        let Some(at) = buffer.host_ptr() else {
            let what = "page-locked memory without an address".into();
            return Err(forebay_hal::Error::Invalid { device: device.info().name.clone(), what }.into());
        };
        Ok(Pinned { locked: None, at, bytes: buffer.len(), buffer })
    }

    /// Touches every page and asks the system to keep it in memory, for as long as this lives; whether it does.
    pub fn lock(&mut self) -> bool {
        if self.locked.is_none() {
            self.locked = Locked::new(&self.buffer);
        }
        self.is_locked()
    }

    /// Whether the system promised to keep it in memory.
    pub fn is_locked(&self) -> bool {
        self.locked.is_some()
    }

    /// Keeps the memory where it is after this has gone, for those who have its address. Nothing else can be done with it.
    pub fn keep(&self) -> Kept {
        Kept { _buffer: self.buffer.clone() }
    }

    /// Where it begins, for those who cannot borrow it. Whoever writes there sees to it that nobody else uses it meanwhile.
    pub fn address(&self) -> *mut u8 {
        self.at.as_ptr()
    }

    /// A part of it, to be sent.
    ///
    /// # Panics
    /// As slicing does, outside of it.
    pub fn part(&self, range: Range<usize>) -> PinnedPart<'_> {
        PinnedPart(&self[range])
    }

    /// A part of it, to be received into.
    ///
    /// # Panics
    /// As slicing does, outside of it.
    pub fn part_mut(&mut self, range: Range<usize>) -> PinnedPartMut<'_> {
        PinnedPartMut(&mut self[range])
    }
}

/// Page-locked memory that is there as long as this ([`Pinned::keep`]).
pub struct Kept {
    _buffer: Buffer,
}

/// Memory that the system keeps where it is until this is dropped.
pub(super) struct Locked(Range<usize>);

const PAGE: usize = 4096;

/// How many have a lock on each page of which they have a part only: the system's locks do not nest.
static SHARED: Own<BTreeMap<usize, usize>> = Own::new();

impl Locked {
    /// Touches every page of host memory and locks it; none where the system refuses. It goes before the memory does.
    pub(super) fn new(b: &Buffer) -> Option<Self> {
        let p = b.host_ptr()?;
        for at in (0..b.len()).step_by(PAGE) {
            // SAFETY: within the buffer. Read and written, so that the page is there and is its own; volatile, so that it
            // happens.
            unsafe {
                let byte = p.as_ptr().add(at);
                std::ptr::write_volatile(byte, std::ptr::read_volatile(byte));
            }
        }
        let begin = p.as_ptr() as usize;
        let locked = Locked(begin..begin + b.len());
        let mut shared = SHARED.lock();
        locked.shared().for_each(|page| *shared.entry(page).or_default() += 1);
        // SAFETY: the range is the buffer's; locking does not change it. What is refused is partly done, and taken back.
        let done = b.is_empty() || unsafe { rustix::mm::mlock(p.as_ptr().cast(), b.len()) }.is_ok();
        drop(shared);
        done.then_some(locked)
    }

    /// Pages that are not all its own.
    fn shared(&self) -> impl Iterator<Item = usize> + use<> {
        let (first, last) = (self.0.start / PAGE, self.0.end / PAGE);
        let begins = (!self.0.start.is_multiple_of(PAGE) && !self.0.is_empty()).then_some(first);
        let ends = (!self.0.end.is_multiple_of(PAGE) && !self.0.is_empty()).then_some(last);
        begins.into_iter().chain(ends.filter(|e| Some(*e) != begins))
    }
}

impl Drop for Locked {
    fn drop(&mut self) {
        let unlock = |from: usize, to: usize| {
            if from < to {
                // SAFETY: pages with a buffer in them that is still there; unlocking does not change them.
                let _ = unsafe { rustix::mm::munlock((from * PAGE) as *mut _, (to - from) * PAGE) };
            }
        };
        unlock(self.0.start.div_ceil(PAGE), self.0.end / PAGE);
        let mut shared = SHARED.lock();
        for page in self.shared() {
            let left = shared.get(&page).map_or(0, |n| n - 1);
            if left > 0 {
                shared.insert(page, left);
            } else {
                shared.remove(&page);
                unlock(page, page + 1);
            }
        }
    }
}

impl Deref for Pinned {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        // SAFETY: all bytes are initialised; nobody else reaches them: the buffer has no other handle but `Kept`, which does
        // not, and in queues, which hold it while they use it, and meanwhile `Pinned` is held by `InFlight` or borrowed.
        unsafe { std::slice::from_raw_parts(self.at.as_ptr(), self.bytes) }
    }
}

impl DerefMut for Pinned {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above.
        unsafe { std::slice::from_raw_parts_mut(self.at.as_ptr(), self.bytes) }
    }
}

/// A part of page-locked memory ([`Pinned::part`]).
pub struct PinnedPart<'a>(&'a [u8]);

/// A part of page-locked memory, for writing ([`Pinned::part_mut`]).
pub struct PinnedPartMut<'a>(&'a mut [u8]);

mod sealed {
    pub trait Sealed {}
}
use sealed::Sealed;

/// Host bytes that can be sent: `[u8]`, `Vec<u8>`, [`Pinned`], [`PinnedPart`].
pub trait HostBytes: Sealed {
    /// The bytes, and where they are.
    #[doc(hidden)]
    fn span(&self) -> (&[u8], Host);
}

/// Host bytes that can be received into.
pub trait HostBytesMut: Sealed {
    /// The bytes, and where they are.
    #[doc(hidden)]
    fn span_mut(&mut self) -> (&mut [u8], Host);
}

macro_rules! host_bytes {
    ($ty:ty, $host:expr, |$s:ident| $bytes:expr) => {
        impl Sealed for $ty {}
        impl HostBytes for $ty {
            fn span(&self) -> (&[u8], Host) {
                let $s = self;
                (&$bytes[..], $host)
            }
        }
    };
}
macro_rules! host_bytes_mut {
    ($ty:ty, $host:expr, |$s:ident| $bytes:expr) => {
        impl HostBytesMut for $ty {
            fn span_mut(&mut self) -> (&mut [u8], Host) {
                let $s = self;
                (&mut $bytes[..], $host)
            }
        }
    };
}
host_bytes!([u8], Host::Pageable, |s| s);
host_bytes_mut!([u8], Host::Pageable, |s| s);
host_bytes!(Vec<u8>, Host::Pageable, |s| s);
host_bytes_mut!(Vec<u8>, Host::Pageable, |s| s);
host_bytes!(Pinned, Host::Pinned, |s| s);
host_bytes_mut!(Pinned, Host::Pinned, |s| s);
host_bytes!(PinnedPart<'_>, Host::Pinned, |s| s.0);
host_bytes!(PinnedPartMut<'_>, Host::Pinned, |s| s.0);
host_bytes_mut!(PinnedPartMut<'_>, Host::Pinned, |s| s.0);
