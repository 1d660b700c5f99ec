//! Coherence: which memory spaces hold the bytes of a block.
//!
//! Rules (PTask section 5.2, a MESI without the M):
//! 1. A view is None (no buffer), Invalid (a buffer with stale bytes), Shared (equal to every other valid view) or
//!    Exclusive (the only valid view).
//! 2. A read makes the view valid: if it is not, the bytes are copied from a valid view; both are Shared then.
//! 3. A write makes the view Exclusive and all others Invalid; it copies first only if the old bytes matter.
//! 4. Device writes are ordered by the device's one queue. The host waits: before it reads, for the copy to it; before
//!    it writes, for devices that still copy from it. A device that copies from another one's memory waits for that one's
//!    queue first; and until it has copied nobody writes there, nor is that memory used for something else.
//! 5. Nothing is copied before somebody needs it there, with one exception: when the last block of an output was read on
//!    the host, the next one is sent there right behind the command that makes it (the reader would otherwise queue its
//!    copy behind whatever was issued since). A block that was sent and not read ends that.
//! 6. A block without handles gives its device memory back to the device, whose queue orders the next use behind the last
//!    one. So a pipeline's items use the same addresses again, which replayed graphs need no update for.
//!
//! Lock rank: a block's views, then a device's queue or its spare memory.

use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};

use forebay_hal::cpu::HostMemory;
use forebay_hal::{Buffer, Direction, Fence};

use super::{Datablock, HOST_ONLY, HOST_VALID, Inner, ON_DEVICE, Pool};
use crate::error::{Error, Result};
use crate::run::device::DeviceHandle;

/// State of one view.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Residency {
    /// No buffer there.
    #[default]
    None,
    /// A buffer with stale bytes.
    Invalid,
    /// Valid, and so may others be.
    Shared,
    /// The only valid view.
    Exclusive,
}

impl Residency {
    fn valid(self) -> bool {
        matches!(self, Residency::Shared | Residency::Exclusive)
    }
}

fn gone(b: &Datablock) -> Error {
    Error::Block { block: b.template().to_string(), want: "a view that was just made is wanted".into() }
}

#[derive(Default)]
pub(super) struct Views {
    host: Option<Buffer>,
    host_state: Residency,
    devices: Vec<DeviceView>,
    /// Copies from the host view that may still be running, and copies to it that were for nothing.
    host_readers: Vec<(Arc<DeviceHandle>, Fence)>,
    /// A copy to the host view that was sent ahead of any reader; the view is Invalid until it has been awaited.
    arriving: Option<(Arc<DeviceHandle>, Fence)>,
    /// It left its device with that copy (`send_home`).
    left: bool,
}

struct DeviceView {
    device: Arc<DeviceHandle>,
    buffer: Buffer,
    state: Residency,
    /// Other devices that may still copy from it.
    readers: Vec<(Arc<DeviceHandle>, Fence)>,
}

impl Drop for DeviceView {
    fn drop(&mut self) {
        self.device.give_back_after(self.buffer.clone(), std::mem::take(&mut self.readers));
    }
}

impl DeviceView {
    /// Before a write.
    fn wait_readers(&mut self) -> Result<()> {
        wait_each(&mut self.readers)
    }
}

/// Waits for devices that read what is about to be written. One that is lost reads nothing any more, which is no failure of
/// who writes; after another error those that were not waited for are still to be.
fn wait_each(readers: &mut Vec<(Arc<DeviceHandle>, Fence)>) -> Result<()> {
    while let Some((d, fence)) = readers.last() {
        wait_for_reader(d, *fence)?;
        readers.pop();
    }
    Ok(())
}

fn wait_for_reader(d: &DeviceHandle, fence: Fence) -> Result<()> {
    match d.wait(fence) {
        Err(forebay_hal::Error::Lost { .. }) => Ok(()),
        other => Ok(other?),
    }
}

impl Views {
    fn device(&mut self, d: &Arc<DeviceHandle>) -> Option<&mut DeviceView> {
        self.devices.iter_mut().find(|v| Arc::ptr_eq(&v.device, d))
    }

