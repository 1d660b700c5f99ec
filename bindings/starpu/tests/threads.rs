//! How long threads were at work, as the policy learns it.

#[path = "../src/threads.rs"]
#[allow(dead_code, reason = "the library uses the rest")]
mod threads;

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Works for so long, by its own clock.
fn work(ms: f64) {
    let begun = threads::own();
    while threads::own() - begun < ms * 1e6 {}
}

#[test]
fn what_others_work_is_counted_but_for_workers() {
    let (go, end) = (AtomicBool::new(false), AtomicBool::new(false));
    let wait = |what: &AtomicBool| {
        while !what.load(Ordering::Acquire) {
            std::thread::sleep(Duration::from_micros(100));
        }
    };
    std::thread::scope(|s| {
        let of = |worker: bool, ms: f64| {
            let (go, end) = (&go, &end);
            s.spawn(move || {
                if worker {
                    threads::is_worker();
                }
                wait(go);
                work(ms);
                wait(end);
            })
        };
        let all = [of(false, 30.0), of(true, 200.0), of(false, 20.0)];
        // They all wait by now, and the worker has said what it is.
        std::thread::sleep(Duration::from_millis(50));
        threads::begins();
        let before = threads::own();
        go.store(true, Ordering::Release);
        let begun = Instant::now();
        while threads::since() < 50e6 && begun.elapsed() < Duration::from_secs(20) {
            std::thread::sleep(Duration::from_millis(1));
        }
        // The worker goes on. What it does is not among them, and neither is the test harness, which sleeps.
        std::thread::sleep(Duration::from_millis(100));
        let others = threads::since() - (threads::own() - before);
        assert!((49e6..70e6).contains(&others), "{others} ns of 50 ms");
        end.store(true, Ordering::Release);
        drop(all);
    });
    assert!(threads::own() > 0.0);
}
