//! Device memory that the processor reaches: allocated through CUDA's virtual memory management, because only that can be
//! exported, and mapped by `forebay-rm` (or, from driver 610 on, through a dma-buf).
//!
//! A mapping costs two mebibytes and several calls, so buffers are cut from slabs. Where the driver refuses, buffers are
//! ordinary ones, and [`Windows::refusal`] says why.

use std::ffi::c_void;
use std::os::fd::{AsFd, FromRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};
use std::time::{Duration, Instant};

use forebay_rm::{Aperture, Client, Rm, Window};

use super::Context;
use super::sys::{self, CuDevicePtr};
use crate::{Error, Result};

/// Where buffers begin in a slab: what the copy engine and kernels like, and no cache line has two owners.
const ALIGN: usize = 256;
/// Bytes of a slab; larger buffers have one of their own.
const SLAB: usize = 4 << 20;
/// How long no slab is asked for where there was no room to map one: an attempt takes several calls, and buffers are ordinary ones
/// meanwhile.
const AGAIN: Duration = Duration::from_secs(1);
/// Stands at the beginning of every slab. A device that has left the bus answers every read with ones, and so does not
/// say this any more.
const PRESENT: u64 = 0x466f_7265_6261_7921;

/// The kernel that mappings are asked of; the machine's own unless a test has set another.
static RM: OnceLock<Arc<dyn Rm>> = OnceLock::new();

/// Has mappings made by `rm`; for tests, before the first device is opened.
#[doc(hidden)]
pub fn use_rm(rm: Arc<dyn Rm>) {
    let _ = RM.set(rm);
}

/// What maps a slab; its drop unmaps.
enum Mapping {
    Aperture(Aperture),
    DmaBuf(Window),
}

impl Mapping {
    fn ptr(&self) -> Option<NonNull<u8>> {
        match self {
            Mapping::Aperture(a) => a.ptr(),
            Mapping::DmaBuf(w) => Some(w.ptr()),
        }
    }
}

/// A piece of exportable device memory, mapped.
pub(super) struct Slab {
    /// Goes before the memory: a reference of RM's would keep it allocated.
    mapping: Option<Mapping>,
    address: CuDevicePtr,
    bytes: usize,
    handle: u64,
    /// How much of the following was done: reserved, created, mapped.
    done: usize,
    /// Free ranges: offset and length, in order, never adjacent.
    free: Mutex<Vec<(usize, usize)>>,
    context: Arc<Context>,
}

/// A buffer's place in a slab; gives it back.
pub(super) struct Part {
    slab: Arc<Slab>,
    offset: usize,
    bytes: usize,
}

impl Part {
    pub(super) fn device(&self) -> CuDevicePtr {
        self.slab.address + self.offset as u64
    }

    /// Where the processor finds it.
    pub(super) fn host(&self) -> Option<NonNull<u8>> {
        let p = self.slab.mapping.as_ref()?.ptr()?;
        // SAFETY: the part lies within the slab, all of which is mapped.
        Some(unsafe { p.add(self.offset) })
    }

    /// Whether the device still answers.
    pub(super) fn is_present(&self) -> bool {
        // SAFETY: a slab begins with a word, in which nobody else has a part.
        self.slab
            .mapping
            .as_ref()
            .and_then(Mapping::ptr)
            .is_some_and(|p| unsafe { p.cast::<u64>().read_volatile() } == PRESENT)
    }
}

impl Drop for Part {
    fn drop(&mut self) {
        give_back(&mut self.slab.free.lock().unwrap_or_else(PoisonError::into_inner), self.offset, self.bytes);
    }
}

/// First fit.
fn take(free: &mut Vec<(usize, usize)>, bytes: usize) -> Option<usize> {
    let i = free.iter().position(|(_, len)| *len >= bytes)?;
    let (offset, len) = free[i];
    if len == bytes {
        free.remove(i);
    } else {
        free[i] = (offset + bytes, len - bytes);
    }
    Some(offset)
}

