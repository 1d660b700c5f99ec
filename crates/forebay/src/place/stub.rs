//! One task by itself: the program calls it like a function, and each call is done where the runtime's mode puts it; under
//! [`Mode::Adaptive`](forebay_policy::Mode) where it is predicted to end first.

use std::borrow::Cow;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use forebay_hal::cpu::on_worker;

use super::circle;
use super::lane::Lane;
use crate::block::Datablock;
use crate::error::{Error, Result};
use crate::graph::{Impl, PortKind, Task};
use crate::run::{Runtime, TaskStats};
use crate::template::{Elem, Layout, Template};

/// Most lanes.
pub const MAX_LANES: usize = 16;

/// A task that the program calls; made by [`Runtime::accelerate`].
///
/// Calls are done side by side on as many lanes as [`Accelerated::spread`] says: each lane is a copy of the task, and each
/// of its calls goes where the runtime's mode puts it: under [`Mode::Adaptive`](forebay_policy::Mode), to the device that is
/// predicted to end it first.
///
/// Functions of tasks may call it, too, and wait: another thread works in their worker's place meanwhile. One that calls its own
/// task needs a lane for each call that has not ended; a call that would wait for itself is refused ([`Error::Circle`]).
#[derive(Clone)]
pub struct Accelerated(Arc<Inner>);

struct Inner {
    name: String,
    inputs: Vec<Template>,
    outputs: usize,
    lanes: Vec<Lane>,
    active: AtomicUsize,
}

/// A call under way. Dropping it lets the call go on and its results go.
#[must_use = "results are had by waiting"]
pub struct Pending {
    of: Arc<Inner>,
    lane: usize,
    number: u64,
    fetched: bool,
}

/// How far an implementation's output is from that of the first one.
#[derive(Clone, Debug)]
pub struct Difference {
    /// The implementation.
    pub implementation: String,
    /// The output port.
    pub output: String,
    /// The largest difference of two elements, as a part of the larger one (for integers: 0 or at least 1).
    pub largest: f64,
    /// Where that is.
    pub at: usize,
}

fn forever() -> Option<Duration> {
    Some(Duration::MAX)
}

impl Runtime {
    /// Makes a task that the program calls by itself. `task` is called once for each lane, of which there may be `lanes`. For
    /// decisions by what was measured the runtime's mode is [`Mode::Adaptive`](forebay_policy::Mode).
    ///
    /// # Errors
    /// Mistakes in the task; no implementation for any device of this runtime; [`Error::Size`] for no lanes or more than 16.
    pub fn accelerate(&self, lanes: usize, task: impl Fn() -> Task) -> Result<Accelerated> {
        if !(1..=MAX_LANES).contains(&lanes) {
            let why = format!("{lanes} lanes; 1 to {MAX_LANES} are possible");
            return Err(Error::Size { what: "accelerate".into(), why });
        }
        self.lanes((0..lanes).map(|_| task()).collect())
    }

    /// Tasks that are all alike, as lanes of one.
    fn lanes(&self, tasks: Vec<Task>) -> Result<Accelerated> {
        let ports = |t: &Task| -> (Vec<Template>, Vec<Template>) {
            let inputs = t.inputs.iter().filter(|p| p.kind != PortKind::Initializer).map(|p| p.template);
            (inputs.collect(), t.outputs.iter().map(|p| p.template).collect())
        };
        let Some(first) = tasks.first() else {
            return Err(Error::Size { what: "accelerate".into(), why: "no task".into() });
        };
        let (name, all) = (first.name().to_owned(), ports(first));
        // A lane with other ports would wait for inputs that nobody gives it, or give what nobody expects.
        if tasks.iter().any(|t| ports(t) != all) {
            let why = "the lanes' tasks have different inputs or outputs; each must be the same".into();
            return Err(Error::Task { task: name, why });
        }
        let (inputs, outputs) = (all.0, all.1.len());
        let lanes = tasks.into_iter().map(|t| Lane::new(self, t)).collect::<Result<Vec<_>>>()?;
        let active = AtomicUsize::new(lanes.len());
        Ok(Accelerated(Arc::new(Inner { name, inputs, outputs, lanes, active })))
    }

