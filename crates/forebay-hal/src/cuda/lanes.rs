//! Copies beside kernels, and lists of launches beside each other: one queue, in order for whoever uses it, on several
//! streams of the driver.
//!
//! Rules:
//! 1. Large copies to the device go on one stream, large copies from it on another, everything else on the main one. Where
//!    lists run beside each other (`FOREBAY_LISTS_BESIDE`) every other one goes on a stream of its own, and copies of any
//!    size on theirs. A queue that has nothing to do beside the main stream has that one and pays for nothing of this.
//! 2. The bytes are those of the order in which commands were given: before a command goes to a stream, that stream is
//!    told to wait for what the others last did with the command's memory, on the device and on the host.
//! 3. A stream waits for a mark (an event) behind the command in question. Marks come behind each command that is not on the
//!    main stream, behind each command there that touches memory which one of these has touched, and otherwise where the
//!    stream is when somebody asks: so nobody waits for what was issued later than what he needs, save the first time.
//! 4. A fence has been reached when each stream has come to where it was when the fence was made. No stream waits for
//!    another because of a fence.
//! 5. A function of the host comes behind everything on all streams, and everything behind it.
//! 6. What the driver has taken is no error any more, and has a fence: events for the marks behind it are there before it is
//!    given, since they take memory.

use std::collections::{HashMap, VecDeque};
use std::ptr::null_mut;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::Context;
use super::part::Part;
use super::sys::{self, CuDevicePtr, CuEvent, CuStream};
use crate::queue::HostRange;
use crate::{Completion, Result};

/// How long a wait polls before it blocks: most small kernels end within it, and a blocking wake-up costs more.
const SPIN: Duration = Duration::from_micros(30);
/// Buffers whose last uses are remembered before those that are long done are forgotten.
const MAX_USES: usize = 256;
/// The same of ranges of host memory; when there are more, the oldest count as all of memory.
const MAX_HOST_USES: usize = 64;

/// One of the streams.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Lane {
    Main,
    /// Large copies to the device.
    Up,
    /// Large copies from the device.
    Down,
    /// Every other list.
    Side,
}

impl Lane {
    const ALL: [Lane; LANES] = [Lane::Main, Lane::Up, Lane::Down, Lane::Side];
}

const LANES: usize = 4;

/// An event, recorded once at a time.
pub(super) struct Event {
    id: CuEvent,
    context: Arc<Context>,
}

// SAFETY: events may be used from any thread with the context current.
unsafe impl Send for Event {}
// SAFETY: as above; it is recorded again only when nobody else has it.
unsafe impl Sync for Event {}

impl Event {
    fn new(context: &Arc<Context>) -> Result<Self> {
        let d = context.enter()?;
        let mut id = null_mut();
        // SAFETY: `id` is valid.
        let code = unsafe { (d.cuEventCreate)(&mut id, sys::EVENT_BLOCKING_SYNC | sys::EVENT_DISABLE_TIMING) };
        context.check("cuEventCreate", code)?;
        Ok(Event { id, context: context.clone() })
    }

    fn is_reached(&self) -> Result<bool> {
        let d = self.context.enter()?;
        // SAFETY: the event lives as long as `self`.
        match unsafe { (d.cuEventQuery)(self.id) } {
            sys::ERROR_NOT_READY => Ok(false),
            code => self.context.check("cuEventQuery", code).map(|()| true),
        }
    }
}

impl Completion for Event {
    fn wait(&self) -> Result<()> {
        let d = self.context.enter()?;
        let begun = Instant::now();
        while begun.elapsed() < SPIN {
            if self.is_reached()? {
                return Ok(());
            }
            std::hint::spin_loop();
        }
        // SAFETY: as above.
        self.context.check("cuEventSynchronize", unsafe { (d.cuEventSynchronize)(self.id) })
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if let Ok(d) = self.context.enter() {
            // SAFETY: created in `new`, destroyed once; the driver defers this until it has been reached.
            unsafe { (d.cuEventDestroy)(self.id) };
        }
    }
}

/// Where the streams were when a fence was made: an event of each that was not known to have come so far.
pub(super) struct Reached {
    events: [Option<Arc<Event>>; LANES],
    tails: [u64; LANES],
}

