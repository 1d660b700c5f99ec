//! How workers sleep while there is nothing to do, and are woken.
//!
//! Rules:
//! 1. A worker that has found nothing puts itself on the list of sleepers, counts itself in `sleepers`, fences, and looks
//!    everywhere once more; then it parks. Whoever makes work visible fences, then reads `sleepers`. One of the two sees the
//!    other.
//! 2. Whoever wakes one takes it from the list and leaves it a token, both under the list's lock. A worker that finds itself
//!    gone from the list takes the token: one that came later, or was left, would cut a later sleep short with the sleeper
//!    still on the list, and its wake-up lost on it.
//! 3. Nobody is woken for work while somebody searches. So a searcher that has found a job wakes the next one if there is
//!    more in the queue for all, after it has stopped counting as a searcher.
//!    One that leaves looks once more after that, for whom somebody has not woken because of it.
//! 4. One that finds a job in its last look although it was being woken passes that on: it was for another job, perhaps.
//!
//! Loom checks rules 1 and 3 (`RUSTFLAGS="--cfg loom" cargo test -p forebay-hal --lib --release sleepers`). What breaks 2 and 4
//! takes more preemptions than it can be given; a test in this file has them happen. That the token is left under the lock no
//! test holds.

use std::sync::PoisonError;

use crate::sync::{AtomicBool, AtomicUsize, Mutex, Ordering, Parker, fence, yield_now};

/// Searches without success before a worker sleeps: about 20 µs, the order of one futex wake-up. Where there are more workers,
/// whose queues each search looks into, there are fewer searches.
fn rounds(workers: usize) -> u32 {
    if cfg!(all(loom, test)) { 1 } else { (SPIN_ROUNDS / (1 + workers / CHEAP_QUEUES) as u32).max(1) }
}
const SPIN_ROUNDS: u32 = 200;
/// So many queues more cost as much to look into as the rest of a search.
const CHEAP_QUEUES: usize = 16;
/// So many times as long one searches while it expects something.
const STAYS: u32 = 20;

/// What a worker does while it has no job.
pub(super) trait Look {
    type Job;
    /// Whether there is nothing to be done any more.
    fn stopped(&self) -> bool;
    /// Whether this one is to go, once it finds nothing.
    fn leaves(&self) -> bool {
        false
    }
    /// Helps where no job has to be taken for it.
    fn help(&self);
    /// Whether there is something to help with.
    fn helps(&self) -> bool;
    /// Whether there will be more to help with soon, so that one had better stay awake.
    fn expects(&self) -> bool {
        false
    }
    /// Takes a job from wherever there is one.
    fn search(&self) -> Option<Self::Job>;
    /// Whether there are more in the queue for all.
    fn more(&self) -> bool;
    /// It sleeps from now on.
    fn sleeps(&self) {}
}

/// Who sleeps, and who looks for work.
pub(super) struct Sleep {
    workers: usize,
    sleepers: AtomicUsize,
    searching: AtomicUsize,
    asleep: Mutex<Vec<usize>>,
    /// A token for each worker; only ever swapped, so that there is one order of who did what with it.
    wake: Vec<AtomicBool>,
    /// Where each waits.
    parkers: Vec<Parker>,
}

impl Sleep {
    /// For so many workers, numbered from 0, and spares behind them.
    pub(super) fn new(workers: usize, spares: usize) -> Self {
        let all = workers + spares;
        Sleep {
            workers,
            sleepers: AtomicUsize::new(0),
            searching: AtomicUsize::new(0),
            asleep: Mutex::new(Vec::with_capacity(workers)),
            wake: (0..all).map(|_| AtomicBool::new(false)).collect(),
            parkers: (0..all).map(|_| Parker::default()).collect(),
        }
    }

    /// The calling thread is worker `me`: said before it looks for work.
    pub(super) fn sit(&self, me: usize) {
        self.parkers[me].sit();
    }

    /// How many sleep, at this moment.
    pub(super) fn sleepers(&self) -> usize {
        self.sleepers.load(Ordering::Relaxed)
    }

