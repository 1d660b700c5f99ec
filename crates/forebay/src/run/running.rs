//! A running graph, as the program sees it.

use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use forebay_hal::Geometry;
use forebay_hal::cpu::on_worker;

use super::host::Cores;
use super::nested::Nested;
use super::node::{Chan, Core, EndRef, Node};
use super::trace::{CopySpan, Recording, Span};
use super::{dispatch, exec};
use crate::block::Datablock;
use crate::error::{Error, Result};
use crate::graph::{Drain, Feed, TaskId};

/// Numbers of one task.
#[derive(Clone, Debug)]
pub struct TaskStats {
    /// Name.
    pub name: String,
    /// Invocations so far.
    pub invocations: u64,
    /// Invocations by device number.
    pub by_device: Vec<u64>,
    /// "waiting", "queued", "executing" or "completed".
    pub state: &'static str,
    /// Decayed average of run times, ns; 0 for tasks that need no scheduling.
    pub avg_run_ns: u64,
    /// Decayed average of waits for a device, ns.
    pub avg_wait_ns: u64,
    /// How often another device became its home (adaptive placement).
    pub moves: u64,
    /// Predictions that came to be, and by how much of what it took they were off on the average (adaptive placement).
    pub accuracy: (u64, f64),
    /// The last of these: what was predicted, and what it took, ns; none before there was one.
    pub last_prediction_ns: Option<(u64, u64)>,
    /// Devices on which it failed and was done elsewhere, and the latest reason of each: lost, full for a while (or when the
    /// graph was started, which then does without), or, under adaptive placement, whatever it was.
    pub refused: Vec<(usize, String)>,
    /// The region that the task is fused into, if it is: its tasks run as one, and these numbers are the region's.
    pub region: Option<String>,
}

/// Numbers of one channel.
#[derive(Clone, Copy, Debug)]
pub struct ChannelStats {
    /// Datablocks in it now.
    pub len: usize,
    /// Room.
    pub capacity: usize,
    /// Datablocks that passed its entrance so far.
    pub passed: u64,
}

/// A look at a running graph.
#[derive(Clone, Debug)]
pub struct Snapshot {
    /// Tasks in order of addition.
    pub tasks: Vec<TaskStats>,
    /// Channels in order of addition.
    pub channels: Vec<ChannelStats>,
}

/// How long a push into a region keeps to the channel's declared capacity. What the region's own channels would have
/// held beyond it (fuse.rs, rule 4) is for programs that push ahead before they pull; others are faster with fewer
/// blocks in flight.
const GRACE: Duration = Duration::from_millis(20);

/// A graph that was started. Dropping it tears it down.
pub struct Running {
    pub(super) core: Arc<Core>,
}

/// The nice value of the calling thread; real-time threads count as -21.
pub(crate) fn current_nice() -> i32 {
    // Field 41 of proc_pid_stat(5), counted behind the parenthesised name, is the policy: 1 SCHED_FIFO, 2 SCHED_RR.
    let stat = std::fs::read_to_string("/proc/thread-self/stat").unwrap_or_default();
    let policy = stat.rsplit(") ").next().and_then(|rest| rest.split(' ').nth(38));
    if matches!(policy, Some("1" | "2")) {
        return -21;
    }
    rustix::process::getpriority_process(None).unwrap_or(0)
}

impl Running {
    pub(crate) fn new(core: Arc<Core>) -> Self {
        Running { core }
    }

    /// # Errors
    /// [`Error::Forked`].
    pub(crate) fn is_here(&self) -> Result<()> {
        match self.core.runtime.is_here() {
            true => Ok(()),
            false => Err(Error::Forked { what: format!("graph {:?}", self.core.name) }),
        }
    }

    fn channel(&self, id: u32, feed: bool) -> Result<(&Chan, &super::host::HostEnd)> {
        self.is_here()?;
        let c = self.core.channels.get(id as usize);
        let c = c.filter(|c| matches!((c.from, c.to, feed), (EndRef::Host, _, true) | (_, EndRef::Host, false)));
        c.and_then(|c| Some((c, c.host.as_deref()?)))
            .ok_or_else(|| Error::NoSuch { what: if feed { "feed" } else { "drain" }, graph: self.core.name.clone() })
    }