    fn ensure_device(&mut self, d: &Arc<DeviceHandle>, bytes: usize) -> Result<usize> {
        if let Some(i) = self.devices.iter().position(|v| Arc::ptr_eq(&v.device, d)) {
            return Ok(i);
        }
        let buffer = d.buffer(bytes)?;
        self.devices.push(DeviceView { device: d.clone(), buffer, state: Residency::Invalid, readers: Vec::new() });
        Ok(self.devices.len() - 1)
    }

    /// After a write in one place everything else is stale.
    fn invalidate_others(&mut self, keep_device: Option<usize>) {
        for (i, v) in self.devices.iter_mut().enumerate() {
            if Some(i) != keep_device {
                v.state = Residency::Invalid;
            }
        }
        if keep_device.is_some() && self.host_state != Residency::None {
            self.host_state = Residency::Invalid;
        }
    }

    /// Before a write on `by` (or on the host): what was sent to the host was for nothing.
    fn cancel_arriving(&mut self, by: Option<&Arc<DeviceHandle>>, home: Option<&Pool>) -> Result<()> {
        self.left = false;
        let Some((d, fence)) = self.arriving.clone() else { return Ok(()) };
        if let Some(p) = home {
            p.read_on_host.store(false, Ordering::Relaxed);
        }
        if by.is_some_and(|by| Arc::ptr_eq(by, &d)) {
            // The device that copies does it before it writes; whoever writes the host view waits for it.
            self.host_readers.retain(|(o, _)| !Arc::ptr_eq(o, &d));
            self.host_readers.push((d, fence));
        } else {
            wait_for_reader(&d, fence)?;
        }
        self.arriving = None;
        Ok(())
    }

    fn wait_host_readers(&mut self) -> Result<()> {
        wait_each(&mut self.host_readers)
    }

    fn share(&mut self) {
        if self.host_state == Residency::Exclusive {
            self.host_state = Residency::Shared;
        }
        for v in &mut self.devices {
            if v.state == Residency::Exclusive {
                v.state = Residency::Shared;
            }
        }
    }
}

impl Inner {
    fn pool(&self) -> Option<&Pool> {
        // SAFETY: a pool outlives its blocks (pool.rs); null means no pool.
        unsafe { self.home.as_ref() }
    }

    fn host_buffer(&self, v: &mut Views) -> Result<Buffer> {
        if let Some(b) = &v.host {
            return Ok(b.clone());
        }
        let bytes = self.template.bytes();
        let b = match self.pool() {
            Some(p) => p.alloc_host(bytes)?,
            None => HostMemory::buffer(bytes)?,
        };
        self.set_host(v, b.clone())?;
        Ok(b)
    }

    fn set_host(&self, v: &mut Views, b: Buffer) -> Result<()> {
        let none = || Error::Block { block: self.template.to_string(), want: "host memory is wanted".into() };
        self.host.store(b.host_ptr().ok_or_else(none)?.as_ptr(), Ordering::Release);
        v.host = Some(b);
        v.host_state = Residency::Invalid;
        Ok(())
    }

    /// Of a block that is just made: what it holds, on the host.
    pub(super) fn begin_with(&self, b: Buffer) -> Result<()> {
        let mut v = self.views.lock().unwrap_or_else(PoisonError::into_inner);
        self.set_host(&mut v, b)?;
        v.host_state = Residency::Exclusive;
        self.publish(&v);
        Ok(())
    }

    fn publish(&self, v: &Views) {
        let mut fast = 0;
        if v.host_state.valid() {
            fast |= HOST_VALID;
        }
        if v.host_state == Residency::Exclusive && v.host_readers.is_empty() {
            fast |= HOST_ONLY;
        }
        if !v.devices.is_empty() {
            fast |= ON_DEVICE;
        }
        self.fast.store(fast, Ordering::Release);
    }

    /// Rule 6; the caller is the block's only user. Whether devices may still copy from its host view.
    #[inline]
    pub(super) fn leave_devices(&self) -> bool {
        self.fast.load(Ordering::Relaxed) & ON_DEVICE != 0 && self.leave_devices_slowly()
    }

