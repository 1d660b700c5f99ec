//! The host's side of a grid: rings, completions, life, and the watchdog.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use forebay_hal::cpu::streaming;

use super::call::{Call, Completion};
use super::heap::HeapUse;
use super::layout::{self, ARGS, RESULT, Slot};
use super::site::{Blocks, HostSide, Site};
use super::watch::Watch;
use super::{Builder, Error, Result};

/// How long a wait spins before it sleeps between looks.
const SPIN: Duration = Duration::from_micros(50);
const NAP: Duration = Duration::from_micros(50);
/// A block that is busy and whose heart has stood still for so long is stuck.
const STILL: Duration = Duration::from_secs(1);

/// How long dropping a grid waits for its blocks.
const LEAVE: Duration = Duration::from_secs(1);

/// A submitted task. Dropping it lets the task go on; its completion is forgotten.
#[derive(Debug)]
#[must_use = "a completion is had by waiting for its ticket"]
pub struct Ticket {
    ring: usize,
    number: u32,
    function: u32,
    grid: Arc<Shared>,
}

/// A block that makes no progress.
#[derive(Clone, Debug)]
pub struct Stuck {
    /// Its number.
    pub block: usize,
    /// The function that it runs.
    pub function: String,
    /// For how long its heart has stood still.
    pub still: Duration,
}

impl std::fmt::Display for Stuck {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "block {} has been in {:?} for {:?} without a sign", self.block, self.function, self.still)
    }
}

/// The host's side of a ring.
#[derive(Default)]
struct Producer {
    /// Next ticket.
    tail: u32,
    /// Of each slot, whether it was ever filled, and whether somebody still waits for what is (or will be) in its completion.
    filled: Vec<bool>,
    wanted: Vec<bool>,
    /// Completions whose slot was needed before they were fetched.
    kept: HashMap<u32, (u32, [u8; RESULT])>,
}

/// What tickets and the grid share.
struct Shared {
    site: Box<dyn Site>,
    host: HostSide,
    /// Names of the functions.
    functions: Mutex<Arc<Vec<String>>>,
    rings: [Mutex<Producer>; 2],
    sizes: [usize; 2],
    /// Epoch of each block when it last changed, and when that was.
    seen: Mutex<Vec<(u32, Instant)>>,
    /// 0 while tasks are taken, 1 once they are not, 2 when no block runs any more.
    stopped: AtomicU32,
    /// Number of functions there are.
    known: AtomicU32,
}

// SAFETY: the addresses in `host` are the site's, which lives as long; who writes what there is the protocol's
// (docs/resident.md).
unsafe impl Send for Shared {}
// SAFETY: as above.
unsafe impl Sync for Shared {}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Grid").field("functions", &self.functions()).finish_non_exhaustive()
    }
}

/// A word that blocks write or read.
///
/// # Safety
/// `p` is valid and aligned for as long as the reference is used.
unsafe fn word<'a>(p: *mut u32) -> &'a AtomicU32 {
    // SAFETY: by the contract.
    unsafe { AtomicU32::from_ptr(p) }
}

impl Shared {
    fn producer(&self, ring: usize) -> MutexGuard<'_, Producer> {
        self.rings[ring].lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn at(&self, ring: usize, number: u32) -> (usize, usize) {
        let slot = number as usize & (self.sizes[ring] - 1);
        (slot, slot + if ring == 0 { 0 } else { self.sizes[0] })
    }

    fn slot(&self, ring: usize, slot: usize) -> *mut Slot {
        // SAFETY: the memory lives as long as `self`, and `slot` is below the ring's size.
        unsafe { self.host.slots[ring].add(slot) }
    }

    /// The completion of a ticket, if it is there.
    fn fetch(&self, ring: usize, number: u32) -> Option<(u32, [u8; RESULT])> {
        let (_, root) = self.at(ring, number);
        // SAFETY: within the completions; `seq` is atomic, and the rest is the host's once it has the ticket's value and
        // until the slot is filled again, which the caller's lock on the ring prevents.
        unsafe {
            let done = self.host.done.add(root);
            let there = word(&raw mut (*done).seq).load(Ordering::Acquire) == number.wrapping_add(1);
            there.then(|| ((*done).status, (*done).result))
        }
    }

