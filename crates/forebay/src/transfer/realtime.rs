//! Real-time streams: the processor's side of a transfer, protected from everybody else on it.
//!
//! Rules:
//! 1. The thread gets real-time priority, or the best that the system allows (`priority`); [`RealTime::protection`] says which.
//!    Dropping the stream gives everything back.
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
use super::priority::{Priority, Scheduling};
use super::stream::Stream;
use super::wait::Wait;
use crate::error::Result;

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
    priority: Priority,
    protection: Protection,
    budget: Budget,
    period_began: Instant,
    used: Duration,
    overruns: u64,
    /// Priorities are a thread's: the stream stays with it.
    not_send: PhantomData<*const ()>,
}

impl RealTime {
    pub(super) fn new(engine: &Arc<Engine>, budget: Budget) -> Result<Self> {
        let mut stream = engine.stream()?;
        stream.set_wait(Wait::spinning(stream.engine().device().info().kind, budget.spin));
        let locked = Locked::new(stream.ring().memory());
        let (priority, scheduling) = Priority::here();
        Ok(RealTime {
            protection: Protection { scheduling, locked: locked.is_some() },
            _locked: locked,
            stream,
            priority,
            budget,
            period_began: Instant::now(),
            used: Duration::ZERO,
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

    fn within_budget(&mut self, transfer: impl FnOnce(&mut Stream) -> Result<()>) -> Result<()> {
        let begun = Instant::now();
        if begun.duration_since(self.period_began) >= self.budget.period {
            self.period_began = begun;
            self.used = Duration::ZERO;
            self.priority.set_over(false);
        }
        let done = transfer(&mut self.stream);
        self.used += begun.elapsed();
        if self.used > self.budget.run && !self.priority.is_over() {
            self.overruns += 1;
            self.priority.set_over(true);
        }
        done
    }
}
