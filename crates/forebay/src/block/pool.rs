//! Pools: datablocks of one template that are used again, so that steady state allocates nothing.
//!
//! Every output port and every feed has a pool, or, where all is the processor's and blocks are large enough, all of one template
//! in a graph have one together (`run/share.rs`). A port's free blocks are in a lock-free stack. Its head carries a tag that
//! changes with every push and pop, so that a pop that was overtaken notices (no ABA); the tag has 16 bits, which a
//! pop would have to sleep through exactly, with the same block on top again. Those that many share are on shelves (shelves.rs).
//!
//! A block that comes back while a device still copies from its host view is lent: whoever had it next would wait for the
//! device before writing (views.rs, rule 4), and a program that pushes item after item could not be ahead of the device. Lent
//! blocks wait in line, a few of them, before one is handed out that is still read. They are no more than the channel's
//! capacity: with room for one, who fills the next waits for the device, and what he fills it with is fresh.
//!
//! Life: the owners (ports of a graph) together and every block hold one count each. [`Pool::close`] is called by each owner, after
//! its last acquire; the last one swaps the stack for a mark, in one step with taking what is in it, so a block that returns either is in
//! what was taken or sees the mark and is freed at once; the same holds for the line and the shelves, under their locks. After its
//! push a returning block does not touch the pool (but to let go of such a lock, which whoever closes it waits for). The last count
//! frees the pool.

use std::collections::VecDeque;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use forebay_hal::cpu::HostMemory;
use forebay_hal::{Buffer, Device};

use super::shelves::Shelves;
use super::{Datablock, Inner};
use crate::error::Result;
use crate::template::Template;

const ADDRESS_BITS: u32 = 48;
const ADDRESS: u64 = (1 << ADDRESS_BITS) - 1;
/// Stands in the place of the topmost block once the pool is closed.
const CLOSED: u64 = ADDRESS;
/// Lent blocks before the first of them is handed out whoever still reads it: as many as that many bytes hold, within limits.
/// One that is filled, one that waits and one that the device works on are the least that keeps both sides busy.
const LENT_BYTES: usize = 4 << 20;
const LENT: std::ops::RangeInclusive<usize> = 3..=16;
/// Bytes of blocks that are worth sharing: what takes less is soon done, and in the caches in any case.
pub(crate) const LEAST_SHARED: usize = 4096;

pub(crate) struct Pool {
    template: Template,
    head: AtomicU64,
    /// In the stack's place, where many share the pool.
    shelves: Option<Shelves>,
    /// Ports that have it.
    owners: AtomicUsize,
    lent: Mutex<Lent>,
    /// Most lent blocks, whatever their size: how far ahead the channels that they go to let anybody be.
    ahead: AtomicUsize,
    /// Length of the line, so that nobody asks the lock in vain.
    lent_len: AtomicUsize,
    /// Blocks that exist, free or not, plus one for the owners.
    count: AtomicUsize,
    /// The last block that came from a device was read on the host (views.rs, rule 5).
    pub(super) read_on_host: AtomicBool,
    /// A block that had left its device was wanted on one again.
    pub(super) used_on_device: AtomicBool,
    /// Device whose page-locked memory host views come from, if one wants that.
    pinned: Option<Arc<dyn Device>>,
}

/// Free blocks that devices may still copy from, in the order in which they came.
#[derive(Default)]
struct Lent {
    line: VecDeque<NonNull<Inner>>,
    closed: bool,
}

// SAFETY: blocks may be sent to other threads, and those in the line are the line's alone.
unsafe impl Send for Lent {}

impl Pool {
    pub(crate) fn template(&self) -> Template {
        self.template
    }

    pub(crate) fn bytes(&self) -> usize {
        self.template.bytes()
    }

    /// With one owner.
    pub(crate) fn new(template: Template, pinned: Option<Arc<dyn Device>>) -> NonNull<Pool> {
        Self::with_shelves(template, pinned, None)
    }

