//! A running graph's states, and what leads from one to another.
//!
//! Any thread may ask for any of it at any time, tasks of the graph among them. Rules:
//! 1. State and `stopping` change together, under `life`'s lock. Nothing is waited for under it, and no end of a channel is
//!    locked: whoever holds an end asks for the state.
//! 2. Who halts a graph is counted as `halting` until the ends are closed and, unless it is a task or out of patience, nobody owns
//!    any task. Tasks then stay as they are, since whoever sets the graph going waits for that: what `quiesce` takes out of the
//!    ready queue and lets go of has its inputs still, and is looked at only then.
//! 3. Who sets it going is `starting` until the ends are open and every task has been told. Who halts it waits for that, which
//!    waits for nothing.
//! 4. Channels and the tasks' own state are emptied by one thread at a time, while it halts the graph and after it has waited.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use forebay_hal::cpu::on_worker;

use super::exec;
use super::node::Core;
use super::running::Running;
use crate::block::Datablock;
use crate::error::{Error, Result};

/// State of a graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GraphState {
    /// Tasks run as their inputs arrive.
    Running,
    /// Nothing runs; channels keep their contents.
    Stopped,
    /// A task failed; the graph can be reset.
    Failed,
    /// Gone for good.
    TornDown,
}

impl GraphState {
    /// Its name in messages.
    pub fn name(self) -> &'static str {
        match self {
            GraphState::Running => "running",
            GraphState::Stopped => "stopped",
            GraphState::Failed => "failed",
            GraphState::TornDown => "torn down",
        }
    }
}

/// How long to wait, asked anew when that is over; none to give up.
pub(super) type Patience<'a> = &'a mut dyn FnMut() -> Option<Duration>;

/// Who waits for tasks that run looks at them so often at first, and after a while so often: most of them end at once, and the
/// others' time is not to be used up by looking.
const FIRST_LOOK: Duration = Duration::from_micros(20);
const LAST_LOOK: Duration = Duration::from_millis(1);

/// So long they are waited for in any case.
const A_MOMENT: Duration = Duration::from_millis(1);

/// As long as makes no difference.
const FOREVER: Duration = Duration::from_secs(1 << 30);

/// The state, and who changes it.
pub(crate) struct Life {
    /// No new invocation starts while set (rule 1).
    stopping: AtomicBool,
    now: Mutex<Now>,
    /// `halting` or `starting` has become less.
    changed: Condvar,
    /// Rule 4.
    emptying: Mutex<()>,
}

struct Now {
    state: GraphState,
    /// Why it failed, if it did.
    why: Option<Error>,
    halting: u32,
    starting: bool,
}

/// Somebody halts the graph as long as this is kept (rule 2).
struct Halts<'a>(&'a Life);

impl Drop for Halts<'_> {
    fn drop(&mut self) {
        self.0.now().halting -= 1;
        self.0.changed.notify_all();
    }
}

impl Life {
    /// Of a graph that does not run yet.
    pub(crate) fn new() -> Self {
        Life {
            stopping: AtomicBool::new(true),
            now: Mutex::new(Now { state: GraphState::Stopped, why: None, halting: 0, starting: false }),
            changed: Condvar::new(),
            emptying: Mutex::default(),
        }
    }

    fn now(&self) -> MutexGuard<'_, Now> {
        self.now.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<'a>(&self, now: MutexGuard<'a, Now>) -> MutexGuard<'a, Now> {
        self.changed.wait(now).unwrap_or_else(PoisonError::into_inner)
    }
}

impl Running {
    /// The graph's state.
    pub fn state(&self) -> GraphState {
        self.core.life.now().state
    }

    /// The error that ended the graph, if one did.
    pub fn error(&self) -> Option<Error> {
        self.core.life.now().why.clone()
    }

    /// Stops the graph: no further invocation starts, and those that run are waited for. Channels keep their contents;
    /// [`Running::run`] goes on. From inside a task nothing is waited for, since that might be the task itself.
    ///
    /// # Errors
    /// [`Error::NotRunning`] after teardown.
    pub fn stop(&self) -> Result<()> {
        self.stop_while(|| Some(Duration::MAX))
    }

    /// Stops the graph as [`Running::stop`] does; waits at most `timeout` for the invocations that run.
    ///
    /// # Errors
    /// As [`Running::stop_while`].
    pub fn stop_timeout(&self, timeout: Duration) -> Result<()> {
        let mut left = Some(timeout);
        self.stop_while(|| left.take())
    }

