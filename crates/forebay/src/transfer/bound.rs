//! A stream for callers whose compiler does not keep a real-time stream with its thread: C's and Python's.

use std::sync::Arc;
use std::thread::{self, ThreadId};

use forebay_hal::{Buffer, Direction};

use super::curve::Host;
use super::engine::Engine;
use super::realtime::{Budget, Protection, RealTime};
use super::stream::Stream;
use crate::error::Result;

/// A [`Stream`], or a [`RealTime`] stream that answers on its own thread only: elsewhere calls are errors. It may be dropped
/// anywhere.
pub struct Bound(Either);

enum Either {
    Ordinary(Box<Stream>),
    RealTime { stream: Box<RealTime>, thread: ThreadId },
}

// SAFETY: a real-time stream is no other thread's only because it protects the one that made it. Here it answers that one
// only: every call looks (`mine`). What it is made of is `Send`, and dropping it is about that thread wherever it happens.
unsafe impl Send for Bound {}

/// What a real-time stream is made of besides, that is.
const _: () = {
    const fn is_send<T: Send>() {}
    is_send::<Stream>();
    is_send::<super::pinned::Locked>();
    is_send::<super::priority::Priority>();
};

impl Bound {
    /// An ordinary stream ([`Engine::stream`]), for any thread.
    ///
    /// # Errors
    /// As there.
    pub fn ordinary(engine: &Arc<Engine>) -> Result<Self> {
        Ok(Bound(Either::Ordinary(Box::new(engine.stream()?))))
    }

    /// A real-time stream of the calling thread ([`Engine::real_time`]).
    ///
    /// # Errors
    /// As there.
    pub fn real_time(engine: &Arc<Engine>, budget: Budget) -> Result<Self> {
        let stream = Box::new(engine.real_time(budget)?);
        Ok(Bound(Either::RealTime { stream, thread: thread::current().id() }))
    }

    /// What a real-time stream got of what it asked for, and in how many periods it used up its budget; none for others.
    pub fn protection(&self) -> Option<(Protection, u64)> {
        match &self.0 {
            Either::Ordinary(_) => None,
            Either::RealTime { stream, .. } => Some((stream.protection(), stream.overruns())),
        }
    }

    /// The stream, for what a budget does not count.
    ///
    /// # Errors
    /// [`forebay_hal::Error::Invalid`] on another thread than the stream's.
    pub fn stream(&mut self) -> Result<&mut Stream> {
        match &mut self.0 {
            Either::Ordinary(s) => Ok(s),
            Either::RealTime { stream, thread } => Ok(mine(stream, *thread)?.stream()),
        }
    }

    /// As [`Stream::transfer`], within the budget.
    ///
    /// # Errors
    /// As there, and as [`Bound::stream`].
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
        unsafe {
            match &mut self.0 {
                Either::Ordinary(s) => s.transfer(direction, device, offset, at, bytes, host),
                Either::RealTime { stream, thread } => {
                    mine(stream, *thread)?.transfer(direction, device, offset, at, bytes, host)
                }
            }
        }
    }
}

thread_local! {
    /// Kept, since asking for it counts references.
    static HERE: ThreadId = thread::current().id();
}

/// Whether this is that thread; not any more when it is about to end.
fn is_here(thread: ThreadId) -> bool {
    HERE.try_with(|here| *here == thread).unwrap_or(false)
}

/// The stream, on its thread.
fn mine(stream: &mut RealTime, thread: ThreadId) -> Result<&mut RealTime> {
    if is_here(thread) {
        return Ok(stream);
    }
    let device = stream.stream().engine().device().info().name.clone();
    let what = "a real-time stream is used by the thread that made it only".into();
    Err(forebay_hal::Error::Invalid { device, what }.into())
}
