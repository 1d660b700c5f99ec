//! Threads that work in the place of workers that sleep for what others of their pool have to do: a task's function may call
//! another task and wait for it, and be the only worker's.
//!
//! Rules:
//! 1. A worker that [`blocks`] gives up its place, and a spare takes it: one that rests, or a new one while there are fewer than
//!    [`MAX_SPARES`]. Without one the worker blocks all the same, and what it waits for is up to the other workers.
//! 2. One that goes on has its place back at once. There is one spare too many then: the first that notices, between two jobs,
//!    rests; one that sleeps is woken so that it notices.
//! 3. A spare takes one job at a time, and of what a job makes it does only what was made last: the rest it gives to all, since
//!    nobody steals from it, and it may rest next.

use std::marker::PhantomData;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use super::pool::{Shared, Worker, with_current};

/// Most spares of a pool: workers and spares that block at the same time, that is, one for the other. As many as sixteen tasks
/// have, all of whose lanes wait.
pub(super) const MAX_SPARES: usize = 256;

#[derive(Default)]
pub(super) struct Spares {
    /// Workers and spares that block.
    blocked: AtomicUsize,
    /// Spares that do not rest. Both are changed under the lock.
    active: AtomicUsize,
    rest: Mutex<Rest>,
    called: Condvar,
}

#[derive(Default)]
struct Rest {
    resting: usize,
    /// Of those, how many have been called and do not know yet.
    calls: usize,
    threads: Vec<JoinHandle<()>>,
}

/// A worker blocks as long as it keeps this.
#[must_use = "the worker has its place back when this is dropped"]
pub struct Blocked {
    was_at_work: bool,
    /// Dropped where it was made.
    here: PhantomData<*const ()>,
}

/// Called before a thread sleeps for what others of its pool have to do; none if it is no worker.
pub fn blocks() -> Option<Blocked> {
    super::about_to_block();
    with_current(|worker| {
        let was_at_work = worker.gives_up_its_place();
        if let Some(helpers) = &worker.helpers {
            helpers.blocked.fetch_add(1, Ordering::SeqCst);
        }
        worker.shared.spares.call(&worker.shared);
        Blocked { was_at_work, here: PhantomData }
    })
}

impl Drop for Blocked {
    fn drop(&mut self) {
        // The same one: a worker stays on its thread.
        with_current(|worker| {
            worker.shared.spares.let_go(&worker.shared);
            if let Some(helpers) = &worker.helpers {
                helpers.blocked.fetch_sub(1, Ordering::SeqCst);
            }
            if self.was_at_work {
                worker.begins();
            }
        });
    }
}

impl Spares {
    /// Rule 2.
    pub(super) fn is_one_too_many(&self) -> bool {
        self.active.load(Ordering::SeqCst) > self.blocked.load(Ordering::SeqCst)
    }

    fn lock(&self) -> MutexGuard<'_, Rest> {
        self.rest.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Rule 1.
    fn call(&self, shared: &Arc<Shared>) {
        let mut r = self.lock();
        let blocked = self.blocked.fetch_add(1, Ordering::SeqCst) + 1;
        if self.active.load(Ordering::SeqCst) >= blocked.min(MAX_SPARES) {
            return;
        }
        self.active.fetch_add(1, Ordering::SeqCst);
        if r.resting > r.calls {
            r.calls += 1;
            drop(r);
            return self.called.notify_one();
        }
        let (number, pool) = (r.threads.len(), shared.clone());
        let main = move || Worker::spare(pool, number).work();
        match std::thread::Builder::new().name(format!("forebay-spare-{number}")).spawn(main) {
            Ok(thread) => r.threads.push(thread),
            Err(_) => _ = self.active.fetch_sub(1, Ordering::SeqCst),
        }
    }

    fn let_go(&self, shared: &Shared) {
        let r = self.lock();
        self.blocked.fetch_sub(1, Ordering::SeqCst);
        let one_too_many = self.is_one_too_many();
        drop(r);
        if one_too_many {
            shared.sleep.wake_a_spare();
        }
    }