    /// How the cores are used at this moment.
    fn cores(&self) -> impl Fn() -> Cores {
        || Cores::of(&self.core.runtime.pool)
    }

    /// See [`super::nested`].
    pub(crate) fn blocks(&self) -> impl FnOnce() -> Result<Option<Nested>> {
        || self.core.runtime.waits_here()
    }

    fn port_of(&self, id: u32) -> String {
        let c = &self.core.channels[id as usize];
        // Ports of a region carry their task's name already.
        let full = |n: u32, port: &str| match self.core.nodes[n as usize].region {
            Some(_) => port.to_owned(),
            None => format!("{}.{port}", self.core.nodes[n as usize].name),
        };
        match (c.from, c.to) {
            (EndRef::Host, EndRef::Node(n)) => {
                let node = &self.core.nodes[n as usize];
                let port = node.inputs.iter().position(|i| i.channel == id).map_or("?", |i| &node.input_names[i]);
                full(n, port)
            }
            (EndRef::Node(n), _) => {
                let node = &self.core.nodes[n as usize];
                let port =
                    node.outputs.iter().position(|o| o.channels.contains(&id)).map_or("?", |i| &node.output_names[i]);
                full(n, port)
            }
            _ => "?".into(),
        }
    }

    /// A datablock for a feed, from its pool: filling and pushing it allocates nothing once the pool is warm.
    ///
    /// # Errors
    /// [`Error::NoSuch`] for a feed of another graph.
    pub fn acquire(&self, feed: Feed) -> Result<Datablock> {
        let (c, _) = self.channel(feed.0, true)?;
        let b = c.pool.as_ref().map(super::node::PoolRef::acquire);
        b.ok_or_else(|| Error::NoSuch { what: "feed", graph: self.core.name.clone() })
    }

    fn fits(&self, c: &Chan, id: u32, b: &Datablock) -> Result<()> {
        match b.template().differs(&c.template) {
            None => Ok(()),
            Some(why) => {
                let want = format!("{} takes {}: {why}", self.port_of(id), c.template);
                Err(Error::Block { block: b.template().to_string(), want })
            }
        }
    }