fn give_back(free: &mut Vec<(usize, usize)>, offset: usize, bytes: usize) {
    let i = free.partition_point(|(at, _)| *at < offset);
    free.insert(i, (offset, bytes));
    if i + 1 < free.len() && free[i].0 + free[i].1 == free[i + 1].0 {
        free[i].1 += free.remove(i + 1).1;
    }
    if i > 0 && free[i - 1].0 + free[i - 1].1 == free[i].0 {
        free[i - 1].1 += free.remove(i).1;
    }
}

/// A device's slabs.
#[derive(Default)]
pub(super) struct Windows {
    /// A client of the kernel driver's; opened with the first slab.
    client: OnceLock<Result<Arc<Client>, String>>,
    slabs: Mutex<Slabs>,
    refused: OnceLock<String>,
}

#[derive(Default)]
struct Slabs {
    all: Vec<Weak<Slab>>,
    /// When there was no room for another one to be mapped.
    full: Option<Instant>,
}

impl Windows {
    /// Memory of `bytes` that the processor reaches; none where that cannot be had.
    pub(super) fn alloc(&self, context: &Arc<Context>, bytes: usize) -> Option<Part> {
        if self.refused.get().is_some() {
            return None;
        }
        let bytes = bytes.max(1).checked_next_multiple_of(ALIGN)?;
        let mut slabs = self.slabs.lock().unwrap_or_else(PoisonError::into_inner);
        slabs.all.retain(|s| s.strong_count() > 0);
        for slab in slabs.all.iter().filter_map(Weak::upgrade) {
            let offset = take(&mut slab.free.lock().unwrap_or_else(PoisonError::into_inner), bytes);
            if let Some(offset) = offset {
                return Some(Part { slab, offset, bytes });
            }
        }
        if slabs.full.is_some_and(|since| since.elapsed() < AGAIN) {
            return None;
        }
        match self.slab(context, bytes.checked_add(ALIGN)?.max(SLAB)) {
            Ok(slab) => {
                let slab = Arc::new(slab);
                let offset = take(&mut slab.free.lock().unwrap_or_else(PoisonError::into_inner), bytes)?;
                slabs.all.push(Arc::downgrade(&slab));
                Some(Part { slab, offset, bytes })
            }
            Err(Error::Full { .. }) => {
                slabs.full = Some(Instant::now());
                None
            }
            // It may fit next time, or as an ordinary buffer.
            Err(e) if e.is_out_of_memory() => None,
            Err(e) => {
                let _ = self.refused.set(e.to_string());
                None
            }
        }
    }

    /// Why no memory is mapped.
    pub(super) fn refusal(&self) -> Option<String> {
        self.refused.get().cloned()
    }

    fn slab(&self, context: &Arc<Context>, bytes: usize) -> Result<Slab> {
        let d = context.enter()?;
        let location = sys::MemLocation { kind: sys::MEM_LOCATION_DEVICE, id: context.device };
        let prop = sys::MemAllocationProp {
            kind: sys::MEM_ALLOCATION_PINNED,
            handle_types: sys::MEM_HANDLE_POSIX_FD,
            location,
            win32: std::ptr::null_mut(),
            compression: 0,
            rdma_capable: u8::from(context.attribute(sys::ATTRIBUTE_RDMA_WITH_VMM) != 0),
            usage: 0,
            reserved: [0; 4],
        };
        let mut granularity = 0;
        // SAFETY: both pointers are valid.
        let code = unsafe { (d.cuMemGetAllocationGranularity)(&mut granularity, &prop, sys::MEM_GRANULARITY_MINIMUM) };
        context.check("cuMemGetAllocationGranularity", code)?;
        let bytes = bytes.next_multiple_of(granularity.max(1));
        let mut slab = Slab {
            mapping: None,
            address: 0,
            bytes,
            handle: 0,
            done: 0,
            free: Mutex::new(vec![(ALIGN, bytes - ALIGN)]),
            context: context.clone(),
        };
        // SAFETY: `address` is valid for the call; no alignment, place or flags are asked for.
        let code = unsafe { (d.cuMemAddressReserve)(&mut slab.address, bytes, 0, 0, 0) };
        context.check("cuMemAddressReserve", code)?;
        slab.done = 1;
        // SAFETY: both pointers are valid.
        let code = unsafe { (d.cuMemCreate)(&mut slab.handle, bytes, &prop, 0) };
        if code == sys::ERROR_OUT_OF_MEMORY {
            let (device, requested) = (context.name.clone(), bytes as u64);
            return Err(Error::OutOfMemory { device, requested, used: context.used(), limit: context.limit });
        }
        context.check("cuMemCreate", code)?;
        slab.done = 2;
        // SAFETY: the address range was reserved for this.
        let code = unsafe { (d.cuMemMap)(slab.address, bytes, 0, slab.handle, 0) };
        context.check("cuMemMap", code)?;
        slab.done = 3;
        let access = sys::MemAccessDesc { location, flags: sys::MEM_ACCESS_READ_WRITE };
        // SAFETY: one description is passed.
        let code = unsafe { (d.cuMemSetAccess)(slab.address, bytes, &access, 1) };
        context.check("cuMemSetAccess", code)?;
        let mapping = self.map(context, &slab)?;
        if let Some(p) = mapping.ptr() {
            // SAFETY: a slab has more than a word, and nobody has a part of it yet.
            unsafe { p.cast::<u64>().write_volatile(PRESENT) };
        }
        slab.mapping = Some(mapping);
        Ok(slab)
    }

