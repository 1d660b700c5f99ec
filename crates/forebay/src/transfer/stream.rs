//! A stream: transfers of one thread, in order.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use forebay_hal::{Buffer, Direction, Fence, Method, Queue};

use super::curve::{Curves, Host, Way};
use super::engine::{Engine, Known};
use super::pinned::{HostBytes, HostBytesMut, Pinned};
use super::plan::{self, Piece, Plan, Range, Request};
use super::ring::Ring;
use super::wait::Wait;
use crate::error::Result;

/// One in so many transfers is timed, to notice when a machine no longer is what calibration found.
const SAMPLE: u32 = 16;
/// Transfers that may be in flight; the next one waits for the oldest.
const MAX_IN_FLIGHT: usize = 64;

/// Streams that were made; each is known by its number.
static STREAMS: AtomicU64 = AtomicU64::new(0);

/// Transfers of one thread to and from one device, in order ([`Engine::stream`]).
///
/// [`Stream::write`] and [`Stream::read`] return when the bytes have arrived; [`Stream::start_write`] and
/// [`Stream::start_read`] return at once. All of them check their ranges; nothing is copied when one is wrong.
pub struct Stream {
    number: u64,
    engine: Arc<Engine>,
    queue: Box<dyn Queue>,
    /// For the mapped half of a split transfer: a mapped copy begins when all before it in its queue has ended.
    side: Box<dyn Queue>,
    ring: Ring,
    known: Arc<Known>,
    /// The queue does everything at once: it is the processor's, and there is nothing to wait for.
    at_once: bool,
    /// Transfers of fewer bytes are made by this method without asking how; 0 for none.
    unasked: usize,
    plain: Method,
    wait: Wait,
    deadline: Option<u64>,
    forced: Option<Way>,
    /// What was started and not yet found done: its fence, and when the device is expected to have done it.
    in_flight: VecDeque<(Fence, Instant)>,
    count: u32,
    late: u64,
}

/// A transfer under way ([`Stream::start_write`]).
#[must_use = "the memory comes back through `Stream::finish`"]
pub struct InFlight {
    /// A fence means something to its own stream only.
    stream: u64,
    fence: Fence,
    memory: Pinned,
}

impl Stream {
    pub(super) fn new(engine: Arc<Engine>) -> Result<Self> {
        let device = engine.device();
        // Memory first: with it the driver has begun, and queues have all that they need.
        let ring = Ring::new(&**device)?;
        let (queue, side) = (device.queue()?, device.queue()?);
        let known = engine.known();
        let (at_once, unasked, plain) = (engine.is_in_host_memory(), known.unasked, engine.plain());
        Ok(Stream {
            // A number and nothing else: no order is needed.
            number: STREAMS.fetch_add(1, Ordering::Relaxed),
            queue,
            side,
            ring,
            known,
            at_once,
            unasked,
            plain,
            wait: Wait::shortly(device.info().kind),
            deadline: None,
            forced: None,
            in_flight: VecDeque::with_capacity(MAX_IN_FLIGHT),
            count: 0,
            late: 0,
            engine,
        })
    }

    /// The engine that it belongs to.
    pub fn engine(&self) -> &Arc<Engine> {
        &self.engine
    }

    /// From now on transfers are to arrive within `deadline`: they go by the way whose slow copies are fastest. `None`
    /// goes back to the way that is fastest as a rule.
    pub fn set_deadline(&mut self, deadline: Option<Duration>) {
        self.deadline = deadline.map(|d| d.as_nanos().min(u128::from(u64::MAX)) as u64);
        self.settings_changed();
    }

    fn settings_changed(&mut self) {
        let as_planned = self.deadline.is_none() && self.forced.is_none();
        self.unasked = if as_planned { self.known.unasked } else { 0 };
    }

    /// How many transfers were not expected to meet their deadline (they were made all the same).
    pub fn expected_late(&self) -> u64 {
        self.late
    }

    /// From now on all transfers go this way, whatever is planned; for measurements.
    ///
    /// # Errors
    /// [`forebay_hal::Error::Unsupported`] for a method that the device does not have.
    pub fn force(&mut self, way: Option<Way>) -> Result<()> {
        if let Some(Way::Direct(m)) = way
            && !self.engine.device().methods().contains(&m)
        {
            let device = self.engine.device().info().name.clone();
            return Err(forebay_hal::Error::Unsupported { device, what: format!("copies by {}", m.name()) }.into());
        }
        self.forced = way;
        self.settings_changed();
        Ok(())
    }

