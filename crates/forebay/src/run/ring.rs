//! The queue of a channel: one producer, one consumer, bounded.
//!
//! Rules: (1) only the producer's side writes `tail` and `head_seen`, only the consumer's `head`; which thread that is
//! changes, but one thread at a time owns a side and ownership passes with acquire/release ([`super::notify`], or a host
//! end's lock). (2) The producer stores the slot, then `tail` with release; the consumer loads `tail` with acquire, then
//! the slot. (3) Likewise `head` for the free slots. (4) Counters only grow; a slot is the counter modulo the storage.
//!
//! Layout: what the producer writes (`tail`, the slots of small rings, its copy of `head`, the mark that it takes) is one
//! cache line, what the consumer writes (`head`, the mark that it takes) another. In steady state a push touches one
//! line and a pop two, and the producer looks at the consumer's line only when its copy says that there is no room.

use super::notify::Waiting;
use crate::sync::{AtomicPtr, AtomicUsize, Ordering};

/// Slots that lie in the producer's own line.
const INLINE: usize = 4;

/// A bounded single-producer, single-consumer queue of pointers.
pub(crate) struct Ring<T> {
    producer: ProducerLine<T>,
    consumer: ConsumerLine,
    /// Slots of rings that need more than the line has; a power of two of them.
    more: Box<[AtomicPtr<T>]>,
    capacity: usize,
}

#[repr(align(64))]
struct ProducerLine<T> {
    tail: AtomicUsize,
    /// `head` as the producer saw it last.
    head_seen: AtomicUsize,
    slots: [AtomicPtr<T>; INLINE],
    /// The consumer waits for an entry.
    empty: Waiting,
}

#[repr(align(64))]
struct ConsumerLine {
    head: AtomicUsize,
    /// The producer waits for room.
    no_room: Waiting,
}

impl<T> Ring<T> {
    pub(crate) fn new(capacity: usize) -> Self {
        let slots = if capacity <= INLINE { 0 } else { capacity.next_power_of_two() };
        let null = || AtomicPtr::new(std::ptr::null_mut());
        Ring {
            producer: ProducerLine {
                tail: AtomicUsize::new(0),
                head_seen: AtomicUsize::new(0),
                slots: [null(), null(), null(), null()],
                empty: Waiting::new(),
            },
            consumer: ConsumerLine { head: AtomicUsize::new(0), no_room: Waiting::new() },
            more: (0..slots).map(|_| null()).collect(),
            capacity,
        }
    }

    pub(crate) fn capacity(&self) -> usize {
        self.capacity
    }

    /// Entries that were ever pushed.
    pub(crate) fn pushed(&self) -> usize {
        self.producer.tail.load(Ordering::Relaxed)
    }

    /// Taken by the producer's side after a push; true when the consumer waits.
    #[inline]
    pub(crate) fn take_empty(&self) -> bool {
        self.producer.empty.take()
    }

    /// Taken by the consumer's side after a pop; true when the producer waits.
    #[inline]
    pub(crate) fn take_no_room(&self) -> bool {
        self.consumer.no_room.take()
    }

    /// Consumer: sets its mark if there is no entry, and looks once more.
    #[inline]
    pub(crate) fn awaits_entry(&self) -> bool {
        if self.is_empty() {
            self.producer.empty.set();
        }
        self.is_empty()
    }

    /// Producer: sets its mark if there is no room, and looks once more.
    #[inline]
    pub(crate) fn awaits_room(&self) -> bool {
        if !self.has_room() {
            self.consumer.no_room.set();
        }
        !self.has_room()
    }

    #[inline]
    fn slot(&self, counter: usize) -> &AtomicPtr<T> {
        if self.capacity <= INLINE {
            &self.producer.slots[counter % INLINE]
        } else {
            &self.more[counter & (self.more.len() - 1)]
        }
    }

    /// Number of entries, as either side sees it.
    pub(crate) fn len(&self) -> usize {
        let tail = self.producer.tail.load(Ordering::Acquire);
        tail.wrapping_sub(self.consumer.head.load(Ordering::Acquire)).min(self.capacity)
    }

    /// Consumer: whether there is nothing.
    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.producer.tail.load(Ordering::Acquire) == self.consumer.head.load(Ordering::Relaxed)
    }

    /// Producer: whether there is room.
    #[inline]
    pub(crate) fn has_room(&self) -> bool {
        let p = &self.producer;
        let tail = p.tail.load(Ordering::Relaxed);
        if tail.wrapping_sub(p.head_seen.load(Ordering::Relaxed)) < self.capacity {
            return true;
        }
        let head = self.consumer.head.load(Ordering::Acquire);
        p.head_seen.store(head, Ordering::Relaxed);
        tail.wrapping_sub(head) < self.capacity
    }

    /// Producer: appends, or gives the pointer back when there is no room.
    #[inline(always)]
    pub(crate) fn push(&self, p: *mut T) -> Result<(), *mut T> {
        if !self.has_room() {
            return Err(p);
        }
        let tail = self.producer.tail.load(Ordering::Relaxed);
        self.slot(tail).store(p, Ordering::Relaxed);
        self.producer.tail.store(tail.wrapping_add(1), Ordering::Release);
        Ok(())
    }

    /// Consumer: the oldest, left where it is.
    pub(crate) fn peek(&self) -> Option<*mut T> {
        let head = self.consumer.head.load(Ordering::Relaxed);
        (self.producer.tail.load(Ordering::Acquire) != head).then(|| self.slot(head).load(Ordering::Relaxed))
    }

    /// Consumer: takes the oldest.
    #[inline]
    pub(crate) fn pop(&self) -> Option<*mut T> {
        let head = self.consumer.head.load(Ordering::Relaxed);
        if self.producer.tail.load(Ordering::Acquire) == head {
            return None;
        }
        let p = self.slot(head).load(Ordering::Relaxed);
        self.consumer.head.store(head.wrapping_add(1), Ordering::Release);
        Some(p)
    }
}
