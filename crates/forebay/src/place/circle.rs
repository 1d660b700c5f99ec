//! Calls that would wait for themselves: a function calls its own task, or another one that calls it, and no lane is left.
//!
//! Rules:
//! 1. A lane does one call at a time, and the calls on it one after the other. Of a call whose function runs, it knows which
//!    thread that is.
//! 2. A worker that waits for a lane says so, under one lock for all, and first follows who waits for whom: the lane's thread, the
//!    lane that this one waits for, and so on. If that leads back to itself, nobody of them would ever go on: it is told instead.
//! 3. Whoever closes a circle comes last, and so sees the others: a thread says that it is at a lane before it calls, and takes
//!    back that it waits before its function ends.
//!
//! A function that has another thread call and waits for that is not seen through.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use forebay_hal::fork::Own;

use crate::graph::{Impl, Task, Work};

/// Which thread is at a lane's function; 0 for none.
pub(super) type At = Arc<AtomicU64>;

/// The lane that each thread waits for.
static WAITING: Own<HashMap<u64, At>> = Own::new();

fn me() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    thread_local! {
        static ME: u64 = NEXT.fetch_add(1, Ordering::Relaxed);
    }
    // A thread that ends runs no function.
    ME.try_with(|me| *me).unwrap_or(0)
}

/// A task whose function says where it runs.
pub(super) fn watched(mut task: Task, at: &At) -> Task {
    let watch = |mut work: Work| -> Work {
        let at = at.clone();
        Box::new(move |inv| {
            // Given back when the function panics, too.
            struct There<'a>(&'a AtomicU64, u64);
            impl Drop for There<'_> {
                fn drop(&mut self) {
                    self.0.store(self.1, Ordering::Relaxed);
                }
            }
            let _there = There(&at, at.swap(me(), Ordering::Relaxed));
            work(inv)
        })
    };
    let with = |i: Impl| if let Impl::Host(work) = i { Impl::Host(watch(work)) } else { i };
    task.impls = task.impls.into_iter().map(with).collect();
    task
}

/// This thread waits for a lane as long as it keeps this.
pub(super) struct Waits(u64);

/// Whether this thread would wait for itself.
fn leads_back(all: &HashMap<u64, At>, at: &At, me: u64) -> bool {
    let mut lane = at;
    // As long as a chain without a circle can be.
    for _ in 0..=all.len() {
        let thread = lane.load(Ordering::Relaxed);
        if thread == me {
            return true;
        }
        match all.get(&thread) {
            Some(next) => lane = next,
            None => return false,
        }
    }
    false
}

/// Whether this thread, at a function, could not wait for that lane.
pub(super) fn closes(at: &At) -> bool {
    leads_back(&WAITING.lock(), at, me())
}

/// Rule 2; none if the thread would wait for itself.
pub(super) fn wait_for(at: &At) -> Option<Waits> {
    let me = me();
    let mut all = WAITING.lock();
    if leads_back(&all, at, me) {
        return None;
    }
    all.insert(me, at.clone());
    Some(Waits(me))
}

impl Drop for Waits {
    fn drop(&mut self) {
        WAITING.lock().remove(&self.0);
    }
}
