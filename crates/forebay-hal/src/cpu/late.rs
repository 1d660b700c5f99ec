//! What a worker puts off a little: telling somebody outside the pool, which takes a system call, and where all cores are at work takes
//! one of them from a worker. Who waits for room, or for a result, is told once then of several.
//!
//! Rules:
//! 1. A worker puts something off only while every worker is at work and there is one for each core: otherwise the woken has a core of its own, and
//!    the sooner it is woken the sooner it makes more work, or is done.
//!    In a long job it puts nothing off: that may be still to come.
//! 2. It is done after jobs that are estimated to take [`LATE_NS`] together, before a longer one, and as soon as the worker has no job; and
//!    before the worker blocks, begins a loop, or calls what may wait for somebody outside ([`Worker::now`]). So nobody waits for what
//!    waits for him.
//! 3. Who is no worker, but does a worker's work for once, puts nothing off.

use std::cell::Cell;

use super::pool::{Job, Worker};

/// Most things that are put off at a time.
const MOST: usize = 8;
/// For how long, in estimated ns of jobs: a futex wake-up takes the woken 5 to 45 µs (measured).
const LATE_NS: u32 = 20_000;

/// What has been put off.
#[derive(Default)]
pub(super) struct Late {
    all: [Cell<Option<Job>>; MOST],
    len: Cell<usize>,
    /// Of jobs since the first of them.
    passed_ns: Cell<u32>,
}

impl Worker {
    /// Does something short, now or soon.
    ///
    /// # Safety
    /// `job.data` stays valid for `job.run` until it has been called, by this thread.
    pub unsafe fn soon(&self, job: Job) {
        let n = self.late.len.get();
        if n == MOST || !self.may_put_off() {
            self.now();
            // SAFETY: the caller's.
            return unsafe { (job.run)(job.data, self) };
        }
        if n == 0 {
            self.late.passed_ns.set(0);
        }
        self.late.all[n].set(Some(job));
        self.late.len.set(n + 1);
    }

    /// Does what has been put off. Whatever runs on a worker and may wait for somebody outside the pool comes after this.
    #[inline]
    pub fn now(&self) {
        if self.late.len.get() != 0 {
            self.do_all();
        }
    }

    /// A job is next that takes so long.
    #[inline]
    pub(super) fn now_or_after(&self, cost_ns: u32) {
        if self.late.len.get() != 0 {
            let passed = self.late.passed_ns.get().saturating_add(cost_ns);
            self.late.passed_ns.set(passed);
            if passed > LATE_NS {
                self.do_all();
            }
        }
    }

