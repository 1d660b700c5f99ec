//! Random graphs on several devices against reference interpreters: whatever way data goes, whoever reads it or does not, and
//! however often the graph is stopped meanwhile, what comes out is what one thread would have computed.
//!
//! `arrays`: data of one size that devices hand to each other, every item alike. `ports`: every kind of port and mark, so that
//! items differ in length, in what marks and metadata they carry, and in where they end. `calls`: tasks that are called like functions.
//! `between`: blocks that go from graph to graph, and from runtime to runtime.

#[path = "../../../forebay-hal/tests/stand_in/mod.rs"]
mod stand_in;

mod arrays;
mod between;
mod calls;
mod ports;

use std::fmt::Debug;
use std::sync::mpsc::RecvTimeoutError;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use forebay::hal::{Device, discover};
use forebay::{Datablock, Drain, Error, Feed, Kind, Running};
use proptest::prelude::*;

const PATIENCE: Duration = Duration::from_secs(20);

/// What can carry out a task.
#[derive(Clone, Copy, Debug, PartialEq)]
enum By {
    Host,
    Kernel,
    Both,
}

fn anybody() -> impl Strategy<Value = By> {
    prop_oneof![Just(By::Host), Just(By::Kernel), Just(By::Both)]
}

/// What tasks do with each element, on the host; kernels have [`MIXED`].
fn mixed(h: u32, v: u32) -> u32 {
    (h ^ v).wrapping_mul(0x9E37_79B9).rotate_left(7)
}

const MIXED: &str = "uint mixed(uint h, uint v) { uint m = (h ^ v) * 0x9E3779B9u; return (m << 7) | (m >> 25); }\n";

struct OnDrop<F: FnMut()>(F);

impl<F: FnMut()> Drop for OnDrop<F> {
    fn drop(&mut self) {
        (self.0)();
    }
}

/// Pushes what `block` makes, whether or not the graph is stopped just now.
fn push(run: &Running, feed: Feed, block: impl Fn() -> Datablock) {
    loop {
        match run.push_timeout(feed, block(), PATIENCE) {
            Err(Error::NotRunning { .. }) => std::thread::yield_now(),
            other => return other.unwrap(),
        }
    }
}

fn pull(run: &Running, drain: Drain) -> Datablock {
    loop {
        match run.pull_timeout(drain, PATIENCE) {
            Err(Error::NotRunning { .. }) => std::thread::yield_now(),
            other => return other.unwrap(),
        }
    }
}

/// As many cases as take a few seconds; more where somebody asks for them (PROPTEST_CASES).
fn all<C: Clone + Debug + Send>(cases: impl Strategy<Value = C>, check: impl Fn(&C)) {
    let asked = std::env::var("PROPTEST_CASES").ok().and_then(|n| n.parse().ok());
    let config = ProptestConfig {
        cases: asked.unwrap_or(60),
        failure_persistence: None,
        max_shrink_iters: 0,
        ..ProptestConfig::default()
    };
    let mut runner = proptest::test_runner::TestRunner::new(config);
    // A graph that stands still cannot be ended either: then this process is.
    let now: Mutex<Option<(Instant, C)>> = Mutex::new(None);
    std::thread::scope(|s| {
        let (done, is_done) = std::sync::mpsc::channel::<()>();
        let now = &now;
        s.spawn(move || {
            while is_done.recv_timeout(Duration::from_secs(1)) == Err(RecvTimeoutError::Timeout) {
                if let Some((begun, case)) = now.lock().unwrap().as_ref().filter(|n| n.0.elapsed() > 3 * PATIENCE) {
                    eprintln!("stands still for {:?}: {case:#?}", begun.elapsed());
                    std::process::abort();
                }
            }
        });
        let result = runner.run(&cases, |case| {
            *now.lock().unwrap() = Some((Instant::now(), case.clone()));
            check(&case);
            Ok(())
        });
        drop(done);
        result.unwrap_or_else(|e| panic!("{e}"));
    });
}

fn on_opencl(check: impl Fn(&[Arc<dyn Device>])) {
    let (found, missing) = discover(&[Kind::OpenCl]);
    let able: Vec<_> = found.into_iter().filter(|d| d.compiles().is_ok()).collect();
    if able.is_empty() {
        return eprintln!("skipped: no opencl device ({missing:?})");
    }
    check(&able);
}

/// The test `name` on one GPU and on two, which the stand-in is.
fn on_two_gpus(name: &str, check: impl Fn(&[Arc<dyn Device>])) {
    if !stand_in::is_here() {
        let delays = ("STAND_IN_DELAYS", "1");
        stand_in::again_with(name, &[("STAND_IN_DEVICES", "1"), delays]);
        return stand_in::again_with(name, &[("STAND_IN_DEVICES", "2"), delays]);
    }
    let (found, missing) = discover(&[Kind::Cuda]);
    assert!(!found.is_empty(), "{missing:?}");
    check(&found);
}