    /// One that many share, where there are so many workers; with one owner.
    pub(crate) fn shared(template: Template, pinned: Option<Arc<dyn Device>>, workers: usize) -> NonNull<Pool> {
        Self::with_shelves(template, pinned, Some(Shelves::new(workers)))
    }

    fn with_shelves(template: Template, pinned: Option<Arc<dyn Device>>, shelves: Option<Shelves>) -> NonNull<Pool> {
        NonNull::from(Box::leak(Box::new(Pool {
            template,
            head: AtomicU64::new(0),
            shelves,
            owners: AtomicUsize::new(1),
            lent: Mutex::default(),
            ahead: AtomicUsize::new(*LENT.end()),
            lent_len: AtomicUsize::new(0),
            count: AtomicUsize::new(1),
            read_on_host: AtomicBool::new(false),
            used_on_device: AtomicBool::new(false),
            pinned,
        })))
    }

    pub(super) fn alloc_host(&self, bytes: usize) -> Result<Buffer> {
        // Page-locked memory is for speed: without it, because it is used up or the device is lost, any will do.
        let pinned = self.pinned.as_ref().and_then(|d| d.alloc_host(bytes).ok());
        Ok(match pinned {
            Some(b) => b,
            None => HostMemory::buffer(bytes)?,
        })
    }

    /// A block with unspecified bytes, no marks and no metadata.
    #[inline]
    pub(crate) fn acquire(&self) -> Datablock {
        match self.take() {
            Some(p) => {
                // SAFETY: a block in the stack has no handle; popping makes us its only user.
                let i = unsafe { p.as_ref() };
                i.refs.store(1, Ordering::Relaxed);
                Datablock(p)
            }
            None => {
                self.count.fetch_add(1, Ordering::Relaxed);
                Datablock::fresh(self.template, self)
            }
        }
    }

    /// There is another owner.
    pub(crate) fn own(&self) {
        self.owners.fetch_add(1, Ordering::Relaxed);
    }

    /// Says what the largest capacity is of the channels that its blocks go to.
    pub(crate) fn set_ahead(&self, capacity: usize) {
        self.ahead.store(capacity.max(1), Ordering::Relaxed);
    }

    #[inline]
    fn take(&self) -> Option<NonNull<Inner>> {
        let free = match &self.shelves {
            None => self.pop(),
            Some(shelves) => shelves.take(),
        };
        match free {
            None if self.lent_len.load(Ordering::Relaxed) != 0 => self.take_lent(),
            other => other,
        }
    }

    /// The first in line if nobody reads it any more, or if the line is long enough.
    #[cold]
    fn take_lent(&self) -> Option<NonNull<Inner>> {
        let mut lent = self.lent();
        let most = (LENT_BYTES / self.bytes().max(1)).clamp(*LENT.start(), *LENT.end());
        let most = most.min(self.ahead.load(Ordering::Relaxed));
        let first = *lent.line.front()?;
        // SAFETY: a block in the line has no handle, and is taken out of it under the lock.
        if lent.line.len() < most && unsafe { first.as_ref() }.is_read_by_a_device() {
            return None;
        }
        lent.line.pop_front();
        self.lent_len.store(lent.line.len(), Ordering::Relaxed);
        Some(first)
    }

    /// False when the pool is closed; the block is then still the caller's.
    fn lend(&self, p: NonNull<Inner>) -> bool {
        let mut lent = self.lent();
        if !lent.closed {
            lent.line.push_back(p);
            self.lent_len.store(lent.line.len(), Ordering::Relaxed);
        }
        !lent.closed
    }