    #[cold]
    fn do_all(&self) {
        self.late.len.set(0);
        // All of them first: what one does may put off something else.
        let all = self.late.all.each_ref().map(Cell::take);
        for job in all.into_iter().flatten() {
            // SAFETY: came in under the contract of `soon`.
            unsafe { (job.run)(job.data, self) };
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
    use std::sync::mpsc::{Sender, channel};
    use std::time::{Duration, Instant};

    use super::super::{Pool, about_to_block};
    use super::*;

    /// What a worker is to do: things to put off, then jobs that are estimated to take so long.
    struct Scene {
        put_off: usize,
        blocks: bool,
        jobs: Vec<u32>,
        said: Sender<&'static str>,
    }

    struct Said(Sender<&'static str>, &'static str);

    unsafe fn say(data: *const (), _: &Worker) {
        // SAFETY: made by `saying`, and called once.
        let said = unsafe { Box::from_raw(data.cast_mut().cast::<Said>()) };
        said.0.send(said.1).unwrap();
    }

    fn saying(to: &Sender<&'static str>, what: &'static str, cost_ns: u32) -> Job {
        Job { run: say, data: Box::into_raw(Box::new(Said(to.clone(), what))).cast(), cost_ns }
    }

    unsafe fn play(data: *const (), w: &Worker) {
        // SAFETY: made by `plays`, and called once.
        let scene = unsafe { Box::from_raw(data.cast_mut().cast::<Scene>()) };
        // SAFETY: `say` has what it needs, here and below.
        (0..scene.put_off).for_each(|_| unsafe { w.soon(saying(&scene.said, "told", 0)) });
        scene.said.send("begun").unwrap();
        if scene.blocks {
            about_to_block();
            scene.said.send("blocked").unwrap();
        }
        for ns in scene.jobs {
            let job = saying(&scene.said, if ns > LATE_NS { "long" } else { "short" }, ns);
            // SAFETY: as above.
            unsafe { w.submit_back(job) };
        }
    }

    fn plays(cost_ns: u32, scene: Scene) -> Job {
        Job { run: play, data: Box::into_raw(Box::new(scene)).cast(), cost_ns }
    }

    /// Keeps a worker at work.
    struct Busy {
        there: AtomicUsize,
        over: AtomicBool,
    }

    unsafe fn is_busy(data: *const (), _: &Worker) {
        // SAFETY: the test waits until nobody is.
        let busy = unsafe { &*data.cast::<Busy>() };
        busy.there.fetch_add(1, Ordering::SeqCst);
        while !busy.over.load(Ordering::SeqCst) {
            std::thread::yield_now();
        }
        busy.there.fetch_sub(1, Ordering::SeqCst);
    }

    /// In which order what happens, on a worker whose colleagues are all at work, or all asleep.
    fn order(colleagues_work: bool, put_off: usize, blocks: bool, jobs: &[u32]) -> Vec<&'static str> {
        order_in(100, colleagues_work, put_off, blocks, jobs)
    }

    /// In a job that is estimated to take so long.
    fn order_in(cost_ns: u32, colleagues_work: bool, put_off: usize, blocks: bool, jobs: &[u32]) -> Vec<&'static str> {
        let workers = std::thread::available_parallelism().map_or(1, |n| n.get()).max(2);
        let (pool, busy) = (Pool::new(workers), Busy { there: AtomicUsize::new(0), over: AtomicBool::new(false) });
        let until = |is: &dyn Fn() -> bool| {
            let begun = Instant::now();
            while !is() {
                assert!(begun.elapsed() < Duration::from_secs(20));
                std::thread::yield_now();
            }
        };
        until(&|| pool.sleepers() == workers);
        if colleagues_work {
            for _ in 1..workers {
                let data = std::ptr::from_ref(&busy).cast();
                // SAFETY: `busy` is there until nobody uses it any more.
                unsafe { pool.submit(Job { run: is_busy, data, cost_ns: super::super::UNKNOWN_NS }) };
            }
            until(&|| busy.there.load(Ordering::SeqCst) == workers - 1);
        }
        let (said, from) = channel();
        let scene = Scene { put_off, blocks, jobs: jobs.to_vec(), said };
        // SAFETY: the scene is the job's own.
        unsafe { pool.submit(plays(cost_ns, scene)) };
        let all = from.iter().collect();
        busy.over.store(true, Ordering::SeqCst);
        until(&|| busy.there.load(Ordering::SeqCst) == 0);
        all
    }

    #[test]
    fn what_is_put_off_is_done_after_a_little_work_or_before_more() {
        assert_eq!(order(true, 1, false, &[1000]), ["begun", "short", "told"], "no job is left");
        assert_eq!(order(true, 1, false, &[1000, 50_000]), ["begun", "short", "told", "long"]);
        let many = order(true, 1, false, &[1000; 30]);
        assert_eq!(many.iter().position(|s| *s == "told"), Some(1 + LATE_NS as usize / 1000), "{many:?}");
        assert_eq!(order(true, 1, true, &[]), ["begun", "told", "blocked"]);
        assert_eq!(order_in(LATE_NS, true, 1, false, &[1000]), ["told", "begun", "short"], "in a long job");
        let full = order(true, MOST + 1, false, &[1000]);
        assert_eq!(full.iter().position(|s| *s == "begun"), Some(MOST + 1), "{full:?}");
    }

    #[test]
    fn nothing_is_put_off_where_a_core_is_left_or_by_who_is_no_worker() {
        let alone = order(false, 2, false, &[]);
        assert_eq!(alone, ["told", "told", "begun"]);
        let (pool, (to, from)) = (Pool::new(2), channel());
        // SAFETY: `say` has what it needs.
        pool.helping(|w| unsafe { w.soon(saying(&to, "told", 0)) });
        assert_eq!(from.try_recv(), Ok("told"));
    }

    #[test]
    fn what_is_done_may_put_off_more() {
        struct Twice(Sender<&'static str>);
        unsafe fn twice(data: *const (), w: &Worker) {
            // SAFETY: made below, and called once.
            let Twice(said) = *unsafe { Box::from_raw(data.cast_mut().cast::<Twice>()) };
            // As the pool's own worker would, if it were one of a full pool.
            for _ in 0..2 {
                w.late.all[w.late.len.get()].set(Some(saying(&said, "more", 0)));
                w.late.len.set(w.late.len.get() + 1);
            }
        }
        let (pool, (to, from)) = (Pool::new(2), channel());
        pool.helping(|w| {
            for n in 0..3 {
                let job = match n {
                    0 => Job { run: twice, data: Box::into_raw(Box::new(Twice(to.clone()))).cast(), cost_ns: 0 },
                    _ => saying(&to, "told", 0),
                };
                w.late.all[n].set(Some(job));
                w.late.len.set(n + 1);
            }
            w.now();
            w.now();
        });
        drop(to);
        assert_eq!(from.try_iter().collect::<Vec<_>>(), ["told", "told", "more", "more"]);
    }
}