    /// Stops the graph as [`Running::stop`] does, and asks how long to wait for invocations that still run after a moment, and
    /// again when that time is over, until they have ended or the answer is none: for programs that can be told to end. The
    /// graph is stopped in any case: no further invocation starts, and those that run go on to their end.
    ///
    /// # Errors
    /// As [`Running::stop`]; [`Error::StillRunning`] when a task did not end in time.
    pub fn stop_while(&self, mut patience: impl FnMut() -> Option<Duration>) -> Result<()> {
        self.is_here()?;
        let begun = Instant::now();
        match self.core.halt((!on_worker()).then_some(&mut patience), |_| {})? {
            None => Ok(()),
            Some(task) => {
                let task = self.core.nodes[task].name.clone();
                Err(Error::StillRunning { graph: self.core.name.clone(), task, waited: begun.elapsed() })
            }
        }
    }

    /// Starts a stopped graph again. Waits for whoever is about to stop or reset it.
    ///
    /// # Errors
    /// The failure of a failed graph, [`Error::NotRunning`] after teardown; [`Error::InsideTask`] from a task, while the graph is
    /// being stopped or reset by somebody else, who may wait for that task.
    pub fn run(&self) -> Result<()> {
        self.is_here()?;
        let (core, life) = (&self.core, &self.core.life);
        {
            let mut now = life.now();
            while now.halting > 0 || now.starting {
                if now.halting > 0 && on_worker() {
                    return Err(Error::InsideTask { graph: core.name.clone(), what: "run" });
                }
                now = life.wait(now);
            }
            match now.state {
                GraphState::Running => return Ok(()),
                GraphState::Stopped => {}
                _ => return Err(core.not_running(&now)),
            }
            (now.state, now.starting) = (GraphState::Running, true);
            life.stopping.store(false, Ordering::SeqCst);
        }
        self.adopt_priority();
        core.close_ends(false);
        for n in core.nodes.iter().filter(|n| n.lead == n.index) {
            if n.notify.notify() {
                // SAFETY: we own the node now; the graph lives while a task is owned.
                unsafe { core.runtime.pool.submit(exec::job(n)) };
            }
        }
        life.now().starting = false;
        life.changed.notify_all();
        Ok(())
    }

    /// Stops the graph, empties all channels and forgets all state and any failure, of implementations, too; [`Running::run`] starts
    /// afresh.
    ///
    /// # Errors
    /// As [`Running::stop`]; [`Error::InsideTask`] from a task.
    pub fn reset(&self) -> Result<()> {
        if on_worker() {
            return Err(Error::InsideTask { graph: self.core.name.clone(), what: "reset" });
        }
        self.begin_anew()
    }

    /// The same from a task, which is none of this graph's and for which none of this graph's waits.
    ///
    /// # Errors
    /// As [`Running::stop`].
    pub(crate) fn begin_anew(&self) -> Result<()> {
        self.is_here()?;
        let _blocks = self.core.runtime.waits_here()?;
        let emptied = self.core.halt(Some(&mut || Some(Duration::MAX)), |core| {
            let _alone = core.life.emptying.lock().unwrap_or_else(PoisonError::into_inner);
            for c in &core.channels {
                let _end = c.host.as_ref().map(|h| h.lock());
                while let Some(p) = c.ring.pop() {
                    // SAFETY: the ring holds handles given by `into_raw`; nobody else uses it now (quiesced, end locked).
                    drop(unsafe { Datablock::from_raw(p) });
                }
                // SAFETY: no task is owned, so nobody else touches it (rules 2 and 4).
                unsafe { *c.latched.get() = false };
            }
            for n in &core.nodes {
                // SAFETY: as above.
                unsafe { (*n.own.get()).reset() };
                n.refused.lock().unwrap_or_else(PoisonError::into_inner).clear();
            }
            let mut now = core.life.now();
            (now.state, now.why) = (GraphState::Stopped, None);
        });
        emptied.map(drop)
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if self.is_here().is_err() {
            // What runs in the other process ends there.
            return std::mem::forget(self.core.clone());
        }
        // Nobody else has a reference, so nobody is about to stop it or to set it going.
        self.core.let_no_more_start();
        let end = |core: &Core| {
            core.quiesce(&mut || Some(Duration::MAX));
            core.leave_recording();
            {
                let mut now = core.life.now();
                (now.state, now.why) = (GraphState::TornDown, None);
            }
            core.wake_hosts();
        };
        if !on_worker() {
            return end(&self.core);
        }
        // A task that lets go of a graph, perhaps its own, cannot wait for it; the graph must live until then.
        let core = self.core.clone();
        let kept = self.core.clone();
        let waiter = std::thread::Builder::new().name("forebay-teardown".into()).spawn(move || end(&core));
        if waiter.is_err() {
            // No thread to be had: a graph that is never freed is better than one freed under its tasks.
            std::mem::forget(kept);
        }
    }
}

