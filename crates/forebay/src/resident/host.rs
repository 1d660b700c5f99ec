//! The host's side of a grid: rings, completions, life, and the watchdog.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use forebay_hal::cpu::streaming;
use forebay_hal::fork::{self, Home};

use super::call::{Call, Completion};
use super::heap::HeapUse;
use super::layout::{self, ARGS, RESULT, Slot};
use super::site::{Blocks, HostSide, Site};
use super::together::Together;
use super::watch::Watch;
use super::{Builder, Error, Result};

/// How long a wait spins before it sleeps between looks.
const SPIN: Duration = Duration::from_micros(50);
const NAP: Duration = Duration::from_micros(50);
/// A block that is busy and whose heart has stood still for so long is stuck.
const STILL: Duration = Duration::from_secs(1);

/// Roots that an attempt to submit looks at, in two places each: so many that most find one, so few that an attempt in vain
/// is cheap.
const LOOKS: usize = 32;

/// How long dropping a grid waits for its blocks.
const LEAVE: Duration = Duration::from_secs(1);

/// A submitted task. Dropping it lets the task go on; its completion is forgotten.
#[derive(Debug)]
#[must_use = "a completion is had by waiting for its ticket"]
pub struct Ticket {
    pub(super) ring: usize,
    pub(super) number: u32,
    /// Among the ring's roots.
    root: u32,
    function: u32,
    /// Its completion has been fetched: nothing is kept for it any more.
    taken: bool,
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

/// What a completion's place was last given to.
#[derive(Clone, Copy, Default)]
pub(super) struct Root {
    /// The ticket; none yet.
    pub(super) number: Option<u32>,
    /// Somebody still waits for what is (or will be) there.
    wanted: bool,
}

/// The host's side of a ring.
pub(super) struct Producer {
    /// Next ticket.
    tail: u32,
    /// As many as the ring has slots.
    pub(super) roots: Vec<Root>,
    /// Where the search for a free one goes on: behind the last one that was found; and anywhere, piece by piece.
    next: usize,
    anywhere: usize,
    /// Completions whose place was needed before they were fetched.
    kept: HashMap<u32, (u32, [u8; RESULT])>,
}

/// What tickets and the grid share.
pub(super) struct Shared {
    site: Box<dyn Site>,
    pub(super) host: HostSide,
    /// Names of the functions.
    functions: Mutex<Arc<Vec<String>>>,
    rings: [Mutex<Producer>; 2],
    sizes: [usize; 2],
    pub(super) together: Mutex<Together>,
    /// Epoch of each block when it last changed, and when that was.
    seen: Mutex<Vec<(u32, Instant)>>,
    /// 0 while tasks are taken, 1 once they are not, 2 when no block runs any more.
    pub(super) stopped: AtomicU32,
    /// Number of functions there are.
    pub(super) known: AtomicU32,
    /// Where its blocks are the threads, or the device's that this process drives.
    home: Home,
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
    pub(super) fn producer(&self, ring: usize) -> MutexGuard<'_, Producer> {
        self.rings[ring].lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The number on the device of a ring's root.
    fn on_device(&self, ring: usize, root: usize) -> usize {
        root + if ring == 0 { 0 } else { self.sizes[0] }
    }

    fn slot(&self, ring: usize, number: u32) -> *mut Slot {
        let slot = number as usize & (self.sizes[ring] - 1);
        // SAFETY: the memory lives as long as `self`, and `slot` is below the ring's size.
        unsafe { self.host.slots[ring].add(slot) }
    }

    /// The completion of a ticket, if it is there.
    pub(super) fn fetch(&self, ring: usize, root: usize, number: u32) -> Option<(u32, [u8; RESULT])> {
        let root = self.on_device(ring, root);
        let mut words = [0u32; 12];
        // SAFETY: within the completions; `seq` is atomic, and the other words of a piece are the host's once that has the
        // ticket's value and until the root is given away again, which the caller's lock on the ring prevents.
        unsafe {
            let done = self.host.done.add(root);
            for (i, to) in words.chunks_exact_mut(3).enumerate() {
                let quad = &raw mut (*done).quads[i];
                if word(&raw mut (*quad).seq).load(Ordering::Acquire) != number.wrapping_add(1) {
                    return None;
                }
                to.copy_from_slice(&(*quad).words);
            }
        }
        let mut result = [0; RESULT];
        result.as_chunks_mut().0.iter_mut().zip(words).for_each(|(to, w)| *to = w.to_ne_bytes());
        Some((words[RESULT / 4], result))
    }