    /// Lock rank: before a block's views.
    fn lent(&self) -> MutexGuard<'_, Lent> {
        self.lent.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn pop(&self) -> Option<NonNull<Inner>> {
        let mut head = self.head.load(Ordering::Acquire);
        loop {
            let p = NonNull::new((head & ADDRESS) as *mut Inner).filter(|_| head & ADDRESS != CLOSED)?;
            // SAFETY: blocks are freed only after `close`, and nobody pops then; a stale `next` fails the exchange.
            let next = unsafe { p.as_ref() }.next.load(Ordering::Relaxed) as u64;
            let new = retag(head, next);
            match self.head.compare_exchange_weak(head, new, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => return Some(p),
                Err(now) => head = now,
            }
        }
    }

    /// False when the pool is closed; the block is then still the caller's.
    #[inline]
    fn put(&self, p: NonNull<Inner>) -> bool {
        match &self.shelves {
            None => self.push(p),
            Some(shelves) => shelves.put(p),
        }
    }

    fn push(&self, p: NonNull<Inner>) -> bool {
        let mut head = self.head.load(Ordering::Relaxed);
        loop {
            if head & ADDRESS == CLOSED {
                return false;
            }
            // SAFETY: the caller owns the block.
            unsafe { p.as_ref() }.next.store((head & ADDRESS) as *mut Inner, Ordering::Relaxed);
            let new = retag(head, p.as_ptr() as u64);
            match self.head.compare_exchange_weak(head, new, Ordering::AcqRel, Ordering::Relaxed) {
                Ok(_) => return true,
                Err(now) => head = now,
            }
        }
    }

    /// An owner gives it up; the last one gives up the owners' count.
    ///
    /// # Safety
    /// Called once by each owner, which does not acquire from the pool afterwards.
    pub(crate) unsafe fn close(pool: NonNull<Pool>) {
        // SAFETY: the owners' count keeps it alive until `release`.
        let p = unsafe { pool.as_ref() };
        if p.owners.fetch_sub(1, Ordering::AcqRel) != 1 {
            return;
        }
        let mut next = (p.head.swap(CLOSED, Ordering::AcqRel) & ADDRESS) as *mut Inner;
        let mut n = 0;
        while let Some(block) = NonNull::new(next) {
            // SAFETY: the swap took the whole list; its blocks have no handles.
            unsafe {
                next = block.as_ref().next.load(Ordering::Relaxed);
                drop(Box::from_raw(block.as_ptr()));
            }
            n += 1;
        }
        let line = {
            let mut lent = p.lent();
            lent.closed = true;
            std::mem::take(&mut lent.line)
        };
        let shelved = p.shelves.as_ref().map(Shelves::close).unwrap_or_default();
        for block in line.into_iter().chain(shelved) {
            // SAFETY: the line and the shelves were taken whole; their blocks have no handles.
            drop(unsafe { Box::from_raw(block.as_ptr()) });
            n += 1;
        }
        // SAFETY: the drained blocks' counts and the owners'.
        unsafe { release(pool, n + 1) };
    }
}

fn retag(old: u64, address: u64) -> u64 {
    (address & ADDRESS) | ((old >> ADDRESS_BITS).wrapping_add(1) << ADDRESS_BITS)
}

/// Gives up `n` counts.
///
/// # Safety
/// The caller has that many counts.
unsafe fn release(pool: NonNull<Pool>, n: usize) {
    // SAFETY: our counts keep it alive up to here.
    if unsafe { pool.as_ref() }.count.fetch_sub(n, Ordering::AcqRel) == n {
        // SAFETY: no count is left, so nobody else can reach it.
        drop(unsafe { Box::from_raw(pool.as_ptr()) });
    }
}

