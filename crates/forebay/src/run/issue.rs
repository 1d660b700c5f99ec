//! What is in flight on a device, and whom it is charged to.
//!
//! Rules:
//! 1. Invocations are fenced in batches; those of a device whose work is charged for, and takes long ([`LONG_NS`]), each by
//!    itself, so that it is known at once when one has ended: a fence is nothing beside them.
//! 2. Where the program says what was used, that is the time from the issue of a batch, or the end of the one before it, to
//!    its end; where the kernel does, it is asked.
//! 3. What is in flight behind the first invocation is known to be going to use as much as those before it did: it counts
//!    against credit when the next one is to be issued (`forebay_policy::begin`, rule 1).
//! 4. An interactive process tells when its first invocation is about to be issued and when nothing of it is in the device any more:
//!    others begin none meanwhile. (On the processor its workers tell, `gate`, rule 5.)

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use forebay_hal::{Fence, Queue, Result};
use forebay_policy::begin::{self, LONG_NS};
use forebay_proto::client::{Account, now_ns};

/// Invocations that may be in flight on a device when throughput counts.
pub(crate) const DEPTH_THROUGHPUT: usize = 32;
/// Invocations in flight when order counts: one running, one ready behind it.
pub(crate) const DEPTH_PRIORITY: usize = 2;
/// Invocations that share a fence: an event and a submission for each would cost as much as a small kernel.
const BATCH: usize = 8;
/// While the oldest invocation in flight is older than this, no more than two are: what is issued far ahead of slow
/// kernels gains no throughput and costs latency.
const MAX_AHEAD: Duration = Duration::from_millis(2);
/// Use below which the kernel isn't asked, half a microsecond each time: it counts for the next ones.
const LOOK_NS: u64 = 100_000;

/// The queue and the fences of the latest invocations; locked while a task is issued.
pub(crate) struct Issue {
    pub(crate) queue: Box<dyn Queue>,
    /// Invocations that may be in flight.
    depth: usize,
    in_flight: VecDeque<InFlight>,
    /// Invocations since the last fence, and when the first of them began to be issued.
    unfenced: usize,
    begun: Option<Instant>,
    /// The latest fence.
    pub(super) last: Fence,
    /// When something was found done last.
    done: Instant,
    charge: Option<Charge>,
}

/// Some invocations with a fence behind them.
struct InFlight {
    fence: Fence,
    invocations: usize,
    /// When the first began to be issued: a device may do the work while it is issued.
    begun: Instant,
    fenced: Instant,
}

/// To whom work in the device is charged.
struct Charge {
    account: Arc<Account>,
    /// The service was told that work is in the device, and since when.
    told: bool,
    /// What an invocation uses, ns; 0 before the first has ended.
    each_ns: u64,
    /// What the kernel said when the last one had ended.
    metered_ns: u64,
    /// Rule 3, for whoever asks without the lock.
    ahead_ns: Arc<AtomicU64>,
}

/// Tells the service that work is in the device from this moment on; whether it needed to be told. Whoever it is told for [`ends`].
fn begins(account: &Account, at_ns: u64) -> bool {
    let told = account.begins(at_ns);
    // Rule 4.
    if told && account.has_precedence() {
        account.works(true);
    }
    told
}

fn ends(account: &Account) {
    account.works_since(None);
    account.works(false);
}

impl Charge {
    /// Nothing is in the device any more, as far as the service is concerned.
    fn leave(&mut self) {
        if std::mem::take(&mut self.told) {
            ends(&self.account);
        }
    }

    /// So many invocations have ended, which took so long; `more`: others are in the device.
    fn took(&mut self, invocations: usize, ns: u64, more: bool) {
        let used = if self.account.is_metered() {
            if ns >= LOOK_NS {
                self.account.look();
            }
            let now = self.account.metered_ns();
            now.saturating_sub(std::mem::replace(&mut self.metered_ns, now))
        } else {
            if !more {
                self.leave();
            } else if self.told {
                self.account.works_since(Some(now_ns()));
            }
            self.account.took(ns);
            ns
        };
        let each = used / invocations.max(1) as u64;
        self.each_ns = if self.each_ns == 0 { each } else { (3 * self.each_ns + each) / 4 };
    }
}

impl Issue {
    pub(super) fn new(queue: Box<dyn Queue>, depth: usize) -> Self {
        Issue {
            queue,
            depth,
            in_flight: VecDeque::with_capacity(depth + 1),
            unfenced: 0,
            begun: None,
            last: Fence::default(),
            done: Instant::now(),
            charge: None,
        }
    }

    /// From now on the account is charged for what is done; `ahead_ns` says what is to come.
    pub(super) fn charge(&mut self, account: Arc<Account>, ahead_ns: Arc<AtomicU64>) {
        let metered_ns = account.metered_ns();
        self.charge = Some(Charge { account, told: false, each_ns: 0, metered_ns, ahead_ns });
    }