    /// Wakes one sleeper for what has become visible, unless somebody searches, who will find it.
    pub(super) fn signal(&self) {
        fence(Ordering::SeqCst);
        if self.sleepers() > 0 && self.searching.load(Ordering::Relaxed) == 0 {
            self.wake_one();
        }
    }

    pub(super) fn wake_one(&self) {
        self.wake_last(|_| true);
    }

    /// Wakes a spare that sleeps: it leaves, and is to notice.
    pub(super) fn wake_a_spare(&self) {
        self.wake_last(|i| i >= self.workers);
    }

    fn wake_last(&self, is: impl Fn(usize) -> bool) {
        let mut asleep = self.asleep.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(at) = asleep.iter().rposition(|&i| is(i)) else { return };
        let i = asleep.remove(at);
        self.sleepers.fetch_sub(1, Ordering::SeqCst);
        self.wake[i].swap(true, Ordering::AcqRel);
        drop(asleep);
        self.parkers[i].unpark();
    }

    /// Wakes everybody who sleeps or is about to, for good.
    pub(super) fn wake_all(&self) {
        for w in &self.wake {
            w.swap(true, Ordering::AcqRel);
        }
        self.parkers.iter().for_each(Parker::unpark);
    }

    /// A job for worker `me`, which has none: looks for one, helps, sleeps. None when there is nothing to be done any more, or
    /// it leaves.
    pub(super) fn find<L: Look>(&self, me: usize, l: &L) -> Option<L::Job> {
        loop {
            // At most half of the workers search at a time: work then tends to stay on the cores where its data is.
            let most = (self.workers / 2).max(1);
            let before = self.searching.fetch_add(1, Ordering::SeqCst);
            let rounds = if before < most { rounds(self.workers) } else { 1 };
            // Loops come one after the other, and where the last range of one takes longer than anybody searches, waking somebody
            // for each would be a good part of many a loop. One that stays awake wakes the others.
            let longer = if before == 0 { rounds.saturating_mul(STAYS) } else { rounds };
            let mut found = self.look(rounds, longer, l);
            self.searching.fetch_sub(1, Ordering::SeqCst);
            // As in rule 1: whoever saw us search and woke nobody, or we, see the other.
            fence(Ordering::SeqCst);
            let leaves = found.is_none() && l.leaves();
            if leaves {
                found = l.search();
            }
            if found.is_some() {
                if l.more() {
                    self.signal();
                }
                return found;
            }
            if l.stopped() || leaves {
                return None;
            }
            self.asleep.lock().unwrap_or_else(PoisonError::into_inner).push(me);
            self.sleepers.fetch_add(1, Ordering::SeqCst);
            fence(Ordering::SeqCst);
            let job = l.search();
            if job.is_some() || l.helps() || l.stopped() || l.leaves() {
                let woken = self.awake(me);
                if job.is_some() {
                    // Either there was no need to wake us, or nobody was woken for the next one because we searched.
                    if woken {
                        self.wake_one();
                    } else if l.more() {
                        self.signal();
                    }
                    return job;
                }
                continue;
            }
            l.sleeps();
            while !self.wake[me].swap(false, Ordering::Acquire) {
                self.parkers[me].park();
            }
        }
    }

    /// Searches so often, or, for as long as it expects something, `longer`.
    fn look<L: Look>(&self, rounds: u32, longer: u32, l: &L) -> Option<L::Job> {
        for round in 0..longer {
            if round >= rounds && !l.expects() {
                break;
            }
            if l.stopped() {
                return None;
            }
            if l.helps() {
                l.help();
            }
            let found = l.search();
            if found.is_some() || l.leaves() {
                return found;
            }
            if round % 8 == 7 { yield_now() } else { std::hint::spin_loop() }
        }
        None
    }

    /// Worker `me` does not sleep after all; whether somebody has woken it meanwhile.
    fn awake(&self, me: usize) -> bool {
        let mut asleep = self.asleep.lock().unwrap_or_else(PoisonError::into_inner);
        let at = asleep.iter().position(|&i| i == me);
        at.map(|at| asleep.swap_remove(at));
        drop(asleep);
        if at.is_some() {
            self.sleepers.fetch_sub(1, Ordering::SeqCst);
        } else {
            self.wake[me].swap(false, Ordering::AcqRel);
        }
        at.is_none()
    }
}

