//! The one pool of worker threads that runs everything on the CPU.
//!
//! A job is a function, a pointer and an estimate; the pool neither owns nor frees what the pointer means. Each worker has
//! a slot for the job that it made last (run next, its data is hot), a bounded queue of its own from which others steal,
//! and there is a queue for all, in which every source of jobs has its turn ([`super::fair`]): for jobs from elsewhere, for
//! those that are so long that it does not matter where they wait, and for those that a worker's queue has no room for.
//! [`Pool::parallel_for`] splits a loop: the caller works too, and idle workers join.
//!
//! Workers with nothing to do sleep ([`super::sleep`]), and an idle pool uses no CPU. A worker that queues jobs for itself
//! wakes a sleeper only when the jobs, by their estimates, outweigh a wake-up; before it runs a long job, or blocks
//! ([`about_to_block`]), it makes up for that, and for what it has put off ([`super::late`]). Who submits a short job from
//! elsewhere while a worker is at short jobs looks whether that one takes it, for as long as a wake-up costs, and wakes a
//! sleeper then: an estimate may be wrong, and a short job block for once.

use std::cell::{Cell, UnsafeCell};
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicUsize, Ordering, fence};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use super::fair::{Fair, Turn};
use super::late::Late;
use super::parfor::{Loop, Loops};
use super::sleep::{Look, Sleep};
use super::spare::{MAX_SPARES, Spares};
use crate::fork::Home;

/// Jobs in a worker's own queue before they overflow into the shared one.
const LOCAL_QUEUE: usize = 256;
/// The same of one that does not keep them.
const HELPERS_QUEUE: usize = 16;
/// Jobs taken from the made-last slot in a row before the queues get a turn, so that a chain that feeds itself cannot
/// starve the others.
const SLOT_BURST: u32 = 16;
/// Jobs after which the shared queue comes before a worker's own, so that jobs which make each other cannot starve what came
/// from elsewhere.
const TURN: u32 = 32;
/// What a long job counts as in both.
const LONG_JOBS: u32 = 8;
/// Queued work, in estimated ns, that is worth waking a sleeper for: a futex wake-up costs the waker 2 to 5 µs and the
/// woken 5 to 45 (measured), so below this the worker is done sooner alone.
const WAKE_NS: u32 = 10_000;
/// Looks at a job that was submitted before a sleeper is woken for it: about 3 µs.
const PATIENCE: u32 = 200;
/// Most workers in a pool.
pub(super) const MAX_WORKERS: usize = 256;

/// Estimate of a job that nothing is known about: long.
pub const UNKNOWN_NS: u32 = u32::MAX;

/// A piece of work: `run(data, worker)` is called exactly once, on some worker.
#[derive(Clone, Copy)]
pub struct Job {
    /// What to call.
    pub run: unsafe fn(*const (), &Worker),
    /// Its argument. Whoever submits the job keeps it valid until `run` has been called.
    pub data: *const (),
    /// How long it takes, roughly, ns; [`UNKNOWN_NS`] if unknown. Decides only whether a sleeper is woken for it.
    pub cost_ns: u32,
}

// SAFETY: a job is only a pair of addresses; that `data` may be used from another thread is the submitter's contract.
unsafe impl Send for Job {}

pub(super) struct Shared {
    overflow: Mutex<Fair>,
    /// Length of `overflow`, readable without its lock.
    overflow_len: AtomicUsize,
    stealers: Vec<st3::fifo::Stealer<Job>>,
    pub(super) loops: Loops,
    pub(super) sleep: Sleep,
    pub(super) spares: Spares,
    /// Workers that could be started.
    pub(super) crew: AtomicUsize,
    /// Workers that run a long job, or block in one.
    long: AtomicUsize,
    /// Workers that have had a job since they last slept.
    at_work: AtomicUsize,
    /// There are as many workers as cores, or more.
    has_all_cores: bool,
    stop: AtomicBool,
    idle_hooks: Mutex<Vec<IdleHook>>,
    sleep_hooks: Mutex<Vec<IdleHook>>,
}

/// What a worker calls when it has run out of work, with the number of others that are at work: false when it is not needed
/// any more.
pub type IdleHook = Box<dyn Fn(usize) -> bool + Send>;

/// A pool of worker threads. Dropping it stops and joins them; jobs not yet begun are then abandoned.
pub struct Pool {
    pub(super) shared: Arc<Shared>,
    handles: Vec<JoinHandle<()>>,
    home: Home,
}

