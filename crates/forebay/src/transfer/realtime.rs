//! Real-time streams: the processor's side of a transfer, protected from everybody else on it.
//!
//! Rules:
//! 1. The thread gets SCHED_FIFO; if the system refuses, the most favourable nice value that it allows; otherwise it stays
//!    as it is. [`RealTime::protection`] says which. Dropping the stream gives everything back.
//! 2. The staging ring is touched and locked into memory before the first transfer, and so is memory from
//!    [`RealTime::pinned`].
//! 3. A transfer neither allocates nor blocks: completion is awaited by asking again and again.
//! 4. That must not starve the machine. A wait that lasts longer than the budget's spin ends in a blocking one. A stream
//!    whose transfers took more than the budget's run time within a period goes on with ordinary priority until the period
//!    is over ([`RealTime::overruns`] counts these).

use std::marker::PhantomData;
use std::sync::Arc;
use std::time::{Duration, Instant};

use forebay_hal::{Buffer, Direction};

use super::curve::Host;
use super::engine::Engine;
use super::pinned::{HostBytes, HostBytesMut, Locked, Pinned};
use super::stream::Stream;
use super::wait::Wait;
use crate::error::Result;

/// Priority under SCHED_FIFO: above ordinary real-time work that has the default of 1, far below the kernel's own
/// threads (50 and above), on which interrupts depend.
const PRIORITY: i32 = 20;
/// The most favourable nice value.
const NICEST: i32 = -20;

/// How a thread is scheduled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scheduling {
    /// SCHED_FIFO with this priority: before every ordinary thread, whenever it is ready.
    Fifo(i32),
    /// An ordinary thread with this nice value.
    Nice(i32),
}

impl std::fmt::Display for Scheduling {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Scheduling::Fifo(p) => write!(f, "SCHED_FIFO, priority {p}"),
            Scheduling::Nice(n) => write!(f, "SCHED_OTHER, nice {n}"),
        }
    }
}

/// What a real-time stream got of what it asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Protection {
    /// How its thread is scheduled.
    pub scheduling: Scheduling,
    /// Whether its staging ring is locked into memory.
    pub locked: bool,
}

/// What a real-time stream may take from others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Budget {
    /// Time in transfers, with real-time priority, within a period.
    pub run: Duration,
    /// The period.
    pub period: Duration,
    /// Longest time that one wait spins.
    pub spin: Duration,
}

impl Default for Budget {
    /// Half of one processor, and a millisecond at a time.
    fn default() -> Self {
        Budget { run: Duration::from_millis(50), period: Duration::from_millis(100), spin: Duration::from_millis(1) }
    }
}

/// A stream with real-time priority, for the thread that made it.
pub struct RealTime {
    /// The staging ring. Goes first.
    _locked: Option<Locked>,
    stream: Stream,
    /// None once it is nobody's any more.
    before: Option<Before>,
    protection: Protection,
    budget: Budget,
    period_began: Instant,
    used: Duration,
    demoted: bool,
    overruns: u64,
    /// Priorities are a thread's: the stream stays with it.
    not_send: PhantomData<*const ()>,
}

/// How the thread was scheduled.
struct Before {
    policy: i32,
    priority: i32,
    nice: i32,
}

fn set_policy(policy: i32, priority: i32) -> bool {
    // SAFETY: all zeros is a valid value; the field that matters is set.
    let mut param: libc::sched_param = unsafe { std::mem::zeroed() };
    param.sched_priority = priority;
    // SAFETY: 0 is the calling thread; the parameters are valid for the call.
    unsafe { libc::sched_setscheduler(0, policy, &param) == 0 }
}

fn set_nice(nice: i32) -> bool {
    // SAFETY: plain call; 0 is the calling thread.
    unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, nice) == 0 }
}

impl Before {
    fn now() -> Self {
        // SAFETY: as in `set_policy`; 0 is the calling thread.
        let (policy, priority, nice) = unsafe {
            let mut param: libc::sched_param = std::mem::zeroed();
            libc::sched_getparam(0, &mut param);
            (libc::sched_getscheduler(0), param.sched_priority, libc::getpriority(libc::PRIO_PROCESS, 0))
        };
        Before { policy: policy.max(0), priority, nice }
    }