    /// One attempt at a push, under the end's lock: none when there is no room. A task that is managed and can run now is
    /// `woken`, and the caller's.
    fn attempt_push<'a>(
        &'a self,
        c: &Chan,
        closed: bool,
        block: &mut Option<Datablock>,
        woken: &mut Option<&'a Node>,
    ) -> Option<Result<()>> {
        if closed || self.core.stopping() {
            return Some(Err(self.core.refusal()));
        }
        if !c.ring.has_room() {
            return None;
        }
        let b = block.take()?;
        if let Err(p) = c.ring.push(b.into_raw()) {
            // SAFETY: the ring gave the handle back.
            *block = Some(unsafe { Datablock::from_raw(p) });
            return None;
        }
        if let EndRef::Node(n) = c.to {
            let node = &self.core.nodes[n as usize];
            match exec::wakes_consumer(c, node) {
                false => {}
                true if node.managed => *woken = Some(node),
                // SAFETY: the notification made us the owner, and the graph lives while a task is owned. The end's lock
                // is held, so teardown, which closes ends first, cannot be past its wait.
                true => unsafe { self.core.runtime.pool.submit_in_turn(exec::job(node), &node.turn) },
            }
        }
        Some(Ok(()))
    }

    /// Has a task stand in line at once: workers may be busy for long, and the device that it goes to idle. What a device
    /// takes at once is issued here, if this thread `may_issue`: a worker would have to be woken for it. The graph lives
    /// while a task is owned.
    fn stand_in_line(&self, woken: Option<&Node>, may_issue: bool) {
        if let Some(node) = woken {
            self.core.runtime.pool.helping(|w| {
                if exec::stand_in_line(node, w, may_issue && !on_worker()) {
                    dispatch::run_here(node, w);
                }
            });
        }
    }

    fn attempt_pull(&self, c: &Chan, closed: bool) -> Option<Result<Datablock>> {
        if let Some(p) = c.ring.pop() {
            if let EndRef::Node(n) = c.from {
                let node = &self.core.nodes[n as usize];
                if !closed && exec::wakes_producer(c, node) {
                    // SAFETY: as in `attempt_push`.
                    unsafe { self.core.runtime.pool.submit_in_turn(exec::job(node), &node.turn) };
                }
            }
            // SAFETY: the ring holds handles given by `into_raw`.
            return Some(Ok(unsafe { Datablock::from_raw(p) }));
        }
        if closed || self.core.stopping() {
            return Some(Err(self.core.refusal()));
        }
        None
    }

    /// Waits for room until then, and pushes the block: none when there was none. A `patient` caller's thread may issue commands.
    fn push_until(
        &self,
        feed: Feed,
        block: &mut Option<Datablock>,
        until: Option<Instant>,
        patient: bool,
    ) -> Option<Result<()>> {
        let (c, host) = match self.channel(feed.0, true) {
            Ok(found) => found,
            Err(e) => return Some(Err(e)),
        };
        if let Some(Err(e)) = block.as_ref().map(|b| self.fits(c, feed.0, b)) {
            return Some(Err(e));
        }
        if !c.ahead.load(Ordering::Relaxed) {
            let whole = Instant::now().checked_add(GRACE);
            let grace = until.map_or(whole, |u| whole.map(|g| g.min(u)));
            let room = || c.ring.len() < c.declared;
            let attempt = |closed| (closed || self.core.stopping() || room()).then_some(());
            // A push that had less time than that has shown nothing; it may still use the room below.
            match host.wait(grace, self.cores(), self.blocks(), room, |s| attempt(s.closed)) {
                Ok(None) if grace == whole => c.ahead.store(true, Ordering::Relaxed),
                Ok(_) => {}
                Err(e) => return Some(Err(e)),
            }
        }
        let mut woken = None;
        let done = host.wait(
            until,
            self.cores(),
            self.blocks(),
            || c.ring.len() < c.ring.capacity(),
            |s| self.attempt_push(c, s.closed, block, &mut woken),
        );
        self.stand_in_line(woken, patient);
        done.unwrap_or_else(|e| Some(Err(e)))
    }

    fn no_room(&self, feed: Feed, begun: Instant) -> Error {
        Error::WouldBlock { what: "no room at", port: self.port_of(feed.0), waited: begun.elapsed() }
    }

    /// Pushes a datablock; waits while the channel is full. If a task on an idle device has all its inputs then, its commands
    /// are issued by this thread.
    ///
    /// # Errors
    /// A block that does not fit, a graph that is not running, or the error that ended it; [`Error::AllWait`] in a task's function.
    pub fn push(&self, feed: Feed, block: Datablock) -> Result<()> {
        let pushed = self.push_until(feed, &mut Some(block), None, true);
        pushed.unwrap_or_else(|| Err(self.no_room(feed, Instant::now())))
    }

    /// Pushes a datablock; waits at most `timeout`.
    ///
    /// # Errors
    /// As [`Running::push`]; [`Error::WouldBlock`] when there was no room in time (the block is dropped).
    pub fn push_timeout(&self, feed: Feed, block: Datablock, timeout: Duration) -> Result<()> {
        let begun = Instant::now();
        let pushed = self.push_until(feed, &mut Some(block), begun.checked_add(timeout), false);
        pushed.unwrap_or_else(|| Err(self.no_room(feed, begun)))
    }

    /// Pushes a datablock as [`Running::push`] does, and asks how long to wait, and again when that time is over, until there is
    /// room or the answer is none: for programs that can be told to end.
    ///
    /// # Errors
    /// As [`Running::push`]; [`Error::WouldBlock`] when there was no room in time (the block is dropped).
    pub fn push_while(
        &self,
        feed: Feed,
        block: Datablock,
        mut patience: impl FnMut() -> Option<Duration>,
    ) -> Result<()> {
        let (begun, mut block) = (Instant::now(), Some(block));
        while let Some(time) = patience() {
            if let Some(pushed) = self.push_until(feed, &mut block, Instant::now().checked_add(time), true) {
                return pushed;
            }
        }
        Err(self.no_room(feed, begun))
    }

    /// Pushes a datablock if there is room now.
    ///
    /// # Errors
    /// As [`Running::push`]; [`Error::WouldBlock`] without room. The block comes back with the error.
    pub fn try_push(&self, feed: Feed, block: Datablock) -> Result<(), (Datablock, Error)> {
        let (c, host) =
            match self.channel(feed.0, true).and_then(|(c, h)| self.fits(c, feed.0, &block).map(|()| (c, h))) {
                Ok(found) => found,
                Err(e) => return Err((block, e)),
            };
        let (mut block, mut woken) = (Some(block), None);
        let result = {
            let s = host.lock();
            self.attempt_push(c, s.closed, &mut block, &mut woken)
        };
        self.stand_in_line(woken, false);
        let e = match result {
            Some(Ok(())) => return Ok(()),
            Some(Err(e)) => e,
            None => Error::WouldBlock { what: "no room at", port: self.port_of(feed.0), waited: Duration::ZERO },
        };
        match block {
            Some(b) => Err((b, e)),
            None => Ok(()),
        }
    }

    /// Pushes a datablock without blocking the thread.
    ///
    /// # Errors
    /// As [`Running::push`].
    pub fn push_async(&self, feed: Feed, block: Datablock) -> impl Future<Output = Result<()>> + '_ {
        let mut block = Some(block);
        OnHost(move |cx: &mut Context<'_>| {
            let (c, host) = match self.channel(feed.0, true) {
                Ok(found) => found,
                Err(e) => return Some(Err(e)),
            };
            if let Some(Err(e)) = block.as_ref().map(|b| self.fits(c, feed.0, b)) {
                return Some(Err(e));
            }
            let mut woken = None;
            let done = host.poll(cx.waker(), |s| self.attempt_push(c, s.closed, &mut block, &mut woken));
            self.stand_in_line(woken, false);
            done
        })
    }

    /// Waits for a datablock until then: none when none came.
    pub(crate) fn pull_until(&self, drain: Drain, until: Option<Instant>) -> Option<Result<Datablock>> {
        let (c, host) = match self.channel(drain.0, false) {
            Ok(found) => found,
            Err(e) => return Some(Err(e)),
        };
        host.wait(until, self.cores(), self.blocks(), || !c.ring.is_empty(), |s| self.attempt_pull(c, s.closed))
            .unwrap_or_else(|e| Some(Err(e)))
    }

    fn nothing(&self, drain: Drain, begun: Instant) -> Error {
        Error::WouldBlock { what: "nothing at", port: self.port_of(drain.0), waited: begun.elapsed() }
    }

    /// Pulls a datablock; waits while the channel is empty.
    ///
    /// # Errors
    /// A graph that is not running (once the channel is empty), or the error that ended it; [`Error::AllWait`] in a task's function.
    pub fn pull(&self, drain: Drain) -> Result<Datablock> {
        self.pull_until(drain, None).unwrap_or_else(|| Err(self.nothing(drain, Instant::now())))
    }

    /// Pulls a datablock; waits at most `timeout`.
    ///
    /// # Errors
    /// As [`Running::pull`]; [`Error::WouldBlock`] when nothing came in time.
    pub fn pull_timeout(&self, drain: Drain, timeout: Duration) -> Result<Datablock> {
        let begun = Instant::now();
        self.pull_until(drain, begun.checked_add(timeout)).unwrap_or_else(|| Err(self.nothing(drain, begun)))
    }

    /// Pulls a datablock as [`Running::pull`] does, and asks how long to wait as [`Running::push_while`] does.
    ///
    /// # Errors
    /// As [`Running::pull`]; [`Error::WouldBlock`] when nothing came in time.
    pub fn pull_while(&self, drain: Drain, mut patience: impl FnMut() -> Option<Duration>) -> Result<Datablock> {
        let begun = Instant::now();
        while let Some(time) = patience() {
            if let Some(pulled) = self.pull_until(drain, Instant::now().checked_add(time)) {
                return pulled;
            }
        }
        Err(self.nothing(drain, begun))
    }

    /// Pulls a datablock if one is there now.
    ///
    /// # Errors
    /// As [`Running::pull`]; [`Error::WouldBlock`] when nothing is there.
    pub fn try_pull(&self, drain: Drain) -> Result<Datablock> {
        let (c, host) = self.channel(drain.0, false)?;
        let s = host.lock();
        self.attempt_pull(c, s.closed).unwrap_or_else(|| {
            Err(Error::WouldBlock { what: "nothing at", port: self.port_of(drain.0), waited: Duration::ZERO })
        })
    }

    /// Pulls a datablock without blocking the thread.
    ///
    /// # Errors
    /// As [`Running::pull`].
    pub fn pull_async(&self, drain: Drain) -> impl Future<Output = Result<Datablock>> + '_ {
        OnHost(move |cx: &mut Context<'_>| {
            let (c, host) = match self.channel(drain.0, false) {
                Ok(found) => found,
                Err(e) => return Some(Err(e)),
            };
            host.poll(cx.waker(), |s| self.attempt_pull(c, s.closed))
        })
    }

    /// Ends the graph for good and frees its datablocks; those that the program holds stay valid.
    pub fn teardown(self) {}

    /// Takes over the OS priority of the calling thread for the tasks of this graph (proxy priority). Starting a graph
    /// does this too; a thread whose priority has changed calls it again.
    pub fn adopt_priority(&self) {
        self.core.nice.store(current_nice(), Ordering::Relaxed);
    }

    fn node(&self, task: TaskId) -> Result<&super::node::Node> {
        let n = self.core.nodes.get(task.0 as usize);
        n.ok_or_else(|| Error::NoSuch { what: "task", graph: self.core.name.clone() })
    }

    /// Changes a task's static priority; from its next invocation on. Tasks that were fused share theirs.
    ///
    /// # Errors
    /// [`Error::NoSuch`].
    pub fn set_priority(&self, task: TaskId, priority: i32) -> Result<()> {
        let n = self.node(task)?;
        self.core.nodes[n.lead as usize].priority.store(priority, Ordering::Relaxed);
        Ok(())
    }

    /// Overrides a task's iteration space from its next invocation on; `None` goes back to the declared one.
    ///
    /// # Errors
    /// [`Error::NoSuch`]; [`Error::Size`] for a space of no items.
    pub fn set_geometry(&self, task: TaskId, geometry: Option<Geometry>) -> Result<()> {
        let n = self.node(task)?;
        if geometry.is_some_and(|g| g.items.contains(&0)) {
            return Err(Error::Size { what: n.name.clone(), why: "a geometry without items".into() });
        }
        *n.geometry.lock().unwrap_or_else(PoisonError::into_inner) = geometry;
        n.geometry_set.store(geometry.is_some(), Ordering::Release);
        Ok(())
    }

    /// What the graph looks like now.
    pub fn snapshot(&self) -> Snapshot {
        const STATES: [&str; 4] = ["waiting", "queued", "executing", "completed"];
        let devices = self.core.runtime.devices.len();
        let tasks = self.core.nodes.iter().map(|n| (&n.name, &self.core.nodes[n.lead as usize]));
        let tasks = tasks.map(|(name, n)| TaskStats {
            name: name.clone(),
            invocations: n.stats.invocations.load(Ordering::Relaxed),
            by_device: match n.managed {
                true => n.by_device[..devices].iter().map(|d| d.load(Ordering::Relaxed)).collect(),
                // Only the CPU can run it, so it is not counted by device.
                false => std::iter::once(n.stats.invocations.load(Ordering::Relaxed))
                    .chain(std::iter::repeat_n(0, devices - 1))
                    .collect(),
            },
            state: STATES[usize::from(n.stats.state.load(Ordering::Relaxed)) % 4],
            avg_run_ns: n.stats.avg_run.load(Ordering::Relaxed),
            avg_wait_ns: n.stats.avg_wait.load(Ordering::Relaxed),
            moves: n.moves.load(Ordering::Relaxed),
            accuracy: {
                let [n, error] = &n.accuracy;
                (n.load(Ordering::Relaxed), error.load(Ordering::Relaxed) as f64 / 1e6)
            },
            last_prediction_ns: {
                let [predicted, took] = n.predicted.each_ref().map(|n| n.load(Ordering::Relaxed));
                (took > 0).then_some((predicted, took))
            },
            refused: n.refused.lock().unwrap_or_else(PoisonError::into_inner).clone(),
            region: n.region.as_deref().map(str::to_owned),
        });
        let channels = self.core.channels.iter().map(|c| ChannelStats {
            len: c.ring.len(),
            capacity: c.ring.capacity(),
            passed: match c.inside {
                Some(lead) => self.core.nodes[lead as usize].stats.invocations.load(Ordering::Relaxed),
                None => c.ring.pushed() as u64,
            },
        });
        Snapshot { tasks: tasks.collect(), channels: channels.collect() }
    }

    /// The spans recorded since the last call, and how many did not fit; empty unless started with
    /// [`crate::Runtime::start_traced`].
    pub fn take_trace(&self) -> (Vec<Span>, u64) {
        self.core.trace.as_ref().map(super::trace::Trace::take).unwrap_or_default()
    }

    /// The copies between devices and the host since the last call, of this graph and others of its runtime, and how many
    /// did not fit; empty unless some graph was started with [`crate::Runtime::start_traced`].
    pub fn take_copies(&self) -> (Vec<CopySpan>, u64) {
        self.core.runtime.take_copies()
    }
}