    /// Runs every implementation of a task that this runtime has a device for on the same inputs, and says how far each is
    /// from the first. Whether that is near enough the caller knows.
    ///
    /// # Errors
    /// As [`Runtime::accelerate`]; an implementation that fails.
    pub fn verify(&self, task: impl Fn() -> Task, inputs: &[Datablock]) -> Result<Vec<Difference>> {
        let mut reference: Option<Vec<Datablock>> = None;
        let mut all = Vec::new();
        for i in 0..task().impls.len() {
            let mut one = task();
            if i >= one.impls.len() {
                let why = "it has fewer implementations than when it was made first".into();
                return Err(Error::Task { task: one.name, why });
            }
            let only = one.impls.swap_remove(i);
            let there = match &only {
                Impl::Host(_) => true,
                Impl::Resident(r) => self.has_memory_of(r),
                Impl::Kernels(kind, launches) => self.runs(*kind, launches),
            };
            if !there {
                continue;
            }
            let implementation = only.describe();
            one.impls = vec![only];
            let ports: Vec<String> = one.outputs.iter().map(|p| p.name.clone()).collect();
            let outputs = self.lanes(vec![one])?.call(inputs)?;
            match &reference {
                None => reference = Some(outputs),
                Some(first) => {
                    for ((port, a), b) in ports.into_iter().zip(first).zip(&outputs) {
                        let (largest, at) = distance(a, b)?;
                        all.push(Difference { implementation: implementation.clone(), output: port, largest, at });
                    }
                }
            }
        }
        Ok(all)
    }
}

/// The bytes of a block's elements: without what is between the rows of an array, which nobody says anything about.
fn elements(b: &Datablock) -> Result<Cow<'_, [u8]>> {
    let (t, bytes) = (b.template(), b.host_bytes()?);
    let used = t.dims[0] * t.elem.size();
    if t.layout != Layout::Array || t.row_bytes() <= used {
        return Ok(bytes.into());
    }
    let rows = bytes.chunks(t.row_bytes()).map(|row| row.get(..used).unwrap_or(row));
    Ok(rows.collect::<Vec<_>>().concat().into())
}

/// The largest difference of elements of two blocks of one template, and the number of that element.
fn distance(a: &Datablock, b: &Datablock) -> Result<(f64, usize)> {
    let (x, y) = (elements(a)?, elements(b)?);
    let (x, y) = (&*x, &*y);
    if x.len() != y.len() {
        return Ok((f64::INFINITY, x.len().min(y.len())));
    }
    fn floats<T: bytemuck::Pod + Into<f64>>(x: &[u8], y: &[u8]) -> (f64, usize) {
        let of =
            |b: &[u8]| b.chunks_exact(size_of::<T>()).map(|c| bytemuck::pod_read_unaligned::<T>(c).into()).collect();
        let (x, y): (Vec<f64>, Vec<f64>) = (of(x), of(y));
        let pairs = x.iter().zip(&y).map(|(a, b)| {
            let same = a == b || (a.is_nan() && b.is_nan());
            let part = (a - b).abs() / a.abs().max(b.abs());
            if same {
                0.0
            } else if part.is_nan() {
                f64::INFINITY
            } else {
                part
            }
        });
        let largest = pairs.enumerate().max_by(|a, b| a.1.total_cmp(&b.1));
        largest.map_or((0.0, 0), |(at, d)| (d, at))
    }
    Ok(match a.template().elem {
        Elem::F16 => floats::<half::f16>(x, y),
        Elem::F32 => floats::<f32>(x, y),
        Elem::F64 => floats::<f64>(x, y),
        other => match x.iter().zip(y).position(|(a, b)| a != b) {
            Some(at) => (1.0, at / other.size().max(1)),
            None => (0.0, 0),
        },
    })
}

impl Inner {
    /// The lane with the fewest calls; for a function's call, of those that do not wait for that function.
    fn choose(&self) -> usize {
        let active = self.active.load(Ordering::Relaxed);
        let nested = on_worker();
        let rank = |i: &usize| (nested && circle::closes(&self.lanes[*i].at), self.lanes[*i].calls());
        (0..active).min_by_key(rank).unwrap_or(0)
    }
}

impl Accelerated {
    /// Calls the task and waits for its outputs, in the order of their ports; for its end, if it has none. Inputs are in the order
    /// of theirs.
    ///
    /// # Errors
    /// [`Error::Block`] for inputs that are not the ports'; what the task fails with, once no implementation is left. Calls that
    /// are under way on the same lane fail with it; the next one is tried as if nothing had been. [`Error::Circle`] from a
    /// function for whose end every lane waits, [`Error::AllWait`] from one that would leave no thread at work.
    pub fn call(&self, inputs: &[Datablock]) -> Result<Vec<Datablock>> {
        self.spawn(inputs)?.wait()
    }

