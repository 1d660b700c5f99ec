//! A device as one runtime uses it: one queue, and a bound on what is in flight.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::{Duration, Instant};

use forebay_hal::{Buffer, Completion, Device, Direction, Error, Fence, Kind, Method, Queue, Result};
use forebay_proto::client::Account;

use super::gate::Gate;
pub(crate) use super::issue::{DEPTH_PRIORITY, DEPTH_THROUGHPUT, Issue};
use super::trace::Copies;
use crate::transfer::{Engine, Host, Way};

/// With fewer invocations in flight the program's threads issue theirs themselves; with more there is no hurry, and a worker
/// issues several at a time.
const AT_ONCE: usize = 2;
/// Larger transfers are the device's, whatever was measured: whoever makes one himself holds the queue meanwhile.
const BY_PROCESSOR: usize = 64 << 10;
/// Buffers of one size that wait for another use.
const MAX_SPARE: usize = 64;
/// After so long somebody waits for a device that is charged for, if nobody else does.
const LOOK: Duration = Duration::from_millis(2);
/// A device of a runtime.
pub(crate) struct DeviceHandle {
    /// Number in the runtime; 0 is the CPU.
    pub(crate) index: usize,
    pub(crate) device: Arc<dyn Device>,
    /// Which way its blocks go; with the curves that this machine stored, if any.
    engine: Arc<Engine>,
    queue: Mutex<Issue>,
    /// What is in flight behind the first invocation, ns: the same as the queue's, for who hasn't the lock.
    ahead_ns: Arc<AtomicU64>,
    /// Something was issued that has no fence behind it yet.
    unfenced: AtomicBool,
    /// Memory that blocks gave back.
    spare: Mutex<Spare<Buffer>>,
    /// Memory that blocks gave back while other devices still copied from it. They are not kept by this: two that copy from
    /// each other would keep one another for ever.
    #[allow(clippy::type_complexity, reason = "a list of a buffer and who reads it")]
    lent: Mutex<Vec<(Buffer, Vec<(Weak<DeviceHandle>, Fence)>)>>,
    /// Whether there is any, so that nobody asks the lock in vain.
    has_lent: AtomicBool,
    /// Bytes moved to and from the device.
    pub(crate) copied: AtomicU64,
    /// Bytes that came from other devices' memory.
    pub(crate) peer: AtomicU64,
    /// The copies one by one, once somebody wants to know.
    pub(crate) copies: OnceLock<Copies>,
    /// Transfers that the processor made itself, through a mapping.
    pub(crate) mapped: AtomicU64,
    /// Invocations issued.
    pub(crate) invocations: AtomicU64,
    /// When something was found done last, ns of the runtime's clock (adaptive placement).
    pub(crate) done_ns: AtomicU64,
    /// The process's presence at the service, and credit on the device if the service has it: the CPU's, if it is one.
    served: OnceLock<(Weak<Gate>, Option<Arc<Account>>)>,
    /// Asks for somebody to look when the device is done, where it is charged for.
    watcher: OnceLock<SyncSender<()>>,
    /// Why nothing can be done on the device any more, once something has failed and it was looked.
    lost: OnceLock<Error>,
}

/// The queue, while an invocation is issued to it. Dropped, nothing was.
pub(crate) struct Issuing<'a> {
    issue: MutexGuard<'a, Issue>,
    issued: bool,
}

impl Issuing<'_> {
    /// The queue itself.
    pub(crate) fn queue(&mut self) -> &mut dyn Queue {
        &mut *self.issue.queue
    }
}

impl Drop for Issuing<'_> {
    fn drop(&mut self) {
        if !self.issued {
            self.issue.was_not_issued();
        }
    }
}

/// Memory that waits for another use. Small memory is taken at once again, so that an item's addresses are those of the
/// one before. Memory whose copies run beside kernels takes turns: the next item is copied into other pieces while the last
/// one's kernels read theirs, and the one after that has those of the first again, in the same order.
struct Spare<B> {
    /// With the number of invocations that had been issued when they came.
    by_size: HashMap<usize, VecDeque<(B, u64)>>,
    /// Sizes from which on pieces take turns.
    beside: usize,
}