    fn functions(&self) -> Arc<Vec<String>> {
        self.functions.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn name(&self, function: u32) -> String {
        self.functions().get(function as usize).cloned().unwrap_or_else(|| function.to_string())
    }

    /// The number of the last ticket whose root this is.
    fn ticket_of(&self, root: usize) -> u32 {
        let (ring, slot) = if root < self.sizes[0] { (0, root) } else { (1, root - self.sizes[0]) };
        let last = self.producer(ring).tail.wrapping_sub(1);
        let back = last.wrapping_sub(slot as u32) & (self.sizes[ring] as u32 - 1);
        last.wrapping_sub(back)
    }

    /// The error of a grid that ended out of order, if it has.
    fn lost(&self) -> Option<Error> {
        let why = self.site.fault()?;
        let mut running = Vec::new();
        for block in 0..self.seen.lock().unwrap_or_else(PoisonError::into_inner).len() {
            // SAFETY: within the beats; all that is read is atomic words.
            let (busy, function, root) = unsafe {
                let beat = self.host.beats.add(block);
                let read = |p: *mut u32| word(p).load(Ordering::Acquire);
                (read(&raw mut (*beat).busy), read(&raw mut (*beat).function), read(&raw mut (*beat).root))
            };
            if busy != 0 {
                running.push(format!("{} (ticket {})", self.name(function), self.ticket_of(root as usize)));
            }
        }
        Some(Error::Lost { why, running })
    }

    /// Fills a slot that is free; the last word of it is its number.
    ///
    /// # Safety
    /// `to` is a slot of this grid that the caller may fill.
    unsafe fn fill(&self, to: *mut Slot, call: &Call, seq: u32) {
        let slot = Slot {
            function: call.function,
            fuel: call.fuel,
            first: call.first,
            count: call.count,
            args: call.args,
            unused: 0,
            seq,
        };
        // SAFETY: by the contract. A slot is eight words of 8 bytes without padding; in ordinary memory the last one is
        // stored behind the others, in the device's as `store_line` does.
        unsafe {
            if self.host.mapped {
                streaming::store_line(&std::mem::transmute::<Slot, [u64; 8]>(slot), to.cast());
                return;
            }
            // Not `seq` with the others: a block may be looking at it.
            (*to).function = slot.function;
            (*to).fuel = slot.fuel;
            (*to).first = slot.first;
            (*to).count = slot.count;
            (*to).args = slot.args;
            word(&raw mut (*to).seq).store(seq, Ordering::Release);
        }
    }

    /// Writes the stop word.
    fn write_stop(&self, stop: u32) {
        // SAFETY: the memory lives as long as `self`; the word is atomic.
        unsafe { word(&raw mut (*self.host.control).stop) }.store(stop, Ordering::Release);
        // Stores to the device's memory may be held back until something pushes them out.
        std::sync::atomic::fence(Ordering::SeqCst);
    }

    fn stuck(&self) -> Option<Stuck> {
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        let mut worst: Option<Stuck> = None;
        for (block, seen) in seen.iter_mut().enumerate() {
            // SAFETY: within the beats; all that is read is atomic words.
            let (epoch, busy, function) = unsafe {
                let beat = self.host.beats.add(block);
                let read = |p: *mut u32| word(p).load(Ordering::Acquire);
                (read(&raw mut (*beat).epoch), read(&raw mut (*beat).busy), read(&raw mut (*beat).function))
            };
            if epoch != seen.0 || busy == 0 {
                *seen = (epoch, Instant::now());
            } else if seen.1.elapsed() > STILL {
                let still = seen.1.elapsed();
                if worst.as_ref().is_none_or(|w| w.still < still) {
                    worst = Some(Stuck { block, function: self.name(function), still });
                }
            }
        }
        worst
    }
}

/// A running grid. Dropping it ends it after the tasks that are running; blocks in tasks that do not end are left behind
/// after a second, with the memory that they use.
pub struct Grid {
    shared: Arc<Shared>,
    /// None once they have ended.
    blocks: Option<Box<dyn Blocks>>,
    watch: Watch,
}

impl Grid {
    pub(super) fn start(with: &Builder, site: Box<dyn Site>) -> Result<Self> {
        let (rings, host) = ([with.sizes.ring; 2], site.host_side());
        let producer = |n: usize| {
            let (filled, wanted) = (vec![false; n], vec![false; n]);
            Mutex::new(Producer { tail: 0, filled, wanted, kept: HashMap::new() })
        };
        let blocks = site.blocks();
        let shared = Arc::new(Shared {
            site,
            host,
            known: AtomicU32::new(with.functions.len() as u32),
            functions: Mutex::new(Arc::new(with.functions.clone())),
            rings: rings.map(producer),
            sizes: rings,
            seen: Mutex::new(vec![(0, Instant::now()); blocks]),
            stopped: AtomicU32::new(0),
        });
        let blocks = Some(shared.site.run(shared.clone())?);
        Ok(Grid { shared, blocks, watch: Watch::default() })
    }