impl Reached {
    pub(super) fn is_reached(&self) -> Result<bool> {
        for e in self.events.iter().flatten() {
            if !e.is_reached()? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// What can be waited for without the queue.
    pub(super) fn completion(&self) -> Arc<dyn Completion> {
        let mut events = self.events.iter().flatten();
        match (events.next(), events.next()) {
            (Some(only), None) => only.clone(),
            _ => Arc::new(All(self.events.clone())),
        }
    }
}

struct All([Option<Arc<Event>>; LANES]);

impl Completion for All {
    fn wait(&self) -> Result<()> {
        self.0.iter().flatten().try_for_each(|e| e.wait())
    }
}

/// A stream and how far everybody knows it to be.
struct Stream {
    /// Null until it is needed.
    id: CuStream,
    /// Commands so far; a command's number is this after it was issued.
    tail: u64,
    /// What the latest fence covers.
    fenced: u64,
    /// What is known to be done.
    reached: u64,
    /// Events behind some of the commands, by number.
    marks: VecDeque<(u64, Arc<Event>)>,
    /// For each stream, up to which of its commands this one has been told to wait.
    knows: [u64; LANES],
}

/// The streams of a queue.
pub(super) struct Lanes {
    context: Arc<Context>,
    /// Whose streams they are, if not the whole device's.
    part: Option<Arc<Part>>,
    streams: [Stream; LANES],
    /// Something went on another stream than the main one: uses are remembered from here on.
    beside: bool,
    /// Number of the last command on each stream that used the buffer at this address.
    uses: HashMap<CuDevicePtr, [u64; LANES]>,
    host: VecDeque<(Lane, u64, HostRange)>,
    /// What every stream must have waited for before its next command.
    floor: [u64; LANES],
    spare: Vec<Arc<Event>>,
}

// SAFETY: streams may be used from any thread with the context current; one thread at a time has `&mut`.
unsafe impl Send for Lanes {}

fn stream(context: &Context, part: Option<&Part>) -> Result<CuStream> {
    if let Some(part) = part {
        return part.stream();
    }
    let d = context.enter()?;
    let mut id = null_mut();
    // SAFETY: `id` is valid.
    context.check("cuStreamCreate", unsafe { (d.cuStreamCreate)(&mut id, sys::STREAM_NON_BLOCKING) })?;
    Ok(id)
}

impl Lanes {
    /// On the whole device, or on a part of it.
    pub(super) fn new(context: Arc<Context>, part: Option<Arc<Part>>) -> Result<Self> {
        let none =
            || Stream { id: null_mut(), tail: 0, fenced: 0, reached: 0, marks: VecDeque::new(), knows: [0; LANES] };
        let mut streams = [none(), none(), none(), none()];
        // Where something runs already, a kernel may be there that stays, and the driver had better make nothing beside that.
        if context.handle().is_some() {
            streams[0].id = match stream(&context, part.as_deref()) {
                // There may be some when it is needed.
                Err(e) if e.is_out_of_memory() => null_mut(),
                made => made?,
            };
        }
        let (uses, host, spare) = (HashMap::new(), VecDeque::new(), Vec::new());
        Ok(Lanes { context, part, streams, beside: false, uses, host, floor: [0; LANES], spare })
    }

    /// Whether they are of a part of the device.
    pub(super) fn is_part(&self) -> bool {
        self.part.is_some()
    }

    /// The stream, which is made when it is first needed.
    fn stream(&mut self, lane: Lane) -> Result<CuStream> {
        let own = &mut self.streams[lane as usize].id;
        if own.is_null() {
            *own = stream(&self.context, self.part.as_deref())?;
        }
        Ok(*own)
    }

    /// The stream for a command that uses these device buffers and this host memory, told to wait for whatever it must
    /// come behind (rule 2). [`Lanes::issued`] follows once the command has been taken.
    pub(super) fn before(
        &mut self,
        lane: Lane,
        buffers: impl Iterator<Item = CuDevicePtr>,
        host: impl Iterator<Item = HostRange>,
    ) -> Result<CuStream> {
        let own = self.stream(lane)?;
        if lane != Lane::Main && !self.beside {
            // Nothing is known of what came before.
            self.floor[0] = self.streams[0].tail;
            self.beside = true;
        }
        if self.beside {
            let mut need = self.floor;
            for b in buffers {
                let last = self.uses.get(&b).copied().unwrap_or_default();
                need.iter_mut().zip(last).for_each(|(n, l)| *n = l.max(*n));
            }
            for h in host {
                for (l, at, _) in self.host.iter().filter(|(_, _, r)| r.conflicts(&h)) {
                    need[*l as usize] = need[*l as usize].max(*at);
                }
            }
            self.await_others(lane, need)?;
        }
        self.have_events()?;
        Ok(own)
    }

    /// Rule 6: one for a mark behind the command that comes next, and one for each stream that a fence is behind.
    fn have_events(&mut self) -> Result<()> {
        let wanted = 1 + self.streams.iter().filter(|s| !s.id.is_null()).count();
        while self.spare.len() < wanted {
            self.spare.push(Arc::new(Event::new(&self.context)?));
        }
        Ok(())
    }

    /// A command is in the stream that [`Lanes::before`] gave.
    pub(super) fn issued(
        &mut self,
        lane: Lane,
        buffers: impl Iterator<Item = CuDevicePtr>,
        host: impl Iterator<Item = HostRange>,
    ) {
        self.streams[lane as usize].tail += 1;
        if !self.beside {
            return;
        }
        let at = self.streams[lane as usize].tail;
        let mut shared = lane != Lane::Main;
        for b in buffers {
            let last = self.uses.entry(b).or_default();
            last[lane as usize] = at;
            shared |= last[1..].iter().any(|n| *n != 0);
        }
        for h in host {
            self.host.push_back((lane, at, h));
            if self.host.len() > MAX_HOST_USES
                && let Some((l, at, _)) = self.host.pop_front()
            {
                self.floor[l as usize] = self.floor[l as usize].max(at);
            }
        }
        if shared {
            // A failure of the device, which whatever comes next will meet.
            _ = self.mark(lane, at);
        }
        if self.uses.len() > MAX_USES {
            let reached = self.streams.each_ref().map(|s| s.reached);
            // What is done needs no waiting; that large copies touched it is found again at the next one.
            self.uses.retain(|_, last| last.iter().zip(reached).any(|(l, r)| *l > r));
        }
    }

    /// Before a function of the host (rule 5).
    pub(super) fn before_all(&mut self) -> Result<CuStream> {
        let tails = self.streams.each_ref().map(|s| s.tail);
        let own = self.stream(Lane::Main)?;
        self.await_others(Lane::Main, tails)?;
        self.have_events()?;
        Ok(own)
    }

    /// Behind such a function.
    pub(super) fn issued_all(&mut self) {
        self.streams[0].tail += 1;
        self.floor[0] = self.streams[0].tail;
    }

    fn await_others(&mut self, lane: Lane, need: [u64; LANES]) -> Result<()> {
        for other in Lane::ALL {
            let (i, n) = (other as usize, need[other as usize]);
            if other == lane || n <= self.streams[i].reached || n <= self.streams[lane as usize].knows[i] {
                continue;
            }
            let (at, event) = self.mark(other, n)?;
            let d = self.context.enter()?;
            // SAFETY: stream and event are alive and of this context; the driver takes the event as it is now.
            let code = unsafe { (d.cuStreamWaitEvent)(self.streams[lane as usize].id, event.id, 0) };
            self.context.check("cuStreamWaitEvent", code)?;
            self.streams[lane as usize].knows[i] = at;
        }
        Ok(())
    }

    /// An event at or behind command `at` of a stream, the nearest that there is.
    fn mark(&mut self, lane: Lane, at: u64) -> Result<(u64, Arc<Event>)> {
        let s = &mut self.streams[lane as usize];
        let nearest = s.marks.partition_point(|(n, _)| *n < at);
        if let Some((n, e)) = s.marks.get(nearest) {
            return Ok((*n, e.clone()));
        }
        let event = match self.spare.pop() {
            Some(e) => e,
            None => Arc::new(Event::new(&self.context)?),
        };
        let d = self.context.enter()?;
        // SAFETY: event and stream are alive and of this context.
        self.context.check("cuEventRecord", unsafe { (d.cuEventRecord)(event.id, s.id) })?;
        s.marks.push_back((s.tail, event.clone()));
        Ok((s.tail, event))
    }

    /// Whether anything was issued since the last fence.
    pub(super) fn is_dirty(&self) -> bool {
        self.streams.iter().any(|s| s.tail > s.fenced)
    }

    /// A fence behind everything so far (rule 4).
    pub(super) fn fence(&mut self) -> Result<Reached> {
        let mut out = Reached { events: [const { None }; LANES], tails: [0; LANES] };
        for lane in Lane::ALL {
            let i = lane as usize;
            let tail = self.streams[i].tail;
            out.tails[i] = tail;
            if tail > self.streams[i].reached {
                out.events[i] = Some(self.mark(lane, tail)?.1);
            }
        }
        // Only now: what failed halfway is no fence.
        self.streams.iter_mut().zip(out.tails).for_each(|(s, tail)| s.fenced = tail);
        Ok(out)
    }

    /// A fence has been reached.
    pub(super) fn retire(&mut self, fence: Reached) {
        let Reached { events, tails } = fence;
        drop(events);
        for (s, tail) in self.streams.iter_mut().zip(tails) {
            s.reached = s.reached.max(tail);
            while let Some((n, e)) = s.marks.pop_front() {
                if n > tail {
                    s.marks.push_front((n, e));
                    break;
                }
                // Somebody may still wait on it.
                if Arc::strong_count(&e) == 1 {
                    self.spare.push(e);
                }
            }
        }
        while let Some((l, at, _)) = self.host.front()
            && *at <= self.streams[*l as usize].reached
        {
            self.host.pop_front();
        }
    }
}

impl Drop for Lanes {
    fn drop(&mut self) {
        if self.streams.iter().all(|s| s.id.is_null()) {
            return;
        }
        if let Ok(d) = self.context.enter() {
            for s in self.streams.iter().filter(|s| !s.id.is_null()) {
                // SAFETY: made by `stream`, destroyed once, after everything in it has ended.
                unsafe {
                    (d.cuStreamSynchronize)(s.id);
                    (d.cuStreamDestroy)(s.id);
                }
            }
        }
    }
}
