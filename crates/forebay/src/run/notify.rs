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
//! sees the other, and no change goes unnoticed.
//!
//! Not every change interests the task. A task that cannot go on waits for one thing: room in one channel, or (with
//! several inputs) a block in one channel. It sets that channel's [`Waiting`] mark and looks once more before it lets
//! go. Whoever changes a channel takes the mark and notifies only if it was set. The same argument holds for the mark as
//! for the counter. Tasks with one input skip their input's mark and are always notified: that saves an exchange per hop.
//!
//! Loom checks all of this (`RUSTFLAGS="--cfg loom" cargo test -p forebay --lib --release`).

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

/// A mark at one side of a channel: the task there waits for the other side.
pub(crate) struct Waiting(AtomicU32);

impl Waiting {
    pub(crate) fn new() -> Self {
        Waiting(AtomicU32::new(0))
    }

    /// Set by the waiting side, which then looks once more.
    #[inline]
    pub(crate) fn set(&self) {
        self.0.swap(1, Ordering::AcqRel);
    }

    /// Taken by the other side after its change; true when somebody waits.
    #[inline]
    pub(crate) fn take(&self) -> bool {
        self.0.swap(0, Ordering::AcqRel) != 0
    }
}

#[cfg(all(test, loom))]
mod tests {
    use super::*;
    use crate::run::ring::Ring;
    use loom::sync::Arc;
    use loom::sync::atomic::AtomicUsize;

    /// Two inputs and an output, each of capacity 1: one invocation takes an entry from each input.
    struct Task {
        notify: Notify,
        inputs: [Ring<u8>; 2],
        output: Ring<u8>,
        runs: AtomicUsize,
        owners: AtomicUsize,
    }

    impl Task {
        fn new() -> Arc<Self> {
            Arc::new(Task {
                notify: Notify::new(),
                inputs: [Ring::new(1), Ring::new(1)],
                output: Ring::new(1),
                runs: AtomicUsize::new(0),
                owners: AtomicUsize::new(0),
            })
        }

        fn can_run(&self) -> bool {
            !self.output.awaits_room() && self.inputs.iter().rev().all(|ring| !ring.awaits_entry())
        }

        /// What a worker does with a task that it owns.
        fn own(&self) {
            let mut seen = self.notify.seen();
            loop {
                assert_eq!(self.owners.fetch_add(1, Ordering::Relaxed), 0, "two owners");
                while self.can_run() {
                    let p = self.inputs[0].pop().expect("checked");
                    self.inputs[1].pop().expect("checked");
                    self.output.push(p).expect("checked");
                    self.runs.fetch_add(1, Ordering::Relaxed);
                }
                self.owners.fetch_sub(1, Ordering::Relaxed);
                match self.notify.release(seen) {
                    Ok(()) => return,
                    Err(now) => seen = now,
                }
            }
        }

        fn push(&self, input: usize, v: usize) -> bool {
            let ring = &self.inputs[input];
            let pushed = ring.push(v as *mut u8).is_ok();
            if pushed && ring.take_empty() && self.notify.notify() {
                self.own();
            }
            pushed
        }

        fn pull(&self) -> Option<usize> {
            let p = self.output.pop()?;
            if self.output.take_no_room() && self.notify.notify() {
                self.own();
            }
            Some(p as usize)
        }

        /// As `run` does: the first look, which sets the first marks.
        fn start(&self) {
            assert!(self.notify.notify());
            self.own();
        }
    }

    /// Producers of both inputs race with each other; whichever completes the pair, the task runs.
    #[test]
    fn a_task_with_two_inputs_runs_when_both_are_there() {
        loom::model(|| {
            let t = Task::new();
            t.start();
            let other = {
                let t = t.clone();
                loom::thread::spawn(move || assert!(t.push(0, 1)))
            };
            assert!(t.push(1, 1));
            other.join().unwrap();
            assert!(t.notify.idle());
            assert_eq!(t.runs.load(Ordering::Relaxed), 1, "the pair was left behind");
            assert_eq!(t.pull(), Some(1));
        });
    }

    /// A producer races with the consumer of a full output: both entries arrive, in order.
    #[test]
    fn a_task_without_room_runs_when_there_is_room() {
        loom::model(|| {
            let t = Task::new();
            t.start();
            assert!(t.push(0, 1) && t.push(1, 1));
            // The output is full now; the second pair waits for the pull.
            let producer = {
                let t = t.clone();
                loom::thread::spawn(move || assert!(t.push(0, 2) && t.push(1, 2)))
            };
            let mut got: Vec<usize> = t.pull().into_iter().collect();
            producer.join().unwrap();
            got.extend(std::iter::from_fn(|| t.pull()));
            assert!(t.notify.idle());
            assert_eq!(got, [1, 2], "an entry was left behind");
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
