use super::*;
use std::time::{Duration, Instant};

struct Chain {
    left: AtomicUsize,
    done: AtomicBool,
}

unsafe fn step(data: *const (), w: &Worker) {
    // SAFETY: the test keeps the chain alive until `done`.
    let c = unsafe { &*data.cast::<Chain>() };
    if c.left.fetch_sub(1, Ordering::Relaxed) == 1 {
        c.done.store(true, Ordering::Release);
    } else {
        // SAFETY: as above.
        unsafe { w.submit(Job { run: step, data, cost_ns: 100 }) };
    }
}

#[test]
fn jobs_that_submit_jobs_all_run() {
    let pool = Pool::new(3);
    let chains: Vec<_> =
        (1..50).map(|n| Chain { left: AtomicUsize::new(n * 7), done: AtomicBool::new(false) }).collect();
    for c in &chains {
        // SAFETY: `chains` outlives the wait below.
        unsafe { pool.submit(Job { run: step, data: std::ptr::from_ref(c).cast(), cost_ns: UNKNOWN_NS }) };
    }
    let until = Instant::now() + Duration::from_secs(20);
    while !chains.iter().all(|c| c.done.load(Ordering::Acquire)) {
        assert!(Instant::now() < until, "a job was lost");
        std::thread::yield_now();
    }
}