    pub(super) fn set_wait(&mut self, wait: Wait) {
        self.wait = wait;
    }

    pub(super) fn ring(&self) -> &Ring {
        &self.ring
    }

    /// Sends `from` to `device` at `offset`; it has arrived when this returns.
    ///
    /// # Errors
    /// [`forebay_hal::Error::Invalid`] for a range outside of the buffer or a buffer of another device,
    /// [`forebay_hal::Error::Lost`] when the device is gone.
    pub fn write<H: HostBytes + ?Sized>(&mut self, device: &Buffer, offset: usize, from: &H) -> Result<()> {
        let (bytes, host) = from.span();
        // SAFETY: borrowed until this returns, and by then nothing is in flight; nothing is written to it.
        unsafe { self.run(Direction::ToDevice, device, offset, bytes.as_ptr().cast_mut(), bytes.len(), host) }
    }

    /// Sends `from` without proof of arrival, where the processor stores it itself: it arrives soon, and before whatever
    /// this stream posts to that memory afterwards. A doorbell, that is; what must have arrived takes [`Stream::write`].
    /// Nothing that was started may use that part of the memory any more.
    ///
    /// # Errors
    /// As [`Stream::write`].
    pub fn post(&mut self, device: &Buffer, offset: usize, from: &[u8]) -> Result<()> {
        self.check(device, offset, from.len())?;
        if !self.in_flight.is_empty() {
            self.settle()?;
        }
        let engine = self.engine.mapping().map(|_| self.engine.clone());
        match engine.as_ref().map(|e| e.try_mapping()) {
            // Another stream has the mapping: this one goes the other way, and is awaited.
            Some(None) => self.write(device, offset, from),
            // SAFETY: the bytes are there; all that this stream began has ended.
            _ => unsafe { self.queue.post(device, offset, from.as_ptr(), from.len()).map_err(Into::into) },
        }
    }

    /// Brings bytes from `device` at `offset` until `to` is full.
    ///
    /// # Errors
    /// As [`Stream::write`].
    pub fn read<H: HostBytesMut + ?Sized>(&mut self, device: &Buffer, offset: usize, to: &mut H) -> Result<()> {
        let (bytes, host) = to.span_mut();
        // SAFETY: borrowed until this returns, and by then nothing is in flight.
        unsafe { self.run(Direction::ToHost, device, offset, bytes.as_mut_ptr(), bytes.len(), host) }
    }

