//! A lane of a task that is called like a function: a graph with that task alone, which does its calls one after the other.
//!
//! Rules:
//! 1. Calls have numbers in the order in which they are sent, and come back in it. `state` is locked for moments only.
//! 2. What comes back one thread takes in at a time (`receiving`), without the lock; others who wait for the lane wait for that
//!    one. Whose patience ends in the middle of a call's outputs, or who must not wait there, leaves those that it has for the next one
//!    (`part`).
//! 3. What nobody wants is let go of when it has come back. Saying so waits for nobody.
//! 4. After a call that failed all that are under way are taken in, and the lane begins anew (`renewing`): the next call is another's.
//!    Whoever else waits for this lane gets the failure, too. Nothing is sent meanwhile.
//!    A lane that is `stopped` does not: the mark is set before the graph is stopped, and looked at after it was begun anew.
//! 5. A worker that waits says for which lane (`circle`), and gives up its place (`run::nested`).

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use forebay_hal::cpu::on_worker;

use super::circle::{self, At};
use crate::block::Datablock;
use crate::error::{Error, Result};
use crate::graph::{Drain, Feed, Graph, PortKind, Task};
use crate::run::{GraphState, Running, Runtime};
use crate::template::Template;

/// Calls that may be in flight on one lane: more would make predictions stale before they are used.
const IN_FLIGHT: usize = 2;

/// How long to wait, asked anew when that is over; none to give up.
pub(super) type Patience<'a> = &'a mut dyn FnMut() -> Option<Duration>;

pub(super) struct Lane {
    name: String,
    pub(super) run: Running,
    feeds: Vec<Feed>,
    drains: Vec<Drain>,
    /// The task itself has no outputs.
    silent: bool,
    /// The thread that is at the task's function.
    pub(super) at: At,
    state: Mutex<State>,
    /// Somebody has taken something in, or the lane has begun anew.
    changed: Condvar,
    /// No call is sent any more.
    stopped: AtomicBool,
    /// Calls whose results nobody wants. Lock rank: behind `state`.
    dropped: Mutex<HashSet<u64>>,
}

#[derive(Default)]
struct State {
    /// Calls so far, and how many of them have come back.
    sent: u64,
    received: u64,
    receiving: bool,
    renewing: bool,
    /// Outputs of the next call to come back, as far as they have been taken in.
    part: Vec<Datablock>,
    /// Results that nobody has fetched yet.
    kept: HashMap<u64, Result<Vec<Datablock>>>,
}

/// What was taken in of the next call to come back.
enum Came {
    /// All of its outputs, or what it failed with.
    Whole(Result<Vec<Datablock>>),
    /// Fewer: there was no time for more, or whoever waited must not.
    Part(Vec<Datablock>, Result<()>),
}

/// A task without outputs, with one that says when an invocation is done.
fn with_an_end(mut task: Task) -> Task {
    task.geometry = Some(task.geometry.unwrap_or_else(|| task.inferred_geometry()));
    let mut name = "done".to_owned();
    while task.inputs.iter().any(|p| p.name == name) {
        name.push('~');
    }
    task.output(&name, Template::scalar::<u8>())
}

impl Lane {
    pub(super) fn new(rt: &Runtime, task: Task) -> Result<Self> {
        let silent = task.outputs.is_empty();
        let task = if silent { with_an_end(task) } else { task };
        let ins: Vec<String> =
            task.inputs.iter().filter(|p| p.kind != PortKind::Initializer).map(|p| p.name.clone()).collect();
        let outs: Vec<String> = task.outputs.iter().map(|p| p.name.clone()).collect();
        let (name, at) = (task.name().to_owned(), At::default());
        let mut graph = Graph::new(name.clone());
        let id = graph.add(circle::watched(task, &at))?;
        let feeds = ins.iter().map(|p| graph.feed((id, p), IN_FLIGHT)).collect::<Result<_>>()?;
        let drains = outs.iter().map(|p| graph.drain((id, p), IN_FLIGHT)).collect::<Result<_>>()?;
        let run = rt.start(graph)?;
        let (state, changed, dropped) = (Mutex::default(), Condvar::new(), Mutex::default());
        Ok(Lane { name, run, feeds, drains, silent, at, state, changed, stopped: AtomicBool::new(false), dropped })
    }

    /// Has no call begin any more; waits for none.
    pub(super) fn stop(&self) {
        self.stopped.store(true, Ordering::SeqCst);
        let _ = self.run.stop_while(|| None);
    }

