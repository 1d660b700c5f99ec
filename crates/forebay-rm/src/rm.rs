//! The seam: what this crate asks of the kernel.

use std::any::Any;
use std::ffi::c_void;
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;

use bytemuck::Pod;
use rustix::mm::{MapFlags, ProtFlags};

use crate::error::{Error, Result, check};
use crate::finder::Finder;
use crate::sys::{Alloc, Card, Control, Free, MapMemory, RawHandle, UnmapMemory};

/// An open control file of the driver (`/dev/nvidiactl`), ours or a duplicate of another process's.
pub trait ControlFile: Send + Sync {
    /// `ESC_CONTROL`; `params` is what the command reads and writes.
    ///
    /// # Errors
    /// The kernel's; RM's own status is in `call`.
    fn control(&self, call: &mut Control, params: &mut [u8]) -> std::io::Result<()>;

    /// `ESC_ALLOC`.
    ///
    /// # Errors
    /// As [`ControlFile::control`].
    fn alloc(&self, call: &mut Alloc, params: &mut [u8]) -> std::io::Result<()>;

    /// `ESC_FREE`.
    ///
    /// # Errors
    /// As [`ControlFile::control`].
    fn free(&self, call: &mut Free) -> std::io::Result<()>;

    /// `ESC_MAP_MEMORY`, and the mapping itself, through a file of GPU `gpu` of its own; none when RM refused.
    ///
    /// # Errors
    /// As [`ControlFile::control`].
    fn map(&self, gpu: u32, call: &mut MapMemory) -> std::io::Result<Option<Window>> {
        let _ = (gpu, call);
        Err(std::io::ErrorKind::Unsupported.into())
    }

    /// The same of memory of the system, for reading, through a control file of its own.
    ///
    /// # Errors
    /// As [`ControlFile::control`].
    fn map_system(&self, call: &mut MapMemory) -> std::io::Result<Option<Window>> {
        let _ = call;
        Err(std::io::ErrorKind::Unsupported.into())
    }

    /// `ESC_UNMAP_MEMORY`, after the window has gone.
    ///
    /// # Errors
    /// As [`ControlFile::control`].
    fn unmap(&self, call: &mut UnmapMemory) -> std::io::Result<()> {
        let _ = call;
        Err(std::io::ErrorKind::Unsupported.into())
    }

    /// `ESC_CARD_INFO`: the cards, by number.
    ///
    /// # Errors
    /// As [`ControlFile::control`].
    fn cards(&self) -> std::io::Result<Vec<Card>>;
}

/// A mapping of a file into this process; gone when dropped.
pub struct Window {
    ptr: NonNull<u8>,
    len: usize,
    /// Dropped after the mapping has gone.
    _with: Option<Box<dyn Any + Send + Sync>>,
}

// SAFETY: it is an address and a length; who uses the memory behind it answers for that.
unsafe impl Send for Window {}
// SAFETY: as above.
unsafe impl Sync for Window {}

impl Window {
    /// Maps `len` bytes of `file`, shared, for reading and writing.
    ///
    /// # Errors
    /// The kernel's.
    pub fn map(
        file: BorrowedFd<'_>,
        offset: u64,
        len: usize,
        with: Option<Box<dyn Any + Send + Sync>>,
    ) -> std::io::Result<Self> {
        Self::new(file, offset, len, ProtFlags::READ | ProtFlags::WRITE, with)
    }

    /// Maps `len` bytes of `file`, shared, for reading.
    ///
    /// # Errors
    /// The kernel's.
    pub fn map_read_only(
        file: BorrowedFd<'_>,
        len: usize,
        with: Option<Box<dyn Any + Send + Sync>>,
    ) -> std::io::Result<Self> {
        Self::new(file, 0, len, ProtFlags::READ, with)
    }