impl<B> Spare<B> {
    fn new(beside: usize) -> Self {
        Spare { by_size: HashMap::new(), beside }
    }

    /// `issued`: invocations so far.
    fn take(&mut self, bytes: usize, issued: u64) -> Option<B> {
        let same = self.by_size.get_mut(&bytes)?;
        let taken = match bytes >= self.beside {
            // Not what the latest one used.
            true if same.front().is_some_and(|(_, came)| *came >= issued) => None,
            true => same.pop_front(),
            false => same.pop_back(),
        };
        taken.map(|(b, _)| b)
    }

    fn put(&mut self, bytes: usize, b: B, issued: u64) {
        let same = self.by_size.entry(bytes).or_default();
        if same.len() < MAX_SPARE {
            same.push_back((b, issued));
        }
    }
}

impl DeviceHandle {
    pub(crate) fn new(index: usize, device: Arc<dyn Device>, depth: usize) -> Result<Arc<Self>> {
        let queue = device.queue()?;
        Ok(Arc::new(DeviceHandle {
            index,
            engine: Engine::as_stored(device.clone()),
            spare: Mutex::new(Spare::new(device.copies_beside())),
            device,
            queue: Mutex::new(Issue::new(queue, depth)),
            ahead_ns: Arc::default(),
            unfenced: AtomicBool::new(false),
            lent: Mutex::default(),
            has_lent: AtomicBool::new(false),
            copied: AtomicU64::new(0),
            peer: AtomicU64::new(0),
            copies: OnceLock::new(),
            mapped: AtomicU64::new(0),
            invocations: AtomicU64::new(0),
            done_ns: AtomicU64::new(0),
            served: OnceLock::new(),
            watcher: OnceLock::new(),
            lost: OnceLock::new(),
        }))
    }

    /// Memory of exactly `bytes`, with any contents. Its last user's commands are in this device's queue, so commands
    /// enqueued from now on come behind them.
    pub(crate) fn buffer(&self, bytes: usize) -> Result<Buffer> {
        if self.has_lent.load(Ordering::Acquire) {
            self.take_back();
        }
        if let Some(b) = self.spare().take(bytes, self.invocations.load(Ordering::Relaxed)) {
            return Ok(b);
        }
        let mapped = Direction::ALL.into_iter().any(|d| self.is_for_the_processor(d, bytes));
        let alloc = || if mapped { self.device.alloc_mapped(bytes) } else { self.device.alloc(bytes) };
        // What nobody uses is freed first; what commands in the queue use is freed behind them.
        let again: [&dyn Fn() -> bool; 2] = [&|| self.trim(), &|| self.finish().is_ok() && self.is_quiet()];
        let mut got = alloc();
        for free in again {
            if got.as_ref().is_err_and(Error::is_out_of_memory) && free() {
                got = alloc();
            }
        }
        got
    }

    /// Whether transfers of this size are fastest made by the processor itself.
    fn is_for_the_processor(&self, direction: Direction, bytes: usize) -> bool {
        bytes <= BY_PROCESSOR
            && self.engine.way(direction, bytes as u64, Host::Pinned) == Some(Way::Direct(Method::Mapped))
    }

    /// Moves the first `bytes` between a block's two views, behind everything in the queue. True when they have arrived;
    /// otherwise the next fence says so.
    pub(crate) fn transfer(
        &self,
        issue: &mut Issue,
        direction: Direction,
        device: &Buffer,
        host: &Buffer,
        bytes: usize,
    ) -> Result<bool> {
        self.copied.fetch_add(bytes as u64, Ordering::Relaxed);
        let begun = self.copies.get().map(|c| (c, Instant::now()));
        let moved = self.start_transfer(issue, direction, device, host, bytes);
        if let Some((copies, begun)) = begun {
            copies.record(self.index, direction, bytes, begun);
        }
        moved
    }

