//! How long threads were at work, as the policy learns it.

#[path = "../src/threads.rs"]
#[allow(dead_code, reason = "the library uses the rest")]
mod threads;

use std::sync::Barrier;
use std::time::{Duration, Instant};

/// Works for so long, by its own clock.
fn work(ms: f64) {
    let begun = threads::own();
    while threads::own() - begun < ms * 1e6 {}
}

#[test]
fn what_others_work_is_counted_but_for_workers() {
    // Whoever waits at these costs nothing, unlike one that sleeps and looks.
    let (go, end) = (Barrier::new(4), Barrier::new(4));
    let others = std::thread::scope(|s| {
        for (worker, ms) in [(false, 30.0), (true, 200.0), (false, 20.0)] {
            let (go, end) = (&go, &end);
            s.spawn(move || {
                if worker {
                    threads::is_worker();
                }
                go.wait();
                work(ms);
                end.wait();
            });
        }
        // They all wait by now, and the worker has said what it is.
        std::thread::sleep(Duration::from_millis(50));
        threads::begins();
        let before = threads::own();
        go.wait();
        let begun = Instant::now();
        while threads::since() < 50e6 && begun.elapsed() < Duration::from_secs(20) {
            std::thread::sleep(Duration::from_millis(1));
        }
        // The worker goes on. What it does is not among them, and neither is the test harness, which sleeps.
        std::thread::sleep(Duration::from_millis(100));
        let others = threads::since() - (threads::own() - before);
        end.wait();
        others
    });
    // Not above: whoever panics there would be waited for.
    assert!((49e6..70e6).contains(&others), "{others} ns of 50 ms");
    assert!(threads::own() > 0.0);
}
