//! In-order command queues and their fences.

use std::sync::Arc;

use crate::{Arg, Buffer, Direction, Geometry, Kernel, Method, Result};

/// A point in one queue's order: reached when every command before it has finished. Values only grow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Fence(pub u64);

/// A function that the queue calls on some host thread when its turn comes.
pub type HostFn = Box<dyn FnOnce() + Send>;

/// An in-order queue of one device.
///
/// Commands are asynchronous unless the device is the CPU, whose queue runs each command at once. Buffers and kernels
/// named in a command stay alive until it has finished, whoever drops them.
pub trait Queue: Send {
    /// Runs `kernel` over `geometry`.
    ///
    /// # Errors
    /// [`crate::Error::Invalid`] for a kernel or buffer of another device, [`crate::Error::Lost`] after a fault.
    fn launch(&mut self, kernel: &Kernel, geometry: &Geometry, args: &[Arg<'_>]) -> Result<()>;

    /// Copies `bytes` from `src` to `dst`, either of which (or both) belongs to this device while the other may be host
    /// memory, or `src` memory of another device that this one reaches ([`crate::Device::reaches`]): what that device's queues
    /// do with it has ended then, and nobody writes there before this copy has.
    fn copy(&mut self, src: &Buffer, src_offset: usize, dst: &Buffer, dst_offset: usize, bytes: usize) -> Result<()>;

    /// Moves `bytes` between plain host memory and `device` by one of [`crate::Device::methods`].
    ///
    /// # Errors
    /// As [`Queue::copy`]; [`crate::Error::Unsupported`] for a method that the device does not have.
    ///
    /// # Safety
    /// Until the commands so far have ended, `host` is valid for `bytes` (for writing, if they go to the host), nobody
    /// else changes them, and it is page-locked memory of this device if the method is [`Method::Kernel`].
    unsafe fn transfer(
        &mut self,
        method: Method,
        direction: Direction,
        device: &Buffer,
        offset: usize,
        host: *mut u8,
        bytes: usize,
    ) -> Result<()>;

    /// Stores into mapped memory without waiting for proof of arrival: the bytes arrive before whatever the calling thread
    /// stores there afterwards, and soon. Elsewhere an ordinary transfer.
    ///
    /// # Errors
    /// As [`Queue::transfer`].
    ///
    /// # Safety
    /// `host` is valid for reading `bytes`; no command that is not finished uses that part of `device`.
    unsafe fn post(&mut self, device: &Buffer, offset: usize, host: *const u8, bytes: usize) -> Result<()> {
        // SAFETY: by the contract; the bytes are only read, and awaited here.
        unsafe { self.transfer(Method::Engine, Direction::ToDevice, device, offset, host.cast_mut(), bytes)? };
        let fence = self.fence()?;
        self.wait(fence)
    }

    /// Sets `bytes` bytes from `offset` on to `value`.
    fn fill(&mut self, dst: &Buffer, offset: usize, bytes: usize, value: u8) -> Result<()>;

    /// Calls `f` once everything before it is finished; never if the device is lost before. `f` must not call into this
    /// queue. Where commands run beside the host, so does it: whoever issues it does not wait for it.
    fn host_fn(&mut self, f: HostFn) -> Result<()>;

    /// Submits everything so far and returns the fence behind it: one more than the last if anything came since. Nothing else
    /// makes one but [`Queue::post`], so who has enqueued something knows the number of the fence that will be behind it.
    fn fence(&mut self) -> Result<Fence>;

    /// True when `fence` has been reached; never blocks.
    fn done(&mut self, fence: Fence) -> Result<bool>;

    /// What can be waited on for `fence` while others use the queue; none when it has been reached.
    ///
    /// # Errors
    /// [`crate::Error::Invalid`] for a fence that was never issued.
    fn completion(&mut self, fence: Fence) -> Result<Option<Arc<dyn Completion>>>;

    /// Blocks until `fence` has been reached.
    ///
    /// # Errors
    /// As [`Queue::completion`]; [`crate::Error::Lost`] when a command failed.
    fn wait(&mut self, fence: Fence) -> Result<()> {
        if let Some(c) = self.completion(fence)? {
            c.wait()?;
            self.done(fence)?;
        }
        Ok(())
    }

    /// Runs the launches one after the other, or in any order that gives the same bytes. `recorded` belongs to the list:
    /// devices with replayable command graphs keep one there and, when the same list comes again, replay it, or update
    /// it in place when only buffers, scalars or iteration spaces changed. Nothing is left in it elsewhere.
    ///
    /// # Errors
    /// As [`Queue::launch`].
    fn launch_list(&mut self, list: &[Listed<'_>], recorded: &mut Recorded) -> Result<Issued> {
        let _ = recorded;
        list.iter().try_for_each(|l| self.launch(l.kernel, &l.geometry, l.args))?;
        Ok(Issued::Singly)
    }
}

/// A fence that can be waited for without its queue.
pub trait Completion: Send + Sync {
    /// Blocks until the fence has been reached.
    ///
    /// # Errors
    /// [`crate::Error::Lost`] when a command failed.
    fn wait(&self) -> Result<()>;
}

/// One launch of a list ([`Queue::launch_list`]).
#[derive(Clone, Copy)]
pub struct Listed<'a> {
    /// The kernel.
    pub kernel: &'a Kernel,
    /// Its iteration space.
    pub geometry: Geometry,
    /// Its arguments; at most 64.
    pub args: &'a [Arg<'a>],
    /// Bit `i`: the kernel writes the buffer that is argument `i`. What is not marked is only read.
    pub writes: u64,
}

/// What a device remembers of a list of launches from one run to the next; empty at first.
#[derive(Default)]
pub struct Recorded(pub Option<Box<dyn std::any::Any + Send>>);

/// How a list of launches reached the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Issued {
    /// One by one: the device has no replayable graphs.
    Singly,
    /// A graph was built and launched.
    Built,
    /// A graph was updated in place and launched.
    Updated,
    /// A graph was launched as it was.
    Replayed,
}