    fn start_transfer(
        &self,
        issue: &mut Issue,
        direction: Direction,
        device: &Buffer,
        host: &Buffer,
        bytes: usize,
    ) -> Result<bool> {
        // The processor would wait for what is in the queue, and whoever else wants the queue with it.
        if self.is_for_the_processor(direction, bytes)
            && device.is_mapped()
            && bytes <= host.len()
            && issue.surplus()?.is_none()
            && issue.is_idle()
            && let Some(p) = host.host_ptr()
            && let Some(_only_one) = self.engine.try_mapping()
        {
            self.mapped.fetch_add(1, Ordering::Relaxed);
            // SAFETY: the host's view has the bytes, and is the caller's until it is told that they have arrived.
            unsafe { issue.queue.transfer(Method::Mapped, direction, device, 0, p.as_ptr(), bytes)? };
            return Ok(true);
        }
        match direction {
            Direction::ToDevice => issue.queue.copy(host, 0, device, 0, bytes)?,
            Direction::ToHost => issue.queue.copy(device, 0, host, 0, bytes)?,
        }
        Ok(false)
    }

    /// Takes memory back for the next one who needs that size, once these devices have copied from it.
    pub(crate) fn give_back_after(&self, b: Buffer, readers: Vec<(Arc<DeviceHandle>, Fence)>) {
        if readers.is_empty() {
            self.spare().put(b.len(), b, self.invocations.load(Ordering::Relaxed));
        } else {
            let readers = readers.into_iter().map(|(d, fence)| (Arc::downgrade(&d), fence)).collect();
            let mut lent = self.lent.lock().unwrap_or_else(PoisonError::into_inner);
            lent.push((b, readers));
            self.has_lent.store(true, Ordering::Release);
        }
    }

    /// Takes back what others have copied by now.
    fn take_back(&self) {
        let mut lent = self.lent.lock().unwrap_or_else(PoisonError::into_inner);
        lent.retain_mut(|(b, readers)| {
            // One that is gone has ended what was in its queue.
            readers.retain(|(d, fence)| d.upgrade().is_some_and(|d| !d.is_done(*fence)));
            if readers.is_empty() {
                self.spare().put(b.len(), b.clone(), self.invocations.load(Ordering::Relaxed));
            }
            !readers.is_empty()
        });
        self.has_lent.store(!lent.is_empty(), Ordering::Release);
    }

    /// Whether a fence is known to have been reached; who uses the queue, and what has no fence yet, is not waited for.
    pub(crate) fn has_reached(&self, fence: Fence) -> bool {
        let Ok(mut issue) = self.queue.try_lock() else { return false };
        fence <= issue.last && issue.queue.done(fence).unwrap_or(true)
    }

    /// Whether a fence has been reached, or the device has failed.
    fn is_done(&self, fence: Fence) -> bool {
        let mut issue = self.lock();
        if fence > issue.last
            && let Err(why) = issue.fence_now()
        {
            // Without memory for a fence it goes on.
            return !why.is_out_of_memory();
        }
        let fence = fence.min(issue.last);
        issue.queue.done(fence).unwrap_or(true)
    }

    /// Copies from memory of another device that this one reaches; the next fence says when it is done.
    pub(crate) fn peer_copy(&self, issue: &mut Issue, from: &Buffer, to: &Buffer, bytes: usize) -> Result<()> {
        self.peer.fetch_add(bytes as u64, Ordering::Relaxed);
        issue.queue.copy(from, 0, to, 0, bytes)
    }

    /// Frees what nobody uses now; whether there was any.
    pub(crate) fn trim(&self) -> bool {
        let all = std::mem::take(&mut self.spare().by_size);
        all.values().any(|same| !same.is_empty())
    }

    fn spare(&self) -> MutexGuard<'_, Spare<Buffer>> {
        self.spare.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// From now on the account says when work may be issued and hears what it took, and the gate hears when all is done.
    pub(crate) fn serve(self: &Arc<Self>, gate: &Arc<Gate>, account: Option<Arc<Account>>) {
        if let Some(a) = &account {
            self.lock().charge(a.clone(), self.ahead_ns.clone());
        }
        if account.as_ref().is_some_and(|a| !a.is_metered()) {
            let (sender, wanted) = sync_channel(1);
            let device = Arc::downgrade(self);
            let watch = move || watch(&device, &wanted);
            // Without it the device is charged for until somebody looks.
            if std::thread::Builder::new().name("forebay-watch".into()).spawn(watch).is_ok() {
                let _ = self.watcher.set(sender);
            }
        }
        let _ = self.served.set((Arc::downgrade(gate), account));
    }

