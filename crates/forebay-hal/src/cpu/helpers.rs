//! Threads beside a pool's workers, for jobs that mostly wait: for a device, say. A worker that waits is a core that nobody
//! uses; these do the waiting, and whatever they make ready goes to the workers.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use super::pool::{Job, Pool, Worker};
use crate::fork::Home;

/// Some threads of a pool that do only what they are given. Dropping it ends them once they have done what they were given.
pub struct Helpers {
    jobs: Option<Sender<Job>>,
    state: Arc<State>,
    threads: Vec<JoinHandle<()>>,
    home: Home,
}

#[derive(Default)]
pub(super) struct State {
    /// Jobs given and not yet ended: of one that ends the last deed may be to give another one.
    given: AtomicUsize,
    /// Threads that block in their job until others have done something ([`super::blocks`]).
    pub(super) blocked: AtomicUsize,
}

impl Helpers {
    /// So many threads beside `pool`'s workers; fewer if no more can be started.
    pub fn new(pool: &Pool, name: &str, n: usize) -> Self {
        let (jobs, todo) = channel();
        let todo = Arc::new(Mutex::new(todo));
        let state = Arc::new(State::default());
        let start = |i: usize| {
            let (todo, shared, state) = (todo.clone(), pool.shared.clone(), state.clone());
            let main = move || work(&Worker::one_of(shared, i, state), &todo);
            std::thread::Builder::new().name(format!("{name}-{i}")).spawn(main).ok()
        };
        Helpers { threads: (0..n).map_while(start).collect(), jobs: Some(jobs), state, home: Home::here() }
    }

    /// Gives a job to one of the threads. Without any it comes back, and where one of them blocks and the others have a job each: it
    /// may be what that one waits for.
    ///
    /// # Safety
    /// As for [`Pool::submit`].
    pub unsafe fn submit(&self, job: Job) -> Result<(), Job> {
        match &self.jobs {
            Some(to) if !self.threads.is_empty() => {
                let given = self.state.given.fetch_add(1, Ordering::SeqCst);
                if given < self.threads.len() || self.state.blocked.load(Ordering::SeqCst) == 0 {
                    return to.send(job).map_err(|e| e.0);
                }
                self.state.given.fetch_sub(1, Ordering::SeqCst);
                Err(job)
            }
            _ => Err(job),
        }
    }
}

impl Drop for Helpers {
    fn drop(&mut self) {
        if !self.home.is_here() {
            // They are not there; what they were given the channel keeps.
            self.threads.drain(..).for_each(std::mem::forget);
            std::mem::forget(self.jobs.take());
            return;
        }
        self.jobs = None;
        let me = std::thread::current().id();
        // The last owner may go away inside a job; a thread cannot join itself.
        for t in self.threads.drain(..).filter(|t| t.thread().id() != me) {
            let _ = t.join();
        }
    }
}