    /// As [`Stream::write`] or [`Stream::read`], for bytes of which there is an address only.
    ///
    /// # Errors
    /// As [`Stream::write`].
    ///
    /// # Safety
    /// `at` is valid for reading (to the device) or writing (to the host) `bytes` until this returns, and is in memory from
    /// [`Engine::pinned`] if `host` says so.
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
        unsafe { self.run(direction, device, offset, at, bytes, host) }
    }

    /// Sends several parts of `from` at once, for one wait; places on both sides are those of `ranges`. What overlaps
    /// ends up as if they were sent one after the other.
    ///
    /// # Errors
    /// As [`Stream::write`].
    pub fn write_batch<H: HostBytes + ?Sized>(&mut self, device: &Buffer, from: &H, ranges: &[Range]) -> Result<()> {
        let (bytes, host) = from.span();
        // SAFETY: as in `write`.
        unsafe { self.run_batch(Direction::ToDevice, device, bytes.as_ptr().cast_mut(), bytes.len(), host, ranges) }
    }

    /// Brings several parts at once, for one wait.
    ///
    /// # Errors
    /// As [`Stream::write`].
    pub fn read_batch<H: HostBytesMut + ?Sized>(
        &mut self,
        device: &Buffer,
        to: &mut H,
        ranges: &[Range],
    ) -> Result<()> {
        let (bytes, host) = to.span_mut();
        // SAFETY: as in `read`.
        unsafe { self.run_batch(Direction::ToHost, device, bytes.as_mut_ptr(), bytes.len(), host, ranges) }
    }

    /// As [`Stream::write_batch`] or [`Stream::read_batch`], for `len` bytes of which there is an address only.
    ///
    /// # Errors
    /// As [`Stream::write`].
    ///
    /// # Safety
    /// As [`Stream::transfer`], for all of the bytes.
    pub unsafe fn transfer_batch(
        &mut self,
        direction: Direction,
        device: &Buffer,
        at: *mut u8,
        len: usize,
        host: Host,
        ranges: &[Range],
    ) -> Result<()> {
        // SAFETY: by the contract.
        unsafe { self.run_batch(direction, device, at, len, host, ranges) }
    }

    /// Begins to send all of `from`; [`Stream::finish`] gives the memory back. Later transfers of this stream come
    /// behind it.
    ///
    /// # Errors
    /// As [`Stream::write`].
    pub fn start_write(&mut self, device: &Buffer, offset: usize, from: Pinned) -> Result<InFlight> {
        self.start(Direction::ToDevice, device, offset, from)
    }

    /// Begins to fill `to`.
    ///
    /// # Errors
    /// As [`Stream::write`].
    pub fn start_read(&mut self, device: &Buffer, offset: usize, to: Pinned) -> Result<InFlight> {
        self.start(Direction::ToHost, device, offset, to)
    }

    /// Waits for a transfer that this stream began, and gives its memory back.
    ///
    /// # Errors
    /// [`forebay_hal::Error::Lost`] when the device is gone, [`forebay_hal::Error::Invalid`] for another stream's transfer; the
    /// memory is freed then, as soon as nothing uses it.
    pub fn finish(&mut self, transfer: InFlight) -> Result<Pinned> {
        if transfer.stream != self.number {
            let what = "a transfer that another stream began is that one's to finish".into();
            return Err(forebay_hal::Error::Invalid { device: self.name(), what }.into());
        }
        self.wait.until(&mut *self.queue, transfer.fence)?;
        self.forget_done()?;
        Ok(transfer.memory)
    }

    /// Copies within the device.
    ///
    /// # Errors
    /// As [`Stream::write`], and [`forebay_hal::Error::Invalid`] when both ranges overlap.
    pub fn copy(&mut self, from: &Buffer, from_at: usize, to: &Buffer, to_at: usize, bytes: usize) -> Result<()> {
        self.check(from, from_at, bytes)?;
        self.check(to, to_at, bytes)?;
        // Both ranges are in bounds, so nothing overflows.
        if Arc::ptr_eq(from, to) && from_at < to_at + bytes && to_at < from_at + bytes && bytes > 0 {
            let what = format!("copy of {bytes} B at {from_at} to {to_at} of the same buffer: the ranges overlap");
            return Err(forebay_hal::Error::Invalid { device: self.name(), what }.into());
        }
        if bytes > 0 {
            self.queue.copy(from, from_at, to, to_at, bytes)?;
            self.settle()?;
        }
        Ok(())
    }

    /// Copies to another device: directly, if that one reaches this one's memory ([`forebay_hal::Device::reaches`]), else by way
    /// of the host: the next piece is fetched while the last one is sent.
    ///
    /// # Errors
    /// As [`Stream::write`], for either device.
    pub fn relay(
        &mut self,
        from: &Buffer,
        from_at: usize,
        other: &mut Stream,
        to: &Buffer,
        to_at: usize,
        bytes: usize,
    ) -> Result<()> {
        self.check(from, from_at, bytes)?;
        other.check(to, to_at, bytes)?;
        if bytes > 0 && other.engine.device().reaches(from) {
            // What this stream was told before comes first.
            self.settle()?;
            other.queue.copy(from, from_at, to, to_at, bytes)?;
            return other.settle();
        }
        const PIECE: usize = 256 << 10;
        let mut spare = vec![self.engine.pinned(PIECE.min(bytes))?, self.engine.pinned(PIECE.min(bytes))?];
        let mut sent: Option<(Fence, Pinned)> = None;
        let moved = (0..bytes.div_ceil(PIECE)).try_for_each(|i| -> Result<()> {
            let (at, n) = (i * PIECE, PIECE.min(bytes - i * PIECE));
            let Some(mut piece) = spare.pop() else { return Ok(()) };
            self.read(from, from_at + at, &mut piece.part_mut(0..n))?;
            if let Some((fence, memory)) = sent.take() {
                other.wait.until(&mut *other.queue, fence)?;
                spare.push(memory);
            }
            other.queue.copy(&piece.buffer, 0, to, to_at + at, n)?;
            sent = Some((other.queue.fence()?, piece));
            Ok(())
        });
        moved.and(other.settle())
    }

    fn name(&self) -> String {
        self.engine.device().info().name.clone()
    }

    fn check(&self, device: &Buffer, offset: usize, bytes: usize) -> Result<()> {
        if offset.checked_add(bytes).is_some_and(|end| end <= device.len()) {
            return Ok(());
        }
        let what = format!("transfer of {bytes} B at {offset} of a buffer of {} B", device.len());
        Err(forebay_hal::Error::Invalid { device: self.name(), what }.into())
    }

    fn start(&mut self, direction: Direction, device: &Buffer, offset: usize, memory: Pinned) -> Result<InFlight> {
        let bytes = memory.len();
        self.check(device, offset, bytes)?;
        if self.in_flight.len() == MAX_IN_FLIGHT
            && let Some((oldest, _)) = self.in_flight.pop_front()
        {
            self.wait.until(&mut *self.queue, oldest)?;
        }
        match direction {
            Direction::ToDevice => self.queue.copy(&memory.buffer, 0, device, offset, bytes)?,
            Direction::ToHost => self.queue.copy(device, offset, &memory.buffer, 0, bytes)?,
        }
        let fence = self.queue.fence()?;
        let cost = self.engine.cost(direction, bytes as u64, Host::Pinned).median;
        let now = Instant::now();
        let begins = self.in_flight.back().map_or(now, |(_, end)| now.max(*end));
        self.in_flight.push_back((fence, begins + Duration::from_nanos(cost)));
        Ok(InFlight { stream: self.number, fence, memory })
    }

    fn forget_done(&mut self) -> Result<()> {
        while let Some((fence, _)) = self.in_flight.front() {
            if !self.queue.done(*fence)? {
                break;
            }
            self.in_flight.pop_front();
        }
        Ok(())
    }

    /// Time until the device is expected to have done what was started, ns.
    fn backlog(&mut self) -> Result<u64> {
        self.forget_done()?;
        let end = self.in_flight.back().map(|(_, end)| end.saturating_duration_since(Instant::now()));
        Ok(end.map_or(0, |d| d.as_nanos().min(u128::from(u64::MAX)) as u64))
    }

    /// Waits for everything so far.
    #[inline]
    fn settle(&mut self) -> Result<()> {
        let fence = self.queue.fence()?;
        self.wait.until(&mut *self.queue, fence)?;
        self.ring.drained();
        if !self.in_flight.is_empty() {
            self.in_flight.clear();
        }
        Ok(())
    }

    /// # Safety
    /// `p` is valid for reading (to the device) or writing (to the host) `bytes` until this returns.
    unsafe fn run(
        &mut self,
        direction: Direction,
        device: &Buffer,
        offset: usize,
        p: *mut u8,
        bytes: usize,
        host: Host,
    ) -> Result<()> {
        if bytes < self.unasked {
            // The queue looks at the range, too: once is enough while nothing is wrong.
            // SAFETY: by the contract; it is done when this returns.
            let done = unsafe { self.queue.transfer(self.plain, direction, device, offset, p, bytes) };
            return done.or_else(|e| self.check(device, offset, bytes).and(Err(e.into())));
        }
        self.check(device, offset, bytes)?;
        if bytes == 0 {
            return Ok(());
        }
        let host = self.engine.place(host);
        if self.engine.refresh(&mut self.known) {
            self.settings_changed();
        }
        let to = Target { direction, device, offset, host: p };
        self.count = self.count.wrapping_add(1);
        // Only where the mapping has to be shared with care does its lock need the engine beside `self`.
        let engine = self.engine.mapping().map(|_| self.engine.clone());
        let mapping = engine.as_ref().map_or(Some(None), |e| e.try_mapping());
        let no_mapping = mapping.is_none() || !device.is_mapped();
        let quick = if self.deadline.is_none() && !no_mapping && self.in_flight.is_empty() {
            self.known.table.way(direction, bytes as u64, host)
        } else {
            None
        };
        if let Some(way) = self.forced.or(quick) {
            let sample = self.forced.is_none() && self.count.is_multiple_of(SAMPLE);
            // What does not go by the mapping leaves it to others while it waits.
            let _mapping = mapping.filter(|_| way == Way::Direct(Method::Mapped));
            let begun = sample.then(Instant::now);
            // SAFETY: by the contract.
            let done = unsafe { self.go(&to, &[Piece { offset: 0, bytes: bytes as u64, way }]) };
            if let (Some(begun), Ok(())) = (begun, &done) {
                self.engine.observe(&self.known, way, direction, host, bytes as u64, begun.elapsed());
            }
            return done;
        }
        let backlog = self.backlog()?;
        let request = Request { direction, bytes: bytes as u64, host, deadline: self.deadline, backlog, no_mapping };
        let Plan { pieces, late, alone, .. } = plan::plan(&request, &self.known.curves);
        self.late += u64::from(late);
        if !pieces.iter().any(|p| p.way == Way::Direct(Method::Mapped)) {
            drop(mapping);
        }
        if pieces.len() > 1 && !self.in_flight.is_empty() {
            // The mapped half goes by a queue of its own, which knows nothing of what was started on the other.
            self.settle()?;
        }
        let begun = Instant::now();
        // SAFETY: by the contract.
        unsafe { self.go(&to, &pieces)? };
        if pieces.len() > 1 {
            self.engine.observe_split(&self.known, direction, alone, begun.elapsed());
        }
        Ok(())
    }

    /// Makes all pieces and waits for them, whatever happens to one of them: afterwards nothing uses the host's bytes.
    ///
    /// # Safety
    /// As [`Stream::run`].
    #[inline]
    unsafe fn go(&mut self, to: &Target<'_>, pieces: &[Piece]) -> Result<()> {
        let alone = pieces.len() == 1;
        // SAFETY: by the contract.
        let made = pieces.iter().try_for_each(|p| unsafe { self.piece(to, p, alone) });
        match pieces {
            // It has arrived.
            [Piece { way: Way::Direct(Method::Mapped), .. }] if made.is_ok() => made,
            [Piece { way: Way::Direct(_), .. }] if self.at_once => made,
            _ => made.and(self.settle()),
        }
    }

    /// # Safety
    /// As [`Stream::run`]; and nothing touches the host's bytes until the queue has been awaited.
    #[inline]
    unsafe fn piece(&mut self, to: &Target<'_>, p: &Piece, alone: bool) -> Result<()> {
        let (offset, n) = (to.offset + p.offset as usize, p.bytes as usize);
        // SAFETY: a piece lies within the transfer.
        let host = unsafe { to.host.add(p.offset as usize) };
        // SAFETY (all): by the contract.
        match (p.way, to.direction) {
            (Way::Direct(method), direction) => {
                let side = method == Method::Mapped && !alone;
                let queue = if side { &mut self.side } else { &mut self.queue };
                // SAFETY: see above.
                unsafe { queue.transfer(method, direction, to.device, offset, host, n)? };
                if method == Method::Mapped {
                    return Ok(());
                }
                if !alone {
                    // Begins now, not when somebody waits.
                    self.queue.fence()?;
                }
                Ok(())
            }
            // SAFETY: see above.
            (Way::Staged, Direction::ToDevice) => unsafe {
                self.ring.write(&mut *self.queue, self.wait, to.device, offset, host, n)
            },
            // SAFETY: see above.
            (Way::Staged, Direction::ToHost) => unsafe {
                self.ring.read(&mut *self.queue, self.wait, to.device, offset, host, n)
            },
        }
    }

    /// # Safety
    /// As [`Stream::run`].
    unsafe fn run_batch(
        &mut self,
        direction: Direction,
        device: &Buffer,
        p: *mut u8,
        len: usize,
        host: Host,
        ranges: &[Range],
    ) -> Result<()> {
        for r in ranges {
            self.check(device, usize::try_from(r.device).unwrap_or(usize::MAX), r.bytes as usize)?;
            if r.host.checked_add(r.bytes).is_none_or(|end| end > len as u64) {
                let what = format!("transfer of {} B at {} of {len} B of the host's", r.bytes, r.host);
                return Err(forebay_hal::Error::Invalid { device: self.name(), what }.into());
            }
        }
        let host = self.engine.place(host);
        let merged = plan::merge(ranges.iter().copied());
        if self.engine.refresh(&mut self.known) {
            self.settings_changed();
        }
        let engine = self.engine.clone();
        let mapping = engine.try_mapping();
        let no_mapping = mapping.is_none() || !device.is_mapped();
        let backlog = self.backlog()?;
        let request = Request { direction, bytes: 0, host, deadline: self.deadline, backlog, no_mapping };
        let (way, cost) = plan::batch(&request, &merged, &self.known.curves);
        self.late += u64::from(self.deadline.is_some_and(|d| cost.tail.saturating_add(backlog) > d));
        let way = self.forced.unwrap_or(way);
        let _mapping = mapping.filter(|_| way == Way::Direct(Method::Mapped));
        let made = merged.iter().try_for_each(|r| {
            let to = Target {
                direction,
                device,
                offset: r.device as usize,
                // SAFETY: within the host's bytes (checked).
                host: unsafe { p.add(r.host as usize) },
            };
            // SAFETY: by the contract; awaited below.
            unsafe { self.piece(&to, &Piece { offset: 0, bytes: r.bytes, way }, true) }
        });
        made.and(self.settle())
    }

    /// What a transfer takes by the engine alone, and split, ns; for calibration. None where it cannot be split.
    pub(super) fn alone_and_split(
        &mut self,
        direction: Direction,
        device: &Buffer,
        memory: &mut Pinned,
        bytes: usize,
        curves: &Curves,
    ) -> Result<Option<(u64, u64)>> {
        let request = Request::new(direction, bytes as u64, Host::Pinned);
        let Some(at) = plan::cut(&request, curves) else { return Ok(None) };
        let to = Target { direction, device, offset: 0, host: memory.as_mut_ptr() };
        let first = Piece { offset: 0, bytes: at, way: Way::Direct(Method::Engine) };
        let second = Piece { offset: at, bytes: bytes as u64 - at, way: Way::Direct(Method::Mapped) };
        let mut time = |pieces: &[Piece]| -> Result<u64> {
            let begun = Instant::now();
            // SAFETY: `memory` has the bytes and is borrowed; `go` waits.
            unsafe { self.go(&to, pieces)? };
            Ok(begun.elapsed().as_nanos().min(u128::from(u64::MAX)) as u64)
        };
        let whole = Piece { offset: 0, bytes: bytes as u64, way: Way::Direct(Method::Engine) };
        Ok(Some((time(&[whole])?, time(&[first, second])?)))
    }
}

