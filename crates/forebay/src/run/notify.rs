//! The task state machine's core: who may run a task.
//!
//! One counter per task. Rules:
//! 1. 0 means Waiting: nobody owns the task. Any other value means that somebody does: it is Queued, Executing, or
//!    Completed with outputs that have no room yet and a look at them pending.
//! 2. Whoever changes one of the task's channels (push into an input, pop from an output) makes the change visible,
//!    then adds 1. If it was 0, the adder has become the owner and queues the task; otherwise the owner will look again.
//! 3. The owner loads the counter (acquire) before it looks at the channels, and lets go by exchanging exactly the value
//!    it loaded for 0. If that fails, something changed since: it looks again with the new value.
//! 4. After a successful exchange the former owner does not touch the task.
//!
//! All accesses are read-modify-writes of one variable or acquire loads of it, so of any change and any letting-go one
//! sees the other, and no change goes unnoticed; loom checks this (`tests/loom.rs` and below).

use crate::sync::{AtomicU32, Ordering};

/// The counter.
pub(crate) struct Notify(AtomicU32);

impl Notify {
    pub(crate) fn new() -> Self {
        Notify(AtomicU32::new(0))
    }

    /// Rule 2; true when the caller is now the owner.
    #[inline]
    pub(crate) fn notify(&self) -> bool {
        self.0.fetch_add(1, Ordering::AcqRel) == 0
    }

    /// Rule 3, first half.
    #[inline]
    pub(crate) fn seen(&self) -> u32 {
        self.0.load(Ordering::Acquire)
    }

    /// Rule 3, second half: true when the task is let go.
    #[inline]
    pub(crate) fn release(&self, seen: u32) -> Result<(), u32> {
        self.0.compare_exchange(seen, 0, Ordering::AcqRel, Ordering::Acquire).map(|_| ())
    }

    /// Whether nobody owns the task.
    pub(crate) fn idle(&self) -> bool {
        self.0.load(Ordering::Acquire) == 0
    }
}

#[cfg(all(test, loom))]
mod tests {
    use super::*;
    use crate::run::ring::Ring;
    use loom::sync::Arc;
    use loom::sync::atomic::AtomicUsize;

    struct Task {
        notify: Notify,
        input: Ring<u8>,
        output: Ring<u8>,
        runs: AtomicUsize,
        owners: AtomicUsize,
    }

    /// What a worker does with a task that it owns: move entries while there is input and room.
    fn own(t: &Task) {
        let mut seen = t.notify.seen();
        assert_eq!(t.owners.fetch_add(1, Ordering::Relaxed), 0, "two owners");
        loop {
            while !t.input.is_empty() && t.output.has_room() {
                let p = t.input.pop().expect("checked");
                t.output.push(p).expect("checked");
                t.runs.fetch_add(1, Ordering::Relaxed);
            }
            t.owners.fetch_sub(1, Ordering::Relaxed);
            match t.notify.release(seen) {
                Ok(()) => return,
                Err(now) => seen = now,
            }
            assert_eq!(t.owners.fetch_add(1, Ordering::Relaxed), 0, "two owners");
        }
    }

    /// A producer and a consumer race with each other; each runs the task when it becomes the owner. Whatever the
    /// interleaving, both entries arrive, in order, and the task is let go.
    #[test]
    fn no_change_goes_unnoticed() {
        loom::model(|| {
            let t = Arc::new(Task {
                notify: Notify::new(),
                input: Ring::new(1),
                output: Ring::new(1),
                runs: AtomicUsize::new(0),
                owners: AtomicUsize::new(0),
            });
            let producer = {
                let t = t.clone();
                loom::thread::spawn(move || {
                    let mut pushed = 0;
                    for i in 1..=2usize {
                        if t.input.push(i as *mut u8).is_ok() {
                            pushed += 1;
                            if t.notify.notify() {
                                own(&t);
                            }
                        }
                    }
                    pushed
                })
            };
            let mut popped = Vec::new();
            for _ in 0..2 {
                if let Some(p) = t.output.pop() {
                    popped.push(p as usize);
                    if t.notify.notify() {
                        own(&t);
                    }
                }
            }
            let pushed: usize = producer.join().unwrap();
            assert!(t.notify.idle());
            while let Some(p) = t.output.pop() {
                popped.push(p as usize);
                if t.notify.notify() {
                    own(&t);
                }
            }
            assert_eq!(t.runs.load(Ordering::Relaxed), pushed, "an entry was left behind");
            assert_eq!(popped.len(), pushed);
            assert!(popped.is_sorted());
        });
    }

    /// The ring alone: what was pushed comes out in order, whole.
    #[test]
    fn ring_is_fifo() {
        loom::model(|| {
            let ring = Arc::new(Ring::<u8>::new(2));
            let producer = {
                let ring = ring.clone();
                loom::thread::spawn(move || (1..=3usize).take_while(|&i| ring.push(i as *mut u8).is_ok()).count())
            };
            let mut got = Vec::new();
            for _ in 0..2 {
                got.extend(ring.pop().map(|p| p as usize));
            }
            let pushed = producer.join().unwrap();
            got.extend(std::iter::from_fn(|| ring.pop().map(|p| p as usize)));
            assert_eq!(got, (1..=pushed).collect::<Vec<_>>());
        });
    }
}