/// Takes back a block whose last handle is gone.
///
/// # Safety
/// No handle to the block exists.
pub(super) unsafe fn recycle(p: NonNull<Inner>) {
    // SAFETY: the caller's contract makes us the only user.
    let i = unsafe { p.as_ref() };
    let Some(pool) = NonNull::new(i.home.cast_mut()) else {
        // SAFETY: made by `Box::leak`, no handle left.
        drop(unsafe { Box::from_raw(p.as_ptr()) });
        return;
    };
    i.unmark();
    let lent = i.leave_devices();
    // SAFETY: the block's own count keeps the pool alive until the block is in the stack, on a shelf, in the line or freed.
    let home = unsafe { pool.as_ref() };
    if !(if lent { home.lend(p) } else { home.put(p) }) {
        // SAFETY: the pool is closed, so the block is ours: free it and give up its count.
        unsafe {
            drop(Box::from_raw(p.as_ptr()));
            release(pool, 1);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::block::Signals;
    use crate::run::device::{DEPTH_THROUGHPUT, DeviceHandle};
    use forebay_hal::sim::{Model, SimDevice};

    #[test]
    fn blocks_come_back_and_outlive_the_owner() {
        let pool = Pool::new(Template::scalar::<u64>(), None);
        // SAFETY: not closed yet.
        let p = unsafe { pool.as_ref() };
        let a = p.acquire();
        let address = a.0;
        a.set_meta(b"x").unwrap();
        drop(a.with_signals(Signals::END_STREAM));
        let b = p.acquire();
        assert_eq!(b.0, address);
        assert_eq!((b.signals(), b.meta()), (Signals::NONE, None));
        let c = p.acquire();
        // SAFETY: nothing is acquired after this.
        unsafe { Pool::close(pool) };
        drop((b, c));
    }

    /// What a device copies from is not waited for as long as there are few such blocks.
    #[test]
    fn who_fills_block_after_block_is_ahead_of_the_device() {
        let sim = SimDevice::new(Model::default());
        let d = DeviceHandle::new(1, Arc::new(sim.clone()), DEPTH_THROUGHPUT).unwrap();
        for (elements, capacity, most) in [(8usize, 100, 16), (8, 4, 4), (8, 1, 1), (1 << 20, 16, 4), (2 << 20, 16, 3)]
        {
            let pool = Pool::new(Template::array::<u8>([elements]), None);
            // SAFETY: not closed yet.
            let p = unsafe { pool.as_ref() };
            p.set_ahead(capacity);
            let mut addresses = Vec::new();
            for _ in 0..3 * most {
                let now = sim.now();
                let mut b = p.acquire();
                b.assign(&vec![1u8; elements]).unwrap();
                b.read_on(&d).unwrap();
                d.flush();
                // Nobody looks at the virtual clock but who waits.
                let waited = sim.now() != now;
                assert_eq!(waited, addresses.len() >= most, "at block {}", addresses.len());
                addresses.push(b.0);
            }
            let distinct: std::collections::HashSet<_> = addresses.iter().collect();
            assert_eq!(distinct.len(), most);
            // What the device has done with comes back first.
            d.finish().unwrap();
            let now = sim.now();
            p.acquire().assign(&vec![2u8; elements]).unwrap();
            assert_eq!(sim.now(), now);
            let kept = p.acquire();
            // SAFETY: nothing is acquired after this.
            unsafe { Pool::close(pool) };
            kept.read_on(&d).unwrap();
            drop(kept);
        }
        d.finish().unwrap();
        drop(d);
        assert_eq!(forebay_hal::Device::allocated(&sim), 0);
    }

    #[test]
    fn threads_share_a_pool_without_sharing_blocks() {
        let pool = Pool::new(Template::scalar::<u64>(), None);
        // SAFETY: closed after the scope.
        let p = unsafe { pool.as_ref() };
        std::thread::scope(|s| {
            for t in 0..4u64 {
                s.spawn(move || {
                    for i in 0..5000u64 {
                        let mut a = p.acquire();
                        a.assign(&[t << 32 | i]).unwrap();
                        let mut b = p.acquire();
                        b.assign(&[!i]).unwrap();
                        assert_eq!(a.as_slice::<u64>().unwrap(), [t << 32 | i]);
                    }
                });
            }
        });
        // SAFETY: all threads are done.
        unsafe { Pool::close(pool) };
    }
}
