//! Pools: datablocks of one template that are used again, so that steady state allocates nothing.
//!
//! Every output port and every feed has a pool. Free blocks are in a lock-free stack. Its head carries a tag that
//! changes with every push and pop, so that a pop that was overtaken notices (no ABA); the tag has 16 bits, which a
//! pop would have to sleep through exactly, with the same block on top again.
//!
//! Life: the owner (graph) and every block hold one count each. [`Pool::close`] is called by the owner, after the last
//! acquire; it swaps the stack for a mark, in one step with taking what is in it, so a block that returns either is in
//! what was taken or sees the mark and is freed at once. After its push a returning block does not touch the pool. The
//! last count frees the pool.

use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, PoisonError};

use forebay_hal::cpu::HostMemory;
use forebay_hal::{Buffer, Device};

use super::{Datablock, Inner, Signals};
use crate::error::Result;
use crate::template::Template;

const ADDRESS_BITS: u32 = 48;
const ADDRESS: u64 = (1 << ADDRESS_BITS) - 1;
/// Stands in the place of the topmost block once the pool is closed.
const CLOSED: u64 = ADDRESS;

pub(crate) struct Pool {
    template: Template,
    head: AtomicU64,
    /// Blocks that exist, free or not, plus one for the owner.
    count: AtomicUsize,
    /// The last block that came from a device was read on the host (views.rs, rule 5).
    pub(super) read_on_host: AtomicBool,
    /// A block that had left its device was wanted on one again.
    pub(super) used_on_device: AtomicBool,
    /// Device whose page-locked memory host views come from, if one wants that.
    pinned: Option<Arc<dyn Device>>,
}

impl Pool {
    pub(crate) fn bytes(&self) -> usize {
        self.template.bytes()
    }

    pub(crate) fn new(template: Template, pinned: Option<Arc<dyn Device>>) -> NonNull<Pool> {
        NonNull::from(Box::leak(Box::new(Pool {
            template,
            head: AtomicU64::new(0),
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
        match self.pop() {
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

    /// Gives up the owner's count.
    ///
    /// # Safety
    /// Called once, by the owner, after which nobody acquires from the pool.
    pub(crate) unsafe fn close(pool: NonNull<Pool>) {
        // SAFETY: the owner's count keeps it alive until `release`.
        let p = unsafe { pool.as_ref() };
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
        // SAFETY: the drained blocks' counts and the owner's.
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
    if i.signals.load(Ordering::Relaxed) != 0 {
        i.signals.store(Signals::NONE.0, Ordering::Relaxed);
    }
    i.records.store(i.template.elements(), Ordering::Relaxed);
    if i.has_meta.load(Ordering::Relaxed) {
        i.has_meta.store(false, Ordering::Relaxed);
        *i.meta.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }
    i.leave_devices();
    // SAFETY: the block's own count keeps the pool alive until the block is in the stack or freed.
    if !unsafe { pool.as_ref() }.push(p) {
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