    fn map(&self, context: &Arc<Context>, slab: &Slab) -> Result<Mapping> {
        let refused = match self.aperture(context, slab)? {
            Ok(a) => return Ok(Mapping::Aperture(a)),
            Err(why) => why,
        };
        let exported = export(context, "cuMemGetHandleForAddressRange", |d, fd| {
            // SAFETY: the handle is a descriptor; the range is the slab's.
            unsafe { (d.cuMemGetHandleForAddressRange)(fd.cast(), slab.address, slab.bytes, sys::MEM_RANGE_DMA_BUF, 0) }
        });
        let window = exported.map_err(|e| e.to_string()).and_then(|fd| {
            Window::map(fd.as_fd(), 0, slab.bytes, None).map_err(|e| format!("the dma-buf cannot be mapped: {e}"))
        });
        let unsupported = |why| Error::Unsupported {
            device: context.name.clone(),
            what: format!("mapping its memory into the processor: {refused}; {why}"),
        };
        window.map(Mapping::DmaBuf).map_err(unsupported)
    }

    /// By RM; inside what says that there is none here, outside that there was no room now.
    fn aperture(&self, context: &Arc<Context>, slab: &Slab) -> Result<Result<Aperture, String>> {
        let client = match self.client.get_or_init(|| open(context)) {
            Ok(client) => client.clone(),
            Err(why) => return Ok(Err(why.clone())),
        };
        let exported = export(context, "cuMemExportToShareableHandle", |d, fd| {
            // SAFETY: the handle is the slab's; a descriptor is asked for.
            unsafe { (d.cuMemExportToShareableHandle)(fd.cast(), slab.handle, sys::MEM_HANDLE_POSIX_FD, 0) }
        });
        let exported = match exported {
            Err(e) if e.is_out_of_memory() => return Err(e),
            Err(e) => return Ok(Err(e.to_string())),
            Ok(fd) => fd,
        };
        match Aperture::map(&client, exported.as_fd(), slab.bytes) {
            Err(e) if e.is_full() => Err(Error::Full { device: context.name.clone(), why: e.to_string() }),
            mapped => Ok(mapped.map_err(|e| e.to_string())),
        }
    }
}