/// The worker that runs a job: where a job submits further jobs without any lock.
pub struct Worker {
    /// 0-based number in the pool; helpers and spares come behind the workers.
    pub index: usize,
    /// Nobody steals from its queue. It does only what it is given, or works for one that blocks (`spare`).
    pub(super) helper: bool,
    pub(super) spare: bool,
    /// It is one of these.
    pub(super) helpers: Option<Arc<super::helpers::State>>,
    slot: Cell<Option<Job>>,
    queue: UnsafeCell<st3::fifo::Worker<Job>>,
    /// Estimated ns of jobs queued since sleepers were last looked at.
    unsignalled: Cell<u32>,
    pub(super) late: Late,
    /// Whether it is counted in `Shared::long`.
    long: Cell<bool>,
    /// The same of `Shared::at_work`.
    at_work: Cell<bool>,
    pub(super) shared: Arc<Shared>,
}

/// Jobs that a worker has had.
#[derive(Default)]
struct Turns {
    /// Made last by the one before, in a row.
    burst: u32,
    /// Since the shared queue had its turn.
    jobs: u32,
    /// What the latest counts as.
    latest: u32,
}

thread_local! {
    /// The worker that this thread is, if it is one.
    static CURRENT: Cell<*const Worker> = const { Cell::new(std::ptr::null()) };
}

/// Calls `f` with the worker that this thread is, if it is one.
pub(super) fn with_current<R>(f: impl FnOnce(&Worker) -> R) -> Option<R> {
    // SAFETY: set by the worker's own thread, which is this one, and cleared there before the worker goes: it stays for `f`.
    unsafe { CURRENT.get().as_ref() }.map(f)
}

/// Called before a thread sleeps for somebody else's work: if it is a worker, others get what it has queued. For work that
/// workers of its own pool have to do there is [`super::blocks`].
pub fn about_to_block() {
    with_current(Worker::yield_slot);
}

/// The number of the worker that this thread is, if it is one of some pool.
#[inline]
pub fn worker_index() -> Option<usize> {
    with_current(|w| w.index)
}

/// Whether this thread is a worker of some pool: what waits for workers must not run on one.
pub fn on_worker() -> bool {
    !CURRENT.get().is_null()
}

impl Pool {
    /// A pool of `workers` threads (at least 1, at most 256).
    pub fn new(workers: usize) -> Arc<Pool> {
        let (workers, home) = (workers.clamp(1, MAX_WORKERS), Home::here());
        let queues: Vec<_> = (0..workers).map(|_| st3::fifo::Worker::new(LOCAL_QUEUE)).collect();
        let shared = Arc::new(Shared {
            overflow: Mutex::new(Fair::new(LOCAL_QUEUE)),
            overflow_len: AtomicUsize::new(0),
            stealers: queues.iter().map(st3::fifo::Worker::stealer).collect(),
            loops: Loops::default(),
            sleep: Sleep::new(workers, MAX_SPARES),
            spares: Spares::default(),
            crew: AtomicUsize::new(0),
            long: AtomicUsize::new(0),
            at_work: AtomicUsize::new(0),
            has_all_cores: workers >= cores(),
            stop: AtomicBool::new(false),
            idle_hooks: Mutex::default(),
            sleep_hooks: Mutex::default(),
        });
        let mut handles = Vec::with_capacity(workers);
        for (index, queue) in queues.into_iter().enumerate() {
            let shared = shared.clone();
            let spawned = std::thread::Builder::new().name(format!("forebay-{index}")).spawn(move || {
                shared.sleep.sit(index);
                let worker = Worker::new(index, queue, shared);
                worker.here(|| worker.main());
            });
            match spawned {
                Ok(handle) => handles.push(handle),
                // With fewer threads than asked for the pool is slower, not wrong, as long as there is one.
                Err(e) if !handles.is_empty() => {
                    eprintln!("forebay: only {} of {workers} workers started: {e}", handles.len());
                    break;
                }
                Err(e) => {
                    eprintln!("forebay: no worker thread could be started ({e}); nothing will run");
                }
            }
        }
        shared.crew.store(handles.len(), Ordering::Relaxed);
        Arc::new(Pool { shared, handles, home })
    }

