//! The queue of a channel: one producer, one consumer, bounded.
//!
//! Rules: (1) only the producer's side writes `tail`, only the consumer's `head`; which thread that is changes, but one
//! thread at a time owns a side and ownership passes with acquire/release ([`super::notify`], or a host end's lock).
//! (2) The producer stores the slot, then `tail` with release; the consumer loads `tail` with acquire, then the slot.
//! (3) Likewise `head` for the free slots. (4) Counters only grow; a slot is the counter modulo the storage.

use crate::sync::{AtomicPtr, AtomicUsize, Ordering};

/// A bounded single-producer, single-consumer queue of pointers.
pub(crate) struct Ring<T> {
    slots: Box<[AtomicPtr<T>]>,
    capacity: usize,
    head: Padded,
    tail: Padded,
}

/// A counter on a cache line of its own, so that the two sides do not slow each other down.
#[repr(align(64))]
struct Padded(AtomicUsize);

impl<T> Ring<T> {
    pub(crate) fn new(capacity: usize) -> Self {
        let slots = capacity.max(1).next_power_of_two();
        Ring {
            slots: (0..slots).map(|_| AtomicPtr::new(std::ptr::null_mut())).collect(),
            capacity,
            head: Padded(AtomicUsize::new(0)),
            tail: Padded(AtomicUsize::new(0)),
        }
    }

    pub(crate) fn capacity(&self) -> usize {
        self.capacity
    }

    fn slot(&self, counter: usize) -> &AtomicPtr<T> {
        &self.slots[counter & (self.slots.len() - 1)]
    }

    /// Number of entries, as either side sees it.
    pub(crate) fn len(&self) -> usize {
        self.tail.0.load(Ordering::Acquire).wrapping_sub(self.head.0.load(Ordering::Acquire))
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Producer: whether there is room.
    pub(crate) fn has_room(&self) -> bool {
        self.tail.0.load(Ordering::Relaxed).wrapping_sub(self.head.0.load(Ordering::Acquire)) < self.capacity
    }

    /// Producer: appends, or gives the pointer back when there is no room.
    pub(crate) fn push(&self, p: *mut T) -> Result<(), *mut T> {
        if !self.has_room() {
            return Err(p);
        }
        let tail = self.tail.0.load(Ordering::Relaxed);
        self.slot(tail).store(p, Ordering::Relaxed);
        self.tail.0.store(tail.wrapping_add(1), Ordering::Release);
        Ok(())
    }

    /// Consumer: the oldest, left where it is.
    pub(crate) fn peek(&self) -> Option<*mut T> {
        let head = self.head.0.load(Ordering::Relaxed);
        (self.tail.0.load(Ordering::Acquire) != head).then(|| self.slot(head).load(Ordering::Relaxed))
    }

    /// Consumer: takes the oldest.
    pub(crate) fn pop(&self) -> Option<*mut T> {
        let head = self.head.0.load(Ordering::Relaxed);
        if self.tail.0.load(Ordering::Acquire) == head {
            return None;
        }
        let p = self.slot(head).load(Ordering::Relaxed);
        self.head.0.store(head.wrapping_add(1), Ordering::Release);
        Some(p)
    }
}