    /// Calls the task; its outputs come later. Waits while every lane has as many calls in flight as it may.
    ///
    /// # Errors
    /// As [`Accelerated::call`].
    pub fn spawn(&self, inputs: &[Datablock]) -> Result<Pending> {
        self.spawn_while(inputs, forever)
    }

    /// As [`Accelerated::spawn`]; asks how long to wait, and again when that time is over, until there is room or the answer is
    /// none: for programs that can be told to end.
    ///
    /// # Errors
    /// As [`Accelerated::call`]; [`Error::WouldBlock`] when there was no room in time.
    pub fn spawn_while(&self, inputs: &[Datablock], mut patience: impl FnMut() -> Option<Duration>) -> Result<Pending> {
        let inner = &self.0;
        let wanted = inner.inputs.len();
        if inputs.len() != wanted {
            let block = format!("{} inputs of {:?}", inputs.len(), inner.name);
            return Err(Error::Block { block, want: format!("{wanted} of them") });
        }
        // All or none: a lane must not be left with half of its inputs.
        for (i, (block, want)) in inputs.iter().zip(&inner.inputs).enumerate() {
            if block.template() != *want {
                let block = format!("input {i} of {:?}: {}", inner.name, block.template());
                return Err(Error::Block { block, want: want.to_string() });
            }
        }
        let lane = inner.choose();
        let number = inner.lanes[lane].send(inputs, &mut patience)?;
        Ok(Pending { of: inner.clone(), lane, number, fetched: false })
    }

    /// Ends it for good: no call begins any more, and those that run are waited for. Asks how long to, as
    /// [`Accelerated::spawn_while`] does. Whoever waits for a call that has not begun gets [`Error::NotRunning`], and so does whoever
    /// makes one. From inside a task nothing is waited for.
    ///
    /// # Errors
    /// [`Error::StillRunning`] when one did not end in time; it ends when it ends.
    pub fn stop_while(&self, mut patience: impl FnMut() -> Option<Duration>) -> Result<()> {
        let all = &self.0.lanes;
        // None begins anything any more before one of them is waited for.
        all.iter().for_each(Lane::stop);
        all.iter().try_for_each(|lane| lane.run.stop_while(&mut patience))
    }

    /// How many calls at most are done side by side, from 1 to the lanes that there are.
    pub fn spread(&self, lanes: usize) {
        self.0.active.store(lanes.clamp(1, self.0.lanes.len()), Ordering::Relaxed);
    }

    /// Back from what somebody has set to what there was before, unless it was set anew since.
    pub(super) fn spread_back(&self, from: usize, to: usize) {
        let _ = self.0.active.compare_exchange(from, to, Ordering::Relaxed, Ordering::Relaxed);
    }

    /// How many calls at most are done side by side now, and how many could be.
    pub fn lanes(&self) -> (usize, usize) {
        (self.0.active.load(Ordering::Relaxed), self.0.lanes.len())
    }

    /// How many outputs a call has.
    pub fn outputs(&self) -> usize {
        self.0.outputs
    }

    /// The task's numbers, for each lane.
    pub fn stats(&self) -> Vec<TaskStats> {
        self.0.lanes.iter().flat_map(|l| l.run.snapshot().tasks).collect()
    }
}

impl Pending {
    /// Waits for the outputs.
    ///
    /// # Errors
    /// As [`Accelerated::call`].
    pub fn wait(mut self) -> Result<Vec<Datablock>> {
        self.wait_while(forever)
    }

    /// Waits for the outputs; asks how long to wait, as [`Accelerated::spawn_while`] does. They are there once.
    ///
    /// # Errors
    /// As [`Accelerated::call`]; [`Error::WouldBlock`] when they did not come in time, after which it can be called again.
    pub fn wait_while(&mut self, mut patience: impl FnMut() -> Option<Duration>) -> Result<Vec<Datablock>> {
        let results = self.of.lanes[self.lane].results(self.number, &mut patience)?;
        self.fetched = true;
        results
    }
}

impl Drop for Pending {
    fn drop(&mut self) {
        if !self.fetched {
            self.of.lanes[self.lane].let_go(self.number);
        }
    }
}