fn work(worker: &Worker, todo: &Mutex<Receiver<Job>>) {
    worker.here(|| {
        loop {
            // Whoever has the lock waits for all.
            let next = todo.lock().unwrap_or_else(PoisonError::into_inner).recv();
            let Ok(job) = next else { return };
            // SAFETY: the submitter keeps `data` valid until this call.
            unsafe { (job.run)(job.data, worker) };
            if let Some(state) = &worker.helpers {
                state.given.fetch_sub(1, Ordering::SeqCst);
            }
            worker.hand_over();
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::{Turn, UNKNOWN_NS};
    use std::time::{Duration, Instant};

    struct Both {
        waits: AtomicUsize,
        done: AtomicUsize,
    }

    unsafe fn wait(data: *const (), w: &Worker) {
        // SAFETY: the test keeps it until both jobs have ended.
        let b = unsafe { &*data.cast::<Both>() };
        for cost_ns in [100, UNKNOWN_NS] {
            // SAFETY: as above.
            unsafe { w.submit(Job { run: count, data, cost_ns }) };
        }
        super::super::about_to_block();
        let begun = Instant::now();
        // What it made is done by workers while it waits.
        while b.done.load(Ordering::Acquire) < 2 && begun.elapsed() < Duration::from_secs(20) {
            std::thread::yield_now();
        }
        // SAFETY: as above.
        unsafe { w.submit_back(Job { run: count, data, cost_ns: 100 }) };
        b.waits.store(b.done.load(Ordering::Acquire), Ordering::Release);
    }

    unsafe fn count(data: *const (), w: &Worker) {
        assert!(w.index < 2, "on a worker, and not on a helper");
        // SAFETY: as above.
        unsafe { &*data.cast::<Both>() }.done.fetch_add(1, Ordering::Release);
    }

    #[test]
    fn what_a_helper_makes_is_done_by_workers_even_while_it_waits() {
        let pool = Pool::new(2);
        let helpers = Helpers::new(&pool, "test", 2);
        for _ in 0..100 {
            let b = Both { waits: AtomicUsize::new(0), done: AtomicUsize::new(0) };
            let data = std::ptr::from_ref(&b).cast();
            // SAFETY: `b` is there until the last of the jobs has ended.
            unsafe { helpers.submit(Job { run: wait, data, cost_ns: UNKNOWN_NS }) }.ok().unwrap();
            let begun = Instant::now();
            while b.done.load(Ordering::Acquire) < 3 {
                assert!(begun.elapsed() < Duration::from_secs(30), "a job was lost");
                std::thread::yield_now();
            }
            while b.waits.load(Ordering::Acquire) == 0 {
                std::thread::yield_now();
            }
            assert_eq!(b.waits.into_inner(), 2);
        }
    }

    unsafe fn passes_on(data: *const (), w: &Worker) {
        let job = Job { run: count, data, cost_ns: UNKNOWN_NS };
        // SAFETY: the test keeps it until that job has ended.
        unsafe { w.submit_in_turn(job, &Turn::default()) };
    }

    /// Such a job is in the queue for all at once: nothing is left to hand over, and somebody has to be woken all the same.
    #[test]
    fn what_a_helper_makes_in_somebodys_turn_is_done_though_all_workers_sleep() {
        let pool = Pool::new(2);
        let helpers = Helpers::new(&pool, "test", 1);
        for by_helper in [true, false] {
            let b = Both { waits: AtomicUsize::new(0), done: AtomicUsize::new(0) };
            let (data, begun) = (std::ptr::from_ref(&b).cast(), Instant::now());
            while pool.sleepers() < 2 {
                std::thread::yield_now();
            }
            match by_helper {
                // SAFETY: `b` is there until the last of the jobs has ended.
                true => unsafe { helpers.submit(Job { run: passes_on, data, cost_ns: 100 }) }.ok().unwrap(),
                // SAFETY: as above.
                false => pool.helping(|w| unsafe { passes_on(data, w) }),
            }
            while b.done.load(Ordering::Acquire) < 1 {
                assert!(begun.elapsed() < Duration::from_secs(20), "nobody was woken; by a helper: {by_helper}");
                std::thread::yield_now();
            }
        }
    }

    #[test]
    fn without_threads_a_job_comes_back_and_what_was_given_is_done_before_the_end() {
        let pool = Pool::new(2);
        let b = Both { waits: AtomicUsize::new(0), done: AtomicUsize::new(0) };
        let job = Job { run: wait, data: std::ptr::from_ref(&b).cast(), cost_ns: UNKNOWN_NS };
        // SAFETY: as above.
        assert!(unsafe { Helpers::new(&pool, "none", 0).submit(job) }.is_err());
        let helpers = Helpers::new(&pool, "test", 1);
        // SAFETY: as above.
        unsafe { helpers.submit(job) }.ok().unwrap();
        drop(helpers);
        assert_eq!(b.waits.load(Ordering::Acquire), 2);
        while b.done.load(Ordering::Acquire) < 3 {
            std::thread::yield_now();
        }
    }
}
