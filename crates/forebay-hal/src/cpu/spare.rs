//! Threads that work in the place of workers that sleep for what others of their pool have to do: a task's function may call
//! another task and wait for it, and be the only worker's.
//!
//! Rules:
//! 1. A worker that [`blocks`] gives up its place, and a spare takes it: one that rests, or a new one while there are fewer than
//!    [`MAX_SPARES`]. Without one (the system may refuse a thread, too) the worker blocks all the same, and what it waits for is up
//!    to those that do not block; it is refused if there would be none, since all of them would stand still for ever.
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
    /// Threads that block: workers, spares, and those of [`super::Helpers`], which take no job from the pool.
    blocked: AtomicUsize,
    /// Spares that do not rest. Both are changed under the lock.
    active: AtomicUsize,
    rest: Mutex<Rest>,
    called: Condvar,
}

#[derive(Default)]
struct Rest {
    /// Of those that block, workers and spares: fewer than there are (rule 1).
    blocked: usize,
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

/// So many threads of a pool, which is all of them, would block for what only one of them could do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("all {0} threads of the pool would wait for each other")]
pub struct AllBlock(pub usize);

/// Called before a thread sleeps for what others of its pool have to do; none if it is no worker.
///
/// # Errors
/// [`AllBlock`] if nobody would be left to do it (rule 1).
pub fn blocks() -> Result<Option<Blocked>, AllBlock> {
    super::about_to_block();
    let blocked = with_current(|worker| {
        // From here on, as a spare may need one of the helpers at once; taken back if it is refused.
        let was_at_work = worker.gives_up_its_place();
        if let Some(helpers) = &worker.helpers {
            helpers.blocked.fetch_add(1, Ordering::SeqCst);
        }
        let called = worker.shared.spares.call(worker);
        if called.is_err() {
            worker.goes_on(was_at_work);
        }
        called.map(|()| Blocked { was_at_work, here: PhantomData })
    });
    blocked.transpose()
}

impl Drop for Blocked {
    fn drop(&mut self) {
        // The same one: a worker stays on its thread.
        with_current(|worker| {
            worker.shared.spares.let_go(worker);
            worker.goes_on(self.was_at_work);
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
    fn call(&self, worker: &Worker) -> Result<(), AllBlock> {
        let (shared, mut r) = (&worker.shared, self.lock());
        let blocked = self.blocked.fetch_add(1, Ordering::SeqCst) + 1;
        if self.active.load(Ordering::SeqCst) < blocked.min(MAX_SPARES) {
            if r.resting > r.calls {
                r.calls += 1;
                self.active.fetch_add(1, Ordering::SeqCst);
                self.called.notify_one();
            } else if let Some(thread) = Spares::another(shared, r.threads.len()) {
                r.threads.push(thread);
                self.active.fetch_add(1, Ordering::SeqCst);
            }
        }
        let all = shared.crew.load(Ordering::Relaxed) + self.active.load(Ordering::SeqCst);
        let blocked = r.blocked + usize::from(worker.is_of_the_crew());
        if blocked >= all {
            self.blocked.fetch_sub(1, Ordering::SeqCst);
            return Err(AllBlock(all));
        }
        r.blocked = blocked;
        Ok(())
    }

    fn another(shared: &Arc<Shared>, number: usize) -> Option<JoinHandle<()>> {
        let pool = shared.clone();
        let main = move || Worker::spare(pool, number).work();
        std::thread::Builder::new().name(format!("forebay-spare-{number}")).spawn(main).ok()
    }

    fn let_go(&self, worker: &Worker) {
        let mut r = self.lock();
        self.blocked.fetch_sub(1, Ordering::SeqCst);
        r.blocked -= usize::from(worker.is_of_the_crew());
        let one_too_many = self.is_one_too_many();
        drop(r);
        if one_too_many {
            worker.shared.sleep.wake_a_spare();
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
    /// A worker or a spare: who does what the pool is given.
    fn is_of_the_crew(&self) -> bool {
        !self.helper || self.spare
    }

    /// After [`blocks`], whether it has blocked or was refused.
    fn goes_on(&self, was_at_work: bool) {
        if let Some(helpers) = &self.helpers {
            helpers.blocked.fetch_sub(1, Ordering::SeqCst);
        }
        if was_at_work {
            self.begins();
        }
    }

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
        refused: AtomicUsize,
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
            let Ok(_blocked) = blocks() else {
                // Then nothing is waited for; the one that it made does its part.
                d.refused.fetch_add(1, Ordering::SeqCst);
                return;
            };
            wait_until("nobody did what was waited for", || d.ended.load(Ordering::SeqCst) == depth - 1);
            d.most.fetch_max(w.shared.spares.lock().threads.len(), Ordering::SeqCst);
        }
        d.ended.store(if depth == 1 { 1 + d.refused.load(Ordering::SeqCst) } else { depth }, Ordering::SeqCst);
    }

    /// Spares that there were for that, and jobs that were not to wait.
    fn deep(pool: &Pool, depth: usize) -> (usize, usize) {
        let [ended, most, refused] = std::array::from_fn(|_| AtomicUsize::new(0));
        let d = Deep { left: AtomicUsize::new(depth), ended, most, refused };
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
        (d.most.into_inner(), d.refused.into_inner())
    }

    #[test]
    fn one_worker_does_jobs_that_wait_for_each_other() {
        for workers in [1, 2, 3] {
            let pool = Pool::new(workers);
            for depth in [2, 3, 2, 32, 5] {
                assert_eq!(deep(&pool, depth).1, 0);
            }
            // As many as were ever needed at a time.
            assert!(deep(&pool, 2).0 < 32);
        }
    }

    #[test]
    fn there_are_no_more_spares_than_may_be_and_the_last_one_may_not_wait() {
        let pool = Pool::new(1);
        assert_eq!(deep(&pool, MAX_SPARES + 1), (MAX_SPARES, 0));
        assert_eq!(deep(&pool, MAX_SPARES + 2), (MAX_SPARES, 1));
        // All is as it was.
        assert_eq!(deep(&pool, MAX_SPARES + 1), (MAX_SPARES, 0));
    }

    #[test]
    fn a_thread_that_is_no_worker_has_no_place_to_give_up() {
        assert!(blocks().unwrap().is_none());
    }
}