#[cfg(all(test, not(loom)))]
mod by_hand {
    use super::*;

    /// Worker 0 is woken while it looks for the last time, and finds a job there.
    struct WokenInTheLastLook(Sleep);

    impl Look for WokenInTheLastLook {
        type Job = ();
        fn stopped(&self) -> bool {
            false
        }
        fn help(&self) {}
        fn helps(&self) -> bool {
            false
        }
        fn search(&self) -> Option<()> {
            // Beside worker 1, who sleeps.
            (self.0.sleepers() == 2).then(|| self.0.wake_one())
        }
        fn more(&self) -> bool {
            false
        }
    }

    /// A loop is open all the time, of which nothing is left; after the first one's search there is nothing to be done any more.
    struct Expecting {
        sleep: Sleep,
        searches: AtomicUsize,
        stopped: AtomicBool,
    }

    impl Look for Expecting {
        type Job = ();
        fn stopped(&self) -> bool {
            self.stopped.load(Ordering::SeqCst)
        }
        fn help(&self) {}
        fn helps(&self) -> bool {
            false
        }
        fn expects(&self) -> bool {
            true
        }
        fn search(&self) -> Option<()> {
            self.searches.fetch_add(1, Ordering::SeqCst);
            // The one before it sleeps is made when it is on the list.
            self.stopped.store(self.sleep.sleepers() > 0, Ordering::SeqCst);
            None
        }
        fn more(&self) -> bool {
            false
        }
    }

    #[test]
    fn one_of_those_who_search_stays_awake_while_a_loop_is_open() {
        for (others, workers, searches) in
            [(0, 8, SPIN_ROUNDS * STAYS), (1, 8, SPIN_ROUNDS), (4, 8, 1), (1, 64, SPIN_ROUNDS / 5)]
        {
            let (searches_made, stopped) = (AtomicUsize::new(0), AtomicBool::new(false));
            let scene = Expecting { sleep: Sleep::new(workers, 0), searches: searches_made, stopped };
            scene.sleep.searching.fetch_add(others, Ordering::SeqCst);
            assert!(scene.sleep.find(0, &scene).is_none());
            // And the last one.
            assert_eq!(scene.searches.into_inner(), searches as usize + 1, "{others} others of {workers}");
        }
    }

    #[test]
    fn who_is_woken_in_its_last_look_takes_its_token_and_passes_the_waking_on() {
        let scene = WokenInTheLastLook(Sleep::new(2, 0));
        let s = &scene.0;
        s.asleep.lock().unwrap().push(1);
        s.sleepers.fetch_add(1, Ordering::SeqCst);
        assert!(s.find(0, &scene).is_some());
        let tokens: Vec<bool> = s.wake.iter().map(|w| w.load(Ordering::SeqCst)).collect();
        assert_eq!((tokens, s.sleepers()), (vec![false, true], 0));
        assert!(s.asleep.lock().unwrap().is_empty());
    }
}

#[cfg(all(test, loom))]
mod tests {
    use super::*;
    use loom::sync::Arc;
    use loom::thread;
    use std::collections::VecDeque;

    /// A job, and whether it lasts for ever: then whoever is needed for the next one must be another.
    type Lasts = bool;

    struct Crew {
        sleep: Sleep,
        jobs: Mutex<VecDeque<Lasts>>,
        len: AtomicUsize,
        stop: AtomicBool,
    }

    /// One of a crew that is to go.
    struct Spare {
        crew: Arc<Crew>,
        leaves: AtomicBool,
    }

    impl Look for Spare {
        type Job = Lasts;
        fn stopped(&self) -> bool {
            self.crew.stopped()
        }
        fn leaves(&self) -> bool {
            self.leaves.load(Ordering::SeqCst)
        }
        fn help(&self) {}
        fn helps(&self) -> bool {
            false
        }
        fn search(&self) -> Option<Lasts> {
            self.crew.search()
        }
        fn more(&self) -> bool {
            self.crew.more()
        }
    }