    /// The process's pool: one worker per CPU that this process may use. A process that was forked has another one.
    pub fn global() -> &'static Arc<Pool> {
        // No lock: whoever was about to make it when the process was forked would keep it for ever.
        static GLOBAL: AtomicPtr<Arc<Pool>> = AtomicPtr::new(std::ptr::null_mut());
        loop {
            let held = GLOBAL.load(Ordering::Acquire);
            // SAFETY: null, or what was made below and is never freed.
            if let Some(pool) = unsafe { held.as_ref() }.filter(|p| p.home.is_here()) {
                return pool;
            }
            let made = Box::new(Pool::new(cores()));
            let made = Box::into_raw(made);
            if GLOBAL.compare_exchange(held, made, Ordering::AcqRel, Ordering::Relaxed).is_err() {
                // SAFETY: somebody else was first, and nobody has this one.
                drop(unsafe { Box::from_raw(made) });
            }
        }
    }

    /// Calls `hook` whenever a worker has run out of work, before it looks for other workers' and sleeps. It should
    /// be short: the worker takes no job meanwhile. It is dropped when it returns false.
    pub fn on_idle(&self, hook: IdleHook) {
        self.shared.idle_hooks.lock().unwrap_or_else(PoisonError::into_inner).push(hook);
    }

    /// Calls `hook` whenever a worker that has been at work goes to sleep. It is dropped when it returns false.
    pub fn on_sleep(&self, hook: IdleHook) {
        self.shared.sleep_hooks.lock().unwrap_or_else(PoisonError::into_inner).push(hook);
    }

    /// Whether any worker thread could be started, and is in this process; without one no job ever runs.
    pub fn is_alive(&self) -> bool {
        !self.handles.is_empty() && self.home.is_here()
    }

    /// Number of workers.
    pub fn workers(&self) -> usize {
        self.handles.len().max(1)
    }

    /// Workers that have had something to do since they last slept: who was woken in vain is none of them.
    pub fn at_work(&self) -> usize {
        self.shared.at_work.load(Ordering::Relaxed)
    }

    /// Workers that sleep because there is nothing to do, at this moment.
    pub fn sleepers(&self) -> usize {
        self.shared.sleep.sleepers()
    }

    /// Whether every worker has something to do, or looks for it, and they have all cores: who else works takes one from them.
    pub fn is_full(&self) -> bool {
        self.shared.is_full()
    }

    /// Submits a job from any thread.
    ///
    /// # Safety
    /// `job.data` stays valid for `job.run` until it has been called, and may be used on another thread. If the pool is
    /// dropped first the job may never be called.
    pub unsafe fn submit(&self, job: Job) {
        self.push(job, None);
    }

    /// Submits a job from any thread, as one of a source's.
    ///
    /// # Safety
    /// As for [`Pool::submit`].
    pub unsafe fn submit_in_turn(&self, job: Job, turn: &Turn) {
        self.push(job, Some(turn));
    }

    fn push(&self, job: Job, turn: Option<&Turn>) {
        self.shared.push_overflow(job, turn);
        fence(Ordering::SeqCst);
        let s = &*self.shared;
        let asleep = s.sleep.sleepers();
        if asleep == 0 {
            return;
        }
        let at_short_ones = s.stealers.len().saturating_sub(asleep) > s.long.load(Ordering::Relaxed);
        if at_short_ones && job.cost_ns <= WAKE_NS {
            for _ in 0..PATIENCE {
                if s.overflow_len.load(Ordering::Relaxed) == 0 {
                    return;
                }
                std::hint::spin_loop();
            }
        }
        s.sleep.signal();
    }

    /// Calls `f` on this thread with a worker to submit jobs to: this one, if it is one of the pool's; otherwise the workers
    /// have them when `f` has returned.
    pub fn helping(&self, f: impl FnOnce(&Worker)) {
        thread_local! {
            /// What this thread was to the pool that it helped last. Its jobs have gone to the workers.
            static HELPER: Cell<Option<Box<Worker>>> = const { Cell::new(None) };
        }
        // SAFETY: set by the worker's own thread, and cleared there before the worker goes.
        if let Some(w) = unsafe { CURRENT.get().as_ref() }.filter(|w| Arc::ptr_eq(&w.shared, &self.shared)) {
            f(w);
            // What this worker does besides may take long.
            return w.offer();
        }
        // While it is taken, whoever calls this from inside `f` makes another; so does a thread that ends.
        let w = HELPER.try_with(Cell::take).ok().flatten().filter(|w| Arc::ptr_eq(&w.shared, &self.shared));
        let w = w.unwrap_or_else(|| Box::new(Worker::helper(self.shared.clone(), 0)));
        f(&w);
        w.hand_over();
        let _ = HELPER.try_with(|h| h.set(Some(w)));
    }

    /// Calls `f(first, last)` over disjoint ranges that cover `0..n`, each at most `grain` long (at least 1), on this
    /// thread and on idle workers; returns when all are done. Ranges may run at the same time. Safe from inside a job.
    ///
    /// # Panics
    /// Passes on a panic of `f`, after all other ranges have ended.
    pub fn parallel_for(&self, n: usize, grain: usize, f: &(dyn Fn(usize, usize) + Sync)) {
        self.shared.parallel_for(n, grain, f);
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        if !self.home.is_here() {
            // Neither to be joined nor to be let go of: they are not there.
            self.handles.drain(..).for_each(std::mem::forget);
            std::mem::forget(self.shared.clone());
            return;
        }
        self.shared.stop.store(true, Ordering::SeqCst);
        self.shared.sleep.wake_all();
        let me = std::thread::current().id();
        for h in self.handles.drain(..).chain(self.shared.spares.end()) {
            // The last handle may go away inside a job; a thread cannot join itself.
            if h.thread().id() != me {
                let _ = h.join();
            }
        }
    }
}