/// Both ends of a transfer.
struct Target<'a> {
    direction: Direction,
    device: &'a Buffer,
    offset: usize,
    host: *mut u8,
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use forebay_hal::{Kind, discover};

    use super::*;
    use crate::stand_in;

    /// A small copy by the mapping need not wait for a large one of another stream's, nor go behind it.
    #[test]
    fn what_does_not_go_by_the_mapping_leaves_it_to_others() {
        if !stand_in::is_here() {
            return stand_in::again("transfer::stream::tests::what_does_not_go_by_the_mapping_leaves_it_to_others");
        }
        let device = discover(&[Kind::Cuda]).0.remove(0);
        let by_engine = Some(Way::Direct(Method::Engine));
        let range = Range { host: 0, device: 0, bytes: 64 };
        type Write = fn(&mut Stream, &Buffer, &[u8; 64], Range) -> Result<()>;
        let writes: [Write; 2] = [|s, b, d, _| s.write(b, 0, &d[..]), |s, b, d, r| s.write_batch(b, &d[..], &[r])];
        for write in writes {
            let engine = Engine::with_curves(device.clone(), Curves::default());
            let (memory, mut stream) = (engine.memory(64).unwrap(), engine.stream().unwrap());
            stream.force(by_engine).unwrap();
            // The device is busy until it is told.
            let (tell, told) = channel::<()>();
            stream.queue.host_fn(Box::new(move || _ = told.recv())).unwrap();
            std::thread::scope(|s| {
                let copy = s.spawn(|| write(&mut stream, &memory, &[7; 64], range));
                let begun = Instant::now();
                let is_free = || engine.try_mapping().is_some();
                let mut seen = Vec::new();
                // It looks at the mapping itself for a moment.
                while seen.len() < 5 && begun.elapsed() < Duration::from_secs(5) {
                    std::thread::sleep(Duration::from_millis(20));
                    if is_free() {
                        seen.push(begun.elapsed());
                    }
                }
                let waits = !copy.is_finished();
                tell.send(()).unwrap();
                copy.join().unwrap().unwrap();
                assert!(waits && seen.len() == 5, "while another one copies: {waits}, free at {seen:?}");
            });
        }
    }
}