    #[cold]
    fn leave_devices_slowly(&self) -> bool {
        let mut v = self.views.lock().unwrap_or_else(PoisonError::into_inner);
        v.devices.clear();
        v.left = false;
        self.publish(&v);
        !v.host_readers.is_empty()
    }

    /// Whether a device copies from the host view, as far as that can be told at once.
    pub(super) fn is_read_by_a_device(&self) -> bool {
        let v = self.views.lock().unwrap_or_else(PoisonError::into_inner);
        v.host_readers.iter().any(|(d, fence)| !d.has_reached(*fence))
    }

    /// Whether no device copies from the host view or to it, as far as that can be told at once.
    pub(super) fn is_at_rest(&self) -> bool {
        let v = self.views.lock().unwrap_or_else(PoisonError::into_inner);
        v.host_readers.iter().chain(&v.arriving).all(|(d, fence)| d.has_reached(*fence))
    }

    /// Makes the host view valid, copying from a device if need be (rule 2).
    fn validate_host(&self, v: &mut Views, bytes: usize) -> Result<()> {
        if v.host_state.valid() {
            return Ok(());
        }
        let host = self.host_buffer(v)?;
        if let Some((d, fence)) = v.arriving.clone() {
            // Until it has come it is what this view waits for, whoever asks: what never comes is not replaced by what was
            // there before.
            d.wait(fence)?;
            v.arriving = None;
            v.share();
            v.host_state = Residency::Shared;
        } else if let Some(i) = v.devices.iter().position(|d| d.state.valid()) {
            if let Some(p) = self.pool() {
                p.read_on_host.store(true, Ordering::Relaxed);
            }
            v.wait_host_readers()?;
            let (device, buffer) = (v.devices[i].device.clone(), v.devices[i].buffer.clone());
            let mut q = device.lock();
            if !device.transfer(&mut q, Direction::ToHost, &buffer, &host, bytes)? {
                // On its way until it has been awaited: where that fails it comes all the same.
                let fence = q.next_fence();
                drop(q);
                v.arriving = Some((device.clone(), fence));
                device.wait(fence)?;
                v.arriving = None;
            }
            v.share();
            v.host_state = Residency::Shared;
        } else {
            // Never written anywhere: whatever is there is as good as anything (pooled blocks).
            v.host_state = Residency::Exclusive;
        }
        Ok(())
    }
}

impl Datablock {
    #[inline]
    pub(super) fn read_host(&self) -> Result<*const u8> {
        let i = self.inner();
        if i.fast.load(Ordering::Acquire) & HOST_VALID == 0 {
            self.read_host_slowly()?;
        }
        Ok(i.host.load(Ordering::Acquire))
    }

    #[cold]
    fn read_host_slowly(&self) -> Result<()> {
        let i = self.inner();
        let mut v = i.views.lock().unwrap_or_else(PoisonError::into_inner);
        i.validate_host(&mut v, self.bytes())?;
        i.publish(&v);
        Ok(())
    }

    /// The host address for writing; the caller has the only handle.
    #[inline]
    pub(crate) fn write_host(&self, keep: bool) -> Result<*mut u8> {
        let i = self.inner();
        if i.fast.load(Ordering::Acquire) & HOST_ONLY == 0 {
            self.write_host_slowly(keep)?;
        }
        Ok(i.host.load(Ordering::Acquire))
    }

    #[cold]
    fn write_host_slowly(&self, keep: bool) -> Result<()> {
        let i = self.inner();
        let mut v = i.views.lock().unwrap_or_else(PoisonError::into_inner);
        if keep {
            i.validate_host(&mut v, self.bytes())?;
        } else {
            i.host_buffer(&mut v)?;
        }
        v.cancel_arriving(None, i.pool())?;
        v.wait_host_readers()?;
        v.invalidate_others(None);
        v.host_state = Residency::Exclusive;
        i.publish(&v);
        Ok(())
    }

