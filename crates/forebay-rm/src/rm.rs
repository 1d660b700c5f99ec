//! The seam: what this crate asks of the kernel.

use bytemuck::Pod;

use crate::error::{Error, Result, check};
use crate::sys::{Alloc, Card, Control, Free, RawHandle};

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

    /// `ESC_CARD_INFO`: the cards, by number.
    ///
    /// # Errors
    /// As [`ControlFile::control`].
    fn cards(&self) -> std::io::Result<Vec<Card>>;
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
    fn files_of(&self, pid: u32) -> Result<Vec<Box<dyn ControlFile>>>;

    /// Processes that have a control file open.
    ///
    /// # Errors
    /// [`Error::NoDriver`].
    fn processes(&self) -> Result<Vec<u32>>;
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