    /// Whether everything that was issued is done, asked by a worker that goes to sleep; if not, somebody will look.
    pub(crate) fn is_quiet_or_watched(&self) -> bool {
        let quiet = self.is_quiet();
        if !quiet {
            self.ask_to_look();
        }
        quiet
    }

    /// Where the device is charged for, somebody will look when what was issued so far is done.
    pub(crate) fn ask_to_look(&self) {
        if let Some(watcher) = self.watcher.get() {
            // Full: it was asked already.
            let _ = watcher.try_send(());
        }
    }

    fn account(&self) -> Option<&Account> {
        self.served.get()?.1.as_deref()
    }

    /// The process's account on the device.
    pub(crate) fn shared_account(&self) -> Option<Arc<Account>> {
        self.served.get()?.1.clone()
    }

    /// What moving so much costs, as far as it was measured.
    pub(crate) fn copy_ns(&self, direction: Direction, bytes: u64) -> u64 {
        if bytes == 0 { 0 } else { self.engine.cost_ns(direction, bytes, Host::Pinned) }
    }

    /// Waits until everything that was issued so far is done.
    pub(crate) fn finish(&self) -> Result<()> {
        let last = {
            let mut issue = self.lock();
            issue.fence()?;
            issue.last
        };
        forebay_hal::cpu::about_to_block();
        self.wait(last)
    }

    /// Why nothing can be done on it any more, as far as anybody has looked.
    pub(crate) fn lost(&self) -> Option<&Error> {
        self.lost.get()
    }

    /// Whether nothing can be done on it any more, asked of the device itself; for who has seen something fail.
    pub(crate) fn look_whether_lost(&self) -> bool {
        if self.lost.get().is_none()
            && let Err(why @ Error::Lost { .. }) = self.lock().fence_now()
        {
            let _ = self.lost.set(why);
        }
        self.lost.get().is_some()
    }

    /// Whether everything that was issued is done.
    pub(crate) fn is_quiet(&self) -> bool {
        let mut issue = self.lock();
        // What fails has come to an end, too.
        let _ = issue.surplus();
        issue.is_idle()
    }

    /// The end of what was issued, if it has not come.
    fn last_in_flight(&self) -> Option<Arc<dyn Completion>> {
        self.flush();
        let mut issue = self.lock();
        let _ = issue.surplus();
        let (_, last) = issue.ends()?;
        issue.queue.completion(last).ok().flatten()
    }

    fn ahead_ns(&self) -> u64 {
        self.ahead_ns.load(Ordering::Relaxed)
    }

    /// Waits for credit on the device, unless `over`.
    pub(crate) fn await_credit(&self, over: impl Fn() -> bool) {
        let Some(a) = self.account().filter(|a| !a.may_beside(self.ahead_ns())) else { return };
        forebay_hal::cpu::about_to_block();
        // What was used is known when it is found done, which somebody must look for.
        self.flush();
        loop {
            let behind = self.behind();
            if over() || a.may_beside(self.ahead_ns()) {
                return;
            }
            match behind {
                // With the first one done the next may be issued, if there is credit at all. A failure meets whoever uses the
                // device next.
                Some(first) if a.may() => {
                    if first.wait().is_err() {
                        return;
                    }
                }
                _ => {
                    if a.wait(|| self.ahead_ns()) {
                        return;
                    }
                }
            }
        }
    }

    /// The end of the first of several that are in flight.
    fn behind(&self) -> Option<Arc<dyn Completion>> {
        let mut issue = self.lock();
        let _ = issue.surplus();
        let (first, _) = issue.ends().filter(|_| self.ahead_ns() > 0)?;
        issue.queue.completion(first).ok().flatten()
    }

    /// The CPU shares the host's memory: no views, no copies.
    pub(crate) fn is_host(&self) -> bool {
        self.device.info().host_memory
    }

    pub(crate) fn kind(&self) -> Kind {
        self.device.info().kind
    }

