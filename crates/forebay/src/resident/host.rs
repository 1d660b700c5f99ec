//! The host's side of a grid: rings, completions, life, and the watchdog.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::call::{Call, Completion};
use super::cpu::Code;
use super::heap::{Heap, HeapUse};
use super::layout::{self, ARGS, Beat, Control, Done, RESULT, Slot};
use super::memory::Memory;
use super::watch::Watch;
use super::{Builder, Error, Result, Sizes};

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
    /// Of each slot, whether somebody still waits for what is (or will be) in its completion.
    wanted: Vec<bool>,
    /// Completions whose slot was needed before they were fetched.
    kept: HashMap<u32, (u32, [u8; RESULT])>,
}

/// Task functions.
struct Loaded {
    functions: Vec<String>,
    code: Code,
}

impl Loaded {
    fn name(&self, function: u32) -> String {
        self.functions.get(function as usize).cloned().unwrap_or_else(|| function.to_string())
    }
}

/// What tickets and the grid share.
struct Shared {
    /// Only to be freed: everything goes through the addresses below, which blocks have, too.
    memory: *mut Memory,
    slots: [*mut Slot; 2],
    done: *mut Done,
    beats: *mut Beat,
    control: *mut Control,
    /// What blocks run at present.
    loaded: Mutex<Arc<Loaded>>,
    rings: [Mutex<Producer>; 2],
    sizes: [usize; 2],
    /// Epoch of each block when it last changed, and when that was.
    seen: Mutex<Vec<(u32, Instant)>>,
    /// Held while blocks run, and given to whoever frees the memory.
    stopped: AtomicU32,
    /// The heap, or null.
    heap: *mut u8,
    /// Number of functions there are.
    functions: AtomicU32,
}