/// A range of host memory, and whether the command writes there.
#[derive(Clone, Copy)]
pub(crate) struct HostRange {
    pub(crate) start: usize,
    pub(crate) bytes: usize,
    pub(crate) written: bool,
}

impl HostRange {
    pub(crate) fn conflicts(&self, other: &HostRange) -> bool {
        let overlap = self.start < other.start + other.bytes && other.start < self.start + self.bytes;
        overlap && (self.written || other.written)
    }
}

/// What must outlive the commands of a queue: released as fences are reached.
///
/// Backends push handles while they enqueue, seal them under a fence value, and drop them when that value is known to
/// have been reached.
#[derive(Default)]
pub struct KeepAlive {
    open: Vec<Held>,
    sealed: std::collections::VecDeque<(u64, Vec<Held>)>,
    spare: Vec<Vec<Held>>,
}

/// One handle that a command needs; the field exists for its drop alone.
#[allow(dead_code, reason = "held for its drop")]
enum Held {
    Buffer(Buffer),
    Kernel(Kernel),
    Other(Arc<dyn std::any::Any + Send + Sync>),
}

impl KeepAlive {
    /// Holds a buffer for the commands before the next fence.
    pub fn buffer(&mut self, b: &Buffer) {
        self.open.push(Held::Buffer(b.clone()));
    }

    /// Holds a kernel and the buffers among its arguments.
    pub fn launch(&mut self, k: &Kernel, args: &[Arg<'_>]) {
        self.open.push(Held::Kernel(k.clone()));
        for a in args {
            if let Arg::Buffer(b) = a {
                self.buffer(b);
            }
        }
    }

    /// Holds whatever a backend wants to keep for the commands before the next fence.
    pub fn other(&mut self, held: Arc<dyn std::any::Any + Send + Sync>) {
        self.open.push(Held::Other(held));
    }

    /// Everything held so far is needed until `fence`.
    pub fn seal(&mut self, fence: u64) {
        let next = self.spare.pop().unwrap_or_default();
        let full = std::mem::replace(&mut self.open, next);
        if full.is_empty() {
            self.spare.push(full);
        } else {
            self.sealed.push_back((fence, full));
        }
    }

    /// Drops what was needed until `fence`.
    pub fn reached(&mut self, fence: u64) {
        while self.sealed.front().is_some_and(|(f, _)| *f <= fence) {
            if let Some((_, mut held)) = self.sealed.pop_front() {
                held.clear();
                self.spare.push(held);
            }
        }
    }
}