    /// The buffer on `d` with up-to-date bytes; commands enqueued on `d` from now on see them.
    pub(crate) fn read_on(&self, d: &Arc<DeviceHandle>) -> Result<Buffer> {
        let i = self.inner();
        let mut v = i.views.lock().unwrap_or_else(PoisonError::into_inner);
        if d.is_host() {
            i.validate_host(&mut v, self.bytes())?;
            i.publish(&v);
            return i.host_buffer(&mut v);
        }
        if let Some(view) = v.device(d).filter(|v| v.state.valid()) {
            return Ok(view.buffer.clone());
        }
        if self.read_from_peer(&mut v, d)? {
            i.publish(&v);
            return Ok(v.device(d).ok_or_else(|| gone(self))?.buffer.clone());
        }
        // By way of the host: rule 4 makes it wait for a writer on another device.
        i.validate_host(&mut v, self.bytes())?;
        let host = i.host_buffer(&mut v)?;
        if std::mem::take(&mut v.left)
            && let Some(p) = i.pool()
        {
            p.used_on_device.store(true, Ordering::Relaxed);
        }
        let at = v.ensure_device(d, i.template.bytes())?;
        let buffer = v.devices[at].buffer.clone();
        let bytes = self.bytes();
        v.devices[at].wait_readers()?;
        if bytes > 0 {
            let mut q = d.lock();
            let arrived = d.transfer(&mut q, Direction::ToDevice, &buffer, &host, bytes)?;
            let fence = q.next_fence();
            drop(q);
            if !arrived {
                d.leave_unfenced();
                v.host_readers.retain(|(o, _)| !Arc::ptr_eq(o, d));
                v.host_readers.push((d.clone(), fence));
            }
        }
        v.share();
        v.host_state = Residency::Shared;
        v.devices[at].state = Residency::Shared;
        i.publish(&v);
        Ok(buffer)
    }

    /// Copies from a device whose memory `d` reaches itself, if one has the bytes and the host does not; whether it did.
    fn read_from_peer(&self, v: &mut Views, d: &Arc<DeviceHandle>) -> Result<bool> {
        if v.host_state.valid() || v.arriving.is_some() {
            return Ok(false);
        }
        let reached = |o: &DeviceView| o.state.valid() && d.device.reaches(&o.buffer);
        let Some(from) = v.devices.iter().position(reached) else { return Ok(false) };
        let (other, source) = (v.devices[from].device.clone(), v.devices[from].buffer.clone());
        let made = other.lock().fence_now()?;
        other.wait(made)?;
        let at = v.ensure_device(d, self.inner().template.bytes())?;
        if at == from {
            return Ok(false);
        }
        // Another device may still copy from what is overwritten here.
        v.devices[at].wait_readers()?;
        let bytes = self.bytes();
        if bytes > 0 {
            let mut q = d.lock();
            d.peer_copy(&mut q, &source, &v.devices[at].buffer, bytes)?;
            let fence = q.next_fence();
            drop(q);
            d.leave_unfenced();
            v.devices[from].readers.push((d.clone(), fence));
        }
        v.share();
        v.devices[at].state = Residency::Shared;
        Ok(true)
    }

    /// The buffer on `d` for a command that writes it; the caller has the only handle.
    pub(crate) fn write_on(&self, d: &Arc<DeviceHandle>, keep: bool) -> Result<Buffer> {
        if keep {
            self.read_on(d)?;
        }
        if d.is_host() {
            self.write_host(keep)?;
        }
        let i = self.inner();
        let mut v = i.views.lock().unwrap_or_else(PoisonError::into_inner);
        if d.is_host() {
            return i.host_buffer(&mut v);
        }
        v.cancel_arriving(Some(d), i.pool())?;
        let at = v.ensure_device(d, i.template.bytes())?;
        v.devices[at].wait_readers()?;
        v.invalidate_others(Some(at));
        v.devices[at].state = Residency::Exclusive;
        i.publish(&v);
        Ok(v.devices[at].buffer.clone())
    }