// SAFETY: `memory` is freed when the last handle drops, after all blocks have ended; see `Memory` for what is in it.
unsafe impl Send for Shared {}
// SAFETY: as above.
unsafe impl Sync for Shared {}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Grid").field("functions", &self.loaded().functions).finish_non_exhaustive()
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        // SAFETY: made by `Box::into_raw`; no block has it any more: each holds a handle while it runs.
        drop(unsafe { Box::from_raw(self.memory) });
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
        unsafe { self.slots[ring].add(slot) }
    }

    /// The completion of a ticket, if it is there.
    fn fetch(&self, ring: usize, number: u32) -> Option<(u32, [u8; RESULT])> {
        let (_, root) = self.at(ring, number);
        // SAFETY: within the completions; `seq` is atomic, and the rest is the host's once it has the ticket's value and
        // until the slot is filled again, which the caller's lock on the ring prevents.
        unsafe {
            let done = self.done.add(root);
            let there = word(&raw mut (*done).seq).load(Ordering::Acquire) == number.wrapping_add(1);
            there.then(|| ((*done).status, (*done).result))
        }
    }

    fn loaded(&self) -> Arc<Loaded> {
        self.loaded.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn name(&self, function: u32) -> String {
        self.loaded().name(function)
    }

    fn stuck(&self) -> Option<Stuck> {
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        let mut worst: Option<Stuck> = None;
        for (block, seen) in seen.iter_mut().enumerate() {
            // SAFETY: within the beats; all that is read is atomic words.
            let (epoch, busy, function) = unsafe {
                let beat = self.beats.add(block);
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
    blocks: Vec<JoinHandle<()>>,
    /// What blocks are given.
    address: Address,
    watch: Watch,
}

/// Where the grid is for its blocks.
#[derive(Clone, Copy)]
struct Address(*mut layout::Grid);
// SAFETY: the grid is shared by protocol.
unsafe impl Send for Address {}
// SAFETY: as above.
unsafe impl Sync for Address {}

impl Grid {
    pub(super) fn start(functions: Vec<String>, sizes: &Sizes, code: Code) -> Result<Self> {
        let (blocks, rings) = (sizes.blocks, [sizes.ring; 2]);
        let heap = sizes.heap.map(|bytes| Heap::new(&code, bytes, blocks)).transpose()?;
        let memory = Box::into_raw(Memory::new(sizes, heap));
        // SAFETY: just made, and nobody else's yet.
        let (address, slots, done, beats, control, heap) = unsafe {
            let g = &raw mut *(*memory).grid;
            (g, [(*g).rings[0].slots, (*g).rings[1].slots], (*g).done, (*g).beats, (*g).control, (*g).heap)
        };
        let producer = |n: usize| Mutex::new(Producer { tail: 0, wanted: vec![false; n], kept: HashMap::new() });
        let shared = Arc::new(Shared {
            memory,
            slots,
            done,
            beats,
            control,
            functions: AtomicU32::new(functions.len() as u32),
            loaded: Mutex::new(Arc::new(Loaded { functions, code })),
            rings: rings.map(producer),
            sizes: rings,
            seen: Mutex::new(vec![(0, Instant::now()); blocks]),
            stopped: AtomicU32::new(0),
            heap,
        });
        let mut grid = Grid { shared, blocks: Vec::new(), address: Address(address), watch: Watch::default() };
        grid.run(blocks)?;
        Ok(grid)
    }

    /// Starts the blocks.
    fn run(&mut self, blocks: usize) -> Result<()> {
        let loaded = self.shared.loaded();
        for i in 0..blocks {
            let (address, shared, loaded) = (self.address, self.shared.clone(), loaded.clone());
            let run = move || {
                let Address(grid) = { address };
                // SAFETY: `shared` keeps the memory.
                unsafe { loaded.code.run(grid, i as u32) };
                drop(shared);
            };
            let thread = std::thread::Builder::new().name(format!("block{i}")).spawn(run);
            // Dropping the grid ends those that were started.
            self.blocks.push(thread.map_err(|e| Error::Start(format!("block {i}: {e}")))?);
        }
        Ok(())
    }

    /// The number of a function.
    ///
    /// # Errors
    /// [`Error::NoFunction`].
    pub fn function(&self, name: &str) -> Result<u32> {
        let loaded = self.shared.loaded();
        let found = loaded.functions.iter().position(|n| n == name);
        let missing = || Error::NoFunction { name: name.into(), known: loaded.functions.join(", ") };
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
        if call.function >= s.functions.load(Ordering::Relaxed) {
            let known = s.loaded().functions.join(", ");
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
        // SAFETY: within the ring; the field is atomic. A slot whose `seq` is 0 was never used.
        let used = unsafe { word(&raw mut (*s.slot(ring, slot)).seq).load(Ordering::Relaxed) } != 0;
        if used {
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
        unsafe {
            let to = s.slot(ring, slot);
            (*to).function = call.function;
            (*to).fuel = call.fuel;
            (*to).first = call.first;
            (*to).count = call.count;
            (*to).args = call.args;
            word(&raw mut (*to).seq).store(number.wrapping_add(1), Ordering::Release);
        }
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
                Err(Error::Full(_)) => std::thread::sleep(NAP),
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

    /// What is taken of the heap, and what is left; none when the grid has no heap ([`super::Builder::heap`]).
    pub fn heap(&self) -> Option<HeapUse> {
        let s = &self.shared;
        // SAFETY: set up when the grid was started; the memory lives as long as `s`.
        (!s.heap.is_null()).then(|| unsafe { s.loaded().code.heap_usage(s.heap) })
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

    /// Exchanges the task functions: those of `with` are built, then what was submitted is done, then the grid goes on with
    /// them. Heap, sizes and tickets stay; what `with` says of sizes is not looked at. Numbers of functions
    /// ([`Grid::function`]) are new.
    ///
    /// # Errors
    /// As [`Builder::start_on_cpu`], after which the grid goes on as it was; [`Error::Stopped`] if it has been stopped before.
    pub fn reload(&mut self, with: &Builder) -> Result<()> {
        let blocks = self.blocks.len();
        if blocks == 0 {
            return Err(Error::Stopped);
        }
        let (functions, code) = with.build()?;
        self.end(layout::STOP_DRAIN, None)?;
        let s = &self.shared;
        for ring in 0..2 {
            // Tickets that blocks had taken, and nobody filled, went with them.
            let tail = s.producer(ring).tail;
            // SAFETY: no block runs, and the memory is there.
            unsafe { (*self.address.0).rings[ring].head = tail };
        }
        s.functions.store(functions.len() as u32, Ordering::Relaxed);
        *s.loaded.lock().unwrap_or_else(PoisonError::into_inner) = Arc::new(Loaded { functions, code });
        // SAFETY: the memory lives as long as `self`; the word is atomic.
        unsafe { word(&raw mut (*s.control).stop) }.store(layout::RUN, Ordering::Release);
        s.stopped.store(0, Ordering::Release);
        self.run(blocks)
    }

    fn tell(&self, stop: u32) {
        // With both rings locked nothing is half submitted.
        let _rings = [self.shared.producer(0), self.shared.producer(1)];
        self.shared.stopped.fetch_max(1, Ordering::AcqRel);
        // SAFETY: the memory lives as long as `self`; the word is atomic.
        let control = unsafe { word(&raw mut (*self.shared.control).stop) };
        control.store(stop, Ordering::Release);
    }

    fn end(&mut self, word_: u32, within: Option<Duration>) -> Result<()> {
        if self.blocks.is_empty() {
            return Err(Error::Stopped);
        }
        self.tell(word_);
        let begun = Instant::now();
        while within.is_some() && self.blocks.iter().any(|b| !b.is_finished()) {
            let waited = begun.elapsed();
            if within.is_some_and(|most| waited > most) {
                let stuck = self.shared.stuck();
                let function = stuck.as_ref().map_or_else(|| "?".into(), |s| s.function.clone());
                return Err(Error::TimedOut { function, waited, stuck });
            }
            std::thread::sleep(NAP);
        }
        for b in self.blocks.drain(..) {
            let _ = b.join();
        }
        self.shared.stopped.store(2, Ordering::Release);
        Ok(())
    }
}

impl Drop for Grid {
    fn drop(&mut self) {
        self.tell(layout::STOP_NOW);
        let begun = Instant::now();
        while begun.elapsed() < LEAVE && self.blocks.iter().any(|b| !b.is_finished()) {
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
            if waited < SPIN { std::hint::spin_loop() } else { std::thread::sleep(NAP) }
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