    fn is_stopped(&self) -> Result<()> {
        match self.stopped.load(Ordering::SeqCst) {
            true => Err(Error::NotRunning { graph: self.name.clone(), state: GraphState::Stopped.name() }),
            false => Ok(()),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Calls under way.
    pub(super) fn calls(&self) -> u64 {
        if self.run.is_here().is_err() {
            return 0;
        }
        let state = self.lock();
        state.sent - state.received
    }

    /// Rule 5.
    fn waits(&self) -> Result<Option<circle::Waits>> {
        if !on_worker() {
            return Ok(None);
        }
        circle::wait_for(&self.at).map(Some).ok_or_else(|| Error::Circle { task: self.name.clone() })
    }

    fn given_up(&self, begun: Instant) -> Error {
        Error::WouldBlock { what: "no outputs yet of", port: self.name.clone(), waited: begun.elapsed() }
    }

    /// Waits until then at most while somebody else is at it.
    fn rest<'a>(&'a self, state: MutexGuard<'a, State>, until: Option<Instant>) -> Result<MutexGuard<'a, State>> {
        drop(state);
        let _blocks = (self.run.blocks())()?;
        let state = self.lock();
        if !state.receiving && !state.renewing {
            return Ok(state);
        }
        Ok(match until.map(|u| u.saturating_duration_since(Instant::now())) {
            None => self.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
            Some(left) => self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0,
        })
    }

    /// The outputs of the next call to come back, of which there is a `part`; as far as they came until then.
    fn pull(&self, mut part: Vec<Datablock>, until: Option<Instant>) -> Came {
        for drain in &self.drains[part.len().min(self.drains.len())..] {
            match self.run.pull_until(*drain, until) {
                Some(Ok(block)) => part.push(block),
                // It is who waits that must not; the call goes on.
                Some(Err(e @ Error::AllWait { .. })) => return Came::Part(part, Err(e)),
                Some(Err(e)) => return Came::Whole(Err(e)),
                None => return Came::Part(part, Ok(())),
            }
        }
        if self.silent {
            part.clear();
        }
        Came::Whole(Ok(part))
    }

    /// Takes in results until `n` calls have come back; waits for them (rule 2).
    fn receive<'a>(
        &'a self,
        mut state: MutexGuard<'a, State>,
        n: u64,
        patience: Patience<'_>,
    ) -> Result<MutexGuard<'a, State>> {
        if state.received >= n {
            return Ok(state);
        }
        let (begun, _waits) = (Instant::now(), self.waits()?);
        let mut more = || patience().map(|time| Instant::now().checked_add(time)).ok_or_else(|| self.given_up(begun));
        let mut until = more()?;
        while state.received < n {
            if state.receiving || state.renewing {
                state = self.rest(state, until)?;
            } else {
                state.receiving = true;
                let part = std::mem::take(&mut state.part);
                drop(state);
                let came = self.pull(part, until);
                state = self.lock();
                state.receiving = false;
                self.changed.notify_all();
                match came {
                    Came::Whole(results) => {
                        let number = state.received;
                        state.kept.insert(number, results);
                        state.received += 1;
                        self.forget(&mut state);
                    }
                    Came::Part(part, goes_on) => {
                        state.part = part;
                        goes_on?;
                    }
                }
            }
            if state.received < n && until.is_some_and(|u| Instant::now() >= u) {
                until = more()?;
            }
        }
        Ok(state)
    }

    /// Rule 3.
    fn forget(&self, state: &mut State) {
        let mut dropped = self.dropped.lock().unwrap_or_else(PoisonError::into_inner);
        dropped.retain(|n| {
            let comes = *n >= state.received;
            if !comes {
                state.kept.remove(n);
            }
            comes
        });
    }

    /// Rule 4, once all calls have come back.
    #[cold]
    fn begin_anew<'a>(&'a self, mut state: MutexGuard<'a, State>) -> Result<MutexGuard<'a, State>> {
        state.renewing = true;
        drop(state);
        // The caller may be a task, but none that this one waits for: its calls have all come back.
        let begun = self.run.begin_anew().and_then(|()| self.run.run());
        if self.is_stopped().is_err() {
            let _ = self.run.stop_while(|| None);
        }
        let mut state = self.lock();
        state.renewing = false;
        self.changed.notify_all();
        begun.map(|()| state)
    }

    /// Sends a call, which has this number then.
    pub(super) fn send(&self, inputs: &[Datablock], patience: Patience<'_>) -> Result<u64> {
        self.run.is_here()?;
        let begun = Instant::now();
        let mut state = self.lock();
        loop {
            self.is_stopped()?;
            if state.renewing {
                let _waits = self.waits()?;
                let time = patience().ok_or_else(|| self.given_up(begun))?;
                state = self.rest(state, Instant::now().checked_add(time))?;
                continue;
            }
            let failed = self.run.state() == GraphState::Failed;
            let room = (state.sent + 1).saturating_sub(IN_FLIGHT as u64);
            let first = if failed { state.sent } else { room };
            if state.received < first {
                state = self.receive(state, first, patience)?;
            } else if failed {
                state = self.begin_anew(state)?;
            } else {
                let mut feeds = self.feeds.iter().zip(inputs);
                match feeds.try_for_each(|(feed, block)| self.run.push(*feed, block.clone())) {
                    Ok(()) => {
                        state.sent += 1;
                        return Ok(state.sent - 1);
                    }
                    // The call before it, meanwhile.
                    Err(_) if self.run.state() == GraphState::Failed => {}
                    Err(e) => return Err(e),
                }
            }
        }
    }

    /// The results of a call, once; waits for them.
    pub(super) fn results(&self, number: u64, patience: Patience<'_>) -> Result<Result<Vec<Datablock>>> {
        self.run.is_here()?;
        let mut state = self.receive(self.lock(), number + 1, patience)?;
        let missing = || Err(Error::NoSuch { what: "result", graph: self.name.clone() });
        Ok(state.kept.remove(&number).unwrap_or_else(missing))
    }

    /// Nobody wants the results of a call any more.
    pub(super) fn let_go(&self, number: u64) {
        if self.run.is_here().is_err() {
            return;
        }
        self.dropped.lock().unwrap_or_else(PoisonError::into_inner).insert(number);
        self.forget(&mut self.lock());
    }
}