    fn restore(&self) {
        set_policy(self.policy, self.priority);
        set_nice(self.nice);
    }
}

/// The best that the system allows.
fn promote(before: &Before) -> Scheduling {
    // Children of the thread do not inherit it.
    if set_policy(libc::SCHED_FIFO | libc::SCHED_RESET_ON_FORK, PRIORITY) {
        return Scheduling::Fifo(PRIORITY);
    }
    let nice = (NICEST..before.nice).find(|n| set_nice(*n));
    Scheduling::Nice(nice.unwrap_or(before.nice))
}

impl RealTime {
    pub(super) fn new(engine: &Arc<Engine>, budget: Budget) -> Result<Self> {
        let mut stream = engine.stream()?;
        stream.set_wait(Wait::spinning(stream.engine().device().info().kind, budget.spin));
        let locked = Locked::new(stream.ring().memory());
        let before = Before::now();
        let scheduling = promote(&before);
        Ok(RealTime {
            protection: Protection { scheduling, locked: locked.is_some() },
            _locked: locked,
            stream,
            before: Some(before),
            budget,
            period_began: Instant::now(),
            used: Duration::ZERO,
            demoted: false,
            overruns: 0,
            not_send: PhantomData,
        })
    }

    /// What it got of what it asked for.
    pub fn protection(&self) -> Protection {
        self.protection
    }

    /// Periods in which it used up its budget, and went on with ordinary priority.
    pub fn overruns(&self) -> u64 {
        self.overruns
    }

    /// Page-locked memory, touched, and locked into memory if the system allows ([`Pinned::is_locked`]).
    ///
    /// # Errors
    /// Out of memory.
    pub fn pinned(&self, bytes: usize) -> Result<Pinned> {
        let mut memory = self.stream.engine().pinned(bytes)?;
        memory.lock();
        Ok(memory)
    }

    /// The stream, for what needs no protection, and for its settings.
    pub fn stream(&mut self) -> &mut Stream {
        &mut self.stream
    }

    /// As [`Stream::write`].
    ///
    /// # Errors
    /// As there.
    pub fn write<H: HostBytes + ?Sized>(&mut self, device: &Buffer, offset: usize, from: &H) -> Result<()> {
        self.within_budget(|s| s.write(device, offset, from))
    }

    /// As [`Stream::read`].
    ///
    /// # Errors
    /// As there.
    pub fn read<H: HostBytesMut + ?Sized>(&mut self, device: &Buffer, offset: usize, to: &mut H) -> Result<()> {
        self.within_budget(|s| s.read(device, offset, to))
    }

    /// As [`Stream::transfer`].
    ///
    /// # Errors
    /// As there.
    ///
    /// # Safety
    /// As there.
    pub unsafe fn transfer(
        &mut self,
        direction: Direction,
        device: &Buffer,
        offset: usize,
        at: *mut u8,
        bytes: usize,
        host: Host,
    ) -> Result<()> {
        // SAFETY: by the contract.
        self.within_budget(|s| unsafe { s.transfer(direction, device, offset, at, bytes, host) })
    }

    /// Lets go of the stream without touching the calling thread's priority, which is another thread's than the stream's.
    pub(super) fn leave(mut self) {
        self.before = None;
    }

    fn restore(&self) {
        if let Some(before) = &self.before {
            before.restore();
        }
    }

    fn within_budget(&mut self, transfer: impl FnOnce(&mut Stream) -> Result<()>) -> Result<()> {
        let begun = Instant::now();
        if begun.duration_since(self.period_began) >= self.budget.period {
            self.period_began = begun;
            self.used = Duration::ZERO;
            if std::mem::take(&mut self.demoted) {
                self.before.as_ref().map(promote);
            }
        }
        let done = transfer(&mut self.stream);
        self.used += begun.elapsed();
        if self.used > self.budget.run && !self.demoted {
            self.demoted = true;
            self.overruns += 1;
            self.restore();
        }
        done
    }
}

impl Drop for RealTime {
    fn drop(&mut self) {
        self.restore();
    }
}