    /// The queue, to issue an invocation; to be handed to [`DeviceHandle::invocation_issued`].
    pub(crate) fn issue(&self) -> Issuing<'_> {
        let mut issue = self.lock();
        issue.begins();
        Issuing { issue, issued: false }
    }

    /// Does work on the device that is not in the queue, and charges its time.
    pub(crate) fn timed<R>(&self, work: impl FnOnce() -> R) -> R {
        match self.account() {
            Some(a) => Issue::timed(a, work),
            None => work(),
        }
    }

    /// Lock rank: after a block's views, before nothing.
    pub(crate) fn lock(&self) -> MutexGuard<'_, Issue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for a fence, or for one that [`Issue::next_fence`] promised.
    pub(crate) fn wait(&self, fence: Fence) -> Result<()> {
        let completion = {
            let mut issue = self.lock();
            if fence > issue.last {
                issue.fence_now()?;
            }
            let fence = fence.min(issue.last);
            issue.queue.completion(fence)?
        };
        // Without the lock: others issue meanwhile.
        let done = completion.map_or(Ok(()), |c| c.wait());
        let gate = self.served.get().and_then(|(g, _)| g.upgrade());
        if let Some(gate) = gate.filter(|_| self.is_quiet()) {
            gate.is_quiet();
        }
        done
    }

    /// Whether an invocation that is issued now waits neither for credit nor for others that are in flight.
    pub(crate) fn takes_at_once(&self) -> bool {
        let may = self.account().is_none_or(|a| a.may_beside(self.ahead_ns()));
        let mut issue = self.lock();
        may && matches!(issue.surplus(), Ok(None)) && issue.batches() < AT_ONCE
    }

    /// Ends the issue of one invocation; waits while more than the device's depth are in flight. Invocations are fenced,
    /// and so handed to the device, in batches; [`DeviceHandle::flush`] hands over what is left when a worker has
    /// nothing else to issue.
    pub(crate) fn invocation_issued<'a>(&'a self, mut issuing: Issuing<'a>) -> Result<()> {
        issuing.issued = true;
        let issue = &mut *issuing.issue;
        self.invocations.fetch_add(1, Ordering::Relaxed);
        let mut oldest = if issue.may_wait_for_others() {
            self.leave_unfenced();
            // Who runs out of work after each of them fences each, and does not wait for any.
            if !issue.may_be_many() {
                return Ok(());
            }
            issue.surplus()?
        } else {
            issue.fence()?
        };
        drop(issuing);
        while let Some(fence) = oldest {
            let completion = self.lock().queue.completion(fence)?;
            if let Some(c) = completion {
                c.wait()?;
            }
            oldest = self.lock().surplus()?;
        }
        Ok(())
    }
}

/// Looks after a device while no worker does: what has ended is charged for no longer. Ends with the device.
fn watch(device: &Weak<DeviceHandle>, wanted: &Receiver<()>) {
    while wanted.recv().is_ok() {
        // Mostly somebody waits for it anyhow.
        std::thread::sleep(LOOK);
        // The device is not kept while this waits: it is its runtime's to give back.
        let Some(last) = device.upgrade().map(|d| d.last_in_flight()) else { return };
        if let Some(c) = last {
            // A failure meets whoever uses the device next.
            let _ = c.wait();
        }
        let Some(d) = device.upgrade() else { return };
        if d.is_quiet()
            && let Some(gate) = d.served.get().and_then(|(g, _)| g.upgrade())
        {
            gate.is_quiet();
        }
    }
}

impl Drop for DeviceHandle {
    fn drop(&mut self) {
        // The account is the process's, and may outlive this.
        let issue = self.queue.get_mut().unwrap_or_else(PoisonError::into_inner);
        issue.leave();
    }
}

impl DeviceHandle {
    /// Hands the device what was issued and not fenced yet. Called by a worker that has run out of work, so it may wait
    /// for the queue: whoever holds it is issuing, or waiting for the device.
    pub(crate) fn flush(&self) {
        if self.unfenced.swap(false, Ordering::AcqRel) {
            // A failure here is sticky on the device and meets whoever uses it next; so does a surplus.
            let _ = self.lock().fence();
        }
    }