    /// Whose memory its tasks reach; none: the host's as it is.
    pub(super) fn memory_id(&self) -> Option<u64> {
        self.shared.site.memory_id()
    }

    /// How many blocks it has.
    pub fn size(&self) -> usize {
        self.shared.site.blocks()
    }

    /// The number of a function.
    ///
    /// # Errors
    /// [`Error::NoFunction`].
    pub fn function(&self, name: &str) -> Result<u32> {
        let known = self.shared.functions();
        let found = known.iter().position(|n| n == name);
        let missing = || Error::NoFunction { name: name.into(), known: known.join(", ") };
        found.map(|i| i as u32).ok_or_else(missing)
    }

    /// Submits a task, if there is room.
    ///
    /// # Errors
    /// [`Error::Full`], [`Error::NoFunction`], [`Error::Arguments`], [`Error::Stopped`].
    pub fn try_submit(&self, call: Call) -> Result<Ticket> {
        let s = &self.shared;
        if call.given > ARGS {
            return Err(Error::Arguments { is: call.given });
        }
        if call.function >= s.known.load(Ordering::Relaxed) {
            let known = s.functions().join(", ");
            return Err(Error::NoFunction { name: format!("number {}", call.function), known });
        }
        let ring = usize::from(!call.urgent);
        let mut p = s.producer(ring);
        if s.stopped.load(Ordering::Acquire) != 0 {
            return Err(Error::Stopped);
        }
        let number = p.tail;
        let (slot, _) = s.at(ring, number);
        let size = s.sizes[ring];
        let before = number.wrapping_sub(size as u32);
        if std::mem::replace(&mut p.filled[slot], true) {
            // Rule 2 of the protocol: the slot is free when its last task's completion has been seen.
            let Some(done) = s.fetch(ring, before) else { return Err(Error::Full(size)) };
            if std::mem::take(&mut p.wanted[slot]) {
                p.kept.insert(before, done);
            }
        }
        p.tail = number.wrapping_add(1);
        p.wanted[slot] = true;
        // SAFETY: the slot is free (above), and the ring is locked: nobody else writes it, and no block reads it before
        // `seq` says so.
        unsafe { s.fill(s.slot(ring, slot), &call, number.wrapping_add(1)) };
        Ok(Ticket { ring, number, function: call.function, grid: s.clone() })
    }

    /// Submits a task; waits while the ring is full.
    ///
    /// # Errors
    /// As [`Grid::try_submit`], but for [`Error::Full`].
    pub fn submit(&self, call: Call) -> Result<Ticket> {
        let begun = Instant::now();
        loop {
            match self.try_submit(call) {
                Err(Error::Full(_)) if begun.elapsed() < SPIN => std::hint::spin_loop(),
                Err(Error::Full(_)) => match self.shared.lost() {
                    Some(e) => return Err(e),
                    None => std::thread::sleep(NAP),
                },
                other => return other,
            }
        }
    }