    /// An invocation is about to be issued. Only what an account is charged for is timed.
    pub(super) fn begins(&mut self) {
        let Some(c) = &mut self.charge else { return };
        self.begun.get_or_insert_with(Instant::now);
        if !c.told {
            c.told = begins(&c.account, now_ns());
        }
    }

    /// It was not.
    pub(super) fn was_not_issued(&mut self) {
        if self.unfenced == 0 {
            self.begun = None;
            if self.in_flight.is_empty() {
                self.leave();
            }
        }
    }

    /// Does work on the device that is not in the queue, and charges its time.
    pub(super) fn timed<R>(account: &Account, work: impl FnOnce() -> R) -> R {
        if account.is_metered() {
            return work();
        }
        let begun = now_ns();
        let told = begins(account, begun);
        let result = work();
        if told {
            ends(account);
        }
        account.took(now_ns().saturating_sub(begun));
        result
    }

    /// Whether no invocation is in the queue, as far as anybody has looked.
    pub(super) fn is_idle(&self) -> bool {
        self.unfenced == 0 && self.in_flight.is_empty()
    }

    /// Batches in flight, as far as anybody has looked.
    pub(super) fn batches(&self) -> usize {
        self.in_flight.len()
    }

    /// The fence of the oldest batch in flight, and of the latest.
    pub(super) fn ends(&self) -> Option<(Fence, Fence)> {
        Some((self.in_flight.front()?.fence, self.in_flight.back()?.fence))
    }

    /// A fence behind everything so far.
    pub(crate) fn fence_now(&mut self) -> Result<Fence> {
        self.last = self.queue.fence()?;
        Ok(self.last)
    }

    /// The fence that will come behind a command that was just enqueued; whoever waits for it makes it if need be.
    pub(crate) fn next_fence(&self) -> Fence {
        Fence(self.last.0 + 1)
    }

    /// An invocation was issued; whether it can do without a fence of its own.
    pub(super) fn may_wait_for_others(&mut self) -> bool {
        self.unfenced += 1;
        self.say_ahead();
        let is_long = self.charge.as_ref().is_some_and(|c| c.each_ns > LONG_NS);
        // With a small depth order counts, and every invocation is awaited for itself.
        self.depth > DEPTH_PRIORITY && self.unfenced < BATCH && !is_long
    }

    /// A fence behind the invocations since the last one; what must be waited for comes back.
    pub(super) fn fence(&mut self) -> Result<Option<Fence>> {
        let invocations = std::mem::take(&mut self.unfenced);
        let begun = self.begun.take();
        let fence = self.fence_now().inspect_err(|_| self.all_ended())?;
        match self.in_flight.back_mut().filter(|f| f.fence == fence) {
            Some(last) => last.invocations += invocations,
            None => {
                let fenced = Instant::now();
                self.in_flight.push_back(InFlight { fence, invocations, begun: begun.unwrap_or(fenced), fenced });
            }
        }
        self.surplus()
    }

    /// What fails has come to an end: nobody waits for it, nor is charged for it, any more.
    fn all_ended(&mut self) {
        self.in_flight.clear();
        self.unfenced = 0;
        self.leave();
        self.say_ahead();
    }

    /// Nothing is in the device any more, as far as the service is concerned.
    pub(super) fn leave(&mut self) {
        self.charge.iter_mut().for_each(Charge::leave);
    }

    /// Whether there may be a surplus, without asking the device.
    pub(super) fn may_be_many(&self) -> bool {
        let late = |f: &InFlight| self.in_flight.len() > DEPTH_PRIORITY && f.fenced.elapsed() > MAX_AHEAD;
        self.in_flight.len() > self.depth / BATCH || self.in_flight.front().is_some_and(late)
    }

    /// Forgets what has been reached; the oldest fence when there are too many, or it is too old.
    pub(super) fn surplus(&mut self) -> Result<Option<Fence>> {
        let batches = if self.depth > DEPTH_PRIORITY { self.depth / BATCH } else { self.depth };
        let oldest = loop {
            let Some(&InFlight { fence, begun, fenced, invocations }) = self.in_flight.front() else { break None };
            let done = self.queue.done(fence).inspect_err(|_| self.all_ended())?;
            if !done {
                let late = self.in_flight.len() > DEPTH_PRIORITY && fenced.elapsed() > MAX_AHEAD;
                break (late || self.in_flight.len() > batches).then_some(fence);
            }
            self.in_flight.pop_front();
            if let Some(c) = &mut self.charge {
                let now = Instant::now();
                let more = !self.in_flight.is_empty() || self.begun.is_some();
                c.took(invocations, now.duration_since(begun.max(self.done)).as_nanos() as u64, more);
                self.done = now;
            }
        };
        self.say_ahead();
        Ok(oldest)
    }

    /// Rule 3.
    fn say_ahead(&self) {
        if let Some(c) = &self.charge {
            let there = self.unfenced + self.in_flight.iter().map(|f| f.invocations).sum::<usize>();
            c.ahead_ns.store(begin::of_pieces(there as u64, c.each_ns), Ordering::Relaxed);
        }
    }
}