/// How many this process may use.
fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, |n| n.get())
}

impl Shared {
    fn is_full(&self) -> bool {
        self.has_all_cores && self.sleep.sleepers() == 0
    }

    pub(super) fn stopped(&self) -> bool {
        self.stop.load(Ordering::SeqCst)
    }

    fn push_overflow(&self, job: Job, turn: Option<&Turn>) {
        let mut q = self.overflow.lock().unwrap_or_else(PoisonError::into_inner);
        q.push(job, turn);
        self.overflow_len.store(q.len(), Ordering::Relaxed);
    }

    fn pop_overflow(&self) -> Option<Job> {
        if self.overflow_len.load(Ordering::Relaxed) == 0 {
            return None;
        }
        let mut q = self.overflow.lock().unwrap_or_else(PoisonError::into_inner);
        let job = q.pop();
        self.overflow_len.store(q.len(), Ordering::Relaxed);
        job
    }

    pub(super) fn parallel_for(&self, n: usize, grain: usize, f: &(dyn Fn(usize, usize) + Sync)) {
        let grain = grain.max(1);
        if n <= grain || self.stealers.len() < 2 {
            let mut at = 0;
            while at < n {
                f(at, (at + grain).min(n));
                at += grain;
            }
            return;
        }
        let work = Loop::new(n, grain, f);
        self.loops.open(&work);
        fence(Ordering::SeqCst);
        work.call(1, || self.wake_a_helper());
        work.help(&self.loops);
        self.loops.close(&work);
        work.rethrow();
    }
}

impl Shared {
    /// For a loop; who does not sleep finds it.
    fn wake_a_helper(&self) {
        if self.sleep.sleepers() > 0 {
            self.sleep.wake_one();
        }
    }
}

impl Worker {
    fn new(index: usize, queue: st3::fifo::Worker<Job>, shared: Arc<Shared>) -> Self {
        let (slot, queue) = (Cell::new(None), UnsafeCell::new(queue));
        let (long, at_work) = (Cell::new(false), Cell::new(false));
        let (helper, spare, helpers) = (false, false, None);
        let (unsignalled, late) = (Cell::new(0), Late::default());
        Worker { index, helper, spare, helpers, slot, queue, unsignalled, late, long, at_work, shared }
    }

    /// Number `i` of the threads beside the workers.
    pub(super) fn helper(shared: Arc<Shared>, i: usize) -> Self {
        let index = shared.stealers.len() + i;
        Worker { helper: true, ..Worker::new(index, st3::fifo::Worker::new(HELPERS_QUEUE), shared) }
    }

    /// Number `i` of some helpers.
    pub(super) fn one_of(shared: Arc<Shared>, i: usize, helpers: Arc<super::helpers::State>) -> Self {
        Worker { helpers: Some(helpers), ..Worker::helper(shared, i) }
    }

    /// Number `i` of the threads that work for workers that block (spare.rs).
    pub(super) fn spare(shared: Arc<Shared>, i: usize) -> Self {
        Worker { spare: true, ..Worker::helper(shared, i) }
    }