/// A descriptor that the driver makes.
fn export(
    context: &Context,
    call: &'static str,
    make: impl FnOnce(&sys::Driver, *mut i32) -> sys::CuResult,
) -> Result<OwnedFd> {
    let d = context.enter()?;
    let mut fd = -1;
    context.check(call, make(d, &mut fd))?;
    if fd < 0 {
        return Err(context.invalid(format!("descriptor {fd} from {call}")));
    }
    // SAFETY: the driver made it for us, and nobody else has it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// A client for the context's GPU, which is found by its place on the bus.
fn open(context: &Context) -> Result<Arc<Client>, String> {
    let rm = RM.get_or_init(|| Arc::new(forebay_rm::Host)).clone();
    let place = [sys::ATTRIBUTE_PCI_DOMAIN, sys::ATTRIBUTE_PCI_BUS, sys::ATTRIBUTE_PCI_DEVICE];
    let [domain, bus, slot] = place.map(|a| context.attribute(a));
    let cards = rm.cards().map_err(|e| e.to_string())?;
    let ours = cards.iter().find(|c| c.is_at(domain, bus, slot));
    let card = ours.ok_or_else(|| format!("the driver lists no card at {domain:04x}:{bus:02x}:{slot:02x}"))?;
    Client::open(rm, card.minor).map(Arc::new).map_err(|e| e.to_string())
}

impl Drop for Slab {
    fn drop(&mut self) {
        let (mapping, done) = (self.mapping.take(), self.done);
        let (address, bytes, handle) = (self.address, self.bytes, self.handle);
        self.context.free_mapped(mapping, move |d| {
            // SAFETY: each was done once, in the reverse order; no part of it is in use. Where the mapping has gone with a context
            // that was made anew, so may the rest have, and its handle be nothing any more.
            unsafe {
                if done >= 3 && (d.cuMemUnmap)(address, bytes) != sys::SUCCESS {
                    return;
                }
                if done >= 2 {
                    (d.cuMemRelease)(handle);
                }
                if done >= 1 {
                    (d.cuMemAddressFree)(address, bytes);
                }
            }
        });
    }
}

/// The processor's copy between its memory and a part, and proof that it arrived. False when what came back is what a device
/// that has left the bus would say, too: ones.
///
/// # Safety
/// `device` is in a window; `bytes`, at least one, are valid on both sides; nothing on the device uses them.
pub(super) unsafe fn copy(to: crate::Direction, device: NonNull<u8>, host: *mut u8, bytes: usize) -> bool {
    use crate::cpu::streaming::{self, Width};
    // SAFETY: by the contract; parts of a window begin and end between lines (`ALIGN`). The load behind the stores (which end
    // in a fence) overtakes none of them on the bus.
    unsafe {
        match to {
            crate::Direction::ToDevice => {
                streaming::store(Width::widest(), host, device.as_ptr(), bytes);
                std::ptr::read_volatile(device.as_ptr()) != 0xFF
            }
            crate::Direction::ToHost => {
                streaming::load(Width::widest(), device.as_ptr(), host, bytes);
                std::slice::from_raw_parts(host, bytes.min(8)).iter().any(|b| *b != 0xFF)
            }
        }
    }
}

const _: () = assert!(size_of::<*mut c_void>() == 8, "the driver's layouts here are those of 64-bit systems");

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_never_overlap_and_a_slab_becomes_whole_again() {
        let mut free = vec![(0, 100 * ALIGN)];
        let mut held: Vec<(usize, usize)> = Vec::new();
        let mut seed = 7u64;
        let mut random = |n: u64| {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (seed >> 33) % n
        };
        for _ in 0..5000 {
            if random(2) == 0 {
                let bytes = (1 + random(9) as usize) * ALIGN;
                if let Some(at) = take(&mut free, bytes) {
                    assert!(at + bytes <= 100 * ALIGN);
                    assert!(held.iter().all(|(o, n)| at + bytes <= *o || o + n <= at), "{at}+{bytes} in {held:?}");
                    held.push((at, bytes));
                }
            } else if !held.is_empty() {
                let (at, bytes) = held.swap_remove(random(held.len() as u64) as usize);
                give_back(&mut free, at, bytes);
            }
            assert!(free.windows(2).all(|w| w[0].0 + w[0].1 < w[1].0), "{free:?}");
        }
        held.into_iter().for_each(|(at, bytes)| give_back(&mut free, at, bytes));
        assert_eq!(free, [(0, 100 * ALIGN)]);
    }
}