impl Core {
    pub(crate) fn stopping(&self) -> bool {
        self.life.stopping.load(Ordering::SeqCst)
    }

    /// Ends the graph with an error; the first one counts.
    #[cold]
    pub(crate) fn fail(&self, e: Error) {
        {
            let mut now = self.life.now();
            if matches!(now.state, GraphState::Failed | GraphState::TornDown) {
                return;
            }
            (now.state, now.why) = (GraphState::Failed, Some(e));
            self.life.stopping.store(true, Ordering::SeqCst);
        }
        self.wake_hosts();
    }

    /// Why nothing can be pushed or pulled.
    pub(crate) fn refusal(&self) -> Error {
        self.not_running(&self.life.now())
    }

    fn not_running(&self, now: &Now) -> Error {
        // Who was refused a moment ago may ask when it runs again.
        let state = if now.state == GraphState::Running { GraphState::Stopped } else { now.state };
        now.why.clone().unwrap_or_else(|| Error::NotRunning { graph: self.name.clone(), state: state.name() })
    }

    /// Lets no further invocation start and, with `patience`, waits for those that run; then calls `still`, while it cannot be set
    /// going (rule 2). Without any left, `still` is not called: the number of a task that did not end.
    pub(super) fn halt(&self, patience: Option<Patience<'_>>, still: impl FnOnce(&Core)) -> Result<Option<usize>> {
        {
            let mut now = self.life.now();
            while now.starting {
                now = self.life.wait(now);
            }
            match now.state {
                GraphState::TornDown => return Err(self.not_running(&now)),
                GraphState::Running => now.state = GraphState::Stopped,
                GraphState::Stopped | GraphState::Failed => {}
            }
            now.halting += 1;
            self.life.stopping.store(true, Ordering::SeqCst);
        }
        // Patience is the program's, and may panic.
        let _halts = Halts(&self.life);
        self.close_ends(true);
        let owned = patience.and_then(|p| self.quiesce(p));
        if owned.is_none() {
            still(self);
        }
        Ok(owned)
    }

    /// The same for good, and nothing is waited for.
    fn let_no_more_start(&self) {
        {
            let mut now = self.life.now();
            now.state = GraphState::Stopped;
            self.life.stopping.store(true, Ordering::SeqCst);
        }
        self.close_ends(true);
    }

    fn close_ends(&self, closed: bool) {
        for h in self.channels.iter().filter_map(|c| c.host.as_deref()) {
            h.lock().closed = closed;
            h.wake_all();
        }
    }

    fn wake_hosts(&self) {
        self.channels.iter().filter_map(|c| c.host.as_deref()).for_each(super::host::HostEnd::wake_all);
    }

    /// Waits until nobody owns any task; the number of one that somebody owns, when there is no patience left. `stopping` is set
    /// and the ends are closed, so no invocation starts; tasks in the ready queue are taken out of it.
    ///
    /// After a first pass that found every task idle once, none executes any more, so none notifies another; what is
    /// owned then was notified before, and a second such pass finds the last of it let go.
    fn quiesce(&self, patience: Patience<'_>) -> Option<usize> {
        let (mut clean, mut pause) = (0, FIRST_LOOK);
        // A worker may be looking at a task that has nothing to do.
        let mut until = Instant::now() + A_MOMENT;
        while clean < 2 {
            let mut owned = None;
            for (i, n) in self.nodes.iter().enumerate() {
                if n.notify.idle() {
                    continue;
                }
                owned = Some(i);
                if n.managed && self.runtime.dispatcher.remove(n) {
                    // Ours now; nothing runs while stopping, so just let it go.
                    let mut seen = n.notify.seen();
                    while let Err(now) = n.notify.release(seen) {
                        seen = now;
                    }
                }
            }
            if owned.is_none() {
                clean += 1;
                continue;
            }
            clean = 0;
            let now = Instant::now();
            if until <= now {
                let Some(time) = patience() else { return owned };
                until = now.checked_add(time).unwrap_or(now + FOREVER);
            }
            std::thread::sleep(until.saturating_duration_since(now).min(pause));
            pause = (pause * 2).min(LAST_LOOK);
        }
        None
    }
}