    impl Look for Crew {
        type Job = Lasts;
        fn stopped(&self) -> bool {
            self.stop.load(Ordering::SeqCst)
        }
        fn help(&self) {}
        fn helps(&self) -> bool {
            false
        }
        fn search(&self) -> Option<Lasts> {
            if self.len.load(Ordering::Relaxed) == 0 {
                return None;
            }
            let mut jobs = self.jobs.lock().unwrap();
            let job = jobs.pop_front();
            self.len.store(jobs.len(), Ordering::Relaxed);
            job
        }
        fn more(&self) -> bool {
            self.len.load(Ordering::Relaxed) > 0
        }
    }

    impl Crew {
        fn new(workers: usize) -> Arc<Crew> {
            Self::with_spares(workers, 0)
        }

        fn with_spares(workers: usize, spares: usize) -> Arc<Crew> {
            let (jobs, len, stop) = (Mutex::default(), AtomicUsize::new(0), AtomicBool::new(false));
            Arc::new(Crew { sleep: Sleep::new(workers, spares), jobs, len, stop })
        }

        /// As the pool does it.
        fn submit(&self, job: Lasts) {
            let mut jobs = self.jobs.lock().unwrap();
            jobs.push_back(job);
            self.len.store(jobs.len(), Ordering::Relaxed);
            drop(jobs);
            fence(Ordering::SeqCst);
            self.sleep.signal();
        }
    }

    /// Each ends with a job that lasts, or when the crew does.
    fn start(crew: &Arc<Crew>, workers: usize) -> Vec<thread::JoinHandle<()>> {
        let one = |me| {
            let crew = crew.clone();
            thread::spawn(move || while crew.sleep.find(me, &*crew) == Some(false) {})
        };
        (0..workers).map(one).collect()
    }

    /// As many of them last as there are workers. Loom says so if somebody sleeps for ever.
    fn all_come_to_somebody(workers: usize, before: &'static [Lasts], jobs: &'static [Lasts]) {
        loom::model(move || {
            let crew = Crew::new(workers);
            before.iter().for_each(|j| crew.submit(*j));
            let handles = start(&crew, workers);
            jobs.iter().for_each(|j| crew.submit(*j));
            handles.into_iter().for_each(|h| h.join().unwrap());
        });
    }

    #[test]
    fn sleepers_are_woken_for_every_job() {
        all_come_to_somebody(2, &[], &[true, true]);
        all_come_to_somebody(2, &[], &[false, true, true]);
    }

    #[test]
    fn sleepers_are_woken_for_what_was_there_before_them() {
        all_come_to_somebody(2, &[true], &[true]);
        all_come_to_somebody(2, &[true, false], &[true]);
    }

    /// Whoever was counted on and leaves takes no wake-up along: the worker gets a job that lasts, or the spare took one and
    /// there is another.
    #[test]
    fn sleepers_are_woken_although_a_spare_leaves() {
        loom::model(|| {
            let crew = Crew::with_spares(1, 1);
            let spare = Arc::new(Spare { crew: crew.clone(), leaves: AtomicBool::new(false) });
            let mut handles = start(&crew, 1);
            let leaving = spare.clone();
            handles.push(thread::spawn(move || while leaving.crew.sleep.find(1, &*leaving) == Some(false) {}));
            crew.submit(true);
            spare.leaves.store(true, Ordering::SeqCst);
            crew.sleep.wake_a_spare();
            crew.submit(true);
            handles.into_iter().for_each(|h| h.join().unwrap());
        });
    }

    #[test]
    fn sleepers_end_when_the_pool_does() {
        loom::model(|| {
            let crew = Crew::new(2);
            let handles = start(&crew, 2);
            crew.submit(true);
            crew.stop.store(true, Ordering::SeqCst);
            crew.sleep.wake_all();
            handles.into_iter().for_each(|h| h.join().unwrap());
        });
    }
}