    /// Sends what `d` has just been told to make to the host, if the last blocks were read there (rule 5). A block for
    /// the program alone leaves the device then, and its memory serves the next one (rule 6), unless such blocks have
    /// come back for more.
    pub(crate) fn send_home(&self, d: &Arc<DeviceHandle>, for_program: bool) -> Result<()> {
        let i = self.inner();
        let Some(pool) = i.pool().filter(|p| p.read_on_host.load(Ordering::Relaxed)) else { return Ok(()) };
        let mut v = i.views.lock().unwrap_or_else(PoisonError::into_inner);
        let busy = v.host_state.valid() || v.arriving.is_some() || !v.host_readers.is_empty();
        let from = v.device(d).filter(|v| v.state.valid()).map(|v| v.buffer.clone());
        let Some(from) = from.filter(|_| !busy) else { return Ok(()) };
        let host = i.host_buffer(&mut v)?;
        let bytes = self.bytes();
        let mut q = d.lock();
        if d.transfer(&mut q, Direction::ToHost, &from, &host, bytes)? {
            drop(q);
            v.share();
            v.host_state = Residency::Shared;
            i.publish(&v);
            return Ok(());
        }
        let fence = q.next_fence();
        drop(q);
        d.leave_unfenced();
        v.arriving = Some((d.clone(), fence));
        v.left = for_program && !pool.used_on_device.load(Ordering::Relaxed);
        if v.left {
            v.devices.clear();
        }
        i.publish(&v);
        Ok(())
    }

    /// Waits until its bytes are made, wherever that is. A block that a task gave may come before its device is done; who reads
    /// it waits of himself, and this is for whoever wants to know when, and not the bytes.
    ///
    /// # Errors
    /// Those of the device.
    pub fn wait(&self) -> Result<()> {
        let v = self.inner().views.lock().unwrap_or_else(PoisonError::into_inner);
        // They were waited for when they were copied there, or come from there.
        if v.host_state.valid() {
            return Ok(());
        }
        let arriving = v.arriving.clone();
        let makers: Vec<_> = v.devices.iter().filter(|d| d.state.valid()).map(|d| d.device.clone()).collect();
        drop(v);
        if let Some((d, fence)) = arriving {
            d.wait(fence)?;
        }
        makers.into_iter().try_for_each(|d| Ok(d.finish()?))
    }

    /// Where the bytes are: `None` in the first place is the host, otherwise a device's name.
    pub fn residency(&self) -> Vec<(Option<String>, Residency)> {
        let v = self.inner().views.lock().unwrap_or_else(PoisonError::into_inner);
        let host = std::iter::once((None, v.host_state));
        host.chain(v.devices.iter().map(|d| (Some(d.device.device.info().name.clone()), d.state))).collect()
    }

    /// Number of the runtime's device that holds the bytes; the CPU (0) when the host does.
    pub(crate) fn nearest(&self) -> Option<usize> {
        if self.inner().fast.load(Ordering::Relaxed) & HOST_ONLY != 0 {
            return Some(0);
        }
        let v = self.inner().views.lock().unwrap_or_else(PoisonError::into_inner);
        let device = v.devices.iter().find(|d| d.state.valid()).map(|d| d.device.index);
        device.or(v.host_state.valid().then_some(0))
    }

    /// A copy of `self`'s bytes in `to` (a fresh sole handle), made where they are.
    ///
    /// # Errors
    /// [`Error::Block`] where they do not fit; device errors.
    pub(crate) fn copy_to(&self, to: &Datablock) -> Result<()> {
        if let Some(why) = self.template().differs(&to.template()) {
            let want = format!("room for {} is wanted: {why}", self.template());
            return Err(Error::Block { block: to.template().to_string(), want });
        }
        to.set_records(self.records())?;
        if self.inner().has_meta.load(Ordering::Relaxed)
            && let Some(meta) = self.meta()
        {
            to.set_meta(&meta)?;
        }
        let bytes = self.bytes();
        let device = {
            let v = self.inner().views.lock().unwrap_or_else(PoisonError::into_inner);
            if v.host_state.valid() {
                None
            } else {
                v.devices.iter().find(|d| d.state.valid()).map(|d| d.device.clone())
            }
        };
        match device {
            Some(d) => {
                let (from, into) = (self.read_on(&d)?, to.write_on(&d, false)?);
                d.lock().queue.copy(&from, 0, &into, 0, bytes)?;
            }
            None => {
                let (from, into) = (self.read_host()?, to.write_host(false)?);
                // SAFETY: both views have their template's size, of which neither is less than `bytes`; `to` is a sole handle, so
                // they do not overlap.
                unsafe { std::ptr::copy_nonoverlapping(from, into, bytes) };
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
