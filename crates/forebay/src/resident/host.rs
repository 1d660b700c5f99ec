//! The host's side of a grid: rings, completions, life, and the watchdog.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::cpu::Code;
use super::heap::{Heap, HeapUse};
use super::layout::{self, ARGS, Beat, Cell, Control, Done, Node, Queue, RESULT, Ring, Root, Slot, Task};
use super::{Error, Result, Sizes};

/// How long a wait spins before it sleeps between looks.
const SPIN: Duration = Duration::from_micros(50);
const NAP: Duration = Duration::from_micros(50);
/// A block that is busy and whose heart has stood still for so long is stuck.
const STILL: Duration = Duration::from_secs(1);

/// How long dropping a grid waits for its blocks.
const LEAVE: Duration = Duration::from_secs(1);

/// A task to submit.
#[derive(Clone, Copy, Debug)]
pub struct Call {
    function: u32,
    args: [u8; ARGS],
    given: usize,
    first: u64,
    count: u64,
    fuel: u32,
    urgent: bool,
}

impl Call {
    /// A call of a function ([`Grid::function`]).
    pub fn new(function: u32) -> Self {
        Call { function, args: [0; ARGS], given: 0, first: 0, count: 1, fuel: 0, urgent: false }
    }

    /// With these arguments, as the function wants them; [`ARGS`] bytes at most.
    pub fn args(mut self, bytes: &[u8]) -> Self {
        let n = bytes.len().min(ARGS);
        self.args[..n].copy_from_slice(&bytes[..n]);
        self.given = bytes.len();
        self
    }

    /// For `count` items from `first` on, done in pieces by whoever has time. None at all is done at once.
    pub fn range(mut self, first: u64, count: u64) -> Self {
        (self.first, self.count) = (first, count);
        self
    }

    /// With a limit on the tasks and units that it and all that comes of it may use.
    pub fn fuel(mut self, units: u32) -> Self {
        self.fuel = units;
        self
    }

    /// Before what is not urgent.
    pub fn urgent(mut self) -> Self {
        self.urgent = true;
        self
    }
}

/// A submitted task. Dropping it lets the task go on; its completion is forgotten.
#[derive(Debug)]
#[must_use = "a completion is had by waiting for its ticket"]
pub struct Ticket {
    ring: usize,
    number: u32,
    function: u32,
    grid: Arc<Shared>,
}

/// What came of a task.
#[derive(Clone, Copy, Debug)]
pub struct Completion {
    /// What its functions wrote.
    pub result: [u8; RESULT],
}

