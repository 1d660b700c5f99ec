//! The staging ring: page-locked buffers through which pageable memory reaches a device's engine.
//!
//! Its size is fixed. When every slot is in flight the next piece waits for the oldest: backpressure, never growth.

use forebay_hal::{Buffer, Device, Direction, Fence, Method, Queue};

use super::wait::Wait;
use crate::error::Result;

/// Slots: one being filled, one in flight, and as many again so that neither side waits for the other's hiccups.
const SLOTS: usize = 4;
/// Bytes of a slot: several hundred times what a command costs, and all slots together fit into an L2 cache.
const SLOT: usize = 256 << 10;
/// Smallest piece that a transfer is cut into, so that filling and sending overlap in small ones, too.
const LEAST: usize = 32 << 10;

pub(super) struct Ring {
    memory: Buffer,
    base: *mut u8,
    fences: [Option<Fence>; SLOTS],
    next: usize,
}

// SAFETY: the memory is the ring's own, and reached through `&mut self`.
unsafe impl Send for Ring {}

impl Ring {
    pub(super) fn new(device: &dyn Device) -> Result<Self> {
        let memory = device.alloc_host(SLOTS * SLOT)?;
        let Some(base) = memory.host_ptr() else {
            let what = "page-locked memory without an address".into();
            return Err(forebay_hal::Error::Invalid { device: device.info().name.clone(), what }.into());
        };
        Ok(Ring { memory, base: base.as_ptr(), fences: [None; SLOTS], next: 0 })
    }

    /// All of its memory, to lock and touch.
    pub(super) fn memory(&self) -> &Buffer {
        &self.memory
    }

    /// Nothing is in flight any more.
    pub(super) fn drained(&mut self) {
        if self.fences[(self.next + SLOTS - 1) % SLOTS].is_some() {
            self.fences = [None; SLOTS];
        }
    }

    fn pieces(bytes: usize) -> impl Iterator<Item = (usize, usize)> {
        let piece = bytes.div_ceil(SLOTS).clamp(LEAST, SLOT);
        (0..bytes.div_ceil(piece)).map(move |i| (i * piece, piece.min(bytes - i * piece)))
    }

    /// The next slot, once its last piece has left it.
    fn slot(&mut self, queue: &mut dyn Queue, wait: Wait) -> Result<(usize, *mut u8)> {
        let i = self.next;
        self.next = (i + 1) % SLOTS;
        if let Some(f) = self.fences[i].take() {
            wait.until(queue, f)?;
        }
        // SAFETY: slot `i` lies within the ring's memory.
        Ok((i, unsafe { self.base.add(i * SLOT) }))
    }

    /// Issues the transfer to the device; `from` has been read when this returns.
    ///
    /// # Safety
    /// `from` is valid for reading `bytes`.
    pub(super) unsafe fn write(
        &mut self,
        queue: &mut dyn Queue,
        wait: Wait,
        device: &Buffer,
        offset: usize,
        from: *const u8,
        bytes: usize,
    ) -> Result<()> {
        for (at, n) in Self::pieces(bytes) {
            let (i, slot) = self.slot(queue, wait)?;
            // SAFETY: `n` ≤ SLOT; nothing in flight uses the slot, and it stays until its fence.
            unsafe {
                std::ptr::copy_nonoverlapping(from.add(at), slot, n);
                queue.transfer(Method::Engine, Direction::ToDevice, device, offset + at, slot, n)?;
            }
            self.fences[i] = Some(queue.fence()?);
        }
        Ok(())
    }

    /// Brings bytes from the device; all of them have arrived when this returns.
    ///
    /// # Safety
    /// `to` is valid for writing `bytes`.
    pub(super) unsafe fn read(
        &mut self,
        queue: &mut dyn Queue,
        wait: Wait,
        device: &Buffer,
        offset: usize,
        to: *mut u8,
        bytes: usize,
    ) -> Result<()> {
        let mut landed = Self::pieces(bytes);
        let mut oldest = self.next;
        let mut land = |ring: &mut Self, queue: &mut dyn Queue| -> Result<()> {
            let (Some((at, n)), Some(fence)) = (landed.next(), ring.fences[oldest].take()) else { return Ok(()) };
            wait.until(queue, fence)?;
            // SAFETY: the slot's transfer has ended; `at + n` ≤ `bytes`.
            unsafe { std::ptr::copy_nonoverlapping(ring.base.add(oldest * SLOT), to.add(at), n) };
            oldest = (oldest + 1) % SLOTS;
            Ok(())
        };
        let mut ahead = 0;
        for (at, n) in Self::pieces(bytes) {
            if ahead == SLOTS {
                land(self, queue)?;
                ahead -= 1;
            }
            let (i, slot) = self.slot(queue, wait)?;
            // SAFETY: as in `write`.
            unsafe { queue.transfer(Method::Engine, Direction::ToHost, device, offset + at, slot, n)? };
            self.fences[i] = Some(queue.fence()?);
            ahead += 1;
        }
        (0..ahead).try_for_each(|_| land(self, queue))
    }
}