    /// Waits until a task and all that came of it are done.
    ///
    /// # Errors
    /// What went wrong with it; [`Error::Stopped`] when the grid ended before.
    pub fn wait(&self, ticket: Ticket) -> Result<Completion> {
        ticket.wait_until(None).map_err(|(e, _)| e)
    }

    /// Waits so long at most; the ticket comes back with [`Error::TimedOut`], which names a block that is stuck.
    ///
    /// # Errors
    /// As [`Grid::wait`].
    pub fn wait_for(&self, ticket: Ticket, time: Duration) -> Result<Completion, (Error, Option<Ticket>)> {
        ticket.wait_until(Some(time))
    }

    /// What is taken of the heap, and what is left; none when the grid has no heap ([`super::Builder::heap`]), or is lost.
    pub fn heap(&self) -> Option<HeapUse> {
        self.shared.site.heap_use()?.ok()
    }

    /// A block that makes no progress, if there is one: it has been in the same task for a second.
    pub fn stuck(&self) -> Option<Stuck> {
        self.shared.stuck()
    }

    /// Submits a task, and calls `then` with what comes of it, on a thread of the grid. A panic there ends only that call.
    ///
    /// # Errors
    /// As [`Grid::submit`].
    pub fn submit_then(&self, call: Call, then: impl FnOnce(Result<Completion>) + Send + 'static) -> Result<()> {
        let ticket = self.submit(call)?;
        self.watch.add(ticket, Box::new(then))
    }

    /// Ends the grid after all that was submitted is done, and frees its threads. Tickets stay good.
    ///
    /// # Errors
    /// [`Error::Stopped`] if it has been stopped before.
    pub fn drain(&mut self) -> Result<()> {
        self.end(layout::STOP_DRAIN, None)
    }

    /// Ends the grid after the tasks that are running. What was not begun is [`Error::Stopped`] for whoever waits for it.
    ///
    /// # Errors
    /// [`Error::Stopped`] if it has been stopped before.
    pub fn stop(&mut self) -> Result<()> {
        self.end(layout::STOP_NOW, None)
    }

    /// [`Grid::stop`] that waits so long at most for the tasks that are running. After [`Error::TimedOut`], which names a block
    /// that is stuck, it can be called again, or the grid dropped.
    ///
    /// # Errors
    /// As [`Grid::stop`]; [`Error::TimedOut`].
    pub fn stop_within(&mut self, time: Duration) -> Result<()> {
        self.end(layout::STOP_NOW, Some(time))
    }

    /// Exchanges the task functions: those of `with` are built, what was submitted is done, and the grid goes on with
    /// them. Heap, sizes and tickets stay; what `with` says of sizes is not looked at. Numbers of functions
    /// ([`Grid::function`]) are new.
    ///
    /// # Errors
    /// As [`Builder::start_on_cpu`], after which the grid goes on as it was; [`Error::Stopped`] if it has been stopped before.
    pub fn reload(&mut self, with: &Builder) -> Result<()> {
        if self.blocks.is_none() {
            return Err(Error::Stopped);
        }
        with.check()?;
        let s = self.shared.clone();
        let loaded = match s.site.loads_beside() {
            true => {
                s.site.load(with)?;
                self.end(layout::STOP_DRAIN, None)
            }
            // The grid would be in the way, so it is started again whatever comes of it.
            false => self.end(layout::STOP_DRAIN, None).and_then(|()| s.site.load(with)),
        };
        if let Err(Error::Lost { .. } | Error::Stopped) = loaded {
            return loaded;
        }
        // Tickets that blocks had taken, and nobody filled, went with them.
        s.site.set_heads([s.producer(0).tail, s.producer(1).tail])?;
        if loaded.is_ok() {
            s.known.store(with.functions.len() as u32, Ordering::Relaxed);
            *s.functions.lock().unwrap_or_else(PoisonError::into_inner) = Arc::new(with.functions.clone());
        }
        s.write_stop(layout::RUN);
        s.stopped.store(0, Ordering::Release);
        self.blocks = Some(s.site.run(s.clone())?);
        loaded
    }