    /// Rests until it is called, if there is one too many; false when the pool stops.
    fn rest(&self, shared: &Shared) -> bool {
        let mut r = self.lock();
        if !self.is_one_too_many() {
            return true;
        }
        self.active.fetch_sub(1, Ordering::SeqCst);
        r.resting += 1;
        while r.calls == 0 {
            if shared.stopped() {
                return false;
            }
            r = self.called.wait(r).unwrap_or_else(PoisonError::into_inner);
        }
        r.calls -= 1;
        r.resting -= 1;
        true
    }

    /// All threads, when the pool has stopped.
    pub(super) fn end(&self) -> Vec<JoinHandle<()>> {
        let mut r = self.lock();
        self.called.notify_all();
        std::mem::take(&mut r.threads)
    }
}

impl Worker {
    /// The life of a spare.
    fn work(&self) {
        self.here(|| {
            self.shared.sleep.sit(self.index);
            let mut burst = 0;
            while !self.shared.stopped() {
                if self.shared.spares.is_one_too_many() {
                    self.hand_over();
                    self.gives_up_its_place();
                    if !self.shared.spares.rest(&self.shared) {
                        return;
                    }
                }
                let Some(job) = self.only_one(&mut burst).or_else(|| self.find()) else { continue };
                self.begins();
                // SAFETY: the submitter keeps `data` valid until this call.
                unsafe { (job.run)(job.data, self) };
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::{Job, Pool, UNKNOWN_NS};
    use std::time::{Duration, Instant};

    /// Jobs that each make the next one and block until it has ended, so many deep.
    struct Deep {
        left: AtomicUsize,
        ended: AtomicUsize,
        most: AtomicUsize,
    }

    fn wait_until(what: &str, is: impl Fn() -> bool) {
        // Hundreds wait.
        let (begun, mut nap) = (Instant::now(), Duration::from_micros(50));
        while !is() {
            assert!(begun.elapsed() < Duration::from_secs(30), "{what}");
            std::thread::sleep(nap);
            nap = (2 * nap).min(Duration::from_millis(2));
        }
    }

    unsafe fn deeper(data: *const (), w: &Worker) {
        // SAFETY: the test keeps it until the last of the jobs has ended.
        let d = unsafe { &*data.cast::<Deep>() };
        let depth = d.left.fetch_sub(1, Ordering::SeqCst);
        if depth > 1 {
            // SAFETY: as above.
            unsafe { w.submit(Job { run: deeper, data, cost_ns: 100 }) };
            let _blocked = blocks();
            wait_until("nobody did what was waited for", || d.ended.load(Ordering::SeqCst) == depth - 1);
            d.most.fetch_max(w.shared.spares.lock().threads.len(), Ordering::SeqCst);
        }
        d.ended.store(depth, Ordering::SeqCst);
    }

    /// Spares that there were for that.
    fn deep(pool: &Pool, depth: usize) -> usize {
        let (left, ended, most) = (AtomicUsize::new(depth), AtomicUsize::new(0), AtomicUsize::new(0));
        let d = Deep { left, ended, most };
        // SAFETY: `d` is there until the last of the jobs has ended.
        unsafe { pool.submit(Job { run: deeper, data: std::ptr::from_ref(&d).cast(), cost_ns: UNKNOWN_NS }) };
        wait_until("not done", || d.ended.load(Ordering::SeqCst) == depth);
        // No worker is in a job any more.
        wait_until("not at rest", || {
            let r = pool.shared.spares.lock();
            pool.shared.spares.blocked.load(Ordering::SeqCst) == 0
                && r.resting == r.threads.len()
                && pool.sleepers() == pool.workers()
        });
        d.most.into_inner()
    }

    #[test]
    fn one_worker_does_jobs_that_wait_for_each_other() {
        for workers in [1, 2, 3] {
            let pool = Pool::new(workers);
            for depth in [2, 3, 2, 32, 5] {
                deep(&pool, depth);
            }
            // As many as were ever needed at a time.
            assert!(deep(&pool, 2) < 32);
        }
    }

    #[test]
    fn there_are_no_more_spares_than_may_be() {
        let pool = Pool::new(1);
        assert_eq!(deep(&pool, MAX_SPARES + 1), MAX_SPARES);
    }

    #[test]
    fn a_thread_that_is_no_worker_has_no_place_to_give_up() {
        assert!(blocks().is_none());
    }
}