    fn new(
        file: BorrowedFd<'_>,
        offset: u64,
        len: usize,
        prot: ProtFlags,
        with: Option<Box<dyn Any + Send + Sync>>,
    ) -> std::io::Result<Self> {
        let flags = MapFlags::SHARED;
        // SAFETY: the kernel chooses the place, so nothing else is there.
        let p: *mut c_void = unsafe { rustix::mm::mmap(std::ptr::null_mut(), len, prot, flags, file, offset)? };
        let ptr = NonNull::new(p.cast()).ok_or(std::io::ErrorKind::InvalidData)?;
        Ok(Window { ptr, len, _with: with })
    }

    /// Its first byte.
    pub fn ptr(&self) -> NonNull<u8> {
        self.ptr
    }

    /// Its size in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Never: the kernel maps nothing of no size.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

impl Drop for Window {
    fn drop(&mut self) {
        // SAFETY: mapped in `map`, unmapped once.
        let _ = unsafe { rustix::mm::munmap(self.ptr.as_ptr().cast(), self.len) };
    }
}

/// The kernel with its driver, or something that answers like it.
pub trait Rm: Send + Sync {
    /// The driver's version, as "580.159.04".
    ///
    /// # Errors
    /// [`Error::NoDriver`].
    fn driver_version(&self) -> Result<String>;

    /// Opens the control file, and the GPU's own file, without which RM gives no access to it.
    ///
    /// # Errors
    /// [`Error::NoDriver`].
    fn open(&self, gpu: u32) -> Result<Box<dyn ControlFile>>;

    /// Duplicates of the control files that process `pid` has open.
    ///
    /// # Errors
    /// [`Error::Process`].
    fn files_of(&self, pid: u32) -> Result<Vec<Box<dyn ControlFile>>> {
        self.files_and_count(pid).map(|(files, _)| files)
    }

    /// The same, and how many of the driver's files it has open in all: whoever makes a channel opens one. Each file that the
    /// process has is looked at, some microseconds.
    ///
    /// # Errors
    /// [`Error::Process`].
    fn files_and_count(&self, pid: u32) -> Result<(Vec<Box<dyn ControlFile>>, usize)>;

    /// How many that is by itself; none where it cannot be seen.
    fn count_files(&self, pid: u32) -> usize;

    /// Whether this process may have the log of everybody's context switches. A request that is refused stops the driver's
    /// timer of whoever has the log of that GPU, so none is made in vain.
    fn may_log(&self) -> bool {
        true
    }

    /// The cards of this machine.
    ///
    /// # Errors
    /// [`Error::NoDriver`].
    fn cards(&self) -> Result<Vec<Card>>;

    /// Processes that have a control file open. `finder` remembers from call to call who was asked.
    ///
    /// # Errors
    /// [`Error::NoDriver`].
    fn processes(&self, finder: &mut Finder) -> Result<Vec<u32>>;
}

/// A control call with typed parameters.
pub(crate) fn control<P: Pod>(
    file: &dyn ControlFile,
    name: &'static str,
    client: RawHandle,
    object: RawHandle,
    cmd: u32,
    params: &mut P,
) -> Result<()> {
    let mut call = Control { client, object, cmd, params_size: size_of::<P>() as u32, ..Control::default() };
    file.control(&mut call, bytemuck::bytes_of_mut(params)).map_err(|why| Error::Call { call: name, why })?;
    check(name, call.status)
}

/// An allocation with typed parameters; the new object's handle.
pub(crate) fn alloc<P: Pod>(
    file: &dyn ControlFile,
    name: &'static str,
    [root, parent, new]: [RawHandle; 3],
    class: u32,
    params: &mut P,
) -> Result<RawHandle> {
    let params_size = size_of::<P>() as u32;
    let mut call = Alloc { root, parent, new, class, params_size, ..Alloc::default() };
    file.alloc(&mut call, bytemuck::bytes_of_mut(params)).map_err(|why| Error::Call { call: name, why })?;
    check(name, call.status)?;
    Ok(call.new)
}