    fn tell(&self, stop: u32) {
        // With both rings locked nothing is half submitted.
        let _rings = [self.shared.producer(0), self.shared.producer(1)];
        self.shared.stopped.fetch_max(1, Ordering::AcqRel);
        self.shared.write_stop(stop);
    }

    fn end(&mut self, word_: u32, within: Option<Duration>) -> Result<()> {
        let Some(blocks) = &self.blocks else { return Err(Error::Stopped) };
        self.tell(word_);
        let begun = Instant::now();
        while within.is_some() && !blocks.have_ended() {
            let waited = begun.elapsed();
            if within.is_some_and(|most| waited > most) {
                let stuck = self.shared.stuck();
                let function = stuck.as_ref().map_or_else(|| "?".into(), |s| s.function.clone());
                return Err(Error::TimedOut { function, waited, stuck });
            }
            std::thread::sleep(NAP);
        }
        let ended = self.blocks.take().map_or(Ok(()), |b| b.join());
        self.shared.stopped.store(2, Ordering::Release);
        ended
    }
}

impl Drop for Grid {
    fn drop(&mut self) {
        self.tell(layout::STOP_NOW);
        let begun = Instant::now();
        while begun.elapsed() < LEAVE && self.blocks.as_ref().is_some_and(|b| !b.have_ended()) {
            std::thread::sleep(NAP);
        }
        // What is not begun by now never will be.
        self.shared.stopped.store(2, Ordering::Release);
    }
}

impl Ticket {
    /// Whether it is done.
    pub fn is_done(&self) -> bool {
        let p = self.grid.producer(self.ring);
        p.kept.contains_key(&self.number) || self.grid.fetch(self.ring, self.number).is_some()
    }

    fn take(&self) -> Option<(u32, [u8; RESULT])> {
        let mut p = self.grid.producer(self.ring);
        if let Some(kept) = p.kept.remove(&self.number) {
            return Some(kept);
        }
        let found = self.grid.fetch(self.ring, self.number)?;
        let (slot, _) = self.grid.at(self.ring, self.number);
        p.wanted[slot] = false;
        Some(found)
    }

    /// What came of it, if it is done, or never will be.
    pub(super) fn poll(&self) -> Option<Result<Completion>> {
        // In this order: what was done before the end is found after it.
        let ended = self.grid.stopped.load(Ordering::Acquire) == 2;
        let Some((status, result)) = self.take() else { return ended.then_some(Err(Error::Stopped)) };
        let function = || self.grid.name(self.function);
        Some(match status {
            0 => Ok(Completion { result }),
            s if s & layout::OUT_OF_FUEL != 0 => Err(Error::OutOfFuel { function: function() }),
            s if s & layout::BAD_FREE != 0 => Err(Error::BadFree { function: function() }),
            s if s & layout::UNKNOWN_FUNCTION != 0 => Err(Error::UnknownFunction { function: function() }),
            status => Err(Error::Failed { function: function(), status }),
        })
    }

    fn wait_until(self, time: Option<Duration>) -> Result<Completion, (Error, Option<Ticket>)> {
        let begun = Instant::now();
        loop {
            if let Some(done) = self.poll() {
                return done.map_err(|e| (e, None));
            }
            let waited = begun.elapsed();
            if time.is_some_and(|t| waited > t) {
                let (function, stuck) = (self.grid.name(self.function), self.grid.stuck());
                return Err((Error::TimedOut { function, waited, stuck }, Some(self)));
            }
            if waited < SPIN {
                std::hint::spin_loop();
            } else if let Some(lost) = self.grid.lost() {
                return Err((lost, None));
            } else {
                std::thread::sleep(NAP);
            }
        }
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        let mut p = self.grid.producer(self.ring);
        if p.kept.remove(&self.number).is_none() {
            let (slot, _) = self.grid.at(self.ring, self.number);
            // Another ticket may have the slot by now; then this one's completion was kept, or fetched.
            let behind = p.tail.wrapping_sub(self.number) as usize;
            if behind <= self.grid.sizes[self.ring] {
                p.wanted[slot] = false;
            }
        }
    }
}
