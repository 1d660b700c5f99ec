//! Device memory that the processor can load from and store to: VRAM that CUDA allocated, mapped through the GPU's
//! aperture (BAR1), without a kernel module of anybody's.
//!
//! The recipe: the owner exports the allocation as a file descriptor; a client of our own imports it (which makes a second
//! reference to the same memory), asks RM for a mapping, and maps `/dev/nvidiaN`.
//!
//! **Order.** The processor's mapping goes first, then RM's, then the imported object; only then may the owner free the
//! allocation (it would stay, invisible to its owner, for as long as our reference does). Dropping an [`Aperture`] does the
//! first three; who owns both keeps it in a field before the allocation.

use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Instant;

use crate::client::Client;
use crate::error::{Error, Result, check};
use crate::rm::{Window, control};
use crate::sys::{CMD_IMPORT_OBJECT, Free, IMPORT_RM_OBJECT, ImportObject, MapMemory, RawHandle, UnmapMemory};

/// A load across the bus takes about a microsecond. One that a hypervisor catches and emulates takes tens: then copies by
/// the processor are slower than any other, and each one stops the whole virtual processor.
const MAX_LOAD_NS: u64 = 10_000;
/// Loads of which the fastest counts: the others may have met an interrupt.
const PROBES: usize = 8;

/// A mapping of device memory. The memory is write-combined: stores gather in the processor and arrive in any order until
/// a fence; loads are slow ([`Aperture::flush`] is one).
pub struct Aperture {
    /// Goes first.
    window: Option<Window>,
    /// RM's name of the mapping, once there is one.
    linear: Option<u64>,
    memory: RawHandle,
    client: Arc<Client>,
}

impl Aperture {
    /// Maps `bytes` of the allocation that `exported` stands for, which must be memory of the client's GPU. The descriptor
    /// may be closed afterwards.
    ///
    /// # Errors
    /// What the driver refused (a mode that forbids it, such as confidential computing, is such a refusal), and
    /// [`Error::Trapped`] where each access would be emulated.
    pub fn map(client: &Arc<Client>, exported: BorrowedFd<'_>, bytes: usize) -> Result<Self> {
        let (device, memory) = (client.device(), client.next_object());
        let mut import =
            ImportObject { fd: exported.as_raw_fd(), kind: IMPORT_RM_OBJECT, device, parent: device, object: memory };
        control(client.file(), "import memory", client.handle(), client.handle(), CMD_IMPORT_OBJECT, &mut import)?;
        // From here on dropping it gives back what there is.
        let mut aperture = Aperture { window: None, linear: None, memory: import.object, client: client.clone() };
        let mut call = MapMemory {
            client: client.handle(),
            device,
            memory: aperture.memory,
            length: bytes as u64,
            ..MapMemory::default()
        };
        let failed = |why| Error::Call { call: "map memory", why };
        let window = client.file().map(client.card().minor, &mut call).map_err(failed)?;
        check("map memory", call.status)?;
        aperture.linear = Some(call.linear);
        aperture.window = window;
        let p = aperture.ptr().ok_or_else(|| failed(std::io::ErrorKind::InvalidData.into()))?;
        // SAFETY: the window has at least a byte, and so a whole word of a page; loads of device memory have no effect.
        let ns = fastest(|| unsafe {
            std::ptr::read_volatile(p.as_ptr().cast::<u32>());
        });
        if ns > MAX_LOAD_NS {
            return Err(Error::Trapped { ns });
        }
        Ok(aperture)
    }

    /// Where the processor finds the memory; none only while it is being made.
    pub fn ptr(&self) -> Option<NonNull<u8>> {
        self.window.as_ref().map(Window::ptr)
    }

    /// Its size in bytes.
    pub fn len(&self) -> usize {
        self.window.as_ref().map_or(0, Window::len)
    }

    /// Whether nothing is mapped.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Waits until everything that was stored (and fenced) before has arrived in the device's memory: a load from it
    /// overtakes no store to it, on the way across the bus.
    pub fn flush(&self) {
        if let Some(p) = self.ptr() {
            // SAFETY: as in `map`.
            unsafe { std::ptr::read_volatile(p.as_ptr().cast::<u32>()) };
        }
    }
}

/// Nanoseconds of the fastest of a few calls.
fn fastest(mut load: impl FnMut()) -> u64 {
    let mut once = |_| {
        let begun = Instant::now();
        load();
        begun.elapsed().as_nanos().min(u128::from(u64::MAX)) as u64
    };
    (0..PROBES).map(&mut once).min().unwrap_or(0)
}

impl Drop for Aperture {
    fn drop(&mut self) {
        // Nothing can be done about a failure; RM frees what is left with the client.
        self.window = None;
        if !self.client.is_ours() {
            return;
        }
        let client = self.client.handle();
        if let Some(linear) = self.linear {
            let (device, memory) = (self.client.device(), self.memory);
            let mut call = UnmapMemory { client, device, memory, linear, ..UnmapMemory::default() };
            let _ = self.client.file().unmap(&mut call);
        }
        let mut call = Free { root: client, parent: self.client.device(), old: self.memory, status: 0 };
        let _ = self.client.file().free(&mut call);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn emulated_loads_are_told_from_interrupted_ones() {
        assert!(fastest(|| std::thread::sleep(Duration::from_micros(30))) > MAX_LOAD_NS);
        let mut n = 0;
        let now_and_then = || {
            n += 1;
            if n % 2 == 0 {
                std::thread::sleep(Duration::from_micros(50));
            }
        };
        assert!(fastest(now_and_then) < MAX_LOAD_NS);
    }
}
