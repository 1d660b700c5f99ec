//! A region's tasks one by one on the host: what is left where no device can have the region as a whole.
//!
//! Rules:
//! 1. A region has this if each of its members can run on the host (fuse.rs, rule 1: under data-aware scheduling). Nothing is
//!    made of it before it is needed.
//! 2. Nobody chooses the host for a region as long as one of its devices is neither lost nor full
//!    ([`super::dispatch::Dispatcher`], `left_of`; [`super::elsewhere`]).
//! 3. The members run in the order of data, each with blocks of its own; what leaves the region takes the place of the region's
//!    blocks. Nothing of an invocation stays here behind it, save what the members' functions remember.

use std::collections::HashMap;

use forebay_hal::Kind;

use super::exec::{dispatch, sole};
use super::fuse::Fused;
use super::node::{Core, InKind, Node};
use super::runtime::Runtime;
use crate::block::{Datablock, Signals};
use crate::error::{Error, Result, TaskError};
use crate::graph::{Impl, Task};

/// See above.
pub(crate) struct Members(State);

enum State {
    Declared(Vec<Declared>),
    Made(Box<[Member]>),
    Refused(Error),
}

/// A member as the program declared it, with its channels.
pub(super) struct Declared {
    index: u32,
    task: Task,
    into: Vec<Option<u32>>,
    out_of: Vec<Vec<u32>>,
    wires: Wires,
}

struct Member {
    index: u32,
    node: Node,
    wires: Wires,
}

/// Where blocks come from, and which of the region's outputs they are.
#[derive(Default)]
struct Wires {
    ins: Vec<From>,
    outs: Vec<Option<usize>>,
}

#[derive(Clone, Copy)]
enum From {
    /// An input of the region.
    Input(usize),
    /// The same, whose block is at an output: what comes in there is overwritten in place.
    Moved(usize),
    /// An output of a member, for the last time or not.
    Member { member: usize, output: usize, last: bool },
}

/// Whether a task can run on the host.
fn has_host(task: &Task) -> bool {
    task.impls.iter().any(of_host)
}

fn of_host(i: &Impl) -> bool {
    matches!(i, Impl::Host(_) | Impl::Kernels(Kind::Cpu, _))
}

impl Declared {
    pub(super) fn new(index: u32, task: Task, into: Vec<Option<u32>>, out_of: Vec<Vec<u32>>) -> Self {
        Declared { index, task, into, out_of, wires: Wires::default() }
    }
}

impl Members {
    /// Those of a region, if there is a way to run it on the host. `members` are in the order of data.
    pub(super) fn of(region: &Fused, mut members: Vec<Declared>) -> Option<Self> {
        if !members.iter().all(|m| has_host(&m.task)) {
            return None;
        }
        let mut maker: HashMap<u32, (usize, usize)> = HashMap::new();
        for (at, m) in members.iter().enumerate() {
            for (o, all) in m.out_of.iter().enumerate() {
                maker.extend(all.iter().map(|c| (*c, (at, o))));
            }
        }
        // From the end, so that the first one met is the last to use a block.
        let mut used = std::collections::HashSet::new();
        for m in members.iter_mut().rev() {
            let mut ins = Vec::with_capacity(m.into.len());
            for c in m.into.iter().rev() {
                ins.push(match maker.get(&(*c)?) {
                    Some(&(member, output)) => From::Member { member, output, last: used.insert((member, output)) },
                    None => {
                        let input = region.into.iter().position(|i| i == c)?;
                        let moved = region.task.outputs.iter().position(|o| o.from_input == Some(input));
                        moved.map_or(From::Input(input), From::Moved)
                    }
                });
            }
            ins.reverse();
            let leaves = |all: &Vec<u32>| region.out_of.iter().position(|o| o.iter().any(|c| all.contains(c)));
            m.wires = Wires { ins, outs: m.out_of.iter().map(leaves).collect() };
        }
        Some(Members(State::Declared(members)))
    }

    fn made(&mut self, core: &Core) -> Result<&mut [Member]> {
        if let State::Declared(declared) = &mut self.0 {
            let rt = Runtime(core.runtime.clone());
            let make = |mut d: Declared| {
                d.task.impls.retain(of_host);
                Ok(Member { index: d.index, node: rt.node(d.index, d.task, &d.into, &d.out_of, None)?, wires: d.wires })
            };
            let made: Result<Box<[Member]>> = std::mem::take(declared).into_iter().map(make).collect();
            self.0 = made.map_or_else(State::Refused, State::Made);
        }
        match &mut self.0 {
            State::Made(members) => Ok(members),
            State::Refused(why) => Err(why.clone()),
            State::Declared(_) => Ok(&mut []),
        }
    }

    /// Runs the region once. The caller owns it; its outputs are at `outs`.
    pub(super) fn run(
        &mut self,
        core: &Core,
        ins: &[Option<Datablock>],
        outs: &mut [Option<Datablock>],
    ) -> Result<(), TaskError> {
        let members = self.made(core)?;
        let result = (0..members.len()).try_for_each(|at| {
            let (before, rest) = members.split_at_mut(at);
            let Some(m) = rest.first_mut() else { return Ok(()) };
            let say = |why: TaskError| format!("{}: {why}", m.node.name).into();
            m.run(core, before, ins, outs).map_err(say)
        });
        for m in members {
            let own = m.node.own.get_mut();
            own.ins.iter_mut().chain(&mut own.outs).for_each(|b| *b = None);
        }
        result
    }
}

impl Member {
    fn run(
        &self,
        core: &Core,
        before: &mut [Member],
        region_ins: &[Option<Datablock>],
        region_outs: &mut [Option<Datablock>],
    ) -> Result<(), TaskError> {
        // SAFETY: only the region's owner reaches its members.
        let own = unsafe { &mut *self.node.own.get() };
        let mut signals = Signals::NONE;
        for (slot, (from, i)) in own.ins.iter_mut().zip(self.wires.ins.iter().zip(&self.node.inputs)) {
            *slot = match *from {
                From::Input(i) => region_ins[i].clone(),
                From::Moved(o) => region_outs[o].take(),
                From::Member { member, output, last } => {
                    let made = &mut before[member].node.own.get_mut().outs[output];
                    if last { made.take() } else { made.clone() }
                }
            };
            let block = slot.as_ref().ok_or("a member's input is empty")?;
            if !matches!(i.kind, InKind::Sticky) {
                signals = signals | block.signals().of_stream();
            }
        }
        for (slot, o) in own.outs.iter_mut().zip(&self.node.outputs) {
            let block = sole(o, o.from_input.and_then(|i| own.ins[i as usize].take()))?;
            if block.signals() != signals {
                block.set_signals(signals);
            }
            *slot = Some(block);
        }
        dispatch(core, &self.node, own, 0, core.nodes[self.index as usize].geometry_now(), 0)?;
        for (o, to) in self.wires.outs.iter().enumerate() {
            if let Some(to) = *to {
                region_outs[to] = own.outs[o].clone();
            }
        }
        Ok(())
    }
}