impl Core {
    /// For whoever named a folder for it ([`super::TRACE_VARIABLE`]).
    pub(super) fn leave_recording(&self) {
        let (Some(folder), Some(trace)) = (&self.runtime.recordings, &self.trace) else { return };
        let ((spans, some), (copies, more)) = (trace.take(), self.runtime.take_copies());
        let device = |d: &std::sync::Arc<super::device::DeviceHandle>| d.device.info().name.clone();
        let recording = Recording {
            pid: std::process::id(),
            graph: self.name.clone(),
            epoch_ns: self.runtime.epoch_ns(),
            tasks: self.nodes.iter().map(|n| n.name.to_string()).collect(),
            devices: self.runtime.devices.iter().map(device).collect(),
            spans,
            copies,
            dropped: some + more,
        };
        // The graph's owner did not ask for it and is not told.
        let _ = recording.write(folder);
    }
}

/// A future from a poll function that returns an option.
struct OnHost<F>(F);

impl<T, F: FnMut(&mut Context<'_>) -> Option<T> + Unpin> Future for OnHost<F> {
    type Output = T;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<T> {
        match (self.0)(cx) {
            Some(v) => Poll::Ready(v),
            None => Poll::Pending,
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use crate::{Graph, Runtime, Task, Template};
    use std::sync::atomic::Ordering;

    #[test]
    fn a_graph_takes_the_os_priority_of_the_thread_that_starts_it() {
        let run = || {
            let mut g = Graph::new("nice");
            let t = g.add(Task::new("t").input("x", Template::scalar::<u64>()).host(|_| Ok(()))).unwrap();
            g.feed((t, "x"), 1).unwrap();
            Runtime::builder().cpu_only().build().unwrap().start(g).unwrap()
        };
        let here = super::current_nice();
        let lower = here + 3;
        // Nice values are per thread on Linux, and lowering one's own priority is always allowed.
        let started = std::thread::spawn(move || {
            rustix::process::setpriority_process(None, lower).unwrap();
            run()
        });
        let started = started.join().unwrap();
        assert_eq!(started.core.nice.load(Ordering::Relaxed), lower);
        started.adopt_priority();
        assert_eq!(started.core.nice.load(Ordering::Relaxed), here);
    }
}