    /// Calls `f` with this thread known as this worker.
    pub(super) fn here(&self, f: impl FnOnce()) {
        CURRENT.set(std::ptr::from_ref(self));
        f();
        CURRENT.set(std::ptr::null());
    }

    /// Gives what was submitted here to the workers: their turn it is already, so it comes next.
    pub(super) fn hand_over(&self) {
        // What had its turn to wait for is there already, and nobody was told of it.
        let mut any = self.unsignalled.replace(0) != 0;
        while let Some(job) = self.slot.take().or_else(|| self.own()) {
            self.shared.push_overflow(job, Some(&Turn::default()));
            any = true;
        }
        if any {
            self.shared.sleep.signal();
        }
    }

    /// Submits a job from inside a job. It runs next on this worker unless another worker takes what was next before.
    ///
    /// # Safety
    /// As for [`Pool::submit`].
    #[inline]
    pub unsafe fn submit(&self, job: Job) {
        if let Some(earlier) = self.slot.replace(Some(job)) {
            // SAFETY: passed on under the same contract.
            unsafe { self.submit_back(earlier) };
        }
    }

    /// Submits a job behind everything in this worker's queue.
    ///
    /// # Safety
    /// As for [`Pool::submit`].
    #[inline]
    pub unsafe fn submit_back(&self, job: Job) {
        // SAFETY: only the worker's own thread gets at `queue`: `Worker` is neither Send nor Sync.
        if let Err(job) = unsafe { &*self.queue.get() }.push(job) {
            self.shared.push_overflow(job, None);
        }
        self.queued(job);
    }

    /// Submits a job of a source that has just had a job here: behind everything in this worker's queue, or, if it is long,
    /// in the queue for all, since a source that has always another one would keep the worker for itself.
    ///
    /// # Safety
    /// As for [`Pool::submit`].
    #[inline]
    pub unsafe fn submit_in_turn(&self, job: Job, turn: &Turn) {
        if job.cost_ns <= WAKE_NS {
            // SAFETY: passed on under the same contract.
            return unsafe { self.submit_back(job) };
        }
        self.shared.push_overflow(job, Some(turn));
        self.queued(job);
    }

    /// Others are told of it before this worker does something that is long.
    #[inline]
    fn queued(&self, job: Job) {
        self.unsignalled.set(self.unsignalled.get().saturating_add(job.cost_ns.max(1)));
    }

    /// Wakes a sleeper if what was queued here since the last look, and the `ahead_ns` that this worker will be busy
    /// with first, outweigh a wake-up.
    #[inline]
    fn signal(&self, ahead_ns: u32) {
        let queued = self.unsignalled.get();
        if queued != 0 && queued.saturating_add(ahead_ns) > WAKE_NS {
            self.unsignalled.set(0);
            self.shared.sleep.signal();
        }
    }

    /// As [`Pool::parallel_for`].
    pub fn parallel_for(&self, n: usize, grain: usize, f: &(dyn Fn(usize, usize) + Sync)) {
        self.signal(UNKNOWN_NS);
        self.now();
        self.is_long();
        self.shared.parallel_for(n, grain, f);
    }

    /// Lets others take everything that this worker has queued: call before blocking inside a job.
    pub fn yield_slot(&self) {
        self.offer();
        self.is_long();
    }

    /// Lets others take everything that was queued here, and does what was put off.
    fn offer(&self) {
        self.now();
        if self.helper {
            return self.hand_over();
        }
        if let Some(job) = self.slot.take() {
            // SAFETY: the job came in under the contract of `submit`.
            unsafe { self.submit_back(job) };
        }
        self.signal(UNKNOWN_NS);
    }

