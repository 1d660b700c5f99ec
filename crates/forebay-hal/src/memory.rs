//! Device memory.

use std::any::Any;
use std::ptr::NonNull;
use std::sync::Arc;

/// A piece of memory of one device, freed when the last handle goes.
///
/// Implementations are `Sync`: the bytes are reached only through queue commands, or through [`Memory::host_ptr`] under
/// its contract.
pub trait Memory: Send + Sync + Any {
    /// Size in bytes.
    fn len(&self) -> usize;

    /// True for a buffer of no bytes.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Whether [`crate::Method::Mapped`] serves it.
    fn is_mapped(&self) -> bool {
        true
    }

    /// Address at which the host may read and write the bytes, if it may. Reading while a command that writes is in
    /// flight, or writing while any command uses the buffer, is a data race: the caller waits for fences first.
    fn host_ptr(&self) -> Option<NonNull<u8>>;

    /// Its address in the device's own space, for data structures that hold pointers; none where there is none.
    fn address(&self) -> Option<u64> {
        self.host_ptr().map(|p| p.as_ptr() as u64)
    }

    /// Where the processor reaches the device's memory itself, if it does: not cached, stores combined. Like
    /// [`Memory::host_ptr`] in what the caller sees to; [`crate::cpu::streaming`] has what is fast there.
    fn mapped_ptr(&self) -> Option<NonNull<u8>> {
        None
    }

    /// For downcasts inside a backend.
    fn as_any(&self) -> &dyn Any;
}

/// Bytes of each accelerator's memory that this process may use, if it is to use less than there is; `forebay run
/// --memory` sets it. A plain number; anything else is no limit.
pub const MEMORY_VARIABLE: &str = "FOREBAY_MEMORY";

/// The memory of an accelerator that this process may use: all of it, or what [`MEMORY_VARIABLE`] allows.
pub(crate) fn allowed(bytes: u64) -> u64 {
    let limit = std::env::var(MEMORY_VARIABLE).ok().and_then(|v| v.parse::<u64>().ok());
    limit.map_or(bytes, |l| l.min(bytes))
}

/// A shared handle to device memory.
pub type Buffer = Arc<dyn Memory>;