    /// Whether a ticket is certainly not done: what its root's place says is of an earlier one. Without the ring's lock; if not,
    /// [`Shared::fetch`] has the answer.
    fn is_pending(&self, ring: usize, root: usize, number: u32) -> bool {
        let root = self.on_device(ring, root);
        // SAFETY: within the completions; the word is atomic.
        let seq = unsafe { word(&raw mut (*self.host.done.add(root)).quads[0].seq) }.load(Ordering::Relaxed);
        // Later ones have the root once its completion is kept. (Where a ticket took so long that half of all numbers were given out
        // meanwhile, this does not see that it is pending.)
        (seq.wrapping_sub(number.wrapping_add(1)) as i32) < 0
    }

    fn functions(&self) -> Arc<Vec<String>> {
        self.functions.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn name(&self, function: u32) -> String {
        let known = self.functions();
        known.get(function as usize).cloned().unwrap_or_else(|| match function as usize == known.len() {
            true => "several".into(),
            false => function.to_string(),
        })
    }

    /// A root that is free, if there is one, for a new ticket (rule 2 of the protocol). The ring is locked.
    fn free_root(&self, ring: usize, p: &mut Producer) -> Option<usize> {
        // Most tasks end in the order in which they began; those that take long are passed by.
        let (n, from) = (p.roots.len(), p.anywhere);
        let looked = 0..LOOKS.min(n);
        p.anywhere = (from + LOOKS) & (n - 1);
        for root in looked.clone().map(|i| p.next + i).chain(looked.map(|i| from + i)).map(|i| i & (n - 1)) {
            let Root { number, wanted } = p.roots[root];
            if let Some(before) = number {
                let Some(done) = self.fetch(ring, root, before) else { continue };
                if wanted {
                    p.kept.insert(before, done);
                }
            }
            p.next = (root + 1) & (n - 1);
            return Some(root);
        }
        None
    }

    /// The number of the last ticket whose root this is.
    fn ticket_of(&self, root: usize) -> u32 {
        let (ring, root) = if root < self.sizes[0] { (0, root) } else { (1, root - self.sizes[0]) };
        self.producer(ring).roots.get(root).and_then(|r| r.number).unwrap_or_default()
    }

    /// The error of a grid that ended out of order, if it has.
    fn lost(&self) -> Option<Error> {
        if !self.home.is_here() {
            return Some(Error::Lost { why: fork::WHY.into(), running: Vec::new() });
        }
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

    /// Fills the slot of a ticket; the last word of it is its number.
    ///
    /// # Safety
    /// The ring is locked, and the ticket has been given a root, so that its slot is free (rule 2).
    unsafe fn fill(&self, ring: usize, number: u32, call: &Call, root: usize) {
        const LATER: Ordering = Ordering::Relaxed;
        const FILL: [Ordering; 8] = [LATER, LATER, LATER, Ordering::Release, LATER, LATER, LATER, Ordering::Release];
        let (to, round) = (self.slot(ring, number), layout::round(number, self.sizes[ring]));
        let slot = Slot {
            first: call.first,
            fuel: call.fuel,
            root: root as u32 | round,
            args: call.args,
            count: call.count,
            function: call.function | if call.count == 1 { layout::SINGLE } else { 0 },
            seq: number.wrapping_add(1),
        };
        // SAFETY: nobody else writes the slot, by the contract. It is eight words of 8 bytes without padding; in ordinary memory the last one is
        // stored behind the others, in the device's as `store_line` does.
        unsafe {
            let words = std::mem::transmute::<Slot, [u64; 8]>(slot);
            if self.host.mapped {
                streaming::store_line(&words, to.cast());
                return;
            }
            // Blocks look at words of a slot before they know whether it is theirs: of each half, what says that it is there
            // comes last.
            for (i, order) in [0, 2, 3, 1, 4, 5, 6, 7].into_iter().zip(FILL) {
                AtomicU64::from_ptr(to.cast::<u64>().add(i)).store(words[i], order);
            }
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
    pub(super) shared: Arc<Shared>,
    /// None once they have ended.
    blocks: Option<Box<dyn Blocks>>,
    watch: Watch,
}

impl Grid {
    pub(super) fn start(with: &Builder, site: Box<dyn Site>) -> Result<Self> {
        let (rings, host) = ([with.sizes.ring; 2], site.host_side());
        let producer = |n: usize| {
            Mutex::new(Producer {
                tail: 0,
                roots: vec![Root::default(); n],
                next: 0,
                anywhere: 0,
                kept: HashMap::new(),
            })
        };
        let blocks = site.blocks();
        let shared = Arc::new(Shared {
            site,
            host,
            known: AtomicU32::new(with.functions.len() as u32),
            functions: Mutex::new(Arc::new(with.functions.clone())),
            rings: rings.map(producer),
            sizes: rings,
            together: Mutex::default(),
            seen: Mutex::new(vec![(0, Instant::now()); blocks]),
            stopped: AtomicU32::new(0),
            home: Home::here(),
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
        self.check(&call)?;
        self.enter(&call)
    }

    pub(super) fn check(&self, call: &Call) -> Result<()> {
        if call.given > ARGS {
            return Err(Error::Arguments { is: call.given });
        }
        if call.function >= self.shared.known.load(Ordering::Relaxed) {
            let known = self.shared.functions().join(", ");
            return Err(Error::NoFunction { name: format!("number {}", call.function), known });
        }
        Ok(())
    }

    /// Puts a call into its ring.
    pub(super) fn enter(&self, call: &Call) -> Result<Ticket> {
        let s = &self.shared;
        if let (false, Some(lost)) = (s.home.is_here(), s.lost()) {
            // Its rings may be the device's, and the other process's as well.
            return Err(lost);
        }
        let ring = usize::from(!call.urgent);
        let mut p = s.producer(ring);
        if s.stopped.load(Ordering::Acquire) != 0 {
            return Err(Error::Stopped);
        }
        let Some(root) = s.free_root(ring, &mut p) else { return Err(Error::Full(s.sizes[ring])) };
        let number = p.tail;
        p.tail = number.wrapping_add(1);
        p.roots[root] = Root { number: Some(number), wanted: true };
        // SAFETY: the slot is free, since the root is (rule 2), and the ring is locked: nobody else writes it.
        unsafe { s.fill(ring, number, call, s.on_device(ring, root)) };
        Ok(Ticket { ring, number, root: root as u32, function: call.function, taken: false, grid: s.clone() })
    }

    /// Submits a task; waits while the ring is full.
    ///
    /// # Errors
    /// As [`Grid::try_submit`], but for [`Error::Full`].
    pub fn submit(&self, call: Call) -> Result<Ticket> {
        self.check(&call)?;
        self.enter_when_free(&call)
    }

    /// A moment between two looks, unless the grid is lost.
    pub(super) fn rest(&self, begun: Instant) -> Result<()> {
        if begun.elapsed() < SPIN {
            std::hint::spin_loop();
            return Ok(());
        }
        match self.shared.lost() {
            Some(e) => Err(e),
            None => {
                std::thread::sleep(NAP);
                Ok(())
            }
        }
    }

    pub(super) fn enter_when_free(&self, call: &Call) -> Result<Ticket> {
        // A clock costs as much as a quarter of a submission: it is asked once there is something to wait for.
        let mut begun = None;
        loop {
            match self.enter(call) {
                Err(Error::Full(_)) => self.rest(*begun.get_or_insert_with(Instant::now))?,
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
        ticket.wait_for(time)
    }

    /// What is taken of the heap, and what is left; none when the grid has no heap ([`super::Builder::heap`]), is lost, or leaves
    /// no room for a look beside it for a second: on a GPU that is a kernel.
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

    /// [`Grid::drain`] that waits so long at most. After [`Error::TimedOut`], which names a block that is stuck, it can be called
    /// again, or the grid stopped or dropped; nothing more can be submitted.
    ///
    /// # Errors
    /// As [`Grid::drain`]; [`Error::TimedOut`].
    pub fn drain_within(&mut self, time: Duration) -> Result<()> {
        self.end(layout::STOP_DRAIN, Some(time))
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
        if loaded.is_ok() {
            s.known.store(with.functions.len() as u32, Ordering::Relaxed);
            *s.functions.lock().unwrap_or_else(PoisonError::into_inner) = Arc::new(with.functions.clone());
        }
        s.write_stop(layout::RUN);
        // Until then it has stopped, and stays so if its blocks cannot be started again.
        self.blocks = Some(s.site.run(s.clone())?);
        s.stopped.store(0, Ordering::Release);
        loaded
    }

    fn tell(&self, stop: u32) {
        // With both rings locked nothing is half submitted.
        let _rings = [self.shared.producer(0), self.shared.producer(1)];
        self.shared.stopped.fetch_max(1, Ordering::AcqRel);
        self.shared.write_stop(stop);
    }

    fn end(&mut self, word_: u32, within: Option<Duration>) -> Result<()> {
        if let (false, Some(lost)) = (self.shared.home.is_here(), self.shared.lost()) {
            return Err(lost);
        }
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
        if !self.shared.home.is_here() {
            return std::mem::forget((self.blocks.take(), self.shared.clone()));
        }
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
    /// Among the ring's roots.
    pub(super) fn root(&self) -> usize {
        self.root as usize
    }

    /// The error of its grid, if that ended out of order.
    pub(super) fn lost(&self) -> Option<Error> {
        self.grid.lost()
    }

    /// Whether it is done.
    pub fn is_done(&self) -> bool {
        let p = self.grid.producer(self.ring);
        p.kept.contains_key(&self.number) || self.grid.fetch(self.ring, self.root(), self.number).is_some()
    }

    /// As [`Grid::wait_for`], for whoever does not have the grid.
    ///
    /// # Errors
    /// As there.
    pub fn wait_for(self, time: Duration) -> Result<Completion, (Error, Option<Ticket>)> {
        self.wait_until(Some(time))
    }

    fn take(&mut self) -> Option<(u32, [u8; RESULT])> {
        // Others submit meanwhile: whoever waits does not lock the ring each time that he looks.
        if self.grid.is_pending(self.ring, self.root(), self.number) {
            return None;
        }
        let mut p = self.grid.producer(self.ring);
        let kept = if p.kept.is_empty() { None } else { p.kept.remove(&self.number) };
        let found = match kept {
            Some(kept) => kept,
            None => {
                let found = self.grid.fetch(self.ring, self.root(), self.number)?;
                p.roots[self.root()].wanted = false;
                found
            }
        };
        self.taken = true;
        Some(found)
    }

    /// What came of it, if it is done, or never will be.
    pub(super) fn poll(&mut self) -> Option<Result<Completion>> {
        // In this order: what was done before the end is found after it.
        let ended = self.grid.stopped.load(Ordering::Acquire) == 2;
        let Some((status, result)) = self.take() else { return ended.then_some(Err(Error::Stopped)) };
        let function = || self.grid.name(self.function);
        Some(match status {
            0 => Ok(Completion { result }),
            s if s & layout::OUT_OF_FUEL != 0 => Err(Error::OutOfFuel { function: function() }),
            s if s & layout::BAD_FREE != 0 => Err(Error::BadFree { function: function() }),
            s if s & layout::NO_ROOM != 0 => Err(Error::NoRoom),
            s if s & layout::UNKNOWN_FUNCTION != 0 => Err(Error::UnknownFunction { function: function() }),
            status => Err(Error::Failed { function: function(), status }),
        })
    }

    fn wait_until(mut self, time: Option<Duration>) -> Result<Completion, (Error, Option<Ticket>)> {
        let mut begun = None;
        loop {
            if let Some(done) = self.poll() {
                return done.map_err(|e| (e, None));
            }
            let waited = begun.get_or_insert_with(Instant::now).elapsed();
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
        if self.taken {
            return;
        }
        let mut p = self.grid.producer(self.ring);
        p.kept.remove(&self.number);
        // Another ticket may have the root by now; then this one's completion was kept, or fetched.
        if let Some(r) = p.roots.get_mut(self.root()).filter(|r| r.number == Some(self.number)) {
            r.wanted = false;
        }
    }
}