    /// Lets go of what is kept for commands that have ended, code and memory; without this that waits for the next use of the
    /// queue, as it does for what has not ended.
    pub(crate) fn sweep(&self) {
        self.flush();
        let mut issue = self.lock();
        // What fails meets whoever uses the device next.
        let _ = issue.surplus();
        if let Ok(last) = issue.fence_now() {
            let _ = issue.queue.done(last);
        }
    }

    /// Marks that something was issued and not fenced.
    pub(crate) fn leave_unfenced(&self) {
        self.unfenced.store(true, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stand_in;
    use forebay_hal::sim::{Model, SimDevice};

    #[test]
    fn memory_that_only_commands_in_the_queue_use_is_waited_for_when_there_is_no_other() {
        if !stand_in::is_here() {
            let name =
                "run::device::tests::memory_that_only_commands_in_the_queue_use_is_waited_for_when_there_is_no_other";
            return stand_in::again_with(name, &[("STAND_IN_DEVICES", "1"), ("STAND_IN_DELAYS", "1")]);
        }
        let device = forebay_hal::discover(&[Kind::Cuda]).0.remove(0);
        let d = DeviceHandle::new(1, device.clone(), DEPTH_THROUGHPUT).unwrap();
        const MIB: usize = 1 << 20;
        let others = device.info().memory_bytes as usize - device.allocated() as usize - 400 * MIB;
        let _others = device.alloc(others).unwrap();
        let first = d.buffer(300 * MIB).unwrap();
        {
            let mut q = d.lock();
            q.queue.host_fn(Box::new(|| std::thread::sleep(Duration::from_millis(20)))).unwrap();
            q.queue.fill(&first, 0, 100, 1).unwrap();
        }
        d.give_back_after(first, Vec::new());
        let begun = Instant::now();
        d.buffer(350 * MIB).unwrap();
        assert!(begun.elapsed() > Duration::from_millis(5), "it was not in use any more: {:?}", begun.elapsed());
        // There is not so much.
        assert!(matches!(d.buffer(500 * MIB), Err(Error::OutOfMemory { .. })));
    }

    /// Neither the service nor who waits for credit waits for what never ends.
    #[test]
    fn what_was_on_a_lost_device_has_come_to_an_end() {
        let sim = SimDevice::new(Model::default());
        let d = DeviceHandle::new(1, Arc::new(sim.clone()), DEPTH_THROUGHPUT).unwrap();
        let b = d.buffer(100).unwrap();
        for _ in 0..20 {
            let mut issuing = d.issue();
            issuing.queue().fill(&b, 0, 100, 1).unwrap();
            d.invocation_issued(issuing).unwrap();
        }
        assert!(!d.is_quiet() && !d.look_whether_lost() && d.lost().is_none());
        sim.unplug();
        assert!(d.is_quiet());
        assert!(d.look_whether_lost() && matches!(d.lost(), Some(Error::Lost { .. })));
        // The same where nobody had looked before it was to be handed over.
        let sim = SimDevice::new(Model::default());
        let d = DeviceHandle::new(1, Arc::new(sim.clone()), DEPTH_THROUGHPUT).unwrap();
        let issuing = d.issue();
        d.invocation_issued(issuing).unwrap();
        sim.unplug();
        d.flush();
        assert!(d.is_quiet());
    }

    #[test]
    fn small_memory_is_used_again_at_once_and_large_memory_takes_turns() {
        let mut spare = Spare::new(100);
        let mut made = 0;
        // As a pipeline does: three of a size for each item, which come back when it has been issued.
        let mut item = |spare: &mut Spare<u32>, bytes, issued: u64| {
            let all = [(); 3].map(|()| {
                spare.take(bytes, issued).unwrap_or_else(|| {
                    made += 1;
                    made
                })
            });
            all.into_iter().for_each(|b| spare.put(bytes, b, issued + 1));
            all
        };
        let small = [0, 1, 2].map(|i| item(&mut spare, 99, i));
        assert!(small.iter().all(|of| of.iter().all(|b| (1..=3).contains(b))), "{small:?}");
        let large = [3, 4, 5, 6].map(|i| item(&mut spare, 100, i));
        assert_eq!(large, [[4, 5, 6], [7, 8, 9], [4, 5, 6], [7, 8, 9]]);
    }
}