/// A job that goes on until a flag is set: by waiting, blocked as such or not, or by making itself anew.
struct Until {
    flag: AtomicBool,
    ended: AtomicBool,
    how: How,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum How {
    Waits,
    Blocks,
    MakesItself,
}

unsafe fn until(data: *const (), w: &Worker) {
    // SAFETY: the test keeps it until it has ended.
    let u = unsafe { &*data.cast::<Until>() };
    if u.how == How::Blocks {
        about_to_block();
    }
    while !u.flag.load(Ordering::Acquire) {
        if u.how == How::MakesItself {
            // SAFETY: as above.
            return unsafe { w.submit_back(Job { run: until, data, cost_ns: 100 }) };
        }
        std::thread::yield_now();
    }
    u.ended.store(true, Ordering::Release);
}

unsafe fn set(data: *const (), _: &Worker) {
    // SAFETY: as above.
    unsafe { &*data.cast::<Until>() }.flag.store(true, Ordering::Release);
}

/// One worker is at something for as long as a short job from elsewhere has not run.
#[test]
fn short_jobs_from_elsewhere_come_to_somebody() {
    for (how, cost_ns, workers) in
        [(How::Waits, UNKNOWN_NS, 2), (How::Waits, 100, 2), (How::Blocks, 100, 2), (How::MakesItself, 100, 1)]
    {
        let pool = Pool::new(workers);
        for i in 0..300u32 {
            let u = Until { flag: AtomicBool::new(false), ended: AtomicBool::new(false), how };
            let data = std::ptr::from_ref(&u).cast();
            // SAFETY: `u` is there until both have ended: the second before the first.
            unsafe { pool.submit(Job { run: until, data, cost_ns }) };
            // The worker is about to begin, has begun, or the others have gone to sleep meanwhile.
            match i % 3 {
                0 => {}
                1 => (0..i * 10).for_each(|_| std::hint::spin_loop()),
                _ => std::thread::sleep(Duration::from_micros(u64::from(i) * 2)),
            }
            // SAFETY: as above.
            unsafe { pool.submit(Job { run: set, data, cost_ns: 100 }) };
            let begun = Instant::now();
            while !u.ended.load(Ordering::Acquire) {
                if begun.elapsed() > Duration::from_secs(20) {
                    // The jobs go on with what lies here.
                    let why = format!("{how:?}: nobody comes to the job, with {workers} workers, in round {i}\n");
                    let _ = std::io::Write::write_all(&mut std::io::stderr(), why.as_bytes());
                    std::process::abort();
                }
                std::thread::yield_now();
            }
        }
    }
}

/// Who was woken for nothing has had no work.
#[test]
fn workers_are_at_work_from_their_first_job_until_they_sleep() {
    let pool = Pool::new(2);
    let within = |what: &str, is: &dyn Fn() -> bool| {
        let begun = Instant::now();
        while !is() {
            assert!(begun.elapsed() < Duration::from_secs(20), "{what}");
            std::thread::yield_now();
        }
    };
    within("both sleep", &|| pool.sleepers() == 2);
    assert_eq!(pool.at_work(), 0);
    let u = Until { flag: AtomicBool::new(false), ended: AtomicBool::new(false), how: How::Waits };
    // SAFETY: `u` is there until it has ended.
    unsafe { pool.submit(Job { run: until, data: std::ptr::from_ref(&u).cast(), cost_ns: UNKNOWN_NS }) };
    within("one has begun", &|| pool.at_work() == 1 && pool.sleepers() == 1);
    for _ in 0..50 {
        pool.shared.sleep.wake_one();
        assert_eq!(pool.at_work(), 1);
        within("the other one sleeps again", &|| pool.sleepers() == 1);
        assert_eq!(pool.at_work(), 1);
    }
    u.flag.store(true, Ordering::Release);
    within("it has ended", &|| u.ended.load(Ordering::Acquire));
    within("nobody is at work", &|| pool.at_work() == 0);
}

/// A source that always has another long job.
struct Greedy {
    turn: Turn,
    /// Somebody else's job waits; it was done.
    waits: AtomicBool,
    done: AtomicBool,
    runs: AtomicUsize,
    meanwhile: AtomicUsize,
    ended: AtomicBool,
}

unsafe fn greedy(data: *const (), w: &Worker) {
    // SAFETY: the test keeps it until it has ended.
    let g = unsafe { &*data.cast::<Greedy>() };
    g.runs.fetch_add(1, Ordering::Relaxed);
    if g.done.load(Ordering::Acquire) {
        return g.ended.store(true, Ordering::Release);
    }
    if g.waits.load(Ordering::Acquire) {
        g.meanwhile.fetch_add(1, Ordering::Relaxed);
    }
    // SAFETY: as above.
    unsafe { w.submit_in_turn(Job { run: greedy, data, cost_ns: 2 * WAKE_NS }, &g.turn) };
}

unsafe fn modest(data: *const (), _: &Worker) {
    // SAFETY: as above.
    unsafe { &*data.cast::<Greedy>() }.done.store(true, Ordering::Release);
}

#[test]
fn a_source_that_always_has_another_long_job_does_not_keep_the_worker() {
    let pool = Pool::new(1);
    for _ in 0..50 {
        let new = || (AtomicBool::new(false), AtomicUsize::new(0));
        let ((waits, runs), (done, meanwhile), (ended, _)) = (new(), new(), new());
        let g = Greedy { turn: Turn::default(), waits, done, runs, meanwhile, ended };
        let data = std::ptr::from_ref(&g).cast();
        // SAFETY: `g` is there until the greedy job has ended, which the other one comes before.
        unsafe { pool.submit_in_turn(Job { run: greedy, data, cost_ns: 2 * WAKE_NS }, &g.turn) };
        while g.runs.load(Ordering::Relaxed) < 100 {
            std::thread::yield_now();
        }
        let turn = Turn::default();
        // SAFETY: as above.
        unsafe { pool.submit_in_turn(Job { run: modest, data, cost_ns: 2 * WAKE_NS }, &turn) };
        g.waits.store(true, Ordering::Release);
        while !g.ended.load(Ordering::Acquire) {
            std::thread::yield_now();
        }
        // The one that ran, and the one that was next.
        assert!(g.meanwhile.load(Ordering::Relaxed) <= 2, "{}", g.meanwhile.load(Ordering::Relaxed));
    }
}

#[test]
fn parallel_for_covers_every_index_once_even_nested() {
    let pool = Pool::new(4);
    for n in [0usize, 1, 7, 1000, 4097] {
        let hits: Vec<AtomicUsize> = (0..n).map(|_| AtomicUsize::new(0)).collect();
        pool.parallel_for(n, 16, &|a, b| {
            pool.parallel_for(b - a, 3, &|c, d| {
                for h in &hits[a + c..a + d] {
                    h.fetch_add(1, Ordering::Relaxed);
                }
            });
        });
        assert!(hits.iter().all(|h| h.load(Ordering::Relaxed) == 1));
    }
}

/// Each of as many ranges as there are threads waits for all others. Whoever has the loop wakes one, which wakes others.
#[test]
fn a_loop_that_everybody_can_help_has_everybody() {
    let pool = Pool::new(12);
    for _ in 0..20 {
        // The caller is no worker.
        let (came, all) = (AtomicUsize::new(0), 13);
        let begun = Instant::now();
        pool.parallel_for(all, 1, &|_, _| {
            came.fetch_add(1, Ordering::SeqCst);
            while came.load(Ordering::SeqCst) < all && begun.elapsed() < Duration::from_secs(20) {
                std::thread::sleep(Duration::from_micros(100));
            }
        });
        assert!(begun.elapsed() < Duration::from_secs(20), "{} of {all} came", came.into_inner());
        // Now and then everybody sleeps when the next one comes.
        std::thread::sleep(Duration::from_millis(2));
    }
    // What has no ranges left is nothing to help with, whatever became of it.
    let r = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        pool.parallel_for(100, 1, &|_, _| panic!("no"));
    }));
    assert!(r.is_err() && !pool.shared.loops.any());
}

#[test]
fn a_panic_in_a_loop_reaches_the_caller_and_the_pool_survives() {
    let pool = Pool::new(2);
    let r = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        pool.parallel_for(100, 1, &|a, _| assert!(a != 57, "fifty-seven"));
    }));
    assert!(r.is_err());
    let sum = AtomicUsize::new(0);
    pool.parallel_for(100, 1, &|a, b| {
        sum.fetch_add((a..b).sum(), Ordering::Relaxed);
    });
    assert_eq!(sum.into_inner(), 4950);
}
