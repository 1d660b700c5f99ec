//! Free blocks of a pool that many tasks share: a shelf for each worker, and one for everybody else.
//!
//! A block goes to the shelf of the thread that is done with it, on top, and that thread's next block is the one from the top: it
//! is in the caches of that core. A chain of tasks then lives in a few blocks, where each task with blocks of its own goes
//! through memory as large as the whole graph. Who finds its shelf empty takes the top of another one, from where it found one the last
//! time.
//!
//! A shelf has a lock, which is nobody else's but for such visits: without one, several that take from one stack at the same time would
//! need more than an address and a few bits to notice that they have been overtaken. Tasks that share a pool have blocks of
//! [`super::pool::LEAST_SHARED`] bytes or more, beside which a lock is little. A process that was forked may find it held for
//! ever, and leaves its blocks where they are.

use std::ptr::NonNull;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use forebay_hal::cpu::worker_index;
use forebay_hal::fork::Home;

use super::Inner;

pub(super) struct Shelves {
    all: Box<[Shelf]>,
    home: Home,
}

/// On cache lines of its own, and of the pair that is fetched together.
#[repr(align(128))]
#[derive(Default)]
struct Shelf {
    blocks: Mutex<Blocks>,
    /// How many there are, so that nobody asks the lock in vain.
    len: AtomicUsize,
    /// Where whoever has this one found a block when this was empty.
    found: AtomicUsize,
}

#[derive(Default)]
struct Blocks {
    free: Vec<NonNull<Inner>>,
    closed: bool,
}

// SAFETY: blocks may be sent to other threads, and those on a shelf are the shelf's alone.
unsafe impl Send for Blocks {}

impl Shelf {
    fn take(&self) -> Option<NonNull<Inner>> {
        if self.len.load(Ordering::Relaxed) == 0 {
            return None;
        }
        let mut blocks = self.blocks.lock().unwrap_or_else(PoisonError::into_inner);
        let taken = blocks.free.pop();
        self.len.store(blocks.free.len(), Ordering::Relaxed);
        taken
    }
}

impl Shelves {
    pub(super) fn new(workers: usize) -> Self {
        Shelves { all: (0..=workers).map(|_| Shelf::default()).collect(), home: Home::here() }
    }

    /// This thread's.
    #[inline]
    fn own(&self) -> usize {
        let last = self.all.len() - 1;
        worker_index().map_or(last, |i| i.min(last))
    }

    /// A block, the one that was in use last if possible.
    pub(super) fn take(&self) -> Option<NonNull<Inner>> {
        let own = self.own();
        let shelf = &self.all[own];
        shelf.take().or_else(|| self.take_elsewhere(shelf))
    }

    fn take_elsewhere(&self, shelf: &Shelf) -> Option<NonNull<Inner>> {
        let first = shelf.found.load(Ordering::Relaxed);
        let mut others = (first..self.all.len()).chain(0..first);
        let (at, block) = others.find_map(|at| Some((at, self.all[at].take()?)))?;
        shelf.found.store(at, Ordering::Relaxed);
        Some(block)
    }

    /// False when they are closed; the block is then still the caller's.
    pub(super) fn put(&self, block: NonNull<Inner>) -> bool {
        if !self.home.is_here() {
            return true;
        }
        let shelf = &self.all[self.own()];
        let mut blocks = shelf.blocks.lock().unwrap_or_else(PoisonError::into_inner);
        if !blocks.closed {
            blocks.free.push(block);
            shelf.len.store(blocks.free.len(), Ordering::Relaxed);
        }
        !blocks.closed
    }

    /// All that there are; from now on nothing is taken back.
    pub(super) fn close(&self) -> Vec<NonNull<Inner>> {
        let mut all = Vec::new();
        for shelf in &self.all {
            let mut blocks = shelf.blocks.lock().unwrap_or_else(PoisonError::into_inner);
            blocks.closed = true;
            all.append(&mut blocks.free);
            shelf.len.store(0, Ordering::Relaxed);
        }
        all
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use forebay_hal::cpu::Pool as Workers;

    use super::*;
    use crate::block::{Datablock, Pool};
    use crate::template::Template;

    fn blocks(n: usize) -> Vec<NonNull<Inner>> {
        (0..n)
            .map(|_| NonNull::new(Datablock::zeroed(Template::scalar::<u64>()).unwrap().into_raw()).unwrap())
            .collect()
    }

    fn end(blocks: Vec<NonNull<Inner>>) {
        // SAFETY: handles that were given up by `blocks`, each once.
        blocks.into_iter().for_each(|b| drop(unsafe { Datablock::from_raw(b.as_ptr()) }));
    }

    #[test]
    fn a_thread_has_what_it_was_done_with_last_and_then_what_others_have() {
        let workers = Workers::new(2);
        let (shelves, all) = (Shelves::new(2), blocks(3));
        all.iter().for_each(|b| assert!(shelves.put(*b)));
        assert_eq!([shelves.take(), shelves.take()], [Some(all[2]), Some(all[1])]);
        // A worker has nothing yet.
        let (from, to) = std::sync::mpsc::channel();
        struct Visit<'a>(&'a Shelves, std::sync::mpsc::Sender<Option<usize>>);
        unsafe fn visit(data: *const (), _: &forebay_hal::cpu::Worker) {
            // SAFETY: the test waits for the answer before it lets go of it.
            let Visit(shelves, answer) = unsafe { &*data.cast::<Visit<'_>>() };
            let taken = shelves.take();
            taken.map(|b| shelves.put(b));
            answer.send(taken.map(|b| b.as_ptr().addr())).unwrap();
        }
        let visitor = Visit(&shelves, from);
        let visit = || {
            let data = std::ptr::from_ref(&visitor).cast();
            // SAFETY: `visitor` outlives the wait for the answer.
            unsafe { workers.submit(forebay_hal::cpu::Job { run: visit, data, cost_ns: 0 }) };
            to.recv().unwrap()
        };
        let first = Some(all[0].as_ptr().addr());
        assert_eq!(visit(), first);
        // It put it on its own shelf, from which this thread takes it.
        assert_eq!(shelves.all[2].len.load(Ordering::Relaxed), 0);
        assert_eq!(shelves.take().map(|b| b.as_ptr().addr()), first);
        assert_eq!((visit(), shelves.take()), (None, None));
        end(all);
    }

    #[test]
    fn what_comes_back_after_the_end_is_not_taken() {
        let (shelves, all) = (Shelves::new(1), blocks(2));
        assert!(shelves.put(all[0]));
        assert_eq!(shelves.close(), [all[0]]);
        assert!(!shelves.put(all[1]) && shelves.take().is_none());
        end(all);
    }

    #[test]
    fn threads_share_a_pool_of_several_owners_without_sharing_blocks() {
        let pool = Pool::shared(Template::scalar::<u64>(), None, 2);
        // SAFETY: not closed yet; closed by both owners below.
        let p = unsafe { pool.as_ref() };
        p.own();
        // SAFETY: one of two owners, which acquires nothing any more.
        unsafe { Pool::close(pool) };
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
        let (one, two) = (p.acquire(), p.acquire());
        drop(one);
        // SAFETY: the other owner; all threads are done.
        unsafe { Pool::close(pool) };
        assert_eq!(two.records(), 1);
    }
}