    /// From now on nobody counts on this worker for short jobs.
    fn is_long(&self) {
        if !self.helper && !self.long.replace(true) {
            self.shared.long.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// What was made last; the rest is given to all, and it as well once in a while.
    pub(super) fn only_one(&self, burst: &mut u32) -> Option<Job> {
        let made_last = if *burst < SLOT_BURST { self.slot.take() } else { None };
        *burst = if made_last.is_some() { *burst + 1 } else { 0 };
        self.hand_over();
        made_last
    }

    /// It does nothing for a while; whether it had something to do.
    pub(super) fn gives_up_its_place(&self) -> bool {
        let was_at_work = self.at_work.get();
        self.sleeps();
        was_at_work
    }

    /// Rules 1 and 3 of [`super::late`].
    pub(super) fn may_put_off(&self) -> bool {
        !self.helper && !self.long.get() && self.shared.is_full()
    }

    fn own(&self) -> Option<Job> {
        // SAFETY: as in `submit_back`.
        unsafe { &*self.queue.get() }.pop()
    }

    /// The next job: what was made last, the own queue, the shared one, other workers'; each has its turn. None when the pool
    /// stops.
    fn next(&self, turns: &mut Turns) -> Option<Job> {
        turns.jobs += turns.latest;
        if turns.jobs >= TURN {
            turns.jobs = 0;
            if let Some(job) = self.shared.pop_overflow() {
                return Some(job);
            }
        }
        let Some(made_last) = self.slot.take() else {
            turns.burst = 0;
            return self.own().or_else(|| self.find());
        };
        if turns.burst < SLOT_BURST {
            turns.burst += turns.latest;
            return Some(made_last);
        }
        // The queues' turn; with nothing in them the slot goes on.
        turns.burst = 0;
        let Some(other) = self.own().or_else(|| self.shared.pop_overflow()) else { return Some(made_last) };
        // SAFETY: came in under the contract of `submit`.
        unsafe { self.submit_back(made_last) };
        Some(other)
    }

    fn main(&self) {
        let mut turns = Turns::default();
        while let Some(job) = self.next(&mut turns) {
            self.signal(job.cost_ns);
            self.now_or_after(job.cost_ns);
            turns.latest = 1;
            if job.cost_ns > WAKE_NS {
                turns.latest = LONG_JOBS;
                self.is_long();
            }
            // SAFETY: the submitter keeps `data` valid until this call.
            unsafe { (job.run)(job.data, self) };
            if self.long.replace(false) {
                self.shared.long.fetch_sub(1, Ordering::Relaxed);
            }
        }
        self.now();
    }

    /// Searches, helps with loops, sleeps; returns a job, or none when the pool stops.
    pub(super) fn find(&self) -> Option<Job> {
        self.now();
        let s = &*self.shared;
        // Another worker in here does the same.
        if let Ok(mut hooks) = s.idle_hooks.try_lock() {
            let others = s.at_work.load(Ordering::Relaxed).saturating_sub(usize::from(self.at_work.get()));
            hooks.retain(|h| h(others));
        }
        let job = s.sleep.find(self.index, self);
        if job.is_some() {
            self.begins();
        }
        job
    }

    /// It has something to do from now on.
    #[inline]
    pub(super) fn begins(&self) {
        if !self.at_work.replace(true) {
            self.shared.at_work.fetch_add(1, Ordering::Relaxed);
        }
    }
}

impl Look for Worker {
    type Job = Job;

    fn stopped(&self) -> bool {
        self.shared.stopped()
    }

    fn leaves(&self) -> bool {
        self.spare && self.shared.spares.is_one_too_many()
    }

    fn help(&self) {
        self.begins();
        self.shared.loops.help_one(|| self.shared.wake_a_helper());
    }

    fn helps(&self) -> bool {
        self.shared.loops.any()
    }

    fn expects(&self) -> bool {
        self.shared.loops.are_open()
    }

    fn search(&self) -> Option<Job> {
        if let Some(job) = self.own().or_else(|| self.shared.pop_overflow()) {
            return Some(job);
        }
        let n = self.shared.stealers.len();
        let half = |n| if self.helper { 1 } else { n - n / 2 };
        for i in usize::from(!self.helper)..n {
            // SAFETY: as in `submit_back`.
            let queue = unsafe { &*self.queue.get() };
            if let Ok((job, _)) = self.shared.stealers[(self.index + i) % n].steal_and_pop(queue, half) {
                return Some(job);
            }
        }
        None
    }

    fn more(&self) -> bool {
        self.shared.overflow_len.load(Ordering::Relaxed) > 0
    }

    fn sleeps(&self) {
        if !self.at_work.replace(false) {
            return;
        }
        let others = self.shared.at_work.fetch_sub(1, Ordering::Relaxed) - 1;
        // Another worker in here says the same, or will have said too much until the next one sleeps or looks.
        if let Ok(mut hooks) = self.shared.sleep_hooks.try_lock() {
            hooks.retain(|h| h(others));
        }
    }
}

#[cfg(test)]
mod tests;