impl Completion {
    /// The first bytes of the result as a value.
    pub fn result_as<T: bytemuck::Pod>(&self) -> T {
        let n = size_of::<T>().min(RESULT);
        let mut value = T::zeroed();
        bytemuck::bytes_of_mut(&mut value)[..n].copy_from_slice(&self.result[..n]);
        value
    }
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

/// Everything that blocks and host share; freed when the last of them has gone.
struct Memory {
    _heap: Option<Heap>,
    grid: Box<layout::Grid>,
    slots: [Box<[Slot]>; 2],
    done: Box<[Done]>,
    roots: Box<[Root]>,
    cells: [Box<[Cell]>; 3],
    nodes: Box<[Node]>,
    beats: Box<[Beat]>,
    control: Box<Control>,
}

// SAFETY: what both sides touch is atomic words and what their protocol (docs/resident.md) gives to one side at a time;
// blocks get an address, the host goes through `Shared`.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

fn zeroed<T>(n: usize) -> Box<[T]> {
    // SAFETY: all types of the layout are integers and pointers, for which zeros are valid.
    (0..n).map(|_| unsafe { std::mem::zeroed() }).collect()
}

fn queue(cells: &mut [Cell]) -> Queue {
    cells.iter_mut().zip(0..).for_each(|(c, i)| c.seq = i);
    let size = cells.len() as u32;
    let pad = [0; 31];
    Queue { count: 0, pad0: pad, space: size, pad1: pad, head: 0, pad2: pad, tail: 0, size, cells: cells.as_mut_ptr() }
}

impl Memory {
    fn new(sizes: &Sizes, mut heap: Option<Heap>) -> Box<Self> {
        let &Sizes { blocks, ring, nodes, queue: places, grain, .. } = sizes;
        let rings = [ring; 2];
        let roots = rings[0] + rings[1];
        let heap_at = heap.as_mut().map_or(std::ptr::null_mut(), Heap::address);
        let mut m = Box::new(Memory {
            _heap: heap,
            // SAFETY: as in `zeroed`.
            grid: Box::new(unsafe { std::mem::zeroed() }),
            slots: rings.map(zeroed),
            done: zeroed(roots),
            roots: zeroed(roots),
            cells: [zeroed(places), zeroed(places), zeroed(nodes)],
            nodes: zeroed(nodes),
            beats: zeroed(blocks),
            control: Box::new(Control { stop: layout::RUN }),
        });
        // All nodes are free.
        let mut free = queue(&mut m.cells[2]);
        for (cell, i) in m.cells[2].iter_mut().zip(0..) {
            cell.task.first = u64::from(i);
            cell.seq = i + 1;
        }
        (free.count, free.space, free.tail) = (nodes as u32, 0, nodes as u32);
        let ring = |first_root: usize, slots: &mut [Slot]| Ring {
            head: 0,
            size: slots.len() as u32,
            first_root: first_root as u32,
            unused: 0,
            slots: slots.as_mut_ptr(),
        };
        let first = rings[0];
        let [urgent, ordinary] = &mut m.slots;
        let rings = [ring(0, urgent), ring(first, ordinary)];
        let [a, b, _] = &mut m.cells;
        let queues = [queue(a), queue(b)];
        *m.grid = layout::Grid {
            rings,
            queues,
            free_nodes: free,
            idle: 0,
            blocks: blocks as u32,
            grain,
            nodes: m.nodes.as_mut_ptr(),
            roots: m.roots.as_mut_ptr(),
            done: m.done.as_mut_ptr(),
            beats: m.beats.as_mut_ptr(),
            control: &raw mut *m.control,
            heap: heap_at,
        };
        m
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

/// What tickets and the grid share.
struct Shared {
    /// Only to be freed: everything goes through the addresses below, which blocks have, too.
    memory: *mut Memory,
    slots: [*mut Slot; 2],
    done: *mut Done,
    beats: *mut Beat,
    control: *mut Control,
    functions: Vec<String>,
    rings: [Mutex<Producer>; 2],
    sizes: [usize; 2],
    /// Epoch of each block when it last changed, and when that was.
    seen: Mutex<Vec<(u32, Instant)>>,
    /// Held while blocks run, and given to whoever frees the memory.
    stopped: AtomicU32,
    /// The heap, or null.
    heap: *mut u8,
    code: Code,
}

// SAFETY: `memory` is freed when the last handle drops, after all blocks have ended; see `Memory` for what is in it.
unsafe impl Send for Shared {}
// SAFETY: as above.
unsafe impl Sync for Shared {}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Grid").field("functions", &self.functions).finish_non_exhaustive()
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

    fn name(&self, function: u32) -> String {
        self.functions.get(function as usize).cloned().unwrap_or_else(|| function.to_string())
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
}

/// What a block's thread has.
struct Block(*mut layout::Grid, u32, Arc<Shared>);
// SAFETY: the grid is shared by protocol.
unsafe impl Send for Block {}

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
            functions,
            rings: rings.map(producer),
            sizes: rings,
            seen: Mutex::new(vec![(0, Instant::now()); blocks]),
            stopped: AtomicU32::new(0),
            heap,
            code,
        });
        let mut grid = Grid { shared, blocks: Vec::new() };
        for i in 0..blocks {
            let block = Block(address, i as u32, grid.shared.clone());
            let run = move || {
                let Block(grid, number, shared) = { block };
                // SAFETY: `shared` keeps the memory.
                unsafe { shared.code.run(grid, number) };
                drop(shared);
            };
            let thread = std::thread::Builder::new().name(format!("block{i}")).spawn(run);
            // Dropping the grid ends those that were started.
            grid.blocks.push(thread.map_err(|e| Error::Start(format!("block {i}: {e}")))?);
        }
        Ok(grid)
    }

    /// The number of a function.
    ///
    /// # Errors
    /// [`Error::NoFunction`].
    pub fn function(&self, name: &str) -> Result<u32> {
        let found = self.shared.functions.iter().position(|n| n == name);
        let missing = || Error::NoFunction { name: name.into(), known: self.shared.functions.join(", ") };
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
        if call.function as usize >= s.functions.len() {
            let known = s.functions.join(", ");
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
        (!s.heap.is_null()).then(|| unsafe { s.code.heap_usage(s.heap) })
    }

    /// A block that makes no progress, if there is one: it has been in the same task for a second.
    pub fn stuck(&self) -> Option<Stuck> {
        self.shared.stuck()
    }

    /// Ends the grid after all that was submitted is done, and frees its threads. Tickets stay good.
    ///
    /// # Errors
    /// [`Error::Stopped`] if it has been stopped before.
    pub fn drain(&mut self) -> Result<()> {
        self.end(layout::STOP_DRAIN)
    }

    /// Ends the grid after the tasks that are running. What was not begun is [`Error::Stopped`] for whoever waits for it.
    ///
    /// # Errors
    /// [`Error::Stopped`] if it has been stopped before.
    pub fn stop(&mut self) -> Result<()> {
        self.end(layout::STOP_NOW)
    }

    fn tell(&self, stop: u32) {
        // With both rings locked nothing is half submitted.
        let _rings = [self.shared.producer(0), self.shared.producer(1)];
        self.shared.stopped.fetch_max(1, Ordering::AcqRel);
        // SAFETY: the memory lives as long as `self`; the word is atomic.
        let control = unsafe { word(&raw mut (*self.shared.control).stop) };
        control.store(stop, Ordering::Release);
    }

    fn end(&mut self, word_: u32) -> Result<()> {
        if self.blocks.is_empty() {
            return Err(Error::Stopped);
        }
        self.tell(word_);
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

    fn wait_until(self, time: Option<Duration>) -> Result<Completion, (Error, Option<Ticket>)> {
        let begun = Instant::now();
        let (status, result) = loop {
            // In this order: what was done before the end is found after it.
            let ended = self.grid.stopped.load(Ordering::Acquire) == 2;
            if let Some(done) = self.take() {
                break done;
            }
            if ended {
                return Err((Error::Stopped, None));
            }
            let waited = begun.elapsed();
            if time.is_some_and(|t| waited > t) {
                let (function, stuck) = (self.grid.name(self.function), self.grid.stuck());
                return Err((Error::TimedOut { function, waited, stuck }, Some(self)));
            }
            if waited < SPIN { std::hint::spin_loop() } else { std::thread::sleep(NAP) }
        };
        let function = || self.grid.name(self.function);
        match status {
            0 => Ok(Completion { result }),
            s if s & layout::OUT_OF_FUEL != 0 => Err((Error::OutOfFuel { function: function() }, None)),
            s if s & layout::BAD_FREE != 0 => Err((Error::BadFree { function: function() }, None)),
            s if s & layout::UNKNOWN_FUNCTION != 0 => Err((Error::UnknownFunction { function: function() }, None)),
            status => Err((Error::Failed { function: function(), status }, None)),
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

/// The device's own layout of a task is what nodes and cells hold.
const _: () = assert!(size_of::<Task>() == 64);
